"""Every kind of installation has everything, compiled parts included, and works from any folder."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.version import Version

from tests.ranks import LONG, ROOT, run

COMPILER = shutil.which(os.environ["CXX"]) if os.environ.get("CXX") else shutil.which("c++") or shutil.which("g++")
HIPCC = shutil.which("hipcc") or shutil.which("hipcc", path="/opt/rocm/bin")
#: A torch of the site: only what an installation looks at.
TORCH = "2.9.1+rocm7.0"
#: Encodes three times and names the backend.
CODEC = (
    "import torch\n"
    "from hzero.codecs import backends\nfrom hzero.codecs.codec import Codec\n"
    "from hzero.config import CodecConfig\n"
    "codec = Codec.from_config(CodecConfig(codec='int8'))\n"
    "for _ in range(3): codec.decode(codec.encode([torch.ones(9)], [9]), [9], dtype=torch.float32)\n"
    "print(backends.choice('cpu').name)\n"
)


def _stated() -> dict[str, str]:
    """Packages that the installation and its extras ask for, with the lower bounds where they are first named."""
    text = (ROOT / "pyproject.toml").read_text().partition("\ndependencies")[2].partition("[project.scripts]")[0]
    stated: dict[str, str] = {}
    for name, version in re.findall(r'"([\w-]+)(?:[>=]=([\d.]+))?[^"]*"', text):
        stated.setdefault(name.lower(), version)  # clients need newer ones than train
    return stated


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packages of a machine with a ROCm torch: stand-ins for torch and what is not installed here."""
    folder = tmp_path_factory.mktemp("site")
    names = {"torch": TORCH}
    for name, version in _stated().items():
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            names[name.replace("-", "_")] = version or "1"
    assert any(name.startswith("cupy_rocm") for name in names)
    for name, version in names.items():
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "INSTALLER").write_text("site\n")
        (info / "RECORD").write_text("")
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(
        f'__version__ = "{TORCH}"\nclass version:\n    hip, cuda = "7.0.51831", None\n'
    )
    own = re.compile(r"(_editable_skbc_)?hzero|torch(-.*)?$|__pycache__|.*\.pth$")
    for path in (path for packages in _site_packages() for path in packages.iterdir()):
        if not own.match(path.name) and not (folder / path.name).exists():
            (folder / path.name).symlink_to(path)
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The content of the source distribution. The tests below build it, so it must be complete."""
    folder = tmp_path_factory.mktemp("source")
    with tarfile.open(_built("sdist", folder / "sdist")) as file:
        # Python before 3.10.12 and 3.11.4 has no filters.
        file.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return next(path.parent for path in folder.glob("*/pyproject.toml"))


@pytest.fixture(scope="module")
def hipcc(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a compiler for AMD GPUs: a stand-in, since tests/kernels has the real one compile the same files."""
    text = 'while [ "$1" != -o ]; do shift; done\necho "stand-in" > "$2"'
    return str(_program(tmp_path_factory.mktemp("bin") / "hipcc", text).parent)


def _program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return path


def _first(*folders: str) -> str:
    """PATH with folders in front."""
    return os.pathsep.join([*folders, os.environ["PATH"]])


