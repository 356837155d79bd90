"""Stops a training in time: all ranks after the same step, with a checkpoint and exit status 75."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from hzero.errors import ConfigError, is_rank_0
from hzero.schema import seconds_of

#: A second Ctrl-C ends the process only after this many seconds, since launchers repeat the terminal's Ctrl-C.
_REPEATED_S = 2.0
#: Seconds that the process needs to exit after the save.
_LEAVING_S = 5.0
#: Value in the all-reduce for the time limit. Signal numbers are smaller.
_TIME = 1000


class StopAndSave:
    """Ends a training on a signal, or before its time limit: the ranks agree, save once, and exit with status 75.

    SIGTERM, SIGINT (Ctrl-C), SIGUSR1 and the end of a Slurm allocation reach ranks at different moments, in different steps.
    So each rank records the signals that it receives. At the end of every step an all-reduce of 8 bytes compares them. It
    takes about as long as the all-reduce of the gradient norm. If one rank has to stop, all ranks stop after the same step.
    With status 75 (``EX_TEMPFAIL``) a job script starts the training again.

    Hugging Face's Trainer, and everything built on it, uses it as a callback. Put it last, so that the other callbacks see
    the end of the training before the process exits::

        trainer = Trainer(..., callbacks=[hzero.StopAndSave()])
        trainer.train(resume_from_checkpoint=hzero.newest_checkpoint(args.output_dir))

    A plain loop calls it once per optimizer step, on all ranks::

        stop = hzero.StopAndSave()
        for batch in loader:
            ...
            stop(save=lambda: engine.save_checkpoint("checkpoints"))

    In Lightning, call it from a callback::

        class Stop(lightning.Callback):
            stop = hzero.StopAndSave()

            def on_train_batch_end(self, trainer, *_):
                self.stop(save=lambda: trainer.save_checkpoint("checkpoints/stopped.ckpt"))

    Construct it early, on the main thread: a signal before the first step takes effect after that step. A second Ctrl-C
    ends the process at once. The class has the methods of a ``TrainerCallback`` without inheriting from it, so that
    transformers need not be installed.

    Args:
        time_limit: Time from now in which the training has to end: seconds, or a text such as ``"1h30m"``. The end of the
            Slurm allocation (``SLURM_JOB_END_TIME``) is a limit as well; the earlier one counts. An end in the past is ignored.
        signals: Signals that stop the ranks.
        save_s: Estimated seconds of a save, used until one has been measured. A plain loop measures none.

    Attributes:
        reason: Why the ranks stop: the name of the signal, or ``"time"``. None until they stop.
        status: The exit status.

    Raises:
        ConfigError: The time limit is not a duration.
    """

    status = os.EX_TEMPFAIL

    def __init__(
        self,
        time_limit: str | float | None = None,
        *,
        signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1),
        save_s: float = 60.0,
    ) -> None:
        self.reason: str | None = None
        self._ends_at = _ends_at(time_limit)
        self._save_s, self._saved_s, self._step_s = save_s, 0.0, 0.0
        self._asked, self._interrupted_at = 0, math.inf  # by Ctrl-C
        self._stepped_at: float | None = None
        self._saving_since = 0.0
        self._stock = {number: signal.signal(number, self._remember) for number in signals}

    def __call__(self, save: Callable[[], object] | None = None) -> bool:
        """Ends a step of a plain loop. Collective.

        Args:
            save: Saves a checkpoint, on all ranks together. If the ranks stop, it is called, and the process exits.

        Returns:
            Whether the ranks stop. If so, save, and exit with `status`.

        Raises:
            SystemExit: The ranks stop, and ``save`` has been called.
        """
        if not self._agree():
            return False
        self._say("the ranks stop after this step")
        if save is not None:
            save()
            self._leave()
        return True

    def close(self) -> None:
        """Restores the previous signal handlers."""
        for number, handler in self._stock.items():
            signal.signal(number, handler)
        self._stock = {}

    # ---- the events of a TrainerCallback ----------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_"):  # the other events do nothing
            return lambda *_, **__: None
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Compares the signals of all ranks. If the ranks stop, Trainer saves without an evaluation and ends its loop."""
        if self._agree():
            self._say(f"the ranks stop after step {state.global_step}")
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False
        self._saving_since = time.monotonic()

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Restarts the clock of a save, which follows the evaluation."""
        self._saving_since = time.monotonic()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Measures the save. If the ranks stop, prevents work that takes longer or removes this checkpoint."""
        seconds = time.monotonic() - self._saving_since
        self._saved_s = max(self._saved_s, seconds)
        if self._stepped_at is not None:
            self._stepped_at += seconds
        if self.reason is not None:
            # Trainer would load the best model now, and with a limit of 1 remove all other checkpoints.
            args.load_best_model_at_end, args.save_total_limit = False, None

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Prevents a second save: Trainer also ends its epoch when it stops."""
        if self.reason is not None:
            control.should_evaluate = control.should_save = False

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Ends the process if the ranks stop."""
        self.close()
        if self.reason is not None:
            self._leave()

    # ---- agreement --------------------------------------------------------------------------------------------------

    def _remember(self, number: int, frame: object) -> None:
        if number == signal.SIGINT:
            now = time.monotonic()
            if now - self._interrupted_at > _REPEATED_S:
                raise KeyboardInterrupt
            self._interrupted_at = min(self._interrupted_at, now)
        self._asked = max(self._asked, int(number))

    def _agree(self) -> bool:
        """Whether the ranks stop, the same on all. Collective."""
        now = time.monotonic()
        if self._stepped_at is not None:
            self._step_s = max(self._step_s, now - self._stepped_at)
        self._stepped_at = now
        asked = self._asked or (_TIME if self._is_due() else 0)
        if asked := _largest(asked):
            self.reason = "time" if asked == _TIME else signal.Signals(asked).name
        return self.reason is not None

    def _is_due(self) -> bool:
        """Whether the remaining time is too short for another step and a save, each 1.5 times as long as the longest so far."""
        if self._ends_at is None:
            return False
        return time.time() > self._ends_at - 1.5 * (self._step_s + (self._saved_s or self._save_s)) - _LEAVING_S

    def _leave(self) -> NoReturn:
        _largest(0)  # a launcher ends all ranks as soon as one has left, and rank 0 may still be writing
        self._say(f"saved; exit status {self.status}")
        raise SystemExit(self.status)

    def _say(self, what: str) -> None:
        if not (dist.is_available() and dist.is_initialized() and dist.get_rank()):
            why = "the time is nearly over" if self.reason == "time" else self.reason
            print(f"hzero: {why}: {what}", file=sys.stderr, flush=True)


def _ends_at(time_limit: str | float | None) -> float | None:
    """The end of the training, in seconds since the epoch; None without a limit."""
    ends = []
    if time_limit is not None:
        try:
            ends.append(time.time() + seconds_of(time_limit))
        except ValueError as error:
            raise ConfigError(f"time_limit: {error}") from None
    slurm = os.environ.get("SLURM_JOB_END_TIME", "")  # set by Slurm 23.02 and later
    if slurm.isdecimal():
        if float(slurm) > time.time():
            ends.append(float(slurm))
        elif is_rank_0():
            found = f"found {slurm}, a time in the past, perhaps of an earlier job"
            print(f"hzero: warning: SLURM_JOB_END_TIME: {found}; ignored", file=sys.stderr, flush=True)
    return min(ends, default=None)


def _largest(value: int) -> int:
    """The largest value over all ranks. Collective."""
    if not (dist.is_available() and dist.is_initialized()):
        return value
    on_cpu = "cpu:" in dist.get_backend_config()  # the device of the default group's backend
    device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
    largest = torch.tensor([value], dtype=torch.int64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest.item())
