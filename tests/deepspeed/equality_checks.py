"""Codec `none` gives the losses of ZeRO-3 and DDP. Run by test_stage.py on 8 and on 6 ranks."""

from __future__ import annotations

import functools
import itertools
import os
from typing import Any

import pytest
import torch

from hzero.config import TopologyConfig
from hzero.topology import resolve_grid
from tests.deepspeed.training import (
    TOPOLOGY,
    WORLD,
    Run,
    assert_losses,
    ds_config,
    engine_of,
    run,
    train,
    train_ddp,
)
from tests.rank_main import same_on_all_ranks

STEPS = {1: 4, 3: 3}  # optimizer steps, by micro-batches per step
#: Machines of more tiers: two groups of two nodes of two packages; two groups of one node of 2 x 2 devices; two clusters of
#: one node with two hives of two packages.
MORE_TIERS: dict[int, list[dict[str, int]]] = {
    8: [
        {"nodes": 4, "packages_per_node": 2, "devices_per_package": 1, "nodes_per_group": 2},
        {"nodes": 2, "packages_per_node": 2, "devices_per_package": 2, "nodes_per_group": 1},
        {"nodes": 2, "packages_per_node": 4, "devices_per_package": 1, "packages_per_hive": 2, "clusters": 2},
    ],
    6: [],
}
#: Whether the lattice is compared cell by cell on every machine, with 1 and 3 micro-batches; that takes minutes.
FULL = os.environ.get("HZERO_LATTICE") == "full"
PACKAGE = {"weights": "package", "gradients": "package"}
#: Scopes of the presets lossless, zero3 and hpz.
_PRESETS = (("package", "node"), ("world", "world"), ("node", "world"))


@functools.cache
def _references(accumulation: int) -> dict[str, tuple[list[float], list[float]]]:
    """Losses and gradient norms of stock ZeRO-3 and of DDP, after a comparison of the two."""
    stock = run(None, accumulation, STEPS[accumulation])
    norms: list[float] = []
    ddp = train_ddp(STEPS[accumulation], accumulation, norms=norms)
    assert stock.losses[-1] < stock.losses[0] and not stock.log
    _assert_equal("ZeRO-3", stock, {"DDP": (ddp, norms)})
    return {"ZeRO-3": (stock.losses, stock.norms), "DDP": (ddp, norms)}


def _assert_equal(what: str, found: Run, references: dict[str, tuple[list[float], list[float]]]) -> None:
    for name, (want, want_norms) in references.items():
        assert_losses(found.losses, want[: len(found.losses)], what=f"losses of {what} and {name}")
        assert_losses(found.norms, want_norms[: len(found.norms)], what=f"gradient norms of {what} and {name}")


def _compare(accumulation: int, steps: int | None = None, **block: Any) -> None:
    block = {"preset": "lossless", **block, "topology": {**TOPOLOGY, **block.get("topology", {})}}
    found = run(block, accumulation, steps or STEPS[accumulation])
    assert found.log
    _assert_equal(str(block), found, _references(accumulation))


def check_presets_with_codec_none() -> None:
    if WORLD != 8:
        pytest.skip("these scopes are in the lattice")
    for preset, accumulation in (("lossless", 1), ("lossless", 3), ("zero3", 1), ("hpz", 3)):
        _compare(accumulation, preset=preset)


def check_layouts_with_tiers_of_size_one() -> None:
    """Scopes of a single device, chosen or not: no hop inside, every hop inside, other orders of ranks. Half of them usually."""
    if WORLD != 8:
        pytest.skip("these layouts have 8 ranks")
    cases: list[tuple[tuple[int, int, int], dict[str, Any]]] = [
        ((2, 4, 1), {"shard": PACKAGE}),
        ((1, 1, 8), {}),
        ((2, 2, 2), {"order": ["intra_node", "inter_node", "intra_package"]}),
        ((8, 1, 1), {}),
        ((1, 4, 2), {}),
        ((2, 2, 2), {"shard": PACKAGE, "order": ["intra_package", "intra_node", "inter_node"]}),
    ]
    for layout, block in cases if FULL else cases[:3]:
        order = {"order": block.pop("order")} if "order" in block else {}
        _compare(1, 2, **block, topology={**dict(zip(TOPOLOGY, layout)), **order})


def check_lattice_of_scopes() -> None:
    """Weights and gradients over every pair of scopes that nests, from ZeRO-1 to ZeRO-3.

    On machines of more than three tiers every fifth of the pairs with a scope of such a tier; on 6 ranks every second pair; on 8
    those that are no preset's.
    """
    for topology in (TOPOLOGY, *MORE_TIERS[WORLD]):
        scopes = resolve_grid(TopologyConfig(**topology), WORLD).scopes
        pairs = list(itertools.combinations_with_replacement(scopes, 2))
        if not FULL and topology != TOPOLOGY:
            pairs = [pair for pair in pairs if {"hive", "group", "cluster"} & set(pair)][::5]
        elif not FULL:
            pairs = pairs[3::2] if WORLD == 6 else [pair for pair in pairs if pair not in _PRESETS]
        for number, (weights, gradients) in enumerate(pairs):
            shard = {"weights": weights, "gradients": gradients}
            for accumulation in (1, 3) if FULL else (3,) if number % 2 else (1,):
                _compare(accumulation, None if FULL else 2, shard=shard, topology=topology)
    _compare(3, preset="zero1", resident="payload")


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
    for leaf, shard in cases if WORLD == 8 else cases[3:4]:
        block = {
            "preset": "lossless",
            "shard": {"weights": shard, "gradients": "world"},
            "codecs": {"weights": {"intra_package": leaf, "intra_node": "int8", "inter_node": leaf}},
            "topology": TOPOLOGY,
        }
        engine = engine_of(ds_config(block))
        seen: list[torch.Tensor] = []
        resident = engine.optimizer.hzero.weights

        def spy(params, unshard=resident.unshard, seen=seen):
            def seeing(wait):
                whole = wait()
                seen.extend(tensor.clone() for tensor in whole)
                return whole

            return [(same, functools.partial(seeing, wait)) for same, wait in unshard(params)]

        resident.unshard = spy
        train(engine, 2)
        assert len(seen) >= 2 * 7
        assert same_on_all_ranks(seen), (leaf, shard)
        engine.destroy()
