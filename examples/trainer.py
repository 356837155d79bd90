"""Trains a small GPT-NeoX with Hugging Face's Trainer and hzero: torchrun --nproc-per-node=4 examples/trainer.py."""

import json
import tempfile
from pathlib import Path

import deepspeed
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, Trainer, TrainingArguments

import hzero

GPU = torch.cuda.is_available()
config = json.loads(Path(__file__).with_name("ds_config.json").read_text())
if not GPU:  # nothing to discover: the ranks stand for two nodes with one MI250X (two GCDs) each
    config["hzero"]["topology"] = {"gpus_per_node": 1, "gcds_per_gpu": 2}
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled; stage 3 does not use it

hzero.enable()  # before Trainer builds its engine
arguments = TrainingArguments(
    output_dir=tempfile.gettempdir(),
    deepspeed=config,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    learning_rate=3e-3,
    max_steps=5,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    bf16=GPU,
    use_cpu=not GPU,
)
text = torch.tensor(list(Path(__file__).read_bytes()))
samples = [{"input_ids": piece, "labels": piece} for piece in text.unfold(0, 32, 8)]
shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256}
model = GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=256, max_position_embeddings=32, **shape))
trainer = Trainer(model, arguments, train_dataset=samples)
trainer.train()

if trainer.is_world_process_zero():
    for hop in hzero.state(trainer.model_wrapped).wire_log.entries():
        print(f"{hop.role} over tier {hop.tier} with {hop.codec}: received {hop.wire_bytes:,} bytes")
torch.distributed.destroy_process_group()
