"""The paper's table: every scheme has its codecs in both layouts; a run of the smallest job, and its report."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.hybrid.__main__ import LAYOUTS, NAIVE, SCHEMES, config_of
from benchmarks.rows import RESULTS, LayoutRow, read_rows
from hzero.config import TIERS, parse_config
from tests.forks import run_forked
from tests.ranks import LONG


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
                assert found == {("zfp", 8)} and codecs.gradients.inter_node.rate == 8
            if scheme == "zhybrid":
                assert found == {("zfp", 16)}


@LONG
def test_a_run_is_stored_once_and_reported(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the train extra is not installed")
    command = ["-m", "benchmarks.hybrid", "--on", "machine", "--steps", "2", "--layers", "2"]
    command += ["--sequences", "8", "--seeds", "4", "--schemes", "hybrid", "--layouts", "tp2-pp2-dp2"]
    command += ["--eval-batches", "2", "--results", str(tmp_path)]
    status, out, errors = run_forked(*command, folder=tmp_path)
    assert status == 0, out + errors
    (row,) = read_rows(tmp_path / RESULTS)[0]
    assert isinstance(row, LayoutRow) and row.evaluation is not None and 6 < row.evaluation < 8
    assert len(row.step_s) == 2 and row.losses[0] is not None and 6 < row.losses[0] < 8
    assert {"tensor", "pipeline", "gradients", "optimizer"} <= {one.role for one in row.sent}
    assert "## Codecs by parallel dimension" in next((tmp_path / "report").glob("*-hybrid.md")).read_text()
    status, out, errors = run_forked(*command, folder=tmp_path)
    assert status == 0 and ": there" in out and len(read_rows(tmp_path / RESULTS)[0]) == 1
