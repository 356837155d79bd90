"""Reads a block: the preset, the user's values over it leaf by leaf, and what does not go together."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from hzero.codecs.formats import SUMMED, TRAITS
from hzero.config import (
    BASE_TIERS,
    DEFAULT_BLOCK_SIZE,
    DEFAULT_PRESET,
    DIMENSIONS,
    OPTIONAL_TIERS,
    PRESETS,
    ROLES,
    SCOPES,
    Block,
    CodecConfig,
    HZeroConfig,
    Preset,
    TopologyConfig,
    TopologySource,
    Written,
    tiers_outside,
)
from hzero.validation import ConfigError, one_of, validated

#: Codecs of differences between weights.
_OF_DIFFERENCES = tuple(name for name in SUMMED if not TRAITS[name].exact)


#: Keys of the block that pipelines have; the others say how stage 3 shards, and what watches its resident weights.
OF_PIPELINES = (
    *("preset", "codecs", "block_size", "error_feedback", "node_all_gather", "checksum", "transport", "checkpoint"),
    "topology",
)
#: Keys of zero_optimization that pipelines do not take: stock cannot load what it saves with the first, and with the second
#: loads what was saved without it in another order.
UNLOADABLE = ("elastic_checkpoint", "round_robin_gradients")


def check_of_pipelines(block: Mapping[str, Any], path: str) -> None:
    """Refuses keys that have no effect in an engine with pipeline stages.

    Args:
        block: The block as written.
        path: Key of the block, for messages.

    Raises:
        ConfigError: Naming the key and the possible ones.
    """
    codecs = block.get("codecs", {})
    unused = [key for key in block if key not in OF_PIPELINES]
    unused += [f"codecs.{role}" for role in ("weights", "except") if role in codecs]
    if unused:
        raise ConfigError(
            f"{path}.{unused[0]}: given with pipeline stages, where nothing has it; possible: {', '.join(OF_PIPELINES)}, of "
            "codecs gradients, pipeline, optimizer and those of the model's dimensions"
        )


def parse_config(block: Any, path: str = "hzero") -> HZeroConfig:
    """Reads a block: the preset, then the block's overrides, leaf by leaf.

    Args:
        block: The block as written.
        path: Key of the block, for messages.

    Raises:
        ConfigError: An unknown key, preset, codec, tier or scope (with the nearest known one), a wrong type, or weights
            sharded wider than gradients.
    """
    if not isinstance(block, Mapping):
        keys = ", ".join(Block.model_fields)
        raise ConfigError(f"{path}: found {reprlib.repr(block)}, expected a block with keys {keys}")
    preset = block.get("preset", DEFAULT_PRESET)
    if preset not in tuple(PRESETS):
        raise one_of(f"{path}.preset", preset, PRESETS, "preset")
    start = PRESETS[preset]
    written, size = block.get("shard", {}), block.get("block_size", DEFAULT_BLOCK_SIZE)
    values = {
        **block,
        "preset": preset,
        "block_size": size,
        "shard": _over({"weights": start.weights, "gradients": start.gradients}, written),
        "codecs": _codecs(start, block.get("codecs", {}), size),
    }
    if isinstance(block.get("topology"), Mapping):  # in a union, an error would name the branch
        values["topology"] = parse_topology(f"{path}.topology", block["topology"])
    # Checked first: the leaves inherit it, so the error would name the first leaf.
    validated(CodecConfig, {"codec": "none", "block_size": size}, path)
    parsed = validated(Block, values, path)
    shard = parsed.shard
    if SCOPES.index(shard.weights) > SCOPES.index(shard.gradients):
        raise ConfigError(
            f"{path}.shard.weights: {shard.weights!r} is wider than {path}.shard.gradients {shard.gradients!r}; degrees "
            f"nest, weights <= gradients <= world, so weights may be "
            f"{', '.join(SCOPES[: SCOPES.index(shard.gradients) + 1])}"
        )
    if parsed.resident == "decoded" and shard.weights != "device":
        raise ConfigError(
            f"{path}.resident: found 'decoded' with weights over the {shard.weights}, whose payloads are gathered at every use; "
            f"possible with {path}.shard.weights 'device'"
        )
    if parsed.refresh_differences and shard.weights == "world":
        raise ConfigError(
            f"{path}.refresh_differences: no copy is kept of weights over the world, so a difference has no base; possible with "
            f"{path}.shard.weights {', '.join(SCOPES[:-1])}"
        )
    if any(not pattern.strip() for pattern in parsed.codecs.exceptions):
        raise ConfigError(f"{path}.codecs.except: found an empty pattern; expected one such as *norm*")
    summed = {f"gradients.{tier}": parsed.codecs.gradients[tier] for tier in parsed.codecs.gradients.written}
    summed |= {f"except.{pattern}": codec for pattern, codec in parsed.codecs.exceptions.items()}
    for key, codec in summed.items():
        if why := codec.traits.not_summed:
            raise ConfigError(f"{path}.codecs.{key}: found {codec.codec!r}, {why}; possible: {', '.join(SUMMED)}")
    for tier in parsed.codecs.weights.written:
        codec = parsed.codecs.weights[tier]
        if not codec.traits.fixed:
            raise ConfigError(
                f"{path}.codecs.weights.{tier}: found {codec.codec!r}, whose messages have no fixed size, as resident weights "
                f"have; possible: {', '.join(name for name, traits in TRAITS.items() if traits.fixed)}"
            )
    every = tiers_outside(shard.weights)
    refreshed = [tier for tier in every if tier in parsed.codecs.weights.written] or every
    found = [parsed.codecs.weights[tier] for tier in refreshed]
    wrong = (
        ""
        if any(not one.traits.plain for one in found)
        else "none, where a difference has no fewer bytes and is rounded"
    )
    if narrow := next((one.codec for one in found if one.traits.narrow), None):
        wrong = f"{narrow}, which holds bfloat16 numbers, and differences are float32"
    if parsed.refresh_differences and wrong:
        raise ConfigError(
            f"{path}.refresh_differences: weights are refreshed on {', '.join(refreshed)} with codec {wrong}; possible with "
            f"{', '.join(_OF_DIFFERENCES)} in {path}.codecs.weights"
        )
    return HZeroConfig(
        **dict(parsed),
        preset_shard="weights" not in written,
        preset_gradients="gradients" not in written,
        preset_dimensions=tuple(one for one in DIMENSIONS if one not in block.get("codecs", {})),
    )


def _codecs(start: Preset, written: Any, size: Any) -> Any:
    """The preset's codecs, overridden leaf by leaf by the written ones."""

    def leaf(written: Any, default: Written | None = None) -> Any:  # a name alone, or some settings
        written = written if isinstance(written, Mapping) else {"codec": written}
        kept = default if default is not None and "codec" not in written else {}  # settings are of one codec
        return {"block_size": size, **(kept if isinstance(kept, Mapping) else {"codec": kept}), **written}

    def each(role: Any, tiers: Any) -> Any:
        if role == "except":
            return _over({}, tiers, lambda _, one: leaf(one))
        if isinstance(tiers, str) or (isinstance(tiers, Mapping) and "codec" in tiers):  # one for all
            tiers = dict.fromkeys(BASE_TIERS, tiers)
        optional = [tier for tier in OPTIONAL_TIERS if isinstance(tiers, Mapping) and tier in tiers]
        default: dict[str, Any] = {tier: start.codec_of(role, tier) for tier in (*BASE_TIERS, *optional)}
        if role in DIMENSIONS and isinstance(tiers, Mapping):  # no small part of activations crosses groups
            tiers = {"group": tiers.get("node", default["node"]), **tiers}
            default = {"group": default["node"], **default}
        return _over(default, tiers, lambda tier, one: leaf(one, default[tier]))

    return _over({role: {} for role in (*ROLES, *DIMENSIONS, "except")}, written, each)


def parse_topology(path: str, value: Any) -> TopologyConfig | TopologySource:
    """Reads a declared grid, or a source with groups of its nodes. Raises `ConfigError` as `parse_config` does."""
    if not isinstance(value, Mapping) or ("source" not in value and set(value) != {"nodes_per_group"}):
        return validated(TopologyConfig, value, path)
    of_grid = [key for key in TopologyConfig.model_fields if key in value and key not in TopologySource.model_fields]
    if of_grid:
        raise ConfigError(
            f"{path}.{of_grid[0]}: given together with {path}.source {value.get('source')!r}, which says where ranks sit; "
            "leave one of them out"
        )
    return validated(TopologySource, value, path)


def _over(default: dict[str, Any], written: Any, each: Callable[[str, Any], Any] | None = None) -> Any:
    """``default``, if it has keys, overridden by ``written``, those passed through ``each``. What is no mapping stays."""
    if not isinstance(written, Mapping):
        return written
    merged = {**default, **written}
    return merged if each is None else {k: each(k, v) if k in default or not default else v for k, v in merged.items()}
