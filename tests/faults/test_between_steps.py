"""Between and inside steps, two engines, and groups of nodes: one launch per world."""

from __future__ import annotations

from tests.ranks import LONG, on_ranks

test_on_ranks = on_ranks({2: ("tests.faults.between_checks", "tests.faults.pair_checks")})
test_groups_of_nodes = LONG(on_ranks({16: ("tests.faults.group_checks",)}))
