"""Sequences in chunks and over groups of ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss, TiledMLP
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import cross_entropy
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    ViTConfig,
    ViTModel,
)

from hzero.config import SequenceConfig, parse_config
from hzero.errors import ConfigError
from hzero.sequence import attach, detacher
from hzero.sequence.attention import Attention
from hzero.sequence.host import HostMemory, one_ahead
from hzero.sequence.models import ChunkedModel
from hzero.tools.plan.sequence import chunked
from tests.ranks import on_ranks
from tests.sequence.live import Live, counting
from tests.sequence.planned import job
from tests.sequence.training import CHUNKED, batch_of, furthest, gradients, model_of, stock

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
    ChunkedModel(model, SequenceConfig(chunk=CHUNK), None).sum_losses(**batch).backward()


def _checkpointed(model: Any, batch: dict[str, torch.Tensor], live: Live) -> None:
    model.activation_checkpointing_enable()
    model(**batch, shift_labels=batch["labels"], num_items_in_batch=1, use_cache=False).loss.backward()


def _tiled(model: Any, batch: dict[str, torch.Tensor], live: Live) -> None:
    """DeepSpeed's tiles for MLP and loss (arXiv 2506.13996), and checkpoints are kept on the host."""
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
    planned = chunked(job(_model(kind).config, 384, SequenceConfig(chunk=CHUNK)))
    assert (found["device"], found["host"]) == (ROWS * planned["device_token"], ROWS * planned["host_token"])
    assert found["device"] <= 6.5 * ROWS * WIDTH * 4


def test_longer_sequences_in_the_same_memory() -> None:
    """Than activation checkpointing, 16 times; than tiles with checkpoints on the host, twice."""
    chunked = _bytes_a_token("llama", _chunked)["device"]
    assert _bytes_a_token("llama", _checkpointed, 128)["device"] >= 16 * chunked
    assert _bytes_a_token("llama", _tiled)["device"] >= 2 * chunked


def test_kernels_of_devices_take_what_attention_gives_them() -> None:
    """Shapes and types only: on no device, with grouped queries and a last chunk that is short."""
    chunks = [
        [torch.empty(2, heads, tokens, 16, dtype=torch.bfloat16, device="meta") for heads in (8, 2, 2)]
        for tokens in (8, 8, 5)
    ]
    attention, kept = Attention(None, HostMemory(offload=False)), list[Any]()
    out = list(one_ahead(attention.forward(chunks, kept)))
    found = list(one_ahead(attention.backward(kept, reversed(out))))

    def kinds(tensors: Iterable[torch.Tensor]) -> list[Any]:
        return [(one.shape, one.dtype) for one in tensors]

    assert [kinds(one) for one in out] == [kinds(chunk[:1]) for chunk in chunks]
    assert [kinds(one) for one in reversed(found)] == [kinds(one) for one in chunks]


# ---- what is refused ----------------------------------------------------------------------------------------------------


def _refusal(model: Any) -> str:
    """Of a model that is made, or of its first forward."""
    batch = batch_of(9, vocabulary=9)
    with pytest.raises(ConfigError) as refused:
        ChunkedModel(model, SequenceConfig(chunk=4), None).sum_losses(**batch)
    assert "forward" not in vars(model.lm_head)
    return str(refused.value)


SHAPE: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 9}
SHAPE |= {"num_key_value_heads": 1, "intermediate_size": 8}


