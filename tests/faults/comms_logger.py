"""Engines without and with DeepSpeed's ``comms_logger``, whose summary has the bytes of hzero's hops.

In the last one, a shard of one rank does not fit codec ``exp``, so that ranks differ in their hops.
"""

from __future__ import annotations

import sys
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.comm.comm import comms_logger

import hzero

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def train(steps: int, block: dict[str, Any], wide: bool = False, **changes: Any) -> Any:
    """An engine after some steps of two micro-steps; ``wide``: exponents of the shard of rank 1 do not fit codec ``exp``."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 98), torch.nn.GELU(), torch.nn.Linear(98, 17))
    if wide:
        shard = model[0].weight.data.view(4, -1)[1]
        shard *= torch.exp2(torch.randint(-90, 1, shard.shape).float())
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "hzero": block},
        **changes,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for _ in range(2 * steps):
        engine.backward(engine(example(engine)).float().square().mean())
        engine.step()
    return engine


def example(engine: Any) -> torch.Tensor:
    """One random example."""
    return torch.randn(1, 40, dtype=engine.module[0].weight.dtype)


def check(engine: Any, *names: str) -> set[str]:
    """The logger has every hop of the wire log, with its bytes; the names of rows in which ranks differ.

    Those have the bytes of the rank that has received most.
    """
    logged = {name: sizes for name, sizes in comms_logger.comms_dict.items() if name.startswith("hzero ")}
    own = {
        f"hzero {e.role}, {e.tier}, {e.codec}": (e.wire_bytes, e.hops)
        for e in hzero.state(engine).wire_log.entries()
        if e.wire_bytes
    }
    every: list[dict[str, tuple[int, int]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(every, own)
    assert logged.keys() == set().union(*every), (logged.keys(), every)
    assert all(any(name in row for row in logged) for name in names), logged.keys()
    for row, sizes in logged.items():
        counted = [each.get(row, (0, 0)) for each in every]
        assert sum(size * found[0] for size, found in sizes.items()) == max(counted)[0], (row, sizes, counted)
        if len(set(counted)) == 1:
            assert sum(found[0] for found in sizes.values()) == counted[0][1], row
    return {row for row in logged if len({each.get(row) for each in every}) > 1}


if __name__ == "__main__":
    deepspeed.init_distributed("gloo")
    topo = {"preset": "topo", "topology": {"gpus_per_node": 1, "gcds_per_gpu": 2}}
    train(1, {"preset": "topo"}).destroy()
    assert not comms_logger.comms_dict
    logger = {"enabled": True, "verbose": False, "prof_all": True, "debug": False}
    engine = train(2, topo, comms_logger=logger)
    assert not check(engine, "weights, node, int8", "gradients, node")
    with torch.no_grad():
        engine(example(engine))
    hzero.state(engine).settle()
    assert not check(engine)
    deepspeed.comm.log_summary(show_straggler=True)
    engine.destroy()

    comms_logger.comms_dict.clear()
    exp = {"preset": "lossless", "codecs": {"weights": "exp"}, "topology": {"nodes": 2, "gpus_per_node": 2}}
    engine = train(2, exp, wide=True, bf16={"enabled": True}, comms_logger=logger)
    assert not check(
        engine, "weights, node, exp", "weights, node, none"
    )  # a block did not fit: all ranks went on without
    deepspeed.comm.log_summary(show_straggler=True)
    sys.stdout.flush()
    engine.destroy()
