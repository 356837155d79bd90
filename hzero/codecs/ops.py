"""The codec operators of the torch.library namespace ``hzero``: schemas, checks, and dispatch to the backends.

The functions of `hzero.codecs.reference` named in `OPERATORS` state the signatures. Schemas follow from their
annotations; a parameter that is a tuple of `hzero.codecs.arguments`, or a format, becomes its fields, one by one. Every
backend, and the fake, has functions of the same names and parameters. So a new argument is a new field, and whatever
the kernels do with it.
"""

from __future__ import annotations

import functools
import inspect
import math
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch

from hzero.codecs import backends, outputs, reference
from hzero.codecs.arguments import Changed, Messages, Rounding, Rows
from hzero.codecs.formats import BLOCK_CODECS, ROTATIONS, SCALE_BYTES, RecordFormat
from hzero.config import CODECS, CODED_SCALE_BLOCKS, NOT_SUMMED, SUMMED

#: Names of the operators.
OPERATORS = (
    "encode",
    "encode_feedback",
    "encode_difference",
    "decode",
    "decode_onto",
    "decode_sum",
    "decode_add",
    "decode_sum_encode",
)

#: Codecs that encode one type alone.
_ONLY = {"exp": torch.bfloat16, "mpc": torch.float32}
#: Types that codecs take.
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
#: More rows than any world has ranks: their number is a 32-bit integer in kernels.
_ROWS = 2**31


# ---- checks: one line, the argument first ---------------------------------------------------------------------------


def _check_format(prefix: str, fmt: RecordFormat) -> RecordFormat:
    if fmt.codec not in CODECS:
        raise ValueError(f"{prefix}codec: found {fmt.codec!r}, possible: {', '.join(CODECS)}")
    if fmt.codec in BLOCK_CODECS:
        if fmt.scale not in SCALE_BYTES:
            raise ValueError(f"{prefix}scale: found {fmt.scale!r}, possible: {', '.join(SCALE_BYTES)}")
        if not 16 <= fmt.block_size <= 4096 or fmt.block_size % 16:
            raise ValueError(f"{prefix}block_size: found {fmt.block_size}, expected a multiple of 16 from 16 to 4096")
        if fmt.scale == "int8" and fmt.block_size not in CODED_SCALE_BLOCKS:
            possible = ", ".join(map(str, CODED_SCALE_BLOCKS))
            raise ValueError(f"{prefix}block_size: found {fmt.block_size} with scale 'int8', possible: {possible}")
        if fmt.rotation not in ROTATIONS or (fmt.rotation and fmt.block_size % fmt.rotation):
            raise ValueError(
                f"{prefix}rotation: found {fmt.rotation}, possible: {', '.join(map(str, ROTATIONS))}, if it divides the "
                f"block size {fmt.block_size}"
            )
    for name, codec, low, high in (("rate", "zfp", 4, 24), ("dimension", "mpc", 1, 32)):
        if fmt.codec == codec and not low <= getattr(fmt, name) <= high:
            raise ValueError(
                f"{prefix}{name}: found {getattr(fmt, name)}, possible with codec {codec}: {low} to {high}"
            )
    return RecordFormat.of(*fmt)


def _check_rows(prefix: str, rows: Rows) -> Rows:
    rows = Rows(tuple(rows.chunks), tuple(rows.sizes), tuple(rows.strides), rows.outer)
    _check_chunks(rows.chunks)
    _check_axes(rows.sizes, rows.strides)
    _check_count("sizes", rows.total)
    _check_outer(rows.outer, rows.total)
    return rows


def _check_messages(prefix: str, messages: Messages) -> Messages:
    _check_chunks(messages.chunks)
    for name, count in (("peers", messages.peers), ("inner", messages.inner)):
        if count < 1:
            raise ValueError(f"{name}: found {count}, expected at least 1")
    _check_count("peers * inner", messages.peers * messages.inner)
    return messages._replace(chunks=tuple(messages.chunks))


def _check_count(name: str, rows: int) -> None:
    if rows >= _ROWS:
        raise ValueError(f"{name}: found {rows} rows, expected fewer than 2**31")


