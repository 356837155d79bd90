"""Measurement: one configuration under which several schemes take turns. A suite consists of measurements."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.compare import schemes
from benchmarks.compare.machine import commit
from benchmarks.compare.traffic import step_bytes
from benchmarks.rows import MeasurementConfig
from benchmarks.training import check_model, numels
from hzero.config import Tier
from hzero.errors import ConfigError, one_of
from hzero.schema import validated

#: Blocks and keys of the configuration that define a measurement.
PARTS = tuple(MeasurementConfig.model_fields)
#: Rough seconds of a rank's own work, without the wires, for estimates of the time left.
_START_S, _BUILD_S, _STEP_S = 3.0, 0.6, 0.12


@dataclass(frozen=True)
class Measurement:
    """One configuration, checked.

    Attributes:
        suite: Name of its suite.
        name: Its name there.
        config: Its full configuration.
        catalog: Entries of its schemes.
        against: Another checkout, which runs the schemes ``NAME@COMMIT``.
    """

    suite: str
    name: str
    config: MeasurementConfig
    catalog: dict[str, dict[str, Any]]
    against: Path | None = None

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
        return len(self.config.schemes)

    @property
    def id(self) -> str:
        """Digest of the name and of everything that is measured."""
        return hashlib.sha256(f"{self.suite} {self.name} {self.work}".encode()).hexdigest()[:16]

    @property
    def work(self) -> str:
        """Everything that is measured, as text."""
        return json.dumps([self.config.model_dump(), self.catalog], sort_keys=True)

    def bytes_of(self, scheme: str, fetches: float = 2) -> dict[str, dict[Tier, float]]:
        """Bytes that all ranks send in a step of a scheme, in closed form, by tier.

        Args:
            scheme: Its name.
            fetches: Gathers of each weight per micro-batch that took place, on average.

        Returns:
            ``planned``, ``planned_twice`` and ``ideal``, as in `benchmarks.rows.Bytes`.
        """
        config = self.config
        return {
            kind: {}  # messages of other engines' Muon are not known
            if config.train.muon
            else step_bytes(
                self.catalog[scheme],
                config.cluster,
                numels(config.model),
                itemsize=4 if config.train.dtype == "fp32" else 2,
                accumulation=config.train.accumulation,
                reduce_scatter=way,
                fetches=gathers,
            )
            for kind, way, gathers in (
                ("planned", "gloo", fetches),
                ("planned_twice", "gloo", 2),
                ("ideal", "ring", fetches),
            )
        }

    def estimated_s(self) -> float:
        """A rough estimate of how long it takes, from bytes, rates and the number of ranks."""
        world = self.config.cluster.world_size
        steps = self.config.rounds + self.config.warmup
        seconds = world * _START_S
        for scheme in self.config.schemes:
            seconds += world * _BUILD_S + steps * world * _STEP_S * self.config.train.accumulation**0.5
            seconds += steps * sum(self._wire_s(self.bytes_of(scheme)["planned"]))
        return seconds

    def _wire_s(self, sent: Mapping[Tier, float]) -> list[float]:
        """Seconds of every shaped tier for bytes that all ranks send in a step, spread evenly."""
        cluster = self.config.cluster
        links = {"intra_package": cluster.world_size, "intra_node": cluster.world_size, "inter_node": cluster.nodes}
        return [size * 8e-6 / rate / links[tier] for tier, size in sent.items() if (rate := cluster.rate_mbit(tier))]


def check(suite: str, name: str, whole: dict[str, Any]) -> Measurement:
    """A measurement from a composed configuration.

    Args:
        suite: Name of its suite.
        name: Its name there.
        whole: The configuration as plain dictionaries, changes of the suite applied.

    Raises:
        ConfigError: Names the key, the value and the possible values.
    """
    config = {part: whole[part] for part in PARTS if part in whole}
    config["model"] = check_model(config["model"])
    parsed = validated(MeasurementConfig, config, "")
    names, catalog = parsed.schemes, whole["catalog"]
    for scheme in names:
        if scheme not in catalog:
            raise one_of("schemes", scheme, catalog)
        if names.count(scheme) > 1:
            raise ConfigError(f"schemes: {scheme} is named {names.count(scheme)} times")
    entries = {scheme: schemes.check(scheme, catalog[scheme]) for scheme in names}
    against = None if whole["against"] is None else Path(str(whole["against"])).resolve()
    if against is not None:
        entries = _with_those_of(against, entries)
        parsed = parsed.model_copy(update={"schemes": list(entries)})
    measurement = Measurement(suite, name, parsed, entries, against)
    for scheme in entries:
        measurement.bytes_of(scheme)  # a block that cannot be used is refused before anything runs
    return measurement


def _with_those_of(checkout: Path, entries: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The entries, with every scheme of hzero, under FSDP2 too, followed by the same scheme of another checkout."""
    its = commit(checkout)
    if not its or not (checkout / "benchmarks" / "compare").is_dir():
        raise ConfigError(f"against: found {str(checkout)!r}; expected a checkout of hzero")
    found = {}
    for name, entry in entries.items():
        found[name] = entry
        if entry["engine"] == "hzero" or "block" in entry:
            found[f"{name}@{its}"] = {**entry, "label": f"{entry.get('label', name)} at {its}"}
    return found
