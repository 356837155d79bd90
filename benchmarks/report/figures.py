"""Figures of the report: schemes sorted, labelled directly, hzero's in one colour, the baseline in another, the rest grey."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.lines import Line2D

from benchmarks.report.results import STOCK, Comparison, Result
from benchmarks.report.series import Series, series_of
from benchmarks.rows import StepsRow

#: Okabe and Ito's red and blue, which stay apart for colour-blind readers.
OWN, BASELINE, OTHER = "#D55E00", "#0072B2", "#8c959f"
_AXES = {"accumulation": "micro-batches per step", "sweep": "Mbit/s between nodes"}
DPI = 110


def _colour(row: StepsRow) -> str:
    return OWN if "hzero" in row.label else BASELINE if row.scheme == STOCK else OTHER


def figures(comparison: Comparison) -> dict[str, Any]:
    """The figures by the end of their file's name. The caller closes them."""
    found: dict[str, Any] = {}
    for result in comparison.detailed()[:1]:
        found["step-time"] = step_time(result)
        found["bytes"] = traffic(result)
    series = {suite: one for suite in ("accumulation", "sweep") if (one := series_of(comparison, suite))}
    if "accumulation" in series:
        found["accumulation"] = _lines(series["accumulation"], "tokens/s, all ranks", lambda row: row.tokens_per_s)
        found["memory"] = memory(series["accumulation"])
    if "sweep" in series:
        found["sweep"] = _lines(series["sweep"], "step time, s (median)", lambda row: row.median_s)
    return found


def step_time(result: Result) -> Any:
    """Median step time by scheme, fastest first, with the range of the timed steps."""
    rows = sorted(result.rows, key=lambda row: row.median_s)
    figure, axes = plt.subplots(figsize=(7.2, 1.1 + 0.3 * len(rows)), layout="constrained")
    for place, row in enumerate(rows):
        low, high = row.median_s - min(row.step_s), max(row.step_s) - row.median_s
        axes.barh(place, row.median_s, 0.7, color=_colour(row))
        axes.errorbar(row.median_s, place, xerr=[[low], [high]], color="black", capsize=2.5, linewidth=1)
        axes.text(max(row.step_s), place, f"  {row.median_s:.2f} s", va="center", fontsize=9)
    _schemes_down(axes, rows)
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    axes.xaxis.set_visible(False)
    figure.suptitle(_title("Step time: median, and range of the timed steps", result), x=0.01, ha="left", fontsize=10)
    return figure


def traffic(result: Result) -> Any:
    """Bytes of a step by scheme, fewest between nodes first, a panel per tier: measured, and as planned."""
    tiers = result.config.cluster.tiers
    rows = sorted(result.rows, key=lambda row: row.bytes.measured.get(tiers[-1], 0))
    size = (2.4 + 2.4 * len(tiers), 1.4 + 0.3 * len(rows))
    figure, panels = plt.subplots(1, len(tiers), figsize=size, squeeze=False, sharey=True, layout="constrained")
    planned: dict[str, Any] = {"marker": "|", "markersize": 13, "markeredgewidth": 2, "color": "black", "linestyle": ""}
    for axes, tier in zip(panels[0], tiers):
        for place, row in enumerate(rows):
            count = row.bytes.measured.get(tier, 0) / 1e6
            axes.barh(place, count, 0.7, color=_colour(row))
            axes.text(count, place, f"  {count:.3g}", va="center", fontsize=8.5)
            if row.bytes.planned:
                axes.plot(row.bytes.planned.get(tier, 0) / 1e6, place, **planned)
        axes.set_title(f"tier {tier}, MB", fontsize=10)
        axes.margins(x=0.2)
        axes.set_xlim(left=0)
        axes.xaxis.set_visible(False)
        _schemes_down(axes, rows)
    figure.suptitle(_title("Bytes per step, all ranks, by tier", result), x=0.01, ha="left", fontsize=10)
    signs = [Line2D([], [], label="planned", **planned)]
    figure.legend(handles=signs, loc="outside lower right", frameon=False, fontsize=8.5)
    return figure


def _title(what: str, result: Result) -> str:
    cluster = result.config.cluster
    rates = [cluster.rate_mbit(tier) for tier in cluster.tiers]
    shown = " / ".join("no limit" if mbit is None else f"{mbit:g}" for mbit in rates)
    ranks = cluster.nodes * cluster.packages_per_node * cluster.devices_per_package
    shape = f"{ranks} CPU ranks, emulated links ({shown} Mbit/s)"
    return f"{what}\n{shape}, accumulation {result.config.train.accumulation}"