def _check_chunks(chunks: Sequence[int]) -> None:
    if not chunks or min(chunks) < 0:
        raise ValueError(f"chunks: found {list(chunks)[:8]}, expected at least one, none negative")


def _check_outer(outer: int, rows: int) -> None:
    if outer < 1 or rows % outer:
        raise ValueError(f"outer: found {outer}, which does not divide the {rows} rows")


@functools.lru_cache(maxsize=256)
def _check_axes(sizes: Sequence[int], strides: Sequence[int]) -> None:
    if not sizes or min(sizes) < 1:
        raise ValueError(f"sizes: found {list(sizes)}, expected at least one, each at least 1")
    if len(strides) != len(sizes):
        raise ValueError(f"strides: found {len(strides)} of them for {len(sizes)} sizes")
    # Sums of multiples of the strides are 0, 1, .. without gap or repetition exactly where each stride is the product of
    # the sizes of smaller ones. Otherwise some shard would be written twice and another never.
    reached = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, sizes) if size > 1):
        if stride != reached:
            raise ValueError(
                f"strides: {list(strides)} with sizes {list(sizes)} do not reach each of the {math.prod(sizes)} shards "
                "once"
            )
        reached *= size


def _check_dtype(dtype: torch.dtype, name: str, bytes_too: bool = False) -> None:
    if dtype not in FLOATS and not (bytes_too and dtype == torch.uint8):
        raise TypeError(f"{name}: found {dtype}, expected float32, bfloat16 or float16")


def _check_storage(tensor: torch.Tensor, name: str) -> None:
    """Refuses a tensor whose memory was freed, as sharding engines do: a kernel would read what is there now."""
    needed = (tensor.storage_offset() + tensor.numel()) * tensor.element_size() if tensor.numel() else 0
    found = tensor.untyped_storage().nbytes()
    if found < needed:
        raise ValueError(f"{name}: found {found} bytes of storage, expected {needed}: its memory was freed")


def _check_source(source: Sequence[torch.Tensor], rows: Rows, fmt: RecordFormat, bytes_too: bool = False) -> None:
    if len(source) != len(rows.chunks):
        raise ValueError(f"source: found {len(source)} tensors for {len(rows.chunks)} chunks")
    dtype, device, total = source[0].dtype, source[0].device, rows.total
    if dtype != (only := _ONLY.get(fmt.codec, dtype)):
        raise TypeError(
            f"source[0]: found {dtype}, expected {str(only).removeprefix('torch.')}: codec {fmt.codec} encodes no other type"
        )
    for index, (tensor, chunk) in enumerate(zip(source, rows.chunks)):
        _check_dtype(tensor.dtype, f"source[{index}]", bytes_too=bytes_too)
        if tensor.dtype != dtype or tensor.device != device:
            raise TypeError(
                f"source[{index}]: found {tensor.dtype} on {tensor.device}, but source[0] is {dtype} on {device}"
            )
        if not tensor.is_contiguous():
            raise ValueError(f"source[{index}]: found strides {tuple(tensor.stride())}, expected a contiguous tensor")
        _check_storage(tensor, f"source[{index}]")
        if tensor.numel() > total * chunk:
            raise ValueError(
                f"source[{index}]: found {tensor.numel()} elements, expected at most {total * chunk}: "
                f"{total} shards of {chunk}"
            )


def _check_residuals(
    residuals: Sequence[torch.Tensor], factors: Sequence[float], source: Sequence[torch.Tensor]
) -> None:
    for name, found in (("residuals", residuals), ("factors", factors)):
        if len(found) != len(source):
            raise ValueError(f"{name}: found {len(found)} for {len(source)} sources")
    for index, (residual, tensor) in enumerate(zip(residuals, source)):
        if residual.numel() not in (0, tensor.numel()):
            raise ValueError(
                f"residuals[{index}]: found {residual.numel()} elements, expected none or the {tensor.numel()} of "
                f"source[{index}]"
            )
    like = source[0].new_empty(0, dtype=torch.float32)
    _check_like("residuals", residuals, like, [residual.numel() for residual in residuals])


