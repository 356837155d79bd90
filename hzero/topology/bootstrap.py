"""Bootstrap: the rank of this process in its world, from the variables of its launcher.

Three kinds of launchers set them: torchrun and others like it (RANK, WORLD_SIZE, LOCAL_RANK), MPI's mpiexec, and a Slurm
step. One may run inside another: then the outer one starts a daemon on each node, and the inner one the ranks. Any other
disagreement is an error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hzero.topology.mpi import address_of_mpi, free_port, size_of_mpi
from hzero.validation import ConfigError

#: MASTER_PORT where nothing sets it: what OLCF's guide for PyTorch on Frontier uses.
DEFAULT_PORT = 3442

# Rank, world size (None where the launcher does not say), local index and local size of each kind of MPI. Open MPI: "Environment
# variables set for MPI applications". PMI_*: MPICH's Hydra and Intel MPI with MPI_LOCALRANKID, Cray's PMI with PMI_LOCAL_RANK.
_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", ("OMPI_COMM_WORLD_LOCAL_RANK",), ("OMPI_COMM_WORLD_LOCAL_SIZE",)),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", ("MV2_COMM_WORLD_LOCAL_RANK",), ("MV2_COMM_WORLD_LOCAL_SIZE",)),
    ("PMI_RANK", "PMI_SIZE", ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"), ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")),
    ("PALS_RANKID", None, ("PALS_LOCAL_RANKID",), ("PALS_LOCAL_SIZE",)),
    ("PMIX_RANK", None, (), ()),
)

# slurm.h: SLURM_INTERACTIVE_STEP, SLURM_BATCH_SCRIPT, SLURM_EXTERN_CONT and SLURM_PENDING_STEP. Their process is no rank,
# whatever SLURM_PROCID says.
_NO_RANKS = {"4294967290", "4294967291", "4294967292", "4294967293", "batch", "extern", "interactive"}

#: The first host of a list, and what may follow it.
_HOSTS = re.compile(r"((?:[A-Za-z0-9._-]|\[[0-9]{1,18}(?:[-,][0-9]{1,18})*\])+)(?:,|$)")


@dataclass(frozen=True)
class Bootstrap:
    """A rank's place in its world, as its launcher states it.

    Attributes:
        rank: The rank.
        world_size: Ranks of the world.
        local_rank: Index of its device among those that this rank sees: 0 where it sees one.
        local_index: Its index among the ranks of its host; None where unknown. Not the index of a device.
        local_size: Ranks of its host, by Slurm's count of nodes if it is even; None where unknown.
        master_addr: Host of rank 0.
        master_port: Port there.
        launcher: ``torchrun``, ``environment`` (RANK and WORLD_SIZE set by something else), ``slurm``, ``mpi`` or ``alone``.
        address_from: Source of the address: ``MASTER_ADDR``, ``slurm``, ``mpi`` or ``alone``.
    """

    rank: int
    world_size: int
    local_rank: int
    local_index: int | None
    local_size: int | None
    master_addr: str
    master_port: int
    launcher: str
    address_from: str = "MASTER_ADDR"

    def environment(self) -> dict[str, str]:
        """The variables that torch.distributed and DeepSpeed read."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


@dataclass(frozen=True)
class _Source:
    """The statement of one launcher; None for values it leaves out."""

    launcher: str
    rank: int
    rank_variable: str
    size: int | None
    size_variable: str
    local: int | None = None
    local_size: int | None = None


def bootstrap(environ: Mapping[str, str] = os.environ, visible: int | None = None) -> Bootstrap:
    """This process' place in the world.

    Args:
        environ: The environment. If it is MPI's and has no master address, this is collective: rank 0 sends its
            own through mpi4py.
        visible: Devices that this process sees; torch is asked where it is None and matters.

    Raises:
        ConfigError: A variable is no number, one of a pair is missing, two launchers contradict each other, the local
            index is beyond the visible devices, or nothing states the master address. The message names the variables.
    """
    inner, *others = _sources(environ) or [_Source("alone", 0, "RANK", 1, "WORLD_SIZE")]
    agreeing = [inner, *(outer for outer in others if _agree(inner, outer))]
    size = next((source.size for source in agreeing if source.size is not None), None)
    if size is None:
        size = size_of_mpi(inner.rank, f"{inner.rank_variable}={inner.rank}")
    for source in agreeing:
        if size < 1:
            raise ConfigError(f"{source.size_variable}: found {size}, expected at least 1")
        if source.rank >= size:
            raise ConfigError(f"{source.rank_variable}: found {source.rank}, but {source.size_variable} is {size}")
    launcher = inner.launcher
    if launcher == "mpi" and any(source.launcher == "slurm" for source in agreeing):
        launcher = "slurm"
    index = next((source.local for source in agreeing if source.local is not None), None)
    local_size = next((source.local_size for source in agreeing if source.local_size is not None), None)
    address, port, address_from = _master(environ, agreeing, inner.rank, size, local_size)
    return Bootstrap(
        rank=inner.rank,
        world_size=size,
        local_rank=_local_rank(environ, index, size, visible),
        local_index=index,
        local_size=local_size,
        master_addr=address,
        master_port=port,
        launcher=launcher,
        address_from=address_from,
    )