def _lines(series: Series, name: str, of: Callable[[StepsRow], float]) -> Any:
    """A line for each scheme over the logarithmic axis of a series, named at its right end."""
    figure, axes = plt.subplots(figsize=(7.2, 0.8 + 0.3 * max(11, len(series.schemes()))), layout="constrained")
    ticks = [value for value, _ in series.points]
    last = 2 * max((value for value in ticks if math.isfinite(value)), default=0.5)  # no limit: rightmost
    ends = []
    for row in series.schemes():
        places = {min(value, last): of(one) for value, one in series.of(row.scheme).items()}
        style = "-" if "hzero" in row.label else "--"
        axes.plot(list(places), list(places.values()), style, color=_colour(row), marker="o", markersize=3.5)
        ends.append((list(places.values())[-1], row))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
    names = [f"{value:g}" if math.isfinite(value) else "no limit" for value in ticks]
    axes.set_xticks([min(value, last) for value in ticks], names)
    axes.tick_params(axis="x", which="minor", length=0)
    axes.grid(alpha=0.3)
    axes.set(xlabel=_AXES[series.suite], ylabel=name)
    _names_right(axes, ends)
    figure.suptitle(f"{name}\n8 CPU ranks, emulated links", x=0.01, ha="left", fontsize=10)
    return figure


def _names_right(axes: Any, ends: Sequence[tuple[float, StepsRow]]) -> None:
    """Names beside the ends of lines, far enough apart to be read, each with a thin line to its end."""
    low, high = axes.get_ylim()
    below = -1.0
    for value, row in sorted(ends, key=lambda end: end[0]):
        share = math.log(value / low) / math.log(high / low)
        below = max(share, below + 1.0 / max(16, len(ends)))
        arrow = {"arrowstyle": "-", "color": "#cccccc", "linewidth": 0.8}
        place = {"xy": (1, share), "xytext": (1.06, below), "xycoords": "axes fraction", "textcoords": "axes fraction"}
        axes.annotate(row.label, **place, color=_colour(row), fontsize=8.5, va="center", arrowprops=arrow)


def memory(series: Series) -> Any:
    """Step time over the memory of a rank's states, a panel per point of the axis; schemes that none beats in both are named."""
    columns = min(2, len(series.points))
    down = -(-len(series.points) // columns)
    figure, panels = plt.subplots(down, columns, figsize=(7.2, 0.6 + 2.7 * down), squeeze=False, layout="constrained")
    for axes, (value, result) in zip(panels.flat, series.points):
        places = [(row.memory.states / 1e6, row.median_s, row) for row in result.rows]
        edge = [
            (x, y, row)
            for x, y, row in sorted(places, key=lambda one: one[:2])
            if not any(u <= x and v <= y and (u, v) != (x, y) for u, v, _ in places)
        ]
        axes.step([x for x, _, _ in edge], [y for _, y, _ in edge], where="post", color=OTHER, linewidth=1, zorder=0)
        for x, y, row in places:
            axes.plot(x, y, "o", color=_colour(row), markersize=6)
        axes.set_title(f"{_AXES[series.suite]}: {value:g}", fontsize=10)
        axes.set(xlabel="MB of states per rank", ylabel="step time, s")
        axes.set_xlim(0, 1.35 * max(x for x, _, _ in places))
        axes.set_ylim(0, 1.15 * max(y for _, y, _ in places))
        below = 0.0
        for x, y, row in reversed(edge):
            below = max(y, below + 0.09 * axes.get_ylim()[1])
            axes.annotate(row.label, (x, below), (9, 0), textcoords="offset points", color=_colour(row), fontsize=8)
        axes.grid(alpha=0.3)
    figure.suptitle("Step time and memory\n8 CPU ranks, emulated links", x=0.01, ha="left", fontsize=10)
    return figure


def _schemes_down(axes: Any, rows: Sequence[StepsRow]) -> None:
    axes.set_yticks(range(len(rows)), [row.label for row in rows], fontsize=9)
    for label, row in zip(axes.get_yticklabels(), rows):
        label.set_color("black" if _colour(row) == OTHER else _colour(row))
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.tick_params(left=False)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