def _check_like(name: str, tensors: Sequence[torch.Tensor], like: torch.Tensor, numels: Sequence[int]) -> None:
    if [tensor.numel() for tensor in tensors] != list(numels):
        raise ValueError(f"{name}: found {[t.numel() for t in tensors][:8]} elements, expected {list(numels)[:8]}")
    for index, tensor in enumerate(tensors):
        if tensor.dtype != like.dtype or tensor.device != like.device:
            raise TypeError(
                f"{name}[{index}]: found {tensor.dtype} on {tensor.device}, expected {like.dtype} on {like.device}"
            )
        if not tensor.is_contiguous():
            raise ValueError(f"{name}[{index}]: found strides {tuple(tensor.stride())}, expected a contiguous tensor")
        _check_storage(tensor, f"{name}[{index}]")


def _check_payload(
    payload: torch.Tensor,
    fmt: RecordFormat,
    chunks: Sequence[int],
    rows: int,
    dtype: torch.dtype,
    bytes_too: bool = False,
) -> None:
    _check_dtype(dtype, "dtype", bytes_too=bytes_too)
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


def _check_sums(name: str, fmt: RecordFormat) -> None:
    if fmt.codec not in SUMMED:
        raise ValueError(f"{name}: found {fmt.codec!r}, {NOT_SUMMED[fmt.codec]}; possible: {', '.join(SUMMED)}")


class _Checks:
    """Checks of arguments against each other, in the form of a backend."""

    @staticmethod
    def encode(source: Sequence[torch.Tensor], rows: Rows, fmt: RecordFormat, *_: Any) -> None:
        _check_source(source, rows, fmt, bytes_too=fmt.codec == "none")

    @staticmethod
    def encode_feedback(
        source: Sequence[torch.Tensor],
        residuals: Sequence[torch.Tensor],
        factors: Sequence[float],
        rows: Rows,
        fmt: RecordFormat,
        *_: Any,
    ) -> None:
        _check_sums("codec", fmt)
        _check_source(source, rows, fmt)
        _check_residuals(residuals, factors, source)

    @staticmethod
    def encode_difference(
        source: Sequence[torch.Tensor], base: Sequence[torch.Tensor], rows: Rows, fmt: RecordFormat, *_: Any
    ) -> None:
        _check_sums("codec", fmt)
        _check_source(source, rows, fmt)
        _check_like("base", base, source[0], [tensor.numel() for tensor in source])

    @staticmethod
    def decode_onto(payload: torch.Tensor, rows: Rows, fmt: RecordFormat, tensors: Sequence[torch.Tensor]) -> None:
        dtype = tensors[0].dtype if tensors else torch.float32
        _check_payload(payload, fmt, rows.chunks, rows.total, dtype)
        _check_like(
            "tensors", tensors, payload.new_empty(0, dtype=dtype), [rows.total * chunk for chunk in rows.chunks]
        )

    @staticmethod
    def decode(payload: torch.Tensor, rows: Rows, fmt: RecordFormat, dtype: torch.dtype) -> None:
        _check_payload(payload, fmt, rows.chunks, rows.total, dtype, bytes_too=fmt.codec == "none")

    @staticmethod
    def decode_sum(payload: torch.Tensor, messages: Messages, fmt: RecordFormat, dtype: torch.dtype) -> None:
        _check_payload(payload, fmt, messages.chunks, messages.peers * messages.inner, dtype)

    @staticmethod
    def decode_add(
        payload: torch.Tensor, messages: Messages, fmt: RecordFormat, dtype: torch.dtype, sums: Sequence[torch.Tensor]
    ) -> None:
        _Checks.decode_sum(payload, messages, fmt, dtype)
        like = payload.new_empty(0, dtype=torch.float32)
        _check_like("sums", sums, like, [messages.inner * chunk for chunk in messages.chunks])

    @staticmethod
    def decode_sum_encode(
        payload: torch.Tensor,
        messages: Messages,
        fmt: RecordFormat,
        dtype: torch.dtype,
        outer: int,
        out: RecordFormat,
        *_: Any,
    ) -> None:
        _check_sums("out_codec", out)
        _check_payload(payload, fmt, messages.chunks, messages.peers * messages.inner, dtype)
        _check_outer(outer, messages.inner)


