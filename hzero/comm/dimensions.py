"""Parallel dimensions of a model: a communicator for each, with the codecs that the ``"hzero"`` block gives it."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any

import torch.distributed as dist

from hzero.block import find, load
from hzero.comm.communicator import Communicator
from hzero.comm.process_groups import world_timeout
from hzero.comm.settings import USES, CommunicatorConfig, Use
from hzero.config import DIMENSIONS, UNCODED, Dimension, HZeroConfig
from hzero.parsing import parse_config
from hzero.topology import Grid, resolve_grid
from hzero.validation import ConfigError, one_of

#: Those that live, which the next engine asks; see `in_use`.
_MADE: weakref.WeakSet[Communicator] = weakref.WeakSet()


def for_dimension(
    dimension: Dimension,
    config: Any,
    group: dist.ProcessGroup | None = None,
    *,
    grid: Grid | None = None,
    uses: Collection[Use] = USES,
) -> Communicator:
    """A communicator for the activations of one parallel dimension, with the codecs of ``codecs.tensor`` and so on.

    Make it before the engine, and give it to `hzero.comm.activations`. An engine with the stage that is built after it
    counts its hops in its own wire log and traces, under the dimension's name. Its ranks keep their places in the world's
    grid.

    Args:
        dimension: ``tensor``, ``sequence`` or ``expert``; an engine of a ``PipelineModule`` makes those of ``pipeline`` and
            ``optimizer`` itself.
        config: A DeepSpeed configuration, as for ``deepspeed.initialize``. One without block has no codecs.
        group: The ranks that share the dimension; None takes the world.
        grid: Of the world; None takes the block's topology. Where that is discovered, all ranks of the world call this at the
            same point.
        uses: As for a `Communicator`.

    A wait lasts as long as the world's timeout allows: groups that others make do not inherit it.

    Raises:
        ConfigError: The configuration cannot be read, its block is wrong, or the group fills the tiers unevenly.
    """
    if dimension not in DIMENSIONS:
        raise one_of("for_dimension: dimension", dimension, DIMENSIONS)
    parsed = config if isinstance(config, HZeroConfig) else None
    if parsed is None and config is not None:
        loaded = load(config)
        if loaded is None:
            raise ConfigError(
                f"for_dimension: config: found {config!r}, expected a DeepSpeed configuration or the path of one"
            )
        if (block := find(loaded)) is not None:
            parsed = parse_config(block)
    codecs = parsed.codecs[dimension] if parsed is not None else UNCODED
    if grid is None:
        grid = resolve_grid("discover" if parsed is None else parsed.topology, dist.get_world_size())
    if group is not None:
        grid = grid.of_ranks(dist.get_process_group_ranks(group))
    common = () if parsed is None else ("node_all_gather", "checksum", "transport")
    settings = CommunicatorConfig(codecs=codecs, gather=codecs, **{key: getattr(parsed, key) for key in common})
    made = Communicator(settings, group, timeout=world_timeout(), role=dimension, grid=grid, uses=uses)
    _MADE.add(made)
    return made


def in_use() -> list[Communicator]:
    """The communicators that `for_dimension` has made and somebody still holds."""
    return list(_MADE)
