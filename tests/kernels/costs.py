"""What the kernels cost on an MI250X, without one: instructions per element of the gfx90a code, and accesses by width.

    python -m tests.kernels.costs [--against CHECKOUT] [--rows 384]

Instructions are those that `tests.kernels.gfx90a` executes of hipcc's assembly, lanes times instructions by elements. The
issue bound is the time in which the 110 compute units of a chiplet start the vector instructions, one each in a cycle of
1.7 GHz, as a share of the time that its memory needs for the bytes, at 1.6 TB/s. Accesses to elements, of so many rows that do
not start at multiples of 16 bytes, are counted in the emulation of the source. All accesses, to codes and scales too, are those
of the assembly: of int4 a thread has 8 bytes of codes and of int2 4, and lanes follow each other in memory.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import hzero
from hzero.codecs import reference
from hzero.codecs.backends import KernelBackend
from hzero.codecs.codec import Decoder, Encoder, Recoder
from hzero.codecs.formats import BLOCK_CODECS, RecordFormat, Rows
from tests.kernels.gfx90a import Simulated

#: A shard of 4096 * 4096 elements on 384 ranks, and the next one of which all start at multiples of 16 bytes.
UNALIGNED, ALIGNED = 43_691, 43_696
PEERS = 4
MEMORY, ISSUE = 1.6e12, 110 * 1.7e9
WIDTHS = (16, 8, 4, 2)


def calls(backend: Any, chunk: int, rows: int) -> Iterator[tuple[str, Any]]:
    """Every call that is measured."""
    bf16 = torch.bfloat16
    order, pieces = Rows.of((chunk,), (rows,)), Rows.of((chunk,), (PEERS,), outer=PEERS)
    for codec in BLOCK_CODECS:
        fmt = RecordFormat.of(codec, 128)
        random = fmt._replace(stochastic=True)
        source = [torch.randn(rows * chunk).to(bf16)]
        # Of zeros no kernel would compute quotients.
        message = Encoder(fmt, pieces, bf16, "", reference)([torch.randn(PEERS * chunk).to(bf16)])
        again, one = Rows.of((chunk,), (1,)), Encoder(fmt, order, bf16, "", backend)
        yield f"encode {codec}", lambda one=one, source=source: one(source)
        one = Encoder(random, order, bf16, "", backend)
        yield f"encode {codec}, stochastic", lambda one=one, source=source: one(source)
        payload = torch.zeros(one.bytes, dtype=torch.uint8)
        decode = Decoder(fmt, order, bf16, False, backend)
        yield f"decode {codec}", lambda decode=decode, payload=payload: decode(payload)
        summed = Decoder(fmt, pieces, bf16, False, backend, True)
        yield f"decode_sum {codec}", lambda summed=summed, message=message: summed(message)
        recode = Recoder(fmt, pieces, bf16, fmt, again, backend)
        yield f"decode_sum_encode {codec}", lambda recode=recode, message=message: recode(message)


def moved(name: str) -> float:
    """Bytes per element that a kernel reads and writes, each once."""
    operation, codec = name.split(",")[0].split()
    coded = RecordFormat.of(codec, 128).element_bytes(2)
    return {"decode_sum": PEERS * coded + 4, "decode_sum_encode": (PEERS + 1) * coded}.get(operation, coded + 2)


def instructions(kernels: Path, rows: int) -> dict[str, dict[str, dict[str, float]]]:
    """Of each kernel and kind of shard: vector, scalar and memory instructions per element, and accesses by width."""

    def assembly(family: str) -> str:
        with tempfile.TemporaryDirectory() as folder:
            command = [shutil.which("hipcc") or "/opt/rocm/bin/hipcc", "--cuda-device-only", "-O3", "-std=c++17", "-S"]
            out, env = Path(folder) / "out.s", {**os.environ, "HIP_PLATFORM": "amd"}
            command += ["--offload-arch=gfx90a", str(kernels / f"{family}.hip"), "-o", str(out)]
            subprocess.run(command, env=env, check=True, capture_output=True)
            return out.read_text()

    simulated = Simulated(assembly)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for chunk, count in ((ALIGNED, 1), (UNALIGNED, rows)):
        for name, call in calls(KernelBackend(simulated), chunk, count):
            simulated.counts.clear()
            simulated.accesses.clear()
            call()
            kinds = Counter[str]()
            for instruction, times in simulated.counts.items():
                kinds["memory" if instruction.startswith(("global", "ds")) else instruction[0]] += times
            for (_, size), lanes in simulated.accesses.items():
                kinds[f"{size} bytes"] += lanes / 64
            elements = chunk * (1 if "sum" in name else count)
            found.setdefault(name, {})[str(chunk)] = {kind: times * 64 / elements for kind, times in kinds.items()}
    return found


def before(checkout: Path, rows: int) -> Any:
    """The same of another checkout, by its own package."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "hzero").symlink_to(checkout / "hzero")
        path = os.pathsep.join([folder, str(Path(__file__).resolve().parents[2])])
        command = [
            sys.executable,
            "-P",
            "-m",
            "tests.kernels.costs",
            "--json",
            str(checkout / "hip_kernels"),
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout, whose instructions are counted too")
    parser.add_argument("--rows", type=int, default=384, help="of which accesses are counted (default 384)")
    parser.add_argument("--few", type=int, default=4, help="rows of which instructions are counted (default 4)")
    parser.add_argument("--json", type=Path, help="print the counts of these sources, unformatted")
    arguments = parser.parse_args()
    if arguments.json:
        print(json.dumps(instructions(arguments.json, arguments.few)))
        return
    own = instructions(Path(hzero.__file__).parents[1] / "hip_kernels", arguments.few)
    others = [own, *([before(arguments.against.resolve(), arguments.few)] if arguments.against else [])]
    print(
        "| kernel, bfloat16 | shards of | vector instr. per element | scalar | memory | bytes | issue bound / HBM bound |"
    )
    print("|---" * 7 + "|")
    for name, chunk in ((name, chunk) for name in own for chunk in (ALIGNED, UNALIGNED)):
        for found, when in reversed([*zip(others, ("", ", before"))]):
            kinds = found[name][str(chunk)]
            share = kinds["v"] / 64 / ISSUE / (moved(name) / MEMORY)
            counted = " | ".join(f"{kinds[kind]:.2f}" for kind in ("v", "s", "memory"))
            print(f"| {name}{when} | {chunk:,} | {counted} | {moved(name):.2f} | {share:.2f} |")
    print(
        f"\n| all accesses, shards of {UNALIGNED:,} | 16 bytes | 8 | 4 | 2 | bytes in accesses of 16 |\n{'|---' * 6}|"
    )
    for name, found in own.items():
        counts = {width: found[str(UNALIGNED)].get(f"{width} bytes", 0.0) for width in WIDTHS}
        made, moves = sum(counts.values()), sum(width * count for width, count in counts.items())
        shares = " | ".join(f"{count / made:.1%}" for count in counts.values())
        print(f"| {name} | {shares} | {16 * counts[16] / moves:.1%} |")
    print(
        f"\n| elements of {arguments.rows} rows of {UNALIGNED:,} | 16 bytes | 8 | 4 | 2 | 16 bytes wide |\n{'|---' * 6}|"
    )
    for name, made in accesses(arguments.rows):
        counts = " | ".join(f"{made[width]:,}" for width in WIDTHS)
        print(f"| {name} | {counts} | {made[16] / sum(made.values()):.1%} |", flush=True)


if __name__ == "__main__":
    main()
