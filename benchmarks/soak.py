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
import gc
import importlib
import json
import os
import platform
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import psutil

from hzero.launcher import STARTED, die_with_parent
from hzero.progress import Progress
from hzero.train.checkpoint import NOTE
from hzero.train.folder import CHECKPOINTS, LOGS, SUMMARY, read_metrics
from hzero.train.worker import RANK_IMPORTS

#: The job: short steps, and a checkpoint every fifth.
STEPS, EVERY, RANKS, TIMEOUT_S = 60, 5, 4, 8
JOB = (
    "model.hidden_size=64",
    "model.num_layers=2",
    "model.intermediate_size=128",
    "model.seq_length=32",
    "data.max_bytes=400000",
    "topology.nodes=2",
    "topology.gpus_per_node=1",
    "topology.gcds_per_gpu=2",
    "zero=lossless",
    f"train.steps={STEPS}",
    f"train.timeout_s={TIMEOUT_S}",
    "launcher.start_timeout_s=60",
    "train.eval_batches=1",
    f"checkpoint.every={EVERY}",
    "sample.at_end=false",
)
#: Size of the disk that a run has, where this process may mount one, and of the file that fills it.
DISK_BYTES = 64_000_000
#: A fault that has no effect within this time is an error, in seconds.
PATIENCE_S = 120.0

WHENS = ("start", "load", "step", "save", "end")


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


