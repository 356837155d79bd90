"""What the benchmarks train: a GPT-NeoX with random weights, on the sources of this Python's standard library."""

from __future__ import annotations

import datetime
import functools
import logging
import math
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hzero.errors import ConfigError
from hzero.tools.experiment import Experiment, compose, transformers_config

#: Keys of a model's shape.
SHAPE = ("name", "hidden_size", "num_layers", "num_heads", "intermediate_size", "vocab_size", "seq_length")


@functools.cache
def _experiment(*overrides: str) -> Experiment:
    return compose(overrides)


def _of(model: dict[str, Any]) -> Experiment:
    return _experiment(*(f"model.{key}={value}" for key, value in model.items()))


def check_model(model: Any) -> dict[str, Any]:
    """Returns a model's shape once it is checked.

    Raises:
        ConfigError: Names the key.
    """
    if not isinstance(model, dict):
        raise ConfigError(f"model: found {model!r}; expected a block with keys {', '.join(SHAPE)}")
    checked = _of(model)
    assert checked.architecture.numels, "transformers can build it"
    return {key: checked["model"][key] for key in SHAPE}


#: Models by name: 1.1, 3.7 and 9.9 million parameters.
MODELS = {
    name: {key: _experiment(f"model={name}")["model"][key] for key in SHAPE}
    for name in ("gpt_neox_1m", "gpt_neox_4m", "gpt_neox_10m")
}


def build(model: dict[str, Any], seed: int) -> Any:
    """A float32 ``GPTNeoXForCausalLM``, the same on all ranks."""
    import torch
    from transformers import GPTNeoXForCausalLM

    torch.manual_seed(seed)
    return GPTNeoXForCausalLM(transformers_config(_of(model)["model"]))


def numels(model: dict[str, Any]) -> list[int]:
    """Elements of every parameter."""
    return list(_of(model).architecture.numels)


def layer_numel(model: dict[str, Any]) -> int:
    """Elements of one transformer layer."""
    return sum(_of(model).architecture.layer or ())


def tokens(vocab_size: int, max_bytes: int, folder: Path) -> Path:
    """The file of token ids of the standard library's sources; it is made if missing.

    Args:
        vocab_size: Of a byte-pair encoding that is trained on the text.
        max_bytes: Length of the text.
        folder: Of the file, which exists.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    file = folder / f"tokens-{vocab_size}-{max_bytes}.npy"
    if file.exists():
        return file
    sources = sorted(path for path in Path(sysconfig.get_path("stdlib")).glob("*.py") if path.is_file())
    sources += sorted(Path(sysconfig.get_path("stdlib")).glob("[a-h]*/*.py"))
    text = b"".join(path.read_bytes() for path in sources)[:max_bytes].decode("utf-8", "ignore")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    lines = text.splitlines(keepends=True)
    tokenizer.train_from_iterator(
        lines, trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False, initial_alphabet=alphabet)
    )
    ids = [one for encoding in tokenizer.encode_batch(lines) for one in encoding.ids]
    partial = file.with_suffix(f".{os.getpid()}.npy")
    np.save(partial, np.asarray(ids, dtype=np.uint16))
    os.replace(partial, file)
    return file


def batch(ids: np.ndarray, key: Sequence[int], first: int, size: int, length: int) -> np.ndarray:
    """Windows at random places, int64 ``[size, length]``, which depend on the key and their numbers only.

    Args:
        ids: Of the text.
        key: Seed and step.
        first: Number of the first sequence in the step.
        size: Sequences.
        length: Tokens of each.
    """
    places = len(ids) - length + 1
    starts = [np.random.default_rng([*key, first + index]).integers(0, places) for index in range(size)]
    return np.stack([ids[start : start + length] for start in starts]).astype(np.int64)


def learning_rate(train: dict[str, Any], step: int) -> float:
    """Rate of a step (from 1): linear warm-up, then constant, or a cosine down to a tenth after ``decay_steps``."""
    rate, warmup, total = train["lr"], train["warmup_steps"], train.get("decay_steps")
    if step <= warmup:
        return float(rate * step / warmup)
    if total is None:
        return float(rate)
    done = min((step - warmup) / max(total - warmup, 1), 1.0)
    return float(rate * (0.1 + 0.45 * (1 + math.cos(math.pi * done))))


def adamw(train: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed's optimizer block: torch's AdamW, for which nothing is compiled."""
    return {
        "type": "AdamW",
        "params": {**{key: train[key] for key in ("lr", "betas", "weight_decay")}, "torch_adam": True},
    }


def prepare() -> None:
    """Imports what ranks need, once in the process that forks them."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    import deepspeed
    import torch._inductor.compile_fx  # noqa: F401 - an engine imports it
    import transformers.models.gpt_neox.modeling_gpt_neox  # noqa: F401

    import hzero.deepspeed  # noqa: F401

    # An extension that DeepSpeed would compile and stage 3 never uses.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def start_rank(threads: int, timeout_s: float) -> None:
    """Joins the world of a forked rank over gloo."""
    import warnings

    import deepspeed
    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)  # also gives a forked process a thread pool of its own
    deepspeed.utils.logger.setLevel(logging.ERROR)
    deepspeed.init_distributed("gloo", timeout=datetime.timedelta(seconds=timeout_s), verbose=False)
