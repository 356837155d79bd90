"""The examples run as their first line says, and hzero carries their weights and gradients."""

from __future__ import annotations

import ast
import math
import os
import re
import shlex
import subprocess
import sys

import pytest

from tests.ranks import ROOT

FOLDER = ROOT / "examples"


def _run(name: str) -> str:
    """Output of the command in the example's docstring."""
    command = re.search(r"torchrun (.*)\.$", ast.get_docstring(ast.parse((FOLDER / name).read_text())) or "")
    assert command, "the docstring ends with the command"
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *shlex.split(command.group(1))],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


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


def test_training_script() -> None:
    output = _run("train.py")
    _check(output, [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)", output, flags=re.MULTILINE)])


def test_trainer() -> None:
    pytest.importorskip("transformers", reason="the train extra is not installed")
    pytest.importorskip("accelerate", minversion="1.1", reason="Trainer needs accelerate, which is not installed")
    output = _run("trainer.py")
    _check(output, [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", output)])
