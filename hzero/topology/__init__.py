"""The machine: sources of a node, its packages and tiers, the places of the ranks, and their grid.

The engine uses only the names below. `resolve_grid` turns the configuration's ``topology`` into a `Grid`. A declared grid needs
only arithmetic. Otherwise every rank reads its node (``sources``), identifies its device, and sends a report to rank 0. Rank 0
merges the reports of each host (``discovery``), derives the packages from the links (``node``), and forms the grid.
"""

from hzero.topology.grid import Grid
from hzero.topology.resolve import declared_grid, resolve_grid, sub_grid

__all__ = ["Grid", "declared_grid", "resolve_grid", "sub_grid"]
