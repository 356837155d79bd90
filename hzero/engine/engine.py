"""The engine of one model: lanes, wire log, secondary partitions, gradients, guard and audit, from its settings."""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from weakref import WeakSet

import torch
import torch.distributed as dist

from hzero.codecs import backends
from hzero.comm import Communicator, Runtime, WireLog, blaming, in_use, limit_waits, peers_of, shared_lanes
from hzero.comm.peers import Peers, unused_name
from hzero.comm.watchdog import shared_watchdog
from hzero.comm.wires import STAGE, Lane
from hzero.config import ROLES, HZeroConfig, TopologyConfig
from hzero.engine.gradients import Gradients
from hzero.engine.guard import GradientOf, Guard, speaks
from hzero.engine.parameter import Parameter
from hzero.engine.weights import Weights
from hzero.errors import ConfigError, is_rank_0
from hzero.program.shards import ShardPlan
from hzero.topology import Grid, resolve_grid

logger = logging.getLogger("hzero")

#: Points at which the ranks compare what they are about to do.
PASS, USE, STEP = "a forward or backward", "a gradient before the last backward of a step", "optimizer.step()"
_MEETINGS = (PASS, USE, STEP)
#: Steps after which the bits of codec ``exact`` are told.
_STEPS_BEFORE_BITS = 20


@dataclass(frozen=True)
class Owners:
    """The ranks that share every parameter's primary shards.

    Attributes:
        grid: Their places, in their numbering.
        rank: This rank in their numbering.
        ranks: Their ranks in the world.
        world: The grid of the world.
        group: Their process group. None is the world, or a group that has not been made yet.
    """

    grid: Grid
    rank: int
    ranks: tuple[int, ...]
    world: Grid
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, group: dist.ProcessGroup | None, topology: TopologyConfig) -> Owners:
        """Returns the owners for a process group; None is the world.

        Collective over the world if the topology is discovered.

        Raises:
            ConfigError: As in `of_ranks`.
        """
        world = resolve_grid(topology, dist.get_world_size())
        return replace(cls.of_ranks(ranks_of(group), world, dist.get_rank()), group=group)

    @classmethod
    def of_ranks(cls, ranks: Sequence[int], world: Grid, rank: int, key: str = "topology") -> Owners:
        """Returns the owners for some ranks of the world. ``key`` is as in `Grid.of_ranks`.

        Raises:
            ConfigError: The ranks are the whole world in another order, so that rank r would not own shard r. Or they do not
                fill the tiers evenly.
        """
        if len(ranks) < world.world_size:
            return cls(world.of_ranks(ranks, key), ranks.index(rank), tuple(ranks), world)
        place = next((place for place, one in enumerate(ranks) if place != one), None)
        if place is not None:
            raise ConfigError(
                f"the data-parallel group: found rank {ranks[place]} of the world at place {place}; expected the world's order, "
                "in which checkpoints number shards: make the group of the ranks in rising order"
            )
        return cls(world, rank, tuple(ranks), world)

    def __str__(self) -> str:
        """Text for the start line; empty if the owners are the whole world."""
        if len(self.ranks) == self.world.world_size:
            return ""
        return f"; data parallel over {len(self.ranks)} of {self.world.world_size} ranks ({self.world})"


def ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    """Returns the world ranks of a process group; None is the world."""
    return dist.get_process_group_ranks(group or dist.group.WORLD)  # type: ignore[arg-type]


