"""One of 16 ranks that stand for 2 Frontier nodes, for test_launch.py.

Each rank is given the environment and the sysfs tree that a way of launching would give it; every way has to find the same
machine, and the collectives on it the right results.
"""

from __future__ import annotations

import json
import os
import random
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from hzero.bootstrap import bootstrap
from hzero.config import TIERS
from hzero.topology.discovery import Discovery, discover
from hzero.validation import ConfigError
from tests.topology import trees

WORLD, NODES, LOCAL = 16, 2, 8
#: GCDs by local rank with `--gpu-bind=closest` (OLCF user guide).
OLCF = (4, 5, 2, 3, 6, 7, 0, 1)
SCRAMBLED = random.Random(4).sample(range(WORLD), WORLD)


def one_device(rank: int) -> tuple[int, dict[str, str]]:
    """``srun -n16 --gpus-per-task=1 --gpu-bind=closest``: all ranks see device 0."""
    node, local = divmod(rank, LOCAL)
    return node, {**_slurm(rank, local), "ROCR_VISIBLE_DEVICES": str(OLCF[local])}


def one_device_cyclic(rank: int) -> tuple[int, dict[str, str]]:
    """The same with ``-m cyclic``: neighbours in rank are on different nodes."""
    local, node = divmod(rank, NODES)
    return node, {**_slurm(rank, local), "ROCR_VISIBLE_DEVICES": str(OLCF[local])}


def own_tree(rank: int) -> tuple[int, dict[str, str]]:
    """Task cgroups: a rank can read its own device alone."""
    node, local = divmod(rank, LOCAL)
    return node, {**_slurm(rank, local), "SEES": str(OLCF[local])}


def all_devices(rank: int) -> tuple[int, dict[str, str]]:
    """torchrun: all devices are visible, LOCAL_RANK chooses."""
    node, local = divmod(rank, LOCAL)
    return node, {"LOCAL_RANK": str(local)}


def rocr_remap(rank: int) -> tuple[int, dict[str, str]]:
    """A wrapper that lists the devices in OLCF's order."""
    node, local = divmod(rank, LOCAL)
    return node, {"LOCAL_RANK": str(local), "ROCR_VISIBLE_DEVICES": ",".join(map(str, OLCF))}


def hip_remap_of_rocr(rank: int) -> tuple[int, dict[str, str]]:
    """HIP's list counts what ROCR's list leaves."""
    node, local = divmod(rank, LOCAL)
    lists = {"ROCR_VISIBLE_DEVICES": "7,6,5,4,3,2,1,0", "HIP_VISIBLE_DEVICES": "6,7,4,5,2,3,0,1"}
    return node, {"LOCAL_RANK": str(local), **lists}


def cuda_list(rank: int) -> tuple[int, dict[str, str]]:
    """CUDA_VISIBLE_DEVICES, which HIP reads as well."""
    node, local = divmod(rank, LOCAL)
    return node, {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": str(OLCF[local])}


def strided(rank: int) -> tuple[int, dict[str, str]]:
    """The first dies of all packages before the second ones."""
    node, local = divmod(rank, LOCAL)
    return node, {"LOCAL_RANK": str(local), "ROCR_VISIBLE_DEVICES": "0,2,4,6,1,3,5,7"}


def scrambled(rank: int) -> tuple[int, dict[str, str]]:
    """Ranks in no order at all."""
    node, device = divmod(SCRAMBLED[rank], LOCAL)
    return node, {"LOCAL_RANK": "0", "ROCR_VISIBLE_DEVICES": str(device)}


STYLES: tuple[Callable[[int], tuple[int, dict[str, str]]], ...] = (
    one_device, one_device_cyclic, own_tree, all_devices, rocr_remap, hip_remap_of_rocr, cuda_list, strided, scrambled,
)  # fmt: skip


def _slurm(rank: int, local: int) -> dict[str, str]:
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local),
        "SLURM_NTASKS": str(WORLD),
        "SLURM_STEP_NUM_TASKS": str(WORLD),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "localhost",
    }


