"""The stage on a GPU that all ranks share."""

from __future__ import annotations

import pytest
import torch

from tests.ranks import on_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
GPU = {"HZERO_CHECKS_DEVICE": "cuda", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "HZERO_CHECKS_HOP_TIMEOUT_S": "60"}
CHECKS = "tests.deepspeed.device_checks"

test_stage = on_ranks({8: [CHECKS]}, timeout=300, **GPU)
test_stage_in_strict_order = on_ranks({2: [CHECKS], 8: [CHECKS]}, timeout=300, HZERO_CHECKS_ORDER="strict", **GPU)
