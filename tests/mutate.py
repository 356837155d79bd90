"""Reports which changes of the code no test sees, one change at a time; see `tests.mutants`.

    python -m tests.mutate [hzero/zero/gradients.py ...] [--count 10] [--seed 0] [--jobs 2] [-o FILE]     or: make mutants

First all tests are run with coverage, for some minutes. Then a change is tried on those that run its lines, the nearest and
quickest first, until one fails. Processes that `tests.forks` starts change the code in memory, so that nothing is imported
anew. Read each survivor, and add a test, or say why it makes no difference.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from tests.covered import COVERAGE, covered, lines_by_test
from tests.forks import fork, join
from tests.mutants import ROOT, VARIABLE, Mutant, all_changes, mutated
from tests.ranks import Outcome, collect, launch

#: Of a collective of a mutant's ranks, of all tests that share ranks, and of these with coverage, in seconds.
HOP_TIMEOUT_S, TESTS_TIMEOUT_S, COVERAGE_TIMEOUT_S = 20, 120, 1800
#: Up to so many seconds with coverage a test is quick: a file of tests, a check on ranks.
QUICK_FILE_S, QUICK_CHECK_S = 15.0, 4.0
#: Checks of the first launch.
FIRST_CHECKS = 3


class OnRanks(NamedTuple):
    """Checks that share ranks, as `tests.ranks.launch` takes them; ``of`` as for `InProcess`."""

    world_size: int
    modules: tuple[str, ...]
    names: tuple[str, ...]
    of: str = "no module"


class InProcess(NamedTuple):
    """Arguments of pytest; ``of`` begins the paths of modules run where no coverage sees them: other processes, old threads."""

    arguments: tuple[str, ...]
    of: str = "no module"


class Covered(NamedTuple):
    """What one test runs.

    Attributes:
        seconds: Its time.
        lines: Lines that it runs, by file.
    """

    seconds: float
    lines: Mapping[str, Set[int]]


def _world(world_size: int, *modules: str, of: str = "no module") -> OnRanks:
    return OnRanks(world_size, modules, tuple(collect(*modules)), of)


def _collectives(*names: str) -> tuple[str, ...]:
    return tuple(f"tests.collectives.{name}_checks" for name in names)


LAUNCHES = [
    _world(8, *_collectives("tiered", "fault", "communicator", "ddp")),
    _world(6, *_collectives("tiered", "fault", "communicator", "ddp")),
    _world(4, *_collectives("recorder"), of="hzero/collectives/record"),
    _world(6, "tests.zero.equality_checks"),
    _world(
        8,
        *(
            f"tests.zero.{name}_checks"
            for name in (
                "equality",
                "stage",
                "refusal",
                "gradient",
                "difference",
                "exponent",
                "audit",
                "race",
                "delay",
                "trace",
            )
        ),
        "tests.train.saver_checks",
    ),
    *(OnRanks(1, ("tests.zero.single_checks",), (name,)) for name in collect("tests.zero.single_checks")),
]
FILES = [
    *(
        InProcess((f"tests/collectives/test_{name}.py",))
        for name in ("bucket", "feedback", "gather", "order", "trace", "checksum", "moves")
    ),
    InProcess(("tests/collectives/test_recorder.py", "-k", "not test_on_ranks"), "hzero/collectives/record"),
    InProcess(("tests/zero/test_guard.py",)),
    InProcess(("tests/zero/test_adoption.py",), "hzero/zero/install.py"),
    *(InProcess((f"tests/train/test_{name}.py",)) for name in ("checkpoint", "reshard", "loop")),
    InProcess(("tests/train/test_main_job.py", "-k", "killed"), "hzero/train/checkpoint"),
]
_Test = tuple[OnRanks | InProcess, str]


def _pytest(arguments: Sequence[str], record: str = "") -> None:
    import pytest

    with covered(record, arguments[0]):
        status = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *arguments])
    sys.exit(status)


def _run(
    tests: OnRanks | InProcess, names: Sequence[str], timeout: float, environment: dict[str, str]
) -> dict[str, Outcome]:
    if isinstance(tests, OnRanks):
        return launch(tests.modules, tests.world_size, names, timeout=timeout, **environment)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        record = environment.get(COVERAGE, "")
        process = fork(_pytest, tests.arguments, record, folder=ROOT, env=environment, out=out, err=out)
        join(process, timeout)
        status, why = ("passed", "") if process.exitcode == 0 else ("failed", out.read_text())
    return {tests.arguments[0]: Outcome(status, why, time.monotonic() - started)}


def _measure(known: Path | None) -> dict[_Test, Covered]:
    """What every test runs, without a change of the code. What the file ``known`` has is not run again; it keeps the rest."""
    everything: list[OnRanks | InProcess] = [*FILES, *LAUNCHES]
    rows = [json.loads(row) for row in known.read_text().splitlines()] if known and known.exists() else []
    for number, tests in enumerate(everything):
        if any(row["of"] == number for row in rows):
            continue
        print(f"what tests run: {number + 1}/{len(everything)}", flush=True)
        names = tests.names if isinstance(tests, OnRanks) else tests.arguments[:1]
        with tempfile.TemporaryDirectory() as folder:
            outcomes = _run(tests, names, COVERAGE_TIMEOUT_S, {COVERAGE: f"{folder}/data"})
            lines = lines_by_test(Path(folder))
        for name, outcome in outcomes.items():
            if outcome.status == "failed":
                sys.exit(f"mutate: {name} fails without a change:\n{outcome.why}")
            rows.append({"of": number, "name": name, "seconds": outcome.seconds, "lines": lines.get(name, {})})
        if known:
            known.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        (everything[row["of"]], row["name"]): Covered(
            row["seconds"], {file: set(lines) for file, lines in row["lines"].items()}
        )
        for row in rows
    }


def _rounds(
    mutant: Mutant, lines: range, tests: Mapping[_Test, Covered], limit_s: float
) -> Iterator[tuple[OnRanks | InProcess, list[str]]]:
    """Tests that run one of the lines, in the order in which they are worth their time.

    Those that run little beside the changed file come before those that run much, up to ``limit_s`` seconds in all; of these
    first the quick ones.
    """
    path = str(ROOT / mutant.path)

    def focus(test: _Test) -> float:
        of_all = tests[test].lines
        return len(of_all.get(path, ())) / max(sum(map(len, of_all.values())), 1)

    near = [
        test
        for test, one in tests.items()
        if not one.lines.get(path, set()).isdisjoint(lines) or mutant.path.startswith(test[0].of)
    ]
    near.sort(key=focus, reverse=True)
    kept, total = [], 0.0
    for test in near:
        if not kept or total + tests[test].seconds <= limit_s:
            kept.append(test)
            total += tests[test].seconds
    for quick in (True, False):
        files, checks = [], []
        for test in kept:
            where, name = test
            if (tests[test].seconds <= (QUICK_CHECK_S if isinstance(where, OnRanks) else QUICK_FILE_S)) == quick:
                (checks if isinstance(where, OnRanks) else files).append(test)
        if quick and files:
            yield InProcess((*(name for _, name in files), "-k", "not test_on_ranks")), [name for _, name in files]
        else:
            yield from ((where, [name]) for where, name in files)
        first = [test for test in checks if test[0] == checks[0][0]][:FIRST_CHECKS] if quick else []
        by_world: dict[OnRanks | InProcess, list[str]] = {}
        for where, name in checks:
            if (where, name) not in first:
                by_world.setdefault(where, []).append(name)
        if first:
            yield first[0][0], [name for _, name in first]
        yield from by_world.items()


def _seen_by(mutant: Mutant, lines: range, tests: Mapping[_Test, Covered], limit_s: float) -> tuple[str, str]:
    """The test that fails and how, or empty texts. Those that run none of the lines cannot see the change, and are not run."""
    environment = {VARIABLE: json.dumps(mutant), "HZERO_CHECKS_HOP_TIMEOUT_S": str(HOP_TIMEOUT_S)}
    for where, names in _rounds(mutant, lines, tests, limit_s):
        for name, outcome in _run(where, names, TESTS_TIMEOUT_S, environment).items():
            if outcome.status == "failed":
                why = outcome.why.strip()
                failed = re.search(r"^FAILED (\S+)", why, re.M)
                return failed[1] if failed else name, why.rpartition("\n")[2]
    return "", ""


def _try(mutant: Mutant, tests: Mapping[_Test, Covered], limit_s: float) -> dict[str, Any]:
    started = time.monotonic()
    change = mutated(mutant)
    by, how = _seen_by(mutant, change.lines, tests, limit_s)
    return {
        "path": mutant.path,
        "place": mutant.place,
        "line": change.line,
        "change": change.text,
        "seen_by": by,
        "how": how[:300],
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
        "--seconds",
        type=float,
        default=60.0,
        help="of tests that a change is tried on, those nearest to it (default: %(default)g); inf tries all that run its lines",
    )
    parser.add_argument(
        "-o",
        "--out",
        type=Path,
        help="FILE.jsonl of rows, one JSON object per change; those in it are not tried again, and FILE.tests.jsonl "
        "beside it keeps what tests run: for one commit alone",
    )
    parsed = parser.parse_args()
    os.chdir(ROOT)
    possible = [
        str(path.relative_to(ROOT))
        for pattern in ("collectives/*.py", "zero/*.py", "train/checkpoint*.py")
        for path in sorted((ROOT / "hzero").glob(pattern))
        if path.name != "__init__.py"
    ]
    for path in parsed.paths:
        if path not in possible:
            parser.error(f"found {path!r}, possible: {', '.join(possible)}")
    paths = parsed.paths or possible
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
    tests = _measure(parsed.out and parsed.out.with_suffix(".tests.jsonl"))
    with ThreadPoolExecutor(parsed.jobs) as pool:
        rows = pool.map(lambda mutant: _try(mutant, tests, parsed.seconds), left)
        for number, row in enumerate(rows, len(mutants) - len(left) + 1):
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
