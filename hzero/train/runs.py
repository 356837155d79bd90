"""``hzero runs``: a table of runs; and a run as its folder describes it."""

from __future__ import annotations

import argparse
import datetime
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hzero.arguments import Parser
from hzero.files import read_small
from hzero.formatting import table_of
from hzero.terminal import console
from hzero.train import folder, status
from hzero.train.summary import loss_window
from hzero.validation import ConfigError

#: Bytes at the end of the metrics of which the table is made: more than a hundred steps.
_TAIL = 1 << 16


@dataclass(frozen=True)
class Run:
    """A run as its folder describes it.

    Attributes:
        name: The folder's name, shown in pictures.
        state: See `state_of`.
        steps: Metrics of steps.
        evaluations: Metrics of evaluations.
        summary: ``summary.json``; empty if the run has not ended.
        config: Text of the resolved configuration.
        torn: Lines of metrics that could not be read.
    """

    name: str
    state: str
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    summary: dict[str, Any]
    config: str
    torn: int


def read_run(path: Path, *, begun: bool = True) -> Run:
    """Reads a run's folder.

    Args:
        path: The folder.
        begun: Whether a step must have been logged.

    Raises:
        ConfigError: The folder is missing or holds no run, or no step has been logged.
    """
    if not path.is_dir():
        raise ConfigError(f"RUN: no folder {str(path)!r}; `hzero runs` lists runs")
    if not (path / folder.METRICS).is_file():
        raise ConfigError(f"RUN: {str(path)!r} holds no {folder.METRICS}; it is not the folder of a run")
    rows, torn = folder.read_metrics(path)
    steps = [row for row in rows if row["kind"] == "step"]
    if begun and not steps:
        raise ConfigError(f"RUN: no step has been logged in {str(path / folder.METRICS)!r}")
    summary = _summary(path)
    config = read_small(path / folder.CONFIG).decode(errors="replace") if (path / folder.CONFIG).is_file() else ""
    evaluations = [row for row in rows if row["kind"] == "eval"]
    return Run(path.resolve().name, state_of(path, summary), steps, evaluations, summary, config, torn)


def numbers(rows: Sequence[dict[str, Any]], key: str) -> list[float]:
    """A figure of every row; NaN where it is missing or was not finite."""
    return [math.nan if row.get(key) is None else float(row[key]) for row in rows]


def state_of(path: Path, summary: dict[str, Any]) -> str:
    """As the summary says; without one as ``status.json`` does, while the run is under way or where it has noted its end.

    Else ``failed``, where a rank has left an error; ``dead``, where nothing was left, as after a SIGKILL or a loss of power; or
    ``unknown``, where the folder is mounted without locks.
    """
    if summary:
        return str(summary.get("status", "unknown"))
    held, noted = folder.under_way(path), str(status.read(path).get("state", ""))
    if held:
        return noted if noted in status.ALIVE else "running"
    if noted and (noted not in status.ALIVE or held is None):
        return noted
    if held is None:
        return "unknown"
    logs = path / folder.LOGS
    return "failed" if any([*logs.glob("rank*.traceback"), *logs.glob("rank*.refused")]) else "dead"


