"""Jobs in the queue, with stand-ins for Slurm's commands: what is refused, what is told of it, and how jobs are cancelled."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hzero.cli import main
from hzero.slurm.command import status_of
from tests.slurm.conftest import tool

RUN = Path("runs/paper_20b")


@pytest.fixture
def queued(paper: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins that queue at most ``most`` jobs, numbered from 101. Returns the file of what they were asked."""
    calls = tmp_path / "calls"
    (tmp_path / "most").write_text("1000")
    (tmp_path / "queue").write_text("")
    (tmp_path / "bin").mkdir()
    sbatch = f"""cd {tmp_path}; echo sbatch >> calls; n=$(grep -c sbatch calls)
        [ $n -le $(cat most) ] || {{ echo 'sbatch: error: Batch job submission failed' >&2; exit 1; }}
        echo $((100 + n))"""
    tool(tmp_path / "bin", "sbatch", sbatch)
    tool(tmp_path / "bin", "squeue", f"cat {tmp_path}/queue")
    tool(tmp_path / "bin", "scancel", f'echo "scancel $*" >> {calls}')
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/bin:/usr/bin")
    return calls


def _refused(capsys: pytest.CaptureFixture[str], message: str, *arguments: str) -> None:
    assert main(["slurm", *arguments]) == 2
    said = capsys.readouterr().err
    assert re.search(message, said) and said.count("\n") == 1, said


def test_a_folder_keeps_the_run_that_it_has(queued: Path, paper: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["slurm", "submit", *paper]) == 0
    assert main(["slurm", "submit", *paper, "nodes=8", "time=1h"]) == 0  # the same run, elsewhere
    other = "holds the run of job 102, which differs .*zero=mild.*; choose another run.name, or resume=auto"
    _refused(capsys, other, "submit", *paper, "zero=mild")
    assert main(["slurm", "submit", *paper, "zero=mild", "resume=auto"]) == 0
    (RUN / "summary.json").write_text(json.dumps({"status": "finished", "steps": 2000}))
    _refused(capsys, "is finished, with 2000 steps; choose another", "submit", *paper, "zero=mild", "resume=auto")
    assert main(["slurm", "submit", *paper, "zero=mild", "train.steps=3000", "resume=auto"]) == 0
    local = Path("runs/local")
    local.mkdir()
    (local / "config.yaml").touch()
    _refused(capsys, "holds a run that was not sent from here", "submit", *paper, "run.name=local")


def test_a_chain_that_is_refused_halfway_says_what_is_queued(
    queued: Path, paper: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "most").write_text("2")
    told = r"Batch job submission failed; 2 of 7 jobs are queued \(101, 102\): `hzero slurm cancel .*/runs/paper_20b`"
    _refused(capsys, told, "submit", "--chain", "12h", *paper)
    assert [row["chain"] for row in _rows()] == ["1 of 7", "2 of 7"]
    _refused(capsys, "submission failed", "submit", *paper, "run.name=other")
    assert [path.name for path in Path("runs").iterdir()] == ["paper_20b"]  # nothing is left of the other one


def test_jobs_beyond_those_of_a_user_are_refused_with_those_in_the_queue(
    queued: Path, paper: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "queue").write_text("".join(f"{number}\n" for number in range(95)))
    told = "sbatch: 7 jobs, and 95 are in the queue; rule: frontier takes 100 of one user"
    _refused(capsys, told, "submit", "--chain", "12h", *paper)
    _refused(capsys, "and 95 are in the queue; rule: qos debug of frontier takes 1", "submit", *paper, "qos=debug")
    assert not RUN.exists()
    assert main(["slurm", "submit", *paper]) == 0


def _rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RUN / "slurm" / "jobs.jsonl").read_text().splitlines()]


QUEUE = (
    "1|COMPLETED|1:00|0:00|n1|None\n2|RUNNING|1:00|9:00|n1|None\n3|PENDING|0:00|1:00:00||Dependency\n4|PENDING||||\n"
)


def test_the_job_that_runs_is_told_to_save_and_none_is_started_again(
    queued: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = RUN / "slurm"
    logs.mkdir(parents=True)
    rows = [{"job": number, "submitted": "x", "name": "n"} for number in (1, 2, 3)]
    (logs / "jobs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "queue").write_text(QUEUE)
    assert main(["slurm", "cancel", str(RUN)]) == 0
    assert "cancelled: 3\ntold to save and end: 2 (--now" in capsys.readouterr().out
    assert queued.read_text().splitlines() == ["scancel --state=PENDING 3", "scancel 3", "scancel --signal=USR1 2"]
    assert sorted(path.name for path in logs.glob("stop-*")) == ["stop-2", "stop-3"]
    queued.unlink()
    assert main(["slurm", "cancel", "--now", str(RUN)]) == 0
    assert queued.read_text().splitlines() == ["scancel --state=PENDING 2 3", "scancel 2 3"]


def test_status_says_why_a_job_waits_and_survives_what_others_wrote(
    queued: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = RUN / "slurm" / "3-0"
    logs.mkdir(parents=True)
    end = {"job": 3, "restart": 0, "began": 1, "ended": 61, "nodes": 2, "status": 75, "result": "nodes excluded: n1"}
    rows = [{"job": 3, "submitted": "x", "name": "n"}, {"job": 4, "submitted": "x"}, end, {"job": 5, "result": "torn"}]
    (RUN / "slurm" / "jobs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "queue").write_text("3|PENDING|0:00|1:00:00||BadConstraints\n")
    third, fourth, fifth = status_of(RUN)["jobs"]
    assert (third["state"], third["restart"], third["result"]) == ("PENDING", 1, "BadConstraints")
    assert (fourth["state"], fifth["result"], fifth["elapsed"]) == ("UNKNOWN", "torn", "")
    (tmp_path / "bin" / "squeue").unlink()
    assert main(["slurm", "status", str(RUN)]) == 0
    said = capsys.readouterr().out
    assert "Slurm does not answer: squeue" in said and "nodes excluded: n1" in said
    (RUN / "slurm" / "old-logs").mkdir()
    for name in ("note.log", "train-0-n1.log"):
        (logs / name).write_text(f"in {name}\n")
    assert main(["slurm", "logs", str(RUN), "--node", "n1"]) == 0
    assert "in train-0-n1.log" in (said := capsys.readouterr().out) and "note" not in said
