"""Memory: bytes of every state on one device under every scheme, and the moment of a step with the most memory."""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass, replace

from hzero.codecs.formats import chunk_numel
from hzero.config import NET_TIERS
from hzero.program.collectives import Scheme
from hzero.program.held import State, States, held_states
from hzero.program.program import IN_FLIGHT, Program, StagePrograms
from hzero.program.shards import ShardPlan
from hzero.tools.plan.machine import gather_buffer
from hzero.tools.plan.scenario import Job
from hzero.tools.plan.sequence import chunked
from hzero.topology import Grid

#: Channels of an NCCL or RCCL communicator, as set in ``slurm/frontier.env``; the default depends on the machine. Each channel
#: has a buffer per neighbour (``NCCL_BUFFSIZE``, 4 MiB by default). Both estimate the memory of communicators: one of each tier,
#: and DeepSpeed's of the world. A ring has two neighbours (NVIDIA/nccl#986, #1450). No source gives the smaller
#: buffers of the protocols LL and LL128, of trees, and of an all-to-all, so they are left out. Logs show more: 67 MB for 4
#: channels (ROCm/rccl#419), 1.6 GB for a communicator on NVIDIA GPUs (NVIDIA/nccl#864). From RCCL 2.30 on, each communicator
#: over 8 nodes or more adds the buffer of `hzero.tools.plan.machine.HIERARCHICAL`.
CHANNELS, CHANNEL_BYTES = 16, 4 << 20
#: Share of transient memory that the allocator reserves in addition, in rounded or fragmented blocks.
#: Assumed: there is no measurement on MI250X.
SLACK = 0.05


@dataclass(frozen=True)
class Footprint:
    """Memory of one device.

    Attributes:
        states: Maximum of every state. Transient states do not all exist at once.
        moments: Bytes at the moments of a step that may be the maximum.
        fullest: The moment with the most bytes.
    """

    states: States
    moments: dict[str, int]
    fullest: str

    @property
    def bytes(self) -> int:
        """Bytes at the moment with the most."""
        return self.moments[self.fullest]


def footprint(scheme: Scheme | ShardPlan, grid: Grid, job: Job) -> Footprint:
    """Memory of a device that trains.

    Args:
        scheme: The stage's shard plan, or another engine.
        grid: The machine.
        job: The job.
    """
    if isinstance(scheme, Scheme) and (scheme.engine != "deepspeed" or scheme.stage < 3):
        states = {"model states": State(_other_bytes(scheme, grid, job), "with buckets")}
    else:
        states = _stage3_states(scheme, grid, job)
    freed = 4 if isinstance(scheme, ShardPlan) and not any(one.micro_hops() for one, _ in _parts(scheme, job)) else 0
    return _summed({**states, **activations(job)}, job, freed)


def longest(scheme: ShardPlan, grid: Grid, job: Job, device: int, host: float) -> int:
    """Tokens of the longest sequence, one in a micro-batch, that fits.

    Args:
        scheme: The stage's shard plan.
        grid: The machine.
        job: The job. Its sequence length is ignored.
        device: Bytes of a device.
        host: Bytes of a host's memory for each of its devices.
    """

    def too_long(tokens: int) -> bool:
        one = replace(job, micro_batch=1, seq_length=tokens)
        on_host = one.tokens * chunked(one)["host_token"] if one.sequence else 0
        return on_host > host or footprint(scheme, grid, one).bytes > device

    return max(bisect(range(1, 1 << 32), False, key=too_long), 0)


