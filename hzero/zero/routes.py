"""Routes: how the weights and gradients of a parameter travel; all alike, but for those that the block excepts by name."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch

from hzero.codecs import Codec
from hzero.config import LOSSLESS
from hzero.sharding.plan import ShardPlan
from hzero.validation import ConfigError, some
from hzero.zero.refusals import ZeroParameter

#: Names that a message gives.
_NAMED = 4


class Route:
    """The hops of a plan and their codecs, found once.

    Args:
        plan: The plan of the parameters that take it.
        number: Of the route, by which ranks order them alike.

    Attributes:
        plan: The same.
        number: The same.
        refresh: Hops to resident payloads.
        fetch: Hops to whole weights, from resident payloads or, where none are kept, from primary shards.
        micro: Hops of gradients in every micro-step.
        boundary: Hops of gradients once per step.
        lossy: Whether a hop of weights loses something.
        sums_travel: Whether a hop of gradients has codec ``none``, so that sums are made on the wire.
    """

    def __init__(self, plan: ShardPlan, number: int) -> None:
        self.plan, self.number = plan, number
        self.refresh = plan.refresh_hops()
        self.fetch = plan.fetch_hops() if self.refresh else plan.gather_hops()
        self.micro, self.boundary = plan.micro_hops(), plan.boundary_hops()
        self.lossy = any(hop.codec.codec not in LOSSLESS for hop in plan.gather_hops())
        self.sums_travel = any(hop.codec.codec == "none" for hop in plan.reduce_hops())

    @functools.cached_property
    def first_codec(self) -> Codec:
        """That of primary shards, where they are encoded."""
        return Codec.from_config(self.plan.gather_hops()[0].codec)

    @functools.cached_property
    def resident_codec(self) -> Codec:
        """That of resident payloads."""
        return Codec.from_config(self.plan.resident_codec)


class Routes:
    """The route of every parameter.

    Args:
        module: The model, its parameters partitioned by DeepSpeed.
        plan: The shard plan; its exceptions are patterns of the names that ``module`` gives its parameters.

    Attributes:
        usual: The route of those that are no exception.

    Raises:
        ConfigError: A pattern matches no parameter.
    """

    def __init__(self, module: torch.nn.Module, plan: ShardPlan) -> None:
        self.usual = Route(plan, 0)
        self._of: dict[int, Route] = {}
        routes: dict[int, Route] = {}
        names = list(module.named_parameters(remove_duplicate=False))  # a tied one may be meant by either name
        for name, param in names:
            found = plan.exception_of(name)
            if found is not None:
                route = routes.setdefault(found, Route(plan.of_exception(found), found + 1))
                self._of.setdefault(param.ds_id, route)  # type: ignore[attr-defined]
        for number, (pattern, _) in enumerate(plan.exceptions):
            if number not in routes:
                raise ConfigError(
                    f"hzero.codecs.except: found {pattern!r}, which is the first match of no parameter; parameters of the "
                    f"model: {some([name for name, _ in names], _NAMED)}"
                )

    def of(self, param: ZeroParameter) -> Route:
        """The route of a parameter."""
        return self._of.get(param.ds_id, self.usual)

    @property
    def all(self) -> list[Route]:
        """All routes."""
        return list(dict.fromkeys([self.usual, *self._of.values()]))

    def alike(self, params: Iterable[ZeroParameter]) -> list[tuple[Route, list[ZeroParameter]]]:
        """Parameters by route, in an order that is the same on all ranks; those of a route stay in theirs."""
        if not self._of:
            kept = list(params)
            return [(self.usual, kept)] if kept else []
        found: dict[Route, list[ZeroParameter]] = {}
        for param in params:
            found.setdefault(self.of(param), []).append(param)
        return sorted(found.items(), key=lambda item: item[0].number)
