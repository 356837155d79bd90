"""The block: presets, overrides leaf by leaf, and messages that name the key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from hzero.config import TIERS, CodecConfig, parse_config
from hzero.errors import ConfigError
from hzero.program.shards import ShardPlan
from hzero.topology import resolve_grid
from hzero.topology.grid import Grid
from tests.ranks import ROOT


def test_gradients_in_int4_cross_groups_of_nodes_in_int8() -> None:
    """The other codecs and the degrees of presets are those of docs/presets.md (tests/test_site.py)."""
    for preset, inside, between in (
        ("topo", "int4", "int4"),
        ("exact", "int8", "int4"),
        ("lossless", "none", "none"),
    ):
        config = parse_config({"preset": preset})
        gradients = {tier: config.codecs["gradients"][tier].codec for tier in TIERS}
        group = {"inter_group": "int8"} if between == "int4" else {}
        inner = dict.fromkeys(("intra_package", "intra_hive", "intra_node"), inside)
        assert gradients == dict.fromkeys(TIERS, between) | inner | group
        assert len({config.codecs["weights"][tier] for tier in TIERS}) == 1 and config.error_feedback == ()


def test_former_presets_are_files_of_conf() -> None:
    with pytest.raises(
        ConfigError, match="preset: found 'lean', which is gone; expected exact, which rounds no weights"
    ):
        parse_config({"preset": "lean"})
    for name, role, codec in (
        ("mild", "gradients", {"codec": "int8"}),
        ("hybrid", "tensor", {"codec": "int8", "rotation": 64}),
        ("zhybrid", "weights", {"codec": "zfp", "rate": 16}),
        ("mzhybrid", "pipeline", {"codec": "mpc"}),
    ):
        with pytest.raises(ConfigError, match=rf"preset: found '{name}', .* conf/zero/{name}.yaml"):
            parse_config({"preset": name})
        block: Any = OmegaConf.to_container(OmegaConf.load(ROOT / "conf" / "zero" / f"{name}.yaml"))
        del block["defaults"]
        assert parse_config(block).codecs[role].inter_node == CodecConfig(**codec), name


def test_settings_belong_to_one_codec() -> None:
    """What names another codec has none of the preset's settings."""
    config = parse_config(
        {"preset": "topo", "codecs": {"weights": {"intra_package": {"rotation": 64}, "intra_node": "zfp"}}}
    )
    assert config.codecs.weights.intra_package == CodecConfig(codec="int8", rotation=64)
    assert config.codecs.weights.intra_node == CodecConfig(codec="zfp")


def test_an_override_replaces_one_leaf() -> None:
    config = parse_config(
        {
            "preset": "topo",
            "codecs": {
                "gradients": {"intra_package": "none", "inter_node": {"codec": "int8", "rounding": "stochastic"}}
            },
            "block_size": 256,
            "error_feedback": ["inter_node", "intra_package"],
        }
    )
    gradients = config.codecs["gradients"]
    assert (gradients["intra_package"].codec, gradients["intra_node"].codec, gradients["inter_node"].codec) == (
        "none",
        "int4",
        "int8",
    )
    assert gradients["inter_node"].rounding == "stochastic"
    assert {config.codecs["weights"][tier].block_size for tier in TIERS} == {256}
    assert config.error_feedback == ("intra_package", "inter_node")
    # A leaf that names settings alone keeps the preset's codec.
    kept = parse_config({"preset": "topo", "codecs": {"gradients": {"inter_node": {"block_size": 64}}}})
    assert (kept.codecs["gradients"]["inter_node"].codec, kept.codecs["gradients"]["inter_node"].block_size) == (
        "int4",
        64,
    )


