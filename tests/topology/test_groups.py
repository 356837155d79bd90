"""Groups of nodes that nobody has declared: how many nodes each has, who makes them, and how to switch them off."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hzero.config import TopologyConfig, parse_config
from hzero.engine.engine import undeclared
from hzero.errors import ConfigError
from hzero.program.shards import ShardPlan
from hzero.tools.experiment import compose
from hzero.topology import Grid, discovery, resolve_grid
from hzero.topology.discovery import RankReport, assemble
from hzero.topology.grid import chosen_group
from hzero.topology.node import Device, tiers_of
from hzero.topology.sources import PRESETS, preset, read_node


@given(st.integers(2, 20_000))
def test_a_group_has_the_divisor_nearest_to_the_root(nodes: int) -> None:
    root = nodes**0.5
    near = [size for size in range(1, nodes + 1) if nodes % size == 0 and root / 4 <= size <= 4 * root]
    expected = min(near, key=lambda size: abs(size - root), default=None)
    assert chosen_group(nodes) == (expected if nodes >= 64 else None)


def _grid(topology: Any, nodes: int, width: int = 2) -> Grid:
    """The grid of a block's key, on so many nodes without GPUs if it is discovered."""
    world = nodes * width
    reports = [RankReport(rank, f"node{rank // width}", None) for rank in range(world)]
    with patch.object(discovery, "discover", lambda _: assemble(reports)):
        discovery.discovered_grid.cache_clear()
        try:
            block = parse_config({} if topology is None else {"topology": topology})
            return resolve_grid(block.topology, world)
        finally:
            discovery.discovered_grid.cache_clear()


@pytest.mark.parametrize(
    ("topology", "nodes", "groups"),
    [
        (None, 72, 9),
        (None, 60, 1),
        ({"nodes_per_group": None}, 72, 1),
        ({"nodes_per_group": 12}, 72, 6),
        ({"packages_per_node": 2}, 72, 9),
        ({"packages_per_node": 2, "nodes_per_group": None}, 72, 1),
        ({"packages_per_node": 2, "nodes_per_group": 36}, 72, 2),
        ({"packages_per_node": 2, "clusters": 2}, 144, 9),
        ({"packages_per_node": 2, "switch_nodes": 128}, 9408, 147),
    ],
)
def test_groups_are_made_unless_the_block_says_otherwise(topology: Any, nodes: int, groups: int) -> None:
    grid = _grid(topology, nodes)
    assert (grid.nodes, grid.size("inter_group")) == (nodes, groups)
    plan = ShardPlan.from_config(parse_config({}), grid, 0)
    assert ("inter_group" in [hop.tier for hop in plan.boundary_hops()]) == (groups > 1)
    chosen = grid.automatic and groups > 1
    assert [note for note in plan.notes if "chosen" in note] == [grid.groups_text] * chosen
    assert ("(groups chosen)" in str(plan)) == chosen, "the start line"


def test_a_discovered_machine_prefers_a_part_of_its_switch_group(tmp_path: Path) -> None:
    """72 nodes, found through the description of a node. One of another switch group leaves its size unknown."""
    (tmp_path / "node").write_text("devices: 2\npackages: [[0], [1]]\nswitch_nodes: 12\n")
    machine = read_node(str(tmp_path / "node"))
    for other, group in ((machine, 6), (replace(machine, switch_nodes=None), 8)):
        machines = [machine, *[other] * 143]
        reports = [RankReport.of(r, f"node{r // 2}", machines[r], Device(r % 2)) for r in range(144)]
        found = assemble(reports).required_grid()
        assert (found.nodes_per_group, found.grouped(12).nodes_per_group) == (group, 12)


def test_a_file_of_a_grid_keeps_its_groups_unless_the_block_writes_others(tmp_path: Path) -> None:
    file = tmp_path / "grid.yaml"
    file.write_text("packages_per_node: 2\nnodes_per_group: 24\n")
    source = str(file)
    assert _grid(source, 72).nodes_per_group == _grid({"source": source}, 72).nodes_per_group == 24
    assert _grid({"source": source, "nodes_per_group": "automatic"}, 72).nodes_per_group == 8
    assert _grid({"source": source, "nodes_per_group": None}, 72).nodes_per_group is None
    keys = ["topology=auto", f"topology.source={source}", "launcher.world_size=144", "zero=topo"]
    assert compose(keys).grid.nodes_per_group == 24
    assert compose([*keys, "topology.nodes_per_group=36"]).grid.nodes_per_group == 36
    file.write_text("nodes_per_group: 24\n")
    with pytest.raises(ConfigError, match="packages_per_node: missing"):
        _grid(source, 72)


