"""Queue: what Slurm's own commands say and do."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from hzero.slurm.machine import Bin, Partition
from hzero.validation import ConfigError

#: Longest wait for an answer of Slurm's, in seconds: a busy controller takes its time.
TIMEOUT_S = 60.0


def run(*command: str) -> str:
    """Runs a command of Slurm's.

    Returns:
        Its standard output.

    Raises:
        ConfigError: It is not installed, failed, or did not answer in time. The message has what it said.
    """
    if shutil.which(command[0]) is None:
        raise ConfigError(f"{command[0]}: not installed here; hzero slurm needs the commands of Slurm, on a login node")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{command[0]}: has not answered within {TIMEOUT_S:g} s") from None
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())[:500]
        raise ConfigError(f"{' '.join(command)[:200]}: failed with status {done.returncode}: {said}")
    return done.stdout


def partitions() -> dict[str, Partition]:
    """The partitions of this cluster, with their limits; the default one first."""
    found = {}
    for line in run("scontrol", "--oneliner", "show", "partition").splitlines():
        value = dict(re.findall(r"(\w+)=(\S+)", line))
        nodes = min((int(value[key]) for key in ("MaxNodes", "TotalNodes") if value.get(key, "").isdigit()), default=0)
        days, _, clock = value.get("MaxTime", "").rpartition("-")
        hours = 24 * 365.0  # UNLIMITED
        if re.fullmatch(r"\d+:\d\d:\d\d", clock):
            hour, minute, second = map(int, clock.split(":"))
            hours = int(days or 0) * 24 + hour + minute / 60 + second / 3600
        if nodes and hours:
            found[value["PartitionName"]] = (
                value.get("Default") != "YES",
                Partition(bins=[Bin(nodes=nodes, hours=hours)]),
            )
    return {name: partition for name, (_, partition) in sorted(found.items(), key=lambda item: item[1][0])}


def accounts() -> list[str]:
    """Accounts that this user may charge; empty where Slurm's database does not say."""
    try:
        text = run("sacctmgr", "--noheader", "--parsable2", "show", "associations", "user=" + _user(), "format=account")
    except ConfigError:  # no database, or no right to ask it
        return []
    return sorted(set(text.split()))


def submit(script: Path, options: Sequence[str]) -> int:
    """Queues a job. Returns its number."""
    said = run("sbatch", "--parsable", *options, str(script))
    number = said.strip().split(";")[0]
    if not number.isdigit():
        raise ConfigError(f"sbatch: expected the number of the job, found {said[:200]!r}")
    return int(number)


def jobs(name: str) -> dict[int, dict[str, str]]:
    """This user's jobs of a name that Slurm still knows, by number: ``state``, ``elapsed``, ``left``, ``nodes``, ``reason``."""
    fields = ("state", "elapsed", "left", "nodes", "reason")
    text = run(
        "squeue", "--noheader", "--states=all", f"--user={_user()}", f"--name={name}", "--format=%i|%T|%M|%L|%N|%r"
    )
    found = {}
    for line in text.splitlines():
        number, *values = line.split("|", len(fields))
        if number.isdigit():
            found[int(number)] = dict(zip(fields, values))
    return found


def count(qos: str | None = None) -> int:
    """How many jobs of this user are in the queue, in a quality of service or in all."""
    chosen = [f"--qos={qos}"] if qos is not None else []
    return len(run("squeue", "--noheader", "--array", f"--user={_user()}", *chosen, "--format=%i").split())


def ended(numbers: Sequence[int]) -> dict[int, dict[str, str]]:
    """What Slurm's database says of jobs: ``state``, ``elapsed``, ``nodes``, ``exit``. Empty without a database."""
    fields = ("state", "elapsed", "nodes", "exit")
    chosen = ",".join(map(str, numbers))
    try:
        text = run("sacct", "--noheader", "--parsable2", "--allocations", "--jobs", chosen,
                   "--format=jobid,state,elapsed,nodelist,exitcode")  # fmt: skip
    except ConfigError:
        return {}
    found = {}
    for line in text.splitlines():
        number, *values = line.split("|")
        if number.isdigit():
            found[int(number)] = dict(zip(fields, values))
    return found


def cancel(numbers: Sequence[int]) -> None:
    """Cancels jobs. Those that wait go first, or the end of one would start the next."""
    if numbers:
        run("scancel", "--state=PENDING", *map(str, numbers))
        run("scancel", *map(str, numbers))


def tell(numbers: Sequence[int]) -> None:
    """Sends the ranks of jobs the signal that Slurm sends before the time limit."""
    if numbers:
        run("scancel", "--signal=USR1", *map(str, numbers))


def _user() -> str:
    import getpass

    return getpass.getuser()


def read_history(path: Path) -> list[dict[str, object]]:
    """The lines of a ``jobs.jsonl``: of submitted jobs and of their ends. Lines that cannot be read are left out."""
    found = []
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    for line in lines:
        try:
            row = json.loads(line)
            if isinstance(row["job"], int):
                found.append(row)
        except (ValueError, LookupError, TypeError):
            continue
    return found
