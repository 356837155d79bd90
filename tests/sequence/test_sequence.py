"""Sequences in chunks and over groups of ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss, TiledMLP
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import cross_entropy
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from hzero.config import SequenceConfig
from hzero.plan.sequence import Chunked
from hzero.sequence.attention import Attended, Attention
from hzero.sequence.host import HostMemory
from hzero.sequence.models import patch
from hzero.validation import ConfigError
from tests.ranks import on_ranks
from tests.sequence.live import Live, counting
from tests.sequence.planned import job
from tests.sequence.training import CHUNKED, batch_of, model_of

test_on_ranks = on_ranks({4: ("tests.sequence.sequence_checks", "tests.sequence.front_checks")})

# ---- live bytes ---------------------------------------------------------------------------------------------------------

WIDTH, CHUNK, ROWS = 32, 32, 2


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Chunks this small wait longer for threads than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _chunked(model: Any, batch: dict[str, torch.Tensor], live: Live) -> None:
    patch(model, SequenceConfig(chunk=CHUNK), None).forward(**batch).loss.backward()


def _checkpointed(model: Any, batch: dict[str, torch.Tensor], live: Live) -> None:
    model.activation_checkpointing_enable()
    model(**batch, shift_labels=batch["labels"], num_items_in_batch=1, use_cache=False).loss.backward()


def _tiled(model: Any, batch: dict[str, torch.Tensor], live: Live) -> None:
    """DeepSpeed's tiles for MLP and loss (arXiv 2506.13996), and what checkpoints keep lies on the host."""
    tiles = batch["labels"].shape[1] // CHUNK
    for layer in model.model.layers:
        mlp, stock, weights = layer.mlp, type(layer.mlp).forward, list(layer.mlp.parameters())
        mlp.forward = lambda x, of=(stock, mlp), weights=weights: TiledMLP.apply(*of, x, tiles, weights)
    model.activation_checkpointing_enable()

    def losses(head: Any, states: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return cross_entropy(head(states), labels, reduction="sum")

    with saved_tensors_hooks(live.on_host(torch.clone), torch.clone):
        states = model.model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False)[0]
    weights = [model.lm_head.weight]
    TiledFusedLogitsLoss.apply(losses, model.lm_head, states, batch["labels"], None, tiles, weights, "sum").backward()


def _peak(kind: str, length: int, train: Callable[..., None]) -> dict[str, int]:
    model = _model(kind)
    batch = batch_of(length, vocabulary=32 * WIDTH)
    with counting([*model.parameters(), *model.buffers(), *batch.values()]) as live:
        train(model, batch, live)
    return live.peak


def _model(kind: str) -> Any:
    return model_of(kind, WIDTH, 32 * WIDTH, layers=2 if kind == "llama" else 1, heads=4)


@functools.cache
def _bytes_a_token(kind: str, train: Callable[..., None], length: int = 384) -> dict[str, float]:
    """What a token more needs; what does not depend on the length falls out."""
    short, long = (_peak(kind, one, train) for one in (length, length + 128))
    return {place: (long[place] - short[place]) / 128 for place in short}


@pytest.mark.parametrize("kind", CHUNKED)
def test_live_bytes_of_a_token_are_those_of_the_plan(kind: str) -> None:
    """On the device two numbers of the width, and cosines and sines."""
    found = _bytes_a_token(kind, _chunked)
    planned = Chunked.of(job(_model(kind).config, 384, SequenceConfig(chunk=CHUNK)))
    assert (found["device"], found["host"]) == (ROWS * planned.device_token, ROWS * planned.host_token)
    assert found["device"] <= 6.5 * ROWS * WIDTH * 4


