"""Step: the tasks of one optimizer step under a scheme, and their discrete-event simulation.

One device represents all devices. Its lanes are compute and one stream per communicator: the stage has a communicator for each
tier, other engines for each group. With the order ``strict``, all collectives of the stage share a lane. A lane runs its tasks
in order, one at a time, and running tasks share resources. The programs come from `hzero.program.collectives`.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from hzero.codecs.formats import CHECKSUM_BYTES, chunk_numel
from hzero.errors import ConfigError
from hzero.program.collectives import Scheme, chains_of, exchange_program
from hzero.program.matrices import Round
from hzero.program.program import IN_FLIGHT, Cross, Program
from hzero.program.shards import ShardPlan
from hzero.tools.plan.machine import Machine, Part, Phase
from hzero.tools.plan.memory import footprint
from hzero.tools.plan.scenario import Bucket, Job, buckets_of

#: Numbers of micro-batches and layers that are simulated. Larger numbers are extrapolated, since middle ones are equal.
MICRO_STEPS, LAYERS = 3, (3, 6)
#: Consecutive work of a bucket on a lane: lane, outermost tier, whether it waits for the last micro-batch, phases.
Timed: TypeAlias = tuple[str, str, bool, list[Phase]]
#: Newton-Schulz iterations of Muon.
_ITERATIONS = 5
#: Error that 9 of 10 ratios of two published runs keep which differ in the number of devices only (`python -m benchmarks.model`).
REST = 0.05
#: Bytes that forward moves for each logit: 16 and 32 bits, and the logarithm of the softmax.
LOGIT_BYTES = 12
#: The lane of compute.
COMPUTE = "compute"


@dataclass(frozen=True)
class Simulated:
    """Cache of predictions of one scheme that differ only in the accumulation.

    Attributes:
        figures: Figures of whole steps, by accumulation.
        hops: Work of a bucket on lanes, by number of the plan, phase, whether micro-batches precede and follow, and the bucket's
            name.
        computes: Compute phases of a bucket, by phase and name.
    """

    figures: dict[int, dict[str, float]] = field(default_factory=dict)
    hops: dict[tuple[int, str, bool, bool, str], list[Timed]] = field(default_factory=dict)
    computes: dict[str, list[Phase]] = field(default_factory=dict)


@dataclass(frozen=True)
class Prediction:
    """A predicted step.

    Attributes:
        step_s: Seconds of a step.
        tflops: Model operations per second and device, in 1e12, without recomputation.
        exposed_s: Seconds in which compute waits for communication, by tier.
        busy: Share of the step in which each resource is busy.
        memory_bytes: Memory of a device.
        spread: Factor of the step with collectives slower by the profile's error.
    """

    step_s: float
    tflops: float
    exposed_s: dict[str, float]
    busy: dict[str, float]
    memory_bytes: int
    spread: float = 1.0

    def ranging_to(self, slow: Prediction) -> Prediction:
        """This step, with the spread that the same step with slower collectives shows."""
        return replace(self, spread=max(slow.step_s / self.step_s, 1.0))

    def ratio(self, other: Prediction) -> tuple[float, float, float]:
        """Ratio of another scheme's step to this one, and its interval.

        The error of compute is common to both, and cancels up to `REST`.
        """
        found, far = other.step_s / self.step_s, self.spread * other.spread * (1 + REST)
        return found, found / far, found * far

    def equal(self, other: Prediction) -> bool:
        """Whether the interval of the ratio contains 1."""
        _, low, high = self.ratio(other)
        return low <= 1 <= high


def require_layers(job: Job) -> None:
    """Raises `ConfigError` if the model's layers differ."""
    if job.model.layer is None:
        raise ConfigError(f"model: the layers of {job.name} differ; expected equal layers for a prediction")


