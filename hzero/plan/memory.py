"""Memory: what fills a device under every scheme, and at which moment of a step it is fullest."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hzero.plan.buffers import IN_FLIGHT, StateMemory, plan_memory, zero3_memory
from hzero.plan.job import Job
from hzero.plan.sequence import Scheme
from hzero.plan.shards import ShardPlan
from hzero.topology import Grid

#: Share of transient memory that the allocator holds in addition, in blocks that are rounded up or fragmented.
#: Assumed; no measurement on MI250X is known.
SLACK = 0.05


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
    numels, itemsize, buffers = job.model.numels, job.itemsize, job.buffers
    freed = 0
    if isinstance(scheme, ShardPlan):
        states = plan_memory(scheme, numels, itemsize=itemsize, accumulation=job.accumulation, buffers=buffers)
        freed = 0 if scheme.micro_hops() else scheme.accumulator_bytes
    elif scheme.engine == "deepspeed" and scheme.stage == 3:
        states = zero3_memory(grid, numels, itemsize=itemsize, buffers=buffers)
        if scheme.hpz:
            # In the weights' type with ZeRO++ too, which quantises what is sent (DeepSpeed 0.19, _partition_param_sec).
            copy = sum(numels) * itemsize // grid.scope_size(scheme.hpz)
            states.append(StateMemory("secondary weights", copy, f"{itemsize} bytes over the {scheme.hpz}"))
    else:
        states = [StateMemory("model states", _other_bytes(scheme, grid, job), "with buckets")]
    states += activations(job)
    return _summed(states, job, freed)


def _other_bytes(scheme: Scheme, grid: Grid, job: Job) -> int:
    """Bytes of the model states and buckets of DDP, FSDP2, ZeRO-1 and ZeRO-2."""
    numels, itemsize = job.model.numels, job.itemsize
    total = sum(numels)
    bucket = 4 * itemsize * min(max(job.bucket_numel, max(numels)), total)
    if scheme.engine == "ddp":
        return total * 16 + bucket // 2
    if scheme.engine == "fsdp":
        return total * 16 // grid.scope_size(scheme.shard) + bucket
    gradients = total * itemsize if scheme.stage == 1 else total * itemsize // grid.world_size
    return total * itemsize + gradients + total * 16 // grid.world_size + bucket


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
    bucket = job.buffers.reduce / total
    # Gradients that accumulate whole, in `freed` bytes each, go from their accumulators into the messages.
    freed *= min(job.buffers.reduce, total)

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
        done = max(1 - (IN_FLIGHT + 1) * job.buffers.prefetch / total, 0.0)
        moments["the refresh"] = before + refresh + gather + remaining(done)
    slack = {name: max(round(SLACK * (count - held)), 0) for name, count in moments.items()}
    found = Footprint(tuple(states), {name: count + slack[name] for name, count in moments.items()})
    what = f"assumed: {SLACK:.0%} of what comes and goes, for its blocks"
    return replace(found, states=(*states, StateMemory("allocator", slack[found.fullest], what)))
