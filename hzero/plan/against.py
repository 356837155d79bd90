"""Against: a finished run's step beside its prediction."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from hzero.config import TIERS
from hzero.files import read_small
from hzero.model.profile import Profile, load_profile, profile_names
from hzero.model.step import Prediction, predict
from hzero.plan.scenario import PROFILES, itemsize_of, job_of
from hzero.settings.settings import Settings
from hzero.sharding.sequence import Scheme
from hzero.validation import ConfigError


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
        step: The whole step.
        parts: What waits for whom: seconds per step for which each tier had a hop in flight and somebody waited, and the
            rest, which is compute and everything else.
        prediction: The prediction.
    """

    run: Path
    profile: str
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
    summary = _read(run / "summary.json", json.loads)
    settings = Settings(config, summary.get("world_size"))
    if not summary.get("step_s_median"):
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
    return Comparison(run, profile.name, step, parts, prediction)


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


def _median(run: Path, summary: dict[str, Any]) -> float:
    """Median step without the first two, in which DeepSpeed records the order of parameters."""
    try:
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        steps = [row["step_s"] for row in map(json.loads, lines) if row.get("kind") == "step"]
    except (OSError, ValueError, KeyError):
        steps = []
    return statistics.median(steps[2:]) if len(steps) > 3 else float(summary["step_s_median"])


def _waited(summary: dict[str, Any]) -> dict[str, float]:
    """Seconds per step for which ranks waited while a tier had a hop in flight, by the wire log, a mean over the ranks."""
    ranks, steps = summary["world_size"], max(summary["steps_here"], 1)
    found: dict[str, float] = {}
    for tier in TIERS:
        rows = [row for row in summary["traffic"] if row["tier"] == tier and row["hops"]]
        if rows:
            found[tier] = sum(row["seconds"] - row["hidden_seconds"] for row in rows) / ranks / steps
    return found
