"""Job: a run on a machine under Slurm, checked against the machine's rules, as a script for sbatch."""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hzero
from hzero.files import refusing, replacing
from hzero.settings.conf import compose, plain
from hzero.settings.settings import Settings
from hzero.slurm import queue
from hzero.slurm.machine import Machine, Partition, load_machine, minutes_of, time_text
from hzero.validation import ConfigError, one_of

#: Set in a job: the folder of its run.
INSIDE = "HZERO_JOB"
#: Folder of a run with scripts, logs and history of its jobs; the last is a line for each submitted job, and one for each end.
FOLDER, HISTORY = "slurm", "jobs.jsonl"
#: What the job itself sets.
_SET = ("resume", "run.dir", "run.overwrite")
_KEY = "launcher.slurm"


@dataclass(frozen=True)
class Job:
    """A job that breaks no rule.

    Attributes:
        run_dir: The run's folder, absolute.
        name: Its name in the queue, the same for all jobs of a run and for no other run's.
        machine: The machine.
        block: The keys of ``launcher.slurm``.
        partition: The partition; None leaves it to Slurm.
        minutes: Its time limit.
        nodes: Its nodes.
        ranks: Ranks per node.
        topology: How checks before training describe the machine: ``auto``, or GPUs and GCDs of a node.
        arguments: Those of ``hzero train``.
    """

    run_dir: Path
    name: str
    machine: Machine
    block: dict[str, Any]
    partition: str | None
    minutes: float
    nodes: int
    ranks: int
    topology: str
    arguments: tuple[str, ...]

    def script(self, *, chained: bool = False) -> str:
        """The text of the script.

        Args:
            chained: Whether other jobs of the run follow, so that it need not be started again itself.
        """
        block, folder = self.block, self.run_dir / FOLDER
        lines = [
            f"--job-name={self.name}",
            f"--nodes={self.nodes}",
            f"--ntasks-per-node={self.ranks}",
            f"--time={time_text(self.minutes)}",
            f"--output={folder}/job-%j.log",
            "--open-mode=append",
            "--requeue",
            f"--signal=USR1@{block['signal_s']}",
            # One job of a run at a time, in the order of their submission.
            "--dependency=singleton",
            *(f"--{key}={block[key]}" for key in ("account", "qos") if block[key]),
            *([f"--partition={self.partition}"] if self.partition else []),
            *self.machine.sbatch,
            *block["options"],
        ]
        scripts = scripts_dir()
        variables = {
            INSIDE: shlex.quote(str(self.run_dir)),
            "HZERO_RANKS": str(self.ranks),
            "HZERO_STEP": _array(self.machine.srun),
            "HZERO_RANK": _array(self.machine.rank),
            "HZERO_ENV": shlex.quote(block["environment"] or ""),
            "HZERO_PYTHON": shlex.quote("" if block["environment"] else sys.executable),
            "HZERO_LOCAL": f'"{self.machine.local_disk or ""}"',
            "HZERO_WAIT": str(block["wait_s"]),
            "HZERO_RESTARTS": "0" if chained else str(block["restarts"]),
            "HZERO_CHECK": _array(self.machine.check if block["check"] else []),
            "HZERO_TOPOLOGY": self.topology,
        }
        return "\n".join(
            [
                "#!/bin/bash",
                f"# Made by `hzero slurm` {hzero.__version__} on {datetime.date.today()}; slurm/README.md says how it works.",
                *(f"#SBATCH {line}" for line in lines),
                "",
                "# ---- what this job is " + "-" * 97,
                *(f"{name}={value}" for name, value in variables.items()),
                "set -- \\",
                *(f"  {shlex.quote(argument)} \\" for argument in self.arguments[:-1]),
                f"  {shlex.quote(self.arguments[-1])}",
                "",
                "# ---- " + f"{block['machine']}.env ".ljust(113, "-"),
                (scripts / f"{block['machine']}.env").read_text(encoding="utf-8"),
                "# ---- " + "job.sh ".ljust(113, "-"),
                (scripts / "job.sh").read_text(encoding="utf-8"),
            ]
        )


def scripts_dir() -> Path:
    """The folder of the shell parts of a job: inside the installed package, or at the root of a checkout."""
    package = Path(hzero.__file__).resolve().parent
    inside = package / "slurm" / "scripts"
    return inside if inside.is_dir() else package.parent / "slurm"


