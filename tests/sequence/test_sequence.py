"""Sequences in chunks and over groups of ranks."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM, ViTConfig, ViTModel

from hzero.config import SequenceConfig, parse_config
from hzero.errors import ConfigError
from hzero.sequence import attach, detacher, host
from hzero.sequence.models import ChunkedModel
from hzero.tools.plan.sequence import chunked
from tests.ranks import on_ranks
from tests.sequence.planned import job
from tests.sequence.training import CHUNKED, batch_of, causal, furthest, gradients, model_of, stock

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


class Live(TorchDispatchMode):
    """Counts the memory of tensors that operators make, until it is freed.

    Args:
        there: Tensors that are there before, and are not counted.

    Attributes:
        peak: The most bytes that have lived at a time, on the device and on the host.
    """

    def __init__(self, there: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.peak, self._place = {"device": 0, "host": 0, "": 0}, ""
        self._now = dict.fromkeys(self.peak, 0)
        self._counted: dict[int, tuple[str, int]] = {}
        self._ends: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for tensor in there:
            self._count(tensor.untyped_storage(), "")
        self._place = "device"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage(), self._place)
        return out

    def _count(self, storage: torch.UntypedStorage, place: str) -> None:
        key = storage._cdata
        if key not in self._counted:
            self._counted[key] = place, storage.nbytes()
            self._now[place] += storage.nbytes()
            self.peak[place] = max(self.peak[place], self._now[place])
            self._ends[key] = weakref.ref(storage, lambda _: self._freed(key))

    def _freed(self, key: int) -> None:
        place, size = self._counted.pop(key)
        del self._ends[key]
        self._now[place] -= size

    def on_host(self, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """A function whose tensors count for the host."""

        def counted(*args: Any) -> torch.Tensor:
            self._place = "host"
            try:
                return function(*args)
            finally:
                self._place = "device"

        return counted


@contextlib.contextmanager
def counting(there: Iterable[torch.Tensor]) -> Iterator[Live]:
    """Inside, bytes are counted. What `HostMemory` keeps is on the host."""
    live = Live(there)
    with live, mock.patch.object(host, "_on_host", live.on_host(host._on_host)):
        yield live


@pytest.mark.parametrize("kind", CHUNKED)
def test_live_bytes_of_a_token_are_those_of_the_plan(kind: str) -> None:
    """On the device two numbers of the width, and cosines and sines. What does not depend on the length falls out."""
    peaks = []
    for length in (384, 512):
        model = model_of(kind, WIDTH, 32 * WIDTH, layers=2 if kind == "llama" else 1, heads=4)
        batch = batch_of(length, vocabulary=32 * WIDTH)
        with counting([*model.parameters(), *model.buffers(), *batch.values()]) as live:
            ChunkedModel(model, SequenceConfig(chunk=CHUNK), None).sum_losses(**batch).backward()
        peaks.append(live.peak)
    found = {place: (peaks[1][place] - peaks[0][place]) / 128 for place in ("device", "host")}
    planned = chunked(job(model.config, 384, SequenceConfig(chunk=CHUNK)))
    assert found == {place: ROWS * planned[f"{place}_token"] for place in found}
    assert found["device"] <= 6.5 * ROWS * WIDTH * 4


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
    lora = model_of("gpt_neox")
    lora.gpt_neox.layers[1].mlp.act = torch.nn.Dropout(0.2)
    gpt2 = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 9}
    for model, says in (
        (causal("llama", **SHAPE, attention_dropout=0.1).train(), "attention with dropout"),
        (lora, "dropout 0.2 in mlp.act"),
        (causal("mistral", **SHAPE, sliding_window=5), "attention with sliding_window"),
        (causal("gpt2", **gpt2).train(), "dropout 0.1 in attn.attn_dropout"),
        (
            causal("mixtral", **SHAPE, num_local_experts=2, output_router_logits=True),
            "router_logits true; expected a model",
        ),
        (causal("lfm2", **SHAPE, layer_types=["conv", "full_attention"]), "a convolution in conv.conv"),
        (causal("bloom", n_layer=1, hidden_size=8, n_head=2, vocab_size=9), "with a forward without position_ids"),
    ):
        assert says in _refusal(model)
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
        causal("mixtral", **SHAPE, num_local_experts=3, sliding_window=None),
        causal("gemma2", **SHAPE, head_dim=4, attn_logit_softcapping=None, layer_types=["full_attention"] * 2),
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
