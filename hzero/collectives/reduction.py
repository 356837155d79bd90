"""One hop of a reduction: parts to all peers, and with a lossless codec their sum.

Codecs ``exp`` and ``mpc`` give the bits of codec ``none`` in fewer bytes. What is summed stays in codec ``none`` in memory, and
so in the type that codec ``none`` would send. A hop encodes it, moves it as any other payload, decodes it, and sums it in
float32 and in peer order, as a hop with codec ``none`` does.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from hzero.codecs import Codec
from hzero.collectives.bucket import Bucket
from hzero.collectives.hop import Recodes, cross
from hzero.collectives.pipeline import Hops
from hzero.collectives.transport import Transport, sum_of
from hzero.config import LOSSLESS, PLAIN, CodecConfig
from hzero.sharding.plan import Hop


def in_memory(hop: Hop) -> CodecConfig:
    """The codec of what a reduction has before and after a hop: with a lossless one on the wire ``none``."""
    return PLAIN if hop.codec.codec in LOSSLESS else hop.codec


def crossed(
    tiered: Recodes, transport: Transport, hop: Hop, bucket: Bucket, message: torch.Tensor, pieces: int, rows: int
) -> Hops[torch.Tensor]:
    """One hop of a reduction.

    Args:
        tiered: The collectives whose hop it is.
        transport: Its transport.
        hop: The hop.
        bucket: The tensors; with codec ``mpc`` one.
        message: uint8, in the codec `in_memory`: ``pieces`` pieces ``[tensor][rows / pieces][record]``, those for one peer one
            after the other.
        pieces: A multiple of the tier's size.
        rows: Shards of each tensor.

    Yields:
        Each collective, once it is started.

    Returns:
        uint8, in the same codec: the parts of all peers, or with a lossless codec their sum, rounded once to the bucket's type.

    Raises:
        HopError: As `cross`.
    """
    held = Codec.from_config(in_memory(hop))
    layout: dict[str, Any] = {"outer": pieces, "rows": rows // pieces, "seed": 0}
    on_wire = held.name == "none" and hop.codec.codec != "none"
    move = partial(transport.scatter, summed=bucket.dtype if hop.codec.codec == "none" else None)
    payload, size = [message], hop.size
    codec = yield from cross(
        tiered, transport, hop, bucket, payload, held, move, peers=1 - 1 / size, parts=size, **layout
    )
    if not on_wire:
        return payload.pop()
    parts, _ = tiered.transcode(bucket, payload.pop(), codec, PLAIN, **layout)
    return sum_of(parts.view(bucket.dtype).view(hop.size, -1)).view(torch.uint8)
