"""The stage inside DeepSpeed, on real ranks: one launch per world."""

from __future__ import annotations

import os

from tests.ranks import on_ranks

#: Modules of checks by the ranks that they need.
CHECKS = {
    8: (
        "tests.zero.equality_checks",
        "tests.zero.traffic_checks",
        "tests.zero.race_checks",
        "tests.zero.delay_checks",
        "tests.zero.tensor_checks",
        "tests.zero.autotp_checks",
        "tests.zero.pipeline_checks",
        "tests.zero.checkpoint_checks",
    ),
    6: ("tests.zero.equality_checks",),
    4: (
        "tests.zero.stage_checks",
        "tests.zero.refusal_checks",
        "tests.zero.gradient_checks",
        "tests.zero.window_checks",
        "tests.zero.difference_checks",
        "tests.zero.codec_checks",
        "tests.zero.audit_checks",
    ),
    1: ("tests.zero.single_checks",),
}


test_stage = on_ranks(CHECKS, timeout=900 + 2 * int(os.environ.get("HZERO_SCHEDULES", "0")))  # see delay_checks
