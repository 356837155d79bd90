"""A links file as `hzero links` measures it."""

from __future__ import annotations

from typing import Any

from hzero.topology.links_file import LinkRow, LinksFile


def row(
    algorithm: Any = "library", size: int = 4096, us: float = 10.0, tier: Any = "intra_package", ranks: int = 2
) -> LinkRow:
    times = {"median_us": us, "min_us": us / 2, "max_us": us * 2}
    return LinkRow(tier=tier, ranks=ranks, algorithm=algorithm, size_bytes=size, **times)


def links(**changes: Any) -> LinksFile:
    rows = [row(size=1 << 20, us=100.0), row(), row(tier="inter_node", us=40.0)]
    values: dict[str, Any] = {
        "schema": "hzero-links-1",
        "date": "2025-11-21T14:00:00+00:00",
        "machine": {"host": "n1"},
        "versions": {"torch": "2.10"},
        "backend": "gloo",
        "device": "cpu",
        "grid": {"intra_package": 2, "intra_node": 1, "inter_node": 2},
        "rows": rows,
    }
    return LinksFile(**{**values, **changes})
