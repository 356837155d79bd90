"""What crosses which tier: bytes, algorithms, torch's profile. Run by test_stage.py on 8 ranks as 2 x 2 x 2."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import torch

import hzero
from hzero.comm import Runtime
from hzero.config import ALGORITHMS, BASE_TIERS, ROLES
from tests.deepspeed.training import block_of, ds_config, engine_of, train


def check_algorithms_between_nodes_change_no_bit_and_no_byte() -> None:
    """Of 4 nodes; some refresh messages are short, others are not."""
    zero = {"stage": 3, "stage3_prefetch_bucket_size": 400}
    topology = {"nodes": 4, "packages_per_node": 1, "devices_per_package": 2}
    losses, counts, used = [], [], set()
    prepare = Runtime.prepare

    def noted(self: Runtime, lane: tuple[str, str], kind: str, *arguments: Any, **keywords: Any) -> Any:
        if kind == "all_gather":
            used.add((algorithm, keywords.get("algorithm", "library"), lane[1]))
        return prepare(self, lane, kind, *arguments, **keywords)

    for algorithm in ALGORITHMS:
        setting = {"algorithm": algorithm, "below_bytes": 80}
        block = {"preset": "topo", "topology": topology, "node_all_gather": setting}
        engine = engine_of(ds_config(block, zero_optimization=zero))
        with mock.patch.object(Runtime, "prepare", noted):
            losses.append(train(engine, 2))
        state = hzero.state(engine)
        state.settle()
        log = state.wire_log.entries()
        counts.append([(entry.role, entry.tier, entry.hops, entry.wire_bytes) for entry in log])
        engine.destroy()
    assert losses[0] == losses[1] == losses[2]
    assert counts[0] == counts[1] == counts[2]
    both = {(asked, one, "inter_node") for asked in ALGORITHMS for one in (asked, "library")}
    assert used == both | {(asked, "library", "intra_package") for asked in ALGORITHMS}


def check_a_profile_has_every_hop_of_the_wire_log() -> None:
    """By role, tier and codec, those of all threads, and the time in which the rank waits for them."""
    engine = engine_of(ds_config(block_of("topo"), 2))
    train(engine, 1, 2)
    state = hzero.state(engine)
    state.settle()
    state.wire_log.reset()
    every = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, experimental_config=every) as profiler:
        train(engine, 1, 2, first=1)
        state.settle()
    names = Counter(event.name for event in profiler.events() if event.name.startswith("hzero: "))
    entries = state.wire_log.entries()
    assert {(entry.role, entry.tier) for entry in entries} == {(role, tier) for role in ROLES for tier in BASE_TIERS}
    for entry in entries:
        of = [name for name in names if f" {entry.tier}: {entry.role} of " in name and f" codec {entry.codec}" in name]
        assert sum(names[name] for name in of) == entry.hops, (entry, names)
    assert names["hzero: wait"]
    engine.destroy()