def test_models_that_would_train_otherwise_are_refused() -> None:
    dropout = LlamaForCausalLM(LlamaConfig(**SHAPE, attention_dropout=0.1))
    assert "attention with dropout" in _refusal(dropout.train())
    lora = model_of("neox")
    lora.gpt_neox.layers[1].mlp.act = torch.nn.Dropout(0.2)
    assert "dropout 0.2 in mlp.act" in _refusal(lora)
    window = MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=5))
    assert "attention with sliding_window" in _refusal(window)
    assert "dropout 0.1 in attn.attn_dropout" in _refusal(
        GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=9))
    )
    experts = MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=2, output_router_logits=True))
    assert "output_router_logits true; expected a model without" in _refusal(experts)
    mixer = Lfm2ForCausalLM(Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"]))
    assert "a convolution in conv.conv" in _refusal(mixer)
    slopes = BloomForCausalLM(BloomConfig(n_layer=1, hidden_size=8, n_head=2, vocab_size=9))
    assert "with a forward without position_ids" in _refusal(slopes)
    heads = ViTModel(ViTConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=2, intermediate_size=8))
    with pytest.raises(ConfigError, match="found ViTModel; expected a causal model"):
        ChunkedModel(heads, SequenceConfig(), None)


def test_experts_and_a_loss_of_a_models_own_are_kept() -> None:
    """Routers choose by token; a subclass changes the loss of a model."""

    class Doubled(LlamaForCausalLM):
        def forward(self, input_ids: Any, position_ids: Any = None, **kwargs: Any) -> Any:
            found = super().forward(input_ids, position_ids=position_ids, **kwargs)
            found.loss = 2 * found.loss
            return found

    torch.manual_seed(0)
    batch = batch_of(9, vocabulary=9)
    for model in (
        Doubled(LlamaConfig(**SHAPE)),
        MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=3, sliding_window=None)),
        Gemma2ForCausalLM(
            Gemma2Config(**SHAPE, head_dim=4, attn_logit_softcapping=None, layer_types=["full_attention"] * 2)
        ),
    ):
        expected, of_all = stock(model, batch)
        model.zero_grad()
        found = ChunkedModel(model, SequenceConfig(chunk=4), None).sum_losses(**batch)
        found.backward()
        torch.testing.assert_close(found, expected)
        assert furthest(gradients(model), of_all) < 1e-5


def test_adapters_are_trained() -> None:
    """A model that PEFT wraps, whose own weights need no gradient."""
    peft = pytest.importorskip("peft")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        targets = {"target_modules": ["q_proj", "up_proj"], "init_lora_weights": False}
        model = peft.get_peft_model(model_of("llama"), peft.LoraConfig(r=2, **targets))
        ids = batch_of(11)["input_ids"]
        expected = model(input_ids=ids, labels=ids).loss
        expected.backward()
        of_all = gradients(model)
        model.zero_grad()
        config = parse_config(
            {"sequence": {"chunk": 4}, "topology": {"nodes": 1, "packages_per_node": 1, "devices_per_package": 1}}
        )
        marked: list[tuple[Any, bool]] = []
        attach(model, config, lambda *given: marked.append(given))
        first = detacher(model)
        attach(model, config)
        first()  # too late, and so without effect
        found = model(input_ids=ids, labels=ids)
        found.loss.backward()
        assert [flag for _, flag in marked] == [True, True, False, False] and found.logits is None
        torch.testing.assert_close(found.loss, expected)
        assert len(of_all) == 8 and furthest(gradients(model), of_all) < 1e-5
        detacher(model)()
        assert model(input_ids=ids, labels=ids).logits is not None
    finally:
        dist.destroy_process_group()


def test_a_model_is_stock_afterwards() -> None:
    """Generation, with its cache, and logits of whole sequences."""
    for kind in (*CHUNKED, "gpt2"):
        model, batch = model_of(kind).eval(), batch_of(9)
        logits = model(input_ids=batch["input_ids"]).logits
        text = model.generate(batch["input_ids"], max_new_tokens=3, do_sample=False)
        ChunkedModel(model, SequenceConfig(chunk=4), None).sum_losses(**batch)
        torch.testing.assert_close(model(input_ids=batch["input_ids"]).logits, logits, rtol=0, atol=0)
        assert torch.equal(model.generate(batch["input_ids"], max_new_tokens=3, do_sample=False), text)
