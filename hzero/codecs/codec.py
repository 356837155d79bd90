"""Codec: turns shards into a payload and back, with the settings of one tier."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hzero.codecs import (
    exponents,
    ops,  # noqa: F401 - defines the operators
    zfp,
)
from hzero.codecs.arguments import Messages, Rounding, Rows
from hzero.codecs.formats import EXP_BLOCK, RecordFormat, record_format
from hzero.codecs.layout import layout_of
from hzero.codecs.scales import SCALE_DTYPES, SCALE_LEVELS, scale_limit
from hzero.config import FALLIBLE, LOSSLESS, CodecConfig, CodecName

#: Largest relative error of rounding a normal number to each type, and largest absolute error of rounding any other.
_ROUNDOFF = {
    torch.float32: (2.0**-24, 2.0**-150),
    torch.bfloat16: (2.0**-8, 2.0**-134),
    torch.float16: (2.0**-11, 2.0**-25),
}


@dataclass(frozen=True)
class Codec:
    """A payload format and how to round into it. Formats: docs/payload_format.md.

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
        return Codec(config, record_format(config))

    @property
    def name(self) -> CodecName:
        """Name of the codec."""
        return self.config.codec

    @property
    def block_size(self) -> int:
        """Elements that share a scale; no meaning for codecs other than ``int8`` and ``int4``, which have no scales."""
        return self.config.block_size

    @property
    def scale(self) -> str:
        """Type of the scales, ``bf16``, ``fp32`` or ``int8``; no meaning for codecs without scales."""
        return self.config.scale

    @property
    def stochastic(self) -> bool:
        """Whether codes are rounded stochastically, not to nearest even; never without scales."""
        return self.config.rounding == "stochastic" and self.format.scale_bytes > 0

    @property
    def exact(self) -> bool:
        """Whether every element is decoded to its original bits; with ``exp`` unless its block is lost, see `lost`."""
        return self.name in LOSSLESS

    @property
    def variable(self) -> bool:
        """Whether a message uses less than its records have room for, by what the data need; see `hzero.codecs.mpc`."""
        return self.name == "mpc"

    @property
    def fallible(self) -> bool:
        """Whether a message may fail to hold a block, see `lost`."""
        return self.name in FALLIBLE

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
        relative, tiny = _ROUNDOFF[dtype]
        if self.exact:
            if self.name == "none" or dtype == torch.float32 or (self.name, dtype) == ("exp", torch.bfloat16):
                return 0.0
            return block_absmax * relative + tiny if block_absmax <= torch.finfo(dtype).max else math.inf
        if self.name == "bf16":
            mantissa, exponent = math.frexp(block_absmax)
            if math.ldexp(round(math.ldexp(mantissa, 8)), exponent - 8) > torch.finfo(dtype).max:
                return math.inf
            error, exact = block_absmax * 2.0**-8 + 2.0**-134, (torch.float32, torch.bfloat16)
        else:
            error, exact = self._block_error(block_absmax), (torch.float32, torch.float32)
        if dtype not in exact:
            error += (block_absmax + error) * relative + tiny
        if self.name == "zfp" and block_absmax + error > torch.finfo(dtype).max:
            return math.inf
        if self.format.rotation:
            summed = self.format.rotation * block_absmax + error  # the largest partial sum, in float32
            if summed > torch.finfo(torch.float32).max or block_absmax + error > torch.finfo(dtype).max:
                return math.inf
        return error

    def _block_error(self, absmax: float) -> float:
        """`error_bound` of a codec with blocks in float32."""
        if self.name == "zfp":
            return zfp.error_bound(absmax, self.format.rate)
        size = self.format.rotation
        if not size:
            return self._code_error(absmax)
        # A rotated element is a mean of magnitudes up to the same, and each decoded one a sum of `size` of them.
        rotating = 1.2 * 2.0**-23 * math.log2(size) * absmax + size * 2.0**-150
        return size * (self._code_error(absmax * (1 + 2.0**-20)) + rotating)

    def _code_error(self, absmax: float) -> float:
        codes = self.format.codes
        levels = -codes.lowest
        roundoff, tiny = _ROUNDOFF[SCALE_DTYPES[self.format.scale_bytes]]
        single = 2.0**-24
        scale = absmax / levels
        if self.format.scale_bytes == 1:
            # The product is rounded, and the code is off by a half or, clamped, by what the factor lacks, which is less.
            roundoff = (1 + roundoff) * (roundoff + 0.5 / SCALE_LEVELS) + 2 * single
            tiny = (SCALE_LEVELS + 2) * tiny
        clamped = any(scale > scale_limit(self.format, t) and absmax <= torch.finfo(t).max for t in _ROUNDOFF)
        # Largest distance of the stored scale from the exact one, and the resulting error of an element.
        drift = scale * ((2 if clamped else 1) * roundoff + 2 * single) + tiny + 2.0**-150
        step = (scale + drift) * (1.0 if self.stochastic else 0.5)
        cut = levels * drift
        if codes.highest < levels:
            # int4: the sign opposite to that of the largest element has 7 levels of the 8.
            cut = max(cut, scale + codes.highest * drift)
        return max(step, cut) + 3 * single * absmax + 2.0**-149

    def encoder(
        self,
        chunks: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        sizes: Sequence[int],
        strides: Sequence[int],
        outer: int = 1,
        adds: str = "",
    ) -> Callable[..., torch.Tensor]:
        """`encode`, or with ``adds="residuals"`` `encode_feedback`, for one layout: takes tensors, a buffer and a seed."""
        how: dict[str, Any] = {"sizes": sizes, "strides": strides, "outer": outer}

        def encode(
            source: Sequence[torch.Tensor],
            out: torch.Tensor | None = None,
            seed: int = 0,
            added: Sequence[torch.Tensor] = (),
            factors: Sequence[float] = (),
            left: Sequence[torch.Tensor] = (),
        ) -> torch.Tensor:
            if not adds:
                message = self.encode(source, chunks, seed=seed, **how)
            else:
                kept = [one.to(torch.float32) for one in added]
                message, lost = self.encode_feedback(source, kept, factors, chunks, seed=seed, **how)
                torch._foreach_copy_(list(left), lost)
            return message if out is None else out.copy_(message)

        itemsize = 4 if adds else dtype.itemsize
        encode.bytes = self.message_bytes(chunks, math.prod(sizes), itemsize)  # type: ignore[attr-defined]
        return encode

    def decoder(
        self,
        chunks: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        sizes: Sequence[int],
        strides: Sequence[int],
        outer: int = 1,
    ) -> Callable[..., list[torch.Tensor]]:
        """`decode` for one layout: takes a message, and tensors to fill."""
        how: dict[str, Any] = {"dtype": dtype, "sizes": sizes, "strides": strides, "outer": outer}

        def decode(payload: torch.Tensor, out: list[torch.Tensor] | None = None) -> list[torch.Tensor]:
            tensors = self.decode(payload, chunks, **how)
            if out is None:
                return tensors
            torch._foreach_copy_(out, tensors)
            return out

        return decode

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
    ) -> Callable[..., Any]:
        """`decode_sum`, or `decode_sum_encode`, for one layout: takes messages, what to fill, and a seed."""
        how: dict[str, Any] = {"inner": inner, "dtype": dtype}

        def summed(payload: torch.Tensor, out: Any = None, seed: int = 0) -> Any:
            if to is not None:
                message = self.decode_sum_encode(payload, peers, chunks, to=to, outer=outer, seed=seed, **how)
                return message if out is None else out.copy_(message)
            if add:
                return self.decode_sum(payload, peers, chunks, into=out, **how)
            sums = self.decode_sum(payload, peers, chunks, **how)
            if out is not None:
                torch._foreach_copy_(out, sums)
            return sums if out is None else out

        summed.bytes = to.message_bytes(chunks, inner, 4) if to is not None else 0  # type: ignore[attr-defined]
        return summed

    def message_bytes(self, chunks: Sequence[int], rows: int, itemsize: int) -> int:
        """Bytes of a message of ``rows`` shards of every tensor; ``itemsize`` is that of the decoded type."""
        return self.format.message_bytes(chunks, rows, itemsize)

    def lost(self, message: torch.Tensor, chunks: Sequence[int], *, outer: int = 1) -> torch.Tensor:
        """Counts the blocks of a message whose elements codec ``exp`` could not hold, and which decode to NaN.

        A block is lost where its list of escapes is too short; its elements have to be sent as they are, by codec
        ``none``. In such a message all readers find the same blocks.

        Args:
            message: uint8 message.
            chunks: As encoded.
            outer: As encoded.

        Returns:
            int64 ``[]`` on the message's device; 0 with every other codec.
        """
        if self.name != "exp" or not message.numel():
            return message.new_zeros((), dtype=torch.int64)
        layout = layout_of(tuple(chunks), self.format, torch.bfloat16.itemsize)
        inner = message.numel() // layout.row_bytes // outer
        return exponents.lost(message, layout, self.format, outer, inner)

    def _rounding(self, seed: int) -> Rounding:
        return Rounding(self.stochastic, seed)

    def encode(
        self,
        source: Sequence[torch.Tensor],
        chunks: Sequence[int],
        *,
        sizes: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
        outer: int = 1,
        seed: int = 0,
    ) -> torch.Tensor:
        """Encodes a bucket into one message.

        Args:
            source: Contiguous floating tensors of one dtype and device, each of at most ``rows * chunk`` elements, shards in
                order; missing elements are encoded as zero. float32, bfloat16 or float16; codec ``exp``: bfloat16; codec
                ``none``: also uint8, bytes of any type. Codec
                ``mpc`` encodes 16-bit numbers as float32, which holds them exactly.
            chunks: Elements of one shard of each tensor.
            sizes: Axes of the rows; their product is the number of rows. None takes as few rows as hold the sources
                and fill ``outer`` pieces, at least one per piece.
            strides: Distance in shards between neighbours on each axis: row ``(i, j, ..)`` is shard
                ``i * strides[0] + j * strides[1] + ..``; rows and shards correspond one to one. None: in order.
            outer: Number of pieces of the message, each ``[tensor][rows / outer][record]``.
            seed: Seed of stochastic rounding.

        Returns:
            uint8 ``[message_bytes]``.

        Raises:
            TypeError: A dtype or device that cannot be encoded, named.
            ValueError: Sizes that do not fit, named.
        """
        if sizes is None:
            pieces = max(outer, 1)
            sizes = _one_axis(strides, -(-_row_count(source, chunks) // pieces) * pieces)
        if self.name == "mpc":
            source = [tensor.to(torch.float32) if tensor.dtype.itemsize == 2 else tensor for tensor in source]
        rounding = self._rounding(seed)
        return torch.ops.hzero.encode(list(source), *_rows(chunks, sizes, strides, outer), *self.format, *rounding)

    def encode_feedback(
        self,
        source: Sequence[torch.Tensor],
        residuals: Sequence[torch.Tensor],
        factors: Sequence[float],
        chunks: Sequence[int],
        *,
        sizes: Sequence[int],
        strides: Sequence[int],
        outer: int = 1,
        seed: int = 0,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Encodes ``source + factor * residual``, product and sum rounded to float32 each, and returns the loss.

        Args:
            source: As in `encode`.
            residuals: float32, of as many elements as the sources; an empty one adds nothing.
            factors: One for each residual.
            chunks: As in `encode`.
            sizes: As in `encode`.
            strides: As in `encode`.
            outer: As in `encode`.
            seed: As in `encode`.

        Returns:
            The message, that of `encode` on float32 sums; and one flat float32 tensor for each source: the sum minus
            what the message decodes to, zero in blocks that are not finite. With a rotation it is the difference of the
            rotated numbers, rotated back.

        Raises:
            TypeError: As in `encode`.
            ValueError: As in `encode`.
        """
        rows, rounding = _rows(chunks, sizes, strides, outer), self._rounding(seed)
        return torch.ops.hzero.encode_feedback(
            list(source), list(residuals), list(factors), *rows, *self.format, *rounding
        )

    def encode_difference(
        self, source: Sequence[torch.Tensor], base: Sequence[torch.Tensor], chunks: Sequence[int], *, seed: int = 0
    ) -> torch.Tensor:
        """Encodes ``source - base``, a float32 difference rounded once, in one pass; rows in order.

        Args:
            source: As in `encode`.
            base: Contiguous tensors of the sources' dtype and sizes.
            chunks: As in `encode`.
            seed: As in `encode`.

        Returns:
            The message, that of `encode` on the float32 differences; with codec ``none`` on those rounded to the sources'
            dtype.

        Raises:
            TypeError: As in `encode`.
            ValueError: As in `encode`.
        """
        rows = Rows.in_order(chunks, _row_count(source, chunks))
        return torch.ops.hzero.encode_difference(list(source), list(base), *rows, *self.format, *self._rounding(seed))

    def decode_onto(
        self,
        payload: torch.Tensor,
        tensors: Sequence[torch.Tensor],
        chunks: Sequence[int],
        *,
        sizes: Sequence[int],
        strides: Sequence[int] | None = None,
        outer: int = 1,
    ) -> None:
        """Adds what a message decodes to, in float32, and rounds each sum once to the type of the tensor it lies in.

        Args:
            payload: uint8 message; one of codec ``none`` of the tensors' dtype.
            tensors: Contiguous tensors of one floating dtype, ``[rows * chunk]`` elements each, shards in order; changed. No
                two may overlap.
            chunks: As encoded.
            sizes: As encoded.
            strides: As encoded. None: in order.
            outer: As encoded.

        Raises:
            TypeError: As in `encode`.
            ValueError: As in `decode`.
        """
        torch.ops.hzero.decode_onto(payload, *_rows(chunks, sizes, strides, outer), *self.format, list(tensors))

    def decode(
        self,
        payload: torch.Tensor,
        chunks: Sequence[int],
        *,
        dtype: torch.dtype,
        sizes: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
        outer: int = 1,
    ) -> list[torch.Tensor]:
        """Decodes one message.

        Args:
            payload: uint8 message.
            chunks: As encoded.
            dtype: Type to decode to; for codec ``none`` the type that was encoded.
            sizes: As encoded. None takes as many rows as the payload holds.
            strides: As encoded. None: in order.
            outer: As encoded.

        Returns:
            One flat tensor of ``dtype`` each, ``[rows * chunk]``, shards in order.

        Raises:
            TypeError: As in `encode`.
            ValueError: The payload's size is not that of such a message.
        """
        if sizes is None:
            row = self.message_bytes(chunks, 1, dtype.itemsize)
            sizes = _one_axis(strides, max(payload.numel() // row, 1) if row else outer)
        return torch.ops.hzero.decode(payload, *_rows(chunks, sizes, strides, outer), *self.format, dtype)

    def decode_sum(
        self,
        payload: torch.Tensor,
        peers: int,
        chunks: Sequence[int],
        *,
        inner: int,
        dtype: torch.dtype,
        into: Sequence[torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        """Decodes the messages of several peers and sums them in float32, in the order of the peers.

        Args:
            payload: uint8, ``peers`` messages of ``inner`` rows, one after the other.
            peers: Number of messages.
            chunks: As encoded.
            inner: Rows of each message.
            dtype: Type that codec ``none`` encoded; for the others any floating type.
            into: Tensors like the results, to which the messages are added one by one, or, rotated, as one sum; None starts
                from the first one.

        Returns:
            One flat float32 tensor each, ``[inner * chunk]``: those of ``into`` where it is given.
        """
        how = (payload, *Messages(peers, chunks, inner), *self.format, dtype)
        if into is None:
            return torch.ops.hzero.decode_sum(*how)
        torch.ops.hzero.decode_add(*how, list(into))
        return list(into)

    def decode_sum_encode(
        self,
        payload: torch.Tensor,
        peers: int,
        chunks: Sequence[int],
        *,
        inner: int,
        dtype: torch.dtype,
        to: Codec,
        outer: int,
        seed: int = 0,
    ) -> torch.Tensor:
        """`decode_sum`, then ``to.encode`` of the sums with rows in order: the same bits, in one operation.

        Returns:
            uint8 message of ``inner`` rows in the codec ``to``, in ``outer`` pieces.
        """
        messages, rounding = Messages(peers, chunks, inner), to._rounding(seed)
        return torch.ops.hzero.decode_sum_encode(payload, *messages, *self.format, dtype, outer, *to.format, *rounding)


def _rows(chunks: Sequence[int], sizes: Sequence[int], strides: Sequence[int] | None, outer: int) -> Rows:
    if strides is None:
        strides = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    return Rows(chunks, sizes, strides, outer)


def _row_count(source: Sequence[torch.Tensor], chunks: Sequence[int]) -> int:
    """As few rows as hold the sources, at least one."""
    return max([1, *(-(-tensor.numel() // chunk) for tensor, chunk in zip(source, chunks) if chunk > 0)])


def _one_axis(strides: Sequence[int] | None, rows: int) -> tuple[int]:
    if strides is not None:
        raise ValueError(f"sizes: found None, expected as many as strides {list(strides)}")
    return (rows,)
