"""Counts what records of small parameters cost: bytes into a node, workgroups of kernels and their threads.

    python -m benchmarks.counts.records

A norm or a bias has a record of its own on every rank, of 16 bytes if its elements and their scale fit there. The table compares
that to one record per rank that all norms and biases of a layer would share.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from hzero.codecs.backends import KernelBackend
from hzero.codecs.formats import RecordFormat, Rows, chunk_numel, layout_of

#: Ranks of a node.
NODE = 8
WORLDS = (384, 75_264)


def _gpt_neox(width: int) -> tuple[list[int], list[int]]:
    return [3 * width**2, width**2, 4 * width**2, 4 * width**2], [width] * 4 + [3 * width, width, 4 * width, width]


#: Matrices of a layer, and its norms and biases.
LAYERS = {
    "GPT-NeoX-20B": _gpt_neox(6144),
    "Llama-3-8B": ([4096**2] * 2 + [4096 * 1024] * 2 + [4096 * 14_336] * 3, [4096] * 2),
    "GPT-NeoX, width 256": _gpt_neox(256),
}
FORMATS = [RecordFormat.of(codec, 128) for codec in ("int8", "int4")]


def into_node(chunks: Sequence[int], fmt: RecordFormat, world: int) -> int:
    """Bytes that enter a node when it gathers a layer, or receives its part of the sums of all nodes."""
    return layout_of(tuple(chunks), fmt, 2).row_bytes * (world - NODE)


def launched(chunks: Sequence[int], fmt: RecordFormat, world: int) -> tuple[int, int]:
    """Workgroups of the kernel that decodes a layer, and how many of their threads have elements."""
    started: list[int] = []
    device = SimpleNamespace(on_device=True, kind="cpu", kernel=lambda *_: lambda *call: started.append(call[1]))
    rows: Any = Rows.of(chunks, (world,))
    decode = KernelBackend(device).decoder(rows, fmt, torch.bfloat16)  # type: ignore[arg-type]
    decode(torch.empty(16, dtype=torch.uint8), [torch.empty(1)] * len(chunks))
    return sum(started), world * int(np.sum([-(-chunk // 16) for chunk in chunks]))


def main() -> None:
    """Prints the tables."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(
        "| layer | ranks | codec | into a node, MB | with a shared record | less | threads with elements, all | small ones |"
    )
    print("|---" * 8 + "|")
    for (name, (large, small)), world in ((layer, world) for layer in LAYERS.items() for world in WORLDS):
        big, tiny = ([chunk_numel(numel, world) for numel in numels] for numels in (large, small))
        for fmt in FORMATS:
            own, shared = (into_node(chunks, fmt, world) for chunks in ([*big, *tiny], [*big, sum(tiny)]))
            groups, threads = launched([*big, *tiny], fmt, world)
            few, busy = launched(tiny, fmt, world)
            print(
                f"| {name} | {world:,} | {fmt.codec} | {own / 1e6:,.2f} | {shared / 1e6:,.2f} | {1 - shared / own:.1%} | "
                f"{threads / groups / 256:.0%} of {groups:,} workgroups | {busy / few / 256:.0%} of {few:,} |"
            )


if __name__ == "__main__":
    main()
