"""The machine: readers of its sources, its tiers, the places of the ranks on it, and the grid that follows.

The engine uses these names alone. `resolve_grid` turns the configuration's ``topology`` into a `Grid`: a declared one by
arithmetic, any other by a discovery (`hzero.topology.discovery`). In it every rank reads its node (``readers``), finds its
own device (``visible``) and sends a report (``rank_report``) to rank 0 (``rendezvous``). Rank 0 adds the reports of a host
up to its node, derives the packages from the links (``tiers``), and finds the grid of all places (``placement``).
"""

from hzero.topology.grid import Coordinates, Grid
from hzero.topology.resolve import declared_grid, foreseen_grid, resolve_grid, sub_grid

__all__ = ["Coordinates", "Grid", "declared_grid", "foreseen_grid", "resolve_grid", "sub_grid"]
