"""Suites: the measurements that the arguments of the command choose."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from benchmarks.compare.measurement import Measurement, check
from benchmarks.training import MODELS
from hzero.errors import ConfigError, one_of

CONF = Path(__file__).parents[1] / "conf"
#: Keys that do not become part of a measurement's name: where results go, how long to measure.
_HOW = ("suite", "results", "again", "against", "rounds", "warmup", "schemes", "threads", "timeout_s")


class Wanted(NamedTuple):
    """The measurements of a command.

    Attributes:
        measurements: In order.
        results: Folder of the results.
        again: Whether stored measurements are taken again.
    """

    measurements: list[Measurement]
    results: Path
    again: bool


def read(arguments: Sequence[str]) -> Wanted:
    """Reads ``KEY=VALUE`` arguments. They override the values of a suite, and become part of the measurements' names.

    Raises:
        ConfigError: Names the key, the value and the possible values.
    """
    config = yaml.safe_load((CONF / "bench.yaml").read_text())
    config["catalog"] = yaml.safe_load((CONF / "catalog.yaml").read_text())
    given = [_parsed(argument) for argument in arguments]
    for key, value in given:
        _set(config, key, value)
    changed = ",".join(text for text, (key, _) in zip(arguments, given) if key.partition(".")[0] not in _HOW)
    for key, kind, expected in (("results", str, "a folder"), ("again", bool, "true or false")):
        if not isinstance(config[key], kind):
            raise ConfigError(f"{key}: found {config[key]!r}; expected {expected}")
    measurements: list[Measurement] = []
    for suite, name, change in _chosen(config.pop("suite")):
        whole = copy.deepcopy(config)
        _merge(whole, change)
        for key, value in given:
            if key != "suite":
                _set(whole, key, value)
        if isinstance(whole["model"], str):
            if whole["model"] not in MODELS:
                raise one_of("model", whole["model"], MODELS)
            whole["model"] = dict(MODELS[whole["model"]])
            for key, value in given:  # model=gpt_neox_10m model.seq_length=64
                if key.startswith("model."):
                    _set(whole, key, value)
        one = check(suite, f"{name},{changed}" if changed else name, whole)
        same = next((other for other in measurements if (other.suite, other.work) == (suite, one.work)), None)
        if same is not None:
            raise ConfigError(
                f"{changed}: suite {suite} varies it, and {same.name} and {one.name} would be the same; choose suite=one "
                "for a measurement of your own"
            )
        measurements.append(one)
    return Wanted(measurements, Path(config["results"]), config["again"])


def _chosen(suites: Any) -> list[tuple[str, str, dict[str, Any]]]:
    """Suite, name and changes of every measurement of some suites, given as ``a,b``."""
    possible = sorted(path.stem for path in (CONF / "suite").glob("*.yaml"))
    found = []
    for file in str(suites).split(","):
        if file not in possible:
            raise one_of("suite", file, possible)
        for suite, measurements in yaml.safe_load((CONF / "suite" / f"{file}.yaml").read_text()).items():
            found += [(suite, name, change or {}) for name, change in measurements.items()]
    return found


def _parsed(argument: str) -> tuple[str, Any]:
    key, equals, text = argument.partition("=")
    if not key or not equals:
        raise ConfigError(f"{argument}: expected KEY=VALUE")
    try:
        return key, yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"{key}: found {text!r}; expected a value as YAML writes it") from None


def _set(config: dict[str, Any], key: str, value: Any) -> None:
    """Sets a dotted key whose block exists. `benchmarks.rows.MeasurementConfig` refuses unknown keys in it."""
    block = config
    *parents, last = key.split(".")
    for depth, parent in enumerate(parents):
        inner = block.get(parent)
        if isinstance(inner, str) and parent == "model":
            return  # the name of a model, whose shape follows
        if not isinstance(inner, dict):
            raise one_of(".".join(parents[:depth]) or "configuration", parent, block, "key")
        block = inner
    if not parents and last not in config:
        raise one_of("configuration", last, config, "key")
    block[last] = value


def _merge(config: dict[str, Any], change: dict[str, Any]) -> None:
    for key, value in change.items():
        if isinstance(value, dict) and isinstance(config.get(key), dict):
            _merge(config[key], value)
        else:
            config[key] = copy.deepcopy(value)
