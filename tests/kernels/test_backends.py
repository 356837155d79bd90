"""Which backend is chosen and what is said of it; the device backend with a stand-in for CuPy; `hzero doctor`."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hzero.codecs import backends, launchers, reference
from hzero.codecs.backends import KernelBackend
from hzero.codecs.codec import Codec
from hzero.codecs.formats import Rows
from hzero.codecs.launchers import BUCKET, VERSION
from hzero.commands.doctor import check_codecs
from hzero.config import CodecConfig
from hzero.validation import ConfigError
from tests.kernels.cases import REFERENCE, Calls
from tests.kernels.emulated import FAMILIES, KERNELS, EmulatedKernels

INT8 = Codec.from_config(CodecConfig(codec="int8"))
ENCODING = ([torch.arange(300.0)], Rows.of((300,), (1,)), INT8.format)
HAS_LIBRARY = launchers.LIBRARY.exists()
needs_library = pytest.mark.skipif(not HAS_LIBRARY, reason="the host library is not built")


@pytest.fixture(autouse=True)
def _chosen_anew(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in (backends.VARIABLE, "RANK", "SLURM_PROCID"):  # the fallback is announced on rank 0 alone
        monkeypatch.delenv(name, raising=False)
    choice = backends.choice  # a test may replace it
    choice.cache_clear()
    yield
    choice.cache_clear()


def use() -> torch.Tensor:
    return INT8.encode([torch.ones(40)], [40])


# ---- the choice -----------------------------------------------------------------------------------------------------


@needs_library
def test_the_host_library_is_used_by_itself() -> None:
    chosen = backends.choice("cpu")
    assert backends.of(torch.device("cpu")) is chosen.backend and chosen.name == "host" and not chosen.fallback
    assert backends.of(torch.device("meta")) is reference
    with backends.reference_instead():
        assert backends.of(torch.device("cpu")) is reference


def test_the_reference_on_request(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(backends.VARIABLE, "reference")
    use()
    assert backends.of(torch.device("cpu")) is reference and not caplog.records


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "is not there"),
        (b"not a library", "invalid ELF|file too short"),
        ("stale", ""),
        ("cut", "is cut short"),
        ("another", "is not hzero's library"),
    ],
)
def test_a_library_that_cannot_be_used_is_said_once(
    content: Any, says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "libhzero_host.so"
    if content in ("stale", "cut") and not HAS_LIBRARY:
        pytest.skip("the host library is not built")
    if content == "cut":
        whole = launchers.LIBRARY.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
    elif content == "another":
        path = Path(_math_library())
    elif content == "stale":
        path.write_bytes(launchers.LIBRARY.read_bytes())
        monkeypatch.setattr(launchers, "VERSION", 99999)
        says = f"has version {VERSION} "
    elif content is not None:
        path.write_bytes(content)
    monkeypatch.setattr(launchers.HostLibrary.__init__, "__defaults__", (path,))
    with caplog.at_level(logging.WARNING, "hzero"):
        want = use()
        use()
    (record,) = caplog.records
    assert "codecs run in plain torch on cpu tensors" in record.getMessage()
    assert backends.choice("cpu").fallback and torch.equal(want, use())
    monkeypatch.setenv(backends.VARIABLE, "host")
    backends.choice.cache_clear()
    with pytest.raises(ConfigError, match=f"HZERO_BACKEND: host cannot be used: .*({says})"):
        backends.choice("cpu")


def _math_library() -> str:
    """The path of some library that is not ours."""
    ctypes.CDLL("libm.so.6")
    return next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libm.so" in line)


def test_other_ranks_do_not_repeat_it(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(launchers.HostLibrary.__init__, "__defaults__", (Path("/nowhere"),))
    monkeypatch.setenv("RANK", "3")
    use()
    assert not caplog.records


@pytest.mark.parametrize("name", ["Host", "gpu", "rocm"])
def test_unknown_backends_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(backends.VARIABLE, name)
    with pytest.raises(ConfigError, match=r"HZERO_BACKEND: unknown backend .* Possible: reference, host, hip, cuda"):
        use()


@pytest.mark.parametrize("name", ["hip", "cuda"])
def test_a_backend_of_another_torch_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if getattr(torch.version, name):
        pytest.skip(f"this torch is built for {name}")
    monkeypatch.setenv(backends.VARIABLE, name)
    with pytest.raises(ConfigError, match=f"HZERO_BACKEND: {name} cannot be used: this torch, "):
        use()


@needs_library
def test_the_library_has_the_structure_that_python_fills() -> None:
    library = ctypes.CDLL(str(launchers.LIBRARY))
    assert library.hz_bucket_version() == VERSION and library.hz_bucket_bytes() == BUCKET.itemsize
    library.hz_build_id.restype = ctypes.c_char_p
    sources = [KERNELS / "bucket.h", *(KERNELS / "host").iterdir()]
    assert library.hz_build_id().decode() == launchers.hash_files(sources), (
        "hzero/native is of other sources: make setup"
    )
    with pytest.raises(ValueError, match="instruction_set: this processor or library has no 'neon'"):
        launchers.HostLibrary().instruction_set = "neon"


# ---- the device backend, with a stand-in for CuPy -------------------------------------------------------------------


class _Cupy:
    """As much of CuPy as the backend uses; kernels run in the emulation."""

    def __init__(self, wave: int) -> None:
        self.compiled: list[tuple[str, tuple[str, ...]]] = []
        self.loaded: list[bytes] = []
        self.launched: list[tuple[Any, ...]] = []
        self.error = ""
        self._emulated = EmulatedKernels(64)  # tests of the kernels have both sizes
        self.module = types.ModuleType("cupy")
        self.module.__version__ = "14.0"
        self.module.cuda = types.ModuleType("cupy.cuda")
        self.module.cuda.runtime = types.SimpleNamespace(is_hip=wave == 64)
        self.module.cuda.ExternalStream = lambda pointer, index: types.SimpleNamespace(ptr=pointer)
        self.module.cuda.function = types.SimpleNamespace(Module=lambda: self)
        self.module.cuda.nvrtc = types.SimpleNamespace(
            NVRTCError=RuntimeError,
            getVersion=lambda: (13, 0),
            createProgram=self._create,
            compileProgram=self._compile,
            getPTX=lambda program: b"code of " + program.encode(),
            getCUBIN=lambda program: b"code of " + program.encode(),
            getProgramLog=lambda program: "block.h(1): error",
            destroyProgram=lambda program: None,
        )

    def _create(self, text: str, name: str, headers: list[bytes], names: list[bytes]) -> str:
        assert text == (KERNELS / name).read_text() and b"bucket.h" in names and len(headers) == len(names)
        return name

    def _compile(self, program: str, options: tuple[str, ...]) -> None:
        self.compiled.append((program, options))
        if self.error:
            raise RuntimeError(self.error)

    def load(self, code: bytes) -> None:
        self.loaded.append(code)

    def get_function(self, kernel: str) -> Any:
        def start(grid: Any, block: Any, arguments: Any, stream: Any) -> None:
            self.launched.append((kernel, grid, block, stream.ptr))
            (bucket,) = arguments
            assert isinstance(bucket, np.ndarray) and bucket.size == 1 and bucket.nbytes == BUCKET.itemsize
            self._emulated.launch("encode", kernel, bucket, grid[0], torch.device("cpu"))

        return start


@pytest.fixture(params=["hip", "cuda"])
def cupy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> _Cupy:
    """A machine with a GPU, as far as Python sees."""
    hip = request.param == "hip"
    found = _Cupy(64 if hip else 32)
    for name in ("cupy", "cupy.cuda"):
        monkeypatch.setitem(sys.modules, name, found.module if name == "cupy" else found.module.cuda)
    properties = types.SimpleNamespace(gcnArchName="gfx90a:sramecc+:xnack-", major=9, minor=0)
    monkeypatch.setattr(torch.version, "hip", "7.0" if hip else None)
    monkeypatch.setattr(torch.version, "cuda", None if hip else "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: types.SimpleNamespace(cuda_stream=4711))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(launchers, "NATIVE", tmp_path / "native")
    launchers.DeviceKernels._architecture.cache_clear()
    yield found
    launchers.DeviceKernels._architecture.cache_clear()


def _encode(kernels: launchers.DeviceKernels) -> torch.Tensor:
    return Calls(KernelBackend(kernels)).encode(*ENCODING)


def test_kernels_are_compiled_once_and_kept(cupy: _Cupy, tmp_path: Path) -> None:
    hip = bool(torch.version.hip)
    want = REFERENCE.encode(*ENCODING)
    for _ in range(2):  # the second finds it on disk
        kernels = launchers.DeviceKernels()
        for _ in range(2):
            assert torch.equal(_encode(kernels), want)
    option = "--offload-arch=gfx90a" if hip else "--gpu-architecture=sm_90"
    assert cupy.compiled == [(f"{family}.hip", (option, "-std=c++17")) for family in FAMILIES]
    assert cupy.loaded == [f"code of {family}.hip".encode() for family in FAMILIES] * 2
    assert cupy.launched == [("encode_int8_fp32", (1,), (256,), 4711)] * 4
    kept = sorted((tmp_path / "cache" / "hzero").iterdir())
    assert [path.read_bytes() for path in kept] == [f"code of {family}.hip".encode() for family in sorted(FAMILIES)]
    assert "compiled on this machine" in kernels.describe()


def test_code_objects_of_the_installation_come_first(cupy: _Cupy, tmp_path: Path) -> None:
    architecture = "gfx90a" if torch.version.hip else "sm_90"
    (tmp_path / "native").mkdir()
    own = launchers.hash_files([*KERNELS.glob("*.h"), *KERNELS.glob("*.hip")])
    for family in FAMILIES:
        (tmp_path / "native" / f"{family}.{architecture}.0123456789ab.hsaco").write_bytes(b"of other sources")
        (tmp_path / "native" / f"{family}.{architecture}.{own}.hsaco").write_bytes(b"built before")
    kernels = launchers.DeviceKernels()
    _encode(kernels)
    assert cupy.loaded == [b"built before"] * len(FAMILIES) and not cupy.compiled
    assert "built with the installation" in kernels.describe()
    for path in (KERNELS.parent / "hzero" / "native").glob("*.hsaco"):
        assert f".{own}." in path.name, "hzero/native is of other sources: make setup"


def test_a_cache_that_cannot_be_written_costs_time_alone(
    cupy: _Cupy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for _ in range(2):
        _encode(launchers.DeviceKernels())
    assert len(cupy.compiled) == 2 * len(FAMILIES)


def test_a_compiler_that_fails_leaves_the_reference(cupy: _Cupy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler's library is missing, or it does not know the device."""
    cupy.error = "compilation"
    with pytest.raises(ImportError, match=r"the kernels cannot be loaded for .*encode\.hip does not compile") as caught:
        launchers.DeviceKernels()
    assert "block.h(1): error" in str(caught.value.__cause__)

    def missing() -> None:
        raise RuntimeError("libnvrtc.so.13 not found\nand more")

    monkeypatch.setattr(cupy.module.cuda.nvrtc, "getVersion", missing)
    chosen = backends.choice("cuda")
    assert chosen.fallback and "(libnvrtc.so.13 not found); pip install" in chosen.why


