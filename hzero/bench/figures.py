"""Figures of the comparison. A peer has one colour in all of them; hzero's peers are solid, others pale or dashed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from hzero.bench.curves import by_preset, smoothed
from hzero.bench.measured import STOCK_PRESET, Chosen, Measurement, elapsed
from hzero.bench.reach import Reach, reach
from hzero.bench.rows import ConvergenceRow, StepsRow
from hzero.bench.series import Series, efficiency, series_of
from hzero.bench.styles import HATCH, colours, styles
from hzero.bench.suites import SUITES
from hzero.train.report import number

#: Most panels beside each other.
_PANELS = 3
#: Pixels an inch.
DPI = 110
#: Ends of the names of all figures.
ENDS = ("step-time", "bytes", "loss-time", "accumulation", "nodes", "scaling", "sweep", "convergence")


def figures(chosen: Chosen) -> dict[str, Any]:
    """The figures of what was measured, by the end of their file's name. The caller closes them."""
    found: dict[str, Any] = {}
    detailed = chosen.detailed()
    if detailed:
        found["step-time"] = step_time(detailed)
        found["bytes"] = traffic(detailed[0])
    joined, _ = reach(chosen)
    if joined:
        found["loss-time"] = loss_reach(joined)
    elif detailed:
        found["loss-time"] = loss_time(detailed[0])
    series = {suite: one for suite in SUITES if SUITES[suite].shown == "series" and (one := series_of(chosen, suite))}
    if "accumulation" in series:
        found["accumulation"] = accumulation(series["accumulation"])
    nodes = [series[suite] for suite in ("nodes_weak", "nodes_strong") if suite in series]
    if nodes:
        found["nodes"] = rates(nodes)
        found["scaling"] = scaling(nodes)
    if "sweep" in series:
        found["sweep"] = sweep(series["sweep"])
    if chosen.runs:
        found["convergence"] = convergence(chosen.runs)
    return found


