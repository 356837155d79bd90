"""QLoRA, the recipe of docs/recipes.md, against plain ZeRO-3. Run by test_clients.py on 2 ranks."""

from __future__ import annotations

import functools
from pathlib import Path

import bitsandbytes  # noqa: F401  # once, before the ranks are forked
import datasets
import torch
import torch.distributed as dist
import trl
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments

import hzero
from hzero.deepspeed import versions
from tests.clients.cells import Run, llama, samples
from tests.clients.config import ACCUMULATION, BATCH, STEPS, config_of
from tests.clients.trainer_checks import ARGUMENTS, logged
from tests.clients.trl_checks import tokenizer
from tests.deepspeed.training import assert_losses, shared_folder


@functools.cache
def _base() -> Path:
    """The folder of the base model."""
    folder = shared_folder()
    if dist.get_rank() == 0:
        llama(hidden_size=64, intermediate_size=96).save_pretrained(folder)
    dist.barrier()
    return folder


def _quantised(dtype: torch.dtype, storage: torch.dtype) -> torch.nn.Module:
    how = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=storage,
    )
    model = AutoModelForCausalLM.from_pretrained(_base(), quantization_config=how, dtype=dtype)
    torch.manual_seed(1)
    return model


def _trained(client: str, preset: str | None) -> tuple[Run, set[str]]:
    """A training of adapters, and the codecs of weights: in float32, where sums show no order, and TRL's in bfloat16."""
    low, rows = client == "SFTTrainer", samples(STEPS * ACCUMULATION * BATCH * 4)
    optimizer = {"params": {"lr": 1e-2, "torch_adam": True}}
    topology = {"nodes": 2, "packages_per_node": 1, "devices_per_package": 1}
    config = config_of(preset, bf16={"enabled": low}, optimizer=optimizer, hzero={"topology": topology})
    changes = {"output_dir": str(shared_folder()), "deepspeed": config, "learning_rate": 1e-2, "bf16": low}
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM")
    if low:
        how = trl.SFTConfig(**{**ARGUMENTS, **changes})
        model = _quantised(torch.bfloat16, torch.bfloat16)
        data = datasets.Dataset.from_list([{"input_ids": row["input_ids"]} for row in rows])
        trainer = trl.SFTTrainer(model, how, train_dataset=data, peft_config=lora, processing_class=tokenizer())
    else:
        arguments = TrainingArguments(**{**ARGUMENTS, **changes})
        model = get_peft_model(_quantised(torch.float32, torch.uint8), lora)
        trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    own = hzero.state(trainer.model_wrapped)
    codecs = {entry.codec for entry in own.wire_log.entries() if entry.role == "weights"} if own else set()
    return Run(logged(trainer, "loss")).end(trainer.model_wrapped), codecs


def check_qlora() -> None:
    """In Trainer with codes in bytes, and in TRL with codes in bfloat16, which recomputes: stock 0.18.9 fails there."""
    clients = {"Trainer": 1e-6} | ({"SFTTrainer": 2e-4} if versions.installed() >= (0, 19) else {})
    for client, rounding in clients.items():
        stock, _ = _trained(client, None)
        for preset, tolerance, codecs in (("fit", rounding, {"none"}), ("topo", 0.01, {"int8", "none"})):
            run, sent = _trained(client, preset)
            assert len(run.losses) == STEPS and run.losses[-1] < run.losses[0] - 0.01
            assert_losses(run.losses, stock.losses, tolerance)
            assert sent == codecs
