"""Measurement: one configuration under which several peers take turns. What a suite is made of."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.cluster.shape import Cluster
from benchmarks.compare import peers, reduce_scatter
from benchmarks.compare.traffic import step_bytes
from hzero.config import ConfigError, one_of
from hzero.train.conf import known_keys
from hzero.train.settings import check_betas, check_model_and_data, model_numels

#: Blocks and keys of the configuration that say what is measured; the rest says how to go about it.
PARTS = ("model", "data", "cluster", "train", "peers", "rounds", "warmup", "reduce_scatter", "timeout_s", "threads")
_TRAIN_AT_LEAST = {"accumulation": 1, "micro_batch": 1, "seed": 0, "warmup_steps": 0, "lr": 0, "weight_decay": 0}
_TRAIN_KEYS = {*_TRAIN_AT_LEAST, "dtype", "betas"}
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
    def folder(self) -> str:
        """Name of its folders for logs and traces."""
        return re.sub(r"[^\w.,=+-]", "_", f"{self.suite}-{self.name}")[:80] + f"-{self.id[:8]}"

    @property
    def rows(self) -> int:
        """Rows of results."""
        return len(self.config["peers"])

    @property
    def id(self) -> str:
        """Digest of the name and of everything that is measured."""
        return hashlib.sha256(f"{self.suite} {self.name} {self.work}".encode()).hexdigest()[:16]

    @property
    def work(self) -> str:
        """Everything that is measured, as text."""
        return json.dumps([self.config, self.catalog], sort_keys=True)

    def bytes_of(self, peer: str, fetches: float = 2) -> dict[str, dict[str, float]]:
        """Bytes that all ranks send in a step of a peer by closed forms, by tier.

        Args:
            peer: Its name.
            fetches: Gathers of every weight a micro-step that took place, on average.

        Returns:
            ``planned``; ``planned_twice``, had every weight been gathered twice a micro-step; ``ideal``, with a
            reduce-scatter that sends nothing twice.
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
                fetches=gathers,
            )
            for kind, way, gathers in (
                ("planned", self.config["reduce_scatter"], fetches),
                ("planned_twice", self.config["reduce_scatter"], 2),
                ("ideal", "ring", fetches),
            )
        }

    def estimated_s(self) -> float:
        """A rough guess of how long it takes, from bytes, rates and the number of ranks."""
        world = self.cluster.world_size
        steps = self.config["rounds"] + self.config["warmup"]
        seconds = world * _START_S
        for peer in self.config["peers"]:
            seconds += world * _BUILD_S + steps * world * _STEP_S * self.config["train"]["accumulation"] ** 0.5
            seconds += steps * sum(self._wire_s(self.bytes_of(peer)["planned"]))
        return seconds

    def _wire_s(self, sent: Mapping[str, float]) -> list[float]:
        """Seconds of every shaped tier for bytes that all ranks send in a step, spread evenly."""
        links = {"gcd": self.cluster.world_size, "gpu": self.cluster.world_size, "node": self.cluster.nodes}
        rates = self.cluster.rates_mbit
        return [size * 8e-6 / rate / links[tier] for tier, size in sent.items() if (rate := rates.get(tier))]


def check(suite: str, name: str, whole: dict[str, Any]) -> Measurement:
    """A measurement from a composed configuration.

    Args:
        suite: Name of its suite.
        name: Its name there.
        whole: The configuration as plain dictionaries, changes of the suite applied.

    Raises:
        ConfigError: Naming the key, what was found, what is possible.
    """
    config = {part: whole[part] for part in PARTS}
    for group in ("model", "data"):
        if not isinstance(config[group], dict):
            raise ConfigError(f"{group}: found {config[group]!r}, expected a block of keys")
        known = [key.partition(".")[2] for key in known_keys() if key.startswith(f"{group}.")]
        for key in config[group]:
            if key not in known:
                raise one_of(group, key, known, "key")
    check_model_and_data(config)
    names, catalog = config["peers"], whole["catalog"]
    if not isinstance(names, list) or not names:
        raise ConfigError(f"peers: found {names!r}, expected a list of names of the catalog: {', '.join(catalog)}")
    for peer in names:
        if peer not in catalog:
            raise one_of("peers", peer, catalog, "peer")
        if names.count(peer) > 1:
            raise ConfigError(f"peers: {peer} is named {names.count(peer)} times")
    for key, least in (("rounds", 1), ("warmup", 2), ("timeout_s", 1), ("threads", 1)):
        at_least(key, config[key], least)
    if config["reduce_scatter"] not in reduce_scatter.KINDS:
        raise one_of("reduce_scatter", config["reduce_scatter"], reduce_scatter.KINDS)
    train = config["train"]
    if not isinstance(train, dict) or set(train) != _TRAIN_KEYS:
        raise ConfigError(f"train: found {train!r}, expected the keys {', '.join(sorted(_TRAIN_KEYS))}")
    check_betas(train["betas"])
    for key, least in _TRAIN_AT_LEAST.items():
        at_least(f"train.{key}", train[key], least, whole=key not in ("lr", "weight_decay"))
    if train["dtype"] not in ("bf16", "fp32"):
        raise one_of("train.dtype", train["dtype"], ("bf16", "fp32"), "type")
    cluster = Cluster.from_config("cluster", config["cluster"])
    config["cluster"] = cluster.as_dict()
    measurement = Measurement(suite, name, config, {peer: peers.check(peer, catalog[peer]) for peer in names}, cluster)
    for peer in names:
        measurement.bytes_of(peer)  # a block that cannot be used is refused before anything runs
    return measurement


def at_least(key: str, value: Any, least: int, *, whole: bool = True) -> None:
    """Refuses what is not a number of at least ``least``, or not a whole one.

    Raises:
        ConfigError: Naming ``key``.
    """
    number = isinstance(value, int) if whole else isinstance(value, (int, float)) and math.isfinite(value)
    if isinstance(value, bool) or not number or value < least:
        kind = "whole number" if whole else "number"
        raise ConfigError(f"{key}: found {value!r}, expected a {kind} of at least {least}")
