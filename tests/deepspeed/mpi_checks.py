"""The stage over MPI gives the bits of gloo. Run by test_mpi.py under mpiexec."""

from __future__ import annotations

from typing import Any

from tests.deepspeed.training import TOPOLOGY, run

BLOCKS: list[dict[str, Any]] = [
    {"preset": "lossless"},
    {"preset": "topo", "error_feedback": ["inter_node"], "checksum": True},
    {"preset": "zero3", "node_all_gather": {"algorithm": "doubling", "below_bytes": 1 << 20}},
    {"preset": "exact", "codecs": {"gradients": "int8"}},
]


def check_losses_and_masters_are_those_of_gloo() -> None:
    for block in BLOCKS:
        gloo, mpi = (run({**block, "transport": one, "topology": TOPOLOGY}, 2, 3) for one in ("torch", "mpi"))
        assert mpi.has_bits_of(gloo) and mpi.losses[-1] < mpi.losses[0], (block, gloo.losses, mpi.losses)
        counts = [[(e.role, e.tier, e.hops, e.wire_bytes) for e in one.log] for one in (gloo, mpi)]
        assert counts[0] == counts[1], block