def _stage3_states(scheme: Scheme | ShardPlan, grid: Grid, job: Job) -> States:
    """States of the stage, or of ZeRO-3 and its variants."""
    plan = scheme if isinstance(scheme, ShardPlan) else None
    numels, itemsize = job.model.numels, job.itemsize
    total, largest = sum(numels), max(numels)
    shard = sum(chunk_numel(numel, grid.world_size) for numel in numels)
    # Gathered: a layer or a parameter, and the prefetched parameters. A request of the stage includes the whole layer in which it
    # ends. Forward ends with the parameters that backward uses next. Twice as many elements are between the two uses of a
    # parameter as follow it in forward.
    unit = max(job.layer, *job.model.before, *job.model.after)
    ahead = job.prefetch
    if plan is not None:
        unit = min(unit, plan.unit_numel)
        ahead += unit if job.prefetch else 0
    fetched = min(max(unit, largest) + job.prefetch, total)
    live = min(max(unit, largest) + max(job.reuse // 2, ahead), total)
    bucket = min(max(job.reduce, largest), total)
    gradient = job.gradient_itemsize or itemsize
    kept = 3 * job.state_itemsize  # a master and Adam's two moments
    states = {
        "primary weights": State(shard * itemsize, f"{itemsize} bytes over the world"),
        "gradient shard": State(shard * gradient, f"{gradient} bytes over the world"),
        "optimizer": State(shard * kept, f"{kept} bytes over the world"),
    }
    if job.matrices:
        # A matrix has one momentum, in the type in which it is sent. A step has five rounds of matrices in memory: two
        # rounds go to their owners, one is orthogonalised, and two return.
        owned = job.owned(grid)
        momenta = sum(matrix.chunk for matrix in owned.matrices)
        size = shard * kept - momenta * (2 * job.state_itemsize - itemsize)
        states["optimizer"] = State(size, "masters, momenta of Muon's matrices, moments of the others")
        if plan is not None:
            received = [owned.parts(one)[1] * grid.scope_size("node") for one in owned.rounds]
            size = 2 * sum(sorted(received)[-5:]) * itemsize
            states["transient matrices"] = State(size, "estimate: five rounds of matrices, two messages each")
    if job.offload:
        states["gradient shard"] = states["optimizer"] = State(0, "on the host")
    if plan is not None:
        states |= held_states(plan, numels, itemsize, job.accumulation, job.model.names)
    # DeepSpeed allocates the buffer of a bucket's gradients in full at the start (stage3.py, ``bucket.buffer``).
    states["gradient buffer"] = State(job.reduce * itemsize, f"reduce_bucket_size, {job.reduce:,} elements")
    if not job.contiguous:
        states["gradient buffer"] = State(0, "none: contiguous_gradients is false")
    states["transient parameters"] = State(live * itemsize, f"{live:,} whole, in use or used again soon")
    states["transient gather"] = State(fetched * itemsize, f"{fetched:,} elements on their way")
    made = bucket * (not job.contiguous) + largest
    if plan is not None:
        states |= _messages(plan, job, fetched, bucket, made)
    else:
        what = f"a bucket of {bucket:,} elements on its way, the largest gradient"
        states["transient reduce"] = State((bucket + made) * itemsize, what)
    # The gradients of a sub-group in the masters' type, and two temporaries of torch's Adam.
    stepped = 0 if job.offload else min(shard, job.sub_group)
    states["transient step"] = State(kept * stepped, "gradients and two temporaries of Adam")
    # Nodes of every communicator: DeepSpeed's over the world, and the stage's on the tiers.
    nodes = [grid.nodes, *(grid.size(tier) if tier in NET_TIERS else 1 for tier in grid.crossed if plan is not None)]
    what = f"estimate: rings of {len(nodes)}, {CHANNELS} channels of 2 x 4 MiB each"
    size = len(nodes) * 2 * CHANNELS * CHANNEL_BYTES
    if job.hierarchical or (isinstance(scheme, Scheme) and scheme.hierarchical):
        buffers = [gather_buffer(count) for count in nodes]
        size += sum(buffers)
        what += f"; buffers of hierarchical all-gathers for {sum(map(bool, buffers))}"
    states["communicators"] = State(size, what)
    if isinstance(scheme, Scheme) and scheme.hpz:
        # In the weights' type, also with ZeRO++, which quantises only messages (DeepSpeed 0.19, _partition_param_sec).
        copy = total * itemsize // grid.scope_size(scheme.hpz)
        states["secondary weights"] = State(copy, f"{itemsize} bytes over the {scheme.hpz}")
    return states


def _parts(plan: ShardPlan, job: Job) -> list[tuple[ShardPlan, list[int]]]:
    return plan.parts(job.model.numels, job.model.names)


def _messages(plan: ShardPlan, job: Job, fetched: int, bucket: int, made: int) -> States:
    """The stage's transient states, from the buffers of its programs. ``made``: elements of gradients outside messages.

    Parameters of different plans do not share messages.
    """
    itemsize, parts = job.itemsize, [(one, part, StagePrograms.of(one)) for one, part in _parts(plan, job)]
    # The number of refreshes ahead is limited, in addition to the refreshes that a layer needs. Crossings are limited by route.
    count, ahead = IN_FLIGHT + 1, IN_FLIGHT + max(sum(one.keeps_copies for one, _, _ in parts), 1)
    crossing = IN_FLIGHT * len(parts) + 1

    def peak(program: Program, numel: int) -> int:
        """Bytes of the messages of a bucket of ``numel`` elements."""
        return program.peak_bytes([chunk_numel(numel, plan.grid.world_size)], itemsize)

    def most(name: str, numel: int) -> int:
        """Bytes of the messages of the bucket of ``numel`` elements whose messages are largest."""
        size, each = 0, [(getattr(programs, name), sum(numels)) for _, numels, programs in parts]
        for program, there in sorted(each, key=lambda one: -peak(one[0], numel)):
            size, numel = size + peak(program, min(there, numel)), max(numel - there, 0)
        return size

    size = most("unshard", fetched)
    states = {"transient gather": State(size, f"payload of {fetched:,} elements on their way")}
    if all(one.whole_copies for one, _, _ in parts):
        states = dict.fromkeys(("transient parameters", "transient gather"), State(0, "none: the weights are whole"))
    states["transient refresh"], sums = State(0, "none"), [0, 0]
    reduced = max(count * most("micro", bucket), crossing * max(most("boundary", bucket), most("outermost", bucket)))
    for one, numels, programs in parts:
        if one.keeps_copies:
            refreshed = min(max(one.refresh_numel(job.prefetch, itemsize), max(numels)), sum(numels))
            decoded = refreshed * itemsize // one.grid.scope_size(one.weights_scope)
            decoded *= one.whole_copies
            size = ahead * peak(programs.uncoded if one.exact else programs.refresh, refreshed) + decoded
            if one.exact:  # changes of all shards are encoded at once, and never take more than the shards
                size += sum(numels) * itemsize // one.grid.world_size
            what = f"{ahead} messages of {refreshed:,} elements{', one decoded' * bool(decoded)}"
            states["transient refresh"] = max(states["transient refresh"], State(size, what))
        together = min(one.boundary_numel(bucket, itemsize), sum(numels))
        if together > bucket:
            # The sums use the memory of gradient accumulation buffers, if there are gradient accumulation buffers.
            held = programs.outermost.crossings[0].rows * chunk_numel(together, plan.grid.world_size) * 4
            extra = count * (peak(programs.outermost, together) - peak(programs.outermost, bucket))
            sums = [sums[0] + together, sums[1] + extra + (held if job.accumulation == 1 else 0)]
    what = f"{count} buckets of {bucket:,} elements on their way, the largest gradient"
    what += f", the sums of {sums[0]:,}" * bool(sums[0])
    return {**states, "transient reduce": State(reduced + made * itemsize + sums[1], what)}


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


def activations(job: Job) -> States:
    """Activations that forward saves for backward, and the memory of the loss and of one layer's backward.

    From the tensors that a GPT-NeoX saves; other architectures count as if they were one. Per token a layer saves its input,
    two normalised inputs, fused queries, keys and values, and rotated queries and keys. It also saves the output of attention,
    and the hidden units before and after the activation function. With 4 x hidden units, these are 17 x hidden elements (arXiv
    2205.05198, eq. 2, without scores and masks of dropout). A tensor group with sequence parallelism divides all of them
    (section 4.2.2).
    """
    model, tokens, size = job.model, job.tokens // job.tensor, job.itemsize
    if job.sequence is not None:
        bytes_of = chunked(job)
        each = bytes_of["device_token"] + 24 * job.parallel  # every rank has the whole batch: ids, mask and labels
        return {
            "activations": State(tokens * each, f"{tokens:,} tokens, and {job.parallel} times their ids"),
            "transient loss": State(bytes_of["loss_chunk"], "logits of a chunk, with gradients, float32"),
            "transient layer": State(bytes_of["layer_chunk"], "a chunk inside a layer"),
        }
    hidden, vocab = model.hidden, model.vocab_size
    # In addition, in float32: the sums of attention's softmax, and mean and deviation of two norms.
    layer = tokens * ((9 * hidden + 2 * model.intermediate) * size + 4 * model.heads + 16)
    working = tokens * (hidden + model.intermediate) * size
    whole = tokens * hidden * size
    kept, again = ("all of", "") if not job.checkpointing else ("inputs of", ", which is computed again")
    return {
        "activations": State(
            round(job.stored * (whole if job.checkpointing else layer) * model.layers) + 2 * whole,
            f"{tokens:,} tokens, {kept} {model.layers} layers",
        ),
        "transient loss": State(12 * tokens * vocab, f"logits of {vocab:,}, with gradients, float32"),
        "transient layer": State(working + layer * job.checkpointing, f"gradients inside a layer{again}"),
    }


# ---- at which moment ----------------------------------------------------------------------------------------------------


def _summed(states: States, job: Job, freed: int) -> Footprint:
    """The moments of a step.

    When the first buckets of gradients are reduced, the same number of parameters and their activations are freed, and few
    buckets are in flight. The last messages of the refresh arrive when the same number of buckets of forward remain.
    Gradient accumulation buffers are empty until then.
    """
    total = sum(job.model.numels)

    def of(name: str) -> int:
        return states[name].bytes if name in states else 0

    held = sum(state.bytes for name, state in states.items() if not name.startswith(("transient", "activations")))
    before = held - of("gradient accumulation buffers")
    live, gather = of("transient parameters"), of("transient gather")
    bucket = job.reduce / total
    # Gradients that accumulate whole, in `freed` bytes per element, move from their gradient accumulation buffers into the
    # messages.
    freed *= min(job.reduce, total)

    def remaining(left: float) -> int:
        return round(left * of("activations")) + min(live, round(left * total * job.itemsize))

    def reducing(count: int) -> int:
        messages = round(of("transient reduce") * count / (IN_FLIGHT + 1))
        return (
            messages - min(count * freed, of("gradient accumulation buffers")) + remaining(max(1 - count * bucket, 0.0))
        )

    counts = [count for count in range(IN_FLIGHT + 2) if count < 2 or (count - 1) * bucket < 1]
    gathering = gather if live < total * job.itemsize else 0  # if all parameters stay whole, backward gathers nothing
    moments = {
        "the loss": held + live + of("activations") + of("transient loss"),
        "backward": held + gathering + of("transient layer") + max(map(reducing, counts)),
        "the optimizer": before + max(of("transient step"), of("transient matrices")),
    }
    if refresh := of("transient refresh"):
        done = max(1 - (IN_FLIGHT + 1) * job.prefetch / total, 0.0)
        moments["the refresh"] = before + refresh + gather + remaining(done)
    slack = {name: max(round(SLACK * (count - held)), 0) for name, count in moments.items()}
    moments = {name: count + slack[name] for name, count in moments.items()}
    fullest = max(moments, key=lambda name: moments[name])
    what = f"assumed: {SLACK:.0%} of what comes and goes, for its blocks"
    return Footprint({**states, "allocator": State(slack[fullest], what)}, moments, fullest)
