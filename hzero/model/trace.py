"""Trace of a predicted step: Chrome trace events with the tracks of a measured one, so that both open side by side."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from hzero.files import replacing
from hzero.model.simulate import COMPUTE, Timeline


def write_trace(path: Path, timeline: Timeline, name: str) -> None:
    """Writes every task as a span; compressed where the name ends in ``.gz``. Whole or not at all.

    Args:
        path: The file.
        timeline: Of a prediction with ``exact``.
        name: Of the process, beside the ranks of a measured trace.

    Raises:
        OSError: It cannot be written.
    """
    pid = 1_000_000  # no rank's
    lanes = {lane: number for number, lane in enumerate(dict.fromkeys(task.lane for task in timeline.tasks), 1)}
    lanes = {COMPUTE: 0, **{lane: number for lane, number in lanes.items() if lane != COMPUTE}}
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"predicted: {name}"}}
    ]
    for lane, tid in lanes.items():
        events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": lane}})
    for task in timeline.tasks:
        events.append(
            {
                "ph": "X",
                "name": task.name,
                "pid": pid,
                "tid": lanes[task.lane],
                "ts": round(task.start * 1e6, 3),
                "dur": round((task.end - task.start) * 1e6, 3),
                "args": task.details,
            }
        )
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode()
    with replacing(path, "wb") as file:
        file.write(gzip.compress(text) if path.name.endswith(".gz") else text)
