"""Report and summary: from folders as runs leave them, torn ones among them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hzero.cli import main
from hzero.formatting import size_text
from hzero.plan.command import compute
from hzero.train.summary import print_summary


def _summary() -> dict[str, Any]:
    tiers = ("gcd", "gpu", "node")
    traffic = [
        {"role": role, "tier": tier, "codec": "int8", "hops": 40, "elements": 9, "payload_bytes": 10**6,
         "wire_bytes": 10**6, "raw_bytes": 4 * 10**6, "seconds": 0.5, "hidden_seconds": 0.2}
        for role in ("weights", "gradients")
        for tier in tiers
    ]  # fmt: skip
    stock = [{"role": r["role"], "tier": r["tier"], "codec": "none", "wire_bytes": 10**5} for r in traffic]
    return {
        "status": "finished", "steps": 20, "steps_here": 20, "loss_first": 6.0, "loss_last": 4.0, "loss_window": 10,
        "tokens_per_s": 1000.0,
        "tflops_per_rank": 0.001, "step_s_median": 0.3, "model": "tiny", "parameters": 1234567, "world_size": 8,
        "preset": "topo", "traffic": traffic, "compressed_share": 1.0, "ratio": 4.0, "memory": {"optimizer": 12345},
        "transient": {"transient gather": 99}, "zero3": {"traffic": stock, "memory": [{"name": "optimizer", "bytes": 5}]},
        "eval": {"loss_decoded": 4.1, "loss_exact": 4.05}, "versions": {"torch": "2"},
    }  # fmt: skip


def _run(path: Path, steps: int, summary: bool = True, torn: bool = False) -> Path:
    path.mkdir(parents=True)
    rows = [{"kind": "step", "step": s, "loss": 6 - s / 10} for s in range(1, steps + 1)]
    rows.append({"kind": "eval", "step": steps, "loss_decoded": 4.0, "loss_exact": 3.9})
    text = "\n".join(json.dumps(row) for row in rows)
    (path / "metrics.jsonl").write_text(text + ('\n{"kind": "st' if torn else "\n"))
    (path / "config.yaml").write_text("a: <b>\n")
    if summary:
        (path / "summary.json").write_text(json.dumps(_summary()))
    return path


def test_report_of_several_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [_run(tmp_path / "whole", 20), _run(tmp_path / "torn", 7, summary=False, torn=True)]
    assert main(["report", *map(str, runs), "-o", str(tmp_path / "out")]) == 0
    assert "report.html" in capsys.readouterr().out
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 2
    assert "1 lines of its metrics could not be read" in page
    assert "has no summary" in page
    assert "a: &lt;b&gt;" in page
    for name in ("loss.png", "bytes.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")


def test_report_of_one_run_goes_into_its_folder(tmp_path: Path) -> None:
    run = _run(tmp_path / "one", 3, summary=False)
    assert main(["report", str(run)]) == 0
    assert (run / "report" / "loss.png").exists()
    assert not (run / "report" / "bytes.png").exists()


def test_report_says_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "metrics.jsonl").write_text("")
    for name, message in (
        ("none", "no folder"),
        ("empty", "holds no metrics.jsonl"),
        ("begun", "no step has been logged"),
    ):
        assert main(["report", str(tmp_path / name)]) == 2
        assert message in capsys.readouterr().err


def test_summary_shows_what_was_measured_and_what_was_computed() -> None:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_summary(_summary(), console)
    text = console.export_text()
    for expected in (
        "6.0000 → 4.0000",
        "4.1000",
        "4.0500",
        "100.0%",
        "4.00 x",
        "ZeRO-3 (computed)",
        "(planned)",
        "50.00 kB",
    ):
        assert expected in text, expected
    partial = {**_summary(), "eval": {}, "loss_first": None, "traffic": [], "memory": {}, "ratio": None}
    print_summary(partial, console)


def test_sizes_are_readable() -> None:
    assert [size_text(n) for n in (0, 999, 1500, 2.5e9)] == ["0 B", "999 B", "1.50 kB", "2.50 GB"]


def test_plan_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "model=gpt_neox_20b", "topology=frontier", "nodes=48"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for expected in ("384 devices", "resident weights", "nominal rates, not measured", "ZeRO++"):
        assert expected in text, expected
    assert main(["plan", "topology=frontier", "nodes=2", "--json", "accumulation=4", "preset=mild"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["preset"], result["accumulation"], result["world_size"]) == ("mild", 4, 16)
    assert result["link_seconds"].keys() == {"gcd", "gpu", "node"}
    twice = compute(["model=gpt_neox_20b", "topology=frontier", "nodes=48", "accumulation=8"], 2)
    assert twice["node_bytes"]["hzero topo"] < 0.8 * twice["node_bytes"]["ZeRO-3"] / 24 * 8
    assert main(["plan", "zero=stock"]) == 2
    assert main(["plan", "preset=tpoo"]) == 2
    assert "did you mean 'topo'" in capsys.readouterr().err
