"""hzero.fsdp.Callback in Hugging Face's Trainer against the Trainer alone. Run by test_fsdp.py on 4 ranks."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

import hzero.fsdp
from hzero import ConfigError
from tests.deepspeed.training import shared_folder
from tests.parity.compare import WORLD, relative

TOPOLOGY = {"nodes": 2, "packages_per_node": WORLD // 4, "devices_per_package": 2}
LAYERS = 2
if importlib.util.find_spec("torchtitan") is not None:
    from tests.fsdp import titan  # before the ranks are forked

#: With 3 sequences of each rank and windows of 2, every epoch ends with a short window.
ROWS, WINDOW, STEPS = 3 * WORLD, 2, 4


def llama() -> LlamaForCausalLM:
    """A model of awkward sizes."""
    torch.manual_seed(0)
    shape = {"hidden_size": 20, "intermediate_size": 29, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=37, num_hidden_layers=LAYERS, **shape))


def trainer_of(callback: Any, folder: Path, model: Any = None, fsdp: bool = True, **changes: Any) -> Trainer:
    """A Trainer that shards on CPUs, unless ``fsdp`` is False."""
    rows = torch.randint(37, (ROWS, 9), generator=torch.Generator().manual_seed(1))
    how: dict[str, Any] = {
        "fsdp": fsdp,
        "fsdp_config": {"transformer_layer_cls_to_wrap": "LlamaDecoderLayer", "state_dict_type": "SHARDED_STATE_DICT"},
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": WINDOW,
        "learning_rate": 3e-3,
        "max_steps": STEPS,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    arguments = TrainingArguments(output_dir=str(folder), **{**how, **changes})
    if fsdp:
        # Accelerate uses FSDP for several GPUs only. Nothing else reads the kind of devices.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return Trainer(
        llama() if model is None else model,
        arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        callbacks=[] if callback is None else [callback],
    )


def losses_of(trainer: Trainer, resume: str | None = None) -> list[float]:
    """Trains, and returns the losses and norms of all steps."""
    try:
        trainer.train(resume_from_checkpoint=resume)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    return [entry[key] for key in ("loss", "grad_norm") for entry in trainer.state.log_history if key in entry]


def check_trainer() -> None:
    folder = shared_folder()
    wanted = losses_of(trainer_of(None, folder))
    callback = hzero.fsdp.Callback("lossless", TOPOLOGY, guard={"every": 2})
    found = losses_of(trainer_of(callback, folder, save_strategy="steps", save_steps=2))
    assert relative(found, wanted) < 1e-6, (found, wanted)
    assert callback.state is not None
    hops = {(entry.role, entry.tier): entry.hops for entry in callback.state.wire_log.entries()}
    modules = LAYERS + 2  # the embedding, and the last norm with the head
    assert hops["gradients", "inter_node"] == STEPS * modules, hops
    assert hops["gradients", "intra_package"] == 2 * ROWS // WORLD * modules, hops
    callback.state.close()
    resumed = hzero.fsdp.Callback("lossless", TOPOLOGY, guard={"every": 1})
    found = losses_of(trainer_of(resumed, folder), resume=str(folder / "checkpoint-2"))
    assert relative(found, wanted) < 1e-6, (found, wanted)
    assert resumed.state is not None
    resumed.state.close()


def check_a_model_that_transformers_have_sharded() -> None:
    """``from_pretrained`` shards over the ranks, without Accelerate."""
    folder = shared_folder()
    if dist.get_rank() == 0:
        llama().save_pretrained(folder)
    dist.barrier()
    runs = []
    for callback in (None, hzero.fsdp.Callback("lossless", TOPOLOGY)):
        model = LlamaForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(fsdp_size=WORLD))
        runs.append(losses_of(trainer_of(callback, folder, model, fsdp=False)))
    assert relative(runs[1], runs[0]) < 1e-6, runs
    assert callback is not None and callback.state is not None
    callback.state.close()


def check_trainer_without_fsdp2_is_refused() -> None:
    with pytest.raises(ConfigError, match="without fully_shard"):
        losses_of(trainer_of(hzero.fsdp.Callback("lossless", TOPOLOGY), shared_folder(), fsdp=False))
    with pytest.raises(ConfigError, match="error_feedbak"):
        hzero.fsdp.Callback("lossless", error_feedbak=["inter_node"])


def check_torchtitans_trainer_gives_the_same_losses() -> None:
    if importlib.util.find_spec("torchtitan") is None:
        pytest.skip("torchtitan is not installed")
    wanted, norms, _ = titan.train(None)
    found, clipped, (state,) = titan.train(
        {"preset": "lossless", "topology": {"packages_per_node": 1, "devices_per_package": 2}}
    )
    assert len(found) == titan.STEPS and wanted[-1] < wanted[0] - 1
    assert relative(found, wanted) < 1e-6 and relative(clipped, norms) < 1e-6, (found, wanted, clipped, norms)
    state.close()
