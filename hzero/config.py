"""The ``"hzero"`` block of a DeepSpeed configuration, as pydantic models, with its presets."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

if TYPE_CHECKING:
    from typing_extensions import Self

#: Levels of links, innermost first.
TIERS = ("gcd", "gpu", "node")
#: Scopes, innermost first: scope i reaches tiers 0..i.
SCOPES = ("package", "node", "world")
CODECS = ("none", "bf16", "int8", "int4")
ROLES = ("weights", "gradients")
DEFAULT_PRESET = "topo"
DEFAULT_BLOCK_SIZE = 128

#: Points of one space: (shard of weights, of gradients, codec of weights on every tier, of gradients).
PRESETS: dict[str, tuple[str, str, str, str]] = {
    "zero3": ("world", "world", "none", "none"),
    "hpz": ("node", "world", "none", "none"),
    "zeropp": ("node", "world", "int8", "int4"),
    "lossless": ("package", "node", "none", "none"),
    "topo": ("package", "node", "int8", "int4"),
    "mild": ("package", "node", "int8", "int8"),
}


class ConfigError(ValueError):
    """Input that cannot be used. One line: the key, file or argument, what was found, what is possible.

    Attributes:
        elsewhere: Whether rank 0 raises the same, so that a command on this rank need not tell it again.
    """

    elsewhere = False

    @classmethod
    def of_rank_0(cls, message: str) -> Self:
        """The error of another rank than 0 that meets what rank 0 meets."""
        error = cls(message)
        error.elsewhere = True
        return error


def one_of(key: str, value: Any, possible: Iterable[str], what: str = "value") -> ConfigError:
    """The error for a value that is not among the possible ones, with the nearest of them."""
    names = [str(name) for name in possible]
    near = difflib.get_close_matches(str(value), names, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return ConfigError(f"{key}: unknown {what} {value!r}{hint} Possible: {', '.join(names)}")


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class CodecConfig(_Frozen):
    """Settings of one tier's codec for one role.

    Attributes:
        codec: One of `CODECS`.
        block_size: Elements that share a scale: a multiple of 16 from 16 to 4096.
        rounding: ``nearest`` (half to even) or ``stochastic``.
        scale: Type of the scales, ``bf16`` or ``fp32``.
    """

    codec: str
    block_size: int = Field(DEFAULT_BLOCK_SIZE, ge=16, le=4096, multiple_of=16)
    rounding: str = "nearest"
    scale: str = "bf16"

    @field_validator("codec")
    @classmethod
    def _known_codec(cls, value: str) -> str:
        if value not in CODECS:
            raise one_of("codec", value, CODECS, "codec")
        return value

    @field_validator("rounding")
    @classmethod
    def _known_rounding(cls, value: str) -> str:
        if value not in ("nearest", "stochastic"):
            raise one_of("rounding", value, ("nearest", "stochastic"))
        return value

    @field_validator("scale")
    @classmethod
    def _known_scale(cls, value: str) -> str:
        if value not in ("bf16", "fp32"):
            raise one_of("scale", value, ("bf16", "fp32"))
        return value


class TierCodecs(_Frozen):
    """One codec a tier."""

    gcd: CodecConfig
    gpu: CodecConfig
    node: CodecConfig

    def __getitem__(self, tier: str) -> CodecConfig:
        return getattr(self, tier)


class CodecsConfig(_Frozen):
    """One codec a role and tier."""

    weights: TierCodecs
    gradients: TierCodecs

    def __getitem__(self, role: str) -> TierCodecs:
        return getattr(self, role)


class ShardConfig(_Frozen):
    """Shard degree of weights and of gradients; optimizer states are sharded over the world."""

    weights: str
    gradients: str


class TopologyConfig(_Frozen):
    """A declared machine.

    Attributes:
        nodes: Nodes of the world; None where it follows from the world size.
        gpus_per_node: Packages of a node.
        gcds_per_gpu: Devices of a package.
        order: How ranks are numbered: axis names, slowest first.
    """

    nodes: int | None = Field(None, ge=1)
    gpus_per_node: int = Field(ge=1)
    gcds_per_gpu: int = Field(1, ge=1)
    order: tuple[str, str, str] = ("node", "gpu", "gcd")

    @field_validator("order", mode="before")
    @classmethod
    def _permutation(cls, value: Any) -> Any:
        if not isinstance(value, (list, tuple)) or sorted(map(str, value)) != sorted(TIERS):
            raise ConfigError(f"order: found {value!r}, expected node, gpu and gcd in some order, slowest first")
        return tuple(value)


class HZeroConfig(_Frozen):
    """The block with its preset applied.

    Attributes:
        preset: Name of the preset that the rest started from.
        shard: Shard degrees.
        codecs: Codecs a role and tier.
        block_size: Default block size of the codecs.
        error_feedback: Tiers whose gradient encoding keeps its residual.
        topology: ``"auto"``, the path of a file, or a declared machine.
        preset_shard: Whether the weights' degree came from the preset and was not written by the user.
        preset_gradients: The same of the gradients' degree.
    """

    preset: str
    shard: ShardConfig
    codecs: CodecsConfig
    block_size: int
    error_feedback: tuple[str, ...] = ()
    topology: str | TopologyConfig = "auto"
    preset_shard: bool = True
    preset_gradients: bool = True


_KEYS = ("preset", "shard", "codecs", "block_size", "error_feedback", "topology")


def parse_config(block: Mapping[str, Any], path: str = "hzero") -> HZeroConfig:
    """Reads a block: the preset first, then what the block overrides, leaf by leaf.

    Args:
        block: The block as written.
        path: Where it stands, for messages.

    Raises:
        ConfigError: An unknown key, preset, codec, tier or scope (with the nearest known one), a wrong type, or weights
            sharded wider than gradients.
    """
    block = _mapping(path, block, _KEYS)
    preset = block.get("preset", DEFAULT_PRESET)
    if not _among(preset, PRESETS):
        raise one_of(f"{path}.preset", preset, PRESETS, "preset")
    weights, gradients, weight_codec, gradient_codec = PRESETS[preset]

    shard = _mapping(f"{path}.shard", block.get("shard", {}), ROLES)
    degrees = {"weights": shard.get("weights", weights), "gradients": shard.get("gradients", gradients)}
    for role, scope in degrees.items():
        if not _among(scope, SCOPES):
            raise one_of(f"{path}.shard.{role}", scope, SCOPES, "scope")
    if SCOPES.index(degrees["weights"]) > SCOPES.index(degrees["gradients"]):
        raise ConfigError(
            f"{path}.shard.weights: {degrees['weights']!r} is wider than {path}.shard.gradients {degrees['gradients']!r}; "
            f"degrees nest, weights <= gradients <= world, so weights may be "
            f"{' or '.join(SCOPES[: SCOPES.index(degrees['gradients']) + 1])}"
        )

    block_size = block.get("block_size", DEFAULT_BLOCK_SIZE)
    default = {"weights": weight_codec, "gradients": gradient_codec}
    written = _mapping(f"{path}.codecs", block.get("codecs", {}), ROLES)
    codecs = {}
    for role in ROLES:
        leaves = _mapping(f"{path}.codecs.{role}", written.get(role, {}), TIERS)
        codecs[role] = TierCodecs(
            **{
                tier: _leaf(
                    f"{path}.codecs.{role}.{tier}", leaves.get(tier, default[role]), default[role], block_size, path
                )
                for tier in TIERS
            }
        )

    feedback = block.get("error_feedback", [])
    if isinstance(feedback, str) or not isinstance(feedback, (list, tuple)):
        raise ConfigError(f"{path}.error_feedback: found {feedback!r}, expected a list of tiers ({', '.join(TIERS)})")
    for tier in feedback:
        if not _among(tier, TIERS):
            raise one_of(f"{path}.error_feedback", tier, TIERS, "tier")

    return HZeroConfig(
        preset=preset,
        shard=ShardConfig(**degrees),
        codecs=CodecsConfig(**codecs),
        block_size=block_size,
        error_feedback=tuple(tier for tier in TIERS if tier in feedback),
        topology=_topology(f"{path}.topology", block.get("topology", "auto")),
        preset_shard="weights" not in shard,
        preset_gradients="gradients" not in shard,
    )


def parse_topology(path: str, value: Any) -> TopologyConfig:
    """Reads a declared machine. Raises `ConfigError` as `parse_config` does."""
    return _model(TopologyConfig, path, _mapping(path, value, tuple(TopologyConfig.model_fields)))


def _topology(path: str, value: Any) -> str | TopologyConfig:
    if isinstance(value, str):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(
            f'{path}: found {value!r}, expected "auto", a file, or {{"nodes": .., "gpus_per_node": .., "gcds_per_gpu": ..}}'
        )
    return parse_topology(path, value)


def _leaf(key: str, value: Any, default: str, block_size: Any, path: str) -> CodecConfig:
    if isinstance(value, str):
        value = {"codec": value}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key}: found {value!r}, expected a codec ({', '.join(CODECS)}) or a block of its settings")
    value = {"codec": default, **_mapping(key, value, tuple(CodecConfig.model_fields))}
    if "block_size" not in value:
        value["block_size"] = block_size
        _model(CodecConfig, path, {"codec": "none", "block_size": block_size})  # blame the top-level key, not the leaf
    return _model(CodecConfig, key, value)


def _among(value: Any, possible: Iterable[str]) -> bool:
    return isinstance(value, str) and value in possible


def _mapping(path: str, value: Any, keys: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path}: found {value!r}, expected a block with keys {', '.join(keys)}")
    for key in value:
        if not _among(key, keys):
            raise one_of(path, key, keys, "key")
    return dict(value)


def _model(model: Any, path: str, values: dict[str, Any]) -> Any:
    try:
        return model(**values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join([path, *(str(part) for part in first["loc"])])
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError):
            raise ConfigError(f"{path}.{cause}") from None
        message = first["msg"][0].lower() + first["msg"][1:]
        if first["type"] == "missing":
            raise ConfigError(f"{key}: missing") from None
        raise ConfigError(f"{key}: found {first.get('input')!r}; {message}") from None
