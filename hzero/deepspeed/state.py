"""State that hzero keeps for one engine."""

from __future__ import annotations

import hashlib
import logging
import sys
import threading
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.comm import comm

from hzero.codecs import backends
from hzero.codecs.formats import CodecName
from hzero.comm import (
    Collectives,
    Communicator,
    ErrorFeedback,
    Lanes,
    Transport,
    WireLog,
    in_use,
    limit_waits,
    most_failures,
    shared_lanes,
)
from hzero.comm.process_groups import world_timeout
from hzero.comm.wirelog import HopTimer
from hzero.config import ROLES, CollectiveOrder, Dimension, HZeroConfig, Tier, TransportName
from hzero.deepspeed import autotp
from hzero.deepspeed.parameters import Parameters, ZeroParameter, layers_of
from hzero.deepspeed.partition import Partition, ranks_of
from hzero.deepspeed.refusals import check_types
from hzero.engine.gradients import Gradients
from hzero.engine.guard import Audit, GradientOf, Guard
from hzero.engine.parameter import routes_of
from hzero.plan.shards import ShardPlan
from hzero.validation import ConfigError, is_rank_0

logger = logging.getLogger("hzero")
#: DeepSpeed's defaults of ``stage3_prefetch_bucket_size`` and ``stage3_max_live_parameters``.
BUCKET_NUMEL, LIVE_NUMEL = 50_000_000, 10**9


class EngineState:
    """Wire log, lanes and communicators of one engine, whether it shards a model or has pipelines.

    Attributes:
        config: The block, preset applied.
        wire_log: Bytes and time of every hop that has ended, those of `hzero.comm.for_dimension` too; see `settle`.
        logged_hops: What DeepSpeed's ``comms_logger`` gets of them, at the end of each step and in `settle`.

    Args:
        config: The block.
        module: The engine's model, which holds the communicators of its layers.
        own: Communicators of the engine itself.
    """

    def __init__(self, config: HZeroConfig, module: torch.nn.Module, own: Sequence[Communicator] = ()) -> None:
        self.config, self.wire_log = config, WireLog()
        self.logged_hops = LoggedHops(self.wire_log)
        self._lanes = stage_lanes(config.transport, config.order)
        self._communicators = WeakSet(adopt(config, module, self.wire_log))  # as long as the model holds them
        for communicator in own:
            communicator.wire_log = self.wire_log
            self._communicators.add(communicator)

    def _announce(self, text: str) -> None:
        """Says on one line, whatever the level of logs, that and how the block is in effect."""
        backend = backends.choice("cpu" if get_accelerator().device_name() == "cpu" else "cuda").name
        transport = "mpi" if self.config.transport == "mpi" else dist.get_backend()
        print(f"hzero: {text}; transport {transport}; codecs {backend}", file=sys.stderr, flush=True)

    def settle(self) -> None:
        """Waits for all hops under way, so that `wire_log` counts them and their checksums are compared. Collective."""
        self._lanes.drain()
        self.verify()
        self.logged_hops.flush()

    def verify(self) -> None:
        """On a device: waits for all hops so far, those of dimensions too. Raises `HopError` for a checksum or a lost block."""
        for communicator in self._communicators:
            communicator.verify()

    @property
    def waited_s(self) -> float:
        """Seconds in which this rank has waited for other ranks' part of hops.

        On a CPU those in which the host was blocked. On a device those that hops took, in which their kernels wait, of
        all lanes together and of those that have ended.
        """
        return self._lanes.waited_s if self._lanes.streams is None else self.wire_log.seconds()


