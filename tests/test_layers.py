"""Dependencies go downwards only, and what plans without torch imports without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

from tests.ranks import ROOT

LAYERS = ["config", "topology", "sharding", "codecs", "collectives", "zero", "train", "bench", "doctor", "cli"]


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_imports_go_downwards_only() -> None:
    package = ROOT / "hzero"
    for path in package.rglob("*.py"):
        layer = path.relative_to(package).parts[0].removesuffix(".py")
        if layer not in LAYERS:
            continue
        for name in _imports(path):
            parts = name.split(".")
            if parts[0] == "hzero" and len(parts) > 1 and parts[1] in LAYERS:
                assert LAYERS.index(parts[1]) <= LAYERS.index(layer), f"{path} imports {name}"
            if parts[0] == "deepspeed":
                assert layer in ("zero", "train"), f"{path} imports deepspeed"


def test_plans_need_neither_torch_nor_deepspeed() -> None:
    code = (
        "import sys, hzero.cli\n"
        "assert hzero.cli.main(['plan', 'model=gpt_neox_20b', 'topology=frontier', 'nodes=9408']) == 0\n"
        "assert 'torch' not in sys.modules and 'deepspeed' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "75,264 devices" in done.stdout


def test_no_file_outgrows_one_reading() -> None:
    for folder in ("hzero", "tests", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            assert len(path.read_text().splitlines()) <= 500, path
