"""Progress of work with a known total: a live line on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from hzero.formatting import clock

#: Seconds between plain lines.
EVERY_S = 5.0


class Progress:
    """Shows a text about the current state and the time left.

    Args:
        total: The work, in any unit.
        start: The part of it that was done before.
        enabled: False shows nothing, as on all ranks but the first.
    """

    def __init__(self, total: float, *, start: int = 0, enabled: bool = True) -> None:
        self._console = Console(soft_wrap=True)
        self._total, self._start, self._enabled = total, start, enabled
        self._began = self._shown = time.monotonic()
        self._bar: Bar | None = None

    def __enter__(self) -> Progress:
        if self._enabled and self._console.is_terminal:
            self._bar = Bar(TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(), console=self._console)
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total, completed=self._start)
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def message(self, text: str) -> None:
        """Prints a line above the progress."""
        if self._enabled:
            self._console.print(text, highlight=False, markup=False)

    def update(self, done: float, text: str, *, always: bool = False) -> None:
        """Shows how much is done.

        Args:
            done: Work that is done, ``start`` included.
            text: The state.
            always: Whether a plain line is due, however short the time since the one before.
        """
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=done, description=text)
        elif always or now - self._shown >= EVERY_S:
            self._shown = now
            left = (now - self._began) / max(done - self._start, 1e-9) * (self._total - done)
            self.message(f"{text}  {clock(left)} left")
