"""The grid of ranks, as the configuration declares it."""

from hzero.topology.declared import resolve_grid
from hzero.topology.grid import Coordinates, Grid

__all__ = ["Coordinates", "Grid", "resolve_grid"]
