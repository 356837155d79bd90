"""Tensor groups inside a machine, data-parallel groups across it, and pipelines outermost, by arithmetic on the grid.

Sequence groups lie as tensor groups do.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from hzero.config import TIERS
from hzero.topology import Grid
from hzero.validation import ConfigError


@dataclass(frozen=True)
class TensorGroups:
    """Where the ranks of a job with tensor and pipeline parallelism stand.

    Tensor groups are innermost, as they send the most: the devices of a package first, then packages of a node. The stages of
    a pipeline are outermost, as they send the least: each is a part of the places that follow each other, such as half of the
    nodes. Ranks at the same place of all tensor groups of a stage are a data-parallel group, over which the stage shards. So
    does DeepSpeed's ``PipeModelDataParallelTopology``.

    Two nodes of two packages of two devices:

        >>> from hzero.topology import Grid
        >>> groups = TensorGroups(Grid(2, 2, 2), tensor=2)
        >>> groups.tensor_group(5), groups.data_group(5), str(groups.data_grid)
        ([4, 5], [1, 3, 5, 7], '2 nodes x 2 GPUs x 1 GCD')

    Attributes:
        grid: Of the world.
        tensor: Ranks of a tensor group.
        pipeline: Stages of a pipeline.
        key: What sets the ranks of a tensor group, for messages.

    Raises:
        ConfigError: Groups of this size do not fill the tiers of a node evenly; the message names the sizes that do. Or
            stages do not fill a part of the grid.
    """

    grid: Grid
    tensor: int
    pipeline: int = 1
    key: str = "model.tensor_parallel"

    def __post_init__(self) -> None:
        if self.tensor not in (possible := sizes(self.grid)):
            raise ConfigError(
                f"{self.key}: found {self.tensor}, which does not divide a node of {self.grid} from the innermost "
                f"tier outwards; possible: {', '.join(map(str, possible))}"
            )
        if self.pipeline > 1 and self.pipeline not in (stages := self._stages()):
            raise ConfigError(
                f"model.pipeline_parallel: found {self.pipeline}, into which {self.grid} with tensor groups of {self.tensor} "
                f"does not divide from the outermost tier inwards; possible: {', '.join(map(str, stages))}"
            )

    def _stages(self) -> list[int]:
        """Numbers of stages that are possible: of the outermost tiers whole ones, of the next a part."""
        found, outside = {1}, 1
        left = self.tensor
        inner = {}
        for tier in TIERS:
            inner[tier] = self.grid.size(tier) // math.gcd(self.grid.size(tier), left)
            left //= math.gcd(self.grid.size(tier), left)
        for tier in TIERS[::-1]:
            found |= {outside * count for count in range(1, inner[tier] + 1) if inner[tier] % count == 0}
            outside *= inner[tier]
        return sorted(found)

    @property
    def data(self) -> int:
        """Ranks of a data-parallel group."""
        return self.grid.world_size // self.tensor // self.pipeline

    def tensor_rank(self, rank: int) -> int:
        """The number of a rank in its tensor group."""
        return self._places[rank] % self.tensor

    def data_rank(self, rank: int) -> int:
        """The number of a rank in its data-parallel group: that of its tensor group in its stage."""
        return self._places[rank] // self.tensor % self.data

    def stage(self, rank: int) -> int:
        """The pipeline stage of a rank."""
        return self._places[rank] // (self.tensor * self.data)

    def tensor_group(self, rank: int) -> list[int]:
        """The tensor group of a rank, in order."""
        first = self._places[rank] // self.tensor * self.tensor
        return list(self._ranks[first : first + self.tensor])

    def data_group(self, rank: int) -> list[int]:
        """The data-parallel group of a rank, in order."""
        ranks = self.tensor * self.data
        first = self.stage(rank) * ranks
        return list(self._ranks[first + self.tensor_rank(rank) : first + ranks : self.tensor])

    def pipeline_group(self, rank: int) -> list[int]:
        """The ranks of a rank's pipeline, by stage."""
        ranks = self.tensor * self.data
        return list(self._ranks[self._places[rank] % ranks :: ranks])

    @functools.cached_property
    def tensor_grid(self) -> Grid:
        """Where the ranks of a tensor group sit, in its own numbers."""
        return self.grid.of_ranks(self.tensor_group(0))

    @functools.cached_property
    def data_grid(self) -> Grid:
        """Where the ranks of a data-parallel group sit, in its own numbers; the world without other parallelism."""
        return self.grid if self.data == self.grid.world_size else self.grid.of_ranks(self.data_group(0))

    @functools.cached_property
    def pipeline_grid(self) -> Grid:
        """Where the ranks of a pipeline sit, in its own numbers."""
        return self.grid.of_ranks(self.pipeline_group(0))

    @functools.cached_property
    def _ranks(self) -> Sequence[int]:
        """The rank of every place, innermost tier fastest; without other parallelism that of its number."""
        if self.tensor == self.pipeline == 1 or (self.grid.regular and self.grid.order == TIERS[::-1]):
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


def stage_layers(layers: int, stage: int, stages: int) -> tuple[int, int]:
    """First layer of a stage, and of the next one: numbers of layers differ by one at most, and the last stage has the fewest.

    The head of the last stage takes as long as some layers.
    """
    least, more = divmod(layers, stages)
    return stage * least + min(stage, more), (stage + 1) * least + min(stage + 1, more)
