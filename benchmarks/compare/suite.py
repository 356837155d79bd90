"""Suites: what a composed configuration asks to be measured and trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from benchmarks.compare.measurement import PARTS, Measurement, at_least, check
from benchmarks.compare.training import SUITE, Training
from hzero.config import ConfigError, one_of
from hzero.train.conf import compose, one_line, plain
from hzero.train.settings import Settings

_KEYS = (*PARTS, "catalog", "suite", "results", "again")
#: Keys that the suite of trainings has a use for.
_OF_TRAINING = ("suite", "data", "results", "again")
#: Keys that say what to measure of what, where results go and how long measuring takes: no part of a measurement's name.
_HOW = ("suite", "results", "again", "rounds", "warmup", "peers", "threads", "timeout_s")


def read(config: DictConfig, given: Sequence[str] = ()) -> list[Measurement | Training]:
    """What a composed configuration asks for.

    Args:
        config: As Hydra composed it.
        given: The user's overrides: they win over what a suite sets, and become part of the measurements' names.

    Raises:
        ConfigError: Naming the key, what was found, what is possible.
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


def _trainings(block: Any, data: dict[str, Any]) -> list[Measurement | Training]:
    where = f"suite.{SUITE}"
    keys = {"presets", "seeds", "model", "steps", "eval_every"}
    if not isinstance(block, dict) or set(block) != keys:
        raise ConfigError(f"{where}: found {block!r}, expected the keys {', '.join(sorted(keys))}")
    for key in ("presets", "seeds"):
        if not isinstance(block[key], list) or not block[key] or len(set(map(str, block[key]))) < len(block[key]):
            raise ConfigError(f"{where}.{key}: found {block[key]!r}, expected a list, nothing in it twice")
    for key, least in (("steps", 1), ("eval_every", 0)):
        at_least(f"{where}.{key}", block[key], least)
    for seed in block["seeds"]:
        at_least(f"{where}.seeds", seed, 0)
    found: list[Measurement | Training] = [
        Training(preset, seed, block["model"], block["steps"], block["eval_every"], data)
        for seed in block["seeds"]  # an interrupted comparison has whole comparisons of fewer seeds
        for preset in block["presets"]
    ]
    for training in found:
        assert isinstance(training, Training)
        Settings(plain(compose(training.overrides(Path("unused")))))  # refuses what the trainer would
    return found
