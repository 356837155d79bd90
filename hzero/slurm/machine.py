"""Machine: the rules of a batch system and the lines of its jobs, as a data file with a source beside each."""

from __future__ import annotations

import contextlib
import functools
import re
from importlib import resources
from typing import Annotated

import yaml
from pydantic import Field, FiniteFloat

from hzero.validation import ConfigError, Frozen, one_of, seconds_of, validated

_FOLDER = resources.files("hzero") / "slurm" / "machines"
Positive = Annotated[int, Field(ge=1)]


class Bin(Frozen):
    """Jobs up to a number of nodes.

    Attributes:
        nodes: Max nodes of a job.
        hours: Max hours of a job.
    """

    nodes: Positive
    hours: Annotated[FiniteFloat, Field(gt=0)]


class Partition(Frozen):
    """A partition.

    Attributes:
        bins: By ascending nodes; the first that has the nodes of a job says how long it may run.
    """

    bins: list[Bin] = Field(min_length=1)


class Qos(Frozen):
    """A quality of service with rules of its own.

    Attributes:
        hours: Max hours of a job.
        chain: Whether a job may follow another; a job that is started again does.
        jobs: Max jobs of a user in it; None for no limit of its own.
    """

    hours: Annotated[FiniteFloat, Field(gt=0)]
    chain: bool
    jobs: Positive | None


class Account(Frozen):
    """Who pays.

    Attributes:
        pattern: Of its name, a regular expression; None for any.
        rule: Why one is needed, with its source; None if none is.
    """

    pattern: str | None
    rule: str | None


class Environment(Frozen):
    """How Python comes to the nodes.

    Attributes:
        suffixes: Of the file's name.
        required: Whether a job needs one.
        rule: Why, with its source.
    """

    suffixes: list[str]
    required: bool
    rule: str


class Machine(Frozen):
    """A machine under Slurm.

    Attributes:
        account: Who pays.
        partitions: By name; None asks Slurm.
        default_partition: The one that a job takes; None leaves it to Slurm.
        max_jobs: Max jobs of a user in the queue; None for no limit.
        qos: Qualities of service that have rules of their own, by name.
        environment: How Python comes to the nodes.
        ranks_per_node: Ranks that every node must have; None for any number.
        sbatch: Options of all jobs.
        srun: Options of a step with all ranks.
        rank: What begins the command of every rank.
        local_disk: Folder on a disk of the node; a shell expands it. None if nodes have no disk.
        discover: Whether ranks find their places themselves (``topology=auto``) in place of those that are declared.
        check: Options of ``hzero bench links`` for the check before training.
    """

    account: Account
    partitions: dict[str, Partition] | None
    default_partition: str | None
    max_jobs: Positive | None
    qos: dict[str, Qos]
    environment: Environment
    ranks_per_node: Positive | None
    sbatch: list[str]
    srun: list[str]
    rank: list[str]
    local_disk: str | None
    discover: bool
    check: list[str]


def machines() -> list[str]:
    """Names of all machines."""
    return sorted(entry.name.removesuffix(".yaml") for entry in _FOLDER.iterdir() if entry.name.endswith(".yaml"))


@functools.cache
def load_machine(name: str) -> Machine:
    """The machine of a name.

    Raises:
        ConfigError: No machine has that name.
    """
    if name not in machines():
        raise one_of("launcher.slurm.machine", name, machines(), "machine")
    file = _FOLDER / f"{name}.yaml"
    return validated(Machine, yaml.safe_load(file.read_text(encoding="utf-8")), f"{file.name}:")


def minutes_of(where: str, text: str | int) -> float:
    """Minutes of a time as `hzero.validation.seconds_of` reads it, but for a number alone.

    It is refused: Slurm takes it for minutes, and the trainer's own keys for seconds.

    Raises:
        ConfigError: It is no such time; begins with ``where``.
    """
    found = str(text)
    if re.fullmatch(r"[\d.]+", found):
        least = f"; {found}m is so many minutes" if float(f"0{found}".rstrip(".")) > 0 else ""
        raise ConfigError(f"{where}: found {found}, expected a time with a unit, such as 90m, 2h or 1:30:00{least}")
    with contextlib.suppress(ValueError):
        return seconds_of(found) / 60
    raise ConfigError(f"{where}: found {found!r}, expected a time such as 90m, 2h, 1h30m, 1:30:00 or 1-12:00:00")


def time_text(minutes: float) -> str:
    """Minutes as Slurm's H:MM:SS, rounded down to seconds."""
    seconds = int(minutes * 60)
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
