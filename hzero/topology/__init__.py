"""The machine: sources of a node, its packages and tiers, the places of the ranks on it, and the grid that follows.

The engine uses only these names. `resolve_grid` turns the configuration's ``topology`` into a `Grid`. A declared one follows by
arithmetic, any other one by a discovery: every rank reads its node (``sources``), finds its device and sends a report to rank 0.
Rank 0 merges the reports of each host into its node (``discovery``), derives the packages from the links (``machine``), and finds
the grid of all places.
"""

from hzero.topology.grid import Grid, declared_grid, resolve_grid, sub_grid

__all__ = ["Grid", "declared_grid", "resolve_grid", "sub_grid"]
