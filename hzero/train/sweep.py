"""A sweep: the runs of a multirun as one table, ``sweep.csv``, and one picture, ``sweep.png``."""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from hzero.files import replacing
from hzero.train import folder
from hzero.train.runs import Run, numbers
from hzero.train.summary import ends

#: Keys that differ between the runs of any sweep, or that change nothing of what is measured.
_ASIDE = ("run.", "resume", "launcher.", "train.time_limit")
#: Results in the table, by their names in it.
_RESULTS = ("state", "ranks", "steps", "first loss", "last loss", "tokens/s", "TFLOPS per rank", "s per step")


def members(path: Path) -> list[Path]:
    """Folders of the runs in a folder that holds no run itself, by name; empty for any other path."""
    if not path.is_dir() or (path / folder.METRICS).exists():
        return []
    return sorted(entry for entry in path.iterdir() if (entry / folder.METRICS).is_file())


def write_sweep(runs: Sequence[Run], output: Path) -> list[str]:
    """Writes the table and the picture. Returns their names."""
    choices = chosen(runs)
    rows = [{"run": run.name, **choice, **_results(run)} for run, choice in zip(runs, choices)]
    with replacing(output / "sweep.csv") as file:
        table = csv.DictWriter(file, ["run", *choices[0], *_RESULTS], lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
    _draw(runs, choices, rows, output / "sweep.png")
    return ["sweep.csv", "sweep.png"]


def chosen(runs: Sequence[Run]) -> list[dict[str, str]]:
    """Of each run the keys of the configuration in which the runs differ, with their values."""
    flat = [_flat(_config(run)) for run in runs]
    keys = [key for key in dict.fromkeys(key for one in flat for key in one) if not key.startswith(_ASIDE)]
    keys = [key for key in keys if len({one.get(key) for one in flat}) > 1]
    return [{key: one.get(key, "") for key in keys} for one in flat]


def _config(run: Run) -> Any:
    try:
        return yaml.safe_load(run.config)
    except yaml.YAMLError:
        return {}


def _flat(value: Any, prefix: str = "") -> dict[str, str]:
    if isinstance(value, dict) and value:
        return {name: text for key, item in value.items() for name, text in _flat(item, f"{prefix}.{key}").items()}
    return {prefix[1:]: value if isinstance(value, str) else json.dumps(value)}


def _results(run: Run) -> dict[str, Any]:
    first, last, _ = ends([row["loss"] for row in run.steps])
    values = (run.state, run.summary.get("world_size", ""), run.steps[-1]["step"] if run.steps else 0, first, last)
    return dict(zip(_RESULTS, (*values, *(_median(run, key) for key in ("tokens_per_s", "tflops_per_rank", "step_s")))))


def _median(run: Run, key: str) -> float | str:
    known = [value for value in numbers(run.steps, key) if value == value]
    return statistics.median(known) if known else ""


def _draw(runs: Sequence[Run], choices: Sequence[dict[str, str]], rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Throughput against the number of ranks, a curve for each other choice; or a bar for each run."""
    from hzero.train.pictures import look_of, plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    shown = [(row, choice) for row, choice in zip(rows, choices) if row["tokens/s"] != ""]
    if len({row["ranks"] for row, _ in shown if row["ranks"]}) > 1:
        lines: dict[str, list[tuple[int, float]]] = {}
        for row, choice in shown:
            others = {key: value for key, value in choice.items() if not key.startswith("topology.")}
            lines.setdefault(_label(others), []).append((int(row["ranks"] or 0), row["tokens/s"]))
        for index, (label, points) in enumerate(lines.items()):
            look = look_of(index)
            axes.plot(*zip(*sorted(points)), color=look.colour, linestyle=look.line, marker="o", label=label)
        axes.set(xlabel="ranks", ylabel="tokens/s", xscale="log", yscale="log")
        if any(lines):
            axes.legend(frameon=False)
    else:
        axes.barh(
            [_label(choice) or row["run"] for row, choice in shown],
            [row["tokens/s"] for row, _ in shown],
            color=look_of(0).colour,
        )
        axes.invert_yaxis()
        axes.set(xlabel="tokens/s")
    with replacing(path, "wb") as file:
        figure.savefig(file, dpi=130, format="png")
    plt.close(figure)


def _label(choice: dict[str, str]) -> str:
    return ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in choice.items())
