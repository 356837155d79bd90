"""Trains while ranks are killed and frozen, disks fill and files tear, and compares the losses with an undisturbed run.

A fault strikes at a moment drawn by the seed. The same command then resumes (``resume=auto``) until the run is finished.
Its losses must be those of the undisturbed run, step by step and to the last bit, and so for run after run until all
faults have struck. Every fault leaves a row; the report has a table of them.

    python -m benchmarks.soak [--faults 200] [--seed 0] [-o runs/soak]      or: make soak ARGS="--faults 20"
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import importlib
import json
import os
import platform
import random
import re
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import psutil

from benchmarks.faults import (
    ANEW,
    EVERY,
    ON_FILES,
    ON_PROCESSES,
    RANKS,
    RESUME,
    STEPS,
    TIMEOUT_S,
    WHENS,
    Command,
    moment,
    schedule,
    small_disk,
    steps_of,
)
from hzero.progress import Progress
from hzero.train.checkpoint import NOTE
from hzero.train.folder import CHECKPOINTS, SUMMARY
from hzero.train.worker import RANK_IMPORTS


@dataclass(frozen=True)
class Outcome:
    """What came of one fault.

    Attributes:
        number: Place of the fault in the sequence.
        fault: Its kind, a name of `FAULTS`.
        when: The moment at which it struck, one of `WHENS`.
        step: Last step in the metrics at that moment.
        exit: Exit status of the command that was struck; None where the next one, after a change of files, went on to the end.
        noticed_s: Seconds until that command had ended.
        repeated: Steps that were done again, since they came after the newest checkpoint.
        message: Last lines that the user saw, of the command that was struck or, for files, of the next one.
    """

    number: int
    fault: str
    when: str
    step: int
    exit: int | None
    noticed_s: float
    repeated: int
    message: str


class Soak:
    """Strikes one run after another with faults until all have struck."""

    def __init__(self, root: Path, faults: list[tuple[str, str]], chance: random.Random) -> None:
        self._root, self._faults, self._chance = root, collections.deque(faults), chance
        self._disk, self._cache = root / "disk", root / "cache"
        self._count, self._runs = len(faults), 0
        self._mode = RESUME
        self.outcomes: list[Outcome] = []
        self.differing: list[str] = []
        self.unnamed: list[str] = []

    def undisturbed(self) -> tuple[dict[int, float | None], float]:
        """Losses by step of a run that nothing disturbs, and its seconds."""
        started = time.monotonic()
        command = self._start(self._root / "undisturbed")
        if command.wait():
            raise RuntimeError(f"the undisturbed run failed:\n{command.said(20)}")
        return steps_of(command.run), time.monotonic() - started

    def run(self, want: dict[int, float | None]) -> Iterator[Outcome]:
        """Yields the outcome of each fault."""
        while self._faults:
            self._runs += 1
            run = self._disk / f"run-{self._runs}"
            while not (run / SUMMARY).exists() or json.loads((run / SUMMARY).read_text())["status"] != "finished":
                yield from self._life(run)
            got = steps_of(run)
            if got != want:
                steps = [step for step in want if got.get(step, "missing") != want[step]]
                self.differing.append(f"{run.name}: other losses at steps {steps}")
            shutil.rmtree(run)

    def _life(self, run: Path) -> Iterator[Outcome]:
        """One command from its start to its end, struck by the next fault that fits."""
        command = self._start(run)
        whole = list((run / CHECKPOINTS).glob(f"step_*/{NOTE}"))
        fault = self._next(files=bool(whole))
        if fault is None:
            if command.wait() and not self._to_start_anew(command.said()):
                raise RuntimeError(f"a run that nothing disturbed failed:\n{command.said(20)}")
            return
        kind, when = fault
        if not moment("step" if kind in ON_FILES else when, command, self._chance):
            self._faults.append(fault)  # the command ended before
            if command.wait() and not self._to_start_anew(command.said()):
                raise RuntimeError(f"a run failed before {kind} struck:\n{command.said(20)}")
            return
        number, struck = len(self.outcomes) + 1, time.monotonic()
        exit_status: int | None
        if kind in ON_PROCESSES:
            rank = None
            with contextlib.suppress(ValueError, psutil.NoSuchProcess):  # the last rank has just ended
                rank = ON_PROCESSES[kind](command, self._chance)
            step = max(steps_of(run), default=0)
            exit_status, seconds = command.wait(), time.monotonic() - struck
            message = command.said()
            if exit_status and rank is not None and not re.search(rf"rank {rank}\b|ranks \[(\d, )*{rank}\b", message):
                self.unnamed.append(f"{run.name}: {kind}, {when}: rank {rank} is not named in:\n{message}")
            self._no_rank_lives_on(run)
            saved = max((int(path.parent.name[5:]) for path in (run / CHECKPOINTS).glob(f"step_*/{NOTE}")), default=0)
        else:
            command.process.kill()
            command.wait()
            self._no_rank_lives_on(run)
            step = max(steps_of(run), default=0)
            ON_FILES[kind](run, self._cache, self._chance)
            struck = time.monotonic()
            command = self._start(run)  # which must notice
            while command.poll() is None and not command.resumed():
                time.sleep(0.005)
            seconds, message, saved = time.monotonic() - struck, command.said(), command.began_after()
            exit_status = command.wait() or None
            self._to_start_anew(message)
        outcome = Outcome(number, kind, when, step, exit_status, seconds, max(0, step - saved), message)
        self.outcomes.append(outcome)
        yield outcome

    def _start(self, run: Path) -> Command:
        mode, self._mode = self._mode, RESUME
        return Command(run, self._cache, self._root / "command.log", mode)

    def _to_start_anew(self, message: str) -> bool:
        """Whether a command was refused since no checkpoint is left. The next one does as it says, as a user would."""
        refused = f"{ANEW} instead of resume" in message
        self._mode = ANEW if refused else self._mode
        return refused

    def _next(self, files: bool) -> tuple[str, str] | None:
        for index, (kind, _) in enumerate(self._faults):
            if files or kind not in ON_FILES or kind.startswith("cache"):
                fault = self._faults[index]
                del self._faults[index]
                return fault
        return None

    def _no_rank_lives_on(self, run: Path) -> None:
        deadline = time.monotonic() + 10
        while left := [p.pid for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{run.name}: processes {left} live on after their command has ended")
            time.sleep(0.05)


def report_of(outcomes: list[Outcome], runs: int, undisturbed_s: float, seconds: float, seed: int, disk: bool) -> str:
    """The report, as Markdown."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("hzero", "torch", "deepspeed"))
    machine = f"{os.cpu_count()} cores, {platform.platform()}, Python {platform.python_version()}"
    lines = [
        "# Soak: training under faults",
        "",
        f"{datetime.date.today()}, {machine}, {packages}, gloo.",
        "",
        f"`python -m benchmarks.soak --faults {len(outcomes)} --seed {seed}`: {len(outcomes)} faults in {runs} runs of {STEPS} "
        f"steps, {seconds / 60:.0f} min. {RANKS} ranks on 2 nodes x 1 GPU x 2 GCDs, preset `lossless`, a checkpoint every "
        f"{EVERY} steps, timeout of a collective {TIMEOUT_S} s.",
        "",
        f"Nothing was lost: every run finished with the losses of the undisturbed run ({undisturbed_s:.0f} s), step by step and "
        "to the last bit. A rank that was killed or frozen was always named.",
        *([] if disk else ["", "No disk was filled: that needs root, for a small file system."]),
        "",
        "Seconds are from the fault to the end of the command, or, for files, until the next command says from where it goes on. "
        "Repeated steps came after the newest checkpoint.",
        "",
        "| fault | when | count | exit status | seconds: median (max) | repeated steps: max |",
        "|---|---|---:|---|---:|---:|",
    ]
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in sorted(outcomes, key=lambda one: (one.fault, WHENS.index(one.when))):
        groups.setdefault((outcome.fault, outcome.when), []).append(outcome)
    for (fault, when), group in groups.items():
        exits = ", ".join(sorted({"went on" if one.exit in (None, 0) else str(one.exit) for one in group}))
        times = [one.noticed_s for one in group]
        seconds_text = f"{statistics.median(times):.1f} ({max(times):.1f})"
        repeated = max(one.repeated for one in group)
        lines.append(f"| {fault} | {when} | {len(group)} | {exits} | {seconds_text} | {repeated} |")
    lines += ["", "What the user sees, an example of each:", ""]
    for (fault, when), group in groups.items():
        lines += [
            f"{fault}, {when}:",
            "",
            "```",
            max((one.message for one in group), key=len) or "(nothing)",
            "```",
            "",
        ]
    return "\n".join(lines)


