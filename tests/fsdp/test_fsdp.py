"""hzero under FSDP2, on real ranks: one launch."""

from __future__ import annotations

from tests.ranks import on_ranks

CHECKS = [f"tests.fsdp.{name}_checks" for name in ("parity", "window", "weight", "torch")]
test_fsdp = on_ranks({8: CHECKS})
