"""Takes one measurement: sets the cluster up, forks a rank into each of its namespaces, and stores their rows."""

from __future__ import annotations

import datetime
import itertools
import json
import os
import pickle
import socket
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.cluster.network import Network
from benchmarks.compare.machine import ROOT, machine, now, versions
from benchmarks.compare.measurement import Measurement
from benchmarks.compare.store import Store
from benchmarks.rows import Bytes, StepsRow
from benchmarks.training import prepare, tokens
from hzero.tools.launch import die_with_parent

#: Longest time that the ranks of another checkout may take to end after ours, in seconds.
_END_S = 60.0
#: A round does not count if a hypervisor took more than this share of the time, or a copy had less than that share of its rate.
STOLEN, COPIED = 0.05, 0.8


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

    config = measurement.config
    text = tokens(config.model["vocab_size"], config.data["max_bytes"], store.folder)
    logs = store.logs(measurement.folder)
    # A trace has a megabyte, so only the comparison behind the claims, and measurements of your own, keep one.
    traces = store.folder / "traces" / measurement.folder if measurement.suite in ("main", "one") else None
    job = worker.Work(config.model_dump(), measurement.catalog, text, traces, after_s, logs / "result.json")
    measured_with = versions()  # before the ranks read the files, which may change while they run
    with Network(config.cluster):
        if measurement.against is None:
            jobs, status = [job], worker.run(job)
        else:
            jobs = [job, replace(job, result=store.logs(f"{measurement.folder}-against") / "result.json", theirs=True)]
            status = _run_beside(measurement.against, config.cluster.world_size, *jobs)
    if status:
        return status
    results: dict[str, dict[str, Any]] = {}
    for one in jobs:
        results |= json.loads(one.result.read_text())
    date, quiet = now(), quiet_rounds(results[config.schemes[0]]["load"])
    if len(quiet) < config.rounds:
        print(
            f"  {config.rounds - len(quiet)} of {config.rounds} rounds do not count: the machine was busy", flush=True
        )
    for result in results.values():  # the same rounds of all schemes, of the other checkout's, too
        del result["load"]
        result["step_s"] = [result["step_s"][place] for place in quiet]
        result["busy_rounds"] = config.rounds - len(quiet)
    store.add([_row(measurement, name, results[name], measured_with, date) for name in config.schemes])
    return 0


def quiet_rounds(load: Sequence[tuple[float, float]]) -> list[int]:
    """The rounds that count: those in which nobody else used the machine, or all if that was seldom.

    Args:
        load: By round, the share of time that a hypervisor took, and the rate of a copy in GB/s.
    """
    usual = statistics.median(rate for _, rate in load)
    quiet = [place for place, (stolen, rate) in enumerate(load) if stolen <= STOLEN and rate >= COPIED * usual]
    return quiet if 2 * len(quiet) > len(load) else list(range(len(load)))


def _run_beside(checkout: Path, ranks: int, ours: Any, theirs: Any) -> int:
    """Runs our ranks beside those of another checkout, which has its own packages, but the worker of this checkout.

    Args:
        checkout: The other checkout.
        ranks: Number of ranks of each.
        ours: What our ranks do, a `benchmarks.compare.worker.Work`.
        theirs: What the others do.

    Returns:
        Exit status, of ours first.
    """
    from benchmarks.compare import worker

    # Both start in the same way: ranks forked from this process would carry everything that it imported.
    run = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"  # keeps this folder out of sys.path
    pairs = [socket.socketpair() for _ in range(ranks)]
    processes = []
    try:
        for folder, work, ends in zip((ROOT, checkout), (ours, theirs), zip(*pairs)):
            peers, env = tuple(end.fileno() for end in ends), {**os.environ, "PYTHONPATH": str(folder)}
            job = pickle.dumps(asdict(replace(work, peers=peers))).hex()
            command = [sys.executable, "-c", run, worker.__file__, job]
            process = subprocess.Popen(command, cwd=folder, env=env, pass_fds=peers, preexec_fn=die_with_parent)
            processes.append(process)
        for end in itertools.chain(*pairs):  # the ranks have them: each side notices if the other ends early
            end.close()
        return processes[0].wait() or processes[1].wait(_END_S)
    finally:
        for process in processes:
            process.kill()  # its ranks end with it
            process.wait()


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
    if commit := name.partition("@")[2]:
        versions = {**versions, "commit": commit}
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
