"""Pictures of runs: each as a PNG for a paper, and as SVG whose text and colours are those of the page around it."""

from __future__ import annotations

import io
import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter

from hzero.config import ROLES, TIERS
from hzero.train import curves
from hzero.train.runs import Run, numbers
from hzero.train.summary import loss_window, zero3_bytes

#: Colours of runs on a light and on a dark ground. They follow Okabe and Ito's, which stay apart for colour-blind readers.
COLOURS = (
    ("#0072b2", "#4fa8e8"),
    ("#d55e00", "#ff8b3d"),
    ("#009e73", "#2dc79b"),
    ("#c4669b", "#e79bc6"),
    ("#a87400", "#f0bb3a"),
    ("#3f97cf", "#9ad5f8"),
    ("#5c5c66", "#c8c8d0"),
)
#: Dashes and gaps of runs, in line widths, so that colours need not be told apart.
DASHES = ((), (5, 1.6), (1.4, 1.4), (6, 1.4, 1.4, 1.4))
#: Text, axes and marks of plain ZeRO-3, and the ground, each on both grounds.
INK, GROUND = ("#1f2328", "#e6e8eb"), ("#ffffff", "#15181d")
_STYLE: Any = {
    "font.size": 10,
    "svg.fonttype": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.18,
    "grid.color": INK[0],
    "hatch.linewidth": 1.2,
    **{
        key: INK[0]
        for key in ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    },
}  # fmt: skip
#: Name of the marks at what plain ZeRO-3 would need.
STOCK = "ZeRO-3 (computed)"
#: Inches of a picture. A page shows it at 1 to 1.6 times its size, so that its text stays readable on a telephone.
_SIZE = (5.0, 3.2)
#: Groups of states in the picture of memory, by the names of the states in them.
_STATES = {
    "weights": ("primary weights", "resident weights"),
    "gradients": ("gradient shard", "gradient accumulators"),
    "optimizer": ("optimizer",),
    "feedback": ("error feedback",),
}


@dataclass(frozen=True)
class Picture:
    """One picture.

    Attributes:
        name: Name of the PNG file, without its ending.
        title: What it shows, with the unit.
        note: What a reader has to know, in one or two sentences.
        stock: Whether plain ZeRO-3 is marked in it.
        draw: Draws it.
    """

    name: str
    title: str
    note: str
    stock: bool
    draw: Callable[[Any], None]


@dataclass(frozen=True)
class Look:
    """How a run is drawn.

    Attributes:
        colour: Its colour on a light ground.
        variable: The CSS variable of its colour.
        dashes: Dashes and gaps of its line, in line widths; empty for a solid line.
    """

    colour: str
    variable: str
    dashes: tuple[float, ...]

    @property
    def line(self) -> Any:
        """The line style as matplotlib takes it."""
        return (0, self.dashes) if self.dashes else "-"


def look_of(index: int) -> Look:
    """How the run of this place among the runs is drawn."""
    place = index % len(COLOURS)
    return Look(COLOURS[place][0], f"var(--run{place})", DASHES[index % len(DASHES)])


def pictures(runs: Sequence[Run]) -> list[Picture]:
    """The pictures that these runs have figures for."""
    made = [
        _curve(runs, "loss", "loss", "Training loss, nats per token", evaluations=True),
        _curve(runs, "gradient_norm", "grad_norm", "Gradient norm"),
        _curve(runs, "throughput", "tokens_per_s", "Throughput, tokens/s"),
        _curve(runs, "tflops", "tflops_per_rank", "Throughput, TFLOPS per rank"),
        _bytes(runs),
        _memory(runs),
        _hidden(runs),
    ]
    return [picture for picture in made if picture is not None]


def write_png(picture: Picture, runs: Sequence[Run], path: Path) -> None:
    """Writes the picture for a light ground, with a legend."""
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
        picture.draw(axes)
        axes.set_title(picture.title)
        handles: list[Any] = []
        for index, run in enumerate(runs):
            look = look_of(index)
            handles.append(Line2D([], [], color=look.colour, linestyle=look.line, linewidth=1.8, label=run.name))
        if picture.stock:
            handles.append(Line2D([], [], color=INK[0], linewidth=2.5, label=STOCK))
        axes.legend(handles=handles, frameon=False)
        figure.savefig(path, dpi=130)
        plt.close(figure)