def overview(path: Path) -> dict[str, Any]:
    """What ``hzero runs --json`` prints of a run. It reads the end of the metrics only.

    Returns:
        ``loss`` is the mean over the last steps, as in the summary; a figure that is not known, or is not finite, is None.

    Raises:
        ConfigError: The folder holds no run, or files that no run has written.
    """
    if not folder.holds_run(path):
        raise ConfigError(f"{path}: holds no run")
    try:
        config = folder.read_config(path)
        rows = [row for row in folder.read_metrics(path, _TAIL)[0] if row["kind"] == "step"]
        done = int(rows[-1]["step"]) if rows else 0
        last = rows[-loss_window(done) :]
        losses = [math.nan if row["loss"] is None else float(row["loss"]) for row in last]
        rates = [float(row["tokens_per_s"]) for row in last if row.get("tokens_per_s") is not None]
        summary = _summary(path)
        rate = summary.get("tokens_per_s") or (statistics.median(rates) if rates else None)
        changed = (path / folder.METRICS).stat().st_mtime
        return {
            "name": path.name,
            "folder": str(path),
            "state": state_of(path, summary),
            "step": done,
            "steps": int(config["train"]["steps"]),
            "loss": folder.finite(statistics.fmean(losses)) if losses else None,
            "tokens_per_s": None if rate is None else float(rate),
            "preset": str(config["zero"].get("preset") or "stock"),
            "model": str(config["model"]["name"]),
            "changed": datetime.datetime.fromtimestamp(changed).astimezone().isoformat(timespec="seconds"),
        }
    except (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        cause = " ".join(str(error).split())
        raise ConfigError(f"{path}: its files are not those of a run ({type(error).__name__}: {cause})") from None


def parser() -> argparse.ArgumentParser:
    """Reads the command's arguments."""
    made = Parser(
        prog="hzero runs",
        description="Lists runs, the one with the newest metrics first: state, steps, loss (mean over the last steps, as in the "
        "summary), tokens/s, preset and model.",
        epilog="states: pending (it starts); running; saving; finished; interrupted, timed out (resume=auto goes on); failed "
        "(the reason is in status.json and logs/); dead (ended without a word, as after a SIGKILL); unknown (the folder is "
        "mounted without locks).",
    )
    made.add_argument("folder", nargs="?", metavar="FOLDER", type=Path, default=Path("runs"), help="default: runs")
    made.add_argument("--json", action="store_true", help="print JSON")
    return made


def run_runs(arguments: Sequence[str]) -> int:
    """Runs the command on its arguments. Raises `ConfigError` for input that cannot be used."""
    parsed = parser().parse_args(list(arguments))
    runs, skipped = list_runs(parsed.folder)
    if parsed.json:
        print(json.dumps({"runs": runs, "skipped": skipped}, indent=1))
        return 0
    out = console()
    if runs:
        head = ("run", "state", "*step", "*loss", "*tokens/s", "preset", "model", "changed")
        table = table_of("", head, map(_cells, runs))
        for column in table.columns[1:5]:  # names may be broken where the window is narrow, figures not
            column.no_wrap = True
        out.print(table)
    else:
        out.print(f"no runs in {parsed.folder}")
    for remark in skipped:
        out.print(f"skipped: {remark}", soft_wrap=True)
    return 0


def list_runs(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Overviews of the runs in a folder, newest first, and why other folders in it are skipped.

    Raises:
        ConfigError: There is no such folder.
    """
    if not path.is_dir():
        raise ConfigError(f"FOLDER: no folder {str(path)!r}")
    runs, skipped = [], []
    for entry in _folders(path):
        try:
            runs.append(overview(entry))
        except ConfigError as error:
            skipped.append(str(error))
    return sorted(runs, key=lambda run: datetime.datetime.fromisoformat(run["changed"]), reverse=True), skipped


def _folders(path: Path) -> Iterator[Path]:
    if folder.holds_run(path):
        yield path
    else:
        yield from sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _cells(run: dict[str, Any]) -> tuple[str, ...]:
    loss, rate = run["loss"], run["tokens_per_s"]
    return (
        run["name"],
        run["state"],
        f"{run['step']:,} of {run['steps']:,}",
        "none" if loss is None else f"{loss:.4f}",
        "" if rate is None else f"{rate:,.0f}",
        run["preset"],
        run["model"],
        datetime.datetime.fromisoformat(run["changed"]).strftime("%Y-%m-%d %H:%M"),
    )


def _summary(path: Path) -> dict[str, Any]:
    try:
        summary = json.loads(read_small(path / folder.SUMMARY))
    except (OSError, ValueError, RecursionError):
        return {}
    return summary if isinstance(summary, dict) else {}
