"""Memory: bytes of every state on one device under every scheme, and the moment of a step at which the device is fullest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hzero.codecs.formats import chunk_numel
from hzero.plan.collectives import Scheme
from hzero.plan.job import Job
from hzero.plan.program import IN_FLIGHT, Program, StagePrograms
from hzero.plan.shards import ShardPlan
from hzero.topology import Grid

#: Channels of an NCCL or RCCL communicator, as ``slurm/frontier.env`` asks for; by default they depend on the
#: machine. ``NCCL_BUFFSIZE`` is 4 MiB by default, for each channel and neighbour.
CHANNELS, CHANNEL_BYTES = 16, 4 << 20
#: Share of transient memory that the allocator holds in addition, in blocks that are rounded up or fragmented.
#: Assumed; no measurement on MI250X is known.
SLACK = 0.05


@dataclass(frozen=True)
class StateMemory:
    """Memory of one state on one device.

    Attributes:
        name: The state, as `hzero.deepspeed.StageState.memory` names it. What comes and goes within a step is ``transient``.
        bytes: Bytes, at most.
        what: Description of the content.
    """

    name: str
    bytes: int
    what: str


@dataclass(frozen=True)
class Footprint:
    """Memory of one device.

    Attributes:
        states: What it holds, each at most. Transient states are not all there at once.
        moments: Bytes at the moments of a step that may be the fullest.
    """

    states: tuple[StateMemory, ...]
    moments: dict[str, int]

    @property
    def fullest(self) -> str:
        """The moment at which most is there."""
        return max(self.moments, key=lambda name: self.moments[name])

    @property
    def bytes(self) -> int:
        """Bytes at that moment."""
        return self.moments[self.fullest]


def footprint(scheme: Scheme | ShardPlan, grid: Grid, job: Job) -> Footprint:
    """Memory of a device that trains.

    Args:
        scheme: The stage's shard plan, or another engine.
        grid: The machine.
        job: What is trained.
    """
    freed = 0
    if isinstance(scheme, ShardPlan):
        states = _stage_states(scheme, job)
        freed = 0 if scheme.micro_hops() else scheme.accumulator_bytes
    elif scheme.engine == "deepspeed" and scheme.stage == 3:
        states = _zero3_states(scheme, grid, job)
    else:
        states = [StateMemory("model states", _other_bytes(scheme, grid, job), "with buckets")]
    return _summed([*states, *activations(job)], job, freed)


# ---- the stage ----------------------------------------------------------------------------------------------------------


def held_states(plan: ShardPlan, numels: Sequence[int], itemsize: int, accumulation: int) -> list[StateMemory]:
    """What the stage itself holds from one step, or micro-step, to the next.

    Args:
        plan: The shard plan.
        numels: Elements of each parameter.
        itemsize: Bytes of one weight.
        accumulation: Micro-steps per step; with one no accumulators are kept.
    """
    chunks = [chunk_numel(numel, plan.grid.world_size) for numel in numels]
    resident, what = 0, "none: the weights' scope is the whole world"
    if plan.resident and plan.decoded:
        resident, what = sum(chunks) * plan.grid.world_size * itemsize, "decoded, whole on every device"
    elif plan.resident:
        codec = plan.resident_codec
        resident = codec.format.message_bytes(chunks, plan.resident_rows, itemsize)
        what = f"{'uncoded' if codec.traits.plain else codec.codec} over the {plan.weights_scope}"
    summed, how = 0, "none: gradients are over the world"
    if plan.accumulates and accumulation == 1:
        how = "none: a step has one micro-step"
    elif plan.accumulates:
        how = f"{'float32' if plan.accumulator_bytes == 4 else 'bfloat16'} over the {plan.gradients_scope}"
        # Without a hop nothing has padded them.
        summed = plan.accumulator_bytes * (sum(chunks) * plan.gradient_rows if plan.micro_hops() else sum(numels))
    programs = StagePrograms.of(plan)
    residual = 2 * sum(chunks) * sum(program.residual_rows for program in (programs.micro, programs.boundary))
    return [
        StateMemory("resident weights", resident, what),
        StateMemory("gradient accumulators", summed, how),
        StateMemory("error feedback", residual, "bfloat16 residuals" if residual else "none"),
    ]


def _stage_states(plan: ShardPlan, job: Job) -> list[StateMemory]:
    numels, itemsize = job.model.numels, job.itemsize
    total, largest = sum(numels), max(numels)
    programs = StagePrograms.of(plan)

    def peak(program: Program, numel: int) -> int:
        """Of the messages of a bucket of ``numel`` elements."""
        return program.peak_bytes([chunk_numel(numel, plan.grid.world_size)], itemsize)

    unit = min(_largest_layer(job), plan.unit_numel)
    fetched = _fetched(job, unit)
    # A request ahead brings all of the layer in which it ends.
    live = _live(job, unit, job.prefetch + unit if job.prefetch else 0)
    gather = StateMemory(
        "transient gather", peak(programs.fetch, fetched), f"payload of {fetched:,} elements on their way"
    )
    if plan.decoded:
        live, gather = (StateMemory(state.name, 0, "none: the weights are whole") for state in (live, gather))
    messages, refresh = IN_FLIGHT + 1, StateMemory("transient refresh", 0, "none")
    if plan.resident:
        refreshed = min(max(plan.refresh_numel(job.prefetch, itemsize), largest), total)
        decoded = refreshed * itemsize // plan.grid.scope_size(plan.weights_scope)
        decoded *= plan.decoded or plan.differences > 0
        size = messages * peak(programs.whole if plan.differences else programs.refresh, refreshed) + decoded
        what = f"{messages} messages of {refreshed:,} elements{', one decoded' * bool(decoded)}"
        refresh = StateMemory("transient refresh", size, what)
    bucket = min(max(job.reduce, largest), total)
    reduce = messages * max(peak(programs.micro, bucket), peak(programs.boundary, bucket))
    reduce += (bucket * (not job.contiguous) + largest) * itemsize
    if job.accumulation > 1 and plan.accumulates and plan.accumulator_bytes < 4:
        # Float32 sums, and what rounding makes of one.
        reduce += (4 * bucket + 16 * largest) // plan.grid.scope_size(plan.gradients_scope)
    return [
        *_sharded(plan.grid, job),
        *held_states(plan, numels, itemsize, job.accumulation),
        _gradient_buffer(job),
        live,
        gather,
        refresh,
        StateMemory(
            "transient reduce", reduce, f"{messages} buckets of {bucket:,} elements on their way, the largest gradient"
        ),
        _step(plan.grid, job),
        _communicators(1 + len(plan.grid.crossed)),
    ]


# ---- other engines ------------------------------------------------------------------------------------------------------


def _zero3_states(scheme: Scheme, grid: Grid, job: Job) -> list[StateMemory]:
    numels, itemsize, layer = job.model.numels, job.itemsize, _largest_layer(job)
    fetched, bucket = _fetched(job, layer), min(max(job.reduce, max(numels)), sum(numels))
    states = [
        *_sharded(grid, job),
        _gradient_buffer(job),
        _live(job, layer, job.prefetch),
        StateMemory("transient gather", fetched * itemsize, f"{fetched:,} elements on their way"),
        StateMemory(
            "transient reduce",
            (bucket * (1 if job.contiguous else 2) + max(numels)) * itemsize,
            f"a bucket of {bucket:,} elements on its way, the largest gradient",
        ),
        _step(grid, job),
        _communicators(1),
    ]
    if scheme.hpz:
        # In the weights' type with ZeRO++ too, which quantises what is sent (DeepSpeed 0.19, _partition_param_sec).
        copy = sum(numels) * itemsize // grid.scope_size(scheme.hpz)
        states.append(StateMemory("secondary weights", copy, f"{itemsize} bytes over the {scheme.hpz}"))
    return states


def _other_bytes(scheme: Scheme, grid: Grid, job: Job) -> int:
    """Bytes of the model states and buckets of DDP, FSDP2, ZeRO-1 and ZeRO-2."""
    numels, itemsize = job.model.numels, job.itemsize
    total = sum(numels)
    bucket = 4 * itemsize * min(max(job.prefetch, max(numels)), total)
    if scheme.engine == "ddp":
        return total * 16 + bucket // 2
    if scheme.engine == "fsdp":
        return total * 16 // grid.scope_size(scheme.shard) + bucket
    gradients = total * itemsize if scheme.stage == 1 else total * itemsize // grid.world_size
    return total * itemsize + gradients + total * 16 // grid.world_size + bucket


# ---- DeepSpeed's part, and the model's ----------------------------------------------------------------------------------


def _shard(grid: Grid, job: Job) -> int:
    """Elements of a rank's shards over the world."""
    return sum(chunk_numel(numel, grid.world_size) for numel in job.model.numels)


