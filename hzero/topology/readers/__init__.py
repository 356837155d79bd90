"""Readers: each turns one source into a `Machine`."""

from __future__ import annotations

import re
from pathlib import Path

from hzero.topology.machine import Machine, TopologyError

_READABLE = (
    "an XML dump of RCCL or NCCL (NCCL_TOPO_DUMP_FILE), the output of rocm-smi --showtopo --json or of nvidia-smi topo -m, "
    "a declared machine (YAML), or a folder with class/kfd (/sys or a copy of it)"
)

#: How far a file is searched for what tells its kind, characters.
_HEAD = 65536
_ROCM_SMI = re.compile(
    r'ROCm System Management Interface|between DRM devices [0-9]|^[ \t]*\{\s*"card[0-9]+"\s*:', re.MULTILINE
)
_NVIDIA = re.compile(r"^[ \t]*(?:\x1b\[[0-9;]{0,16}m[ \t]*)?GPU[0-9]+\b", re.MULTILINE)
_MAPPING = re.compile(r"""(?:---[^\n]*\n)?(?:[ \t]*(?:\#[^\n]*)?\n)*(?:\{|[A-Za-z_"'][\w"' .-]{0,80}:(?:\s|$))""")


def read_file(path: Path) -> Machine:
    """The machine that a file or folder describes; what kind of source it is follows from its content.

    Raises:
        TopologyError: It cannot be read, is of no known kind, or contradicts itself; the message names file and place.
    """
    from hzero.topology.readers import declared, kfd, nccl_dump, nvidia, rocm_smi
    from hzero.topology.readers.source import read_text

    try:
        if path.is_dir():
            if (path / "class/kfd").is_dir():
                return kfd.read(path)
            raise TopologyError(f"{path}: is a folder without class/kfd; readable are: {_READABLE}")
    except OSError as error:
        raise TopologyError(f"{path}: cannot be read: {(error.strerror or str(error)).lower()}") from None
    head = read_text(path)[:_HEAD].lstrip()
    if not head:
        raise TopologyError(f"{path}: is empty; readable are: {_READABLE}")
    if head.startswith("<"):
        return nccl_dump.read(path)
    if _ROCM_SMI.search(head):
        return rocm_smi.read(path)
    if _NVIDIA.search(head):
        return nvidia.read(path)
    if _MAPPING.match(head):
        return declared.read(path)
    raise TopologyError(f"{path}: is of no known kind; readable are: {_READABLE}")
