"""Kernel backends: the operators by compiled kernels. On a CPU and on a device only the launch differs.

Formats without blocks (``none``, ``bf16``) are copies and casts, which torch does as fast as memory allows: they stay
with the reference. So do the few buckets that the kernels' structure cannot describe (`Shape.fits`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from hzero.codecs import outputs, reference
from hzero.codecs.arguments import Messages, Rounding, Rows
from hzero.codecs.descriptor import Shape, axes_of, buckets_of
from hzero.codecs.formats import BLOCK_CODECS, RecordFormat

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Launcher(Protocol):
    """How kernels are started.

    Attributes:
        name: Of the backend.
        alignment: The address of a payload must be a multiple of it.
        wave: Lanes of a wave; 0 where a kernel has no lanes.
    """

    name: str
    alignment: int
    wave: int

    def launch(self, family: str, kernel: str, bucket: np.ndarray, device: torch.device) -> None:
        """Starts ``kernel`` of ``family`` on one `hzero.codecs.descriptor.BUCKET`."""


@dataclass(frozen=True)
class Prepared:
    """A kernel ready to run, any number of times, into outputs that exist.

    Attributes:
        outputs: The tensors that it writes.
        kernel: Name of the kernel in hip_kernels.
        family: File of the kernel.
        buckets: One launch each.
        launcher: Starts the kernel.
        inputs: The tensors that it reads; held here, since buckets have only addresses.
    """

    outputs: list[torch.Tensor]
    kernel: str
    family: str
    buckets: list[np.ndarray]
    launcher: Launcher
    inputs: list[torch.Tensor]

    def run(self) -> list[torch.Tensor]:
        """Runs the kernel and returns the outputs."""
        for bucket in self.buckets:
            self.launcher.launch(self.family, self.kernel, bucket, self.inputs[0].device)
        return self.outputs


def _family(operation: str, fmt: RecordFormat) -> str:
    """The file of a kernel: codec ``exp`` has one of its own. The host's library has no files."""
    return "exponents" if fmt.codec == "exp" else operation