def svg(picture: Picture) -> str:
    """The picture as an SVG element for the inside of a page that defines the variables of `variables`."""
    with plt.rc_context({**_STYLE, "svg.hashsalt": picture.name}):
        figure, axes = plt.subplots(figsize=_SIZE, layout="constrained")
        picture.draw(axes)
        axes.set_ylabel("")  # the title has the unit, and the space is the curve's
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator")))
        plt.close(figure)
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(
        r' id="(?![phm][0-9a-f]{10}")[^"]*"', "", text
    )  # those that nothing refers to would meet again in the next picture
    text = re.sub(
        r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', rf'<svg viewBox="\1" role="img" aria-label="{picture.title}">', text
    )
    text = re.sub(r"(font: [\d.]+px) [^;\"]*", r"\1 system-ui, sans-serif", text)
    names = {INK[0]: "currentColor", GROUND[0]: "var(--ground)"}
    names |= {light: f"var(--run{index})" for index, (light, _) in enumerate(COLOURS)}
    return re.sub("|".join(names), lambda found: names[found.group()], text)


def variables(dark: bool) -> str:
    """CSS variables of the colours on a ground."""
    values = {"ink": INK[dark], "ground": GROUND[dark]}
    values |= {f"run{index}": pair[dark] for index, pair in enumerate(COLOURS)}
    return "".join(f"--{name}:{value};" for name, value in values.items())


def _curve(runs: Sequence[Run], name: str, key: str, title: str, evaluations: bool = False) -> Picture | None:
    values = [numbers(run.steps, key) for run in runs]
    if all(math.isnan(value) for those in values for value in those) and key != "loss":
        return None
    longest = max(values, key=len)
    windows = sorted({loss_window(len(those)) for those in values})
    note = f"Faint: every step. Bold: mean over {' or '.join(map(str, windows))} steps"
    note += ", which ends in the table's value." if key == "loss" else "."
    if len(longest) * curves.SHARE > 2:
        note += " Away from the ends of a run it reaches further, by a hundredth of the run."
    if (points := len(curves.drawn(longest))) < len(longest):
        note += f" Of {len(longest):,} steps {points:,} are drawn: both ends and the extremes of {curves.STRETCHES} stretches."
    if evaluations and any(run.evaluations for run in runs):
        note += " Diamonds: evaluation with exact weights; hollow: with decoded weights."

    def draw(axes: Any) -> None:
        for index, run in enumerate(runs):
            look = look_of(index)
            at = [row["step"] for row in run.steps]
            _line(axes, at, values[index], color=look.colour, alpha=0.45, linewidth=0.7)
            own = loss_window(len(at))
            _line(
                axes,
                at[own - 1 :],
                curves.smooth(values[index], own),
                color=look.colour,
                linewidth=1.8,
                linestyle=look.line,
            )
            for weights, face in (("loss_decoded", "none"), ("loss_exact", look.colour)) if evaluations else ():
                losses = numbers(run.evaluations, weights)
                kept = curves.drawn(losses)
                steps = [run.evaluations[i]["step"] for i in kept]
                size = {"markersize": 7 if face == "none" else 5, "markeredgewidth": 1}
                axes.plot(steps, [losses[i] for i in kept], "D", color=look.colour, markerfacecolor=face, **size)
        known = [value for those in values for value in those if math.isfinite(value)]
        if key in ("tokens_per_s", "tflops_per_rank"):
            axes.set_ylim(bottom=0)
        if key == "tokens_per_s":
            axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        elif key == "grad_norm" and min(known) > 0 and max(known) > 100 * min(known):
            axes.set_yscale("log")
        axes.set(xlabel="optimizer step", ylabel=title.rpartition(", ")[2])

    return Picture(name, title, note, False, draw)


def _line(axes: Any, at: Sequence[int], values: Sequence[float], **style: Any) -> None:
    kept = curves.drawn(values)
    shown = [values[i] for i in kept]
    # A line of one point is none, so a value between two gaps is a dot.
    known = [False, *map(math.isfinite, shown), False]
    alone = [i for i in range(len(shown)) if known[i : i + 3] == [False, True, False]]
    axes.plot([at[i] for i in kept], shown, marker="o" if alone else None, markevery=alone, markersize=4, **style)


@dataclass(frozen=True)
class _Bars:
    """Bars of one run, by group.

    Attributes:
        colour: Their colour.
        plain: Heights of the lower, plain parts.
        hatched: Heights of the upper, hatched parts.
        marks: Heights of plain ZeRO-3's marks; empty for none.
    """

    colour: str
    plain: Sequence[float]
    hatched: Sequence[float]
    marks: Sequence[float] = ()


