"""Both front ends beside stock, row by row; scripts/test-versions runs it for other releases of DeepSpeed."""

from __future__ import annotations

from tests.ranks import on_ranks

SCOPES = ("tests.parity.deepspeed_scopes",)
test_deepspeed = on_ranks(
    {4: ("tests.parity.deepspeed_rows", "tests.deepspeed.muon_checks"), 8: SCOPES, 6: SCOPES, 1: SCOPES}
)
test_exact = on_ranks({8: ("tests.parity.exact_checks",)})
test_fsdp = on_ranks({4: ("tests.parity.fsdp_rows",), 8: ("tests.parity.fsdp_tiers",)})
test_golden = on_ranks({4: ("tests.parity.golden_checks",)}, MKL_CBWR="COMPATIBLE", ATEN_CPU_CAPABILITY="default")
