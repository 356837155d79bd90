"""Bootstrap: which rank of which world this process is, from what started it.

Three kinds of launchers tell it, each in variables of its own: torchrun and its like (RANK, WORLD_SIZE, LOCAL_RANK), MPI's
mpiexec, and a Slurm step. One may run inside another: then the outer one starts a daemon on each node and the inner one the
ranks. Any other disagreement is an error.
"""

from __future__ import annotations

import functools
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hzero.config import ConfigError
from hzero.topology.hosts import hosts_of
from hzero.topology.mpi import import_mpi, wait_mpi

#: MASTER_PORT where nothing sets it: what OLCF's guide for PyTorch on Frontier uses.
DEFAULT_PORT = 3442

#: Longest wait for rank 0's address under MPI, in seconds.
MPI_TIMEOUT_S = 300.0

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

_TASKS = re.compile(r"([0-9]{1,7})(?:\(x([0-9]{1,7})\))?")


@dataclass(frozen=True)
class Bootstrap:
    """A rank's place in its world, as its launcher tells it.

    Attributes:
        rank: The rank.
        world_size: Ranks of the world.
        local_rank: Index of its device among those that this rank sees: 0 where it sees one.
        local_index: Its index among the ranks of its host; None where unknown. Not the index of a device.
        local_size: Ranks of its host; None where unknown.
        master_addr: Host of rank 0.
        master_port: Port there.
        launcher: ``torchrun``, ``environment`` (RANK and WORLD_SIZE set by something else), ``slurm``, ``mpi`` or ``alone``.
        address_from: What the address follows from: ``MASTER_ADDR``, ``slurm``, ``mpi`` or ``alone``.
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
        """What torch.distributed and DeepSpeed read, as variables of the environment."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


