"""Shard plan: which tiers each state crosses, how often, and over which ranks. No process group, no tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hzero.config import ROLES, SCOPES, TIERS, CodecConfig, CodecsConfig, HZeroConfig
from hzero.topology.grid import Grid


@dataclass(frozen=True)
class Hop:
    """One collective on one tier.

    Attributes:
        tier: The tier.
        size: Ranks of its group.
        codec: Codec of its messages.
    """

    tier: str
    size: int
    codec: CodecConfig


@dataclass(frozen=True)
class ShardPlan:
    """What one rank has to know of its world. Costs the same for 8 ranks and for 75,264.

    Attributes:
        grid: The machine.
        rank: This rank.
        weights_scope: Scope over which the weights are resident.
        gradients_scope: Scope over which gradients accumulate.
        codecs: Codec a role and tier.
        error_feedback: Tiers whose gradient encoding keeps its residual.
        notes: What the user should be told: adapted presets, unused codecs.
    """

    grid: Grid
    rank: int
    weights_scope: str
    gradients_scope: str
    codecs: CodecsConfig
    error_feedback: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @classmethod
    def from_config(cls, config: HZeroConfig, grid: Grid, rank: int) -> ShardPlan:
        """The plan of one rank.

        A degree from a preset that is a single device here becomes the smallest scope of more than one, so that a
        preset never means whole copies by accident; a degree that the user wrote is honoured.
        """
        notes = []
        scopes = {"weights": config.shard.weights, "gradients": config.shard.gradients}
        from_preset = {"weights": config.preset_shard, "gradients": config.preset_gradients}
        for role in ("gradients", "weights"):
            if from_preset[role] and grid.scope_size(scopes[role]) == 1:
                # Weights may not become wider than gradients that the user fixed.
                widest = SCOPES[-1] if role == "gradients" else scopes["gradients"]
                allowed = SCOPES[SCOPES.index(scopes[role]) : SCOPES.index(widest) + 1]
                wider = next((scope for scope in allowed if grid.scope_size(scope) > 1), scopes[role])
                if wider != scopes[role]:
                    notes.append(
                        f"preset {config.preset}: a {scopes[role]} is one device here, so {role} are sharded over the {wider}"
                    )
                    scopes[role] = wider
        weights, gradients = scopes["weights"], scopes["gradients"]
        for role in ROLES:
            for tier in TIERS:
                codec = config.codecs[role][tier].codec
                if grid.size(tier) == 1 and codec != "none":
                    notes.append(f"codec {codec} of {role} on tier {tier} is unused: the tier has size 1")
        for tier in config.error_feedback:
            if config.codecs.gradients[tier].codec == "none":
                notes.append(f"error feedback on tier {tier} has nothing to keep: codec none loses nothing")
        return cls(grid, rank, weights, gradients, config.codecs, config.error_feedback, tuple(notes))

    def _hops(self, role: str, tiers: tuple[str, ...]) -> tuple[Hop, ...]:
        return tuple(
            Hop(tier, self.grid.size(tier), self.codecs[role][tier]) for tier in tiers if self.grid.size(tier) > 1
        )

    def gather_hops(self) -> tuple[Hop, ...]:
        """Hops from primary shards to whole weights, outermost first."""
        return self._hops("weights", TIERS[::-1])

    def refresh_hops(self) -> tuple[Hop, ...]:
        """Hops from primary shards to resident payloads: once a step. None where weights are sharded over the world."""
        return self._hops("weights", TIERS[: SCOPES.index(self.weights_scope) : -1])

    def fetch_hops(self) -> tuple[Hop, ...]:
        """Hops from resident payloads to whole weights: at every use."""
        return self._hops("weights", TIERS[SCOPES.index(self.weights_scope) :: -1])

    def reduce_hops(self) -> tuple[Hop, ...]:
        """Hops from whole gradients to this rank's shard, innermost first."""
        return self._hops("gradients", TIERS)

    def micro_hops(self) -> tuple[Hop, ...]:
        """Hops of every micro-step."""
        return self._hops("gradients", TIERS[: SCOPES.index(self.gradients_scope) + 1])

    def boundary_hops(self) -> tuple[Hop, ...]:
        """Hops of the boundary: once a step."""
        return self._hops("gradients", TIERS[SCOPES.index(self.gradients_scope) + 1 :])

    @property
    def resident(self) -> bool:
        """Whether a resident payload is kept: there is something outside the weights' scope."""
        return bool(self.refresh_hops())

    @property
    def resident_codec(self) -> CodecConfig:
        """Settings of the codec that resident payloads are in: the next tier's inwards, else the last one received in."""
        fetch = self.fetch_hops()
        return fetch[0].codec if fetch else self.refresh_hops()[-1].codec

    @property
    def accumulates(self) -> bool:
        """Whether gradients wait in accumulators of our own for the boundary."""
        return self.gradients_scope != "world"

    @property
    def resident_rows(self) -> int:
        """Shards of every parameter that this rank's resident payload holds."""
        return self.grid.world_size // self.grid.scope_size(self.weights_scope)

    @property
    def gradient_rows(self) -> int:
        """Shards of every parameter that this rank's accumulators hold."""
        return self.grid.world_size // self.grid.scope_size(self.gradients_scope)

    @property
    def hop_sizes(self) -> tuple[int, int, int]:
        """Sizes of the axes of hop order: gcd, gpu, node."""
        return tuple(self.grid.size(tier) for tier in TIERS)  # type: ignore[return-value]

    @property
    def hop_strides(self) -> tuple[int, int, int]:
        """Distance in shards between neighbours on each axis of hop order, where ranks are numbered regularly."""
        return tuple(self.grid.stride(tier) for tier in TIERS)  # type: ignore[return-value]

    def tier_group(self, tier: str) -> Sequence[int]:
        """Ranks of this rank's group of a tier."""
        return self.grid.tier_group(self.rank, tier)

    def row_order(self) -> list[int]:
        """Shard of every row of hop order. Costs as much as the world is large."""
        gcds, gpus, nodes = map(range, self.hop_sizes)
        return [self.grid.rank(node, gpu, gcd) for gcd in gcds for gpu in gpus for node in nodes]
