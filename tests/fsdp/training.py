"""A small model of awkward sizes under FSDP2, and a loop that trains it with hzero and without."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F  # noqa: N812

import hzero.fsdp
from hzero.fsdp import FsdpState

VOCAB, WIDTH, INNER, BLOCKS = 37, 13, 29, 2
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
#: Of the whole world.
LAYOUT = (2, WORLD // 4, 2)


@dataclass(frozen=True)
class Case:
    """What is trained, and how.

    Attributes:
        layout: Nodes, packages of a node and devices of a package of the ranks that share the model: the first ones. The others
            train one of their own, so that all ranks of the world make the same collectives.
        accumulation: Backwards of every optimizer step, or of each.
        flags: What tells FSDP2 that a backward is not the last one: ``last``, ``sync`` or ``all_reduce``, for
            ``set_is_last_backward`` and so on; ``count`` tells hzero their number; ``none``.
        optimizer: ``adamw``, ``fused`` or ``sgd``.
        options: Of the model, see `build`.
        tensor: Ranks of a tensor group.
    """

    layout: tuple[int, int, int] = LAYOUT
    accumulation: int | tuple[int, ...] = 1
    flags: str = "last"
    optimizer: str = "adamw"
    options: frozenset[str] = frozenset()
    tensor: int = 1

    def backwards(self, step: int) -> int:
        """Backwards of a step."""
        return self.accumulation if isinstance(self.accumulation, int) else self.accumulation[step]

    @property
    def topology(self) -> dict[str, int]:
        """That of the world, of which the ranks of the model are a part."""
        _, packages, devices = self.layout
        inside = packages * devices * self.tensor
        return {"nodes": WORLD // inside, "packages_per_node": packages, "devices_per_package": devices * self.tensor}


def case(*options: str, **how: Any) -> Case:
    """A case with these options."""
    return Case(options=frozenset(options), **how)


class Block(nn.Module):
    """A residual block; with ``spare`` it has parameters that a backward uses by turns, or never."""

    def __init__(self, spare: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.gain = nn.Parameter(torch.ones(1))
        self.spare = nn.Linear(WIDTH, WIDTH) if spare else None
        self.skips = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = x + self.down(F.gelu(self.up(self.norm(x)))) * self.gain
        return made if self.spare is None or self.skips else made + self.spare(x)


class Net(nn.Module):
    """Mean next-token loss, a scalar, of int64 ``[batch, length]``."""

    def __init__(self, tied: bool = False, spare: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(spare) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).float()[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@functools.cache
def mesh_of(ranks: int, tensor: int = 1) -> DeviceMesh:
    """The mesh of this rank: of the first ranks of the world, or of the others."""
    if tensor > 1:
        return dist.init_device_mesh("cpu", (WORLD // tensor, tensor), mesh_dim_names=("data", "tensor"))
    if ranks == WORLD:
        return dist.init_device_mesh("cpu", (WORLD,))
    meshes = [DeviceMesh("cpu", list(part)) for part in (range(ranks), range(ranks, WORLD))]
    return meshes[dist.get_rank() >= ranks]


def build(options: frozenset[str], mesh: DeviceMesh, seed: int = 0) -> Net:
    """The model, sharded; ``options`` are names of what it has or how it is sharded."""
    torch.manual_seed(seed)
    model = Net("tied" in options, "spare" in options)
    how: dict[str, Any] = {"mesh": mesh["data"] if mesh.ndim > 1 else mesh}
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    if mesh.ndim > 1:
        for block in model.blocks:
            parallelize_module(
                block, mesh["tensor"], {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
            )
    if "frozen" in options:
        model.embed.weight.requires_grad_(False)
        for name in ("up.weight", "norm.bias"):
            model.blocks[0].get_parameter(name).requires_grad_(False)
        model.blocks[1].requires_grad_(False)
    if "checkpointing" in options:
        for place, block in enumerate(model.blocks):
            model.blocks[place] = checkpoint_wrapper(block)
    types = {"bf16": torch.float32, "bf16_wire": torch.bfloat16, "fp16": torch.float16}
    for name, wire in types.items():
        if name in options:
            param_dtype = torch.float16 if name == "fp16" else torch.bfloat16
            how["mp_policy"] = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=wire)
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
        for block in model.blocks:
            block.compile(backend="aot_eager")
    if "prefetch" in options:
        for block, following in zip(model.blocks, model.blocks[1:]):
            block.set_modules_to_forward_prefetch([following])
    if "meta" in options:
        model.to_empty(device="cpu")
        set_model_state_dict(model, whole, options=StateDictOptions(full_state_dict=True))
    return model


@dataclass
class Run:
    """What a training has shown.

    Attributes:
        losses: Of each step, the mean over ranks and micro-batches.
        norms: Of the gradients of each step.
        weights: At the end, whole, on the host.
        state: hzero's; None without it.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: list[torch.Tensor] = field(default_factory=list)
    state: FsdpState | None = None


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer of the trained parameters."""
    trained = [param for param in model.parameters() if param.requires_grad]
    if name == "sgd":
        return torch.optim.SGD(trained, lr=0.1, momentum=0.9)
    return torch.optim.AdamW(trained, lr=3e-3, weight_decay=0.1, fused=name == "fused")


def backward(case: Case, model: Any, mesh: DeviceMesh, step: int, micro: int) -> torch.Tensor:
    """One forward and backward; the loss."""
    group = mesh["data"] if mesh.ndim > 1 else mesh
    last = micro == case.backwards(step) - 1
    flag = {
        "last": model.set_is_last_backward,
        "sync": model.set_requires_gradient_sync,
        "all_reduce": model.set_requires_all_reduce,
    }.get(case.flags)
    if flag is not None:
        flag(last)
    for block in model.blocks:
        block.skips = (step + micro) % 2 == 0
    rank = group.get_local_rank()
    generator = torch.Generator().manual_seed(step * 10_007 + micro * 101 + rank)
    tokens = torch.randint(0, VOCAB, (2, 9), generator=generator)
    loss = model(tokens) / case.backwards(step)
    loss.backward()
    return loss.detach()


def apply(model: Net, case: Case, block: dict[str, Any]) -> FsdpState:
    """hzero for a model."""
    count = case.backwards(0) if case.flags == "count" else None
    return hzero.fsdp.apply(model, topology=case.topology, accumulation=count, **block)


def spoil(state: FsdpState, name: str) -> None:
    """Changes the copies of a module's weights, as a fault of hzero would."""
    for param in state.weights.parameters.values():
        if name in param.name and param.secondary is not None:
            param.secondary.view(-1).view(torch.uint8)[:64] ^= 255


