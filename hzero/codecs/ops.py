"""The codec operators of the torch.library namespace ``hzero``: schema, checks, fake, and the reference backend."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hzero.codecs import reference
from hzero.config import CODECS
from hzero.sharding.records import RecordFormat

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_SCALES = {"bf16": 2, "fp32": 4}

torch.library.define(
    "hzero::encode",
    "(Tensor[] source, int[] chunks, int[] sizes, int[] strides, int outer, str codec, int block_size, str scale, "
    "bool stochastic, int seed) -> Tensor",
)
torch.library.define(
    "hzero::decode",
    "(Tensor payload, int[] chunks, int[] sizes, int[] strides, int outer, str codec, int block_size, str scale, "
    "ScalarType dtype) -> Tensor[]",
)
torch.library.define(
    "hzero::decode_sum",
    "(Tensor payload, int peers, int[] chunks, int inner, str codec, int block_size, str scale, ScalarType dtype) "
    "-> Tensor[]",
)
torch.library.define(
    "hzero::decode_sum_encode",
    "(Tensor payload, int peers, int[] chunks, int inner, str codec, int block_size, str scale, ScalarType dtype, "
    "int outer, str out_codec, int out_block_size, str out_scale, bool stochastic, int seed) -> Tensor",
)


# ---- checks ---------------------------------------------------------------------------------------------------------


def _format(codec: str, block_size: int, scale: str) -> RecordFormat:
    if codec not in CODECS:
        raise ValueError(f"codec: found {codec!r}, possible: {', '.join(CODECS)}")
    if codec in ("none", "bf16"):
        return RecordFormat(codec, 0, 0)
    if scale not in _SCALES:
        raise ValueError(f"scale: found {scale!r}, possible: {', '.join(_SCALES)}")
    if not 16 <= block_size <= 4096 or block_size % 16:
        raise ValueError(f"block_size: found {block_size}, expected a multiple of 16 from 16 to 4096")
    return RecordFormat(codec, block_size, _SCALES[scale])


def _rows(sizes: Sequence[int], strides: Sequence[int], outer: int) -> int:
    if len(sizes) != len(strides) or not sizes:
        raise ValueError(f"strides: found {len(strides)} of them for {len(sizes)} sizes")
    rows = 1
    for size in sizes:
        rows *= size
    if outer < 1 or rows < 1 or rows % outer:
        raise ValueError(f"outer: found {outer}, which does not divide the {rows} rows")
    if any(s < 0 for s in strides) or sum((n - 1) * s for n, s in zip(sizes, strides)) >= rows:
        raise ValueError(f"strides: {list(strides)} lead beyond the {rows} shards of sizes {list(sizes)}")
    return rows


def _check_dtype(dtype: torch.dtype, name: str) -> None:
    if dtype not in FLOATS:
        raise TypeError(f"{name}: found {dtype}, expected float32, bfloat16 or float16")


def _check_source(source: Sequence[torch.Tensor], chunks: Sequence[int], rows: int) -> None:
    if not source or len(source) != len(chunks):
        raise ValueError(f"chunks: found {len(chunks)} of them for {len(source)} source tensors (at least one)")
    for index, (tensor, chunk) in enumerate(zip(source, chunks)):
        _check_dtype(tensor.dtype, f"source[{index}]")
        if tensor.dtype != source[0].dtype or tensor.device != source[0].device:
            raise TypeError(
                f"source[{index}]: found {tensor.dtype} on {tensor.device}, but source[0] is {source[0].dtype} on "
                f"{source[0].device}"
            )
        if not tensor.is_contiguous():
            raise ValueError(f"source[{index}]: not contiguous")
        if chunk < 0 or tensor.numel() > rows * chunk:
            raise ValueError(f"source[{index}]: {tensor.numel()} elements do not fit {rows} shards of {chunk}")


def _check_payload(payload: torch.Tensor, fmt: RecordFormat, chunks: Sequence[int], rows: int, itemsize: int) -> None:
    if payload.dtype != torch.uint8 or payload.dim() != 1:
        raise TypeError(f"payload: found {payload.dtype} of {payload.dim()} dimensions, expected uint8 of one")
    expected = fmt.message_bytes(chunks, rows, itemsize)
    if payload.numel() != expected:
        raise ValueError(
            f"payload: found {payload.numel()} bytes, expected {expected} for {rows} rows of chunks {list(chunks)[:8]} in "
            f"codec {fmt.codec}"
        )


# ---- reference backend and fakes --------------------------------------------------------------------------------------


@torch.library.impl("hzero::encode", "CompositeExplicitAutograd")
def _encode(source, chunks, sizes, strides, outer, codec, block_size, scale, stochastic, seed):  # type: ignore[no-untyped-def]
    fmt = _format(codec, block_size, scale)
    _check_source(source, chunks, _rows(sizes, strides, outer))
    return reference.encode(source, chunks, sizes, strides, outer, fmt, stochastic, seed)


@torch.library.register_fake("hzero::encode")
def _encode_fake(source, chunks, sizes, strides, outer, codec, block_size, scale, stochastic, seed):  # type: ignore[no-untyped-def]
    fmt = _format(codec, block_size, scale)
    rows = _rows(sizes, strides, outer)
    _check_source(source, chunks, rows)
    return source[0].new_empty(fmt.message_bytes(chunks, rows, source[0].dtype.itemsize), dtype=torch.uint8)


@torch.library.impl("hzero::decode", "CompositeExplicitAutograd")
def _decode(payload, chunks, sizes, strides, outer, codec, block_size, scale, dtype):  # type: ignore[no-untyped-def]
    fmt = _format(codec, block_size, scale)
    _check_dtype(dtype, "dtype")
    _check_payload(payload, fmt, chunks, _rows(sizes, strides, outer), dtype.itemsize)
    return reference.decode(payload, chunks, sizes, strides, outer, fmt, dtype)


@torch.library.register_fake("hzero::decode")
def _decode_fake(payload, chunks, sizes, strides, outer, codec, block_size, scale, dtype):  # type: ignore[no-untyped-def]
    fmt = _format(codec, block_size, scale)
    rows = _rows(sizes, strides, outer)
    _check_dtype(dtype, "dtype")
    _check_payload(payload, fmt, chunks, rows, dtype.itemsize)
    return [payload.new_empty(rows * chunk, dtype=dtype) for chunk in chunks]


@torch.library.impl("hzero::decode_sum", "CompositeExplicitAutograd")
def _decode_sum(payload, peers, chunks, inner, codec, block_size, scale, dtype):  # type: ignore[no-untyped-def]
    fmt = _format(codec, block_size, scale)
    _check_dtype(dtype, "dtype")
    _check_payload(payload, fmt, chunks, peers * inner, dtype.itemsize)
    return reference.decode_sum(payload, peers, chunks, inner, fmt, dtype)


@torch.library.register_fake("hzero::decode_sum")
def _decode_sum_fake(payload, peers, chunks, inner, codec, block_size, scale, dtype):  # type: ignore[no-untyped-def]
    fmt = _format(codec, block_size, scale)
    _check_dtype(dtype, "dtype")
    _check_payload(payload, fmt, chunks, peers * inner, dtype.itemsize)
    return [payload.new_empty(inner * chunk, dtype=torch.float32) for chunk in chunks]


@torch.library.impl("hzero::decode_sum_encode", "CompositeExplicitAutograd")
def _decode_sum_encode(  # type: ignore[no-untyped-def]
    payload,
    peers,
    chunks,
    inner,
    codec,
    block_size,
    scale,
    dtype,
    outer,
    out_codec,
    out_block_size,
    out_scale,
    stochastic,
    seed,
):
    fmt, out = _format(codec, block_size, scale), _format(out_codec, out_block_size, out_scale)
    _check_dtype(dtype, "dtype")
    _check_payload(payload, fmt, chunks, peers * inner, dtype.itemsize)
    _rows((inner,), (1,), outer)
    return reference.decode_sum_encode(payload, peers, chunks, inner, fmt, dtype, outer, out, stochastic, seed)


@torch.library.register_fake("hzero::decode_sum_encode")
def _decode_sum_encode_fake(  # type: ignore[no-untyped-def]
    payload,
    peers,
    chunks,
    inner,
    codec,
    block_size,
    scale,
    dtype,
    outer,
    out_codec,
    out_block_size,
    out_scale,
    stochastic,
    seed,
):
    fmt, out = _format(codec, block_size, scale), _format(out_codec, out_block_size, out_scale)
    _check_dtype(dtype, "dtype")
    _check_payload(payload, fmt, chunks, peers * inner, dtype.itemsize)
    _rows((inner,), (1,), outer)
    return payload.new_empty(out.message_bytes(chunks, inner, torch.float32.itemsize), dtype=torch.uint8)
