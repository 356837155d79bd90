"""The stage over MPI gives the bits of gloo. Run by test_mpi.py under mpiexec."""

from __future__ import annotations

from typing import Any

import torch

from tests.parity.compare import row, train
from tests.parity.deepspeed import Session

BLOCKS: list[tuple[str, dict[str, Any]]] = [
    ("lossless", {}),
    ("topo", {"error_feedback": ["inter_node"], "checksum": True}),
    ("zero3", {"node_all_gather": {"algorithm": "doubling", "below_bytes": 1 << 20}}),
    ("exact", {"codecs": {"gradients": "int8"}}),
]


def check_losses_and_masters_are_those_of_gloo() -> None:
    for preset, block in BLOCKS:
        runs = (train(Session, row(preset, 2, block={**block, "transport": one})) for one in ("torch", "mpi"))
        gloo, mpi = runs
        assert mpi.losses == gloo.losses, (block, gloo.losses, mpi.losses)
        assert all(torch.equal(mpi.masters[name], master) for name, master in gloo.masters.items()), block