def test_a_dimension_takes_codecs_by_tier_or_one_name_for_all() -> None:
    assert parse_config({}).codecs.dimensions == ()
    codecs = parse_config({"block_size": 64, "codecs": {"tensor": "int8", "expert": {"inter_node": "int4"}}}).codecs
    assert codecs.dimensions == ("tensor", "expert")
    assert {codecs.tensor[tier] for tier in TIERS} == {CodecConfig(codec="int8", block_size=64)}
    names = [codecs["expert"][tier].codec for tier in ("intra_package", "intra_node", "inter_node", "inter_group")]
    assert names == ["none", "none", "int4", "int4"]
    assert {codecs.sequence[tier].codec for tier in TIERS} == {"none"}
    rotated = parse_config({"codecs": {"sequence": {"codec": "int4", "rotation": 64}}}).codecs.sequence
    assert {rotated[tier] for tier in TIERS} == {CodecConfig(codec="int4", rotation=64)}
    weights = parse_config({"preset": "lossless", "codecs": {"weights": "int8"}}).codecs.weights
    assert {weights[tier].codec for tier in TIERS} == {"int8"}


def test_short_messages_between_nodes_take_the_algorithm_of_the_block() -> None:
    setting = parse_config({"node_all_gather": {"algorithm": "pairs", "below_bytes": 1024}}).node_all_gather
    assert [setting.of(size) for size in (0, 1023, 1024)] == ["pairs", "pairs", "library"]
    assert parse_config({}).node_all_gather.of(0) == "library"


def test_exceptions_take_the_defaults_of_the_block() -> None:
    found = parse_config(
        {
            "preset": "topo",
            "block_size": 64,
            "codecs": {"except": {"*norm*": "none", "e*": {"codec": "int8", "rotation": 64}}},
        }
    )
    assert list(found.codecs.exceptions) == ["*norm*", "e*"]
    assert found.codecs.exceptions["e*"] == CodecConfig(codec="int8", block_size=64, rotation=64)
    plan = ShardPlan.from_config(found, Grid(2, 2, 2), 0)
    plans = plan.plans_of([("h.norm.weight",), ("embed",), ("enorm",), ("head",), ("head.weight", "embed.weight")])
    used = [{hop.codec.codec for hop in (*own.gather_hops(), *own.reduce_hops())} for own in plans]
    assert used == [{"none"}, {"int8"}, {"none"}, {"int8", "int4"}, {"int8"}]
    assert str(plan).endswith("none for *norm*; int8 for e*") and not plans[0].exceptions


def test_scopes_of_exceptions_are_the_blocks_unless_they_are_written() -> None:
    patterns = {"*experts*": {"weights": "world"}, "*norm*": {"gradients": "world"}, "*": {"weights": "device"}}
    codecs = {"except": {"*bias": "none"}}
    block = parse_config({"preset": "exact", "shard": {"gradients": "node", "except": patterns}, "codecs": codecs})
    plan = ShardPlan.from_config(block, Grid(2, 2, 2), 3)
    names = [(name,) for name in ("experts.up", "experts.norm", "norm.bias", "head.bias", "head")]
    plans = plan.plans_of(names)
    scopes = [(own.weights_scope, own.gradients_scope) for own in plans]
    assert scopes == [
        ("world", "node"),
        ("world", "node"),
        ("package", "world"),
        ("device", "node"),
        ("device", "node"),
    ]
    assert [own.whole_copies for own in plans] == [False, False, False, True, True]
    assert [own.exact for own in plans] == [False, False, False, False, True]
    assert [hop.codec.codec for hop in plans[0].gather_hops()] == ["none"] * 3, "no copy, so no changes"
    assert plan.parts([7, 1, 2, 3, 5], names) == [(plans[0], [7, 1]), (plans[2], [2]), (plans[3], [3]), (plans[4], [5])]
    assert "; weights over the world, gradients over the node for *experts*; weights" in str(plan)
    # A machine without packages of several devices: what is inherited is what the preset's degree became.
    narrow = ShardPlan.from_config(block, Grid(2, 4, 1), 0).plans_of(names)
    assert [own.weights_scope for own in narrow] == ["world", "world", "node", "device", "device"]


