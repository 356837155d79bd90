"""Changes of the code, one operator, constant or call at a time, applied to the functions of a process in memory."""

from __future__ import annotations

import ast
import gc
import importlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
#: What names the change of a process.
VARIABLE = "HZERO_MUTANT"


class Mutant(NamedTuple):
    """One change.

    Attributes:
        path: The file, from the root of the repository.
        place: Its place among all changes of the file.
    """

    path: str
    place: int


# ---- changes -----------------------------------------------------------------------------------------------------

_SWAPPED: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
#: Messages and annotations are not changed.
_LEFT_ALONE = (ast.Raise, ast.JoinedStr, ast.Assert)


def _changes(node: ast.AST) -> Iterator[tuple[ast.AST, Callable[[], None]]]:
    """Every possible change below a node: where, and what makes it."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "defaults", "kw_defaults"):
            continue  # what takes effect before a call; defaults are no part of the code
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, _LEFT_ALONE):
                continue
            yield from _changes_of(node, field, child)
            yield from _changes(child)


def _changes_of(parent: ast.AST, field: str, node: Any) -> Iterator[tuple[ast.AST, Callable[[], None]]]:
    def replace(new: ast.AST) -> Callable[[], None]:
        def change() -> None:
            value = getattr(parent, field)
            if isinstance(value, list):
                value[next(i for i, one in enumerate(value) if one is node)] = ast.copy_location(new, node)
            else:
                setattr(parent, field, ast.copy_location(new, node))

        return change

    def swap(owner: Any, name: str, old: Any) -> Callable[[], None]:
        return lambda: setattr(owner, name, _SWAPPED[type(old)]())

    if isinstance(node, ast.Compare) and type(node.ops[0]) in _SWAPPED:
        yield node, lambda: node.ops.__setitem__(0, _SWAPPED[type(node.ops[0])]())
    elif isinstance(node, (ast.BinOp, ast.AugAssign, ast.BoolOp)) and type(node.op) in _SWAPPED:
        yield node, swap(node, "op", node.op)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node, replace(node.operand)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield node, replace(ast.Constant(not node.value))
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield node, replace(ast.Constant(node.value + 1))
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield node, replace(ast.Pass())
    elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        yield node, replace(ast.Return(ast.Constant(None)))
    if field == "test" and isinstance(parent, (ast.If, ast.IfExp, ast.While)):
        yield node, replace(ast.UnaryOp(ast.Not(), node))


def all_changes(tree: ast.Module) -> list[tuple[ast.AST, Callable[[], None]]]:
    """Changes inside functions, in the order of the file. The others take effect at import alone."""

    def functions(body: Sequence[ast.stmt]) -> Iterator[ast.FunctionDef]:
        for node in body:
            if isinstance(node, ast.FunctionDef):
                yield node
            elif isinstance(node, ast.ClassDef):
                yield from functions(node.body)

    return [change for function in functions(tree.body) for change in _changes(function)]


class Change(NamedTuple):
    """A mutant in full.

    Attributes:
        tree: The changed file.
        line: Where it is changed.
        lines: Those of the statement that is changed, of a compound one its head.
        text: The statement as it reads before and after.
    """

    tree: ast.Module
    line: int
    lines: range
    text: str


def mutated(mutant: Mutant) -> Change:
    """Makes the change."""
    tree = ast.parse((ROOT / mutant.path).read_text())
    where, change = all_changes(tree)[mutant.place]
    line = where.lineno  # type: ignore[attr-defined]
    statement = min(
        (n for n in ast.walk(tree) if isinstance(n, ast.stmt) and n.lineno <= line <= (n.end_lineno or 0)),
        key=lambda n: ((n.end_lineno or 0) - n.lineno, -n.lineno),
    )
    body = getattr(statement, "body", None)
    last = body[0].lineno - 1 if isinstance(body, list) else statement.end_lineno or statement.lineno
    lines = range(statement.lineno, max(last, statement.lineno) + 1)
    before = ast.unparse(statement).splitlines()[0]
    change()
    ast.fix_missing_locations(tree)
    if statement is where:  # was replaced
        after = "return None" if isinstance(where, ast.Return) else "pass"
    else:
        after = ast.unparse(statement).splitlines()[0]
    text = f"`{before}` → `{after}`" if before != after else f"`{before}` (below its first line)"
    return Change(tree, line, lines, text)


def apply(text: str) -> None:
    """Replaces the code of one function in this process, as the variable `VARIABLE` says."""
    mutant = Mutant(*json.loads(text))
    tree = mutated(mutant).tree
    module = importlib.import_module(mutant.path.removesuffix(".py").replace("/", "."))
    codes = dict(_codes(compile(tree, str(ROOT / mutant.path), "exec"), ""))
    for found in gc.get_objects():
        if isinstance(found, FunctionType) and found.__module__ == module.__name__:
            new = codes.get((found.__qualname__.replace("<locals>.", ""), found.__code__.co_firstlineno))
            if new is not None and new.co_freevars == found.__code__.co_freevars:
                found.__code__ = new


def _codes(code: CodeType, prefix: str) -> Iterator[tuple[tuple[str, int], CodeType]]:
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            name = f"{prefix}{inner.co_name}"
            yield (name, inner.co_firstlineno), inner
            yield from _codes(inner, f"{name}.")
