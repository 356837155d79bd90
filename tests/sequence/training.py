"""Small models of the three kinds that run in chunks, and what they give on one rank without hzero."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import AutoConfig, AutoModelForCausalLM

#: Models of whom must-haves are tested, those whose layers are Llama's, and all, with one without rotary embedding.
CHUNKED = ("llama", "gpt_neox", "qwen3")
LIKE_LLAMA = ("llama", "mistral", "qwen2", "qwen3")
KINDS = (*CHUNKED, "gpt2")


def causal(kind: str, **shape: Any) -> Any:
    """A causal model of an architecture."""
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape))


def model_of(kind: str, width: int = 32, vocabulary: int = 67, layers: int = 2, heads: int = 8, keys: int = 2) -> Any:
    """A model with the same weights on all ranks. Heads of keys are fewer than those of queries, except in GPT-NeoX."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": width, "intermediate_size": 4 * width, "vocab_size": vocabulary}
    shape |= {"num_hidden_layers": layers, "num_attention_heads": heads, "attn_implementation": "sdpa"}
    if kind == "gpt_neox":
        return causal(kind, **shape, rotary_pct=0.5, use_parallel_residual=layers % 2 == 0)
    if kind == "gpt2":
        del shape["intermediate_size"]
        return causal(kind, **shape, n_positions=64, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0)
    window = {"sliding_window": None} if kind == "mistral" else {}
    return causal(kind, **shape, **window, num_key_value_heads=keys, head_dim=width // heads)


def batch_of(length: int, vocabulary: int = 67) -> dict[str, torch.Tensor]:
    """Two whole sequences, with labels that follow each token."""
    ids = torch.randint(0, vocabulary, (2, length), generator=torch.Generator().manual_seed(length))
    labels = pad(ids[:, 1:], (0, 1), value=-100)
    labels[:, 3:5] = -100
    positions = torch.arange(length).repeat(2, 1)
    return {"input_ids": ids, "position_ids": positions, "labels": labels}


def parts_of(batch: dict[str, torch.Tensor], chunk: int, rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """The tokens of one rank: its part of every chunk."""
    chunks = {name: whole.split(chunk * ranks, 1) for name, whole in batch.items()}
    return {name: torch.cat([one.chunk(ranks, 1)[rank] for one in of], 1) for name, of in chunks.items()}


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    """Of all parameters."""
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def stock(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The sum of a batch's losses, and its gradients, by transformers."""
    model.zero_grad()
    labels = batch["labels"]
    loss = model(**batch, shift_labels=labels, num_items_in_batch=1, use_cache=False).loss
    loss.backward()
    return loss.detach(), gradients(model)


def furthest(ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    """The largest difference of two lists of gradients, relative to the norm of each."""
    assert len(ones) == len(others)
    return max(float((one - other).norm() / other.norm()) for one, other in zip(ones, others) if other.norm() > 0)
