"""Recordings of some steps of rank 0: hzero's trace of hops, and torch's profile."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import torch

from hzero.collectives import Trace
from hzero.settings.settings import Settings
from hzero.train import folder


class Recordings:
    """Starts and ends the recordings that the settings ask for.

    Args:
        settings: The run's settings.
        run_dir: The run's folder.
        own: The engine's stage; None without hzero.
        metrics: Takes the traced shares; None on other ranks than 0, which record nothing.
    """

    def __init__(self, settings: Settings, run_dir: Path, own: Any, metrics: folder.Metrics | None) -> None:
        self._run_dir, self._own, self._metrics = run_dir, own, metrics
        self._traced = self._profiled = range(0)
        if metrics is not None:
            self._traced, self._profiled = (
                range(steps[0], steps[1] + 1) if (steps := settings[block]["steps"]) else range(0)
                for block in ("trace", "profile")
            )
        self._trace: Trace | None = None
        self._profile: Any = None
        self._tracing, self._done = contextlib.ExitStack(), 0

    def __enter__(self) -> Recordings:
        self._tracing.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._tracing.__exit__(*error)  # after an error nothing is written

    def before(self, step: int) -> None:
        """Before a step."""
        if step in self._traced and self._trace is None and self._own is not None:
            self._trace = self._tracing.enter_context(self._own.trace(self._run_dir / folder.TRACE))
        if step in self._profiled and self._profile is None:
            self._profile = torch.profiler.profile()  # of all devices that there are
            self._profile.start()

    def after(self, step: int, stopped: bool) -> None:
        """After a step; ``stopped`` if it was the last one."""
        self._done += 1
        if self._profile is not None and (stopped or step == self._profiled[-1]):
            self._profile.stop()
            self._profile.export_chrome_trace(str(self._run_dir / folder.PROFILE))
            self._profile, self._profiled = None, range(0)
        if self._metrics is not None and self._trace is not None and (stopped or step == self._traced[-1]):
            self._tracing.close()  # writes it
            for at, tiers in enumerate(self._trace.shares(), max(self._traced[0], step + 1 - self._done)):
                shares = {tier: dataclasses.asdict(found) for tier, found in tiers.items()}
                self._metrics.add({"kind": "trace", "step": at, "tiers": shares})
            self._trace, self._traced = None, range(0)
