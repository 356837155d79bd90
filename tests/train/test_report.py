"""Report and summary: from folders as runs leave them, torn ones among them."""

from __future__ import annotations

import json
import math
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hzero.cli import main
from hzero.formatting import size_text
from hzero.train import curves
from hzero.train.summary import ends, print_summary, traffic_rows


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
        "traced": {"node": {"wire_s": 0.5, "behind_compute": 0.25, "behind_tiers": 0.5}},
        "transient": {"transient gather": 99}, "zero3": {"traffic": stock, "memory": [{"name": "optimizer", "bytes": 5}]},
        "eval": {"loss_decoded": 4.1, "loss_exact": 4.05}, "versions": {"torch": "2"},
    }  # fmt: skip


def _run(
    path: Path, losses: list[float | None], summary: bool = True, torn: bool = False, figures: bool = True
) -> Path:
    path.mkdir(parents=True)
    more = {"grad_norm": 1.5, "tokens_per_s": 1000.0, "tflops_per_rank": 0.5, "step_s": 0.5} if figures else {}
    rows: list[dict[str, Any]] = [
        {"kind": "step", "step": step, "loss": loss, **more} for step, loss in enumerate(losses, 1)
    ]
    rows.append({"kind": "eval", "step": len(losses), "loss_decoded": 4.0, "loss_exact": 3.9})
    text = "\n".join(json.dumps(row) for row in rows)
    (path / "metrics.jsonl").write_text(text + ('\n{"kind": "st' if torn else "\n"))
    (path / "config.yaml").write_text("a: <b>\n")
    if summary:
        (path / "summary.json").write_text(json.dumps(_summary()))
    return path


