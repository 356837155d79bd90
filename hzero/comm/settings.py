"""Settings of a `Communicator`, as a pydantic model."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping
from typing import Any, Literal, TypeAlias

from pydantic import Field, field_validator

from hzero.config import (
    BASE_TIERS,
    DEFAULT_BLOCK_SIZE,
    NodeAllGather,
    Tier,
    TierCodecs,
    Topology,
    TransportName,
    tiers_in_order,
)
from hzero.parsing import parse_topology
from hzero.validation import ConfigError, Frozen, one_of, validated

#: What has wires of its own: sums and copies on every tier, messages from rank to rank one for the whole group.
Use: TypeAlias = Literal["sums", "copies", "messages"]
USES: tuple[Use, ...] = ("sums", "copies", "messages")


def check_uses(uses: Collection[Use]) -> list[Use]:
    """The uses in one order on all ranks, which make their wires in it; `ConfigError` if one is unknown."""
    if isinstance(uses, str) or not isinstance(uses, Collection):
        raise ConfigError(f"communicator: uses: found {uses!r}, expected a list of {', '.join(USES)}")
    for use in uses:
        if use not in USES:
            raise one_of("communicator: uses", use, USES)
    return [use for use in USES if use in uses]


class CommunicatorConfig(Frozen):
    """What a `Communicator` sends, and over which tiers.

    Attributes:
        codecs: Codec of each tier, by name or as a block with `codec` and its settings (those of a stage's `codecs`); a tier
            that is not named has `none`. A name instead of the block is the codec of all tiers. `exp` takes bfloat16 tensors
            alone; with it and with `mpc` sums are bit for bit those of `none`.
        gather: The same for what is copied and not summed: all-gathers, broadcasts, all-to-alls, sends, and the second half
            of an all-reduce, which spreads the sums. By default `codecs`.
        block_size: Elements that share a scale; a codec may have its own.
        error_feedback: Tiers whose encoding keeps its loss (bfloat16) and adds it the next time, in reductions that have a
            key; with the outermost tier of the machine also in the second half of an all-reduce.
        node_all_gather: Algorithm of the all-gathers between nodes.
        checksum: Whether every message is followed by a checksum of 16 bytes, which is compared on arrival; on GPUs in
            `Communicator.verify`.
        transport: What carries the messages: `torch`, the backend of the process group, or `mpi`.
        topology: Where the ranks sit: `discover`, the default, finds out; a preset's name or a file names a machine; a block
            declares one.
    """

    codecs: TierCodecs
    gather: TierCodecs
    block_size: int = Field(DEFAULT_BLOCK_SIZE, ge=16, le=4096, multiple_of=16)
    error_feedback: tuple[Tier, ...] = ()
    node_all_gather: NodeAllGather = NodeAllGather()
    checksum: bool = False
    transport: TransportName = "torch"
    topology: Topology = "discover"

    @field_validator("error_feedback", mode="before")
    @classmethod
    def _tiers(cls, value: Any) -> Any:
        return tiers_in_order(value)


def parse_communicator(block: Any, where: str = "communicator") -> CommunicatorConfig:
    """Reads the settings of a communicator.

    Args:
        block: As the user wrote them; None: every codec is ``none`` and the topology is discovered.
        where: Begins messages.

    Raises:
        ConfigError: An unknown key, codec or tier (with the nearest known one), or a wrong type.
    """
    block = {} if block is None else block
    if not isinstance(block, Mapping):
        keys = ", ".join(CommunicatorConfig.model_fields)
        raise ConfigError(f"{where}: found {reprlib.repr(block)}, expected a block with keys {keys}")
    size = block.get("block_size", DEFAULT_BLOCK_SIZE)
    codecs = _by_tier(block.get("codecs", "none"), size)
    values = {**block, "codecs": codecs, "gather": _by_tier(block["gather"], size) if "gather" in block else codecs}
    topology = block.get("topology", "discover")
    if topology == "auto" or not isinstance(topology, Mapping | Topology):
        raise ConfigError(f'{where}.topology: found {topology!r}, expected "discover", a preset, a file or a block')
    if isinstance(block.get("topology"), Mapping):  # in a union, an error would name the branch
        values["topology"] = parse_topology(f"{where}.topology", block["topology"])
    parsed = validated(CommunicatorConfig, values, where)
    for tier in parsed.error_feedback:
        if parsed.codecs[tier].traits.exact and parsed.gather[tier].traits.exact:
            raise ConfigError(
                f"{where}.error_feedback: found {tier!r}, whose codec {parsed.codecs[tier].codec!r} loses nothing; possible: "
                "tiers with another one"
            )
    return parsed


def _by_tier(written: Any, block_size: Any) -> Any:
    """A block for each tier; what is neither a name nor a mapping stays, to be refused."""
    if isinstance(written, str) or (isinstance(written, Mapping) and "codec" in written):  # one for all
        written = dict.fromkeys(BASE_TIERS, written)
    if not isinstance(written, Mapping):
        return written
    filled = {**dict.fromkeys(BASE_TIERS, "none"), "group": written.get("node", "none"), **written}
    return {
        tier: {"block_size": block_size, **(leaf if isinstance(leaf, Mapping) else {"codec": leaf})}
        for tier, leaf in filled.items()
    }