def test_a_source_in_a_block_is_the_same_as_its_name_alone() -> None:
    with pytest.raises(ConfigError, match=r"hzero\.topology: found no file 'frontierr'"):
        resolve_grid(parse_config({"topology": {"source": "frontierr"}}).topology, 8)
    cpu = torch.device("cpu")
    start_line = undeclared(parse_config({"topology": "discover"}), cpu)
    for topology in ({"source": "discover"}, {"nodes_per_group": 4}):
        assert undeclared(parse_config({"topology": topology}), cpu) == start_line
    assert not undeclared(parse_config({"topology": {"source": "frontier"}}), cpu)


@pytest.mark.parametrize(
    ("topology", "says"),
    [
        ({"nodes_per_group": 5}, r"nodes_per_group: found 5; expected a divisor of the 72 nodes: 1, 2, 3"),
        ({"packages_per_node": 2, "nodes_per_group": "many"},
         "nodes_per_group: found 'many'; expected a number of nodes, null"),
        ({"source": "frontier", "devices_per_package": 2}, r"devices_per_package: found together with .*source 'frontier'"),
    ],
)  # fmt: skip
def test_what_cannot_be_groups_is_refused(topology: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        _grid(topology, 72)


def test_a_count_without_a_divisor_is_warned_about_with_the_nearest_that_has_one() -> None:
    machine = {"packages_per_node": 2, "devices_per_package": 2}
    grid = _grid(machine, 67, width=4)
    assert grid.nodes_per_group is None
    [warning] = ShardPlan.from_config(parse_config({}), grid, 0).adaptations
    assert "67 nodes form no groups" in warning and "66 nodes would" in warning
    off = _grid({**machine, "nodes_per_group": None}, 67, width=4)
    assert not ShardPlan.from_config(parse_config({}), off, 0).adaptations


@pytest.mark.parametrize(
    "order", [("inter_node", "intra_node", "intra_package"), ("intra_package", "intra_node", "inter_node")]
)
def test_ranks_of_a_part_of_the_world_form_groups_of_their_own(order: Any) -> None:
    """A pipeline stage has a part of the nodes, which groups of the world would not divide evenly."""
    whole = Grid(576, 2, 1, order, automatic=True)
    assert whole.nodes_per_group == 24
    places = {rank: whole.coordinates(rank) for rank in range(whole.world_size)}
    number = {rank: place.inter_group * 24 + place.inter_node for rank, place in places.items()}
    for nodes, group in ((32, None), (72, 8)):
        ranks = [rank for rank in places if number[rank] < nodes]
        part = whole.of_ranks(ranks)
        assert (part.nodes, part.nodes_per_group) == (nodes, group)
        size = group or nodes
        for rank in (0, 1, len(ranks) - 1):
            first, *others = [number[ranks[peer]] for peer in part.tier_group(rank, "inter_node")]
            assert first % size == 0 and others == list(range(first + 1, first + size))


@pytest.mark.parametrize(
    ("block", "weights", "gradients"),
    [
        ({"preset": "topo"}, "int8", "int8"),
        ({"preset": "zeropp"}, "int8", "int8"),
        ({"preset": "lossless"}, "exact", "none"),
        ({"preset": "topo", "codecs": {"gradients": {"inter_node": "none"}}}, "int8", "none"),
        ({"preset": "topo", "codecs": {"gradients": {"inter_group": "int4"}, "weights": {"inter_node": "int4"}}}, "int8",
         "int4"),
    ],
)  # fmt: skip
def test_groups_exchange_in_int8_or_better(block: dict[str, Any], weights: str, gradients: str) -> None:
    plan = ShardPlan.from_config(parse_config(block), Grid(64, 4, 2, automatic=True), 0)
    for hops, codec in ((plan.gather_hops(), weights), (plan.reduce_hops(), gradients)):
        assert {hop.tier: hop.codec.codec for hop in hops}["inter_group"] == codec


def test_the_plan_makes_the_groups_of_the_run() -> None:
    keys = ["topology=frontier", "zero=topo", "topology.nodes=128"]
    assert compose(keys).grid.nodes_per_group == 8
    off = compose([*keys, "topology.nodes_per_group=null"])
    assert off.grid.nodes_per_group is None
    assert off.block is not None and parse_config(off.block).topology.nodes_per_group is None  # type: ignore[union-attr]


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "laptop"])
def test_presets_are_options_of_the_trainer_and_the_plan(name: str) -> None:
    experiment = compose([f"topology={name}", "topology.nodes=2"])
    assert experiment.grid == resolve_grid(TopologyConfig(source=name), experiment.world_size)
    rates = {tier.name: tier.gb_s for tier in tiers_of(preset(name)) if tier.gb_s is not None}
    declared = experiment.config["topology"]
    if "nic_gbit" in declared:
        assert rates == {"inter_node": declared["nic_gbit"] * declared["nics_per_node"] / 8 / 8}
    else:
        assert declared["bandwidth_gb_s"].items() >= rates.items()
