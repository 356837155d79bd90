"""Jobs under a real Slurm: a run that is stopped, started again and finished, as if nothing had stopped it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hzero import newest_checkpoint
from tests.forks import Command
from tests.ranks import LONG, ROOT
from tests.slurm import cluster, forking
from tests.slurm.cluster import Cluster

pytestmark = pytest.mark.skipif(bool(cluster.missing()), reason=cluster.missing())
#: With it a job also runs into its time limit, which Slurm looks at twice a minute.
FULL = os.environ.get("HZERO_SLURM") == "full"
#: Longest wait for a job, in seconds.
WAIT_S = 600.0 if FULL else 240.0
#: A small run in fp32 and without a codec, so that losses can be compared bit for bit.
KEYS = (
    *("topology.nodes=2", "topology.packages_per_node=1", "topology.devices_per_package=1", "zero=lossless",
     "train.dtype=fp32"),
    *("model.hidden_size=64", "model.num_layers=2", "model.num_heads=2", "model.intermediate_size=128"),
    *("model.vocab_size=300", "model.seq_length=128", "train.micro_batch=8", "train.eval_batches=1"),
    *("data=text", "data.path=book.txt", "data.cache_dir=cache"),
)  # fmt: skip


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster.running(tmp_path_factory.mktemp("slurm"), nodes=2, cpus=16) as running:
        yield running


class _Jobs:
    """Jobs that are sent from a folder, as from a checkout."""

    def __init__(self, slurm: Cluster, folder: Path) -> None:
        self._slurm, self._folder = slurm, folder
        for name in ("slurm", "benchmarks"):
            (folder / name).symlink_to(ROOT / name)
        (folder / "book.txt").write_text((ROOT / "hzero" / "config.py").read_text())

    def send(
        self, name: str, *keys: str, script: str = "slurm_local", options: tuple[str, ...] = (), **more: str
    ) -> str:
        """Sends the job of a run; returns its number."""
        variables = {"HZERO_PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "HZERO_CHECK": "0", **more}
        command = ["sbatch", "--parsable", "-N2", "--ntasks-per-node=1", "-J", name, *options]
        done = self._slurm.run(*command, f"slurm/{script}.sbatch", *keys, **variables, cwd=self._folder)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def log(self, name: str, number: str) -> str:
        path = self._folder / f"{name}-{number}.log"
        return path.read_text() if path.exists() else ""

    def logs(self, name: str) -> str:
        return "\n".join(path.read_text() for path in sorted(self.run(name).glob("slurm/**/*.log")))

    def run(self, name: str) -> Path:
        return self._folder / "runs" / name

    def losses(self, name: str) -> list[float]:
        """Of all steps before the newest checkpoint."""
        newest = newest_checkpoint(self.run(name))
        state = json.loads((Path(newest) / "trainer_state.json").read_text()) if newest else {"log_history": []}
        return [row["loss"] for row in state["log_history"] if "loss" in row]

    def until(self, holds: Callable[[], Any], name: str, what: str, wait_s: float = WAIT_S) -> None:
        deadline = time.monotonic() + wait_s
        while not holds():
            if time.monotonic() > deadline:
                queue = self._slurm.run("squeue", "--states=all").stdout
                pytest.fail(f"not within {wait_s:g} s: {what}\n{queue}\n{self.logs(name)}\n{self._slurm.log()}")
            time.sleep(0.1)


@pytest.fixture
def jobs(slurm: Cluster, tmp_path: Path) -> Iterator[_Jobs]:
    yield _Jobs(slurm, tmp_path)
    slurm.run("scancel", "--user=root")


def test_a_run_that_is_stopped_is_started_again_and_loses_nothing(slurm: Cluster, jobs: _Jobs, tmp_path: Path) -> None:
    """Slurm sends the signal here that it sends before the time limit; with HZERO_SLURM=full the time limit comes."""
    steps = 1200 if FULL else 60
    keys = (*KEYS, f"train.steps={steps}", f"checkpoint.every={40 if FULL else 4}")
    limit = ("--time=2", "--signal=USR1@60") if FULL else ()
    with tempfile.TemporaryDirectory() as folder, forking.python(Path(folder)) as program:
        cut = jobs.send("cut", *keys, options=limit, HZERO_PYTHON=str(program), HZERO_RESTARTS="9")
        jobs.until(lambda: jobs.losses("cut"), "cut", "the job trains")
        if not FULL:
            slurm.run("scancel", "--signal=USR1", cut)
        again = "stopped before the end; the job is started again"
        jobs.until(lambda: again in jobs.log("cut", cut), "cut", "it has stopped")
        assert 4 <= len(jobs.losses("cut")) < steps
        with Command(["train", f"run.dir={jobs.run('whole')}", *keys], tmp_path, tmp_path / "output", {}) as whole:
            status, _, errors = whole.finish(WAIT_S)
        assert status == 0, errors
        jobs.until(lambda: "finished" in jobs.log("cut", cut), "cut", "the job finishes")
    assert len(jobs.losses("whole")) == steps and jobs.losses("cut") == jobs.losses("whole")
    if FULL:
        print(jobs.log("cut", cut))


@LONG
def test_the_nodes_are_checked_before_training(jobs: _Jobs, tmp_path: Path) -> None:
    """The doctor finds nothing that keeps training from working; training then refuses the folder, which is empty.

    A misspelt key and a path that does not exist are refused before.
    """
    (tmp_path / "empty").mkdir()
    with tempfile.TemporaryDirectory() as folder, forking.python(Path(folder)) as program:
        more = {"HZERO_CHECK": "1", "HZERO_PYTHON": str(program)}
        refused = jobs.send("refused", "zero=tpo", **more)
        missing = jobs.send("missing", *KEYS, "data.path=none.txt", **more)
        number = jobs.send("checked", *KEYS, "data.path=empty", **more)
        jobs.until(lambda: "did you mean 'topo'?" in jobs.log("refused", refused), "refused", "the key is refused")
        says = "data.path: found no such file or folder: 'none.txt'; expected only text"
        jobs.until(lambda: says in jobs.log("missing", missing), "missing", "the path is refused")
        jobs.until(lambda: "failed with status 2" in jobs.log("checked", number), "checked", "the folder is refused")
    assert "checking 2 nodes" in jobs.log("checked", number) and "no regular file" in jobs.log("checked", number)
    assert "checking" not in jobs.log("refused", refused) + jobs.log("missing", missing)


#: `python` without the time that Python takes. It says what it is asked, and ends with the status in the file ``go``, or upon a
#: signal as a trainer that has saved.
PYTHON = """#!/bin/sh
[ "$1" != -c ] || exit 0
echo "$SLURM_PROCID $*" >> "$CALLS"
[ "$3" = train ] || exit "${DOCTOR:-0}"
trap "exit ${ENDS:-75}" TERM USR1
run=${4#run.dir=}
[ -z "${SAVES:-}" ] || { mkdir -p "$run/checkpoint-1" && touch "$run/checkpoint-1/complete.json"; }
touch training
while [ ! -e go ]; do sleep 0.1; done
exit "$(cat go)"
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> dict[str, str]:
    """Variables of a job whose Python is `PYTHON`."""
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    (tmp_path / "go").write_text("1")
    return {"HZERO_PYTHON": str(tmp_path / "python"), "CALLS": str(tmp_path / "calls")}


def _calls(folder: Path) -> list[str]:
    return sorted((folder / "calls").read_text().splitlines())


def test_a_failure_is_tried_again_only_after_a_new_checkpoint(
    jobs: _Jobs, tmp_path: Path, stand_in: dict[str, str]
) -> None:
    with tarfile.open(tmp_path / "env.tar.gz", "w:gz") as packed:
        packed.add(tmp_path / "python", "bin/python")
    local = tmp_path / "local"
    local.mkdir()
    archive = {"HZERO_ENV": str(tmp_path / "env.tar.gz"), "HZERO_LOCAL": str(local), "HZERO_PYTHON": "none"}
    failing = jobs.send("failing", "train.steps=3", **{**stand_in, **archive, "HZERO_CHECK": "1", "DOCTOR": "1"})
    jobs.until(lambda: "failed with status 1" in jobs.log("failing", failing), "failing", "the job fails")
    assert "hzero doctor warns" in jobs.log("failing", failing)
    train = f"train run.dir={jobs.run('failing')} resume=auto train.steps=3"
    calls, said = _calls(tmp_path), f"0 -m hzero doctor --log {jobs.run('failing')}/slurm/{failing}-0/"
    calls.remove(next(call for call in calls if call.startswith(said)))
    assert calls == sorted(f"{rank} -m hzero {what}" for rank in (0, 1) for what in ("doctor", train))
    jobs.until(lambda: not list(local.iterdir()), "failing", "the unpacked environment is removed")
    again = jobs.send("again", **stand_in, SAVES="1", HZERO_RESTARTS="1")
    unfit = jobs.send("unfit", **{**stand_in, "HZERO_CHECK": "1", "DOCTOR": "2"})
    jobs.until(lambda: "training cannot work here" in jobs.log("unfit", unfit), "unfit", "the check fails")
    jobs.until(lambda: "failed with status 1; see" in jobs.log("again", again), "again", "the job fails for good")
    assert "failed with status 1; the job is started again" in jobs.log("again", again)


def test_a_job_that_is_cancelled_saves_and_ends(
    slurm: Cluster, jobs: _Jobs, tmp_path: Path, stand_in: dict[str, str]
) -> None:
    (tmp_path / "go").unlink()
    first = jobs.send("run", **stand_in)
    jobs.until((tmp_path / "training").exists, "run", "the job trains")
    second = jobs.send("run", **stand_in)
    jobs.until(lambda: f"job {first} trains in" in jobs.log("run", second), "run", "the second of a name is refused")
    slurm.run("scancel", first)
    jobs.until(lambda: "saved; the same command resumes" in jobs.log("run", first), "run", "it saves")
    assert "started again" not in jobs.log("run", first)
    (tmp_path / "training").unlink()
    early = jobs.send("early", **stand_in, ENDS="143")
    jobs.until((tmp_path / "training").exists, "early", "the job trains")
    slurm.run("scancel", early)
    jobs.until(lambda: "ended by scancel" in jobs.log("early", early), "early", "it says who ended it")
    assert "failed" not in jobs.log("early", early) and not any("--log" in call for call in _calls(tmp_path))


@pytest.mark.parametrize("script", ["frontier", "lumi", "slurm_local", "prepare", "first_run"])
def test_a_script_says_where_it_must_start(script: str, tmp_path: Path) -> None:
    """Outside of a checkout's root, and on a machine without the command `module`. The scripts run in bash, not in Slurm."""
    variables = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_NUM_NODES": "1", "PATH": os.environ["PATH"]}
    command = ["bash", "--norc", str(ROOT / f"slurm/{script}.sbatch")]
    there = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=False)
    assert there.returncode == 2 and re.fullmatch("hzero: found no .*; expected .*a checkout's root.*\n", there.stderr)
    if script != "slurm_local":
        (tmp_path / "slurm").symlink_to(ROOT / "slurm")
        here = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=False)
        assert here.returncode == 2 and here.stderr.startswith("hzero: found no command module; expected ")
        assert here.stderr.count("\n") == 1


