"""The page of a first run, from folders in which each part has ended, has been killed, or has found something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report.__main__ import main
from benchmarks.report.first_run import SCHEMES, Folder, page, predictions

#: Seconds of a step of every part that trains, and bytes into one node of its wire log.
MEASURED = {"zero3": 2.5, "zeropp": 2.3, "hsdp": 2.3, "topo": 2.2, "lossless": 2.4, "lanes": 2.1}
BYTES = {"zeropp": 7.7e9, "topo": 7.7e9, "lossless": 20e9, "lanes": 7.7e9}
PLAN = {
    "ZeRO-3": (2.5, None), "zeropp": (2.3, 7.7e9), "HSDP, node": (2.28, None), "topo": (2.26, 7.7e9), "lossless": (2.4, 20e9),
}  # fmt: skip
#: Rows of the plan's memory, of which a run has the first two.
STATES = [
    {"name": "secondary partition", "bytes": 5_100_000_000},
    {"name": "optimizer", "bytes": 7_600_000_000},
    {"name": "activations", "bytes": 800_000_000},
]
#: What each part leaves.
FILES = {
    "plan": ["logs/plan.log"],
    "doctor": ["logs/doctor.log"],
    "links": ["links.json"],
    "kernels": ["2026-11-26-kernels-mi250x.jsonl"],
    **{name: [f"{name}/steps.jsonl", f"{name}/summary.json"] for name in SCHEMES},
    "faults": ["logs/faults.log"],
}


def _write(file: Path, *rows: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder as slurm/first_run.sbatch leaves it on Frontier, if all goes as the plan says."""
    (tmp_path / "parts.tsv").write_text("".join(f"{name}\t0\t30\t180\n" for name in FILES))
    (tmp_path / "environment.txt").write_text(
        "2026-11-26T09:00:00, frontier, 2 nodes, job 1, commit abc\nNCCL_NET=OFI\n"
    )
    (tmp_path / "keys.txt").write_text("experiment=paper_10b\ntrain.steps=30\n")
    schemes = {name: {"step_s": step, "node_bytes": size, "memory_bytes": 24e9} for name, (step, size) in PLAN.items()}
    plan = {
        "schemes": schemes,
        "rates_gb_s": {"intra_package": 200, "intra_node": 50, "inter_node": 11},
        "memory": STATES,
    }
    _write(tmp_path / "logs/plan.log", plan)
    _write(tmp_path / "logs/doctor.log", {"verdict": "good", "remarks": [], "versions": "hzero 0.1.0, RCCL 2.27.7"})
    row = {
        "tier": "inter_node", "ranks": 2, "algorithm": "library", "size_bytes": 2_000_000, "min_us": 100.0, "max_us": 100.0,
    }  # fmt: skip
    _write(
        tmp_path / "links.json",
        {"schema": "hzero-links-1", "date": "", "machine": {}, "versions": {}, "backend": "nccl", "device": "MI250X"}
        | {"grid": {"intra_package": 2, "intra_node": 4, "inter_node": 2}, "rows": [{**row, "median_us": 100.0}]},
    )
    copy = {"kernel": "copy", "moved_bytes": 2_000_000_000, "seconds": [0.002]}
    _write(tmp_path / FILES["kernels"][0], {"machine": {}}, copy, {**copy, "kernel": "encode int8", "seconds": [0.004]})
    for name, seconds in MEASURED.items():
        steps = [{"step": step, "loss": 9.0 - step / 10, "seconds": seconds + (step < 3)} for step in range(1, 31)]
        _write(tmp_path / name / "steps.jsonl", *steps)
        wires = (
            [{"tier": "inter_node", "role": "weights", "codec": "int8", "received": 2 * BYTES[name]}]
            if name in BYTES
            else []
        )
        states = {row["name"]: row["bytes"] for row in STATES[:2]}
        summary = {"grid": {"inter_node": 2}, "bytes_per_step": wires, "memory": states, "peak_bytes": 25_000_000_000}
        _write(tmp_path / name / "summary.json", summary)
    (tmp_path / "logs/faults.log").write_text("files: 3, lines: 30, known causes: 0\nverdict: good\n")
    return tmp_path


