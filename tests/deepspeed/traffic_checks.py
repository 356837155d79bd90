"""What crosses which tier: bytes, algorithms, torch's profile. Run by test_stage.py on 8 ranks as 2 x 2 x 2."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import hzero
from hzero.comm import Runtime
from hzero.config import ALGORITHMS, BASE_TIERS, ROLES, TIERS, parse_config
from hzero.tools.plan.collectives import node_bytes, step_traffic
from tests.deepspeed.training import AwkwardNet, block_of, ds_config, engine_of, train


def _wide() -> tuple[AwkwardNet, list[int], list[int]]:
    """A model whose shards are not mostly padding, and the elements of its parameters: those that train, and the frozen ones."""
    model = AwkwardNet(width=256, inner=1024)
    numels: dict[bool, list[int]] = {True: [], False: []}
    for param in model.parameters():
        numels[param.requires_grad].append(param.numel())
    return model, numels[True], numels[False]


def check_bytes_between_nodes() -> None:
    """`topo` moves at most 0.78 M f a step into a node, whatever the accumulation, and exactly what the plan says."""
    for accumulation in (1, 3):
        model, numels, frozen = _wide()
        released = {"stage3_max_reuse_distance": 0}  # as in a model that does not fit: every use is a fetch
        config = ds_config(block_of("topo"), accumulation, bf16={"enabled": True}, zero_optimization=released)
        engine = engine_of(config, model)
        state = hzero.state(engine)
        train(engine, 1, accumulation)
        state.settle()
        state.wire_log.reset()
        train(engine, 2, accumulation, first=1)
        state.settle()
        moved = torch.tensor([float(state.wire_log.wire_bytes("inter_node"))])
        everyones = [torch.empty(1) for _ in range(8)]
        dist.all_gather(everyones, moved)
        node = dist.get_rank() // 4
        into_node = sum(map(float, everyones[4 * node : 4 * node + 4])) / 2
        m, f = 2 * sum(numels), 1 / 2
        assert 0.70 * m * f < into_node <= 0.78 * m * f, into_node / (m * f)
        planned = step_traffic(state.plan, state.plan.grid, numels, itemsize=2, accumulation=accumulation)
        assert into_node == node_bytes(planned, state.plan.grid)
        # Inside the node the frozen parameters are fetched too, though they are never refreshed.
        fetched = step_traffic(state.plan, state.plan.grid, numels + frozen, itemsize=2, accumulation=accumulation)
        logged = {(e.role, e.tier): e.wire_bytes for e in state.wire_log.entries()}
        for traffic in planned:
            if traffic.role == "gradients" and traffic.used:
                assert logged[(traffic.role, traffic.tier)] == 2 * traffic.wire_bytes, traffic
        fetch = next(t for t in fetched if (t.role, t.tier) == ("weights", "intra_package"))
        assert 0.5 < logged[("weights", "intra_package")] / (2 * fetch.wire_bytes) <= 1, (
            logged[("weights", "intra_package")] / fetch.wire_bytes
        )
        engine.destroy()


def check_bytes_of_differences() -> None:
    """Bytes into a node in a step, but in the first and every third, which are whole: 0.53 M f in int4, 0.41 with ``lean``."""
    model, numels, frozen = _wide()
    int4 = {"weights": dict.fromkeys(("intra_node", "inter_node"), "int4"), "gradients": dict.fromkeys(TIERS, "int4")}
    blocks = {0.53: block_of("lossless", refresh_differences=True, codecs=int4), 0.41: block_of("lean")}
    for limit, block in blocks.items():
        engine = engine_of(ds_config({**block, "full_refresh_every": 3}, 2, bf16={"enabled": True}), model)
        state = hzero.state(engine)
        whole = dataclasses.replace(state.plan, codecs=parse_config({"preset": "lossless"}).codecs)
        for step in range(4):
            state.wire_log.reset()
            train(engine, 1, 2, first=step)
            state.settle()
            plan = state.plan if step % 3 else whole
            traffic = step_traffic(plan, plan.grid, numels + frozen * (step == 0))
            planned = {(row.role, row.tier): row.wire_bytes for row in traffic}
            assert state.wire_log.wire_bytes("inter_node", "weights") == planned["weights", "inter_node"], step
            if step % 3:
                into_node = state.wire_log.wire_bytes("inter_node") * state.plan.grid.scope_size("node")
                assert into_node < limit * 2 * sum(numels) / 2, into_node
        engine.destroy()


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
