"""The measurement of a hop's cost on the host, on one rank whose collectives are empty."""

from __future__ import annotations

import json

from tests.ranks import LONG, run_python


@LONG
def test_hops_and_launches_of_a_step() -> None:
    done = run_python("benchmarks/host_cost.py", "--presets", "topo", "--layers", "1", "--steps", "1", "--json")
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])["topo"]
    assert found["hops"] > 0 and 0 < found["own"] < found["whole"] and found["launches"] > 0
