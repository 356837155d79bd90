"""Sources of a node: this machine, a file of any kind, a preset."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from hzero.files import read_text
from hzero.topology.declared import MAX_BYTES, read_declared
from hzero.topology.dump import read_dump
from hzero.topology.kfd import read_sysfs
from hzero.topology.machine import Machine
from hzero.topology.nvidia import is_matrix, query_nvidia, read_matrix
from hzero.validation import ConfigError, one_of

#: Where the kernel's tree is, for containers that see the host's elsewhere.
SYSFS = "HZERO_SYSFS"

#: Words for this machine; the block calls it ``discover``.
HERE = ("auto", "discover")
#: Nodes of known machines, as declared files that name the public source of every figure.
PRESETS = ("frontier", "lumi", "el_capitan", "mi300x", "dgx_h200", "laptop")

_FOLDER = Path(__file__).resolve().parent / "presets"
#: Largest dump or matrix, bytes. A dump of a node of 16 devices has 18 kB.
_MAX_BYTES = 8 * 2**20


def machine_of(source: str, environ: Mapping[str, str] = os.environ, where: str = "topology") -> Machine:
    """The node that a text names: ``auto``, one of `PRESETS`, or else a file. ``where`` begins a message.

    Raises:
        ConfigError: Unknown preset, missing file, or unusable content.
    """
    if source in HERE:
        return this_machine(environ)
    if source in PRESETS:
        return preset(source)
    if "/" not in source and "." not in source and not os.path.exists(source):
        known = one_of(where, source[:80], ("auto", *PRESETS), "source")
        raise ConfigError(f"{known}, or a file (no such file)")
    return read_file(source)


def this_machine(environ: Mapping[str, str] = os.environ) -> Machine:
    """The node that this process runs on.

    AMD's GPUs are read from the kernel's KFD tree, which AMD's own tools read too. NVIDIA's are asked of nvidia-smi. A
    node without GPUs is a machine without devices.

    Args:
        environ: ``HZERO_SYSFS`` names another place of ``/sys``.

    Raises:
        ConfigError: GPUs are there, but what describes them cannot be read.
    """
    machine = read_sysfs(Path(environ.get(SYSFS) or "/sys"))
    if machine.devices or environ.get(SYSFS) or not shutil.which("nvidia-smi"):
        return machine
    return query_nvidia()


def read_file(path: str | os.PathLike[str]) -> Machine:
    """The machine that a file or folder describes; what kind of source it is follows from its content.

    Raises:
        ConfigError: It cannot be read, is of no known kind, or contradicts itself; the message names the file.
    """
    if os.path.isdir(path):
        return read_sysfs(Path(path))
    text = read_text(path, _MAX_BYTES)
    if text.lstrip().startswith("<"):
        return read_dump(text, str(path))
    if is_matrix(text):
        return read_matrix(text, str(path))
    return read_declared(read_text(path, MAX_BYTES), str(path))


@functools.cache
def preset(name: str) -> Machine:
    """One node of a known machine.

    Raises:
        ConfigError: Unknown preset; the message names the nearest.
    """
    if name not in PRESETS:
        raise one_of("topology", name, PRESETS, "preset")
    path = _FOLDER / f"{name}.yaml"
    return read_declared(read_text(path), str(path), f"preset {name}")
