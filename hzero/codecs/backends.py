"""Backends: prepared calls of compiled kernels, and the choice of a backend for a device.

A call is prepared once for a bucket layout. It contains the ``hz_bucket`` of hip_kernels/bucket.h, the argument of every kernel,
which is complete except for addresses, element counts and the seed. CPU and device differ only in the launch
(`hzero.codecs.launchers`). Codecs without compiled code (`hzero.codecs.formats.Traits.compiled`) use the reference.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hzero.codecs import reference
from hzero.codecs.blocks import noise_key
from hzero.codecs.formats import RecordFormat, Rows, layout_of
from hzero.codecs.launchers import AXES, BUCKET, TENSOR, TENSORS, THREADS, DeviceKernels, HostLibrary, divisor
from hzero.codecs.reference import NAMES, Backend, Run
from hzero.errors import ConfigError, is_rank_0, one_of

#: Environment variable that forces a backend for its devices (``reference`` is for all). Without it, and for other devices, the
#: fastest working backend is used.
VARIABLE = "HZERO_BACKEND"
BACKENDS = ("reference", "host", "hip", "cuda")

#: A bucket as bytes without field names: numpy would list the fields on every access to its address.
_BYTES = np.dtype((np.void, BUCKET.itemsize))

logger = logging.getLogger("hzero")


# ---- the choice -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """The backend for one kind of device.

    Attributes:
        name: One of `BACKENDS`.
        backend: Prepares the calls.
        why: The reason, on one line.
        fallback: Whether a faster backend is expected here and missing.
    """

    name: str
    backend: Backend
    why: str
    fallback: bool = False


@functools.cache
def choice(kind: str) -> Choice:
    """Returns the backend for tensors on a kind of device. On rank 0, warns if it falls back to the reference.

    Args:
        kind: ``cpu`` or ``cuda`` (torch's name for AMD GPUs too).

    Raises:
        ConfigError: ``HZERO_BACKEND`` is unknown, or names a backend for this kind that does not work.
    """
    wanted = os.environ.get(VARIABLE, "")
    if wanted and wanted not in BACKENDS:
        raise one_of(VARIABLE, wanted, BACKENDS)
    if wanted in ("hip", "cuda") and not getattr(torch.version, wanted):
        raise ConfigError(f"{VARIABLE}: {wanted} cannot be used: this torch, {torch.__version__}, is not built for it")
    if wanted == "reference":
        return Choice("reference", reference, f"set by {VARIABLE}")
    own = "host" if kind == "cpu" else ("hip" if torch.version.hip else "cuda")
    try:
        if kind == "cpu":
            library = HostLibrary()
            return Choice(own, KernelBackend(library), f"compiled library, {library.instruction_set}")
        kernels = DeviceKernels()
        return Choice(own, KernelBackend(kernels), kernels.describe())
    except (OSError, ImportError) as error:
        if wanted == own:
            raise ConfigError(f"{VARIABLE}: {own} cannot be used: {error}") from None
        if is_rank_0():
            logger.warning("hzero: codecs run in plain torch on %s tensors, several times slower: %s", kind, error)
        return Choice("reference", reference, str(error), fallback=True)


@contextlib.contextmanager
def reference_instead() -> Iterator[None]:
    """Context in which the reference computes everything, for comparisons in one process."""
    _reference_only.append(True)
    try:
        yield
    finally:
        _reference_only.pop()


_reference_only: list[bool] = []


def of(device: torch.device) -> Backend:
    """Returns the backend in use for a device."""
    if _reference_only or device.type not in ("cpu", "cuda"):
        return reference
    return choice(device.type).backend


# ---- calls of kernels -----------------------------------------------------------------------------------------------


class KernelBackend:
    """Prepares the calls of `hzero.codecs.reference` with kernels.

    Args:
        launcher: Launches the kernels.
    """

    def __init__(self, launcher: HostLibrary | DeviceKernels) -> None:
        self.launcher = launcher

    def encoder(self, rows: Rows, fmt: RecordFormat, dtype: torch.dtype, feedback: bool = False) -> Run:
        """Encodes a bucket. The kernels for codecs without a reference module support no residuals."""
        if not self._has(fmt, rows) or (feedback and not fmt.traits.reference):
            return reference.encoder(rows, fmt, dtype, feedback)
        fields = ("data", "numel", *(("residual", "left") if feedback else ()))
        return Launch(self.launcher, "encode", rows, fmt, dtype, fields, feedback=feedback)

    def decoder(self, rows: Rows, fmt: RecordFormat, dtype: torch.dtype, sums: bool = False, add: bool = False) -> Run:
        """Decodes a message into tensors in shard order, or sums its pieces in float32 in their order. Can add to such sums."""
        if not self._has(fmt, rows) or (sums and not fmt.traits.fixed):
            return reference.decoder(rows, fmt, dtype, sums, add)
        fields = ("data", "residual") if add else ("data",)
        return Launch(self.launcher, "decode_sum" if sums else "decode", rows, fmt, dtype, fields)

    def recoder(self, rows: Rows, fmt: RecordFormat, dtype: torch.dtype, summed: Rows, out: RecordFormat) -> Run | None:
        """Sums and encodes in one kernel if both formats have the same blocks or elements."""
        like = fmt.alike(out) or (fmt == out and not fmt.traits.reference)
        if not (like and self._has(fmt, rows) and self._has(out, summed)):
            return reference.recoder(rows, fmt, dtype, summed, out)
        return Launch(self.launcher, "decode_sum_encode", rows, fmt, dtype, (), out=out, summed=summed)

    def checksums(self, parts: torch.Tensor) -> torch.Tensor:
        """Checksums of bytes outside a codec kernel: a library function on CPU, the reference on devices."""
        sums: torch.Tensor = getattr(self.launcher, "checksums", reference.checksums)(parts)
        return sums

    def _has(self, fmt: RecordFormat, rows: Rows) -> bool:
        """Returns whether there are kernels for a format. Kernels that only CPUs have compute no checksums."""
        return fmt.traits.compiled in (("all",) if self.launcher.on_device or rows.parts else ("all", "cpu"))


def _kernel(operator: str, fmt: RecordFormat, dtype: torch.dtype, out: RecordFormat | None) -> str:
    """Returns the name of a kernel. Bfloat16 elements have the same records in codecs ``bf16`` and ``none``."""
    if fmt.traits.reference:
        of_type = {"decode_sum": "", "decode_sum_encode": f"_{out and out.codec}"}.get(operator, f"_{NAMES[dtype]}")
        return f"{operator}_{fmt.codec}{of_type}"
    stored = dtype if fmt.traits.plain else torch.bfloat16
    if "sum" in operator:
        return f"{operator}_none{'_none' if out else ''}_{NAMES[stored]}"
    return f"{operator}_none_{8 * stored.itemsize}" if stored == dtype else f"{operator}_bf16_{NAMES[dtype]}"


def _place_of_sums(message: torch.Tensor, parts: int, sums: torch.Tensor | None = None) -> tuple[int, int]:
    """Returns the address and the step of ``sums``, or of the checksums in a message to write, which it sets to zero."""
    found = reference.trailers(message, parts).zero_()[:, 0] if sums is None else sums
    return found.data_ptr(), found.stride(0) * found.element_size()


class Launch:
    """A kernel call for one bucket layout, with any addresses, any number of times and on any thread.

    Args:
        launcher: Launches the kernel.
        operator: Prefix of the kernel's name: encode, decode, decode_sum or decode_sum_encode.
        rows: Rows of the payload.
        fmt: Format of the payload.
        dtype: Dtype of the elements; only its size and range matter.
        fields: Fields that a call sets for each tensor: addresses, and the number of elements at the first one.
        feedback: Whether residuals are added before encoding.
        out: Format of a second payload to write, or None.
        summed: Rows of the second payload.

    Attributes:
        kernel: Name of the kernel.
    """

    def __init__(
        self,
        launcher: HostLibrary | DeviceKernels,
        operator: str,
        rows: Rows,
        fmt: RecordFormat,
        dtype: torch.dtype,
        fields: tuple[str, ...],
        *,
        feedback: bool = False,
        out: RecordFormat | None = None,
        summed: Rows | None = None,
    ) -> None:
        self.kernel = _kernel(operator, fmt, dtype, out)
        self._launch = launcher.kernel(operator, self.kernel)
        self._launcher, self._operator, self._fields = launcher, operator, fields
        self._rows, self._fmt, self._dtype, self._feedback = rows, fmt, dtype, feedback
        self._out, self._summed = out, summed
        self._stochastic = (out or fmt).stochastic
        self._buckets: list[tuple[np.ndarray, np.ndarray, list[int], int]] = []
        whole = [index for index, chunk in enumerate(rows.chunks) if chunk]
        for first in range(0, len(whole), TENSORS):
            some = whole[first : first + TENSORS]
            places = [BUCKET.fields[name][1] for name in ("payload", "out_payload")]  # type: ignore[index]
            for name in ("checks", "out_checks"):
                first_sum: int = BUCKET.fields[name][1]  # type: ignore[index]
                places += [first_sum, first_sum + 8]  # address and step
            start: int = BUCKET.fields["tensor"][1]  # type: ignore[index]
            for field in fields:
                offset = start + TENSOR.fields[field][1]  # type: ignore[index]
                places += [offset + TENSOR.itemsize * index for index in range(len(some))]
            bucket = self._bucket(some)
            words = bucket.reshape(1).view(np.uint64)
            self._buckets.append((words, np.array(places) // 8, some, int(bucket["workgroups"])))

    def _bucket(self, some: list[int]) -> np.ndarray:
        """Returns the structure for some tensors. On a device, it also defines how threads share the work."""
        rows, fmt, out, bucket = self._rows, self._fmt, self._out, np.zeros((), BUCKET)
        encodes, sums = self._operator == "encode", "sum" in self._operator
        layout = layout_of(rows.chunks, fmt, self._dtype.itemsize)
        if len(rows.sizes) > AXES or max(layout.record_bytes) >= 2**32:
            limits = f"at most {AXES} axes, and records of fewer than 2**32 bytes"
            raise ValueError(f"sizes: found {list(rows.sizes)} with chunks {list(rows.chunks)[:8]}; expected {limits}")
        together = fmt.traits.span(encodes, max(rows.chunks)) if fmt.traits.span else fmt.block_size
        bucket["row_bytes"], bucket["outer"], bucket["inner"] = layout.row_bytes, rows.outer, rows.inner
        bucket["block_size"], bucket["tensors"] = together, len(some)
        bucket["rotation"], bucket["rate"], bucket["dimension"] = fmt.rotation, fmt.rate, fmt.dimension
        bucket["stochastic"] = self._stochastic
        if fmt.traits.codes:
            # Sums are float32 for every encoded dtype.
            bucket["limit"] = (out or fmt).scale_limit("fp32" if sums or self._feedback else NAMES[self._dtype])
        bucket["axes"] = len(rows.sizes)
        bucket["sizes"][: len(rows.sizes)], bucket["strides"][: len(rows.sizes)] = rows.sizes, rows.strides
        bucket["by_sizes"][: len(rows.sizes)] = [divisor(size) for size in rows.sizes]
        bucket["by_inner"] = divisor(rows.inner)
        of_tensors: dict[str, Sequence[int]] = {
            "chunk": rows.chunks,
            "blocks": [-(-chunk // together) for chunk in rows.chunks],
            "first_block": [start % 2**32 for start in layout.block_starts],
            "start": layout.record_starts,
            "record_bytes": layout.record_bytes,
            "scales": layout.scales_offsets,
        }
        if out:
            written = layout_of(rows.chunks, out, self._dtype.itemsize)
            assert self._summed is not None
            bucket["out_row_bytes"], bucket["out_inner"] = written.row_bytes, self._summed.inner
            bucket["by_out_inner"] = divisor(self._summed.inner)
            of_tensors["out_start"], of_tensors["out_record_bytes"] = written.record_starts, written.record_bytes
            of_tensors["out_scales"] = written.scales_offsets
        for name, message in (("checks", rows), ("out_checks", self._summed)):
            if message and message.parts:
                bucket[name]["pieces"] = message.outer // message.parts
                bucket[name]["by_pieces"] = divisor(message.outer // message.parts)
        tensor = bucket["tensor"][: len(some)]
        for name, values in of_tensors.items():
            tensor[name] = [values[index] for index in some]
        if self._launcher.on_device:
            bucket["rows"] = rows.inner if sums else rows.total
            self._share(bucket, tensor, together)
        return bucket

    @staticmethod
    def _share(bucket: np.ndarray, tensor: np.ndarray, together: int) -> None:
        """Assigns workgroups of a device to the rows of all tensors.

        A block has a power of two of threads, one for 16 elements. Blocks of all rows follow each other.
        """
        first = 0
        bucket["first_group"] = 2**32 - 1
        for index, one in enumerate(tensor):
            lanes = 1 << (-(-min(int(one["chunk"]), together) // 16) - 1).bit_length()
            one["lanes_shift"], one["by_blocks"] = lanes.bit_length() - 1, divisor(int(one["blocks"]))
            bucket["first_group"][index] = first
            blocks = int(one["blocks"]) * int(bucket["rows"])
            if blocks > 2**31 - THREADS:  # limit of `divisor`
                raise ValueError(f"sizes: found {blocks:,} blocks of a tensor; expected at most 2**31 - {THREADS}")
            first += -(-blocks * lanes // THREADS)
        bucket["workgroups"] = first

    def __call__(
        self,
        payload: torch.Tensor,
        tensors: Sequence[torch.Tensor] = (),
        *,
        seed: int = 0,
        residuals: Sequence[torch.Tensor] = (),
        factors: Sequence[float] = (),
        message: torch.Tensor | None = None,
        checksums: torch.Tensor | None = None,
    ) -> None:
        """Launches the kernel.

        Args:
            payload: uint8 payload to read or write.
            tensors: The source, or the output of decoding; none if a sum is encoded again.
            seed: Seed of stochastic rounding.
            residuals: Tensors to add to the source. New residuals overwrite them.
            factors: Factors of residuals.
            message: A second payload, to write.
            checksums: The checksums of a payload that is read are added to it. None: ``payload`` is written.

        Raises:
            TypeError: The payload is on another kind of device, where its address is of other memory.
        """
        if payload.device.type != self._launcher.kind:
            found = f"found {payload.device}; expected {self._launcher.kind}"
            raise TypeError(f"device: {found}, for which the call was prepared")
        messages = [payload.data_ptr(), 0 if message is None else message.data_ptr(), 0, 0, 0, 0]
        if self._rows.parts:
            messages[2:4] = _place_of_sums(payload, self._rows.parts, checksums)
        if message is not None and self._summed is not None and self._summed.parts:
            messages[4:6] = _place_of_sums(message, self._summed.parts)
        # A kernel that adds to sums reads them from its output.
        addresses = {"data": tensors, "residual": residuals or tensors, "left": residuals}
        for template, places, some, workgroups in self._buckets:
            words = template.copy()
            values = [*messages]
            for field in self._fields:
                if field == "numel":
                    values += [tensors[index].numel() for index in some]
                else:
                    of = addresses[field]
                    values += [of[index].data_ptr() if of[index].numel() else 0 for index in some]
            words[places] = values
            if self._stochastic or factors:
                bucket = words.view(BUCKET)[0]
                bucket["key"] = noise_key(seed)
                if factors:
                    bucket["kept_bytes"] = residuals[0].element_size()
                    bucket["tensor"]["factor"][: len(some)] = [factors[index] for index in some]
            bucket = words.view(_BYTES).reshape(())
            self._launch(bucket, workgroups, payload.device)
