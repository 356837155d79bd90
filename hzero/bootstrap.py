"""Bootstrap: the rank of this process in its world, from the variables of the launcher that has started it.

Torch, Accelerate and DeepSpeed read RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, which torchrun sets. `launched`
sets them under srun and mpiexec too. One launcher may run inside another, such as torchrun inside srun: the outer one then
starts a daemon on each node, and the inner one the ranks.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hzero.launch import end_with_parent, free_port
from hzero.mpi import from_rank_0
from hzero.validation import ConfigError

#: MASTER_PORT if nothing sets it: what OLCF's guide for PyTorch on Frontier uses.
DEFAULT_PORT = 3442

# Rank, world size, index and count of the ranks on this host, the innermost launcher first. OMPI_*: Open MPI, "Environment
# variables set for MPI applications". PMI_*: MPICH's Hydra, with MPI_* Intel MPI, with PMI_LOCAL_* Cray's PMI. PALS_*: Cray's
# mpiexec.
_VARIABLES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
    ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
)
# slurm.h: SLURM_INTERACTIVE_STEP, SLURM_BATCH_SCRIPT, SLURM_EXTERN_CONT and SLURM_PENDING_STEP. Their process is no rank,
# whatever SLURM_PROCID says.
_NO_RANKS = {"", "4294967290", "4294967291", "4294967292", "4294967293", "batch", "extern", "interactive"}
#: The first host of a list such as ``frontier[00001-00003,00010],login1``.
_HOST = re.compile(r"((?:[A-Za-z0-9._-]|\[[0-9]{1,18}(?:[-,][0-9]{1,18})*\])+)(?:,|$)")


@dataclass(frozen=True)
class Bootstrap:
    """A rank's place in its world, as its launcher states it.

    Attributes:
        rank: The rank.
        world_size: Ranks of the world.
        local_rank: Index of its device among those that this rank sees: 0 if it sees one.
        local_size: Ranks of its host; None if unknown.
        master_addr: Host of rank 0.
        master_port: Port there.
        launcher: ``torchrun``, ``environment`` (RANK and WORLD_SIZE set by something else), ``slurm``, ``mpi`` or ``alone``.
    """

    rank: int
    world_size: int
    local_rank: int
    local_size: int | None
    master_addr: str
    master_port: int
    launcher: str

    def environment(self) -> dict[str, str]:
        """The variables that torch.distributed, Accelerate and DeepSpeed read."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


@dataclass(frozen=True)
class _Source:
    """What the variables of one launcher state."""

    launcher: str
    names: Sequence[str]
    rank: int
    size: int
    local: int | None
    local_size: int | None


def launched() -> bool:
    """Whether torchrun, srun or mpiexec has started this process as one of several ranks.

    If so, the variables that torch.distributed reads are in the environment afterwards, and the process ends with its launcher.

    Raises:
        ConfigError: As `bootstrap`.
    """
    start = bootstrap()
    if start.world_size == 1:
        return False
    os.environ.update(start.environment())
    if start.launcher != "environment":  # whose parent may be a shell, which may end before it
        end_with_parent()
    return True


def bootstrap(environ: Mapping[str, str] = os.environ, visible: int | None = None) -> Bootstrap:
    """This process' place in the world.

    Args:
        environ: The environment. If it is MPI's and has no master address, this is collective: mpi4py brings rank 0's to all.
        visible: Devices that this process sees; torch is asked if it is None and matters.

    Raises:
        ConfigError: A variable is no number, two launchers contradict each other, the local index is beyond the visible
            devices, or nothing states the master address. The message names the variables.
    """
    sources = [source for source in (_source(environ, names) for names in _VARIABLES) if source is not None]
    if not sources:
        for rank, size, *_ in (*_VARIABLES[:-1], ("PMIX_RANK", "WORLD_SIZE")):
            if (_number(environ, rank) or 0) > 0 or (_number(environ, size) or 1) > 1:
                raise ConfigError(f"{rank}, {size}: found one of them; expected both, or RANK and WORLD_SIZE")
        address, port = environ.get("MASTER_ADDR", "127.0.0.1"), _number(environ, "MASTER_PORT")
        return Bootstrap(0, 1, 0, 1, address, port or free_port(), "alone")
    inner = sources[0]
    if not inner.rank < inner.size:
        raise ConfigError(f"{inner.names[0]}: found {inner.rank}, but {inner.names[1]} is {inner.size}")
    agreeing = [source for source in sources if (source.rank, source.size) == (inner.rank, inner.size)]
    for outer in sources:
        # An outer launcher that starts fewer processes has started the daemons of the inner one.
        if outer not in agreeing and inner.launcher != "torchrun" and outer.size >= inner.size:
            raise ConfigError(
                f"{inner.names[0]}={inner.rank} of {inner.names[1]}={inner.size} and {outer.names[0]}={outer.rank} of "
                f"{outer.names[1]}={outer.size} contradict each other; unset the variables of one of these launchers"
            )
    local_size = next((source.local_size for source in agreeing if source.local_size is not None), None)
    address, port = _master(environ, inner, {source.launcher for source in agreeing}, local_size)
    return Bootstrap(
        inner.rank,
        inner.size,
        _local_rank(environ, agreeing, visible),
        local_size,
        address,
        port,
        agreeing[-1].launcher,
    )