def predict(scheme: Scheme | ShardPlan, job: Job, machine: Machine, known: Simulated | None = None) -> Prediction:
    """Predicts one step of the stage's shard plan, or of another engine.

    Args:
        scheme: The shard plan, or the other engine.
        job: The job.
        machine: The machine.
        known: Cache for further predictions that differ only in the accumulation.

    Raises:
        ConfigError: The model's layers differ.
    """
    require_layers(job)
    job = _as_cut(scheme, job)
    found = _figures(scheme, job, machine, known or Simulated())
    seconds = found["seconds"]
    # Forward and backward, without recomputation.
    flops = 3.0 * job.tokens * job.accumulation * sum(bucket.flops for bucket in buckets_of(job))
    return Prediction(
        step_s=seconds,
        tflops=flops / seconds / 1e12,
        exposed_s={name[8:]: time for name, time in found.items() if name.startswith("exposed ")},
        busy={name[5:]: time / seconds for name, time in found.items() if name.startswith("busy ")},
        memory_bytes=footprint(scheme, machine.grid, job).bytes,
    )


def predict_range(scheme: Scheme | ShardPlan, job: Job, machine: Machine) -> Prediction:
    """`predict`, with the spread. The grid is the machine's, so there is no tensor parallelism."""
    slow = predict(scheme, job, Machine(machine.grid, machine.profile.slower))
    return predict(scheme, job, machine).ranging_to(slow)