class StageState(EngineState):
    """Plan, weights and gradients of one engine.

    Attributes:
        partition: The ranks that it shards over.
        plan: The shard plan of this rank, in the numbers of the partition.
        weights: Resident payloads and gathers.
        gradients: Reductions and accumulators.
        guard: Ends a training that diverges.

    Args:
        module: The model, its parameters partitioned by DeepSpeed.
        config: The block.
        bucket_numel: Max elements of the parameters that share one message of the refresh; also of the boundary, until
            the optimizer sets its own.
        live_numel: Max elements of a layer that is gathered as a whole, beside the block's own limit.
        group: The ranks over which DeepSpeed partitions; None is the world.

    Raises:
        ConfigError: The topology does not fit the ranks, or a parameter is partitioned over others.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        config: HZeroConfig,
        bucket_numel: int = BUCKET_NUMEL,
        group: Any = None,
        live_numel: int = LIVE_NUMEL,
    ) -> None:
        self.partition = Partition.of(group, config.topology)
        _check_parameters(module, group)
        self._module = module
        self.plan = ShardPlan.from_config(config, self.partition.grid, self.partition.rank)
        routes, codes = routes_of(module, self.plan)
        check_types(module, routes)
        self._autotp = autotp.take_over(module, config, self.partition.world)
        super().__init__(config, module)
        self._feedback = ErrorFeedback() if config.error_feedback else None
        limit_waits()
        failures = most_failures(self._lanes.failures, config.transport, group, ranks_of(group), world_timeout())
        transport = Transport(self.plan, ranks=self.partition.ranks, failures=failures, streams=self._lanes.streams)
        self._lanes.mend(transport.lanes)
        collectives = Collectives(self.plan, transport, self.wire_log, self._feedback, self._lanes)
        self._collectives = collectives
        # Weights that are whole on every device need no gather.
        self._layers = [] if self.plan.decoded else layers_of(module, min(self.plan.unit_numel, live_numel))
        self.weights = Parameters(module, collectives, routes, codes, bucket_numel, self._layers)
        if config.exact_evaluation:
            self.weights.follow_mode()
        self.gradients = Gradients(collectives, bucket_numel, len(set(routes.values())))
        device, resident = torch.device(get_accelerator().current_device_name()), self.weights.resident
        self.guard = Guard(resident, config.guard.discarded_steps, device)
        if is_rank_0():
            grid, _, sharding = str(self.plan).partition("; ")
            as_bytes = f"; parameters that hold codes, sent as bytes: {len(codes):,}" if codes else ""
            self._announce(
                f"{config.preset} on {grid}{undeclared(config)}; {sharding}{self.partition}{self._gathers()}{as_bytes}"
            )
            for adaptation in self.plan.adaptations:
                logger.warning("hzero: %s", adaptation)
            for note in self.plan.notes:
                logger.info("hzero: %s", note)
        self._steps = 0
        self._audit, self._audit_due = Audit(resident, collectives, device), True

    def _gathers(self) -> str:
        """How forward gathers weights, for the start line."""
        if self.plan.decoded or not self.plan.gather_hops():
            return ""
        layers = Counter(type(layer).__name__ for layer in self._layers)
        named = ", ".join(f"{name} x {count}" for name, count in layers.items())
        return f"; gathers by layer ({named})" if named else "; gathers by module"

    def replaced(self) -> None:
        """Forgets everything derived from the primary shards, which have been replaced, as by a checkpoint."""
        self.weights.mark_stale()
        self.gradients.clear()
        self._audit_due = True
        if self._feedback is not None:
            self._feedback.clear()

    # ---- what a checkpoint holds beside stock's state, and in the same files -----------------------------------------

    def state_dict(self) -> dict[str, Any] | None:
        """Residuals of error feedback, and the numbers from which seeds of stochastic rounding are made.

        A run that resumes with the same plan then rounds gradients as one that was never interrupted. Weights that are rounded
        stochastically are rounded anew where a load lays them into other messages than a step does.

        Returns:
            Of this rank, in plain types and tensors; None where there is nothing to save, so the files stay stock.
        """
        if not self._by_chance() and not self.config.save_residuals:
            return None
        names = self._names()
        residuals: dict[str, dict[str, torch.Tensor]] = {}
        scales: dict[str, dict[str, float]] = {}
        if self._feedback is not None and self.config.save_residuals:
            for tier, kept in self._feedback.saved().items():
                residuals[tier] = {names[key]: residual for key, (residual, _) in kept.items()}
                scales[tier] = {names[key]: scale for key, (_, scale) in kept.items()}
        seeds = {"weights": self.weights.resident.version, "gradients": self.gradients.reductions}
        return {"plan": self._identity(), "seeds": seeds, "residuals": residuals, "scales": scales}

    def load_state_dict(self, found: Mapping[str, Any] | None) -> None:
        """Goes on from what a checkpoint holds, after everything else has been replaced.

        Residuals of another plan are dropped with a warning; they start at zero.

        Args:
            found: What `state_dict` has given; None where the checkpoint has nothing, as one of stock.
        """
        kept = found["residuals"] if found is not None else {}
        same = found is not None and found["plan"] == self._identity()
        if self._feedback is not None and is_rank_0() and not (same and kept):
            why = "was written with another plan or on other ranks" if kept else "has none"
            logger.warning("hzero: residuals of error feedback start at zero: the checkpoint %s", why)
        if found is None or not same:
            return
        self.weights.resident.version, self.gradients.reductions = (
            found["seeds"]["weights"],
            found["seeds"]["gradients"],
        )
        if self._feedback is None:
            return
        keys = {name: key for key, name in self._names().items()}
        device = get_accelerator().current_device_name()
        for tier, residuals in kept.items():
            for name, residual in residuals.items():
                if name in keys:
                    self._feedback.restore(tier, keys[name], residual.to(device), found["scales"][tier][name])

    def _by_chance(self) -> bool:
        """Whether anything is rounded stochastically."""
        plan = self.plan
        codecs = [plan.codecs[role][tier] for role in ROLES for tier in plan.codecs[role].written]
        codecs += [codec for _, codec in plan.exceptions]
        return plan.accumulator_bytes < 4 or any(codec.rounding == "stochastic" for codec in codecs)

    def _identity(self) -> str:
        """What residuals depend on: which rows a rank holds, and what is lost on the way to it."""
        plan = self.plan
        hops = (plan.gather_hops(), plan.micro_hops(), plan.boundary_hops())
        told = (plan.grid, plan.weights_scope, plan.gradients_scope, hops, plan.error_feedback, plan.exceptions)
        return hashlib.sha256(repr(told).encode()).hexdigest()

    def _names(self) -> dict[int, str]:
        return {param.ds_id: name for name, param in self._module.named_parameters()}  # type: ignore[attr-defined]

    # ---- hops, audits and traces --------------------------------------------------------------------------------------

    def place(self) -> None:
        """Where DeepSpeed or a script may send something next: gives hops their places before it, see `Lanes.place`."""
        self._lanes.place()

    def fall_back(self) -> bool:
        """Whether a step has to be discarded since a codec could not hold weights, which are NaN then. Collective.

        From now on they travel without that codec.
        """
        if not self.weights.resident.fallible:
            return False
        what = self._collectives.lost()
        lost = torch.tensor(int(what is not None), dtype=torch.uint8, device=get_accelerator().current_device_name())
        dist.all_reduce(lost, dist.ReduceOp.MAX)
        if not int(lost):
            return False
        if is_rank_0():
            logger.warning(
                "hzero: %s; this step is discarded, and weights travel without the codec from now on",
                what or "codec exp could not hold some weights",
            )
        self.weights.fall_back()
        return True

    def verify(self) -> None:
        """As of `EngineState`, and of weights and gradients."""
        self._collectives.verify()
        super().verify()

    @property
    def ratios(self) -> dict[str, float]:
        """Signal-to-noise ratios that the last audit found, in dB; see `Audit`."""
        return self._audit.ratios

    def before_step(self, params: Iterable[ZeroParameter], gradient_of: GradientOf) -> None:
        """Counts an optimizer step that is about to begin, and audits if one is due. Collective.

        Args:
            params: Those that the optimizer steps.
            gradient_of: Gives this rank's shard of the gradient of one of them.

        Raises:
            StaleWeightsError: Resident weights are wrong.
        """
        self._steps += 1
        every = self.config.guard.every
        if every and (self._audit_due or self._steps % every == 0):
            self._audit.run(self._steps, self.weights.weights_of(params), gradient_of)
            self._audit_due = False

    def memory(self, optimizer: Any = None) -> dict[str, int]:
        """Measured bytes of each state on this rank, without transient buffers.

        Gradient accumulators and error feedback are peaks, since they come and go within a step; the others are current.

        Args:
            optimizer: The engine's optimizer, if it has one.
        """
        return {
            "primary weights": self.weights.primary_bytes(),
            "resident weights": self.weights.resident.resident_bytes(),
            "gradient shard": _bytes([getattr(optimizer, "grad_partitions_flat_buffer", None)]),
            "gradient accumulators": self.gradients.peak_bytes,
            "optimizer": optimizer_bytes(optimizer),
            "error feedback": self._feedback.bytes if self._feedback is not None else 0,
        }

    def destroy(self) -> None:
        """Frees payloads and accumulators, and restores the model to what DeepSpeed made."""
        if self._autotp is not None:
            autotp.give_back(self._module, self._autotp)
            self._autotp = None  # DeepSpeed may hold this object, and nothing is sent over that group any more
        try:
            self.weights.close()
        finally:
            self.gradients.clear()


def stage_lanes(transport: TransportName, order: CollectiveOrder | None = None) -> Lanes:
    """The lanes of this process for hops of a transport on DeepSpeed's accelerator; as `shared_lanes`."""
    accelerator = get_accelerator()
    # A synchronised device runs everything in order, as CPUs do.
    return shared_lanes(None if accelerator.is_synchronized_device() else accelerator, transport, order)


