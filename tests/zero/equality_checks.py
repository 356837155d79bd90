"""Codec `none` gives the losses of ZeRO-3 and DDP. Run by test_stage.py on 8 and on 6 ranks."""

from __future__ import annotations

import functools
import itertools
import os
from typing import Any

import pytest
import torch

from hzero.parsing import parse_topology
from hzero.topology import resolve_grid
from tests.zero.training import (
    assert_losses,
    ds_config,
    engine_of,
    same_on_all_ranks,
    train,
    train_ddp,
)

STEPS = {1: 4, 3: 3, 4: 3}  # optimizer steps, by micro-steps per step
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
LAYOUTS = {8: (2, 2, 2), 6: (3, 1, 2)}
#: Machines of more tiers: two groups of two nodes of two packages; two groups of one node of 2 x 2 devices; two clusters of
#: one node with two hives of two packages.
MORE_TIERS: dict[int, list[dict[str, int]]] = {
    8: [
        {"nodes": 4, "gpus_per_node": 2, "gcds_per_gpu": 1, "nodes_per_group": 2},
        {"nodes": 2, "gpus_per_node": 2, "gcds_per_gpu": 2, "nodes_per_group": 1},
        {"nodes": 2, "gpus_per_node": 4, "gcds_per_gpu": 1, "gpus_per_hive": 2, "clusters": 2},
    ],
    6: [],
}
#: Whether the lattice is compared cell by cell on every machine, with 1 and 3 micro-steps; that takes minutes.
FULL = os.environ.get("HZERO_LATTICE") == "full"


def _topology(layout: tuple[int, int, int]) -> dict[str, int]:
    return dict(zip(("nodes", "gpus_per_node", "gcds_per_gpu"), layout))


@functools.cache
def _references(accumulation: int) -> dict[str, tuple[list[float], list[float]]]:
    """Losses and gradient norms of stock ZeRO-3 and of DDP, after a comparison of the two."""
    engine = engine_of(ds_config(accumulation=accumulation))
    assert type(engine.optimizer).__name__ == "DeepSpeedZeroOptimizer_Stage3"
    stock_norms: list[float] = []
    stock = train(engine, STEPS[accumulation], accumulation, norms=stock_norms)
    engine.destroy()
    ddp_norms: list[float] = []
    ddp = train_ddp(STEPS[accumulation], accumulation, norms=ddp_norms)
    assert stock[-1] < stock[0]
    references = {"ZeRO-3": (stock, stock_norms), "DDP": (ddp, ddp_norms)}
    _assert_equal("ZeRO-3", stock, stock_norms, {"DDP": references["DDP"]})
    return references


def _assert_equal(what: str, losses: list[float], norms: list[float], references: dict[str, Any]) -> None:
    for name, (want, want_norms) in references.items():
        assert_losses(losses, want[: len(losses)], what=f"losses of {what} and {name}")
        assert_losses(norms, want_norms[: len(norms)], what=f"gradient norms of {what} and {name}")


def _compare(block: dict[str, Any], layout: tuple[int, int, int], accumulation: int, steps: int | None = None) -> None:
    topology = {**_topology(layout), **block.get("topology", {})}
    engine = engine_of(ds_config({**block, "topology": topology}, accumulation))
    assert type(engine.optimizer).__name__ == "HZeroStage3"
    norms: list[float] = []
    losses = train(engine, steps or STEPS[accumulation], accumulation, norms=norms)
    engine.destroy()
    _assert_equal(f"{block} on {topology}", losses, norms, _references(accumulation))


def check_lossless_without_accumulation() -> None:
    _compare({"preset": "lossless"}, LAYOUTS[WORLD], 1)


def check_lossless_with_accumulation_4() -> None:
    _compare({"preset": "lossless"}, LAYOUTS[WORLD], 4)


def check_zero3_preset_without_accumulation() -> None:
    _compare({"preset": "zero3"}, LAYOUTS[WORLD], 1)


