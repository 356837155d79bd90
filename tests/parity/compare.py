"""What every row of the parity tables asserts, for both front ends.

1. Losses, gradient norms and weights equal stock's: with codec `none` up to the order of sums in float32, otherwise within
   what the codecs lose. What forward reads is within the codec's error bound of the exact weights.
2. The wire log has the bytes of the plan, and the states have its memory.
3. All ranks read the same bits.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist

from hzero.codecs.codec import Codec
from hzero.program.collectives import step_traffic
from hzero.program.held import held_states
from tests.parity import zoo
from tests.rank_main import DEVICE, same_on_all_ranks

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
#: Nodes, packages of a node, devices of a package: 4 ranks have a boundary between nodes and packages of two devices; 8 have a
#: tier between them too; 6 is not a power of two.
LAYOUTS = {2: (2, 1, 1), 4: (2, 1, 2), 6: (3, 1, 2), 8: (2, 2, 2)}
LAYOUT = LAYOUTS.get(WORLD, (1, 1, 1))
#: Largest relative difference of a loss, and of a norm, to stock, by the coarsest codec of the hops.
#: Gradients in 16 bits are as codec `bf16`.
TOLERANCES = {"none": (2e-6, 2e-6), "bf16": (2e-3, 2e-2), "zfp": (2e-2, 5e-2), "int8": (1e-2, 5e-2)}
TOLERANCES["int4"] = 4e-2, 0.4


@dataclass(frozen=True)
class Row:
    """What is trained, and how.

    Attributes:
        preset: Preset of the block; None for stock.
        options: Features of the model, of the front end and of the loop; see the front ends.
        accumulation: Micro-batches of every step, or of each.
        layout: Nodes, packages of a node and devices of a package of the ranks that share the model.
        block: More of the block.
        edit: How weights are written after every step but the last two; see the front ends.
        tensor: Ranks of a tensor group, which only FSDP2 has here.
        make: Makes another model than `zoo.make`, which returns a loss; only under DeepSpeed.
        within: Largest relative difference of a loss, and of a norm, instead of `TOLERANCES`.
    """

    preset: str | None = "lossless"
    options: frozenset[str] = frozenset()
    accumulation: int | tuple[int, ...] = 1
    layout: tuple[int, int, int] = LAYOUT
    block: Mapping[str, Any] = field(default_factory=dict, compare=False)
    edit: str = ""
    tensor: int = 1
    make: Callable[[], torch.nn.Module] | None = None
    within: tuple[float, float] | None = field(default=None, compare=False)

    @property
    def windows(self) -> tuple[int, ...]:
        """Micro-batches of each step."""
        steps = 3 if self.edit or "spare" in self.options else 2
        return (self.accumulation,) * steps if isinstance(self.accumulation, int) else self.accumulation

    @property
    def topology(self) -> dict[str, int]:
        """That of the world, of which the ranks of the model are a part."""
        _, packages, devices = self.layout
        inside = packages * devices * self.tensor
        return {"nodes": WORLD // inside, "packages_per_node": packages, "devices_per_package": devices * self.tensor}

    @property
    def of_stock(self) -> Row:
        """The same training without hzero, which places of ranks do not concern."""
        nodes, packages, devices = self.layout
        return replace(self, preset=None, block={}, layout=(nodes * packages * devices, 1, 1))

    @property
    def whole_block(self) -> dict[str, Any]:
        """The block, with audits after every step unless the row says otherwise."""
        return {"preset": self.preset, "topology": self.topology, "guard": {"every": 1}, **self.block}


def row(preset: str, *features: Any, **how: Any) -> Row:
    """A row; ``features`` are options, and a number or a tuple for the accumulation."""
    windows = [one for one in features if not isinstance(one, str)]
    options = frozenset(one for one in features if isinstance(one, str))
    return Row(preset, options, *windows, **how)


class Session(Protocol):
    """A model in training under a front end.

    Attributes:
        rank: Rank among those that have other batches.
        group: Their group.
        state: hzero's state; None for stock.
        wire: Dtype of gradients on a hop without a codec.
        optimizer: For the memory of its states.
    """

    rank: int
    group: Any
    state: Any
    wire: torch.dtype
    blocks: Any

    def backward(self, tokens: torch.Tensor, last: bool, count: int) -> torch.Tensor:
        """One forward and backward; the loss. ``last`` of ``count`` micro-batches."""

    def step(self) -> float:
        """One optimizer step; the norm of its gradients."""

    def edit(self, way: str, step: int) -> None:
        """Writes weights."""

    def evaluate(self, tokens: torch.Tensor) -> torch.Tensor:
        """A loss without gradients."""

    def masters(self) -> dict[str, torch.Tensor]:
        """Exact weights by name."""

    def read(self) -> dict[str, torch.Tensor]:
        """What forward reads, by name."""

    def end(self) -> None:
        """Frees the model."""


@dataclass
class Run:
    """What a training has shown.

    Attributes:
        losses: Of each step, the mean over ranks and micro-batches, and of an evaluation at the end.
        norms: Of the gradients of each step.
        masters: Exact weights at the end, by name.
        read: What forward reads at the end, by name.
        codec: The coarsest codec of the hops.
        narrow: Whether gradients have 16 bits.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    masters: dict[str, torch.Tensor] = field(default_factory=dict)
    read: dict[str, torch.Tensor] = field(default_factory=dict)
    codec: str = "none"
    narrow: bool = False


