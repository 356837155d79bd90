"""Parameters as the engine sees them: keys, sizes, types and shards; and the programs by which each travels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from hzero.codecs.codec import FLOAT_DTYPES
from hzero.codecs.formats import chunk_numel, owned_numel
from hzero.comm import Bucket, Chain
from hzero.config import PLAIN
from hzero.plan.program import StagePrograms
from hzero.plan.shards import ShardPlan

#: Parts of names that wrappers of modules add.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
#: Sets of parameters whose messages are kept ready; experts that are chosen by chance make many.
READY = 1024


class Route:
    """The programs of parameters that have one plan, made once.

    Args:
        plan: The shard plan.
        number: Of the route, by which ranks order routes alike.

    Attributes:
        plan: The plan.
        number: The number.
        programs: Its programs.
        copies: Whether resident copies are kept.
        lossy: Whether a hop of weights loses something.
        sums_travel: Whether a hop of gradients has codec ``none``, so that sums travel: the library may make them on its way.
    """

    def __init__(self, plan: ShardPlan, number: int) -> None:
        self.plan, self.number = plan, number
        self.programs, self.copies = StagePrograms.of(plan), plan.keeps_copies
        self.lossy = any(not hop.codec.traits.exact for hop in plan.gather_hops())
        self.sums_travel = any(hop.codec.traits.plain for hop in plan.reduce_hops())


@dataclass(eq=False)
class Parameter:
    """One parameter, or several that a front end keeps in one flat tensor.

    Attributes:
        key: A number, the same on all ranks, by which ranks order parameters alike.
        name: For messages.
        numel: Elements of the whole. The front end sets it when it changes.
        dtype: Type in which the weights travel: uint8 for the bytes of codes.
        route: The programs.
        shard: Gives this rank's primary shard, flat, ``[chunk]`` with or without padding at its end, on the device.
        trained: Whether the optimizer changes it.
        urgent: Whether it is needed right after a step, so that its refresh must not wait for others.
        code_bytes: Bytes of an element whose bytes travel; otherwise 1. Shards hold whole elements.
        unit: What it is gathered with, if the front end has units.
        resident: Resident payload ``[rows][record]``, uint8, or weights ``[world * chunk]`` if the plan keeps them decoded. None
            if there is no copy, or none yet. This and what follows is the engine's.
        chunk: Elements of each shard of the resident copy.
        refresh: The chain that makes the resident copy.
        age: Refreshes of differences since the last one of whole weights; None: the next one sends whole weights.
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
    resident: torch.Tensor | None = None
    chunk: int = 0
    refresh: Chain[None] | None = None
    age: int | None = None

    @property
    def differs(self) -> bool:
        """Whether the next refresh sends a difference."""
        return self.age is not None and self.age + 1 < self.route.plan.differences


def bucket_of(params: list[Parameter], dtype: torch.dtype, role: str) -> Bucket:
    """Parameters of one route as the tensors of one message."""
    plan = params[0].route.plan
    items = [param.code_bytes if dtype == torch.uint8 else 1 for param in params]
    chunks = [chunk_numel(param.numel, plan.grid.world_size) for param in params]
    owned = [owned_numel(param.numel, chunk, plan.rank) for param, chunk in zip(params, chunks)]
    sizes = [tuple(number * item for number, item in zip(numbers, items)) for numbers in (chunks, owned)]
    return Bucket(tuple(param.key for param in params), sizes[0], dtype, role, owned=sizes[1])


def alike(
    params: Iterable[Parameter], kind: Callable[[Parameter], Any] = lambda param: param.route.number
) -> list[list[Parameter]]:
    """Parameters of one kind together, such as of one route, in an order that is the same on all ranks."""
    kinds: dict[Any, list[Parameter]] = {}
    for param in params:
        kinds.setdefault(kind(param), []).append(param)
    return [kinds[one] for one in sorted(kinds)]


def routes_of(
    module: torch.nn.Module, plan: ShardPlan
) -> tuple[dict[torch.nn.Parameter, Route], set[torch.nn.Parameter]]:
    """The route of every parameter of a model: the usual one, or one for each way of parameters that patterns except.

    Args:
        module: The model.
        plan: The shard plan; its exceptions are patterns of the names that ``module`` gives its parameters.

    Returns:
        The routes, and the parameters that travel by their bytes (`holds_codes`).

    Raises:
        ConfigError: As of `ShardPlan.plans_of`.
    """
    names: dict[torch.nn.Parameter, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):  # a tied one may be meant by either name
        names.setdefault(param, []).append(plain_name(name))
    codes = {param for one in module.modules() for param in one.parameters(recurse=False) if holds_codes(param, one)}
    # The usual route is number 0, also if all parameters are excepted.
    routes, found = {(plan.way, False): Route(plan, 0)}, dict[torch.nn.Parameter, Route]()
    for param, own in zip(names, plan.plans_of(list(names.values()))):
        way = own.with_codec(PLAIN) if param in codes else own
        if (kind := (way.way, param in codes)) not in routes:
            routes[kind] = Route(way, len(routes))
        found[param] = routes[kind]
    return found, codes


def plain_name(name: str) -> str:
    """The name of a module or parameter without what activation checkpointing and torch.compile add to it."""
    for part in _WRAPPERS:
        name = name.replace(part, "")
    return name


def holds_codes(param: torch.Tensor, module: torch.nn.Module) -> bool:
    """Whether a parameter holds codes, or numbers of a type that no codec supports, so that it travels by its bytes.

    Quantised weights may have a floating type and hold packed codes (``bnb_4bit_quant_storage``, HQQ's ``view_as_float``).
    Then their library keeps a state of the quantisation, and a lossy codec would destroy them.

    Args:
        param: The parameter.
        module: The module that holds it.
    """
    if param.dtype not in FLOAT_DTYPES:
        return True
    if getattr(param, "quant_state", None) is not None:  # bitsandbytes, a Params4bit
        return True
    if param is getattr(module, "W_q", None):  # HQQ
        return "nbits" in (getattr(module, "meta", None) or ())
    return param is getattr(module, "weight", None) and getattr(module, "quant_state", None) is not None
