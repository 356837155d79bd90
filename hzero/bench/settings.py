"""Arguments of ``hzero bench links``, checked."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hzero.config import CODECS, ConfigError, TopologyConfig, one_of, parse_topology

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
#: Types of weights and gradients; auto is what `hzero train` takes: bf16 on accelerators, fp32 on processors.
DTYPES = ("auto", "fp32", "bf16")
DEVICES = ("auto", "cpu")
#: Bytes that a part of a message is a multiple of, as of the records of payloads.
ALIGNMENT = 16
_EXAMPLES = """columns, as in rccl-tests (its doc/PERFORMANCE.md):
  size    bytes of the whole array over one group: of what an all-gather ends with, of what a reduction starts from
  count   elements of one rank's part of it
  op      all_gather, all_to_all, reduce_scatter: the bare collective. weights/CODEC, gradients/CODEC: a hop as in
          training, which encodes, gathers or reduces, and decodes; its size is that before encoding, so its rates are
          effective ones: a codec pays on a tier from the size on where its line is above that of codec none
  time    median over the iterations; an iteration takes what its slowest rank takes. min, max: of the iterations
  algbw   size / time;  busbw = algbw x (n - 1) / n, n being the ranks of a group: what each device receives a second
All groups of a tier run at once, as in training. A tier's bandwidth is the busbw of its largest all-gather; its latency
is the time of its smallest, which is not free of bandwidth where --min-bytes is large.

