"""Units of gathering on 4 ranks: one launch."""

from __future__ import annotations

from tests.ranks import on_ranks

test_units = on_ranks({4: ("tests.deepspeed.unit_checks",)})
