"""torchrun --nproc-per-node=4 kinds.py FOLDER

Parameters of every type under stock ZeRO-3 and hzero: as forward reads them, in GatheredParameters, after they are written there,
and after save and load. Packed codes among them, as quantised models hold them. One JSON line for each run.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param
from torch import nn

import hzero
from hzero.sharding.traffic import plan_traffic

TYPES = ("bool", "uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex64")
#: 0-dim parameters of more than one byte, and what gloo cannot send, are refused.
SHAPES: dict[str, tuple[int, ...]] = {"matrix": (17, 3), "single": (1,), "long": (4099,)}
SCALAR = ("bool", "uint8", "int8")
TOPOLOGY = {"nodes": 2, "gpus_per_node": 2, "gcds_per_gpu": 1}
#: Blocks beyond the preset, and whether parameters are kept whole between uses.
RUNS: dict[str, tuple[dict[str, Any] | None, bool]] = {
    "stock": (None, False),
    "lossless": ({"preset": "lossless"}, False),
    "topo": ({"preset": "topo", "checksum": True}, False),
    "topo, kept whole": ({"preset": "topo", "guard": {"every": 1}}, True),
    "topo, differences": ({"preset": "topo", "refresh_differences": True}, False),
    "zeropp": ({"preset": "zeropp"}, True),
    "replica": ({"preset": "replica"}, False),
    "replica, payload": ({"preset": "replica", "resident": "payload"}, True),
    "zero3": ({"preset": "zero3", "codecs": {"weights": "int8"}}, False),
}


def values(kind: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Values that use every byte of the type."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, kind)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max, shape, generator=generator, dtype=torch.int64).to(dtype)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor's bytes."""
    return tensor.detach().clone().reshape(-1).view(torch.uint8)


class Kind(nn.Module):
    """Parameters of one type, and the bytes that its last forward has read."""

    def __init__(self, kind: str, seed: int) -> None:
        super().__init__()
        self.seen: dict[str, torch.Tensor] = {}
        for number, (name, shape) in enumerate({**SHAPES, **({"scalar": ()} if kind in SCALAR else {})}.items()):
            param = nn.Parameter(values(kind, shape, seed + number), requires_grad=False)
            self.register_parameter(name, param)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``."""
        self.seen = {name: raw(param) for name, param in self.named_parameters(recurse=False)}
        return x


class Packed(nn.Module):
    """Packed codes in floating types, marked as bitsandbytes and HQQ mark theirs."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seen: dict[str, torch.Tensor] = {}
        codes = values("uint8", (8184,), seed)
        self.weight = nn.Parameter(codes.clone().view(torch.bfloat16).view(4092, 1), requires_grad=False)
        self.weight.quant_state = object()
        self.W_q = nn.Parameter(codes.clone().view(torch.float16), requires_grad=False)
        self.meta = {"nbits": 4, "view_as_float": True}

    forward = Kind.forward


class Model(nn.Module):
    """One module for each type, packed codes, a tied parameter, and a layer that trains."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.kinds = nn.ModuleDict({f"of_{kind}": Kind(kind, seed + 10 * at) for at, kind in enumerate(TYPES)})
        self.packed = Packed(seed)
        self.tied = Kind("uint8", seed)
        self.tied.matrix = self.kinds["of_int64"].matrix
        torch.manual_seed(seed)
        self.layer = nn.Linear(9, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss of the layer."""
        for kind in self.kinds.values():
            x = kind(x)
        return self.layer(self.tied(self.packed(x))).square().mean()

    def read(self) -> dict[str, torch.Tensor]:
        """Bytes that forward has read, by name."""
        return {
            f"{path}.{name}": found
            for path, one in self.named_modules()
            for name, found in getattr(one, "seen", {}).items()
        }


def engine_of(model: nn.Module, block: dict[str, Any] | None, whole: bool = False) -> Any:
    """An engine that trains what requires a gradient."""
    zero: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 10**6 if whole else 0}
    if block is not None:
        zero["hzero"] = {"topology": TOPOLOGY, **block}
    adam = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "optimizer": adam}
    trained = [param for param in model.parameters() if param.requires_grad]
    return deepspeed.initialize(model=model, model_parameters=trained, config=config)[0]


