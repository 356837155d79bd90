"""Between and inside steps, and two engines: one launch."""

from __future__ import annotations

from tests.ranks import on_ranks

test_on_ranks = on_ranks({2: ("tests.faults.between_checks", "tests.faults.pair_checks")})
