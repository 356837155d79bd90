"""Three tiers, and nodes of an odd number. Run by test_parity.py on 8 ranks."""

from __future__ import annotations

import functools

import torch

from tests.deepspeed.training import shared_folder
from tests.fsdp import muon_checks
from tests.parity.compare import row, rows
from tests.parity.deepspeed_rows import AT_RANDOM, CHANGES, NONE
from tests.parity.fsdp import Session, mesh_of
from tests.ranks import LONG

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


@LONG
def check_muon_resumes_on_two_and_six_ranks() -> None:
    """Of a checkpoint of four ranks, and trains on as they do with the same batches. Each half of the world saves its own."""
    four, other, folder = mesh_of(4), mesh_of(2), shared_folder()
    loop = muon_checks.Loop.sharded("lossless", muon_checks.TOPOLOGIES[0], four, **ALONE)
    loop.train(range(2))
    own = folder / str(int(four.mesh.min()))
    loop.save(own, four.get_group())
    torch.distributed.barrier()
    loop.found.clear()
    loop.train(range(2, 5))
    again = muon_checks.Loop.sharded("lossless", muon_checks.TOPOLOGIES[0], other, **ALONE)
    again.load(folder / "0", other.get_group())
    again.train(range(2, 5))
    torch.testing.assert_close(again.found, loop.found, rtol=1e-5, atol=1e-6)