Front = Callable[[Row], Session]


def relative(found: list[float], wanted: list[float]) -> float:
    """The largest relative difference."""
    return max(abs(one - other) / max(abs(other), 1e-9) for one, other in zip(found, wanted, strict=True))


def train(front: Front, row: Row, measures: bool = True) -> Run:
    """Trains a new model. Under hzero bytes and memory of the last step are compared with the plan, and reads on all ranks."""
    session, run, windows = front(row), Run(), row.windows
    for step, count in enumerate(windows):
        last = measures and session.state is not None and step == len(windows) - 1
        gathers = count_gathers(session.state) if last else Counter()
        losses = []
        for micro in range(count):
            for block in session.blocks:
                block.skips = (step + micro) % 2 == 0
            losses.append(session.backward(zoo.batch(step, micro, session.rank).to(DEVICE), micro == count - 1, count))
        run.norms.append(session.step())
        run.losses.append(_mean(session, torch.stack(losses).mean()))
        if last:
            assert_planned(session, row, gathers, count)
        if row.edit and step < len(windows) - 2:
            session.edit(row.edit, step)
    run.losses.append(_mean(session, session.evaluate(zoo.batch(99, 0, session.rank).to(DEVICE))))
    run.masters = {name: master.clone() for name, master in session.masters().items()}
    if session.state is not None:
        run.read, run.codec, run.narrow = session.read(), _coarsest(session.state), session.wire.itemsize == 2
        _assert_read(session, run)
    session.end()
    return run


def _mean(session: Session, loss: torch.Tensor) -> float:
    total = loss.detach().double()
    dist.all_reduce(total, group=session.group)
    return float(total) / dist.get_world_size(session.group)


def _coarsest(state: Any) -> str:
    plans = [param.route.plan for param in state.weights.parameters.values()]
    used = {hop.codec for plan in plans for hop in (*plan.gather_hops(), *plan.reduce_hops())}
    return max((codec.codec for codec in used if not codec.traits.exact), key=list(TOLERANCES).index, default="none")


# ---- bytes and memory ---------------------------------------------------------------------------------------------------


def count_gathers(state: Any) -> Counter[int]:
    """Counts the gathers of each parameter from now on."""
    gathers, unshard = Counter[int](), state.weights.unshard

    def counting(params: Any, *rest: Any, **more: Any) -> Any:
        gathers.update(param.key for param in params)
        return unshard(params, *rest, **more)

    state.settle()
    state.wire_log.reset()
    state.weights.unshard = counting
    return gathers


def planned_bytes(state: Any, gathers: Counter[int], accumulation: int, wire: torch.dtype) -> Counter[Any]:
    """Bytes of a step by role and tier, of all parameters and their gathers."""
    planned = Counter[Any]()
    for param in state.weights.parameters.values():
        plan, often = param.route.plan, gathers[param.key] / accumulation
        again = {hop.tier for hop in plan.refresh_hops()}
        for role, dtype in (("weights", param.dtype), ("gradients", wire)):
            how = {"itemsize": dtype.itemsize, "accumulation": accumulation, "fetches": often}
            for one in step_traffic(plan, plan.grid, [param.numel], **how):
                if one.role == role and (param.trained or (role == "weights" and one.tier not in again)):
                    planned[one.role, one.tier] += one.wire_bytes
    return planned