def _source(environ: Mapping[str, str], names: Sequence[str]) -> _Source | None:
    launcher = "mpi"
    if names[0] == "RANK":
        launcher = "torchrun" if environ.get("TORCHELASTIC_RUN_ID") else "environment"
    elif names[0] == "SLURM_PROCID":
        launcher = "slurm"
        if environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", "")) in _NO_RANKS:
            return None
    rank, size, local, local_size = (_number(environ, name) for name in names)
    if launcher == "slurm":
        nodes = _number(environ, "SLURM_STEP_NUM_NODES")
        local_size = (
            size // nodes if size and nodes and size % nodes == 0 else None
        )  # a step has a task on each of its nodes
    if rank is None or size is None:
        return None
    return _Source(launcher, names, rank, size, local, local_size)


def _local_rank(environ: Mapping[str, str], agreeing: Sequence[_Source], visible: int | None) -> int:
    """Index among the visible devices: LOCAL_RANK, otherwise the launcher's index on the host."""
    local = _number(environ, "LOCAL_RANK")
    if local is None:
        local = next((source.local for source in agreeing if source.local is not None), None)
    if local is None and agreeing[0].size == 1:
        local = 0
    if local == 0:
        return 0
    if visible is None:
        import torch

        visible = torch.cuda.device_count()
    if visible == 1:
        return 0  # as under --gpus-per-task=1: DeepSpeed binds device(LOCAL_RANK)
    if visible and (local is None or local >= visible):
        raise ConfigError(
            f"LOCAL_RANK: found {local}, but this rank sees {visible} devices; expected 0 to {visible - 1}"
        )
    return local or 0


def _master(environ: Mapping[str, str], inner: _Source, launchers: set[str], local_size: int | None) -> tuple[str, int]:
    """Address and port of rank 0."""
    address, port = environ.get("MASTER_ADDR"), _number(environ, "MASTER_PORT")
    if port is not None and not 0 < port < 1 << 16:
        raise ConfigError(f"MASTER_PORT: found {port}, expected 1 to 65535")
    if address:
        return address, port or DEFAULT_PORT
    one_host = inner.size in (1, local_size)
    if inner.size == 1:
        return "127.0.0.1", port or free_port()
    if "slurm" in launchers:
        return "127.0.0.1" if one_host else _first_host(environ), port or DEFAULT_PORT
    if "mpi" in launchers and (not one_host or port is None):
        ours = f"{'127.0.0.1' if one_host else socket.gethostname()} {free_port()}"
        address, free = from_rank_0(ours, inner.rank, inner.size).split()
        return address, port or int(free)
    if one_host:
        return "127.0.0.1", port or DEFAULT_PORT
    raise ConfigError("MASTER_ADDR: missing; set it to the host of rank 0")


def _first_host(environ: Mapping[str, str]) -> str:
    """The host of a step's first task."""
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    found = _HOST.match(hosts)
    if found is None or environ.get("SLURM_DISTRIBUTION", "").startswith("arbitrary"):
        raise ConfigError(
            f"MASTER_ADDR: missing, and SLURM_STEP_NODELIST={hosts[:80]!r} does not tell the host of rank 0; set it"
        )
    return re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", found[1])


def _number(environ: Mapping[str, str], variable: str) -> int | None:
    value = environ.get(variable)
    if not value:
        return None
    if not (value.isascii() and value.isdigit() and len(value) < 10):
        raise ConfigError(f"{variable}: found {value[:40]!r}, expected a number")
    return int(value)
