"""Kernels under AddressSanitizer and UndefinedBehaviorSanitizer: their tests again, with memory of exactly a tensor's size."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from hzero.codecs import launchers
from tests.kernels.emulated import KERNELS, build, compiler
from tests.ranks import LONG, run, run_python

# -O0: to optimize instrumented code takes longer than to run it.
_SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O0", "-w")
#: Flags of the host library's instruction sets, as CMakeLists.txt has them.
_SETS = {
    "baseline": [],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": ["-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"],
}
#: Reads behind the end of a payload.
_SHORT = """
import sys, torch
from hzero.codecs.formats import RecordFormat, Rows
from tests.kernels.test_kernels import backend_of

payload = torch.zeros(8, dtype=torch.uint8)
how = Rows.of((64,), (1,)), RecordFormat.of("int8", 64), torch.float32, False
backend_of(sys.argv[1]).decoder(*how)(payload, [torch.empty(64)])
"""


def _library(name: str) -> str:
    """The library with this instruction set alone, under the name of the one that every processor has."""
    try:
        launchers.HostLibrary().instruction_set = name
    except (OSError, ValueError) as error:
        pytest.skip(str(error))
    flags = ["-march=x86-64", *_SETS[name]] if platform.machine() in ("x86_64", "AMD64") else []
    text = '#include "host/codec.cpp"\n#undef __x86_64__\n#include "host/library.cpp"\n'
    built_from = f'-DHZ_BUILD_ID="{launchers.hash_files(launchers.host_sources(KERNELS))}"'
    return str(build(text, "-DHZ_ISA=baseline", built_from, "-fno-math-errno", *flags, *_SANITIZE))


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[None]]]:
    """Of each selected target, all of which begin with the first test: one alone would keep one core busy to the end."""
    selected = [item for item in request.session.items if item.path == request.path]
    targets = [item.callspec.params["target"] for item in selected]  # type: ignore[attr-defined]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        yield {target: threads.submit(_sanitized, target) for target in targets}


@LONG
@pytest.mark.parametrize("target", ["wave 64", *_SETS])
def test_sanitizers_find_nothing(outcomes: dict[str, Future[None]], target: str) -> None:
    outcomes[target].result()


def _sanitized(target: str) -> None:
    runtimes = [run(compiler(), f"-print-file-name={name}") for name in ("libasan.so", "libstdc++.so")]
    env = {
        "LD_PRELOAD": " ".join(done.stdout.strip() for done in runtimes),
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
    }
    if target in _SETS:
        env |= {"HZERO_TESTS_LIBRARY": _library(target), "HZERO_TESTS": ""}
        inner, tests = "baseline", "baseline and not forked or host"
    else:
        env |= {"HZERO_TESTS_CXXFLAGS": " ".join(_SANITIZE)}
        inner, tests = target, "wave and not 32"

    files = ("tests/kernels/test_kernels.py", "tests/kernels/test_hostile_payloads.py")
    tests = f"({tests}) and not quotient"  # which differ in numbers alone
    command = ["-m", "pytest", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *files, "-k", tests]
    done = run_python(*command, timeout=500, **env)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:] + done.stderr[-4000:]
    short = run_python("-c", _SHORT, inner, **env)
    assert short.returncode and "AddressSanitizer: heap-buffer-overflow" in short.stderr, short.stderr[-4000:]