def write_trees(folder: Path) -> None:
    """One tree a node with all devices readable, and one a device in which a cgroup hides the others."""
    trees.frontier(folder / "all")
    for device in range(LOCAL):
        trees.frontier(folder / f"sees{device}", unreadable=set(range(LOCAL)) - {device})


def environment(folder: Path, style: Callable[[int], tuple[int, dict[str, str]]], rank: int) -> dict[str, str]:
    """What a rank finds around it under a way of launching, in a real world of the same rank."""
    node, said = style(rank)
    tree = f"sees{said.pop('SEES')}" if "SEES" in said else "all"
    return {**os.environ, **said, "NCCL_HOSTID": f"frontier0000{node + 1}", "HZERO_SYSFS": str(folder / tree)}


def physical(found: Discovery) -> dict[str, list[list[str]]]:
    """The tier groups as hosts and bus ids, whatever the ranks; on rank 0."""
    assert found.grid is not None
    names = [f"{r.host} {r.device.bus}" for r in found.reports if r.device is not None]
    return {
        tier: sorted({tuple(sorted(names[r] for r in found.grid.tier_group(rank, tier))) for rank in range(WORLD)})  # type: ignore[misc]
        for tier in TIERS
    }


def _discover(folder: Path, style: Callable[[int], tuple[int, dict[str, str]]], rank: int) -> Discovery:
    return discover(environ=environment(folder, style, rank), timeout_s=60)


def check(folder: Path, rank: int) -> dict[str, object]:
    """Discovers under every style, and where one rank is wrong."""
    found = {style.__name__: _discover(folder, style, rank) for style in STYLES}
    outcome: dict[str, object] = {
        "grids": {name: [str(f.grid), f.grid.order, f.grid.ranks] for name, f in found.items() if f.grid is not None},
        "uneven": _error(folder, rank, uneven),
        "failing": _error(folder, rank, failing),
    }
    if rank == 0:
        outcome["physical"] = {name: physical(each) for name, each in found.items()}
    return {**outcome, **_check_with_torch(folder, rank, found)}


def _check_with_torch(folder: Path, rank: int, found: dict[str, Discovery]) -> dict[str, object]:
    """Discovers again once the process group is up, and tries the collectives."""
    import torch
    import torch.distributed as dist

    os.environ.update(bootstrap(visible=0).environment())
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=90))
    again = discover(environ=environment(folder, scrambled, rank), timeout_s=60)

    from tests.collectives import tiered_checks

    tiered_checks.GRIDS[WORLD] = [
        found[name].required_grid() for name in ("one_device", "one_device_cyclic", "scrambled")
    ]
    tiered_checks.check_gather_exact()
    tiered_checks.check_reduce_exact()
    dist.barrier()
    dist.destroy_process_group()
    return {"after": again.grid == found["scrambled"].grid}


def uneven(rank: int) -> tuple[int, dict[str, str]]:
    """The last rank has found its device on a third node."""
    node, device = (2, 0) if rank == WORLD - 1 else divmod(rank, LOCAL)
    return node, {"LOCAL_RANK": "0", "ROCR_VISIBLE_DEVICES": str(device)}


def failing(rank: int) -> tuple[int, dict[str, str]]:
    """One rank asks for a device that its node does not have."""
    node, local = divmod(rank, LOCAL)
    return node, {"LOCAL_RANK": "0", "ROCR_VISIBLE_DEVICES": "99" if rank == 5 else str(local)}


def _error(folder: Path, rank: int, style: Callable[[int], tuple[int, dict[str, str]]]) -> str:
    try:
        _discover(folder, style, rank).required_grid()
    except ConfigError as error:
        return str(error)
    return ""


def leave_outcome(folder: Path) -> int:
    """Leaves ``rank<r>.json`` in the folder; a failure is in it."""
    rank = int(os.environ["RANK"])
    try:
        outcome = check(folder, rank)
    except BaseException:
        outcome = {"failure": traceback.format_exc()}
    (folder / f"rank{rank}.partial").write_text(json.dumps(outcome))
    (folder / f"rank{rank}.partial").rename(folder / f"rank{rank}.json")
    return int("failure" in outcome)
