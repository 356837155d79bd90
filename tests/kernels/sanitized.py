"""Kernels under AddressSanitizer and UndefinedBehaviorSanitizer: a program that runs calls which Python has prepared."""

from __future__ import annotations

import os
import platform
import struct
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from hzero.codecs.descriptor import BUCKET
from hzero.codecs.kernels import Prepared
from tests.kernels.emulated import FAMILIES, KERNELS, compiler

_FLAGS = [
    "-std=c++17",
    "-O0",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-Wno-psabi",
    "-Wno-unknown-pragmas",
    "-rdynamic",
]
_SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
#: Flags of the host library's instruction sets, as CMakeLists.txt has them.
_SETS = {
    "baseline": [],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": ["-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"],
}


def build(target: str, folder: Path) -> Path:
    """The program with the decoders of a target: an instruction set of the host library, or ``wave 64`` or ``wave 32``."""
    lines = [f'#include "{Path(__file__).with_name("sanitized.cpp")}"']
    if target.startswith("wave"):
        flags = ["-DHZ_EMULATE", f"-DHZ_WAVE={target.split()[1]}"]
        lines += [f'#include "{family}.hip"' for family in FAMILIES if family != "encode"]
    else:
        # The library with this set alone, under the name of the one that every processor has.
        flags = ["-DHZ_ISA=baseline"]
        if platform.machine() in ("x86_64", "AMD64"):
            flags += ["-march=x86-64", *_SETS[target]]
        lines += ['#include "host/codec.cpp"', "#undef __x86_64__", '#include "host/library.cpp"']
    program = folder / target.replace(" ", "")
    command = [compiler(), *_FLAGS, *_SANITIZE, *flags, f"-I{KERNELS}", "-x", "c++", "-", "-o", str(program)]
    done = subprocess.run(
        [*command, "-ldl", "-lpthread"],
        input="\n".join(lines) + "\n",
        cwd=KERNELS,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode and any(word in done.stderr for word in ("lasan", "lubsan", "libasan", "libubsan", "_Float16")):
        pytest.skip(f"{command[0]} lacks the sanitizers, or _Float16: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return program


def run(program: Path, calls: Sequence[Prepared]) -> list[list[torch.Tensor]]:
    """Runs calls, and returns the outputs of each. Fails with the sanitizer's report where it has one."""
    text, places = bytearray(), []
    for call in calls:
        tensors = {t.data_ptr(): t for t in [*call.inputs, *call.outputs] if t.numel()}
        held = list(tensors.values())
        (bucket,) = call.buckets
        text += struct.pack("I", len(call.kernel)) + call.kernel.encode() + bucket.tobytes()
        text += struct.pack("I", len(held))
        for tensor in held:
            content = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
            text += struct.pack("=IQ", tensor.data_ptr() % 16, len(content)) + content
        fields = list(_pointers(bucket, list(tensors)))
        text += struct.pack("I", len(fields)) + b"".join(struct.pack("II", *field) for field in fields)
        places.append(held)
    done = subprocess.run(
        [str(program)],
        input=bytes(text),
        capture_output=True,
        timeout=120,
        check=False,
        env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0"},
    )
    report = done.stderr.decode(errors="replace")
    assert done.returncode == 0, report[-4000:]
    results, at = [], 0
    for call, held in zip(calls, places):
        found = {}
        for tensor in held:
            size = tensor.numel() * tensor.element_size()
            found[tensor.data_ptr()] = torch.frombuffer(bytearray(done.stdout[at : at + size]), dtype=tensor.dtype)
            at += size
        results.append([found[t.data_ptr()] if t.numel() else t for t in call.outputs])
    assert at == len(done.stdout), "it has ended early"
    return results


def _pointers(bucket: np.ndarray, addresses: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Offsets of the bucket's pointers, and the buffer that each points to."""
    offsets = [(bucket[name], BUCKET.fields[name][1]) for name in ("payload", "out_payload")]
    kind, start = BUCKET["tensor"].base, BUCKET.fields["tensor"][1]
    for index in range(int(bucket["tensors"])):
        for name in ("data", "residual", "left"):
            offsets.append((bucket["tensor"][index][name], start + index * kind.itemsize + kind.fields[name][1]))
    yield from ((offset, addresses.index(int(pointer))) for pointer, offset in offsets if pointer)
