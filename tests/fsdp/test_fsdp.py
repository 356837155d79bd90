"""hzero under FSDP2, on real ranks: one launch of 4 ranks; three tiers need 8, and take long."""

from __future__ import annotations

from tests.ranks import LONG, on_ranks

CHECKS = [f"tests.fsdp.{name}_checks" for name in ("parity", "window", "weight", "torch", "trainer", "mesh")]
test_fsdp = on_ranks({4: CHECKS})
test_fsdp_of_three_tiers = LONG(on_ranks({8: ["tests.fsdp.tier_checks"]}))
