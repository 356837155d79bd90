"""Three tiers, and nodes of an odd number. Run by test_parity.py on 8 ranks."""

from __future__ import annotations

import functools

from tests.parity.compare import row, rows
from tests.parity.deepspeed_rows import AT_RANDOM, CHANGES, NONE
from tests.parity.fsdp import Session

_of = functools.partial(rows, Session)
ALONE = {"guard": {"every": 0, "discarded_steps": 0}}  # audits of a part of the world are in mesh_checks.py

LONG_ROWS = {
    "layouts": _of(
        row("lossless", (1, 3, 8)),
        row("lossless", (1, 3, 8), layout=(3, 1, 2), block=ALONE),
        row("lossless", "bf16", block=CHANGES),
        row("lossless", "frozen", "tied", "offload", layout=(3, 1, 2), block=ALONE),
        row("lossless", 2, layout=(2, 2, 1), tensor=2),
    ),
    "scopes": _of(row("hpz", block=NONE), row("zero1", block=NONE), row("lossless", "count", 3)),
    "codecs": _of(
        row("topo", 3),
        *(row("topo", block={"codecs": {"weights": one, "gradients": one}}) for one in ("int4", AT_RANDOM)),
    ),
}
