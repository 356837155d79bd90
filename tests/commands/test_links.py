"""The command: wrong arguments are one line and status 2; a run of 8 ranks measures every tier."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hzero.tools.cli import main
from hzero.topology.links_file import read_links
from tests.forks import Command

WRONG = {
    "--max-bytes 1K": "--max-bytes: found 1,024; expected at least 4,096",
    "--min-bytes 4Q": "--min-bytes: found '4Q'; expected bytes",
    "--iterations 0": "--iterations: found '0'; expected more than 0",
    "--timeout nan": "--timeout: found 'nan'",
    "--device gpu": "--device: invalid choice: 'gpu'",
    "--topology 2x2": "--topology: found no file '2x2'; expected ",
    "--topology 0x2x2": "--topology.nodes: found 0",
    "--topology 9999x99x9": "--topology: found 8,909,109 ranks for this machine",
    "--topology nope": "--topology: found no file 'nope'",
    "--topology frontier": "--topology: found 0 ranks for this machine; expected 2 to 256, as in 2x2x2",
    "--topology 1x1x2 --out no/such/links.json": "--out: found 'no/such/links.json'; expected a file in a folder",
    "--topology 1x1x2 --out here.json": "found 'here.json', which exists; expected --overwrite",
    "--topology 1x1x2 --out folder.json --overwrite": "--out: found the folder 'folder.json'; expected a file",
    "--fctor 2": "found argument '--fctor'",
}


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in os.environ:
        if name in ("RANK", "WORLD_SIZE") or name.startswith(("SLURM_", "PMI", "OMPI_")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("arguments", WRONG)
def test_wrong_input_is_one_line(arguments: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "here.json").write_text("{}")
    (tmp_path / "folder.json").mkdir()
    assert main(["links", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert WRONG[arguments] in error and error.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"here.json", "folder.json"}


def test_a_run_measures_all_tiers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "links.json"
    words = f"links --device cpu --topology 2x2x2 --min-bytes 1K --max-bytes 4K --iterations 2 --out {out}"
    command = Command(words.split(), tmp_path, tmp_path / "output", {"HZERO_BACKEND": "reference"})
    status, output, errors = command.finish()
    assert status == 0, errors
    links = read_links(out)
    measured = {"intra_package": ["library"], "intra_node": ["library"], "inter_node": ["library", "doubling", "pairs"]}
    expected = [(tier, name, size) for tier in measured for name in measured[tier] for size in (1024, 4096)]
    assert [(row.tier, row.algorithm, row.size_bytes) for row in links.rows] == expected
    for row in links.rows:
        assert row.min_us <= row.median_us <= row.max_us
        assert row.busbw_gb_s == pytest.approx(row.size_bytes / 2 / (row.median_us / 1e6) / 1e9)
    assert links.grid == {"intra_package": 2, "intra_node": 2, "inter_node": 2}
    assert (links.backend, links.device) == ("gloo", "cpu")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["links.json", "output"]
    shown = [line.split() for line in output.splitlines() if line[:1] == " " and "GB/s" not in line]
    assert sum(len(line) == 7 and line[0] in ("1024", "4096") for line in shown) == len(expected)
    assert output.count(": 4 x 2 ranks, all at once") == 3

    assert main(["plan", "model=gpt_neox_1m", "topology=emulated_2x2x2", "--links", str(out)]) == 0
    assert "GB/s" in capsys.readouterr().out
