"""The stage on a GPU that all ranks share."""

from __future__ import annotations

import pytest
import torch

from tests.ranks import on_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
CHECKS = {ranks: ("tests.deepspeed.device_checks",) for ranks in (2, 8)}

test_stage = on_ranks(
    CHECKS, timeout=300, HZERO_CHECKS_DEVICE="cuda", CUBLAS_WORKSPACE_CONFIG=":4096:8", HZERO_CHECKS_HOP_TIMEOUT_S="60"
)