def logged_bytes(state: Any) -> Counter[Any]:
    """Bytes of the wire log by role and tier."""
    logged = Counter[Any]()
    for entry in state.wire_log.entries():
        logged[entry.role, entry.tier] += entry.wire_bytes
    return logged


def assert_planned(session: Any, row: Row, gathers: Counter[int], accumulation: int) -> None:
    """Asserts that the bytes of a step, and the memory, equal the plan's."""
    state, states = session.state, Counter[str]()
    state.settle()
    planned, logged = planned_bytes(state, gathers, accumulation, session.wire), logged_bytes(state)
    for param in state.weights.parameters.values():
        plan = param.route.plan
        for name, held in held_states(plan, [param.numel], param.dtype.itemsize, accumulation).items():
            states[name] += held.bytes if param.trained or name == "secondary partition" else 0
    if "spare" in row.options and row.preset:  # gradients of unused parameters are not sent
        assert all(size <= planned[place] for place, size in logged.items()), (row, logged, planned)
        return
    if any(param.changes for param in state.weights.parameters.values()):  # never more than whole weights
        sent = {place: size for place, size in logged.items() if place[0] == "weights"}
        assert all(size <= planned[place] for place, size in sent.items()), (row, sent, planned)
        logged |= {place: planned[place] for place in sent}
    assert +logged == +planned, (row, logged, +planned)
    measured = state.memory()
    # Residuals of the first hop have no padding.
    padding = sum(-param.numel % param.route.plan.grid.world_size for param in state.weights.parameters.values())
    assert 0 <= states["error feedback"] - measured["error feedback"] <= 2 * padding, (row, measured, states)
    del states["error feedback"]
    assert {name: measured[name] for name in states} == dict(states), (row, measured, states)


def _assert_read(session: Session, run: Run) -> None:
    """What forward reads has the same bits on all ranks, and is as near to the masters as the codecs promise."""
    assert same_on_all_ranks(list(run.read.values()), session.group)
    bounds = {}
    for param in session.state.weights.parameters.values():
        hops = param.route.plan.gather_hops()
        bounds[param.name] = [Codec.from_config(hop.codec) for hop in hops if not hop.codec.traits.exact]
    for name in run.masters.keys() & run.read.keys():  # parts of a tensor group are not read
        master = run.masters[name]
        # Parameters of a module of FSDP2 are one, so that their blocks have others' elements too.
        alone, read = name in bounds, run.read[name]
        codecs = bounds[name] if alone else max(bounds.values(), key=len)
        largest = 1.1 * max(float(one.abs().max()) for one in ([master] if alone else run.masters.values()))
        bound = sum(codec.error_bound(largest, read.dtype) for codec in codecs)
        error = float((read.float() - master.to(read.dtype).float()).abs().max())
        assert error <= bound, (name, error, bound)


# ---- parity -------------------------------------------------------------------------------------------------------------


@functools.cache
def stock(front: Front, row: Row) -> Run:
    """The training of a row `Row.of_stock`."""
    return train(front, row)


def assert_row(front: Front, row: Row, reference: Front | None = None) -> None:
    """Trains under stock, or under another reference, and under hzero, and compares."""
    wanted, found = stock(reference or front, row.of_stock), train(front, row)
    losses, norms = row.within or map(max, TOLERANCES[found.codec], TOLERANCES["bf16" if found.narrow else "none"])
    assert relative(found.losses, wanted.losses) <= losses, (row, found.losses, wanted.losses)
    assert relative(found.norms, wanted.norms) <= norms, (row, found.norms, wanted.norms)
    if found.codec == "none" and not found.narrow:
        assert found.masters.keys() == wanted.masters.keys()
        for name, master in wanted.masters.items():
            torch.testing.assert_close(
                found.masters[name], master, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{row}, {name}: {text}"
            )


def rows(front: Front, *several: Row, reference: Front | None = None) -> Callable[[], None]:
    """A check of rows."""

    def check() -> None:
        for one in several:
            assert_row(front, one, reference)

    return check
