"""Plot of a links file: bus bandwidth against size, one panel per tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from hzero.config import Tier
from hzero.files import replacing
from hzero.plan.links_file import LinkRow, LinksFile
from hzero.validation import ConfigError

#: Okabe and Ito's colours, which stay apart for colour-blind readers; bare collectives are grey.
_COLOURS = {"none": "#0072B2", "bf16": "#E69F00", "int8": "#009E73", "int4": "#D55E00", None: "#777777"}
_STYLES = {
    "all_gather": ("-", "o"),
    "doubling": ("-.", "v"),
    "pairs": ("-.", "D"),
    "all_to_all": ("--", "s"),
    "reduce_scatter": (":", "^"),
    "weights": ("-", "o"),
    "gradients": ("--", "s"),
}


def draw(links: LinksFile, path: Path) -> None:
    """Writes the plot as PNG.

    Raises:
        ConfigError: It cannot be written.
    """
    figure, panels = plt.subplots(
        1, len(links.tiers), figsize=(2.5 + 4 * len(links.tiers), 5.2), sharey=True, squeeze=False, layout="constrained"
    )
    for axes, tier in zip(panels[0], links.tiers):
        _panel(axes, links, tier)
    panels[0][0].set_ylabel("busbw, GB/s (of hops: effective)")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.suptitle(f"Links of {links.grid_text()}, {links.backend} on {links.device}, {links.date[:10]}", fontsize=11)
    try:
        with replacing(path, "wb") as file:
            figure.savefig(file, dpi=130, format="png")
    except OSError as error:
        raise ConfigError(f"--out: cannot write {str(path)!r}: {error.strerror}") from None
    finally:
        plt.close(figure)


def _panel(axes: Any, links: LinksFile, tier: Tier) -> None:
    lines: dict[tuple[str, str | None], list[LinkRow]] = {}
    for row in links.rows:
        if row.tier == tier:
            lines.setdefault((row.op, row.codec), []).append(row)
    for (op, codec), rows in lines.items():
        style, marker = _STYLES[op]
        label = op.replace("_", "-") if codec is None else f"{op} hop, {codec}"
        axes.plot(
            [row.size_bytes for row in rows],
            [row.busbw_gb_s for row in rows],
            linestyle=style,
            marker=marker,
            markersize=4,
            linewidth=1.5,
            color=_COLOURS[codec],
            label=label,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: _size(value))
    axes.set(xlabel="size before encoding, bytes", title=f"tier {tier}, groups of {links.grid[tier]}")
    axes.grid(alpha=0.3)


def _size(count: float) -> str:
    for unit in ("", "K", "M"):
        if count < 1024:
            return f"{count:.3g}{unit}"
        count /= 1024
    return f"{count:.3g}G"
