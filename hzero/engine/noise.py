"""Signal-to-noise ratios of what codecs do to weights and gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from hzero.codecs.codec import Codec
from hzero.config import ROLES, CodecConfig, Role, Tier
from hzero.plan.shards import ShardPlan


def lossy_tiers(plan: ShardPlan) -> dict[tuple[Role, CodecConfig], list[Tier]]:
    """Tiers whose codec loses something, those of one codec together."""
    tiers: dict[tuple[Role, CodecConfig], list[Tier]] = {}
    for role in ROLES:
        for hop in plan.gather_hops() if role == "weights" else plan.reduce_hops():
            if not Codec.from_config(hop.codec).exact:
                tiers.setdefault((role, hop.codec), []).append(hop.tier)
    return tiers


def of_codecs(
    tiers: Mapping[tuple[Role, CodecConfig], list[Tier]],
    shards: Mapping[Role, Sequence[torch.Tensor]],
    device: torch.device,
) -> list[list[float]]:
    """Powers of signal and noise of one round trip through each codec, summed over all ranks. Collective.

    Args:
        tiers: Of `lossy_tiers`; not empty.
        shards: This rank's part of each role's values. Those that are not all finite are left out.
        device: Where sums are made.

    Returns:
        ``[signal, noise]`` for each codec, sums of squares.
    """
    powers = torch.stack([_round_trip(config, shards[role], device) for role, config in tiers])
    dist.all_reduce(powers)
    found: list[list[float]] = powers.tolist()
    return found


def power(exact: torch.Tensor, decoded: torch.Tensor) -> torch.Tensor:
    """Sums of squares of values and of their errors, float64 ``[2]``."""
    exact, decoded = exact.double(), decoded.double()
    return torch.stack([exact.square().sum(), (decoded - exact).square().sum()])


def decibels(signal: float, noise: float) -> float | None:
    """The ratio in dB; infinity without noise, None without a finite signal."""
    if not signal or not math.isfinite(signal + noise):
        return None
    return 10 * math.log10(signal / noise) if noise else math.inf


def described(ratio: float | None) -> str:
    """A ratio for people."""
    if ratio is None:
        return "unknown (nothing but zeros)"
    return f"{ratio:.1f} dB" if math.isfinite(ratio) else "without loss"


def _round_trip(config: CodecConfig, shards: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    codec, total = Codec.from_config(config), torch.zeros(2, dtype=torch.float64, device=device)
    for shard in shards:
        if not shard.numel() or not bool(shard.isfinite().all()):
            continue
        values = shard.to(device, torch.float32)
        (decoded,) = codec.decode(codec.encode([values], [values.numel()]), [values.numel()], dtype=values.dtype)
        total += power(values, decoded[: values.numel()])
    return total
