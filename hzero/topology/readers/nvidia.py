"""nvidia-smi: the matrix of ``nvidia-smi topo -m``.

NVIDIA's machines have no KFD, and a dump of NCCL needs a job that runs: of a live NVIDIA node this is the one source.

Source of the format: the legend that nvidia-smi prints below the matrix. NV# stands for # NVLinks between two GPUs, also
where they run through switches; the other cells classify the PCIe path, from PIX (one bridge) to SYS (sockets).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hzero.topology.machine import MAX_DEVICES, Device, Link, Machine, Nic, bus_id, merge_links
from hzero.topology.readers.source import integer, read_text, run, shown
from hzero.validation import ConfigError

_MATRIX = ("nvidia-smi", "topo", "-m")
_DEVICES = ("nvidia-smi", "--query-gpu=index,pci.bus_id,name,uuid", "--format=csv,noheader")

#: PCIe paths, nearest first. SOC is what older versions call SYS.
_PATHS = ("PIX", "PXB", "PHB", "NODE", "SYS", "SOC")
#: GB/s each way of one NVLink by product: half of the two-way figures of NVIDIA's data sheets of V100 (300 GB/s by 6
#: links), A100 (600 by 12), H100 and H200 (900 by 18) and B200 (1800 by 18).
_NVLINK_GB_S = {"V100": 25.0, "A100": 25.0, "H100": 25.0, "H200": 25.0, "B200": 50.0}
_MAX_LINKS = 64

_ESCAPE = re.compile(r"\x1b\[[0-9;]{0,16}m")
_GPU = re.compile(r"GPU([0-9]{1,6})")
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,80}")
_ALIAS = re.compile(r"\s*(NIC[0-9]{1,6}):\s*(\S{1,80})\s*")
_LINKS = re.compile(r"NV([0-9]{1,6})")
_DEVICE = re.compile(
    r"\s*([0-9]{1,6}), ?([0-9A-Fa-f]{4,8}:[0-9A-Fa-f:.]{7}), ?([^,]{1,80}), ?(GPU-[0-9a-fA-F-]{1,60})\s*"
)
_PRODUCT = re.compile(r"\b(G?[VAHB][12]00)\b")


@dataclass
class _Matrix:
    """Rows of the matrix, its legend, and the devices listed after it."""

    columns: list[str] = field(default_factory=list)  # names of GPUs and NICs
    trailing: int = 0  # columns that follow them
    numa_column: int | None = None  # which of those is the NUMA affinity
    rows: dict[str, tuple[int, list[str], list[str]]] = field(default_factory=dict)  # line, cells, cells that follow
    aliases: dict[str, str] = field(default_factory=dict)  # NIC names by the short names of the legend
    devices: dict[int, tuple[str, str, str]] = field(default_factory=dict)  # bus id, product, UUID


def read(path: Path) -> Machine:
    """The node that a saved matrix describes.

    Args:
        path: Output of ``nvidia-smi topo -m``, and where bus ids are wanted, after it that of ``nvidia-smi
            --query-gpu=index,pci.bus_id,name,uuid --format=csv``.

    Raises:
        ConfigError: It is no such output, or contradicts itself; the message names file and line.
    """
    return _machine(read_text(path, 4 * 2**20), str(path))


def query() -> Machine:
    """The same from the tool itself. Raises `ConfigError` if it is not installed, fails, or does not answer in time."""
    return _machine(f"{run(_MATRIX)}\n{run(_DEVICES)}", "nvidia-smi")


def _machine(text: str, name: str) -> Machine:
    matrix = _parse(text, name)
    numbers = {column: int(found.group(1)) for column in matrix.columns if (found := _GPU.fullmatch(column))}
    missing = [column for column in numbers if column not in matrix.rows]
    if missing or not numbers:
        what = f"no row of {missing[0]}" if missing else "no matrix"
        raise ConfigError(f"{name}: has {what}; expected the output of nvidia-smi topo -m")
    nics = [column for column in matrix.columns if column not in numbers]
    devices = []
    for column, number in numbers.items():
        bus, kind, uuid = matrix.devices.get(number, ("", "", ""))
        nic = _nearest(matrix, column, nics)
        devices.append(Device(number, bus, kind, numa=_numa(matrix, column, name), nic=nic, uuid=uuid))
    kinds = {device.number: device.kind for device in devices}
    links = merge_links(name, _links(matrix, numbers, kinds, name), both_ends=True)
    return Machine(name, tuple(devices), links, tuple(Nic(matrix.aliases.get(nic, nic)) for nic in nics))


def _links(matrix: _Matrix, numbers: dict[str, int], kinds: dict[int, str], name: str) -> Iterator[Link]:
    for row, number in numbers.items():
        line, cells, _ = matrix.rows[row]
        for column, cell in zip(matrix.columns, cells):
            found = _LINKS.fullmatch(cell)
            if column not in numbers or not found:
                continue
            if column == row:
                raise ConfigError(f"{name}:{line}: {row} is linked to itself")
            count = integer(found.group(1), f"{name}:{line}", "number of links", 1, _MAX_LINKS)
            rates = {_rate(kinds[number]), _rate(kinds[numbers[column]])}
            rate = rates.pop() if len(rates) == 1 else None
            yield Link(number, numbers[column], "nvlink", count, rate * count if rate else None)


def _rate(kind: str) -> float | None:
    found = _PRODUCT.search(kind)
    return _NVLINK_GB_S.get(found.group(1).removeprefix("G")) if found else None


def _nearest(matrix: _Matrix, gpu: str, nics: list[str]) -> str:
    _, cells, _ = matrix.rows[gpu]
    paths = dict(zip(matrix.columns, cells))
    ranks = {nic: _PATHS.index(paths[nic]) for nic in nics if paths[nic] in _PATHS}
    near = [nic for nic, rank in ranks.items() if rank == min(ranks.values())]
    return matrix.aliases.get(near[0], near[0]) if len(near) == 1 else ""


def _numa(matrix: _Matrix, gpu: str, name: str) -> int | None:
    """NUMA domain of a row; None where it has none, several, or a column is empty, which leaves it unknown."""
    line, _, rest = matrix.rows[gpu]
    if matrix.numa_column is None or len(rest) != matrix.trailing or not rest[matrix.numa_column].isdecimal():
        return None
    return integer(rest[matrix.numa_column], f"{name}:{line}", "NUMA affinity", 0, 2**20)


def _parse(text: str, name: str) -> _Matrix:
    matrix = _Matrix()
    known: frozenset[str] = frozenset()
    for line, row in enumerate(_ESCAPE.sub("", text).split("\n"), start=1):
        where = f"{name}:{line}"
        words = row.split()
        if not matrix.columns:
            if words and _GPU.fullmatch(words[0]) and not (len(words) > 1 and _is_cell(words[1])):
                _header(matrix, row, words, where)
                known = frozenset(matrix.columns)
        elif words and words[0] in known:
            _row(matrix, words, line, where)
        elif found := _ALIAS.fullmatch(row[:200]):
            matrix.aliases[found.group(1)] = found.group(2)
        elif found := _DEVICE.fullmatch(row[:400]):
            number, bus, product, uuid = found.groups()
            matrix.devices[int(number)] = (bus_id(bus, where), product.strip(), uuid)
    return matrix


def _header(matrix: _Matrix, row: str, words: list[str], where: str) -> None:
    end = words.index("CPU") if "CPU" in words else len(words)
    matrix.columns = words[:end]
    if len(matrix.columns) > 2 * MAX_DEVICES:
        raise ConfigError(f"{where}: {len(matrix.columns)} columns, at most {2 * MAX_DEVICES} are read")
    for column in matrix.columns:
        if matrix.columns.count(column) > 1 or not _NAME.fullmatch(column):
            raise ConfigError(f"{where}: found the column {shown(column)}, expected names that differ")
    titles = re.findall(r"CPU Affinity|NUMA Affinity|GPU NUMA ID", row[:100_000])
    matrix.trailing = len(titles)
    matrix.numa_column = titles.index("NUMA Affinity") if "NUMA Affinity" in titles else None


def _row(matrix: _Matrix, words: list[str], line: int, where: str) -> None:
    label, count = words[0], len(matrix.columns)
    cells = words[1 : count + 1]
    wrong = next((cell for cell in cells if not _is_cell(cell)), None)
    if wrong is not None or len(cells) < count:
        what = f"found {shown(wrong)}" if wrong is not None else f"found {len(cells)} cells, expected {count}"
        raise ConfigError(f"{where}: row of {label}: {what}; cells are X, NV# or one of {', '.join(_PATHS)}")
    if label in matrix.rows:
        raise ConfigError(f"{where}: {label} is also in line {matrix.rows[label][0]}")
    matrix.rows[label] = (line, cells, words[count + 1 :])


def _is_cell(word: str) -> bool:
    return word in ("X", "N/A", *_PATHS) or _LINKS.fullmatch(word) is not None