def codec(of: Any, role: str = "weights", tier: str = "intra_node") -> dict[str, Any]:
    return {"codecs": {role: {tier: of}}}


def int4(**settings: Any) -> dict[str, Any]:
    return codec({"codec": "int4", **settings}, "gradients")


NO_FIXED_SIZE = "found 'mpc', whose messages have no fixed size; expected none"
#: Blocks, and what is said behind "hzero.".
BAD: list[tuple[Any, str]] = [
    ({"preset": "tpoo"}, "preset: found 'tpoo'; expected .. did you mean 'topo'"),
    (codec("int8", tier="node"), "codecs.weights: found key 'node'; expected .. (did you mean 'inter_node'?)"),
    ({"topology": {"gpus_per_node": 4}}, "topology: found key 'gpus_per_node'; expected .. (did you mean 'packages_per_node'?)"),
    ({"presets": "topo"}, "found key 'presets'; expected .. did you mean 'preset'"),
    ({"shard": {"weight": "node"}}, "shard: found key 'weight'; expected .. did you mean 'weights'"),
    ({"shard": {"weights": "nod"}}, "shard.weights: found 'nod'; expected .. did you mean 'node'"),
    ({"shard": {"except": {"*": {"weights": "nod"}}}}, "shard.except.*.weights: found 'nod'; expected .. did you mean 'node'"),
    ({"shard": {"except": {"*": {"weight": "node"}}}}, "shard.except.*: found key 'weight'; expected .. did you mean 'weights'"),
    ({"shard": {"except": {"": {}}}}, "shard.except: found an empty pattern; expected one such as *norm*"),
    ({"shard": {"except": {"*": "node"}}}, "shard.except.*: found 'node'; expected a block with keys weights, gradients"),
    (codec("int8", tier="intra_nod"), "codecs.weights: found key 'intra_nod'; expected .. did you mean 'intra_node'"),
    (codec("int9"), "codecs.weights.intra_node.codec: found 'int9'"),
    ({"codecs": {"tensors": "int8"}}, "codecs: found key 'tensors'; expected .. did you mean 'tensor'"),
    (codec({"codec": "int8", "block_size": 8}), "codecs.weights.intra_node.block_size: found 8"),
    (int4(block_size=64, rotation=128), "found rotation 128 with codec int4 and block_size 64; expected int8 or int4"),
    (codec({"codec": "bf16", "rounding": "stochastic"}), "found rounding 'stochastic' with codec bf16; expected int8"),
    (codec({"codec": "none", "rounding": "stochastic"}), "found rounding 'stochastic' with codec none; expected int8"),
    (int4(scale="fp32"), "codecs.gradients.intra_node: found key 'scale'"),
    ({"error_feedback": ["inter_nodes"]}, "did you mean 'inter_node'"),
    ({"node_all_gather": "doubling"}, "node_all_gather: found 'doubling'; expected a block with keys algorithm"),
    ({"node_all_gather": {"algorithm": "pairs"}}, "node_all_gather: found algorithm 'pairs' without below_bytes"),
    (codec("exp"), "codecs.weights.intra_node.codec: found 'exp'; expected none, bf16, int8, int4, zfp, mpc or exact"),
    (codec("mpc", "gradients", "inter_node"), f"codecs.gradients.inter_node: {NO_FIXED_SIZE}"),
    (codec("mpc"), f"codecs.weights.intra_node: {NO_FIXED_SIZE}"),
    ({"codecs": {"except": {"*": "mpc"}}}, f"codecs.except.*: {NO_FIXED_SIZE}"),
    (codec({"codec": "int8", "rate": 8}), "codecs.weights.intra_node: found rate 8 with codec int8; expected zfp"),
    (codec({"codec": "bf16", "dimension": 1}), "codecs.weights.intra_node: found dimension 1 with codec bf16; expected mpc"),
    ({"refresh_differences": True}, "refresh_differences: found a key that is gone; expected codec 'exact' in hzero.codecs.we"),
    ({"codecs": {"gradients": "exact"}}, "codecs.gradients.intra_package: found 'exact', which sends changes of weights; exp"),
    ({"codecs": {"tensor": "exact"}}, "codecs.tensor.intra_package: found 'exact', which sends changes of weights; expected"),
    ({"codecs": {"except": {"*": "exact"}}}, "codecs.except.*: found 'exact', which sends changes of weights"),
    ({"codecs": {"except": ["*norm*"]}}, "codecs.except: found ['*norm*']"),
    ({"full_refresh_every": 9}, "full_refresh_every: found a key that is gone"),
    ({"refresh_message_bytes": 1 << 31}, "refresh_message_bytes: found 2147483648"),
    ({"resident": "decoded"}, "resident: found 'decoded' with weights over the package"),
    ({"guard": 5.5}, "guard.discarded_steps: found 5.5; expected a valid integer"),
    ({"block_size": 24}, "block_size: found 24; expected a multiple of 16"),
    ({"boundary_message_bytes": -1}, "boundary_message_bytes: found -1; expected greater than or equal to 0"),
    (codec("INT8"), "codecs.weights.intra_node.codec: found 'INT8'; expected .. (did you mean 'int8'?)"),
    ({"checkpoint": True}, "checkpoint: found True; expected a block with keys same_batch, verify, trust"),
    ({"topology": {"nodes": 2}}, "topology.packages_per_node: missing"),
    ({"topology": "auto"}, 'topology: found "auto"; expected "discover"'),
    ({"topology": {"packages_per_node": 2, "order": ["inter_node", "intra_node"]}}, "topology.order"),
]  # fmt: skip


