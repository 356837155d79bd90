"""What the kernels cost on an MI250X, without one: instructions per element of the gfx90a code, and accesses by width.

    python -m benchmarks.counts.costs [--against CHECKOUT] [--rows 384]

It prints three tables:

1. Instructions that `gfx90a.py` executes of hipcc's assembly, lanes times instructions by elements. The issue bound is
   the time in which the 110 compute units of a chiplet start the vector instructions, one each in a cycle of 1.7 GHz, as a share
   of the time that its memory needs for the bytes, at 1.6 TB/s.
2. All memory accesses of that assembly by width, to codes, scales and arguments too. A thread has 8 bytes of codes in
   int4, so these cannot be 16 bytes wide; successive lanes access successive addresses.
3. Accesses to elements alone, by width, of rows that start anywhere, as the emulation of the source counts them. At least 90 % of
   these are to be 16 bytes wide.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch

import hzero
from benchmarks.counts.gfx90a import Simulated
from hzero.codecs import reference
from hzero.codecs.backends import KernelBackend
from hzero.codecs.codec import Decoder, Encoder, Recoder
from hzero.codecs.formats import BLOCK_CODECS, RecordFormat, Rows
from hzero.tools.terminal import positive

#: A shard of 4096 * 4096 elements on 384 ranks, and the next one of which all start at multiples of 16 bytes.
UNALIGNED, ALIGNED = 43_691, 43_696
PEERS = 4
MEMORY, ISSUE = 1.6e12, 110 * 1.7e9
WIDTHS = (16, 8, 4, 2)
HIPCC = shutil.which("hipcc") or "/opt/rocm/bin/hipcc"


def calls(backend: Any, chunk: int, rows: int) -> Iterator[tuple[str, Any]]:
    """Every call that is measured."""
    bf16 = torch.bfloat16
    order, pieces = Rows.of((chunk,), (rows,)), Rows.of((chunk,), (PEERS,), outer=PEERS)
    for codec in BLOCK_CODECS:
        fmt = RecordFormat.of(codec, 128)
        random = fmt._replace(stochastic=True)
        source = [torch.randn(rows * chunk).to(bf16)]
        # Of zeros no kernel would compute quotients.
        message = Encoder(fmt, pieces, bf16, reference)([torch.randn(PEERS * chunk).to(bf16)])
        again, one = Rows.of((chunk,), (1,)), Encoder(fmt, order, bf16, backend)
        yield f"encode {codec}", lambda one=one, source=source: one(source)
        one = Encoder(random, order, bf16, backend)
        yield f"encode {codec}, stochastic", lambda one=one, source=source: one(source)
        payload = torch.zeros(one.bytes, dtype=torch.uint8)
        decode = Decoder(fmt, order, bf16, backend)
        yield f"decode {codec}", lambda decode=decode, payload=payload: decode(payload)
        summed = Decoder(fmt, pieces, bf16, backend, True)
        yield f"decode_sum {codec}", lambda summed=summed, message=message: summed(message)
        recode = Recoder(fmt, pieces, bf16, fmt, again, backend)
        yield f"decode_sum_encode {codec}", lambda recode=recode, message=message: recode(message)


def moved(name: str) -> float:
    """Bytes per element that a kernel reads and writes, each once."""
    operation, codec = name.split(",")[0].split()
    coded = RecordFormat.of(cast(Any, codec), 128).element_bytes(2)
    return {"decode_sum": PEERS * coded + 4, "decode_sum_encode": (PEERS + 1) * coded}.get(operation, coded + 2)


def instructions(kernels: Path, rows: int) -> dict[str, dict[str, dict[str, float]]]:
    """Of each kernel and kind of shard: vector, scalar and memory instructions per element, and accesses by width."""

    def assembly(family: str) -> str:
        with tempfile.TemporaryDirectory() as folder:
            command = [HIPCC, "--cuda-device-only", "-O3", "-std=c++17", "-S"]
            out, env = Path(folder) / "out.s", {**os.environ, "HIP_PLATFORM": "amd"}
            command += ["--offload-arch=gfx90a", str(kernels / f"{family}.hip"), "-o", str(out)]
            subprocess.run(command, env=env, check=True, capture_output=True)
            return out.read_text()

    simulated: Any = Simulated(assembly)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for chunk, count in ((ALIGNED, 1), (UNALIGNED, rows)):
        for name, call in calls(KernelBackend(simulated), chunk, count):
            simulated.counts.clear()
            simulated.accesses.clear()
            call()
            kinds: dict[str, float] = defaultdict(float)
            for instruction, times in simulated.counts.items():
                kinds["memory" if instruction.startswith(("global", "ds")) else instruction[0]] += times
            for (_, size), lanes in simulated.accesses.items():
                kinds[f"{size} bytes"] += lanes / 64
            elements = chunk * (1 if "sum" in name else count)
            found.setdefault(name, {})[str(chunk)] = {kind: times * 64 / elements for kind, times in kinds.items()}
    return found


def before(other: Path, rows: int) -> Any:
    """The same of another checkout, by its own package."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "hzero").symlink_to(other / "hzero")
        path = os.pathsep.join([folder, str(Path(__file__).resolve().parents[2])])
        command = [
            sys.executable,
            "-P",
            "-m",
            "benchmarks.counts.costs",
            "--json",
            str(other),
            "--few",
            str(rows),
        ]
        done = subprocess.run(
            command, cwd=folder, env={**os.environ, "PYTHONPATH": path}, check=True, stdout=subprocess.PIPE, text=True
        )
        return json.loads(done.stdout)


