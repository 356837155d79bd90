"""Which backend is chosen and what is said of it; the device backend on stand-ins for HIP and CUDA; `hzero doctor`."""

from __future__ import annotations

import _ctypes
import builtins
import contextlib
import ctypes
import logging
import os
import shutil
import struct
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from hzero.codecs import backends, launchers, reference
from hzero.codecs.backends import KernelBackend
from hzero.codecs.codec import Codec
from hzero.codecs.formats import Rows
from hzero.codecs.launchers import BUCKET, VERSION
from hzero.config import CodecConfig
from hzero.errors import ConfigError
from hzero.tools.commands.doctor import check_codecs, check_runtimes
from tests.kernels.cases import REFERENCE, Calls
from tests.kernels.emulated import FAMILIES, KERNELS
from tests.kernels.gpu import WRONG_DEVICE, Gpu, copied, package

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
        (None, "is missing"),
        (b"not a library", "invalid ELF|file too short"),
        ("stale", rf"found version, bytes and sources \({VERSION}, .*; expected \(99999, .*: run `make setup`"),
        (
            "of other sources",
            rf"found version, bytes and sources \({VERSION}, .*; expected \({VERSION}, .*: run `make setup`",
        ),
        ("cut", "is truncated"),
        ("another", "is not hzero's library"),
    ],
)
def test_a_library_that_cannot_be_used_is_said_once(
    content: Any, says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "libhzero_host.so"
    if content in ("stale", "of other sources", "cut") and not HAS_LIBRARY:
        pytest.skip("the host library is not built")
    if content == "cut":
        whole = launchers.LIBRARY.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
    elif content == "another":
        path = Path(torch._C.__file__)
    elif content == "stale":
        path.write_bytes(launchers.LIBRARY.read_bytes())
        monkeypatch.setattr(launchers, "VERSION", 99999)
    elif content == "of other sources":
        path.write_bytes(launchers.LIBRARY.read_bytes())
        kernels = Path(shutil.copytree(KERNELS, tmp_path / "hip_kernels"))
        (kernels / "host" / "zfp.h").open("a").write("// edited\n")
        monkeypatch.setattr(launchers, "SOURCES", (tmp_path / "kernels", kernels))
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


def test_other_ranks_do_not_repeat_it(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(launchers.HostLibrary.__init__, "__defaults__", (Path("/nowhere"),))
    monkeypatch.setenv("RANK", "3")
    use()
    assert not caplog.records


@pytest.mark.parametrize("name", ["Host", "gpu", "rocm"])
def test_unknown_backends_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(backends.VARIABLE, name)
    with pytest.raises(ConfigError, match=r"HZERO_BACKEND: found .*; expected reference, host, hip or cuda"):
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
    assert library.hz_build_id().decode() == launchers.hash_files(launchers.host_sources(KERNELS)), (
        "hzero/native is of other sources: make setup"
    )
    with pytest.raises(ValueError, match="instruction_set: this processor or library has no 'neon'"):
        launchers.HostLibrary().instruction_set = "neon"


# ---- the device backend, on libraries that a test answers -----------------------------------------------------------


@pytest.fixture(params=["hip", "cuda"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A machine with a GPU, as far as hzero sees."""
    hip = request.param == "hip"
    if torch.cuda.is_available():
        pytest.skip("the process has loaded the runtime of a real GPU")
    found = Gpu(hip)
    properties = types.SimpleNamespace(gcnArchName="gfx90a:sramecc+:xnack-", major=9, minor=0)
    monkeypatch.setattr(torch._C, "__file__", str(found.folder / "torch" / "_C.so"))
    monkeypatch.setattr(torch.version, "hip", "7.0" if hip else None)
    monkeypatch.setattr(torch.version, "cuda", None if hip else "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: types.SimpleNamespace(cuda_stream=STREAM))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(launchers, "NATIVE", tmp_path / "native")
    monkeypatch.setattr(launchers.DeviceKernels, "kind", "cpu")  # its memory is this machine's
    launchers.DeviceKernels._architecture.cache_clear()
    yield found
    launchers.DeviceKernels._architecture.cache_clear()


#: Of more than 32 bits, as a pointer has.
STREAM = 0x7F00_0000_4711


def _encode(kernels: launchers.DeviceKernels) -> torch.Tensor:
    return Calls(KernelBackend(kernels)).encode(*ENCODING)


def _built_before(folder: Path) -> None:
    """Code objects of an installation, which need no compiler."""
    folder.mkdir()
    own = launchers.hash_files([*KERNELS.glob("*.h"), *KERNELS.glob("*.hip")])
    for family in FAMILIES:
        for architecture in ("gfx90a", "sm_90"):
            (folder / f"{family}.{architecture}.0123456789ab.hsaco").write_bytes(b"of other sources")
            (folder / f"{family}.{architecture}.{own}.hsaco").write_bytes(b"built before")


def test_kernels_are_compiled_once_and_kept(gpu: Gpu, tmp_path: Path) -> None:
    want = REFERENCE.encode(*ENCODING)
    for _ in range(2):  # the second finds it on disk
        kernels = launchers.DeviceKernels()
        for _ in range(2):
            assert torch.equal(_encode(kernels), want)
    option = "--offload-arch=gfx90a" if gpu.hip else "--gpu-architecture=sm_90"
    assert gpu.compiled == [(f"{family}.hip", (option, "-std=c++17")) for family in FAMILIES]
    assert gpu.loaded == [f"code of {family}.hip".encode() for family in FAMILIES] * 2
    assert gpu.launched == [("encode_int8_fp32", 1, 256, STREAM)] * 4
    assert gpu.calls.count("destroy") == len(FAMILIES)
    kept = sorted((tmp_path / "cache" / "hzero").iterdir())
    assert [path.read_bytes() for path in kept] == [f"code of {family}.hip".encode() for family in sorted(FAMILIES)]
    assert "compiled on first use" in kernels.describe()


def test_code_objects_of_the_installation_come_first(gpu: Gpu, tmp_path: Path) -> None:
    _built_before(tmp_path / "native")
    kernels = launchers.DeviceKernels()
    _encode(kernels)
    assert gpu.loaded == [b"built before"] * len(FAMILIES) and not gpu.compiled
    assert "built with the installation" in kernels.describe()
    own = launchers.hash_files([*KERNELS.glob("*.h"), *KERNELS.glob("*.hip")])
    for path in (KERNELS.parent / "hzero" / "native").glob("*.hsaco"):
        assert f".{own}." in path.name, "hzero/native is of other sources: make setup"


def test_code_objects_that_the_runtime_refuses_are_compiled_again(gpu: Gpu, tmp_path: Path) -> None:
    """Code objects of a newer ROCm are an example."""
    _built_before(tmp_path / "native")
    gpu.refused = b"built before"
    kernels = launchers.DeviceKernels()
    assert torch.equal(_encode(kernels), REFERENCE.encode(*ENCODING))
    assert [file for file, _ in gpu.compiled] == [f"{family}.hip" for family in FAMILIES]
    assert "compiled on first use; the installation's were refused: encode" in kernels.describe()


#: An ELF with a table of 10 sections at its end, and the header that hipcc puts before one.
ELF = b"\x7fELF\x02".ljust(40, b"\0") + struct.pack("<Q10xHH2x", 1000, 64, 10) + bytes(1000 - 64 + 640)
BUNDLE = b"__CLANG_OFFLOAD_BUNDLE__".ljust(4096, b"\0")


def test_truncated_code_objects_are_named(gpu: Gpu, tmp_path: Path) -> None:
    """Those of the installation are an error, and those in the cache are compiled again."""
    _built_before(tmp_path / "native")
    own = launchers.hash_files([*KERNELS.glob("*.h"), *KERNELS.glob("*.hip")])
    path = tmp_path / "native" / f"encode.{'gfx90a' if gpu.hip else 'sm_90'}.{own}.hsaco"
    for content, whole in [(BUNDLE + ELF, True), ((BUNDLE + ELF)[:-1], False), ((BUNDLE + ELF)[:4100], False)]:
        path.write_bytes(content)
        if whole:
            assert torch.equal(_encode(launchers.DeviceKernels()), REFERENCE.encode(*ENCODING))
            continue
        with pytest.raises(ImportError, match=f"cannot be loaded for .*{path} is truncated: {len(content)} bytes"):
            launchers.DeviceKernels()
    assert not gpu.compiled
    shutil.rmtree(tmp_path / "native")
    launchers.DeviceKernels()
    for kept in (tmp_path / "cache" / "hzero").iterdir():
        kept.write_bytes(ELF[:-1])
    assert torch.equal(_encode(launchers.DeviceKernels()), REFERENCE.encode(*ENCODING))
    assert len(gpu.compiled) == 2 * len(FAMILIES)


def test_a_cache_that_cannot_be_written_costs_time_alone(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for _ in range(2):
        _encode(launchers.DeviceKernels())
    assert len(gpu.compiled) == 2 * len(FAMILIES)


def test_a_compiler_that_fails_leaves_the_reference(gpu: Gpu) -> None:
    gpu.status["compile"] = 6
    with pytest.raises(ImportError, match=r"cannot be loaded for \w+: \S+encode\.hip does not compile") as caught:
        launchers.DeviceKernels()
    assert "ERROR_COMPILATION (6)\nblock.h(1): an error!" in str(caught.value.__cause__)
    chosen = backends.choice("cuda")
    assert chosen.fallback and chosen.backend is reference and "ERROR_COMPILATION (6)" in chosen.why
    assert "\n" not in chosen.why


def test_devices_that_do_not_fit_are_named(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """An architecture without kernels, and code that the device does not take; in the words of the runtime."""
    if gpu.hip:
        other = types.SimpleNamespace(gcnArchName="gfx1100", major=11, minor=0)
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "get_device_properties", lambda index: other)
            why = backends.choice("cuda").why
        assert "the kernels are written for gfx9 (MI50 to MI300), this is gfx1100" in why
        backends.choice.cache_clear()
        launchers.DeviceKernels._architecture.cache_clear()
    gpu.status["load"] = WRONG_DEVICE
    name = "hip" if gpu.hip else "cu"
    says = f"encode: {name}ModuleLoadData: no kernel image for this device (209)"
    assert backends.choice("cuda").why.endswith(says)
    # Otherwise torch's next launch would report it.
    assert gpu.calls.count("forget") == gpu.hip
    monkeypatch.setenv(backends.VARIABLE, "hip" if gpu.hip else "cuda")
    backends.choice.cache_clear()
    with pytest.raises(ConfigError, match=r"cannot be used: the kernels cannot be loaded for \w+: encode: "):
        backends.choice("cuda")


def test_a_launch_that_fails_names_kernel_and_reason(gpu: Gpu) -> None:
    kernels = launchers.DeviceKernels()
    _encode(kernels)
    gpu.status["launch"] = 1
    name = "hipModuleLaunchKernel" if gpu.hip else "cuLaunchKernel"
    with pytest.raises(RuntimeError, match=rf"^encode_int8_fp32: {name}: out of order \(1\)$"):
        _encode(kernels)


def test_threads_without_a_context_get_the_devices(gpu: Gpu) -> None:
    kernels = launchers.DeviceKernels()
    gpu.context = 0
    _encode(kernels)
    assert gpu.context == (0 if gpu.hip else 0x7DEF_0000_0000)
    assert gpu.calls.count("retain") == (0 if gpu.hip else 2)
    _encode(kernels)
    assert gpu.calls.count("retain") == (0 if gpu.hip else 2)


@pytest.mark.parametrize("mode", [os.RTLD_LOCAL, os.RTLD_GLOBAL])
def test_a_second_runtime_is_not_used_and_is_refused_by_doctor(mode: int, gpu: Gpu, tmp_path: Path) -> None:
    """One that takes torch's own calls, since it was loaded for the whole process, leaves the reference."""
    runtime = gpu.libraries()[0]
    second = ctypes.CDLL(str(copied(runtime, tmp_path / "of a module")), mode=mode)
    called = []
    answer = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *call: called.append(call) or 0)
    second.answer_by(answer)
    both = sorted([str(runtime), str(tmp_path / "of a module" / runtime.name)])
    try:
        assert launchers.runtimes() == both
        if mode == os.RTLD_GLOBAL and gpu.hip:
            says = f"gfx90a: torch's calls may go to two runtimes: {both[0]} and {both[1]}"
            with pytest.raises(ImportError, match=says):
                launchers.DeviceKernels()
        else:
            assert torch.equal(_encode(launchers.DeviceKernels()), REFERENCE.encode(*ENCODING))
            assert gpu.launched
        assert not called
        refused = [text for status, text in check_runtimes() if status == 2]
        assert len(refused) == 1 and all(path in refused[0] for path in both)
        second_file = tmp_path / "of a module" / runtime.name
        second_file.unlink()  # as an update does while the process runs
        assert f"{second_file} (deleted)" in launchers.runtimes()
    finally:
        _ctypes.dlclose(second._handle)
    assert launchers.runtimes() == [str(runtime)]
    assert list(check_runtimes()) == [(0, f"torch loads the GPU runtime {runtime}")]


def test_kernels_start_where_maps_are_hidden(gpu: Gpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in some containers."""
    _built_before(tmp_path / "native")
    ctypes.CDLL(torch._C.__file__)  # as torch has
    hidden = mock.Mock(side_effect=PermissionError(13, "Permission denied"))
    with mock.patch.object(Path, "read_text", hidden):
        assert launchers.runtimes() == []
        assert torch.equal(_encode(launchers.DeviceKernels()), REFERENCE.encode(*ENCODING))


@pytest.fixture
def without_compiler(gpu: Gpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Torch cannot find the compiler itself, and no compiler is next to its runtime or loaded."""
    if not gpu.hip:
        pytest.skip("the same code as for HIP")
    extension = copied(Path(torch._C.__file__), tmp_path / "torch")  # linked with the runtime as before
    monkeypatch.setattr(torch._C, "__file__", str(extension))
    compiler, loaded = gpu.libraries()[1], launchers.loaded
    aside = compiler.rename(tmp_path / compiler.name)
    own = str(tmp_path / "of cupy")  # other tests have left theirs
    monkeypatch.setattr(
        launchers, "loaded", lambda *of: [path for path in loaded(*of) if "hiprtc" not in path or path.startswith(own)]
    )
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    package(tmp_path / "site", "torch", gpu.libraries()[:1])
    yield aside
    aside.rename(compiler)
    sys.modules.pop("cupy", None)


def test_the_compiler_beside_the_runtime(gpu: Gpu, without_compiler: Path) -> None:
    with pytest.raises(ImportError, match=r"gfx90a: found no hiprtc in torch's libraries nor beside them, nor a CuPy"):
        launchers.DeviceKernels()
    beside = gpu.folder / "rocm" / "libhiprtc.so"
    shutil.copy(without_compiler, beside)
    try:
        gpu.answer(ctypes.CDLL(str(beside)))
        launchers.DeviceKernels()
    finally:
        beside.unlink()
    assert len(gpu.compiled) == len(FAMILIES)


def test_a_cupy_with_torchs_runtime_brings_a_compiler(
    gpu: Gpu, without_compiler: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever its distribution is called. Doctor says that they share the runtime."""
    compiler = copied(without_compiler, tmp_path / "of cupy")
    here = f"import builtins\ngetattr(builtins, 'imported', bool)({str(compiler)!r})\n"
    package(tmp_path / "site", "cupy", [*gpu.libraries(), compiler], here)
    monkeypatch.setattr(builtins, "imported", lambda path: gpu.answer(ctypes.CDLL(path)), raising=False)
    launchers.DeviceKernels()
    assert len(gpu.compiled) == len(FAMILIES) and "cupy" in sys.modules
    assert (0, f"torch with CuPy loads the GPU runtime {gpu.libraries()[0]}") in list(check_runtimes())


def test_a_cupy_with_a_second_runtime_is_not_imported(gpu: Gpu, without_compiler: Path, tmp_path: Path) -> None:
    second = copied(gpu.libraries()[0], tmp_path / "of cupy")
    package(tmp_path / "site", "cupy", [second, copied(without_compiler, tmp_path / "of cupy")])
    with pytest.raises(ImportError, match="found no hiprtc"):
        launchers.DeviceKernels()
    assert "cupy" not in sys.modules and len(launchers.runtimes()) == 1
    (text,) = [text for status, text in check_runtimes() if status == 1]
    assert str(second) in text and str(gpu.libraries()[0]) in text and "hzero does not need CuPy" in text


# ---- hzero doctor ---------------------------------------------------------------------------------------------------


def test_doctor_finds_wrong_results(monkeypatch: pytest.MonkeyPatch) -> None:
    def decoder(*how: Any) -> Any:
        decode = reference.decoder(*how)

        def one_more(payload: torch.Tensor, tensors: list[torch.Tensor], **how: Any) -> None:
            decode(payload, tensors, **how)
            tensors[0].add_(1)

        return one_more if how[3] else decode

    wrong = types.ModuleType("wrong")
    vars(wrong).update(vars(reference), decoder=decoder)
    monkeypatch.setattr(backends, "choice", lambda kind: backends.Choice("host", wrong, "a test"))
    findings = list(check_codecs())
    assert {status for status, _ in findings} == {2}
    assert "cpu: {'codec': 'int8'} differs from the reference" in [text for _, text in findings]
