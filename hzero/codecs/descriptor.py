"""The ``hz_bucket`` structure of hip_kernels/bucket.h, the argument of every kernel, as a numpy type."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hzero.codecs.arguments import Rounding
from hzero.codecs.formats import EXP_BLOCK, RecordFormat
from hzero.codecs.layout import layout_of
from hzero.codecs.reference import noise_key
from hzero.codecs.scales import scale_limit

#: ``HZ_BUCKET_VERSION``, ``HZ_BUCKET_TENSORS``, ``HZ_BUCKET_AXES`` and ``HZ_THREADS`` of the C side.
VERSION, TENSORS, AXES, THREADS = 6, 40, 6, 256
#: ``zfp_group`` of the host's codec ``zfp``: elements whose blocks take whole words.
ZFP_GROUP = 64

_TENSOR = np.dtype(
    [
        *((name, "u8") for name in ("data", "residual", "left")),
        *((name, "i8") for name in ("numel", "start", "out_start")),
        *((name, "u4") for name in ("chunk", "scales", "out_scales", "record_bytes", "out_record_bytes")),
        *((name, "u4") for name in ("first_block", "first_group")),
        ("factor", "f4"),
    ],
    align=True,
)

#: The whole structure.
BUCKET = np.dtype(
    [
        *((name, "u8") for name in ("payload", "out_payload")),
        *((name, "i8") for name in ("row_bytes", "out_row_bytes")),
        *((name, "u4") for name in ("outer", "inner", "out_inner", "block_size", "scale_bytes", "out_scale_bytes")),
        ("limit", "f4"),
        *((name, "u4") for name in ("stochastic", "key", "rotation", "rate", "dimension", "difference", "axes")),
        *((name, "u4", AXES) for name in ("sizes", "strides")),
        *((name, "u4") for name in ("tensors", "workgroups", "lanes")),
        ("tensor", _TENSOR, TENSORS),
    ],
    align=True,
)


@dataclass(frozen=True)
class Shape:
    """A kernel call without addresses, counts of elements and the seed.

    Attributes:
        chunks: Elements of one shard of each tensor.
        rows: Rows to work on: those of the payload, or of one peer's message.
        sizes: Axes of the rows.
        strides: Strides of the axes, in shards.
        outer: Pieces of the payload; for a sum, its peers.
        inner: Rows of a piece.
        fmt: Format of the payload.
        dtype: Type of the elements; only its size and range matter.
        out: Format of a second payload, to write, or None.
        out_outer: Pieces of that payload.
        wave: Lanes of the device's wave; 0 for a CPU.
        encodes: Whether the payload is written. Codec ``exp`` encodes whole blocks and decodes single lines, codec ``mpc``
            encodes whole records and decodes single chunks.
    """

    chunks: tuple[int, ...]
    rows: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    outer: int
    inner: int
    fmt: RecordFormat
    dtype: torch.dtype
    out: RecordFormat | None = None
    out_outer: int = 1
    wave: int = 0
    encodes: bool = False

    @property
    def block_size(self) -> int:
        """Elements that are worked on together."""
        if self.fmt.codec == "zfp":
            return ZFP_GROUP
        if self.encodes and self.fmt.codec in ("exp", "mpc"):
            return EXP_BLOCK if self.fmt.codec == "exp" else max(self.chunks)
        return self.fmt.block_size

    @property
    def lanes(self) -> int:
        """Threads of a device that share a block: 16 elements each, a power of two; of a long block again and again."""
        return min(1 << (self.block_size // 16 - 1).bit_length(), THREADS)

    def groups(self, chunk: int) -> int:
        """Workgroups of a device that a tensor takes."""
        together = self.block_size * (THREADS // self.lanes)
        return -(-chunk // together) * self.rows

    @functools.cached_property
    def fits(self) -> bool:
        """Whether kernels can do it.

        They take shards of fewer than 2**31 elements and records of fewer than 2**32 bytes, rows of at most six axes, and
        no more workgroups than a device starts: AMD's devices count threads in 32 bits.
        """
        longest = max(self.chunks)
        if longest >= 2**31 or len(self.sizes) > AXES or self.rows >= 2**31:
            return False
        if self.fmt.record_bytes(longest, self.dtype.itemsize) >= 2**32:
            return False
        return not self.wave or sum(self.groups(chunk) for chunk in self.chunks) * THREADS < 2**32

    @functools.cached_property
    def templates(self) -> tuple[tuple[bytes, list[int]], ...]:
        """Structures without addresses, counts of elements and keys; and the indices of the tensors in each."""
        return _templates(self)


def _templates(shape: Shape) -> tuple[tuple[bytes, list[int]], ...]:
    layout = layout_of(shape.chunks, shape.fmt, shape.dtype.itemsize)
    # Sums are float32, whatever was encoded.
    out = layout_of(shape.chunks, shape.out, torch.float32.itemsize) if shape.out else None
    whole = [index for index, chunk in enumerate(shape.chunks) if chunk]
    made = []
    for first in range(0, len(whole), TENSORS):
        some = np.array(whole[first : first + TENSORS])
        bucket = np.zeros((), BUCKET)
        bucket["row_bytes"], bucket["outer"], bucket["inner"] = layout.row_bytes, shape.outer, shape.inner
        bucket["block_size"], bucket["scale_bytes"] = shape.block_size, shape.fmt.scale_bytes
        bucket["rotation"], bucket["rate"], bucket["dimension"] = (
            shape.fmt.rotation,
            shape.fmt.rate,
            shape.fmt.dimension,
        )
        if shape.fmt.scale_bytes:
            bucket["limit"] = scale_limit(shape.out or shape.fmt, torch.float32 if shape.out else shape.dtype)
        bucket["axes"], bucket["tensors"], bucket["lanes"] = len(shape.sizes), len(some), shape.lanes
        bucket["sizes"][: len(shape.sizes)], bucket["strides"][: len(shape.strides)] = shape.sizes, shape.strides
        tensor = bucket["tensor"][: len(some)]
        tensor["chunk"] = [shape.chunks[index] for index in some]
        tensor["first_block"] = np.array(layout.block_starts)[some] % 2**32
        tensor["start"], tensor["record_bytes"] = (
            np.array(offsets)[some] for offsets in (layout.record_starts, layout.record_bytes)
        )
        tensor["scales"] = np.array(layout.scales_offsets)[some]
        if out:
            assert shape.out
            bucket["out_row_bytes"], bucket["out_inner"] = out.row_bytes, shape.rows // shape.out_outer
            bucket["out_scale_bytes"] = shape.out.scale_bytes
            tensor["out_start"], tensor["out_record_bytes"], tensor["out_scales"] = (
                np.array(offsets)[some] for offsets in (out.record_starts, out.record_bytes, out.scales_offsets)
            )
        if shape.wave:
            groups = [shape.groups(shape.chunks[index]) for index in some]
            tensor["first_group"] = np.cumsum([0, *groups[:-1]])
            bucket["workgroups"] = sum(groups)
        made.append((bucket.tobytes(), some.tolist()))
    return tuple(made)


def buckets_of(
    shape: Shape,
    payload: torch.Tensor,
    tensors: Sequence[torch.Tensor] = (),
    *,
    out_payload: torch.Tensor | None = None,
    residuals: Sequence[torch.Tensor] = (),
    factors: Sequence[float] = (),
    left: Sequence[torch.Tensor] = (),
    difference: bool = False,
    rounding: Rounding | None = None,
) -> Iterator[np.ndarray]:
    """The structures of one call: several where the bucket has more tensors than one holds, none where it has none.

    Args:
        shape: The rest of the call.
        payload: uint8 payload to read or write.
        tensors: The source, or the output of decoding, one tensor of each chunk; empty where neither is involved.
        out_payload: A second uint8 payload, to write.
        residuals: float32 tensors to add before encoding, or that sums start from, of the sizes of ``tensors``; an empty
            one adds nothing. Tensors of the elements' type that are added after decoding, or with ``difference``.
        factors: Factors of the residuals, where they are encoded.
        left: Outputs for the new residuals.
        difference: Whether residuals are subtracted from the source.
        rounding: How to round; None where nothing is encoded.

    Yields:
        Values of `BUCKET`, ready for a kernel.
    """
    for template, some in shape.templates:
        # A copy of the array itself would go field by field.
        bucket = np.frombuffer(bytearray(template), BUCKET).reshape(())
        bucket["payload"] = payload.data_ptr()
        if out_payload is not None:
            bucket["out_payload"] = out_payload.data_ptr()
        if rounding is not None and rounding.stochastic:
            bucket["stochastic"], bucket["key"] = 1, noise_key(rounding.seed)
        each: Any = bucket["tensor"][: len(some)]
        if tensors:
            each["data"] = [tensors[index].data_ptr() for index in some]
            each["numel"] = [tensors[index].numel() for index in some]
        if residuals:
            each["residual"] = [residuals[index].data_ptr() if residuals[index].numel() else 0 for index in some]
        if left:
            each["left"] = [left[index].data_ptr() for index in some]
            each["factor"] = [factors[index] for index in some]
        if difference:
            bucket["difference"], each["factor"] = 1, -1.0
        yield bucket


def axes_of(sizes: Sequence[int], strides: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes of more than one row, as `Shape` wants them; one of size 1 if all have size 1."""
    kept = [(size, stride) for size, stride in zip(sizes, strides) if size > 1] or [(1, 1)]
    return tuple(size for size, _ in kept), tuple(stride for _, stride in kept)