def test_longer_sequences_in_the_same_memory() -> None:
    """Than activation checkpointing, 16 times; than tiles with checkpoints on the host, twice."""
    chunked = _bytes_a_token("llama", _chunked)["device"]
    assert _bytes_a_token("llama", _checkpointed, 128)["device"] >= 16 * chunked
    assert _bytes_a_token("llama", _tiled)["device"] >= 2 * chunked


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_of_devices_take_what_attention_gives_them(dtype: torch.dtype) -> None:
    """Shapes and types only: on no device. bfloat16 is the flash kernel's, float32 the memory-efficient one's."""
    shapes = (2, 8, 21, 16), (2, 2, 21, 16), (2, 2, 21, 16)
    tensors = [torch.empty(shape, dtype=dtype, device="meta", requires_grad=True) for shape in shapes]
    out = Attended.apply(Attention(None, HostMemory(offload=False), chunk=8), True, *tensors)
    out.backward(torch.empty_like(out))
    assert out.shape == (2, 21, 8, 16) and out.dtype == dtype
    assert [(one.grad.shape, one.grad.dtype) for one in tensors] == [(shape, dtype) for shape in shapes]


# ---- what is refused ----------------------------------------------------------------------------------------------------


def _refusal(model: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        patch(model, SequenceConfig(), None)
    return str(refused.value)


def test_models_that_would_train_otherwise_are_refused() -> None:
    dropout = model_of("llama")
    dropout.config.attention_dropout = 0.1
    assert "attention_dropout 0.1" in _refusal(dropout)
    lora = model_of("neox")
    lora.gpt_neox.layers[1].mlp.act = torch.nn.Dropout(0.2)
    assert "gpt_neox.layers.1.mlp.act 0.2" in _refusal(lora)
    shape: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 9}
    window = MistralForCausalLM(MistralConfig(**shape, num_key_value_heads=1, intermediate_size=8, sliding_window=5))
    assert "a sliding window of 5 tokens" in _refusal(window)
    assert "attn_pdrop 0.1" in _refusal(GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=9)))
    experts = MixtralForCausalLM(MixtralConfig(**shape, num_local_experts=2, output_router_logits=True))
    assert "output_router_logits true; expected false" in _refusal(experts)
    kinds = ["conv", "full_attention"]
    mixer = Lfm2ForCausalLM(Lfm2Config(**{**shape, "num_hidden_layers": 2}, num_key_value_heads=1, layer_types=kinds))
    assert "layers conv, Conv1d; expected full attention alone" in _refusal(mixer)


def test_a_loss_of_a_models_own_is_kept() -> None:
    """By a subclass of a model whose layers are known."""

    class Doubled(LlamaForCausalLM):
        def forward(self, input_ids: Any, position_ids: Any = None, **kwargs: Any) -> Any:
            found = super().forward(input_ids, position_ids=position_ids, **kwargs)
            found.loss = 2 * found.loss
            return found

    model, batch = model_of("llama"), batch_of(9)
    own = Doubled(model.config)
    own.load_state_dict(model.state_dict())
    ids, places = batch["input_ids"], torch.arange(9).expand(len(batch["input_ids"]), -1)
    labels = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    want = (
        patch(model, SequenceConfig(chunk=4), None).forward(ids, places, labels, use_cache=True, return_dict=False).loss
    )
    assert torch.allclose(patch(own, SequenceConfig(chunk=4), None).forward(ids, places, labels).loss, 2 * want)


def test_a_patched_model_is_stock_without_labels_and_after_remove() -> None:
    """Generation, with its cache, and logits of whole sequences."""
    for kind in (*CHUNKED, "gpt2"):
        model, ids = model_of(kind).eval(), batch_of(9)["input_ids"]
        logits, text = model(input_ids=ids).logits, model.generate(ids, max_new_tokens=3, do_sample=False)
        patched = patch(model, SequenceConfig(chunk=4), None)
        for _ in range(2):
            torch.testing.assert_close(model(input_ids=ids).logits, logits)
            assert torch.equal(model.generate(ids, max_new_tokens=3, do_sample=False), text)
            patched.remove()
        assert "forward" not in vars(model.lm_head)
