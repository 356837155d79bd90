"""Fit: chooses the layout of a run, from links and memory that all ranks measure."""

from __future__ import annotations

import platform
from collections import Counter
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from hzero.codecs import exact
from hzero.comm import Runtime, WireLog, peers_of
from hzero.comm.lanes import Lanes
from hzero.comm.probe import Probe, slowest
from hzero.comm.wirelog import HopTimer
from hzero.config import FIT, MEASURE, HZeroConfig
from hzero.engine.engine import Owners
from hzero.errors import ConfigError, from_rank_0, of_every_rank
from hzero.program.choice import Choice, Load, Rates, choose, room_of
from hzero.program.shards import ShardPlan
from hzero.topology.links_file import LinksFile, links_for, write_links

#: Weights with which codec `exact` is timed.
_WEIGHTS = 1 << 18
#: Measurements of this process, by lanes and ranks: a program may make several engines.
_MEASURED: WeakKeyDictionary[Lanes, dict[tuple[int, ...], LinksFile]] = WeakKeyDictionary()


def fitted(
    config: HZeroConfig,
    owners: Owners,
    load: Load,
    device: torch.device,
    lanes: Lanes,
    group: dist.ProcessGroup | None = None,
) -> tuple[HZeroConfig, Choice | None]:
    """Chooses the layout of a block with preset ``fit``; returns any other block as it is. Collective.

    Args:
        config: The block.
        owners: The ranks that own primary shards.
        load: The model and its step.
        device: Device on which the model runs.
        lanes: Lanes of the hops.
        group: The ranks that take the same decisions; None is the world.

    Returns:
        The block with shard degrees, and the choice; None if nothing was chosen.

    Raises:
        ConfigError: The links file or the memory is wrong, or nothing fits.
        HopError: A link fails.
    """
    if config.preset != FIT or owners.grid.world_size == 1:
        return config, None
    free = None if config.memory.device is not None else _least_free(device, group)
    room = room_of(config, owners.grid, load, free)
    links = _links(config, owners, device, lanes, group)
    together = 1.0 if lanes.order == "strict" else links.together or 0.0
    rates = Rates(
        {tier: rate for tier in owners.grid.crossed if (rate := links.rate(tier))},
        together,
        *(time / _WEIGHTS for time in slowest(_coding_s(device), device, group)),
    )
    choice = choose(config, owners.grid, load, rates, room)
    assert choice.best.config is not None
    return choice.best.config, choice


def _least_free(device: torch.device, group: Any) -> int:
    """Free bytes of the fullest device. CPU ranks share their host's memory. Collective."""
    every = of_every_rank((platform.node(), _free_bytes(device)), group)
    ranks = Counter(host for host, _ in every)
    return min(size // (ranks[host] if device.type == "cpu" else 1) for host, size in every)


def _free_bytes(device: torch.device) -> int:
    """Memory that a device, or the host of CPU ranks, has free."""
    if device.type != "cpu":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        raise ConfigError(
            "hzero.memory.device: missing, and this machine does not tell its free memory; expected bytes, such as 64GB"
        ) from None


def _links(config: HZeroConfig, owners: Owners, device: torch.device, lanes: Lanes, group: Any) -> LinksFile:
    """The rates of all tiers: from the user's file, or measured now, and then written to that file."""
    kept = None if config.links == MEASURE else Path(config.links)
    if kept and (text := from_rank_0(lambda: _read(kept, owners), group)):
        return LinksFile.model_validate_json(text)
    if kept is None and (links := _MEASURED.setdefault(lanes, {}).get(owners.ranks)):
        return links
    backend = "mpi" if config.transport == "mpi" else dist.get_backend()
    name = "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)
    plan = ShardPlan.from_config(config, owners.grid, owners.rank)
    runtime = Runtime(plan, peers_of(plan, ranks=owners.ranks, lanes=lanes), WireLog(), lanes)
    links = Probe(runtime, device, group).short(backend, name)
    _MEASURED.setdefault(lanes, {})[owners.ranks] = links
    if kept:
        from_rank_0(lambda: write_links(kept, links, "hzero.links"), group)
    return links


def _read(kept: Path, owners: Owners) -> str:
    """The content of a links file; empty if it does not exist yet."""
    return links_for(kept, owners.grid).model_dump_json(by_alias=True) if kept.exists() else ""


def _coding_s(device: torch.device) -> tuple[float, float]:
    """Seconds to measure and encode `_WEIGHTS` weights in codec ``exact``, and to decode them."""
    old = torch.linspace(0.001, 1, _WEIGHTS, device=device).bfloat16()
    new = (old.view(torch.int16) + (torch.arange(_WEIGHTS, device=device) % 3).to(torch.int16)).view(torch.bfloat16)
    layout = exact.Layout.of((_WEIGHTS,))

    def encoded() -> torch.Tensor:
        head = old.new_empty(layout.head, dtype=torch.uint8)
        exact.measure([new], [old], head)
        record = head.new_empty(layout.record_bytes(int(exact.words_of(head))))
        record[: len(head)] = head
        exact.encode([new], [old], record)
        return record

    record, copy = encoded(), old.clone().view(1, -1)
    exact.decode(record, [copy], [0])  # both are compiled now
    encode = HopTimer(device)
    record = encoded()
    encode.stop()
    decode = HopTimer(device)
    exact.decode(record, [copy.copy_(old)], [0])
    decode.stop()
    return encode.seconds(), decode.seconds()
