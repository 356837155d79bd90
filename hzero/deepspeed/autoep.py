"""DeepSpeed's AutoEP: the partition of experts, and exchanges of tokens, tier by tier and with the codecs of the block.

DeepSpeed partitions each expert over its expert-data-parallel group, and all other parameters over the world. The stage has a
shard plan for each of these two partitions, with its own tiers and lanes. Gradients of both are divided by the world size.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.comm import comm

from hzero.block import KEY
from hzero.calls import attributes
from hzero.comm import Communicator, for_dimension
from hzero.comm.activations import exchange_rows
from hzero.comm.lanes import Lanes
from hzero.config import HZeroConfig
from hzero.engine.engine import Owners, ranks_of
from hzero.errors import ConfigError, agreed
from hzero.program.shards import ShardPlan
from hzero.topology import Grid


def is_expert(param: Any) -> bool:
    """Returns whether a parameter belongs to an expert of AutoEP."""
    return getattr(param, "ds_zero_placement_family", None) == "autoep_expert"


def parts(module: torch.nn.Module, config: HZeroConfig, world: Grid) -> list[tuple[ShardPlan, Owners]]:
    """Returns the plan and the owners of the experts; empty without experts. Collective over the world.

    Args:
        module: An engine's model, whose parameters DeepSpeed has partitioned.
        config: The block.
        world: Grid of the world.

    Raises:
        ConfigError: A group of ranks with the same experts does not fill the tiers evenly.
    """
    expert: Any = next(filter(is_expert, module.parameters()), None)
    if expert is None:
        return []
    with agreed():
        ranks = ranks_of(expert.ds_process_group)
        owners = Owners.of_ranks(ranks, world, dist.get_rank(), "expert_parallel.autoep_size")
        plan = ShardPlan.of_part(config, owners.grid, owners.rank, "experts")
    return [(plan, owners)]


def codes_tokens(config: HZeroConfig, group: Grid) -> bool:
    """Returns whether a codec applies to the tokens that a group of ranks exchanges.

    Raises:
        ConfigError: The codec has no fixed size, or the block has checksums too. The user has written codecs for other tiers
            only.
    """
    codecs = {f"codecs.expert.{tier}": config.codecs.expert[tier] for tier in group.crossed}
    if all(codec.traits.plain for codec in codecs.values()):
        if "expert" in config.codecs.dimensions:
            found = f"none on the tiers that groups of {group.world_size} ranks cross ({', '.join(group.crossed)})"
            raise ConfigError(f"{KEY}.codecs.expert: found {found}; expected a codec on one of them")
        return False
    refused = [f"{key}: found {codec.codec!r}" for key, codec in codecs.items() if not codec.traits.fixed]
    if refused := ["checksum: found True"] * config.checksum + refused:
        raise ConfigError(f"{KEY}.{refused[0]} with coded tokens; expected codecs of fixed size, and no checksums")
    return True


def take_over(module: torch.nn.Module, config: HZeroConfig, world: Grid, lanes: Lanes) -> Communicator | None:
    """Makes AutoEP's layers exchange tokens with a communicator of dimension ``expert``. Collective over the world.

    If no tier that the exchanges cross has a codec, DeepSpeed's exchanges remain. With order ``strict``, they and the exchanges
    of counts have a place in the order of the hops, for all engines of this process.

    Args:
        module: An engine's model, with or without layers of AutoEP.
        config: The block.
        world: Grid of the world.
        lanes: Lanes that run the stage's hops.

    Returns:
        The communicator. None if DeepSpeed's exchanges remain.

    Raises:
        ConfigError: A group of ranks that exchange tokens does not fill the tiers evenly. See also `codes_tokens`.
    """
    modules: list[Any] = list(module.modules())
    layers = [one for one in modules if getattr(one, "_is_autoep_layer", False) and one.ep_size > 1]
    if not layers:
        return None
    if lanes.order == "strict":
        from deepspeed.module_inject import auto_ep_layer  # older releases lack it

        ordered = {"all_to_all_single": partial(lanes.between, comm.all_to_all_single)}
        auto_ep_layer.dist = SimpleNamespace(**{**vars(comm), **ordered})
    group = layers[0].ep_group  # of all layers, since expert_parallel has one autoep_size
    with agreed():  # groups may cross different tiers
        coded = codes_tokens(config, world.of_ranks(ranks_of(group), "expert_parallel.autoep_size"))
    if not coded:
        return None
    made = for_dimension("expert", config, group, grid=world, uses=())
    for layer in layers:
        layer.hzero_group, layer.forward = made, partial(_forward, type(layer).forward, layer)
    return made


def _forward(stock: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs the forward of a layer with the communicator's all-to-all."""
    from deepspeed.module_inject import auto_ep_layer  # older releases lack it

    def exchange(_: Any, tokens: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        return exchange_rows(tokens, layer.hzero_group, sent, received)

    with attributes((auto_ep_layer, "_AllToAllV", SimpleNamespace(apply=exchange))):
        return stock(layer, *args, **kwargs)
