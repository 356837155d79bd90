"""Which rank this process is, from the variables of the launcher that has started it.

Torch, Accelerate and DeepSpeed read RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, which torchrun sets. `launched`
sets them under srun and mpiexec too. One launcher may run inside another, such as torchrun inside srun: the outer one then
starts a daemon on each node, and the inner one the ranks.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from hzero.launch import die_with_parent
from hzero.validation import ConfigError

#: MASTER_PORT if nothing sets it: what OLCF's guide for PyTorch on Frontier uses.
DEFAULT_PORT = 3442

# Rank, world size, index and count of the ranks on this host, the innermost launcher first. OMPI_*: Open MPI, "Environment
# variables set for MPI applications". PMI_*: MPICH's Hydra, with MPI_* Intel MPI, with PMI_LOCAL_* Cray's PMI. PALS_*: Cray's
# mpiexec.
_VARIABLES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
    ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
)
# slurm.h: SLURM_INTERACTIVE_STEP, SLURM_BATCH_SCRIPT, SLURM_EXTERN_CONT and SLURM_PENDING_STEP. Their process is no rank,
# although it has a SLURM_PROCID.
_NO_RANKS = {"", "4294967290", "4294967291", "4294967292", "4294967293", "batch", "extern", "interactive"}
#: The first host of a list such as ``frontier[00001-00003,00010],login1``.
_HOST = re.compile(r"((?:[A-Za-z0-9._-]|\[[0-9]{1,18}(?:[-,][0-9]{1,18})*\])+)(?:,|$)")


def launched() -> bool:
    """Whether torchrun, srun or mpiexec has started this process as one of several ranks.

    If so, the variables that torch.distributed, Accelerate and DeepSpeed read are in the environment afterwards.

    Raises:
        ConfigError: As `rank_variables`.
    """
    found = rank_variables()
    os.environ.update(found)
    if os.environ.get("TORCHELASTIC_RUN_ID"):
        die_with_parent()  # SIGKILL may end torchrun's agent. Daemons of Slurm and MPI clean up by themselves
    return bool(found)


def rank_variables(environ: Mapping[str, str] = os.environ, visible: int | None = None) -> dict[str, str]:
    """RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, and LOCAL_WORLD_SIZE if known; empty for a single process.

    Args:
        environ: The environment.
        visible: Devices that this process sees; torch is asked if it is None and matters.

    Raises:
        ConfigError: A variable is no number, two launchers contradict each other, the local index is beyond the visible
            devices, or nothing states the master address. The message names the variables.
    """
    sources, halves = [], []
    for names in _VARIABLES:
        rank, size, local, local_size = (_number(environ, name) for name in names)
        if names[0] == "SLURM_PROCID":
            if environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", "")) in _NO_RANKS:
                continue
            nodes = _number(environ, "SLURM_STEP_NUM_NODES")  # a step has a task on each of them
            local_size = size // nodes if size and nodes and size % nodes == 0 else None
        if rank is not None and size is not None:
            sources.append((rank, size, local, local_size, names))
        elif rank or (size or 1) > 1:
            halves.append(names)
    if not sources and halves:
        raise ConfigError(f"{halves[0][0]}, {halves[0][1]}: found one of them; expected both, or RANK and WORLD_SIZE")
    if not sources or sources[0][1] == 1:
        return {}
    rank, size, *_, names = sources[0]
    if rank >= size:
        raise ConfigError(f"{names[0]}: found {rank}, but {names[1]} is {size}")
    agreeing = [source for source in sources if source[:2] == (rank, size)]
    for outer_rank, outer_size, *_, outer in sources:
        # An outer launcher that starts fewer processes has started the daemons of the inner one.
        if (outer_rank, outer_size) != (rank, size) and outer_size >= size and not environ.get("TORCHELASTIC_RUN_ID"):
            raise ConfigError(
                f"{names[0]}={rank} of {names[1]}={size} and {outer[0]}={outer_rank} of {outer[1]}={outer_size} contradict "
                "each other; unset the variables of one of these launchers"
            )
    local = next((source[2] for source in agreeing if source[2] is not None), None)
    local_size = next((source[3] for source in agreeing if source[3] is not None), None)
    found = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": _device(_number(environ, "LOCAL_RANK"), local, visible)}
    found |= {"MASTER_PORT": _number(environ, "MASTER_PORT") or DEFAULT_PORT}
    found |= {"LOCAL_WORLD_SIZE": local_size} if local_size is not None else {}
    address = environ.get("MASTER_ADDR") or (
        "127.0.0.1" if size == local_size else _first_host(environ, agreeing[-1][4])
    )
    return {**{name: str(value) for name, value in found.items()}, "MASTER_ADDR": address}


def _device(given: int | None, local: int | None, visible: int | None) -> int:
    """Index among the visible devices: LOCAL_RANK, otherwise the launcher's index on the host."""
    local = local if given is None else given
    if local == 0:
        return 0
    if visible is None:
        import torch

        visible = torch.cuda.device_count()
    if visible == 1:
        return 0  # as under --gpus-per-task=1: DeepSpeed binds device(LOCAL_RANK)
    if visible and (local is None or local >= visible):
        raise ConfigError(f"LOCAL_RANK: found {local}; expected 0 to {visible - 1}, the visible devices")
    return local or 0


def _first_host(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    """The host of a step's first task."""
    hosts = environ.get("SLURM_STEP_NODELIST", "") if names[0] == "SLURM_PROCID" else ""
    found = _HOST.match(hosts)
    if found is None or environ.get("SLURM_DISTRIBUTION", "").startswith("arbitrary"):
        raise ConfigError("MASTER_ADDR: missing; set it to the host of rank 0")
    return re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", found[1])


def _number(environ: Mapping[str, str], variable: str) -> int | None:
    value = environ.get(variable)
    if not value:
        return None
    if not (value.isascii() and value.isdigit() and len(value) < 10):
        raise ConfigError(f"{variable}: found {value[:40]!r}, expected a number")
    return int(value)
