"""Kernel backends: the four operations by compiled kernels, on a processor or on a device, the same but for the launch.

Formats without blocks (``none``, ``bf16``) are copies and casts, which torch does as fast as memory allows: they stay
with the reference. So do the few buckets that the kernels' structure cannot describe (`Shape.fits`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from hzero.codecs import reference
from hzero.codecs.descriptor import Shape, axes_of, buckets_of
from hzero.sharding.records import RecordFormat

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Launcher(Protocol):
    """How kernels are started.

    Attributes:
        name: Of the backend.
        alignment: What the address of a payload must be a multiple of.
        wave: Lanes of a wave; 0 where a kernel has no lanes.
    """

    name: str
    alignment: int
    wave: int

    def launch(self, family: str, kernel: str, bucket: np.ndarray, device: torch.device) -> None:
        """Starts ``kernel`` of ``family`` on a record of `hzero.codecs.descriptor.BUCKET`."""


@dataclass(frozen=True)
class Prepared:
    """Kernels ready to run, as often as wanted, into outputs that exist.

    Attributes:
        outputs: What they write.
        kernel: Name of the kernel, as hip_kernels has it.
        family: File of the kernel.
        buckets: One call each.
        launcher: Starts them.
        inputs: What they read; held, since buckets have only addresses.
    """

    outputs: list[torch.Tensor]
    kernel: str
    family: str
    buckets: list[np.ndarray]
    launcher: Launcher
    inputs: list[torch.Tensor]

    def run(self) -> list[torch.Tensor]:
        """Runs them and returns the outputs."""
        for bucket in self.buckets:
            self.launcher.launch(self.family, self.kernel, bucket, self.inputs[0].device)
        return self.outputs


class KernelBackend:
    """The codec operations by kernels; arguments as `hzero.codecs.reference` has them, checked before.

    Args:
        launcher: Starts the kernels.
    """

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self.name = launcher.name

    # ---- what the operators call -----------------------------------------------------------------------------------

    def encode(self, *arguments: Any) -> torch.Tensor:
        """Encodes a bucket."""
        call = self.prepare_encode(*arguments)
        return call.run()[0] if call else reference.encode(*arguments)

    def encode_feedback(
        self, source: Sequence[torch.Tensor], residuals: Sequence[torch.Tensor], factors: Sequence[float], *how: Any
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Encodes a bucket with residuals added, and tells what that loses."""
        call = self.prepare_encode(source, *how, residuals=residuals, factors=factors)
        if call is None:
            return reference.encode_feedback(source, residuals, factors, *how)
        message, *left = call.run()
        return message, left

    def decode(self, *arguments: Any) -> list[torch.Tensor]:
        """Decodes a message into flat tensors in shard order."""
        call = self.prepare_decode(*arguments)
        return call.run() if call else reference.decode(*arguments)

    def decode_sum(self, *arguments: Any) -> list[torch.Tensor]:
        """Decodes the messages of several peers and sums them in float32, in their order."""
        call = self.prepare_decode_sum(*arguments)
        return call.run() if call else reference.decode_sum(*arguments)

    def decode_sum_encode(self, *arguments: Any) -> torch.Tensor:
        """`decode_sum`, then `encode` of the sums; in one kernel where blocks agree."""
        call = self.prepare_decode_sum_encode(*arguments)
        if call:
            return call.run()[0]
        payload, peers, chunks, inner, fmt, dtype, *encoding = arguments
        sums = self.decode_sum(payload, peers, chunks, inner, fmt, dtype)
        return self.encode(sums, chunks, (inner,), (1,), *encoding)

    # ---- calls, with their outputs ---------------------------------------------------------------------------------

    def prepare_encode(
        self,
        source: Sequence[torch.Tensor],
        chunks: Sequence[int],
        sizes: Sequence[int],
        strides: Sequence[int],
        outer: int,
        fmt: RecordFormat,
        stochastic: bool,
        seed: int,
        *,
        residuals: Sequence[torch.Tensor] = (),
        factors: Sequence[float] = (),
    ) -> Prepared | None:
        """`encode`, or `encode_feedback` where there are residuals; None where no kernel does it."""
        dtype, rows = source[0].dtype, math.prod(sizes)
        # What is encoded with residuals is a float32 sum.
        shape = self._shape(
            chunks, rows, (sizes, strides), (outer, rows // outer), fmt, torch.float32 if residuals else dtype
        )
        if shape is None:
            return None
        payload = source[0].new_empty(fmt.message_bytes(chunks, rows, dtype.itemsize), dtype=torch.uint8)
        left = [tensor.new_empty(tensor.numel(), dtype=torch.float32) for tensor in source] if residuals else []
        buckets = buckets_of(
            shape, payload, source, residuals=residuals, factors=factors, left=left, stochastic=stochastic, seed=seed
        )
        kernel = f"encode_{fmt.codec}_{_NAMES[dtype]}{self._wide(shape)}"
        return Prepared([payload, *left], kernel, "encode", list(buckets), self.launcher, [*source, *residuals])

    def prepare_decode(
        self,
        payload: torch.Tensor,
        chunks: Sequence[int],
        sizes: Sequence[int],
        strides: Sequence[int],
        outer: int,
        fmt: RecordFormat,
        dtype: torch.dtype,
    ) -> Prepared | None:
        """`decode`; None where no kernel does it."""
        rows = math.prod(sizes)
        shape = self._shape(chunks, rows, (sizes, strides), (outer, rows // outer), fmt, dtype)
        if shape is None:
            return None
        payload = self._aligned(payload)
        decoded = [payload.new_empty(rows * chunk, dtype=dtype) for chunk in chunks]
        buckets = buckets_of(shape, payload, decoded)
        kernel = f"decode_{fmt.codec}_{_NAMES[dtype]}"
        return Prepared(decoded, kernel, "decode", list(buckets), self.launcher, [payload])

    def prepare_decode_sum(
        self,
        payload: torch.Tensor,
        peers: int,
        chunks: Sequence[int],
        inner: int,
        fmt: RecordFormat,
        dtype: torch.dtype,
    ) -> Prepared | None:
        """`decode_sum`; None where no kernel does it."""
        shape = self._shape(chunks, inner, ((inner,), (1,)), (peers, inner), fmt, dtype)
        if shape is None:
            return None
        payload = self._aligned(payload)
        sums = [payload.new_empty(inner * chunk, dtype=torch.float32) for chunk in chunks]
        buckets = list(buckets_of(shape, payload, sums))
        return Prepared(sums, f"decode_sum_{fmt.codec}", "decode_sum", buckets, self.launcher, [payload])

    def prepare_decode_sum_encode(
        self,
        payload: torch.Tensor,
        peers: int,
        chunks: Sequence[int],
        inner: int,
        fmt: RecordFormat,
        dtype: torch.dtype,
        outer: int,
        out: RecordFormat,
        stochastic: bool,
        seed: int,
    ) -> Prepared | None:
        """`decode_sum_encode`; None where no kernel does it in one."""
        if fmt.block_size != out.block_size:
            return None
        axes = ((inner,), (1,))
        shape = self._shape(chunks, inner, axes, (peers, inner), fmt, dtype, out=out, out_outer=outer)
        if shape is None:
            return None
        payload = self._aligned(payload)
        message = payload.new_empty(out.message_bytes(chunks, inner, torch.float32.itemsize), dtype=torch.uint8)
        buckets = buckets_of(shape, payload, out_payload=message, stochastic=stochastic, seed=seed)
        kernel = f"decode_sum_encode_{fmt.codec}_{out.codec}{self._wide(shape)}"
        return Prepared([message], kernel, "decode_sum_encode", list(buckets), self.launcher, [payload])

    def _shape(
        self,
        chunks: Sequence[int],
        rows: int,
        axes: tuple[Sequence[int], Sequence[int]],
        pieces: tuple[int, int],
        fmt: RecordFormat,
        dtype: torch.dtype,
        *,
        out: RecordFormat | None = None,
        out_outer: int = 1,
    ) -> Shape | None:
        if not fmt.scale_bytes:
            return None
        sizes, strides = axes_of(*axes)
        shape = Shape(
            chunks=tuple(chunks),
            rows=rows,
            sizes=sizes,
            strides=strides,
            outer=pieces[0],
            inner=pieces[1],
            fmt=fmt,
            dtype=dtype,
            out=out,
            out_outer=out_outer,
            wave=self.launcher.wave,
        )
        return shape if shape.fits else None

    @staticmethod
    def _wide(shape: Shape) -> str:
        """A suffix: blocks of more elements than the lanes of a wave hold have kernels of their own."""
        return "_wide" if shape.wave and shape.fmt.block_size > 16 * shape.wave else ""

    def _aligned(self, payload: torch.Tensor) -> torch.Tensor:
        return payload.clone() if payload.data_ptr() % self.launcher.alignment else payload
