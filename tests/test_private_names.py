"""Every private name of another package that hzero touches is in the table of tests/private_names.md, with its reason."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.ranks import ROOT

FILES = [*(ROOT / "hzero").rglob("*.py"), ROOT / "hzero_autoload.py"]
#: Functions whose second argument names an attribute; methods of a namedtuple, and a part of a key.
BY_NAME, PUBLIC = {"getattr", "hasattr", "setattr", "delattr"}, {"_replace", "_asdict", "_ll"}
OWN = ("self", "cls")
PACKAGES = ("torch", "deepspeed", "transformers", "accelerate")


def _private(name: str) -> bool:
    return re.fullmatch(rf"_[^\W_]\w*|({'|'.join(PACKAGES)})(\.\w+)*\._\w+(\.\w+)*", name) is not None


def _names(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """Names that a file uses of objects and modules, and whether of an object of its own class."""
    endings = {id(one) for node in ast.walk(tree) if _called(node) == "endswith" for one in node.args}  # type: ignore[attr-defined]
    for node in ast.walk(tree):
        named: list[ast.expr | None] = []
        of_self = False
        if isinstance(node, ast.Attribute):
            if _owner(node) not in sys.stdlib_module_names:
                yield node.attr, _owner(node) in OWN
        elif isinstance(node, ast.ImportFrom):
            yield f"{node.module}", False
            yield from ((one.name, False) for one in node.names)
        elif isinstance(node, ast.Import):
            yield from ((one.name, False) for one in node.names)
        elif _called(node) in BY_NAME:
            named = [*node.args[1:2]]  # type: ignore[attr-defined]
        elif isinstance(node, (ast.Tuple, ast.List, ast.Set)) and id(node) not in endings:
            named = [*node.elts]
            of_self = any(isinstance(one, ast.Name) and one.id in OWN for one in node.elts)
        elif isinstance(node, ast.Dict):
            named = node.keys
        yield from (
            (one.value, of_self) for one in named if isinstance(one, ast.Constant) and isinstance(one.value, str)
        )


def _owner(node: ast.Attribute) -> str:
    return node.value.id if isinstance(node.value, ast.Name) else ""


def _called(node: ast.AST) -> str:
    """Name of the function or method that a node calls."""
    function = node.func if isinstance(node, ast.Call) else None
    return str(getattr(function, "id", getattr(function, "attr", "")))


def _defined(tree: ast.AST) -> tuple[set[str], set[str]]:
    """Names of functions, classes and variables of a file, and names of attributes of its own classes."""
    found, attributes = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _owner(node) in OWN:
            attributes.add(node.attr)
    return found, attributes


def _overridden(path: Path, defined: set[str]) -> set[str]:
    """Private names that the classes of a file replace in classes of other packages."""
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    found = set()
    for one in vars(module).values():
        if inspect.isclass(one) and one.__module__ == module.__name__:
            theirs = [base for base in one.__mro__ if base.__module__.split(".")[0] in PACKAGES]
            found |= {name for name in defined & vars(one).keys() if any(name in vars(base) for base in theirs)}
    return found


def test_every_private_name_is_in_the_table() -> None:
    trees = {path: ast.parse(path.read_text()) for path in FILES}
    defined = {path: _defined(tree) for path, tree in trees.items()}
    ours = set().union(*(one for both in defined.values() for one in both))
    used = defaultdict(set)
    for path, tree in trees.items():
        derives = any(isinstance(node, ast.ClassDef) and node.bases for node in ast.walk(tree))
        overridden = _overridden(path, defined[path][0]) if derives else set()
        for name, of_self in [*_names(tree), *((name, False) for name in overridden)]:
            own = name in defined[path][0] or (of_self and name in ours)
            if _private(name) and name not in PUBLIC and (name in overridden or not own):
                used[name].add(str(path.relative_to(ROOT)))
    text = (ROOT / "tests/private_names.md").read_text()
    listed = {name for row in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE) for name in re.findall(r"`(.+?)`", row)}
    added = {name: sorted(used[name]) for name in sorted(used.keys() - listed)}
    assert not added, f"not in the table: {added}"
    assert not listed - used.keys(), f"in the table, but not used: {sorted(listed - used.keys())}"