class Traffic:
    """Lanes and wire log for one model's hops, including the hops of the communicators of its layers.

    Args:
        config: The block.
        module: The model, whose layers hold the communicators.
        device: Device on which the model runs.
        accelerator: Makes streams and events of an asynchronous device: ``torch.cuda`` or a DeepSpeed accelerator. None on CPU.
        communicators: Communicators of the front end itself.

    Attributes:
        config: The block with its preset applied.
        device: As given.
        lanes: Lanes that run the hops.
        wire_log: Bytes and time of every completed hop, including the hops of `hzero.comm.for_dimension`; see `settle`.
        on_settle: Functions that `settle` calls last.
        LATER: Dimensions whose communicators may be made after this.
    """

    LATER: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        config: HZeroConfig,
        module: torch.nn.Module,
        device: torch.device,
        accelerator: Any = None,
        communicators: Sequence[Communicator] = (),
    ) -> None:
        self.config, self.device, self.wire_log = config, device, WireLog()
        self.lanes = shared_lanes(accelerator, config.transport, config.order)
        self.on_settle: list[Callable[[], None]] = []
        limit_waits()
        # Weak: a communicator lives as long as the model uses it.
        self._communicators = WeakSet[Communicator]()
        for communicator in (*_communicators_of(module, config, self.LATER), *communicators):
            self.adopt(communicator)

    def adopt(self, communicator: Communicator) -> None:
        """Counts the hops of a communicator in `wire_log`."""
        self._communicators.add(communicator)
        communicator.wire_log = self.wire_log

    def announce(self, text: str, choice: object = None) -> None:
        """Prints one line that shows how the block is in effect, at every log level, after a line about the choice."""
        if choice is not None:
            print(f"hzero: {choice}", file=sys.stderr, flush=True)
        backend = backends.choice("cpu" if self.device.type == "cpu" else "cuda").name
        transport = "mpi" if self.config.transport == "mpi" else dist.get_backend()
        print(f"hzero: {text}; transport {transport}; codecs {backend}", file=sys.stderr, flush=True)

    def settle(self) -> None:
        """Waits for all hops in flight. `wire_log` then counts them, and their checksums have been compared. Collective."""
        self.lanes.drain()
        self.verify()
        for call in self.on_settle:
            call()

    def verify(self) -> None:
        """On a device: waits for all hops so far, including the hops of dimensions. Raises `HopError` if a checksum differs."""
        for communicator in self._communicators:
            communicator.verify()


