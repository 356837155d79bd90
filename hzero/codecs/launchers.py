"""Launchers: launch compiled kernels of the host library and of devices (hip_kernels), with one `BUCKET` each."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from hzero.files import cache_folder, distrust, replacing

#: ``HZ_BUCKET_VERSION``, ``_TENSORS``, ``_GROUPS``, ``_AXES`` and ``HZ_THREADS`` of the C side.
VERSION, TENSORS, GROUPS, AXES, THREADS = 13, 38, 40, 6, 256

#: A prepared divisor; see `divisor`.
DIVISOR = np.dtype([("factor", "u4"), ("shift", "u4")])

TENSOR = np.dtype(
    [
        *((name, "u8") for name in ("data", "residual", "left")),
        *((name, "i8") for name in ("numel", "start", "out_start")),
        *((name, "u4") for name in ("chunk", "blocks", "scales", "out_scales", "record_bytes", "out_record_bytes")),
        ("first_block", "u4"),
        ("factor", "f4"),
        ("lanes_shift", "u4"),
        ("by_blocks", DIVISOR),
    ],
    align=True,
)

#: Place of a payload's checksums.
CHECKS = np.dtype([("sums", "u8"), ("step", "i8"), ("pieces", "u4"), ("by_pieces", DIVISOR)], align=True)

#: The argument of every kernel, ``hz_bucket`` of hip_kernels/bucket.h.
BUCKET = np.dtype(
    [
        *((name, "u8") for name in ("payload", "out_payload")),
        *((name, "i8") for name in ("row_bytes", "out_row_bytes")),
        *((name, CHECKS) for name in ("checks", "out_checks")),
        *((name, "u4") for name in ("outer", "inner", "out_inner")),
        *((name, DIVISOR) for name in ("by_inner", "by_out_inner")),
        ("block_size", "u4"),
        ("limit", "f4"),
        *((name, "u4") for name in ("stochastic", "key", "rotation", "rate", "dimension", "kept_bytes", "axes")),
        *((name, "u4", AXES) for name in ("sizes", "strides")),
        ("by_sizes", DIVISOR, AXES),
        *((name, "u4") for name in ("tensors", "rows", "workgroups", "padding")),
        ("first_group", "u4", GROUPS),
        ("tensor", TENSOR, TENSORS),
    ],
    align=True,
)

#: The argument of the kernels of codec ``exact``, ``hz_exact`` of hip_kernels/bucket.h, and its ``HZ_EXACT_ROWS``.
EXACT_ROWS = 384
EXACT_TENSOR = np.dtype(
    [
        *((name, "u8") for name in ("old", "fresh")),
        ("step", "i8"),
        *((name, "u4") for name in ("numel", "chunk", "first_block", "first_lane", "first_place", "blocks")),
        ("by_blocks", DIVISOR),
    ],
    align=True,
)
EXACT = np.dtype(
    [
        *((name, "u8") for name in ("message", "sums")),
        ("record_bytes", "i8"),
        *((name, "u4") for name in ("lane_bytes", "head", "blocks", "shift", "offset", "records", "tensors")),
        ("padding", "u4", 3),
        ("first_group", "u4", GROUPS),
        ("rows", "u4", EXACT_ROWS),
        ("tensor", EXACT_TENSOR, TENSORS),
    ],
    align=True,
)


def divisor(number: int) -> tuple[int, int]:
    """A `DIVISOR`: ``n // number == n * factor >> shift`` for every ``n`` below 2**31 (Granlund and Montgomery, PLDI 1994)."""
    shift = 31 + (number - 1).bit_length()
    return -(-(1 << shift) // number), shift


#: Launches a kernel: receives its `BUCKET`, the number of workgroups and the device.
Kernel: TypeAlias = Callable[[np.ndarray, int, torch.device], None]

#: Folder of the compiled parts, in an installation and in a checkout after `make setup`.
NATIVE = Path(__file__).resolve().parents[1] / "native"
LIBRARY = NATIVE / "libhzero_host.so"


class HostLibrary:
    """Launches kernels of the host library, with torch's number of threads.

    Args:
        path: The library.

    Raises:
        OSError: The library is missing or truncated, cannot be loaded, or was built from other sources.
    """

    on_device, kind = False, "cpu"

    def __init__(self, path: Path = LIBRARY) -> None:
        if not path.exists():
            raise OSError(f"{path} is missing; install hzero with a C++ compiler, or run `make setup` in a checkout")
        read_whole(path)
        self._library = library = ctypes.CDLL(str(path))
        try:
            library.hz_build_id.restype = library.hz_instruction_set.restype = ctypes.c_char_p
            built = library.hz_bucket_version(), library.hz_bucket_bytes(), library.hz_build_id().decode()
        except AttributeError:
            raise OSError(f"{path} is not hzero's library") from None
        # An installation has no sources of the library. In a checkout, they may have changed since it was built.
        sources = host_sources(SOURCES[1])
        expected = VERSION, BUCKET.itemsize, hash_files(sources) if sources else built[2]
        if built != expected:
            raise OSError(f"{path}: found version, bytes and sources {built}; expected {expected}: run `make setup`")

    @property
    def instruction_set(self) -> str:
        """The instruction set in use: ``avx512``, ``avx2`` or ``baseline``."""
        return self._library.hz_instruction_set().decode()

    @instruction_set.setter
    def instruction_set(self, name: str) -> None:
        if not self._library.hz_use_instruction_set(name.encode()):
            raise ValueError(f"instruction_set: this processor or library has no {name!r}")

    def kernel(self, family: str, name: str) -> Kernel:
        """Returns a function that runs a kernel to its end. Other Python threads run meanwhile."""
        function = getattr(self._library, name)
        return lambda bucket, *_: function(ctypes.c_void_p(bucket.ctypes.data), torch.get_num_threads())

    def checksums(self, parts: torch.Tensor) -> torch.Tensor:
        """As in `hzero.codecs.reference.checksums`."""
        (count, size), sums = parts.shape, parts.new_empty(len(parts), dtype=torch.int64)
        numbers = (parts.data_ptr(), count, size, parts.stride(0), sums.data_ptr())
        self._library.hz_checksums(*map(ctypes.c_uint64, numbers))
        return sums

    def fingerprints(self, groups: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
        """As in `hzero.codecs.codec.fingerprints`, in one call and one pass over the bytes."""
        every = [tensor for group in groups for tensor in group]
        columns = [tensor.data_ptr() for tensor in every], [tensor.nbytes for tensor in every], list(map(len, groups))
        arrays, sums = [np.array(column, dtype=np.uint64) for column in columns], np.empty(len(groups), dtype=np.int64)
        numbers = (*(array.ctypes.data for array in arrays), len(groups), sums.ctypes.data)
        self._library.hz_fingerprints(*map(ctypes.c_uint64, numbers))
        return torch.from_numpy(sums)


def read_whole(path: Path) -> bytes:
    """Returns a library or a code object; raises OSError if it is truncated.

    A process that loads a truncated library crashes when it touches the missing part. For a code object, the driver's error
    would not name the file.
    """
    content = path.read_bytes()
    start = content.find(b"\x7fELF\x02")  # a 64-bit ELF. hipcc puts a header before it. Loaders reject other files
    if 0 <= start <= len(content) - 64:
        sections, width, count = struct.unpack_from("<Q10xHH", content, start + 40)
        end = start + sections + width * count  # the table of sections comes last
        if end > len(content):
            raise OSError(f"{path} is truncated: {len(content)} bytes of {end}")
    elif content.startswith(b"__CLANG_OFFLOAD_BUNDLE__"):
        raise OSError(f"{path} is truncated: {len(content)} bytes")
    return content


#: Source files of the kernels: one per operator.
FAMILIES = ("encode", "decode", "decode_sum", "decode_sum_encode", "exact")

#: Folders of the kernel sources: in an installation, in a checkout.
SOURCES = (NATIVE / "kernels", NATIVE.parents[1] / "hip_kernels")


class DeviceKernels:
    """Launches device kernels on torch's current stream, without copies or waits; graphs can capture them.

    A code object from the installation is used if it fits the device's architecture. Otherwise, hiprtc or NVRTC compiles the
    sources at first use, and the result is cached on disk.

    Raises:
        ImportError: The kernels cannot be compiled or loaded; the message has the reason.
        OSError: The kernels do not support the device.
    """

    on_device, kind = True, "cuda"

    def __init__(self) -> None:
        self._refused = ""  # why the installation's code objects are not used
        index = torch.cuda.current_device()  # loads and initialises the runtime
        architecture = self._architecture(index)
        if torch.version.hip and not architecture.startswith("gfx9"):
            raise OSError(f"the kernels are written for gfx9 (MI50 to MI300), this is {architecture}")
        self._sources = SOURCES[0] if SOURCES[0].is_dir() else SOURCES[1]
        self._id = hash_files([*self._sources.glob("*.h"), *self._sources.glob("*.hip")])
        try:
            # A process may have loaded a second HIP, which sees neither torch's memory nor its streams. A lookup by name may
            # find that one. So HIP's functions are looked up through torch's extension: the loader then searches the libraries
            # that torch is linked with. A HIP that was loaded for the whole process, as by LD_PRELOAD, receives torch calls that
            # are bound later. NVIDIA's driver exists once per process.
            libraries = ctypes.CDLL(torch._C.__file__), ctypes.CDLL(None)
            places = [ctypes.cast(getattr(one, "hipModuleLoadData", 0), ctypes.c_void_p).value for one in libraries]
            if places[1] not in (None, places[0]):
                raise OSError(f"torch's calls may go to two runtimes: {' and '.join(runtimes())}")
            self._runtime = Library(torch._C.__file__, "hip") if torch.version.hip else Library("libcuda.so.1", "cu")
            self._modules(index)
        except (OSError, AttributeError, RuntimeError) as error:
            # First line only, without the compiler's log.
            raise ImportError(f"the kernels cannot be loaded for {architecture}: {error}".splitlines()[0]) from error

    def describe(self) -> str:
        """Architecture of the current device, and the origin of its kernels."""
        architecture = self._architecture(torch.cuda.current_device())
        built = self._built("encode", architecture).exists() and not self._refused
        how = "built with the installation" if built else f"compiled on first use{self._refused}"
        return f"kernels for {architecture}, {how}"

    def kernel(self, family: str, name: str) -> Kernel:
        """Returns a function that launches a kernel from a file of `FAMILIES` on the device's current stream."""
        return partial(self._launch, family, name)

    def _launch(self, family: str, kernel: str, bucket: np.ndarray, workgroups: int, device: torch.device) -> None:
        current = torch.cuda.current_device()
        index = current if device.index is None else device.index
        stream = ctypes.c_void_p(torch.cuda.current_stream(index).cuda_stream)
        address = ctypes.c_void_p(bucket.ctypes.data)  # the call copies the structure
        name = "ModuleLaunchKernel" if torch.version.hip else "LaunchKernel"
        with contextlib.nullcontext() if index == current else torch.cuda.device(index):
            self._enter(index)
            handle = self._function(index, family, kernel)
            self._runtime(kernel, name, handle, workgroups, 1, 1, THREADS, 1, 1, 0, stream, ctypes.byref(address), None)

    def _enter(self, index: int) -> None:
        """Sets the device's context if this thread has not used CUDA yet. HIP does so itself."""
        context = ctypes.c_void_p()
        if not torch.version.hip:
            self._runtime("context", "CtxGetCurrent", ctypes.byref(context))
            if not context:
                self._runtime("context", "DevicePrimaryCtxRetain", ctypes.byref(context), index)
                self._runtime("context", "CtxSetCurrent", context)

    @staticmethod
    @functools.cache
    def _architecture(index: int) -> str:
        properties = torch.cuda.get_device_properties(index)
        if torch.version.hip:
            return properties.gcnArchName.split(":")[0]
        return f"sm_{properties.major}{properties.minor}"

    def _built(self, family: str, architecture: str) -> Path:
        """The installation's code object; its name contains the hash of these sources."""
        return NATIVE / f"{family}.{architecture}.{self._id}.hsaco"

    @functools.cache  # noqa: B019 - one instance per process, which lives as long as the process
    def _function(self, index: int, family: str, kernel: str) -> ctypes.c_void_p:
        function, (module, _) = ctypes.c_void_p(), self._modules(index)[family]
        self._runtime(kernel, "ModuleGetFunction", ctypes.byref(function), module, kernel.encode())
        return function

    @functools.cache  # noqa: B019
    def _modules(self, index: int) -> dict[str, tuple[ctypes.c_void_p, bytes]]:
        """Loads all families at once, so that none is compiled or loaded during a graph capture.

        The result keeps their code, since HIP may read it while a module is loaded.
        """
        architecture = self._architecture(index)
        with torch.cuda.device(index):
            self._enter(index)
            return {family: self._loaded(family, architecture) for family in FAMILIES}

    def _loaded(self, family: str, architecture: str) -> tuple[ctypes.c_void_p, bytes]:
        """Loads a code object. If the runtime refuses the installation's, as of a newer ROCm, it is compiled here."""
        module, built = ctypes.c_void_p(), self._built(family, architecture)
        if built.exists() and not self._refused:
            code = read_whole(built)
            try:
                self._runtime(family, "ModuleLoadData", ctypes.byref(module), code)
                return module, code
            except RuntimeError as error:
                self._refused = f"; the installation's were refused: {error}"
        code = self._compiled(family, architecture)
        self._runtime(family, "ModuleLoadData", ctypes.byref(module), code)
        return module, code

    def _compiled(self, family: str, architecture: str) -> bytes:
        source = self._sources / f"{family}.hip"
        options = (f"--{'offload-arch' if torch.version.hip else 'gpu-architecture'}={architecture}", "-std=c++17")
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._compiler("version", "Version", ctypes.byref(major), ctypes.byref(minor))
        built_by = (*options, (major.value, minor.value), torch.version.hip, torch.version.cuda)
        key = hashlib.sha256(repr(built_by).encode()).hexdigest()[:12]
        kept = cache_folder() / f"{family}.{architecture}.{self._id}.{key}"
        try:
            if why := distrust(kept):
                raise OSError(why)
            return read_whole(kept)
        except OSError:
            code = compiled(self._compiler, source, options)
            with contextlib.suppress(OSError):  # if the folder is read-only, later processes compile again
                kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                with replacing(kept, "wb") as file:
                    file.write(code)
            return code

    @functools.cached_property
    def _compiler(self) -> Library:
        """Hiprtc or NVRTC: torch's, or one next to its runtime, or CuPy's if that shares the runtime."""
        name = "hiprtc" if torch.version.hip else "nvrtc"
        torchs = f"{Path(torch._C.__file__).parent}/lib/libcaffe2_nvrtc.so"  # torch compiles through it
        beside = [str(path) for runtime in runtimes() for path in Path(runtime).parent.glob(f"lib{name}.so*")]
        if not beside and not loaded(f"lib{name}") and len(runtimes_with_cupy()) == 1:
            import cupy  # noqa: F401
        for path in [torchs, *beside, *loaded(f"lib{name}")]:
            with contextlib.suppress(OSError, AttributeError):
                return Library(path, name)
        raise RuntimeError(f"found no {name} in torch's libraries nor beside them, nor a CuPy that shares them")


class Library:
    """Functions of a library that share a prefix and return a status, zero for success.

    Args:
        path: The library, or one that is linked to it.
        prefix: ``hip``, ``hiprtc``, ``cu`` or ``nvrtc``.

    Raises:
        AttributeError: The library has no such functions.
        OSError: The library cannot be loaded.
    """

    def __init__(self, path: str, prefix: str) -> None:
        self._library, self._prefix = ctypes.CDLL(path), prefix
        self._words = getattr(self._library, f"{prefix}GetErrorString")
        self._words.restype = ctypes.c_int if prefix == "cu" else ctypes.c_char_p

    def __call__(self, what: str, function: str, *arguments: Any) -> None:
        """Calls a function. Raises RuntimeError with ``what`` and the library's text if the status is not zero."""
        if status := getattr(self._library, self._prefix + function)(*arguments):
            words = ctypes.c_char_p()
            if self._prefix == "cu":
                self._words(status, ctypes.byref(words))
            else:
                words.value = self._words(status)
            if self._prefix == "hip":
                self._library.hipGetLastError()  # clears it, or torch's next check would raise it
            raise RuntimeError(f"{what}: {self._prefix}{function}: {(words.value or b'').decode()} ({status})")


def compiled(compiler: Library, source: Path, options: Sequence[str]) -> bytes:
    """Compiles a source with hiprtc or NVRTC and returns its code object. Raises RuntimeError with the compiler's log."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()

    def content(name: str) -> bytes:
        compiler(source.name, f"Get{name}Size", program, ctypes.byref(size))
        found = ctypes.create_string_buffer(size.value)
        compiler(source.name, f"Get{name}", program, found)
        return found.raw

    texts = [option.encode() for option in options] + [b"-I" + os.fsencode(source.parent)]
    name = source.name.encode()
    compiler(source.name, "CreateProgram", ctypes.byref(program), source.read_bytes(), name, 0, None, None)
    try:
        compiler(source.name, "CompileProgram", program, len(texts), (ctypes.c_char_p * len(texts))(*texts))
        return content("Code" if torch.version.hip else "CUBIN")
    except RuntimeError as error:
        log = content("ProgramLog").strip(b"\0\n ").decode(errors="replace")
        raise RuntimeError(f"{source} does not compile with {' '.join(options)}: {error}\n{log}") from None
    finally:
        compiler(source.name, "DestroyProgram", ctypes.byref(program))


def runtimes(maps: str | None = None) -> list[str]:
    """Files of the GPU runtimes that a process has loaded: this process, or the one of a ``/proc/PID/maps``."""
    return loaded("libamdhip64" if torch.version.hip else "libcuda", maps)


def loaded(name: str, maps: str | None = None) -> list[str]:
    """Files of a library that a process has loaded, each once; none if a container hides them."""
    with contextlib.suppress(OSError):
        maps = Path("/proc/self/maps").read_text(errors="surrogateescape") if maps is None else maps
    # Wheels add 8 hex digits to the names of bundled libraries.
    return sorted(set(re.findall(rf"/(?:.*/)?{name}(?:-[0-9a-f]{{8}})?\.so.*", maps or "")))


def runtimes_with_cupy() -> list[str]:
    """`runtimes` of a process that imports torch and CuPy, from any distribution; none if that fails.

    It runs another process, since a library cannot be unloaded.
    """
    if find_spec("cupy"):
        command = [sys.executable, "-c", "import torch, cupy; print(open('/proc/self/maps').read())"]
        with contextlib.suppress(subprocess.TimeoutExpired):
            return runtimes(subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout)
    return []


def host_sources(folder: Path) -> list[Path]:
    """Sources of the host library, as in CMakeLists.txt; none if the folder does not exist."""
    return [path for names in ("bucket.h", "host/*.h", "host/*.cpp") for path in folder.glob(names)]


def hash_files(paths: Sequence[Path]) -> str:
    """Returns twelve hex digits for the names and contents of files, like the same function in CMakeLists.txt."""
    lines = sorted(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n" for path in paths)
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:12]
