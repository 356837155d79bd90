"""Grids of any shape and numbering, for hypothesis."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import strategies as st

from hzero.config import BASE_TIERS, TIERS
from hzero.topology.grid import Grid

ORDERS = st.permutations(BASE_TIERS).map(tuple) | st.permutations(TIERS).map(tuple)
#: Sizes of the tiers: three, or all.
SIZES = st.tuples(
    st.integers(1, 3), st.just(1), st.integers(1, 4), st.integers(1, 4), st.just(1), st.just(1)
) | st.tuples(*(st.integers(1, most) for most in (2, 2, 2, 3, 2, 2)))


def grid_of(sizes: tuple[int, ...], **how: Any) -> Grid:
    """A grid by the sizes of all tiers, innermost first."""
    gcd, hive, gpu, node, group, cluster = sizes
    declared = {"packages_per_hive": hive, "nodes_per_group": node if group > 1 else None, "clusters": cluster}
    return Grid(node * group * cluster, gpu * hive, gcd, **declared, **how)


REGULAR = st.builds(lambda sizes, order: grid_of(sizes, order=order), SIZES, ORDERS)
#: Ranks in no order at all, as visible-device lists can number them.
IRREGULAR = SIZES.flatmap(
    lambda sizes: st.permutations(range(math.prod(sizes))).map(lambda ranks: grid_of(sizes, ranks=tuple(ranks)))
)
GRIDS = REGULAR | IRREGULAR
