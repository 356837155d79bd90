"""Readers: each turns one source into a `Machine`, and names the data that other sources lack."""

from __future__ import annotations

import re
from pathlib import Path

from hzero.topology.machine import Machine
from hzero.topology.readers import declared, kfd, nccl_dump, nvidia
from hzero.topology.readers.source import READABLE, read_text
from hzero.validation import ConfigError

_MATRIX = re.compile(r"^[ \t]*(?:\x1b\[[0-9;]{0,16}m[ \t]*)?GPU[0-9]+\b(?!\s*:)", re.MULTILINE)


def read_file(path: Path) -> Machine:
    """The machine that a file or folder describes; what kind of source it is follows from its content.

    Raises:
        ConfigError: It cannot be read, is of no known kind, or contradicts itself; the message names file and place.
    """
    try:
        if path.is_dir():
            if (path / "class/kfd").is_dir():
                return kfd.read(path)
            raise ConfigError(f"{path}: is a folder without class/kfd; readable are: {READABLE}")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {(error.strerror or str(error)).lower()}") from None
    head = read_text(path)[:65536].lstrip()
    if not head:
        raise ConfigError(f"{path}: is empty; readable are: {READABLE}")
    if head.startswith("<"):
        return nccl_dump.read(path)
    return nvidia.read(path) if _MATRIX.search(head) else declared.read(path)
