"""Against: predicts all schemes by number of nodes, including TP x PP x ZeRO-1 and FSDP2 with tensor parallelism.

A tensor group splits every matrix, and sums activations twice per layer and direction (Megatron-LM, arXiv 1909.08053). With
sequence parallelism it also divides the activations that are kept (arXiv 2205.05198). Its all-reduces do not overlap. A
matrix that is split over t ranks has as many tiles as a whole matrix with t times fewer tokens, and is assumed to be as fast.

A pipeline has p stages of whole nodes, each with some layers in v chunks. One step of m micro-batches takes, by the
interleaved schedule of one forward and one backward at a time (arXiv 2104.04473, sections 2.2 and 4.1):

    stage(m) + (p - 1) / v x stage's micro-batch + 2 v (m + (p - 1) / v) x message

``stage(m)`` is the simulated step of the slowest stage, which has the head, as if it were a model with ZeRO-1. A message is the
activation of a micro-batch, or its gradient, divided among the tensor group. All devices of a node send at once, and compute
waits. A stage keeps the activations of p micro-batches, times 1 + (p - 1) / (p v) if v > 1 (arXiv 2205.05198).

These formulas favour the other engines: ZeRO-1 reduces during the last backward, and gradients are summed in 16 bits.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hzero.config import PRESETS
from hzero.errors import ConfigError
from hzero.program.collectives import OTHERS, Scheme
from hzero.program.shards import ShardPlan
from hzero.tools.plan.machine import Machine, Profile
from hzero.tools.plan.memory import footprint
from hzero.tools.plan.scenario import Job, Scenario, buckets_of
from hzero.tools.plan.step import Prediction, Simulated, compute_s, predict, predict_range, require_layers
from hzero.topology import Grid

#: Sizes of tensor groups, numbers of chunks other than one, and the maximum number of stages that are tried.
TENSOR, CHUNKS, STAGES = (1, 2, 4, 8), (2, 4), 64
#: Presets that are also predicted under FSDP2.
IN_FSDP = ("topo", "lossless")
#: Names of the schemes with model parallelism.
TENSOR_FSDP, PIPELINE = "FSDP2 x TP", "TP x PP x ZeRO-1"


@dataclass(frozen=True)
class Degrees:
    """Degrees of model parallelism.

    Attributes:
        tensor: Devices of a tensor group, all of one node.
        pipeline: Stages of a pipeline, each of whole nodes.
        chunks: Parts of a stage in the interleaved schedule.
    """

    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1

    def __str__(self) -> str:
        chunks = f" in {self.chunks} chunks" if self.chunks > 1 else ""
        return f"TP {self.tensor}" + (f" x PP {self.pipeline}{chunks}" if self.pipeline > 1 else "")


@dataclass(frozen=True)
class Price:
    """Prediction of a scheme on some number of nodes.

    Attributes:
        step: The predicted step.
        fits: Whether it fits into a device's memory.
        job: The job, with its micro-batch and the micro-batches of a replica.
        degrees: Degrees of model parallelism; None without it.
    """

    step: Prediction
    fits: bool
    job: Job
    degrees: Degrees | None = None

    @property
    def setting(self) -> str:
        """Text of its degrees, and of sequences x micro-batches."""
        return f"{self.degrees or ''}{', ' * bool(self.degrees)}{self.job.micro_batch} x {self.job.accumulation}"


def of_rank(job: Job, degrees: Degrees) -> Job:
    """The job of one device: its part of every matrix, and the layers of the last stage, which has the head.

    With several stages, the embedding is on another stage and is left out.
    """
    model, tensor = job.model, degrees.tensor
    assert model.layer is not None
    layers = math.ceil(model.layers / degrees.pipeline)

    def part(numels: Sequence[int]) -> tuple[int, ...]:
        return tuple(math.ceil(numel / tensor) for numel in numels)

    before = part(model.before) if degrees.pipeline == 1 else ()
    layer, after = part(model.layer), part(model.after)
    share = layers / model.layers / tensor
    shapes = replace(
        model,
        numels=(*before, *layer * layers, *after),
        idle=model.idle * share,
        attention=round(model.attention * share),
        layers=layers,
        before=before,
        layer=layer,
        after=after,
    )
    stages, stored = degrees.pipeline, 1.0
    if stages > 1:
        interleaved = 1 + (stages - 1) / (stages * degrees.chunks) if degrees.chunks > 1 else 1.0
        stored = min(stages, job.accumulation) * interleaved
    return replace(job, model=shapes, tensor=tensor, stored=stored)


def placed(job: Job, grid: Grid, profile: Profile, degrees: Degrees) -> tuple[Job, Machine]:
    """The job of one device, and the machine of one stage. The number of stages divides the nodes."""
    if degrees.pipeline > 1:
        nodes = grid.nodes // degrees.pipeline
        grid = replace(grid, nodes=nodes, ranks=None, automatic=False, nodes_per_group=None)
    return of_rank(job, degrees), Machine(grid, profile, degrees.tensor)


def price(scheme: Scheme, job: Job, grid: Grid, profile: Profile, degrees: Degrees) -> Prediction:
    """Predicts a step of another engine with model parallelism.

    Args:
        scheme: Scheme of the data-parallel dimension.
        job: The job, with the micro-batches of a replica.
        grid: All devices.
        profile: The machine's constants.
        degrees: Degrees of model parallelism.
    """
    own, machine = placed(job, grid, profile, degrees)
    known = Simulated()
    found = predict(scheme, own, machine, known)
    if degrees.pipeline == 1:
        return found
    longer = predict(scheme, replace(own, accumulation=own.accumulation + 1), machine, known)
    idle = (degrees.pipeline - 1) / degrees.chunks
    message = machine.message(job.tokens * job.model.hidden * job.itemsize / degrees.tensor)
    waits = 2 * degrees.chunks * (job.accumulation + idle) * message
    seconds = found.step_s + idle * (longer.step_s - found.step_s) + waits
    flops = 3.0 * job.tokens * job.accumulation * sum(bucket.flops for bucket in buckets_of(job))
    exposed = {**found.exposed_s, "inter_node": found.exposed_s.get("inter_node", 0.0) + waits}
    tflops = flops / seconds / 1e12 / (degrees.tensor * degrees.pipeline)
    return replace(found, step_s=seconds, tflops=tflops, exposed_s=exposed)


def against(scenario: Scenario) -> dict[str, Price]:
    """Predicts every scheme on a scenario's nodes. Model parallelism uses the best degrees that fit.

    Args:
        scenario: The model and the machine. A device, or a replica, has micro-batches as large as the scenario's, or smaller
            ones if the global batch is too small.

    Returns:
        Prices by name. A scheme is left out if the batch cannot be divided among its replicas.

    Raises:
        ConfigError: The model's layers differ, or the machine has no profile.
    """
    require_layers(scenario.job)
    found: dict[str, Price] = {}
    if job := _shared(scenario, 1, scenario.job.micro_batch):
        own: dict[str, tuple[ShardPlan | Scheme, Job]] = {}
        for preset in PRESETS:
            own[f"hzero {preset}"] = (scenario.shard_plan(preset), job)
        for preset in IN_FSDP:
            own[f"FSDP2, hzero {preset}"] = (scenario.shard_plan(preset), job.in_fsdp())
        own |= {name: (scheme, job) for name, scheme in scenario.others().items()}
        for name, (scheme, cut) in own.items():
            step = predict_range(scheme, cut, scenario.machine)
            found[name] = Price(step, scenario.holds(step.memory_bytes), cut)
    for name in (TENSOR_FSDP, PIPELINE):
        if (one := best_degrees(scenario, name)) and one.degrees:
            scheme = OTHERS["FSDP2" if name == TENSOR_FSDP else "ZeRO-1"]
            slow = price(scheme, one.job, scenario.grid, scenario.machine.profile.slower, one.degrees)
            found[name] = replace(one, step=one.step.ranging_to(slow))
    return found


def best_degrees(scenario: Scenario, name: str) -> Price | None:
    """The price of `TENSOR_FSDP` or `PIPELINE` with the best degrees that fit; None if none fit."""
    if name == TENSOR_FSDP:
        return next(iter(_best(scenario, OTHERS["FSDP2"], [Degrees(tensor) for tensor in TENSOR[1:]])), None)
    possible = [Degrees(*pair) for pair in itertools.product(TENSOR, range(1, STAGES + 1))]
    best = _best(scenario, OTHERS["ZeRO-1"], possible)
    pipelines = {price.degrees for price in best if price.degrees and price.degrees.pipeline > 1}
    chunked = [replace(degrees, chunks=chunks) for degrees in pipelines for chunks in CHUNKS]
    return min([*best, *_best(scenario, OTHERS["ZeRO-1"], chunked)], key=lambda one: one.step.step_s, default=None)


def _best(scenario: Scenario, scheme: Scheme, possible: Sequence[Degrees]) -> list[Price]:
    """The three shortest steps among the degrees that fit and that the machine, the model and the batch allow."""
    fitting: list[tuple[float, Job, Degrees]] = []  # the seconds are without communication
    grid, layers, micro = scenario.grid, scenario.job.model.layers, scenario.job.micro_batch
    for degrees in possible:
        tensor, stages, chunks = degrees.tensor, degrees.pipeline, degrees.chunks
        if grid.scope_size("node") % tensor or grid.nodes % stages or stages > layers:
            continue
        for size in {micro, micro * tensor}:
            job = _shared(scenario, tensor * stages, size)
            if job is None or (chunks > 1 and (layers % (stages * chunks) or job.accumulation % stages)):
                continue
            own, machine = placed(job, grid, scenario.machine.profile, degrees)
            if scenario.holds(footprint(scheme, machine.grid, own).bytes):
                least = compute_s(own, machine) * (1 + (stages - 1) / chunks / job.accumulation)
                fitting.append((least, job, degrees))
    found: list[Price] = []
    for least, job, degrees in sorted(fitting, key=lambda one: one[0]):
        if len(found) == 3 and least > found[-1].step.step_s:
            break
        step = price(scheme, job, grid, scenario.machine.profile, degrees)
        found = sorted([*found, Price(step, True, job, degrees)], key=lambda one: one.step.step_s)[:3]
    return found


def _shared(scenario: Scenario, devices: int, micro: int) -> Job | None:
    """The job of a replica on ``devices`` devices, with micro-batches of at most ``micro`` sequences; None if impossible."""
    job, world = scenario.job, scenario.grid.world_size
    sequences, rest = divmod((scenario.global_batch or job.micro_batch * job.accumulation * world) * devices, world)
    if rest or not sequences:
        return None
    micro = math.gcd(sequences, micro)
    return replace(job, micro_batch=micro, accumulation=sequences // micro)


# ---- over the nodes -----------------------------------------------------------------------------------------------------


def node_counts(text: str) -> list[int]:
    """Parses numbers of nodes: ``1..9408``, both ends and the powers of two between them, or a list such as ``2,4,48``.

    ``nodes=`` may precede.

    Raises:
        ConfigError: The text is neither.
    """
    counts = text.removeprefix("nodes=")
    found = re.fullmatch(r"(\d{1,6})\.\.(\d{1,6})", counts)
    if found and 1 <= (first := int(found[1])) <= (last := int(found[2])):
        return sorted({first, last, *(1 << power for power in range(20) if first < 1 << power < last)})
    if re.fullmatch(r"[1-9]\d{0,5}(,[1-9]\d{0,5})*", counts):
        return sorted(set(map(int, counts.split(","))))
    raise ConfigError(f"--against: found {text!r}; expected nodes, as in 48, 2,4,48 or 1..9408")