def undeclared(config: HZeroConfig) -> str:
    """The start line's remark on a grid that is neither declared nor read from devices: each CPU rank counts as a GPU."""
    source = getattr(config.topology, "source", config.topology)  # a string is a source
    on_cpu = get_accelerator().device_name() == "cpu" and source == "discover"
    return " (CPU ranks, no topology declared)" if on_cpu else ""


def adopt(config: HZeroConfig, module: torch.nn.Module, wire_log: WireLog) -> list[Communicator]:
    """Counts the hops of dimensions in an engine's wire log; warns of codecs of one that nobody sends.

    Args:
        config: The block.
        module: The engine's model, which holds the communicators of its layers.
        wire_log: The engine's.

    Returns:
        The communicators whose hops it counts.
    """
    used = in_use()
    held = {id(value) for one in module.modules() for value in vars(one).values()}
    # Not those of another engine's model.
    adopted = [communicator for communicator in used if id(communicator) in held or not communicator.adopted]
    for communicator in adopted:
        communicator.wire_log = wire_log
    crossed: dict[str | None, set[Tier]] = {}
    for communicator in used:
        crossed.setdefault(communicator.role, set()).update(hop.tier for hop in communicator.plan.gather_hops())
    for dimension in config.written_dimensions if is_rank_0() else ():
        tiers = crossed.get(dimension)
        if not tiers:
            logger.warning(
                "hzero: codecs.%s has no effect: nothing in this process sends over such a group; %s",
                dimension,
                _who_sends(dimension),
            )
        elif all(config.codecs[dimension][tier].traits.plain for tier in tiers):
            logger.warning(
                "hzero: codecs.%s has no effect: its groups cross %s alone", dimension, ", ".join(sorted(tiers))
            )
    return adopted


