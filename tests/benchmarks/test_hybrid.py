"""The paper's table: every scheme is a job of the trainer, with the codecs that it stands for; and the report from given rows."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from benchmarks import hybrid, hybrid_report
from benchmarks.compare.store import Store
from benchmarks.hybrid import LAYOUTS, NAIVE, SCHEMES, overrides
from benchmarks.rows import LayoutRow, Machine, Sent
from hzero.config import TIERS
from hzero.parsing import parse_config
from hzero.settings.conf import compose, plain
from hzero.settings.settings import Settings
from hzero.validation import ConfigError


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_schemes_are_jobs(layout: str, scheme: str) -> None:
    settings = Settings(plain(compose(overrides(layout, scheme, 1, 20, "gpt_neox_1m", ["train.grad_clip=3"]))))
    assert settings["train"]["grad_clip"] == 3
    assert (settings.layout.tensor, settings.layout.pipeline) == (2, 2 if "pp2" in layout else 1)
    assert settings["train"]["seed"] == 1
    sequences = settings.layout.data * settings["train"]["micro_batch"] * settings["train"]["grad_accumulation"]
    assert sequences == 16, "both layouts train on as many"
    codecs = parse_config(settings.block).codecs
    for role in NAIVE[layout]:
        found = {(codecs[role][tier].codec, codecs[role][tier].rate) for tier in TIERS}  # type: ignore[index]
        if scheme in ("baseline", "lossless"):
            assert found == {("none", None)}
        if scheme == "naive":
            assert found == {("zfp", 8)}
            assert codecs.gradients.node.rate == 8
        if scheme == "zhybrid":
            assert found == {("zfp", 16)}


def _row(scheme: str, seed: int, rates: str | None, step_s: float, loss: float | None, **other: Any) -> LayoutRow:
    name = f"{scheme}-{seed}-{rates}"
    model = {"name": "gpt_neox_1m"}
    return LayoutRow(
        suite="hybrid",
        measurement=name,
        id=name,
        date=datetime(2026, 11, 23, tzinfo=timezone.utc),
        machine=Machine(cores=2, processor="x", memory_bytes=10**9, system="Linux", python="3.11"),
        versions={"hzero": "0.1.0"},
        world_size=8,
        config={"model": model, "train": {"micro_batch": 4, "grad_accumulation": 1}},
        scheme=scheme,
        seed=seed,
        rates=rates,
        tokens_per_step=2048,
        step_s=[9.0, 9.0, step_s],
        losses=[5.0, 5.0, loss],
        evaluation=loss,
        **{
            "layout": "tp2-dp4",
            "parameters": 1000,
            "sent": [Sent(role="tensor", tier="gcd", codec="zfp", wire_bytes=2.5e6, raw_bytes=5e6)],
            **other,
        },
    )


def test_the_report_compares_with_the_baseline_of_the_same_seed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add([_row("hybrid", 0, "200,75,50", 0.5, 3.03), _row("baseline", 0, "200,75,50", 0.75, 3.0)])
    with open(store.path, "a") as file:
        file.write('{"format": 2, "kind": "lay')  # an interrupted command
    store = Store(tmp_path)
    sent = [Sent(role="pipeline", tier="node", codec="none", wire_bytes=1000, raw_bytes=1000)]
    for seed, loss in ((0, 2.0), (1, 4.0)):
        store.add([_row("baseline", seed, None, 1.0, loss, layout="tp2-pp2-dp2", sent=sent)])
        store.add([_row("zhybrid", seed, None, 1.0, loss + 0.5, layout="tp2-pp2-dp2", sent=sent)])
    store.add([_row("naive", 1, None, 1.0, 5.0, layout="tp2-pp2-dp2"), _row("naive", 0, None, 1.0, None)])
    text = hybrid_report.report(hybrid_report.rows_of(tmp_path))
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
    store.add([_row("hybrid", 0, None, 1.0, 2.0, layout="tp2-pp2-dp2", parameters=7)])
    apart = hybrid_report.report(hybrid_report.rows_of(tmp_path))
    assert apart.count("\n## ") == text.count("\n## ") + 1, "another size of model is another table"
    nav = "  - Comparisons:\n      - How they are made: benchmarks.md\n"
    page = hybrid_report.with_page(nav, "2026-11-23")
    assert page.endswith("      - 2026-11-23, codecs by parallel dimension: benchmarks/reports/2026-11-23-hybrid.md\n")
    assert hybrid_report.with_page(page, "2026-11-23") == page
    with pytest.raises(ConfigError, match="found no row of benchmarks"):
        hybrid_report.rows_of(Store(tmp_path / "none").folder)


def test_a_run_whose_row_is_there_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    class Failed:
        returncode = 3

    def run(command: list[str], **_: Any) -> Failed:
        started.append(command)
        return Failed()

    monkeypatch.setattr(hybrid.subprocess, "run", run)
    arguments = ["--on", "machine", "--steps", "3", "--seeds", "4", "--schemes", "hybrid", "--results", str(tmp_path)]
    assert hybrid.main(arguments) == 1
    assert len(started) == len(LAYOUTS), "one that fails does not keep the others from running"
    made = [_row("hybrid", 4, None, 1.0, 2.0).model_copy(update={"id": each}) for each in hybrid_ids()]
    Store(tmp_path).add(made)
    assert hybrid.main(arguments) == 0
    assert len(started) == len(LAYOUTS)


def hybrid_ids() -> list[str]:
    """Digests of the runs above."""
    return [hybrid.identity(overrides(layout, "hybrid", 4, 3, "gpt_neox_1m"), None) for layout in LAYOUTS]
