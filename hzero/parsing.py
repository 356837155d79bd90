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
    _check_together(parsed, path)
    return HZeroConfig(
        **dict(parsed),
        preset_shard="weights" not in written,
        preset_gradients="gradients" not in written,
        preset_dimensions=tuple(one for one in DIMENSIONS if one not in block.get("codecs", {})),
    )


def _check_together(block: Block, path: str) -> None:
    """Refuses values that exclude each other."""

    def refuse(key: str, found: str, possible: str) -> ConfigError:
        return ConfigError(f"{path}.{key}: {found}; possible: {possible}")

    scope, widest, weights = block.shard.weights, block.shard.gradients, block.codecs.weights
    if SCOPES.index(scope) > SCOPES.index(widest):
        nested = ", ".join(SCOPES[: SCOPES.index(widest) + 1])
        raise refuse("shard.weights", f"{scope!r} is wider than {path}.shard.gradients {widest!r}", nested)
    if block.resident == "decoded" and scope != "device":
        raise refuse("resident", f"found 'decoded' with weights over the {scope}", "with weights over the device")
    if block.refresh_differences and scope == "world":
        why = "found true with weights over the world, of which no copy is kept"
        raise refuse("refresh_differences", why, f"with {path}.shard.weights {', '.join(SCOPES[:-1])}")
    if any(not pattern.strip() for pattern in block.codecs.exceptions):
        raise refuse("codecs.except", "found an empty pattern", "one such as *norm*")
    summed = {f"gradients.{tier}": block.codecs.gradients[tier] for tier in block.codecs.gradients.written}
    summed |= {f"except.{pattern}": codec for pattern, codec in block.codecs.exceptions.items()}
    for key, codec in summed.items():
        if why := codec.traits.not_summed:
            raise refuse(f"codecs.{key}", f"found {codec.codec!r}, {why}", ", ".join(SUMMED))
    for tier in weights.written:
        if not weights[tier].traits.fixed:
            found = f"found {weights[tier].codec!r}, whose messages have no fixed size, as resident weights have"
            fixed = ", ".join(name for name, traits in TRAITS.items() if traits.fixed)
            raise refuse(f"codecs.weights.{tier}", found, fixed)
    every = tiers_outside(scope)
    refreshed = [tier for tier in every if tier in weights.written] or every
    codecs = [weights[tier] for tier in refreshed]
    wrong = "none, where a difference has no fewer bytes" if all(one.traits.plain for one in codecs) else ""
    if narrow := next((one.codec for one in codecs if one.traits.narrow), None):
        wrong = f"{narrow}, which holds bfloat16 numbers, and differences are float32"
    if block.refresh_differences and wrong:
        found = f"weights are refreshed on {', '.join(refreshed)} with codec {wrong}"
        raise refuse("refresh_differences", found, f"{', '.join(_OF_DIFFERENCES)} in {path}.codecs.weights")


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
