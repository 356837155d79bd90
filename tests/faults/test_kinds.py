"""Parameters of all types, sharded and kept whole: one launch."""

from __future__ import annotations

from tests.ranks import on_ranks

test_on_ranks = on_ranks({4: ("tests.faults.kind_checks",)})