def test_lumis_script_starts_every_rank_in_the_container(
    slurm: Cluster, jobs: _Jobs, tmp_path: Path, stand_in: dict[str, str]
) -> None:
    """With stand-ins for the container's runtime and for the modules."""
    (tmp_path / "image.sif").touch()
    (tmp_path / "go").write_text("0")
    starts = f'#!/bin/sh\necho "$ROCR_VISIBLE_DEVICES $*" >> {tmp_path}/starts\nshift 5\nexec {tmp_path}/python "$@"\n'
    (tmp_path / "singularity").write_text(starts)
    (tmp_path / "singularity").chmod(0o755)
    more = {
        "HZERO_ENV": str(tmp_path / "image.sif"),
        "HZERO_OVERLAY": str(tmp_path / "hzero.sqsh"),
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "USER": "pretend",
        "BASH_FUNC_module%%": f'() {{ echo "$*" >> {tmp_path}/modules; }}',
    }
    number = jobs.send("lumi", options=("--ntasks-per-node=8",), script="lumi", **{**stand_in, **more})
    jobs.until(lambda: "finished" in jobs.log("lumi", number), "lumi", "the job finishes")
    Path("/tmp/pretend-miopen").rmdir()  # as lumi.env has it
    assert (tmp_path / "modules").read_text().splitlines() == ["load Local-LAIF lumi-aif-singularity-bindings"]
    keys = f"run.dir={jobs.run('lumi')} resume=auto topology=auto launcher=slurm"
    overlay = f"{tmp_path}/hzero.sqsh:/user-software:image-src=/"
    train = f"exec -B {overlay} {tmp_path}/image.sif /user-software/bin/python -m hzero train {keys}"
    assert sorted((tmp_path / "starts").read_text().splitlines()) == sorted(
        f"{gcd} {train}" for gcd in range(8) for _ in range(2)
    )


