"""Codecs zfp and mpc beside int8, int4 and exp on this machine's processors: bits, noise and speed. Prints a Markdown table.

ZFP and MPC are what arXiv 2409.02423 compresses collectives with. Each codec takes float32 numbers (exp: bfloat16) of two
kinds: normal ones, as weights and gradients nearly are, and a smooth curve, which ZFP and MPC were made for.

    python -m benchmarks.paper_codecs [--mib 16] [--threads 1] [--repeats 5]
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from hzero.codecs import Codec, backends, mpc
from hzero.config import CodecConfig

MIB, BLOCK = 1 << 20, 128
CODECS = [
    *(CodecConfig(codec=name, block_size=BLOCK) for name in ("int8", "int4", "exp", "mpc")),
    *(CodecConfig(codec="zfp", block_size=BLOCK, rate=rate) for rate in (4, 8, 12, 16, 24)),
]


def numbers(count: int) -> dict[str, torch.Tensor]:
    """Float32 numbers by kind."""
    normal = torch.randn(count, generator=torch.Generator().manual_seed(0))
    return {"normal": normal, "smooth": (torch.arange(count) * 0.01).sin() + 1e-4 * normal}


def seconds(call: Callable[[], Any], repeats: int) -> float:
    """Median of the repeats, after one more."""
    call()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def row(config: CodecConfig, kind: str, source: torch.Tensor, repeats: int) -> str:
    """One line of the table."""
    codec = Codec.from_config(config)
    source = source.bfloat16() if config.codec == "exp" else source
    chunks, dtype = [source.numel()], source.dtype
    message = codec.encode([source], chunks)
    (decoded,) = codec.decode(message, chunks, dtype=dtype)
    used = int(mpc.lengths(message, [message.numel()])) if config.codec == "mpc" else message.numel()
    lost = (decoded.double() - source.double()).square().sum()
    noise = "none" if not lost else f"{float(10 * (source.double().square().sum() / lost).log10()):.1f} dB"
    encode = seconds(lambda: codec.encode([source], chunks), repeats)
    decode = seconds(lambda: codec.decode(message, chunks, dtype=dtype), repeats)
    name = config.codec + (f", rate {config.rate}" if config.rate else "")
    rates = " | ".join(f"{source.nbytes / taken / 1e9:.2f}" for taken in (encode, decode))
    return f"| {kind} | {name} | {8 * used / source.numel():.2f} of {8 * dtype.itemsize} | {noise} | {rates} |"


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=16, help="MiB of float32 numbers (default 16)")
    parser.add_argument("--threads", type=int, default=1, help="(default 1)")
    parser.add_argument("--repeats", type=int, default=5, help="(default 5)")
    arguments = parser.parse_args()
    for name, value in vars(arguments).items():
        if value < 1:
            parser.error(f"--{name}: found {value}, expected at least 1")
    torch.set_num_threads(arguments.threads)
    print(
        f"{datetime.date.today().isoformat()}, backend `{backends.choice('cpu').name}`, {arguments.threads} threads, "
        f"{arguments.mib} MiB of float32, medians of {arguments.repeats}\n\n"
        "| numbers | codec | bits an element | signal to noise | encode, GB/s | decode, GB/s |\n|---|---|---|---|---|---|"
    )
    for kind, source in numbers(arguments.mib * MIB // 4).items():
        for config in CODECS:
            print(row(config, kind, source, arguments.repeats), flush=True)


if __name__ == "__main__":
    main()