def test_the_page_says_which_predictions_hold(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["first_run", str(run)]) == 0
    assert capsys.readouterr().out == f"page: {run}/first_run.md\n"
    text = (run / "first_run.md").read_text()
    assert text.startswith("# First run: 2026-11-26T09:00:00, frontier, 2 nodes")
    for line in (
        "| hzero `topo`: bytes into a node per step | **confirmed** | 7.70 GB, planned 7.70 GB |",
        "| hzero `topo`: step over ZeRO-3's | **confirmed** | 0.88, predicted 0.90 |",
        "| FSDP2, HSDP over the node | 30 | 2.300 | 2.280 | +1% | 8.9000 | 6.0000 |",
        "| inter_node | 10 | 11 | -9% | 100.0 |",
        "| Links of tier inter_node | **confirmed** | 10 GB/s per device, assumed 11 |",
        "| hzero `topo`: memory of states | **confirmed** | 12.70 GB, planned 12.70 GB |",
        "| FSDP2, HSDP over the node: peak of memory | **confirmed** | 25.00 GB, planned 24.00 GB |",
        "| encode int8 | 500.0 | 0.50 |",
        "NCCL_NET=OFI",
        "| step over ZeRO-3's: 2026-11-26T09:00:00, frontier, 2 nodes, job 1 | 0.96 | 0.88 | `zeropp` 0.92, HSDP 0.92 |",
    ):
        assert line in text
    assert all(good for _, good, _ in predictions(Folder(run)))


@pytest.mark.parametrize("part", FILES)
def test_a_part_that_was_killed_leaves_the_rest(run: Path, part: str) -> None:
    """Training leaves the steps that it has done."""
    whole = page(Folder(run))
    for name in FILES[part]:
        if name.endswith("steps.jsonl"):
            (run / name).write_text((run / name).read_text()[:600])  # in the middle of a line
        else:
            (run / name).unlink()
    rows = (run / "parts.tsv").read_text()
    (run / "parts.tsv").write_text(rows.replace(f"{part}\t0\t30\t180", f"{part}\t124\t180\t180"))
    text = page(Folder(run))
    assert f"| {part} | **killed** by its limit | 180 | 180 |" in text
    lost = set(whole.splitlines()) - set(text.splitlines())
    others = [f"| {SCHEMES[name][0]} |" for name in SCHEMES if name != part]
    if part != "plan":  # without it only the predictions go
        assert not [line for line in lost for label in others if line.startswith(label)]
    if part in SCHEMES:
        assert [row["step"] for row in Folder(run).rows[part]] == list(range(1, len(Folder(run).rows[part]) + 1)) != []


def test_what_differs_from_a_prediction_is_refuted(run: Path) -> None:
    _write(run / "topo/steps.jsonl", *({"step": step, "loss": 9.5, "seconds": 3.1} for step in range(1, 31)))
    wires = [{"tier": "inter_node", "role": "weights", "codec": "int8", "received": 2.2 * BYTES["topo"]}]
    _write(run / "topo/summary.json", {"grid": {"inter_node": 2}, "bytes_per_step": wires})
    (run / "logs/kernels.err").write_text("kernels.py: encode int8, kernel, bf16: not bit-equal to the reference\n")
    rows = (
        (run / "parts.tsv").read_text().replace("kernels\t0", "kernels\t1").replace("lanes\t0\t30", "lanes\t124\t180")
    )
    (run / "parts.tsv").write_text(rows)
    refuted = [what for what, good, _ in predictions(Folder(run)) if good is False]
    assert refuted == [
        "The kernels give the bits of plain torch",
        "hzero `topo`: bytes into a node per step",
        "hzero `topo`: step over ZeRO-3's",
        "hzero `topo`: loss of ZeRO-3 (in float32)",
        "Order `lanes` does not hang",
    ]
    # Ranks that a failure ended have not hung.
    (run / "parts.tsv").write_text(rows.replace("lanes\t124\t180", "lanes\t137\t34"))
    assert "Order `lanes` does not hang" not in [what for what, *_ in predictions(Folder(run))]
    assert "| lanes | **status 137** | 34 | 180 |" in page(Folder(run))
