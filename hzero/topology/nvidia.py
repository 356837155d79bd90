"""nvidia-smi: the matrix of ``nvidia-smi topo -m``.

NVIDIA's machines have no KFD, and a dump of NCCL needs a job that runs: of a live NVIDIA node this is the one source.

Source of the format: the legend that nvidia-smi prints below the matrix. NV# means # NVLinks between two GPUs, also
where they run through switches; the other cells classify the PCIe path, from PIX (one bridge) to SYS (sockets).
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Sequence

from hzero.topology.machine import MAX_DEVICES, Device, Link, Machine, Nic, bus_id, merge_links
from hzero.validation import ConfigError

_MATRIX = ("nvidia-smi", "topo", "-m")
_DEVICES = ("nvidia-smi", "--query-gpu=index,pci.bus_id,name,uuid", "--format=csv,noheader")
_TIMEOUT_S = 30.0

#: GB/s each way of one NVLink by product: half of the two-way figures of NVIDIA's data sheets of V100 (300 GB/s by 6
#: links), A100 (600 by 12), H100 and H200 (900 by 18) and B200 (1800 by 18).
_NVLINK_GB_S = {"V100": 25.0, "A100": 25.0, "H100": 25.0, "H200": 25.0, "B200": 50.0}

_ESCAPE = re.compile(r"\x1b\[[0-9;]{0,16}m")
_GPU = re.compile(r"GPU[0-9]{1,4}")
_CELL = re.compile(r"X|N/A|PIX|PXB|PHB|NODE|SYS|SOC|NV[1-9][0-9]?")
_ALIAS = re.compile(r"\s*(NIC[0-9]{1,4}):\s*(\S{1,80})\s*")
_DEVICE = re.compile(
    r"\s*([0-9]{1,4}), ?([0-9A-Fa-f]{4,8}:[0-9A-Fa-f:.]{7}), ?([^,]{1,80}), ?(GPU-[0-9a-fA-F-]{1,60})\s*"
)


def query_nvidia() -> Machine:
    """The node from the tool itself. Raises `ConfigError` if it fails, or does not answer in time."""
    return read_matrix(f"{_run(_MATRIX)}\n{_run(_DEVICES)}", "nvidia-smi")


def is_matrix(text: str) -> bool:
    """Whether a text looks like the output of the tool."""
    return re.search(r"^\s*GPU[0-9]+\s", _ESCAPE.sub("", text), re.MULTILINE) is not None


def read_matrix(text: str, name: str) -> Machine:
    """The node that a saved matrix describes.

    Args:
        text: Output of ``nvidia-smi topo -m``, and where bus ids are wanted, after it that of ``nvidia-smi
            --query-gpu=index,pci.bus_id,name,uuid --format=csv``.
        name: Its file, for messages.

    Raises:
        ConfigError: It is no such output, or contradicts itself.
    """
    columns: list[str] = []
    rows: dict[str, list[str]] = {}
    aliases: dict[str, str] = {}
    known: dict[int, tuple[str, str, str]] = {}  # bus id, product, UUID
    for line in _ESCAPE.sub("", text).split("\n"):
        words = line.split()
        if not columns and words and _GPU.fullmatch(words[0]):
            columns = words[: words.index("CPU")] if "CPU" in words else words
            if len(set(columns)) < len(columns) or len(columns) > 2 * MAX_DEVICES:
                most = 2 * MAX_DEVICES
                raise ConfigError(f"{name}: found {len(columns)} columns, expected at most {most}, each once")
        elif words and words[0] in columns and words[0] not in rows:
            rows[words[0]] = words[1:]
        elif found := _ALIAS.fullmatch(line[:200]):
            aliases[found[1]] = found[2]
        elif found := _DEVICE.fullmatch(line[:400]):
            known[int(found[1])] = (bus_id(found[2], name), found[3].strip(), found[4])
    gpus = [column for column in columns if _GPU.fullmatch(column)]
    devices, links = [], []
    for gpu in gpus:
        cells = rows.get(gpu, [])[: len(columns)]
        if len(cells) < len(columns) or not all(map(_CELL.fullmatch, cells)):
            raise ConfigError(f"{name}: row of {gpu}: expected {len(columns)} cells, each X, NV# or a path such as PIX")
        number = int(gpu[3:])
        bus, kind, uuid = known.get(number, ("", "", ""))
        rate = next((rate for product, rate in _NVLINK_GB_S.items() if product in kind), None)
        devices.append(Device(number, bus, kind, uuid=uuid))
        for column, cell in zip(columns, cells):
            if cell.startswith("NV") and column in gpus:
                links.append(Link(number, int(column[3:]), "nvlink", int(cell[2:]), rate and rate * int(cell[2:])))
    if not devices:
        raise ConfigError(f"{name}: has no row of a GPU; expected the output of nvidia-smi topo -m")
    nics = tuple(Nic(aliases.get(column, column)) for column in columns if column not in gpus)
    return Machine(name, tuple(devices), merge_links(name, links), nics)


def _run(command: Sequence[str]) -> str:
    name = " ".join(command)
    pipe, both = subprocess.PIPE, subprocess.STDOUT
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=both, start_new_session=True)
        output = process.communicate(timeout=_TIMEOUT_S)[0].decode(errors="replace")
    except OSError as error:
        raise ConfigError(f"{name}: cannot be run: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and no wait: a tool that is stuck in the driver never ends
        raise ConfigError(f"{name}: no answer within {_TIMEOUT_S:g} s") from None
    if process.returncode:
        reason = output.strip().rpartition("\n")[2][:200] or "no message"
        raise ConfigError(f"{name}: failed with exit status {process.returncode}: {reason}")
    return output
