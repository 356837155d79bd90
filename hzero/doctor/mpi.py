"""MPI as ranks of mpiexec or srun find it: the library, what it can do, and one compressed collective over it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from hzero.doctor.verdict import GOOD, UNUSABLE, Findings
from hzero.reasons import PeerError
from hzero.topology.bootstrap import Bootstrap
from hzero.topology.mpi import gpu_aware, import_mpi
from hzero.validation import ConfigError

#: What a launcher of MPI gives its ranks. Without it MPI_Init may end the process, as on Cray's login nodes.
_STARTED = ("PMI_RANK", "PMIX_RANK", "PALS_RANKID", "OMPI_COMM_WORLD_RANK")
#: Elements that the collective sums: no multiple of a block.
_NUMEL = 10_001


def started_by_mpi(environ: Mapping[str, str]) -> bool:
    """Whether this process is a rank of MPI."""
    return any(name in environ for name in _STARTED)


def examine_mpi(start: Bootstrap, findings: Findings, timeout_s: float, environ: Mapping[str, str]) -> dict[str, Any]:
    """Library, netmod, provider, whether it is GPU-aware, and the time of an all-reduce in int8. Collective.

    Args:
        start: Of this rank.
        findings: Takes what does not work.
        timeout_s: Longest wait for other ranks.
        environ: The environment of this rank.
    """
    import torch

    try:
        mpi = import_mpi('transport "mpi" needs mpi4py', "as it is, torch alone carries hops")
    except ConfigError as error:
        findings.add(GOOD, str(error))
        return {"library": None, "why": str(error)}
    lines = [" ".join(line.split()) for line in mpi.Get_library_version().splitlines()]
    found = {
        "library": lines[0],
        "device": next((line.partition(": ")[2] for line in lines if line.startswith("MPICH Device")), None),
        "provider": _provider(environ),
        "gpu_aware": gpu_aware(),
        "thread_multiple": mpi.Query_thread() == mpi.THREAD_MULTIPLE,
    }
    if torch.cuda.is_available() and not found["gpu_aware"]:
        findings.add(
            GOOD, f"{lines[0]} does not say that it reads the memory of GPUs: only transport torch can be used on them"
        )
    try:
        found["all_reduce_us"] = _try(start, timeout_s)
    except (ConfigError, PeerError, RuntimeError) as error:
        findings.add(UNUSABLE, f"transport mpi: {error}")
    return found


def _provider(environ: Mapping[str, str]) -> str | None:
    """The provider of libfabric, where it can be told."""
    if "FI_PROVIDER" in environ:
        return environ["FI_PROVIDER"]
    loaded = Path("/proc/self/maps")
    return "cxi" if loaded.exists() and "/libcxi.so" in loaded.read_text() else None


def _try(start: Bootstrap, timeout_s: float) -> float:
    """Median microseconds of an all-reduce in int8 over all ranks, in host memory, once its result is right."""
    import torch
    import torch.distributed as dist

    from hzero.codecs import Codec
    from hzero.collectives import Communicator

    os.environ.update(start.environment())
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    world, times = start.world_size, []
    flat = {"nodes": 1, "gpus_per_node": world, "gcds_per_gpu": 1}
    group = Communicator({"codecs": "int8", "transport": "mpi", "topology": flat})
    tensor = torch.linspace(-1, 1, _NUMEL)
    for _ in range(9):
        dist.barrier()
        begun = time.perf_counter()
        got = group.all_reduce(tensor * (start.rank + 1))
        times.append((time.perf_counter() - begun) * 1e6)
    largest = world * (world + 1) / 2
    bound = 2.4 * Codec.from_config(group.config.codecs.gpu).error_bound(largest)  # both halves, and a fifth
    error = float((got - tensor * largest).abs().max())
    dist.barrier()
    dist.destroy_process_group()
    if not error <= bound:
        raise RuntimeError(f"an all-reduce in int8 is off by {error:g}, at most {bound:g} is right")
    return sorted(times)[len(times) // 2]
