"""The measurement of a hop's cost on the host, on one rank whose collectives are empty."""

from __future__ import annotations

import json
from pathlib import Path

from tests.forks import run_forked
from tests.ranks import LONG


@LONG
def test_hops_and_launches_of_a_step(tmp_path: Path) -> None:
    words = ["benchmarks/host_cost.py", "--presets", "topo", "--layers", "1", "--steps", "1", "--json"]
    status, out, errors = run_forked(*words, folder=tmp_path)
    assert status == 0, errors[-2000:]
    found = json.loads(out.splitlines()[-1])["topo"]
    assert found["hops"] > 0 and 0 < found["own"] < found["whole"] and found["launches"] > 0
