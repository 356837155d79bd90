"""Parameters of all types, sharded and kept whole, and DeepSpeed's summary of communication: one launch for all."""

from __future__ import annotations

from tests.ranks import on_ranks

test_on_ranks = on_ranks({4: ("tests.faults.logger_checks", "tests.faults.kind_checks")})
