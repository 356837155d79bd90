"""The stage over MPI gives the bits of gloo. Run by test_mpi.py under mpiexec."""

from __future__ import annotations

import os
from typing import Any

import torch

from tests.zero.training import ds_config, engine_of, masters_of, train

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
TOPOLOGY = {"nodes": WORLD // 4, "gpus_per_node": 2, "gcds_per_gpu": 2}
BLOCKS: list[dict[str, Any]] = [
    {"preset": "lossless"},
    {"preset": "topo", "error_feedback": ["node"], "checksum": True},
    {"preset": "zero3", "node_all_gather": {"algorithm": "doubling", "below_bytes": 1 << 20}},
    {"preset": "mild", "refresh_differences": True, "canary": {"every_steps": 1}},
]


def check_losses_and_masters_are_those_of_gloo() -> None:
    for block in BLOCKS:
        found = []
        for transport in ("torch", "mpi"):
            engine = engine_of(ds_config({**block, "transport": transport, "topology": TOPOLOGY}, 2))
            losses = train(engine, 4, 2)
            masters = masters_of(engine)
            counts = [(e.role, e.tier, e.hops, e.wire_bytes) for e in engine.optimizer.hzero.wire_log.entries()]
            found.append((losses, masters, counts))
            engine.destroy()
        assert found[0][0] == found[1][0] and found[0][0][-1] < found[0][0][0], (block, found[0][0], found[1][0])
        for name, master in found[0][1].items():
            assert torch.equal(master.view(torch.int32), found[1][1][name].view(torch.int32)), (block, name)
        assert found[0][2] == found[1][2], block
