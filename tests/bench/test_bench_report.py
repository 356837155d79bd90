"""`hzero bench report`: figures in its tables by hand, targets met and missed, files whole or not at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hzero.cli import main
from tests.bench.rows import config, everything, main_rows, run, steps, training, write, write_trace
from tests.ranks import ROOT

STEM = "2026-11-21-comparison"
FIGURES = ("step-time", "bytes", "loss-time", "accumulation", "nodes", "scaling", "sweep", "convergence")


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
        assert data.startswith(b"\x89PNG\r\n") and data.endswith(b"IEND\xaeB`\x82")
        assert f"({STEM}-{end}.png)" in (whole / f"{STEM}.md").read_text()
    rows = [json.loads(line) for line in (whole / f"{STEM}.jsonl").read_text().splitlines()]
    assert sorted(map(json.dumps, rows)) == sorted(map(json.dumps, everything()))


def test_tables_have_the_figures_of_the_rows(whole: Path) -> None:
    text = (whole / f"{STEM}.md").read_text()
    # DeepSpeed 4.0 s, topo 1.25 s; 64 tokens x 8 ranks x 2; time to 3.5: two warm-up steps and 0.9 + 1 + 1 + 1.2 medians.
    assert _cells(text, "### Measurement main", "hzero topo") == [
        *("hzero topo", "1.250", "1.125", "1.500", "0.312", "819", "3.5000", "7.6")
    ]
    assert _cells(text, "MB that all ranks send", "hzero lossless")[1:] == [
        *("40.80 / 40.00 / 30.00 (+2.0%)", "20.40 / 20.00 / 15.00 (+2.0%)", "8.16 / 8.00 / 6.00 (+2.0%)", "1.80")
    ]
    assert _cells(text, "MB that all ranks send", "PyTorch DDP")[4] == "–"
    assert "it pays about 10% of the gathers more" in text
    assert _cells(text, "Memory of a rank", "PyTorch DDP")[3:6] == ["12.00 MB", "15.00 MB", "0 B"]
    assert _cells(text, "Where the time goes. ", "hzero topo")[1:] == [
        *("1.250", "0.110", "0.147", "0.352", "0.352", "0.609", "3.55", "0.500")
    ]
    assert "above 100 % for hzero topo (142%): there the cores set the pace. For the others (7) the wires do." in text
    assert _cells(text, "One traced step", "hzero topo")[1:4] == ["1.200", "0.350", "0.800"]


def test_targets_stand_beside_each_reduce_scatter(whole: Path) -> None:
    text = (whole / f"{STEM}.md").read_text()
    part = text[text.index("## What it must show") : text.index("## By peer")]
    assert _cells(part, "| quantity", "quantity")[3:6] == [
        "gloo (main)",
        "all_to_all (reduce_scatter all_to_all)",
        "ring (reduce_scatter ring)",
    ]
    assert _cells(part, "| quantity", "step time of hzero topo | DeepSpeed ZeRO-3 |")[3:6] == ["0.312, met"] * 3
    assert "| plan, with two gathers a micro-step | not judged | -10.0% (hzero " in part
    assert "gloo's reduce-scatter sends its bytes twice, which 6 of the 8 peers pay and hzero topo does not" in part
    for title in ("main", "reduce_scatter all_to_all", "reduce_scatter ring"):
        assert f"Every target is met in {title}." in part


def test_series_have_times_rates_and_efficiency(whole: Path) -> None:
    text = (whole / f"{STEM}.md").read_text()
    part = text[text.index("## Accumulation") :]
    assert _cells(part, "Tokens/s.", "hzero topo")[1:] == ["546", "819", "1,092", "1,311"]
    assert _cells(part, "Tokens/s.", "peer")[1:] == [f"accumulation {many}" for many in (1, "2 (main)", 4, 8)]
    assert "PyTorch DDP" not in part[: part.index("## Nodes")]  # it is in main alone
    assert (
        "bf16, micro-batch 1; Mbit/s each way: gcd 200 a rank; gpu 75 a rank; node 15, 50, 150 a node's trunk." in part
    )
    # Half a second of both cores is longer than what topo's wires take, and shorter than ZeRO-3's.
    assert _cells(part, "Processor, s", "hzero topo")[1] == "0.500 *"
    assert _cells(part, "Processor, s", "DeepSpeed ZeRO-3")[1] == "0.500"
    # Weak: 4 nodes take 4 times (topo) and 8 times (DeepSpeed) as long as 1 for the same work a rank.
    assert _cells(part, "## Nodes, weak", "hzero topo")[3] == "2.500 (2.250–3.000)"
    assert _cells(part, "Efficiency: tokens/s a rank over those at 1 node", "hzero topo")[1:] == [
        "1.000",
        "0.500",
        "0.250",
    ]
    assert _cells(part, "Efficiency: ", "DeepSpeed ZeRO-3")[1:] == ["1.000", "0.500", "0.125"]
    sweep = part[part.index("## Bandwidth") :]
    assert _cells(sweep, "| at | fastest |", "15 Mbit/s")[1:4] == [
        "hzero topo",
        "1.875",
        "HSDP, node mesh, 184.4% slower",
    ]
    assert _cells(sweep, "| at | fastest |", "150 Mbit/s")[1:3] == ["HSDP, node mesh", "0.533"]
    assert _cells(sweep, "| at | fastest |", "150 Mbit/s")[4] == "hzero topo to HSDP, node mesh: 2.109"
    assert _cells(text, "## Codecs of topo", "codecs | topo, weights-int4")[2:5] == [
        "block.preset topo",
        "1.125",
        "0.900",
    ]
    assert _cells(text, "## Shard degrees of topo", "shards | topo, gradients")[3:5] == ["2.250", "1.800"]


def test_points_that_differ_in_version_and_ties_are_told() -> None:
    rows = []
    for rate, commit, scale in ((15, "aaa", 1.0), (150, "bbb", 1.5)):
        setting = config(node_rate=rate, peers=["hsdp-node", "topo"])
        more = {"config": setting, "versions": {"hzero": "0.1.0", "commit": commit}}
        rows.append(steps("hsdp-node", "sweep", f"node-{rate}", 1.0, **more))
        rows.append(steps("topo", "sweep", f"node-{rate}", scale * 0.8, **more))  # 1.0 and 1.5 beside 1.6
    text = _report(rows)
    assert _cells(text, "| at | fastest |", "15 Mbit/s")[1] == "hzero topo"
    assert _cells(text, "| at | fastest |", "150 Mbit/s")[1] == "tie of hzero topo and HSDP, node mesh"
    assert "different commits (15 Mbit/s a node: aaa, 150 Mbit/s a node: bbb)" in text
    assert "different versions" not in text and "different machines" not in text


def test_convergence_is_set_beside_the_spread_between_seeds(whole: Path) -> None:
    text = (whole / f"{STEM}.md").read_text()
    assert _cells(text, "Final training loss", "topo") == [
        *("topo", "2", "1: 4.0300, 2: 4.0700", "4.0500", "0.0400"),
        *("1: +0.0300, 2: +0.0500", "+0.0400 (+1.00%)", "+0.0400 beside 0.0200"),
    ]
    assert _cells(text, "Final training loss", "lossless")[6:] == ["+0.0005 (+0.01%)", "+0.0005 beside 0.0200"]
    assert _cells(text, "Final evaluation", "stock")[3:6] == ["4.0600", "0.0200", "4.1100"]
    assert (
        "Model gpt_neox_1m of 1,000,000 parameters, 100 optimizer steps of 8 ranks; a micro-batch of 1 sequences a rank of 64 "
        "tokens, accumulation 2; learning rate 0.003, type fp32." in text
    )


def test_runs_with_a_loss_that_was_not_finite_have_no_clean_difference() -> None:
    rows = [run("stock", 1), run("topo", 1), run("topo", 2, 0.1), run("topo", 3, 0.2), run("mild", 1)]
    rows[1]["losses"][3] = None
    text = _report(rows)
    assert "Losses that were not finite: topo seed 1 (1 of 100 steps)." in text
    assert _cells(text, "Final training", "topo")[2:6] == [
        "1: 4.0000, 2: 4.1000, 3: 4.2000",
        "4.1000",
        "0.2000",
        "0.1000",
    ]
    assert _cells(text, "Final training", "topo")[6:] == ["1: no clean difference", "no clean difference", "–"]
    assert _cells(text, "Final training", "mild")[4:] == [
        *("one seed", "–", "1: +0.0000", "+0.0000 (+0.00%)", "one seed of stock only")
    ]
    text = _report(rows[1:])
    assert "There is no run of stock ZeRO-3 among these" in text


def test_time_to_a_loss_is_steps_times_step_time() -> None:
    runs = [run(preset, 1) for preset in ("stock", "lossless", "topo")]
    for row, level in zip(runs, (4.0, 3.0, 4.5)):
        row["losses"] = [level] * 100
    text = _report(runs + training())
    part = "### Time to a given loss on emulated links"
    assert _cells(text, part, "peer") == ["peer", "s a step (median)", "loss 4.00"]
    assert _cells(text, part, "DeepSpeed ZeRO-3")[1:] == ["4.000", "1 steps, 4 s (1.000)"]
    assert _cells(text, part, "hzero lossless")[1:] == ["2.000", "1 steps, 2 s (0.500)"]
    assert _cells(text, part, "hzero topo")[1:] == ["1.250", "not reached"]
    assert (
        _cells(text, part, "HSDP, node mesh")[2] == "1 steps, 2 s (0.400)" and "ZeRO-3 does, so its steps stand" in text
    )
    assert "Weights and gradients are fp32 here, of which codecs save more than of bf16." in text
    assert "The runs clip gradients" in text
    text = _report([*runs, steps("topo", "training", "main-job")])
    assert "No time to a given loss on emulated links: training main-job differs" in text and part not in text


def test_losses_of_peers_without_codec_are_set_beside_each_other() -> None:
    rows = main_rows()
    for row, last in zip(rows, (3.5, 3.5, 3.5, 3.51, 3.5, 3.5, 3.5, 3.6)):
        row["losses"][-1] = last
    rows[-2]["losses"][-1] = None
    text = _report(rows)
    assert (
        "of the 6 peers without codecs, which should differ by rounding alone: 3.50000 to 3.51000, a spread of 0.01000"
        in text
    )
    assert "Not finite: hzero lossless. From their mean: hzero topo +0.09833." in text


def test_what_a_plan_says_beforehand_is_said_to_be_off_where_it_is() -> None:
    rows = main_rows()
    off = "with two gathers a micro-step, is up to"
    text = _report(rows)
    assert f"{off} -10.0% off (hzero" in text and "saves 10% of the gathers" in text
    assert "Every target is met in main." in text
    for row in rows:
        row["bytes"]["planned_twice"] = row["bytes"]["planned"]
    assert off not in _report(rows)


def test_targets_that_are_missed_are_said_plainly(capsys: pytest.CaptureFixture[str]) -> None:
    rows = main_rows()
    rows[-1]["step_s"] = [1.55, 1.55, 1.7]  # misses HSDP's 1.5 over the package, keeps the others
    rows[-1]["bytes"]["measured"]["node"] = 4.4e6
    rows[-1]["memory"]["optimizer"] = 1_600_000
    rows[-1]["trace"] = "traces/topo.json.gz"
    write_trace(Path("in"), "traces/topo.json.gz")
    text = _report(rows)
    part = text[text.index("## What it must show") : text.index("## By peer")]
    verdicts = [line.split(" | ")[3] for line in part.splitlines() if line.startswith(("| step time", "| optimizer"))]
    missed = "**not met**"
    assert verdicts == [
        *("0.388, met", f"0.620, {missed}", "0.969, met", f"1.033, {missed}", f"0.533, {missed}", f"0.267, {missed}")
    ]
    assert "| +10.0% (hzero topo, node), **not met** |" in part
    assert "Missed in main: step time of hzero topo against DeepSpeed ZeRO-3, hpZ (0.620, at most 0.585)" in part
    assert "[Measurement main](#measurement-main)." in part
    assert "Every target is met" not in text
    assert "(at most 1.000): not met" in capsys.readouterr().out


def test_targets_follow_the_grid_and_the_setting_is_said() -> None:
    setting = config(nodes=4, accumulation=1)
    rows = [steps(peer, config=setting) for peer in ("hsdp-node", "hsdp-package", "topo")]
    text = _report(rows)
    part = text[text.index("## What it must show") :]
    assert "4 nodes x 2 GPUs x 2 GCDs instead of 2 x 2 x 2, accumulation 1 instead of 2." in part
    assert _cells(part, "| quantity", "optimizer memory of hzero topo | HSDP, node")[2] == "at most 0.250 (+1%)"
    assert _cells(part, "| quantity", "optimizer memory of hzero topo | HSDP, package")[2].startswith("at most 0.125")
    assert _cells(part, "| quantity", "step time of hzero topo | zero3-deepspeed")[3] == "not measured"
    assert "Every target is met" not in part


def test_bytes_that_no_plan_has_miss_the_target() -> None:
    row = steps("topo")
    row["bytes"]["planned"]["gcd"] = 0
    assert "| +inf% (hzero topo, gcd), **not met** |" in _report([row])


def test_what_was_not_measured_is_left_out_and_said() -> None:
    text = _report([run("stock", 1), run("topo", 1)])
    assert "## What it must show" not in text and "## By peer" not in text and "## Accumulation" not in text
    assert "In this report: convergence over many steps and seeds." in text
    assert "limited rates" not in text and "Headers of packets" not in text
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


def test_rates_that_are_not_limited_are_not_called_so() -> None:
    setting = config(peers=["topo"])
    setting["cluster"]["rates_mbit"] = dict.fromkeys(("gcd", "gpu", "node"))
    text = _report([steps("topo", config=setting)])
    assert (
        "gcd not limited, gpu not limited, node not limited" in text
        and "limited rates" not in text
        and "slow wires" not in text
    )
    assert "[docs/benchmarks.md](../../docs/benchmarks.md)" in text


def _traced(*sizes: int) -> list[dict[str, Any]]:
    """Rows of main; its last peers, zero3 to topo, have traces."""
    rows = main_rows()
    for row, size in zip(rows[-len(sizes) :], sizes):
        row["trace"] = f"traces/{row['peer']}.json.gz"
        write_trace(Path("in"), row["trace"], size)
    return rows


def test_traces_of_the_subject_of_stock_and_of_missed_targets_are_copied() -> None:
    rows = _traced(10, 10, 10, 10, 10)  # of DeepSpeed's two, zero3, lossless and topo
    rows[0]["trace"] = "traces/ddp.json.gz"
    text = _report(rows)
    assert sorted(path.name for path in Path("out").glob("*trace*")) == [
        f"{STEM}-trace-main-{peer}.json.gz" for peer in ("topo", "zero3-deepspeed")
    ]
    name = f"{STEM}-trace-main-topo.json.gz"
    assert Path("out", name).read_bytes() == Path("in/traces/topo.json.gz").read_bytes()
    assert _cells(text, "One traced step", "hzero topo")[4].endswith(f"({name})")
    assert _cells(text, "One traced step", "PyTorch DDP")[4] == "not copied"  # the row names one that is not there
    copied = [json.loads(line)["trace"] for line in Path("out", f"{STEM}.jsonl").read_text().splitlines()]
    assert copied[-3:] == ["traces/zero3.json.gz", "traces/lossless.json.gz", name]
    rows[-1]["step_s"] = [1.55, 1.55, 1.7]  # misses the target against hpZ
    write_trace(Path("in"), "traces/topo.json.gz", 3_000_000)  # more than 5 MB
    _report(rows)
    assert sorted(path.name for path in Path("out").glob("*trace*")) == [
        f"{STEM}-trace-main-{peer}.json.gz" for peer in ("hpz-deepspeed", "zero3-deepspeed")
    ]


def test_traces_that_are_asked_for_stay_when_a_report_is_written_again() -> None:
    _report(_traced(10, 10, 10), "--traces", "lossless")
    traces = [f"{STEM}-trace-main-lossless.json.gz"]
    assert [path.name for path in Path("out").glob("*trace*")] == traces
    before = Path("out", f"{STEM}.md").read_text()
    assert main(["bench", "report", f"out/{STEM}.jsonl", "-o", "out"]) == 0
    assert [path.name for path in Path("out").glob("*trace*")] == traces
    assert Path("out", f"{STEM}.md").read_text() == before
    _report(_traced(10, 10, 10), "--traces", "none")
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
