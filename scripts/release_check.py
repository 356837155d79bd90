#!/usr/bin/env python3
"""The release checklist: scripts/release_check.py, in the environment of `make setup`, says of each point whether it is met.

It builds the wheel twice, from two copies of the last commit, and tries it without a compiler and git. The tests are not run:
a release needs `.ci/run`, `scripts/test-versions newest` and `scripts/test-versions oldest` as well.
"""

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from email import message_from_string
from pathlib import Path

ROOT = Path(__file__).parent.parent
FAMILIES, ARCHITECTURES = (
    ("encode", "decode", "decode_sum", "decode_sum_encode", "exact"),
    ("gfx90a", "gfx942", "gfx950"),
)
#: Encodes and decodes in every instruction set that this processor has.
CODECS = """
import torch
from hzero.codecs import backends
from hzero.codecs.codec import Codec
from hzero.config import CodecConfig
assert backends.choice("cpu").name == "host"
codec = Codec.from_config(CodecConfig(codec="int8"))
for name in ("avx512", "avx2", "baseline"):
    try:
        backends.choice("cpu").backend.launcher.instruction_set = name
    except ValueError:
        continue
    codec.decode(codec.encode([torch.ones(999)], [999]), [999], dtype=torch.float32)
"""


def run(*command: str, folder: Path = ROOT, **env: str) -> str:
    """Runs a command and returns its output. Raises ValueError with its end if it fails."""
    done = subprocess.run(command, cwd=folder, env={**os.environ, **env}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"{' '.join(command)[:60]}: {(done.stdout + done.stderr)[-400:]}")
    return done.stdout


def expect(found: object, expected: object, key: str) -> None:
    """Raises ValueError if two values differ."""
    if found != expected:
        raise ValueError(f"{key}: found {found!r}; expected {expected!r}")


def built(folder: Path) -> Path:
    """The wheel of the last commit, built in a new copy of it."""
    run("git", "clone", "--quiet", str(ROOT), str(folder / "source"))
    epoch = run("git", "log", "-1", "--format=%ct").strip()
    build = (sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", str(folder))
    run(*build, folder=folder / "source", HZERO_WHEEL="1", SOURCE_DATE_EPOCH=epoch)
    return next(folder.glob("*.whl"))


def main() -> int:
    """Checks all points. Returns 1 if one is not met."""
    version = re.findall(r'__version__ = "(.+)"', (ROOT / "hzero/__init__.py").read_text())[0]
    heading = re.findall(r"^## (.+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    cited = (ROOT / "CITATION.cff").read_text()
    failed = []

    def point(says: str, check: Callable[[], object]) -> None:
        try:
            check()
            print(f"met      {says}", flush=True)
        except ValueError as error:
            failed.append(says)
            print(f"NOT MET  {says}: {error}", flush=True)

    with tempfile.TemporaryDirectory() as name:
        first, second, site = (Path(name, part) for part in ("first", "second", "site"))
        first.mkdir(), second.mkdir()
        wheel = built(first)
        with zipfile.ZipFile(wheel) as file:
            names = file.namelist()
            info = f"hzero-{version}.dist-info"
            metadata = message_from_string(file.read(f"{info}/METADATA").decode())
        urls = {one.split(",")[0] for one in metadata.get_all("Project-URL")}
        objects = {tuple(Path(one).name.split(".")[:2]) for one in names if one.endswith(".hsaco")}
        point("everything is committed", lambda: expect(run("git", "status", "--porcelain"), "", "git status"))
        point(
            "CHANGELOG.md has version and day", lambda: expect(heading[: len(version) + 4], f"{version}, 20", "heading")
        )
        point("CITATION.cff has the version", lambda: expect(f"version: {version}\n" in cited, True, version))
        point(
            "CITATION.cff has the day and the address",
            lambda: expect(
                {"date-released", "repository-code"} - set(re.findall(r"^[\w-]+", cited, re.MULTILINE)),
                set(),
                "missing",
            ),
        )
        point("metadata has the addresses", lambda: expect({"Repository", "Documentation"} - urls, set(), "missing"))
        point(
            "the wheel is for other machines",
            lambda: expect(wheel.name, f"hzero-{version}-py3-none-manylinux_2_17_x86_64.whl", "name"),
        )
        point(
            "the wheel has code objects",
            lambda: expect({(one, two) for one in FAMILIES for two in ARCHITECTURES} ^ objects, set(), "difference"),
        )
        point("the wheel lists its contents", lambda: expect(f"{info}/sboms/hzero.cdx.json" in names, True, "SBOM"))
        point("two builds are equal", lambda: expect(built(second).read_bytes() == wheel.read_bytes(), True, "equal"))
        run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel))
        packages = [path for path in sys.path if path.endswith("-packages")]
        bare = {"PATH": "/nowhere", "PYTHONPATH": os.pathsep.join([str(site), *packages]), "OMP_NUM_THREADS": "1"}
        python = (sys.executable, "-S")  # without paths of editable installations
        example = (Path(name) / "train.py", (ROOT / "examples/train.py").read_text().replace("range(10)", "range(1)"))
        example[0].write_text(example[1])
        steps = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", str(example[0]))
        point("codecs run without a compiler", lambda: run(*python, "-c", CODECS, folder=Path(name), **bare))
        point("hzero doctor", lambda: run(*python, "-m", "hzero", "doctor", folder=Path(name), **bare))
        point("an example trains", lambda: run(sys.executable, *steps, folder=Path(name), **bare, HZERO_AUTOLOAD="0"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
