"""What a save costs the steps around it: ``python -m benchmarks.saves [KEY=VALUE ...]``, keys of ``hzero train``.

Trains a model on two ranks, saves every twelfth step, and compares the time between the ends of steps: of the step behind a save,
of those during which its files are written, and of the others.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hzero.formatting import size_text
from hzero.train.folder import read_metrics

EVERY, STEPS = 12, 96
JOB = (
    "model=gpt_neox_10m",
    "model.seq_length=128",
    "topology.nodes=1",
    "topology.gcds_per_gpu=1",
    "train.micro_batch=4",
    f"train.steps={STEPS}",
    f"checkpoint.every={EVERY}",
    "sample.at_end=false",
)


def measure(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Median seconds from the end of a step to the end of the next, and what saves took.

    Args:
        rows: Of ``metrics.jsonl``.

    Returns:
        ``other_s``, of steps without a save around them; ``behind_s``, of the step that follows a save, whose time holds it;
        ``during_s``, of the later ones during which files were written; ``all_s``, what steps from one save to the next take
        beyond as many others; and of the rows of saves, if there are some, ``copy_s``, ``blocked_s`` (how long the loop stood
        still), ``write_s`` and ``bytes``.
    """
    steps = [row for row in rows if row["kind"] == "step"]
    saves = {row["step"]: row for row in rows if row["kind"] == "save"}
    gaps: dict[str, list[float]] = {"other_s": [], "behind_s": [], "during_s": []}
    between: dict[int, list[float]] = {}
    busy_until = 0.0
    for before, row in itertools.pairwise(steps[2:]):  # the first ones are slower
        kind = "other_s" if before["time"] > busy_until else "during_s"
        if before["step"] % EVERY == 0:
            kind = "behind_s"
            busy_until = before["time"] + saves.get(before["step"], {}).get("write_s", 0.0)
        gaps[kind].append(row["time"] - before["time"])
        between.setdefault(before["step"] // EVERY, []).append(gaps[kind][-1])
    found: dict[str, Any] = {name: statistics.median(values) for name, values in gaps.items() if values}
    whole = [sum(times) - EVERY * found["other_s"] for save, times in between.items() if save and len(times) == EVERY]
    if whole and "behind_s" in found:
        found["all_s"] = statistics.median(whole)
    for name in ("copy_s", "blocked_s", "write_s", "bytes"):
        if saves:
            found[name] = statistics.median(row[name] for row in saves.values())
    return found


def main(overrides: Sequence[str]) -> int:
    """Runs the job and prints what was measured. Returns an exit status."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "hzero", "train", *JOB, f"run.dir='{run}'", *overrides]
        if status := subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
            return status
        found = measure(read_metrics(run)[0])
        newest = max((run / "checkpoints").glob("step_*"))
        found["checkpoint"] = size_text(sum(json.loads((newest / "complete.json").read_text())["files"].values()))
    found["save_s"] = found["behind_s"] - found["other_s"]
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as of `hzero train`")
    sys.exit(main(parser.parse_args().overrides))
