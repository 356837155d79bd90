"""Figures of the report. A scheme has one colour and marker in all of them; hzero's are solid, others pale or dashed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from benchmarks.report.results import SCHEMES, Comparison, Result
from benchmarks.report.series import Series, series_of
from benchmarks.rows import StepsRow

#: Okabe and Ito's colours, which stay apart for colour-blind readers.
COLOURS = _BLUE, _RED, _GREEN, _PINK, _ORANGE, _SKY, _BLACK = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"
)  # fmt: skip
_BROWN = "#8B5A2B"
#: In the order of `SCHEMES`. Schemes of one idea share a colour, such as hzero's zero3 and DeepSpeed's.
_OTHERS = (_BLACK, _ORANGE, _BROWN, _GREEN, _PINK, _BLUE, _SKY)
_OWN = (_BLUE, _SKY, _PINK, _GREEN, _ORANGE, _RED)
_COLOURS = dict(zip(SCHEMES, _OTHERS + _OWN))
_MARKERS = "osD^vPX*<>hpd8H1234+x"
_HATCH = "///"
_AXES = {
    "accumulation": "micro-steps per step",
    "sweep": "Mbit/s between nodes",
}
DPI = 110


@dataclass(frozen=True)
class _Style:
    colour: str
    own: bool
    marker: str

    @property
    def bar(self) -> dict[str, Any]:
        if self.own:
            return {"color": self.colour, "edgecolor": "black", "linewidth": 1.0, "hatch": _HATCH}
        return {"color": self.colour, "alpha": 0.45, "edgecolor": self.colour, "linewidth": 0.8}

    @property
    def line(self) -> dict[str, Any]:
        return {
            "color": self.colour,
            "linewidth": 2.0 if self.own else 1.2,
            "linestyle": "-" if self.own else "--",
            "marker": self.marker,
            "markersize": 5,
            "markerfacecolor": self.colour if self.own else "white",
        }


def styles(rows: Sequence[StepsRow]) -> dict[str, _Style]:
    """Styles by scheme. Schemes beyond `SCHEMES` take the colours and markers that are left, in order."""
    order = list(dict.fromkeys([*SCHEMES, *(row.scheme for row in rows)]))
    used = {_COLOURS.get(row.scheme) for row in rows}
    free = [colour for colour in (*COLOURS, _BROWN) if colour not in used] or list(COLOURS)
    found = {}
    for row in rows:
        place = order.index(row.scheme)
        colour = _COLOURS.get(row.scheme) or free[(place - len(SCHEMES)) % len(free)]
        found[row.scheme] = _Style(colour, row.engine == "hzero", _MARKERS[place % len(_MARKERS)])
    return found


def figures(comparison: Comparison) -> dict[str, Any]:
    """The figures by the end of their file's name. The caller closes them."""
    found: dict[str, Any] = {}
    for result in comparison.detailed()[:1]:
        found["step-time"] = step_time(result)
        found["bytes"] = traffic(result)
    series = {suite: one for suite in ("accumulation", "sweep") if (one := series_of(comparison, suite))}
    if "accumulation" in series:
        found["accumulation"] = _lines(series["accumulation"], "tokens/s, all ranks", lambda row: row.tokens_per_s)
        found["accumulation"].axes[0].set_ylim(bottom=0)
        found["memory"] = memory(series["accumulation"])
    if "sweep" in series:
        found["sweep"] = _lines(series["sweep"], "step time, s (median)", lambda row: row.median_s)
        axes = found["sweep"].axes[0]
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
    return found


def step_time(result: Result) -> Any:
    """Median step time by scheme, with the range of the timed steps."""
    rows = result.rows
    figure, axes = plt.subplots(figsize=(7.6, 1.3 + 0.34 * len(rows)), layout="constrained")
    style = styles(rows)
    for place, row in enumerate(rows):
        low, high = row.median_s - min(row.step_s), max(row.step_s) - row.median_s
        axes.barh(place, row.median_s, 0.72, **style[row.scheme].bar)
        axes.errorbar(row.median_s, place, xerr=[[low], [high]], color="black", capsize=2.5, linewidth=1)
        axes.text(max(row.step_s), place, f"  {row.median_s:.2f}", va="center", fontsize=8.5)
    _schemes_down(axes, rows)
    axes.margins(x=0.1)
    axes.set_xlim(left=0)
    axes.set(xlabel="step time, s: median, and range of the timed steps")
    axes.set_title(_title("Step time", result), fontsize=11)
    _families(figure, rows)
    return figure


