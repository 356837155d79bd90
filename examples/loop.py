"""Trains a GPT-NeoX in a loop of Accelerate: accelerate launch --config_file examples/accelerate.yaml examples/loop.py."""

from pathlib import Path

import deepspeed
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DummyOptim
from torch.utils.data import DataLoader
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

import hzero

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # CPUs would compile it; stage 3 does not use it
if not torch.cuda.is_available():
    PartialState(cpu=True)  # else each rank would think that it is alone; cpu=True of Accelerator would train DDP
accelerator = Accelerator(gradient_accumulation_steps=2)
text = torch.tensor(list(Path(__file__).read_bytes()))
loader = DataLoader(text.unfold(0, 32, 4), batch_size=4, shuffle=True)
shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256}
model = GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=256, max_position_embeddings=32, **shape))
model, optimizer, loader = accelerator.prepare(model, DummyOptim(model.parameters(), lr=3e-3), loader)

for micro_step, tokens in zip(range(16), loader):
    with accelerator.accumulate(model):
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.print(f"micro-batch {micro_step + 1}: loss {loss.item():.3f}")

state = hzero.state(model)  # None without the block
if state:
    state.settle()  # on all ranks: the log counts hops that have ended
    for hop in state.wire_log.entries() if accelerator.is_main_process else ():
        print(f"{hop.role} over tier {hop.tier} with {hop.codec}: received {hop.wire_bytes:,} bytes")
accelerator.end_training()
