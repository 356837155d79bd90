"""hzero under FSDP2, on real ranks: a launch of 4 ranks, and with HZERO_TESTS=all one more of 4 and one of 8 with three tiers."""

from __future__ import annotations

from tests.ranks import LONG, on_ranks

CHECKS, MORE, TIERS = (
    [f"tests.fsdp.{name}_checks" for name in names]
    for names in (("parity", "window", "weight", "action", "mesh"), ("feature", "torch", "trainer"), ("tier",))
)
test_fsdp = on_ranks({4: CHECKS})
test_fsdp_at_length = LONG(on_ranks({4: MORE, 8: TIERS}))
