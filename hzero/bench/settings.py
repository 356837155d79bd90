"""Arguments of ``hzero bench links``, checked."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from hzero.arguments import Parser
from hzero.config import NAMED, NOT_SUMMED, TRANSPORTS, CodecName, TopologyConfig, TransportName
from hzero.validation import ConfigError, validated

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
#: A part of a message is a multiple of this many bytes, as the records of payloads are.
ALIGNMENT = 16
MAX_COUNT = 10**9
_EPILOG = """columns, as in rccl-tests (its doc/PERFORMANCE.md):
  size    bytes of the whole array over one group: the result of an all-gather, the input of a reduction
  count   elements of one rank's part of it
  op      all_gather, all_to_all, reduce_scatter: the bare collective. doubling, pairs: the all-gather by another
          algorithm than the library's, between nodes. weights/CODEC, gradients/CODEC: a hop as in training, which
          encodes, gathers or reduces, and decodes. Its size is that before encoding, so its rates are effective
          rates: a codec pays off on a tier for sizes at which its line is above that of codec none
  time    median over the iterations, each timed on its slowest rank; min, max: of the iterations
  algbw   size / time;  busbw = algbw x (n - 1) / n for groups of n ranks: what each device receives per second
All groups of a tier run at once, as in training, so links that ranks share are shared here too. A tier's bandwidth is
the busbw of its largest all-gather. Its latency is the time of its smallest one, which contains bandwidth if --min-bytes
is large.