def differing(found: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> dict[str, float]:
    """Names whose bytes differ, with the largest difference over the largest magnitude, or 1 for what are no numbers."""
    wrong = {}
    for name, expected in want.items():
        if not torch.equal(found[name], expected):
            kind = next((kind for kind in ("float16", "bfloat16", "float32") if f"of_{kind}." in name), None)
            if kind is None:
                wrong[name] = 1.0
                continue
            got, exact = (one.view(getattr(torch, kind)).float() for one in (found[name], expected))
            wrong[name] = float((got - exact).abs().max() / exact.abs().max())
    return wrong


def gathered(model: nn.Module, peer: nn.Module) -> dict[str, torch.Tensor]:
    """Bytes of all parameters inside GatheredParameters, behind those of another engine, by all their names."""
    with deepspeed.zero.GatheredParameters([*peer.parameters(), *model.parameters()]):
        return {name: raw(param) for name, param in model.named_parameters(remove_duplicate=False)}


def held(block: dict[str, Any] | None, whole: bool, folder: Path) -> dict[str, Any]:
    """Reads, trains, writes, saves and loads parameters of all types; what is not as it was.

    Contexts hold parameters of a second engine too: of a stock one beside hzero's, of hzero's beside a stock one.
    """
    peer = one("codes", values("int64", (17, 3), 7))
    peers_engine = engine_of(peer, {"preset": "lossless"} if block is None else None)
    model = Model(0)
    frozen = {name for name, param in model.named_parameters(remove_duplicate=False) if not param.requires_grad}
    want = {name: raw(param) for name, param in model.named_parameters(remove_duplicate=False) if name in frozen}
    engine, x = engine_of(model, block, whole), torch.ones(2, 9)
    found: dict[str, Any] = {"losses": []}
    for _ in range(3):
        loss = engine(x)
        found["losses"].append(loss.item())
        engine.backward(loss)
        engine.step()
    found["forward"] = differing(model.read(), want)
    found["gathered"] = differing(gathered(model, peer), want)
    with torch.no_grad(), hzero.exact_weights(engine):
        engine(x)
        found["exact"] = differing(model.read(), want)
    found["no master"] = all(safe_get_full_fp32_param(p) is None for p in model.parameters() if not p.requires_grad)
    found["master"] = safe_get_full_fp32_param(model.layer.weight).sum().item()
    engine.save_checkpoint(str(folder))
    with deepspeed.zero.GatheredParameters([*peer.parameters(), *model.parameters()], modifier_rank=0):
        if dist.get_rank() == 0:
            peer.codes.data.neg_()
            for name, param in model.named_parameters():
                if name in frozen:
                    param.data.copy_(param.data.flip(0) if param.dim() else param.data)
    flipped = {
        name: raw(param.data.flip(0) if param.dim() else param.data)
        for name, param in Model(0).named_parameters(remove_duplicate=False)
        if name in frozen
    }
    with torch.no_grad():
        engine(x)
        peers_engine(x)
    found["written"] = differing(model.read(), flipped)
    found["peer"] = torch.equal(peer.seen["codes"], raw(-values("int64", (17, 3), 7)))
    engine.destroy()

    other = Model(1)
    engine = engine_of(other, block, whole)
    with torch.no_grad():
        engine(x)  # so that there is something to replace
        engine.load_checkpoint(str(folder))
        engine(x)
    found["loaded"] = differing(other.read(), want)
    found["loaded, gathered"] = differing(gathered(other, peer), want)
    found["loaded master"] = safe_get_full_fp32_param(other.layer.weight).sum().item()
    peers_engine.destroy()
    engine.destroy()
    return found


def trained(block: dict[str, Any] | None) -> dict[str, Any]:
    """Trains models of each type that stock trains; weights and masters at the end, in float64."""
    found = {}
    for kind in ("float32", "bfloat16", "float16", "float64"):
        torch.manual_seed(0)
        model = nn.Linear(9, 7).to(getattr(torch, kind))
        engine = engine_of(model, block)
        for _ in range(2):
            loss = engine(torch.ones(2, 9, dtype=model.weight.dtype)).square().mean()
            engine.backward(loss)
            engine.step()
        with deepspeed.zero.GatheredParameters(model.weight):
            found[kind] = [model.weight.double().flatten().tolist(), str(model.weight.dtype)]
        found[kind].append(safe_get_full_fp32_param(model.weight).double().flatten().tolist())
        engine.destroy()
    return found


def unused(block: dict[str, Any] | None) -> list[float]:
    """Losses of a model with a module whose parameters are all empty and whose forward never runs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 7), nn.Tanh())
    model[1].spare = nn.Embedding(0, 12)
    engine, losses = engine_of(model, block), []
    for _ in range(3):
        losses.append(engine(torch.ones(2, 9)).square().mean())
        engine.backward(losses[-1])
        engine.step()
    engine.destroy()
    return [loss.item() for loss in losses]


def counted(preset: str) -> dict[str, list[int]]:
    """Bytes that frozen codes take on the wire, by tier: one forward of a model that holds nothing else but a layer."""
    model = nn.Sequential(nn.Linear(8, 8), Kind("int64", 0))
    model[1].matrix, model[1].single, model[1].long = (
        nn.Parameter(values(kind, (4 * count,), count), requires_grad=False)
        for kind, count in (("bool", 100), ("int64", 25), ("float64", 9))
    )
    sizes = [param.numel() * param.element_size() for param in model[1].parameters()]
    engine = engine_of(model, {"preset": preset})
    with torch.no_grad():
        engine(torch.ones(1, 8))
    own = hzero.state(engine)
    own.settle()
    logged: dict[str, int] = {}
    for entry in own.wire_log.entries():
        if entry.role == "weights":
            logged[entry.tier] = logged.get(entry.tier, 0) + entry.wire_bytes
    how = {"fetches": 1, "accumulation": 1}
    layer = plan_traffic(own.plan, [64, 8], itemsize=4, **how)
    codes = plan_traffic(own.plan.with_codec(hzero.config.PLAIN), sizes, itemsize=1, **how)
    planned: dict[str, int] = {}
    for row in (*layer, *codes):
        if row.role == "weights" and row.used:
            planned[row.tier] = planned.get(row.tier, 0) + row.wire_bytes
    engine.destroy()
    return {tier: [logged.get(tier, 0), size] for tier, size in planned.items()}


class Wrapped(torch.Tensor):
    """A tensor that holds two others, as torchao's quantised tensors do."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor) -> torch.Tensor:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.bfloat16)

    def __init__(self, codes: torch.Tensor) -> None:
        self.codes = codes

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes"], None

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(args[0].codes)
        raise NotImplementedError(f"{function} of a wrapped tensor")


def one(name: str, value: torch.Tensor, trains: bool = False) -> nn.Module:
    """A model with one unusual parameter beside a layer."""
    model = Kind("bool", 0)
    model.layer = nn.Linear(9, 7)
    for other in list(dict(model.named_parameters(recurse=False))):
        delattr(model, other)
    model.register_parameter(name, nn.Parameter(value, requires_grad=trains))
    model.forward = lambda x: model.layer(Kind.forward(model, x)).square().mean()
    return model


REFUSED: dict[str, Callable[[], nn.Module]] = {
    "int16": lambda: one("short", values("int16", (17, 3), 0)),
    "fp8": lambda: one("eight", torch.randn(17, 3).to(torch.float8_e4m3fn)),
    "0-dim": lambda: one("scale", torch.tensor(3.0)),
    "0-dim int64": lambda: one("count", torch.tensor(3)),
    "empty": lambda: one("nothing", torch.zeros(0)),
    "another type trains": lambda: one("sixteen", torch.randn(5).bfloat16(), trains=True),
    "wrapped": lambda: one("subclass", Wrapped(torch.zeros(6, 2, dtype=torch.uint8))),
}


def refused(block: dict[str, Any] | None) -> dict[str, str]:
    """The errors of what stock refuses, on whichever rank and whenever before the end of a forward."""
    found = {}
    for name, make in REFUSED.items():
        when = "start"
        try:
            engine = engine_of(make(), block)
            when = "forward"
            engine(torch.ones(2, 9))
            text = "accepted"
        except Exception as error:
            text = f"{when}: {type(error).__name__}: {error}"
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, text)
        found[name] = every[0] if every == [text] * len(every) else f"ranks differ: {every}"
    return found


def main() -> None:
    """Runs all."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    folder = Path(sys.argv[1])
    runs: dict[str, Callable[[], Any]] = {name: partial(held, *how, folder / name) for name, how in RUNS.items()}
    for preset in ("lossless", "topo"):
        runs[f"bytes of {preset}"] = partial(counted, preset)
    for preset in ("stock", "lossless", "topo"):
        block = None if preset == "stock" else {"preset": preset}
        runs[f"trained {preset}"] = partial(trained, block)
        runs[f"unused {preset}"] = partial(unused, block)
        runs[f"refused {preset}"] = partial(refused, block)
    for name, run in runs.items():
        try:
            found = run()
        except Exception:
            found = {"error": traceback.format_exc()}
        if dist.get_rank() == 0:
            print(json.dumps([name, found]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