class Command:
    """`hzero train` on one folder, forked from this process, which has imported what takes long."""

    def __init__(self, run: Path, cache: Path, log: Path) -> None:
        self.run, self._log = run, log
        log.write_bytes(b"")
        log.with_suffix(".out").write_bytes(b"")
        self._pid = os.fork()
        if not self._pid:
            self._train([*JOB, f"run.dir={run}", f"data.cache_dir={cache}", "resume=auto"])
        self.process = psutil.Process(self._pid)
        self._status: int | None = None

    def _train(self, overrides: list[str]) -> None:
        status = 1
        try:
            os.setsid()
            die_with_parent()
            for number, name in ((1, self._log.with_suffix(".out")), (2, self._log)):
                os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            gc.freeze()
            from hzero.cli import main

            sys.argv = ["hzero", "train", *overrides]
            status = main(sys.argv[1:])
        except SystemExit as left:
            status = left.code if isinstance(left.code, int) else 1
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    def poll(self) -> int | None:
        """Exit status, None while it runs."""
        if self._status is None:
            ended, status = os.waitpid(self._pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if ended else None
        return self._status

    def wait(self) -> int:
        """Exit status.

        Raises:
            RuntimeError: It does not end.
        """
        started = time.monotonic()
        while self.poll() is None:
            if time.monotonic() - started > PATIENCE_S:
                self.process.kill()
                raise RuntimeError(f"the command has not ended within {PATIENCE_S:.0f} s:\n{self.said(40)}")
            time.sleep(0.005)
        return self._status or 0

    def ranks(self) -> list[psutil.Process]:
        """The ranks that run, in order."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return sorted(self.process.children(), key=lambda process: process.pid)
        return []

    def said(self, lines: int = 3) -> str:
        """The last lines of its errors and warnings."""
        with contextlib.suppress(FileNotFoundError):
            printed = self._log.with_suffix(".out").read_text(errors="replace").splitlines()
            printed = [line for line in printed if line.startswith(("warning", "stopped", "tokenising"))]
            printed += self._log.read_text(errors="replace").splitlines()
            return "\n".join([line for line in printed if "; transport gloo; " not in line][-lines:])
        return ""

    def resumed(self) -> bool:
        """Whether it has said from where it goes on."""
        with contextlib.suppress(FileNotFoundError):
            printed = self._log.with_suffix(".out").read_text(errors="replace")
            return "going on after step" in printed or "starting at the first step" in printed
        return False


def steps_of(run: Path) -> dict[int, float | None]:
    """Losses by step, as the metrics have them."""
    return {row["step"]: row["loss"] for row in read_metrics(run)[0] if row["kind"] == "step"}


def moment(when: str, command: Command, chance: random.Random) -> bool:
    """Waits until a command is where a fault shall strike. Returns whether it got there before it ended."""
    run, begun = command.run, len(steps_of(command.run))
    wanted = min(STEPS, begun + chance.randint(1, 2 * EVERY))
    saving = {path.name for path in (run / CHECKPOINTS).glob("step_*")}

    def there() -> bool:
        if when == "start":
            return bool(command.ranks())
        if when == "load":
            return (run / LOGS / "rank0.log").exists() and len(command.ranks()) == RANKS
        if when == "save":
            new = {path.name for path in (run / CHECKPOINTS).glob("step_*")} - saving
            return any(not (run / CHECKPOINTS / name / NOTE).exists() for name in new)
        if when == "end":
            return STEPS in steps_of(run)
        return (run / LOGS / STARTED).exists() and len(steps_of(run)) >= wanted

    while not there():
        if command.poll() is not None:
            return False
        time.sleep(0.002)
    time.sleep(chance.uniform(0, {"start": 0.05, "load": 0.8, "save": 0.01}.get(when, 0.05)))
    return command.poll() is None


# ---- faults on processes: each returns what undoes it -----------------------------------------------------------


def kill_rank(command: Command, chance: random.Random) -> int:
    """SIGKILL for one rank, as by the kernel when memory runs out."""
    ranks = command.ranks()
    rank = chance.randrange(len(ranks))
    ranks[rank].kill()
    return rank


def freeze_rank(command: Command, chance: random.Random) -> int:
    """SIGSTOP for one rank: it neither works nor ends."""
    ranks = command.ranks()
    rank = chance.randrange(len(ranks))
    ranks[rank].suspend()
    return rank


def kill_command(command: Command, chance: random.Random) -> None:
    """SIGKILL for the command; its ranks must not live on."""
    command.process.kill()


def stop_command(command: Command, chance: random.Random) -> None:
    """SIGTERM for the command, as by a batch system."""
    command.process.terminate()


def fill_disk(command: Command, chance: random.Random) -> None:
    """Nothing is left on the disk of the run for some seconds."""
    ballast = command.run.parent / "ballast"
    with contextlib.suppress(OSError), open(ballast, "wb", buffering=0) as file:
        while file.write(bytes(1 << 16)):
            pass
    time.sleep(chance.uniform(0.5, 3.0))
    ballast.unlink()


# ---- faults on files, after the command was killed ----------------------------------------------------------------


def newest_file(run: Path, chance: random.Random) -> Path:
    """A file of the newest complete checkpoint."""
    folders = [path.parent for path in sorted((run / CHECKPOINTS).glob(f"step_*/{NOTE}"))]
    return chance.choice(sorted(path for path in folders[-1].rglob("*.pt")))


def flip_bit(run: Path, cache: Path, chance: random.Random) -> None:
    """One bit of the newest checkpoint is another one; sizes stay."""
    path = newest_file(run, chance)
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def truncate(run: Path, cache: Path, chance: random.Random) -> None:
    """A file of the newest checkpoint lacks its end."""
    path = newest_file(run, chance)
    os.truncate(path, chance.randrange(path.stat().st_size))


def remove(run: Path, cache: Path, chance: random.Random) -> None:
    """A file of the newest checkpoint is gone."""
    newest_file(run, chance).unlink()


def spoil_cache(run: Path, cache: Path, chance: random.Random) -> None:
    """Ids of the tokenised text are other ones."""
    path = chance.choice(sorted(cache.glob("tokens-*/tokens.bin")))
    content = bytearray(path.read_bytes())
    start = chance.randrange(len(content) - 64)
    content[start : start + 64] = chance.randbytes(64)
    path.write_bytes(content)


#: Those of ranks return the rank, which the user must be told.
ON_PROCESSES: dict[str, Callable[[Command, random.Random], int | None]] = {
    "rank killed": kill_rank,
    "rank frozen": freeze_rank,
    "command killed": kill_command,
    "command stopped": stop_command,
    "disk full": fill_disk,
}
ON_FILES: dict[str, Callable[[Path, Path, random.Random], None]] = {
    "checkpoint: bit flipped": flip_bit,
    "checkpoint: truncated": truncate,
    "checkpoint: file gone": remove,
    "cache: ids changed": spoil_cache,
}


def schedule(count: int, chance: random.Random, disk: bool) -> list[tuple[str, str]]:
    """Kind and moment of every fault: all pairs in turn, shuffled."""
    kinds = [name for name in ON_PROCESSES if disk or name != "disk full"]
    pairs = [(kind, when) for kind in kinds for when in WHENS] + [(kind, "load") for kind in ON_FILES]
    order: list[tuple[str, str]] = []
    while len(order) < count:
        chance.shuffle(pairs)
        order += pairs
    return order[:count]


class Soak:
    """Strikes one run after another with faults until all have struck."""

    def __init__(self, root: Path, faults: list[tuple[str, str]], chance: random.Random) -> None:
        self._root, self._faults, self._chance = root, collections.deque(faults), chance
        self._disk, self._cache = root / "disk", root / "cache"
        self._count, self._runs = len(faults), 0
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
            if command.wait():
                raise RuntimeError(f"a run that nothing disturbed failed:\n{command.said(20)}")
            return
        kind, when = fault
        if not moment("step" if kind in ON_FILES else when, command, self._chance):
            self._faults.append(fault)  # the command ended before
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
            seconds, message = time.monotonic() - struck, command.said()
            exit_status = command.wait() or None
        saved = max((int(path.parent.name[5:]) for path in (run / CHECKPOINTS).glob(f"step_*/{NOTE}")), default=0)
        outcome = Outcome(number, kind, when, step, exit_status, seconds, max(0, step - saved), message)
        self.outcomes.append(outcome)
        yield outcome

    def _start(self, run: Path) -> Command:
        return Command(run, self._cache, self._root / "command.log")

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


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """A small file system in a folder; yields whether it could be mounted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    mounted = os.geteuid() == 0 and subprocess.run(command, capture_output=True, check=False).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


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
