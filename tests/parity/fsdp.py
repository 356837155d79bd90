"""FSDP2 in the parity tables, without hzero and with it; and what other checks of FSDP2 share."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hzero.fsdp
from hzero.engine.parameter import plain_name
from hzero.fsdp import FsdpState
from tests.deepspeed.training import shared_folder
from tests.parity import zoo
from tests.parity.compare import WORLD, Row
from tests.parity.zoo import Net

#: Options that tell FSDP2 that a backward is not the last one. ``count`` tells hzero their number, ``none`` nobody.
FLAGS = ("sync", "all_reduce", "count", "none")
#: Computing in 16 bits, by the dtypes of weights and of sums of gradients.
TYPES = {
    "bf16": (torch.bfloat16, torch.float32),
    "bf16_wire": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
}


def mesh_of(ranks: int, tensor: int = 1) -> DeviceMesh:
    """The mesh of this rank: of the first ranks of the world, or of the others."""
    return _mesh_of(ranks, tensor)


@functools.cache
def _mesh_of(ranks: int, tensor: int) -> DeviceMesh:
    if tensor > 1:
        return dist.init_device_mesh("cpu", (WORLD // tensor, tensor), mesh_dim_names=("data", "tensor"))
    if ranks == WORLD:
        return dist.init_device_mesh("cpu", (WORLD,))
    meshes = [DeviceMesh("cpu", list(part)) for part in (range(ranks), range(ranks, WORLD))]
    return meshes[dist.get_rank() >= ranks]


def build(options: frozenset[str], mesh: DeviceMesh, seed: int = 0) -> Net:
    """The sharded model; ``options`` name its features and how it is sharded."""
    model = zoo.make(options, seed)
    how: dict[str, Any] = {"mesh": mesh["data"] if mesh.ndim > 1 else mesh}
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    if mesh.ndim > 1:
        plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
        for block in model.blocks:
            parallelize_module(block, mesh["tensor"], plan)
    zoo.checkpoint_blocks(model, options)
    for name in options & TYPES.keys():
        how["mp_policy"] = MixedPrecisionPolicy(*TYPES[name])
    if "offload" in options:
        how["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if "kept" in options:
        how["reshard_after_forward"] = False
    if "smaller" in options:
        how["reshard_after_forward"] = 2
    if "meta" in options:
        model = model.to("meta")
    for block in model.blocks:
        fully_shard(block, **how)
    if "grouped" in options:
        fully_shard([model.embed, model.head], **how)
    if "smaller" in options:
        how["reshard_after_forward"] = True
    fully_shard(model, **how)
    if "compiled" in options:
        torch._dynamo.reset()
        for block in model.blocks:
            block.compile(backend="aot_eager")
    if "prefetch" in options:
        for block, following in zip(model.blocks, model.blocks[1:]):
            block.set_modules_to_forward_prefetch([following])
    if "meta" in options:
        model.to_empty(device="cpu")
        set_model_state_dict(model, whole, options=StateDictOptions(full_state_dict=True))
    return model


def optimizer_of(model: nn.Module, options: frozenset[str] = frozenset()) -> torch.optim.Optimizer:
    """An optimizer of the trained parameters: ``sgd``, ``fused``, or AdamW without fusion."""
    trained = [param for param in model.parameters() if param.requires_grad]
    if "sgd" in options:
        return torch.optim.SGD(trained, lr=0.1, momentum=0.9)
    return torch.optim.AdamW(trained, lr=3e-3, weight_decay=0.1, fused="fused" in options)


def unsharded(model: nn.Module) -> dict[str, torch.Tensor]:
    """What forward reads, by name."""
    found = {}
    for prefix, module in model.named_modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            for name, param in module.named_parameters():
                if not hasattr(param, "placements"):
                    found[plain_name(f"{prefix}.{name}".lstrip("."))] = param.detach().clone()
            module.reshard()
    return found


class Session:
    """A sharded model; see `tests.parity.compare.Session`."""

    def __init__(self, row: Row) -> None:
        ranks = WORLD if row.tensor > 1 else row.layout[0] * row.layout[1] * row.layout[2]
        self.row, self.mesh = row, mesh_of(ranks, row.tensor)
        data = self.mesh["data"] if self.mesh.ndim > 1 else self.mesh
        self.group, self.rank = data.get_group(), data.get_local_rank()
        self.model = build(row.options, self.mesh)
        self.state: FsdpState | None = None
        if row.preset is not None:
            count = row.windows[0] if "count" in row.options else None
            self.state = hzero.fsdp.apply(self.model, accumulation=count, **row.whole_block)
        elif "spare" in row.options:
            self.model.set_reduce_scatter_unused_params(True)
        self.wire = next((TYPES[name][1] for name in row.options & TYPES.keys()), torch.float32)
        self.optimizer = optimizer_of(self.model, row.options)
        self.blocks = [module for module in self.model.modules() if isinstance(module, zoo.Block)]

    def backward(self, tokens: torch.Tensor, last: bool = True, count: int = 1) -> torch.Tensor:
        flags = self.row.options.intersection(FLAGS)
        if not flags:
            self.model.set_is_last_backward(last)
        elif "sync" in flags:
            self.model.set_requires_gradient_sync(last)
        elif "all_reduce" in flags:
            self.model.set_requires_all_reduce(last)
        loss = self.model(tokens)
        (loss / count).backward()
        return loss.detach()

    def go(self, step: int, micro: int = 0) -> torch.Tensor:
        """A forward and backward of a step's micro-batch."""
        count = self.row.windows[0]
        return self.backward(zoo.batch(step, micro, self.rank), micro == count - 1, count)

    def advance(self) -> None:
        """The optimizer's step, without a norm."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> float:
        trained = [param for param in self.model.parameters() if param.requires_grad]
        norm: Any = nn.utils.clip_grad_norm_(trained, 1.0) if self.mesh.ndim == 1 else torch.zeros(())
        self.advance()
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def edit(self, way: str, step: int) -> None:
        EDITS[way](self.model, self.optimizer)

    def evaluate(self, tokens: torch.Tensor) -> torch.Tensor:
        return zoo.evaluate(self.model, tokens)

    def masters(self) -> dict[str, torch.Tensor]:
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        named = self.model.named_parameters()
        return {plain_name(name): param.full_tensor().detach().cpu() for name, param in named}

    def read(self) -> dict[str, torch.Tensor]:
        return unsharded(self.model)

    def end(self) -> None:
        if self.state is not None:
            self.state.close()


# ---- ways to write weights ----------------------------------------------------------------------------------------------


def _halved(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value * 0.5 for name, value in values.items()}


def _assign(model: Net, optimizer: torch.optim.Optimizer) -> None:
    model.load_state_dict(_halved(model.state_dict()), assign=True)
    optimizer.param_groups[0]["params"] = list(model.parameters())


def _spoil(model: Net) -> None:
    """Spoils the weights, and makes secondary partitions of them."""
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1.0)
    model(torch.zeros(1, 4, dtype=torch.int64))
    model.reshard()


def _load_in_place(model: Net, _: Any) -> None:
    """Loads into the shards, which moves no counter of the parameters."""
    path, group = shared_folder(), mesh_of(WORLD).get_group()
    dcp.save({"model": model.state_dict()}, checkpoint_id=path, process_group=group)
    _spoil(model)
    dcp.load({"model": model.state_dict()}, checkpoint_id=path, process_group=group)


def _load_with_optimizer(model: Net, optimizer: torch.optim.Optimizer) -> None:
    weights, states = get_state_dict(model, optimizer)
    read, path, group = {"model": weights, "optimizer": states}, shared_folder(), mesh_of(WORLD).get_group()
    dcp.save(read, checkpoint_id=path, process_group=group)
    _spoil(model)
    dcp.load(read, checkpoint_id=path, process_group=group)
    set_state_dict(model, optimizer, model_state_dict=read["model"], optim_state_dict=read["optimizer"])


def _scale(model: Net, _: Any) -> None:
    with torch.no_grad():
        model.blocks[1].up.weight.to_local().mul_(0.5)
        for param in model.parameters():
            param.mul_(0.5)


def _toggle(model: Net, _: Any) -> None:
    weight = model.blocks[1].up.weight
    weight.requires_grad_(not weight.requires_grad)


EDITS: dict[str, Callable[[Any, Any], Any]] = {
    "load": lambda model, _: model.load_state_dict(_halved(model.state_dict())),
    "assign": _assign,
    "set": lambda model, _: set_model_state_dict(model, _halved(get_model_state_dict(model))),
    "scale": _scale,
    "load in place": _load_in_place,
    "load with optimizer": _load_with_optimizer,
    "freeze": _toggle,
}


# ---- for other checks ---------------------------------------------------------------------------------------------------


def spoil(state: FsdpState, name: str) -> None:
    """Changes the copies of a module's weights, as a fault of hzero would."""
    for param in state.weights.parameters.values():
        if name in param.name and param.secondary is not None:
            param.secondary.view(-1).view(torch.uint8)[:64] ^= 255


@contextlib.contextmanager
def applied(block: dict[str, Any], *options: str, accumulation: int = 1, **how: Any) -> Iterator[Session]:
    """A model under hzero, and its optimizer."""
    session = Session(Row(block["preset"], frozenset(options), accumulation, block={"guard": {}, **block}, **how))
    try:
        yield session
    finally:
        session.end()
