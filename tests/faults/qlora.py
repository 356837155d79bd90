"""torchrun --nproc-per-node=2 qlora.py FOLDER

QLoRA of a tiny Llama with bitsandbytes' nf4, in Trainer and in TRL's SFTTrainer, under stock ZeRO-3 and hzero. Prints losses.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
import torch
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

import hzero

STEPS, LENGTH, VOCAB = 4, 16, 61
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "up_proj"], "task_type": "CAUSAL_LM"}
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}


def config_of(preset: str, low: bool) -> dict[str, Any]:
    """The DeepSpeed configuration, with values that the client fills in; ``low`` trains in bfloat16."""
    zero: dict[str, Any] = {"stage": 3}
    if preset != "stock":
        zero["hzero"] = {"preset": preset, "topology": {"nodes": 2, "gpus_per_node": 1, "gcds_per_gpu": 1}}
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "bf16": {"enabled": low},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": zero,
    }


def trainer_of(client: str, preset: str, storage: torch.dtype, folder: Path) -> Any:
    """A trainer of a quantised model with adapters: in float32, where sums show no order, and TRL's in bfloat16."""
    low = client != "Trainer"
    dtype = torch.bfloat16 if low else torch.float32
    arguments: dict[str, Any] = {
        "output_dir": str(folder / "out"),
        "deepspeed": config_of(preset, low),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
        "logging_steps": 1,
        "lr_scheduler_type": "constant",
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": low,
    }
    rows = [[(start + 5 * at * start) % (VOCAB - 3) + 3 for at in range(LENGTH)] for start in range(STEPS * 8)]
    quantised = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=storage,
    )
    if not low:
        how = TrainingArguments(**arguments)
        model = AutoModelForCausalLM.from_pretrained(folder / "base", quantization_config=quantised, dtype=dtype)
        torch.manual_seed(1)
        model = get_peft_model(model, LoraConfig(**LORA))
        return Trainer(model, how, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
    from trl import SFTConfig, SFTTrainer

    how = SFTConfig(**arguments, max_length=LENGTH, gradient_checkpointing=True)
    model = AutoModelForCausalLM.from_pretrained(folder / "base", quantization_config=quantised, dtype=dtype)
    torch.manual_seed(1)
    data = Dataset.from_list([{"input_ids": row} for row in rows])
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "base")
    return SFTTrainer(model, how, train_dataset=data, peft_config=LoraConfig(**LORA), processing_class=tokenizer)


def make_base(folder: Path) -> None:
    """Saves the base model, and a tokenizer of as many words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, num_key_value_heads=2, **SHAPE)).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({str(word): word for word in range(VOCAB)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1").save_pretrained(folder)


def main() -> None:
    """Trains all and prints each one's losses and the number of bytes that reached no rank as they were."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    folder = Path(sys.argv[1])
    if dist.get_rank() == 0:
        make_base(folder / "base")
    dist.barrier()
    for client, storage in (("Trainer", torch.uint8), ("SFTTrainer", torch.bfloat16)):
        for preset in ("stock", "lossless", "topo"):
            trainer = trainer_of(client, preset, storage, folder)
            trainer.train()
            losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
            own = hzero.state(trainer.model_wrapped)
            codecs = sorted({entry.codec for entry in own.wire_log.entries() if entry.role == "weights"}) if own else []
            if dist.get_rank() == 0:
                print(json.dumps([client, str(storage), preset, losses, codecs]), flush=True)
            trainer.model_wrapped.destroy()
            trainer.accelerator.free_memory()
            unset_hf_deepspeed_config()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
