"""A node as a picture: packages in a circle, links as lines by number and kind, NICs outside."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hzero.config import ConfigError
from hzero.topology.machine import AmbiguousTopologyError, Device, Link, Machine
from hzero.topology.tiers import packages_of

_COLOURS = {"xgmi": "#D55E00", "nvlink": "#009E73", "nvswitch": "#0072B2", "pcie": "#777777"}


def png(machine: Machine, path: Path | str) -> None:
    """Draws the node to a PNG file, which appears whole or not at all.

    Packages stand in a circle with their devices inside; lines are links, their width the number of parallel ones, their
    colour the kind; NICs stand outside, at the devices that they are nearest to.

    Raises:
        ConfigError: The file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 11.5))
    FigureCanvasAgg(figure)
    _Picture(machine, figure.add_axes((0.02, 0.02, 0.96, 0.96))).draw()
    path = Path(path)
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:50]}.", suffix=".part")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
    try:
        with os.fdopen(handle, "wb") as stream:
            figure.savefig(stream, format="png", dpi=120)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except OSError as error:
        os.unlink(name)
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None


def known_packages(machine: Machine) -> tuple[tuple[int, ...], ...] | None:
    """The packages; None where they are ambiguous."""
    try:
        return packages_of(machine)
    except AmbiguousTopologyError:
        return None


def plural(count: int, noun: str) -> str:
    """A count with its noun."""
    return f"{count} {noun}{'s' if count != 1 else ''}"


