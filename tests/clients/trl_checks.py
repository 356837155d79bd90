"""TRL's SFTTrainer against plain ZeRO-3. Run by test_clients.py on 4 ranks."""

from __future__ import annotations

from typing import Any

import datasets
import trl
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.clients.cells import VOCAB, Run, assert_both, llama, samples
from tests.clients.config import ACCUMULATION, BATCH, STEPS, config_of
from tests.clients.trainer_checks import ARGUMENTS, logged
from tests.deepspeed.training import shared_folder


def tokenizer() -> Any:
    """A tokenizer of `VOCAB` words: the numbers."""
    words = Tokenizer(models.WordLevel({str(number): number for number in range(VOCAB)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", bos_token="1", eos_token="2")


def trained(preset: str | None, **changes: Any) -> Run:
    """A supervised fine-tuning on texts, which SFTTrainer tokenises; ``changes`` are arguments of SFTConfig."""
    count = STEPS * ACCUMULATION * BATCH * 4
    texts = [" ".join(map(str, row["input_ids"])) for row in samples(count)]
    arguments = trl.SFTConfig(
        output_dir=str(shared_folder()), deepspeed=config_of(preset), bf16=False, **{**ARGUMENTS, **changes}
    )
    trainer = trl.SFTTrainer(
        llama(), arguments, train_dataset=datasets.Dataset.from_dict({"text": texts}), processing_class=tokenizer()
    )
    trainer.train()
    return Run(logged(trainer, "loss"), logged(trainer, "grad_norm")).end(trainer.model_wrapped)


def check_trl_sft_trainer() -> None:
    """SFTTrainer, whose default is gradient checkpointing."""
    assert_both(trained, trained(None))