def accesses(rows: int) -> Iterator[tuple[str, dict[int, int]]]:
    """Accesses to elements by width, as the emulation counts them, of every kernel that has some."""
    from tests.kernels.emulated import EmulatedKernels

    emulated = EmulatedKernels(64)
    for name, call in calls(KernelBackend(emulated), UNALIGNED, rows):  # type: ignore[arg-type]
        first = emulated.accesses(name.split()[0])
        call()
        made = {width: count - first[width] for width, count in emulated.accesses(name.split()[0]).items()}
        if sum(made.values()):
            yield name, made


def checkout(text: str) -> Path:
    """The ``type`` of an argument that names a checkout."""
    if not (Path(text) / "hip_kernels" / "encode.hip").exists():
        raise argparse.ArgumentTypeError(f"found {text!r}; expected a checkout of hzero")
    return Path(text).resolve()


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=checkout, help="another checkout, whose instructions are counted too")
    count = positive(int, 4096)
    parser.add_argument("--rows", type=count, default=384, help="rows of the third table (default 384)")
    parser.add_argument("--few", type=count, default=4, help="rows of the first two tables (default 4)")
    parser.add_argument("--json", type=checkout, help="print the instructions of this checkout, unformatted")
    arguments = parser.parse_args()
    if not Path(HIPCC).exists():
        parser.error(f"found no hipcc on PATH, nor {HIPCC}, which compiles for gfx90a")
    if arguments.json:
        print(json.dumps(instructions(arguments.json / "hip_kernels", arguments.few)))
        return
    own = instructions(Path(hzero.__file__).parents[1] / "hip_kernels", arguments.few)
    others = [own, *([before(arguments.against, arguments.few)] if arguments.against else [])]
    print("## Instructions of the gfx90a assembly\n")
    print("| kernel, bfloat16 | shards of | vector per element | scalar | memory | bytes | issue bound / HBM bound |")
    print("|---" * 7 + "|")
    for name, chunk in ((name, chunk) for name in own for chunk in (ALIGNED, UNALIGNED)):
        for found, when in reversed([*zip(others, ("", ", before"))]):
            if name not in found:  # a codec that the other checkout lacks
                continue
            kinds = found[name][str(chunk)]
            share = kinds["v"] / 64 / ISSUE / (moved(name) / MEMORY)
            counted = " | ".join(f"{kinds[kind]:.2f}" for kind in ("v", "s", "memory"))
            print(f"| {name}{when} | {chunk:,} | {counted} | {moved(name):.2f} | {share:.2f} |")
    print("\n## All accesses of the gfx90a assembly by width: elements, codes, scales and arguments\n")
    print(f"| shards of {UNALIGNED:,} | 16 bytes | 8 | 4 | 2 | bytes in accesses of 16 |\n{'|---' * 6}|")
    for name, found in own.items():
        widths = {width: found[str(UNALIGNED)].get(f"{width} bytes", 0.0) for width in WIDTHS}
        total, moves = sum(widths.values()), sum(width * count for width, count in widths.items())
        shares = " | ".join(f"{count / total:.1%}" for count in widths.values())
        print(f"| {name} | {shares} | {16 * widths[16] / moves:.1%} |")
    print("\n## Accesses to elements by width, counted by the emulation; to be 16 bytes wide: at least 90 %\n")
    print(f"| {arguments.rows} rows of {UNALIGNED:,} | 16 bytes | 8 | 4 | 2 | 16 bytes wide |\n{'|---' * 6}|")
    for name, made in accesses(arguments.rows):
        counts = " | ".join(f"{made[width]:,}" for width in WIDTHS)
        print(f"| {name} | {counts} | {made[16] / sum(made.values()):.1%} |", flush=True)


if __name__ == "__main__":
    main()