examples:
  hzero bench links --topology 2x2x2                 8 ranks on this machine that stand for 2 nodes x 2 GPUs x 2 GCDs
  hzero bench links --topology 1x2x2 --max-bytes 1M --iterations 5
  srun -N2 -n16 -c7 --gpus-per-task=1 --gpu-bind=closest hzero bench links --max-bytes 1G --out frontier.json
  hzero plan model=gpt_neox_20b topology=frontier nodes=48 --links frontier.json"""


@dataclass(frozen=True)
class LinksSettings:
    """What to measure and how.

    Attributes:
        topology: A declared machine, ``auto``, or a file or name that `hzero.topology.resolve_grid` knows.
        min_bytes: Least size.
        max_bytes: Largest size.
        factor: From one size to the next.
        codecs: Codecs of the hops.
        dtype: One of `DTYPES`.
        device: One of `DEVICES`.
        iterations: Timed ones of each measurement.
        warmup: Untimed ones before them.
        timeout_s: Longest wait for one collective.
        out: The links file to write; the plot goes beside it.
        overwrite: Whether files that are there may be replaced.
    """

    topology: str | TopologyConfig
    min_bytes: int
    max_bytes: int
    factor: int
    codecs: tuple[str, ...]
    dtype: str
    device: str
    iterations: int
    warmup: int
    timeout_s: float
    out: Path
    overwrite: bool

    @property
    def plot(self) -> Path:
        """Where the plot goes."""
        return self.out.with_suffix(".png")

    def as_dict(self) -> dict[str, Any]:
        """What was measured and how, for JSON."""
        kept = ("min_bytes", "max_bytes", "factor", "dtype", "iterations", "warmup", "timeout_s")
        return {**{name: getattr(self, name) for name in kept}, "codecs": list(self.codecs)}

    def sizes(self) -> list[int]:
        """Sizes from least to largest."""
        sizes = [self.min_bytes]
        while sizes[-1] * self.factor <= self.max_bytes:
            sizes.append(sizes[-1] * self.factor)
        return sizes

    def parts(self, ranks: int, itemsize: int) -> list[int]:
        """Elements of one rank's part for each size, which is rounded down so that parts are equal and aligned.

        A part is of at least `ALIGNMENT` bytes, so that the least sizes are rounded up.

        Args:
            ranks: Ranks of a group.
            itemsize: Bytes of an element.
        """
        aligned = {max(size // ranks // ALIGNMENT, 1) * ALIGNMENT // itemsize for size in self.sizes()}
        return sorted(aligned)


def parse(arguments: Sequence[str]) -> LinksSettings:
    """Reads the arguments.

    Raises:
        ConfigError: One of them cannot be used.
    """
    parser = argparse.ArgumentParser(
        prog="hzero bench links",
        description="Measures bandwidth and latency of every tier, and what each hop of the stage takes with and without "
        "codec. Under srun, torchrun or mpiexec every process is a rank; otherwise it starts the ranks on this machine.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--topology",
        default="auto",
        metavar="NxPxG|FILE|auto",
        help="nodes x GPUs a node x GCDs a GPU, a file with the keys of a declared topology, or auto (default): as "
        "discovered; it also says how many ranks to start",
    )
    add(
        "--min-bytes",
        default="4K",
        metavar="SIZE",
        help="least size, as 512, 4K, 16M or 1G (default 4K); a rank's part is of at least 16 bytes",
    )
    add("--max-bytes", default="16M", metavar="SIZE", help="largest size (default 16M)")
    add("--factor", default="4", metavar="N", help="from one size to the next (default 4)")
    add("--codecs", default="none,int8,int4", help=f"codecs of the hops, of {', '.join(CODECS)} (default %(default)s)")
    add("--dtype", default="auto", help="type of the elements: auto (bf16 on GPUs, fp32 on processors), fp32, bf16")
    add("--device", default="auto", help="auto (GPUs where torch has them) or cpu")
    add("--iterations", default="20", metavar="N", help="timed iterations of a measurement (default 20)")
    add("--warmup", default="5", metavar="N", help="untimed iterations before them (default 5)")
    add("--timeout", default="120", metavar="SECONDS", help="longest wait for one collective (default 120)")
    add("--out", default="links.json", metavar="FILE", help="JSON to write, with a plot beside it (default links.json)")
    add("--overwrite", action="store_true", help="replace FILE and its plot where they are there")
    given = parser.parse_args(list(arguments))
    settings = LinksSettings(
        topology=_topology(given.topology),
        min_bytes=_size("--min-bytes", given.min_bytes),
        max_bytes=_size("--max-bytes", given.max_bytes),
        factor=_whole("--factor", given.factor, 2),
        codecs=_codecs(given.codecs),
        dtype=_among("--dtype", given.dtype, DTYPES),
        device=_among("--device", given.device, DEVICES),
        iterations=_whole("--iterations", given.iterations, 1),
        warmup=_whole("--warmup", given.warmup, 0),
        timeout_s=_seconds("--timeout", given.timeout),
        out=Path(given.out),
        overwrite=given.overwrite,
    )
    if settings.max_bytes < settings.min_bytes:
        raise ConfigError(f"--max-bytes: found {given.max_bytes}, which is less than --min-bytes {given.min_bytes}")
    if settings.out.suffix != ".json":
        raise ConfigError(f"--out: found {given.out!r}, expected a name that ends in .json")
    return settings


def check_output(settings: LinksSettings) -> None:
    """Refuses files that could not be written, before anything is measured.

    Raises:
        ConfigError: The folder is missing, or a file is there and may not be replaced.
    """
    if not settings.out.parent.is_dir():
        raise ConfigError(f"--out: no folder {str(settings.out.parent)!r}")
    for path in (settings.out, settings.plot):
        if path.is_dir():
            raise ConfigError(f"--out: {str(path)!r} is a folder")
        if path.exists() and not settings.overwrite:
            raise ConfigError(f"--out: {str(path)!r} is there; --overwrite replaces it, --out FILE writes elsewhere")


def _topology(text: str) -> str | TopologyConfig:
    factors = re.fullmatch(r"(\d{1,9})x(\d{1,9})x(\d{1,9})", text)
    if factors is None:
        if re.fullmatch(r"[\dx]+", text):
            raise ConfigError(f"--topology: found {text!r}, expected nodes x GPUs x GCDs, as in 2x2x2")
        return text
    keys = ("nodes", "gpus_per_node", "gcds_per_gpu")
    return parse_topology("--topology", dict(zip(keys, map(int, factors.groups()))))


def _size(option: str, text: str) -> int:
    found = re.fullmatch(r"(\d{1,15})([KMG]?)(?:i?B)?", text, re.IGNORECASE | re.ASCII)
    if found is None or not int(found[1]):
        raise ConfigError(
            f"{option}: found {text!r}, expected a number of bytes, as in 512, 4K, 16M or 1G (powers of 1024)"
        )
    return int(found[1]) * _UNITS[found[2].upper()]


def _whole(option: str, text: str, least: int) -> int:
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII) or int(text) < least:
        raise ConfigError(f"{option}: found {text!r}, expected a whole number of at least {least}")
    return int(text)


def _seconds(option: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1e6:
        raise ConfigError(f"{option}: found {text!r}, expected seconds above 0, at most a million")
    return value


def _among(option: str, value: str, possible: Sequence[str]) -> str:
    if value not in possible:
        raise one_of(option, value, possible)
    return value


def _codecs(text: str) -> tuple[str, ...]:
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in CODECS:
            raise one_of("--codecs", name, CODECS, "codec")
    return tuple(names)
