"""The clients of DeepSpeed under hzero, on four ranks: one launch for all of them. docs/clients.md is their table."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.clients.config import config_of
from tests.ranks import ROOT, Outcome, collect, conclude, launch, selected

needs_clients = pytest.mark.skipif(
    not all(map(find_spec, ("transformers", "accelerate"))),
    reason="transformers or accelerate is not installed; the extra `clients` has them",
)

CHECKS = (
    "tests.clients.trainer_checks",
    "tests.clients.accelerate_checks",
    "tests.clients.lightning_checks",
    "tests.clients.trl_checks",
    "tests.clients.deepspeed_checks",
    "tests.clients.ulysses_checks",
)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, Outcome]:
    """Outcomes of the selected checks."""
    return launch(CHECKS, 4, selected(request))


@needs_clients
@pytest.mark.parametrize("check", collect(*CHECKS))
def test_client(outcomes: dict[str, Outcome], check: str) -> None:
    conclude(outcomes[check])


@needs_clients
@pytest.mark.skipif(
    os.environ.get("HZERO_CLIENTS") != "all",
    reason="starts three processes that import everything; tests/examples launches as it does, HZERO_CLIENTS=all runs it",
)
def test_accelerate_launch(tmp_path: Path) -> None:
    """The command line, with a DeepSpeed configuration file that has ``"auto"`` values."""
    file = tmp_path / "ds_config.json"
    topology = {"gpus_per_node": 1}  # two nodes of one device
    file.write_text(json.dumps(config_of("topo", hzero={"topology": topology}, train_micro_batch_size_per_gpu="auto")))
    options = ["--num_processes", "2", "--main_process_port", "0", "--mixed_precision", "no", "--num_machines", "1"]
    done = subprocess.run(
        [
            *(str(Path(sys.executable).with_name("accelerate")), "launch", *options),
            *("--use_deepspeed", "--deepspeed_config_file", str(file), "--module", "tests.clients.launched"),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    shown = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert shown["losses"][-1] < shown["losses"][0] - 0.1
    assert shown["codecs"] == [["gradients", "int4"], ["weights", "int8"]]


def test_the_table_names_every_check() -> None:
    named = re.findall(r"\| `((?:check|test)_\w+)` \|$", (ROOT / "docs" / "clients.md").read_text(), flags=re.MULTILINE)
    assert sorted(named) == sorted([*collect(*CHECKS), test_accelerate_launch.__name__])
