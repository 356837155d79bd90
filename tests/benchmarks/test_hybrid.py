"""The paper's table: every scheme has its codecs in both layouts; a run of the smallest job, and its report."""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.hybrid.__main__ import LAYOUTS, NAIVE, SCHEMES, config_of
from benchmarks.report.layouts import layouts
from benchmarks.rows import RESULTS, LayoutRow, parse_row, read_rows
from hzero.config import TIERS
from hzero.parsing import parse_config
from tests.benchmarks.rows import LAYOUT
from tests.ranks import LONG, ROOT


@pytest.mark.parametrize("layout", LAYOUTS)
def test_schemes_have_their_codecs(layout: str) -> None:
    for scheme in SCHEMES:
        config = config_of(layout, scheme, 1, Namespace(layers=4, steps=20, sequences=16, eval_batches=8))
        train, readers = config["train"], 8 // config["tensor"] // config["pipeline"]
        assert readers * train["micro_batch"] * train["grad_accumulation"] == 16, "both layouts train on as many"
        codecs = parse_config(config["block"]).codecs
        for role in NAIVE[layout]:
            found = {(codecs[role][tier].codec, codecs[role][tier].rate) for tier in TIERS}  # type: ignore[index]
            if scheme in ("baseline", "lossless"):
                assert found == {("none", None)}
            if scheme == "naive":
                assert found == {("zfp", 8)} and codecs.gradients.node.rate == 8
            if scheme == "zhybrid":
                assert found == {("zfp", 16)}


@LONG
def test_a_run_is_stored_once_and_reported(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the train extra is not installed")
    command = [sys.executable, "-m", "benchmarks.hybrid", "--on", "machine", "--steps", "2", "--layers", "2"]
    command += ["--sequences", "8", "--seeds", "4", "--schemes", "hybrid", "--layouts", "tp2-pp2-dp2"]
    command += ["--eval-batches", "2", "--results", str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = read_rows(tmp_path / RESULTS)[0]
    assert isinstance(row, LayoutRow) and row.evaluation is not None and 6 < row.evaluation < 8
    assert len(row.step_s) == 2 and row.losses[0] is not None and 6 < row.losses[0] < 8
    assert {"tensor", "pipeline", "gradients", "optimizer"} <= {one.role for one in row.sent}
    assert "## Codecs by parallel dimension" in next((tmp_path / "report").glob("*-hybrid.md")).read_text()
    again = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert again.returncode == 0 and ": there" in again.stdout and len(read_rows(tmp_path / RESULTS)[0]) == 1


def _row(scheme: str, seed: int, rates: str | None, step_s: float, loss: float | None, **other: Any) -> LayoutRow:
    name = f"{scheme}-{seed}-{rates}"
    named = {"measurement": name, "id": name, "scheme": scheme, "seed": seed, "rates": rates}
    found = {"step_s": [9.0, 9.0, step_s], "losses": [5.0, 5.0, loss], "evaluation": loss}
    row = parse_row({**LAYOUT, **named, **found, **other}, "here")
    assert isinstance(row, LayoutRow)
    return row


def test_the_tables_compare_with_the_baseline_of_the_same_seed() -> None:
    rows = [_row("hybrid", 0, "200,75,50", 0.5, 3.03), _row("baseline", 0, "200,75,50", 0.75, 3.0)]
    sent = [{"role": "pipeline", "tier": "node", "codec": "none", "wire_bytes": 1000, "raw_bytes": 1000}]
    for seed, loss in ((0, 2.0), (1, 4.0)):
        rows.append(_row("baseline", seed, None, 1.0, loss, layout="tp2-pp2-dp2", sent=sent))
        rows.append(_row("zhybrid", seed, None, 1.0, loss + 0.5, layout="tp2-pp2-dp2", sent=sent))
    rows += [_row("naive", 1, None, 1.0, 5.0, layout="tp2-pp2-dp2"), _row("naive", 0, None, 1.0, None)]
    text = layouts(rows)
    for line in (
        "| baseline | 0.750 | 0.750 to 0.750 | 2,731 | +0.0% | 1 |",
        "| hybrid | 0.500 | 0.500 to 0.500 | 4,096 | +50.0% | 1 |",
        "| hybrid | 3.0300 | +1.00% | 3.0300 | +1.00% |",
        "| hybrid | 2.50 MB (zfp) | 2.50 MB |",
        "| baseline | 2.0000 | 4.0000 | +0.00%, +0.00%; mean +0.00% | 2.0000 | 4.0000 | +0.00%, +0.00%; mean +0.00% |",
        "| zhybrid | 2.5000 | 4.5000 | +25.00%, +12.50%; mean +18.75% | 2.5000 | 4.5000 | +25.00%, +12.50%; mean +18.75% |",
        "| naive | – | 5.0000 | +25.00% | – | 5.0000 | +25.00% |",
        "| baseline | 1.00 kB (none) | – | 1.00 kB |",
        "| naive | nan | – | nan | – |",
    ):
        assert line in text, line
    assert text.count("tokens/s against baseline") == 1, "times without emulated links say nothing"
    apart = layouts([*rows, _row("hybrid", 0, None, 1.0, 2.0, layout="tp2-pp2-dp2", parameters=7)])
    assert apart.count("### ") == text.count("### ") + 1, "another size of model is another table"
