"""Jobs under a real Slurm: what follows when a node is bad, a time limit comes, an environment is broken, a user cancels.

The ranks of most tests are a shell script in a packed environment, which says what it was asked and ends as it is told, so
these tests take no time for Python. One job trains; HZERO_SLURM=full has it check its nodes and run 2 x 8 ranks.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults import small_disk
from hzero.cli import main
from hzero.slurm.command import status_of
from hzero.train.folder import NOTE
from tests.ranks import ROOT
from tests.slurm import cluster
from tests.slurm.cluster import Cluster
from tests.slurm.test_render import links_file

pytestmark = pytest.mark.skipif(bool(cluster.missing()), reason=cluster.missing())
FULL = os.environ.get("HZERO_SLURM") == "full"
#: Longest wait for a job, in seconds.
WAIT_S = 300.0 if FULL else 60.0

#: `python` of the packed environment. `-m hzero train` waits until a file called ``go`` is there, whose content is its
#: status, or for a signal, upon which it ends as a trainer does that has saved.
PYTHON = f"""#!/bin/sh
echo "$SLURMD_NODENAME $SLURM_PROCID $SLURM_RESTART_COUNT $*" >> "$HZERO_JOB/calls"
case "$*" in
*preflight*) exec {sys.executable} "$@" ;;
*"bench links"*)
  if [ "$SLURMD_NODENAME" = pretend01 ]; then echo "no such device" >&2; exit 1; fi
  while [ "$1" != --out ]; do shift; done
  cp "$HZERO_JOB/links" "$2" ;;
*" train "*)
  trap 'echo saved; exit 75' USR1 TERM
  echo "training on $MASTER_ADDR"
  while [ ! -e "$HZERO_JOB/go" ]; do sleep 0.1; done
  exit "$(cat "$HZERO_JOB/go")" ;;
esac
"""

#: A runtime of containers that has none: notes GCD and command, and starts the `python` above.
CONTAINER = """#!/bin/sh
echo "$ROCR_VISIBLE_DEVICES $1 $2 $3" >> {starts}
shift 3
exec {inside} "$@"
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster.running(tmp_path_factory.mktemp("slurm"), nodes=3, cpus=16) as running:
        yield running