def _who_sends(dimension: Dimension) -> str:
    if dimension in ("pipeline", "optimizer"):
        return "a PipelineModule does, with zero_optimization.stage 1 and more than one stage or data-parallel rank"
    autotp = "AutoTP does (tensor_parallel.autotp_size), or " if dimension == "tensor" else ""
    return (
        f"{autotp}a model does, with hzero.comm.for_dimension({dimension!r}, config, group), before its engine is built"
    )


def _check_parameters(module: torch.nn.Module, group: Any) -> None:
    """Refuses parameters that are partitioned over other ranks than the engine's.

    Raises:
        ConfigError: As under expert parallelism, or where ``deepspeed.zero.Init`` knew nothing of an mpu.
    """
    ranks = ranks_of(group)
    for name, param in module.named_parameters():
        own = getattr(param, "ds_process_group", None)
        if own is not group and (found := ranks_of(own)) != ranks:
            raise ConfigError(
                f"parameter {name}: partitioned over {len(found)} ranks, and the engine over {len(ranks)}"
                f"{', others' if len(found) == len(ranks) else ''}; hzero needs one partition for all: no expert parallelism, "
                "and under deepspeed.zero.Init data_parallel_group=mpu.get_data_parallel_group()"
            )


def _bytes(tensors: list[Any]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))


