"""DeepSpeed's ``comms_logger``, whose summary has the bytes of hzero's hops. Run by test_kinds.py on 4 ranks."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.comm.comm import comms_logger

import hzero
from tests.deepspeed.training import ds_config, engine_of, train


def _example(engine: Any) -> torch.Tensor:
    return torch.randn(1, 40, dtype=engine.module[0].weight.dtype)


def _trained(block: dict[str, Any], **changes: Any) -> Any:
    """An engine after two steps of two micro-batches."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 98), torch.nn.GELU(), torch.nn.Linear(98, 17))
    optimizer = {"params": {"lr": 1e-5, "torch_adam": True}}
    engine = engine_of(ds_config(block, 2, optimizer=optimizer, gradient_clipping=0.0, **changes), model)
    train(engine, 2, 2, loss_of=lambda engine, *_: engine(_example(engine)).float().square().mean())
    return engine


def _same_as_the_wire_log(engine: Any) -> bool:
    """Whether the logger has every hop of the wire log, with its bytes, and the same rows on all ranks."""
    logged = {
        name: (sum(size * found[0] for size, found in sizes.items()), sum(found[0] for found in sizes.values()))
        for name, sizes in comms_logger.comms_dict.items()
        if name.startswith("hzero ")
    }
    counted = {
        f"hzero {e.role}, {e.tier}, {e.codec}": (e.wire_bytes, e.hops)
        for e in hzero.state(engine).wire_log.entries()
        if e.wire_bytes
    }
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, logged)
    return logged == counted and all(each == logged for each in every)


def check_the_summary_has_the_bytes_on_the_wire() -> None:
    topo = {"preset": "topo", "topology": {"packages_per_node": 1, "devices_per_package": 2}}
    logger = {"enabled": True, "verbose": False, "prof_all": True, "debug": False}
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(io.StringIO()) as printed:
        _trained({"preset": "topo"}).destroy()
        assert not comms_logger.comms_dict
        engine = _trained(topo, comms_logger=logger)
        hzero.state(engine).settle()
        assert _same_as_the_wire_log(engine)
        with torch.no_grad():
            engine(_example(engine))
        hzero.state(engine).settle()
        assert _same_as_the_wire_log(engine)
        deepspeed.comm.log_summary(show_straggler=True)
        engine.destroy()
    comms_logger.enabled = False
    if dist.get_rank() == 0:
        starts = [line for line in said.getvalue().splitlines() if line.startswith("hzero: topo on ")]
        assert [line.partition("; ")[0].removeprefix("hzero: topo on ") for line in starts] == [
            "1 node x 4 packages x 1 device (CPU ranks, no topology declared)",
            "2 nodes x 1 package x 2 devices",
        ]
        _, summary, stragglers = printed.getvalue().split("Comm. Op")
        for rows in (summary, stragglers):
            assert "\nhzero weights, inter_node, int8\n" in rows and "\nhzero gradients, inter_node, int4\n" in rows
