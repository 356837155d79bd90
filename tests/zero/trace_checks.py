"""What torch's profiler shows of an engine. Run by test_stage.py on 8 ranks, 2 nodes x 2 GPUs x 2 GCDs."""

from __future__ import annotations

from collections import Counter

import torch

import hzero
from hzero.config import BASE_TIERS, ROLES
from tests.zero.training import block_of, ds_config, engine_of, train


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
