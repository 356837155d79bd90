"""Fit: chooses the layout of a run, from links and memory that all ranks measure."""

from __future__ import annotations

import os
import platform
from collections import Counter
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from hzero.comm import Runtime, WireLog, peers_of
from hzero.comm.lanes import Lanes
from hzero.comm.probe import Probe, coding_s, slowest
from hzero.config import MEASURE, HZeroConfig
from hzero.engine.engine import Owners, ranks_of
from hzero.errors import ConfigError, from_rank_0, of_every_rank
from hzero.program.choice import Choice, Load, Rates, choose, room_of
from hzero.program.shards import ShardPlan
from hzero.topology.links_file import LinksFile, links_for, write_links

#: Measurements of this process, by lanes, and by the ranks that decide, the ranks that share parameters, and their grid. A
#: program may make several engines.
_MEASURED: WeakKeyDictionary[Lanes, dict[tuple[Any, ...], LinksFile]] = WeakKeyDictionary()


def fitted(
    config: HZeroConfig,
    owners: Owners,
    load: Load,
    device: torch.device,
    lanes: Lanes,
    group: dist.ProcessGroup | None = None,
) -> tuple[HZeroConfig, Choice | None]:
    """Chooses the layout of a block with preset ``fit``. Collective.

    Args:
        config: The block.
        owners: The ranks that own primary shards.
        load: The model and its step.
        device: Device on which the model runs.
        lanes: Lanes of the hops.
        group: The ranks that take the same decisions; None is the world.

    Returns:
        The block with shard degrees, and the choice; None if there is one rank.

    Raises:
        ConfigError: The links file or the memory is wrong, or nothing fits.
        HopError: A link fails.
    """
    if owners.grid.world_size == 1:
        return config, None
    free = None if config.memory.device is not None else _least_free(device, group)
    room = room_of(config, owners.grid, load, free)
    links = _links(config, owners, device, lanes, group)
    encode_s, decode_s = links.coding_s or slowest(coding_s(device), device, group)
    together = 1.0 if lanes.order == "strict" else links.together or 0.0
    tiers = {tier: rate for tier in owners.grid.crossed if (rate := links.rate(tier))}
    rates = Rates(tiers, together, encode_s, decode_s)
    choice = choose(config, owners.grid, load, rates, room)
    assert choice.best.config is not None
    return choice.best.config, choice


def _least_free(device: torch.device, group: Any) -> int:
    """Free bytes of the fullest device. CPU ranks share their host's memory. Collective."""
    every = of_every_rank((platform.node(), _free_bytes(device)), group)
    if any(size is None for _, size in every):
        raise ConfigError(
            "hzero.memory.device: missing, and a machine does not tell its free memory; expected bytes, such as 64GB"
        )
    ranks, of_host = Counter(host for host, _ in every), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return min((size or 0) // (max(ranks[host], of_host) if device.type == "cpu" else 1) for host, size in every)


def _free_bytes(device: torch.device) -> int | None:
    """Memory that a device, or the host of CPU ranks, has free; None if it is unknown."""
    if device.type != "cpu":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None


def _links(config: HZeroConfig, owners: Owners, device: torch.device, lanes: Lanes, group: Any) -> LinksFile:
    """The rates of all tiers: from the user's file, or measured now, and then written to that file."""
    kept = None if config.links == MEASURE else Path(config.links)
    if kept and (text := from_rank_0(lambda: _read(kept, owners), group)):
        return LinksFile.model_validate_json(text)
    key = tuple(ranks_of(group)), owners.ranks, owners.grid
    if kept is None and (links := _MEASURED.setdefault(lanes, {}).get(key)):
        return links
    backend = "mpi" if config.transport == "mpi" else dist.get_backend()
    name = "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)
    plan = ShardPlan.from_config(config, owners.grid, owners.rank)
    runtime = Runtime(plan, peers_of(plan, ranks=owners.ranks, lanes=lanes), WireLog(), lanes)
    links = Probe(runtime, device, group).short(backend, name)
    _MEASURED.setdefault(lanes, {})[key] = links
    if kept:
        from_rank_0(lambda: write_links(kept, links, "hzero.links"), group)
    return links


def _read(kept: Path, owners: Owners) -> str:
    """The content of a links file; empty if it does not exist yet, and can be written."""
    try:
        if kept.exists():
            return links_for(kept, owners.grid).model_dump_json(by_alias=True)
    except ConfigError as error:
        raise ConfigError(f"hzero.links: {error}") from None
    except OSError as error:
        raise ConfigError(f"hzero.links: found {str(kept)!r}: {error.strerror}; expected a links file") from None
    if not os.access(kept.parent, os.W_OK):  # before a measurement that would be lost
        raise ConfigError(f"hzero.links: found {str(kept)!r}; expected a file in a folder that you can write to")
    return ""
