"""Step: the tasks of one optimizer step of a scheme, simulated.

One device stands for all. Its lanes are compute and, for every communicator, a stream: the stage has one for each role and
tier, other engines one for each group. Which collectives there are, and in what order, is read off `hzero.sharding.sequence`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hzero.config import Tier
from hzero.model.collectives import Phase, kernel, transfer
from hzero.model.compute import Bucket, compute_phase, layers_together, model_buckets, model_flops, optimizer_phase
from hzero.model.footprint import footprint
from hzero.model.job import Job
from hzero.model.profile import Profile
from hzero.model.simulate import COMPUTE, Task, Timeline, simulate
from hzero.sharding.memory import IN_FLIGHT
from hzero.sharding.plan import ShardPlan
from hzero.sharding.records import chunk_numel
from hzero.sharding.sequence import Chain, Scheme, scheme_chains, stage_chains
from hzero.sharding.traffic import CHECKSUM_BYTES
from hzero.topology import Grid
from hzero.validation import ConfigError

#: Micro-steps and layers that are simulated; more are extrapolated from the last ones, since they are all alike.
MICRO_STEPS, LAYERS = 3, (2, 4)
#: Bytes of an element that Adam reads and writes: gradient, float32 master and two moments, 16-bit weight.
ADAM_BYTES = 4 + 2 * 12 + 2


@dataclass(frozen=True)
class Prediction:
    """A predicted step.

    Attributes:
        step_s: Seconds of a step.
        tflops: Model operations per second and device in 1e12, without what is computed again.
        tokens_per_s: Of all devices.
        compute_s: Seconds of compute and optimizer if nothing waited.
        exposed: Seconds in which compute waits for communication, by tier.
        latency_s: Of these, seconds of latency.
        busy: Share of the step for which each resource is full.
        memory_bytes: Of a device.
        timeline: What was simulated, where every layer and micro-step was.
    """

    step_s: float
    tflops: float
    tokens_per_s: float
    compute_s: float
    exposed: dict[str, float]
    latency_s: float
    busy: dict[str, float]
    memory_bytes: int
    timeline: Timeline | None = field(repr=False)

    @property
    def full(self) -> str:
        """The resource that is full for the largest share of the step."""
        return max(self.busy, key=lambda name: self.busy[name], default="compute")


def predict(scheme: Scheme | ShardPlan, job: Job, grid: Grid, profile: Profile, *, exact: bool = False) -> Prediction:
    """Predicts one step.

    Args:
        scheme: The stage's shard plan, or another engine.
        job: What is trained.
        grid: The machine.
        profile: Its constants.
        exact: Whether every layer and micro-step is simulated, and the timeline kept.

    Raises:
        ConfigError: The grid is not that of the profile's machine.
    """
    if (grid.gpus_per_node, grid.gcds_per_gpu) != (profile.gpus_per_node, profile.gcds_per_gpu):
        raise ConfigError(
            f"profile {profile.name}: found a node of {grid.gpus_per_node} x {grid.gcds_per_gpu} devices, expected "
            f"{profile.gpus_per_node} x {profile.gcds_per_gpu}"
        )
    if grid.gpus_per_hive > 1 or grid.clusters > 1:
        missing = "gpus_per_hive" if grid.gpus_per_hive > 1 else "clusters"
        raise ConfigError(f"profile {profile.name}: has no rates of links that topology.{missing} declares")
    if grid.nodes > profile.nodes:
        raise ConfigError(f"nodes: found {grid.nodes:,}; {profile.name} has {profile.nodes:,}")
    if isinstance(scheme, Scheme) and scheme.engine == "fsdp":  # gathers and reduces a layer at once
        job = replace(job, bucket_numel=sum(job.model.layer))
    buckets = model_buckets(job.model, job.bucket_numel)
    timeline = None
    if exact:
        timeline = _simulated(scheme, job, grid, profile)
        found = _figures(timeline)
    else:
        found = _many_micro_steps(scheme, job, grid, profile)
    seconds = found["seconds"]
    tokens = job.tokens * job.accumulation
    return Prediction(
        step_s=seconds,
        tflops=model_flops(buckets, tokens) / seconds / 1e12,
        tokens_per_s=tokens * grid.world_size / seconds,
        compute_s=found["compute"],
        exposed={name[8:]: time for name, time in found.items() if name.startswith("exposed ")},
        latency_s=found["latency"],
        busy={name[5:]: time / seconds for name, time in found.items() if name.startswith("busy ")},
        memory_bytes=footprint(scheme, grid, job.model.numels, job, channels=profile.channels).bytes,
        timeline=timeline,
    )


def _many_micro_steps(scheme: Scheme | ShardPlan, job: Job, grid: Grid, profile: Profile) -> dict[str, float]:
    """Figures of a step. Those of the middle micro-steps are all alike: each adds what the third adds to two."""
    if job.accumulation <= MICRO_STEPS:
        return _many_layers(scheme, job, grid, profile)
    longer, shorter = (
        _many_layers(scheme, replace(job, accumulation=count), grid, profile)
        for count in (MICRO_STEPS, MICRO_STEPS - 1)
    )
    return _extended(shorter, longer, job.accumulation - MICRO_STEPS)


def _many_layers(scheme: Scheme | ShardPlan, job: Job, grid: Grid, profile: Profile) -> dict[str, float]:
    """The same over layers, which are alike too."""
    layers, together = job.model.layers, layers_together(job.model, job.bucket_numel)
    few, more = (_kept_layers(job) + count * together for count in LAYERS)
    if layers <= more:
        return _figures(_simulated(scheme, job, grid, profile))
    shorter, longer = (
        _figures(_simulated(scheme, replace(job, model=replace(job.model, layers=count)), grid, profile))
        for count in (few, more)
    )
    return _extended(shorter, longer, (layers - more) / (more - few))


def _kept_layers(job: Job) -> int:
    """Layers at the end of forward that backward finds still gathered; they are not like the others."""
    behind = sum(job.model.after)
    return next((n for n in range(job.model.layers) if 2 * (behind + n * sum(job.model.layer)) >= job.reuse_numel), 0)


def _extended(shorter: dict[str, float], longer: dict[str, float], times: float) -> dict[str, float]:
    return {name: max(value + times * (value - shorter.get(name, 0.0)), 0.0) for name, value in longer.items()}


def _simulated(scheme: Scheme | ShardPlan, job: Job, grid: Grid, profile: Profile) -> Timeline:
    buckets = model_buckets(job.model, job.bucket_numel)
    return simulate(_Builder(scheme, job, grid, profile, buckets).tasks())


def _figures(timeline: Timeline) -> dict[str, float]:
    compute = sum(phase.alone_s for task in timeline.tasks if task.lane == COMPUTE for phase in task.phases)
    return {
        "seconds": timeline.seconds,
        "compute": compute,
        "latency": timeline.latency,
        **{f"exposed {tier}": time for tier, time in timeline.exposed.items() if tier},
        **{f"busy {resource}": time for resource, time in timeline.busy.items()},
    }


class _Builder:
    """Makes the tasks of a step."""

    def __init__(
        self, scheme: Scheme | ShardPlan, job: Job, grid: Grid, profile: Profile, buckets: Sequence[Bucket]
    ) -> None:
        self._stage = scheme if isinstance(scheme, ShardPlan) else None
        self._engine = scheme.engine if isinstance(scheme, Scheme) else "hzero"
        self._job, self._grid, self._profile, self._buckets = job, grid, profile, buckets
        self._chains: dict[tuple[str, int], Chain] = {}
        found = (
            stage_chains(scheme, job.accumulation)
            if isinstance(scheme, ShardPlan)
            else scheme_chains(scheme, grid, job.accumulation)
        )
        for chain in found:
            self._chains[chain.phase, chain.micro] = chain
        waits = self._engine == "fsdp" and not profile.overlap
        self._ahead = 0 if waits or not job.overlap else job.ahead
        beside = profile.overlap or self._engine not in ("fsdp", "deepspeed")
        # DDP waits for no bucket before backward has ended (Reducer::finalize_backward, arXiv 2006.15704, section 4.2).
        most = len(buckets) if self._engine == "ddp" else IN_FLIGHT
        self._in_flight = most if beside and job.overlap else 0
        # Crossings of a reduction before those that wait for the last micro-step.
        self._inside = len(scheme.micro_hops()) if isinstance(scheme, ShardPlan) else 1
        # Buckets that backward finds still gathered, the last always. Those behind one are used twice before it.
        behind = [2 * sum(bucket.numel for bucket in buckets[index + 1 :]) for index in range(len(buckets))]
        keeps = self._engine in ("hzero", "deepspeed")
        self._kept = [keeps and (numel < job.reuse_numel or not numel) for numel in behind]
        self._tasks: list[Task] = []
        self._phases: dict[Any, Sequence[Phase]] = {}
        # The largest of many nodes' times; about sqrt(2 ln n) deviations above their mean.
        late = profile.value("jitter_share") * math.sqrt(2 * math.log(grid.nodes)) if grid.nodes > 1 else 0.0
        self._late = 1 + late

    def tasks(self) -> list[Task]:
        """All tasks, lane by lane in order of submission."""
        job, count = self._job, len(self._buckets)
        refreshed = self._refresh()
        reductions: list[Task] = []
        pending: list[Task] = []  # of each bucket's reduction what backward waits for, in order
        computed: list[Task] = []
        order = [
            (phase, micro, index)
            for micro in range(job.accumulation)
            for phase, indices in (("forward", range(count)), ("backward", range(count - 1, -1, -1)))
            for index in indices
        ]
        gathered: list[list[Task]] = []
        for place, (phase, micro, index) in enumerate(order):
            for other, step, ahead in order[len(gathered) : place + 1 + self._ahead]:
                kept = other == "backward" and self._kept[ahead]
                chain = self._chains.get((other, step))
                needs = [*computed[-1:], *([refreshed[ahead]] if refreshed else [])]
                gathered.append([] if chain is None or kept else self._chain(chain, ahead, needs)[-1:])
            needs = gathered[place]
            if phase == "backward" and len(pending) > self._in_flight:
                needs = [*needs, pending[-1 - self._in_flight]]
            computed.append(self._compute(phase, index, needs))
            if phase == "backward" and (chain := self._chains.get(("reduce", micro))) is not None:
                made = self._chain(chain, index, computed[-1:])
                reductions += made[-1:]
                inside = [one for one in made if not one.details["boundary"] or not self._in_flight]
                pending.append((inside or computed)[-1])
        stepped = self._add(Task(COMPUTE, "optimizer", [self._optimizer()], reductions))
        if (chain := self._chains.get(("after", job.accumulation - 1))) is not None:
            ends = [task for index in range(count) for task in self._chain(chain, index, [stepped])[-1:]]
            self._add(Task(COMPUTE, "gathered", [Phase(0.0)], ends))
        return self._tasks

    def _refresh(self) -> list[Task]:
        """The refresh of every bucket; several share a message where the block asks for long ones."""
        chain = self._chains.get(("refresh", 0))
        if chain is None or self._stage is None:
            return []
        limit = self._stage.refresh_numel(self._job.bucket_numel, self._job.itemsize)
        groups: list[list[int]] = [[]]
        for index, bucket in enumerate(self._buckets):
            if groups[-1] and sum(self._buckets[i].numel for i in groups[-1]) + bucket.numel > limit:
                groups.append([])
            groups[-1].append(index)
        ends: list[Task] = []
        for group in groups:
            numels = tuple(numel for index in group for numel in self._buckets[index].numels)
            last = self._chain(chain, Bucket("+".join(self._buckets[i].name for i in group), numels, 0.0), [])[-1]
            ends += [last] * len(group)
        return ends if self._job.overlap else ends[-1:] * len(ends)

    def _add(self, task: Task) -> Task:
        self._tasks.append(task)
        return task

    def _compute(self, phase: str, index: int, needs: list[Task]) -> Task:
        bucket, job = self._buckets[index], self._job
        factor = 1 if phase == "forward" else 3 if job.checkpointing else 2
        key = (COMPUTE, bucket.name, factor)
        if key not in self._phases:
            flops = bucket.flops * job.tokens * factor * self._late
            self._phases[key] = [compute_phase(self._profile, flops, job.tokens, self._grid.world_size)]
        return self._add(Task(COMPUTE, f"{phase} {bucket.name}", self._phases[key], needs))

    def _optimizer(self) -> Phase:
        total = sum(bucket.numel for bucket in self._buckets)
        grid = self._grid
        ranks = 1 if self._engine == "ddp" else grid.world_size
        if self._engine == "fsdp":
            ranks = self._chains["forward", 0].crossings[0].ranks
        return optimizer_phase(self._profile, total // ranks, ADAM_BYTES, grid.world_size)

    def _chain(self, chain: Chain, where: int | Bucket, needs: Sequence[Task]) -> list[Task]:
        bucket = where if isinstance(where, Bucket) else self._buckets[where]
        made: list[Task] = []
        for number, crossing in enumerate(chain.crossings):
            key = (chain.phase, chain.crossings, bucket.name, number)
            if key not in self._phases:
                self._phases[key] = self._hop(chain, number, bucket)
            tier: Tier = crossing.tiers[-1] if crossing.tiers else "gcd"
            lane = f"{crossing.role} {tier}" if self._stage is not None else "+".join(crossing.tiers)
            details: dict[str, Any] = {"tier": tier, "codec": crossing.codec.codec}
            if chain.phase == "reduce":
                details["boundary"] = number >= self._inside
            after = made[-1:] or list(needs)
            made.append(self._add(Task(lane, f"{chain.phase} {bucket.name}", self._phases[key], after, details)))
        if not made and needs:
            return list(needs)[-1:]
        return made

    def _hop(self, chain: Chain, number: int, bucket: Bucket) -> list[Phase]:
        """One collective between the kernels that read and write its messages.

        Encoding reads whole elements and writes the payload; a reduction reads the payloads of all peers and writes their
        sum; the last hop of a gather writes whole elements. Codec ``none`` copies.
        """
        crossing, last = chain.crossings[number], number == len(chain.crossings) - 1
        job, world = self._job, self._grid.world_size
        chunks = [chunk_numel(numel, world) for numel in bucket.numels]
        message = crossing.message_bytes(chunks, job.itemsize)
        array = crossing.array_bytes(chunks, job.itemsize)
        phases = []
        if self._profile.cores:
            host = self._profile.value("host_us") / 1e6 * world / self._profile.cores
            phases.append(Phase(0.0, {"cores": host}))
        encodes = number == 0 and (crossing.kind != "all_gather" or chain.phase == "refresh" or self._stage is None)
        if encodes and (crossing.role == "gradients" or crossing.codec.codec != "none"):
            elements = crossing.rows * sum(chunks) * job.itemsize
            phases.append(kernel(self._profile, elements + message, world))
        algorithm = self._stage.node_all_gather.of(message) if self._stage is not None else "library"
        phases.append(
            transfer(
                crossing,
                array,
                self._grid,
                self._profile,
                pairwise=self._stage is not None,
                algorithm=algorithm,
            )
        )
        if self._stage is not None and self._stage.checksum:
            phases.append(transfer(crossing, CHECKSUM_BYTES * crossing.ranks, self._grid, self._profile))
        if crossing.kind == "all_gather" and last:
            whole = array if chain.phase == "refresh" else bucket.numel * job.itemsize
            phases.append(kernel(self._profile, array + whole, world))
        elif crossing.kind == "all_to_all":
            phases.append(kernel(self._profile, array + 4 * array / crossing.ranks, world))
        return phases
