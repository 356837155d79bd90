"""Tensor groups inside a machine and data-parallel groups across it, by arithmetic on the grid."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from hzero.config import TIERS
from hzero.topology import Grid
from hzero.validation import ConfigError


@dataclass(frozen=True)
class TensorGroups:
    """Where the ranks of a job with tensor parallelism stand.

    Tensor groups are innermost, as they send the most: the devices of a package first, then packages of a node. Ranks at the
    same place of all tensor groups are a data-parallel group, over which the stage shards.

    Two nodes of two packages of two devices:

        >>> from hzero.topology import Grid
        >>> groups = TensorGroups(Grid(2, 2, 2), tensor=2)
        >>> groups.tensor_group(5), groups.data_group(5), str(groups.data_grid)
        ([4, 5], [1, 3, 5, 7], '2 nodes x 2 GPUs x 1 GCD')

    Attributes:
        grid: Of the world.
        tensor: Ranks of a tensor group.

    Raises:
        ConfigError: Groups of this size do not fill the tiers of a node evenly; the message names the sizes that do.
    """

    grid: Grid
    tensor: int

    def __post_init__(self) -> None:
        if self.tensor not in (possible := sizes(self.grid)):
            raise ConfigError(
                f"model.tensor_parallel: found {self.tensor}, which does not divide a node of {self.grid} from the innermost "
                f"tier outwards; possible: {', '.join(map(str, possible))}"
            )

    @property
    def data(self) -> int:
        """Ranks of a data-parallel group."""
        return self.grid.world_size // self.tensor

    def tensor_rank(self, rank: int) -> int:
        """The number of a rank in its tensor group."""
        return self._places[rank] % self.tensor

    def data_rank(self, rank: int) -> int:
        """The number of a rank in its data-parallel group: that of its tensor group."""
        return self._places[rank] // self.tensor

    def tensor_group(self, rank: int) -> list[int]:
        """The tensor group of a rank, in order."""
        first = self.data_rank(rank) * self.tensor
        return list(self._ranks[first : first + self.tensor])

    def data_group(self, rank: int) -> list[int]:
        """The data-parallel group of a rank, in order."""
        return list(self._ranks[self.tensor_rank(rank) :: self.tensor])

    @functools.cached_property
    def tensor_grid(self) -> Grid:
        """Where the ranks of a tensor group sit, in its own numbers."""
        return self.grid.of_ranks(self.tensor_group(0))

    @functools.cached_property
    def data_grid(self) -> Grid:
        """Where the ranks of a data-parallel group sit, in its own numbers; the world without tensor parallelism."""
        return self.grid if self.tensor == 1 else self.grid.of_ranks(self.data_group(0))

    @functools.cached_property
    def _ranks(self) -> Sequence[int]:
        """The rank of every place, innermost tier fastest; without tensor parallelism that of its number."""
        if self.tensor == 1 or (self.grid.regular and self.grid.order == TIERS[::-1]):
            return range(self.grid.world_size)
        cells = itertools.product(*(range(self.grid.size(tier)) for tier in TIERS[::-1]))
        return [self.grid.rank(**dict(zip(TIERS[::-1], cell))) for cell in cells]

    @functools.cached_property
    def _places(self) -> Sequence[int]:
        if isinstance(self._ranks, range):
            return self._ranks
        return sorted(range(len(self._ranks)), key=self._ranks.__getitem__)


def sizes(grid: Grid) -> list[int]:
    """Sizes that a tensor group can have: of devices of a package, of whole packages of a hive, of whole hives of a node."""
    found, inside = {1}, 1
    for tier in ("gcd", "hive", "gpu"):
        found |= {inside * count for count in range(1, grid.size(tier) + 1) if grid.size(tier) % count == 0}  # type: ignore[arg-type]
        inside *= grid.size(tier)  # type: ignore[arg-type]
    return sorted(found)
