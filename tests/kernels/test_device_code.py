"""Device code without a device: every kernel compiles for gfx90a, gfx942, gfx950 within its limits, and for NVIDIA with nvcc."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from benchmarks.counts.gfx90a import Simulated
from hzero.codecs import backends, exact
from hzero.codecs.backends import KernelBackend
from hzero.codecs.formats import RecordFormat
from tests.codecs.samples import numbers
from tests.codecs.test_exact import record_of
from tests.kernels.cases import REFERENCE, Case, compared, source_of
from tests.kernels.emulated import FAMILIES, KERNELS
from tests.ranks import LONG, run_python

#: Kernels of each family: types and codecs.
COUNTS = {"encode": 11, "decode": 11, "decode_sum": 5, "decode_sum_encode": 7, "exact": 6}


def _compiler(name: str) -> list[str]:
    """A command that compiles HIP, or a skipped test."""
    if name == "hipcc":
        hipcc = shutil.which("hipcc") or shutil.which("hipcc", path="/opt/rocm/bin")
        if hipcc is None:
            pytest.skip("hipcc is not installed")
        return [hipcc, "--cuda-device-only"]
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("ziglang is not installed")
    return [sys.executable, "-m", "ziglang", "clang", "-x", "hip", "--offload-device-only", "-nogpuinc", "-nogpulib"]


# Two compilers, years apart: a kernel near its limits fits one of them only. Debian's hipcc does not support gfx942.
NEWER = [pytest.param(f"clang-gfx{one}", marks=LONG) for one in (942, 950)]


@pytest.fixture(scope="module", params=["hipcc-gfx90a", "clang-gfx90a", *NEWER])
def assembly(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Assembly of each family."""
    compiler, architecture = request.param.split("-")
    command = [*_compiler(compiler), "-O3", "-std=c++17", f"--offload-arch={architecture}", "-S"]
    out = tmp_path_factory.mktemp(request.param)
    env = {**os.environ, "HIP_PLATFORM": "amd"}
    running = {}
    for family in FAMILIES:
        path = out / f"{family}.s"
        running[family] = (
            path,
            subprocess.Popen(
                [*command, str(KERNELS / f"{family}.hip"), "-o", str(path)], env=env, stderr=subprocess.PIPE, text=True
            ),
        )
    texts = {}
    for family, (path, process) in running.items():
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        texts[family] = path.read_text()
    return texts


def _notes(text: str) -> list[dict[str, Any]]:
    """What the code object will say of each kernel (the metadata of its notes)."""
    found = re.search(r"\.amdgpu_metadata\n---\n(.*?)\n\.\.\.", text, re.DOTALL)
    assert found
    return yaml.safe_load(found[1])["amdhsa.kernels"]


@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_stay_within_their_limits(assembly: dict[str, str], family: str) -> None:
    kernels = _notes(assembly[family])
    assert len(kernels) == COUNTS[family]
    for kernel in kernels:
        name = kernel[".name"]
        assert kernel[".vgpr_count"] <= 64, name
        assert kernel[".vgpr_spill_count"] == kernel[".sgpr_spill_count"] == 0, name
        assert kernel[".private_segment_fixed_size"] == 0, f"{name} uses scratch memory"
        assert kernel[".wavefront_size"] == 64 and kernel[".max_flat_workgroup_size"] == 256, name
        assert kernel[".kernarg_segment_size"] <= 4096, name
        if name == "exact_count":  # counts every change of every class in shared memory
            assert kernel[".group_segment_fixed_size"] * 2 <= 64 << 10
            continue
        # Shared memory of 8 waves a SIMD, four SIMDs: 8 workgroups in 64 KiB.
        assert kernel[".group_segment_fixed_size"] * 8 <= 64 << 10, name
        waves = re.search(rf"^{name}:.*?; Occupancy: (\d+)", assembly[family], re.DOTALL | re.MULTILINE)
        assert waves and int(waves[1]) >= 8, name


def test_memory_is_accessed_16_bytes_at_a_time(assembly: dict[str, str]) -> None:
    """Whichever side of a kernel has 16 bytes in 16 elements; int4 codes have 8, in successive lanes."""
    for text in assembly.values():
        for name, body in re.findall(r"^(\w+):\s*; @\1\n(.*?)^\.Lfunc_end", text, re.DOTALL | re.MULTILINE):
            found = Counter(re.findall(r"^\s+((?:global|flat|scratch|buffer)_\w+)", body, re.MULTILINE))
            assert not [access for access in found if not access.startswith("global_")], (name, found)
            reads, writes = "global_load_dwordx4", "global_store_dwordx4"
            if name.startswith("exact"):  # weights one by one, in successive lanes
                assert name != "exact_decode" or found[reads] >= 4, (name, found)
                continue
            if re.fullmatch(r"decode_(none_16|(int\d|bf16)_(bf16|fp16))", name):  # two vectors a thread, aligned or not
                assert found[writes] >= 4, (name, found)
            if "none" in name or "bf16_" in name:
                assert found[reads] and found[writes], (name, found)
                continue
            if name.startswith("encode"):
                wide = [reads, writes] if "int8" in name else [reads]
            elif name.startswith("decode_sum_encode"):
                _, _, _, codec, out = name.split("_")
                wide = [reads] * (codec == "int8") + [writes] * (out == "int8")
            else:
                wide = [reads, writes] if "int8" in name else [writes]
            assert all(found[access] for access in wide), (name, found)
            assert found["global_load_dwordx4"] or found["global_load_dwordx2"], (name, found)
            assert found["global_store_dwordx4"] or found["global_store_dwordx2"], (name, found)
    # Exchanges within 16 lanes go by DPP; only those of 16 and more lanes, through the crossbar.
    dpp = re.findall(r"v_(?:max|min)_u32_dpp|v_mov_b32_dpp", assembly["encode"])
    assert len(dpp) >= 4 * 6  # the kernels of codecs with scales


