"""Takes one measurement: sets the cluster up, forks a rank into each of its namespaces, and stores their rows."""

from __future__ import annotations

import datetime
import functools
import json
from pathlib import Path
from typing import Any

from benchmarks.cluster.network import Network
from benchmarks.cluster.ranks import run_ranks
from benchmarks.compare.machine import machine, now, versions
from benchmarks.compare.measurement import Measurement
from benchmarks.compare.store import Store
from benchmarks.rows import Bytes, StepsRow
from benchmarks.training import prepare, tokens


def take_measurement(measurement: Measurement, store: Store, after_s: float) -> int:
    """Takes a measurement and stores one row per scheme.

    Args:
        measurement: What to measure.
        store: Where results go.
        after_s: Seconds that the measurements after this one will take, for the time left.

    Returns:
        Exit status: 0, or 1 if a rank failed.

    Raises:
        ConfigError: The cluster cannot be set up.
    """
    prepare()
    from benchmarks.compare import worker

    config, cluster = measurement.config, measurement.config.cluster
    text = tokens(config.model["vocab_size"], config.data["max_bytes"], store.folder)
    logs = store.logs(measurement.folder)
    # A trace has a megabyte, so only the comparison behind the claims, and measurements of your own, keep one.
    traces = store.folder / "traces" / measurement.folder if measurement.suite in ("main", "one") else None
    job = worker.Work(config.model_dump(), measurement.catalog, text, traces, after_s, logs / "result.json")
    measured_with = versions()  # before the ranks read the files, which may change while they run
    with Network(cluster):
        status = run_ranks(cluster, functools.partial(worker.measure, job), logs, config.threads)
    if status:
        return status
    results: dict[str, dict[str, Any]] = json.loads(Path(job.result).read_text())
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
    sequences = config.cluster.world_size * config.train.accumulation * config.train.micro_batch
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
        tokens_per_step=sequences * config.model["seq_length"],
        bytes=Bytes(measured=sent, **planned),
        **result,
    )