# ---- from signatures to operators -----------------------------------------------------------------------------------

#: Parameters that become their fields, and the check of each: takes the prefix of the fields' names and the value.
_TUPLES: dict[type, Callable[[str, Any], Any]] = {
    RecordFormat: functools.lru_cache(maxsize=256)(_check_format),
    Rows: _check_rows,
    Messages: _check_messages,
    Rounding: lambda _, rounding: rounding,
}

_SCHEMA_TYPES: dict[Any, str] = {
    torch.Tensor: "Tensor",
    Sequence[torch.Tensor]: "Tensor[]",
    Changed: "Tensor(a!)[]",
    type(None): "()",
    list[torch.Tensor]: "Tensor[]",
    tuple[torch.Tensor, list[torch.Tensor]]: "(Tensor, Tensor[])",
    Sequence[int]: "int[]",
    Sequence[float]: "float[]",
    int: "int",
    bool: "bool",
    str: "str",
    torch.dtype: "ScalarType",
}


def _parameters(name: str) -> Iterator[tuple[str, Any, str]]:
    """Name and type of every parameter of an operator's function, and the prefix that its fields take.

    A second parameter of the same type has its name as the prefix: the format ``out`` gives ``out_codec``.
    """
    function = getattr(reference, name)
    types, seen = typing.get_type_hints(function, include_extras=True), set()
    for parameter in inspect.signature(function).parameters:
        yield parameter, types[parameter], f"{parameter}_" if types[parameter] in seen else ""
        seen.add(types[parameter])


def _schema(name: str) -> str:
    """The torch.library schema of an operator."""
    flat: list[tuple[str, Any]] = []
    for parameter, kind, prefix in _parameters(name):
        fields = typing.get_type_hints(kind) if kind in _TUPLES else None
        flat += [(prefix + field, type_) for field, type_ in fields.items()] if fields else [(parameter, kind)]
    arguments = (f"{_SCHEMA_TYPES[str if typing.get_origin(t) is Literal else t]} {name}" for name, t in flat)
    returned = typing.get_type_hints(getattr(reference, name))["return"]
    return f"({', '.join(arguments)}) -> {_SCHEMA_TYPES[returned]}"


def _implementation(name: str, backend: Any) -> Callable[..., Any]:
    """An operator of flat arguments: rebuilds the tuples, checks them, and calls the backend's function."""
    parts: list[tuple[Callable[[Any], Any] | None, int, int]] = []
    start = 0
    for _, kind, prefix in _parameters(name):
        stop = start + (len(kind._fields) if kind in _TUPLES else 1)
        parts.append((functools.partial(_rebuilt, kind, prefix) if kind in _TUPLES else None, start, stop))
        start = stop
    check = getattr(_Checks, name)

    def operator(*flat: Any) -> Any:
        arguments = [rebuild(flat[start:stop]) if rebuild else flat[start] for rebuild, start, stop in parts]
        check(*arguments)
        return getattr(backend, name)(*arguments)

    return operator


def _rebuilt(kind: Any, prefix: str, fields: Sequence[Any]) -> Any:
    return _TUPLES[kind](prefix, kind._make(fields))


def flat(arguments: Sequence[Any]) -> list[Any]:
    """Arguments of a backend's function as the operator takes them."""
    return [part for value in arguments for part in (value if type(value) in _TUPLES else (value,))]


# Tensors of a CPU and of a GPU go to the backend that is in use for them, all others to the reference.
for _name in OPERATORS:
    _qualified = f"hzero::{_name}"
    torch.library.define(_qualified, _schema(_name))
    torch.library.impl(_qualified, "CompositeExplicitAutograd")(_implementation(_name, reference))
    torch.library.impl(_qualified, "CPU")(_implementation(_name, backends.Current("cpu")))
    torch.library.impl(_qualified, "CUDA")(_implementation(_name, backends.Current("cuda")))
    torch.library.register_fake(_qualified)(_implementation(_name, outputs))
