"""Faults that strike a training, and the command that they strike; for `benchmarks.soak`."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from hzero.launcher import STARTED, die_with_parent
from hzero.train.checkpoint import NOTE
from hzero.train.folder import CHECKPOINTS, LOGS, read_metrics

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

#: How a command goes on, and what it is told to use where no checkpoint is left.
RESUME, ANEW = "resume=auto", "run.overwrite=true"

WHENS = ("start", "load", "step", "save", "end")


class Command:
    """`hzero train` on one folder, forked from this process, which has imported what takes long.

    Args:
        run: The folder.
        cache: Of tokenised text.
        log: The file for its errors; its output goes beside it.
        mode: How it treats a run that is there.
    """

    def __init__(self, run: Path, cache: Path, log: Path, mode: str = RESUME) -> None:
        self.run, self._log = run, log
        log.write_bytes(b"")
        log.with_suffix(".out").write_bytes(b"")
        self._pid = os.fork()
        if not self._pid:
            self._train([*JOB, f"run.dir={run}", f"data.cache_dir={cache}", mode])
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
        printed = [
            line for line in self._printed().splitlines() if line.startswith(("warning", "stopped", "tokenising"))
        ]
        with contextlib.suppress(FileNotFoundError):
            printed += self._log.read_text(errors="replace").splitlines()
        return "\n".join([line for line in printed if "; transport gloo; " not in line][-lines:])

    def began_after(self) -> int:
        """The step from which it says that it goes on; 0 where it says none."""
        found = re.search(r"going on after step (\d+)", self._printed())
        return int(found.group(1)) if found is not None else 0

    def resumed(self) -> bool:
        """Whether it has said from where it goes on."""
        printed = self._printed()
        return "going on after step" in printed or "starting at the first step" in printed

    def _printed(self) -> str:
        with contextlib.suppress(FileNotFoundError):
            return self._log.with_suffix(".out").read_text(errors="replace")
        return ""


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
