"""The stage beside DeepSpeed's AutoTP, which divides a model of transformers. Run by test_stage.py on several ranks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.module_inject.layers import set_autotp_mode
from deepspeed.utils import groups
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import hzero
from hzero.config import parse_config
from hzero.deepspeed import autotp
from tests.deepspeed.training import VOCAB, assert_losses, batch, block_of, ds_config, engine_of, train
from tests.rank_main import same_on_all_ranks

TENSOR, STEPS = 2, 2
SHAPE = {"hidden_size": 20, "intermediate_size": 26, "num_hidden_layers": 2, "num_attention_heads": 2}
#: Models by what AutoTP makes of them: a head whose logits are gathered; weights of norms whose gradients are summed, and a tied
#: embedding that is divided; attention divided by a configuration, and whole experts.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({"tie_word_embeddings": False}, {}),
    "qwen3": ({"tie_word_embeddings": True, "head_dim": 10}, {}),
    "mixtral": (
        {"num_local_experts": 3, "num_experts_per_tok": 2, "hidden_size": 24, "intermediate_size": 28},
        {
            "partition_config": {
                "layer_specs": [
                    {"patterns": [r".*\.[qkv]_proj\.weight$"], "partition_type": "column"},
                    {"patterns": [r".*\.o_proj\.weight$"], "partition_type": "row"},
                ]
            }
        },
    ),
}


@contextlib.contextmanager
def _autotp() -> Iterator[None]:
    """Afterwards DeepSpeed, which keeps groups and mode for all later engines, forgets them."""
    try:
        yield
    finally:
        groups.mpu = groups._TENSOR_MODEL_PARALLEL_GROUP = groups._MODEL_PARALLEL_GROUP = None
        groups._DATA_PARALLEL_GROUP = None
        set_autotp_mode(training=False)


def _train(block: dict[str, Any] | None, accumulation: int) -> tuple[list[float], list[float], Any]:
    """Losses, gradient norms, and the engine."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, num_key_value_heads=2, tie_word_embeddings=False, **SHAPE))
    engine = engine_of(ds_config(block, accumulation, tensor_parallel={"autotp_size": TENSOR}), model)
    norms: list[float] = []
    return train(engine, STEPS, accumulation, norms=norms, loss_of=_loss), norms, engine


@functools.cache
def _stock(accumulation: int) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of plain ZeRO-3."""
    with _autotp():
        losses, norms, engine = _train(None, accumulation)
        engine.destroy()
    return losses, norms


def _loss(engine: Any, step: int, micro: int) -> torch.Tensor:
    ids = batch(step, micro, dist.get_rank() // TENSOR)
    return engine(input_ids=ids, labels=ids).loss


def check_models_give_the_losses_of_no_tensor_parallelism() -> None:
    for name, (keys, how) in MODELS.items():
        found = list[tuple[list[float], list[float]]]()
        for block, changes in ((None, {}), (block_of("lossless"), {"tensor_parallel": {"autotp_size": TENSOR, **how}})):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(
                AutoConfig.for_model(name, vocab_size=VOCAB, num_key_value_heads=2, **{**SHAPE, **keys})
            )
            with _autotp():
                engine, norms = engine_of(ds_config(block, 1, **changes), model), list[float]()
                found.append((train(engine, STEPS, norms=norms, loss_of=_loss), norms))
                engine.destroy()
        for whole, divided, what in zip(*found, ("losses", "norms"), strict=True):
            assert_losses(divided, whole, what=f"{name}: {what} with and without tensor parallelism")


def check_codecs_of_autotp_reach_its_sums() -> None:
    """Forward sums what two layers of a block leave, backward what each of five takes, and the head; another engine gets
    DeepSpeed's own."""
    stock, _ = _stock(1)
    with _autotp():
        block = block_of("lossless", codecs={"tensor": "int8"})
        losses, _, engine = _train(block, accumulation=1)
        hops = [entry for entry in hzero.state(engine).wire_log.entries() if entry.role == "tensor"]
        assert hops and all(entry.codec == "int8" and entry.wire_bytes < entry.raw_bytes for entry in hops)
        tokens, hidden, blocks = 2 * 9, 20, 2
        # An all-reduce over two ranks is a reduce-scatter and an all-gather.
        sums = STEPS * (blocks * (2 + 5) + 1)
        assert sum(entry.hops for entry in hops) == 2 * sums
        assert sum(entry.raw_bytes for entry in hops) >= sums * tokens * hidden * 4
        assert losses != stock and losses == pytest.approx(stock, rel=0.02)
        layers = [layer for layer in engine.module.modules() if hasattr(layer, "hzero_group")]
        assert len(layers) == blocks * 7 + 1
        # A weight that is not divided.
        assert same_on_all_ranks([deepspeed.utils.safe_get_full_fp32_param(engine.module.model.norm.weight)])
        with mock.patch.object(autotp.logger, "warning") as warned:  # all have a forward of their own now
            autotp.take_over(engine.module, parse_config(block), hzero.state(engine).owners.world)
        said = [call.args[0] % call.args[1:] for call in warned.mock_calls]
        named = "with another forward: model.layers.0.self_attn.q_proj ("
        assert [named in text for text in said] == [True] * (dist.get_rank() == 0), said
        engine.destroy()
        assert not any("hzero_group" in vars(layer) or "forward" in vars(layer) for layer in layers)
