"""Codec: turns shards into a payload and back, with the settings of one tier.

`Codec.encoder`, `decoder` and `summer` prepare calls on one bucket layout; whoever calls often keeps them. `Codec.encode` and
`Codec.decode` prepare, or reuse, such a call and make its outputs. Formats: docs/payload_format.md.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hzero.codecs import backends, exponents
from hzero.codecs.formats import EXP_BLOCK, Messages, RecordFormat, Rows, Traits, layout_of
from hzero.codecs.reference import DTYPES, NAMES, Adds
from hzero.config import CodecConfig, CodecName

#: Types that codecs take.
FLOATS = tuple(NAMES)
#: More rows than any world has ranks: their number is a 32-bit integer in kernels.
_ROWS = 2**31
#: Addresses below are looked at: freed memory starts at 0, so that one is an offset in it.
_LOW = 2**40


@dataclass(frozen=True)
class Codec:
    """A payload format and how to round into it.

    Attributes:
        config: The settings it was made from.
        format: Layout of its records.
    """

    config: CodecConfig
    format: RecordFormat

    @staticmethod
    @functools.lru_cache(maxsize=256)
    def from_config(config: CodecConfig) -> Codec:
        """The codec of one tier and role."""
        return Codec(config, config.format)

    @property
    def name(self) -> CodecName:
        """Name of the codec."""
        return self.config.codec

    @property
    def traits(self) -> Traits:
        """Its properties, such as whether it is exact."""
        return self.format.traits

    @property
    def stochastic(self) -> bool:
        """Whether codes are rounded stochastically, not to nearest even; never without scales."""
        return self.config.rounding == "stochastic" and self.format.scale_bytes > 0

    @property
    def bits(self) -> float:
        """Bits per element in a long record, scales included; for ``none`` those of float32, for ``mpc`` the most."""
        numel = EXP_BLOCK * self.config.block_size
        return 8 * self.format.record_bytes(numel, torch.float32.itemsize) / numel

    def error_bound(self, block_absmax: float, dtype: torch.dtype = torch.float32) -> float:
        """Largest absolute error of one round trip of a finite element.

        Args:
            block_absmax: Largest magnitude in the element's block (codec ``bf16``: of the element itself; codec ``zfp``: of its
                four; scale ``int8``: of the 512 elements that share a factor).
            dtype: Target type; also the source type, unless that is wider and nothing exceeds the range of ``dtype``.

        Returns:
            The bound, in the unit of the elements; infinity where a decoded element may overflow.
            docs/payload_format.md derives it.
        """
        return self.format.error_bound(block_absmax, NAMES[dtype], stochastic=self.stochastic)

    def message_bytes(self, chunks: Sequence[int], rows: int, itemsize: int) -> int:
        """Bytes of a message of ``rows`` shards of every tensor; ``itemsize`` is that of the decoded type."""
        return self.format.message_bytes(chunks, rows, itemsize)

    def lost(self, message: torch.Tensor, chunks: Sequence[int], *, outer: int = 1) -> torch.Tensor:
        """Counts the blocks of a message whose elements a fallible codec could not hold, and which decode to NaN.

        A block is lost where its list of escapes is too short; its elements have to be sent as they are, by codec
        ``none``. In such a message all readers find the same blocks.

        Args:
            message: uint8 message.
            chunks: As encoded.
            outer: As encoded.

        Returns:
            int64 ``[]`` on the message's device; 0 with every other codec.
        """
        if not self.traits.fallible or not message.numel():
            return message.new_zeros((), dtype=torch.int64)
        layout = layout_of(tuple(chunks), self.format, torch.bfloat16.itemsize)
        inner = message.numel() // layout.row_bytes // outer
        return exponents.lost(message, layout, self.format, outer, inner)

    # ---- messages without a fixed size ------------------------------------------------------------------------------

    def cut(self, message: torch.Tensor, parts: int, row_bytes: int) -> list[torch.Tensor]:
        """The bytes that the records of each part of a message use, one after the other. The host waits for the device.

        Args:
            message: uint8 ``[parts][rows][row_bytes]``, of one tensor.
            parts: Messages of one peer each.
            row_bytes: Bytes of a record.
        """
        rows = message.view(parts, -1, row_bytes)
        lengths = rows[..., :8].contiguous().view(torch.int64).view(parts, -1).tolist()
        return [torch.cat([row[:length] for row, length in zip(part, used)]) for part, used in zip(rows, lengths)]

    def whole(self, arrived: torch.Tensor, parts: int, rows: int, row_bytes: int) -> torch.Tensor:
        """The message whose parts were `cut`, with zeros where they were. The host waits for the device.

        Args:
            arrived: uint8 ``[parts][length]``.
            parts: Of the message.
            rows: Of each part.
            row_bytes: Bytes of a record.

        Raises:
            ValueError: A record has a length that no encoder writes.
        """
        message = arrived.new_zeros(parts, rows, row_bytes)
        for part, sent in zip(message, arrived.view(parts, arrived.numel() // parts)):
            for row in part:
                length = int(sent[:8].view(torch.int64)) if len(sent) >= 8 else 0
                if not 0 < length <= min(row_bytes, len(sent)) or length % 16:
                    raise ValueError(f"found a record of {length} bytes, expected a multiple of 16 to {row_bytes}")
                row[:length] = sent[:length]
                sent = sent[length:]
        return message.view(-1)

    # ---- prepared calls ---------------------------------------------------------------------------------------------

    def encoder(
        self,
        chunks: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        sizes: Sequence[int],
        strides: Sequence[int] | None = None,
        outer: int = 1,
        adds: Adds = "",
    ) -> Encoder:
        """Prepares to encode buckets of one layout.

        Args:
            chunks: Elements of one shard of each tensor.
            dtype: Type of the tensors: float32, bfloat16 or float16; codec ``exp``: bfloat16; codec ``none``: also uint8,
                bytes of any type. Codec ``mpc`` encodes 16-bit numbers as float32, which holds them exactly.
            device: Of the tensors.
            sizes: Axes of the rows; their product is the number of rows.
            strides: Distance in shards between neighbours on each axis: row ``(i, j, ..)`` is shard
                ``i * strides[0] + j * strides[1] + ..``; rows and shards correspond one to one. None: in order.
            outer: Number of pieces of the message, each ``[tensor][rows / outer][record]``.
            adds: ``residuals`` encodes ``source + factor * residual``, product and sum rounded to float32 each, and gives the
                loss; ``base`` encodes ``source - base``, a float32 difference rounded once.

        Raises:
            TypeError: A dtype that cannot be encoded, named.
            ValueError: Rows that do not fit, named.
        """
        rows = Rows.of(chunks, sizes, strides, outer)
        return _encoder(self.format, rows, dtype, adds, self.stochastic, backends.of(device))

    def decoder(
        self,
        chunks: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        sizes: Sequence[int],
        strides: Sequence[int] | None = None,
        outer: int = 1,
        add: bool = False,
    ) -> Decoder:
        """Prepares to decode messages of one layout.

        Args:
            chunks: As encoded.
            dtype: Type to decode to; for codec ``none`` the type that was encoded.
            device: Of the messages.
            sizes: As encoded.
            strides: As encoded.
            outer: As encoded.
            add: Whether decoded values are added, in float32, to what is in the tensors, and each sum rounded once.
        """
        rows = Rows.of(chunks, sizes, strides, outer)
        return _decoder(self.format, rows, dtype, add, backends.of(device))

    def summer(
        self,
        peers: int,
        chunks: Sequence[int],
        *,
        inner: int,
        dtype: torch.dtype,
        device: torch.device,
        to: Codec | None = None,
        outer: int = 1,
        add: bool = False,
    ) -> Summer:
        """Prepares to decode messages of several peers and to sum them in float32, in the order of the peers.

        Args:
            peers: Number of messages, one after the other.
            chunks: As encoded.
            inner: Rows of each message.
            dtype: Type that codec ``none`` encoded; for the others any floating type.
            device: Of the messages.
            to: Codec to encode the sums in, rows in order: the bits of its ``encode``; None gives the sums. Codec ``none`` takes
                them rounded once to ``dtype``.
            outer: Pieces of that message.
            add: Whether the messages are added one by one, or, rotated, as one sum, to sums that exist.
        """
        messages = Messages(peers, tuple(chunks), inner)
        target = None if to is None else (to.format, outer, to.stochastic)
        return _summer(self.format, messages, dtype, target, add, backends.of(device))

    # ---- single calls -----------------------------------------------------------------------------------------------

    def encode(
        self,
        source: Sequence[torch.Tensor],
        chunks: Sequence[int],
        *,
        sizes: Sequence[int] | None = None,
        seed: int = 0,
        **layout: Any,
    ) -> torch.Tensor:
        """Encodes a bucket into one message; see `encoder` and `Encoder`.

        ``sizes`` of None takes as few rows as hold the sources and fill the ``outer`` pieces, at least one per piece.
        """
        if sizes is None:
            pieces = max(layout.get("outer", 1), 1)
            rows = max([1, *(-(-tensor.numel() // chunk) for tensor, chunk in zip(source, chunks) if chunk > 0)])
            sizes = (-(-rows // pieces) * pieces,)
        return self.encoder(chunks, source[0].dtype, source[0].device, sizes=sizes, **layout)(source, seed=seed)

    def decode(
        self,
        payload: torch.Tensor,
        chunks: Sequence[int],
        *,
        dtype: torch.dtype,
        sizes: Sequence[int] | None = None,
        **layout: Any,
    ) -> list[torch.Tensor]:
        """Decodes one message; see `decoder` and `Decoder`. ``sizes`` of None takes as many rows as the payload holds."""
        if sizes is None:
            row = self.message_bytes(chunks, 1, dtype.itemsize)
            sizes = (max(payload.numel() // row, 1) if row else layout.get("outer", 1),)
        tensors: list[torch.Tensor] = self.decoder(chunks, dtype, payload.device, sizes=sizes, **layout)(payload)
        return tensors


# ---- prepared calls -------------------------------------------------------------------------------------------------


class Encoder:
    """Encodes buckets of one layout, any number of times; `Codec.encoder` makes it.

    Attributes:
        bytes: Size of the message.
    """

    def __init__(
        self, fmt: RecordFormat, rows: Rows, dtype: torch.dtype, adds: Adds, stochastic: bool, backend: Any
    ) -> None:
        _check_rows(rows)
        traits = fmt.traits
        _check_dtype(dtype, "source[0]", bytes_too=traits.plain and not adds)
        if NAMES.get(dtype, traits.types[0]) not in traits.types:
            raise TypeError(
                f"source[0]: found {dtype}, expected {_types(traits)}: codec {fmt.codec} encodes no other type"
            )
        if adds and traits.not_summed:
            raise ValueError(f"codec: found {fmt.codec!r}, {traits.not_summed}")
        self._rows, self._dtype, self._adds = rows, dtype, adds
        self._most = [rows.total * chunk for chunk in rows.chunks]
        self._widens = traits.widens and dtype.itemsize == 2
        coded = torch.float32 if self._widens else dtype
        self.bytes = fmt.message_bytes(rows.chunks, rows.total, 4 if adds == "residuals" else coded.itemsize)
        self._run = backend.encoder(rows, fmt, coded, adds, stochastic)

    def __call__(
        self,
        source: Sequence[torch.Tensor],
        out: torch.Tensor | None = None,
        seed: int = 0,
        added: Sequence[torch.Tensor] = (),
        factors: Sequence[float] = (),
        left: Sequence[torch.Tensor] = (),
    ) -> torch.Tensor:
        """Encodes one bucket.

        Args:
            source: Contiguous tensors of the dtype and device, each of at most ``rows * chunk`` elements, shards in order;
                missing elements are encoded as zero.
            out: uint8 ``[bytes]`` to write, on a device at a multiple of 16 bytes; None makes it.
            seed: Seed of stochastic rounding.
            added: The residuals, float32 or bfloat16, or the base, of the sources' dtype; of as many elements as the sources. An
                empty residual adds nothing.
            factors: One for each residual.
            left: Outputs like the sources, of the residuals' type: the sums minus what the message decodes to, zero in blocks
                that are not finite. With a rotation it is the difference of the rotated numbers, rotated back. They may be the
                residuals themselves.

        Returns:
            The message.

        Raises:
            TypeError: A dtype or device that does not fit, named.
            ValueError: Sizes that do not fit, named.
        """
        self._check(source, added, factors, left)
        if self._widens:
            source = [tensor.to(torch.float32) for tensor in source]
        out = _written(source[0], out, self.bytes)
        self._run(out, source, seed, added, factors, left)
        return out

    def _check(
        self,
        source: Sequence[torch.Tensor],
        added: Sequence[torch.Tensor],
        factors: Sequence[float],
        left: Sequence[torch.Tensor],
    ) -> None:
        device, numels = source[0].device, [tensor.numel() for tensor in source]
        if len(source) != len(self._most):
            raise ValueError(f"source: found {len(source)} tensors for {len(self._most)} chunks")
        _check_tensors("source", source, self._dtype, device)
        for index, (numel, most) in enumerate(zip(numels, self._most)):
            if numel > most:
                total, chunk = self._rows.total, self._rows.chunks[index]
                raise ValueError(
                    f"source[{index}]: found {numel} elements, expected at most {most}: {total} shards of {chunk}"
                )
        if self._adds == "residuals":
            for name, found in (("residuals", added), ("factors", factors), ("left", left)):
                if len(found) != len(source):
                    raise ValueError(f"{name}: found {len(found)} for {len(source)} sources")
            for index, (residual, numel) in enumerate(zip(added, numels)):
                if residual.numel() not in (0, numel):
                    raise ValueError(
                        f"residuals[{index}]: found {residual.numel()} elements, expected none or the {numel} of "
                        f"source[{index}]"
                    )
            kept = torch.bfloat16 if left[0].dtype == torch.bfloat16 else torch.float32
            _check_tensors("left", left, kept, device, numels)
            _check_tensors("residuals", added, kept, device)
        elif self._adds:
            _check_tensors("base", added, self._dtype, device, numels)


class Decoder:
    """Decodes messages of one layout, any number of times; `Codec.decoder` makes it.

    Attributes:
        bytes: Size of the message.
    """

    def __init__(self, fmt: RecordFormat, rows: Rows, dtype: torch.dtype, add: bool, backend: Any) -> None:
        _check_rows(rows)
        _check_dtype(dtype, "dtype", bytes_too=fmt.traits.plain and not add)
        self._numels = [rows.total * chunk for chunk in rows.chunks]
        self._fmt, self._chunks, self._total, self._dtype = fmt, rows.chunks, rows.total, dtype
        self.bytes = fmt.message_bytes(rows.chunks, rows.total, dtype.itemsize)
        self._run = backend.decoder(rows, fmt, dtype, add)

    def __call__(self, payload: torch.Tensor, out: Sequence[torch.Tensor] | None = None) -> Any:
        """Decodes one message.

        Args:
            payload: uint8 ``[bytes]``, at any address.
            out: Contiguous tensors of the dtype, ``[rows * chunk]`` elements each, no two of which overlap; None makes them.

        Returns:
            The tensors, flat if they are made here, shards in order.

        Raises:
            TypeError: As in `Encoder`.
            ValueError: The payload or a tensor has another size.
        """
        _check_payload(payload, self.bytes, self._fmt, self._chunks, self._total)
        if out is None:
            out = [payload.new_empty(numel, dtype=self._dtype) for numel in self._numels]
        else:
            _check_tensors("tensors", out, self._dtype, payload.device, self._numels)
        self._run(payload, out)
        return out


class Summer:
    """Sums messages of one layout, and encodes the sums again, any number of times; `Codec.summer` makes it.

    Attributes:
        bytes: Size of the message that it gives; 0 if it gives sums.
    """

    def __init__(
        self,
        fmt: RecordFormat,
        messages: Messages,
        dtype: torch.dtype,
        target: tuple[RecordFormat, int, bool] | None,
        add: bool,
        backend: Any,
    ) -> None:
        _check_chunks(messages.chunks)
        _check_dtype(dtype, "dtype")
        for name, count in (("peers", messages.peers), ("inner", messages.inner)):
            if count < 1:
                raise ValueError(f"{name}: found {count}, expected at least 1")
        self._rows = messages.peers * messages.inner
        _check_count("peers * inner", self._rows)
        self._fmt, self._chunks, self._dtype = fmt, messages.chunks, torch.float32
        self._numels = [messages.inner * chunk for chunk in messages.chunks]
        self._arriving = fmt.message_bytes(messages.chunks, self._rows, dtype.itemsize)
        self.bytes, self._encoder, self._recodes = 0, None, target is not None
        if target is None:
            self._run = backend.summer(messages, fmt, dtype, add)
            return
        out, outer, stochastic = target
        _check_outer(outer, messages.inner)
        self._dtype = dtype if out.traits.plain else torch.float32
        self.bytes = out.message_bytes(messages.chunks, messages.inner, self._dtype.itemsize)
        self._run = backend.recoder(messages, fmt, dtype, outer, out, stochastic)
        if self._run is None:  # in two steps
            rows = Rows.of(messages.chunks, (messages.inner,), outer=outer)
            self._recodes, self._run = False, backend.summer(messages, fmt, dtype, False)
            self._encoder = _encoder(out, rows, self._dtype, "", stochastic, backend)

    def __call__(self, payload: torch.Tensor, out: Any = None, seed: int = 0) -> Any:
        """Sums the messages.

        Args:
            payload: uint8, the messages one after the other.
            out: float32 ``[inner * chunk]`` each: the sums to add to, or tensors to write; or uint8 ``[bytes]``. None makes it.
            seed: Seed of stochastic rounding.

        Returns:
            The sums, or the message of the sums.
        """
        _check_payload(payload, self._arriving, self._fmt, self._chunks, self._rows)
        if self._recodes:
            out = _written(payload, out, self.bytes)
            self._run(payload, out, seed)
            return out
        sums = out
        if out is None or self._encoder is not None:
            sums = [payload.new_empty(numel, dtype=torch.float32) for numel in self._numels]
        else:
            _check_tensors("sums", sums, torch.float32, payload.device, self._numels)
        self._run(payload, sums)
        if self._encoder is None:
            return sums
        return self._encoder([total.to(self._dtype) for total in sums], out, seed)


# A bucket comes back in every step: its calls are prepared once.
_encoder = functools.lru_cache(maxsize=4096)(Encoder)
_decoder = functools.lru_cache(maxsize=4096)(Decoder)
_summer = functools.lru_cache(maxsize=4096)(Summer)


# ---- checks: one line, the argument first ---------------------------------------------------------------------------


def _check_rows(rows: Rows) -> None:
    _check_chunks(rows.chunks)
    sizes, strides = rows.sizes, rows.strides
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
    _check_count("sizes", rows.total)
    _check_outer(rows.outer, rows.total)


def _check_count(name: str, rows: int) -> None:
    if rows >= _ROWS:
        raise ValueError(f"{name}: found {rows} rows, expected fewer than 2**31")


def _check_chunks(chunks: Sequence[int]) -> None:
    if not chunks or min(chunks) < 0:
        raise ValueError(f"chunks: found {list(chunks)[:8]}, expected at least one, none negative")


def _check_outer(outer: int, rows: int) -> None:
    if outer < 1 or rows % outer:
        raise ValueError(f"outer: found {outer}, which does not divide the {rows} rows")


def _types(traits: Traits) -> str:
    return " or ".join(str(DTYPES[name]).removeprefix("torch.") for name in traits.types)


def _check_dtype(dtype: torch.dtype, name: str, bytes_too: bool = False) -> None:
    if dtype not in FLOATS and not (bytes_too and dtype == torch.uint8):
        raise TypeError(f"{name}: found {dtype}, expected float32, bfloat16 or float16")


def _check_tensors(
    name: str,
    tensors: Sequence[torch.Tensor],
    dtype: torch.dtype,
    device: torch.device,
    numels: Sequence[int] | None = None,
) -> None:
    if numels is not None and [tensor.numel() for tensor in tensors] != list(numels):
        raise ValueError(f"{name}: found {[t.numel() for t in tensors][:8]} elements, expected {list(numels)[:8]}")
    for index, tensor in enumerate(tensors):
        if tensor.dtype is not dtype or tensor.device != device:
            raise TypeError(f"{name}[{index}]: found {tensor.dtype} on {tensor.device}, expected {dtype} on {device}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name}[{index}]: found strides {tuple(tensor.stride())}, expected a contiguous tensor")
        if tensor.data_ptr() < _LOW:
            _check_storage(tensor, f"{name}[{index}]")


def _check_storage(tensor: torch.Tensor, name: str) -> None:
    """Refuses a tensor whose memory was freed, as sharding engines do: a kernel would read what is there now."""
    needed = (tensor.storage_offset() + tensor.numel()) * tensor.element_size() if tensor.numel() else 0
    found = tensor.untyped_storage().nbytes()
    if found < needed:
        raise ValueError(f"{name}: found {found} bytes of storage, expected {needed}: its memory was freed")


def _check_payload(
    payload: torch.Tensor, size: int, fmt: RecordFormat | None = None, chunks: Sequence[int] = (), rows: int = 0
) -> None:
    if payload.dtype != torch.uint8 or payload.dim() != 1:
        raise TypeError(f"payload: found {payload.dtype} of {payload.dim()} dimensions, expected uint8 of one")
    if not payload.is_contiguous():
        raise ValueError(f"payload: found stride {payload.stride()[0]}, expected a contiguous tensor")
    _check_storage(payload, "payload")
    if payload.numel() != size:
        what = f": {rows} rows of chunks {list(chunks)[:8]} in codec {fmt.codec}" if fmt else ""
        raise ValueError(f"payload: found {payload.numel()} bytes, expected {size}{what}")


def _written(like: torch.Tensor, out: torch.Tensor | None, size: int) -> torch.Tensor:
    """A message to write: the one that is given, or a new one."""
    if out is None:
        return like.new_empty(size, dtype=torch.uint8)
    _check_payload(out, size)
    return out
