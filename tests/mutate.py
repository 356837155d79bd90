"""Reports which changes of the code no test sees, one change at a time; see `tests.mutants`.

    python -m tests.mutate [hzero/zero/gradients.py ...] [--count 10] [--seed 0] [--jobs 2] [-o FILE]     or: make mutants

A module has a list of tests (`TESTS`), run until one fails. Processes that `tests.forks` starts change the code in memory, so
that nothing is imported anew. Read each survivor, and add a test, or say why it makes no difference.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from tests.forks import fork, join
from tests.mutants import ROOT, VARIABLE, Mutant, all_changes, mutated
from tests.ranks import collect, launch

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


_TIERED = ("tests.collectives.tiered_checks", "tests.collectives.fault_checks")
#: Those that let no rank wait until the timeout come first.
_QUICK = tuple(name for name in collect(*_TIERED) if name != "check_everyone_ends_in_time_when_one_rank_stops")
_TRANSFERS: list[OnRanks | InProcess] = [
    OnRanks(8, _TIERED, _QUICK),
    InProcess(
        tuple(
            f"tests/collectives/test_{name}.py"
            for name in ("bucket", "feedback", "gather", "order", "trace", "checksum")
        )
    ),
    OnRanks(6, _TIERED),
    OnRanks(8, _TIERED, ("check_everyone_ends_in_time_when_one_rank_stops",)),
]
_EQUALITY = OnRanks(8, ("tests.zero.equality_checks", "tests.zero.gradient_checks"))
_FEATURES = OnRanks(8, ("tests.zero.stage_checks", "tests.zero.trace_checks"))
_RACES = OnRanks(8, ("tests.zero.race_checks", "tests.zero.delay_checks"))
_DIFFERENCES = OnRanks(8, ("tests.zero.difference_checks",))
#: Tests of a module, quickest first.
TESTS: dict[str, list[OnRanks | InProcess]] = {
    "hzero/collectives/pipeline.py": [*_TRANSFERS, _EQUALITY, _RACES],
    "hzero/collectives/trace.py": [
        InProcess(("tests/collectives/test_trace.py",)),
        OnRanks(8, ("tests.zero.trace_checks",)),
    ],
    "hzero/collectives/record": [
        InProcess(("tests/collectives/test_recorder.py", "-k", "not test_on_ranks")),
        OnRanks(4, ("tests.collectives.recorder_checks",)),
        OnRanks(8, ("tests.zero.delay_checks",)),
    ],
    "hzero/collectives/": [*_TRANSFERS, _EQUALITY],
    "hzero/zero/guard.py": [
        InProcess(("tests/zero/test_guard.py",)),
        OnRanks(8, ("tests.zero.gradient_checks",), ("check_the_guard_ends_training_that_diverges",)),
    ],
    "hzero/zero/streams.py": [_RACES],
    "hzero/zero/refusals.py": [_FEATURES],
    "hzero/zero/": [_EQUALITY, _FEATURES, _DIFFERENCES, _RACES],
    "hzero/train/checkpoint": [
        InProcess(("tests/train/test_checkpoint.py",)),
        OnRanks(8, ("tests.train.saver_checks",)),
        InProcess(("tests/train/test_main_job.py", "-k", "killed")),
    ],
}


def _pytest(arguments: Sequence[str]) -> None:
    import pytest

    sys.exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *arguments]))


def _seen_by(tests: OnRanks | InProcess, mutant: Mutant) -> str:
    """The check that fails, or an empty text."""
    environment = {VARIABLE: json.dumps(mutant), "HZERO_CHECKS_HOP_TIMEOUT_S": str(HOP_TIMEOUT_S)}
    if isinstance(tests, OnRanks):
        names = tests.names or collect(*tests.modules)
        outcomes = launch(tests.modules, tests.world_size, names, timeout=TESTS_TIMEOUT_S, **environment)
        return next((name for name, outcome in outcomes.items() if outcome.status == "failed"), "")
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
    for path in parsed.paths:
        if not Path(path).is_file() or not any(path.startswith(start) for start in TESTS):
            parser.error(f"found {path!r}, possible: files of {', '.join(TESTS)}")
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
        count = len(all_changes(ast.parse((ROOT / path).read_text())))
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
