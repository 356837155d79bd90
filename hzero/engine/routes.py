"""Routes: how the weights and gradients of a parameter travel; all alike, but for those that the block excepts by name."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hzero.codecs.codec import Codec
from hzero.codecs.ops import FLOATS
from hzero.config import LOSSLESS, PLAIN, CodecConfig
from hzero.deepspeed.refusals import ZeroParameter
from hzero.plan.program import gather_program, reduce_program
from hzero.plan.shards import ShardPlan, plain
from hzero.validation import ConfigError, some

#: Names that a message gives.
_NAMED = 4


def holds_codes(param: ZeroParameter, module: torch.nn.Module) -> bool:
    """Whether a parameter holds codes, or numbers of a type that no codec takes: such a parameter travels by its bytes.

    Quantised weights may have a floating type and hold packed codes (``bnb_4bit_quant_storage``, HQQ's ``view_as_float``).
    Then their library keeps a state of the quantisation, and a lossy codec would destroy them.

    Args:
        param: The parameter.
        module: The module that holds it.
    """
    if param.dtype not in FLOATS:
        return True
    if getattr(param, "quant_state", None) is not None:  # bitsandbytes, a Params4bit
        return True
    if param is getattr(module, "W_q", None):  # HQQ
        return "nbits" in (getattr(module, "meta", None) or ())
    return param is getattr(module, "weight", None) and getattr(module, "quant_state", None) is not None


class Route:
    """The hops of a plan and their codecs, found once.

    Args:
        plan: The plan of the parameters that take it.
        number: Of the route, by which ranks order them alike.
        codes: Whether its parameters hold codes and travel by their bytes, see `holds_codes`.

    Attributes:
        plan: The plan.
        number: The number.
        codes: Whether its parameters hold codes.
        refreshes: Whether resident copies are kept.
        resident_codec: Of resident payloads.
        refresh: From primary shards to resident copies, as payloads or decoded.
        whole: The same without codecs, where other refreshes send differences.
        difference: From a difference of primary shards to a message of those of a resident copy.
        fetch: To whole weights, from resident payloads or, where none are kept, from primary shards.
        micro: Of gradients in every micro-step.
        boundary: Of gradients once per step.
        lossy: Whether a hop of weights loses something.
        fallible: Whether a hop of weights may fail to hold a block, see `Codec.lost`.
        sums_travel: Whether a hop of gradients has codec ``none``, so that sums are made on the wire.
    """

    def __init__(self, plan: ShardPlan, number: int, codes: bool = False) -> None:
        self.number, self.codes = number, codes
        self.follow(plan)

    def follow(self, plan: ShardPlan) -> None:
        """Takes another plan from now on."""
        self.plan = plan
        refresh, micro = plan.refresh_hops(), plan.micro_hops()
        self.refreshes = bool(refresh)
        if refresh:
            self.resident_codec = Codec.from_config(plan.resident_codec)
            kept = None if plan.decoded else plan.resident_codec
            first = refresh[0].codec
            self.refresh = gather_program(plan, refresh, left=kept)
            self.whole = gather_program(plan, plain(refresh), left=kept)
            self.difference = gather_program(plan, refresh, held=first, left=refresh[-1].codec)
            self.fetch = gather_program(plan, plan.fetch_hops(), held=plan.resident_codec, rows=plan.resident_rows)
        elif plan.gather_hops():
            self.fetch = gather_program(plan, plan.gather_hops())
        self.micro = reduce_program(plan, micro, plan.grid.world_size, shard_order=True)
        self.boundary = reduce_program(plan, plan.boundary_hops(), plan.gradient_rows, shard_order=not micro)
        self.lossy = any(hop.codec.codec not in LOSSLESS for hop in plan.gather_hops())
        self.fallible = any(Codec.from_config(hop.codec).fallible for hop in plan.gather_hops())
        self.sums_travel = any(hop.codec.codec == "none" for hop in plan.reduce_hops())


class Routes:
    """The route of every parameter: the usual one, or one for each codec of an exception.

    Args:
        module: The model, its parameters partitioned by DeepSpeed.
        plan: The shard plan; its exceptions are patterns of the names that ``module`` gives its parameters.

    Attributes:
        usual: The route of those that are no exception.
        all: All routes, by number.
        codes: Number of parameters that hold codes.

    Raises:
        ConfigError: A pattern matches no parameter, or those alone that an earlier one has taken.
    """

    def __init__(self, module: torch.nn.Module, plan: ShardPlan) -> None:
        self.usual = Route(plan, 0)
        self.all = [self.usual]
        self._of: dict[int, Route] = {}
        names = [name for name, _ in module.named_parameters()]
        taken: dict[int, int] = {}
        for name, param in module.named_parameters(remove_duplicate=False):  # a tied one may be meant by either name
            found = plan.exception_of(name)
            if found is not None:
                key = param.ds_id  # type: ignore[attr-defined]
                taken[key] = min(found, taken.get(key, found))
        for number, (pattern, _) in enumerate(plan.exceptions):
            if number not in taken.values():
                raise ConfigError(
                    f"hzero.codecs.except: found {pattern!r}, which matches no parameter that an earlier pattern has not "
                    f"taken; parameters of the model: {some(names, _NAMED)}"
                )
        routes: dict[CodecConfig, Route] = {}
        for number, (_, codec) in enumerate(plan.exceptions):
            if codec not in routes:
                own = plan.with_codec(codec)
                same = (own.gather_hops(), own.reduce_hops()) == (plan.gather_hops(), plan.reduce_hops())
                routes[codec] = self.usual if same else Route(own, len(self.all))
                self.all += [] if same else [routes[codec]]
            self._of |= {key: routes[codec] for key, found in taken.items() if found == number}
        codes = {
            param.ds_id  # type: ignore[attr-defined]
            for one in module.modules()
            for param in one.parameters(recurse=False)
            if holds_codes(param, one)
        }
        self.codes = len(codes)
        if codes:
            self.all.append(Route(plan.with_codec(PLAIN), len(self.all), codes=True))
            self._of |= dict.fromkeys(codes, self.all[-1])

    def of(self, param: ZeroParameter) -> Route:
        """The route of a parameter."""
        return self._of.get(param.ds_id, self.usual)

    def alike(self, params: Iterable[ZeroParameter]) -> list[tuple[Route, list[ZeroParameter]]]:
        """Parameters by route, in an order that is the same on all ranks; those of a route stay in theirs."""
        found: dict[int, list[ZeroParameter]] = {}
        for param in params:
            found.setdefault(self.of(param).number, []).append(param)
        return [(self.all[number], alike) for number, alike in sorted(found.items())]
