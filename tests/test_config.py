"""The block: presets, overrides leaf by leaf, and messages that name the key."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hzero.config import CODECS, DIMENSIONS, PRESETS, TIERS, CodecConfig
from hzero.parsing import parse_config, parse_topology
from hzero.sharding.plan import ShardPlan
from hzero.topology.grid import Grid
from hzero.topology.resolve import resolve_grid
from hzero.validation import ConfigError


def test_presets_are_the_documented_points() -> None:
    expected = {
        "zero1": ("device", "device", "none", "none"),
        "zero2": ("device", "world", "none", "none"),
        "replica": ("device", "device", "int8", "int4"),
        "half": ("node", "node", "int8", "int4"),
        "zero3": ("world", "world", "none", "none"),
        "hpz": ("node", "world", "none", "none"),
        "zeropp": ("node", "world", "int8", "int4"),
        "lossless": ("package", "node", "none", "none"),
        "topo": ("package", "node", "int8", "int4"),
        "mild": ("package", "node", "int8", "int8"),
        "zhybrid": ("device", "device", "zfp", "zfp"),
        "mzhybrid": ("device", "device", "none", "zfp"),
        "hybrid": ("package", "node", "int8", {"gcd": "int8", "hive": "int8", "gpu": "int8"}),
    }
    assert list(expected) == list(PRESETS)
    for name, (weights, gradients, weight_codec, gradient_codec) in expected.items():
        config = parse_config({"preset": name})
        assert (config.shard.weights, config.shard.gradients) == (weights, gradients)
        assert {config.codecs["weights"][tier].codec for tier in TIERS} == {weight_codec}
        inner = {} if isinstance(gradient_codec, str) else gradient_codec
        outer = gradient_codec if isinstance(gradient_codec, str) else "int4"
        codecs = {tier: config.codecs["gradients"][tier].codec for tier in TIERS}
        between_groups = {"group": "int8"} if outer == "int4" else {}
        assert codecs == dict.fromkeys(TIERS, outer) | between_groups | inner
        assert config.error_feedback == ()


def test_presets_of_activations() -> None:
    low, high = {"codec": "zfp", "rate": 8}, {"codec": "zfp", "rate": 16}
    for name, weights, gradients, activations, optimizer in (
        ("topo", "int8", "int4", "none", "none"),
        ("zhybrid", high, low, high, high),
        ("mzhybrid", "none", low, "mpc", "mpc"),
        ("hybrid", "int8", {"gcd": "int8", "gpu": "int8", "node": "int4"}, {"codec": "int8", "rotation": 64}, "int8"),
    ):
        config = parse_config({"preset": name})
        roles = {"weights": weights, "gradients": gradients, **dict.fromkeys(DIMENSIONS, activations)}
        roles["optimizer"] = optimizer
        same = parse_config({"preset": "zero1", "codecs": roles}).codecs
        assert all(config.codecs[role][tier] == same[role][tier] for role in roles for tier in TIERS)
        assert config.written_dimensions == (), "what a preset says of dimensions that nobody uses is no mistake"
    # Settings are of one codec: what names another one has none of the preset's.
    codecs = {"gradients": {"gcd": {"rate": 12}, "gpu": "int4"}, "tensor": "none", "expert": {"node": "int8"}}
    config = parse_config({"preset": "zhybrid", "codecs": codecs})
    assert config.codecs.gradients.gcd == CodecConfig(codec="zfp", rate=12)
    assert config.codecs.gradients.gpu == CodecConfig(codec="int4")
    assert config.codecs.gradients.node == CodecConfig(codec="zfp", rate=8)
    assert config.written_dimensions == ("expert",) and config.codecs.expert.gpu.rate == 16


def test_an_override_replaces_one_leaf() -> None:
    config = parse_config(
        {
            "preset": "topo",
            "codecs": {"gradients": {"gcd": "none", "node": {"codec": "int8", "rounding": "stochastic"}}},
            "block_size": 256,
            "error_feedback": ["node", "gcd"],
        }
    )
    gradients = config.codecs["gradients"]
    assert (gradients["gcd"].codec, gradients["gpu"].codec, gradients["node"].codec) == ("none", "int4", "int8")
    assert gradients["node"].rounding == "stochastic"
    assert {config.codecs["weights"][tier].block_size for tier in TIERS} == {256}
    assert config.error_feedback == ("gcd", "node")
    # A leaf that names settings alone keeps the preset's codec.
    kept = parse_config({"preset": "topo", "codecs": {"gradients": {"node": {"block_size": 64}}}})
    assert (kept.codecs["gradients"]["node"].codec, kept.codecs["gradients"]["node"].block_size) == ("int4", 64)


def test_a_dimension_takes_codecs_by_tier_or_one_name_for_all() -> None:
    assert parse_config({}).codecs.dimensions == ()
    codecs = parse_config({"block_size": 64, "codecs": {"tensor": "int8", "expert": {"node": "int4"}}}).codecs
    assert codecs.dimensions == ("tensor", "expert")
    assert {codecs.tensor[tier] for tier in TIERS} == {CodecConfig(codec="int8", block_size=64)}
    assert [codecs["expert"][tier].codec for tier in ("gcd", "gpu", "node", "group")] == [
        "none",
        "none",
        "int4",
        "int4",
    ]
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
        {"block_size": 64, "codecs": {"except": {"*norm*": "none", "e*": {"codec": "int8", "scale": "fp32"}}}}
    )
    assert list(found.codecs.exceptions) == ["*norm*", "e*"]
    assert found.codecs.exceptions["e*"] == CodecConfig(codec="int8", block_size=64, scale="fp32")
    plan = ShardPlan.from_config(found, Grid(2, 2, 2), 0)
    assert [plan.exception_of(name) for name in ("h.norm.weight", "embed", "enorm", "head")] == [0, 1, 0, None]
    own = plan.with_codec(found.codecs.exceptions["*norm*"])
    assert {hop.codec.codec for hop in (*own.gather_hops(), *own.reduce_hops())} == {"none"}
    assert str(plan).endswith("none for *norm*; int8 for e*") and not own.exceptions


BAD: list[tuple[Any, str]] = [
    ({"preset": "tpoo"}, "hzero.preset: unknown preset 'tpoo'; did you mean 'topo'"),
    ({"presets": "topo"}, "unknown key 'presets'; did you mean 'preset'"),
    ({"shard": {"weight": "node"}}, "hzero.shard: unknown key 'weight'; did you mean 'weights'"),
    ({"shard": {"weights": "nod"}}, "hzero.shard.weights: unknown value 'nod'; did you mean 'node'"),
    ({"shard": {"weights": "world", "gradients": "node"}}, "weights may be device, package, hive, node"),
    ({"shard": "node"}, "hzero.shard: found 'node'"),
    ({"codecs": {"weights": {"gpuu": "int8"}}}, "hzero.codecs.weights: unknown key 'gpuu'; did you mean 'gpu'"),
    ({"codecs": {"weights": {"gpu": "int9"}}}, "hzero.codecs.weights.gpu.codec: unknown value 'int9'"),
    ({"codecs": {"tensors": "int8"}}, "hzero.codecs: unknown key 'tensors'; did you mean 'tensor'"),
    ({"codecs": {"tensor": 8}}, "hzero.codecs.tensor: found 8"),
    ({"codecs": {"weights": {"gpu": {"codec": "int8", "rounding": "up"}}}}, "hzero.codecs.weights.gpu.rounding"),
    (
        {"codecs": {"weights": {"gpu": {"codec": "int8", "block_size": 8}}}},
        "hzero.codecs.weights.gpu.block_size: found 8",
    ),
    (
        {"codecs": {"gradients": {"gpu": {"codec": "int4", "block_size": 64, "rotation": 128}}}},
        "hzero.codecs.gradients.gpu: found rotation 128 with codec int4 and block_size 64; possible with int8 and int4",
    ),
    (
        {"codecs": {"gradients": {"gpu": {"codec": "int4", "block_size": 512, "scale": "int8"}}}},
        "hzero.codecs.gradients.gpu: found scale 'int8' with codec int4 and block_size 512; possible with int8 and int4 and a "
        "block_size of 32, 64, 128, 256",
    ),
    (
        {"codecs": {"gradients": {"gpu": {"codec": "int4", "rotation": 32}}}},
        "hzero.codecs.gradients.gpu.rotation: unknown value 32. Possible: 0, 64, 128",
    ),
    ({"block_size": "128"}, "hzero.block_size: found '128'"),
    ({"error_feedback": ["nodes"]}, "did you mean 'node'"),
    ({"node_all_gather": "doubling"}, "hzero.node_all_gather: found 'doubling', expected a block with keys algorithm"),
    (
        {"node_all_gather": {"algorithm": "doubled", "below_bytes": 1}},
        "hzero.node_all_gather.algorithm: unknown value 'doubled'; did you mean 'doubling'",
    ),
    ({"node_all_gather": {"algorithm": "pairs", "below_bytes": -1}}, "hzero.node_all_gather.below_bytes: found -1"),
    ({"node_all_gather": {"algorithm": "pairs"}}, "hzero.node_all_gather: found algorithm 'pairs' without below_bytes"),
    ({"exact_evaluation": "yes"}, "hzero.exact_evaluation: found 'yes'"),
    (
        {"codecs": {"gradients": {"gpu": "exp"}}},
        "hzero.codecs.gradients.gpu: found 'exp', which holds bfloat16 numbers, and sums are float32; possible: none, bf16, int8",
    ),
    (
        {"codecs": {"gradients": {"node": "mpc"}}},
        "hzero.codecs.gradients.node: found 'mpc', whose messages have no fixed size, as those of a stage have; possible: none",
    ),
    (
        {"codecs": {"weights": {"gpu": "mpc"}}},
        "hzero.codecs.weights.gpu: found 'mpc', whose messages have no fixed size, as resident weights have; possible: none",
    ),
    ({"codecs": {"except": {"*": "mpc"}}}, "hzero.codecs.except.*: found 'mpc', whose messages have no fixed size"),
    (
        {"codecs": {"weights": {"gpu": "zfp"}}},
        "hzero.codecs.weights.gpu: found codec zfp without rate, the bits of a value",
    ),
    ({"codecs": {"weights": {"gpu": {"codec": "zfp", "rate": 25}}}}, "hzero.codecs.weights.gpu.rate: found 25"),
    (
        {"codecs": {"weights": {"gpu": {"codec": "int8", "rate": 8}}}},
        "hzero.codecs.weights.gpu: found rate 8 with codec int8; possible with zfp",
    ),
    (
        {"codecs": {"weights": {"gpu": {"codec": "bf16", "dimension": 1}}}},
        "hzero.codecs.weights.gpu: found dimension 1 with codec bf16; possible with mpc",
    ),
    (
        {"codecs": {"weights": {"node": "exp"}}, "refresh_differences": True},
        "hzero.refresh_differences: weights are refreshed on gpu, node with codec exp",
    ),
    (
        {"preset": "zero3", "refresh_differences": True},
        "hzero.refresh_differences: no copy is kept of weights over the world",
    ),
    (
        {"preset": "lossless", "refresh_differences": True},
        "weights are refreshed on gpu, node with codec none, where a difference has no fewer bytes and is rounded; possible "
        "with int4, int8, bf16, zfp in hzero.codecs.weights",
    ),
    (
        {"codecs": {"except": {"*": {"codec": "int8", "size": 8}}}},
        "hzero.codecs.except.*: unknown key 'size'; did you mean 'block_size'",
    ),
    ({"codecs": {"except": ["*norm*"]}}, "hzero.codecs.except: found ['*norm*']"),
    (
        {"codecs": {"except": {"*": "exp"}}},
        "hzero.codecs.except.*: found 'exp', which holds bfloat16 numbers, and sums are float32; possible: none, bf16, int",
    ),
    ({"accumulators": "fp16"}, "hzero.accumulators: unknown value 'fp16'; did you mean 'bf16'"),
    ({"full_refresh_every": 0}, "hzero.full_refresh_every: found 0"),
    ({"resident": "decoded"}, "hzero.resident: found 'decoded' with weights over the package"),
    ({"resident": "whole"}, "hzero.resident: unknown value 'whole'. Possible: decoded, payload"),
    ({"checksum": 1}, "hzero.checksum: found 1"),
    ({"canary": 100}, "hzero.canary: found 100, expected a block with keys every_steps"),
    ({"canary": {"bytes": 8}}, "hzero.canary.bytes: found 8"),
    ({"guard": 5.5}, "hzero.guard: found 5.5, expected a number of steps or a block with keys discarded_steps, every"),
    ({"guard": -1}, "hzero.guard.discarded_steps: found -1"),
    ({"checkpoint": True}, "hzero.checkpoint: found True, expected a block with keys same_batch, verify, trust"),
    ({"checkpoint": {"verif": True}}, "hzero.checkpoint: unknown key 'verif'; did you mean 'verify'"),
    ({"topology": 8}, "hzero.topology: found 8"),
    ({"topology": {"nodes": 2}}, "hzero.topology.gpus_per_node: missing"),
    ({"topology": {"nodes": "2", "gpus_per_node": 2}}, "hzero.topology.nodes: found '2'"),
    ({"topology": {"gpus_per_node": 2, "order": ["node", "gpu"]}}, "order"),
    ("topo", "hzero: found 'topo'"),
]


@pytest.mark.parametrize(("block", "message"), BAD)
def test_bad_blocks_are_named(block: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(block)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


KEYS = re.findall(
    r"\w+",
    "preset shard codecs weights gcd block_size error_feedback node_all_gather algorithm below_bytes exact_evaluation checksum "
    "canary every_steps topology nodes gpus_per_node order",
)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from(CODECS),
        lambda inner: (
            st.lists(inner, max_size=2)
            | st.dictionaries(
                st.sampled_from(KEYS) | st.text(max_size=3),
                inner,
                max_size=3,
            )
        ),
        max_leaves=8,
    )
)
def test_any_block_is_read_or_refused_with_one_line(block: Any) -> None:
    try:
        parse_config(block)
    except ConfigError as error:
        assert str(error).startswith("hzero")


def test_topology_from_a_file_and_its_complaints(tmp_path: Path) -> None:
    file = tmp_path / "machine.yaml"
    file.write_text("topology: {gpus_per_node: 4, gcds_per_gpu: 2, bandwidth_gb_s: {node: 12.5}}\n")
    assert resolve_grid(str(file), 48).nodes == 6
    file.write_text(json.dumps({"nodes": 2, "gpus_per_node": 2, "gcds_per_gpu": 2}))
    assert resolve_grid(str(file), 8).world_size == 8
    with pytest.raises(ConfigError, match="nodes=3 or gpus_per_node=3 or gcds_per_gpu=3 would fit"):
        resolve_grid(str(file), 12)
    with pytest.raises(ConfigError, match="no single factor"):
        resolve_grid(str(file), 7)
    for content, message in (
        ("a: [", "neither YAML nor JSON"),
        ("gpus: 2", "unknown key 'gpus'"),
        ("3", "of no known kind"),
    ):
        file.write_text(content)
        with pytest.raises(ConfigError, match=message):
            resolve_grid(str(file), 8)
    with pytest.raises(ConfigError, match="no such file"):
        resolve_grid(str(tmp_path / "none.yaml"), 8)


def test_a_dump_is_discovered_from_whatever_its_name(tmp_path: Path) -> None:
    file = tmp_path / "node.json"
    file.write_text('<system version="1"><cpu><pci busid="c1:00.0"><gpu dev="0"/></pci></cpu></system>\n')
    assert resolve_grid(str(file), 1) == Grid(1, 1, 1)


def test_auto_and_presets() -> None:
    assert resolve_grid("frontier", 16) == Grid(2, 4, 2)
    assert resolve_grid("mi300x", 8) == Grid(1, 8, 1)
    with pytest.raises(ConfigError, match="gpus_per_node=4 x gcds_per_gpu=2 is 8 ranks a node, but the world has 12"):
        resolve_grid("lumi", 12)
    assert resolve_grid("discover", 1) == Grid(1, 1, 1)
    with pytest.raises(ConfigError, match="discovery found 1 ranks; expected 8"):
        resolve_grid("discover", 8)
    with pytest.raises(ConfigError, match="no such file: 'frontie'; possible: \"discover\", a file"):
        resolve_grid("frontie", 8)


def test_order_is_a_permutation() -> None:
    grid = resolve_grid(parse_topology("t", {"nodes": 2, "gpus_per_node": 3, "order": ["gpu", "gcd", "node"]}), 6)
    assert grid.stride("node") == 1
    assert list(grid.tier_group(0, "gpu")) == [0, 2, 4]


def test_a_number_is_the_guards_limit_of_discarded_steps() -> None:
    found = [parse_config(block).guard for block in ({}, {"guard": 3}, {"guard": {"every": 7}}, {"guard": 0})]
    assert [(guard.discarded_steps, guard.every) for guard in found] == [(10, 100), (3, 100), (10, 7), (0, 100)]
