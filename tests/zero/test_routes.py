"""Which parameter takes which route, without ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hzero.parsing import parse_config
from hzero.sharding.plan import ShardPlan
from hzero.topology import Grid
from hzero.validation import ConfigError
from hzero.zero.routes import Routes


class _Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(3, 2)
        self.norm = torch.nn.LayerNorm(2)
        self.head = torch.nn.Linear(2, 3)
        self.head.weight = self.embed.weight
        for number, param in enumerate(self.parameters()):
            param.ds_id = number  # type: ignore[attr-defined]


def _routes(exceptions: dict[str, Any], preset: str = "topo") -> tuple[Routes, dict[str, str]]:
    model = _Tied()
    plan = ShardPlan.from_config(parse_config({"preset": preset, "codecs": {"except": exceptions}}), Grid(2, 2, 2), 0)
    routes = Routes(model, plan)
    found: dict[str, Any] = dict(model.named_parameters())
    codecs = {name: routes.of(param).plan.codecs.gradients["node"].codec for name, param in found.items()}
    numbers = [route.number for route, _ in routes.alike(found.values())]
    assert numbers == sorted(set(numbers)) and [route.number for route in routes.all] == list(range(len(routes.all)))
    assert sum(len(alike) for _, alike in routes.alike(found.values())) == len(found)
    return routes, codecs


def test_the_first_pattern_counts_also_for_tied_parameters() -> None:
    _, codecs = _routes({"head.weight": "none", "*.bias": "bf16"})
    assert codecs == {"embed.weight": "none", "norm.weight": "int4", "norm.bias": "bf16", "head.bias": "bf16"}


def test_exceptions_of_one_codec_share_a_route_and_those_without_effect_have_none() -> None:
    routes, codecs = _routes({"norm*": "none", "*.bias": "none"})
    assert len(routes.all) == 2 and [codecs[name] for name in ("norm.weight", "head.bias")] == ["none", "none"]
    routes, _ = _routes({"norm*": "none"}, "lossless")
    assert routes.all == [routes.usual] and not routes.usual.lossy


def test_a_pattern_whose_parameters_are_taken_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"except: found 'embed\*', which matches no parameter that an earlier pattern"
    ):
        _routes({"head*": "none", "embed*": "int8"})