def test_a_corpus_is_prepared_by_one_rank_for_each_task(jobs: _Jobs, tmp_path: Path, stand_in: dict[str, str]) -> None:
    keys = ("slurm_local", "data.path=texts", "data.output=ids")
    options = ("--ntasks-per-node=3", "--constraint=", "--export=ALL")
    number = jobs.send("corpus", *keys, script="prepare", options=options, **stand_in)
    jobs.until(lambda: "finished" in jobs.log("corpus", number), "corpus", "the job finishes")
    command = "-m hzero data prepare data.path=texts data.output=ids"
    assert _calls(tmp_path) == [f"{rank} {command}" for rank in range(6)]
    failing = jobs.send("failing", *keys, script="prepare", options=options, **stand_in, DOCTOR="2")
    jobs.until(lambda: "failed with status 2" in jobs.log("failing", failing), "failing", "the job fails")


#: Parts of a first run, in order.
PARTS = (
    "plan", "text", "doctor", "links", "kernels", "zero3", "zeropp", "hsdp", "topo", "lossless", "lanes", "faults", "page",
)  # fmt: skip


def _parts(out: Path) -> list[list[str]]:
    """Name, status, seconds and limit of every part."""
    return [line.split() for line in (out / "parts.tsv").read_text().splitlines()]


