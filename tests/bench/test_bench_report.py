"""`hzero bench report`: figures in its tables by hand, targets met and missed, files whole or not at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hzero.bench.targets import outcomes
from hzero.cli import main
from tests.bench.rows import config, everything, main_rows, run, steps, write, write_trace
from tests.ranks import ROOT

STEM = "2026-11-21-comparison"
FIGURES = ("step-time", "bytes", "loss-time", "accumulation", "scaling", "sweep", "convergence")


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")


def _report(rows: list[dict[str, Any]], *arguments: str, tail: str = "") -> str:
    write(Path("in"), rows, tail)
    assert main(["bench", "report", "in", "-o", "out", *arguments]) == 0
    return Path("out", f"{STEM}.md").read_text(encoding="utf-8")


def _cells(text: str, part: str, start: str) -> list[str]:
    """Cells of the first line that starts so, after a part's first words."""
    rest = text[text.index(part) :]
    line = next(line for line in rest.splitlines() if line.startswith(f"| {start}"))
    return [cell.strip() for cell in line.strip("|").split(" | ")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the report of all suites."""
    folder = tmp_path_factory.mktemp("whole")
    assert main(["bench", "report", str(write(folder / "in", everything())), "-o", str(folder / "out")]) == 0
    return folder / "out"


def test_all_files_are_there_and_figures_are_pictures(whole: Path) -> None:
    names = {path.name for path in whole.iterdir()}
    assert names == {f"{STEM}.md", f"{STEM}.jsonl", *(f"{STEM}-{end}.png" for end in FIGURES)}
    for end in FIGURES:
        data = (whole / f"{STEM}-{end}.png").read_bytes()
        assert data.startswith(b"\x89PNG\r\n") and data.endswith(b"IEND\xaeB`\x82") and len(data) > 8_000
        assert f"({STEM}-{end}.png)" in (whole / f"{STEM}.md").read_text()
    rows = [json.loads(line) for line in (whole / f"{STEM}.jsonl").read_text().splitlines()]
    assert sorted(map(json.dumps, rows)) == sorted(map(json.dumps, everything()))


def test_tables_have_the_figures_of_the_rows(whole: Path) -> None:
    text = (whole / f"{STEM}.md").read_text()
    # DeepSpeed 4.0 s, topo 1.25 s; 64 tokens x 8 ranks x 2; time to 3.5: two warm-up steps and 0.9 + 1 + 1 + 1.2 medians.
    assert _cells(text, "### Measurement main", "hzero topo") == [
        *("hzero topo", "1.250", "1.125", "1.500", "0.312", "819", "3.5000", "7.6")
    ]
    assert _cells(text, "MB that all ranks send", "hzero topo")[1:] == [
        *("20.40 / 20.00 / 15.00 (+2.0%)", "10.20 / 10.00 / 7.50 (+2.0%)", "4.08 / 4.00 / 3.00 (+2.0%)", "2.00")
    ]
    assert _cells(text, "Memory of a rank", "PyTorch DDP")[3:6] == ["12.00 MB", "0 B", "15.00 MB"]
    assert _cells(text, "Where the time goes. ", "hzero topo")[1:] == [
        *("1.250", "0.102", "0.136", "0.326", "0.326", "0.564", "3.83")
    ]
    assert _cells(text, "Seconds a step that hops", "hzero topo")[1:] == ["0.100", "0.200", "0.500"]
    assert _cells(text, "One traced step", "hzero topo")[1:4] == ["0.800", "0.350", "0.100"]
    assert "Every target is met." in text


def test_series_have_times_rates_and_efficiency(whole: Path) -> None:
    text = (whole / f"{STEM}.md").read_text()
    part = text[text.index("## Accumulation") :]
    assert _cells(part, "Tokens/s.", "hzero topo")[1:] == ["546", "819", "1,092", "1,311"]
    assert _cells(part, "Tokens/s.", "peer")[1:] == [f"accumulation {many}" for many in (1, 2, 4, 8)]
    assert "PyTorch DDP" not in part[: part.index("## Nodes")]  # it is in main alone
    # Weak: 4 nodes take 4 times (topo) and 8 times (DeepSpeed) as long as 1 for the same work a rank.
    assert _cells(part, "## Nodes, weak", "hzero topo")[3] == "2.500 (2.250–3.000)"
    assert _cells(part, "Efficiency: tokens/s a rank over those at 1 node", "hzero topo")[1:] == [
        "1.000",
        "0.500",
        "0.250",
    ]
    assert _cells(part, "Efficiency: ", "DeepSpeed ZeRO-3")[1:] == ["1.000", "0.500", "0.125"]
    sweep = part[part.index("## Bandwidth") :]
    assert _cells(sweep, "| Mbit/s a node |", "15 |")[1:4] == ["hzero topo", "1.875", "HSDP, node mesh, 184.4% slower"]
    assert _cells(sweep, "| Mbit/s a node |", "150 |")[1:3] == ["HSDP, node mesh", "0.533"]
    assert _cells(sweep, "| Mbit/s a node |", "150 |")[4] == "hzero topo to HSDP, node mesh: 2.109"
    assert _cells(text, "## Codecs", "weights-int4")[2:4] == ["hzero.preset topo", "1.125"]
    assert _cells(text, "## Shard degrees", "gradients-world")[3] == "2.250"


def test_convergence_is_set_beside_the_spread_between_seeds(whole: Path) -> None:
    text = (whole / f"{STEM}.md").read_text()
    assert _cells(text, "Final training loss", "topo") == [
        *("topo", "2", "1: 4.0300, 2: 4.0700", "4.0500", "0.0400", "+1.00%", "no (0.0400, 0.0200)")
    ]
    assert _cells(text, "Final training loss", "lossless")[5:] == ["+0.01%", "yes (0.0005, 0.0200)"]
    assert _cells(text, "Final evaluation", "stock")[3:6] == ["4.0600", "0.0200", "4.1100"]


def test_runs_that_do_not_compare_stand_apart() -> None:
    rows = [run("stock", 1), run("topo", 1), run("topo", 2, 0.1), run("topo", 3, 0.2), run("mild", 1, number=120)]
    rows[1]["losses"][-1] = None
    text = _report(rows)
    assert _cells(text, "100 steps", "topo")[2:6] == ["1: not finite, 2: 4.1000, 3: 4.2000", "4.1500", "0.1000", "–"]
    assert _cells(text, "Final evaluation", "topo")[5] == "0.1000"  # standard deviation of 4.05, 4.15, 4.25
    assert _cells(text, "Final evaluation", "topo")[7:] == ["+0.00%", "one seed only"]
    part = text[text.index("120 steps") :]
    assert "There is no run of stock ZeRO-3 among these" in part
    assert _cells(part, "Final training", "mild")[3:] == ["4.0000", "one seed", "–", "–"]


def test_targets_that_are_missed_are_said_plainly(capsys: pytest.CaptureFixture[str]) -> None:
    rows = main_rows()
    rows[-1]["step_s"] = [1.55, 1.55, 1.7]  # misses HSDP's 1.5 over the package, keeps the others
    rows[-1]["bytes"]["measured"]["node"] = 4.4e6
    rows[-1]["memory"]["optimizer"] = 1_600_000
    rows[-1]["trace"] = "traces/topo.json.gz"
    write_trace(Path("in"), "traces/topo.json.gz")
    text = _report(rows)
    part = text[text.index("## What it must show") : text.index("## By peer")]
    verdicts = [line.split(" | ")[3:5] for line in part.splitlines() if line.startswith(("| step time", "| optimizer"))]
    assert [one[0] for one in verdicts] == ["0.388", "0.620", "0.969", "1.033", "0.533", "0.267"]
    assert [one[1] for one in verdicts] == ["met", "**not met**", "met", "**not met**", "**not met**", "**not met**"]
    assert "farthest hzero topo, node | **not met** |" in part
    assert "Missed: step time of hzero topo against DeepSpeed ZeRO-3, hpZ (0.620, target at most 0.585)" in part
    assert "[Measurement main](#measurement-main); traces are named there for hzero topo." in part
    assert "Every target is met" not in text
    assert "(at most 1.000): not met" in capsys.readouterr().out


def test_targets_follow_the_grid_and_the_setting_is_said() -> None:
    setting = config(nodes=4, accumulation=1)
    rows = [steps(peer, config=setting) for peer in ("hsdp-node", "hsdp-package", "topo")]
    text = _report(rows)
    part = text[text.index("## What it must show") :]
    assert "4 nodes x 2 GPUs x 2 GCDs instead of 2 x 2 x 2, accumulation 1 instead of 2." in part
    assert (
        _cells(part, "| quantity", "optimizer memory of hzero topo | HSDP, node")[2]
        == "at most 0.250 (+5% for padding)"
    )
    assert _cells(part, "| quantity", "optimizer memory of hzero topo | HSDP, package")[2].startswith("at most 0.125")
    assert _cells(part, "| quantity", "step time of hzero topo | zero3-deepspeed")[3:5] == ["–", "not measured"]
    assert "Every target is met" not in part


def test_bytes_that_no_plan_has_miss_the_target(tmp_path: Path) -> None:
    from hzero.bench.measured import choose
    from hzero.bench.results import read_results

    row = steps("topo")
    row["bytes"]["planned"]["gcd"] = 0
    last = outcomes(choose(read_results([write(tmp_path / "in", [row])])[0]).measurements[0])[-1]
    assert last.met is False and "inf" in last.found


def test_what_was_not_measured_is_left_out_and_said() -> None:
    text = _report([run("stock", 1), run("topo", 1)])
    assert "## What it must show" not in text and "## By peer" not in text and "## Accumulation" not in text
    assert "In this report: convergence over many steps and seeds." in text
    assert "Not measured: the main measurement" in text
    assert {path.name for path in Path("out").iterdir()} == {
        f"{STEM}{end}" for end in (".md", ".jsonl", "-convergence.png")
    }
    text = _report([steps("topo", suite="one", name="one,train.seed=3")])
    assert "suite `one`" in text and "### Measurement one,train.seed=3" in text
    assert not Path("out", f"{STEM}-convergence.png").exists()  # of the earlier report
    assert Path("out", f"{STEM}-step-time.png").exists()


def test_notes_tell_what_does_not_count() -> None:
    later = main_rows(id="later", scale=2.0, date="2026-11-21T20:00:00+00:00")
    text = _report([*main_rows(), *later[:-1]], tail='{"kind": "ste')
    assert "- Line 16 of results.jsonl is torn" in text
    assert "the newest whole one counts, of 2026-11-21 18:02 (id 9f0c)" in text
    assert len(Path("out", f"{STEM}.jsonl").read_text().splitlines()) == 8


def test_losses_that_were_not_finite_and_text_that_breaks_tables() -> None:
    rows = main_rows()
    rows[-1].update(losses=[None] * 6, label="hzero | <topo>\n[bold]")
    text = _report(rows)
    cells = _cells(text, "### Measurement main", "hzero \\|")
    assert cells[0] == "hzero \\| &lt;topo> [bold]"
    assert cells[-2:] == ["not finite", "–"]


def test_traces_are_copied_by_size_or_by_name() -> None:
    rows = main_rows()
    for row, size in zip(rows[-3:], (10, 600_000, 10)):
        row["trace"] = f"traces/{row['peer']}.json.gz"
        write_trace(Path("in"), row["trace"], size)
    Path("in/traces/topo.json.gz").unlink()
    text = _report(rows)
    name = f"{STEM}-trace-main-zero3.json.gz"
    assert Path("out", name).read_bytes() == Path("in/traces/zero3.json.gz").read_bytes()
    traces = {row: _cells(text, "One traced step", row)[4] for row in ("hzero zero3", "hzero lossless", "hzero topo")}
    assert traces["hzero zero3"].endswith(f"({name})")
    assert traces["hzero lossless"].startswith("left out, 1.20 MB")
    assert traces["hzero topo"] == "not there"
    copied = [json.loads(line)["trace"] for line in Path("out", f"{STEM}.jsonl").read_text().splitlines()]
    assert copied[-3:] == [name, "traces/lossless.json.gz", "traces/topo.json.gz"]
    _report(rows, "--traces", "lossless")
    assert [path.name for path in Path("out").glob("*trace*")] == [f"{STEM}-trace-main-lossless.json.gz"]
    _report(rows, "--traces", "none")
    assert not list(Path("out").glob("*trace*"))


def test_a_report_is_written_again_from_its_own_rows(whole: Path) -> None:
    before = (whole / f"{STEM}.md").read_text()
    assert main(["bench", "report", str(whole / f"{STEM}.jsonl"), "-o", "again"]) == 0
    assert Path("again", f"{STEM}.md").read_text() == before


def test_wrong_input_is_one_line_and_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    write(Path("in"), main_rows())
    Path("file").write_text("")
    wrong = {
        "nowhere": "RESULTS: no folder or file",
        "in --name a/b": "--name: found 'a/b', expected letters",
        "in --date 21.11.2026": "--date: found '21.11.2026', expected a day as 2026-11-21",
        "in --traces toppo": "--traces: unknown peer 'toppo'",
        "in -o file": "--output: cannot write 'file': File exists",
        "in -o file/below": "--output: cannot write 'file/below': Not a directory",
    }
    for arguments, message in wrong.items():
        assert main(["bench", "report", *arguments.split()]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    assert {path.name for path in Path().iterdir()} == {"in", "file"}


def test_a_report_that_fails_leaves_the_earlier_one_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = _report([run("stock", 1)])
    files = {path.name: path.read_bytes() for path in Path("out").iterdir()}
    write(Path("in"), [run("stock", 1), run("topo", 1)])

    def full(*_: object, **__: object) -> str:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("hzero.bench.report.document", full)
    assert main(["bench", "report", "in", "-o", "out"]) == 2
    assert "--output: cannot write 'out': No space left on device" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in Path("out").iterdir()} == files
    assert "topo" not in text.split("## Convergence")[1]


def test_name_date_and_help() -> None:
    write(Path("in"), [run("stock", 1)])
    assert main(["bench", "report", "in", "-o", "out/deep", "--name", "first", "--date", "2027-01-02"]) == 0
    assert (
        (Path("out/deep") / "2027-01-02-first.md")
        .read_text()
        .startswith("# Comparison on an emulated cluster, 2027-01-02")
    )
    code = (
        "import sys, hzero.cli\n"
        "assert hzero.cli.main(['bench', 'report', 'in', '-o', 'out']) == 0\n"
        "assert 'torch' not in sys.modules and 'deepspeed' not in sys.modules\n"
        "hzero.cli.main(['bench', 'report', '--help'])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "hzero bench report runs/bench" in done.stdout
