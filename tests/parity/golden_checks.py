"""Losses of every preset under both front ends, compared with committed ones: a silent change of numerics fails.

``golden.json`` has them. If you change numerics on purpose, write them anew, and say why in the commit:

    HZERO_GOLDEN=write .venv/bin/python -m pytest tests/parity --long -k golden

Run by test_parity.py on 4 ranks, with instructions that all x86-64 processors have, so that all of them give the same sums.
"""

from __future__ import annotations

import functools
import json
import os
import platform
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hzero.config import PRESET_NAMES
from tests.parity import deepspeed, fsdp
from tests.parity.compare import Row, relative, train

GOLDEN = Path(__file__).with_name("golden.json")
STEPS = 20
#: Largest relative difference of a loss.
WITHIN = 1e-6


def _compare(front: Any, name: str) -> None:
    """Trains under each preset, and compares the loss of every step and of an evaluation."""
    golden: dict[str, Any] = json.loads(GOLDEN.read_text())
    writes = os.environ.get("HZERO_GOLDEN") == "write"
    if not writes and (torch.__version__, platform.machine()) != (golden["torch"], "x86_64"):
        pytest.skip(f"the losses are those of torch {golden['torch']} on x86-64: others may add in another order")
    for preset in PRESET_NAMES:
        row = Row(preset, accumulation=(1,) * STEPS, block={"guard": {}})
        found = train(front, row, measures=False).losses
        golden[name][preset] = found if writes else golden[name][preset]
        assert relative(found, golden[name][preset]) <= WITHIN, (name, preset, found, golden[name][preset])
    assert golden[name].keys() == set(PRESET_NAMES), f"{GOLDEN.name}: found other presets than hzero has"
    dist.barrier()
    if writes and dist.get_rank() == 0:
        GOLDEN.write_text(json.dumps({**golden, "torch": torch.__version__}, indent=1) + "\n")
    dist.barrier()


LONG_ROWS = {
    "golden_deepspeed": functools.partial(_compare, deepspeed.Session, "deepspeed"),
    "golden_fsdp": functools.partial(_compare, fsdp.Session, "fsdp"),
}
