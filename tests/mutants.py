"""Changes one operator, constant or call of the code at a time, and reports which changes no test sees.

    python -m tests.mutants [hzero/zero/gradients.py ...] [--count 10] [--seed 0] [--jobs 2] [-o FILE]     or: make mutants

A module has a list of tests (`TESTS`), run until one fails. The code is changed in memory: `apply` replaces the code of
functions in processes that `tests.forks` starts, so that nothing is imported anew. Survivors are changes that no test sees:
read each, and add a test, or say why it makes no difference.
"""

from __future__ import annotations

import argparse
import ast
import gc
import importlib
import itertools
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
VARIABLE = "HZERO_MUTANT"
#: Of a collective of a mutant's ranks, and of all of its tests, in seconds.
HOP_TIMEOUT_S, TESTS_TIMEOUT_S = 20, 240


class OnRanks(NamedTuple):
    """Checks on ranks, as `tests.ranks.launch` takes them; all of the modules where no names are given."""

    world_size: int
    modules: tuple[str, ...]
    names: tuple[str, ...] = ()


class InProcess(NamedTuple):
    """Arguments of pytest."""

    arguments: tuple[str, ...]


_TIERED: list[OnRanks | InProcess] = [
    OnRanks(8, ("tests.collectives.tiered_checks",)),
    OnRanks(6, ("tests.collectives.tiered_checks",)),
]
_UNIT: list[OnRanks | InProcess] = [
    InProcess(
        ("tests/collectives/test_gather.py", "tests/collectives/test_order.py", "tests/collectives/test_trace.py")
    )
]
_STAGE: list[OnRanks | InProcess] = [
    OnRanks(8, ("tests.zero.equality_checks", "tests.zero.gradient_checks")),
    OnRanks(8, ("tests.zero.stage_checks", "tests.zero.trace_checks")),
    OnRanks(8, ("tests.zero.race_checks", "tests.zero.delay_checks")),
]
#: Tests of a module, quickest first.
TESTS: dict[str, list[OnRanks | InProcess]] = {
    "hzero/collectives/pipeline.py": [*_UNIT, *_TIERED[:1], *_STAGE],
    "hzero/collectives/trace.py": [*_UNIT, OnRanks(8, ("tests.zero.trace_checks",))],
    "hzero/collectives/": [*_UNIT, *_TIERED, _STAGE[0]],
    "hzero/zero/guard.py": [
        InProcess(("tests/zero/test_guard.py",)),
        OnRanks(8, ("tests.zero.gradient_checks",), ("check_the_guard_ends_training_that_diverges",)),
    ],
    "hzero/zero/": _STAGE,
    "hzero/train/": [InProcess(("tests/train", "--deselect", "tests/train/test_main_job.py"))],
}


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
        if field in ("annotation", "returns", "decorator_list"):
            continue
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


def _all_changes(tree: ast.Module) -> list[tuple[ast.AST, Callable[[], None]]]:
    """Changes inside functions, in the order of the file. The others take effect at import alone."""

    def functions(body: Sequence[ast.stmt]) -> Iterator[ast.FunctionDef]:
        for node in body:
            if isinstance(node, ast.FunctionDef):
                yield node
            elif isinstance(node, ast.ClassDef):
                yield from functions(node.body)

    return [change for function in functions(tree.body) for change in _changes(function)]


def mutated(mutant: Mutant) -> tuple[ast.Module, int, str]:
    """The changed tree, the line, and the statement as it reads after the change."""
    tree = ast.parse((ROOT / mutant.path).read_text())
    where, change = _all_changes(tree)[mutant.place]
    line = where.lineno  # type: ignore[attr-defined]
    statement = min(
        (n for n in ast.walk(tree) if isinstance(n, ast.stmt) and n.lineno <= line <= (n.end_lineno or 0)),
        key=lambda n: ((n.end_lineno or 0) - n.lineno, -n.lineno),
    )
    before = ast.unparse(statement).splitlines()[0]
    change()
    ast.fix_missing_locations(tree)
    if statement is where:  # was replaced
        return tree, line, f"`{before}` → `{'return None' if isinstance(where, ast.Return) else 'pass'}`"
    after = ast.unparse(statement).splitlines()[0]
    return tree, line, f"`{before}` → `{after}`" if before != after else f"`{before}` (below its first line)"


