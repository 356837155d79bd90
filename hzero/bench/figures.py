"""Figures of the comparison. A peer has one colour in all of them; hzero's peers are solid, others pale or dashed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from hzero.bench.curves import STOCK, by_preset, groups
from hzero.bench.measured import Chosen, Measurement, elapsed
from hzero.bench.rows import ConvergenceRow, StepsRow
from hzero.bench.series import Series, all_series, efficiency
from hzero.train.report import COLOURS, number, smooth

_BLUE, _RED, _GREEN, _PINK, _ORANGE, _SKY, _BLACK = COLOURS
#: Peers with the same idea share a colour: hzero's zero3 and DeepSpeed's, the two hpZ.
_OF_PEER = {
    "zero3": _BLUE,
    "hpz": _SKY,
    "zeropp": _PINK,
    "lossless": _GREEN,
    "mild": _ORANGE,
    "topo": _RED,
    "zero3-deepspeed": _BLUE,
    "hpz-deepspeed": _SKY,
    "hsdp-node": _GREEN,
    "hsdp-package": _PINK,
    "ddp": _BLACK,
    "fsdp2": _ORANGE,
    "fsdp2-node": _RED,
    STOCK: _BLACK,
}
_MARKERS = "osD^vPX*<>hpd"
_HATCH = "///"
#: Most panels in one figure.
_PANELS = 3
#: Pixels an inch.
DPI = 110
#: Ends of the names of all figures.
ENDS = ("step-time", "bytes", "loss-time", "accumulation", "scaling", "sweep", "convergence")


@dataclass(frozen=True)
class Style:
    """How a peer is drawn.

    Attributes:
        colour: The same in all figures.
        own: Whether it is one of hzero's.
        marker: Of lines.
    """

    colour: str
    own: bool
    marker: str

    @classmethod
    def of(cls, row: StepsRow) -> Style:
        """The style of a peer; unknown ones take theirs by name, so that it is the same everywhere."""
        names = list(_OF_PEER)
        place = names.index(row.peer) if row.peer in names else sum(map(ord, row.peer))
        colour = _OF_PEER.get(row.peer, COLOURS[place % len(COLOURS)])
        return cls(colour, row.engine == "hzero", _MARKERS[place % len(_MARKERS)])

    @property
    def bar(self) -> dict[str, Any]:
        """Arguments of a bar."""
        if self.own:
            return {"color": self.colour, "edgecolor": "black", "linewidth": 1.0, "hatch": _HATCH}
        return {"color": self.colour, "alpha": 0.45, "edgecolor": self.colour, "linewidth": 0.8}

    @property
    def line(self) -> dict[str, Any]:
        """Arguments of a line."""
        width, dashes = (2.0, "-") if self.own else (1.2, "--")
        face = self.colour if self.own else "white"
        return {
            "color": self.colour,
            "linewidth": width,
            "linestyle": dashes,
            "marker": self.marker,
            "markersize": 5,
            "markerfacecolor": face,
        }


def figures(chosen: Chosen) -> dict[str, Any]:
    """The figures of what was measured, by the end of their file's name. The caller closes them."""
    found: dict[str, Any] = {}
    detailed = chosen.of("main", "reduce_scatter") or [m for m in chosen.measurements if m.suite == "one"]
    if detailed:
        found["step-time"] = step_time(detailed[:_PANELS])
        found["bytes"] = traffic(detailed[0])
        found["loss-time"] = loss_time(detailed[0])
    series = all_series(chosen)
    if "accumulation" in series:
        found["accumulation"] = accumulation(series["accumulation"])
    nodes = [series[suite] for suite in ("nodes_weak", "nodes_strong") if suite in series]
    if nodes:
        found["scaling"] = scaling(nodes)
    if "sweep" in series:
        found["sweep"] = sweep(series["sweep"])
    if chosen.runs:
        found["convergence"] = convergence([line.row for line in chosen.runs if isinstance(line.row, ConvergenceRow)])
    return found


def step_time(measurements: Sequence[Measurement]) -> Any:
    """Median step time by peer with the range of the timed steps, a panel a measurement."""
    most = max(len(measurement.rows) for measurement in measurements)
    size = (4.6 + 3.4 * (len(measurements) - 1) + 1.6, 1.5 + 0.36 * most)
    alike = len({tuple(row.label for row in measurement.rows) for measurement in measurements}) == 1
    figure, panels = plt.subplots(1, len(measurements), figsize=size, squeeze=False, sharey=alike, layout="constrained")
    for axes, measurement in zip(panels[0], measurements):
        rows = measurement.rows
        for place, row in enumerate(rows):
            axes.barh(place, row.median_s, 0.72, **Style.of(row).bar)
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
        axes.margins(x=0.14)
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
    figure, panels = plt.subplots(1, len(tiers), figsize=size, squeeze=False, sharey=True, layout="constrained")
    for axes, tier in zip(panels[0], tiers):
        for place, row in enumerate(rows):
            axes.barh(place, row.bytes.measured.get(tier, 0) / 1e6, 0.72, **Style.of(row).bar)
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
    figure.suptitle("Bytes by tier", fontsize=11)
    signs = [
        Line2D([], [], color="black", marker="|", markersize=12, markeredgewidth=2.2, linestyle="", label="planned"),
        Line2D([], [], color="black", marker="o", markerfacecolor="white", linestyle="", label="ideal reduce-scatter"),
    ]
    _families(figure, rows, signs)
    return figure


