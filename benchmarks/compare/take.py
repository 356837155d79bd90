"""Takes one measurement: sets the cluster up, runs a rank in each of its namespaces, and stores their rows."""

from __future__ import annotations

import datetime
import json
import sys
from typing import Any

from benchmarks.cluster.network import Network
from benchmarks.cluster.ranks import rank_environment_on
from benchmarks.compare import worker
from benchmarks.compare.machine import machine, now, versions
from benchmarks.compare.measurement import Measurement
from benchmarks.compare.store import Store
from benchmarks.rows import Bytes, StepsRow
from hzero.launcher import Ranks
from hzero.train import data
from hzero.train.worker import RANK_IMPORTS


def take_measurement(measurement: Measurement, store: Store, after_s: float) -> int:
    """Takes a measurement and stores one row per scheme.

    Args:
        measurement: What to measure.
        store: Where results go.
        after_s: Seconds that the measurements after this one will take, for the time left.

    Returns:
        Exit status: 0, 1 if a rank failed, 130 after Ctrl-C.

    Raises:
        ConfigError: The cluster cannot be set up, or the text cannot be used.
    """
    config, cluster = measurement.config, measurement.config.cluster
    model = config.model
    sequences = cluster.world_size * config.train.micro_batch
    tokens = data.prepare(config.data, model["vocab_size"], model["seq_length"], sequences, print)
    logs = store.logs(measurement.folder)
    # Only the comparison that the claims are about is traced to files: a trace is of a megabyte.
    traced = measurement.suite in ("main", "one")
    job = {
        "config": config.model_dump(),
        "catalog": measurement.catalog,
        "tokens": str(data.entry(config.data, tokens.key)),
        "source": tokens.source,
        "traces": str(store.folder / "traces" / measurement.folder) if traced else None,
        "after_s": after_s,
    }
    (logs / worker.JOB).write_text(json.dumps(job))
    measured_with = versions()  # before the ranks read the files, which may change while they run
    with Network(cluster):
        status = Ranks(
            [sys.executable, "-m", "benchmarks.compare.worker", str(logs)],
            [
                {**rank_environment_on(cluster, rank, threads=config.threads), "PYTHONWARNINGS": "ignore"}
                for rank in range(cluster.world_size)
            ],
            logs,
            imports=(*RANK_IMPORTS, "benchmarks.compare.scheme"),
            stopping="results of this measurement are discarded",
        ).run()
    if status:
        return status
    results: dict[str, dict[str, Any]] = json.loads((logs / worker.RESULT).read_text())
    date = now()
    store.add([_row(measurement, name, results[name], measured_with, date) for name in config.schemes])
    return 0


def _row(
    measurement: Measurement, name: str, result: dict[str, Any], versions: dict[str, str], date: datetime.datetime
) -> StepsRow:
    """The row of a scheme.

    Args:
        measurement: That ended.
        name: Of the scheme.
        result: Of the scheme, as rank 0 wrote it (`benchmarks.compare.worker`).
        versions: That measured.
        date: When it ended.
    """
    config, entry = measurement.config, measurement.catalog[name]
    sent = result.pop("measured")
    planned = measurement.bytes_of(name, result["fetches"] or 2)
    return StepsRow(
        suite=measurement.suite,
        measurement=measurement.name,
        id=measurement.id,
        date=date,
        machine=machine(),
        versions=versions,
        config=config,
        scheme=name,
        label=entry.get("label", name),
        engine=entry["engine"],
        scheme_config=entry,
        world_size=config.cluster.world_size,
        tokens_per_step=config.cluster.world_size
        * config.train.accumulation
        * config.train.micro_batch
        * config.model["seq_length"],
        bytes=Bytes(measured=sent, **planned),
        **result,
    )
