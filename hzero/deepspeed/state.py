"""State that hzero keeps for one DeepSpeed engine."""

from __future__ import annotations

import threading
from collections import Counter, deque
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.comm import comm

from hzero.codecs.formats import CodecName
from hzero.comm import WireLog
from hzero.comm.wirelog import HopTimer
from hzero.config import HZeroConfig, Tier
from hzero.deepspeed import autotp
from hzero.deepspeed.parameters import Parameters, layers_of, managed_parameters
from hzero.deepspeed.refusals import check_types
from hzero.engine.engine import Engine, Partition, ranks_of
from hzero.engine.parameter import routes_of
from hzero.plan.shards import ShardPlan
from hzero.validation import ConfigError, is_rank_0

#: DeepSpeed's defaults of ``stage3_prefetch_bucket_size`` and ``stage3_max_live_parameters``.
BUCKET_NUMEL, LIVE_NUMEL = 50_000_000, 10**9


def async_accelerator() -> Any:
    """DeepSpeed's accelerator; None where it is synchronised, which runs everything in order, as CPUs do."""
    accelerator = get_accelerator()
    return None if accelerator.is_synchronized_device() else accelerator


def current_device() -> torch.device:
    """The device of this rank."""
    return torch.device(get_accelerator().current_device_name())


class StageState(Engine):
    """The engine of one DeepSpeed engine with ZeRO-3: `Engine`, and what is DeepSpeed's.

    Attributes:
        weights: DeepSpeed's parameters, which gather from resident weights.
        logged_hops: What DeepSpeed's ``comms_logger`` gets of hops, at the end of each step and in `settle`.

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

    ADVICE = (
        "change weights inside deepspeed.zero.GatheredParameters with a modifier_rank, or call "
        "hzero.state(engine).weights.mark_stale() on all ranks afterwards"
    )

    def __init__(
        self,
        module: torch.nn.Module,
        config: HZeroConfig,
        bucket_numel: int = BUCKET_NUMEL,
        group: Any = None,
        live_numel: int = LIVE_NUMEL,
    ) -> None:
        partition = Partition.of(group, config.topology)
        _check_parameters(module, group)
        self._module = module
        plan = ShardPlan.from_config(config, partition.grid, partition.rank)
        routes, codes = routes_of(module, plan)
        check_types(module, routes)
        self._autotp = autotp.take_over(module, config, partition.world)
        managed = managed_parameters(module, routes, codes)
        weights = [one.weight for one in managed.values()]
        super().__init__(config, plan, partition, module, weights, bucket_numel, current_device(), async_accelerator())
        # Weights that are whole on every device need no gather.
        layers = [] if plan.decoded else layers_of(module, min(plan.unit_numel, live_numel))
        self.weights = Parameters(module, managed, self.resident, layers)
        if config.exact_evaluation:
            self.weights.follow_mode()
        self.logged_hops = LoggedHops(self.wire_log)
        if is_rank_0():
            how = ""  # forward gathers weights
            if plan.gather_hops() and not plan.decoded:
                kinds = Counter(type(layer).__name__ for layer in layers)
                named = ", ".join(f"{name} x {count}" for name, count in kinds.items())
                how = f"; gathers by layer ({named})" if named else "; gathers by module"
            as_bytes = f"; parameters that hold codes, sent as bytes: {len(codes):,}" if codes else ""
            self.announce(f"{self.described()}{how}{as_bytes}")
            self.warn_of_plan()

    def settle(self) -> None:
        """As of `Traffic`; ``comms_logger`` gets the hops."""
        super().settle()
        self.logged_hops.flush()

    def lost(self) -> bool:
        """As of `Engine`."""
        lost = super().lost()
        if lost:
            self.weights.put_away_all()
        return lost

    def replaced(self) -> None:
        """As of `Engine`."""
        self.weights.forget()
        super().replaced()

    def memory(self, optimizer: Any = None) -> dict[str, int]:
        """Measured bytes of each state on this rank, without transient buffers; see `Engine.memory`.

        Args:
            optimizer: The engine's optimizer, if it has one.
        """
        return {
            "primary weights": self.weights.primary_bytes(),
            "gradient shard": _bytes([getattr(optimizer, "grad_partitions_flat_buffer", None)]),
            "optimizer": optimizer_bytes(optimizer),
            **super().memory(),
        }

    def destroy(self) -> None:
        """Frees payloads and accumulators, and restores the model to what DeepSpeed made."""
        if self._autotp is not None:
            autotp.give_back(self._module, self._autotp)
            self._autotp = None  # DeepSpeed may hold this object, and nothing is sent over that group any more
        try:
            self.close()
        finally:
            self.weights.close()


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
