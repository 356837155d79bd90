"""Stops a training in time: all ranks together, at the end of a step, with a checkpoint and an exit status of its own."""

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

from hzero.launch import UNFINISHED
from hzero.validation import ConfigError, seconds_of

#: Seconds after which a second Ctrl-C ends the process. Launchers send the terminal's Ctrl-C once more within that time.
_REPEATED_S = 2.0
#: Seconds that leaving takes after the save.
_LEAVING_S = 5.0
#: What the ranks agree on beside the number of a signal, which is smaller.
_TIME = 1000


class StopAndSave:
    """Ends a training by a signal, or before its time is over: agreement of all ranks, one save, exit status 75.

    SIGTERM, SIGINT (Ctrl-C), SIGUSR1 and the end of a Slurm allocation reach ranks at different moments, in different steps.
    So each rank remembers what has reached it, and at the end of every step all ranks compare: one all-reduce of 8 bytes,
    which takes about as long as the all-reduce of the gradient norm. If one rank has to stop, all do, after the same step.
    Status 75 (``EX_TEMPFAIL``) tells a job script to start the training again.

    In Hugging Face's Trainer, and in everything built on it, it is a callback. Put it last, so that the others see the end
    of the training before the process leaves::

        trainer = Trainer(..., callbacks=[hzero.StopAndSave()])
        trainer.train(resume_from_checkpoint=hzero.newest_checkpoint(args.output_dir))

    A plain loop calls it once per optimizer step, on all ranks::

        stop = hzero.StopAndSave()
        for batch in loader:
            ...
            stop(save=lambda: engine.save_checkpoint("checkpoints"))

    Lightning calls it from a callback of its own::

        class Stop(lightning.Callback):
            stop = hzero.StopAndSave()

            def on_train_batch_end(self, trainer, *_):
                self.stop(save=lambda: trainer.save_checkpoint("checkpoints/stopped.ckpt"))

    Make it early, on the main thread: a signal that comes before the first step takes effect after that step. A second Ctrl-C
    ends the process at once. It has the methods of a ``TrainerCallback`` without being one, since transformers need not be
    installed.

    Args:
        time_limit: Time from now in which the training has to end: seconds, or a text such as ``"1h30m"``. The end of the
            Slurm allocation (``SLURM_JOB_END_TIME``) is a limit as well; the earlier one counts.
        signals: What asks the ranks to stop.
        save_s: Seconds that a save takes, as long as none has been measured; a plain loop measures none.

    Attributes:
        reason: Why the ranks stop: the name of the signal, or ``"time"``. None as long as they do not.
        status: The exit status.

    Raises:
        ConfigError: The time limit is no duration.
    """

    status = UNFINISHED

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
            save: Saves a checkpoint, on all ranks together. If the ranks stop, it is called, and the process leaves.

        Returns:
            Whether the ranks stop. Then save, and end with `status`.

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
        """Gives the signals back to whoever had them before."""
        for number, handler in self._stock.items():
            signal.signal(number, handler)
        self._stock = {}

    # ---- the events of a TrainerCallback ----------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_"):  # an event that needs nothing
            return lambda *_, **__: None
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Agrees with the other ranks; then Trainer saves, without an evaluation before it, and ends its loop."""
        if self._agree():
            self._say(f"the ranks stop after step {state.global_step}")
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False
        self._saving_since = time.monotonic()

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A save comes after an evaluation."""
        self._saving_since = time.monotonic()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Measures the save. Once the ranks stop, nothing may take longer or remove this checkpoint."""
        seconds = time.monotonic() - self._saving_since
        self._saved_s = max(self._saved_s, seconds)
        if self._stepped_at is not None:
            self._stepped_at += seconds
        if self.reason is not None:
            # Trainer would load the best model now, and with a limit of 1 remove all others.
            args.load_best_model_at_end, args.save_total_limit = False, None

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Trainer ends its epoch here too when it is told to stop."""
        if self.reason is not None:
            control.should_evaluate = control.should_save = False

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Leaves if the ranks stop."""
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
        """Whether the time is over too soon for another step and a save, each half as long again as the longest so far."""
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
    """When the training has to end, in seconds of the clock; None if nothing says so."""
    ends = []
    if time_limit is not None:
        try:
            ends.append(time.time() + seconds_of(time_limit))
        except ValueError as error:
            raise ConfigError(f"time_limit: {error}") from None
    slurm = os.environ.get("SLURM_JOB_END_TIME", "")  # of every job and step from Slurm 23.02 on
    if slurm.isdecimal():
        ends.append(float(slurm))
    return min(ends, default=None)


def _largest(value: int) -> int:
    """The largest value of a rank. Collective."""
    if not (dist.is_available() and dist.is_initialized()):
        return value
    on_cpu = "cpu:" in dist.get_backend_config()  # where the default group's backend takes tensors from
    device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
    largest = torch.tensor([value], dtype=torch.int64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest.item())
