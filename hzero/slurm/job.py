"""Job: a run on a machine under Slurm, checked against the machine's rules, as a script for sbatch."""

from __future__ import annotations

import datetime
import hashlib
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
from hzero.config import TransportName
from hzero.settings.conf import compose, key_of, plain
from hzero.settings.settings import Settings
from hzero.slurm import queue
from hzero.slurm.machine import Machine, Partition, load_machine, minutes_of, time_text
from hzero.validation import ConfigError, one_of

#: Set in a job: the folder of its run.
INSIDE = "HZERO_JOB"
#: Folder of a run with scripts, logs and history of its jobs; the last is a line for each submitted job, and one for each end.
FOLDER, HISTORY = "slurm", "jobs.jsonl"
#: What the job itself sets.
SET = ("resume", "run.dir", "run.overwrite")
#: Options of sbatch that other keys set, or that make another kind of job of it.
_OWN = (
    "account",
    "array",
    "bcast",
    "chdir",
    "error",
    "ntasks",
    "partition",
    "qos",
    "test-only",
    "time-min",
    "wait",
    "wrap",
)
#: What a path may have: Slurm's patterns of names take %, its lines end at #, and its lists have commas.
_PATH = re.compile(r"[\w./+@=-]+", re.ASCII)
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
        transport: What carries the hops.
        arguments: Those of ``hzero train``.
        steps: The run's steps.
        goes_on: Whether the user has said that an existing run goes on (``resume=auto``).
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
    transport: TransportName
    arguments: tuple[str, ...]
    steps: int
    goes_on: bool

    @property
    def may_chain(self) -> bool:
        """Whether the quality of service allows that a job follows another, such as the same one that is started again."""
        qos = self.machine.qos.get(self.block["qos"])
        return qos is None or qos.chain

    def options(self) -> list[str]:
        """The options of sbatch, without those of the user's own."""
        block, folder = self.block, self.run_dir / FOLDER
        return [
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
        ]

    def script(self, *, chained: bool = False) -> str:
        """The text of the script.

        Args:
            chained: Whether other jobs of the run follow, so that it need not be started again itself.
        """
        block, scripts = self.block, scripts_dir()
        restarts = 0 if chained or not self.may_chain else block["restarts"]
        variables = {
            "HZERO_RANK": _array(self.machine.rank),
            INSIDE: shlex.quote(str(self.run_dir)),
            "HZERO_RANKS": str(self.ranks),
            "HZERO_STEP": _array(self.machine.srun),
            "HZERO_ENV": shlex.quote(block["environment"] or ""),
            "HZERO_PYTHON": shlex.quote("" if block["environment"] else sys.executable),
            "HZERO_LOCAL": f'"{self.machine.local_disk or ""}"',
            "HZERO_WAIT": str(block["wait_s"]),
            "HZERO_RESTARTS": str(restarts),
            "HZERO_CHECK": _array(self.machine.check if block["check"] else []),
            "HZERO_TOPOLOGY": self.topology,
            "HZERO_TRANSPORT": self.transport,
        }
        return "\n".join(
            [
                "#!/bin/bash",
                f"# Made by `hzero slurm` {hzero.__version__} on {datetime.date.today()}; slurm/README.md says how it works.",
                *(f"#SBATCH {option}" for option in (*self.options(), *block["options"])),
                "",
                "# ---- what this job is " + "-" * 97,
                # Paths such as data.path are those of the folder in which the job was made.
                f"cd {shlex.quote(str(Path.cwd()))} || exit 1",
                *(["# shellcheck disable=SC2016 # every rank expands it"] if "$" in variables["HZERO_RANK"] else []),
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
    if settings["resume"] not in (False, None, "auto"):
        raise ConfigError(
            f"resume: found {settings['resume']!r}; jobs of a run go on with the run itself, so only auto is possible; "
            "`hzero train` can begin with another run's checkpoint"
        )
    machine, grid = load_machine(block["machine"]), settings.grid
    ranks = grid.gpus_per_node * grid.gcds_per_gpu
    if machine.ranks_per_node not in (None, ranks):
        raise ConfigError(
            f"topology: {ranks} ranks per node, and {block['machine']} has {machine.ranks_per_node}, one for each device; "
            f"topology={block['machine']} has them"
        )
    for key in ("account", "qos", "partition"):
        if block[key] is not None and not re.fullmatch(r"[\w.-]+", block[key], re.ASCII):
            raise ConfigError(f"{_KEY}.{key}: found {block[key]!r}, expected letters, digits, dots, _ and - only")
    _check_account(block, machine)
    partition, minutes = _place(block, machine, grid.nodes)
    if block["signal_s"] > 0.75 * minutes * 60:
        raise ConfigError(
            f"{_KEY}.signal_s: found {block['signal_s']}, and the job ends after {minutes * 60:g} s (time={time_text(minutes)}); "
            "it may take three quarters of that at most, or little is left for training"
        )
    wait_s = block["wait_s"] or math.ceil(settings["train"]["timeout_s"]) + 60
    block = {**block, "environment": _environment(block, machine), "wait_s": wait_s}
    run_dir = Path(f"{settings['run']['dir']}{suffix}").expanduser().resolve()
    if not _PATH.fullmatch(str(run_dir)):
        raise ConfigError(
            f"run.dir: {str(run_dir)!r} has blanks, quotes or other signs that Slurm's names of logs do not take; possible: "
            "letters, digits and . _ / + @ = -"
        )
    kept = [override for override in overrides if not _replaced(override, machine.discover)]
    found = ["topology=auto"] if machine.discover else []
    job = Job(
        run_dir=run_dir,
        name=f"{re.sub(r'[^A-Za-z0-9._-]', '_', run_dir.name)}-{hashlib.sha256(str(run_dir).encode()).hexdigest()[:6]}",
        machine=machine,
        block=block,
        partition=partition,
        minutes=minutes,
        nodes=grid.nodes,
        ranks=ranks,
        topology="auto" if machine.discover else f"{grid.gpus_per_node}x{grid.gcds_per_gpu}",
        transport=settings.plan.transport if settings.plan is not None else "torch",
        arguments=(*kept, *found, f"run.dir={run_dir}", "resume=auto"),
        steps=settings["train"]["steps"],
        goes_on=settings["resume"] == "auto",
    )
    for option in block["options"]:
        _check_option(option, job)
    return job


def _check_account(block: dict[str, Any], machine: Machine) -> None:
    account, rule = block["account"], machine.account.rule
    if account is None:
        if rule is not None:
            raise ConfigError(f"{_KEY}.account: missing, as in account=PROJECT; rule: {rule}")
        return
    if machine.account.pattern is not None and not re.fullmatch(machine.account.pattern, account):
        raise ConfigError(f"{_KEY}.account: found {account!r}; rule: {rule}")
    known = queue.accounts()
    if known and account.lower() not in known:  # Slurm keeps them in lower case
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
    qos = machine.qos.get(block["qos"])
    most = min(fits.hours, qos.hours) if qos is not None else fits.hours
    if block["time"] is None:
        return name, most * 60
    minutes = minutes_of(f"{_KEY}.time", block["time"])
    if qos is not None and minutes > qos.hours * 60:
        raise ConfigError(
            f"{_KEY}.time: found {block['time']}; rule: a job of qos {block['qos']} may take {qos.hours:g} h"
        )
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


def _check_option(option: str, job: Job) -> None:
    """Refuses an option of sbatch that changes what keys and rules have decided. sbatch takes beginnings of names as well."""
    if not re.fullmatch(r"--[a-z][a-z-]*(=\S+)?", option):
        raise ConfigError(
            f"{_KEY}.options: found {option!r}, expected one long option of sbatch without blanks, such as ['--mail-type=END']"
        )
    name = option[2:].partition("=")[0]
    ours = [own[2:].partition("=")[0] for own in job.options()]
    taken = next((own for own in (*ours, *_OWN) if own.startswith(name)), None)
    if taken is not None or name == "no-requeue":
        raise ConfigError(
            f"{_KEY}.options: found {option!r}; a job on {job.block['machine']} has its own --{taken or 'requeue'}, which "
            "follows from other keys and from the rules of the machine"
        )


def _replaced(override: str, discover: bool) -> bool:
    """Whether the job gives this key itself."""
    key = key_of(override)
    return key in SET or (discover and key.split(".")[0] == "topology")


def _array(items: Sequence[str]) -> str:
    """Of bash; commas are quoted too, which linters take for separators."""
    return f"({' '.join(shlex.quote(item) if ',' not in item or chr(39) in item else repr(item) for item in items)})"
