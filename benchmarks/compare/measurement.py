"""Measurement: one configuration under which several peers take turns. What a suite is made of."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from benchmarks.cluster.shape import Cluster
from benchmarks.compare import peers, reduce_scatter
from benchmarks.compare.traffic import step_bytes
from benchmarks.compare.training import SUITE, Training
from hzero.config import ConfigError, one_of
from hzero.train.conf import compose, one_line, plain
from hzero.train.settings import Settings, model_numels

#: Blocks and keys of the configuration that say what is measured; the rest says how to go about it.
PARTS = ("model", "data", "cluster", "train", "peers", "rounds", "warmup", "reduce_scatter", "timeout_s", "threads")
_TRAIN_AT_LEAST = {"accumulation": 1, "micro_batch": 1, "seed": 0, "warmup_steps": 0, "lr": 0, "weight_decay": 0}
#: Seconds for which a rank's own work lasts beside the wires, roughly, for estimates of time left.
_START_S, _BUILD_S, _STEP_S = 3.0, 0.6, 0.12


@dataclass(frozen=True)
class Measurement:
    """One configuration, checked.

    Attributes:
        suite: Name of its suite.
        name: Its name there.
        config: Its full configuration, plain.
        catalog: Entries of its peers.
        cluster: Shape and rates.
    """

    suite: str
    name: str
    config: dict[str, Any]
    catalog: dict[str, dict[str, Any]]
    cluster: Cluster

    @property
    def title(self) -> str:
        """Suite and name."""
        return f"{self.suite}/{self.name}"

    @property
    def rows(self) -> int:
        """Rows of results."""
        return len(self.config["peers"])

    @property
    def id(self) -> str:
        """Digest of everything that is measured."""
        text = json.dumps([self.suite, self.name, self.config, self.catalog], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def bytes_of(self, peer: str, fetches: float = 2) -> dict[str, dict[str, float]]:
        """Bytes that all ranks send in a step of a peer by closed forms, ``planned`` and ``ideal``, by tier.

        Args:
            peer: Its name.
            fetches: Gathers of every weight a micro-step, on average.
        """
        train = self.config["train"]
        return {
            kind: step_bytes(
                self.catalog[peer],
                self.cluster,
                model_numels(self.config["model"]),
                itemsize=4 if train["dtype"] == "fp32" else 2,
                accumulation=train["accumulation"],
                reduce_scatter=way,
                fetches=fetches,
            )
            for kind, way in (("planned", self.config["reduce_scatter"]), ("ideal", "ring"))
        }

    def estimated_s(self) -> float:
        """A rough guess of how long it takes, from bytes, rates and the number of ranks."""
        world = self.cluster.world_size
        steps = self.config["rounds"] + self.config["warmup"]
        seconds = world * _START_S
        for peer in self.config["peers"]:
            seconds += world * _BUILD_S + steps * world * _STEP_S * self.config["train"]["accumulation"] ** 0.5
            seconds += steps * sum(self.wire_s(self.bytes_of(peer)["planned"]).values())
        return seconds

    def wire_s(self, sent: Mapping[str, float]) -> dict[str, float]:
        """Least seconds of every shaped tier for bytes that all ranks send in a step."""
        links = {"gcd": self.cluster.world_size, "gpu": self.cluster.world_size, "node": self.cluster.nodes}
        rates = self.cluster.rates_mbit
        return {tier: size * 8e-6 / rate / links[tier] for tier, size in sent.items() if (rate := rates.get(tier))}


def read(config: DictConfig, changed: str = "") -> list[Measurement | Training]:
    """What a composed configuration asks for.

    Args:
        config: As Hydra composed it.
        changed: What the user has changed in it; becomes part of the measurements' names.

    Raises:
        ConfigError: Naming the key, what was found, what is possible.
    """
    OmegaConf.set_struct(config, True)
    suites: dict[str, Any] = dict(OmegaConf.to_container(config.suite, resolve=True) or {})  # type: ignore[arg-type]
    block = suites.pop(SUITE, None)
    found: list[Measurement | Training] = []
    for suite, measurements in suites.items():
        if not isinstance(measurements, dict):
            raise ConfigError(f"suite.{suite}: found {measurements!r}, expected measurements by name")
        for name, change in measurements.items():
            where = f"suite.{suite}.{name}"
            try:
                merged = OmegaConf.merge(config, change)
                whole: Any = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
            except OmegaConfBaseException as error:
                raise ConfigError(f"{where}: {one_line(error)}") from None
            found.append(_measurement(suite, f"{name},{changed}" if changed else name, whole))
    if block is None:
        return found
    return found + _trainings(block, OmegaConf.to_container(config.data, resolve=True))  # type: ignore[arg-type]


def _measurement(suite: str, name: str, whole: dict[str, Any]) -> Measurement:
    config = {part: whole[part] for part in PARTS}
    names, catalog = config["peers"], whole["catalog"]
    if not isinstance(names, list) or not names:
        raise ConfigError(f"peers: found {names!r}, expected a list of names of the catalog: {', '.join(catalog)}")
    for peer in names:
        if peer not in catalog:
            raise one_of("peers", peer, catalog, "peer")
        if names.count(peer) > 1:
            raise ConfigError(f"peers: {peer} is named {names.count(peer)} times")
    for key, least in (("rounds", 1), ("warmup", 2), ("timeout_s", 1), ("threads", 1)):
        _at_least(key, config[key], least)
    if config["reduce_scatter"] not in reduce_scatter.KINDS:
        raise one_of("reduce_scatter", config["reduce_scatter"], reduce_scatter.KINDS)
    train = config["train"]
    for key, least in _TRAIN_AT_LEAST.items():
        _at_least(f"train.{key}", train[key], least, whole=key not in ("lr", "weight_decay"))
    if train["dtype"] not in ("bf16", "fp32"):
        raise one_of("train.dtype", train["dtype"], ("bf16", "fp32"), "type")
    cluster = Cluster.from_config("cluster", config["cluster"])
    measurement = Measurement(suite, name, config, {peer: peers.check(peer, catalog[peer]) for peer in names}, cluster)
    for peer in names:
        measurement.bytes_of(peer)  # a block that cannot be used is refused before anything runs
    return measurement


def _trainings(block: Any, data: dict[str, Any]) -> list[Measurement | Training]:
    where = f"suite.{SUITE}"
    keys = {"presets", "seeds", "model", "steps", "eval_every"}
    if not isinstance(block, dict) or set(block) != keys:
        raise ConfigError(f"{where}: found {block!r}, expected the keys {', '.join(sorted(keys))}")
    for key in ("presets", "seeds"):
        if not isinstance(block[key], list) or not block[key]:
            raise ConfigError(f"{where}.{key}: found {block[key]!r}, expected a list")
    for key, least in (("steps", 1), ("eval_every", 0)):
        _at_least(f"{where}.{key}", block[key], least)
    for seed in block["seeds"]:
        _at_least(f"{where}.seeds", seed, 0)
    found: list[Measurement | Training] = [
        Training(preset, seed, block["model"], block["steps"], block["eval_every"], data)
        for seed in block["seeds"]  # an interrupted comparison has whole comparisons of fewer seeds
        for preset in block["presets"]
    ]
    for training in found:
        assert isinstance(training, Training)
        Settings(plain(compose(training.overrides(Path("unused")))))  # refuses what the trainer would
    return found


def _at_least(key: str, value: Any, least: int, *, whole: bool = True) -> None:
    number = isinstance(value, int) if whole else isinstance(value, (int, float)) and math.isfinite(value)
    if isinstance(value, bool) or not number or value < least:
        kind = "whole number" if whole else "number"
        raise ConfigError(f"{key}: found {value!r}, expected a {kind} of at least {least}")
