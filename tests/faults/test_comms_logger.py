"""DeepSpeed's own summary of communication, and the line that begins an engine."""

from __future__ import annotations

from pathlib import Path

from tests.faults.launch import run


def test_the_summary_has_the_bytes_on_the_wire(tmp_path: Path) -> None:
    output = run("comms_logger.py", folder=tmp_path)
    starts = [line for line in output.splitlines() if line.startswith("hzero: topo on ")]
    assert [line.partition("; ")[0].removeprefix("hzero: topo on ") for line in starts] == [
        "1 node x 4 GPUs x 1 GCD (CPU ranks, no topology declared)",
        "2 nodes x 1 GPU x 2 GCDs",
    ]
    _, summary, _, unfit, stragglers = output.split("Comm. Op")
    assert "\nhzero weights, node, int8\n" in summary and "\nhzero gradients, node, int4\n" in summary
    # Rank 0, which prints, has not sent this message: it is of ranks 1 and 3.
    assert "\nhzero weights, node, none\n" in unfit and "\nhzero weights, node, none\n" in stragglers
