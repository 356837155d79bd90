"""The stage with DeepSpeed's AutoEP, which spreads the experts of a model over ranks. Run by test_stage.py on four ranks."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import groups
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.utils import output_capturing

import hzero
from hzero.deepspeed.autoep import is_expert
from tests.deepspeed.training import VOCAB, assert_losses, batch, block_of, ds_config, engine_of, train

EXPERT, STEPS, HIDDEN, LAYERS = 2, 2, 20, 2


def _mend_transformers() -> None:
    """DeepSpeed 0.19.8 uses names as keys of the registry (auto_ep_presets/base.py:326), which since 5.23 takes models."""
    kind = type(output_capturing._CAN_RECORD_REGISTRY)
    if kind is not dict:
        name = lambda key: key if isinstance(key, str) else str(key.__class__)  # noqa: E731
        kind.get = lambda self, key, default=None: dict.get(self, name(key)) or ({} if default is None else default)
        kind.__setitem__ = lambda self, key, value: dict.__setitem__(self, name(key), value)


def _engine(block: dict[str, Any] | None, expert: int, **zero: Any) -> Any:
    pytest.importorskip("deepspeed.module_inject.auto_ep_layer", reason="this DeepSpeed has no AutoEP")
    _mend_transformers()
    torch.manual_seed(0)
    shape = {"hidden_size": HIDDEN, "intermediate_size": 28, "num_hidden_layers": LAYERS, "num_attention_heads": 2}
    of_experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = MixtralConfig(vocab_size=VOCAB, num_key_value_heads=2, tie_word_embeddings=False, **shape, **of_experts)
    changes: dict[str, Any] = {"zero_optimization": zero}
    if expert:
        changes["expert_parallel"] = {"enabled": True, "autoep_size": expert, "preset_model": "mixtral"}
    return engine_of(ds_config(block, 2, **changes), MixtralForCausalLM(config))


def _loss(engine: Any, step: int, micro: int) -> torch.Tensor:
    ids = batch(step, micro)
    return engine(input_ids=ids, labels=ids).loss


@functools.cache
def _stock() -> tuple[list[float], list[float]]:
    """Losses and gradient norms of ZeRO-3 without expert parallelism."""
    engine, norms = _engine(None, 0), list[float]()
    losses = train(engine, STEPS, 2, norms=norms, loss_of=_loss)
    engine.destroy()
    return losses, norms


def check_experts_over_ranks_give_the_losses_of_the_model_on_every_rank() -> None:
    """Experts over neighbours, and over all ranks; also where DeepSpeed keeps parameters whole."""
    stock, stock_norms = _stock()
    for expert, preset, threshold in ((2, "lossless", 0), (2, "zero3", 10**5), (4, "lossless", 0)):
        engine, norms = _engine(block_of(preset), expert, stage3_param_persistence_threshold=threshold), list[float]()
        experts = [param for param in engine.module.parameters() if is_expert(param)]
        assert len(experts) == 3 * LAYERS
        assert {dist.get_world_size(param.ds_process_group) for param in experts} == {dist.get_world_size() // expert}
        losses = train(engine, STEPS, 2, norms=norms, loss_of=_loss)
        assert_losses(losses, stock, what=f"losses of {preset} with experts over {expert} ranks, and of ZeRO-3 without")
        assert norms == pytest.approx(stock_norms, rel=1e-5)
        assert {entry.role for entry in hzero.state(engine).wire_log.entries()} == {"weights", "gradients"}
        engine.destroy()


def check_tokens_go_to_experts_in_the_codec_of_their_tier() -> None:
    stock, _ = _stock()
    codec = {"gcd": "int8", "node": "none"}
    engine = _engine(block_of("lossless", codecs={"expert": codec}), EXPERT)
    losses = train(engine, STEPS, 2, loss_of=_loss)
    assert losses != stock and losses == pytest.approx(stock, rel=0.02)
    layers = [layer for layer in engine.module.modules() if hasattr(layer, "hzero_group")]
    assert len(layers) == LAYERS
    (entry,) = [entry for entry in hzero.state(engine).wire_log.entries() if entry.role == "expert"]
    assert (entry.tier, entry.codec) == ("gcd", "int8")
    # There and back, forward and backward, in every layer and micro-step.
    assert entry.hops == 4 * LAYERS * 2 * STEPS
    rows, rest = divmod(entry.raw_bytes, HIDDEN * 4)
    assert rows > 0 and rest == 0
    assert entry.wire_bytes == layers[0].hzero_group.plan.codecs.weights["gcd"].format.message_bytes((HIDDEN,), rows, 4)
    experts = [param for param in engine.module.parameters() if is_expert(param)]
    assert all(param.all_gather_coalesced.__self__ is hzero.state(engine) for param in experts)
    engine.destroy()
    assert not any("hzero_group" in vars(layer) or "forward" in vars(layer) for layer in layers)
    assert not any(hasattr(param.all_gather_coalesced, "__self__") for param in experts)
    groups._get_expert_parallel_group_dict().clear()
    groups._get_expert_data_parallel_group_dict().clear()
