"""Trains a small GPT-NeoX with Hugging Face's Trainer: torchrun --nproc-per-node=4 examples/trainer.py."""

import tempfile
from pathlib import Path

import deepspeed
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, Trainer, TrainingArguments

GPU = torch.cuda.is_available()
HERE = Path(__file__).parent
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # CPUs would compile it; stage 3 does not use it

arguments = TrainingArguments(
    output_dir=tempfile.gettempdir(),
    deepspeed=str(HERE / ("ds_config.json" if GPU else "ds_config_cpu.json")),
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
torch.distributed.destroy_process_group()
