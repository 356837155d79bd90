"""QLoRA: the recipe of docs/recipes/qlora.md on a tiny model."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.faults.launch import run

pytestmark = pytest.mark.skipif(
    not all(map(find_spec, ("bitsandbytes", "peft", "trl"))),
    reason="bitsandbytes, peft or trl is not installed; the extra `clients` has them",
)


def test_losses_are_those_of_stock(tmp_path: Path) -> None:
    """In Trainer with codes in bytes, and in TRL with codes in bfloat16."""
    lines = run("qlora.py", str(tmp_path / "run"), folder=tmp_path, ranks=2).splitlines()
    found = {
        tuple(key): (losses, codecs)
        for *key, losses, codecs in map(json.loads, filter(lambda x: x.startswith('["'), lines))
    }
    assert len(found) == 6
    for (client, storage, preset), (losses, codecs) in found.items():
        stock, _ = found[client, storage, "stock"]
        print(client, storage, preset, losses)
        assert len(losses) == 4 and losses[-1] < losses[0] - 0.01
        rounding = 1e-6 if client == "Trainer" else 2e-4  # of sums in float32 and bfloat16
        assert losses == pytest.approx(stock, rel=0.01 if preset == "topo" else rounding)
        assert codecs == {"stock": [], "lossless": ["none"], "topo": ["int8", "none"]}[preset]
