"""The soak: its schedule, and two faults that strike a real run."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

from benchmarks.faults import ON_FILES, ON_PROCESSES, WHENS, schedule

ROOT = Path(__file__).parents[2]


def test_every_fault_strikes_at_every_moment() -> None:
    struck = Counter(schedule(200, random.Random(0), disk=True))
    assert set(struck) == {(kind, when) for kind in ON_PROCESSES for when in WHENS} | {
        (kind, "load") for kind in ON_FILES
    }
    assert sum(struck.values()) == 200 and max(struck.values()) - min(struck.values()) <= 1
    assert not any(kind == "disk full" for kind, _ in schedule(200, random.Random(0), disk=False))


def test_two_faults_lose_nothing(tmp_path: Path) -> None:
    out = tmp_path / "soak"
    command = [sys.executable, "-m", "benchmarks.soak", "--faults", "2", "--seed", "0", "-o", str(out)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    rows = [json.loads(line) for line in (out / "outcomes.jsonl").read_text().splitlines()]
    assert [row["number"] for row in rows] == [1, 2]
    assert "2 faults in 1 runs of 60 steps" in (out / "report.md").read_text()
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert again.returncode == 2 and "exists; choose another folder" in again.stderr
