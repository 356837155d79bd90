"""What a save costs, from the times in a run's metrics."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.saves import EVERY, measure


def test_steps_are_told_apart_by_the_save_around_them() -> None:
    """The step behind a save holds what the save took of the loop; those while it is written are compared with the others."""
    rows: list[dict[str, Any]] = []
    time = 0.0
    for step in range(1, 5 * EVERY + 1):
        time += {1: 3.0, 2: 1.5}.get(step % EVERY, 1.0)
        rows.append({"kind": "step", "step": step, "time": time})
    for step in range(EVERY, 5 * EVERY, EVERY):
        rows.append({"kind": "save", "step": step, "copy_s": 0.5, "blocked_s": 2.0, "write_s": 3.5, "bytes": 7})
    found = measure(rows)
    assert (found["other_s"], found["behind_s"], found["during_s"]) == pytest.approx((1.0, 3.0, 1.5))
    assert found["all_s"] == pytest.approx(2.5)
    assert (found["copy_s"], found["blocked_s"], found["write_s"], found["bytes"]) == (0.5, 2.0, 3.5, 7)
    assert "during_s" not in measure([row for row in rows if row["kind"] == "step"])
