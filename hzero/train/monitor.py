"""What a run writes to TensorBoard, Weights & Biases or CSV files, by DeepSpeed's monitor."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from hzero.train import folder
from hzero.validation import ConfigError

#: What each kind needs besides DeepSpeed.
_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb"}


def check(kind: str | None) -> None:
    """Refuses a kind whose package is not installed.

    Raises:
        ConfigError: Names the package.
    """
    package = _PACKAGES.get(kind or "")
    if package is not None and importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"train.monitor: found {kind}, and the package {package} is not installed; pip install {package}"
        )


class Monitor:
    """Writes figures of rank 0.

    Args:
        kind: ``tensorboard``, ``wandb``, ``csv``, or None for none.
        run_dir: The run's folder; files go into `hzero.train.folder.MONITOR`.
        name: The run's name.
        warn: Takes a line where files cannot be written.
    """

    def __init__(self, kind: str | None, run_dir: Path, name: str, warn: Callable[[str], None]) -> None:
        self._kind, self._path, self._warn = kind, run_dir / folder.MONITOR, warn
        self._master = None
        if kind is None:
            return
        from deepspeed.monitor.config import get_monitor_config
        from deepspeed.monitor.monitor import MonitorMaster

        place = {"output_path": str(run_dir), "job_name": folder.MONITOR}
        if kind == "wandb":
            (run_dir / folder.MONITOR).mkdir(exist_ok=True)
            os.environ.setdefault("WANDB_DIR", str(run_dir / folder.MONITOR))
            os.environ.setdefault("WANDB_NAME", name)
            place = {"project": os.environ.get("WANDB_PROJECT", "hzero")}
        key = "csv_monitor" if kind == "csv" else kind
        self._master = MonitorMaster(get_monitor_config({key: {"enabled": True, **place}}))

    def write(self, step: int, figures: Mapping[str, float | None]) -> None:
        """Writes figures of a step; those that are None are left out."""
        if self._master is not None:
            with folder.may_write(self._path, self._warn):
                self._master.write_events([(name, value, step) for name, value in figures.items() if value is not None])

    def close(self) -> None:
        """Writes what is left."""
        if self._kind == "wandb":
            import wandb

            wandb.finish()
