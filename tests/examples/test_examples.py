"""The examples run as their first line says, and hzero carries their weights and gradients."""

from __future__ import annotations

import ast
import importlib
import math
import os
import re
import runpy
import shlex
import subprocess
import sys
import traceback
from pathlib import Path
from unittest import mock

import pytest

from hzero.launcher import local_ranks
from tests.forks import fork, join
from tests.ranks import ROOT

FOLDER = ROOT / "examples"


def _command(name: str) -> list[str]:
    """The command in the example's docstring."""
    command = re.search(
        r": ((?:torchrun|accelerate launch) .*)\.$", ast.get_docstring(ast.parse((FOLDER / name).read_text())) or ""
    )
    assert command, "the docstring ends with the command"
    return shlex.split(command.group(1))


def _by_torchrun(name: str) -> str:
    """Output of the command in the example's docstring."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *_command(name)[1:]],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _by_forks(name: str, folder: Path) -> str:
    """Output of as many ranks as the command starts, forked after one import."""
    program, *words = _command(name)
    if program == "accelerate":
        ranks, env = _of_accelerate(words[1:])
    else:
        (ranks,) = (int(word.partition("=")[2]) for word in words if word.startswith("--nproc-per-node="))
        env = {}
    out, err = folder / "out", folder / "err"
    env |= {"PYTHONWARNINGS": "ignore", "DS_ACCELERATOR": "cpu"}
    process = fork(_rank_processes, FOLDER / name, ranks, folder=ROOT, env=env, out=out, err=err)
    join(process, 300)
    assert process.exitcode == 0, out.read_text() + err.read_text()
    return out.read_text()


def _of_accelerate(words: list[str]) -> tuple[int, dict[str, str]]:
    """Number of ranks that `accelerate launch` would start, and what it would tell them."""
    from accelerate.commands import launch

    with mock.patch.object(launch, "deepspeed_launcher") as launcher:
        launch.launch_command(launch.launch_command_parser().parse_args(words))
    (parsed,) = launcher.call_args.args
    _, env = launch.prepare_deepspeed_cmd_env(parsed)
    return parsed.num_processes, {name: value for name, value in env.items() if name.startswith("ACCELERATE_")}


def _rank_processes(script: Path, ranks: int) -> int:
    importlib.import_module("transformers.trainer")
    for environment in local_ranks(ranks):
        if os.fork() == 0:
            os.environ.update(environment)
            try:
                runpy.run_path(str(script), run_name="__main__")
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            sys.stdout.flush()
            os._exit(0)
    return int(any(os.wait()[1] for _ in range(ranks)))


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
    output = _by_torchrun("train.py")
    _check(output, [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)", output, flags=re.MULTILINE)])


@pytest.mark.parametrize(
    ("name", "client"), [("trainer.py", "accelerate"), ("loop.py", "accelerate"), ("sft.py", "trl")]
)
def test_client(name: str, client: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the train extra is not installed")
    pytest.importorskip(client, reason=f"{client} is not installed")
    output = _by_forks(name, tmp_path)
    _check(output, [float(loss) for loss in re.findall(r"(?:'loss': '?|: loss )([\d.]+)", output)])
