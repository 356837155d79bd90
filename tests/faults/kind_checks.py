"""Parameters of every type under hzero, against what stock ZeRO-3 makes of them: as forward reads them, in GatheredParameters,
after they are written there, and after save and load. Packed codes among them, as quantised models hold them.

Run by test_kinds.py on 4 ranks.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from deepspeed.utils import safe_get_full_fp32_param
from torch import nn

import hzero
from tests.deepspeed import training
from tests.deepspeed.training import ds_config, shared_folder
from tests.ranks import LONG

#: Of codec int8 relative to a block's largest magnitude, once more where a payload is encoded again.
INT8 = 0.02
TYPES = ("bool", "uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex64")
#: 0-dim parameters of more than one byte, and what gloo cannot send, are refused.
SHAPES: dict[str, tuple[int, ...]] = {"matrix": (17, 3), "single": (1,), "long": (4099,)}
SCALAR = ("bool", "uint8", "int8")
TOPOLOGY = {"nodes": 2, "packages_per_node": 2, "devices_per_package": 1}
#: Blocks beyond the preset, and whether parameters are kept whole between uses.
RUNS: dict[str, tuple[dict[str, Any], bool]] = {
    "lossless": ({"preset": "lossless"}, False),
    "topo, kept whole": ({"preset": "topo", "guard": {"every": 1}}, True),
    "exact": ({"preset": "exact", "checksum": True}, False),
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
    kept = {"stage3_param_persistence_threshold": 10**6 if whole else 0}
    block = block if block is None else {"topology": TOPOLOGY, **block}
    return training.engine_of(ds_config(block, zero_optimization=kept, gradient_clipping=0.0), model)


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
    with GatheredParameters([*peer.parameters(), *model.parameters()]):
        return {name: raw(param) for name, param in model.named_parameters(remove_duplicate=False)}


def _held(name: str, block: dict[str, Any] | None, whole: bool) -> tuple[list[float], float]:
    """Reads, trains, writes, saves and loads parameters of all types; the losses, and the sum of a master.

    Codes arrive as they are, and numbers within the bound of their codec; what is gathered to be read, written or saved is
    exact. Contexts hold parameters of a second engine too: of a stock one beside hzero's, of hzero's beside a stock one.
    """

    def assert_near(found: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
        wrong = differing(found, want)
        assert all(error <= (0 if name in ("stock", "lossless") else INT8) for error in wrong.values()), (name, wrong)

    folder = shared_folder()
    peer = one("codes", values("int64", (17, 3), 7))
    peers_engine = engine_of(peer, {"preset": "lossless"} if block is None else None)
    model = Model(0)
    frozen = {name for name, param in model.named_parameters(remove_duplicate=False) if not param.requires_grad}
    want = {name: raw(param) for name, param in model.named_parameters(remove_duplicate=False) if name in frozen}
    with contextlib.redirect_stderr(io.StringIO()) as said:
        engine, x, losses = engine_of(model, block, whole), torch.ones(2, 9), []
    if block is not None and dist.get_rank() == 0:
        # Those that are no float16, bfloat16 or float32, the scalars, two packed ones; a tied one counts once.
        codes = 3 * (len(TYPES) - 3) + len(SCALAR) + 2 + 3
        assert f"parameters that hold codes, sent as bytes: {codes}" in said.getvalue(), name
    for _ in range(3):
        loss = engine(x)
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    assert_near(model.read(), want)
    assert not differing(gathered(model, peer), want), name
    with torch.no_grad(), hzero.exact_weights(engine):
        engine(x)
        assert not differing(model.read(), want), name
    assert all(safe_get_full_fp32_param(param) is None for param in model.parameters() if not param.requires_grad)
    master = safe_get_full_fp32_param(model.layer.weight).sum().item()
    engine.save_checkpoint(str(folder))
    with GatheredParameters([*peer.parameters(), *model.parameters()], modifier_rank=0):
        if dist.get_rank() == 0:
            peer.codes.data.neg_()
            for key, param in model.named_parameters():
                if key in frozen:
                    param.data.copy_(param.data.flip(0) if param.dim() else param.data)
    flipped = {
        key: raw(param.data.flip(0) if param.dim() else param.data)
        for key, param in Model(0).named_parameters(remove_duplicate=False)
        if key in frozen
    }
    with torch.no_grad():
        engine(x)
        peers_engine(x)
    assert_near(model.read(), flipped)
    assert torch.equal(peer.seen["codes"], raw(-values("int64", (17, 3), 7))), name
    engine.destroy()

    other = Model(1)
    engine = engine_of(other, block, whole)
    with torch.no_grad():
        engine(x)  # so that there is something to replace
        engine.load_checkpoint(str(folder))
        engine(x)
    assert_near(other.read(), want)
    assert not differing(gathered(other, peer), want), name
    assert safe_get_full_fp32_param(other.layer.weight).sum().item() == master, name
    peers_engine.destroy()
    engine.destroy()
    return losses, master


#: With fp16, stock's zero.Init takes the type of a model's first parameter for its own, and refuses codes and doubles.
without_fp16 = mock.patch.object(type(get_accelerator()), "is_fp16_supported", mock.Mock(return_value=False))


@LONG
@without_fp16
def check_codes_arrive_as_they_are() -> None:
    want_losses, want_master = _held("stock", None, False)
    for name, how in RUNS.items():
        losses, master = _held(name, *how)
        rel = 1e-6 if name == "lossless" else 0.05
        assert losses == pytest.approx(want_losses, rel=rel) and master == pytest.approx(want_master, rel=rel), name


@without_fp16
def check_types_that_stock_trains() -> None:
    """Weights and masters at the end."""
    for kind in ("float32", "bfloat16", "float16", "float64"):
        want: list[float] = []
        for block in (None, {"preset": "lossless"}, {"preset": "topo"}):
            torch.manual_seed(0)
            model = nn.Linear(9, 7).to(getattr(torch, kind))
            engine = engine_of(model, block)
            for _ in range(2):
                loss = engine(torch.ones(2, 9, dtype=model.weight.dtype)).square().mean()
                engine.backward(loss)
                engine.step()
            with GatheredParameters(model.weight):
                found = model.weight.double().flatten().tolist()
                assert str(model.weight.dtype) == f"torch.{kind}"
            found += safe_get_full_fp32_param(model.weight).double().flatten().tolist()
            want = want or found
            lossy = block == {"preset": "topo"}
            assert found == pytest.approx(want, rel=1e-6, abs=0.03 if lossy else 1e-7), (kind, block)
            engine.destroy()


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
    "short": lambda: one("short", values("int16", (17, 3), 0)),
    "eight": lambda: one("eight", torch.randn(17, 3).to(torch.float8_e4m3fn)),
    "scale": lambda: one("scale", torch.tensor(3.0)),
    "count": lambda: one("count", torch.tensor(3)),
    "nothing": lambda: one("nothing", torch.zeros(0)),
    "sixteen": lambda: one("sixteen", torch.randn(5).bfloat16(), trains=True),
    "subclass": lambda: one("subclass", Wrapped(torch.zeros(6, 2, dtype=torch.uint8))),
}


def check_what_stock_cannot_send_is_read_as_it_is_or_ends_alike_on_all_ranks() -> None:
    """Last, since what is refused leaves a model behind. hzero sends the bytes of codes, of any type."""
    for name, made in REFUSED.items():
        for preset in ("lossless", "topo"):
            torch.manual_seed(0)
            model = made()
            torch.manual_seed(0)
            wrong: dict[str, float] = {}
            try:
                engine_of(model, {"preset": preset})(torch.ones(2, 9))
                wrong, text = differing(model.seen, {name: raw(dict(made().named_parameters())[name])}), "accepted"
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
            assert all(error <= INT8 for error in wrong.values()), (name, wrong)
            every: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(every, text)
            assert every == [text] * len(every), every
