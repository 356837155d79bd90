"""The examples run as their first line says, and hzero carries their weights and gradients."""

from __future__ import annotations

import ast
import gc
import importlib
import json
import math
import re
import shlex
from pathlib import Path
from unittest import mock

import pytest
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from tests.forks import fork, join, torchrun
from tests.ranks import ROOT

FOLDER = ROOT / "examples"


def _command(name: str) -> list[str]:
    """The command in the example's docstring."""
    command = re.search(
        r": ((?:torchrun|accelerate launch) .*)\.$", ast.get_docstring(ast.parse((FOLDER / name).read_text())) or ""
    )
    assert command, "the docstring ends with the command"
    return shlex.split(command.group(1))


def _output(name: str, folder: Path, script: Path | None = None) -> str:
    """Of the command in the example's docstring, or of ``script`` in its place; ranks are forked after one import."""
    program, *words = _command(name)
    more: dict[str, str] = {}
    if program == "accelerate":
        ranks, more = _of_accelerate(words[1:])
        words = [f"--nproc-per-node={ranks}", words[-1]]
    words[-1] = str(script or words[-1])
    out, err = folder / "out", folder / "err"
    env = {"PYTHONWARNINGS": "ignore", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", **more}
    process = fork(_run, words, folder=ROOT, env=env, out=out, err=err)
    join(process, 300)
    assert process.exitcode == 0, out.read_text() + err.read_text()
    return out.read_text() + err.read_text()


def _of_accelerate(words: list[str]) -> tuple[int, dict[str, str]]:
    """Number of ranks that `accelerate launch` would start, and what it would tell them."""
    from accelerate.commands import launch

    with mock.patch.object(launch, "deepspeed_launcher") as launcher:
        launch.launch_command(launch.launch_command_parser().parse_args(words))
    (parsed,) = launcher.call_args.args
    _, env = launch.prepare_deepspeed_cmd_env(parsed)
    return parsed.num_processes, {name: value for name, value in env.items() if name.startswith("ACCELERATE_")}


def _run(words: list[str]) -> int:
    script = Path(words[-1])
    for needed in {"train.py": (), "sft.py": ("trl.trainer.sft_trainer",)}.get(script.name, ("transformers.trainer",)):
        importlib.import_module(needed)  # once, before the ranks are forked
    gc.freeze()  # or collections would copy the memory that the ranks share
    if script.name == "trainer.py":  # it has no word of hzero in it
        words = [*words[:-1], str(ROOT / "tests" / "examples" / "wire_log.py"), str(script)]
    return torchrun("--standalone", *words)


def _losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"(?:'loss': '?|: loss )([\d.]+)", output)]


EXAMPLES = {"train.py": "deepspeed", "trainer.py": "accelerate", "loop.py": "accelerate", "sft.py": "trl"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str, tmp_path: Path) -> None:
    pytest.importorskip(EXAMPLES[name], reason=f"{EXAMPLES[name]} is not installed")
    losses = _losses(output := _output(name, tmp_path))
    if name == "train.py":  # the tutorial shows its output
        page = (ROOT / "docs" / "cpu.md").read_text()
        shown = re.findall(r"^step (\d+): loss ([\d.]+)$", page, flags=re.MULTILINE)
        assert [losses[int(step) - 1] for step, _ in shown] == pytest.approx(
            [float(loss) for _, loss in shown], abs=0.02
        )
        received = re.findall(r"^\w+ over tier .* with none: received [\d,]+ bytes$", page, flags=re.MULTILINE)
        assert len(received) == 4
    assert len(losses) >= 4 and all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < losses[0] - 0.3, losses
    hops = re.findall(r"(\w+) over tier (\w+) with (\w+): received ([\d,]+) bytes", output)
    # On two nodes of one package, whatever layout is chosen; nothing rounds.
    assert {hop[2] for hop in hops} <= {"none", "exact"}
    tiers = ("intra_package", "inter_node")
    assert {hop[:2] for hop in hops} == {(role, tier) for role in ("weights", "gradients") for tier in tiers}
    received = {hop[:2]: int(hop[3].replace(",", "")) for hop in hops}
    # A node's weights enter once per step, a package's with every use; gradients cross nodes once per step.
    assert 0 < received["weights", "inter_node"] < received["weights", "intra_package"]
    assert 0 < received["gradients", "inter_node"] < received["gradients", "intra_package"]


def test_a_script_without_a_word_of_hzero(tmp_path: Path) -> None:
    """Nothing but the JSON turns hzero on and off; without hzero the same JSON is refused by DeepSpeed."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    text = (FOLDER / "trainer.py").read_text()
    assert "hzero" not in text
    script, config = tmp_path / "trainer.py", tmp_path / "ds_config_cpu.json"
    script.write_text(text)
    written = json.loads((FOLDER / config.name).read_text())
    assert written["zero_optimization"].keys() == {"stage", "hzero"}
    with pytest.raises(ValueError, match="hzero\n  Extra inputs are not permitted"):
        DeepSpeedZeroConfig(**written["zero_optimization"])
    config.write_text(json.dumps({**written, "zero_optimization": {"stage": 3}}))
    output = _output("trainer.py", tmp_path, script)
    assert "no wire log" in output and "hzero: fit on" not in output and len(_losses(output)) >= 4
