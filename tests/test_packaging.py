"""A built wheel has everything and works from any folder."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.ranks import ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="the dev extra is not installed")
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = out.glob("*.whl")
    return built


def test_wheel_holds_configuration_and_types(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"hzero/conf/train.yaml", "hzero/conf/model/gpt_neox_20b.yaml", "hzero/py.typed"} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    for path in (ROOT / "conf").rglob("*.yaml"):
        assert f"hzero/{path.relative_to(ROOT)}" in names


def test_wheel_works_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    env = {**os.environ, "PYTHONPATH": str(site)}
    for arguments in (["plan", "model=gpt_neox_10b", "topology=frontier", "nodes=4"], ["train", "--cfg", "job"]):
        command = [sys.executable, "-m", "hzero", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout
    code = "import hzero, hzero.train.conf as c; print(hzero.__file__, c.conf_dir())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.count(str(site)) == 2