def _sources(environ: Mapping[str, str]) -> list[_Source]:
    """All launchers that have started this process, the innermost first."""
    outer = [source for source in (*(_mpi_source(environ, *names) for names in _MPI), _slurm_source(environ)) if source]
    told = []
    for source in outer:
        for other in outer:  # srun's PMIx states the rank alone; the step's variables the rest
            if other.rank == source.rank and source.size in (None, other.size):
                if source.size is None:
                    source = replace(source, size=other.size, size_variable=other.size_variable)
                if source.local_size is None:
                    source = replace(source, local_size=other.local_size)
        told.append(source)
    return [source for source in (_environment_source(environ, bool(told)), *told) if source]


def _environment_source(environ: Mapping[str, str], more: bool) -> _Source | None:
    rank, size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    if rank is None and size is None:
        return None
    if rank is None or size is None:
        if rank is None and (more or size == 1):  # job scripts export the size for all ranks
            return None
        raise _half("RANK", "WORLD_SIZE", environ)
    local_size = _number(environ, "LOCAL_WORLD_SIZE")
    elastic = bool(environ.get("TORCHELASTIC_RUN_ID"))
    # Wrappers set LOCAL_RANK=0 for ranks that see one device: an index on the host only where the number of ranks is known.
    local = _number(environ, "LOCAL_RANK") if elastic or local_size is not None else None
    if local is not None and local_size is not None and local >= local_size:
        if elastic:
            raise ConfigError(f"LOCAL_RANK: found {local}, but LOCAL_WORLD_SIZE is {local_size}")
        local = None
    return _Source("torchrun" if elastic else "environment", rank, "RANK", size, "WORLD_SIZE", local, local_size)


def _mpi_source(
    environ: Mapping[str, str],
    rank_variable: str,
    size_variable: str | None,
    locals_: tuple[str, ...],
    local_sizes: tuple[str, ...],
) -> _Source | None:
    rank = _number(environ, rank_variable)
    size = _number(environ, size_variable) if size_variable else None
    if size_variable and (rank is None) != (size is None):
        raise _half(rank_variable, size_variable, environ)
    if rank is None:
        return None
    local, local_variable = _first(environ, locals_)
    local_size, local_size_variable = _first(environ, local_sizes)
    if local is not None and local_size is not None and local >= local_size:
        raise ConfigError(f"{local_variable}: found {local}, but {local_size_variable} is {local_size}")
    return _Source("mpi", rank, rank_variable, size, size_variable or rank_variable, local, local_size)


