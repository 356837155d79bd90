"""The table of what safeguards cost."""

from __future__ import annotations

from benchmarks.safeguards import table


def test_shares_are_of_time_or_of_cpu_time() -> None:
    seconds = {"hashes": 1.0, "recorder": 0.5, "hops": 0.1, "canary": 0.2, "audit": 0.4, "guard": 0.0}
    calls = {"hashes": 3_000_000, "recorder": 2, "hops": 100, "canary": 3, "audit": 2}
    rank = {"whole_s": 100.0, "cpu_s": 50.0, "seconds": seconds, "calls": calls}
    lines = table([rank, {**rank, "seconds": {**seconds, "hashes": 2.0}}]).splitlines()
    assert lines[2] == "| hashes of checkpoints | 3.00 MB | 1.500 of 50.0 | 3.000% of CPU time |"
    assert lines[5] == "| canaries | 3 | 0.200 of 100.0 | 0.200% of time |"
    assert lines[-1] == "| all | | | 4.700% |"
