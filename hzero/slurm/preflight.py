"""The nodes that a check before training found bad: ``python -m hzero.slurm.preflight LOGS STEP RANKS_PER_NODE NODE..``.

Step ``alone``: every node has measured its own links and left ``alone-NUMBER.json``. Bad are nodes without that file and, of
three nodes or more, those that have less than half of the median rate on a tier. Step ``links``: all nodes together have left
``links.json``, or ranks have said whom they waited for; the nodes of these are bad.

Prints the names with commas, nothing if all are good. Status 1: the step failed and names nobody, or more than half of several
nodes: so many do not break at once, but software fails on all of them.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from hzero.plan.links_file import read_links
from hzero.validation import ConfigError

#: A node is slow below this share of the median of all nodes.
SLOW = 0.5
#: What `hzero bench links` says of ranks that did not come.
BLAMED = "hzero: ranks that did not come: "


def alone(logs: Path, nodes: Sequence[str]) -> list[str]:
    """Nodes that failed or were slow on their own.

    Args:
        logs: The folder of the job's logs.
        nodes: Names of the nodes, by number.
    """
    rates: dict[str, dict[str, float]] = {}
    for number, node in enumerate(nodes):
        try:
            found = read_links(logs / f"alone-{number}.json")
        except ConfigError:  # missing, or cut short
            continue
        rates[node] = {str(tier): rate.gb_s for tier, rate in found.tiers.items()}
    bad = [node for node in nodes if node not in rates]
    if len(rates) >= 3:
        for tier in {tier for found in rates.values() for tier in found}:
            median = statistics.median(found.get(tier, 0.0) for found in rates.values())
            bad += [node for node, found in rates.items() if found.get(tier, 0.0) < SLOW * median and node not in bad]
    return bad


def together(logs: Path, ranks: int, nodes: Sequence[str]) -> list[str] | None:
    """Nodes that others waited for; None if the step failed and nobody was named.

    Args:
        logs: The folder of the job's logs.
        ranks: Ranks per node, in the order of the nodes.
        nodes: Names of the nodes, by number.
    """
    if (logs / "links.json").exists():
        return []
    named = set()
    for path in logs.glob("links-*.log"):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(BLAMED):
                named |= {int(rank) // ranks for rank in re.findall(r"\d{1,9}", line.removeprefix(BLAMED))}
    return [nodes[number] for number in sorted(named) if number < len(nodes)] or None


def main(logs: str, step: str, ranks: str, *nodes: str) -> int:
    """Prints the nodes. Returns the exit status."""
    found = alone(Path(logs), nodes) if step == "alone" else together(Path(logs), int(ranks), nodes)
    if found is None or len(found) > max(1, len(nodes) / 2):
        return 1
    print(",".join(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