def traffic(result: Result) -> Any:
    """Bytes of a step by scheme, a panel per tier: measured, planned, and with an ideal reduce-scatter."""
    rows, tiers = result.rows, result.config.cluster.tiers
    size = (2.6 + 2.9 * len(tiers), 1.7 + 0.34 * len(rows))
    figure, panels = plt.subplots(1, len(tiers), figsize=size, squeeze=False, sharey=True, layout="constrained")
    style = styles(rows)
    planned: dict[str, Any] = {
        "marker": "|",
        "markersize": 14,
        "markeredgewidth": 2.2,
        "color": "black",
        "linestyle": "",
    }
    ideal: dict[str, Any] = {
        "marker": "o",
        "markersize": 5,
        "markerfacecolor": "white",
        "color": "black",
        "linestyle": "",
    }
    for axes, tier in zip(panels[0], tiers):
        for place, row in enumerate(rows):
            axes.barh(place, row.bytes.measured.get(tier, 0) / 1e6, 0.72, **style[row.scheme].bar)
            if row.bytes.planned:
                axes.plot(row.bytes.planned.get(tier, 0) / 1e6, place, **planned)
                axes.plot(row.bytes.ideal.get(tier, 0) / 1e6, place, zorder=4, **ideal)
        axes.set(xlabel="MB per step, all ranks")
        axes.set_title(f"tier {tier}", fontsize=10)
        axes.set_xlim(left=0)
        _schemes_down(axes, rows)
    figure.suptitle(_title("Bytes by tier", result), fontsize=11)
    signs = [Line2D([], [], label="planned", **planned), Line2D([], [], label="ideal reduce-scatter", **ideal)]
    _families(figure, rows, signs)
    return figure


def _title(what: str, result: Result) -> str:
    cluster = result.config.cluster
    rates = [cluster.rate_mbit(tier) for tier in cluster.tiers]
    shown = " / ".join("no limit" if mbit is None else f"{mbit:g}" for mbit in rates)
    shape = f"{cluster.nodes} x {cluster.gpus_per_node} x {cluster.gcds_per_gpu} ranks"
    return f"{what}: {shape}, {shown} Mbit/s, accumulation {result.config.train.accumulation}"


def _lines(series: Series, name: str, of: Callable[[StepsRow], float]) -> Any:
    """A line for each scheme over the logarithmic axis of a series."""
    figure, axes = plt.subplots(figsize=(7.6, 4.0), layout="constrained")
    style = styles(series.schemes())
    ticks = [value for value, _ in series.points]
    last = 2 * max((value for value in ticks if math.isfinite(value)), default=0.5)  # no limit: rightmost
    for row in series.schemes():
        places = {min(value, last): of(one) for value, one in series.of(row.scheme).items()}
        axes.plot(list(places), list(places.values()), label=row.label, **style[row.scheme].line)
    axes.set_xscale("log", base=2)
    names = [f"{value:g}" if math.isfinite(value) else "no limit" for value in ticks]
    axes.set_xticks([min(value, last) for value in ticks], names)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.set(xlabel=_AXES[series.suite], ylabel=name)
    figure.legend(loc="outside right center", frameon=False, fontsize=8.5)
    return figure


def memory(series: Series) -> Any:
    """Step time over the memory of a rank's states, a panel per point of the axis, with the schemes that none beats in both."""
    style, handles = styles(series.schemes()), dict[str, Any]()
    size = (2.4 + 3.0 * len(series.points), 3.9)
    figure, panels = plt.subplots(1, len(series.points), figsize=size, squeeze=False, sharex=True, layout="constrained")
    for axes, (value, result) in zip(panels[0], series.points):
        places = {row.scheme: (row.memory.states / 1e6, row.median_s) for row in result.rows if row.scheme in style}
        edge = [
            place
            for place in sorted(places.values())
            if not any(x <= place[0] and y <= place[1] and (x, y) != place for x, y in places.values())
        ]
        axes.step(*zip(*edge), where="post", color="grey", linewidth=1, zorder=0)
        for row in result.rows:
            if row.scheme in places:
                look = {**style[row.scheme].line, "linestyle": "", "markersize": 8}
                (drawn,) = axes.plot(*places[row.scheme], **look)
                handles.setdefault(row.label, drawn)
        axes.set_title(f"{_AXES[series.suite]}: {value:g}", fontsize=10)
        axes.set(xlabel="MB of states per rank")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel("step time, s (median)")
    figure.legend(list(handles.values()), list(handles), loc="outside right center", frameon=False, fontsize=8.5)
    return figure


def _schemes_down(axes: Any, rows: Sequence[StepsRow]) -> None:
    axes.set_yticks(range(len(rows)), [row.label for row in rows], fontsize=8.5)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)


def _families(figure: Any, rows: Sequence[StepsRow], more: Sequence[Any] = ()) -> None:
    """A legend below that tells hzero's bars from others."""
    handles = [
        Patch(facecolor="#dddddd", edgecolor="black", hatch=_HATCH, label="hzero"),
        Patch(facecolor="#dddddd", edgecolor="#dddddd", label="others"),
        *more,
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8.5)
