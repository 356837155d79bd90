"""``hzero doctor --log`` on the sentences of public issues, with hosts, users, paths and addresses replaced."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import yaml

from hzero.tools import cli
from hzero.tools.commands.logs import CAUSES
from tests.ranks import ROOT

GOOD, DEGRADED, UNUSABLE = range(3)
#: Lines by the issue that shows them.
ISSUES = yaml.safe_load((ROOT / "tests/commands/issues.yaml").read_text())


def _run(capsys: pytest.CaptureFixture[str], *files: Path) -> tuple[int, dict[str, Any]]:
    status = cli.main(["doctor", "--json", "--log", *map(str, files)])
    found = json.loads(capsys.readouterr().out)
    assert status == found["status"] and found["verdict"] == ("good", "degraded", "unusable")[status]
    return status, found


@pytest.mark.parametrize("issue", ISSUES)
def test_the_sentence_of_an_issue_is_found_with_its_source(
    issue: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "job.log"
    log.write_text(f"step 1: loss 9.1\n{ISSUES[issue]}\nstep 2: loss 9.0\n")
    status, found = _run(capsys, log)
    (said,) = (text for text in found["remarks"] if f"{log}:2: " in text)
    assert len(found["remarks"]) == 2 and issue in said
    assert status == (UNUSABLE if next(one for one in CAUSES if issue in one.source).fatal else DEGRADED)


def test_a_start_whose_trees_came_is_good(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """RCCL says of each communicator what it has connected. Later versions connect trees when they use them."""
    rings, trees, whole = (
        "NCCL INFO Connected all rings\n",
        "NCCL INFO Connected all trees\n",
        "NCCL INFO Init COMPLETE\n",
    )
    log = tmp_path / "job.log"
    for text in (2 * rings + 2 * trees + 2 * whole, 2 * whole + 2 * rings):
        log.write_text(text)
        assert _run(capsys, log)[0] == GOOD
    log.write_text(2 * rings + 2 * trees + 2 * whole + 2 * rings)  # the second one hangs
    assert _run(capsys, log)[0] == UNUSABLE


def test_causes_come_in_order_counted_over_files_that_are_not_read_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "train-0.log", tmp_path / "train-1.log"
    line = "x" * 199 + "\n"
    first.write_text(line * 100_000 + "NCCL INFO Using network Socket\n" + line)  # 20 MB, in 20 pieces
    # A rank that was killed has not ended its last line.
    second.write_text("Using network Socket\nslurmstepd: error: Detected 1 oom_kill event in StepId=1.0.\nstep 1")
    tracemalloc.start()
    status, found = _run(capsys, first, second)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8e6
    assert status == UNUSABLE and len(found["remarks"]) == 3
    for text in (
        "files: 2, lines: 100,005, known causes: 2",
        f"{first}:100001: 'Using network Socket', times: 2: ",
        f"{second}:2: 'oom_kill event', times: 1: ",
    ):
        assert any(text in remark for remark in found["remarks"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["."], "--log: . is not a regular file; expected a text file"),
        (["packed.gz"], "--log: packed.gz is binary; expected a text file, unpacked"),
        (["packed.gz", "--nodes", "2"], "--log: found with CONFIG, --topology, --expect or --nodes; expected it alone"),
    ],
)
def test_a_file_that_is_no_log_is_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "packed.gz").write_bytes(b"\x1f\x8b\x08\0\0\0")
    assert cli.main(["doctor", "--log", *arguments]) == 2
    assert capsys.readouterr().err == f"hzero: error: {message}\n"
