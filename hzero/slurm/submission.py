"""Submission: the jobs of a run in Slurm's queue, one or a chain of them, and the rules that these break."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hzero.files import read_small, refusing, replacing
from hzero.settings.conf import key_of
from hzero.slurm import queue
from hzero.slurm.job import FOLDER, HISTORY, SET, Job
from hzero.slurm.machine import time_text
from hzero.validation import ConfigError

_KEY = "launcher.slurm"


def submit(job: Job, chain_minutes: float = 0.0) -> list[int]:
    """Queues a run's job, or as many as a time takes, of which each goes on where the one before has ended.

    Args:
        job: The job.
        chain_minutes: The time that all jobs together shall have; 0 for one job, which is started again as often as
            ``restarts`` allows.

    Returns:
        The jobs' numbers.

    Raises:
        ConfigError: The chain is not allowed, the folder holds another run or one that is finished, it cannot be written,
            or sbatch refuses.
    """
    count = chain_length(job, chain_minutes)
    text = job.script(chained=count > 1)
    check_run(job)
    _check_queue(job, count)
    folder = job.run_dir / FOLDER
    with refusing("run.dir", folder):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        number = len(list(folder.glob("job-*.sbatch"))) + 1
        script = folder / f"job-{number}.sbatch"
        with replacing(script) as file:
            file.write(text)
    numbers: list[int] = []
    for position in range(count):
        try:
            numbers.append(queue.submit(script, ()))
        except ConfigError as error:
            if numbers:
                raise ConfigError(
                    f"{error}; {len(numbers)} of {count} jobs are queued ({', '.join(map(str, numbers))}): `hzero slurm cancel "
                    f"{job.run_dir}` cancels them"
                ) from None
            _remove(script)
            raise
        row = {
            "job": numbers[-1], "submitted": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            "name": job.name, "nodes": job.nodes, "time": time_text(job.minutes), "script": script.name,
            "chain": f"{position + 1} of {count}", "run": compared(job.arguments),
        }  # fmt: skip
        with refusing("run.dir", folder), open(folder / HISTORY, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    return numbers


def _remove(script: Path) -> None:
    """Removes the script of a job that was not queued, with folders that hold nothing else."""
    with contextlib.suppress(OSError):
        script.unlink()
        script.parent.rmdir()
        script.parent.parent.rmdir()


def compared(arguments: Sequence[str]) -> list[str]:
    """Of a job's arguments those that say which run it is: neither its machine nor its place on it."""
    elsewhere = ("launcher", "topology", *SET)
    return sorted(argument for argument in arguments if not key_of(argument).startswith(elsewhere))


def check_run(job: Job) -> None:
    """Refuses a job whose run has nothing left to do, or whose folder holds another run.

    Raises:
        ConfigError: Names the difference, and what to do.
    """
    summary = _json(job.run_dir / "summary.json")
    done = summary.get("steps")
    if summary.get("status") == "finished" and isinstance(done, int) and job.steps <= done:
        raise ConfigError(
            f"run.dir: the run in {str(job.run_dir)!r} is finished, with {done} steps; choose another run.name, or more "
            "train.steps"
        )
    if job.goes_on:
        return
    rows = [row for row in queue.read_history(job.run_dir / FOLDER / HISTORY) if isinstance(row.get("run"), list)]
    ours = compared(job.arguments)
    if rows and rows[-1]["run"] != ours:
        theirs: Any = rows[-1]["run"]
        changed = [*(f"+{key}" for key in ours if key not in theirs), *(f"-{key}" for key in theirs if key not in ours)]
        found = f"the run of job {rows[-1]['job']}, which differs ({', '.join(map(str, changed))[:300]})"
    elif not rows and (job.run_dir / "config.yaml").exists():
        found = "a run that was not sent from here"
    else:
        return
    raise ConfigError(
        f"run.dir: {str(job.run_dir)!r} holds {found}; choose another run.name, or resume=auto to go on with that run"
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_small(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _check_queue(job: Job, count: int) -> None:
    """Refuses jobs beyond those that the machine takes of one user, with the ones that are in the queue."""
    qos = job.machine.qos.get(job.block["qos"])
    most = qos.jobs if qos is not None and qos.jobs is not None else job.machine.max_jobs
    if most is None:
        return
    there = queue.count(job.block["qos"] if qos is not None and qos.jobs is not None else None)
    if there + count > most:
        place = f"qos {job.block['qos']} of " if qos is not None and qos.jobs is not None else ""
        raise ConfigError(
            f"sbatch: {count} jobs, and {there} are in the queue; rule: {place}{job.block['machine']} takes {most} of one user"
        )


def chain_length(job: Job, chain_minutes: float) -> int:
    """Jobs that a time takes, without the share of each that its last save may need; 1 for no chain."""
    if not chain_minutes:
        return 1
    count = math.ceil(chain_minutes / (job.minutes - job.block["signal_s"] / 60))
    if not job.may_chain:
        raise ConfigError(f"--chain: {_KEY}.qos {job.block['qos']} allows no chains on {job.block['machine']}")
    if job.machine.max_jobs is not None and count > job.machine.max_jobs:
        raise ConfigError(
            f"--chain: {count} jobs of {time_text(job.minutes)}, and {job.block['machine']} takes {job.machine.max_jobs} of one "
            "user"
        )
    return count