def job_of(overrides: Sequence[str]) -> Job:
    """The job of a run.

    Args:
        overrides: Of the trainer's configuration. They choose a launcher of a cluster.

    Raises:
        ConfigError: Names the key and the rule that it breaks.
    """
    chosen = [override for override in overrides if override.startswith("launcher=")]
    if not chosen or chosen[-1] == "launcher=local":
        raise ConfigError("launcher: local sends no jobs; choose machine=frontier, lumi or slurm_local (launcher=..)")
    return job_with(Settings(plain(compose(list(overrides)))), overrides)


def job_with(settings: Settings, overrides: Sequence[str], suffix: str = "") -> Job:
    """The job of a run whose configuration is composed.

    Args:
        settings: The run's settings, with ``launcher.slurm``.
        overrides: Those that have led to the settings.
        suffix: What follows the name of the run's folder, as in a multirun.

    Raises:
        ConfigError: Names the key and the rule that it breaks.
    """
    block: dict[str, Any] = settings["launcher"]["slurm"]
    if settings["run"]["overwrite"]:
        raise ConfigError("run.overwrite: a job goes on with its run; remove the folder, or choose another run.name")
    machine, grid = load_machine(block["machine"]), settings.grid
    ranks = grid.gpus_per_node * grid.gcds_per_gpu
    if machine.ranks_per_node not in (None, ranks):
        raise ConfigError(
            f"topology: {ranks} ranks per node, and {block['machine']} has {machine.ranks_per_node}, one for each device; "
            f"topology={block['machine']} has them"
        )
    _check_account(block, machine)
    partition, minutes = _place(block, machine, grid.nodes)
    if block["signal_s"] >= minutes * 60:
        raise ConfigError(
            f"{_KEY}.signal_s: found {block['signal_s']}, and the job ends after {minutes * 60:g} s (time={time_text(minutes)})"
        )
    block = {**block, "environment": _environment(block, machine)}
    for option in block["options"]:
        if not re.fullmatch(r"--?[A-Za-z][^\n]*", option):
            raise ConfigError(f"{_KEY}.options: found {option!r}, expected an option of sbatch such as --mail-type=END")
    run_dir = Path(f"{settings['run']['dir']}{suffix}").expanduser().resolve()
    if re.search(r"[\s'\"\\%$]", str(run_dir)):
        raise ConfigError(
            f"run.dir: {str(run_dir)!r} has blanks, quotes, $ or %, which Slurm's names of logs do not take"
        )
    kept = [override for override in overrides if not _replaced(override, machine.discover)]
    found = ["topology=auto"] if machine.discover else []
    return Job(
        run_dir=run_dir,
        name=f"{run_dir.name}-{hashlib.sha256(str(run_dir).encode()).hexdigest()[:6]}",
        machine=machine,
        block=block,
        partition=partition,
        minutes=minutes,
        nodes=grid.nodes,
        ranks=ranks,
        topology="auto" if machine.discover else f"{grid.gpus_per_node}x{grid.gcds_per_gpu}",
        arguments=(*kept, *found, f"run.dir={run_dir}", "resume=auto"),
    )


