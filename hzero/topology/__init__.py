"""The machine: sources of a node, its packages and tiers, the places of the ranks on it, and the grid that follows.

The engine uses only these names. `resolve_grid` turns the configuration's ``topology`` into a `Grid`. A declared one follows by
arithmetic, any other one by a discovery: every rank reads its node (``sources``), finds its device (``device``) and sends a
report to rank 0 (``exchange``). Rank 0 merges the reports of each host into its node (``discovery``), derives the packages from
the links (``tiers``), and finds the grid of all places.
"""

from hzero.topology.grid import Grid
from hzero.topology.resolve import declared_grid, foreseen_grid, resolve_grid, sub_grid

__all__ = ["Grid", "declared_grid", "foreseen_grid", "resolve_grid", "sub_grid"]
