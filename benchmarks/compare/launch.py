"""Launching one measurement: the cluster, a rank in each of its namespaces, and their rows in the store."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

from benchmarks.cluster.launch import command_inside, rank_environment_on
from benchmarks.cluster.network import Network
from benchmarks.compare import worker
from benchmarks.compare.machine import versions
from benchmarks.compare.measurement import Measurement
from benchmarks.compare.store import Store
from hzero.train import data
from hzero.train.launch import Ranks


def take(measurement: Measurement, store: Store, after_s: float) -> int:
    """Takes a measurement and stores one row a peer.

    Args:
        measurement: What to measure.
        store: Where results go.
        after_s: Seconds that the measurements after this one will take, for the time left.

    Returns:
        Exit status: 0, 1 where a rank failed, 130 after Ctrl-C.

    Raises:
        ConfigError: The cluster cannot be set up, or the text cannot be used.
    """
    config, cluster = measurement.config, measurement.cluster
    model = config["model"]
    sequences = cluster.world_size * config["train"]["micro_batch"]
    tokens = data.prepare(config["data"], model["vocab_size"], model["seq_length"], sequences, print)
    logs = store.logs(measurement.folder)
    # Only the comparison that the claims are about is traced to files: a trace is of a megabyte.
    traced = measurement.suite in ("main", "one")
    job = {
        "config": config,
        "catalog": measurement.catalog,
        "tokens": str(data.folder_of(config["data"], tokens)),
        "source": tokens.source,
        "traces": str(store.folder / "traces" / measurement.folder) if traced else None,
        "after_s": after_s,
    }
    (logs / worker.JOB).write_text(json.dumps(job))
    measured_with = versions()  # before the ranks read the files, which may change while they run
    with Network(cluster):
        status = Ranks(
            command_inside([sys.executable, "-m", "benchmarks.compare.worker", str(logs)]),
            [
                {**rank_environment_on(cluster, rank, threads=config["threads"]), "PYTHONWARNINGS": "ignore"}
                for rank in range(cluster.world_size)
            ],
            logs,
            logs / worker.STARTED,
            math.inf,  # every wait of the ranks has its own end
            stopping="what this measurement has is dropped",
        ).run()
    if status:
        return status
    results: dict[str, dict[str, Any]] = json.loads((logs / worker.RESULT).read_text())
    rows = ({"versions": measured_with, **_row(measurement, peer, results[peer], traced)} for peer in config["peers"])
    store.add(rows, measurement.id)
    return 0


def _row(measurement: Measurement, peer: str, result: dict[str, Any], traced: bool) -> dict[str, Any]:
    config = measurement.config
    train = config["train"]
    entry = measurement.catalog[peer]
    return {
        "kind": "steps",
        "suite": measurement.suite,
        "measurement": measurement.name,
        "config": config,
        "peer": peer,
        "label": entry.get("label", peer),
        "engine": entry["engine"],
        "peer_config": entry,
        "parameters": result["parameters"],
        "world_size": measurement.cluster.world_size,
        "tokens_per_step": measurement.cluster.world_size
        * train["accumulation"]
        * train["micro_batch"]
        * config["model"]["seq_length"],
        "step_s": result["step_s"],
        "losses": result["losses"],
        "bytes": {"measured": result["measured"], **measurement.bytes_of(peer, result["fetches"] or 2)},
        "fetches": result["fetches"],
        "memory": result["memory"],
        "busiest": result["busiest"],
        "cpu_s": result["cpu_s"],
        "breakdown": result["breakdown"],
        "trace": f"traces/{measurement.folder}/{peer}.json.gz" if traced else None,
    }