def _sharded(grid: Grid, job: Job) -> list[StateMemory]:
    """What is sharded over the world under every scheme of stage 3. A float32 master and Adam's two moments make 12 bytes."""
    sizes = {"primary weights": job.itemsize, "gradient shard": job.gradient_itemsize or job.itemsize, "optimizer": 12}
    states = [StateMemory(n, _shard(grid, job) * size, f"{size} bytes over the world") for n, size in sizes.items()]
    if job.offload:
        states[1:] = [StateMemory(state.name, 0, "on the host") for state in states[1:]]
    return states


def _gradient_buffer(job: Job) -> StateMemory:
    """DeepSpeed's buffer of a bucket's gradients (stage3.py, ``bucket.buffer``), made whole at the start."""
    if not job.contiguous:
        return StateMemory("gradient buffer", 0, "none: contiguous_gradients is false")
    return StateMemory("gradient buffer", job.reduce * job.itemsize, f"reduce_bucket_size, {job.reduce:,} elements")


def _largest_layer(job: Job) -> int:
    return max(job.layer, *job.model.before, *job.model.after)


def _fetched(job: Job, unit: int) -> int:
    """Elements on their way: those of a layer of at most ``unit`` elements or of a parameter, and those gathered ahead."""
    return min(max(unit, max(job.model.numels)) + job.prefetch, sum(job.model.numels))


