"""The stage inside DeepSpeed, on real ranks: one launch per world."""

from __future__ import annotations

import os

from tests.ranks import on_ranks

#: Modules of checks by the ranks that they need.
CHECKS = {
    8: (
        "tests.deepspeed.traffic_checks",
        "tests.deepspeed.race_checks",
        "tests.deepspeed.delay_checks",
        "tests.deepspeed.tensor_checks",
        "tests.deepspeed.pipeline_checks",
    ),
    4: (
        "tests.deepspeed.stage_checks",
        "tests.deepspeed.refusal_checks",
        "tests.deepspeed.gradient_checks",
        "tests.deepspeed.weight_checks",
        "tests.deepspeed.autotp_checks",
        "tests.deepspeed.expert_checks",
        "tests.deepspeed.race_checks",
        "tests.deepspeed.checkpoint_checks",
    ),
}


test_stage = on_ranks(CHECKS, timeout=900 + 2 * int(os.environ.get("HZERO_SCHEDULES", "0")))  # see delay_checks
