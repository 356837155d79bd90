"""The codec operators of the torch.library namespace ``hzero``: schema, checks, fake, and what computes them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from hzero.codecs import backends, reference
from hzero.config import CODECS
from hzero.sharding.records import SCALE_BYTES, RecordFormat

FLOATS = (torch.float32, torch.bfloat16, torch.float16)

torch.library.define(
    "hzero::encode",
    "(Tensor[] source, int[] chunks, int[] sizes, int[] strides, int outer, str codec, int block_size, str scale, "
    "bool stochastic, int seed) -> Tensor",
)
torch.library.define(
    "hzero::encode_feedback",
    "(Tensor[] source, Tensor[] residuals, float[] factors, int[] chunks, int[] sizes, int[] strides, int outer, "
    "str codec, int block_size, str scale, bool stochastic, int seed) -> (Tensor, Tensor[])",
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


# ---- checks: one line, the argument first ---------------------------------------------------------------------------


def _format(codec: str, block_size: int, scale: str, prefix: str = "") -> RecordFormat:
    if codec not in CODECS:
        raise ValueError(f"{prefix}codec: found {codec!r}, possible: {', '.join(CODECS)}")
    if codec not in ("none", "bf16"):
        if scale not in SCALE_BYTES:
            raise ValueError(f"{prefix}scale: found {scale!r}, possible: {', '.join(SCALE_BYTES)}")
        if not 16 <= block_size <= 4096 or block_size % 16:
            raise ValueError(f"{prefix}block_size: found {block_size}, expected a multiple of 16 from 16 to 4096")
    return RecordFormat.of(codec, block_size, scale)


def _rows(sizes: Sequence[int], strides: Sequence[int], outer: int) -> int:
    _check_axes(tuple(sizes), tuple(strides))
    rows = math.prod(sizes)
    if outer < 1 or rows % outer:
        raise ValueError(f"outer: found {outer}, which does not divide the {rows} rows")
    return rows


@functools.lru_cache(maxsize=256)
def _check_axes(sizes: tuple[int, ...], strides: tuple[int, ...]) -> None:
    if not sizes or min(sizes) < 1:
        raise ValueError(f"sizes: found {list(sizes)}, expected at least one, each at least 1")
    if len(strides) != len(sizes):
        raise ValueError(f"strides: found {len(strides)} of them for {len(sizes)} sizes")
    # Sums of multiples of the strides are 0, 1, .. without gap or repetition just where each stride is the product of
    # the sizes of smaller ones. Otherwise some shard would be written twice and another never.
    reached = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, sizes) if size > 1):
        if stride != reached:
            raise ValueError(
                f"strides: {list(strides)} with sizes {list(sizes)} do not reach each of the {math.prod(sizes)} shards "
                "once"
            )
        reached *= size


def _check_dtype(dtype: torch.dtype, name: str) -> None:
    if dtype not in FLOATS:
        raise TypeError(f"{name}: found {dtype}, expected float32, bfloat16 or float16")


def _check_chunks(chunks: Sequence[int]) -> None:
    if not chunks or min(chunks) < 0:
        raise ValueError(f"chunks: found {list(chunks)[:8]}, expected at least one, none negative")


def _check_storage(tensor: torch.Tensor, name: str) -> None:
    """Refuses a tensor whose memory was taken away, as sharding engines do: a kernel would read what is there now."""
    needed = (tensor.storage_offset() + tensor.numel()) * tensor.element_size() if tensor.numel() else 0
    found = tensor.untyped_storage().nbytes()
    if found < needed:
        raise ValueError(f"{name}: found {found} bytes of storage, expected {needed}: its memory was freed")


def _check_source(source: Sequence[torch.Tensor], chunks: Sequence[int], rows: int) -> None:
    _check_chunks(chunks)
    if len(source) != len(chunks):
        raise ValueError(f"source: found {len(source)} tensors for {len(chunks)} chunks")
    dtype, device = source[0].dtype, source[0].device
    for index, (tensor, chunk) in enumerate(zip(source, chunks)):
        _check_dtype(tensor.dtype, f"source[{index}]")
        if tensor.dtype != dtype or tensor.device != device:
            raise TypeError(
                f"source[{index}]: found {tensor.dtype} on {tensor.device}, but source[0] is {dtype} on {device}"
            )
        if not tensor.is_contiguous():
            raise ValueError(f"source[{index}]: found strides {tuple(tensor.stride())}, expected a contiguous tensor")
        _check_storage(tensor, f"source[{index}]")
        if tensor.numel() > rows * chunk:
            raise ValueError(
                f"source[{index}]: found {tensor.numel()} elements, expected at most {rows * chunk}: "
                f"{rows} shards of {chunk}"
            )


def _check_residuals(
    residuals: Sequence[torch.Tensor], factors: Sequence[float], source: Sequence[torch.Tensor]
) -> None:
    for name, found in (("residuals", residuals), ("factors", factors)):
        if len(found) != len(source):
            raise ValueError(f"{name}: found {len(found)} for {len(source)} sources")
    for index, (residual, tensor) in enumerate(zip(residuals, source)):
        name = f"residuals[{index}]"
        if residual.dtype != torch.float32 or residual.device != tensor.device:
            raise TypeError(f"{name}: found {residual.dtype} on {residual.device}, expected float32 on {tensor.device}")
        if not residual.is_contiguous():
            raise ValueError(f"{name}: found strides {tuple(residual.stride())}, expected a contiguous tensor")
        _check_storage(residual, name)
        if residual.numel() not in (0, tensor.numel()):
            raise ValueError(
                f"{name}: found {residual.numel()} elements, expected none or the {tensor.numel()} of source[{index}]"
            )


def _summed_rows(peers: int, inner: int) -> int:
    for name, count in (("peers", peers), ("inner", inner)):
        if count < 1:
            raise ValueError(f"{name}: found {count}, expected at least 1")
    return peers * inner


def _check_payload(
    payload: torch.Tensor, fmt: RecordFormat, chunks: Sequence[int], rows: int, dtype: torch.dtype
) -> None:
    _check_dtype(dtype, "dtype")
    _check_chunks(chunks)
    if payload.dtype != torch.uint8 or payload.dim() != 1:
        raise TypeError(f"payload: found {payload.dtype} of {payload.dim()} dimensions, expected uint8 of one")
    if not payload.is_contiguous():
        raise ValueError(f"payload: found stride {payload.stride()[0]}, expected a contiguous tensor")
    _check_storage(payload, "payload")
    expected = fmt.message_bytes(chunks, rows, dtype.itemsize)
    if payload.numel() != expected:
        raise ValueError(
            f"payload: found {payload.numel()} bytes, expected {expected}: {rows} rows of chunks {list(chunks)[:8]} "
            f"in codec {fmt.codec}"
        )


# ---- backends: what computes behind the checks ----------------------------------------------------------------------


def _operators(backend: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every operator by its qualified name: the checks, then the function of that name of ``backend``.

    A backend takes formats in place of their settings; `hzero.codecs.reference` shows the functions.
    """

    def encode(
        source: Sequence[torch.Tensor],
        chunks: Sequence[int],
        sizes: Sequence[int],
        strides: Sequence[int],
        outer: int,
        codec: str,
        block_size: int,
        scale: str,
        stochastic: bool,
        seed: int,
    ) -> torch.Tensor:
        fmt = _format(codec, block_size, scale)
        _check_source(source, chunks, _rows(sizes, strides, outer))
        return backend.encode(source, chunks, sizes, strides, outer, fmt, stochastic, seed)

    def encode_feedback(
        source: Sequence[torch.Tensor],
        residuals: Sequence[torch.Tensor],
        factors: Sequence[float],
        chunks: Sequence[int],
        sizes: Sequence[int],
        strides: Sequence[int],
        outer: int,
        codec: str,
        block_size: int,
        scale: str,
        stochastic: bool,
        seed: int,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        fmt = _format(codec, block_size, scale)
        _check_source(source, chunks, _rows(sizes, strides, outer))
        _check_residuals(residuals, factors, source)
        return backend.encode_feedback(source, residuals, factors, chunks, sizes, strides, outer, fmt, stochastic, seed)

    def decode(
        payload: torch.Tensor,
        chunks: Sequence[int],
        sizes: Sequence[int],
        strides: Sequence[int],
        outer: int,
        codec: str,
        block_size: int,
        scale: str,
        dtype: torch.dtype,
    ) -> list[torch.Tensor]:
        fmt = _format(codec, block_size, scale)
        _check_payload(payload, fmt, chunks, _rows(sizes, strides, outer), dtype)
        return backend.decode(payload, chunks, sizes, strides, outer, fmt, dtype)

    def decode_sum(
        payload: torch.Tensor,
        peers: int,
        chunks: Sequence[int],
        inner: int,
        codec: str,
        block_size: int,
        scale: str,
        dtype: torch.dtype,
    ) -> list[torch.Tensor]:
        fmt = _format(codec, block_size, scale)
        _check_payload(payload, fmt, chunks, _summed_rows(peers, inner), dtype)
        return backend.decode_sum(payload, peers, chunks, inner, fmt, dtype)

    def decode_sum_encode(
        payload: torch.Tensor,
        peers: int,
        chunks: Sequence[int],
        inner: int,
        codec: str,
        block_size: int,
        scale: str,
        dtype: torch.dtype,
        outer: int,
        out_codec: str,
        out_block_size: int,
        out_scale: str,
        stochastic: bool,
        seed: int,
    ) -> torch.Tensor:
        fmt, out = _format(codec, block_size, scale), _format(out_codec, out_block_size, out_scale, "out_")
        _check_payload(payload, fmt, chunks, _summed_rows(peers, inner), dtype)
        _rows((inner,), (1,), outer)
        return backend.decode_sum_encode(payload, peers, chunks, inner, fmt, dtype, outer, out, stochastic, seed)

    for operator in (encode, encode_feedback, decode, decode_sum, decode_sum_encode):
        yield f"hzero::{operator.__name__}", operator


class _Fake:
    """The backend of tracing: outputs of the right size, type and device, without their content."""

    @staticmethod
    def encode(
        source: Sequence[torch.Tensor],
        chunks: Sequence[int],
        sizes: Sequence[int],
        strides: Sequence[int],
        outer: int,
        fmt: RecordFormat,
        *rounding: Any,
    ) -> torch.Tensor:
        size = fmt.message_bytes(chunks, math.prod(sizes), source[0].dtype.itemsize)
        return source[0].new_empty(size, dtype=torch.uint8)

    @classmethod
    def encode_feedback(
        cls,
        source: Sequence[torch.Tensor],
        residuals: Sequence[torch.Tensor],
        factors: Sequence[float],
        *layout: Any,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        # What is encoded are float32 sums.
        left = [tensor.new_empty(tensor.numel(), dtype=torch.float32) for tensor in source]
        return cls.encode(left, *layout), left

    @staticmethod
    def decode(
        payload: torch.Tensor,
        chunks: Sequence[int],
        sizes: Sequence[int],
        strides: Sequence[int],
        outer: int,
        fmt: RecordFormat,
        dtype: torch.dtype,
    ) -> list[torch.Tensor]:
        return [payload.new_empty(math.prod(sizes) * chunk, dtype=dtype) for chunk in chunks]

    @staticmethod
    def decode_sum(
        payload: torch.Tensor, peers: int, chunks: Sequence[int], inner: int, fmt: RecordFormat, dtype: torch.dtype
    ) -> list[torch.Tensor]:
        return [payload.new_empty(inner * chunk, dtype=torch.float32) for chunk in chunks]

    @staticmethod
    def decode_sum_encode(
        payload: torch.Tensor,
        peers: int,
        chunks: Sequence[int],
        inner: int,
        fmt: RecordFormat,
        dtype: torch.dtype,
        outer: int,
        out: RecordFormat,
        *rounding: Any,
    ) -> torch.Tensor:
        return payload.new_empty(out.message_bytes(chunks, inner, torch.float32.itemsize), dtype=torch.uint8)


# Tensors of a processor and of a GPU go to the backend that is in use for them, all others to the reference.
for _key, _backend in (
    ("CompositeExplicitAutograd", reference),
    ("CPU", backends.Current("cpu")),
    ("CUDA", backends.Current("cuda")),
):
    for _name, _operator in _operators(_backend):
        torch.library.impl(_name, _key)(_operator)
for _name, _operator in _operators(_Fake):
    torch.library.register_fake(_name)(_operator)
