"""Shard plan: the tiers that each state crosses, how often, and over which ranks, without process groups or tensors."""

from __future__ import annotations

import fnmatch
import functools
import itertools
import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from typing import Any

from hzero import config
from hzero.config import PLAIN, ROLES, SCOPES, TIERS, CodecConfig, Role, Scope, Tier, tiers_inside, tiers_outside
from hzero.errors import ConfigError, some
from hzero.topology import Grid

#: Keys that a plan copies from the block.
_AS_WRITTEN = ("error_feedback", "refresh_message_bytes", "checksum", "transport", "order")
#: All-gathers of many nodes that form no groups, since a ring waits for each node. From this size on the ring is as fast: its
#: messages go to neighbours, and few of them leave a switch group.
_UNGROUPED = config.NodeAllGather(algorithm="doubling", below_bytes=1 << 18)
#: Bytes of a peer's part at which a Slingshot NIC reaches nine tenths of its rate. From this many ranks on, the latency of a
#: tier's messages exceeds the latency of a launch.
_PART_BYTES, _MANY_PEERS = 1 << 16, 16
#: Maximum number of names in a message.
_NAMED = 4
#: By scope that machines lack by default: the key that declares it.
_DECLARED_BY: dict[Scope, str] = {"hive": "packages_per_hive", "group": "nodes_per_group", "cluster": "clusters"}


@dataclass(frozen=True)
class Hop:
    """One collective on one tier.

    Attributes:
        tier: The tier.
        size: Ranks of its group.
        codec: Codec of its messages.
    """

    tier: Tier
    size: int
    codec: CodecConfig


def lossy_crossings(codecs: config.TierCodecs, grid: Grid) -> list[Tier]:
    """The tiers that the ranks of a grid cross with a lossy codec."""
    return [tier for tier in grid.crossed if not codecs[tier].traits.exact]


def plain(hops: Sequence[Hop]) -> tuple[Hop, ...]:
    """The same hops without codecs."""
    return tuple(replace(hop, codec=PLAIN) for hop in hops)