@dataclass(frozen=True)
class _Source:
    """What one launcher says; ``size`` None where it does not say."""

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
        environ: The environment. Where it is of MPI's and tells no master address, this is collective: rank 0 sends its
            own through mpi4py.
        visible: Devices that this process sees; torch is asked where it is None and matters.

    Raises:
        ConfigError: A variable is no number, one of a pair is missing, two launchers contradict each other, the local
            index is beyond the visible devices, or nothing tells the master address. The message names the variables.
    """
    sources = _sources(environ)
    if not sources:
        return _alone(environ, visible)
    inner, agreeing = sources[0], [sources[0]]
    for outer in sources[1:]:
        if _agree(environ, inner, outer):
            agreeing.append(outer)
    size = next((source.size for source in agreeing if source.size is not None), None)
    if size is None:
        size = _size_of_mpi(inner)
    for source in agreeing:
        _check_range(source, size)
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
    outer = [
        source for source in (*map(functools.partial(_mpi_source, environ), _MPI), _slurm_source(environ)) if source
    ]
    # What one does not say, another one that has the same rank may: srun's PMIx tells the rank alone.
    told = []
    for source in outer:
        for other in outer:
            if other.rank == source.rank and (source.size is None or other.size == source.size):
                source = replace(
                    source,
                    size=other.size if source.size is None else source.size,
                    size_variable=other.size_variable if source.size is None else source.size_variable,
                    local_size=other.local_size if source.local_size is None else source.local_size,
                )
        told.append(source)
    return [source for source in (_environment_source(environ, bool(told)), *told) if source]


def _environment_source(environ: Mapping[str, str], more: bool) -> _Source | None:
    rank, size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    if rank is None and size is None:
        return None
    if rank is None or size is None:
        if rank is None and (more or size == 1):  # job scripts export the size for all ranks
            return None
        raise _half(*(("RANK", "WORLD_SIZE") if size is None else ("WORLD_SIZE", "RANK")), environ)
    local_size = _number(environ, "LOCAL_WORLD_SIZE")
    elastic = bool(environ.get("TORCHELASTIC_RUN_ID"))
    # Wrappers set LOCAL_RANK=0 for ranks that see one device: an index on the host only where the number of ranks is told.
    local = _number(environ, "LOCAL_RANK") if elastic or local_size is not None else None
    if local is not None and local_size is not None and local >= local_size:
        if elastic:
            raise ConfigError(f"LOCAL_RANK: found {local}, but LOCAL_WORLD_SIZE is {local_size}")
        local = None
    return _Source("torchrun" if elastic else "environment", rank, "RANK", size, "WORLD_SIZE", local, local_size)


def _mpi_source(
    environ: Mapping[str, str], names: tuple[str, str | None, tuple[str, ...], tuple[str, ...]]
) -> _Source | None:
    rank_variable, size_variable, locals_, local_sizes = names
    rank = _number(environ, rank_variable)
    size = _number(environ, size_variable) if size_variable else None
    if rank is None:
        if size is not None and size_variable:
            raise _half(size_variable, rank_variable, environ)
        return None
    if size is None and size_variable:
        raise _half(rank_variable, size_variable, environ)
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
    local_size = None
    if environ.get("SLURM_STEP_TASKS_PER_NODE") and (node := _number(environ, "SLURM_NODEID")) is not None:
        local_size = _tasks_of_node(environ, node)
    elif nodes == size:  # a step has a task on each of its nodes
        local_size = 1
    return _Source("slurm", rank, "SLURM_PROCID", size, size_variable, _number(environ, "SLURM_LOCALID"), local_size)


def _tasks_of_node(environ: Mapping[str, str], node: int) -> int:
    """Tasks of one node out of a list such as ``8(x2),4``."""
    name = "SLURM_STEP_TASKS_PER_NODE"
    after = 0
    for part in environ[name].split(","):
        found = _TASKS.fullmatch(part.strip())
        if found is None:
            raise ConfigError(f"{name}: found {environ[name][:80]!r}, expected counts such as 8(x2),4")
        after += int(found[2] or 1)
        if node < after:
            return int(found[1])
    raise ConfigError(f"SLURM_NODEID: found {node}, but {name}={environ[name][:80]!r} is of {after} nodes")


def _agree(environ: Mapping[str, str], inner: _Source, outer: _Source) -> bool:
    """Whether both tell the same rank; False where the outer one has started the daemons of the inner one."""
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
        "task a node; unset the variables of one of them"
    )


def _check_range(source: _Source, size: int) -> None:
    if size < 1:
        raise ConfigError(f"{source.size_variable}: found {size}, expected at least 1")
    if source.rank >= size:
        raise ConfigError(f"{source.rank_variable}: found {source.rank}, but {source.size_variable} is {size}")


def _alone(environ: Mapping[str, str], visible: int | None) -> Bootstrap:
    address = environ.get("MASTER_ADDR")
    port = _port(environ) or _free_port()
    local = _local_rank(environ, 0, 1, visible)
    return Bootstrap(
        0, 1, local, None, None, address or "127.0.0.1", port, "alone", "MASTER_ADDR" if address else "alone"
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
    """Address and port of rank 0, and what they follow from."""
    port = _port(environ)
    launchers = {source.launcher for source in agreeing}
    if address := environ.get("MASTER_ADDR"):
        return address, port or (DEFAULT_PORT if size > 1 else _free_port()), "MASTER_ADDR"
    if size == 1:
        return "127.0.0.1", port or _free_port(), "alone"
    if "slurm" in launchers and (found := _first_host(environ)):
        return found, port or DEFAULT_PORT, "slurm"
    if "mpi" in launchers:
        source = next(source for source in agreeing if source.launcher == "mpi")
        address, free = _address_of_mpi(rank, size, source.rank_variable, source.size_variable, local_size == size)
        return address, port or free, "mpi"
    raise ConfigError("MASTER_ADDR: not set, and nothing else tells the host of rank 0; set it to that host's name")


def _first_host(environ: Mapping[str, str]) -> str | None:
    """The host of a step's first task; None where Slurm's environment has no list of hosts."""
    name = next((n for n in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST") if environ.get(n)), None)
    if name is None:
        return None
    hosts = hosts_of(environ[name], name)
    if environ.get("SLURM_DISTRIBUTION", "").startswith("arbitrary") and len(hosts) > 1:
        raise ConfigError(
            "MASTER_ADDR: not set; under SLURM_DISTRIBUTION=arbitrary rank 0 need not be on the first host: set it to "
            "that of rank 0"
        )
    return hosts[0]


@functools.cache
def _address_of_mpi(rank: int, size: int, rank_variable: str, size_variable: str, one_host: bool) -> tuple[str, int]:
    """Rank 0's address and a free port there, sent to all ranks. Once a process: it is collective."""
    mpi = import_mpi()
    comm = mpi.COMM_WORLD
    _check_mpi(comm.Get_rank(), comm.Get_size(), rank, size, f"{rank_variable}={rank}, {size_variable}={size}")
    line = bytearray(512)
    if rank == 0:
        text = f"{'127.0.0.1' if one_host else socket.gethostname()} {_free_port()}".encode()
        line[: len(text)] = text
    wait = f"topology: rank {rank} has waited {MPI_TIMEOUT_S:g} s for the address of rank 0; MASTER_ADDR would tell it"
    wait_mpi(comm, comm.Ibcast([line, mpi.BYTE], 0), MPI_TIMEOUT_S, wait)
    address, port = line.rstrip(b"\0").decode().split()
    return address, int(port)


def _size_of_mpi(source: _Source) -> int:
    """The world size where the launcher tells the rank alone."""
    comm = import_mpi().COMM_WORLD
    size = int(comm.Get_size())
    _check_mpi(comm.Get_rank(), size, source.rank, size, f"{source.rank_variable}={source.rank}")
    return size


def _check_mpi(rank: int, size: int, told: int, told_size: int, variables: str) -> None:
    if (rank, size) != (told, told_size):
        raise ConfigError(
            f"mpi4py has this process as rank {rank} of {size}, but {variables}: mpi4py is of another MPI than the launcher"
        )


@functools.cache
def _free_port() -> int:
    """A port that was free a moment ago; the same throughout a process."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _port(environ: Mapping[str, str]) -> int | None:
    port = _number(environ, "MASTER_PORT")
    if port is not None and not 0 < port < 1 << 16:
        raise ConfigError(f"MASTER_PORT: found {port}, expected 1 to 65535")
    return port


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


def _half(there: str, missing: str, environ: Mapping[str, str]) -> ConfigError:
    return ConfigError(f"{there}={environ[there]} is set, but {missing} is not; set both or neither")