@pytest.fixture
def job(slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Submits a run of two nodes with two ranks each, and returns its folder. Its jobs are cancelled at the end."""
    monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    archive = tmp_path / "env.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        entry = tarfile.TarInfo("bin/python")
        entry.size, entry.mode = len(PYTHON), 0o755
        packed.addfile(entry, io.BytesIO(PYTHON.encode()))
    runs: list[Path] = []

    def submit(*keys: str, options: tuple[str, ...] = ()) -> Path:
        run = tmp_path / "run"
        run.mkdir()
        (run / "links").write_text(links_file(1.0))
        topology = ("nodes=2", "topology.gpus_per_node=1", "topology.gcds_per_gpu=2")
        common = ("machine=slurm_local", *topology, f"run.dir={run}", f"environment={archive}", "time=10m")
        assert main(["slurm", "submit", *options, *common, *keys]) == 0
        runs.append(run)
        return run

    yield submit
    for run in runs:
        main(["slurm", "cancel", "--now", str(run)])
    _until(lambda: not slurm.run("squeue", "-h", "-t", "R,PD,CG,RQ", "-o", "%i").stdout, slurm, "the queue is empty")


def _until(holds: Callable[[], Any], slurm: Cluster, what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        if time.monotonic() > deadline:
            queue = slurm.run("squeue", "--states=all").stdout
            pytest.fail(f"not within {WAIT_S:g} s: {what}\n{queue}\n{slurm.log()}")
        time.sleep(0.1)


def _history(run: Path) -> list[dict[str, Any]]:
    """The ends of a run's jobs."""
    rows = [json.loads(line) for line in (run / "slurm" / "jobs.jsonl").read_text().splitlines()]
    return [row for row in rows if "result" in row]


def _calls(run: Path, word: str) -> list[list[str]]:
    """Of each rank that was started with a word: node, rank, restart, and arguments."""
    lines = (run / "calls").read_text().splitlines() if (run / "calls").exists() else []
    return sorted(line.split(" ", 3) for line in lines if word in line)


def _numbers(run: Path) -> list[int]:
    return [found["job"] for found in status_of(run)["jobs"]]


def test_a_bad_node_is_excluded_and_a_job_that_is_not_finished_starts_again(
    slurm: Cluster, job: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run = job("launcher.slurm.check=true")
    (number,) = _numbers(run)
    _until(lambda: _history(run), slurm, "the check has failed")
    assert _history(run)[0]["result"] == "nodes excluded: pretend01"
    _until(lambda: len(_calls(run, " train ")) == 4, slurm, "the job trains")
    ranks = [(node, rank, restart) for node, rank, restart, _ in _calls(run, " train ")]
    assert ranks == [("pretend02", "0", "1"), ("pretend02", "1", "1"), ("pretend03", "2", "1"), ("pretend03", "3", "1")]
    arguments = _calls(run, " train ")[0][3]
    assert arguments.startswith("-m hzero train ") and arguments.endswith(f"run.dir={run} resume=auto")
    # Each node was checked by ranks of a world of its own, then all of them together.
    checks = [row[3] for row in _calls(run, "bench links") if row[2] == "1"]
    assert [sum(f"--topology {machine}x1x2 " in call for call in checks) for machine in (1, 2)] == [4, 4]

    slurm.run("scancel", "--signal=USR1", str(number))  # what Slurm sends before the time limit
    _until(lambda: len(_history(run)) == 2, slurm, "the ranks have saved")
    (run / "go").write_text("0")
    _until(lambda: len(_history(run)) == 3, slurm, "the job finishes")
    results = [(row["restart"], row["status"], row["result"]) for row in _history(run)]
    assert results[1:] == [(1, 75, "saved, to go on; started again"), (2, 0, "finished")]
    capsys.readouterr()
    assert main(["slurm", "logs", str(run)]) == 0
    assert "train-0-" in (said := capsys.readouterr().out) and "training on 127." in said and "finished" in said
    _until(lambda: status_of(run)["jobs"][-1]["result"] == "finished", slurm, "Slurm knows that the job has ended")
    assert main(["slurm", "status", str(run)]) == 0
    assert "finished" in capsys.readouterr().out


def test_the_jobs_of_a_chain_follow_each_other_until_the_run_is_finished(
    slurm: Cluster, job: Callable[..., Path]
) -> None:
    run = job(options=("--chain", "27m"))  # three times the nine minutes that ten leave for training
    first, second, third = _numbers(run)
    _until(lambda: len(_calls(run, " train ")) == 4, slurm, "the first job trains")
    states = {found["job"]: (found["state"], found["result"]) for found in status_of(run)["jobs"]}
    assert states == {first: ("RUNNING", ""), second: ("PENDING", "Dependency"), third: ("PENDING", "Dependency")}
    (run / "go").write_text("1")  # a rank fails: the next job goes on all the same
    _until(lambda: _history(run), slurm, "the first job has ended")
    (run / "go").unlink()
    _until(lambda: len(_calls(run, " train ")) == 8, slurm, "the second job trains")
    (run / "go").write_text("0")
    _until(lambda: len(_history(run)) == 2, slurm, "the run is finished")
    _until(lambda: status_of(run)["jobs"][2]["state"] == "CANCELLED", slurm, "the third job is not needed")
    results = [(row["job"], row["status"], row["result"]) for row in _history(run)]
    assert results == [(first, 1, "failed with status 1, no new checkpoint"), (second, 0, "finished")]


def test_a_cancelled_job_saves_and_does_not_start_again(slurm: Cluster, job: Callable[..., Path]) -> None:
    run = job()
    _until(lambda: len(_calls(run, " train ")) == 4, slurm, "the job trains")
    assert main(["slurm", "cancel", str(run)]) == 0
    _until(lambda: _history(run), slurm, "the job has ended")
    assert _history(run)[0]["result"] == "cancelled; saved, to go on"
    _until(lambda: status_of(run)["jobs"][0]["state"] == "FAILED", slurm, "Slurm has noted it")  # not PENDING


@pytest.mark.parametrize("broken", ["gone", "torn"])
def test_an_environment_that_does_not_reach_the_nodes_ends_the_job(
    broken: str, slurm: Cluster, job: Callable[..., Path], tmp_path: Path
) -> None:
    run = job("launcher.slurm.options=[--hold]", "launcher.slurm.restarts=0")
    archive = tmp_path / "env.tar.gz"
    archive.unlink() if broken == "gone" else archive.write_bytes(archive.read_bytes()[:40])
    slurm.run("scontrol", "release", str(_numbers(run)[0]))
    _until(lambda: _history(run), slurm, "the job has ended")
    expected = f"sbcast of {archive} failed" if broken == "gone" else f"{archive} cannot be unpacked on every node"
    assert (_history(run)[0]["result"], _history(run)[0]["status"]) == (f"{expected}, no new checkpoint", 1)
    assert not _calls(run, "train")


def test_lumis_own_script_starts_every_rank_in_the_container(
    slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As rendered for LUMI, with stand-ins for the container's runtime and for the modules."""
    run, image = tmp_path / "run", tmp_path / "image.sif"
    run.mkdir()
    (run / "go").write_text("0")
    image.touch()
    for name, text in (
        ("inside", PYTHON),
        ("singularity", CONTAINER.format(starts=run / "starts", inside=tmp_path / "inside")),
    ):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("USER", "pretend")
    monkeypatch.setenv("BASH_FUNC_module%%", f'() {{ echo "$*" >> {run}/modules; }}')
    keys = ("topology=lumi", "nodes=2", "account=project_1", f"environment={image}", "time=10m", f"run.dir={run}")
    assert main(["slurm", "submit", "machine=lumi", *keys, "launcher.slurm.check=false"]) == 0
    _until(lambda: _history(run), slurm, "the job has ended")
    assert _history(run)[0]["result"] == "finished", _logs(run)
    Path("/tmp/pretend-miopen").rmdir()  # as lumi.env has it
    assert (run / "modules").read_text().splitlines()[-1] == "load lumi-aif-singularity-bindings"
    starts = sorted((run / "starts").read_text().splitlines())
    assert starts == sorted(f"{gcd} exec {image} python" for gcd in range(8) for _ in range(2))
    assert all(call[3].endswith(f"topology=auto run.dir={run} resume=auto") for call in _calls(run, " train "))


def test_the_rules_of_a_cluster_are_asked_from_it(
    slurm: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
    for key, message in (
        ("nodes=4", "partition batch has at most 3 nodes"),
        ("time=3h", "in partition batch may take 2 h"),
    ):
        assert main(["slurm", "render", "machine=slurm_local", "nodes=2", key]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.skipif(not FULL, reason="takes half a minute; HZERO_SLURM=full runs it")
def test_a_job_whose_node_has_died_starts_again_on_others(slurm: Cluster, job: Callable[..., Path]) -> None:
    run = job()
    _until(lambda: len(_calls(run, " train ")) == 4, slurm, "the job trains")
    dead = _calls(run, " train ")[-1][0]
    for pid in _ranks_of(run, lambda variables: variables["SLURMD_NODENAME"] == dead):
        os.kill(pid, signal.SIGSTOP)  # the daemon's death alone would leave them at work
    slurm.kill_node(dead)
    _until(lambda: {row[0] for row in _calls(run, " train ") if row[2] == "1"}, slurm, "Slurm has started it again")
    assert dead not in {row[0] for row in _calls(run, " train ") if row[2] == "1"}
    for pid in _ranks_of(run, lambda variables: variables["SLURMD_NODENAME"] == dead):
        os.kill(pid, signal.SIGKILL)
    slurm.start_node(dead)
    (run / "go").write_text("0")
    _until(lambda: any(row["result"] == "finished" for row in _history(run)), slurm, "the job finishes")


def _ranks_of(run: Path, chosen: Callable[[dict[str, str]], bool]) -> list[int]:
    """Processes of a run's ranks that are chosen by their environment."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (place / "cmdline").read_bytes()
            text = (place / "environ").read_text(errors="replace")
        except OSError:  # it has ended
            continue
        variables = dict(pair.split("=", 1) for pair in text.split("\0") if "=" in pair)
        started = (
            f"run.dir={run}".encode() in arguments and "SLURM_STEP_ID" in variables and b"srun" not in arguments[:8]
        )
        if started and chosen(variables):
            found.append(int(place.name))
    return found


def _train(
    slurm: Cluster, run: Path, *keys: str, nodes: int = 2, ranks: int = 2, options: tuple[str, ...] = ()
) -> None:
    """Submits a run of the smallest model."""
    given = ["machine=slurm_local", f"nodes={nodes}", "topology.gpus_per_node=1", f"topology.gcds_per_gpu={ranks}"]
    given += [f"run.dir={run}", "train.eval_batches=1", "sample.at_end=false", "data.max_bytes=100000", *keys]
    environment = {**slurm.environment, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(run.parent / "cache")}
    command = [sys.executable, "-m", "hzero", "slurm", "submit", *options, *given]
    subprocess.run(command, env=environment, check=True, timeout=60)


def _logs(run: Path) -> str:
    return "\n".join(path.read_text() for path in run.glob("slurm/**/*.log"))


def _losses(run: Path) -> dict[int, float]:
    path = run / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {row["step"]: row["loss"] for row in rows if row["kind"] == "step"}


def _reached(slurm: Cluster, run: Path, count: int, seconds: float) -> None:
    """Waits until a run's jobs have ended so many times."""
    deadline = time.monotonic() + seconds
    while len(_history(run)) < count:
        if time.monotonic() > deadline:
            pytest.fail(f"{len(_history(run))} of {count} ends within {seconds:g} s\n{_logs(run)}\n{slurm.log()}")
        time.sleep(0.2)


def test_a_run_trains_on_two_nodes(slurm: Cluster, tmp_path: Path) -> None:
    run, ranks = tmp_path / "run", 8 if FULL else 2
    check = f"launcher.slurm.check={str(FULL).lower()}"
    _train(slurm, run, "train.steps=3", "checkpoint.every=0", "launcher.slurm.restarts=0", check, ranks=ranks)
    _reached(slurm, run, 1, 500 if FULL else 120)
    assert [row["result"] for row in _history(run)] == ["finished"], _logs(run)
    assert list(_losses(run)) == [1, 2, 3]
    assert f"{2 * ranks} ranks: 2 nodes x 1 GPU x {ranks} GCDs" in _logs(run)


#: Half a minute of training on two cores, in fp32 and without a codec, so that losses can be compared bit for bit.
LONG = ["train.steps=60", "train.micro_batch=16", "checkpoint.every=4", "zero=lossless", "train.dtype=fp32"]


@pytest.fixture(scope="module")
def whole(slurm: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of a run that nothing has interrupted."""
    run = tmp_path_factory.mktemp("whole") / "run"
    _train(slurm, run, *LONG)
    _reached(slurm, run, 1, 300)
    assert len(_losses(run)) == 60, _logs(run)
    return _losses(run)


@pytest.mark.skipif(not FULL, reason="takes minutes; HZERO_SLURM=full runs it")
def test_a_run_that_hits_its_time_limit_goes_on_bit_for_bit(
    slurm: Cluster, whole: dict[int, float], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    _train(slurm, run, *LONG, "time=2m", "launcher.slurm.signal_s=90")
    _reached(slurm, run, 2, 300)
    while _history(run)[-1]["status"] == 75:
        _reached(slurm, run, len(_history(run)) + 1, 300)
    results = [row["result"] for row in _history(run)]
    assert results == ["saved, to go on; started again"] * (len(results) - 1) + ["finished"], _logs(run)
    assert _losses(run) == whole


@pytest.mark.skipif(not FULL, reason="takes minutes; HZERO_SLURM=full runs it")
def test_a_run_goes_on_with_other_nodes_and_presets_and_after_a_killed_rank(
    slurm: Cluster, whole: dict[int, float], tmp_path: Path
) -> None:
    run = tmp_path / "run"

    def until_step(step: int) -> None:
        _until(lambda: max(_losses(run), default=0) >= step, slurm, f"step {step}")

    _train(slurm, run, *LONG, "launcher.slurm.restarts=0")
    until_step(5)
    slurm.run("scancel", "--signal=USR1", str(_numbers_in(run)[-1]))
    _reached(slurm, run, 1, 100)
    _train(slurm, run, *LONG, "launcher.slurm.restarts=1", nodes=1)
    until_step(10)
    os.kill(_ranks_of(run, lambda variables: variables["SLURM_PROCID"] == "1")[0], signal.SIGKILL)
    _reached(slurm, run, 2, 100)
    assert _history(run)[-1]["status"] not in (0, 75)
    until_step(14)
    slurm.run("scancel", "--signal=USR1", str(_numbers_in(run)[-1]))
    _reached(slurm, run, 3, 100)
    _train(slurm, run, *LONG[:3], "zero=zero3", "train.dtype=fp32", "resume=auto")
    _reached(slurm, run, 4, 300)
    assert _history(run)[-1]["result"] == "finished", _logs(run)
    assert _losses(run) == pytest.approx(whole, rel=1e-5)


def _numbers_in(run: Path) -> list[int]:
    rows = [json.loads(line) for line in (run / "slurm" / "jobs.jsonl").read_text().splitlines()]
    return [row["job"] for row in rows if "submitted" in row]


@pytest.mark.skipif(not FULL, reason="takes minutes; HZERO_SLURM=full runs it")
def test_every_fault_is_told_and_the_next_job_goes_on_from_the_last_whole_checkpoint(
    slurm: Cluster, tmp_path: Path
) -> None:
    """A chain of five jobs, of which the first four end by a killed rank, a stopped one, `scancel`, and a full disk."""
    timeout_s, wait_s = 30, 40
    keys = ["train.steps=48", "train.micro_batch=4", *LONG[2:], f"train.timeout_s={timeout_s}"]
    keys += [f"launcher.slurm.wait_s={wait_s}", "checkpoint.max_failures=2"]
    with small_disk(tmp_path / "disk") as mounted:
        assert mounted
        run, whole = tmp_path / "disk" / "run", tmp_path / "whole"
        _train(slurm, run, *keys, "time=10m", "launcher.slurm.options=[--hold]", options=("--chain", "45m"))
        numbers = iter(_numbers_in(run))

        def wholes() -> list[Path]:
            return sorted(path.parent for path in (run / "checkpoints").glob(f"step_*/{NOTE}"))

        def trains() -> int:
            """Starts the next job, which trains beyond the steps of the one before, and past a checkpoint."""
            number, seen = next(numbers), max(_losses(run), default=0)
            slurm.run("scontrol", "release", str(number))
            _until(lambda: max(_losses(run), default=0) >= seen + 2 and wholes(), slurm, f"job {number} trains")
            return number

        def ended(began: float) -> dict[str, Any]:
            """What the run says of itself once the job has ended, which nothing may delay."""
            _reached(slurm, run, len(ends) + 1, timeout_s + wait_s + 60)
            row = {**json.loads((run / "status.json").read_text()), "took": time.monotonic() - began}
            row["newest"] = int(wholes()[-1].name.removeprefix("step_"))
            ends.append(row)
            print(f"{_history(run)[-1]['result']}: {row}")
            return row

        ends: list[dict[str, Any]] = []
        for rank, sent in (("3", signal.SIGKILL), ("2", signal.SIGSTOP)):
            trains()
            os.kill(_ranks_of(run, lambda variables, rank=rank: variables["SLURM_PROCID"] == rank)[0], sent)
            began = time.monotonic()
            if sent == signal.SIGSTOP:  # while nobody works
                _train(slurm, whole, *keys)
            told = ended(began)
            assert told["state"] == "failed" and f"rank {rank}" in told["reason"], f"{told}\n{_logs(run)}"
            assert told["took"] < timeout_s + wait_s + 30, told

        slurm.run("scancel", str(trains()))
        told = ended(time.monotonic())
        assert (told["state"], told["step"]) == ("interrupted", told["newest"]), told
        assert _history(run)[-1]["result"] == "cancelled; saved, to go on"
        torn = sorted(wholes()[-1].glob("*optim_states.pt"))[-1]
        os.truncate(torn, torn.stat().st_size // 2)
        before = wholes()[-2].name

        trains()
        assert f"{torn.parent.name}' is torn" in _logs(run), _logs(run)
        full = threading.Event()
        filler = threading.Thread(target=_fill_while_saving, args=(run, full))
        filler.start()
        began = time.monotonic()
        _until(lambda: len(_history(run)) == len(ends) + 1, slurm, "the job has ended")
        full.set()
        filler.join()
        told = ended(began)
        assert "No space left on device" in _logs(run), _logs(run)
        assert told["state"] == "failed" and "could not be saved" in told["reason"], told

        slurm.run("scontrol", "release", str(next(numbers)))
        _reached(slurm, run, len(ends) + 1, 300)
        assert _history(run)[-1]["result"] == "finished", _logs(run)
        _reached(slurm, whole, 1, 300)
        assert len(_losses(whole)) == 48 and _losses(run) == _losses(whole)
        jobs = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
        assert [job["state"] for job in jobs] == ["failed", "failed", "interrupted", "failed", "done"]
        untorn = int(before.removeprefix("step_"))  # nothing could be saved on the full disk
        assert [job["from"] for job in jobs] == [0, ends[0]["newest"], ends[1]["newest"], untorn, untorn]


def _fill_while_saving(run: Path, enough: threading.Event) -> None:
    """Takes all that is left on a run's disk whenever a checkpoint is being written, and gives it back at the end."""
    ballast = run.parent / "ballast"
    with open(ballast, "wb", buffering=0) as file:
        while not enough.wait(0.002):
            if any(not (path / NOTE).exists() for path in (run / "checkpoints").glob("step_*")):
                with contextlib.suppress(OSError):
                    while file.write(bytes(1 << 16)):
                        pass
    ballast.unlink()


@pytest.mark.skipif(not FULL, reason="takes minutes; HZERO_SLURM=full runs it")
def test_a_run_with_integer_codecs_goes_on_with_other_nodes(slurm: Cluster, tmp_path: Path) -> None:
    """Checkpoints are exact whatever the codecs are: the next step's loss is the same. Later ones part by what codecs round."""
    keys = ["train.steps=12", *LONG[1:3], "checkpoint.keep=9", "zero=topo", "train.dtype=fp32"]
    whole, run = tmp_path / "whole", tmp_path / "run"
    _train(slurm, whole, *keys)
    _reached(slurm, whole, 1, 300)
    left = shutil.ignore_patterns("slurm", "step_000008", "step_000012", "summary.json", "status.json", "history.jsonl")
    shutil.copytree(whole, run, ignore=left)
    _train(slurm, run, *keys, "resume=auto", nodes=1)
    _reached(slurm, run, 1, 300)
    assert _history(run)[-1]["result"] == "finished", _logs(run)
    assert "step_000004 of 4 ranks goes on with 2" in _logs(run)
    errors = {step: abs(_losses(run)[step] / loss - 1) for step, loss in _losses(whole).items()}
    assert list(errors) == list(range(1, 13)) and errors[5] < 1e-5 and max(errors.values()) < 1e-3, errors