def check_hpz_preset_with_accumulation_4() -> None:
    _compare({"preset": "hpz"}, LAYOUTS[WORLD], 4)


def check_layouts_with_tiers_of_size_one() -> None:
    """Scopes of a single device, chosen or not: no hop inside, every hop inside, other orders of ranks. Half of them usually."""
    if WORLD != 8:
        pytest.skip("these layouts have 8 ranks")
    package = {"weights": "package", "gradients": "package"}
    cases = [
        ({"preset": "lossless", "shard": package}, (2, 4, 1), {}),
        ({"preset": "lossless"}, (1, 1, 8), {}),
        ({"preset": "lossless"}, (2, 2, 2), {"order": ["gpu", "node", "gcd"]}),
        ({"preset": "lossless"}, (8, 1, 1), {}),
        ({"preset": "lossless"}, (1, 4, 2), {}),
        ({"preset": "lossless", "shard": package}, (2, 2, 2), {"order": ["gcd", "gpu", "node"]}),
    ]
    for block, layout, order in cases if FULL else cases[:3]:
        _compare({**block, "topology": order}, layout, 1, steps=3)


def check_lattice_of_scopes() -> None:
    """Weights and gradients over every pair of scopes that nests, from ZeRO-1 to ZeRO-3.

    On machines of more than three tiers every fifth of the pairs with a scope of such a tier.
    """
    usual = _topology(LAYOUTS[WORLD])
    for topology in (usual, *MORE_TIERS[WORLD]):
        scopes = resolve_grid(parse_topology("topology", topology), WORLD).scopes
        pairs = list(itertools.combinations_with_replacement(scopes, 2))
        if not FULL and topology != usual:
            pairs = [pair for pair in pairs if {"hive", "group", "cluster"} & set(pair)][::5]
        for number, (weights, gradients) in enumerate(pairs):
            block = {"preset": "lossless", "shard": {"weights": weights, "gradients": gradients}, "topology": topology}
            for accumulation in (1, 3) if FULL else (3,) if number % 2 else (1,):
                _compare(block, LAYOUTS[WORLD], accumulation, steps=None if FULL or topology == usual else 2)
    _compare({"preset": "zero1", "resident": "payload"}, LAYOUTS[WORLD], 3)


def check_determinism() -> None:
    """The same configuration twice gives the same bits."""
    for preset in ("lossless", "topo"):
        runs = []
        for _ in range(2):
            engine = engine_of(ds_config({"preset": preset, "topology": _topology(LAYOUTS[WORLD])}, 2))
            runs.append(train(engine, 3, 2))
            engine.destroy()
        assert runs[0] == runs[1]


def check_weights_are_bit_identical_after_every_gather() -> None:
    """With every codec, what forward and backward read is the same on all ranks."""
    rounded_at_random = {"codec": "int8", "rounding": "stochastic", "block_size": 64}
    cases = [
        ("none", "package"),
        ("bf16", "node"),
        ("int8", "package"),
        ("int4", "node"),
        (rounded_at_random, "package"),
        ({"codec": "int4", "rotation": 128}, "device"),
        ("int4", "world"),
    ]
    for leaf, shard in cases:
        block = {
            "preset": "lossless",
            "shard": {"weights": shard, "gradients": "world"},
            "codecs": {"weights": {"gcd": leaf, "gpu": "int8", "node": leaf}},
            "topology": _topology(LAYOUTS[WORLD]),
        }
        engine = engine_of(ds_config(block))
        seen: list[torch.Tensor] = []
        collectives = engine.optimizer.hzero.weights.collectives
        decode = collectives.decode_gathered

        def spy(*args, decode=decode, seen=seen):
            whole = decode(*args)
            seen.extend(t.clone() for t in whole)
            return whole

        collectives.decode_gathered = spy
        train(engine, 2)
        assert len(seen) >= 2 * 7
        assert same_on_all_ranks(seen), (leaf, shard)
        engine.destroy()
