"""`hzero presets`: its rows are those of `hzero plan`, and what it refuses."""

from __future__ import annotations

import json

import pytest

from hzero.cli import main
from hzero.config import PRESETS

JOB = ["model=gpt_neox_20b", "topology=frontier", "nodes=48", "accumulation=8"]


def test_rows_are_those_of_plans(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets", *JOB, "zero.codecs.weights.node=int4", "--json"]) == 0
    rows = {row["preset"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == list(PRESETS)
    for name in ("replica", "topo"):
        assert main(["plan", *JOB, f"preset={name}", "zero.codecs.weights.node=int4", "--json"]) == 0
        plan = json.loads(capsys.readouterr().out)
        assert rows[name]["memory_bytes"] == plan["memory_bytes"]
        assert rows[name]["node_bytes"] == plan["node_bytes"][f"hzero {name}"]
        assert rows[name]["weights_codec"] == "int8/int4", "what is written counts, and not what the preset has"
    assert main(["presets", *JOB]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in PRESETS) and "8 micro-steps per step" in text
    assert main(["presets", "nodes=1", "gpus_per_node=1", "gcds_per_gpu=1"]) == 0  # no tier at all
    for more in ("tensor", "sequence"):  # with rows of activations
        assert main(["presets", *JOB, f"model.{more}_parallel=2"]) == 0
    assert main(["presets", "preset=topo"]) != 0
    assert "lists all of zero1, zero2" in capsys.readouterr().err
