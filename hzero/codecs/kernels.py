"""Kernel backends: prepared calls of compiled kernels. On a CPU and on a device only the launch differs.

A call is prepared once for a bucket layout: it has the ``hz_bucket`` of hip_kernels/bucket.h, the argument of every kernel,
complete but for addresses, counts of elements and the seed. Formats without blocks (``none``, ``bf16``) are copies and casts,
which torch does as fast as memory allows: they stay with the reference. So do the few buckets that the structure cannot
describe (`Shape.fits`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from hzero.codecs import reference
from hzero.codecs.formats import EXP_BLOCK, Messages, RecordFormat, Rows, layout_of, scale_limit
from hzero.codecs.reference import NAMES, Adds, noise_key

#: ``HZ_BUCKET_VERSION``, ``HZ_BUCKET_TENSORS``, ``HZ_BUCKET_AXES`` and ``HZ_THREADS`` of the C side.
VERSION, TENSORS, AXES, THREADS = 7, 40, 6, 256
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
        *(
            (name, "u4")
            for name in ("stochastic", "key", "rotation", "rate", "dimension", "difference", "kept_bytes", "axes")
        ),
        *((name, "u4", AXES) for name in ("sizes", "strides")),
        *((name, "u4") for name in ("tensors", "workgroups", "lanes")),
        ("tensor", _TENSOR, TENSORS),
    ],
    align=True,
)
#: The same bytes without their names, which numpy would list whenever an address is asked for.
_BYTES = np.dtype((np.void, BUCKET.itemsize))


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

    def launch(self, family: str, kernel: str, bucket: np.ndarray, workgroups: int, device: torch.device) -> None:
        """Starts ``kernel`` of ``family`` on the bytes of one `BUCKET`, which it copies."""


@dataclass(frozen=True)
class Shape:
    """A kernel call without addresses, counts of elements and the seed.

    Attributes:
        rows: Rows to work on: those of the payload, or of one peer's message. Its pieces are those of what is written.
        fmt: Format of the payload.
        dtype: Type of the elements; only its size and range matter.
        wave: Lanes of the device's wave; 0 for a CPU.
        peers: Messages of the payload that are summed; 0 where none are.
        out: Format of a second payload, to write, or None.
        adds: What is added before encoding; "base" is subtracted.
        stochastic: Whether codes are rounded stochastically.
        encodes: Whether the payload is written. Codec ``exp`` encodes whole blocks and decodes single lines, codec ``mpc``
            encodes whole records and decodes single chunks.
    """

    rows: Rows
    fmt: RecordFormat
    dtype: torch.dtype
    wave: int
    peers: int = 0
    out: RecordFormat | None = None
    adds: Adds = ""
    stochastic: bool = False
    encodes: bool = False

    @property
    def axes(self) -> list[tuple[int, int]]:
        """Sizes and strides of the rows' axes, those of size 1 left out."""
        return [(size, stride) for size, stride in zip(self.rows.sizes, self.rows.strides) if size > 1] or [(1, 1)]

    @property
    def block_size(self) -> int:
        """Elements that are worked on together."""
        sizes = {"zfp": ZFP_GROUP}
        if self.encodes:
            sizes |= {"exp": EXP_BLOCK, "mpc": max(self.rows.chunks)}
        return sizes.get(self.fmt.codec, self.fmt.block_size)

    @property
    def lanes(self) -> int:
        """Threads of a device that share a block: 16 elements each, a power of two; of a long block again and again."""
        return min(1 << (self.block_size // 16 - 1).bit_length(), THREADS)

    @property
    def suffix(self) -> str:
        """Of the kernel's name: blocks of more elements than the lanes of a wave hold have kernels of their own."""
        return "_wide" if self.wave and self.fmt.scale_bytes and self.fmt.block_size > 16 * self.wave else ""

    def groups(self, chunk: int) -> int:
        """Workgroups of a device that a tensor takes."""
        together = self.block_size * (THREADS // self.lanes)
        return -(-chunk // together) * self.rows.total

    @property
    def fits(self) -> bool:
        """Whether kernels can do it.

        They take shards of fewer than 2**31 elements and records of fewer than 2**32 bytes, rows of at most six axes, and
        no more workgroups than a device starts: AMD's devices count threads in 32 bits.
        """
        longest = max(self.rows.chunks)
        if longest >= 2**31 or len(self.axes) > AXES:
            return False
        if self.fmt.record_bytes(longest, self.dtype.itemsize) >= 2**32:
            return False
        return not self.wave or sum(map(self.groups, self.rows.chunks)) * THREADS < 2**32


def _bucket(shape: Shape, some: list[int]) -> np.ndarray:
    """The structure of some of the tensors, without addresses, counts of elements and the key."""
    rows, fmt, bucket = shape.rows, shape.fmt, np.zeros((), BUCKET)
    layout = layout_of(rows.chunks, fmt, shape.dtype.itemsize)
    bucket["row_bytes"], bucket["outer"] = layout.row_bytes, shape.peers or rows.outer
    bucket["inner"] = rows.total if shape.peers else rows.inner
    bucket["block_size"], bucket["scale_bytes"] = shape.block_size, fmt.scale_bytes
    bucket["rotation"], bucket["rate"], bucket["dimension"] = fmt.rotation, fmt.rate, fmt.dimension
    bucket["stochastic"], bucket["difference"] = shape.stochastic, shape.adds == "base"
    if fmt.scale_bytes:
        # Sums are float32, whatever was encoded.
        source = "fp32" if shape.out or shape.adds else NAMES[shape.dtype]
        bucket["limit"] = scale_limit(shape.out or fmt, source, stochastic=shape.stochastic)
    bucket["axes"], bucket["tensors"], bucket["lanes"] = len(shape.axes), len(some), shape.lanes
    for axis, (size, stride) in enumerate(shape.axes):
        bucket["sizes"][axis], bucket["strides"][axis] = size, stride
    tensor = bucket["tensor"][: len(some)]
    tensor["chunk"] = [rows.chunks[index] for index in some]
    tensor["first_block"] = [layout.block_starts[index] % 2**32 for index in some]
    tensor["start"] = [layout.record_starts[index] for index in some]
    tensor["record_bytes"] = [layout.record_bytes[index] for index in some]
    tensor["scales"] = [layout.scales_offsets[index] for index in some]
    tensor["factor"] = -1.0 if shape.adds == "base" else 0.0
    if shape.out:
        out = layout_of(rows.chunks, shape.out, torch.float32.itemsize)
        bucket["out_row_bytes"], bucket["out_inner"] = out.row_bytes, rows.inner
        bucket["out_scale_bytes"] = shape.out.scale_bytes
        tensor["out_start"] = [out.record_starts[index] for index in some]
        tensor["out_record_bytes"] = [out.record_bytes[index] for index in some]
        tensor["out_scales"] = [out.scales_offsets[index] for index in some]
    if shape.wave:
        groups = [shape.groups(rows.chunks[index]) for index in some]
        tensor["first_group"] = np.cumsum([0, *groups[:-1]])
        bucket["workgroups"] = sum(groups)
    return bucket


class Launch:
    """A kernel on buckets of one layout, for any addresses, any number of times and on any thread.

    Args:
        launcher: Starts the kernel.
        family: File of the kernel; codec ``exp`` has one of its own, and the host's library has no files.
        kernel: Name of the kernel in hip_kernels.
        shape: The layout.
        fields: What the calls fill in for each tensor: addresses ``data``, ``residual`` and ``left``, and ``numel``.
    """

    def __init__(self, launcher: Launcher, family: str, kernel: str, shape: Shape, *fields: str) -> None:
        self._launcher, self._kernel, self._fields = launcher, kernel, fields
        self._family = "exponents" if shape.fmt.codec == "exp" else family
        self._parts: list[tuple[np.ndarray, np.ndarray, list[int], int]] = []
        whole = [index for index, chunk in enumerate(shape.rows.chunks) if chunk]
        for first in range(0, len(whole), TENSORS):
            some = whole[first : first + TENSORS]
            places = [BUCKET.fields[name][1] for name in ("payload", "out_payload")]  # type: ignore[index]
            start: int = BUCKET.fields["tensor"][1]  # type: ignore[index]
            for field in fields:
                offset = start + _TENSOR.fields[field][1]  # type: ignore[index]
                places += [offset + _TENSOR.itemsize * index for index in range(len(some))]
            bucket = _bucket(shape, some)
            words = bucket.reshape(1).view(np.uint64)
            self._parts.append((words, np.array(places) // 8, some, int(bucket["workgroups"])))

    def __call__(
        self,
        payload: torch.Tensor,
        tensors: Sequence[torch.Tensor] = (),
        *,
        residuals: Sequence[torch.Tensor] = (),
        left: Sequence[torch.Tensor] = (),
        factors: Sequence[float] = (),
        out_payload: torch.Tensor | None = None,
        seed: int | None = None,
    ) -> None:
        """Starts the kernel.

        Args:
            payload: uint8 payload to read or write.
            tensors: The source, or the output of decoding; none where a sum is encoded again.
            residuals: Tensors to add, like ``tensors``; an empty one adds nothing.
            left: Outputs for the new residuals.
            factors: Factors of the residuals, where these are not plain sums.
            out_payload: A second payload, to write.
            seed: Of stochastic rounding.
        """
        for template, places, some, workgroups in self._parts:
            words = template.copy()
            values = [payload.data_ptr(), out_payload.data_ptr() if out_payload is not None else 0]
            for field in self._fields:
                if field == "numel":
                    values += [tensors[index].numel() for index in some]
                else:
                    of = tensors if field == "data" else residuals if field == "residual" else left
                    values += [of[index].data_ptr() if of[index].numel() else 0 for index in some]
            words[places] = values
            if seed is not None or left:
                bucket = words.view(BUCKET)[0]
                bucket["key"] = noise_key(seed) if seed is not None else 0
                if left:
                    bucket["kept_bytes"] = left[0].element_size()
                    bucket["tensor"]["factor"][: len(some)] = [factors[index] for index in some]
            bucket = words.view(_BYTES).reshape(())
            self._launcher.launch(self._family, self._kernel, bucket, workgroups, payload.device)


class KernelBackend:
    """The calls of `hzero.codecs.reference` by kernels.

    Args:
        launcher: Starts the kernels.
    """

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self.name = launcher.name

    def encoder(
        self, rows: Rows, fmt: RecordFormat, dtype: torch.dtype, adds: Adds, stochastic: bool
    ) -> Callable[..., None]:
        """Encodes a bucket."""
        shape = self._shape(rows, fmt, dtype, adds=adds, stochastic=stochastic, encodes=True)
        if shape is None:
            return reference.encoder(rows, fmt, dtype, adds, stochastic)
        fields = {"": ("data", "numel"), "base": ("data", "numel", "residual")}
        kernel = f"encode_{fmt.codec}_{NAMES[dtype]}{shape.suffix}"
        launch = Launch(
            self.launcher, "encode", kernel, shape, *fields.get(adds, ("data", "numel", "residual", "left"))
        )

        def run(
            payload: torch.Tensor,
            source: Sequence[torch.Tensor],
            seed: int = 0,
            added: Sequence[torch.Tensor] = (),
            factors: Sequence[float] = (),
            left: Sequence[torch.Tensor] = (),
        ) -> None:
            key, payload = seed if stochastic else None, self._written(payload)
            launch(payload, source, residuals=added, left=left, factors=factors, seed=key)

        return run

    def decoder(self, rows: Rows, fmt: RecordFormat, dtype: torch.dtype, add: bool) -> Callable[..., None]:
        """Decodes a message into tensors in shard order, or adds it to them."""
        shape = self._shape(rows, fmt, dtype)
        if shape is None:
            return reference.decoder(rows, fmt, dtype, add)
        if add and not fmt.traits.levels:
            return functools.partial(_decode_and_add, self.decoder(rows, fmt, torch.float32, False))
        fields = ("data", "residual") if add else ("data",)
        launch = Launch(self.launcher, "decode", f"decode_{fmt.codec}_{NAMES[dtype]}", shape, *fields)
        return lambda payload, tensors: launch(self._read(payload), tensors, residuals=tensors)

    def summer(self, messages: Messages, fmt: RecordFormat, dtype: torch.dtype, add: bool) -> Callable[..., None]:
        """Decodes the messages of several peers and sums them in float32, in their order."""
        rows = Rows.of(messages.chunks, (messages.inner,))
        shape = self._shape(rows, fmt, dtype, peers=messages.peers)
        if shape is None:
            return reference.summer(messages, fmt, dtype, add)
        fields = ("data", "residual") if add else ("data",)
        launch = Launch(self.launcher, "decode_sum", f"decode_sum_{fmt.codec}", shape, *fields)
        return lambda payload, sums: launch(self._read(payload), sums, residuals=sums)

    def recoder(
        self,
        messages: Messages,
        fmt: RecordFormat,
        dtype: torch.dtype,
        outer: int,
        out: RecordFormat,
        stochastic: bool,
    ) -> Callable[..., None] | None:
        """Sums and encodes in one kernel where blocks agree; None elsewhere."""
        rows = Rows.of(messages.chunks, (messages.inner,), outer=outer)
        how = {"peers": messages.peers, "out": out, "stochastic": stochastic}
        shape = self._shape(rows, fmt, dtype, **how) if fmt.alike(out) else None
        if shape is None:
            return reference.recoder(messages, fmt, dtype, outer, out, stochastic)
        kernel = f"decode_sum_encode_{fmt.codec}_{out.codec}{shape.suffix}"
        launch = Launch(self.launcher, "decode_sum_encode", kernel, shape)

        def run(payload: torch.Tensor, message: torch.Tensor, seed: int = 0) -> None:
            launch(self._read(payload), out_payload=self._written(message), seed=seed if stochastic else None)

        return run

    def _shape(self, rows: Rows, fmt: RecordFormat, dtype: torch.dtype, **how: Any) -> Shape | None:
        """The call, if there is a kernel for it."""
        traits, shape = fmt.traits, Shape(rows, fmt, dtype, self.launcher.wave, **how)
        has = fmt.block_size > 0 and (traits.on_devices or not shape.wave) and (traits.fixed or not shape.peers)
        return shape if has and shape.fits else None

    def _read(self, payload: torch.Tensor) -> torch.Tensor:
        return payload.clone() if payload.data_ptr() % self.launcher.alignment else payload

    def _written(self, payload: torch.Tensor) -> torch.Tensor:
        if payload.data_ptr() % self.launcher.alignment:
            where = f"{payload.data_ptr():#x}, expected a multiple of {self.launcher.alignment}"
            raise ValueError(f"payload: found address {where}")
        return payload


def _decode_and_add(decode: Callable[..., None], payload: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    parts = [tensor.new_empty(tensor.numel(), dtype=torch.float32) for tensor in tensors]
    decode(payload, parts)
    for tensor, part in zip(tensors, parts):
        tensor.copy_(part.add_(tensor.view(-1)).view(tensor.shape))
