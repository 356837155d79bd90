"""Suites: the measurements and trainings that a composed configuration asks for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import Field, field_validator

from benchmarks.compare.measurement import PARTS, Measurement, check
from benchmarks.compare.training import SUITE, Training
from hzero.settings.conf import compose, one_line, plain
from hzero.settings.groups import Count, Positive
from hzero.settings.settings import Settings
from hzero.validation import ConfigError, Frozen, one_of, validated

_KEYS = (*PARTS, "catalog", "suite", "results", "again")
#: Keys that the suite of trainings uses.
_OF_TRAINING = ("suite", "data", "results", "again")
#: Keys that do not become part of a measurement's name: what to run, where results go, how long to measure.
_HOW = ("suite", "results", "again", "rounds", "warmup", "schemes", "threads", "timeout_s")


def read(config: DictConfig, given: Sequence[str] = ()) -> list[Measurement | Training]:
    """Measurements and trainings of a composed configuration.

    Args:
        config: As Hydra composed it.
        given: The user's overrides: they win over what a suite sets, and become part of the measurements' names.

    Raises:
        ConfigError: Names the key, what was found and what is possible.
    """
    OmegaConf.set_struct(config, True)
    keys = [override.lstrip("+~").partition("=")[0] for override in given]
    changed = ",".join(override for key, override in zip(keys, given) if key.partition(".")[0] not in _HOW)
    suites: dict[str, Any] = dict(OmegaConf.to_container(config.suite, resolve=True) or {})  # type: ignore[arg-type]
    block = suites.pop(SUITE, None)
    for key in config:
        if key not in _KEYS:
            raise one_of("configuration", key, _KEYS, "key")
    found: list[Measurement | Training] = []
    seen: dict[str, str] = {}
    for suite, measurements in suites.items():
        if not isinstance(measurements, dict) or not all(isinstance(change, dict) for change in measurements.values()):
            raise ConfigError(f"suite.{suite}: found {measurements!r}, expected by name what each measurement changes")
        for name, change in measurements.items():
            try:
                merged = OmegaConf.merge(config, change)
                for key in keys:
                    if "." in key or not OmegaConf.is_dict(OmegaConf.select(config, key)):
                        OmegaConf.update(merged, key, OmegaConf.select(config, key))
                whole: Any = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
            except OmegaConfBaseException as error:
                raise ConfigError(f"suite.{suite}.{name}: {one_line(error)}") from None
            measurement = check(suite, f"{name},{changed}" if changed else name, whole)
            same = seen.setdefault(f"{suite} {measurement.work}", name)
            if same != name:
                raise ConfigError(
                    f"{changed}: suite {suite} varies it, and {same} and {name} would be the same; choose suite=one for a "
                    "measurement of your own"
                )
            found.append(measurement)
    if block is None:
        return found
    unused = [key for key in keys if key.partition(".")[0] not in _OF_TRAINING]
    if unused and not found:
        raise ConfigError(f"{unused[0]}: suite {SUITE} has no use for it; it takes suite.{SUITE}.* and data.*")
    return found + _trainings(block, OmegaConf.to_container(config.data, resolve=True))  # type: ignore[arg-type]


class _Block(Frozen):
    """The suite of trainings, as the configuration has it."""

    presets: list[str] = Field(min_length=1)
    seeds: list[Count] = Field(min_length=1)
    model: str
    steps: Positive
    eval_every: Count
    overrides: list[str] = []
    choices: dict[str, list[str]] = {}

    @field_validator("presets", "seeds")
    @classmethod
    def _distinct(cls, values: list[Any]) -> list[Any]:
        if len(set(values)) < len(values):
            raise ValueError(f"found {values}, expected each one once")
        return values


def _trainings(block: Any, data: dict[str, Any]) -> list[Measurement | Training]:
    parsed = validated(_Block, block, f"suite.{SUITE}")
    wanted: dict[str, tuple[str, ...] | None] = dict.fromkeys(parsed.presets)
    for name, overrides in parsed.choices.items():
        if name in wanted:
            raise ConfigError(f"suite.{SUITE}.choices: found {name!r}, which is a preset too; choose another name")
        wanted[name] = tuple(overrides)
    found: list[Measurement | Training] = [
        Training(name, seed, parsed.model, parsed.steps, parsed.eval_every, data, tuple(parsed.overrides), choice)
        for seed in parsed.seeds  # an interrupted comparison has whole comparisons of fewer seeds
        for name, choice in wanted.items()
    ]
    for training in found:
        assert isinstance(training, Training)
        config = plain(compose(training.overrides(Path("unused"))))
        Settings(config)  # refuses what the trainer would
        jobs = {"train.seed": training.seed, "train.steps": training.steps, "model.name": training.model}
        for key, value in jobs.items():
            group, _, name = key.partition(".")
            if config[group][name] != value:
                raise ConfigError(
                    f"suite.{SUITE}: {training.preset} overrides {key} with {config[group][name]!r}, but all of its trainings "
                    f"have {value!r}"
                )
    return found
