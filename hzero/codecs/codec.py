"""Codec: encodes shards into a payload and decodes them, with the settings of one tier.

`Codec.encoder`, `decoder` and `recoder` prepare calls for one bucket layout; frequent callers keep them. `Codec.encode` and
`Codec.decode` prepare such a call, or reuse one, and allocate its outputs. Formats: docs/payload_format.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from hzero.codecs import backends, reference
from hzero.codecs.formats import ALIGNMENT, FIXED, RecordFormat, Rows
from hzero.codecs.launchers import HostLibrary
from hzero.codecs.reference import NAMES, Backend
from hzero.config import PLAIN, CodecConfig

#: Dtypes that codecs encode.
FLOAT_DTYPES = tuple(NAMES)
#: Tensors with an address below this get a storage check: freed storage starts at 0, so their address is an offset.
_LOW = 2**40
#: Maximum number of bytes that `fingerprints` passes to an encoder as one tensor.
_LONGEST = 2**30


class Codec(NamedTuple):
    """A payload format and its rounding.

    Attributes:
        format: Layout of the records, and the rounding of codes.
    """

    format: RecordFormat

    @staticmethod
    @functools.lru_cache(maxsize=256)
    def from_config(config: CodecConfig) -> Codec:
        """Returns the codec of one tier and role."""
        return Codec(config.format._replace(stochastic=config.rounding == "stochastic"))

    def error_bound(self, block_absmax: float, dtype: torch.dtype = torch.float32) -> float:
        """Returns the largest absolute error of one round trip of a finite element.

        Args:
            block_absmax: Largest magnitude in the element's block, or of the element itself if the codec has no blocks.
            dtype: Target dtype. It is also the source dtype, unless the source is wider and no element exceeds the range of
                ``dtype``.

        Returns:
            The bound, in the unit of the elements; infinity if a decoded element may overflow. docs/payload_format.md derives
            it.
        """
        return self.format.error_bound(block_absmax, NAMES[dtype])

    def message_bytes(self, chunks: Sequence[int], rows: int, itemsize: int) -> int:
        """Bytes of a message of ``rows`` shards of every tensor; ``itemsize`` is the item size of the decoded dtype."""
        return self.format.message_bytes(chunks, rows, itemsize)

    # ---- prepared calls ---------------------------------------------------------------------------------------------

    def encoder(self, rows: Rows, dtype: torch.dtype, device: torch.device, feedback: bool = False) -> Encoder:
        """Prepares to encode buckets of one layout.

        Args:
            rows: Shards of the bucket, and their order in the message.
            dtype: Dtype of the tensors; for codec ``none`` also uint8, for bytes of any dtype.
            device: Device of the tensors.
            feedback: Whether ``source + factor * residual`` is encoded, with product and sum each rounded to float32, and the
                loss stored.

        Raises:
            TypeError: The dtype cannot be encoded.
            ValueError: The codec has no messages of a fixed size, as ``feedback`` requires.
        """
        return _encoder(self.format, rows, dtype, backends.of(device), feedback)

    def decoder(
        self, rows: Rows, dtype: torch.dtype, device: torch.device, sums: bool = False, add: bool = False
    ) -> Decoder:
        """Prepares to decode messages of one layout, or to sum their pieces.

        Args:
            rows: Rows of the messages, as encoded. For a sum, each peer's message is a piece, with a checksum or none.
            dtype: Dtype to decode to; for codec ``none``, the encoded dtype. Sums are float32.
            device: Device of the messages.
            sums: Whether the decoded pieces are summed in float32, in their order.
            add: With ``sums``: whether they are added to the values in the output tensors, one by one, or as one sum if they are
                rotated.

        Raises:
            TypeError: The dtype cannot be decoded.
            ValueError: Parts of a sum have several pieces, or ``add`` is set without ``sums``.
        """
        return _decoder(self.format, rows, dtype, backends.of(device), sums, add)

    def recoder(self, rows: Rows, dtype: torch.dtype, device: torch.device, to: Codec, summed: Rows) -> Recoder:
        """Prepares to sum the pieces of messages, as `decoder` does, and to encode the sums.

        Args:
            rows: Rows of the messages that are summed.
            dtype: Dtype that codec ``none`` encoded; for other codecs, any floating dtype.
            device: Device of the messages.
            to: Codec of the sums, with the bits of its ``encode``. Codec ``none`` encodes the sums rounded once to ``dtype``.
            summed: Rows of the message of sums: one piece's shards, in order.

        Raises:
            TypeError: The dtype cannot be decoded.
            ValueError: Parts of the messages have several pieces.
        """
        return _recoder(self.format, rows, dtype, to.format, summed, backends.of(device))

    # ---- single calls -----------------------------------------------------------------------------------------------

    def encode(
        self, source: Sequence[torch.Tensor], chunks: Sequence[int], *, seed: int = 0, **layout: Any
    ) -> torch.Tensor:
        """Encodes a bucket into one message, by default with one row; see `encoder` and `Encoder`."""
        rows = Rows.of(chunks, **{"sizes": (1,), **layout})
        return self.encoder(rows, source[0].dtype, source[0].device)(source, seed=seed)

    def decode(
        self, payload: torch.Tensor, chunks: Sequence[int], *, dtype: torch.dtype, **layout: Any
    ) -> list[torch.Tensor]:
        """Decodes one message, by default with all rows that it contains; see `decoder` and `Decoder`."""
        row = self.message_bytes(chunks, 1, dtype.itemsize)
        layout = {"sizes": (max(payload.numel() // row, 1) if row else layout.get("outer", 1),), **layout}
        tensors: list[torch.Tensor] = self.decoder(Rows.of(chunks, **layout), dtype, payload.device)(payload)
        return tensors


# ---- prepared calls -------------------------------------------------------------------------------------------------


class Encoder:
    """Encodes buckets of one layout, any number of times; made by `Codec.encoder`.

    Attributes:
        bytes: Size of the message.
    """

    def __init__(
        self, fmt: RecordFormat, rows: Rows, dtype: torch.dtype, backend: Backend, feedback: bool = False
    ) -> None:
        traits = fmt.traits
        _check_dtype(dtype, fmt, bytes_too=traits.plain and not feedback)
        if feedback and not traits.fixed:
            raise ValueError(f"codec: found {fmt.codec!r} with residuals; expected {', '.join(FIXED)}")
        self._dtype, self._feedback, self._rows, self._widens = dtype, feedback, rows.total, traits.widens
        self._most = [rows.total * chunk for chunk in rows.chunks]
        coded = torch.float32 if traits.widens else dtype
        self.bytes = rows.message_bytes(fmt, 4 if feedback else coded.itemsize)
        self._run = backend.encoder(rows, fmt, coded, feedback)

    def __call__(
        self,
        source: Sequence[torch.Tensor],
        out: torch.Tensor | None = None,
        seed: int = 0,
        residuals: Sequence[torch.Tensor] = (),
        factors: Sequence[float] = (),
    ) -> torch.Tensor:
        """Encodes one bucket.

        Args:
            source: Contiguous tensors with the prepared dtype and device, at most ``rows * chunk`` elements each, shards in
                order. Missing elements are encoded as zero.
            out: uint8 ``[bytes]`` to write, at an address that is a multiple of 16; None makes it.
            seed: Seed of stochastic rounding.
            residuals: Float32 or bfloat16 tensors, with as many elements as the sources. They are overwritten by the sums minus
                their decoded values, and by zero in blocks that are not finite. With a rotation, the difference is computed for
                rotated numbers and then rotated back.
            factors: One factor per residual.

        Returns:
            The message.

        Raises:
            TypeError: A dtype or device does not fit.
            ValueError: A size does not fit.
        """
        if len(source) != len(self._most):
            raise ValueError(f"source: found {len(source)} tensors for {len(self._most)} chunks")
        device, numels = source[0].device, [tensor.numel() for tensor in source]
        check_tensors("source", source, self._dtype, device, numels)
        for index, (numel, most) in enumerate(zip(numels, self._most)):
            if numel > most:
                shards = f"{self._rows} shards of {most // self._rows}"
                raise ValueError(f"source[{index}]: found {numel} elements; expected at most {most}: {shards}")
        if self._feedback:
            if not len(residuals) == len(factors) == len(source):
                found = f"found {len(residuals)} with {len(factors)} factors"
                raise ValueError(f"residuals: {found} for {len(source)} sources")
            kept = torch.bfloat16 if residuals[0].dtype == torch.bfloat16 else torch.float32
            check_tensors("residuals", residuals, kept, device, numels)
        if self._widens:
            source = [tensor.to(torch.float32) for tensor in source]
        out = _written(source[0], out, self.bytes)
        self._run(out, source, seed=seed, residuals=residuals, factors=factors)
        return out


class Decoder:
    """Decodes messages of one layout, or the sum of their pieces, any number of times; made by `Codec.decoder`.

    Attributes:
        bytes: Size of the message.
    """

    def __init__(
        self, fmt: RecordFormat, rows: Rows, dtype: torch.dtype, backend: Backend, sums: bool = False, add: bool = False
    ) -> None:
        if add and not sums:
            raise ValueError("add: found True without sums; expected sums=True, or no add")
        _check_dtype(dtype, fmt, bytes_too=fmt.traits.plain and not sums)
        self._numels = [(rows.inner if sums else rows.total) * chunk for chunk in rows.chunks]
        self._dtype, self._expected = torch.float32 if sums else dtype, _expected_of(fmt, rows, dtype, sums)
        self.bytes = self._expected[0]
        self._run = backend.decoder(rows, fmt, dtype, sums, add)

    def __call__(
        self, payload: torch.Tensor, out: Sequence[torch.Tensor] | None = None, checksums: torch.Tensor | None = None
    ) -> Any:
        """Decodes one message.

        Args:
            payload: uint8 ``[bytes]``, at any address.
            out: Contiguous tensors to write, or sums to add to, with the prepared dtype (float32 for sums) and ``rows * chunk``
                elements each. They must not overlap. None makes them.
            checksums: For a message with checksums: int64 ``[parts]``, to which the checksums of its bytes are added.

        Returns:
            The tensors, shards in order; new ones are flat.

        Raises:
            TypeError: As in `Encoder`.
            ValueError: The payload or a tensor has another size.
        """
        # The usual message passes without another call: every gather comes here. `_checked` finds what is wrong with others.
        usual = payload.dtype is torch.uint8 and payload.dim() == 1 and payload.is_contiguous()
        usual = usual and payload.numel() == self.bytes and not payload.data_ptr() % ALIGNMENT
        room = payload.untyped_storage().nbytes() - payload.storage_offset()
        if not usual or room < self.bytes or self._expected[1] or checksums is not None:
            payload = _checked(payload, checksums, *self._expected)
        if out is None:
            out = [payload.new_empty(numel, dtype=self._dtype) for numel in self._numels]
        else:
            check_tensors("tensors", out, self._dtype, payload.device, self._numels)
        self._run(payload, out, checksums=checksums)
        return out


class Recoder:
    """Sums the pieces of messages of one layout and encodes the sums, any number of times; made by `Codec.recoder`.

    Attributes:
        bytes: Size of the message that it returns.
    """

    def __init__(
        self, fmt: RecordFormat, rows: Rows, dtype: torch.dtype, out: RecordFormat, summed: Rows, backend: Backend
    ) -> None:
        _check_dtype(dtype, fmt)
        coded = dtype if out.traits.plain else torch.float32
        self.bytes, self._expected = summed.message_bytes(out, coded.itemsize), _expected_of(fmt, rows, dtype, True)
        one_pass = backend.recoder(rows, fmt, dtype, summed, out)
        if one_pass is None:
            decode, encode = _decoder(fmt, rows, dtype, backend, True), _encoder(out, summed, coded, backend)

            def in_two_steps(payload: Any, *, message: torch.Tensor, seed: int = 0, checksums: Any = None) -> None:
                encode([total.to(coded) for total in decode(payload, None, checksums)], message, seed)

            one_pass = in_two_steps
        self._run = one_pass

    def __call__(
        self,
        payload: torch.Tensor,
        out: torch.Tensor | None = None,
        seed: int = 0,
        checksums: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Sums the messages.

        Args:
            payload: uint8, the messages one after the other.
            out: uint8 ``[bytes]``; None makes it.
            seed: Seed of stochastic rounding.
            checksums: As in `Decoder`.

        Returns:
            The message of sums.
        """
        payload = _checked(payload, checksums, *self._expected)
        out = _written(payload, out, self.bytes)
        self._run(payload, message=out, seed=seed, checksums=checksums)
        return out