@pytest.fixture(scope="module")
def cxx(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The compiler without optimisation, which takes most of its time: what make setup built is the optimised library."""
    if not COMPILER:
        return "/nowhere/c++"
    return str(_program(tmp_path_factory.mktemp("cxx") / "c++", f'exec "{COMPILER}" "${{@/#-O3/-O0}}"'))


@pytest.fixture(scope="module")
def compiled(site: Path, hipcc: str, cxx: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which builds share object files, since compiling takes longest.

    That takes one scikit-build-core, and make: an environment may bring a ninja that does not read another one's log.
    """
    return {
        "PATH": _first(hipcc),
        "CXX": cxx,
        "SKBUILD_BUILD_DIR": str(tmp_path_factory.mktemp("objects")),
        "CMAKE_GENERATOR": "Unix Makefiles",
        "CMAKE_BUILD_PARALLEL_LEVEL": "2",
        "PYTHONPATH": str(site),
    }


@pytest.fixture(scope="module")
def wheel(source: Path, compiled: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _built("wheel", tmp_path_factory.mktemp("wheel"), root=source, **compiled)


@pytest.fixture(scope="module")
def wheel_without_compiler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the checkout, whose own compiled parts must not get into it."""
    return _built("wheel", tmp_path_factory.mktemp("reference"), CXX="/nowhere/c++", HZERO_BACKEND="host")


def _built(kind: str, out: Path, *, root: Path = ROOT, **env: str) -> Path:
    """A wheel or source distribution."""
    for module in ("build", "scikit_build_core", "cmake"):
        pytest.importorskip(module, reason="the dev extra is not installed")
    _run([sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "-o", str(out)], root, env)
    (path,) = out.iterdir()
    return path


def _run(command: list[str], folder: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    done = run(*command, folder=folder, timeout=600, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def _site_packages() -> list[Path]:
    return [Path(path) for path in sys.path if path.endswith(("site-packages", "dist-packages"))]


def _python(code: list[str], folder: Path, *paths: Path) -> subprocess.CompletedProcess[str]:
    """Runs Python with ``paths`` first and without the installation of this checkout."""
    found = os.pathsep.join(str(path) for path in (*paths, *_site_packages()))
    return _run([sys.executable, "-S", *code], folder, {"PYTHONPATH": found, "HZERO_BACKEND": ""})


def _names(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


@LONG
def test_wheel_holds_configuration_types_and_kernels(wheel: Path) -> None:
    """Kernels compiled for CPUs, and as sources for GPUs without a code object."""
    names = _names(wheel)
    assert "hzero/py.typed" in names and any(name.endswith("licenses/LICENSE") for name in names)
    assert {f"hzero/{path.relative_to(ROOT)}" for path in (ROOT / "conf").rglob("*.yaml")} <= names
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "hzero/topology/presets").glob("*.yaml")} <= names
    if COMPILER:
        assert "hzero/native/libhzero_host.so" in names
    for path in (*(ROOT / "hip_kernels").glob("*.hip"), *(ROOT / "hip_kernels").glob("*.h")):
        assert f"hzero/native/kernels/{path.name}" in names
    if not os.environ.get("HZERO_BACKEND"):
        assert any(name.startswith("hzero/native/encode.gfx90a.") for name in names)
    with zipfile.ZipFile(wheel) as file:
        (sbom,) = (name for name in names if name.endswith(".dist-info/sboms/hzero.cdx.json"))
        listed = json.loads(file.read(sbom))["components"]
        for one in (one for one in listed if one["type"] == "file"):
            assert one["hashes"][0]["content"] == hashlib.sha256(file.read(one["name"])).hexdigest()
    assert {one["name"] for one in listed} >= {name for name in names if name.endswith((".so", ".hsaco"))}
    # Compiled code is not tied to a version of Python.
    assert "-py3-none-linux" in wheel.name or not any(name.endswith(".so") for name in names)


@LONG
def test_without_a_compiler_the_wheel_has_the_reference_alone(wheel_without_compiler: Path, tmp_path: Path) -> None:
    names = _names(wheel_without_compiler)
    assert not any(name.endswith((".so", ".hsaco")) for name in names) and "hzero/native/kernels/encode.hip" in names
    zipfile.ZipFile(wheel_without_compiler).extractall(tmp_path / "site")
    done = _python(["-c", CODEC], tmp_path, tmp_path / "site")
    assert done.stdout.split() == ["reference"]
    assert done.stderr.count("codecs run in plain torch on cpu tensors") == 1


def test_a_backend_that_cannot_be_built_is_an_error(tmp_path: Path) -> None:
    cmake = pytest.importorskip("cmake", reason="the dev extra is not installed")
    binary = Path(cmake.CMAKE_BIN_DIR) / "cmake"
    for backend, says in (("hip", "HZERO_BACKEND: hip needs hipcc"), ("opencl", "HZERO_BACKEND: unknown backend 'op")):
        if backend == "hip" and HIPCC:
            continue
        command = [str(binary), "-S", str(ROOT), "-B", str(tmp_path / backend)]
        done = run(*command, HZERO_BACKEND=backend, CXX="/nowhere/c++")
        assert done.returncode != 0 and says in " ".join(done.stderr.split())


@LONG
def test_wheel_works_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    for arguments in (["plan", "model=gpt_neox_10b", "topology=frontier", "nodes=4"], ["train", "--cfg", "job"]):
        assert _python(["-m", "hzero", *arguments], tmp_path, site).stdout
    done = _python(["-c", f"{CODEC}print(backends.__file__)"], tmp_path, site)
    assert done.stdout.split()[0] == ("host" if COMPILER else "reference")
    assert done.stdout.count(str(site)) == 1


#: pip with what is installed alone: a torch that it wanted to replace would be an error.
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONPATH": ""}


def _quick(python: Path, name: Path) -> Path:
    """A Python that makes virtual environments without a copy of pip, for which they take the site's."""
    make = f'case "$1 $2" in "-m venv") shift 2; exec "{python}" -m venv --without-pip "$@";; esac'
    return _program(name, f'{make}\nexec "{python}" "$@"')


def _own_packages(venv: Path) -> Path:
    (packages,) = venv.glob("lib/python3*/site-packages")
    return packages


@LONG
def test_setup_compiles_and_keeps_the_torch_of_the_site(
    site: Path, source: Path, compiled: dict[str, str], wheel: Path, tmp_path: Path
) -> None:
    """An editable installation. The object files are those of the wheel."""
    outer, venv = tmp_path / "outer", tmp_path / "venv"
    _run([sys.executable, "-m", "venv", "--without-pip", str(outer)], tmp_path, {})
    (_own_packages(outer) / "site.pth").write_text(f"{site}\n")
    python = _quick(outer / "bin/python", outer / "bin/quick")
    env = {**OFFLINE, "PYTHON": str(python), "MAKEFLAGS": "", "MAKELEVEL": ""}
    env |= {name: compiled[name] for name in ("PATH", "CXX")}
    setup = ["make", "setup", f"VENV={venv}"]
    library = source / "hzero/native/libhzero_host.so"

    said = _run(setup, source, {**compiled, **env}).stdout
    assert f"setup: keeps torch=={TORCH}" in said
    assert library.exists() == bool(COMPILER) and ("no C++ compiler" in said) != bool(COMPILER)
    found = _run(
        [str(venv / "bin/python"), "-c", "import torch, hzero; print(torch.__file__, hzero.__file__)"], tmp_path, env
    )
    assert found.stdout.split() == [str(site / "torch/__init__.py"), str(source / "hzero/__init__.py")]
    assert not (_own_packages(venv) / "torch").exists()
    assert (_own_packages(venv) / "hzero.pth").read_text().strip() == str(source)
    done = _python(["-c", CODEC], tmp_path, source)
    assert done.stdout.split() == ["host" if COMPILER else "reference"]

    assert _run(setup, source, env).stdout == ""  # nothing has changed
    kernels = source / "hip_kernels/host/library.cpp"
    kernels.write_text(kernels.read_text() + "// changed\n")
    said = _run(setup, source, {**env, "CXX": "/nowhere/c++"}).stdout
    assert said.splitlines() == [
        f"setup: keeps torch=={TORCH}",
        "setup: found no C++ compiler; on CPUs codecs will run in plain torch",
    ]
    assert not library.exists()

    # torch loads hzero, and lives on when the checkout has gone.
    script = "import sys, site; site.addsitedir(sys.argv[1]); import torch; print('hzero' in sys.modules)"
    packages = _own_packages(venv)

    def import_torch(**env: str) -> tuple[str, list[str]]:
        paths = os.pathsep.join(map(str, [packages, *_site_packages()]))
        done = _run([sys.executable, "-S", "-c", script, str(packages)], tmp_path, {"PYTHONPATH": paths, **env})
        return done.stdout.strip(), [line for line in done.stderr.splitlines() if line.startswith("hzero:")]

    assert import_torch() == ("True", [])
    source.rename(moved := source.with_name("moved"))
    try:
        loaded, (said,) = import_torch()
        assert (
            loaded == "False" and "so it is off: ModuleNotFoundError: No module named 'hzero'; install it again" in said
        )
        assert import_torch(HZERO_AUTOLOAD="0") == ("False", [])
    finally:
        moved.rename(source)


@LONG
def test_the_way_written_down_for_an_accelerator_keeps_its_torch(site: Path, hipcc: str, tmp_path: Path) -> None:
    page = (ROOT / "docs/installation.md").read_text()
    (block,) = re.findall(r"```sh\n(python -m venv .*?)```", page, flags=re.DOTALL)
    assert '".[train]"' in block
    programs = tmp_path / "bin"
    programs.mkdir()
    _quick(Path(sys.executable), programs / "python")
    _program(programs / "pip", 'exec python -m pip "$@"')
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    for path in (path for path in ROOT.iterdir() if path.name != "env"):
        (checkout / path.name).symlink_to(path)
    env = {
        **OFFLINE,
        "PATH": _first(str(programs), hipcc),
        "PYTHONPATH": str(site),  # as a module of the machine would set it
        "CXX": "/nowhere/c++",
        "HZERO_BACKEND": "hip",
    }
    _run(["bash", "-euc", block], checkout, env)
    packages = _own_packages(checkout / "env")
    assert not (packages / "torch").exists() and (site / "torch/__init__.py").exists()
    native = packages / "hzero/native"
    assert (native / "kernels/encode.hip").exists()
    assert [path.read_text() for path in native.glob("encode.gfx90a.*.hsaco")] == ["stand-in\n"]


def test_the_versions_tested_are_those_that_are_stated() -> None:
    """The oldest are the lower bounds, and every package that is asked for is pinned once for the tests."""
    stated = _stated()
    optional = {"hzero", "cupy-rocm-7-0", "cupy-cuda13x"}
    oldest, tested = (
        dict(
            re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "constraints" / f"{which}.txt").read_text(), flags=re.MULTILINE)
        )
        for which in ("oldest", "tested")
    )
    assert stated.keys() - optional <= tested.keys()
    assert oldest.keys() <= stated.keys()
    for name, version in oldest.items():
        assert Version(stated[name]) == Version(version) <= Version(tested[name]), name
