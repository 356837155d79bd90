"""Weights are read as they were written last, and what hzero cannot do is refused. Run by test_fsdp.py on 4 ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import hzero.fsdp
from hzero import ConfigError, StaleWeightsError
from tests.parity.compare import WORLD, relative
from tests.parity.fsdp import applied, mesh_of, spoil

LOSSLESS: dict[str, Any] = {"preset": "lossless", "guard": {"every": 1}}
TOPOLOGY = {"packages_per_node": 1, "devices_per_package": 2}


class _Twice(nn.Module):
    """Uses a layer twice. User code between may write its shards."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)

    def forward(self, x: torch.Tensor, between: Callable[[], None]) -> torch.Tensor:
        x = self.layer(x)
        between()
        return self.layer(x)


def check_writes_between_two_uses_in_a_forward_are_read() -> None:
    losses = []
    for applies in (True, False):
        torch.manual_seed(0)
        model = _Twice()
        for one in (model.layer, model):
            fully_shard(one, mesh=mesh_of(WORLD))
        state = hzero.fsdp.apply(model, "lossless", TOPOLOGY) if applies else None
        for step in range(3):
            with torch.no_grad():
                write = partial(model.layer.weight.to_local().mul_, 0.5)
                losses.append(model(torch.full((2, 12), step + 1.0), write).sum().item())
        if state is not None:
            state.close()
    assert relative(losses[:3], losses[3:]) < 1e-6, losses


def check_the_audit_finds_wrong_copies() -> None:
    with applied(LOSSLESS) as session:
        for step in range(2):
            session.go(step)
            session.advance()
        session.go(2)
        spoil(session.state, "blocks.1")
        with pytest.raises(StaleWeightsError, match=r"blocks\.1.*note_edit"):
            session.optimizer.step()
        session.state.note_edit()
        session.go(3)
        session.optimizer.step()


def check_close_gives_fsdp2_back() -> None:
    with applied(LOSSLESS) as session:
        session.go(0)
        session.advance()
        session.state.close()
        hops = sum(entry.hops for entry in session.state.wire_log.entries())
        for step in (1, 2):
            session.go(step)
            session.advance()
        assert hops == sum(entry.hops for entry in session.state.wire_log.entries())
        again = hzero.fsdp.apply(session.model, "lossless", TOPOLOGY)
        session.go(3)
        again.close()


def check_refusals() -> None:
    mesh = mesh_of(WORLD)

    def sharded(**how: Any) -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        fully_shard(model, **{"mesh": mesh, **how})
        return model

    def mixed() -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).to(torch.float64))
        model[0].requires_grad_(False)
        fully_shard(model, mesh=mesh)
        return model

    def hooked() -> nn.Module:
        model = sharded()
        model.set_all_reduce_hook(lambda _: None)  # type: ignore[operator]
        return model

    def twice() -> nn.Module:
        model = sharded()
        hzero.fsdp.apply(model, "lossless", TOPOLOGY)
        return model

    two = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    cases: list[tuple[Callable[[], nn.Module], dict[str, Any], str]] = [
        (lambda: nn.Linear(2, 2), {}, "found Linear without fully_shard"),
        (lambda: mock.sentinel.model, {}, "model: found _SentinelObject; expected a torch.nn.Module"),
        (lambda: sharded(mesh=two), {}, r"found mesh of replicas \(HSDP\)"),
        (mixed, {}, "found trained parameters of torch.float64"),
        (hooked, {}, "found set_all_reduce_hook"),
        (twice, {}, "found hzero.fsdp.apply already"),
        (sharded, {"preset": "tpo"}, "did you mean 'topo'"),
        (sharded, {"accumulation": 0}, "accumulation: found 0"),
        (sharded, {"accumulations": 2}, "did you mean 'accumulation'"),
        (sharded, {"unit": "layer"}, "unit: found 'layer'"),
        (sharded, {"nonsense": 1}, "nonsense"),
        (sharded, {"codecs": {"weights": "mpc"}}, "found 'mpc', whose messages have no fixed size"),
        (sharded, {"codecs": {"except": {"*nothing*": "none"}}}, "matches no parameter"),
        (sharded, {"topology": {"packages_per_node": 3}}, "expected a multiple"),
        (sharded, {"checksum": dist.get_rank() == 1}, "hzero.checksum: found True on rank 1; expected False, as on rank 0"),
    ]  # fmt: skip
    for make, words, message in cases:
        with pytest.raises(ConfigError, match=message):
            hzero.fsdp.apply(make(), **{"topology": TOPOLOGY, **words})
    with applied(LOSSLESS) as session:
        for param in session.model.parameters():
            param.register_post_accumulate_grad_hook(lambda _: None)
        with pytest.raises(ConfigError, match="post-accumulate-grad hook"):
            session.go(0)
    model = sharded()
    model[1].weight.requires_grad_(False)
    hzero.fsdp.apply(model, "lossless", TOPOLOGY)
    model(torch.zeros(2, 8))  # leaves the root whole
    model[1].weight.requires_grad_(True)
    with pytest.raises(ConfigError, match="requires_grad_ on whole parameters"):
        model(torch.zeros(2, 8)).sum().backward()
    with mock.patch.object(torch, "__version__", "2.9.1"), pytest.raises(ConfigError, match=re.escape("found 2.9.1")):
        hzero.fsdp.apply(sharded(), topology=TOPOLOGY)
