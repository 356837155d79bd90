"""Steps under the race detector, and what it says when a wait of the stage is taken away. Run by test_stage.py on 8 ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from hzero.collectives.pipeline import Pipeline
from hzero.config import PRESETS
from hzero.zero.streams import DeviceStreams
from hzero.zero.weights import Weights
from tests.zero.race_detector import detecting
from tests.zero.training import WIDTH, AwkwardNet, block_of, ds_config, engine_of, train


class _Net(AwkwardNet):
    """Has weights that no forward waits for, in a refresh message of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = torch.nn.Linear(WIDTH, WIDTH)


def _races(preset: str, **block: Any) -> list[str]:
    zero = {"stage": 3, "stage3_prefetch_bucket_size": 400, "reduce_bucket_size": 400}
    with detecting() as recorder:
        engine = engine_of(ds_config(block_of(preset, **block), 2, zero_optimization=zero), _Net())
        train(engine, 2, 2)
        engine.destroy()
    return list(recorder.races.values())


def check_no_races() -> None:
    """Every preset orders all accesses of every buffer, collectives included, and frees none that is in use."""
    for preset in PRESETS:
        races = _races(preset)
        assert not races, f"{preset}: {len(races)} races\n" + "\n".join(races[:6])
    for algorithm in ("doubling", "pairs"):
        setting = {"algorithm": algorithm, "below_bytes": 1 << 30}
        races = _races("topo", topology={"nodes": 4, "gpus_per_node": 1, "gcds_per_gpu": 2}, node_all_gather=setting)
        assert not races, f"{algorithm}: {len(races)} races\n" + "\n".join(races[:6])


def _skipped(owner: type, name: str, caller: str) -> Any:
    """``owner.name`` does nothing where a function called ``caller`` calls it, directly or through one or two others."""
    whole: Callable[..., Any] = getattr(owner, name)

    def mutated(self: Any, *arguments: Any) -> Any:
        first = sys._getframe(1)
        callers = [frame.f_code.co_name for frame in (first, first.f_back, first.f_back.f_back)]  # type: ignore[union-attr]
        return None if caller in callers else whole(self, *arguments)

    return mock.patch.object(owner, name, mutated)


#: What is taken away: under a preset a method, and where it is called.
MUTATIONS: dict[str, tuple[str, type, str, str]] = {
    "a step of a chain waits for the one before it": ("topo", DeviceStreams, "wait", "_enqueue"),
    "the current stream waits for a chain's result": ("topo", DeviceStreams, "wait", "_wait"),
    "gradients are overwritten once they are read": ("topo", DeviceStreams, "wait", "wait_read"),
    "memory of a hop is kept until it is over": ("topo", DeviceStreams, "used", "_received"),
    "memory of sums is kept until it is encoded": ("topo", DeviceStreams, "used", "_reduce"),
    "memory of a result is kept until it is read": ("topo", DeviceStreams, "used", "_wait"),
    "weights are encoded once they have changed": ("zero3", Weights, "_note_change", "mark_stale"),
    "weights change once they are encoded": ("topo", Weights, "before_change", "step"),
}


def check_taking_a_wait_away_is_seen() -> None:
    """Every wait and every record of a stream is needed: without it the detector reports a race on some rank."""
    submit = Pipeline.submit
    in_any_order = mock.patch.object(Pipeline, "submit", lambda self, hops, lanes, after=(): submit(self, hops, lanes))
    mutations = {what: (preset, _skipped(*where)) for what, (preset, *where) in MUTATIONS.items()}
    mutations["a gather comes after the refresh of its payloads"] = ("topo", in_any_order)
    unseen = []
    for what, (preset, mutation) in mutations.items():
        with mutation:
            count = torch.tensor([len(_races(preset))])
        dist.all_reduce(count)
        if not count:
            unseen.append(what)
    assert not unseen, unseen
