"""Device backend: the HIP and CUDA kernels of hip_kernels, started through CuPy on torch's tensors and streams."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hzero.codecs.host import NATIVE
from hzero.codecs.kernels import THREADS
from hzero.files import cache_folder, distrust, replacing

#: Files of the kernels: one per operator, and those of codec ``exp``.
FAMILIES = ("encode", "decode", "decode_sum", "decode_sum_encode", "exponents")

#: Folders of the kernels' sources: in an installation, in a checkout.
SOURCES = (NATIVE / "kernels", NATIVE.parents[1] / "hip_kernels")


class DeviceKernels:
    """Starts device kernels on torch's current stream, without copies and without waiting; graphs can capture them.

    A code object built with the installation is used where it fits the device's architecture. Otherwise hiprtc or NVRTC
    compiles the sources at first use, and the result is kept on disk.

    Raises:
        ImportError: CuPy is not installed, cannot be loaded, or finds no compiler; the message names the extra to
            install.
        OSError: No device, a device that the kernels do not support, or missing sources.
    """

    alignment = 16

    def __init__(self) -> None:
        self.name = "hip" if torch.version.hip else "cuda"
        self.wave = 64 if torch.version.hip else 32
        extra = "rocm" if torch.version.hip else "cuda"
        try:
            import cupy
            from cupy.cuda import nvrtc
        except Exception as error:  # CuPy raises what its libraries raise
            raise ImportError(f'cupy cannot be imported ({_line(error)}); pip install "hzero[{extra}]"') from None
        if bool(cupy.cuda.runtime.is_hip) != bool(torch.version.hip):
            raise ImportError(f'this cupy is not for the GPU that torch is for; pip install "hzero[{extra}]"')
        if not torch.cuda.is_available():
            raise OSError("torch sees no GPU")
        self._cupy, self._compiler = cupy, nvrtc
        sources = next((folder for folder in SOURCES if folder.is_dir()), None)
        if sources is None:
            raise OSError(f"the kernels' sources are not there: neither {SOURCES[0]} nor {SOURCES[1]} exists")
        self._sources = sources
        self._id = hash_files([*sources.glob("*.h"), *sources.glob("*.hip")])
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
        """Starts a kernel on the device's current stream."""
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
            _keep(kept, code)
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


def _keep(path: Path, code: bytes) -> None:
    """Keeps compiled code for later processes. Where the folder cannot be written they compile again."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with replacing(path, "wb") as file:
            file.write(code)


def _line(error: Exception) -> str:
    """The first line of an error's message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
