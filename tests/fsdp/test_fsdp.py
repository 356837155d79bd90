"""FSDP2 under hzero, on real ranks: what the rows of tests/parity do not show."""

from __future__ import annotations

from tests.ranks import LONG, on_ranks

CHECKS, MORE = (
    [f"tests.fsdp.{name}_checks" for name in names]
    for names in (("window", "weight", "action", "mesh", "fit", "muon"), ("torch", "trainer"))
)
test_fsdp = on_ranks({4: CHECKS})
test_fsdp_at_length = LONG(on_ranks({4: MORE}))