def test_products_and_sums_are_not_contracted(assembly: dict[str, str]) -> None:
    """Neither family divides, so whatever fuses a product and a sum would round once where the format rounds twice."""
    for family in ("decode", "decode_sum"):
        fused = re.findall(r"v_(?:pk_)?(?:fma|mac|fmac|mad)\w*_f32", assembly[family])
        assert not fused, (family, fused)
        assert re.search(r"v_(?:pk_)?mul_f32", assembly[family])


@pytest.mark.parametrize(
    "fmt", [RecordFormat.of("int8", 128), RecordFormat.of("int4", 64, 64, True), RecordFormat.of("none")], ids=str
)
def test_the_code_gives_the_bits_of_the_reference(assembly: dict[str, str], fmt: RecordFormat) -> None:
    """Instruction by instruction, on shards that start at no multiple of 16 bytes, and on many of one block."""
    if "--gfx90a" not in assembly["decode"]:
        pytest.skip("benchmarks/counts/gfx90a.py has the instructions of gfx90a")
    backend, cpu = KernelBackend(Simulated(assembly.__getitem__)), torch.device("cpu")
    case = Case((275, 9), (3,), (1,), 3, fmt, torch.bfloat16)
    source, rows, seed = source_of(case), case.rows, 2**40 + 1
    message = REFERENCE.encode(source, rows, fmt, seed)
    calls: list[tuple[Any, ...]] = [
        ("encode", source, rows, fmt, seed),
        ("decode", message, rows, fmt, torch.bfloat16),
        ("decode_sum", message, rows, fmt, torch.bfloat16),
        ("decode_sum_encode", message, rows, fmt, torch.bfloat16, 1, fmt, seed),
    ]
    if fmt.traits.codes:
        residuals = [numbers("normal", one.numel(), torch.bfloat16, 7) for one in source]
        calls.append(("encode_feedback", source, residuals, [0.5, 1.0], rows, fmt, seed))
    for call in calls:
        assert not list(compared(backend, cpu, *call))


def test_the_code_decodes_codec_exact(assembly: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Instruction by instruction, lanes that end at different weights; some weights change their sign, with an escape."""
    if "--gfx90a" not in assembly["decode"]:
        pytest.skip("benchmarks/counts/gfx90a.py has the instructions of gfx90a")
    old = [numbers("normal", size, torch.bfloat16, size) for size in (700, 3, 0, 1030)]
    new = [(one + 0.02 * numbers("normal", len(one), seed=9)).bfloat16() for one in old]
    record = record_of(new, old)
    copies = [one.clone().view(1, -1) for one in old]
    backend = KernelBackend(Simulated(assembly.__getitem__))
    monkeypatch.setattr(backends, "choice", lambda kind: backends.Choice("simulated", backend, "of this test"))
    assert exact.decode(record, copies, [0]).all()
    assert all(torch.equal(copy[0], one) for copy, one in zip(copies, new))


@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_compile_for_nvidia(family: str, tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not installed")
    command = [nvcc, "-O3", "-std=c++17", "-arch=sm_90", "-Xptxas=-v", "-cubin", "-x", "cu"]
    done = subprocess.run(
        [*command, str(KERNELS / f"{family}.hip"), "-o", str(tmp_path / "out.cubin")],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", done.stderr)]
    assert len(registers) == COUNTS[family] and max(registers) <= 80, done.stderr
    assert not re.search(r"[1-9]\d* bytes (?:stack frame|spill)", done.stderr), done.stderr


#: In a process of its own, since the stand-ins of other tests have the compiler's name.
AT_RUN_TIME = """
import contextlib, sys, torch
from pathlib import Path
from hzero.codecs.launchers import Library, compiled
torch.version.hip, source, found = "of the system", Path(sys.argv[1]), None
for name in ("libhiprtc.so", "libamdhip64.so", "libamdhip64.so.5", "libhiprtc.so.6", "libhiprtc.so.7"):
    with contextlib.suppress(OSError, AttributeError):  # older ones have it in the runtime
        found = found or Library(name, "hiprtc")
if found is None:
    sys.exit("hiprtc is not installed")
code = compiled(found, source, ["--offload-arch=gfx90a", "-std=c++17"])
assert code[:4] == b"\\x7fELF" and len(code) > 10_000
compiled(found, source, ["--offload-arch=gfx90a", "-Dhz_bucket=7"])
"""


@pytest.mark.parametrize("family", [pytest.param(one, marks=[LONG] * (one != "exact")) for one in FAMILIES])
def test_kernels_compile_at_run_time_for_amd(family: str) -> None:
    """As the device backend compiles them, by a real hiprtc, which needs no device. Bare clang compiles all families above."""
    done = run_python("-c", AT_RUN_TIME, str(KERNELS / f"{family}.hip"))
    if "hiprtc is not installed" in done.stderr:
        pytest.skip("hiprtc is not installed")
    assert re.search(
        r"RuntimeError: (?s:.*hip does not compile with .*-Dhz_bucket=7: .*\(6\)\n.*error: )", done.stderr
    ), done