class _Page(HTMLParser):
    """The page's figures by title, cells of tables, addresses, and tags left open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.figures: dict[str, dict[str, int]] = {}
        self.cells: list[str] = []
        self.addresses: list[str] = []
        self._open: list[str] = []
        self._figure: dict[str, int] = {}
        self.feed(text)
        assert not self._open, self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br"):
            self._open.append(tag)
        self._figure[tag] = self._figure.get(tag, 0) + 1
        if tag == "figure":
            self._figure = {}
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "srcset")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        if "figure" in self._open and self._open[-1] == "h2":
            self.figures[data] = self._figure
        if self._open and self._open[-1] in ("td", "th"):
            self.cells.append(data)

    def row(self, name: str, columns: int) -> list[str]:
        place = self.cells.index(name) + 1
        return self.cells[place : place + columns]


def test_report_of_several_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    falling = [6 - step / 10 for step in range(1, 21)]
    runs = [
        _run(tmp_path / "whole", falling),
        _run(tmp_path / "torn & <cut>", [*falling[:7], None], summary=False, torn=True),
    ]
    assert main(["report", *map(str, runs), "-o", str(tmp_path / "out")]) == 0
    assert "report.html" in capsys.readouterr().out
    text = (tmp_path / "out" / "report.html").read_text()
    page = _Page(text)
    titles = ("Training loss", "Gradient norm", "tokens/s", "TFLOPS", "Bytes received", "Memory", "Hidden share")
    assert len(page.figures) == len(titles) and all(title in " ".join(page.figures) for title in titles)
    assert all(figure["svg"] >= 2 for figure in page.figures.values())  # the picture, and keys of its legend
    assert all(address.startswith("#") for address in page.addresses)  # so the page works offline
    assert not set(re.findall(r"#[0-9a-f]{6}", text[text.index("<figure") :])), "a colour that no ground changes"
    ids = re.findall(r' id="([^"]+)"', text)
    assert len(ids) == len(set(ids)) and set(re.findall(r"url\(#(\w+)\)", text)) <= set(ids)
    assert page.row("first loss", 2) == ["5.4500", "5.7500"] and page.row("last loss", 2) == ["4.4500", "not finite"]
    assert page.row("tokens/s", 2) == ["1,000", "1,000"]
    assert "The loss was not finite in 1 of 8 steps, gaps in its curve: 8." in text
    assert "1 lines of its metrics could not be read" in text
    assert "has no summary (unknown)" in text
    assert "a: &lt;b&gt;" in text and "<cut>" not in text
    for name in ("loss", "gradient_norm", "throughput", "tflops", "bytes", "memory", "hidden"):
        assert (tmp_path / "out" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_report_of_one_run_goes_into_its_folder(tmp_path: Path) -> None:
    run = _run(tmp_path / "one", [3.0, 2.5, 2.0], summary=False, figures=False)
    assert main(["report", str(run)]) == 0
    assert sorted(path.name for path in (run / "report").iterdir()) == ["loss.png", "report.html"]


def test_the_page_of_a_long_run_is_small_and_says_what_is_drawn(tmp_path: Path) -> None:
    losses: list[float | None] = [3 + math.sin(step * step) for step in range(100_000)]
    losses[70_000] = None
    run = _run(tmp_path / "long", losses, summary=False, figures=False)
    assert main(["report", str(run)]) == 0
    page = run / "report" / "report.html"
    assert page.stat().st_size < 100_000
    text = page.read_text()
    assert re.search(r"Of 100,000 steps \d{3} are drawn: both ends and the extremes of 400 stretches", text)
    assert "gaps in its curve: 70,001." in text


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 25, 1000, 30_000])
def test_the_smooth_curve_begins_and_ends_in_the_summary(steps: int) -> None:
    losses = [5 / (1 + step / 40) + math.sin(7 * step) / 3 for step in range(steps)]
    first, last, window = ends(losses)
    curve = curves.smooth(losses, window)
    assert len(curve) == steps - window + 1
    assert [curve[0], curve[-1]] == pytest.approx([first, last], rel=1e-12)
    if steps == 30_000:  # away from the ends the waves are gone
        assert curve[15_000] == pytest.approx(5 / (1 + 15_000 / 40), abs=0.005)


def test_gaps_stay_and_extremes_are_drawn() -> None:
    values = [1.0] * 50_000
    values[30_001], values[40_002], values[45_003] = 9.0, -9.0, math.nan
    assert {0, 49_999, 30_001, 40_002, 45_003} <= set(curves.drawn(values))
    assert len(curves.drawn(values)) <= 3 * curves.STRETCHES + 2
    assert curves.drawn(values[:1000]) == list(range(1000))
    smoothed = curves.smooth(values[44_000:46_000], 10)
    assert [place for place, mean in enumerate(smoothed) if math.isnan(mean)] == list(range(994, 1004))
    assert curves.spans([3, 7, 8, 9, 1200]) == "3, 7 to 9, 1,200"
    assert curves.spans(range(0, 40, 2)) == "0, 2, 4, 6, 8, 10, 12, 14 and 12 more"


def test_a_sweep_becomes_one_table_and_one_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = tmp_path / "multirun" / "presets"
    for number, (preset, ranks) in enumerate([("topo", 8), ("topo", 16), ("zero3", 8)]):
        run = _run(sweep / f"run-{number}-{preset}", [5.0 - number, 4.0 - number])
        zero = {"preset": preset, "block_size": None}
        (run / "config.yaml").write_text(
            json.dumps({"zero": zero, "run": {"name": number}, "launcher": {"threads": number}})
        )
        summary = {**json.loads((run / "summary.json").read_text()), "world_size": ranks}
        (run / "summary.json").write_text(json.dumps(summary))
    (sweep / "logs").mkdir()
    empty = _run(sweep / "run-3-mild", [], summary=False)
    (empty / "config.yaml").write_text(json.dumps({"zero": {"preset": "mild", "block_size": None}}))
    (empty / "status.json").write_text('{"state": "failed"}')
    assert main(["report", str(sweep)]) == 0
    printed = capsys.readouterr()
    assert "sweep.csv, sweep.png, loss.png" in printed.out
    assert "run-3-mild: no step has been logged, so it is in sweep.csv alone" in printed.err
    rows = [line.split(",") for line in (sweep / "report" / "sweep.csv").read_text().splitlines()]
    assert rows[0][:5] == ["run", "zero.preset", "state", "ranks", "steps"] and rows[0][7] == "tokens/s"
    figures = [["run-0-topo", "topo", "8"], ["run-1-topo", "topo", "16"], ["run-2-zero3", "zero3", "8"]]
    assert [row[:2] + row[3:5] + row[7:8] for row in rows[1:4]] == [[*row, "2", "1000.0"] for row in figures]
    assert rows[4:] == [["run-3-mild", "mild", "failed", "", "0", *[""] * 5]]
    assert (sweep / "report" / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert "run-2-zero3" in (sweep / "report" / "report.html").read_text()
    assert main(["report", str(sweep / "run-0-topo"), str(sweep / "run-2-zero3"), "-o", str(tmp_path / "two")]) == 0
    assert not (tmp_path / "two" / "sweep.csv").exists()
    for run in sweep.glob("run-[012]-*"):
        shutil.rmtree(run)
    assert main(["report", str(sweep)]) == 2
    assert "no step has been logged" in capsys.readouterr().err


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


def test_a_tier_with_two_codecs_has_a_row_of_each() -> None:
    row = {"role": "weights", "tier": "gpu", "hops": 16, "seconds": 0.0}
    sent = [
        {"codec": "exp", "wire_bytes": 7620, "raw_bytes": 10000},
        {"codec": "none", "wire_bytes": 100, "raw_bytes": 0},
    ]
    stock = [{"role": "weights", "tier": tier, "wire_bytes": 250} for tier in ("gpu", "node")]
    summary = {"steps_here": 2, "world_size": 4, "traffic": [row | one for one in sent], "zero3": {"traffic": stock}}
    assert traffic_rows(summary) == [
        ("weights", "gpu", "exp", "2.0", "", size_text(3810), "1.31", size_text(1000)),
        ("weights", "gpu", "none", "2.0", "", size_text(50), "0.00", ""),
        ("weights", "node", "", "", "", "", "", size_text(1000)),
    ]
