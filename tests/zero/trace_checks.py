"""The trace of an engine. Run by test_stage.py on 8 ranks, 2 nodes x 2 GPUs x 2 GCDs."""

from __future__ import annotations

import gzip
import json
from collections import Counter

import pytest
import torch.distributed as dist

import hzero
from hzero.config import BASE_TIERS, ROLES
from tests.zero.training import block_of, ds_config, engine_of, shared_folder, train


def check_a_trace_holds_what_the_wire_log_counts() -> None:
    """Bytes by role and tier, every part of two steps, one hop at a time on a lane, and waits that the pipeline counts."""
    engine = engine_of(ds_config(block_of("topo"), 2))
    train(engine, 1, 2)
    state, path = hzero.state(engine), shared_folder() / f"trace{dist.get_rank()}.json.gz"
    state.settle()
    state.wire_log.reset()
    waited_s = state._pipeline.waited_s
    with state.trace(path) as trace:
        with pytest.raises(RuntimeError, match="recorded already"), state.trace(path):
            pass
        train(engine, 2, 2, first=1)
        state.settle()
        assert not path.exists()
    waited_s = state._pipeline.waited_s - waited_s
    logged = {f"{entry.role} {entry.tier}": (entry.hops, entry.wire_bytes) for entry in state.wire_log.entries()}
    train(engine, 1, 2, first=3)  # after the trace
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert {event["pid"] for event in events} == {dist.get_rank()}
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    slices = {name: [e for e in events if e["ph"] == "X" and e["tid"] == tid] for tid, name in tracks.items()}
    # One track for each: on processors the hops of a lane do not overlap.
    assert slices.keys() == {f"{role} {tier}" for role in ROLES for tier in BASE_TIERS} | {
        "steps",
        "compute",
        "waiting for hops",
    }
    for name, found in slices.items():
        if name in logged:
            assert (len(found), sum(event["args"]["bytes"] for event in found)) == logged[name], name
            assert all(event["args"]["codec"] in ("int8", "int4") and "parameters" in event["name"] for event in found)
    assert len(logged) == 6
    parts = Counter(event["name"] for name in ("steps", "compute") for event in slices[name])
    assert parts == {"step": 2, "forward": 4, "backward": 4, "optimizer": 2}
    assert abs(sum(event["dur"] for event in slices["waiting for hops"]) / 1e6 - waited_s) < 0.02 + 0.1 * waited_s
    assert [shares.keys() for shares in trace.shares()] == [set(BASE_TIERS)] * 2
    with pytest.raises(ZeroDivisionError), state.trace(path.with_name("failed")):
        raise ZeroDivisionError
    assert not path.with_name("failed").exists()
    engine.destroy()
