"""The key ``sequence`` under DeepSpeed and FSDP2, against a model that one rank trains. Run by test_sequence.py on 4 ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import hzero.fsdp
from hzero.errors import ConfigError
from tests.deepspeed.training import ds_config, engine_of

VOCAB, LENGTH = 61, 23
TOPOLOGY = {"nodes": 2, "packages_per_node": 1, "devices_per_package": 2}
BLOCK: dict[str, Any] = {"preset": "lossless", "topology": TOPOLOGY, "sequence": {"parallel": 2, "chunk": 4}}


def _model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "vocab_size": VOCAB}
    config = LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)
    return LlamaForCausalLM(config)


def _batch(step: int, groups: list[int]) -> dict[str, torch.Tensor]:
    """One sample for each group of ranks, each with its own padding on the right."""
    ids = torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(step))
    mask = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [9]])).long()
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids[groups], "attention_mask": mask[groups], "labels": labels[groups]}


def _alone(model: LlamaForCausalLM, step: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of both samples on one rank."""
    model.zero_grad()
    loss = model(**_batch(step, [0, 1])).loss
    loss.backward()
    return loss.detach(), {name: param.grad.clone() for name, param in model.named_parameters()}


def _engine(block: dict[str, Any] = BLOCK, **config: Any) -> Any:
    changes = {"train_micro_batch_size_per_gpu": 1, "zero_force_ds_cpu_optimizer": False, "gradient_clipping": 0.0}
    return engine_of(ds_config(block, **{**changes, **config}), _model())


def check_deepspeed_trains_as_one_rank_does() -> None:
    """Groups with unequal padding: losses, gradients and the weights after steps."""
    engine = _engine(optimizer={"type": "SGD", "params": {"lr": 0.5}})
    alone = _model()
    group = dist.get_rank() // 2
    for step in range(3):
        loss, gradients = _alone(alone, step)
        shared = engine(**_batch(step, [group])).loss
        torch.testing.assert_close(shared.detach(), loss, rtol=1e-5, atol=1e-6)
        engine.backward(shared)
        for name, param in engine.module.named_parameters():
            torch.testing.assert_close(safe_get_full_grad(param), gradients[name], rtol=1e-5, atol=1e-6)
        engine.step()
        with torch.no_grad():
            for name, param in alone.named_parameters():
                param -= 0.5 * gradients[name]
    engine.eval()
    alone.eval()
    with torch.no_grad():  # an evaluation, and a forward without labels, which is whole
        torch.testing.assert_close(
            engine(**_batch(9, [group])).loss, alone(**_batch(9, [0, 1])).loss, rtol=1e-5, atol=1e-6
        )
        ids = _batch(9, [0])["input_ids"]
        torch.testing.assert_close(engine(input_ids=ids).logits, alone(input_ids=ids).logits, rtol=1e-5, atol=1e-5)
    received = {
        row["tier"]: row["wire_bytes"] for row in hzero.state(engine).wire_log.as_dicts() if row["role"] == "sequence"
    }
    assert set(received) == {"intra_package"}, received
    engine.destroy()


def check_fsdp2_trains_as_one_rank_does() -> None:
    """The same by `hzero.fsdp.apply`."""
    model, alone, group = _model(), _model(), dist.get_rank() // 2
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    block = {key: value for key, value in BLOCK.items() if key not in ("preset", "topology")}
    state = hzero.fsdp.apply(model, "lossless", TOPOLOGY, **block)
    for step in range(2):
        loss, gradients = _alone(alone, step)
        shared = model(**_batch(step, [group])).loss
        torch.testing.assert_close(shared.detach(), loss, rtol=1e-5, atol=1e-6)
        shared.backward()
        for name, param in model.named_parameters():
            torch.testing.assert_close(param.grad.full_tensor(), gradients[name], rtol=1e-5, atol=1e-6)
        model.zero_grad()
    state.close()
    torch.testing.assert_close(model(**_batch(0, [0, 1])).loss, alone(**_batch(0, [0, 1])).loss)  # as before


