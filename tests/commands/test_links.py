"""The command: wrong arguments are one line and status 2; a run of 8 ranks measures every tier and hop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from hzero.cli import main
from hzero.commands.links import ranks_to_start
from hzero.plan.links_file import algorithm_bandwidth, bus_bandwidth, read_links
from hzero.topology import Grid
from hzero.validation import ConfigError
from tests.forks import Command
from tests.ranks import LONG, environment, mpiexec

WRONG = {
    "--max-bytes 1K": "--max-bytes: found 1,024, less than --min-bytes 4,096",
    "--min-bytes 4Q": "--min-bytes: found '4Q', expected bytes",
    "--iterations 0": "--iterations: found '0', expected more than 0",
    "--timeout nan": "--timeout: found 'nan'",
    "--codecs none,int9": "--codecs: unknown codec 'int9'; did you mean 'int8'",
    "--codecs none,exp": "--codecs: unknown codec 'exp'",
    "--topology 1x1x2 --transport mpi": "--transport: found 'mpi', whose ranks mpiexec or srun starts",
    "--device gpu": "--device: invalid choice: 'gpu'",
    "--topology 2x2": "--topology: found '2x2', expected nodes x GPUs x GCDs",
    "--topology 0x2x2": "--topology: nodes: found 0",
    "--topology 9999x99x9": "--topology: found 8,909,109 ranks for this machine",
    "--topology nope": "--topology: no such file: 'nope'",
    "--topology 1x1x2 --out links.txt": "expected a name that ends in .json",
    "--topology 1x1x2 --out no/such/links.json": "--out: found 'no/such/links.json', expected a file in a folder",
    "--topology 1x1x2 --out here.json": "'here.json' exists; --overwrite replaces a file",
    "--topology 1x1x2 --out folder.json --overwrite": "'folder.json' exists",
    "--fctor 2": "unknown argument '--fctor'",
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


def test_a_topology_says_how_many_ranks_to_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "machine.yaml"
    file.write_text("{nodes: 3, gpus_per_node: 2, gcds_per_gpu: 1}")
    assert ranks_to_start(str(file)) == 6 and ranks_to_start("frontier") == 8
    monkeypatch.setenv("HZERO_SYSFS", str(tmp_path))
    with pytest.raises(ConfigError, match="--topology: found no GPUs on this machine; expected nodes x GPUs x GCDs"):
        ranks_to_start("auto")


def test_parts_are_equal_and_aligned() -> None:
    """Parts have whole 16 bytes; a size of less than a part per rank is the least that there is."""
    from hzero.commands.probe import measurements

    for ranks, dtype, counts in ((3, torch.float32, [84, 680]), (4096, torch.bfloat16, [8])):
        found = measurements(Grid(1, 1, ranks), (1024, 8192), ("int8",), dtype)
        assert [one.count for one in found if one.op == "gradients"] == counts


def start(folder: Path, topology: str, *arguments: str, **env: str) -> Command:
    env["HZERO_BACKEND"] = "reference"
    return Command(["links", "--device", "cpu", "--topology", topology, *arguments], folder, folder / "output", env)


def test_a_run_measures_all_tiers_and_hops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "links.json"
    sizes = ("--min-bytes", "1K", "--max-bytes", "4K", "--iterations", "2")
    status, output, errors = start(tmp_path, "2x2x2", *sizes, "--out", str(out)).finish()
    assert status == 0, errors
    links = read_links(out)
    ops = [("all_gather", None), ("all_to_all", None), ("reduce_scatter", None)]
    ops += [(role, codec) for role in ("weights", "gradients") for codec in ("none", "int8", "int4")]
    between_nodes = [ops[0], ("doubling", None), ("pairs", None), *ops[1:]]
    measured = {"gcd": ops, "gpu": ops, "node": between_nodes}
    expected = [(tier, *op, size) for tier in measured for op in measured[tier] for size in (1024, 4096)]
    assert [(row.tier, row.op, row.codec, row.size_bytes) for row in links.rows] == expected
    for row in links.rows:
        assert row.min_us <= row.median_us <= row.max_us
        assert row.algbw_gb_s == pytest.approx(algorithm_bandwidth(row.size_bytes, row.median_us / 1e6))
        assert row.busbw_gb_s == pytest.approx(bus_bandwidth(row.size_bytes, row.median_us / 1e6, 2))
        assert row.count * 2 * {"uint8": 1, "float32": 4}[row.type] == row.size_bytes
    assert links.grid == {"gcd": 2, "gpu": 2, "node": 2} and links.launcher == "hzero"
    assert (links.backend, links.device, links.codecs) == ("gloo", "cpu", "reference")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["links.json", "output"]
    shown = [line.split() for line in output.splitlines() if line[:1] == " " and "GB/s" not in line]
    assert sum(len(line) == 9 and line[0] in ("1024", "4096") for line in shown) == len(expected)
    assert output.count(": 4 x 2 ranks, all at once") == 3

    assert main(["plan", "model=gpt_neox_1m", "topology=emulated_2x2x2", "--links", str(out)]) == 0
    assert "GB/s" in capsys.readouterr().out


def test_ctrl_c_ends_all_ranks(tmp_path: Path) -> None:
    links = tmp_path / "links.json"
    with start(tmp_path, "1x1x2", "--iterations", "10000", "--out", str(links), TMPDIR=str(tmp_path)) as running:
        deadline = time.monotonic() + 240
        while not running.out.exists() or "\n" not in running.out.read_text():
            assert time.monotonic() < deadline and running.poll() is None, running.err.read_text()
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        status, output, errors = running.finish(60)
    assert output.startswith("# hzero links: 2 ranks, 1 node x 1 GPU x 2 GCDs")
    assert status == 130 and "Traceback" not in errors
    assert [path.name for path in tmp_path.iterdir()] == ["output"]  # neither results nor logs


@LONG
def test_under_mpiexec_everything_is_written(tmp_path: Path) -> None:
    """mpiexec ends all ranks with the first that leaves."""
    arguments = "--topology 1x1x2 --device cpu --max-bytes 4K --iterations 1 --codecs none --out links.json"
    done = subprocess.run(
        [mpiexec(), "-n", "2", sys.executable, "-m", "hzero", "links", *arguments.split()],
        env=environment(HZERO_BACKEND="reference"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "written: links.json" in done.stdout
    assert read_links(tmp_path / "links.json").launcher == "other"
