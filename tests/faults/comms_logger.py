"""Two engines, without and with DeepSpeed's ``comms_logger``, whose summary has the bytes of hzero's hops."""

from __future__ import annotations

import sys
from typing import Any

import deepspeed
import torch
from deepspeed.comm.comm import comms_logger

import hzero

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def train(topology: Any, steps: int, **changes: Any) -> Any:
    """An engine after some steps of two micro-steps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 58), torch.nn.GELU(), torch.nn.Linear(58, 17))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 3, "hzero": {"preset": "topo", "topology": topology}},
        **changes,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for _ in range(2 * steps):
        engine.backward(engine(torch.randn(1, 40)).square().mean())
        engine.step()
    return engine


def check(engine: Any) -> None:
    """The logger has every hop of the wire log, with its bytes."""
    logged = {name: sizes for name, sizes in comms_logger.comms_dict.items() if name.startswith("hzero ")}
    counted = {
        f"hzero {e.role}, {e.tier}, {e.codec}": e for e in hzero.state(engine).wire_log.entries() if e.wire_bytes
    }
    assert logged.keys() == counted.keys(), (logged.keys(), counted.keys())
    assert any("weights, node, int8" in name for name in logged) and any("gradients, node" in name for name in logged)
    for name, sizes in logged.items():
        assert sum(size * found[0] for size, found in sizes.items()) == counted[name].wire_bytes, name
        assert sum(found[0] for found in sizes.values()) == counted[name].hops, name


if __name__ == "__main__":
    deepspeed.init_distributed("gloo")
    train("discover", 1).destroy()
    assert not comms_logger.comms_dict
    logger = {"enabled": True, "verbose": False, "prof_all": True, "debug": False}
    engine = train({"gpus_per_node": 1, "gcds_per_gpu": 2}, 2, comms_logger=logger)
    check(engine)
    with torch.no_grad():
        engine(torch.randn(1, 40))
    hzero.state(engine).settle()
    check(engine)
    deepspeed.comm.log_summary(show_straggler=True)
    sys.stdout.flush()
    engine.destroy()
