"""The stage beside stock ZeRO-3 on four ranks, for the installed DeepSpeed; scripts/test-versions runs it for others."""

from __future__ import annotations

from tests.ranks import on_ranks

test_parity = on_ranks({4: ("tests.deepspeed.parity_checks",)})
