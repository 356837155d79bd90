"""A configuration that hzero refuses, in the ways in which users give one. It is refused before there is a model."""

from __future__ import annotations

import json
import sys
from typing import Any

import deepspeed
import torch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def configuration(block: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A DeepSpeed configuration; ``zero_optimization`` is merged."""
    zero = {"stage": 3, "hzero": block, **changes.pop("zero_optimization", {})}
    return {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, **changes}


def init(path: str) -> None:
    """``zero.Init`` with a file, before torch.distributed has been initialised by anybody."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(configuration({"presett": "topo"}), file)
    with deepspeed.zero.Init(config_dict_or_path=path):
        print("a model is made", flush=True)


def world(_: str) -> None:
    """A topology that does not fit the ranks, which only an engine can see."""
    deepspeed.init_distributed("gloo")
    model = torch.nn.Linear(4, 4)
    block = {"preset": "topo", "topology": {"nodes": 3, "packages_per_node": 1, "devices_per_package": 1}}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    deepspeed.initialize(model=model, config=configuration(block, optimizer=optimizer))
    print("an engine is made", flush=True)


if __name__ == "__main__":
    {"init": init, "world": world}[sys.argv[1]](sys.argv[2])