def _slurm_source(environ: Mapping[str, str]) -> _Source | None:
    """A task of a step. A batch script and an interactive shell have SLURM_PROCID=0 as well, but are none."""
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID") or ""
    if not step or step in _NO_RANKS or not environ.get("SLURM_PROCID"):
        return None
    rank = _number(environ, "SLURM_PROCID")
    size, size_variable = _first(environ, ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"))
    if rank is None or size is None:
        raise _half("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", environ)
    nodes, _ = _first(environ, ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"))
    local_size = size // nodes if nodes and size % nodes == 0 else None  # a step has a task on each of its nodes
    return _Source("slurm", rank, "SLURM_PROCID", size, size_variable, _number(environ, "SLURM_LOCALID"), local_size)


def _agree(inner: _Source, outer: _Source) -> bool:
    """Whether both state the same rank; False where the outer one has started the daemons of the inner one."""
    sizes_agree = None in (inner.size, outer.size) or inner.size == outer.size
    if inner.rank == outer.rank and sizes_agree:
        return True
    if inner.launcher == "torchrun":
        return False
    if inner.size is not None and outer.size is not None and inner.size > outer.size and outer.local_size == 1:
        return False
    if not sizes_agree:
        what = f"{inner.size_variable}={inner.size} and {outer.size_variable}={outer.size}"
    else:
        what = f"{inner.rank_variable}={inner.rank} and {outer.rank_variable}={outer.rank}"
    raise ConfigError(
        f"{what} contradict each other: two launchers have started this process, and the outer one does not run one "
        "task per node; unset the variables of one of them"
    )


def _local_rank(environ: Mapping[str, str], index: int | None, size: int, visible: int | None) -> int:
    """Index among the visible devices, from LOCAL_RANK, else from the launcher's local index."""
    local, variable = _number(environ, "LOCAL_RANK"), "LOCAL_RANK"
    if local is None:
        local, variable = index, "local index of the launcher"
    if local is None and size == 1:
        local = 0
    if local == 0:
        return 0
    if visible is None:
        import torch

        visible = torch.cuda.device_count()
    if visible == 1:
        return 0
    if local is None:
        if visible == 0:
            return 0
        raise ConfigError(
            f"LOCAL_RANK: not set, and nothing else tells which of the {visible} visible devices is this rank's; set it, or "
            "let the launcher bind one device to each rank"
        )
    if visible and local >= visible:
        raise ConfigError(f"{variable}: found {local}, but this rank sees {visible} devices (0 to {visible - 1})")
    return local


def _master(
    environ: Mapping[str, str], agreeing: Sequence[_Source], rank: int, size: int, local_size: int | None
) -> tuple[str, int, str]:
    """Address and port of rank 0, and their source."""
    port = _number(environ, "MASTER_PORT")
    if port is not None and not 0 < port < 1 << 16:
        raise ConfigError(f"MASTER_PORT: found {port}, expected 1 to 65535")
    launchers = {source.launcher for source in agreeing}
    if address := environ.get("MASTER_ADDR"):
        return address, port or (DEFAULT_PORT if size > 1 else free_port()), "MASTER_ADDR"
    if size == 1:
        return "127.0.0.1", port or free_port(), "alone"
    if "slurm" in launchers and (found := _first_host(environ)):
        return found, port or DEFAULT_PORT, "slurm"
    if "mpi" in launchers:
        source = next(source for source in agreeing if source.launcher == "mpi")
        address, free = address_of_mpi(
            rank, size, f"{source.rank_variable}={rank}, {source.size_variable}={size}", local_size == size
        )
        return address, port or free, "mpi"
    raise ConfigError("MASTER_ADDR: not set, and nothing else tells the host of rank 0; set it to that host's name")


def _first_host(environ: Mapping[str, str]) -> str | None:
    """The host of a step's first task; None where Slurm's environment has no list of hosts."""
    name = next((n for n in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST") if environ.get(n)), None)
    if name is None:
        return None
    host = first_host(environ[name], name)
    if environ.get("SLURM_DISTRIBUTION", "").startswith("arbitrary") and host != environ[name]:
        raise ConfigError(
            "MASTER_ADDR: not set; under SLURM_DISTRIBUTION=arbitrary rank 0 need not be on the first host: set it to "
            "that of rank 0"
        )
    return host


def first_host(text: str, where: str) -> str:
    """``frontier00001`` of ``frontier[00001-00003,00010],login1``. Raises `ConfigError` where no host stands first."""
    found = _HOSTS.match(text)
    if found is None:
        raise ConfigError(f"{where}: found {text[:80]!r}, expected hosts such as node[001-003,010],login1")
    return re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", found[1])


def _number(environ: Mapping[str, str], variable: str) -> int | None:
    value = environ.get(variable)
    if not value:
        return None
    if not (value.isascii() and value.isdigit() and len(value) < 10):
        raise ConfigError(f"{variable}: found {value[:40]!r} in the environment, expected a number")
    return int(value)


def _first(environ: Mapping[str, str], variables: Sequence[str]) -> tuple[int | None, str]:
    """The first of some variables that is set, and its name."""
    for variable in variables:
        if (number := _number(environ, variable)) is not None:
            return number, variable
    return None, variables[0] if variables else ""


def _half(one: str, other: str, environ: Mapping[str, str]) -> ConfigError:
    there, missing = (one, other) if environ.get(one) else (other, one)
    return ConfigError(f"{there}={environ[there]} is set, but {missing} is not; set both or neither")
