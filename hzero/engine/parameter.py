"""Parameters as the engine represents them: keys, sizes, dtypes, shards, and the programs that move them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from hzero.codecs import exact
from hzero.codecs.codec import FLOAT_DTYPES
from hzero.codecs.formats import chunk_numel, owned_numel
from hzero.comm import Bucket, Chain
from hzero.config import PLAIN
from hzero.program.program import StagePrograms, changes_program
from hzero.program.shards import ShardPlan

#: Name parts that module wrappers add.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
#: Number of parameter sets with prepared messages. Experts that are chosen at random make many sets.
READY = 1024


class Route:
    """The programs for parameters that share a shard plan. Made once.

    Args:
        plan: The shard plan.
        number: Number of the route, by which ranks order routes.

    Attributes:
        plan: The plan.
        number: The number.
        programs: The programs of the plan.
        copies: Whether secondary partitions are kept.
        lossy: Whether a hop of weights has a lossy codec.
        sums_travel: Whether a hop of gradients has codec ``none``. The library may then compute sums on the way.
        changes: Returns the program of a refresh that sends changes, by the bytes of a record.
    """

    def __init__(self, plan: ShardPlan, number: int) -> None:
        self.plan, self.number = plan, number
        self.programs, self.copies = StagePrograms.of(plan), plan.keeps_copies
        self.lossy = any(not hop.codec.traits.exact for hop in plan.gather_hops())
        self.sums_travel = any(hop.codec.traits.plain for hop in plan.reduce_hops())
        self.changes = functools.lru_cache(READY)(functools.partial(changes_program, plan))


@dataclass(eq=False)
class Parameter:
    """One parameter, or several parameters that a front end keeps in one flat tensor.

    Attributes:
        key: A number, the same on all ranks, by which ranks order parameters.
        name: Name for messages.
        numel: Elements of the whole parameter. The front end updates it.
        dtype: Dtype of the weights on the wire; uint8 for the bytes of codes.
        route: The programs.
        shard: Returns this rank's primary shard, flat, ``[chunk]`` with or without padding at its end, on the device.
        trained: Whether the optimizer changes it.
        urgent: Whether it is used right after a step, so that its refresh must not wait for others.
        code_bytes: Bytes per element if the parameter travels as bytes; otherwise 1. Shards consist of whole elements.
        unit: The unit with which it is gathered, if the front end has units.
        secondary: Secondary partition ``[rows][record]``, uint8, or weights ``[world * chunk]`` if the plan keeps them decoded.
            None if there is no copy, or none yet. The engine sets this and the following attributes.
        chunk: Elements of each shard of the secondary partition.
        refreshing: The chain that makes the secondary partition, even after it has ended.
        fingerprint: Checksum of the `memory` from which the secondary partition is made, int64 ``[]``. None if there is none.
        known: Whether all ranks hold the bits of the last refresh, so that the next one may send changes.
    """

    key: int
    name: str
    numel: int
    dtype: torch.dtype
    route: Route
    shard: Callable[[], torch.Tensor]
    trained: bool = True
    urgent: bool = False
    code_bytes: int = 1
    unit: Any = None
    secondary: torch.Tensor | None = None
    chunk: int = 0
    refreshing: Chain[None] | None = None
    fingerprint: torch.Tensor | None = None
    known: bool = False

    @property
    def changes(self) -> bool:
        """Whether the next refresh sends changes, unless they need more bytes than whole weights."""
        return self.known and self.route.plan.exact and self.dtype in exact.CLASS_OF

    def memory(self) -> list[torch.Tensor]:
        """Returns the tensors of this rank's primary shard, which the user may write at any time."""
        return [self.shard()]


def bucket_of(params: list[Parameter], dtype: torch.dtype, role: str) -> Bucket:
    """Returns the bucket of a message of parameters that share a route."""
    plan = params[0].route.plan
    items = [param.code_bytes if dtype == torch.uint8 else 1 for param in params]
    chunks = [chunk_numel(param.numel, plan.grid.world_size) for param in params]
    owned = [owned_numel(param.numel, chunk, plan.rank) for param, chunk in zip(params, chunks)]
    sizes = [tuple(number * item for number, item in zip(numbers, items)) for numbers in (chunks, owned)]
    return Bucket(tuple(param.key for param in params), sizes[0], dtype, role, plan.channel, owned=sizes[1])


def alike(
    params: Iterable[Parameter], kind: Callable[[Parameter], Any] = lambda param: param.route.number
) -> list[list[Parameter]]:
    """Groups parameters by kind, such as by route, in an order that is the same on all ranks."""
    kinds: dict[Any, list[Parameter]] = {}
    for param in params:
        kinds.setdefault(kind(param), []).append(param)
    return [kinds[one] for one in sorted(kinds)]


def routes_of(
    module: torch.nn.Module,
    plan: ShardPlan,
    part_of: Callable[[Any], ShardPlan | None] = lambda _: None,
    packed: Collection[torch.nn.Parameter] = (),
) -> tuple[dict[torch.nn.Parameter, Route], set[torch.nn.Parameter]]:
    """Returns the route of every parameter of a model: the usual one, or one for each different plan of excepted parameters.

    Args:
        module: The model.
        plan: The shard plan. Its exceptions are patterns for the names of parameters in ``module``.
        part_of: Returns the plan of a parameter that only some ranks share, see `ShardPlan.of_part`; None for others.
        packed: Parameters that hold codes, although `holds_codes` finds no sign of it.

    Returns:
        The routes, and the parameters that travel as bytes.

    Raises:
        ConfigError: As in `ShardPlan.plans_of`.
    """
    names: dict[torch.nn.Parameter, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):  # a pattern may use any name of a tied one
        names.setdefault(param, []).append(plain_name(name))
    codes = {param for one in module.modules() for param in one.parameters(recurse=False) if holds_codes(param, one)}
    codes.update(packed)
    # The usual route is number 0, even if all parameters are excepted.
    routes, found = {(plan.way, False): Route(plan, 0)}, dict[torch.nn.Parameter, Route]()
    for param, own in zip(names, plan.plans_of(list(names.values()))):
        if (part := part_of(param)) is not None:
            own = (
                part if own is plan else part.with_codec(own.codecs.weights["intra_package"])
            )  # one codec on all tiers
        way = own.with_codec(PLAIN) if param in codes else own
        if (kind := (way.way, param in codes)) not in routes:
            routes[kind] = Route(way, len(routes))
        found[param] = routes[kind]
    return found, codes


def plain_name(name: str) -> str:
    """Returns the name of a module or parameter without the parts that activation checkpointing and torch.compile add."""
    for part in _WRAPPERS:
        name = name.replace(part, "")
    return name


def holds_codes(param: torch.Tensor, module: torch.nn.Module) -> bool:
    """Whether a parameter travels as bytes, because it contains codes or numbers of a dtype that no codec supports.

    Quantised weights may have a floating dtype and contain packed codes (``bnb_4bit_quant_storage``, HQQ's ``view_as_float``).
    Their library then attaches a quantisation state. A lossy codec would destroy the codes.

    Args:
        param: The parameter.
        module: The module that owns it.
    """
    if param.dtype not in FLOAT_DTYPES:
        return True
    if getattr(param, "quant_state", None) is not None:  # bitsandbytes, a Params4bit
        return True
    if param is getattr(module, "W_q", None):  # HQQ
        return "nbits" in (getattr(module, "meta", None) or ())
    return param is getattr(module, "weight", None) and getattr(module, "quant_state", None) is not None
