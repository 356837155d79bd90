"""The stage inside DeepSpeed, on real ranks: one launch per world."""

from __future__ import annotations

from tests.ranks import LONG, on_ranks

#: Modules of checks by the ranks that they need.
CHECKS = {
    8: ("tests.deepspeed.tensor_checks", "tests.deepspeed.pipeline_checks"),
    4: ("tests.deepspeed.stage_checks", "tests.deepspeed.refusal_checks", "tests.deepspeed.gradient_checks",
     "tests.deepspeed.autotp_checks", "tests.deepspeed.expert_checks",
     "tests.deepspeed.race_checks", "tests.deepspeed.checkpoint_checks"),
}  # fmt: skip


test_stage = on_ranks(CHECKS)
test_races_of_three_tiers = LONG(on_ranks({8: ("tests.deepspeed.race_checks",)}))