examples:
  hzero bench links --topology 2x2x2      8 ranks on this machine as 2 nodes x 2 GPUs x 2 GCDs
  hzero bench links --topology 1x2x2 --max-bytes 1M --iterations 5
  mpiexec -n 8 hzero bench links --topology 2x2x2 --transport mpi
  srun -N2 -n16 -c7 --gpus-per-task=1 --gpu-bind=closest hzero bench links --max-bytes 1G --out frontier.json
  hzero plan model=gpt_neox_20b topology=frontier nodes=48 --links frontier.json"""


def _size(text: str) -> int:
    found = re.fullmatch(r"(\d{1,15})([KMG]?)(?:i?B)?", text, re.IGNORECASE | re.ASCII)
    if found is None or not int(found[1]):
        raise ValueError(f"found {text!r}, expected a number of bytes, such as 512, 4K, 16M or 1G (powers of 1024)")
    return int(found[1]) * _UNITS[found[2].upper()]


Size = Annotated[int, BeforeValidator(_size)]


class LinksSettings(BaseModel):
    """What to measure and how. The options of the command are the fields' aliases, so that messages name them.

    Attributes:
        topology: A declared machine, ``auto``, or a file or name that `hzero.topology.resolve_grid` knows.
        min_bytes: Smallest size.
        max_bytes: Largest size.
        factor: Ratio of one size to the one before.
        codecs: Codecs of the hops.
        dtype: Type of the elements; ``auto`` is bf16 on accelerators and fp32 on processors, as in `hzero train`.
        device: ``auto`` or ``cpu``.
        transport: What carries the messages; ``mpi`` between ranks of mpiexec or srun.
        iterations: Timed iterations of each measurement.
        warmup: Untimed iterations before them.
        timeout: How long one collective may take, in seconds.
        out: The links file to write. The plot is written next to it.
        overwrite: Whether existing files may be replaced.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=lambda name: f"--{name.replace('_', '-')}")

    topology: str | TopologyConfig
    min_bytes: Size
    max_bytes: Size
    factor: int = Field(ge=2, le=MAX_COUNT)
    codecs: tuple[CodecName, ...]
    dtype: Literal["auto", "fp32", "bf16"]
    device: Literal["auto", "cpu"]
    transport: TransportName
    iterations: int = Field(ge=1, le=MAX_COUNT)
    warmup: int = Field(ge=0, le=MAX_COUNT)
    timeout: float = Field(gt=0, le=1e6)
    out: Path
    overwrite: bool

    @field_validator("max_bytes")
    @classmethod
    def _not_below_min(cls, value: int, info: ValidationInfo) -> int:
        if value < info.data.get("min_bytes", value):
            raise ValueError(f"found {value:,}, which is less than --min-bytes {info.data['min_bytes']:,}")
        return value

    @field_validator("codecs", mode="before")
    @classmethod
    def _split(cls, value: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(value.split(",")))
        for name, why in {**NOT_SUMMED, "zfp": "which needs a rate beside its name"}.items():
            if name in names:
                raise ValueError(f"found {name!r}, {why}; possible: {', '.join(NAMED)}")
        return names

    @field_validator("out")
    @classmethod
    def _json(cls, value: Path) -> Path:
        if value.suffix != ".json":
            raise ValueError(f"found {str(value)!r}, expected a name that ends in .json")
        return value

    @property
    def plot(self) -> Path:
        """Where the plot goes."""
        return self.out.with_suffix(".png")

    def sizes(self) -> list[int]:
        """Sizes in ascending order."""
        sizes = [self.min_bytes]
        while sizes[-1] * self.factor <= self.max_bytes:
            sizes.append(sizes[-1] * self.factor)
        return sizes

    def parts(self, ranks: int, itemsize: int) -> list[int]:
        """Elements of one rank's part for each size, rounded down so that parts are equal and aligned.

        A part has at least `ALIGNMENT` bytes, so the smallest sizes are rounded up.

        Args:
            ranks: Ranks of a group.
            itemsize: Bytes of an element.
        """
        aligned = {max(size // ranks // ALIGNMENT, 1) * ALIGNMENT // itemsize for size in self.sizes()}
        return sorted(aligned)


def parser() -> argparse.ArgumentParser:
    """Reads the command's arguments."""
    made = Parser(
        prog="hzero bench links",
        description="Measures bandwidth and latency of every tier, and the time of each hop of the stage with and without "
        "codecs. Under srun, torchrun or mpiexec every process is a rank; otherwise the command starts the ranks itself.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add(
        "--topology",
        default="auto",
        metavar="NxPxG|FILE|auto",
        help="nodes x GPUs per node x GCDs per GPU, a file with the keys of a declared topology, or auto (default): "
        "discover it. It also gives the number of ranks to start",
    )
    add("--min-bytes", default="4K", metavar="SIZE", help="smallest size, such as 512, 4K, 16M or 1G (default 4K)")
    add("--max-bytes", default="16M", metavar="SIZE", help="largest size (default 16M)")
    add("--factor", default="4", metavar="N", help="ratio of one size to the one before (default 4)")
    add("--codecs", default="none,int8,int4", help=f"codecs of the hops, of {', '.join(NAMED)} (default %(default)s)")
    add("--dtype", default="auto", help="type of the elements: auto (bf16 on GPUs, fp32 on processors), fp32, bf16")
    add("--device", default="auto", help="auto (GPUs if torch has them) or cpu")
    add(
        "--transport",
        default="torch",
        help=f"what carries the messages, of {', '.join(TRANSPORTS)}; mpi under mpiexec or srun (default %(default)s)",
    )
    add("--iterations", default="20", metavar="N", help="timed iterations per measurement (default 20)")
    add("--warmup", default="5", metavar="N", help="untimed iterations before them (default 5)")
    add("--timeout", default="120", metavar="SECONDS", help="how long one collective may take (default 120)")
    add(
        "--out",
        default="links.json",
        metavar="FILE",
        help="JSON file to write, with a plot next to it (default links.json)",
    )
    add("--overwrite", action="store_true", help="replace FILE and its plot if they exist")
    return made


def parse(arguments: Sequence[str]) -> LinksSettings:
    """Reads the arguments.

    Raises:
        ConfigError: One of them cannot be used.
    """
    given = vars(parser().parse_args(list(arguments)))
    given["topology"] = _topology(given["topology"])
    return validated(LinksSettings, {f"--{name.replace('_', '-')}": value for name, value in given.items()}, "")


def check_output(settings: LinksSettings) -> None:
    """Refuses files that could not be written.

    Raises:
        ConfigError: The folder is missing, or a file exists and may not be replaced.
    """
    if not settings.out.parent.is_dir():
        raise ConfigError(f"--out: no folder {str(settings.out.parent)!r}")
    for path in (settings.out, settings.plot):
        if path.is_dir():
            raise ConfigError(f"--out: {str(path)!r} is a folder")
        if path.exists() and not settings.overwrite:
            raise ConfigError(f"--out: {str(path)!r} exists; --overwrite replaces it, --out FILE writes elsewhere")


def _topology(text: str) -> str | TopologyConfig:
    factors = re.fullmatch(r"(\d{1,9})x(\d{1,9})x(\d{1,9})", text)
    if factors is None:
        if re.fullmatch(r"[\dx]+", text):
            raise ConfigError(f"--topology: found {text!r}, expected nodes x GPUs x GCDs, as in 2x2x2")
        return text
    keys = ("nodes", "gpus_per_node", "gcds_per_gpu")
    return validated(TopologyConfig, dict(zip(keys, map(int, factors.groups()))), "--topology")
