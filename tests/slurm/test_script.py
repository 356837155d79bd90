"""The body of a job, ``slurm/job.sh``, with stand-ins for Slurm's commands: how it ends, what it starts again and cleans."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import ROOT
from tests.slurm.test_render import links_file

#: A step runs its command once, whatever the number of tasks. Requests are noted in the order in which they come.
STANDINS = {
    "srun": """#!/bin/bash
name='' wait=''
while [ "${1#-}" != "$1" ]; do
  case $1 in --output=*) name=${1##*/} ;; --wait=*) wait=$1 ;; -N | -n) shift ;; esac
  shift
done
echo "srun ${name%%-*} $wait $*" >> "$CALLS"
exec "$@"
""",
    "sbcast": '#!/bin/bash\nwhile [ "${1#-}" != "$1" ]; do shift; done\ncp "$1" "$2"\n',
    "scontrol": """#!/bin/bash
echo "scontrol $*" >> "$CALLS"
case $1 in
hostnames | show) if [ "$2" = hostnames ]; then printf '%s\\n' n1 n2 n3 n4 | head -n "$SLURM_JOB_NUM_NODES"; fi ;;
requeue*) exit "${REQUEUE:-0}" ;;
esac
""",
    "squeue": """#!/bin/bash
echo "squeue $*" >> "$CALLS"
case "$*" in *%e*) echo "${ENDS:-}" ;; *PENDING*) for job in ${WAITING:-}; do echo "$job"; done ;; esac
""",
    "scancel": '#!/bin/bash\necho "scancel $*" >> "$CALLS"\n',
    "python": """#!/bin/bash
case "$*" in
*preflight*) exec "$REAL_PYTHON" "$@" ;;
*" doctor"*) eval "${DOCTOR:-true}" ;;
*"bench links"*) eval "${LINKS:-true}" ;;
*" train"*) eval "${TRAIN:-true}" ;;
esac
""",
}


class Job:
    """A job script in a folder of its own.

    Attributes:
        run: Its run's folder.
        archive: A packed environment for it.
    """

    def __init__(self, folder: Path) -> None:
        self._bin, self.run, self._calls = folder / "bin", folder / "run", folder / "calls"
        self._bin.mkdir()
        for name, text in STANDINS.items():
            (self._bin / name).write_text(text)
            (self._bin / name).chmod(0o755)
        self.archive = folder / "env.tar.gz"
        with tarfile.open(self.archive, "w:gz") as packed:
            packed.add(self._bin / "python", "bin/python")
        self._local = folder / "local"
        self._local.mkdir()

    def start(self, restart: int = 0, nodes: int = 4, check: str = "", archive: bool = False, **more: str) -> int:
        """Runs the script. Returns its status."""
        lines = [
            f"HZERO_JOB={self.run} HZERO_RANKS=2 HZERO_STEP=() HZERO_RANK=() HZERO_LOCAL={self._local}",
            f"HZERO_ENV={self.archive if archive else ''}",
            f"HZERO_WAIT=9 HZERO_RESTARTS={more.pop('restarts', '20')} HZERO_CHECK=({check}) HZERO_TOPOLOGY=4x2",
            f'set -- resume=auto\nexport MASTER_PORT=1\nsource "{ROOT}/slurm/job.sh"',
        ]
        environment = {
            "PATH": f"{self._bin}:/usr/bin:/bin",
            "CALLS": str(self._calls),
            "REAL_PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NAME": "run-1",
            "SLURM_JOB_NUM_NODES": str(nodes),
            "SLURM_JOB_NODELIST": "n",
            "SLURM_RESTART_COUNT": str(restart),
            "SLURM_NODEID": "0",
            "SLURM_LOCALID": "0",
            **more,
        }
        done = subprocess.run(
            ["/bin/bash", "-c", "\n".join(lines)], env=environment, capture_output=True, text=True, timeout=30
        )
        self.said = done.stdout + done.stderr
        return done.returncode

    def calls(self, word: str) -> list[str]:
        """What a command of Slurm's was asked."""
        lines = self._calls.read_text().splitlines() if self._calls.exists() else []
        return [line for line in lines if line.startswith(word)]

    def rows(self) -> list[dict[str, Any]]:
        """The lines of the history."""
        return [json.loads(line) for line in (self.run / "slurm" / "jobs.jsonl").read_text().splitlines()]

    def results(self) -> list[str]:
        """The results in the history."""
        return [row["result"] for row in self.rows() if "result" in row]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


SAVES = 'mkdir -p "$HZERO_JOB/checkpoints/step_1"; touch "$HZERO_JOB/checkpoints/step_1/complete.json"; '


def test_a_failure_is_tried_again_once_and_again_after_every_checkpoint(job: Job) -> None:
    assert job.start(TRAIN="exit 1") == 1
    assert job.start(1, TRAIN=SAVES + "exit 1") == 1  # it has come further
    assert job.start(2, TRAIN="exit 1") == 1
    assert job.start(3, TRAIN="exit 1", WAITING="8 9") == 1
    again = "; started again"
    lost = "failed with status 1, no new checkpoint"
    assert job.results() == [lost + again, f"failed with status 1{again}", lost + again, lost]
    assert job.calls("scontrol requeue") == ["scontrol requeue 7"] * 3
    assert job.calls("scancel") == ["scancel 8 9"]  # of a chain too


