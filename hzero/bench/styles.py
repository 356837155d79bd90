"""How peers are drawn. A peer has one colour in all figures; hzero's peers are solid, others pale or dashed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hzero.bench.measured import STOCK_PRESET
from hzero.bench.rows import StepsRow
from hzero.train.report import COLOURS

_BLUE, _RED, _GREEN, _PINK, _ORANGE, _SKY, _BLACK = COLOURS
#: Peers with the same idea share a colour: hzero's zero3 and DeepSpeed's, the two hpZ. A colour is there once among hzero's
#: peers and once among others; black and brown are of others alone.
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
    "fsdp2-node": "#8B5A2B",
}
#: Presets of runs of training.
_OF_PRESET = {**_OF_PEER, STOCK_PRESET: _BLACK}
#: One a known peer, in their order, then those of others.
_MARKERS = "osD^vPX*<>hpd8H1234+x"
HATCH = "///"


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

    @property
    def bar(self) -> dict[str, Any]:
        """Arguments of a bar."""
        if self.own:
            return {"color": self.colour, "edgecolor": "black", "linewidth": 1.0, "hatch": HATCH}
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


def styles(rows: Sequence[StepsRow]) -> dict[str, Style]:
    """Styles of the peers of one figure. Unknown peers take what known ones leave, in order."""
    peers = {row.peer: row.engine == "hzero" for row in rows}
    known = list(_OF_PEER)
    colour = colours(list(peers))
    others = [peer for peer in peers if peer not in known]
    free = _MARKERS[len(known) :]
    marker = {peer: _MARKERS[index] for index, peer in enumerate(known)}
    marker |= {peer: free[index % len(free)] for index, peer in enumerate(others)}
    return {peer: Style(colour[peer], own, marker[peer]) for peer, own in peers.items()}


def colours(names: Sequence[str]) -> dict[str, str]:
    """Colours of the peers or presets of one figure; unknown ones take those that known ones leave, in order."""
    known = {name: _OF_PRESET[name] for name in names if name in _OF_PRESET}
    free = [colour for colour in COLOURS if colour not in known.values()] or list(COLOURS)
    others = [name for name in names if name not in known]
    return {**known, **{name: free[index % len(free)] for index, name in enumerate(others)}}