def compute_s(job: Job, machine: Machine) -> float:
    """Seconds of a step's compute at the profile's rate: a lower bound of the step."""
    flops = sum(bucket.flops * (1 + bucket.backward(job.checkpointing)) for bucket in buckets_of(job))
    return job.accumulation * job.tokens * flops / machine.rate(job.tokens // job.tensor)


def tasks_of(
    scheme: Scheme | ShardPlan, job: Job, machine: Machine, layers: int | None = None, known: Simulated | None = None
) -> list[Task]:
    """The tasks of a step in the order of submission. ``layers`` limits the number of layers.

    ``known``: see `predict`.
    """
    job = _as_cut(scheme, job)
    return _Builder(scheme, job, machine, layers, known or Simulated()).tasks()


def _plans_of(scheme: Scheme | ShardPlan, job: Job) -> tuple[list[Any], list[int]]:
    """The different plans of a job's parameters, and the number of each parameter's plan."""
    places = range(len(job.model.numels))
    parts = scheme.parts(places, job.model.names) if isinstance(scheme, ShardPlan) else [(scheme, places)]
    numbers = {place: number for number, (_, of_plan) in enumerate(parts) for place in of_plan}
    return [plan for plan, _ in parts], [numbers[place] for place in places]


def _as_cut(scheme: Scheme | ShardPlan, job: Job) -> Job:
    """The job with the buckets of a scheme: FSDP gathers and reduces one layer at a time, and stock ZeRO-3 keeps parameters."""
    if isinstance(scheme, Scheme) and (scheme.engine, scheme.stage) == ("deepspeed", 3):
        return job
    fsdp = isinstance(scheme, Scheme) and scheme.engine == "fsdp"
    return replace(job, kept=0, prefetch=job.layer if fsdp else job.prefetch)


def _figures(scheme: Scheme | ShardPlan, job: Job, machine: Machine, known: Simulated) -> dict[str, float]:
    """Seconds of a step, of waits and of busy resources. Extrapolates, since middle micro-batches and layers are equal."""
    if job.accumulation > MICRO_STEPS:
        counts = (MICRO_STEPS - 1, MICRO_STEPS)
        shorter, longer = (_figures(scheme, replace(job, accumulation=count), machine, known) for count in counts)
        return _extended(shorter, longer, job.accumulation - MICRO_STEPS)
    # The layers that backward finds still gathered are an exception, and are simulated.
    layers, behind = job.model.layers, sum(job.model.after)
    kept = next((n for n in range(layers) if 2 * (behind + n * job.layer) >= job.reuse), 0)
    few, more = (kept + count * job.layers_together for count in LAYERS)
    # If layers share a message of the boundary, the number of messages does not grow with each layer: no extrapolation.
    plans, _ = _plans_of(scheme, job)
    shared = any(isinstance(one, ShardPlan) and one.boundary_numel(0, job.itemsize) > job.layer for one in plans)
    # Patterns may match the parameters of some layers only.
    if layers <= more or shared or len(plans) > 1:
        return simulate(tasks_of(scheme, job, machine))
    if job.accumulation not in known.figures:
        shorter, longer = (simulate(tasks_of(scheme, job, machine, count, known)) for count in (few, more))
        known.figures[job.accumulation] = _extended(shorter, longer, (layers - more) / (more - few))
    return known.figures[job.accumulation]


def _extended(shorter: dict[str, float], longer: dict[str, float], times: float) -> dict[str, float]:
    """Extrapolates figures: adds the difference between the longer and the shorter ones ``times`` more times."""
    return {name: max(value + times * (value - shorter.get(name, 0.0)), 0.0) for name, value in longer.items()}


class _Builder:
    """Makes the tasks of a step."""

    def __init__(
        self, scheme: Scheme | ShardPlan, job: Job, machine: Machine, layers: int | None, known: Simulated
    ) -> None:
        buckets = self._buckets = buckets_of(job, layers)
        self._job, self._machine, (self._plans, numbers) = job, machine, _plans_of(scheme, job)
        # Parameters of different plans do not share messages: the parts of each bucket, by the number of the plan.
        self._parts = [{0: bucket} for bucket in buckets]
        if len(self._plans) > 1:
            places = iter(numbers)
            self._parts = [_cut(bucket, [next(places) for _ in bucket.numels]) for bucket in buckets]
        self._stage = scheme if isinstance(scheme, ShardPlan) else None
        self._engine = None if isinstance(scheme, ShardPlan) else scheme.engine
        self._hierarchical = isinstance(scheme, Scheme) and (scheme.hierarchical or machine.profile.hierarchical)
        self._programs = [chains_of(plan, machine.grid, job.accumulation) for plan in self._plans]
        # DDP waits for buckets only after backward (Reducer::finalize_backward, arXiv 2006.15704, section 4.2).
        self._in_flight = len(buckets) if self._engine == "ddp" else IN_FLIGHT
        self._strict = self._stage is not None and (self._stage.order or machine.profile.order) == "strict"
        # Buckets that backward finds still gathered, always including the last. Later buckets are used twice in between.
        behind = [2 * sum(bucket.numel for bucket in buckets[index + 1 :]) for index in range(len(buckets))]
        keeps = self._engine in (None, "deepspeed")
        self._kept = [keeps and (numel < job.reuse or not numel) for numel in behind]
        self._tasks: list[Task] = []
        # Equal buckets share phases, so that `simulate` recognises combinations of tasks.
        self._hops, self._computes = known.hops, known.computes
        # The slowest of n nodes is about sqrt(2 ln n) standard deviations above the mean.
        self._late = 1 + machine.profile.value("jitter_share") * math.sqrt(2 * math.log(machine.grid.nodes))

    def tasks(self) -> list[Task]:
        """All tasks in the order of submission."""
        job, count = self._job, len(self._buckets)
        messages = [self._messages(number) for number in range(len(self._plans))]
        # By plan: the last task of each message. A bucket's use starts messages up to a few ahead.
        refreshed: list[list[Task]] = [[] for _ in messages]
        reductions: list[Task] = []
        pending: list[list[Task]] = []  # by bucket, in order: the tasks of its reduction for which backward waits
        # By plan: parts of the next message of the outermost tier, and the tasks of their sums.
        waiting: list[list[tuple[Bucket, Task]]] = [[] for _ in messages]
        computed: list[Task] = []
        order = [
            (phase, micro, index)
            for micro in range(job.accumulation)
            for phase, indices in (("forward", range(count)), ("backward", range(count - 1, -1, -1)))
            for index in indices
        ]
        gathered: list[list[Task]] = []
        for place, (phase, micro, index) in enumerate(order):
            for other, step, ahead in order[len(gathered) : place + 1 + job.ahead]:
                kept, copies = other == "backward" and self._kept[ahead], list[Task]()
                for number in self._parts[ahead]:
                    if messages[number]:
                        own = next(at for at, (last, _) in enumerate(messages[number]) if ahead <= last)
                        for _, message in messages[number][len(refreshed[number]) : own + 1 + IN_FLIGHT]:
                            refreshed[number] += self._chain(number, "refresh", 0, message, [])[-1:]
                        copies.append(refreshed[number][own])
                chains = [] if kept else self._chains(other, step, ahead, [*computed[-1:], *copies])
                ends = [made[-1] for made in chains if made]
                gathered.append([] if kept else ends or copies or computed[-1:])
            needs = gathered[place]
            if phase == "backward" and len(pending) > self._in_flight:
                needs = [*needs, *pending[-1 - self._in_flight]]
            computed.append(self._compute(phase, self._buckets[index], needs))
            if phase == "backward":
                chains = self._chains("reduce", micro, index, computed[-1:])
                reductions += [made[-1] for made in chains if made]
                if any(chains):
                    inside = [[task for task in made if not task.boundary] for made in chains]
                    pending.append([made[-1] for made in inside if made] or computed[-1:])
                for (number, part), made in zip(self._parts[index].items(), chains):
                    if ("boundary", micro) in self._programs[number]:
                        waiting[number].append((part, (made or computed)[-1]))
                for number, parts in enumerate(waiting):
                    buckets, ends = [bucket for bucket, _ in parts], [end for _, end in parts]
                    if parts and (place + 1 == len(order) or self._fills(number, buckets, micro)):
                        reductions += self._chain(number, "boundary", micro, _joined(buckets), ends)[-1:]
                        parts.clear()
        stepped = self._add(Task(COMPUTE, "optimizer", [self._optimizer()], self._updates(reductions)))
        for index in range(count):
            self._chains("after", job.accumulation - 1, index, [stepped])
        # One by one (`_post_step` in DeepSpeed 0.19.8).
        for numel in (numel for bucket in self._buckets for numel in bucket.numels if numel <= job.kept):
            self._chain(0, "forward", 0, Bucket(f"kept {numel}", (numel,), 0.0), [stepped])
        return self._tasks

    def _messages(self, number: int) -> list[tuple[int, Bucket]]:
        """A plan's messages of the refresh, each with the number of its last bucket. Several buckets may share a message."""
        if self._stage is None or ("refresh", 0) not in self._programs[number]:
            return []
        limit = self._plans[number].refresh_numel(self._job.prefetch, self._job.itemsize)
        messages: list[tuple[int, Bucket]] = []
        for index, parts in enumerate(self._parts):
            if (bucket := parts.get(number)) is None:
                continue
            if messages and messages[-1][1].numel + bucket.numel <= limit:
                _, last = messages.pop()
                bucket = _joined([last, bucket])
            messages.append((index, bucket))
        return messages

    def _fills(self, number: int, buckets: Sequence[Bucket], micro: int) -> bool:
        """Whether the parts of a message of the outermost tier have the plan's minimum size."""
        world, crossing = self._machine.grid.world_size, self._programs[number]["boundary", micro].crossings[0]
        chunks = [chunk_numel(numel, world) for bucket in buckets for numel in bucket.numels]
        return bool(crossing.part_bytes(chunks, self._job.itemsize) >= self._plans[number].boundary_message_bytes)

    def _add(self, task: Task) -> Task:
        self._tasks.append(task)
        return task

    def _compute(self, phase: str, bucket: Bucket, needs: list[Task]) -> Task:
        job, name = self._job, f"{phase} {bucket.name}"
        if name not in self._computes:
            times = job.tokens * (1 if phase == "forward" else bucket.backward(job.checkpointing)) * self._late
            moved = bucket.layers * job.model.hidden * self._machine.profile.value("layer_bytes") / job.tensor
            moved += bucket.logits * LOGIT_BYTES
            flops = bucket.flops + bucket.attention * (1 / self._machine.profile.value("attention_share") - 1)
            # A tensor group makes matrices narrower. They have as many tiles as with fewer tokens.
            tokens = job.tokens // job.tensor
            self._computes[name] = [self._machine.compute(flops * times, tokens, moved * times)]
            if job.tensor > 1 and (
                count := 2 * bucket.layers * (2 if phase == "backward" and job.checkpointing else 1)
            ):
                one = self._machine.tensor_reduce(job.tokens * job.model.hidden * job.itemsize)
                work = {resource: seconds * count for resource, seconds in one.work.items()}
                self._computes[name].append(Phase(one.latency_s * count, work))
        return self._add(Task(COMPUTE, name, self._computes[name], needs))

    def _updates(self, needs: list[Task]) -> list[Task]:
        """Adds the rounds of Muon's matrices, see `hzero.engine.muon`: to their owners, Newton-Schulz, and back."""
        grid, stage = self._machine.grid, self._stage
        if stage is None or not self._job.matrices:
            return needs
        owned = self._job.owned(grid)
        legs = [exchange_program(leg, stage.codecs.optimizer) for leg in owned.legs]
        ends: list[Task] = []
        sent: list[tuple[list[list[Timed]], Round, list[Task]]] = []
        for number, one in enumerate([*owned.rounds, None]):
            if one is not None:  # it is on its way while the round before is computed
                timed = [
                    self._timed(stage, leg, Bucket(f"matrices {number}", (part * grid.world_size,), 0.0), late=True)
                    for leg, part in zip(legs, owned.parts(one))
                ]
                sent.append((timed, one, self._moves([*timed[0], *timed[1]], needs)))
            if number:
                timed, before, arrived = sent[number - 1]
                slowest = max((numbers for node in before for numbers in node), key=owned.flops)
                side = min(min(owned.matrices[matrix].shape[-2:]) for matrix in slowest)
                phase = self._machine.compute(_ITERATIONS * owned.flops(slowest), side)
                computed = self._add(Task(COMPUTE, "Newton-Schulz", [phase], arrived))
                ends += self._moves([*timed[1], *timed[0]], [computed])
        return ends

    def _moves(self, timed: list[Timed], needs: list[Task]) -> list[Task]:
        for lane, tier, _, phases in timed:
            needs = [self._add(Task(lane, "matrices", phases, needs, tier, boundary=True))]
        return needs

    def _optimizer(self) -> Phase:
        ranks = 1 if self._engine == "ddp" else self._machine.grid.world_size
        if self._engine == "fsdp":
            ranks = self._programs[0]["forward", 0].crossings[0].ranks
        return self._machine.optimizer(sum(bucket.numel for bucket in self._buckets) // ranks)

    def _chains(self, phase: str, micro: int, index: int, needs: Sequence[Task]) -> list[list[Task]]:
        """Adds the tasks of a bucket's programs in a phase, which do not wait for each other. One list for each part."""
        return [self._chain(number, phase, micro, part, needs) for number, part in self._parts[index].items()]

    def _chain(self, number: int, phase: str, micro: int, bucket: Bucket, needs: Sequence[Task]) -> list[Task]:
        """Adds the tasks of a plan's program in a phase, one after the other."""
        program = self._programs[number].get((phase, micro), Program(()))
        # Only the first and the last micro-batch differ.
        key = number, phase, micro > 0, micro == self._job.accumulation - 1, bucket.name
        if key not in self._hops:
            self._hops[key] = self._timed(self._plans[number], program, bucket, late=phase == "boundary")
        made: list[Task] = []
        for lane, tier, boundary, phases in self._hops[key]:
            made.append(self._add(Task(lane, f"{phase} {bucket.name}", phases, made[-1:] or needs, tier, boundary)))
        return made

    def _timed(self, plan: Any, program: Program, bucket: Bucket, late: bool) -> list[Timed]:
        """Divides a program into consecutive work on lanes.

        Kernels are on the lane of the collective before them, or of the first collective.
        """
        machine, stage, number = self._machine, self._stage, 0
        # Crossings of a reduction in every micro-batch. The others wait for the last one.
        inside = 1 if stage is None else len(plan.micro_hops())
        chunks = [chunk_numel(numel, machine.grid.world_size) for numel in bucket.numels]
        found: list[Timed] = []
        moved = program.moved(chunks, self._job.itemsize) if program.crossings else []
        for index, (step, taken, left) in enumerate(moved):
            phases = [machine.kernel(taken + left)]
            if isinstance(step, Cross):
                number = program.crossings.index(step)
                # Of the whole array over the group, as nccl-tests count sizes.
                size, sent, phases = taken * (step.ranks if step.kind == "all_gather" else 1), step, []
                if stage is not None and stage.checksum:
                    size += CHECKSUM_BYTES * step.ranks
                    written, read = program.checked(index)
                    again = (0 if written else taken) + (0 if read else left)
                    # With checksums the hop sends parts and sums them itself, instead of the library.
                    if step.kind == "reduce_scatter":
                        sent, again = replace(step, kind="all_to_all"), again + taken
                    if again:
                        phases.append(machine.kernel(again))
                algorithm = "hierarchical" if self._hierarchical else step.algorithms.of(taken)
                phases.append(machine.transfer(sent, size, algorithm))
            crossing = program.crossings[number]
            tier = crossing.tiers[-1] if crossing.tiers else "intra_package"
            lane = tier if stage is not None else "+".join(crossing.tiers)
            if isinstance(step, Cross) and self._strict:
                lane = "wire"
            boundary = crossing.role == "gradients" and (late or number >= inside)
            if found and found[-1][:3] == (lane, tier, boundary):
                found[-1][3].extend(phases)
            else:
                found.append((lane, tier, boundary, phases))
        return found


def _cut(bucket: Bucket, numbers: Sequence[int]) -> dict[int, Bucket]:
    """The parts of a bucket by the number of their parameters' plan. Equal parts have equal names."""
    numels: dict[int, list[int]] = {}
    for number, numel in zip(numbers, bucket.numels):
        numels.setdefault(number, []).append(numel)
    name = f"{bucket.name} {numbers}"
    return {number: replace(bucket, name=name, numels=tuple(numels[number])) for number in sorted(numels)}


def _joined(buckets: Sequence[Bucket]) -> Bucket:
    """One bucket with the parameters of several."""
    name, numels = "+".join(one.name for one in buckets), itertools.chain.from_iterable(one.numels for one in buckets)
    return Bucket(name, tuple(numels), 0.0)


# ---- events -------------------------------------------------------------------------------------------------------------


def speeds(usages: Sequence[Mapping[Any, float]]) -> list[float]:
    """Max-min fair speeds of at most 1. All speeds grow equally until a resource is full, whose users then keep their speed.

    Args:
        usages: For each transfer, the share of every resource that it uses at speed 1.

    Returns:
        The speeds. The shares of a resource add up to at most 1.
    """
    found, growing, level = [1.0] * len(usages), set(range(len(usages))), 0.0
    left: dict[Any, float] = defaultdict(lambda: 1.0)
    while growing:
        demand: dict[Any, float] = defaultdict(float)
        for index in growing:
            for resource, share in usages[index].items():
                demand[resource] += share
        full = min(demand, key=lambda resource: left[resource] / demand[resource], default=None)
        if full is None or level + left[full] / demand[full] >= 1.0:
            break
        step = left[full] / demand[full]
        level += step
        for resource, total in demand.items():
            left[resource] = max(left[resource] - step * total, 0.0)
        for index in [index for index in growing if full in usages[index]]:
            found[index] = level
            growing.remove(index)
    return found


@dataclass
class Task:
    """One entry of a lane.

    Attributes:
        lane: The lane.
        name: Name for tests and debuggers.
        phases: Phases in order.
        after: Tasks that must end before it starts.
        tier: Outermost tier that it crosses; "" for compute.
        boundary: Whether it waits for the last micro-batch.
        start: Start time in seconds.
        end: End time in seconds; infinite until the task has ended.
    """

    lane: str
    name: str
    phases: Sequence[Phase]
    after: Sequence[Task] = field(default=(), repr=False)  # recursive, so a text of all would be huge
    tier: str = ""
    boundary: bool = False
    start: float = -1.0
    end: float = math.inf


def simulate(tasks: Sequence[Task]) -> dict[str, float]:
    """Simulates tasks.

    Args:
        tasks: Tasks in the order of submission on every lane. A task follows the tasks of its `after`.

    Returns:
        ``seconds`` from the first start to the last end. ``exposed TIER``: seconds without compute, by the tier of the task
        for which compute waits. ``busy RESOURCE``: seconds in which the resource is busy.

    Raises:
        ValueError: A task waits for a later task of its lane, so no task can start.
    """
    lanes: dict[str, deque[Task]] = defaultdict(deque)
    behind: dict[int, list[Task]] = defaultdict(list)
    waits = {id(task): len(task.after) for task in tasks}
    for task in tasks:
        lanes[task.lane].append(task)
        for other in task.after:
            behind[id(other)].append(task)
    running: dict[str, Task] = {}
    parts: dict[str, list[Part]] = {}  # by lane: remaining parts of the running task, the current one last
    left: dict[str, float] = {}  # by lane: remaining seconds of the current part
    known: dict[tuple[int, ...], list[float]] = {}
    now, done = 0.0, 0
    figures: dict[str, float] = defaultdict(float)
    for task in tasks:  # independent of speeds
        for phase in task.phases:
            for resource, seconds in phase.work.items():
                figures[f"busy {resource}"] += seconds
    ready = list(lanes)
    while done < len(tasks):
        for lane in ready:
            if lane not in running and lanes[lane] and not waits[id(lanes[lane][0])]:
                task = running[lane] = lanes[lane].popleft()
                task.start = now
                parts[lane] = [part for phase in task.phases for part in phase.parts][::-1]
                left[lane] = parts[lane][-1].seconds
        ready = []
        if not running:
            raise ValueError("nothing can start: a task waits for one behind it")
        present = [parts[lane][-1].shares for lane in running]
        key = tuple(map(id, present))  # equal shares are mostly the same object
        rates = known.get(key) or known.setdefault(key, speeds(present))
        step = min([left[lane] / rate for lane, rate in zip(running, rates)])
        if COMPUTE not in running and (tier := _waited_for(lanes, running).tier):
            figures[f"exposed {tier}"] += step
        now += step
        for lane, rate in zip(list(running), rates):
            left[lane] -= step * rate
            if left[lane] > 1e-15 + 1e-12 * step:
                continue
            parts[lane].pop()
            if parts[lane]:
                left[lane] = parts[lane][-1].seconds
                continue
            task = running.pop(lane)
            task.end = now
            done += 1
            ready.append(lane)
            for other in behind[id(task)]:
                waits[id(other)] -= 1
                if not waits[id(other)]:
                    ready.append(other.lane)
    return {"seconds": now, **figures}


def _waited_for(lanes: dict[str, deque[Task]], running: dict[str, Task]) -> Task:
    """The running task for which the next compute task waits."""
    task = lanes[COMPUTE][0] if lanes[COMPUTE] else None
    while task is not None:
        if task.lane in running:  # the task itself, or an earlier task of its lane
            return running[task.lane]
        if lanes[task.lane] and lanes[task.lane][0] is not task:
            task = lanes[task.lane][0]
        else:
            task = next((other for other in task.after if other.end == math.inf), None)
    return next(iter(running.values()))
