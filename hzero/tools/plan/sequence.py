"""Sequence: memory, copies and exchanges of chunked sequences, per rank and micro-batch."""

from __future__ import annotations

import itertools
import math
from typing import Any

from hzero.config import Tier, TierCodecs
from hzero.program.collectives import exchange_bytes
from hzero.tools.plan.scenario import Job
from hzero.topology import Grid


def chunked(job: Job) -> dict[str, Any]:
    """Bytes of chunked sequences on one rank, in a micro-batch.

    Args:
        job: A job with the key ``sequence``.

    Returns:
        ``device_token``: bytes per token of the rank on the device, at the maximum. ``host_token``: bytes per token on the
        host, 0 without offloading. ``layer_chunk``: bytes on the device for a chunk in a layer. ``loss_chunk``: bytes on the
        device for a chunk in the loss. ``to_host`` and ``to_device``: copied bytes. ``flops``: operations, including the
        operations that backward repeats. ``attention_flops``: those in attention.
    """
    (queries, keys, tokens, chunk), offload = _shape(job), job.sequence is not None and job.sequence.offload
    model, size, hidden, layers = job.model, job.itemsize, job.model.hidden, job.model.layers
    # Chunks of keys and values are copied back for every later chunk, and so are the float32 sums of their gradients.
    count = math.ceil(tokens / chunk)
    again = chunk * count * (count - 1) // 2
    pair, sums = 2 * keys * size, 2 * keys * 4
    # Attention of a layer: its input, queries, results with sums of exponentials, keys and values.
    attention = 3 * queries * size + 4 * model.heads + pair
    copied_out = tokens * (hidden * size + attention + pair) + again * sums
    copied_back = tokens * (3 * hidden * size + attention) + again * (3 * pair + sums)
    ends = tokens * 2 * hidden * size  # inputs of the last norm and of the loss
    # The input of every layer, and the tensors of attention of the layer in backward.
    kept = layers * hidden * size + attention + sums
    # Forward, recomputed forward, and backward with twice the operations. Layers project three more times to reach attention.
    attend = 8.0 * job.tokens * job.seq_length * model.attention  # each token attends to half of the others, on average
    linear = 4 * (sum(model.numels) - model.idle) + 3 * layers * hidden * (queries + 2 * model.keys)
    return {
        # Gradients of a layer's result and input, cosines and sines.
        "device_token": 2 * (hidden + model.rotary) * size + kept * (not offload),
        "host_token": kept * offload,
        "layer_chunk": chunk * (18 * hidden + 6 * model.intermediate) * size,  # measured for a gated MLP
        "loss_chunk": 12 * max(min(4 * chunk * hidden, chunk * model.vocab_size), model.vocab_size),
        "to_host": job.micro_batch * (layers * copied_out + ends) * offload,
        "to_device": job.micro_batch * (layers * copied_back + ends) * offload,
        "flops": 2.0 * job.tokens * linear + attend,
        "attention_flops": attend,
    }


def exchanged(job: Job, grid: Grid, codecs: TierCodecs) -> dict[Tier, int]:
    """Bytes that a rank receives in a micro-batch's exchanges, by tier.

    Args:
        job: The job.
        grid: Grid of the world.
        codecs: The block's ``codecs.sequence``.
    """
    (queries, keys, tokens, chunk), ranks = _shape(job), job.parallel
    group = grid.of_ranks(range(ranks))  # a group has neighbouring ranks
    # Forward, recomputed forward, and gradients: queries, keys and values one way, and results of attention back.
    sent = itertools.product(range(0, tokens, chunk), (queries + 2 * keys, queries))
    numels = [job.micro_batch * min(chunk, tokens - start) * width // ranks for start, width in sent]
    found = exchange_bytes(group, codecs, numels, job.itemsize)
    return {tier: 3 * job.model.layers * size for tier, size in found.items()}


def _shape(job: Job) -> tuple[int, int, int, int]:
    """Widths of queries and keys, tokens of a rank and of a chunk. Keys are repeated until the ranks divide their heads."""
    assert job.sequence is not None
    queries, tokens = job.model.attention // job.model.layers, math.ceil(job.seq_length / job.parallel)
    keys = queries // job.model.heads * math.lcm(job.parallel, job.model.keys * job.model.heads // queries)
    return queries, keys, tokens, min(job.sequence.chunk, tokens)
