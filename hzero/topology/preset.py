"""Presets: nodes of known machines, as declared files that name the public source of every figure."""

from __future__ import annotations

import functools
from pathlib import Path

from hzero.topology.machine import Machine
from hzero.topology.readers import declared
from hzero.validation import one_of

PRESETS = ("frontier", "lumi", "el_capitan", "mi300x", "dgx_h200", "laptop")

_FOLDER = Path(__file__).resolve().parent / "presets"


@functools.cache
def preset(name: str) -> Machine:
    """One node of a known machine.

    Raises:
        ConfigError: Unknown preset; the message names the nearest.
    """
    if name not in PRESETS:
        raise one_of("topology", name, PRESETS, "preset")
    return declared.read(_FOLDER / f"{name}.yaml", source=f"preset {name}")