class KernelBackend:
    """The operators by kernels. Arguments are those of `hzero.codecs.reference`, already checked.

    Args:
        launcher: Starts the kernels.
    """

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self.name = launcher.name
        self._wave = launcher.wave

    # ---- called by the operators -----------------------------------------------------------------------------------

    def encode(self, *arguments: Any) -> torch.Tensor:
        """Encodes a bucket."""
        call = self.prepare_encode(*arguments)
        return call.run()[0] if call else reference.encode(*arguments)

    def encode_feedback(
        self, source: Sequence[torch.Tensor], residuals: Sequence[torch.Tensor], factors: Sequence[float], *how: Any
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Encodes a bucket with residuals added, and returns the loss."""
        call = self.prepare_encode(source, *how, residuals=residuals, factors=factors)
        if call is None:
            return reference.encode_feedback(source, residuals, factors, *how)
        message, *left = call.run()
        return message, left

    def encode_difference(self, *arguments: Any) -> torch.Tensor:
        """Encodes what is new in a bucket."""
        source, base, *how = arguments
        call = self.prepare_encode(source, *how, residuals=base, difference=True)
        return call.run()[0] if call else reference.encode_difference(*arguments)

    def decode_onto(self, *arguments: Any) -> None:
        """Adds what a message decodes to, where the tensors lie."""
        payload, rows, fmt, tensors = arguments
        if not tensors or fmt.codec not in BLOCK_CODECS:
            dtype = tensors[0].dtype if tensors and fmt.codec == "none" else torch.float32
            reference.add_onto(tensors, self.decode(payload, rows, fmt, dtype))
            return
        call = self.prepare_decode(payload, rows, fmt, tensors[0].dtype, onto=tensors)
        if call:
            call.run()
        else:
            reference.decode_onto(*arguments)

    def decode(self, *arguments: Any) -> list[torch.Tensor]:
        """Decodes a message into flat tensors in shard order."""
        call = self.prepare_decode(*arguments)
        return call.run() if call else reference.decode(*arguments)

    def decode_sum(self, *arguments: Any) -> list[torch.Tensor]:
        """Decodes the messages of several peers and sums them in float32, in their order."""
        call = self.prepare_decode_sum(*arguments)
        return call.run() if call else reference.decode_sum(*arguments)

    def decode_add(self, *arguments: Any) -> None:
        """Decodes the messages of several peers and adds them in float32, in their order, to sums that exist."""
        call = self.prepare_decode_sum(*arguments)
        if call:
            call.run()
        else:
            reference.decode_add(*arguments)

    def decode_sum_encode(self, *arguments: Any) -> torch.Tensor:
        """`decode_sum`, then `encode` of the sums; in one kernel where blocks agree."""
        call = self.prepare_decode_sum_encode(*arguments)
        if call:
            return call.run()[0]
        payload, messages, fmt, dtype, outer, *encoding = arguments
        if fmt.rotation and reference.alike(fmt, encoding[0]):
            return reference.decode_sum_encode(*arguments)
        sums = self.decode_sum(payload, messages, fmt, dtype)
        return self.encode(sums, Rows.in_order(messages.chunks, messages.inner, outer), *encoding)

    # ---- calls, with their outputs ---------------------------------------------------------------------------------

    def prepare_encode(
        self,
        source: Sequence[torch.Tensor],
        rows: Rows,
        fmt: RecordFormat,
        rounding: Rounding,
        *,
        residuals: Sequence[torch.Tensor] = (),
        factors: Sequence[float] = (),
        difference: bool = False,
    ) -> Prepared | None:
        """`encode`, `encode_feedback` if residuals are given, or `encode_difference`; None if no kernel supports it."""
        dtype = source[0].dtype
        # With residuals, float32 sums are encoded.
        shape = self._shape(rows, fmt, torch.float32 if residuals else dtype, encodes=fmt.codec not in BLOCK_CODECS)
        if shape is None:
            return None
        left: list[torch.Tensor] = []
        if residuals and not difference:
            payload, left = outputs.encode_feedback(source, residuals, factors, rows, fmt)
        else:
            payload = outputs.encode(source, rows, fmt)
        added: dict[str, Any] = {"residuals": residuals, "factors": factors, "left": left, "difference": difference}
        buckets = buckets_of(shape, payload, source, **added, rounding=rounding)
        kernel = f"encode_{fmt.codec}_{_NAMES[dtype]}{self._wide(shape)}"
        return Prepared(
            [payload, *left], kernel, _family("encode", fmt), list(buckets), self.launcher, [*source, *residuals]
        )

    def prepare_decode(
        self,
        payload: torch.Tensor,
        rows: Rows,
        fmt: RecordFormat,
        dtype: torch.dtype,
        onto: Sequence[torch.Tensor] = (),
    ) -> Prepared | None:
        """`decode`, or `decode_onto` if tensors are given; None where no kernel does it."""
        shape = self._shape(rows, fmt, dtype)
        if shape is None:
            return None
        payload = self._aligned(payload)
        decoded = list(onto) or outputs.decode(payload, rows, fmt, dtype)
        kernel = f"decode_{fmt.codec}_{_NAMES[dtype]}"
        buckets = list(buckets_of(shape, payload, decoded, residuals=onto))
        return Prepared(decoded, kernel, _family("decode", fmt), buckets, self.launcher, [payload])

    def prepare_decode_sum(
        self,
        payload: torch.Tensor,
        messages: Messages,
        fmt: RecordFormat,
        dtype: torch.dtype,
        sums: Sequence[torch.Tensor] = (),
    ) -> Prepared | None:
        """`decode_sum`, or `decode_add` if sums are given; None where no kernel does it."""
        shape = self._sum_shape(messages, fmt, dtype)
        if shape is None:
            return None
        payload = self._aligned(payload)
        written = list(sums) or outputs.decode_sum(payload, messages)
        buckets = list(buckets_of(shape, payload, written, residuals=sums))
        family = _family("decode_sum", fmt)
        return Prepared(written, f"decode_sum_{fmt.codec}", family, buckets, self.launcher, [payload])

    def prepare_decode_sum_encode(
        self,
        payload: torch.Tensor,
        messages: Messages,
        fmt: RecordFormat,
        dtype: torch.dtype,
        outer: int,
        out: RecordFormat,
        rounding: Rounding,
    ) -> Prepared | None:
        """`decode_sum_encode`; None where no kernel does it in one."""
        if not fmt.scale_bytes or not reference.alike(fmt, out):
            return None
        shape = self._sum_shape(messages, fmt, dtype, out, outer)
        if shape is None:
            return None
        payload = self._aligned(payload)
        message = outputs.decode_sum_encode(payload, messages, fmt, dtype, outer, out)
        buckets = buckets_of(shape, payload, out_payload=message, rounding=rounding)
        kernel = f"decode_sum_encode_{fmt.codec}_{out.codec}{self._wide(shape)}"
        return Prepared([message], kernel, "decode_sum_encode", list(buckets), self.launcher, [payload])

    def _has(self, fmt: RecordFormat) -> bool:
        """Whether kernels have the codec: ``zfp`` and ``mpc`` only those of a CPU."""
        return fmt.block_size > 0 and not (self._wave and fmt.codec in ("zfp", "mpc"))

    # A bucket comes back in every step: its shape is found once.

    @functools.lru_cache(maxsize=1024)  # noqa: B019 - a process has few backends, and they last
    def _shape(self, rows: Rows, fmt: RecordFormat, dtype: torch.dtype, encodes: bool = False) -> Shape | None:
        if not self._has(fmt):
            return None
        sizes, strides = axes_of(rows.sizes, rows.strides)
        where = (tuple(rows.chunks), rows.total, sizes, strides, rows.outer, rows.inner)
        return self._fitting(Shape(*where, fmt, dtype, wave=self._wave, encodes=encodes))

    @functools.lru_cache(maxsize=1024)  # noqa: B019
    def _sum_shape(
        self,
        messages: Messages,
        fmt: RecordFormat,
        dtype: torch.dtype,
        out: RecordFormat | None = None,
        out_outer: int = 1,
    ) -> Shape | None:
        if not self._has(fmt) or fmt.codec == "mpc":
            return None
        peers, chunks, inner = messages
        sizes, strides = axes_of((inner,), (1,))
        return self._fitting(
            Shape(tuple(chunks), inner, sizes, strides, peers, inner, fmt, dtype, out, out_outer, self._wave)
        )

    @staticmethod
    def _fitting(shape: Shape) -> Shape | None:
        return shape if shape.fits else None

    @staticmethod
    def _wide(shape: Shape) -> str:
        """A suffix: blocks of more elements than the lanes of a wave hold have kernels of their own."""
        scaled = shape.fmt.scale_bytes > 0
        return "_wide" if shape.wave and scaled and shape.fmt.block_size > 16 * shape.wave else ""

    def _aligned(self, payload: torch.Tensor) -> torch.Tensor:
        return payload.clone() if payload.data_ptr() % self.launcher.alignment else payload
