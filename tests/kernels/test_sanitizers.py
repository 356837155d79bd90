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
#: Runs tests, and then reads behind the end of a payload.
_TESTS = """
import sys, pytest

status = pytest.main(sys.argv[2:])
if status:
    sys.exit(status)
print("nothing found", flush=True)
import torch
from hzero.codecs.formats import RecordFormat, Rows
from tests.kernels.test_kernels import backend_of

payload = torch.zeros(8, dtype=torch.uint8)
how = Rows.of((64,), (1,)), RecordFormat.of("int8", 64), torch.float32, False
backend_of(sys.argv[1]).decoder(*how)(payload, [torch.empty(64)])
"""


def _library() -> str:
    """The host library with its instruction sets."""
    sets = _SETS if platform.machine() in ("x86_64", "AMD64") else {"baseline": []}
    march = ["-march=x86-64"] if len(sets) > 1 else []
    objects = [
        build('#include "host/codec.cpp"\n', "-c", f"-DHZ_ISA={name}", "-fno-math-errno", *march, *flags, *_SANITIZE)
        for name, flags in sets.items()
    ]
    built_from = f'-DHZ_BUILD_ID="{launchers.hash_files(launchers.host_sources(KERNELS))}"'
    flags = [built_from, "-pthread", *march, *_SANITIZE]
    return str(build('#include "host/library.cpp"\n', *map(str, objects), *flags))


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[None]]]:
    """Of each selected target, all of which begin with the first test: one alone would keep one core busy to the end."""
    selected = [item for item in request.session.items if item.path == request.path]
    targets = [item.callspec.params["target"] for item in selected]  # type: ignore[attr-defined]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        yield {target: threads.submit(_sanitized, target) for target in targets}


@LONG
@pytest.mark.parametrize("target", ["wave 64", "host"])
def test_sanitizers_find_nothing(outcomes: dict[str, Future[None]], target: str) -> None:
    outcomes[target].result()


def _sanitized(target: str) -> None:
    runtimes = [run(compiler(), f"-print-file-name={name}") for name in ("libasan.so", "libstdc++.so")]
    env = {
        "LD_PRELOAD": " ".join(done.stdout.strip() for done in runtimes),
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
    }
    if target == "host":
        env |= {"HZERO_TESTS_LIBRARY": _library()}
        tests = "(baseline or avx) and not forked or host"
    else:
        env |= {"HZERO_TESTS_CXXFLAGS": " ".join(_SANITIZE)}
        tests = "wave and not 32 and (nan or huge or not special)"  # numbers move no access of a device's kernels

    files = ("tests/kernels/test_kernels.py", "tests/kernels/test_hostile_payloads.py", "tests/codecs/test_exact.py")
    tests = f"({tests}) and not quotient and not every_pattern and not many_tensors"  # which differ in numbers alone
    options = ["-x", "-p", "no:cacheprovider", "-p", "no:xdist", *files, "-k", tests]
    done = run_python("-c", _TESTS, target, *options, timeout=500, **env)
    assert "nothing found" in done.stdout and " passed" in done.stdout, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.returncode and "AddressSanitizer: heap-buffer-overflow" in done.stderr, done.stderr[-4000:]
