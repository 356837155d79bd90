"""Modules depend downwards only, in imports and in strings; and plans do without DeepSpeed."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

from tests.ranks import ROOT

#: The map of layers, lowest first. A module belongs to the longest name that it starts with, and may import modules of
#: its own layer and of those before it. `hzero` alone is the package's surface, which imports the stage when asked for it.
LAYERS = [
    "hzero.validation", "hzero.arguments", "hzero.files", "hzero.block", "hzero.terminal", "hzero.formatting",
    "hzero.launch", "hzero.mpi", "hzero.bootstrap", "hzero.manifest", "hzero.stop",
    "hzero.config", "hzero.parsing",
    "hzero.topology", "hzero.sharding", "hzero.codecs", "hzero.collectives", "hzero.zero", "hzero.autoload", "hzero",
    "hzero.commands.experiment", "hzero.plan",
    "hzero.run",
    "hzero.commands",
    "hzero.cli", "hzero.__main__",
    "benchmarks", "benchmarks.training", "benchmarks.cluster", "benchmarks.rows", "benchmarks.report", "benchmarks.compare",
    "benchmarks.hybrid", "benchmarks.model", "benchmarks.host_cost", "benchmarks.kernels",
    "benchmarks.transports", "benchmarks.groups", "benchmarks.unit",
    "examples", "tests",
]  # fmt: skip

#: Layers of hzero that may import DeepSpeed.
WITH_DEEPSPEED = {"hzero.zero", "hzero.commands"}

#: What takes the name of a module as a string.
IMPORTERS = {"import_module", "__import__", "files", "importorskip", "find_spec"}


@cache
def _modules() -> dict[str, Path]:
    """Every module by its name; a package is its ``__init__``, or its folder where it has none."""
    found = {}
    for top in ("hzero", "benchmarks", "examples", "tests"):
        for path in (ROOT / top).rglob("*.py"):
            found[".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")] = path
            for folder in path.relative_to(ROOT).parents[:-1]:
                found.setdefault(".".join(folder.parts), ROOT / folder)
    return found


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text() if path.is_file() else "")


def _imports(path: Path) -> set[str]:
    """Modules that a file imports anywhere in it, functions included."""
    found = set()
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = path.relative_to(ROOT).parts[: -node.level] if node.level else ()
            module = ".".join([*package, *([node.module] if node.module else [])])
            for alias in node.names:
                name = f"{module}.{alias.name}"
                found.add(name if name in _modules() else module)
    return found


def _started(path: Path) -> set[str]:
    """Modules that a file starts or imports by their names: behind ``"-m"``, and as arguments of `IMPORTERS`."""
    strings: list[ast.expr] = []
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            strings += node.args[:1] if name in IMPORTERS else []
        items = node.args if isinstance(node, ast.Call) else getattr(node, "elts", [])
        strings += [then for flag, then in pairwise(items) if isinstance(flag, ast.Constant) and flag.value == "-m"]
    return {s.value for s in strings if isinstance(s, ast.Constant) and isinstance(s.value, str)}


def _ours(names: set[str]) -> set[str]:
    return {name for name in names if name.split(".")[0] in ("hzero", "benchmarks", "examples", "tests")}


def _layer(module: str) -> str:
    parts = module.split(".")
    # `hzero` and `benchmarks` are layers of their own, not those of everything in them.
    shortest = 0 if len(parts) == 1 or parts[0] in ("examples", "tests") else 1
    for end in range(len(parts), shortest, -1):
        if ".".join(parts[:end]) in LAYERS:
            return ".".join(parts[:end])
    pytest.fail(f"{module} is not in the map of layers")


def test_every_module_has_a_layer_and_every_layer_a_module() -> None:
    assert {_layer(module) for module in _modules()} == set(LAYERS)


def test_dependencies_go_downwards_only() -> None:
    upwards = []
    for module, path in _modules().items():
        for name in sorted(_ours(_imports(path)) | _ours(_started(path))):
            if name not in _modules():
                upwards.append(f"{module} depends on {name}, which does not exist")
            elif LAYERS.index(_layer(name)) > LAYERS.index(_layer(module)):
                upwards.append(f"{module} depends on {name}, which is above it")
        in_hzero = module.split(".")[0] == "hzero" and _layer(module) not in WITH_DEEPSPEED
        if in_hzero and any(name.split(".")[0] == "deepspeed" for name in _imports(path)):
            upwards.append(f"{module} imports deepspeed")
    assert not upwards, "\n".join(upwards)


def test_no_files_import_each_other_in_a_circle() -> None:
    graph = {module: _ours(_imports(path)) - {module} for module, path in _modules().items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("circle: " + " is imported by ".join(error.args[1]))


def _commands() -> Iterator[tuple[Path, str]]:
    """Module names behind ``-m`` and files behind ``python`` in texts, and in code as in help texts."""
    texts = [
        ROOT / "Makefile",
        ROOT / ".ci" / "run",
        *ROOT.glob("scripts/*"),
        *ROOT.glob("slurm/*"),
        *ROOT.glob("*.md"),
    ]
    for folder in ("benchmarks", "conf", "docs", "examples", "hip_kernels", "hzero", "tests"):
        texts += [
            path for kind in ("py", "md", "yaml", "h", "hip", "cpp") for path in (ROOT / folder).rglob(f"*.{kind}")
        ]
    for path in texts:
        if path.name != "CHANGELOG.md" and "reports" not in path.parts:
            for name in re.findall(r"-m ((?:hzero|benchmarks|tests)(?:\.\w+)*)", path.read_text()):
                yield path, name
            for name in re.findall(
                r"(?:python|torchrun)[^`\n]* ((?:benchmarks|examples|tests)/[\w/]+\.py)", path.read_text()
            ):
                yield path, name


def test_commands_in_texts_name_what_exists() -> None:
    missing = []
    for path, name in _commands():
        starts = (ROOT / name) if name.endswith(".py") else _modules().get(name)
        if starts is not None and starts.name == "__init__.py":
            starts = starts.with_name("__main__.py")
        if starts is None or not starts.is_file():
            missing.append(f"{path.relative_to(ROOT)}: {name}")
    assert not missing, "\n".join(missing)


def test_modules_of_checks_exist() -> None:
    """Those that tests launch on ranks are named by strings."""
    for module, path in _modules().items():
        strings = [n.value for n in ast.walk(_tree(path)) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        for name in strings:
            if re.fullmatch(r"(tests|benchmarks)(\.\w+)+", name):
                assert name in _modules(), f"{module} names {name}, which does not exist"


def test_the_installed_command_exists() -> None:
    script = re.search(r'^hzero = "([\w.]+):(\w+)"$', (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    assert script
    module, function = script.groups()
    assert any(isinstance(n, ast.FunctionDef) and n.name == function for n in _tree(_modules()[module]).body)


def test_plans_do_without_deepspeed_and_predictions_without_torch() -> None:
    code = (
        "import sys, hzero.cli, hzero.plan.command\n"
        "assert 'torch' not in sys.modules\n"
        "assert hzero.cli.main(['plan', 'model=gpt_neox_20b', 'topology=frontier', 'nodes=9408']) == 0\n"
        "assert 'deepspeed' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "75,264 devices" in done.stdout