class _Picture:
    """The node on a circle. Lengths are in units of a device's diameter."""

    def __init__(self, machine: Machine, axes: Any) -> None:
        self._machine = machine
        self._axes = axes
        packages = known_packages(machine)
        self._known = packages is not None
        self._packages = packages if packages is not None else [(device.number,) for device in machine.devices]
        # Along the circle: each device one and a bit, and a gap after each package.
        self._step, self._gap = 1.15, 0.85
        around = sum(len(package) * self._step + self._gap for package in self._packages)
        self._radius = max(around / (2 * math.pi), 2.6)
        self._home = {number: index for index, package in enumerate(self._packages) for number in package}
        self._angles: dict[int, float] = {}
        self._place(around)
        self._font = max(4.0, min(15.0, 62 / self._radius))

    def _place(self, around: float) -> None:
        start = -len(self._packages[0]) * self._step / 2 if self._packages else 0.0
        along = start
        for package in self._packages:
            for number in package:
                self._angles[number] = math.pi / 2 - 2 * math.pi * (along + self._step / 2) / around
                along += self._step
            along += self._gap

    def _at(self, angle: float, radius: float) -> tuple[float, float]:
        return radius * math.cos(angle), radius * math.sin(angle)

    def draw(self) -> None:
        reach = self._radius + 3.0  # room for captions and NICs around, title above, legend below
        centre = 0.0
        if len(self._machine.devices) == 1:  # not a circle, but its one point
            reach, centre = 4.0, self._radius
        self._axes.set_xlim(-reach, reach)
        self._axes.set_ylim(centre - 1.2 * reach, centre + 1.12 * reach)
        self._axes.set_aspect("equal")
        self._axes.axis("off")
        self._links()
        for index, package in enumerate(self._packages):
            self._package(index, package)
        for device in self._machine.devices:
            self._device(device)
        self._nics(reach, centre)
        self._title(reach, centre)

    def _links(self) -> None:
        from matplotlib.collections import LineCollection

        groups: dict[tuple[str, int | None, float | None], list[Link]] = {}
        for link in self._machine.links:
            groups.setdefault((link.kind, link.count, link.gb_s), []).append(link)
        handles = []
        many = len(self._machine.links) > 60
        for (kind, count, gb_s), links in sorted(groups.items(), key=lambda item: (item[0][0], -(item[0][1] or 0))):
            width = _line_width(count, self._machine.links) * (0.6 if many else 1.0)
            colour = _COLOURS.get(kind, "#000000")
            segments = [self._curve(link) for link in links]
            style = "dotted" if kind == "pcie" else "solid"
            label = f"{count if count is not None else '?'} x {kind}"
            label += f", {gb_s:g} GB/s each way" if gb_s is not None else ""
            label += f" ({plural(len(links), 'pair')})"
            lines = LineCollection(
                segments, colors=colour, linewidths=width, linestyles=style, alpha=0.55 if many else 0.8,
                capstyle="butt", zorder=3, label=label,
            )  # fmt: skip
            handles.append(self._axes.add_collection(lines))
        if handles:
            self._axes.legend(
                handles=handles[:12], loc="lower left", fontsize=10, frameon=False, title="links of a pair", handlelength=3.5,
                alignment="left",
            ).get_title().set_fontweight("bold")  # fmt: skip

    def _curve(self, link: Link) -> list[tuple[float, float]]:
        """From device to device: straight inside a package, else bent inwards, clear of the devices between."""
        start, end = (self._at(self._angles[number], self._radius) for number in (link.a, link.b))
        if self._home[link.a] == self._home[link.b]:
            return [start, end]
        bend = [0.45 * (one + other) / 2 for one, other in zip(start, end)]
        points = []
        for part in (step / 24 for step in range(25)):
            x, y = (
                (1 - part) ** 2 * one + 2 * part * (1 - part) * middle + part**2 * other
                for one, middle, other in zip(start, bend, end)
            )
            points.append((x, y))
        return points

    def _package(self, index: int, package: Sequence[int]) -> None:
        """A band along the circle: the module, where several devices share one, else the frame of one device."""
        from matplotlib.patches import Polygon

        first, last = self._angles[package[0]], self._angles[package[-1]]
        half = 0.62 / self._radius
        depth = 0.68
        edge = [first + half - (first - last + 2 * half) * part / 24 for part in range(25)]
        outer = [self._at(angle, self._radius + depth) for angle in edge]
        inner = [self._at(angle, self._radius - depth) for angle in reversed(edge)]
        if self._known:
            band = Polygon(
                [*outer, *inner], closed=True, facecolor="#F1F1EC", edgecolor="#999999", linewidth=1.4, zorder=1
            )
            self._axes.add_patch(band)
            numa = {device.numa for device in self._machine.devices if device.number in package}
            caption = f"package {index}"
            if len(numa) == 1 and None not in numa:
                caption += f"\nNUMA {numa.pop()}"
            x, y = self._at((first + last) / 2, self._radius + depth + 0.2)
            self._axes.text(
                x, y, caption, fontsize=self._font * 0.62, color="#555555", zorder=5, **_outwards(x, y),
                bbox={"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none"},
            )  # fmt: skip

    def _device(self, device: Device) -> None:
        from matplotlib.patches import Circle

        x, y = self._at(self._angles[device.number], self._radius)
        self._axes.add_patch(Circle((x, y), 0.5, facecolor="#E8F1F8", edgecolor="#0072B2", linewidth=1.6, zorder=4))
        bus = device.bus.removeprefix("0000:")
        self._axes.text(
            x, y + (0.1 if bus else 0), str(device.number), ha="center", va="center", fontsize=self._font,
            fontweight="bold", zorder=5,
        )  # fmt: skip
        self._axes.text(x, y - 0.25, bus, ha="center", va="center", fontsize=self._font * 0.5, zorder=5)

    def _nics(self, reach: float, centre: float) -> None:
        away = []
        for nic in self._machine.nics:
            near = [device.number for device in self._machine.devices if device.nic == nic.name]
            rate = f"\n{nic.gb_s:g} GB/s" if nic.gb_s is not None else ""
            mean = [sum(part) for part in zip(*(self._at(self._angles[number], 1.0) for number in near))]
            if not near or math.hypot(*mean) < 0.6 * len(near):  # at no one side of the circle
                of = " of all" if len(near) == len(self._machine.devices) else f" of {' '.join(map(str, near))[:40]}"
                away.append(nic.name + rate.replace("\n", " ") + (of if near else ""))
                continue
            angle = math.atan2(mean[1], mean[0])
            x, y = self._at(angle, self._radius + 2.5)
            for package in {self._home[number] for number in near}:
                first, last = (
                    self._angles[number] for number in (self._packages[package][0], self._packages[package][-1])
                )
                edge = self._at((first + last) / 2, self._radius + 0.68)
                self._axes.plot(*zip((x, y), edge), color="#B58900", linestyle="dashed", linewidth=1.2, zorder=2)
            self._axes.text(
                x, y, nic.name + rate, ha="center", va="center", fontsize=self._font * 0.66, zorder=6,
                parse_math=False,
                bbox={"boxstyle": "round,pad=0.3", "facecolor": "#FFF6DD", "edgecolor": "#B58900"},
            )  # fmt: skip
        if away:
            shown = away[:8] + ([f"and {len(away) - 8} more"] if len(away) > 8 else [])
            lines = "\n".join(["other NICs:", *shown])
            self._axes.text(
                reach * 0.98, centre - reach * 1.18, lines, ha="right", va="bottom", fontsize=10, parse_math=False,
                bbox={"boxstyle": "round,pad=0.4", "facecolor": "#FFF6DD", "edgecolor": "#B58900"},
            )  # fmt: skip

    def _title(self, reach: float, centre: float) -> None:
        kinds = sorted({device.kind for device in self._machine.devices if device.kind})
        what = f"{plural(len(self._machine.devices), 'device')}{' (' + ', '.join(kinds)[:60] + ')' if kinds else ''}"
        what += f", {plural(len(self._packages), 'package')}" if self._known else ", packages not known"
        source = self._machine.source if len(self._machine.source) <= 80 else "..." + self._machine.source[-77:]
        self._axes.text(
            -reach * 0.98, centre + reach * 1.11, source, fontsize=14, fontweight="bold", va="top", parse_math=False
        )
        self._axes.text(-reach * 0.98, centre + reach * 1.05, what, fontsize=11, va="top", parse_math=False)


def _line_width(count: int | None, links: Sequence[Link]) -> float:
    """Points: in proportion to the number of links, within what can be told apart."""
    most = max((link.count or 1 for link in links), default=1)
    return max(1.4, 7.2 * (count or 1) / max(most, 4)) if most <= 8 else 2.0


def _outwards(x: float, y: float) -> dict[str, str]:
    """Alignment of a text that stands outside of the circle at a point."""
    length = math.hypot(x, y)
    side = "center" if abs(x) < 0.35 * length else "left" if x > 0 else "right"
    return {"ha": side, "va": "center" if abs(y) < 0.35 * length else "bottom" if y > 0 else "top"}