def apply(text: str) -> None:
    """Replaces the code of one function in this process, as the variable `VARIABLE` says."""
    mutant = Mutant(*json.loads(text))
    tree, _, _ = mutated(mutant)
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


# ---- tests -------------------------------------------------------------------------------------------------------


def _pytest(arguments: Sequence[str]) -> None:
    import pytest

    sys.exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *arguments]))


def _seen_by(tests: OnRanks | InProcess, mutant: Mutant) -> str:
    """The check that fails, or an empty text."""
    environment = {VARIABLE: json.dumps(mutant), "HZERO_CHECKS_HOP_TIMEOUT_S": str(HOP_TIMEOUT_S)}
    if isinstance(tests, OnRanks):
        from tests.ranks import collect, launch

        names = tests.names or collect(*tests.modules)
        outcomes = launch(tests.modules, tests.world_size, names, timeout=TESTS_TIMEOUT_S, **environment)
        return next((name for name, outcome in outcomes.items() if outcome.status == "failed"), "")
    from tests.forks import fork, join

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        process = fork(_pytest, tests.arguments, folder=ROOT, env=environment, out=out, err=out)
        join(process, TESTS_TIMEOUT_S)
        return "" if process.exitcode == 0 else tests.arguments[0]


def _tests_of(path: str) -> list[OnRanks | InProcess]:
    return next(tests for start, tests in TESTS.items() if path.startswith(start))


def _try(mutant: Mutant) -> dict[str, Any]:
    started = time.monotonic()
    _, line, text = mutated(mutant)
    by = next(filter(None, (_seen_by(tests, mutant) for tests in _tests_of(mutant.path))), "")
    return {
        "path": mutant.path,
        "place": mutant.place,
        "line": line,
        "change": text,
        "seen_by": by,
        "seconds": round(time.monotonic() - started, 1),
    }


def main() -> int:
    """Parses arguments, tries the mutants, prints and writes a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "paths", nargs="*", help="modules (default: hzero/collectives, hzero/zero, hzero/train/checkpoint*.py)"
    )
    parser.add_argument("--count", type=int, default=10, help="changes of each module (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="chooses them (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="changes tried at once (default: %(default)s)")
    parser.add_argument(
        "-o", "--out", type=Path, help="file of rows, one JSON object per change; those in it are not tried again"
    )
    parsed = parser.parse_args()
    os.chdir(ROOT)
    paths = parsed.paths or [
        str(path.relative_to(ROOT))
        for pattern in ("collectives/*.py", "zero/*.py", "train/checkpoint*.py")
        for path in sorted((ROOT / "hzero").glob(pattern))
        if path.name != "__init__.py"
    ]
    done: list[dict[str, Any]] = []
    if parsed.out and parsed.out.exists():
        done = [json.loads(line) for line in parsed.out.read_text().splitlines()]
    mutants = []
    for path in paths:
        count = len(_all_changes(ast.parse((ROOT / path).read_text())))
        chosen = random.Random(f"{parsed.seed} {path}").sample(range(count), min(parsed.count, count))
        mutants += [Mutant(path, index) for index in sorted(chosen)]
    tried = {(row["path"], row["place"]) for row in done}
    left = [mutant for mutant in mutants if mutant not in tried]
    with ThreadPoolExecutor(parsed.jobs) as pool:
        for number, row in enumerate(pool.map(_try, left), len(mutants) - len(left) + 1):
            done.append(row)
            said = f"seen by {row['seen_by']}" if row["seen_by"] else "SURVIVES"
            print(
                f"{number}/{len(mutants)}  {row['path']}:{row['line']}  {row['change']}  {said}  {row['seconds']:.0f} s",
                flush=True,
            )
            if parsed.out:
                with open(parsed.out, "a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    survivors = [row for row in done if not row["seen_by"]]
    for path, rows in itertools.groupby(done, key=lambda row: row["path"]):
        group = list(rows)
        print(f"{path}: {sum(bool(row['seen_by']) for row in group)} of {len(group)} seen")
    print(f"{len(done) - len(survivors)} of {len(done)} changes are seen by a test")
    return 0


if __name__ == "__main__":
    sys.exit(main())