def _first_run(jobs: _Jobs, folder: Path, *keys: str, ranks: int = 1, **more: str) -> Path:
    """The folder of a first run that has ended."""
    options = ("-C", "", "--export=ALL", f"--ntasks-per-node={ranks}")
    number = jobs.send("first", "slurm_local", *keys, script="first_run", options=options, **more)
    jobs.until(lambda: "to an issue" in jobs.log("first", number), "first", "the archive is written", 900)
    out = folder / "runs" / f"first_run-{number}"
    assert [row[0] for row in _parts(out)] == list(PARTS)
    with tarfile.open(f"{out}.tar.gz") as archive:
        assert f"{out.name}/first_run.md" in archive.getnames() or not (out / "first_run.md").exists()
    assert Path(f"{out}.tar.gz").stat().st_size < 10e6
    return out


@LONG
def test_a_first_run_measures_everything_and_makes_its_page(jobs: _Jobs, tmp_path: Path) -> None:
    """On two nodes of two ranks; of four with HZERO_SLURM=full."""
    keys = [key for key in KEYS if key.startswith(("model.", "data"))]
    with tempfile.TemporaryDirectory() as folder, forking.python(Path(folder)) as program:
        more = {"HZERO_PYTHON": str(program), "HZERO_PATIENCE": "400"}
        out = _first_run(jobs, tmp_path, *keys, "train.steps=8", ranks=4 if FULL else 2, **more)
    page = (out / "first_run.md").read_text()
    print(page)
    assert {row[1] for row in _parts(out) if row[0] != "doctor"} == {"0"}, page
    for what in (
        "The kernels give the bits of plain torch",
        *(f"hzero `{scheme}`: bytes into a node per step" for scheme in ("zeropp", "topo", "lossless")),
        "hzero `lossless`: loss of ZeRO-3 (in float32)",
        "Order `lanes` does not hang",
    ):
        assert f"| {what} | **confirmed** |" in page
    assert "| FSDP2, HSDP over the node | 8 |" in page and (out / "hsdp/steps.jsonl").read_text()
    assert (out / "topo/trace.json.gz").stat().st_size and (out / "zero3/trace.json.gz").stat().st_size