class Engine(Traffic):
    """Secondary partitions, gradients and guard of one model. Most methods are collective: all ranks call them in the same order.

    In a step, a front end calls `Weights.unshard` at every use of weights, `Gradients.accumulate` in every backward and
    `Gradients.finish` after the last one. Then it calls `before_step`, `Weights.note_step` for the parameters that its
    optimizer has stepped, and `after_step`.

    Args:
        config: The block.
        plan: The shard plan of this rank, in the numbering of the owners.
        owners: The ranks that own primary shards.
        module: The model, whose layers hold the communicators.
        parameters: The model's parameters, with routes from `hzero.engine.parameter.routes_of`.
        bucket_numel: Maximum number of elements in one message of a refresh or a boundary.
        device: Device on which the model runs.
        accelerator: As in `Traffic`.
        group: The ranks that train the model together, and so take the same decisions; None is the world.
        parts: Plans of parameters that only some ranks share, with these ranks as owners. See `ShardPlan.of_part`.

    Attributes:
        plan: As given.
        owners: As given.
        group: As given.
        weights: The secondary partitions.
        gradients: Reductions and gradient accumulation buffers.
        guard: Stops a training that diverges.
        most_marks: Maximum number of marks in `meet`.
    """

    #: Advice in the audit's message: how to change weights without making secondary partitions stale.
    ADVICE: ClassVar[str] = "call note_edit() on all ranks after weights have been changed outside of the optimizer"

    def __init__(
        self,
        config: HZeroConfig,
        plan: ShardPlan,
        owners: Owners,
        module: torch.nn.Module,
        parameters: Sequence[Parameter],
        bucket_numel: int,
        device: torch.device,
        accelerator: Any = None,
        group: dist.ProcessGroup | None = None,
        parts: Sequence[tuple[ShardPlan, Owners]] = (),
    ) -> None:
        super().__init__(config, module, device, accelerator)
        self.plan, self.owners, self.group = plan, owners, group
        self.most_marks = 2 + len(parameters)
        settings = {"hzero": config.model_dump(exclude={"written"})}
        name = unused_name(STAGE, self.lanes.failures, owners.group, owners.ranks, settings)
        roles, peers = dict[tuple[str, str], str](), dict[Lane, Peers]()
        for one, of_it in ((plan, owners), *parts):
            first = name.replace(STAGE, one.channel)  # the rest is the number of failures
            every = [f"{first} {role}" for role in ROLES] if self.lanes.apart else [first] * len(ROLES)
            roles |= {(one.channel, role): lane for role, lane in zip(ROLES, every)}
            peers |= peers_of(one, channels=list(dict.fromkeys(every)), ranks=of_it.ranks, lanes=self.lanes)
        self._runtime = Runtime(plan, peers, self.wire_log, self.lanes, roles)
        self._synchronous = accelerator is None
        self.weights = Weights(self._runtime, parameters, bucket_numel, self._largest, accelerator)
        self.gradients = Gradients(self._runtime, bucket_numel, len({param.route.number for param in parameters}))
        self.guard = Guard(self.weights, config.guard, device, self.ADVICE, group)

    # ---- what the user does ----------------------------------------------------------------------------------------

    def meet(self, where: str, marks: torch.Tensor | None = None) -> list[int]:
        """Combines marks of all ranks, and checks that all ranks are at the same point. Collective; waits for the device.

        All messages have one size, so ranks at different points find each other out instead of waiting for ever.

        Args:
            where: `PASS`, `USE` or `STEP`.
            marks: bool ``[n]``, at most `most_marks`.

        Returns:
            For each mark, whether it is set on a rank.

        Raises:
            RuntimeError: Other ranks are elsewhere, such as if one rank reads a gradient that others do not read.
        """
        message = torch.zeros(len(_MEETINGS) + self.most_marks, dtype=torch.uint8)
        message[_MEETINGS.index(where)] = 1
        message = message.to(self.device)
        if marks is not None:
            message[len(_MEETINGS) :][: len(marks)] = marks
        found = self._largest(message)
        others = [name for name, there in zip(_MEETINGS, found) if there and name != where]
        if others:
            raise RuntimeError(
                f"hzero: this rank is at {where}, other ranks are at {' and '.join(others)}; all ranks must use gradients and "
                "weights in the same order, also for logging"
            )
        return found[len(_MEETINGS) :]

    def _largest(self, numbers: torch.Tensor) -> list[int]:
        """Returns the largest of each number over all ranks. Collective; waits for the device."""
        with blaming():
            self.lanes.between(dist.all_reduce, numbers, dist.ReduceOp.MAX, self.group)
            found: list[int] = numbers.tolist()
        return found

    def follow_writes(self, where: str = PASS) -> list[Parameter]:
        """Marks parameters whose primary shards any rank has written, so that all ranks refresh them. See `meet`.

        Front ends call it before the first unshard of each forward and backward.

        Returns:
            The marked parameters.
        """
        compared, written = self.weights.written()
        if written is None:  # on all ranks
            return []
        found = list(itertools.compress(compared, self.meet(where, written)))
        self.weights.note_edit(found)
        return found

    # ---- the optimizer step ----------------------------------------------------------------------------------------

    def before_step(self, params: Sequence[Parameter], gradient_of: GradientOf) -> None:
        """Prepares for an optimizer step, which changes primary shards. Runs an audit if one is due.

        Args:
            params: Parameters that the optimizer steps.
            gradient_of: Returns this rank's gradient shard of one parameter.

        Raises:
            StaleWeightsError: Secondary partitions are wrong.
        """
        self.lanes.join()  # waits for all submitted hops, so the collectives that follow have one order with them
        if self._synchronous:
            self.settle()
        if self.guard.audits_next:
            self.follow_writes(STEP)  # what the user has written is no fault
        self.guard.before_step(params, gradient_of)

    def after_step(self, *, done: bool) -> None:
        """Ends the window of an optimizer step. ``done`` is False if the step was discarded."""
        if done:
            self.guard.stepped()
            if self.plan.exact and self.guard.steps == _STEPS_BEFORE_BITS and speaks(self.group):
                self._tell_bits()
        self.gradients.clear(done=done)
        watchdog = shared_watchdog()
        watchdog.step, watchdog.micro = watchdog.step + 1, 0

    def _tell_bits(self) -> None:
        outermost = self.plan.refresh_hops()[0]
        sent = [
            one for one in self.wire_log.entries() if (one.tier, one.codec) == (outermost.tier, outermost.codec.codec)
        ]
        if elements := sum(one.elements for one in sent):
            bits = 8 * sum(one.payload_bytes for one in sent) / elements
            found = (
                f"hzero: codec exact took {bits:.2f} bits per weight on {outermost.tier} in {self.guard.steps} steps"
            )
            print(f"{found}; the plan expects {outermost.codec.format.bits:g}", file=sys.stderr, flush=True)

    def verify(self) -> None:
        """As in `Traffic`, and also for the hops of weights and gradients."""
        self.lanes.verify()

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def after_load(self) -> None:
        """Discards everything derived from primary shards, after a checkpoint or another load has replaced them."""
        self.weights.note_edit()
        self.gradients.clear()
        self.guard.audit_due = True
        self._runtime.feedback.clear()

    def state_dict(self) -> dict[str, int] | None:
        """Returns the counts from which seeds of stochastic rounding are made.

        A run that resumes with the same plan then rounds gradients like an uninterrupted run. Weights are rounded differently if
        a load groups them into other messages than a step does.

        Returns:
            None if no codec rounds stochastically. The checkpoint files then stay stock.
        """
        codecs = [self.plan.codecs[role][tier] for role in ROLES for tier in self.plan.codecs[role].written]
        codecs += [codec for _, codec in self.plan.exceptions]
        if all(codec.rounding != "stochastic" for codec in codecs):
            return None
        return {"weights": self.weights.version, "gradients": self.gradients.reductions}

    def load_state_dict(self, seeds: Mapping[str, int] | None) -> None:
        """Restores the counts of `state_dict`, after a load has replaced everything else. Residuals start at zero.

        Args:
            seeds: Result of `state_dict`; None if the checkpoint has none, such as a stock one.
        """
        if self.config.error_feedback and speaks(self.group):
            logger.warning("hzero: residuals of error feedback start at zero: checkpoints have none")
        if seeds is not None:
            self.weights.version, self.gradients.reductions = seeds["weights"], seeds["gradients"]

    # ---- reports -------------------------------------------------------------------------------------------------

    @property
    def ratios(self) -> dict[str, float]:
        """Signal-to-noise ratios from the last audit, in dB; see `Guard`."""
        return self.guard.ratios

    def memory(self) -> dict[str, int]:
        """Returns the measured bytes of each state on this rank, without transient buffers.

        Gradient accumulation buffers and error feedback are peaks, since they are allocated and freed within a step. Secondary
        partitions are current. Call `settle` before, since copies and sums in flight do not count yet.
        """
        copies = (param.secondary for param in self.weights.parameters.values())
        return {
            "secondary partition": sum(copy.nbytes for copy in copies if copy is not None),
            "gradient accumulation buffers": self.gradients.peak_bytes,
            "error feedback": self._runtime.feedback.bytes,
        }

    def described(self) -> str:
        """Preset, grid, scopes and codecs, for the start line."""
        grid, _, sharding = str(self.plan).partition("; ")
        return f"{self.config.preset} on {grid}{undeclared(self.config, self.device)}; {sharding}{self.owners}"

    def warn_of_plan(self) -> None:
        """Logs how the plan was adapted to the machine, and which settings have no effect."""
        plans = [self.plan, *(param.route.plan for param in self.weights.parameters.values())]
        for adaptation in dict.fromkeys(one for plan in plans for one in plan.adaptations):
            logger.warning("hzero: %s", adaptation)
        for note in dict.fromkeys(one for plan in plans for one in plan.notes):
            logger.info("hzero: %s", note)

    def close(self) -> None:
        """Waits for the hops in flight, and frees payloads and gradient accumulation buffers."""
        try:
            self.weights.free()
        finally:
            self.gradients.clear()


