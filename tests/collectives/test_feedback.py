"""Error feedback's own account of its memory."""

from __future__ import annotations

import torch

from hzero.collectives import Bucket, ErrorFeedback


def test_the_peak_counts_what_is_kept_beside_what_replaces_it() -> None:
    feedback = ErrorFeedback()
    bucket = Bucket((3, 4), (5, 7), torch.float32, "gradients")
    assert feedback.peak_bytes == 0
    for expected in (48, 96, 96):  # 12 elements of 4 bytes; from the second step on the old ones too
        feedback.keep("node", bucket, [torch.ones(5), torch.ones(7)], 1.0)
        feedback.commit()
        assert feedback.peak_bytes == expected
