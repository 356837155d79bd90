"""A built wheel has everything and works from any folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.ranks import ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _built("wheel", tmp_path_factory.mktemp("wheel"))


def _built(kind: str, out: Path, *, root: Path = ROOT, **env: str) -> Path:
    """A wheel or source distribution."""
    for module in ("build", "scikit_build_core", "cmake"):
        pytest.importorskip(module, reason="the dev extra is not installed")
    command = [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "-o", str(out)]
    done = subprocess.run(
        command, cwd=root, env={**os.environ, **env}, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = out.iterdir()
    return path


def _installed(wheel: Path, folder: Path) -> tuple[list[str], dict[str, str]]:
    """An interpreter and an environment that see a wheel's content, and no development installation of this checkout."""
    zipfile.ZipFile(wheel).extractall(folder)
    paths = [str(folder), *(path for path in sys.path if path.endswith(("site-packages", "dist-packages")))]
    return [sys.executable, "-S"], {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _names(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def test_wheel_holds_configuration_and_types(wheel: Path) -> None:
    names = _names(wheel)
    assert {"hzero/conf/train.yaml", "hzero/conf/model/gpt_neox_20b.yaml", "hzero/py.typed"} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    for path in (ROOT / "conf").rglob("*.yaml"):
        assert f"hzero/{path.relative_to(ROOT)}" in names
    for path in (ROOT / "hzero/topology/presets").glob("*.yaml"):
        assert str(path.relative_to(ROOT)) in names


def test_wheel_holds_the_kernels(wheel: Path) -> None:
    """Compiled for processors, and as sources for the GPUs that no code object was built for."""
    names = _names(wheel)
    if shutil.which("c++") or shutil.which("g++"):
        assert "hzero/native/libhzero_host.so" in names
    for path in (*(ROOT / "hip_kernels").glob("*.hip"), *(ROOT / "hip_kernels").glob("*.h")):
        assert f"hzero/native/kernels/{path.name}" in names
    if shutil.which("hipcc") and not os.environ.get("HZERO_BACKEND"):
        assert any(name.startswith("hzero/native/encode.gfx90a.") for name in names)
    # Compiled code is not tied to a version of Python.
    assert "-py3-none-linux" in wheel.name or not any(name.endswith(".so") for name in names)


def test_source_distribution_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    archive = _built("sdist", tmp_path / "sdist")
    with tarfile.open(archive) as file:
        # Python before 3.10.12 and 3.11.4 has no filters.
        file.extractall(tmp_path / "source", **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (root,) = (tmp_path / "source").iterdir()
    assert _names(_built("wheel", tmp_path / "wheel", root=root)) == _names(wheel)


def test_without_a_compiler_the_wheel_has_the_reference_alone(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".git", "build", "native", ".venv", "runs", "outputs"))
    built = _built("wheel", tmp_path / "out", root=source, CXX="/nowhere/c++", HZERO_BACKEND="host")
    names = _names(built)
    assert not any(name.endswith((".so", ".hsaco")) for name in names) and "hzero/native/kernels/encode.hip" in names
    python, env = _installed(built, tmp_path / "site")
    code = (
        "import torch\n"
        "from hzero.codecs import Codec\n"
        "from hzero.config import CodecConfig\n"
        "codec = Codec.from_config(CodecConfig(codec='int8'))\n"
        "for _ in range(3): codec.decode(codec.encode([torch.ones(9)], [9]), [9], dtype=torch.float32)\n"
    )
    done = subprocess.run([*python, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("codecs run in plain torch on cpu tensors") == 1


def test_a_backend_that_cannot_be_built_is_an_error(tmp_path: Path) -> None:
    cmake = pytest.importorskip("cmake", reason="the dev extra is not installed")
    binary = Path(cmake.CMAKE_BIN_DIR) / "cmake"
    for backend, says in (("hip", "HZERO_BACKEND: hip needs hipcc"), ("opencl", "HZERO_BACKEND: unknown backend 'op")):
        if backend == "hip" and (shutil.which("hipcc") or Path("/opt/rocm/bin/hipcc").exists()):
            continue
        done = subprocess.run([str(binary), "-S", str(ROOT), "-B", str(tmp_path / backend)], capture_output=True,
                              env={**os.environ, "HZERO_BACKEND": backend}, text=True, check=False)  # fmt: skip
        assert done.returncode != 0 and says in " ".join(done.stderr.split())


def test_wheel_works_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    python, env = _installed(wheel, site)
    for arguments in (["plan", "model=gpt_neox_10b", "topology=frontier", "nodes=4"], ["train", "--cfg", "job"]):
        done = subprocess.run(
            [*python, "-m", "hzero", *arguments], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout
    code = "import hzero, hzero.train.conf as c; print(hzero.__file__, c.conf_dir())"
    done = subprocess.run([*python, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.count(str(site)) == 2