def submit(job: Job, chain_minutes: float = 0.0) -> list[int]:
    """Queues a run's job, or as many as a time takes, of which each goes on where the one before has ended.

    Args:
        job: The job.
        chain_minutes: The time that all jobs together shall have; 0 for one job, which is started again as often as
            ``restarts`` allows.

    Returns:
        The jobs' numbers.

    Raises:
        ConfigError: The chain is not allowed, the run's folder cannot be written, or sbatch refuses.
    """
    count = chain_length(job, chain_minutes)
    folder = job.run_dir / FOLDER
    with refusing("run.dir", folder):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        number = len(list(folder.glob("job-*.sbatch"))) + 1
        script = folder / f"job-{number}.sbatch"
        with replacing(script) as file:
            file.write(job.script(chained=count > 1))
    numbers = []
    for position in range(count):
        numbers.append(queue.submit(script, ()))
        row = {
            "job": numbers[-1], "submitted": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            "name": job.name, "nodes": job.nodes, "time": time_text(job.minutes), "script": script.name,
            "chain": f"{position + 1} of {count}",
        }  # fmt: skip
        with refusing("run.dir", folder), open(folder / HISTORY, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    return numbers


def chain_length(job: Job, chain_minutes: float) -> int:
    """Jobs that a time takes, without the share of each that its last save may need; 1 for no chain."""
    if not chain_minutes:
        return 1
    count = math.ceil(chain_minutes / (job.minutes - job.block["signal_s"] / 60))
    if job.block["qos"] in job.machine.no_chain_qos:
        raise ConfigError(f"--chain: {_KEY}.qos {job.block['qos']} allows no chains on {job.block['machine']}")
    if job.machine.max_jobs is not None and count > job.machine.max_jobs:
        raise ConfigError(
            f"--chain: {count} jobs of {time_text(job.minutes)}, and {job.block['machine']} takes {job.machine.max_jobs} of one "
            "user"
        )
    return count


def _check_account(block: dict[str, Any], machine: Machine) -> None:
    account, rule = block["account"], machine.account.rule
    if account is None:
        if rule is not None:
            raise ConfigError(f"{_KEY}.account: missing, as in account=PROJECT; rule: {rule}")
        return
    if machine.account.pattern is not None and not re.fullmatch(machine.account.pattern, account):
        raise ConfigError(f"{_KEY}.account: found {account!r}; rule: {rule}")
    known = queue.accounts()
    if known and account not in known:
        raise one_of(f"{_KEY}.account", account, known, "account")


def _place(block: dict[str, Any], machine: Machine, nodes: int) -> tuple[str | None, float]:
    """The partition and the time limit in minutes."""
    partitions = machine.partitions if machine.partitions is not None else queue.partitions()
    name = block["partition"] or machine.default_partition or next(iter(partitions), None)
    if name is None:
        raise ConfigError(f"{_KEY}.partition: this cluster has none that takes jobs")
    if name not in partitions:
        raise one_of(f"{_KEY}.partition", name, partitions, "partition")
    bins = partitions[name].bins
    fits = next((found for found in bins if nodes <= found.nodes), None)
    if fits is None:
        raise ConfigError(
            f"topology.nodes: found {nodes:,}; rule: a job of partition {name} has at most {bins[-1].nodes:,} nodes"
        )
    if block["time"] is None:
        return name, fits.hours * 60
    minutes = minutes_of(f"{_KEY}.time", block["time"])
    if minutes > fits.hours * 60:
        raise ConfigError(f"{_KEY}.time: found {block['time']}; rule: {_rule(name, partitions[name], fits.nodes)}")
    return name, minutes


def _rule(name: str, partition: Partition, nodes: int) -> str:
    index = next(index for index, found in enumerate(partition.bins) if found.nodes == nodes)
    least = partition.bins[index - 1].nodes + 1 if index else 1
    return f"a job of {least:,} to {nodes:,} nodes in partition {name} may take {partition.bins[index].hours:g} h"


def _environment(block: dict[str, Any], machine: Machine) -> str | None:
    found, rule = block["environment"], machine.environment
    kinds = ", ".join(rule.suffixes)
    if found is None:
        if rule.required:
            raise ConfigError(f"{_KEY}.environment: missing, expected a file that ends in {kinds}; rule: {rule.rule}")
        return None
    path = Path(found).expanduser()
    if not str(path).endswith(tuple(rule.suffixes)):
        raise ConfigError(
            f"{_KEY}.environment: found {found!r}, expected a file that ends in {kinds}; rule: {rule.rule}"
        )
    if not path.is_file() or not os.access(path, os.R_OK):
        raise ConfigError(f"{_KEY}.environment: no file {str(path)!r} that can be read; rule: {rule.rule}")
    if not str(path).endswith(".sif") and machine.local_disk is None:
        raise ConfigError(
            f"{_KEY}.environment: found {found!r}, and nodes of {block['machine']} have no disk to unpack it on"
        )
    return str(path.resolve())


def _replaced(override: str, discover: bool) -> bool:
    """Whether the job gives this key itself."""
    key = override.partition("=")[0].lstrip("+~")
    return key in _SET or (discover and key.split(".")[0] == "topology")


def _array(items: Sequence[str]) -> str:
    """Of bash; commas are quoted too, which linters take for separators."""
    return f"({' '.join(shlex.quote(item) if ',' not in item or chr(39) in item else repr(item) for item in items)})"
