"""Rows of FSDP2 on 4 ranks. Run by test_parity.py; `LONG_ROWS` take longer."""

from __future__ import annotations

import functools

import torch._dynamo  # noqa: F401  # once, before the ranks are forked
from torch.distributed.fsdp import FSDPModule

from tests.parity.compare import row, rows
from tests.parity.deepspeed_rows import AT_RANDOM, CHANGES, EXCEPT, FEEDBACK, MILD, NONE
from tests.parity.fsdp import EDITS, FLAGS, Session

_of = functools.partial(rows, Session)
_SPARE = [row("lossless", "spare", "smaller", 2)] if hasattr(FSDPModule, "set_reduce_scatter_unused_params") else []
_SHARD = {"except": {"head.*": {"weights": "world"}, "*norm*": {"weights": "device", "gradients": "world"}}}

ROWS = {
    "layouts_and_accumulation": _of(row("lossless", (1, 3, 8)), row("lossless", (1, 3, 8), layout=(1, 2, 2))),
    "presets": _of(
        *(row(preset, 2, block=NONE) for preset in ("hpz", "zero1", "zero2")),
        row("topo", 2, block=MILD),
        row("topo", 4),
        row("fit", 2),
    ),
    "codecs": _of(
        row("topo", 2, block=FEEDBACK),
        row("exact", "bf16", block=CHANGES),
        row("topo", block={"codecs": {"weights": AT_RANDOM, "gradients": AT_RANDOM}}),
        row("replica", "bf16", block={"codecs": {"weights": "int4"}}),
        row("half", block={"codecs": {"weights": "bf16", "gradients": "bf16"}}),
    ),
    "exceptions": _of(
        row("topo", "frozen", block=EXCEPT), row("lossless", "frozen", "checkpointing", 2, block={"shard": _SHARD})
    ),
    "features": _of(
        row("lossless", "frozen", "checkpointing", 2, block={"boundary_message_bytes": 300}),
        row("lossless", "tied", "grouped", "kept", "sgd", block={"boundary_message_bytes": 1 << 24}),
        *_SPARE,
        row("lossless", "meta", "prefetch", "offload", layout=(1, 2, 2)),
        row("lossless", 2, layout=(2, 1, 1), tensor=2),
        row("lossless", "bf16", 3, block=CHANGES),
        row("zero1", "bf16", block=CHANGES),
    ),
    "signs_of_the_last_backward": _of(*(row("lossless", flag, 3) for flag in FLAGS[:3])),
    "edits": _of(*(row("lossless", "fused", edit=way) for way in EDITS)),
    "exact_evaluation": _of(row("topo", block={"exact_evaluation": True, "codecs": {"weights": "int4"}})),
}
LONG_ROWS = {
    "compiled_blocks": _of(row("lossless", "compiled", 2)),
    "sums_in_16_bits": _of(
        row("lossless", "bf16_wire", block=CHANGES), row("lossless", "fp16", block=CHANGES), row("topo", "bf16_wire", 2)
    ),
}
