"""hzero serves a configuration with the block from any caller of DeepSpeed, and changes nothing else; in fresh processes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hzero.tools import cli
from hzero.tools.launch import free_port
from tests.forks import run_forked
from tests.ranks import ROOT, run_python

STAGE, STOCK = "HZeroStage3", "DeepSpeedZeroOptimizer_Stage3"
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "DS_ACCELERATOR": "cpu"}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder whose entry point torch finds, as after an installation."""
    folder = tmp_path_factory.mktemp("site")
    info = folder / "hzero_entry-0.1.dist-info"
    info.mkdir()
    entry = next(line for line in (ROOT / "pyproject.toml").read_text().splitlines() if "hzero_autoload" in line)
    (info / "entry_points.txt").write_text("[torch.backends]\n" + entry.replace('"', "") + "\n")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hzero-entry\nVersion: 0.1\n")
    return folder


def _run(*command: str, **environment: str) -> tuple[dict[str, Any], str]:
    """What a process of `tests.deepspeed.adoption` says, and its errors."""
    path = os.pathsep.join([environment.pop("site", ""), str(ROOT)]).strip(os.pathsep)
    # Without TORCHDYNAMO_DISABLE an engine imports torch's compiler.
    done = run_python(*command, PYTHONPATH=path, TORCHDYNAMO_DISABLE="1", **ALONE, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_every_place_of_the_block_is_served_or_refused(installed: Path) -> None:
    found, errors = _run("-m", "tests.deepspeed.adoption", "places", site=str(installed))
    assert found["loaded"] == ["hzero", "hzero.autoload", "hzero.block"], "torch's entry point loads two small modules"
    assert len(found["files"]) <= 51, "a front end loads what it uses"
    assert found[""] == found["stock again"] == STOCK
    assert found["inside"] == found["top"] == found["file"] == found["zero.Init"] == STAGE
    assert found["both"].startswith("ConfigError: hzero: found at the top level and in zero_optimization")
    assert "zero_optimization.stage: found 2" in found["stage 2"]
    assert found["misspelt"] == "ConfigError: zero_optimization.h_zero: found key 'h_zero'; expected 'hzero'"
    lines = [line for line in errors.splitlines() if line.startswith("hzero: topo on ")]
    assert len(lines) == 4  # one for each engine that hzero serves
    assert lines[0] == (
        "hzero: topo on 1 node x 1 package x 1 device; weights over the package, gradients over the node; nothing is sent / "
        "nothing is sent; transport gloo; codecs " + lines[0].rpartition(" ")[2]
    )


def test_without_autoload_the_block_is_refused_until_an_import(installed: Path) -> None:
    found, _ = _run(
        "-m", "tests.deepspeed.adoption", "without_autoload", site=str(installed), TORCH_DEVICE_BACKEND_AUTOLOAD="0"
    )
    assert "Extra inputs are not permitted" in found["inside"] and found["loaded"] == []
    assert found["late"] == STAGE


def test_the_stage_needs_no_extra_and_commands_name_theirs(installed: Path) -> None:
    found, errors = _run("-m", "tests.deepspeed.adoption", "without_extras", site=str(installed))
    assert found["stage"] == STAGE and "hzero: topo on" in errors
    for command, (status, said) in found["said"].items():
        expected = (
            rf"hzero: error: {command}: \w+ is not installed; run pip install "
            r'("\.\[(data,)?train\]" in a checkout of hzero|hydra-core transformers rich in its own environment)\n'
        )
        assert status == 2 and re.fullmatch(expected, said), (command, status, said)
    assert found["said"].keys() == cli.NEEDS.keys()


def test_hzero_run_serves_a_script_without_a_change(installed: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom tests.deepspeed import adoption\n"
        "assert __name__ == '__main__' and sys.argv[1:] == ['--lr', '1']\nadoption.by_script()\n"
    )
    found, errors = _run("-m", "hzero.run", str(script), "--lr", "1", site=str(installed), HZERO_AUTOLOAD="0")
    assert found == {"inside": STAGE} and "no DeepSpeed configuration" not in errors
    script.write_text("print('{}')\nraise SystemExit(0)")
    assert 'no DeepSpeed configuration with an "hzero" block was read' in _run("-m", "hzero.run", str(script))[1]


@pytest.mark.parametrize("raised", ["BrokenPipeError()", "ModuleNotFoundError(name='tokenizers')", "ConfigError('x')"])
def test_what_a_script_raises_is_its_own(raised: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"from hzero import ConfigError\nraise {raised}")
    with pytest.raises(Exception) as error:
        cli.main(["run", str(script)])
    assert type(error.value).__name__ == raised.partition("(")[0]
    assert cli.main(["run", "nothing.py"]) == 2 and "SCRIPT: found no file 'nothing.py'" in capfd.readouterr().err


def test_without_a_block_deepspeed_stays_as_it_is(installed: Path) -> None:
    """The one thing that differs is the method in which configurations are seen."""
    found, errors = _run("-m", "tests.deepspeed.adoption", "untouched", site=str(installed), HZERO_AUTOLOAD="0")
    watched = "DeepSpeedConfig._initialize_params"
    assert found["changed"] and [name for name in found["changed"] if watched not in name] == []
    assert found["new"] == [] and found["seen"] > 10_000
    assert found["alone"] and found["stock"] == STOCK and found["state"] and found["with_block"] == STAGE
    assert errors.count("hzero: topo on") == 1


def test_accelerate_without_deepspeed_is_refused(tmp_path: Path) -> None:
    """In a fork of a process that has imported hzero."""
    pytest.importorskip("accelerate", minversion="1.12", reason="accelerate is not installed, or fails by itself here")
    words = ("-m", "tests.deepspeed.adoption", "accelerate")
    status, out, errors = run_forked(*words, folder=tmp_path, MASTER_PORT=str(free_port()), **ALONE)
    assert status == 0, out + errors
    found = json.loads(out.splitlines()[-1])
    assert "CPU" in found["without"]
    for name in ("plugin", "environment"):
        assert "Accelerate does not use DeepSpeed" in found[name] and "cpu=True" in found[name]
