"""Weights are read as they were written last, and what hzero cannot do is refused. Run by test_fsdp.py on 4 ranks."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

import hzero.fsdp
from hzero import ConfigError, StaleWeightsError
from tests.fsdp.training import WORLD, Case, Net, applied, backward, build, case, mesh_of, plain, relative, spoil, train

SMALL = Case()
LOSSLESS: dict[str, Any] = {"preset": "lossless", "guard": {"every": 1}}


def _folder() -> Path:
    found = [tempfile.mkdtemp()]
    dist.broadcast_object_list(found)
    return Path(found[0])


def check_writes_outside_of_steps_are_read() -> None:
    """Each way to replace the weights after a step gives what FSDP2 alone reads; the audit finds no stale weight."""
    folder = _folder()

    def load(step: int, model: Net, _: Any) -> None:
        model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})

    def assign(step: int, model: Net, _: Any) -> None:
        model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()}, assign=True)

    def set_whole(step: int, model: Net, _: Any) -> None:
        set_model_state_dict(model, {name: value * 0.5 for name, value in get_model_state_dict(model).items()})

    def scale(step: int, model: Net, _: Any) -> None:
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.5)

    def scale_local(step: int, model: Net, _: Any) -> None:
        with torch.no_grad():
            model.blocks[1].up.weight.to_local().mul_(0.5)

    def in_place(step: int, model: Net, optimizer: torch.optim.Optimizer) -> None:
        path = folder / f"in_place {step}"
        group = mesh_of(WORLD).get_group()
        dcp.save({"model": model.state_dict()}, checkpoint_id=path, process_group=group)
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1.0)
        model(torch.zeros(1, 4, dtype=torch.int64))  # makes secondary partitions of what is spoilt
        # This moves no counter of the parameters.
        dcp.load({"model": model.state_dict()}, checkpoint_id=path, process_group=group)

    def with_optimizer(step: int, model: Net, optimizer: torch.optim.Optimizer) -> None:
        weights, states = get_state_dict(model, optimizer)
        path, group = folder / f"both {step}", mesh_of(WORLD).get_group()
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=path, process_group=group)
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1.0)
        model(torch.zeros(1, 4, dtype=torch.int64))
        model.reshard()
        read = {"model": weights, "optimizer": states}
        dcp.load(read, checkpoint_id=path, process_group=group)
        set_state_dict(model, optimizer, model_state_dict=read["model"], optim_state_dict=read["optimizer"])

    ways: list[Callable[..., None]] = [load, assign, set_whole, scale, scale_local, in_place, with_optimizer]
    halved = train(SMALL, None, between=scale)
    wants = {way: train(SMALL, None, between=way) for way in (assign, scale_local)}
    wants |= {way: plain(SMALL) for way in (in_place, with_optimizer)}  # which write back what was there
    for way in ways:
        found, wanted = train(SMALL, LOSSLESS, between=way), wants.get(way, halved)
        assert relative(found.losses, wanted.losses) < 1e-6, (way, found.losses, wanted.losses)
        assert found.state is not None
        found.state.close()


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
        state = hzero.fsdp.apply(model, "lossless", SMALL.topology) if applies else None
        for step in range(3):
            with torch.no_grad():
                write = partial(model.layer.weight.to_local().mul_, 0.5)
                losses.append(model(torch.full((2, 12), step + 1.0), write).sum().item())
        if state is not None:
            state.close()
    assert relative(losses[:3], losses[3:]) < 1e-6, losses


def check_fused_optimizers_are_followed() -> None:
    what = Case(optimizer="fused")
    found, wanted = train(what, LOSSLESS, 3), plain(what, 3)
    assert relative(found.losses, wanted.losses) < 1e-6, (found.losses, wanted.losses)
    assert wanted.losses[-1] != wanted.losses[0]
    assert found.state is not None
    found.state.close()


def check_the_audit_finds_wrong_copies() -> None:
    with applied(SMALL, LOSSLESS) as (model, state, optimizer, mesh):
        for step in range(2):
            backward(SMALL, model, mesh, step, 0)
            optimizer.step()
            optimizer.zero_grad()
        backward(SMALL, model, mesh, 2, 0)
        spoil(state, "blocks.1")
        with pytest.raises(StaleWeightsError, match=r"blocks\.1.*note_edit"):
            optimizer.step()
        state.note_edit()
        backward(SMALL, model, mesh, 3, 0)
        optimizer.step()


def check_parameters_that_are_frozen_and_trained_again() -> None:
    def toggle(step: int, model: Net, _: Any) -> None:
        model.blocks[1].up.weight.requires_grad_(step % 2 == 1)

    found, wanted = train(SMALL, LOSSLESS, 4, toggle), train(SMALL, None, 4, toggle)
    assert relative(found.losses, wanted.losses) < 1e-6, (found.losses, wanted.losses)
    assert found.state is not None
    found.state.close()


def check_frozen_weights_are_refreshed_once() -> None:
    with applied(case("frozen"), {"preset": "lossless", "guard": 0}) as (model, state, optimizer, mesh):
        refreshed = []
        for step in range(3):
            state.wire_log.reset()
            backward(SMALL, model, mesh, step, 0)
            optimizer.step()
            optimizer.zero_grad()
            state.settle()
            refreshed.append(state.wire_log.wire_bytes("inter_node", "weights"))
        assert refreshed[0] > refreshed[1] == refreshed[2] > 0


def check_evaluation() -> None:
    """Without gradients, in inference mode, and exact where the block says so."""
    coarse = {"preset": "topo", "codecs": {"weights": "int4"}, "exact_evaluation": True}
    tokens = torch.arange(18).view(2, 9)
    with applied(SMALL, coarse) as (model, _, optimizer, mesh):
        backward(SMALL, model, mesh, 0, 0)
        optimizer.step()
        with torch.inference_mode():
            read = float(model(tokens))
            model.eval()
            exact = float(model(tokens))
        model.train()
        backward(SMALL, model, mesh, 1, 0)
        optimizer.step()
        whole = Net()
        whole.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
        model.eval()
        with torch.no_grad():
            assert float(model(tokens)) == pytest.approx(float(whole(tokens)), rel=1e-6)
    assert read != exact


def check_close_gives_fsdp2_back() -> None:
    with applied(SMALL, LOSSLESS) as (model, state, optimizer, mesh):
        backward(SMALL, model, mesh, 0, 0)
        optimizer.step()
        optimizer.zero_grad()
        state.close()
        hops = sum(entry.hops for entry in state.wire_log.entries())
        losses = []
        for step in (1, 2):
            losses.append(float(backward(SMALL, model, mesh, step, 0)))
            optimizer.step()
            optimizer.zero_grad()
        assert hops == sum(entry.hops for entry in state.wire_log.entries())
        again = hzero.fsdp.apply(model, "lossless", SMALL.topology)
        backward(SMALL, model, mesh, 3, 0)
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
        hzero.fsdp.apply(model, "lossless", {"packages_per_node": 1, "devices_per_package": 2})
        return model

    two = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    where = {"packages_per_node": 1, "devices_per_package": 2}
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
        (
            sharded,
            {"checksum": dist.get_rank() == 1},
            "hzero.checksum: found True on rank 1; expected False, as on rank 0",
        ),
    ]
    for make, words, message in cases:
        with pytest.raises(ConfigError, match=message):
            hzero.fsdp.apply(make(), **{"topology": where, **words})
    model = build(frozenset(), mesh)
    hzero.fsdp.apply(model, "lossless", where)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(ConfigError, match="post-accumulate-grad hook"):
        backward(Case(), model, mesh, 0, 0)
    model = sharded()
    model[1].weight.requires_grad_(False)
    hzero.fsdp.apply(model, "lossless", where)
    model(torch.zeros(2, 8))  # leaves the root whole
    model[1].weight.requires_grad_(True)
    with pytest.raises(ConfigError, match="requires_grad_ on whole parameters"):
        model(torch.zeros(2, 8)).sum().backward()
    with mock.patch.object(torch, "__version__", "2.9.1"), pytest.raises(ConfigError, match=re.escape("found 2.9.1")):
        hzero.fsdp.apply(sharded(), topology=where)