def test_ranks_that_the_signal_finds_starting_are_no_failure(job: Job) -> None:
    assert job.start(TRAIN="kill -USR1 $$") == 75
    assert job.results() == ["told to stop before it trained; started again"]


def test_a_job_that_slurm_does_not_start_again_says_so(job: Job) -> None:
    assert job.start(TRAIN="exit 75", REQUEUE="1") == 75
    assert job.results() == ["saved, to go on; started again", "saved, to go on; Slurm does not start it again"]


def test_the_jobs_that_are_cancelled_are_those_of_the_run(job: Job) -> None:
    (job.run / "slurm").mkdir(parents=True)
    (job.run / "slurm" / "jobs.jsonl").write_text('{"job": 7, "submitted": "x"}\n{"job": 8, "submitted": "x"}\n')
    assert job.start(WAITING="8") == 0
    assert "--jobs=7,8 --states=PENDING" in job.calls("squeue")[-1] and job.calls("scancel") == ["scancel 8"]
    assert job.start(SLURM_JOB_NAME="a,b") == 2 and "may have letters" in job.said


def test_a_job_that_was_sent_by_hand_is_in_the_history(job: Job) -> None:
    assert job.start() == job.start(1) == 0
    submitted = [row for row in job.rows() if "submitted" in row]
    assert [(row["job"], row["name"], row["nodes"]) for row in submitted] == [(7, "run-1", 4)]


def test_software_that_fails_everywhere_is_no_nodes_fault(job: Job) -> None:
    assert job.start(check="x", DOCTOR="exit 2", LINKS="exit 1") == 1
    assert job.results()[0].startswith("most nodes fail alone") and not job.calls("scontrol requeuehold")
    assert job.start(1, nodes=1, check="x", DOCTOR="exit 2", LINKS="exit 1") == 1
    assert job.results()[1].startswith("hzero doctor: training cannot work") and not job.calls("scontrol requeuehold")
    assert not job.calls("srun train")


def test_the_signal_before_the_time_limit_does_not_end_the_check(job: Job) -> None:
    """Both checks would die of it; then all nodes look bad."""
    assert (
        job.start(nodes=1, check="x", DOCTOR="kill -USR1 $$; echo doctor >> $CALLS", LINKS="kill -USR1 $$; exit 0")
        == 75
    )
    assert job.calls("doctor")


def test_checks_wait_less_than_training_for_ranks_that_do_not_end(job: Job) -> None:
    (job.run / "slurm" / "7-0").mkdir(parents=True)
    (job.run / "slurm" / "7-0" / "alone-0.json").write_text(links_file(1.0))
    assert job.start(nodes=1, check="x") == 0
    steps = [call.split()[1:3] for call in job.calls("srun")]
    assert steps == [["doctor", "--wait=120"], ["alone", "--wait=120"], ["train", "--wait=9"]]


def test_an_excluded_node_frees_the_job_before_the_others_hear_of_it(job: Job) -> None:
    job.run.mkdir()
    status = job.start(nodes=1, check="x", LINKS="exit 1", WAITING="8 9", archive=True)
    assert status == 75 and job.results() == ["nodes excluded: n1"]
    asked = [call.split()[1:3] for call in job.calls("scontrol") if "hostnames" not in call and " show " not in call]
    assert asked == [["requeuehold", "7"], ["update", "JobId=7"], ["release", "7"], ["update", "JobId=8,9"]]
    assert not list(job.run.parent.glob("local/*"))


@pytest.mark.parametrize("status", [0, 1, 75])
def test_the_unpacked_environment_is_taken_away_however_the_job_ends(status: int, job: Job) -> None:
    assert job.start(archive=True, TRAIN=f"exit {status}", restarts="0") == status
    assert job.calls("srun train") and not list(job.run.parent.glob("local/*"))


def test_an_environment_that_cannot_be_unpacked_may_be_a_nodes_fault_once(job: Job) -> None:
    job.archive.write_bytes(b"torn")
    assert job.start(archive=True) == job.start(1, archive=True) == 1
    told = f"{job.archive} cannot be unpacked on every node, no new checkpoint"
    assert job.results() == [f"{told}; started again", told]


def test_a_cancelled_job_does_not_begin_and_is_not_started_again(job: Job) -> None:
    (job.run / "slurm").mkdir(parents=True)
    assert job.start(TRAIN='touch "$HZERO_JOB/slurm/stop-7"; exit 75') == 75  # asked while it trains
    assert job.start() == 75
    assert job.results() == ["cancelled; saved, to go on", "cancelled; ended before training"]
    assert len(job.calls("srun train")) == 1 and not job.calls("scontrol requeue")


@pytest.mark.parametrize(("ends", "told"), [("2030-01-01T00:00:00", "1893456000"), ("NONE", ""), ("", "")])
def test_the_ranks_know_when_the_job_ends_under_an_older_slurm(ends: str, told: str, job: Job) -> None:
    assert job.start(ENDS=ends, TZ="UTC", TRAIN='echo "ends ${SLURM_JOB_END_TIME:-}" >> $CALLS') == 0
    assert job.calls("ends") == [f"ends {told}"]
