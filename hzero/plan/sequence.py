"""Sequence: what chunks keep on the device and on the host, copy between them and exchange, by rank and micro-step."""

from __future__ import annotations

import itertools
import math
from typing import Any

from hzero.config import Tier, TierCodecs
from hzero.plan.collectives import exchange_bytes
from hzero.plan.scenario import Job
from hzero.topology import Grid


def chunked(job: Job) -> dict[str, Any]:
    """Bytes of chunked sequences on one rank, in a micro-step.

    Args:
        job: With the key ``sequence``.

    Returns:
        ``device_token``, of one of the rank's tokens on the device, at the fullest moment; ``host_token``, the same on the
        host, 0 without offloading; ``layer_chunk``, on the device for a chunk on its way through a layer; ``loss_chunk``, the
        same of the loss; ``to_host`` and ``to_device``, copied; ``flops``, operations, with those that backward repeats.
    """
    (queries, keys, tokens, chunk), offload = _shape(job), job.sequence is not None and job.sequence.offload
    model, size, hidden, layers = job.model, job.itemsize, job.model.hidden, job.model.layers
    # Chunks of keys and values come back once for every later chunk; so do float32 sums of their gradients.
    count = math.ceil(tokens / chunk)
    again = chunk * count * (count - 1) // 2
    pair, sums = 2 * keys * size, 2 * keys * 4
    # What a layer attends to, its queries, their results with sums of exponentials, keys and values.
    attention = 3 * queries * size + 4 * model.heads + pair
    copied_out = tokens * (hidden * size + attention + pair) + again * sums
    copied_back = tokens * (3 * hidden * size + attention) + again * (3 * pair + sums)
    ends = tokens * 2 * hidden * size  # inputs of the last norm and of the loss
    # The input of every layer; of one in its backward also the rest.
    kept = layers * hidden * size + attention + sums
    # Forward, forward again and twice as much backward; layers project three times more, to run up to their attention.
    linear = 4 * (sum(model.numels) - model.idle) + 3 * layers * hidden * (queries + 2 * model.keys)
    return {
        # Gradients of a layer's result and of its input, cosines and sines.
        "device_token": 2 * (hidden + model.rotary) * size + kept * (not offload),
        "host_token": kept * offload,
        "layer_chunk": chunk * (18 * hidden + 6 * model.intermediate) * size,  # measured for a gated MLP
        "loss_chunk": 12 * max(min(4 * chunk * hidden, chunk * model.vocab_size), model.vocab_size),
        "to_host": job.micro_batch * (layers * copied_out + ends) * offload,
        "to_device": job.micro_batch * (layers * copied_back + ends) * offload,
        "flops": job.tokens * (2.0 * linear + 8.0 * job.seq_length * model.attention),
    }


def exchanged(job: Job, grid: Grid, codecs: TierCodecs) -> dict[Tier, int]:
    """Bytes that a rank receives in a micro-step's exchanges, by tier.

    Args:
        job: The job.
        grid: Of the world.
        codecs: Of ``codecs.sequence``.
    """
    (queries, keys, tokens, chunk), ranks = _shape(job), job.parallel
    group = grid.of_ranks(range(ranks))  # of neighbours
    # Forward, forward again, and gradients: queries, keys and values one way, and what is attended to the other.
    sent = itertools.product(range(0, tokens, chunk), (queries + 2 * keys, queries))
    numels = [job.micro_batch * min(chunk, tokens - start) * width // ranks for start, width in sent]
    found = exchange_bytes(group, codecs, numels, job.itemsize)
    return {tier: 3 * job.model.layers * size for tier, size in found.items()}


def _shape(job: Job) -> tuple[int, int, int, int]:
    """Widths of queries and of keys, which are repeated until the ranks can divide their heads; tokens of a rank, of a chunk."""
    assert job.sequence is not None
    queries, tokens = job.model.attention // job.model.layers, math.ceil(job.seq_length / job.parallel)
    keys = queries // job.model.heads * math.lcm(job.parallel, job.model.keys * job.model.heads // queries)
    return queries, keys, tokens, min(job.sequence.chunk, tokens)
