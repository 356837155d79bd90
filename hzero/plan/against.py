"""Against: a finished run's step beside its prediction."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from hzero.config import TIERS, Tier
from hzero.files import read_small
from hzero.model.profile import Profile, load_profile, profile_names
from hzero.model.step import Prediction, predict
from hzero.plan.scenario import PROFILES, itemsize_of, job_of
from hzero.settings.settings import Settings
from hzero.sharding.sequence import Scheme
from hzero.validation import ConfigError, validated


class _Read(BaseModel):
    """Base of what is read of a run's files, which hold more."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class _Traffic(_Read):
    tier: Tier
    hops: int
    seconds: FiniteFloat
    hidden_seconds: FiniteFloat


class _Traced(_Read):
    wire_s: FiniteFloat
    behind_compute: FiniteFloat


class _Summary(_Read):
    world_size: int = Field(ge=1)
    steps_here: int = Field(ge=0)
    step_s_median: Annotated[FiniteFloat, Field(gt=0)] | None
    traffic: list[_Traffic] = []
    traced: dict[Tier, _Traced] | None = None


@dataclass(frozen=True)
class Part:
    """One part of a step.

    Attributes:
        name: What it is.
        measured: Seconds.
        predicted: Seconds.
    """

    name: str
    measured: float
    predicted: float

    @property
    def gap(self) -> float:
        """Seconds measured beyond those predicted."""
        return self.measured - self.predicted


@dataclass(frozen=True)
class Comparison:
    """A run and its prediction.

    Attributes:
        run: The run's folder.
        profile: Name of the profile.
        traced: Whether waiting is taken from the run's trace; else from its wire log, in which hops of several lanes that
            are in flight together count each.
        step: The whole step.
        parts: What waits for whom: seconds per step for which each tier had a hop in flight and somebody waited, and the
            rest, which is compute and everything else.
        prediction: The prediction.
    """

    run: Path
    profile: str
    traced: bool
    step: Part
    parts: list[Part]
    prediction: Prediction

    @property
    def largest(self) -> Part:
        """The part with the largest gap either way."""
        return max(self.parts, key=lambda part: abs(part.gap))


def against(run: Path, profile_name: str | None) -> Comparison:
    """Compares a run of `hzero train` with its prediction.

    Args:
        run: The run's folder.
        profile_name: Name or file of the profile; None takes that of the run's shape, where one is known.

    Raises:
        ConfigError: The folder holds no finished run, its model is not simulated, or no profile is known.
    """
    config = _read(run / "config.yaml", yaml.safe_load)
    summary = validated(_Summary, _read(run / "summary.json", json.loads), f"{run}/summary.json:")
    try:
        settings = Settings(config, summary.world_size)
    except ConfigError as error:
        raise ConfigError(f"{run}/config.yaml: {error}") from None
    if not summary.step_s_median:
        raise ConfigError(f"{run}/summary.json: step_s_median: missing; the run made no step")
    grid = replace(settings.grid, ranks=None)
    profile = (
        load_profile(profile_name) if profile_name else _profile_of_shape(run, grid.gpus_per_node, grid.gcds_per_gpu)
    )
    job = job_of(settings, itemsize_of(settings, profile))
    prediction = predict(settings.plan or Scheme("deepspeed"), job, grid, profile)
    step = Part("step", _median(run, summary), prediction.step_s)
    waited = _waited(summary)
    parts = [Part(f"waiting for tier {tier}", waited[tier], prediction.exposed.get(tier, 0.0)) for tier in waited]
    rest = [part for part in (step.measured - sum(waited.values()), step.predicted - sum(p.predicted for p in parts))]
    parts.append(Part("compute, optimizer and the rest", *rest))
    return Comparison(run, profile.name, bool(summary.traced), step, parts, prediction)


def _read(path: Path, load: Any) -> dict[str, Any]:
    try:
        content = load(read_small(path))
    except OSError as error:
        raise ConfigError(
            f"--from: cannot read {str(path)!r}: {error.strerror}; give the folder of a finished run"
        ) from None
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: found {type(content).__name__}, expected the keys of a run")
    return content


def _profile_of_shape(run: Path, gpus: int, gcds: int) -> Profile:
    for name in PROFILES.values():
        profile = load_profile(name)
        if (profile.gpus_per_node, profile.gcds_per_gpu) == (gpus, gcds):
            return profile
    raise ConfigError(
        f"{run}: no profile is known for nodes of {gpus} x {gcds} devices; give profile=NAME or a .yaml, possible: "
        f"{', '.join(profile_names())}"
    )


def _median(run: Path, summary: _Summary) -> float:
    """Median step without the first two, in which DeepSpeed records the order of parameters."""
    try:
        rows = map(json.loads, read_small(run / "metrics.jsonl").decode().splitlines())
        steps = [row["step_s"] for row in rows if isinstance(row, dict) and row.get("kind") == "step"]
        if len(steps) > 3:
            return float(statistics.median(steps[2:]))
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return summary.step_s_median or 0.0


def _waited(summary: _Summary) -> dict[str, float]:
    """Seconds per step for which ranks waited while a tier had a hop in flight.

    By the traced steps where there are some; else by the wire log, a mean over ranks and steps.
    """
    if summary.traced:
        by_tier = summary.traced
        return {tier: by_tier[tier].wire_s * (1 - by_tier[tier].behind_compute) for tier in TIERS if tier in by_tier}
    ranks, steps = summary.world_size, max(summary.steps_here, 1)
    found: dict[str, float] = {}
    for tier in TIERS:
        rows = [row for row in summary.traffic if row.tier == tier and row.hops]
        if rows:
            found[tier] = sum(row.seconds - row.hidden_seconds for row in rows) / ranks / steps
    return found