def undeclared(config: HZeroConfig, device: torch.device) -> str:
    """Remark for the start line if no topology is declared on CPU, where each rank counts as a GPU."""
    discovers = config.topology.packages_per_node is None and config.topology.source == "discover"
    return " (CPU ranks, no topology declared)" if discovers and device.type == "cpu" else ""


def _communicators_of(module: torch.nn.Module, config: HZeroConfig, later: Sequence[str]) -> list[Communicator]:
    """Returns the communicators of a model's layers. Warns if no communicator uses the codecs of a dimension."""
    used = in_use()
    held = {id(value) for one in module.modules() for value in vars(one).values()}
    for dimension in sorted({*config.codecs.dimensions} - {*later}) if is_rank_0() else ():
        plans = [communicator.plan for communicator in used if communicator.role == dimension]
        tiers = {hop.tier for plan in plans for hop in plan.gather_hops()}
        why = ""
        if not tiers:
            why = f"nothing in this process sends over such a group; {_SENDERS.get(dimension, _ANY_MODEL)}"
        elif all(config.codecs[dimension][tier].traits.plain for tier in tiers):
            why = f"its groups cross {', '.join(sorted(tiers))} alone"
        if why:
            logger.warning("hzero: codecs.%s has no effect: %s", dimension, why)
    # Leave out the communicators of another engine's model.
    return [communicator for communicator in used if id(communicator) in held or not communicator.adopted]


_PIPELINE = "a PipelineModule does, with zero_optimization.stage 1 and more than one stage or data-parallel rank"
_ANY_MODEL = "a model does, with hzero.comm.for_dimension(dimension, config, group), before its engine is built"
_SENDERS = {
    "pipeline": _PIPELINE,
    "optimizer": f"{_PIPELINE}, and so does Muon",
    "expert": f"AutoEP does (expert_parallel.enabled), or {_ANY_MODEL}",
    "tensor": f"AutoTP does (tensor_parallel.autotp_size), or {_ANY_MODEL}",
}
