"""The machine: sources of a node, its packages and tiers, the places of the ranks on it, and the grid that follows.

The engine uses these names only. `resolve_grid` turns the configuration's ``topology`` into a `Grid`: a declared one by
arithmetic, any other by a discovery. In it every rank reads its node (``sources``), finds its own device (``device``) and
sends a report to rank 0 (``exchange``). Rank 0 adds the reports of a host up to its node (``discovery``), derives the
packages from the links (``tiers``), and finds the grid of all places (``placement``).
"""

from hzero.topology.grid import Coordinates, Grid
from hzero.topology.resolve import declared_grid, foreseen_grid, resolve_grid, sub_grid

__all__ = ["Coordinates", "Grid", "declared_grid", "foreseen_grid", "resolve_grid", "sub_grid"]
