"""Codec: one tier's way to turn shards into a payload and back."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hzero.codecs import ops  # noqa: F401 - defines the operators
from hzero.codecs.reference import scale_limit
from hzero.config import CodecConfig
from hzero.sharding.records import RecordFormat, record_format

_UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


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
    def name(self) -> str:
        """One of `hzero.config.CODECS`."""
        return self.config.codec

    @property
    def exact(self) -> bool:
        """Whether every element comes back as it went in, whatever its type."""
        return self.name == "none"

    @property
    def bits(self) -> float:
        """Bits an element takes in a long record, scales included; of codec ``none`` those of float32."""
        block = self.config.block_size
        return 8 * self.format.record_bytes(block * 16, torch.float32.itemsize) / (block * 16)

    def error_bound(self, absmax: float, dtype: torch.dtype = torch.float32) -> float:
        """Largest absolute error of one round trip of a finite element.

        Args:
            absmax: Largest magnitude in the element's block (codec ``bf16``: of the element).
            dtype: Type decoded to; its own rounding is included.

        Returns:
            The bound, in the unit of the elements. Proofs are on docs/payload_format.md.
        """
        if self.name == "none":
            return 0.0
        own = _UNIT_ROUNDOFF[dtype]
        if self.name == "bf16":
            return absmax * 2.0**-8 + 2.0**-134
        unit = {2: 2.0**-8, 4: 2.0**-24}[self.format.scale_bytes]
        steps = 0.5 if self.config.rounding == "nearest" else 1.0
        largest, tiny = (127, 127 * 2.0**-134) if self.name == "int8" else (8, 8 * 2.0**-134)
        # The sign that int4 gives 7 levels is cut off at 7/8 of the block's largest element.
        relative = steps / 127 * (1 + unit) if self.name == "int8" else 1 / 8 + unit
        if absmax / largest > scale_limit(self.format, dtype):
            relative += 2 * unit
        return absmax * (relative + 1.5 * own) + tiny + torch.finfo(dtype).tiny * own

    def message_bytes(self, chunks: Sequence[int], rows: int, itemsize: int) -> int:
        """Bytes of a message of ``rows`` shards of every tensor; ``itemsize`` is that of the decoded type."""
        return self.format.message_bytes(chunks, rows, itemsize)

    def _settings(self) -> tuple[str, int, str]:
        return self.config.codec, self.config.block_size, self.config.scale

    def encode(
        self,
        source: Sequence[torch.Tensor],
        chunks: Sequence[int],
        *,
        sizes: Sequence[int] = (1,),
        strides: Sequence[int] = (1,),
        outer: int = 1,
        seed: int = 0,
    ) -> torch.Tensor:
        """Encodes a bucket into one message.

        Args:
            source: Contiguous floating tensors of one dtype (float32, bfloat16, float16) and device, each of at most
                ``rows * chunk`` elements, shards in order; what is missing is encoded as zero.
            chunks: Elements of one shard of each tensor.
            sizes: Axes of the rows; their product is the number of rows.
            strides: Distance in shards between neighbours on each axis: row ``(i, j, ..)`` is shard
                ``i * strides[0] + j * strides[1] + ..``.
            outer: How many pieces the message falls into, each ``[tensor][rows / outer][record]``.
            seed: Of stochastic rounding.

        Returns:
            uint8 ``[message_bytes]``.

        Raises:
            TypeError: A dtype or device that cannot be encoded, named.
            ValueError: Sizes that do not fit, named.
        """
        return torch.ops.hzero.encode(
            list(source),
            list(chunks),
            list(sizes),
            list(strides),
            outer,
            *self._settings(),
            self.config.rounding == "stochastic",
            seed,
        )

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
            sizes: As encoded. None takes the rows in order, as many as the payload holds.
            strides: As encoded.
            outer: As encoded.

        Returns:
            One flat tensor of ``dtype`` each, ``[rows * chunk]``, shards in order.

        Raises:
            TypeError: As `encode`.
            ValueError: The payload's size is not that of such a message.
        """
        if sizes is None or strides is None:
            row = self.message_bytes(chunks, 1, dtype.itemsize)
            sizes, strides = (payload.numel() // row if row else outer,), (1,)
        return torch.ops.hzero.decode(
            payload, list(chunks), list(sizes), list(strides), outer, *self._settings(), dtype
        )

    def decode_sum(
        self, payload: torch.Tensor, peers: int, chunks: Sequence[int], *, inner: int, dtype: torch.dtype
    ) -> list[torch.Tensor]:
        """Decodes the messages of several peers and sums them in float32, in the order of the peers.

        Args:
            payload: uint8, ``peers`` messages of ``inner`` rows, one after the other.
            peers: How many.
            chunks: As encoded.
            inner: Rows of each message.
            dtype: Type that codec ``none`` encoded; of the others only its size has to fit, and it does.

        Returns:
            One flat float32 tensor each, ``[inner * chunk]``.
        """
        return torch.ops.hzero.decode_sum(payload, peers, list(chunks), inner, *self._settings(), dtype)

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
        return torch.ops.hzero.decode_sum_encode(
            payload,
            peers,
            list(chunks),
            inner,
            *self._settings(),
            dtype,
            outer,
            *to._settings(),
            to.config.rounding == "stochastic",
            seed,
        )
