"""Footprint: what fills a device under every scheme, and when in a step it is fullest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hzero.model.job import Job
from hzero.model.shape import ModelShape
from hzero.sharding.memory import IN_FLIGHT, StateMemory, plan_memory, zero3_memory
from hzero.sharding.plan import ShardPlan
from hzero.sharding.sequence import Scheme
from hzero.topology import Grid

#: Share of what comes and goes on a device that its allocator holds beside it, in blocks that are rounded up or torn.
#: Assumed; no measurement on MI250X is known.
SLACK = 0.05


@dataclass(frozen=True)
class Footprint:
    """Memory of one device.

    Attributes:
        states: What it holds, each at most. What comes and goes is not there all at once.
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


def footprint(scheme: Scheme | ShardPlan, grid: Grid, numels: Sequence[int], job: Job, *, channels: int) -> Footprint:
    """Memory of a device that trains.

    Args:
        scheme: The stage's shard plan, or another engine.
        grid: The machine.
        numels: Elements of every parameter.
        job: What is trained.
        channels: Channels of a communicator; 0 on processors.
    """
    if isinstance(scheme, ShardPlan):
        states = plan_memory(
            scheme,
            numels,
            itemsize=job.itemsize,
            accumulation=job.accumulation,
            channels=channels,
            buffers=job.buffers,
        )
    elif scheme.engine == "deepspeed" and scheme.stage == 3:
        states = zero3_memory(grid, numels, itemsize=job.itemsize, channels=channels, buffers=job.buffers)
        if scheme.hpz:
            # In the weights' type with ZeRO++ too, which quantises what is sent (DeepSpeed 0.19, _partition_param_sec).
            copy = sum(numels) * job.itemsize // grid.scope_size(scheme.hpz)
            states.append(StateMemory("secondary weights", copy, f"{job.itemsize} bytes over the {scheme.hpz}"))
    else:
        states = [StateMemory("model states", _other_bytes(scheme, grid, numels, job), "with buckets")]
    states += activations(job.model, job, on_processors=not channels)
    whole = scheme.accumulator_bytes if isinstance(scheme, ShardPlan) and not scheme.micro_hops() else 0
    return _summed(states, sum(numels), job, freed=whole, slack=SLACK * bool(channels))


def activations(model: ModelShape, job: Job, *, on_processors: bool) -> list[StateMemory]:
    """What forward leaves for backward, what the loss adds, and what backward of a layer adds.

    Of a GPT-NeoX, by its saved tensors; other architectures are counted as if they were one. Per token a layer keeps its
    input, two normalised inputs, queries, keys and values as one, rotated queries and keys, the output of attention, and
    the hidden units before and after their function: 17 x hidden with 4 x hidden units, as in arXiv 2205.05198, eq. 2,
    without scores and masks of dropout. Torch's flash attention on processors keeps its output in two layouts.
    """
    tokens, size, hidden = job.tokens, job.itemsize, model.hidden
    kept = 9 * hidden + 2 * model.intermediate
    # Sums of attention's softmax, and mean and deviation of two norms, in float32.
    layer = tokens * (kept * size + 4 * model.heads + 16)
    if job.attention == "flash":
        layer += tokens * hidden * size * on_processors
    else:  # scaled queries and keys, and values, in float32 where torch computes scores in float32
        layer += tokens * (hidden * (12 - 5 * size) + 4 * model.heads * model.seq_length)
    whole = tokens * hidden * size
    working = tokens * (hidden + model.intermediate) * size
    if job.attention == "math":
        working += 8 * tokens * model.heads * model.seq_length
    held = (whole if job.checkpointing else layer) * model.layers + 2 * whole
    return [
        StateMemory(
            "activations",
            held,
            f"{tokens:,} tokens, {'inputs of' if job.checkpointing else 'all of'} {model.layers} layers",
        ),
        StateMemory("transient loss", 12 * tokens * model.vocab, f"logits of {model.vocab:,}, with gradients, float32"),
        StateMemory(
            "transient layer",
            working + (layer if job.checkpointing else 0),
            f"gradients inside a layer{', which is computed again' if job.checkpointing else ''}",
        ),
    ]


def _summed(states: list[StateMemory], total: int, job: Job, *, freed: int, slack: float) -> Footprint:
    """The moments of a step.

    While the first buckets of gradients are reduced, as many parameters and their activations are gone, and few buckets are on
    their way. The last messages of the refresh come when forward is as many short of its end; accumulators are empty
    until then.
    """
    size = {state.name: state.bytes for state in states}

    def of(name: str) -> int:
        return size.get(name, 0)

    held = sum(state.bytes for state in states if not state.name.startswith(("transient", "activations")))
    before = held - of("gradient accumulators")
    live, gather = of("transient parameters"), of("transient gather")
    everything = live >= total * job.itemsize  # backward gathers nothing again
    bucket = job.buffers.reduce / max(total, 1)
    # Gradients that accumulate whole, in `freed` bytes each, go from their accumulators into the messages.
    freed *= min(job.buffers.reduce, total)

    def reducing(count: int) -> int:
        left = max(1 - count * bucket, 0.0)
        messages = round(of("transient reduce") * count / (IN_FLIGHT + 1))
        sums = -min(count * freed, of("gradient accumulators"))
        return messages + sums + round(left * of("activations")) + min(live, round(left * total * job.itemsize))

    counts = [count for count in range(IN_FLIGHT + 2) if count < 2 or (count - 1) * bucket < 1]
    moments = {
        "the loss": held + live + of("activations") + of("transient loss"),
        "backward": held
        + (0 if everything else gather)
        + of("transient layer")
        + max(reducing(count) for count in counts),
        "the optimizer": before + of("transient step"),
    }
    if refresh := of("transient refresh"):
        done = max(1 - (IN_FLIGHT + 1) * job.buffers.prefetch / max(total, 1), 0.0)
        forward = round(done * of("activations")) + min(live, round(done * total * job.itemsize))
        moments["the refresh"] = before + refresh + gather + forward
    slacks = {name: round(slack * (count - held)) if count > held else 0 for name, count in moments.items()}
    moments = {name: count + slacks[name] for name, count in moments.items()}
    fullest = max(moments, key=lambda name: moments[name])
    if slack:
        states.append(
            StateMemory("allocator", slacks[fullest], f"assumed: {slack:.0%} of what comes and goes, for its blocks")
        )
    return Footprint(tuple(states), moments)


def _other_bytes(scheme: Scheme, grid: Grid, numels: Sequence[int], job: Job) -> int:
    """Bytes of the model states and buckets of DDP, FSDP2, ZeRO-1 and ZeRO-2."""
    total, itemsize = sum(numels), job.itemsize
    bucket = 4 * itemsize * min(max(job.bucket_numel, max(numels)), total)
    if scheme.engine == "ddp":
        return total * 16 + bucket // 2
    if scheme.engine == "fsdp":
        return total * 16 // grid.scope_size(scheme.shard) + bucket
    gradients = total * itemsize if scheme.stage == 1 else total * itemsize // grid.world_size
    return total * itemsize + gradients + total * 16 // grid.world_size + bucket