def check_loaders_and_batches_count_a_group_once() -> None:
    """DeepSpeed's own loader, with a batch of the world as it is written."""
    samples = [{"input_ids": torch.full((LENGTH,), number)} for number in range(8)]
    block = {**BLOCK, "sequence": {"parallel": 2}}
    config = ds_config(block, train_batch_size=4, train_micro_batch_size_per_gpu=1)
    del config["gradient_accumulation_steps"]
    engine = engine_of(config, _model())
    loader = engine.deepspeed_io(samples, num_local_io_workers=0)
    assert engine.gradient_accumulation_steps() == 2
    mine = [int(batch["input_ids"][0, 0]) for batch in loader]
    every: list[Any] = [None] * 4
    dist.all_gather_object(every, mine)
    assert every[0] == every[1] and every[2] == every[3] and sorted(every[0] + every[2]) == list(range(8)), every
    engine.destroy()


def check_batches_that_cannot_be_shared_are_refused() -> None:
    """On all ranks, although one of them has it: other samples in a group, and what attention by chunks does not do."""
    engine = _engine()

    def refused(found: str, of_rank_3: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match=found):
            engine(**(of_rank_3 if dist.get_rank() == 3 else _batch(0, [0])))

    refused("found other samples in a group", _batch(1, [0]))
    # Differences of two groups that cancel each other.
    whole = _batch(0, [0])
    more, less = dict(whole), dict(whole)
    more["input_ids"], less["input_ids"] = whole["input_ids"].clone(), whole["input_ids"].clone()
    more["input_ids"][0, 4] += 1
    less["input_ids"][0, 4] -= 1
    with pytest.raises(ConfigError, match="found other samples in a group"):
        engine(**{1: more, 3: less}.get(dist.get_rank(), whole))
    left = _batch(0, [0])
    left["attention_mask"][:, 0] = 0
    refused("padding on the left", left)
    documents = torch.cat([torch.arange(10), torch.arange(LENGTH - 10)])[None]
    refused("several documents", {**whole, "position_ids": documents})
    refused("labels: found None in training", {**whole, "labels": None})
    refused("a batch with output_hidden_states", {**whole, "output_hidden_states": True})
    refused("a batch with fused_lm_head", {**whole, "fused_lm_head": True})  # as of TRL
    refused("a batch with no ids", {"inputs_embeds": None, "labels": whole["labels"]})
    refused(r"labels: found \[1, 22\]; expected \[1, 23\]", {**whole, "labels": whole["labels"][:, 1:]})
    refused(r"attention_mask: found \[1, 1, 23, 23\]", {**whole, "attention_mask": torch.ones(1, 1, LENGTH, LENGTH)})
    refused("a batch of other shapes or types", {**whole, "position_ids": documents[:, 1:]})
    engine.eval()
    with torch.no_grad():
        refused("labels: found None on some ranks", {**whole, "labels": None})
        text = engine.module.generate(whole["input_ids"], max_new_tokens=2, do_sample=False, synced_gpus=True)
    assert torch.equal(text, _model().generate(whole["input_ids"], max_new_tokens=2, do_sample=False))
    assert engine(**whole).loss.isfinite()  # as if nothing had been refused
    engine.destroy()


def check_settings_that_cannot_work_are_refused() -> None:
    """By name, on all ranks."""
    for sequence, config, found in (
        ({"parallel": 3}, {}, "sequence.parallel: found 3; expected a divisor of the 4 ranks"),
        (
            {"parallel": 2},
            {"tensor_parallel": {"autotp_size": 2}},
            "autotp_size: found 2, which hzero does not support with the key sequence",
        ),
        ({"chunks": 2}, {}, "did you mean 'chunk'"),
    ):
        with pytest.raises(ConfigError, match=found):
            _engine({**BLOCK, "sequence": sequence}, **config)
