"""``hzero train`` as ranks of mpiexec, with hops over MPI."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.ranks import environment, mpiexec

ARGUMENTS = [
    *("model=gpt_neox_1m", "topology.nodes=1", "topology.gpus_per_node=2", "topology.gcds_per_gpu=1", "train.steps=3"),
    *("train.eval_every=0", "sample.at_end=false", "data.max_bytes=200000", "zero.transport=mpi", "train.monitor=null"),
]


def test_a_run_under_mpiexec(tmp_path: Path) -> None:
    done = subprocess.run(
        [mpiexec(), "-n", "2", sys.executable, "-m", "hzero", "train", *ARGUMENTS, f"run.dir={tmp_path}/run"],
        env=environment(DS_ACCELERATOR="cpu"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "; transport mpi; codecs" in done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 3 and losses[-1] < losses[0]
