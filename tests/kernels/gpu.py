"""A GPU as far as hzero's launcher sees: libraries with the functions of HIP and hiprtc, or of CUDA's driver and NVRTC.

They are real shared libraries, laid out as an installation of torch has them. A test answers their calls.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hzero.codecs.launchers import BUCKET
from tests.kernels.emulated import KERNELS, EmulatedKernels, compiler

#: Status that the libraries have words for.
WRONG_DEVICE = 209

_COMMON = """
typedef int (*Answer)(const char*, const void* const*);
static Answer answer;
static int ask(const char* name, const void* a = 0, const void* b = 0, const void* c = 0, const void* d = 0) {
  const void* with[] = {a, b, c, d};
  return answer(name, with);
}
static const char* words(int status) { return status == 209 ? "no kernel image for this device" : "out of order"; }
extern "C" void answer_by(Answer by) { answer = by; }
extern "C" {
"""
_RUNTIME = """
int hipModuleLoadData(void** module, const void* code) { return ask("load", module, code); }
int hipModuleGetFunction(void** function, void* module, const char* name) { return ask("find", function, module, name); }
int hipModuleLaunchKernel(void* function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned threads_y,
                          unsigned threads_z, unsigned shared, void* stream, void** arguments, void** extra) {
  if (y != 1 || z != 1 || threads_y != 1 || threads_z != 1 || shared || extra) return 1;
  unsigned sizes[] = {x, threads};
  return ask("launch", function, sizes, stream, arguments[0]);
}
"""
_HIP = """
const char* hipGetErrorString(int status) { return words(status); }
int hipGetLastError() { return ask("forget"); }
"""
_CUDA = """
int cuGetErrorString(int status, const char** text) { *text = words(status); return 0; }
int cuCtxGetCurrent(void** context) { return ask("context", context); }
int cuDevicePrimaryCtxRetain(void** context, int device) { return ask("retain", context, (void*)(long)device); }
int cuCtxSetCurrent(void* context) { return ask("enter", context); }
"""
_COMPILER = """
const char* hiprtcGetErrorString(int status) { return status == 6 ? "ERROR_COMPILATION" : "ERROR"; }
int hiprtcVersion(int* major, int* minor) { *major = 7; *minor = 1; return 0; }
int hiprtcCreateProgram(void** program, const char* text, const char* name, int headers, const char**, const char**) {
  return headers ? 1 : ask("create", program, text, name);
}
int hiprtcCompileProgram(void* program, int options, const char** text) {
  return options == 3 ? ask("compile", program, text[0], text[1], text[2]) : 1;
}
int hiprtcGetProgramLogSize(void* program, unsigned long* size) { *size = 22; return 0; }
int hiprtcGetProgramLog(void* program, char* log) { __builtin_memcpy(log, "block.h(1): an error!\\n", 22); return 0; }
int hiprtcGetCodeSize(void* program, unsigned long* size) { return ask("size", program, size); }
int hiprtcGetCode(void* program, char* code) { return ask("code", program, code); }
int hiprtcDestroyProgram(void** program) { return ask("destroy", *program); }
"""


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="hzero gpu ")


@functools.cache
def installation(hip: bool) -> Path:
    """Folders ``torch`` with its extension and its way to the compiler, and ``rocm``, which has runtime and compiler."""
    folder = Path(_scratch().name, "hip" if hip else "cuda")
    for name in ("torch/lib", "rocm"):
        (folder / name).mkdir(parents=True)
    runtime, run_time_compiler = ("libamdhip64.so.7", "libhiprtc.so.7") if hip else ("libcuda.so.1", "libnvrtc.so.13")

    def build(path: str, text: str, *links: str) -> None:
        if not hip:
            for old, new in (("hipModuleLaunch", "cuLaunch"), ("hiprtcGetCode", "nvrtcGetCUBIN"), ("hiprtc", "nvrtc")):
                text = text.replace(old, new)
            text = text.replace("hip", "cu")
        command = [compiler(), "-shared", "-fPIC", "-x", "c++", "-", "-o", str(folder / path)]
        command += [f"-Wl,-soname,{Path(path).name}", "-Wl,--no-as-needed", f"-Wl,-rpath,{folder / 'rocm'}"]
        command += ["-x", "none", *(str(folder / "rocm" / link) for link in links)]
        subprocess.run(command, input=text, text=True, check=True)

    build(f"rocm/{runtime}", _COMMON + _RUNTIME + (_HIP if hip else _CUDA) + "}")
    build(f"rocm/{run_time_compiler}", _COMMON + _COMPILER + "}")
    build("torch/lib/libcaffe2_nvrtc.so", "", run_time_compiler)
    build("torch/_C.so", "", *([runtime] if hip else []))
    return folder


class Gpu:
    """Answers the calls of an installation's libraries; kernels run in the emulation.

    Attributes:
        compiled: Name and options of each source that was compiled.
        loaded: Code of the modules that were loaded.
        launched: Kernel, workgroups, threads and stream of each launch.
        refused: Code that the runtime refuses to load.
        status: What calls give, by name, instead of success.
        calls: Names of all calls.
    """

    def __init__(self, hip: bool) -> None:
        self.hip, self.folder = hip, installation(hip)
        self.compiled: list[tuple[str, tuple[str, ...]]] = []
        self.loaded: list[bytes] = []
        self.launched: list[tuple[Any, ...]] = []
        self.refused = b""
        self.status: dict[str, int] = {}
        self.calls: list[str] = []
        self.context = 0
        self._names: dict[int, Any] = {}
        self._emulated = EmulatedKernels(64)  # tests of the kernels have both sizes
        self._answer = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p))(self._asked)
        for path in self.libraries():
            self.answer(ctypes.CDLL(str(path)))

    def libraries(self) -> list[Path]:
        return sorted((self.folder / "rocm").iterdir())

    def answer(self, library: ctypes.CDLL) -> None:
        """From now on this object answers the library's calls."""
        library.answer_by(self._answer)

    def _asked(self, name: bytes, with_: Any) -> int:
        call = name.decode()
        self.calls.append(call)
        try:
            getattr(self, f"_{call}")(*(with_[index] or 0 for index in range(4)))
        except Exception:  # ctypes would swallow it
            traceback.print_exc()
            return 999
        return self.status.get(call, 0)

    def _handle(self, at: int, what: Any) -> None:
        """Writes a handle, whose upper half a call that passes 32 bits would lose."""
        handle = 0x7ABC_0000_0000 + 16 * len(self._names)
        self._names[handle] = what
        ctypes.c_void_p.from_address(at).value = handle

    def _create(self, program: int, text: int, name: int, _: int) -> None:
        found = ctypes.string_at(name).decode()
        assert ctypes.string_at(text) == (KERNELS / found).read_bytes()
        self._handle(program, found)

    def _compile(self, program: int, *options: int) -> None:
        *given, folder = (ctypes.string_at(option).decode() for option in options)
        assert folder == f"-I{KERNELS}"
        self.compiled.append((self._names[program], tuple(given)))

    def _size(self, program: int, size: int, *_: int) -> None:
        ctypes.c_size_t.from_address(size).value = len(b"code of " + self._names[program].encode())

    def _code(self, program: int, code: int, *_: int) -> None:
        text = b"code of " + self._names[program].encode()
        ctypes.memmove(code, text, len(text))

    def _destroy(self, program: int, *_: int) -> None:
        del self._names[program]

    def _load(self, module: int, code: int, *_: int) -> None:
        self.loaded.append(ctypes.string_at(code))
        if self.refused:
            self.status["load"] = WRONG_DEVICE * (self.loaded[-1] == self.refused)
        self._handle(module, self.loaded[-1])

    def _find(self, function: int, module: int, name: int, _: int) -> None:
        assert module in self._names
        self._handle(function, ctypes.string_at(name).decode())

    def _launch(self, function: int, sizes: int, stream: int, bucket: int) -> None:
        workgroups, threads = (ctypes.c_uint * 2).from_address(sizes)
        kernel = self._names[function]
        self.launched.append((kernel, workgroups, threads, stream))
        given = np.frombuffer(ctypes.string_at(bucket, BUCKET.itemsize), np.uint8).view(BUCKET)
        self._emulated.launch("encode", kernel, given, workgroups, torch.device("cpu"))

    def _forget(self, *_: int) -> None:
        pass

    def _context(self, at: int, *_: int) -> None:
        ctypes.c_void_p.from_address(at).value = self.context

    def _retain(self, at: int, device: int, *_: int) -> None:
        ctypes.c_void_p.from_address(at).value = 0x7DEF_0000_0000 + device

    def _enter(self, context: int, *_: int) -> None:
        self.context = context


def package(folder: Path, name: str, loads: Sequence[Path], more: str = "") -> None:
    """A Python package that loads libraries when it is imported."""
    (folder / name).mkdir(parents=True)
    text = "import ctypes\n" + "".join(f"ctypes.CDLL({os.fspath(path)!r})\n" for path in loads)
    (folder / name / "__init__.py").write_text(text + more)


def copied(path: Path, folder: Path) -> Path:
    """A second library with the content of the first."""
    folder.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(path, folder))