def main() -> int:
    """Parses arguments, runs the soak, writes rows and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200, help="faults in all (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="draws faults and moments (default: %(default)s)")
    parser.add_argument(
        "-o", "--out", type=Path, default=Path("runs/soak"), help="folder, which must not exist (default: %(default)s)"
    )
    parsed = parser.parse_args()
    if parsed.faults < 1:
        parser.error(f"--faults: found {parsed.faults}, possible: 1 and more")
    if parsed.out.exists():
        parser.error(f"-o: {str(parsed.out)!r} exists; choose another folder or remove it")
    parsed.out.mkdir(parents=True)
    root, chance = parsed.out.resolve(), random.Random(parsed.seed)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["DS_ACCELERATOR"] = "cpu"
    for name in ("hzero.train.application", *RANK_IMPORTS):
        importlib.import_module(name)
    started = time.monotonic()
    with small_disk(root / "disk") as disk, open(root / "outcomes.jsonl", "w", encoding="utf-8") as rows:
        if not disk:
            print("no disk is filled: mounting a small one needs root", file=sys.stderr)
        soak = Soak(root, schedule(parsed.faults, chance, disk), chance)
        want, undisturbed_s = soak.undisturbed()
        with Progress(parsed.faults) as progress:
            for outcome in soak.run(want):
                rows.write(json.dumps(asdict(outcome)) + "\n")
                rows.flush()
                text = f"fault {outcome.number}/{parsed.faults}  {outcome.fault}, {outcome.when}  {outcome.noticed_s:.1f} s"
                progress.update(outcome.number, text, always=True)
    for what, found in (("results of training differ", soak.differing), ("messages blame nobody", soak.unnamed)):
        if found:
            print("\n".join([f"hzero: error: {what}:", *found]), file=sys.stderr)
            return 1
    text = report_of(soak.outcomes, soak._runs, undisturbed_s, time.monotonic() - started, parsed.seed, disk)
    (root / "report.md").write_text(text)
    print(f"{len(soak.outcomes)} faults, nothing lost: {root / 'report.md'}")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
