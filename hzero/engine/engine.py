"""What a front end builds for one model: lanes and wire log, resident weights, gradients, guard and audit, from its settings."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from weakref import WeakSet

import torch
import torch.distributed as dist

from hzero.codecs import backends
from hzero.comm import Collectives, Communicator, WireLog, in_use, limit_waits, peers_of, shared_lanes
from hzero.comm.peers import unused_name
from hzero.comm.watchdog import shared_watchdog
from hzero.comm.wires import STAGE
from hzero.config import ROLES, HZeroConfig, TopologyConfig
from hzero.engine.gradients import Gradients
from hzero.engine.guard import GradientOf, Guard, speaks
from hzero.engine.parameter import Parameter
from hzero.engine.weights import Weights
from hzero.plan.shards import ShardPlan
from hzero.topology import Grid, resolve_grid
from hzero.validation import ConfigError, is_rank_0

logger = logging.getLogger("hzero")


@dataclass(frozen=True)
class Owners:
    """The ranks that share every parameter's primary shards.

    Attributes:
        grid: Where they sit, in their own numbers.
        rank: This rank's number.
        ranks: Their ranks in the world.
        world: The grid of the world.
        group: Their process group; None is the world, or a group that is not made yet.
    """

    grid: Grid
    rank: int
    ranks: tuple[int, ...]
    world: Grid
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, group: dist.ProcessGroup | None, topology: TopologyConfig) -> Owners:
        """The owners that a process group is; None is the world.

        Collective over the world where the topology is discovered.

        Raises:
            ConfigError: As of `of_ranks`.
        """
        world = resolve_grid(topology, dist.get_world_size())
        return replace(cls.of_ranks(ranks_of(group), world, dist.get_rank()), group=group)

    @classmethod
    def of_ranks(cls, ranks: Sequence[int], world: Grid, rank: int) -> Owners:
        """The owners that some ranks of the world are.

        Raises:
            ConfigError: They are the world in another order, so that rank r does not own shard r; or they do not fill the
                tiers evenly.
        """
        if len(ranks) < world.world_size:
            return cls(world.of_ranks(ranks), ranks.index(rank), tuple(ranks), world)
        place = next((place for place, one in enumerate(ranks) if place != one), None)
        if place is not None:
            raise ConfigError(
                f"the data-parallel group: its rank {place} is rank {ranks[place]} of the world; hzero needs the world's own "
                "order"
            )
        return cls(world, rank, tuple(ranks), world)

    def __str__(self) -> str:
        """What the line at the start says where it is not the whole world."""
        if len(self.ranks) == self.world.world_size:
            return ""
        return f"; data parallel over {len(self.ranks)} of {self.world.world_size} ranks ({self.world})"


def ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    """Ranks of the world in a process group; None is the world."""
    return dist.get_process_group_ranks(group or dist.group.WORLD)  # type: ignore[arg-type]


class Traffic:
    """Lanes and wire log of one model's hops, those of the communicators of its layers included.

    Args:
        config: The block.
        module: The model, which holds the communicators of its layers.
        device: Where the model is computed.
        accelerator: Makes streams and events of an asynchronous device: ``torch.cuda``, or an accelerator of DeepSpeed. None
            on CPUs.
        communicators: Those of the front end itself.

    Attributes:
        config: The block, preset applied.
        device: As given.
        lanes: Run the hops.
        wire_log: Bytes and time of every hop that has ended, those of `hzero.comm.for_dimension` too; see `settle`.
        on_settle: Called at the end of `settle`.
    """

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
        # As long as the model holds them.
        self._communicators = WeakSet([*_communicators_of(module, config), *communicators])
        for communicator in self._communicators:
            communicator.wire_log = self.wire_log

    def announce(self, text: str) -> None:
        """Prints on one line, whatever the level of logs, that and how the block is in effect."""
        backend = backends.choice("cpu" if self.device.type == "cpu" else "cuda").name
        transport = "mpi" if self.config.transport == "mpi" else dist.get_backend()
        print(f"hzero: {text}; transport {transport}; codecs {backend}", file=sys.stderr, flush=True)

    def settle(self) -> None:
        """Waits for all hops under way, so that `wire_log` counts them and their checksums are compared. Collective."""
        self.lanes.drain()
        self.verify()
        for call in self.on_settle:
            call()

    def verify(self) -> None:
        """On a device: waits for all hops so far, those of dimensions too. Raises `HopError` for a checksum that differs."""
        for communicator in self._communicators:
            communicator.verify()


class Engine(Traffic):
    """Resident weights, gradients and guard of one model. All ranks call all methods alike, since most are collective.

    A front end calls in a step: `Weights.unshard` at every use of weights, `Gradients.accumulate` in every backward,
    `Gradients.finish` after the last one, `before_step`, then `Weights.mark_stale` for what its optimizer has stepped, and
    `after_step`.

    Args:
        config: The block.
        plan: The shard plan of this rank, in the numbers of the owners.
        owners: The ranks that own primary shards.
        module: The model, which holds the communicators of its layers.
        parameters: Its parameters. Their routes are of `hzero.engine.parameter.routes_of`.
        bucket_numel: Max elements of the parameters that share one message of a refresh or a boundary.
        device: Where the model is computed.
        accelerator: As of `Traffic`.
        group: The ranks that train the model together, and so decide alike; None is the world.

    Attributes:
        plan: As given.
        owners: As given.
        group: As given.
        weights: The resident weights.
        gradients: Reductions and accumulators.
        guard: Ends a training that diverges.
    """

    #: How a user changes weights without making resident copies stale, for the audit's message.
    ADVICE: ClassVar[str] = "call mark_stale() on all ranks after weights have been changed outside of the optimizer"

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
    ) -> None:
        super().__init__(config, module, device, accelerator)
        self.plan, self.owners, self.group = plan, owners, group
        ranks = owners.ranks
        name = unused_name(STAGE, self.lanes.failures, owners.group, ranks)
        roles: dict[str, str] = {role: f"{name} {role}" if self.lanes.apart else name for role in ROLES}
        channels = list(dict.fromkeys(roles.values()))
        peers = peers_of(plan, channels=channels, ranks=ranks, streams=self.lanes.streams)
        self._collectives = Collectives(plan, peers, self.wire_log, self.lanes, roles)
        self._synchronous = accelerator is None
        self.weights = Weights(self._collectives, parameters, bucket_numel, accelerator)
        self.gradients = Gradients(self._collectives, bucket_numel, len({param.route.number for param in parameters}))
        self.guard = Guard(self.weights, config.guard, device, self.ADVICE, group)

    # ---- the optimizer step ----------------------------------------------------------------------------------------

    def before_step(self, params: Sequence[Parameter], gradient_of: GradientOf) -> None:
        """An optimizer step is about to change primary shards. Audits if an audit is due.

        Args:
            params: Those that the optimizer steps.
            gradient_of: Gives this rank's shard of the gradient of one of them.

        Raises:
            StaleWeightsError: Resident weights are wrong.
        """
        self.weights.before_change()
        if self._synchronous:
            self.settle()
        self.lanes.before_others()
        self.guard.before_step(params, gradient_of)

    def after_step(self, *, done: bool) -> None:
        """Ends the window of an optimizer step, which was done or discarded."""
        if done:
            self.gradients.commit()
            self.guard.stepped()
        self.gradients.clear()
        watchdog = shared_watchdog()
        watchdog.step, watchdog.micro = watchdog.step + 1, 0

    def verify(self) -> None:
        """As of `Traffic`, and of weights and gradients."""
        self._collectives.verify()
        super().verify()

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def replaced(self) -> None:
        """Forgets everything derived from the primary shards, which have been replaced, as by a checkpoint."""
        self.weights.mark_stale()
        self.gradients.clear()
        self.guard.audit_due = True
        self._collectives.feedback.clear()

    def state_dict(self) -> dict[str, int] | None:
        """The numbers from which seeds of stochastic rounding are made.

        A run that resumes with the same plan then rounds gradients as one that was never interrupted. Weights that are rounded
        stochastically are rounded anew where a load lays them into other messages than a step does.

        Returns:
            None where nothing is rounded stochastically, so the files stay stock.
        """
        codecs = [self.plan.codecs[role][tier] for role in ROLES for tier in self.plan.codecs[role].written]
        codecs += [codec for _, codec in self.plan.exceptions]
        if all(codec.rounding != "stochastic" for codec in codecs):
            return None
        return {"weights": self.weights.version, "gradients": self.gradients.reductions}

    def load_state_dict(self, seeds: Mapping[str, int] | None) -> None:
        """Goes on from what a checkpoint holds, after everything else has been replaced. Residuals start at zero.

        Args:
            seeds: What `state_dict` has given; None where the checkpoint has nothing, as one of stock.
        """
        if self.config.error_feedback and speaks(self.group):
            logger.warning("hzero: residuals of error feedback start at zero: checkpoints have none")
        if seeds is not None:
            self.weights.version, self.gradients.reductions = seeds["weights"], seeds["gradients"]

    # ---- what a user reads -----------------------------------------------------------------------------------------

    @property
    def ratios(self) -> dict[str, float]:
        """Signal-to-noise ratios that the last audit found, in dB; see `Guard`."""
        return self.guard.ratios

    def memory(self) -> dict[str, int]:
        """Measured bytes of each state on this rank, without transient buffers.

        Gradient accumulators and error feedback are peaks, since they come and go within a step; the others are current.
        """
        return {
            "resident weights": self.weights.resident_bytes(),
            "gradient accumulators": self.gradients.peak_bytes,
            "error feedback": self._collectives.feedback.bytes,
        }

    def described(self) -> str:
        """Preset, grid, scopes and codecs, for the line at the start."""
        grid, _, sharding = str(self.plan).partition("; ")
        return f"{self.config.preset} on {grid}{undeclared(self.config, self.device)}; {sharding}{self.owners}"

    def warn_of_plan(self) -> None:
        """Logs how the plan was adapted to the machine, and which settings have no effect."""
        for adaptation in self.plan.adaptations:
            logger.warning("hzero: %s", adaptation)
        for note in self.plan.notes:
            logger.info("hzero: %s", note)

    def close(self) -> None:
        """Waits for what is under way, and frees payloads and accumulators."""
        try:
            self.weights.free()
        finally:
            self.gradients.clear()


def undeclared(config: HZeroConfig, device: torch.device) -> str:
    """The start line's remark on a grid that is neither declared nor read from devices: each CPU rank counts as a GPU."""
    discovers = config.topology.gpus_per_node is None and config.topology.source == "discover"
    return " (CPU ranks, no topology declared)" if discovers and device.type == "cpu" else ""


