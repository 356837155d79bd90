"""Training: a run of `hzero train` whose losses are kept beside the measurements."""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.compare.machine import ROOT
from benchmarks.compare.store import Store
from hzero.config import ConfigError
from hzero.train.folder import CONFIG, SUMMARY, read_metrics
from hzero.train.launch import GRACE_S, INTERRUPTED
from hzero.train.settings import without_nulls

SUITE = "convergence"
#: Steps after which an interrupted run can go on.
CHECKPOINT_EVERY = 250
#: Seconds of one step of the main job, roughly, for estimates of time left.
_STEP_S = 0.4


@dataclass(frozen=True)
class Training:
    """One run.

    Attributes:
        preset: Option of the trainer's group ``zero``; ``stock`` is DeepSpeed ZeRO-3.
        seed: Of weights and batches.
        model: Option of the trainer's group ``model``.
        steps: Optimizer steps.
        eval_every: Steps between evaluations; 0: at the end only.
        data: The ``data`` group.
    """

    preset: str
    seed: int
    model: str
    steps: int
    eval_every: int
    data: dict[str, Any]

    rows = 1

    @property
    def title(self) -> str:
        """Suite and name."""
        return f"{SUITE}/{self.preset}-seed{self.seed}"

    @property
    def folder(self) -> str:
        """Name of the run's folder."""
        return f"{SUITE}/{self.preset}-seed{self.seed}-{self.id[:8]}"

    @property
    def id(self) -> str:
        """Digest of what is trained."""
        what = [self.preset, self.seed, self.model, self.steps, self.eval_every, without_nulls(self.data)]
        text = json.dumps(what, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def estimated_s(self) -> float:
        """A rough guess of how long it takes."""
        return self.steps * _STEP_S

    def overrides(self, folder: Path) -> list[str]:
        """Arguments of `hzero train`."""
        keys = {
            "zero": self.preset,
            "model": self.model,
            "train.seed": self.seed,
            "train.steps": self.steps,
            "train.eval_every": self.eval_every,
            "checkpoint.every": CHECKPOINT_EVERY,
            "checkpoint.keep": 1,
            **{f"data.{key}": value for key, value in without_nulls(self.data).items()},
        }
        quoted = [f"{key}={_quoted(value)}" for key, value in keys.items()]
        return [*quoted, f"run.dir={_quoted(str(folder))}"]

    def take(self, store: Store, *, again: bool) -> int:
        """Trains, or goes on, unless the folder holds the whole run; then stores its row.

        Returns:
            Exit status, as of `hzero train`.
        """
        folder = store.folder / self.folder
        if again or not _finished(folder):
            resume = ["run.overwrite=true"] if again else ["resume=auto"] if folder.exists() else []
            command = [sys.executable, "-m", "hzero", "train", *self.overrides(folder), *resume]
            status = _run(command)
            if status:
                return status
        store.add([self._row(folder)], self.id)
        return 0

    def _row(self, folder: Path) -> dict[str, Any]:
        config = yaml.safe_load((folder / CONFIG).read_text())
        train = config["train"]
        found = (train["seed"], train["steps"], config["model"]["name"], config["zero"]["preset"] or "stock")
        expected = (self.seed, self.steps, self.model, self.preset)
        if found != expected:
            raise ConfigError(f"{folder}: holds a run of seed, steps, model and preset {found}, expected {expected}")
        summary = json.loads((folder / SUMMARY).read_text())
        rows = read_metrics(folder)[0]
        return {
            "kind": SUITE,
            "versions": summary["versions"],  # of the training, which may be older than we are
            "suite": SUITE,
            "measurement": f"{self.preset}-seed{self.seed}",
            "config": config,
            "preset": self.preset,
            "seed": self.seed,
            "parameters": summary["parameters"],
            "world_size": summary["world_size"],
            "losses": [row["loss"] for row in rows if row["kind"] == "step"],
            "evaluations": [
                {key: row[key] for key in ("step", "loss_decoded", "loss_exact")}
                for row in rows
                if row["kind"] == "eval"
            ],
        }


def _run(command: list[str]) -> int:
    """Runs the trainer to its end; what interrupts us interrupts it as well, and it saves before it leaves."""
    trainer = subprocess.Popen(command, cwd=ROOT)
    interrupted = False
    while True:
        try:
            status = trainer.wait()
            return INTERRUPTED if interrupted else status
        except KeyboardInterrupt:
            interrupted = True
        except BaseException:
            trainer.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                trainer.wait(GRACE_S)
            trainer.kill()
            raise


def _finished(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / SUMMARY).read_text())["status"] == "finished")
    except (OSError, ValueError, KeyError):
        return False


def _quoted(value: Any) -> str:
    return f"'{value}'" if isinstance(value, str) and not value.isidentifier() else str(value)
