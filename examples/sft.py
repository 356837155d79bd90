"""Fine-tunes a small model on conversations with TRL's SFTTrainer: torchrun --nproc-per-node=4 examples/sft.py."""

import itertools
import tempfile
from pathlib import Path

import deepspeed
import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import hzero

GPU = torch.cuda.is_available()
HERE = Path(__file__).parent
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # CPUs would compile it; stage 3 does not use it

# A tokenizer of single bytes with a chat template represents the one of a real model.
alphabet = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
bytewise = Tokenizer(models.WordLevel({token: number for number, token in enumerate(alphabet)}, unk_token="<pad>"))
bytewise.pre_tokenizer = pre_tokenizers.Sequence(
    [pre_tokenizers.ByteLevel(add_prefix_space=False), pre_tokenizers.Split("", "isolated")]
)
bytewise.decoder = decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise, pad_token="<pad>", eos_token="<eos>")
tokenizer.chat_template = (
    "{% for message in messages %}{{ message['role'] + ': ' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}"
    "{{ '\n' }}{% endfor %}"
)

arguments = SFTConfig(
    output_dir=tempfile.gettempdir(),
    deepspeed=str(HERE / ("ds_config.json" if GPU else "ds_config_cpu.json")),
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    learning_rate=3e-3,
    max_steps=5,
    logging_steps=1,
    max_length=128,
    assistant_only_loss=True,  # by the template's generation marks
    save_strategy="no",
    report_to="none",
    bf16=GPU,
    use_cpu=not GPU,
)
shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256}
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(alphabet), max_position_embeddings=128, **shape))
lines = [line[:40] for line in Path(__file__).read_text().splitlines() if line]
turns = [
    [{"role": "user", "content": line}, {"role": "assistant", "content": following}]
    for line, following in itertools.pairwise(lines)
]
trainer = SFTTrainer(
    model, arguments, train_dataset=Dataset.from_dict({"messages": turns * 4}), processing_class=tokenizer
)
trainer.train()

state = hzero.state(trainer.model_wrapped)  # None without the block
if state:
    state.settle()  # on all ranks: the log counts hops that have ended
    for hop in state.wire_log.entries() if trainer.is_world_process_zero() else ():
        print(f"{hop.role} over tier {hop.tier} with {hop.codec}: received {hop.wire_bytes:,} bytes")
torch.distributed.destroy_process_group()
