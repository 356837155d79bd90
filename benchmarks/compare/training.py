"""Training: a run of `hzero train` whose losses are stored next to the measurements."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.compare.machine import ROOT, machine, now, versions
from benchmarks.compare.store import Store
from benchmarks.rows import Evaluation, TrainingRow
from hzero.launcher import GRACE_S, INTERRUPTED, die_with_parent
from hzero.settings.settings import without_nulls
from hzero.train.folder import CONFIG, SUMMARY, finished, read_metrics
from hzero.validation import ConfigError

SUITE = "convergence"
#: Steps after which an interrupted run can go on.
CHECKPOINT_EVERY = 250
#: Longest wait for a trainer that was asked to stop, which gives its ranks `GRACE_S`.
_LEAVES_S = GRACE_S + 30
#: Seconds of one step of the main job, roughly, for estimates of time left.
_STEP_S = 0.4


@dataclass(frozen=True)
class Training:
    """One run.

    Attributes:
        preset: Option of the trainer's group ``zero``, ``stock`` for DeepSpeed ZeRO-3; or the name of a choice.
        seed: Of weights and batches.
        model: Option of the trainer's group ``model``.
        steps: Optimizer steps.
        eval_every: Steps between evaluations; 0: at the end only.
        data: The ``data`` group.
        common: What all trainings of the suite override.
        choice: What the choice overrides in the trainer's configuration; None: nothing, it is an option of ``zero``.
    """

    preset: str
    seed: int
    model: str
    steps: int
    eval_every: int
    data: dict[str, Any]
    common: tuple[str, ...] = ()
    choice: tuple[str, ...] | None = None

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
        """Digest of the job."""
        what = [self.preset, self.seed, self.model, self.steps, self.eval_every, without_nulls(self.data)]
        if self.common or self.choice is not None:
            what += [self.common, self.choice]
        text = json.dumps(what, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def estimated_s(self) -> float:
        """A rough guess of how long it takes."""
        return self.steps * _STEP_S

    def overrides(self, folder: Path) -> list[str]:
        """Arguments of `hzero train`."""
        keys = {
            **({"zero": self.preset} if self.choice is None else {}),
            "model": self.model,
            "train.seed": self.seed,
            "train.steps": self.steps,
            "train.eval_every": self.eval_every,
            "checkpoint.every": CHECKPOINT_EVERY,
            "checkpoint.keep": 1,
            **{f"data.{key}": value for key, value in without_nulls(self.data).items()},
        }
        quoted = [f"{key}={_quoted(value)}" for key, value in keys.items()]
        return [*quoted, *self.common, *(self.choice or ()), f"run.dir={_quoted(str(folder))}"]

    def take(self, store: Store, *, again: bool) -> int:
        """Trains, or goes on, unless the folder holds the whole run; then stores its row.

        Returns:
            Exit status of `hzero train`.
        """
        folder = store.folder / self.folder
        trained_with: dict[str, str] = {}
        if again or not finished(folder):
            trained_with = {key: value for key, value in versions().items() if key == "commit"}
            resume = ["run.overwrite=true"] if again else ["resume=auto"] if folder.exists() else []
            command = [sys.executable, "-m", "hzero", "train", *self.overrides(folder), *resume]
            status = _run(command)
            if status:
                return status
        store.add([self._row(folder, trained_with)])
        return 0

    def _row(self, folder: Path, trained_with: dict[str, str]) -> TrainingRow:
        config = yaml.safe_load((folder / CONFIG).read_text())
        train = config["train"]
        zero = (config["zero"]["preset"] or "stock") if self.choice is None else self.preset
        found = (train["seed"], train["steps"], config["model"]["name"], zero)
        expected = (self.seed, self.steps, self.model, self.preset)
        if found != expected:
            raise ConfigError(f"{folder}: holds a run of seed, steps, model and preset {found}, expected {expected}")
        # Rows are published and must not name this machine's paths: the folder is relative to the results.
        config["run"]["dir"] = self.folder
        summary = json.loads((folder / SUMMARY).read_text())
        metrics = read_metrics(folder)[0]
        return TrainingRow(
            suite=SUITE,
            measurement=f"{self.preset}-seed{self.seed}",
            id=self.id,
            date=now(),
            machine=machine(),
            versions={**summary["versions"], **trained_with},  # of the training, which may be older than this command
            parameters=summary["parameters"],
            world_size=summary["world_size"],
            config=config,
            preset=self.preset,
            seed=self.seed,
            losses=[one["loss"] for one in metrics if one["kind"] == "step"],
            evaluations=[
                Evaluation(step=one["step"], loss_decoded=one["loss_decoded"], loss_exact=one["loss_exact"])
                for one in metrics
                if one["kind"] == "eval"
            ],
        )


def _run(command: list[str]) -> int:
    """Runs the trainer to its end.

    Ctrl-C and its like are passed on: the trainer finishes its step and saves, and a second one ends it at once.
    """
    # A terminal's Ctrl-C reaches us alone; and the trainer, with its ranks, ends with us however we end.
    trainer = subprocess.Popen(command, cwd=ROOT, start_new_session=True, preexec_fn=die_with_parent)
    interrupted = False
    while True:
        try:
            status = trainer.wait(_LEAVES_S if interrupted else None)
            return INTERRUPTED if interrupted else status
        except KeyboardInterrupt:
            interrupted = True
            trainer.send_signal(signal.SIGINT)
        except subprocess.TimeoutExpired:
            print(f"bench: the trainer did not end within {_LEAVES_S:.0f} s of being asked to; killed", file=sys.stderr)
            trainer.kill()


def _quoted(value: Any) -> str:
    return f"'{value}'" if isinstance(value, str) and not value.isidentifier() else str(value)
