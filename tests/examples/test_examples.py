"""The examples run as their first line says, and hzero carries their weights and gradients."""

from __future__ import annotations

import ast
import importlib
import math
import re
import shlex
from pathlib import Path

import pytest

from tests.forks import fork, join, torchrun
from tests.ranks import ROOT

FOLDER = ROOT / "examples"


def _command(name: str) -> list[str]:
    """Arguments of torchrun in the example's docstring."""
    command = re.search(r"torchrun (.*)\.$", ast.get_docstring(ast.parse((FOLDER / name).read_text())) or "")
    assert command, "the docstring ends with the command"
    return shlex.split(command.group(1))


def _output(name: str, folder: Path) -> str:
    """Of the command in the example's docstring, whose ranks torchrun forks after one import."""
    out, err = folder / "out", folder / "err"
    env = {"PYTHONWARNINGS": "ignore", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    process = fork(_run, _command(name), folder=ROOT, env=env, out=out, err=err)
    join(process, 300)
    assert process.exitcode == 0, out.read_text() + err.read_text()
    return out.read_text()


def _run(command: list[str]) -> int:
    if "trainer" in command[-1]:
        importlib.import_module("transformers.trainer")
    return torchrun("--standalone", *command)


def _check(output: str, losses: list[float]) -> None:
    assert len(losses) >= 4 and all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < losses[0] - 0.3, losses
    hops = re.findall(r"(\w+) over tier (\w+) with (\w+): received ([\d,]+) bytes", output)
    assert {hop[:3] for hop in hops} == {  # the preset, on two nodes of one package
        ("weights", "gcd", "int8"),
        ("weights", "node", "int8"),
        ("gradients", "gcd", "int4"),
        ("gradients", "node", "int4"),
    }
    received = {hop[:2]: int(hop[3].replace(",", "")) for hop in hops}
    # A node's weights enter once per step, a package's with every use; gradients cross nodes once per step.
    assert 0 < received["weights", "node"] < received["weights", "gcd"]
    assert 0 < received["gradients", "node"] < received["gradients", "gcd"]


def test_training_script(tmp_path: Path) -> None:
    output = _output("train.py", tmp_path)
    _check(output, [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)", output, flags=re.MULTILINE)])


def test_trainer(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the train extra is not installed")
    pytest.importorskip("accelerate", minversion="1.1", reason="Trainer needs accelerate, which is not installed")
    output = _output("trainer.py", tmp_path)
    _check(output, [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", output)])
