"""Modules of hzero import downwards only, and commands in texts name what exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from tests.ranks import ROOT, run_python

#: The engine's folders and files, lowest first; tools are above them. A module belongs to the longest name that it starts with,
#: and imports modules of its own layer and of those before it. `hzero` alone is the package's surface, which imports the stage
#: when asked for it.
LAYERS = [
    "hzero.errors", "hzero.calls", "hzero.schema", "hzero.files", "hzero.block", "hzero.manifest", "hzero.stop",
    "hzero.codecs.formats", "hzero.config",
    "hzero.topology", "hzero.program", "hzero.codecs", "hzero.comm", "hzero.sequence", "hzero.engine",
    "hzero.fsdp", "hzero.deepspeed", "hzero.autoload", "hzero",
    "hzero.tools.terminal", "hzero.tools.launch", "hzero.tools.experiment", "hzero.tools.data", "hzero.tools.plan",
    "hzero.run", "hzero.tools.commands", "hzero.tools.cli", "hzero.tools", "hzero.__main__",
]  # fmt: skip
#: Layers that may import DeepSpeed.
WITH_DEEPSPEED = {"hzero.deepspeed", "hzero.tools.commands"}


@cache
def _modules() -> dict[str, Path]:
    """Every module by its name; a package is its ``__init__``."""
    paths = [path for top in ("hzero", "benchmarks", "tests") for path in (ROOT / top).rglob("*.py")]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def _imports(path: Path) -> set[str]:
    """Modules that a file imports anywhere in it, functions included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in _modules() else node.module for name in names}
    return found


def _layer(module: str) -> int:
    """Its place in `LAYERS`; `hzero` is a layer of its own, not that of everything in it."""
    found = [name for name in LAYERS if module == name or (name != "hzero" and module.startswith(f"{name}."))]
    assert found, f"{module} is not in the map of layers"
    return LAYERS.index(max(found, key=len))


def test_dependencies_go_downwards_only() -> None:
    upwards = []
    for module, path in _modules().items():
        if not module.startswith("hzero"):
            continue
        imports = _imports(path)
        for name in (name for name in imports if name.split(".")[0] in ("hzero", "benchmarks", "tests")):
            if not name.startswith("hzero") or _layer(name) > _layer(module):
                upwards.append(f"{module} depends on {name}, which is above it")
        if LAYERS[_layer(module)] not in WITH_DEEPSPEED and any(name.split(".")[0] == "deepspeed" for name in imports):
            upwards.append(f"{module} imports deepspeed")
    assert not upwards, "\n".join(upwards)


def test_no_files_import_each_other() -> None:
    """Not in functions either. Files without imports of remaining files are taken away until only circles are left."""
    remaining = {name: _imports(path) - {name} for name, path in _modules().items() if name.startswith("hzero")}
    while leaves := [name for name, imports in remaining.items() if not imports & remaining.keys()]:
        for name in leaves:
            del remaining[name]
    assert not remaining, f"in circles, or above them: {sorted(remaining)}"


def test_the_engine_loads_no_tool() -> None:
    code = "import sys, hzero.deepspeed, hzero.fsdp; print([name for name in sys.modules if name.startswith('hzero.tools')])"
    done = run_python("-c", code)
    assert done.stdout.splitlines()[-1:] == ["[]"], done


def test_commands_in_texts_name_what_exists() -> None:
    """Module names after ``-m`` and files after ``python``, in texts and in code as in help texts."""
    texts = [path for pattern in ("Makefile", ".ci/run", "scripts/*", "slurm/*", "*.md") for path in ROOT.glob(pattern)]
    for folder in ("benchmarks", "conf", "docs", "examples", "hip_kernels", "hzero", "tests"):
        texts += [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md", ".yaml")]
    missing = []
    for path in (path for path in texts if path.name != "CHANGELOG.md" and "reports" not in path.parts):
        text = path.read_text()
        for name in re.findall(r"-m ((?:hzero|benchmarks|tests)(?:\.\w+)*)", text):
            package = name in _modules() and _modules()[name].name == "__init__.py"
            if (f"{name}.__main__" if package else name) not in _modules():
                missing.append(f"{path.relative_to(ROOT)}: {name}")
        for name in re.findall(r"(?:python|torchrun)[^`\n]* ((?:benchmarks|examples|tests)/[\w/]+\.py)", text):
            if not (ROOT / name).is_file():
                missing.append(f"{path.relative_to(ROOT)}: {name}")
    assert not missing, "\n".join(missing)


def test_plans_do_without_deepspeed_and_predictions_without_torch() -> None:
    code = (
        "import sys, hzero.tools.cli, hzero.tools.plan.command\n"
        "assert 'torch' not in sys.modules\n"
        "assert hzero.tools.cli.main(['plan', 'model=gpt_neox_20b', 'topology=frontier', 'nodes=9408']) == 0\n"
        "assert 'deepspeed' not in sys.modules\n"
    )
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    assert "75,264 devices" in done.stdout