def _live(job: Job, unit: int, ahead: int) -> StateMemory:
    """Whole parameters. Forward ends with those that backward uses next: behind each lie half as many as until its next use."""
    live = min(max(unit, max(job.model.numels)) + max(job.reuse // 2, ahead), sum(job.model.numels))
    return StateMemory("transient parameters", live * job.itemsize, f"{live:,} whole, in use or used again soon")


def _step(grid: Grid, job: Job) -> StateMemory:
    """Float32 gradients of a sub-group, and two temporaries of torch's Adam."""
    group = 0 if job.offload else min(_shard(grid, job), job.sub_group)
    return StateMemory("transient step", 12 * group, "float32 gradients and two temporaries of Adam")


def _communicators(count: int) -> StateMemory:
    """An estimate of the buffers of NCCL's or RCCL's communicators: of each tier, and of DeepSpeed's world.

    A ring has two neighbours, whatever its size, and a buffer for each on every channel (NVIDIA/nccl#986, #1450). Left out,
    since no source gives them: the smaller buffers of the protocols LL and LL128, trees, and the connections of an all-to-all.
    Logs show more: 67 MB for 4 channels (ROCm/rccl#419), 1.6 GB for a communicator on NVIDIA GPUs (NVIDIA/nccl#864).
    """
    what = f"estimate: rings of {count}, {CHANNELS} channels of 2 x 4 MiB each"
    return StateMemory("communicators", count * 2 * CHANNELS * CHANNEL_BYTES, what)


def activations(job: Job) -> list[StateMemory]:
    """What forward leaves for backward, what the loss adds, and what backward of a layer adds.

    By the tensors that a GPT-NeoX saves; other architectures are counted as if they were one. Per token a layer keeps its
    input, two normalised inputs, queries, keys and values as one, rotated queries and keys, the output of attention, and
    the hidden units before and after their function: 17 x hidden with 4 x hidden units, as in arXiv 2205.05198, eq. 2,
    without scores and masks of dropout.
    """
    model, tokens, size = job.model, job.tokens, job.itemsize
    hidden, vocab = model.hidden, model.vocab_size
    # Sums of attention's softmax, and mean and deviation of two norms, in float32.
    layer = tokens * ((9 * hidden + 2 * model.intermediate) * size + 4 * model.heads + 16)
    working = tokens * (hidden + model.intermediate) * size
    whole = tokens * hidden * size
    kept, again = ("all of", "") if not job.checkpointing else ("inputs of", ", which is computed again")
    return [
        StateMemory(
            "activations",
            (whole if job.checkpointing else layer) * model.layers + 2 * whole,
            f"{tokens:,} tokens, {kept} {model.layers} layers",
        ),
        StateMemory("transient loss", 12 * tokens * vocab, f"logits of {vocab:,}, with gradients, float32"),
        StateMemory("transient layer", working + layer * job.checkpointing, f"gradients inside a layer{again}"),
    ]


# ---- at which moment ----------------------------------------------------------------------------------------------------


def _summed(states: list[StateMemory], job: Job, freed: int) -> Footprint:
    """The moments of a step.

    While the first buckets of gradients are reduced, as many parameters and their activations are gone, and few buckets are
    in flight. The last messages of the refresh come when forward is as many short of its end; accumulators are empty
    until then.
    """
    total = sum(job.model.numels)
    size = {state.name: state.bytes for state in states}

    def of(name: str) -> int:
        return size.get(name, 0)

    held = sum(state.bytes for state in states if not state.name.startswith(("transient", "activations")))
    before = held - of("gradient accumulators")
    live, gather = of("transient parameters"), of("transient gather")
    bucket = job.reduce / total
    # Gradients that accumulate whole, in `freed` bytes each, go from their accumulators into the messages.
    freed *= min(job.reduce, total)

    def remaining(left: float) -> int:
        return round(left * of("activations")) + min(live, round(left * total * job.itemsize))

    def reducing(count: int) -> int:
        messages = round(of("transient reduce") * count / (IN_FLIGHT + 1))
        return messages - min(count * freed, of("gradient accumulators")) + remaining(max(1 - count * bucket, 0.0))

    counts = [count for count in range(IN_FLIGHT + 2) if count < 2 or (count - 1) * bucket < 1]
    gathering = gather if live < total * job.itemsize else 0  # if all is whole, backward gathers nothing again
    moments = {
        "the loss": held + live + of("activations") + of("transient loss"),
        "backward": held + gathering + of("transient layer") + max(map(reducing, counts)),
        "the optimizer": before + of("transient step"),
    }
    if refresh := of("transient refresh"):
        done = max(1 - (IN_FLIGHT + 1) * job.prefetch / total, 0.0)
        moments["the refresh"] = before + refresh + gather + remaining(done)
    slack = {name: max(round(SLACK * (count - held)), 0) for name, count in moments.items()}
    found = Footprint(tuple(states), {name: count + slack[name] for name, count in moments.items()})
    what = f"assumed: {SLACK:.0%} of what comes and goes, for its blocks"
    return replace(found, states=(*states, StateMemory("allocator", slack[found.fullest], what)))
