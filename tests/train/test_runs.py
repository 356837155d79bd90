"""`hzero runs`: states of runs as their processes leave them, and folders of others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hzero.cli import main
from hzero.train import folder
from tests.ranks import ROOT

CONFIG = "model: {name: tiny}\nzero: {preset: topo}\ntrain: {steps: 20}\n"


def _run(path: Path, steps: int, age: float, **summary: Any) -> Path:
    (path / "logs").mkdir(parents=True)
    (path / ".hzero-run").write_text("1")
    (path / "config.yaml").write_text(CONFIG)
    rows = [{"kind": "step", "step": s, "loss": 6 - s / 10, "tokens_per_s": 100.0 * s} for s in range(1, steps + 1)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.utime(path / "metrics.jsonl", (1.7e9 - age, 1.7e9 - age))
    if summary:
        (path / "summary.json").write_text(json.dumps(summary))
    return path


def _listed(path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["runs", str(path), "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_runs_in_every_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    _run(tmp_path / "whole", 20, 300, status="finished", tokens_per_s=1500.0)
    _run(tmp_path / "stopped", 8, 200, status="interrupted", tokens_per_s=900.0)
    _run(tmp_path / "killed", 5, 400)
    error = _run(tmp_path / "error", 0, 100)
    (error / "logs" / "rank1.traceback").write_text("Traceback")
    running = _run(tmp_path / "running", 12, 0)
    with folder.lock(running):
        listed = _listed(tmp_path, capsys)
    assert [(run["name"], run["state"]) for run in listed["runs"]] == [
        ("running", "running"), ("error", "failed"), ("stopped", "interrupted"), ("whole", "finished"), ("killed", "dead")
    ]  # fmt: skip
    found = listed["runs"][0]
    assert (found["step"], found["steps"], found["preset"], found["model"]) == (12, 20, "topo", "tiny")
    assert found["loss"] == pytest.approx(6 - 0.95)  # the mean of six steps, as the summary will have it
    assert found["tokens_per_s"] == 950.0  # their median
    assert listed["runs"][1]["loss"] is None and listed["runs"][3]["tokens_per_s"] == 1500.0
    folder.lock(running).close()  # listing has left no lock
    assert _listed(running, capsys)["runs"][0]["state"] == "dead"
    assert main(["runs", str(tmp_path)]) == 0
    table = capsys.readouterr().out
    assert "5 of 20" in table and "5.0500" in table and "interrupted" in table


def test_folders_of_others_and_half_written_ones_are_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _run(tmp_path / "good", 300, 0, status="finished")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "notes.txt").touch()
    (_run(tmp_path / "yaml", 3, 0) / "config.yaml").write_text("model: {name: [")
    (_run(tmp_path / "list", 3, 0) / "config.yaml").write_text("- 1\n")
    (_run(tmp_path / "words", 3, 0) / "metrics.jsonl").write_text('{"kind": "step", "step": 1, "loss": "low"}\n')
    torn = _run(tmp_path / "torn", 3, 0)
    (torn / "metrics.jsonl").write_bytes((torn / "metrics.jsonl").read_bytes() + b'{"kind": "step", "st\xff')
    (torn / "summary.json").write_text('{"status": "fini')
    listed = _listed(tmp_path, capsys)
    assert {run["name"]: run["step"] for run in listed["runs"]} == {"good": 300, "torn": 3}
    skipped = dict(remark.removeprefix(f"{tmp_path}/").split(": ", 1) for remark in listed["skipped"])
    assert skipped.keys() == {"foreign", "yaml", "list", "words"} and skipped["foreign"] == "holds no run"
    assert main(["runs", str(tmp_path / "foreign")]) == 0
    assert f"no runs in {tmp_path / 'foreign'}" in capsys.readouterr().out.replace("\n", "")
    assert main(["runs", str(tmp_path / "none")]) == 2
    assert "FOLDER: no folder" in capsys.readouterr().err


def test_runs_of_others_neither_command_the_terminal_nor_keep_the_reader(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    _run(tmp_path / "title", 3, 0, status="\x1b]0;PWNED\a\n")
    os.mkfifo(_run(tmp_path / "pipe", 3, 0) / "summary.json")
    huge = _run(tmp_path / "huge", 3, 0, status="finished")
    os.truncate(huge / "summary.json", 3 << 30)
    for name in ("config.yaml", "metrics.jsonl", ".hzero-run"):
        left = _run(tmp_path / f"no-{name}", 3, 0)
        (left / ".replaced").mkdir()  # such a folder is listed without the others
        (left / name).unlink()
        os.mkfifo(left / name)
    assert main(["runs", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert r"\x1b]0;PWNED\x07\n" in out and not {"\x1b", "\a"} & set(out)
    assert out.count("dead") == 2 and out.count("unknown") == 1 and out.count("skipped: ") == 2


def test_runs_are_listed_without_torch(tmp_path: Path) -> None:
    _run(tmp_path / "one", 3, 0)
    code = (
        "import sys, hzero.cli\n"
        f"assert hzero.cli.main(['runs', {str(tmp_path)!r}]) == 0\n"
        "assert not {'torch', 'deepspeed', 'hydra', 'matplotlib'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