def train(
    case: Case,
    block: dict[str, Any] | None,
    steps: int = 2,
    between: Callable[[int, Net, torch.optim.Optimizer], None] | None = None,
) -> Run:
    """Trains a new model, with hzero if there is a block."""
    ranks = WORLD if case.tensor > 1 else case.layout[0] * case.layout[1] * case.layout[2]
    mesh, run = mesh_of(ranks, case.tensor), Run()
    group = (mesh["data"] if mesh.ndim > 1 else mesh).get_group()
    model = build(case.options, mesh)
    if block is not None:
        run.state = apply(model, case, block)
    elif "spare" in case.options:
        model.set_reduce_scatter_unused_params(True)
    optimizer = optimizer_of(case.optimizer, model)
    for step in range(steps):
        loss = sum((backward(case, model, mesh, step, micro) for micro in range(case.backwards(step))), torch.zeros(()))
        trained = [param for param in model.parameters() if param.requires_grad]
        norm = nn.utils.clip_grad_norm_(trained, 1.0) if mesh.ndim == 1 else torch.zeros(())
        dist.all_reduce(loss, group=group)
        run.losses.append(float(loss) / group.size())
        run.norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
        optimizer.step()
        optimizer.zero_grad()
        if between is not None:
            between(step, model, optimizer)
    run.weights = [param.full_tensor().detach().cpu() for param in model.parameters()]
    return run


@contextlib.contextmanager
def applied(case: Case, block: dict[str, Any]) -> Iterator[tuple[Net, FsdpState, torch.optim.Optimizer, DeviceMesh]]:
    """A model under hzero, and its optimizer."""
    mesh = mesh_of(case.layout[0] * case.layout[1] * case.layout[2])
    model = build(case.options, mesh)
    state = apply(model, case, block)
    try:
        yield model, state, optimizer_of(case.optimizer, model), mesh
    finally:
        state.close()


def plain(case: Case, steps: int = 2) -> Run:
    """FSDP2 alone, which neither flags nor places of ranks concern."""
    nodes, packages, devices = case.layout
    return _plain(replace(case, flags="last", layout=(nodes * packages * devices, 1, 1)), steps)


@functools.cache
def _plain(case: Case, steps: int) -> Run:
    return train(case, None, steps)


def relative(found: list[float], wanted: list[float]) -> float:
    """The largest relative difference."""
    return max(abs(one - other) / max(abs(other), 1e-12) for one, other in zip(found, wanted, strict=True))