# A bucket recurs in every step, so its calls are prepared once.
_encoder: Callable[..., Encoder] = functools.lru_cache(maxsize=4096)(Encoder)
_decoder: Callable[..., Decoder] = functools.lru_cache(maxsize=4096)(Decoder)
_recoder: Callable[..., Recoder] = functools.lru_cache(maxsize=4096)(Recoder)


# ---- checksums ------------------------------------------------------------------------------------------------------


def checksums(parts: torch.Tensor) -> torch.Tensor:
    """Checksums of bytes (docs/payload_format.md): int64 ``[parts]`` for uint8 ``[parts, bytes]`` with contiguous rows."""
    sums: torch.Tensor = backends.of(parts.device).checksums(parts)
    return sums


def fingerprints(groups: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    """Checksums of groups of tensors, by which a later call detects that their bits have changed. No host wait.

    The words of a group are weighted by their place, as in `checksums`: a change of one word, or a swap of two words, is always
    detected, and any other change with a probability above 1 - 2**-31. Only results of one device can be compared.

    Args:
        groups: Contiguous tensors of any dtypes on one device. A group has at least one tensor.

    Returns:
        int64 ``[groups]`` on that device.
    """
    device = groups[0][0].device
    backend = backends.of(device)
    launcher = getattr(backend, "launcher", None)
    if isinstance(launcher, HostLibrary):
        return launcher.fingerprints(groups)
    sums = []
    for group in groups:  # an encoder of codec `none` adds up the words that it copies, in one launch for 38 tensors
        parts = [part for tensor in group for part in tensor.view(-1).view(torch.uint8).split(_LONGEST)]
        rows = Rows.of([part.numel() for part in parts], (1,), parts=1)
        message = _encoder(PLAIN.format, rows, torch.uint8, backend)(parts)
        sums.append(reference.trailers(message, 1)[0, 0])
    return torch.stack(sums)


# ---- checks: kernels read and write any address, so arguments are checked here ------------------------------------------


def _check_dtype(dtype: torch.dtype, fmt: RecordFormat, bytes_too: bool = False) -> None:
    if dtype not in FLOAT_DTYPES and not (bytes_too and dtype == torch.uint8):
        expected = " or ".join(str(one).removeprefix("torch.") for one in FLOAT_DTYPES)
        raise TypeError(f"dtype: found {dtype}; expected {expected} in codec {fmt.codec}")


def check_tensors(
    name: str, tensors: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device, numels: Sequence[int]
) -> None:
    """Raises TypeError or ValueError unless tensors are contiguous, have memory, and are what a call was prepared for."""
    if [tensor.numel() for tensor in tensors] != numels:
        raise ValueError(f"{name}: found {[t.numel() for t in tensors][:8]} elements; expected {list(numels)[:8]}")
    for index, tensor in enumerate(tensors):
        if tensor.dtype is not dtype or tensor.device != device:
            raise TypeError(f"{name}[{index}]: found {tensor.dtype} on {tensor.device}; expected {dtype} on {device}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name}[{index}]: found strides {tuple(tensor.stride())}; expected a contiguous tensor")
        if tensor.data_ptr() < _LOW:
            check_storage(tensor, f"{name}[{index}]")


def check_storage(tensor: torch.Tensor, name: str) -> None:
    """Raises if a tensor's memory was freed, as sharding engines do: a kernel would read other data there."""
    needed = (tensor.storage_offset() + tensor.numel()) * tensor.element_size() if tensor.numel() else 0
    found = tensor.untyped_storage().nbytes()
    if found < needed:
        raise ValueError(f"{name}: found {found} bytes of storage; expected {needed}: its memory was freed")


def check_payload(payload: torch.Tensor, size: int, what: str) -> None:
    """Raises TypeError or ValueError unless a payload is contiguous uint8 ``[size]`` with memory. ``what`` describes it."""
    if payload.dtype != torch.uint8 or payload.dim() != 1:
        raise TypeError(f"payload: found {payload.dtype} of {payload.dim()} dimensions; expected uint8 of one")
    if not payload.is_contiguous():
        raise ValueError(f"payload: found stride {payload.stride()[0]}; expected a contiguous tensor")
    check_storage(payload, "payload")
    if payload.numel() != size:
        raise ValueError(f"payload: found {payload.numel()} bytes; expected {size}: {what}")


def _expected_of(fmt: RecordFormat, rows: Rows, dtype: torch.dtype, sums: bool) -> tuple[int, int, str]:
    """Returns the bytes of a message to read, its number of checksums, and its description."""
    if sums and rows.parts not in (0, rows.outer):  # kernels step from one piece to the next, over its checksum
        raise ValueError(f"parts: found {rows.parts}; expected {rows.outer}, one for each piece of a sum, or 0")
    what = f"{rows.total} rows of chunks {list(rows.chunks[:8])} in codec {fmt.codec}"
    return rows.message_bytes(fmt, dtype.itemsize), rows.parts, what


def _checked(payload: torch.Tensor, checksums: torch.Tensor | None, size: int, parts: int, what: str) -> torch.Tensor:
    """Checks a message to read and its checksums. Returns the message, or a copy at an aligned address."""
    check_payload(payload, size, what)
    if parts or checksums is not None:
        given = [] if checksums is None else [checksums]
        check_tensors("checksums", given, torch.int64, payload.device, [parts] if parts else [])
        if given[0].dim() != 1:  # kernels step over the first dimension
            raise ValueError(f"checksums: found shape {tuple(given[0].shape)}; expected one dimension")
    return payload.clone() if payload.data_ptr() % ALIGNMENT else payload


def _written(like: torch.Tensor, out: torch.Tensor | None, size: int) -> torch.Tensor:
    """Returns the message to write: ``out``, or a new one."""
    if out is None:
        return like.new_empty(size, dtype=torch.uint8)
    check_payload(out, size, "to be written")
    if out.device != like.device:
        raise TypeError(f"payload: found {out.device}; expected {like.device}")
    if out.data_ptr() % ALIGNMENT:
        raise ValueError(f"payload: found address {out.data_ptr():#x}; expected a multiple of {ALIGNMENT}")
    return out
