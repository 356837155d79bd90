"""Progress of a run: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

#: Seconds between plain lines.
EVERY_S = 5.0


class Progress:
    """Shows step, loss, tokens a second, TFLOPS a rank and the time left.

    Args:
        total: Steps of the run.
        start: Steps done already.
        enabled: False shows nothing: every rank but the first.
        console: Where to; standard output by default.
    """

    def __init__(self, total: int, *, start: int = 0, enabled: bool = True, console: Console | None = None) -> None:
        self._console = console or Console(soft_wrap=True)
        self._total, self._start, self._enabled = total, start, enabled
        self._began = time.monotonic()
        self._shown = 0.0
        self._bar: Bar | None = None

    def __enter__(self) -> Progress:
        if self._enabled and self._console.is_terminal:
            columns = (
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
            )
            self._bar = Bar(*columns, console=self._console)
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total, completed=self._start)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def message(self, text: str) -> None:
        """Prints a line beside the progress."""
        if self._enabled:
            (self._bar.console if self._bar else self._console).print(text, highlight=False, markup=False)

    def update(self, *, step: int, loss: float, tokens_per_s: float, tflops: float) -> None:
        """Shows one finished step."""
        if not self._enabled:
            return
        figures = f"loss {loss:.4f}  {tokens_per_s:,.0f} tokens/s  {tflops:.3g} TFLOPS a rank"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=figures)
            return
        now = time.monotonic()
        first_or_last = step in (self._start + 1, self._total)
        if first_or_last or now - self._shown >= EVERY_S:
            self._shown = now
            left = (now - self._began) / max(step - self._start, 1) * (self._total - step)
            self.message(f"step {step}/{self._total}  {figures}  {clock(left)} left")


def clock(seconds: float) -> str:
    """Seconds as 1:02:03 or 2:03."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
