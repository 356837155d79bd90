"""Launchers: start compiled kernels on one `BUCKET`, those of the host library and those of devices (hip_kernels)."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hzero.files import cache_folder, distrust, replacing

#: ``HZ_BUCKET_VERSION``, ``HZ_BUCKET_TENSORS``, ``HZ_BUCKET_AXES`` and ``HZ_THREADS`` of the C side.
VERSION, TENSORS, AXES, THREADS = 10, 38, 6, 256

#: A number to divide by, see `divisor`.
DIVISOR = np.dtype([("factor", "u4"), ("shift", "u4")])

TENSOR = np.dtype(
    [
        *((name, "u8") for name in ("data", "residual", "left")),
        *((name, "i8") for name in ("numel", "start", "out_start")),
        *((name, "u4") for name in ("chunk", "blocks", "scales", "out_scales", "record_bytes", "out_record_bytes")),
        ("first_block", "u4"),
        ("factor", "f4"),
        ("lanes_shift", "u4"),
        ("per_row", DIVISOR),
    ],
    align=True,
)

#: Where a payload's checksums are.
CHECKS = np.dtype([("sums", "u8"), ("step", "i8"), ("pieces", "u4"), ("by_pieces", DIVISOR)], align=True)

#: The whole structure.
BUCKET = np.dtype(
    [
        *((name, "u8") for name in ("payload", "out_payload")),
        *((name, "i8") for name in ("row_bytes", "out_row_bytes")),
        *((name, CHECKS) for name in ("checks", "out_checks")),
        *((name, "u4") for name in ("outer", "inner", "out_inner")),
        *((name, DIVISOR) for name in ("by_inner", "by_out_inner")),
        ("block_size", "u4"),
        ("limit", "f4"),
        *(
            (name, "u4")
            for name in ("stochastic", "key", "rotation", "rate", "dimension", "difference", "kept_bytes", "axes")
        ),
        *((name, "u4", AXES) for name in ("sizes", "strides")),
        ("by_sizes", DIVISOR, AXES),
        *((name, "u4") for name in ("tensors", "rows", "workgroups")),
        ("first_group", "u4", TENSORS),
        ("tensor", TENSOR, TENSORS),
    ],
    align=True,
)


def divisor(number: int) -> tuple[int, int]:
    """A `DIVISOR`: ``n // number == n * factor >> shift`` for every ``n`` below 2**31 (Granlund and Montgomery, PLDI 1994)."""
    shift = 31 + (number - 1).bit_length()
    return -(-(1 << shift) // number), shift


#: Folder of the compiled parts, in an installation and in a checkout that was set up.
NATIVE = Path(__file__).resolve().parents[1] / "native"
LIBRARY = NATIVE / "libhzero_host.so"


class HostLibrary:
    """Starts kernels of the host library, on as many threads as torch was given.

    Args:
        path: The library.

    Raises:
        OSError: It is not there, cannot be loaded, or was built for another version of hzero.
    """

    on_device = False

    def __init__(self, path: Path = LIBRARY) -> None:
        if not path.exists():
            raise OSError(
                f"{path} is not there: hzero was installed without a C++ compiler, or its checkout not set up"
            )
        _check_whole(path)
        self._library = ctypes.CDLL(str(path))
        try:
            built = self._library.hz_bucket_version(), self._library.hz_bucket_bytes()
        except AttributeError:
            raise OSError(f"{path} is not hzero's library") from None
        if built != (VERSION, BUCKET.itemsize):
            raise OSError(
                f"{path} has version {built[0]} ({built[1]} bytes), expected {VERSION} ({BUCKET.itemsize} bytes): "
                "build it again"
            )
        self._library.hz_instruction_set.restype = ctypes.c_char_p

    @property
    def instruction_set(self) -> str:
        """The instruction set in use: ``avx512``, ``avx2`` or ``baseline``."""
        return self._library.hz_instruction_set().decode()

    @instruction_set.setter
    def instruction_set(self, name: str) -> None:
        if not self._library.hz_use_instruction_set(name.encode()):
            raise ValueError(f"instruction_set: this processor or library has no {name!r}")

    def launch(self, family: str, kernel: str, bucket: np.ndarray, workgroups: int, device: torch.device) -> None:
        """Runs a kernel to its end. Other Python threads go on meanwhile."""
        getattr(self._library, kernel)(ctypes.c_void_p(bucket.ctypes.data), torch.get_num_threads())

    def checksums(self, parts: torch.Tensor) -> torch.Tensor:
        """As of `hzero.codecs.reference.checksums`."""
        (count, size), sums = parts.shape, parts.new_empty(len(parts), dtype=torch.int64)
        numbers = (parts.data_ptr(), count, size, parts.stride(0), sums.data_ptr())
        self._library.hz_checksums(*map(ctypes.c_uint64, numbers))
        return sums


def _check_whole(path: Path) -> None:
    """Raises OSError for a truncated file: loading one kills the process when it touches the missing part."""
    with path.open("rb") as file:
        header = file.read(64)
        size = os.fstat(file.fileno()).st_size
    if len(header) == 64 and header[:5] == b"\x7fELF\x02":  # a 64-bit ELF; the loader itself refuses all else
        (sections,), (width, count) = struct.unpack_from("<Q", header, 40), struct.unpack_from("<HH", header, 58)
        if sections + width * count > size:
            raise OSError(f"{path} is cut short: {size} bytes of {sections + width * count}")


#: Files of the kernels: one per operator.
FAMILIES = ("encode", "decode", "decode_sum", "decode_sum_encode")

#: Folders of the kernels' sources: in an installation, in a checkout.
SOURCES = (NATIVE / "kernels", NATIVE.parents[1] / "hip_kernels")


class DeviceKernels:
    """Starts device kernels on torch's current stream, without copies and without waiting; graphs can capture them.

    A code object built with the installation is used where it fits the device's architecture. Otherwise hiprtc or NVRTC
    compiles the sources at first use, and the result is kept on disk.

    Raises:
        ImportError: CuPy is not installed, cannot be loaded, or finds no compiler; the message names the extra to
            install.
        OSError: A device that the kernels do not support.
    """

    on_device = True

    def __init__(self) -> None:
        extra = "rocm" if torch.version.hip else "cuda"
        try:
            import cupy
            from cupy.cuda import nvrtc
        except Exception as error:  # CuPy raises what its libraries raise
            raise ImportError(f'cupy cannot be imported ({_line(error)}); pip install "hzero[{extra}]"') from None
        if bool(cupy.cuda.runtime.is_hip) != bool(torch.version.hip):
            raise ImportError(f'this cupy is not for the GPU that torch is for; pip install "hzero[{extra}]"')
        self._cupy, self._compiler = cupy, nvrtc
        self._sources = SOURCES[0] if SOURCES[0].is_dir() else SOURCES[1]
        self._id = hash_files([*self._sources.glob("*.h"), *self._sources.glob("*.hip")])
        architecture = self._architecture(torch.cuda.current_device())
        if torch.version.hip and not architecture.startswith("gfx9"):
            raise OSError(f"the kernels are written for gfx9 (MI50 to MI300), this is {architecture}")
        try:
            self._modules(torch.cuda.current_device())
        except Exception as error:  # the compiler's libraries may be missing or too old for the device
            raise ImportError(
                f'the kernels cannot be loaded for {architecture} ({_line(error)}); pip install "hzero[{extra}]"'
            ) from error

    def describe(self) -> str:
        """Architecture of the current device, and where its kernels come from."""
        architecture = self._architecture(torch.cuda.current_device())
        built = self._built("encode", architecture).exists()
        how = "built with the installation" if built else "compiled on this machine"
        return f"kernels for {architecture}, {how}, cupy {self._cupy.__version__}"

    def launch(self, family: str, kernel: str, bucket: np.ndarray, workgroups: int, device: torch.device) -> None:
        """Starts a kernel of a file of `FAMILIES` on the device's current stream."""
        current = torch.cuda.current_device()
        index = current if device.index is None else device.index
        stream = self._stream(index, torch.cuda.current_stream(index).cuda_stream)
        with contextlib.nullcontext() if index == current else torch.cuda.device(index):
            function = self._function(index, family, kernel)
            function((workgroups,), (THREADS,), (bucket,), stream=stream)

    @functools.cache  # noqa: B019 - one instance per process, which lives as long as the process
    def _stream(self, index: int, pointer: int) -> Any:
        return self._cupy.cuda.ExternalStream(pointer, index)

    @staticmethod
    @functools.cache
    def _architecture(index: int) -> str:
        properties = torch.cuda.get_device_properties(index)
        if torch.version.hip:
            return properties.gcnArchName.split(":")[0]
        return f"sm_{properties.major}{properties.minor}"

    def _built(self, family: str, architecture: str) -> Path:
        """The installation's code object; its name holds the hash of these sources."""
        return NATIVE / f"{family}.{architecture}.{self._id}.hsaco"

    @functools.cache  # noqa: B019
    def _function(self, index: int, family: str, kernel: str) -> Any:
        return self._modules(index)[family].get_function(kernel)

    @functools.cache  # noqa: B019
    def _modules(self, index: int) -> dict[str, Any]:
        """Loads all families at once, so that none is compiled or loaded while a graph is captured."""
        architecture = self._architecture(index)
        modules = {}
        with torch.cuda.device(index):
            for family in FAMILIES:
                built = self._built(family, architecture)
                module = self._cupy.cuda.function.Module()
                module.load(built.read_bytes() if built.exists() else self._compiled(family, architecture))
                modules[family] = module
        return modules

    def _compiled(self, family: str, architecture: str) -> bytes:
        headers = sorted(self._sources.glob("*.h"))
        source = self._sources / f"{family}.hip"
        option = "--offload-arch=" if torch.version.hip else "--gpu-architecture="
        options = (f"{option}{architecture}", "-std=c++17")
        built_by = (*options, self._compiler.getVersion(), torch.version.hip, torch.version.cuda)
        key = hashlib.sha256(repr(built_by).encode()).hexdigest()[:12]
        kept = cache_folder() / f"{family}.{architecture}.{self._id}.{key}"
        try:
            if why := distrust(kept):
                raise OSError(why)
            return kept.read_bytes()
        except OSError:
            code = self._compile(source, headers, options)
            with contextlib.suppress(OSError):  # where the folder cannot be written, later processes compile again
                kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                with replacing(kept, "wb") as file:
                    file.write(code)
            return code

    def _compile(self, source: Path, headers: list[Path], options: tuple[str, ...]) -> bytes:
        # Not by cupy.RawModule: on ROCm that would flush subnormal numbers, which the payload format keeps.
        program = self._compiler.createProgram(
            source.read_text(), source.name, [h.read_bytes() for h in headers], [h.name.encode() for h in headers]
        )
        try:
            self._compiler.compileProgram(program, options)
            return (self._compiler.getPTX if torch.version.hip else self._compiler.getCUBIN)(program)
        except self._compiler.NVRTCError:
            log = self._compiler.getProgramLog(program).strip()
            raise RuntimeError(f"{source} does not compile with {' '.join(options)}:\n{log}") from None
        finally:
            self._compiler.destroyProgram(program)


def hash_files(paths: Sequence[Path]) -> str:
    """Twelve digits for the names and contents of files, as the function of this name in CMakeLists.txt computes them."""
    lines = sorted(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n" for path in paths)
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:12]


def _line(error: Exception) -> str:
    """The first line of an error's message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