def test_devices_and_packages_that_do_not_fit_are_named(cupy: _Cupy, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "hip" if torch.version.hip else "cuda"
    extra = f'pip install "hzero[{"rocm" if name == "hip" else "cuda"}]"'

    def why() -> str:
        backends.choice.cache_clear()
        chosen = backends.choice("cuda")
        assert chosen.fallback and chosen.backend is reference
        return chosen.why

    if name == "hip":
        other = types.SimpleNamespace(gcnArchName="gfx1100", major=11, minor=0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: other)
        assert "the kernels are written for gfx9 (MI50 to MI300), this is gfx1100" in why()
    cupy.module.cuda.runtime.is_hip = name == "cuda"
    assert f"this cupy is not for the GPU that torch is for; {extra}" in why()
    for module in ("cupy", "cupy.cuda"):
        monkeypatch.setitem(sys.modules, module, None)
    assert "cupy cannot be imported (" in why() and why().endswith(extra)
    monkeypatch.setenv(backends.VARIABLE, name)
    with pytest.raises(ConfigError, match="cannot be used: cupy cannot be imported"):
        why()


# ---- hzero doctor ---------------------------------------------------------------------------------------------------


def test_doctor_finds_wrong_results(monkeypatch: pytest.MonkeyPatch) -> None:
    def decoder(*how: Any) -> Any:
        decode = reference.decoder(*how)

        def one_more(payload: torch.Tensor, tensors: list[torch.Tensor]) -> None:
            decode(payload, tensors)
            tensors[0].add_(1)

        return one_more if how[4] else decode

    wrong = types.ModuleType("wrong")
    vars(wrong).update(vars(reference), decoder=decoder)
    monkeypatch.setattr(backends, "choice", lambda kind: backends.Choice("host", wrong, "a test"))
    findings = list(check_codecs())
    assert {status for status, _ in findings} == {2}
    assert "cpu: {'codec': 'int8'} differs from the reference" in [text for _, text in findings]