def _communicators_of(module: torch.nn.Module, config: HZeroConfig) -> list[Communicator]:
    """The communicators of a model's layers, whose hops its engine counts; warns of codecs of a dimension that nobody sends."""
    used = in_use()
    held = {id(value) for one in module.modules() for value in vars(one).values()}
    for dimension in config.written_dimensions if is_rank_0() else ():
        plans = [communicator.plan for communicator in used if communicator.role == dimension]
        tiers = {hop.tier for plan in plans for hop in plan.gather_hops()}
        why = ""
        if not tiers:
            why = f"nothing in this process sends over such a group; {_SENDERS.get(dimension, _ANY_MODEL)}"
        elif all(config.codecs[dimension][tier].traits.plain for tier in tiers):
            why = f"its groups cross {', '.join(sorted(tiers))} alone"
        if why:
            logger.warning("hzero: codecs.%s has no effect: %s", dimension, why)
    # Not those of another engine's model.
    return [communicator for communicator in used if id(communicator) in held or not communicator.adopted]


_PIPELINE = "a PipelineModule does, with zero_optimization.stage 1 and more than one stage or data-parallel rank"
_ANY_MODEL = "a model does, with hzero.comm.for_dimension(dimension, config, group), before its engine is built"
_SENDERS = {
    "pipeline": _PIPELINE,
    "optimizer": f"{_PIPELINE}, and so does Muon",
    "expert": f"AutoEP does (expert_parallel.enabled), or {_ANY_MODEL}",
    "tensor": f"AutoTP does (tensor_parallel.autotp_size), or {_ANY_MODEL}",
}