def loss_time(measurement: Measurement) -> Any:
    """Training loss against elapsed time by peer."""
    figure, axes = plt.subplots(figsize=(8.6, 4.4), layout="constrained")
    for row in measurement.rows:
        axes.plot(elapsed(row), [number(loss) for loss in row.losses], label=row.label, **Style.of(row).line)
    axes.set(xlabel="time since the first step, s (warm-up steps at the median)", ylabel="training loss, nats a token")
    axes.set_title(f"Loss against time, {measurement.title}", fontsize=11)
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
    figure.axes[0].set_yscale("log")
    figure.axes[0].yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    figure.axes[0].yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
    return figure


def convergence(rows: Sequence[ConvergenceRow]) -> Any:
    """Smoothed training loss by preset, mean over the seeds with the band between them: all steps, and the last half."""
    shown = list(groups(rows).items())[:_PANELS]
    size = (11.0, 0.6 + 3.8 * len(shown))
    figure, panels = plt.subplots(len(shown), 2, figsize=size, squeeze=False, layout="constrained")
    handles: dict[str, Any] = {}
    for pair, (title, group) in zip(panels, shown):
        for axes, half in zip(pair, (False, True)):
            handles |= _curves(axes, group, last_half=half)
            axes.set(xlabel="optimizer step")
            axes.set_title("the last half of the steps" if half else title, fontsize=9.5)
            axes.grid(alpha=0.3)
        pair[0].set_ylabel("training loss, nats a token (smoothed)")
    figure.suptitle("Convergence: mean of the seeds, and the band between them", fontsize=11)
    figure.legend(list(handles.values()), list(handles), loc="outside right center", frameon=False, fontsize=8.5)
    return figure


def _curves(axes: Any, group: Sequence[ConvergenceRow], *, last_half: bool) -> dict[str, Any]:
    """Draws the curves of runs that compare. Returns their lines by preset."""
    handles: dict[str, Any] = {}
    for name, runs in by_preset(group).items():
        curves = [smooth([number(loss) for loss in row.losses]) for row in runs]
        first = len(curves[0]) // 2 if last_half else 0
        at = list(zip(*curves))[first:]
        steps = range(first + 1, first + len(at) + 1)
        colour = _OF_PEER.get(name, COLOURS[sum(map(ord, name)) % len(COLOURS)])
        stock = name == STOCK
        (line,) = axes.plot(
            steps,
            [math.fsum(values) / len(values) for values in at],
            color=colour,
            linewidth=1.6,
            linestyle="--" if stock else "-",
            zorder=4 if stock else 3,
        )
        axes.fill_between(steps, [min(v) for v in at], [max(v) for v in at], color=colour, alpha=0.15, linewidth=0)
        handles["stock (DeepSpeed ZeRO-3)" if stock else name] = line
    return handles


def _lines(series: Sequence[Series], values: Any, ylabel: str, title: str) -> Any:
    """Lines by peer over a logarithmic axis, a panel a series."""
    size = (3.2 + 4.4 * len(series), 4.4)
    figure, panels = plt.subplots(1, len(series), figsize=size, squeeze=False, sharey=True, layout="constrained")
    handles: dict[str, Any] = {}
    for axes, one in zip(panels[0], series):
        for row in one.peers():
            pairs = values(one, row.peer)
            if pairs:
                (line,) = axes.plot([x for x, _ in pairs], [y for _, y in pairs], **Style.of(row).line)
                handles.setdefault(row.label, line)
        ticks = [value for value, _ in one.points]
        if min(ticks) > 0:
            axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{value:g}" for value in ticks])
        axes.minorticks_off()
        axes.set(xlabel=one.axis)
        if len(series) > 1:
            axes.set_title(one.title, fontsize=10)
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
        True: Patch(facecolor="#dddddd", edgecolor="black", hatch=_HATCH, label="hzero"),
        False: Patch(facecolor="#dddddd", edgecolor="#dddddd", label="others"),
    }
    there = {row.engine == "hzero" for row in rows}
    handles = [kinds[own] for own in (True, False) if own in there] + list(more)
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8.5)