@pytest.mark.parametrize(("block", "message"), BAD)
def test_bad_blocks_are_named(block: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(block)
    assert str(error.value).startswith("hzero")
    assert all(part in str(error.value) for part in message.split(" .. ")), error.value
    assert "\n" not in str(error.value)


def grid_of(topology: Any, ranks: int) -> Grid:
    """The grid of a block's key."""
    return resolve_grid(parse_config({"topology": topology}).topology, ranks)


def test_topology_from_a_file_and_its_complaints(tmp_path: Path) -> None:
    file = tmp_path / "machine.yaml"
    file.write_text("topology: {packages_per_node: 4, devices_per_package: 2, bandwidth_gb_s: {node: 12.5}}\n")
    assert grid_of(str(file), 48).nodes == 6
    file.write_text(json.dumps({"nodes": 2, "packages_per_node": 2, "devices_per_package": 2}))
    assert grid_of(str(file), 8).world_size == 8
    with pytest.raises(ConfigError, match="nodes=3 or packages_per_node=3 or devices_per_package=3 would fit"):
        grid_of(str(file), 12)
    with pytest.raises(ConfigError, match="no single factor"):
        grid_of(str(file), 7)


def test_auto_and_presets() -> None:
    assert grid_of("frontier", 16) == Grid(2, 4, 2)
    assert grid_of("mi300x", 8) == Grid(1, 8, 1)
    with pytest.raises(
        ConfigError, match="packages_per_node=4 x devices_per_package=2 is 8 ranks a node, but the world has 12"
    ):
        grid_of("lumi", 12)
    assert grid_of("discover", 1) == Grid(1, 1, 1)
    with pytest.raises(ConfigError, match="discovery found 1 ranks; expected 8"):
        grid_of("discover", 8)
    with pytest.raises(
        ConfigError, match=r"found no file 'frontie'; expected discover, a file, .*did you mean 'frontier'"
    ):
        grid_of("frontie", 8)


def test_order_is_a_permutation() -> None:
    grid = grid_of({"nodes": 2, "packages_per_node": 3, "order": ["intra_node", "intra_package", "inter_node"]}, 6)
    assert grid.stride("inter_node") == 1
    assert list(grid.tier_group(0, "intra_node")) == [0, 2, 4]