def _draw_bars(axes: Any, groups: Sequence[str], bars: Sequence[_Bars]) -> None:
    """Draws the runs side by side in every group."""
    width = min(0.8 / len(bars), 0.3)
    for index, own in enumerate(bars):
        places = [place + (index - (len(bars) - 1) / 2) * width for place in range(len(groups))]
        style = {"width": width * 0.9, "color": own.colour, "edgecolor": GROUND[0], "linewidth": 0.4}
        axes.bar(places, own.plain, **style)
        axes.bar(places, own.hatched, bottom=own.plain, hatch="////", **style)
        for place, height in zip(places, own.marks):
            if height:
                axes.plot([place - width * 0.42, place + width * 0.42], [height] * 2, color=INK[0], linewidth=2.5)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_xlim(-0.6, len(groups) - 0.4)
    axes.set_ylim(bottom=0)
    axes.tick_params(axis="x", length=0)
    axes.grid(visible=False, axis="x")


def _ended(runs: Sequence[Run]) -> list[tuple[str, dict[str, Any]]]:
    """Colour and summary of the runs that have one."""
    return [(look_of(index).colour, run.summary) for index, run in enumerate(runs) if run.summary.get("zero3")]


def _bytes(runs: Sequence[Run]) -> Picture | None:
    sizes = []
    for colour, summary in _ended(runs):
        steps = max(summary["steps_here"], 1)
        own: defaultdict[tuple[str, str], float] = defaultdict(float)
        for row in summary["traffic"]:
            own[row["role"], row["tier"]] += row["wire_bytes"] / steps
        sizes.append((colour, own, zero3_bytes(summary)))
    used = {tier for _, *both in sizes for of in both for (_, tier), count in of.items() if count}
    tiers = [tier for tier in TIERS if tier in used]
    if not tiers:
        return None
    bars = []
    for colour, own, stock in sizes:
        weights, gradients = ([own.get((role, tier), 0) for tier in tiers] for role in ROLES)
        bars.append(_Bars(colour, weights, gradients, [sum(stock.get((r, tier), 0) for r in ROLES) for tier in tiers]))

    def draw(axes: Any) -> None:
        _draw_bars(axes, [f"tier {tier}" for tier in tiers], bars)
        axes.yaxis.set_major_formatter(EngFormatter("B"))

    note = "Plain: weights; hatched: gradients."
    return Picture("bytes", "Bytes received per step, all ranks together", note, True, draw)


def _memory(runs: Sequence[Run]) -> Picture | None:
    sizes = []
    for colour, summary in _ended(runs):
        stock = {row["name"]: row["bytes"] for row in summary["zero3"]["memory"]}
        sizes.append((colour, {**summary["memory"], **summary["transient"]}, stock))
    used = {name for _, own, _ in sizes for name, count in own.items() if count}
    if not used:
        return None
    groups = {group: names for group, names in _STATES.items() if used & set(names)}

    def held(of: dict[str, int]) -> list[int]:
        states = [sum(of.get(name, 0) for name in names) for names in groups.values()]
        return [sum(states), *states, sum(count for name, count in of.items() if name.startswith("transient"))]

    bars = []
    for colour, own, stock in sizes:
        *states, transient = held(own)
        bars.append(_Bars(colour, [*states, 0], [0] * len(states) + [transient], held(stock)))

    def draw(axes: Any) -> None:
        _draw_bars(axes, ["sum", *groups, "transient"], bars)
        axes.yaxis.set_major_formatter(EngFormatter("B"))

    note = "Maximum over the ranks, without activations. Sum: of all states. Hatched: transient buffers as planned."
    return Picture("memory", "Memory per rank", note, True, draw)


def _hidden(runs: Sequence[Run]) -> Picture | None:
    traced = [(colour, summary["traced"]) for colour, summary in _ended(runs) if summary.get("traced")]
    tiers = [tier for tier in TIERS if any(tier in found for _, found in traced)]
    if not tiers:
        return None
    none = [0.0] * len(tiers)
    bars = []
    for colour, found in traced:
        compute, others = (
            [100 * found[tier][name] if tier in found else 0 for tier in tiers]
            for name in ("behind_compute", "behind_tiers")
        )
        bars += [_Bars(colour, compute, none), _Bars(colour, none, others)]

    def draw(axes: Any) -> None:
        _draw_bars(axes, [f"tier {tier}" for tier in tiers], bars)
        axes.set_ylim(0, 100)

    note = "Traced steps of rank 0. Plain: behind compute; hatched: behind other tiers. A second may count in both."
    return Picture("hidden", "Hidden share of the time with hops in flight, %", note, False, draw)
