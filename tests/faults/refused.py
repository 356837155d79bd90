"""A configuration that hzero refuses, in the ways in which users give one. It is refused before there is a model."""

from __future__ import annotations

import base64
import json
import sys
from typing import Any

import deepspeed
import torch

import hzero

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def configuration(block: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A DeepSpeed configuration; ``zero_optimization`` is merged."""
    zero = {"stage": 3, "hzero": block, **changes.pop("zero_optimization", {})}
    return {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, **changes}


def caught() -> None:
    """A refusal that depends on the configuration only comes with ``zero.Init``, and can be caught."""
    cases: list[tuple[dict[str, Any], str]] = [
        (configuration({}, zero_optimization={"stage": 2}), "stage"),
        (configuration({}, hybrid_engine={"enabled": True}), "hybrid_engine.enabled"),
        (configuration({"preset": "tpoo"}), "did you mean 'topo'?"),
        (configuration({"topology": "frontierr"}), "hzero.topology: found no file"),
        ({**configuration({}), "hzero": {}}, "found at the top level and in zero_optimization"),
    ]
    for config, says in cases:
        text = json.dumps(config)
        for given in (config, base64.urlsafe_b64encode(text.encode()).decode()):
            try:
                with deepspeed.zero.Init(config_dict_or_path=given):
                    torch.nn.Linear(4, 4)
            except hzero.ConfigError as error:
                assert says in str(error), (says, str(error))
            else:
                raise AssertionError(f"{says}: not refused")


def init(path: str) -> None:
    """``zero.Init`` with a file, before torch.distributed has been initialised by anybody."""
    caught()
    with open(path, "w", encoding="utf-8") as file:
        json.dump(configuration({"presett": "topo"}), file)
    with deepspeed.zero.Init(config_dict_or_path=path):
        print("a model is made", flush=True)


def trainer(folder: str) -> None:
    """Trainer's arguments, with values "auto"."""
    from transformers import TrainingArguments

    config = configuration({"codecs": {"weightx": "int8"}}, optimizer={"type": "AdamW", "params": {"lr": "auto"}})
    config.update(train_micro_batch_size_per_gpu="auto", bf16={"enabled": "auto"}, gradient_clipping="auto")
    TrainingArguments(folder, deepspeed=config, use_cpu=True, report_to=[])
    print("a model is made", flush=True)


def accelerate(_: str) -> None:
    """Accelerate's plug-in, with a value of the block that Accelerate would fill in."""
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin

    config = configuration({"preset": "topo", "topology": "auto"}, gradient_accumulation_steps="auto")
    Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
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
    {"init": init, "trainer": trainer, "accelerate": accelerate, "world": world}[sys.argv[1]](sys.argv[2])
