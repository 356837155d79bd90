"""What the machine is: readers of its sources, its tiers, where the ranks sit on it, and the grid that follows."""

from hzero.topology.grid import Coordinates, Grid
from hzero.topology.resolve import resolve_grid

__all__ = ["Coordinates", "Grid", "resolve_grid"]