def step_time(measurements: Sequence[Measurement]) -> Any:
    """Median step time by peer with the range of the timed steps, a panel a measurement, three beside each other."""
    most = max(len(measurement.rows) for measurement in measurements)
    down, across = -(-len(measurements) // _PANELS), min(len(measurements), _PANELS)
    size = (6.2 + 3.4 * (across - 1), 0.6 + (0.9 + 0.36 * most) * down)
    alike = len({tuple(row.label for row in measurement.rows) for measurement in measurements}) == 1
    figure, panels = plt.subplots(down, across, figsize=size, squeeze=False, sharey=alike, layout="constrained")
    for axes in panels.flat[len(measurements) :]:
        axes.set_visible(False)
    style = styles([row for measurement in measurements for row in measurement.rows])
    for axes, measurement in zip(panels.flat, measurements):
        rows = measurement.rows
        for place, row in enumerate(rows):
            axes.barh(place, row.median_s, 0.72, **style[row.peer].bar)
            low, high = row.median_s - min(row.step_s), max(row.step_s) - row.median_s
            axes.errorbar(row.median_s, place, xerr=[[low], [high]], color="black", capsize=2.5, linewidth=1)
            axes.annotate(
                f"{row.median_s:.2f}",
                (max(row.step_s), place),
                (4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
        _peers_down(axes, rows)
        axes.margins(x=0.18)
        axes.set_xlim(left=0)
        axes.set(xlabel="step time, s", title=f"{measurement.title}\n{measurement.config.cluster.text()}")
        axes.title.set_fontsize(9.5)
    figure.suptitle("Step time: median, and range of the timed steps", fontsize=11)
    _families(figure, [row for measurement in measurements for row in measurement.rows])
    return figure


def traffic(measurement: Measurement) -> Any:
    """Bytes of a step by peer, a panel a tier: measured, planned, and with an ideal reduce-scatter."""
    rows = measurement.rows
    tiers = rows[0].tiers or ("gcd",)
    size = (2.6 + 2.9 * len(tiers), 1.7 + 0.36 * len(rows))
    style = styles(rows)
    figure, panels = plt.subplots(1, len(tiers), figsize=size, squeeze=False, sharey=True, layout="constrained")
    for axes, tier in zip(panels[0], tiers):
        for place, row in enumerate(rows):
            axes.barh(place, row.bytes.measured.get(tier, 0) / 1e6, 0.72, **style[row.peer].bar)
            planned, ideal = (values.get(tier, 0) / 1e6 for values in (row.bytes.planned, row.bytes.ideal))
            axes.plot(planned, place, marker="|", markersize=15, markeredgewidth=2.2, color="black", linestyle="")
            axes.plot(
                ideal, place, marker="o", markersize=5, markerfacecolor="white", color="black", linestyle="", zorder=4
            )
        axes.set(xlabel="MB a step, all ranks", title=f"tier {tier}")
        axes.set_xlim(left=0)
    _peers_down(panels[0][0], rows)
    for axes in panels[0][1:]:
        axes.grid(axis="x", alpha=0.3)
    figure.suptitle(f"Bytes by tier, {measurement.title}", fontsize=11)
    signs = [
        Line2D([], [], color="black", marker="|", markersize=12, markeredgewidth=2.2, linestyle="", label="planned"),
        Line2D([], [], color="black", marker="o", markerfacecolor="white", linestyle="", label="ideal reduce-scatter"),
    ]
    _families(figure, rows, signs)
    return figure


def loss_time(measurement: Measurement) -> Any:
    """Training loss against elapsed time by peer, of the few steps of a measurement."""
    steps = max(len(row.losses) for row in measurement.rows)
    curves = {row.peer: (elapsed(row), [number(loss) for loss in row.losses]) for row in measurement.rows}
    figure = _loss_curves(
        measurement.rows, curves, f"Loss of the first {steps} steps against time, {measurement.title}"
    )
    figure.axes[0].set(xlabel="time since the first step, s (warm-up steps at the median)")
    return figure


def loss_reach(found: Reach) -> Any:
    """Smoothed training loss of the convergence runs against the time that their steps take on emulated links."""
    curves = {
        row.peer: ([step * row.median_s for step in range(1, len(found.curves[row.peer]) + 1)], found.curves[row.peer])
        for row in found.rows()
    }
    figure = _loss_curves(
        found.rows(), curves, "Loss of the convergence runs against time on emulated links", marks=False
    )
    axes = figure.axes[0]
    axes.set(xlabel=f"steps x median step time of {found.measurement.title}, s", ylabel="training loss (smoothed)")
    for loss in found.losses:
        axes.axhline(loss, color="#999999", linewidth=0.8, linestyle=":", zorder=1)
    return figure


def _loss_curves(rows: Sequence[StepsRow], curves: Mapping[str, Any], title: str, *, marks: bool = True) -> Any:
    figure, axes = plt.subplots(figsize=(8.6, 4.4), layout="constrained")
    style = styles(rows)
    for row in rows:
        line = style[row.peer].line if marks else {**style[row.peer].line, "marker": ""}
        axes.plot(*curves[row.peer], label=row.label, **line)
    axes.set(ylabel="training loss, nats a token")
    axes.set_title(title, fontsize=11)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right center", frameon=False, fontsize=8.5)
    return figure


def accumulation(series: Series) -> Any:
    """Tokens/s by accumulation."""
    return _lines(
        [series],
        lambda series, peer: [(value, row.tokens_per_s) for value, row in series.of(peer)],
        "tokens/s, all ranks",
        "Tokens/s by accumulation",
    )


def rates(series: Sequence[Series]) -> Any:
    """Tokens/s a rank by number of nodes, a panel for weak and for strong."""
    figure = _lines(
        series,
        lambda series, peer: [(value, row.tokens_per_s / row.world_size) for value, row in series.of(peer)],
        "tokens/s a rank",
        "Tokens/s a rank by number of nodes",
    )
    _logarithmic(figure.axes[0])
    return figure


def scaling(series: Sequence[Series]) -> Any:
    """Scaling efficiency by number of nodes, a panel for weak and for strong."""
    figure = _lines(series, efficiency, "tokens/s a rank over those of the fewest nodes", "Scaling efficiency")
    figure.axes[0].set_ylim(bottom=0)
    return figure


def sweep(series: Series) -> Any:
    """Step time by the rate between nodes."""
    figure = _lines(
        [series],
        lambda series, peer: [(value, row.median_s) for value, row in series.of(peer)],
        "step time, s (median)",
        "Step time by the rate between nodes",
    )
    _logarithmic(figure.axes[0])
    return figure


def _logarithmic(axes: Any) -> None:
    """Logarithmic upwards, with plain numbers at 1, 2 and 5."""
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")


def convergence(rows: Sequence[ConvergenceRow]) -> Any:
    """Smoothed training loss by preset, mean over the seeds with the band between them; and the same less stock's.

    Only seeds that all presets have are drawn, where there are such.
    """
    presets = by_preset(rows)
    common = set.intersection(*({row.seed for row in runs} for runs in presets.values()))
    if common:
        presets = {name: [row for row in runs if row.seed in common] for name, runs in presets.items()}
    stock = {row.seed: smoothed(row) for row in presets.get(STOCK_PRESET, []) if common}
    figure, panels = plt.subplots(
        1, 2 if stock else 1, figsize=(11.0 if stock else 7.0, 4.4), squeeze=False, layout="constrained"
    )
    colour = colours(list(presets))
    for name, runs in presets.items():
        curves = [smoothed(row) for row in runs]
        _band(panels[0][0], name, curves, colour[name])
        if stock:
            bases = [stock[row.seed] for row in runs]
            _band(panels[0][1], name, [[x - y for x, y in zip(*pair)] for pair in zip(curves, bases)], colour[name])
    panels[0][0].set_ylabel("training loss, nats a token (smoothed)")
    for axes, text in zip(panels[0], ("training loss", "difference to stock with the same seed")):
        axes.set(xlabel="optimizer step")
        axes.set_title(text, fontsize=9.5)
        axes.grid(alpha=0.3)
    seeds = ", ".join(str(seed) for seed in sorted(common)) if common else "of each preset its own"
    figure.suptitle(f"Convergence: mean of the seeds ({seeds}), and the band between them", fontsize=11)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=8.5)
    return figure


def _band(axes: Any, name: str, curves: Sequence[Sequence[float]], colour: str) -> None:
    """The mean of curves, and the band between the least and the most of them."""
    at = list(zip(*curves))
    steps, stock = range(1, len(at) + 1), name == STOCK_PRESET
    axes.plot(
        *(steps, [math.fsum(values) / len(values) for values in at]),
        color=colour,
        linewidth=1.6,
        linestyle="--" if stock else "-",
        zorder=4 if stock else 3,
        label="stock (DeepSpeed ZeRO-3)" if stock else name,
    )
    axes.fill_between(steps, [min(v) for v in at], [max(v) for v in at], color=colour, alpha=0.15, linewidth=0)


def _lines(series: Sequence[Series], values: Any, ylabel: str, title: str) -> Any:
    """Lines by peer over a logarithmic axis, a panel a series."""
    size = (3.2 + 4.4 * len(series), 4.4)
    figure, panels = plt.subplots(1, len(series), figsize=size, squeeze=False, sharey=True, layout="constrained")
    handles: dict[str, Any] = {}
    style = styles([row for one in series for row in one.peers()])
    for axes, one in zip(panels[0], series):
        ticks = [value for value, _ in one.points]
        limited = [value for value in ticks if math.isfinite(value)]
        last = 2 * max(limited, default=0.5)  # where a rate that is not limited stands: right of all others
        for row in one.peers():
            pairs = values(one, row.peer)
            if pairs:
                (line,) = axes.plot([min(x, last) for x, _ in pairs], [y for _, y in pairs], **style[row.peer].line)
                handles.setdefault(row.label, line)
        axes.set_xscale("log", base=2)
        names = [f"{value:g}" if math.isfinite(value) else "not\nlimited" for value in ticks]
        axes.set_xticks([min(value, last) for value in ticks], names)
        axes.minorticks_off()
        axes.set(xlabel=SUITES[one.suite].axis)
        if len(series) > 1:
            axes.set_title(SUITES[one.suite].title, fontsize=10)
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel(ylabel)
    figure.suptitle(title, fontsize=11)
    figure.legend(list(handles.values()), list(handles), loc="outside right center", frameon=False, fontsize=8.5)
    return figure


def _peers_down(axes: Any, rows: Sequence[StepsRow]) -> None:
    axes.set_yticks(range(len(rows)), [row.label for row in rows], fontsize=8.5)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)


def _families(figure: Any, rows: Sequence[StepsRow], more: Sequence[Any] = ()) -> None:
    """A legend below that tells hzero's bars from others."""
    kinds: Mapping[bool, Any] = {
        True: Patch(facecolor="#dddddd", edgecolor="black", hatch=HATCH, label="hzero"),
        False: Patch(facecolor="#dddddd", edgecolor="#dddddd", label="others"),
    }
    there = {row.engine == "hzero" for row in rows}
    handles = [kinds[own] for own in (True, False) if own in there] + list(more)
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8.5)