@dataclass(frozen=True)
class ShardPlan:
    """The hops of weights and gradients on one rank, and the states that the rank keeps in between.

    A machine has three tiers, innermost first: ``intra_package`` (devices of a package), ``intra_node`` (packages of a node) and
    ``inter_node``. The scopes that end at these tiers are the package, the node and the world; the scope inside all tiers is
    the device. A declared machine may have more tiers, each with its scope: ``intra_hive`` below ``intra_node``, ``inter_group``
    and ``inter_cluster`` above ``inter_node``. Every parameter is divided into as many shards as the world has ranks, and rank r
    owns shard r. This is DeepSpeed's partition, which the optimizer and checkpoints use. A state is sharded inside its scope and
    replicated outside. Optimizer states are sharded over the world. Weights and gradients each have a scope. Parameters that
    match a pattern may have other scopes, and then another plan (`plans_of`).

    Weights move inwards. Once per step `refresh_hops` cross the tiers outside the weights' scope. Each rank keeps the
    `secondary_rows` shards that it received, as a payload. Every forward and backward of a module crosses only the tiers inside
    the scope, by `unshard_hops`. If the scope is the device, there are none: the payload is complete, or kept decoded
    (`whole_copies`). Gradients move outwards. In every micro-batch `micro_hops` cross the tiers inside the gradients' scope and
    leave `gradient_rows` shards per rank to accumulate. Once per step `boundary_hops` cross the other tiers. A tier of size 1
    has no hop.

    A rank keeps 1/(ranks of the scope) of the weights and of the gradient accumulation buffers. So a smaller scope needs more
    memory, and crosses outer tiers less often. `hzero.tools.plan.memory` and `hzero.program.collectives` compute both from
    the plan.

    The plan is only arithmetic on the grid. It makes no process group and no tensor, chooses nothing at run time, and costs the
    same for 8 ranks and for 75,264.

    Two nodes of two packages of two devices, with the preset ``lossless`` (weights over the package, gradients over the
    node), seen from rank 5:

        >>> from hzero.config import parse_config
        >>> from hzero.topology import Grid
        >>> plan = ShardPlan.from_config(parse_config({"preset": "lossless"}), Grid(2, 2, 2), rank=5)
        >>> [list(plan.tier_group(tier)) for tier in ("intra_package", "intra_node", "inter_node")]
        [[4, 5], [5, 7], [1, 5]]
        >>> [hop.tier for hop in plan.refresh_hops()], plan.secondary_rows, [hop.tier for hop in plan.unshard_hops()]
        (['inter_node', 'intra_node'], 4, ['intra_package'])
        >>> [hop.tier for hop in plan.micro_hops()], plan.gradient_rows, [hop.tier for hop in plan.boundary_hops()]
        (['intra_package', 'intra_node'], 2, ['inter_node'])

    Rank 5 receives shard 1 (inter_node), then 3 and 7 (intra_node), and keeps the four shards 1, 5, 3, 7. The other device of its
    package, rank 4, keeps 0, 4, 2, 6. Their intra_package hop gives both the whole weights. Rank 5 also keeps the gradient sums
    of shards 1 and 5 over its node. The node hop leaves shard 5, summed over the world.

    Attributes:
        grid: The machine.
        rank: This rank.
        weights_scope: Scope over which the weights are resident.
        gradients_scope: Scope over which gradients accumulate.
        codecs: Codec of each role and tier.
        error_feedback: Tiers whose gradient encoding keeps its residual.
        refresh_message_bytes: Minimum bytes that a rank sends in one refresh message.
        boundary_message_bytes: Minimum bytes of a peer's part in a message of the outermost tier at the boundary.
        node_all_gather: Algorithm of the all-gathers between nodes.
        checksum: Whether every message carries a checksum.
        whole_copies: Whether secondary partitions are whole weights in their own type instead of payloads.
        exact: Whether refreshes send the changes of 16-bit weights in codec ``exact``.
        exceptions: Patterns of parameters' names with their codecs; see `plans_of`.
        scoped: Patterns of parameters' names with the plans of their scopes.
        transport: Transport of the messages.
        unit_numel: Maximum elements of a layer that forward and backward gather as a whole; 0: no layer.
        order: Order of collectives on a device, see `hzero.config.HZeroConfig`; None: the order for the device's library.
        channel: First part of the lane names.
        adaptations: Warnings: adaptations of the preset to the machine.
        notes: Settings without effect on this machine.
    """

    grid: Grid
    rank: int
    weights_scope: Scope
    gradients_scope: Scope
    codecs: config.CodecsConfig
    error_feedback: tuple[Tier, ...] = ()
    adaptations: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    refresh_message_bytes: int = 0
    boundary_message_bytes: int = 0
    node_all_gather: config.NodeAllGather = field(default_factory=config.NodeAllGather)
    checksum: bool = False
    whole_copies: bool = False
    exact: bool = False
    exceptions: tuple[tuple[str, CodecConfig], ...] = ()
    scoped: tuple[tuple[str, ShardPlan], ...] = ()
    transport: config.TransportName = "torch"
    unit_numel: int = 0
    order: config.CollectiveOrder | None = None
    channel: str = "stage"

    @classmethod
    def from_config(cls, config: config.HZeroConfig, grid: Grid, rank: int, key: str = "hzero.shard") -> ShardPlan:
        """The plan of one rank of a grid. ``key`` is the key of the scopes, for messages.

        If a preset's degree is a single device on this machine, it becomes the smallest scope of more than one device. So a
        preset never makes whole copies by accident. A degree that the user wrote is kept.

        Raises:
            ConfigError: The machine has no such scope.
        """
        adaptations: list[str] = []
        notes: list[str] = []
        gathers, least = config.node_all_gather, config.boundary_message_bytes
        if grid.groups_text:
            (adaptations if grid.nodes_per_group is None else notes).append(grid.groups_text)
            if grid.nodes_per_group is None and "node_all_gather" not in config.written:
                gathers = _UNGROUPED
        scopes: dict[Role, Scope] = {"weights": config.shard.weights, "gradients": config.shard.gradients}
        for role, scope in scopes.items():
            if scope not in grid.scopes:
                raise ConfigError(
                    f"{key}.{role}: found {scope!r}, which this machine does not have ({grid}); expected "
                    f"{', '.join(grid.scopes)}; {_DECLARED_BY[scope]} in hzero.topology declares it"
                )
        for role in reversed(ROLES):
            from_preset = f"shard.{role}" not in config.written
            if from_preset and scopes[role] != "device" and grid.scope_size(scopes[role]) == 1:
                # Weights must not become wider than gradients whose scope the user has written.
                widest = SCOPES[-1] if role == "gradients" else scopes["gradients"]
                allowed = grid.scopes[grid.scopes.index(scopes[role]) : grid.scopes.index(widest) + 1]
                wider = next((scope for scope in allowed if grid.scope_size(scope) > 1), scopes[role])
                if wider != scopes[role]:
                    adaptations.append(
                        f"preset {config.preset}: a {scopes[role]} is one device here, so {role} are sharded over the {wider}"
                    )
                    scopes[role] = wider
        weights, gradients = scopes["weights"], scopes["gradients"]
        scoped = [
            (pattern, config.in_scopes(other.weights or weights, other.gradients or gradients))
            for pattern, other in config.shard.exceptions.items()
        ]
        if least is None:
            outer = [grid.size(tier) for tier in tiers_outside(gradients) if grid.size(tier) > 1]
            least = _PART_BYTES if outer and outer[-1] >= _MANY_PEERS else 0
        written = [(role, tier, config.codecs[role][tier]) for role in ROLES for tier in config.codecs[role].written]
        unused = [
            f"{codec.codec} of {role} on {tier}"
            for role, tier, codec in written
            if grid.size(tier) == 1 and not codec.traits.plain
        ]
        if unused:
            notes.append(f"codecs on tiers of size 1 are unused: {', '.join(unused)}")
        excepted = any(not codec.traits.plain for codec in config.codecs.exceptions.values())
        for tier in config.error_feedback:
            if config.codecs.gradients[tier].traits.plain and not excepted:
                notes.append(f"error feedback on tier {tier} has no effect: codec none is exact")
        codecs, exact = _with_changes(config.codecs, [tier for tier in tiers_outside(weights) if grid.size(tier) > 1])
        return cls(
            grid,
            rank,
            weights,
            gradients,
            codecs,
            adaptations=tuple(adaptations),
            notes=tuple(notes),
            whole_copies=weights == "device" and config.resident != "payload" and grid.world_size > 1,
            exact=exact,
            exceptions=tuple(config.codecs.exceptions.items()),
            scoped=tuple((name, cls.from_config(one, grid, rank, f"{key}.except.{name}")) for name, one in scoped),
            unit_numel=config.unit_numel if config.unit == "layer" else 0,
            boundary_message_bytes=least,
            node_all_gather=gathers,
            **{name: getattr(config, name) for name in _AS_WRITTEN},
        )

    @classmethod
    def of_part(cls, config: config.HZeroConfig, grid: Grid, rank: int, channel: str) -> ShardPlan:
        """The plan of one of the ranks that share a part of the parameters, such as an expert; see `from_config`.

        Scopes remain: over the package now means over those ranks of the package that have the part. If other ranks of the
        package have the other parts, no state needs more memory than without parts.
        """
        names = {grid.scope_size(one): one for one in grid.scopes}  # for scopes of the world that this grid lacks
        here = {one: names[grid.scope_size(one)] for one in SCOPES} | {one: one for one in grid.scopes}
        config = config.in_scopes(here[config.shard.weights], here[config.shard.gradients])
        return replace(cls.from_config(config, grid, rank), channel=channel)

    def plans_of(self, parameters: Sequence[Sequence[str]]) -> list[ShardPlan]:
        """The plan of each parameter of a model: this plan, or the plan of the first pattern that matches.

        Args:
            parameters: The names of each parameter. A tied parameter has several, and a pattern may match any of them.

        Raises:
            ConfigError: A pattern matches no parameter, or only parameters that match an earlier pattern. Patterns for the
                names of one tied parameter have different values.
        """
        taken = []
        for key, patterns in (("shard", self.scoped), ("codecs", self.exceptions)):
            taken.append([_first_match(patterns, names) for names in parameters])
            for at, (pattern, value) in enumerate(patterns):
                # A tied parameter may have a pattern for each of its names.
                tied = [
                    (patterns[first], names)
                    for first, names in zip(taken[-1], parameters)
                    if first is not None
                    and any(_first_match((patterns[first], patterns[at]), [one]) == 1 for one in names)
                ]
                for (earlier, chosen), names in tied if at not in taken[-1] else ():
                    if getattr(chosen, "way", chosen) != getattr(value, "way", value):
                        tie = f"{' = '.join(names)}, which are tied and have {earlier!r} too"
                        raise ConfigError(
                            f"hzero.{key}.except: found {pattern!r} for {tie}; expected equal values: they are one parameter"
                        )
                if at not in taken[-1] and not tied:
                    near = some(_nearest_to(pattern, [names[0] for names in parameters]), _NAMED)
                    raise ConfigError(
                        f"hzero.{key}.except: found {pattern!r}, which matches no parameter that an earlier pattern has not "
                        f"taken; parameters of the model, the nearest first: {near}"
                    )
        made: dict[tuple[int | None, ...], ShardPlan] = {}
        for scope, codec in set(zip(*taken)):
            plan = self if scope is None else self.scoped[scope][1]
            made[scope, codec] = plan if codec is None else plan.with_codec(self.exceptions[codec][1])
        return [made[pair] for pair in zip(*taken)]

    def parts(self, numels: Sequence[int], names: Sequence[Sequence[str]]) -> list[tuple[ShardPlan, list[int]]]:
        """The plans of a model's parameters, each with the elements of its parameters.

        If a plan has fewer ranks than this one, each has as much less of the parameter, such as an expert.

        Args:
            numels: Elements of every parameter.
            names: Names of every parameter, see `plans_of`. Empty if unknown: then patterns are ignored.
        """
        if not names or not (self.scoped or self.exceptions):
            return [(self, list(numels))]
        found: dict[Hashable, tuple[ShardPlan, list[int]]] = {}
        for numel, plan in zip(numels, self.plans_of(names)):
            ranks = plan.grid.world_size
            found.setdefault(plan.way, (plan, []))[1].append(numel * ranks // self.grid.world_size)
        return list(found.values())

    @functools.cached_property
    def way(self) -> Hashable:
        """The properties that determine messages and copies. Parameters of plans with equal ways can share messages."""
        hops = self.refresh_hops(), self.unshard_hops(), self.micro_hops(), self.boundary_hops()
        return self.channel, hops, self.accumulates, self.whole_copies, self.exact

    def with_codec(self, codec: CodecConfig) -> ShardPlan:
        """The plan with one codec on every tier, for weights and gradients."""
        codecs = config.TierCodecs(intra_package=codec, intra_node=codec, inter_node=codec, inter_group=codec)
        return replace(
            self,
            codecs=config.CodecsConfig(weights=codecs, gradients=codecs),
            exact=False,
            exceptions=(),
            scoped=(),
        )

    def __str__(self) -> str:
        """Grid, scopes and codecs, on one line without the preset's name."""
        codecs = " / ".join(self._codecs_text(role) for role in ROLES)
        excepted = "".join(f"; {plan._scopes_text()} for {pattern}" for pattern, plan in self.scoped)
        excepted += "".join(f"; {codec.codec} for {pattern}" for pattern, codec in self.exceptions)
        chosen = " (groups chosen)" if self.grid.automatic and self.grid.size("inter_group") > 1 else ""
        return f"{self.grid}{chosen}; {self._scopes_text()}; {codecs}{excepted}"

    def _scopes_text(self) -> str:
        return f"weights over the {self.weights_scope}, gradients over the {self.gradients_scope}"

    def _codecs_text(self, role: Role) -> str:
        """The codec of a role, or the codecs of its tiers, outermost first, if they differ."""
        used = [f"{hop.codec.codec} on {hop.tier}" for hop in self._hops(role, TIERS[::-1])]
        names = {name.partition(" ")[0] for name in used}
        return next(iter(names), "nothing is sent") if len(names) < 2 else ", ".join(used)

    def _hops(self, role: Role, tiers: tuple[Tier, ...]) -> tuple[Hop, ...]:
        return tuple(
            Hop(tier, self.grid.size(tier), self.codecs[role][tier]) for tier in tiers if self.grid.size(tier) > 1
        )

    def gather_hops(self) -> tuple[Hop, ...]:
        """Hops from primary shards to whole weights, outermost first."""
        return self._hops("weights", TIERS[::-1])

    def refresh_hops(self) -> tuple[Hop, ...]:
        """Hops from primary shards to secondary partitions: once per step. Empty if weights are sharded over the world."""
        return self._hops("weights", tiers_outside(self.weights_scope)[::-1])

    def unshard_hops(self) -> tuple[Hop, ...]:
        """Hops from secondary partitions, or over the world from primary shards, to whole weights, at every use."""
        return self._hops("weights", tiers_inside(self.weights_scope)[::-1])

    def reduce_hops(self) -> tuple[Hop, ...]:
        """Hops from whole gradients to this rank's shard, innermost first."""
        return self._hops("gradients", TIERS)

    def micro_hops(self) -> tuple[Hop, ...]:
        """Hops of every micro-batch."""
        return self._hops("gradients", tiers_inside(self.gradients_scope))

    def boundary_hops(self) -> tuple[Hop, ...]:
        """Hops of the boundary, once per step."""
        return self._hops("gradients", tiers_outside(self.gradients_scope))

    @property
    def keeps_copies(self) -> bool:
        """Whether the rank keeps secondary partitions: the world is larger than the weights' scope."""
        return bool(self.refresh_hops())

    @property
    def secondary_codec(self) -> CodecConfig:
        """The codec of secondary partitions: the codec of the first unshard hop, or else of the last refresh hop.

        If the refresh sends changes of the payload, it is codec ``none`` (`PLAIN`).
        """
        if self.exact:
            return PLAIN
        unshard = self.unshard_hops()
        return unshard[0].codec if unshard else self.refresh_hops()[-1].codec

    @functools.cached_property
    def secondary_shards(self) -> tuple[int, ...]:
        """The shards that refreshes bring, and so the ranks that own them. The innermost refreshed tier comes first."""
        place, hops = self.grid.coordinates(self.rank), self.refresh_hops()[::-1]
        found = itertools.product(*(range(hop.size) for hop in hops))
        return tuple(
            self.grid.rank(place._replace(**{hop.tier: at for hop, at in zip(hops, indices)})) for indices in found
        )

    @functools.cached_property
    def rank_row(self) -> int:
        """Row of this rank's shard in its secondary partition. Whole copies have shard order."""
        return self.rank if self.whole_copies else self.secondary_shards.index(self.rank)

    @property
    def accumulates(self) -> bool:
        """Whether gradients wait in gradient accumulation buffers for the boundary."""
        return self.gradients_scope != "world"

    def refresh_numel(self, bucket_numel: int, itemsize: int) -> int:
        """Maximum elements of the parameters that share one refresh message.

        ``bucket_numel``, or more if a rank's part of the message would have less than `refresh_message_bytes`. On many ranks,
        latency would otherwise dominate the time of a hop.
        """
        codec = PLAIN if self.exact else self.gather_hops()[0].codec  # some refreshes send whole weights
        element = codec.format.element_bytes(itemsize)
        return max(bucket_numel, math.ceil(self.refresh_message_bytes * self.grid.world_size / element))

    def boundary_numel(self, bucket_numel: int, itemsize: int) -> int:
        """Maximum elements of the buckets that share one message of the outermost tier, see `boundary_message_bytes`."""
        if not (hops := self.boundary_hops()):
            return bucket_numel
        least = self.boundary_message_bytes * self.grid.world_size / hops[-1].codec.format.element_bytes(itemsize)
        return bucket_numel + (math.ceil(least) if least > bucket_numel else 0)

    @property
    def secondary_rows(self) -> int:
        """Shards of every parameter in this rank's secondary partition."""
        return self.grid.world_size // self.grid.scope_size(self.weights_scope)

    @property
    def gradient_rows(self) -> int:
        """Shards of every parameter in this rank's gradient accumulation buffers."""
        return self.grid.world_size // self.grid.scope_size(self.gradients_scope)

    def tier_group(self, tier: Tier) -> Sequence[int]:
        """Ranks of this rank's tier group."""
        return self.grid.tier_group(self.rank, tier)


def _with_changes(codecs: config.CodecsConfig, refreshed: Sequence[Tier]) -> tuple[config.CodecsConfig, bool]:
    """The codecs with codec ``exact`` on all refreshed tiers or on none, and whether it is on them.

    The outermost refreshed tier decides, since a payload of changes is forwarded from there inwards. Elsewhere codec ``exact``
    is ``none``.

    Args:
        codecs: The codecs as written.
        refreshed: Tiers that refreshes cross, innermost first.

    Raises:
        ConfigError: The outermost tier has codec ``exact``, and another one a lossy codec.
    """
    weights = {tier: codecs.weights[tier] for tier in TIERS}
    if not any(codec.traits.changes for codec in weights.values()):
        return codecs, False
    outermost = weights[refreshed[-1]] if refreshed else PLAIN
    for tier, codec in weights.items():
        if outermost.traits.changes and tier in refreshed:
            if not codec.traits.exact:
                raise ConfigError(
                    f"hzero.codecs.weights.{tier}: found {codec.codec!r}, with 'exact' on {refreshed[-1]}; expected 'exact' on "
                    "both or on neither: weights are refreshed over both tiers, and changes of rounded weights are not exact"
                )
            weights[tier] = outermost
        elif codec.traits.changes:
            weights[tier] = PLAIN
    return codecs.model_copy(update={"weights": config.TierCodecs(**weights)}), outermost.traits.changes


def _first_match(patterns: Sequence[tuple[str, Any]], names: Iterable[str]) -> int | None:
    """Index of the first pattern that matches one of a parameter's names; None if none matches."""
    matching = (
        at for at, (pattern, _) in enumerate(patterns) if any(fnmatch.fnmatchcase(name, pattern) for name in names)
    )
    return next(matching, None)


def _nearest_to(pattern: str, names: Sequence[str]) -> list[str]:
    """Names sorted by similarity to a pattern. The most similar part between two dots counts."""
    meant = pattern.strip("*.")

    def likeness(name: str) -> float:
        return max(SequenceMatcher(None, meant, part).ratio() for part in (name, *name.split(".")))

    return sorted(names, key=likeness, reverse=True)
