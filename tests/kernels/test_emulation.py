"""The emulation itself: what a GPU would not define ends with a message, and exchanges do what the hardware does."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import numpy as np
import pytest

from hzero.codecs.descriptor import BUCKET
from tests.kernels.emulated import build

_DIVERGENT = """
#include "shim.h"
HZ_KERNEL(barrier_of_some) { if (hz::thread() < 8) hz::barrier(); }
HZ_KERNEL(barrier_of_a_wave) { if (hz::thread() < HZ_WAVE) hz::barrier(); }
HZ_KERNEL(exchange_of_some) { if (hz::thread() != 70) hz::swap_halves(1, 1); }
HZ_KERNEL(exchange_and_barrier) { if (hz::thread() % 2) hz::barrier(); else hz::swap_halves(1, 1); }
HZ_KERNEL(exchanges) {
  // Sums over 2, 4, .. lanes: right if each exchange brings what the other half holds.
  hz_u32 sum = 1u << hz::thread() % 16;
  for (hz_u32 m = 1; m < HZ_WAVE; m *= 2) sum += hz::swap_halves(sum, m);
  hz::pointer<hz_u32>(bucket.payload)[hz::thread()] = sum;
}
HZ_KERNEL(shared_memory) {
  HZ_SHARED hz_u32 seen[HZ_THREADS];
  seen[hz::thread()] = hz::thread() * 3;
  hz::barrier();
  hz::pointer<hz_u32>(bucket.payload)[hz::thread()] = seen[HZ_THREADS - 1 - hz::thread()];
}
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    source = tmp_path_factory.mktemp("emulation") / "kernels.h"
    source.write_text(_DIVERGENT)
    return {wave: str(build(wave, str(source))) for wave in (64, 32)}


@pytest.mark.parametrize("wave", [64, 32])
@pytest.mark.parametrize(
    ("kernel", "says"),
    [
        ("barrier_of_some", "divergence in a wave: thread 0 waits at a barrier, thread 8 is done"),
        ("barrier_of_a_wave", "divergence in a workgroup: thread 0 waits at a barrier, thread {wave} is done"),
        ("exchange_of_some", "divergence in a wave: thread 64 exchanges with its wave, thread 70 is done"),
        ("exchange_and_barrier", "divergence in a wave: thread 0 exchanges with its wave, thread 1 waits at a barrier"),
    ],
)
def test_divergence_aborts_with_a_message(libraries: dict[int, str], wave: int, kernel: str, says: str) -> None:
    bucket = np.zeros((), BUCKET)
    bucket["workgroups"] = 1
    code = (
        "import ctypes, sys\n"
        "bucket = ctypes.create_string_buffer(bytes.fromhex(sys.argv[3]))\n"
        "getattr(ctypes.CDLL(sys.argv[1]), sys.argv[2])(bucket)\n"
    )
    command = [sys.executable, "-S", "-c", code, libraries[wave], kernel, bucket.tobytes().hex()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode < 0, "it went on"
    assert f"emulation: {kernel}, workgroup 0: {says.format(wave=wave)}" in done.stderr


@pytest.mark.parametrize("wave", [64, 32])
def test_exchanges_and_shared_memory(libraries: dict[int, str], wave: int) -> None:
    library = ctypes.CDLL(libraries[wave])
    out = np.zeros(256, np.uint32)
    bucket = np.zeros((), BUCKET)
    bucket["workgroups"], bucket["payload"] = 1, out.ctypes.data
    library.exchanges(ctypes.c_void_p(bucket.ctypes.data))
    assert (out == (2**16 - 1) * wave // 16).all()
    library.shared_memory(ctypes.c_void_p(bucket.ctypes.data))
    assert (out == 3 * np.arange(255, -1, -1)).all()