def optimizer_bytes(optimizer: Any) -> int:
    """Bytes of a ZeRO optimizer on this rank: float32 masters and the states of the wrapped optimizer."""
    names = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups")  # of stage 3, of stage 1
    masters = [master for name in names for master in getattr(optimizer, name, ())]
    inner = getattr(optimizer, "optimizer", None)
    states = [value for state in getattr(inner, "state", {}).values() for value in state.values()]
    return _bytes(masters) + _bytes(states)


# ---- DeepSpeed's ``comms_logger`` ---------------------------------------------------------------------------------------


class LoggedHops:
    """Counts and times of hops that have ended, by name and size, until ``comms_logger`` gets them.

    The logger gets the same rows on all ranks: its summary with ``show_straggler`` makes one all-reduce for each of them.

    Args:
        wire_log: Counts the hops.
    """

    def __init__(self, wire_log: WireLog) -> None:
        self._running: deque[tuple[tuple[str, int], HopTimer]] = deque()
        self._counts: Counter[tuple[str, int]] = Counter()
        self._seconds: dict[tuple[str, int], float] = {}
        self._lock = threading.Lock()  # hops may end on another thread
        wire_log.on_hop.append(self._add)

    @staticmethod
    def wanted() -> bool:
        """Whether the user has turned the logger on, for all operations or for those named ``hzero``."""
        logger = comm.comms_logger
        return bool(logger.enabled and (logger.prof_all or "hzero" in logger.prof_ops))

    def _add(self, role: str, tier: Tier, codec: CodecName, wire_bytes: int, timer: HopTimer) -> None:
        if wire_bytes and self.wanted():
            with self._lock:
                self._running.append(((f"hzero {role}, {tier}, {codec}", wire_bytes), timer))
                while self._running and self._running[0][1].ready():
                    self._count()

    def _count(self) -> None:
        row, timer = self._running.popleft()
        self._counts[row] += 1
        self._seconds[row] = self._seconds.get(row, 0.0) + timer.seconds()

    def flush(self) -> None:
        """Gives all hops to the logger, once they have ended. Collective over the world where the logger is on.

        Bytes may differ between ranks: where a message does not fit codec ``exp``, or in codec ``mpc``. The hops of such a name
        are one entry on every rank, with the bytes of the rank that has received most.
        """
        if not self.wanted():
            return
        with self._lock:
            while self._running:
                self._count()
            counts, self._counts = self._counts, Counter()
            seconds, self._seconds = self._seconds, {}
        every = [counts] * dist.get_world_size()
        dist.all_gather_object(every, counts)
        for name in sorted({name for each in every for name, _ in each}):
            first, *others = [{size: count for (own, size), count in each.items() if own == name} for each in every]
            if all(sizes == first for sizes in others):
                for size, count in sorted(first.items()):
                    for _ in range(count):
                        _log(name, seconds[name, size] / count, size)
            else:
                most = max(sum(size * count for size, count in sizes.items()) for sizes in (first, *others))
                _log(name, sum(spent for row, spent in seconds.items() if row[0] == name), most)


def _log(name: str, seconds: float, wire_bytes: int) -> None:
    # The logger computes the bandwidth of `recv` from these bytes, without a factor for the ranks of the world.
    comm.comms_logger.append("recv", name, max(seconds * 1e3, 1e-6), wire_bytes)
