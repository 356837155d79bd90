"""The README's commands are run, long ones with fewer steps; its links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import ROOT

README = (ROOT / "README.md").read_text()

#: What is appended to a command so that it takes seconds: the same command, on a smaller job.
SHORTER = {
    "make train": "ARGS='train.steps=2 model.num_layers=1 data.max_bytes=2000000 train.eval_batches=1 run.dir={run}'",
    "make test": "ARGS='--collect-only -q tests/test_config.py'",
    "hzero bench links --topology 1x2x2 --max-bytes 64K --iterations 3": "--min-bytes 16K --codecs int8 --out {run}.json",
}


def _commands() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", README, flags=re.DOTALL)
    return [line.split(" #")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]


def _environment(tmp_path: Path) -> dict[str, str]:
    """An environment where `make` finds this interpreter as its virtual environment, already set up."""
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys.executable)
    for name, module in (("python", ""), ("hzero", "-m hzero")):
        script = venv / "bin" / name
        script.unlink(missing_ok=True)
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
        script.chmod(0o755)
    wanted = subprocess.run(
        "cat pyproject.toml constraints/cpu.txt scripts/setup | sha256sum | cut -c1-16",
        shell=True, cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    (venv / ".hzero-installed").write_text(wanted)
    # The compiled parts are those that are there, or none.
    (ROOT / "hzero" / "native").mkdir(exist_ok=True)
    native = 'source <(sed -n "/^native()/,/^}/p" scripts/setup) && native'
    built = subprocess.run(["bash", "-c", native], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert len(built.strip()) == 16
    (venv / ".hzero-native").write_text(built)
    path = os.pathsep.join([str(venv / "bin"), os.environ["PATH"]])
    return {**os.environ, "VENV": str(venv), "PATH": path, "PYTHONPATH": str(ROOT), "MAKEFLAGS": "", "MAKELEVEL": ""}


def test_readme_names_the_two_commands() -> None:
    assert {"make train", "make test"} <= set(_commands())


@pytest.mark.parametrize(
    "command",
    [c for c in _commands() if c.startswith(("make", "hzero plan", "hzero doctor", "hzero topology", "hzero bench"))],
)
def test_command(command: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the train extra is not installed")
    shorter = f"{command} {SHORTER.get(command, '').format(run=tmp_path / 'run')}"
    done = subprocess.run(
        shorter,
        shell=True,
        cwd=ROOT,
        env=_environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if command == "make train":
        assert "evaluation loss, exact weights" in done.stdout
        report = [sys.executable, "-m", "hzero", "report", str(tmp_path / "run"), "-o", str(tmp_path / "report")]
        subprocess.run(report, cwd=ROOT, check=True, capture_output=True)
        assert (tmp_path / "report" / "report.html").exists()


def test_links_lead_somewhere() -> None:
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md")]
    for page in pages:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)|src=\"([^\"]+)\"", page.read_text()):
            link = target[0] or target[1]
            if not link.startswith("http"):
                assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_python_in_the_configuration_page_names_what_exists() -> None:
    import hzero
    from hzero.config import parse_config

    page = (ROOT / "docs" / "configuration.md").read_text()
    for name in re.findall(r"hzero\.(\w+)\(", page):
        assert name in hzero.__all__, name
    import json

    block = json.loads(re.search(r"```json\n(.*?)```", page, flags=re.DOTALL).group(1))["hzero"]
    assert parse_config(block).codecs["gradients"]["node"].rounding == "stochastic"
