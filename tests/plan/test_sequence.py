"""What a plan says of long sequences, against what `hzero.sequence` does."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM

from hzero.config import SequenceConfig
from hzero.sequence.host import HostMemory
from hzero.sequence.models import ChunkedModel
from hzero.tools import cli
from hzero.tools.plan.sequence import chunked
from tests.sequence.planned import job

SHAPE = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "vocab_size": 31, "num_attention_heads": 4}
LONG = (
    "model.seq_length=32768",
    "model.config.max_position_embeddings=32768",
    "zero.sequence.chunk=2048",
    "train.micro_batch=1",
)
MACHINE = ("plan", "--json", "model=gpt_neox_20b", "topology=frontier", "nodes=48", *LONG)


@pytest.mark.parametrize(("keys", "length"), [(1, 19), (4, 12), (0, 19)])
def test_copies_to_the_host_and_back_are_the_plans(monkeypatch: pytest.MonkeyPatch, keys: int, length: int) -> None:
    """With grouped queries; keys 0: GPT-NeoX. The last chunk may be shorter."""
    model: Any = GPTNeoXForCausalLM(GPTNeoXConfig(**SHAPE))
    if keys:
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=keys))
    copied = {"out": 0, "back": 0}
    stock = HostMemory._copy

    def counted(self: HostMemory, targets: Any, sources: Any, *args: Any) -> Any:
        copied["out" if storing else "back"] += sum(one.nbytes for one in sources)
        return stock(self, targets, sources, *args)

    storing: list[bool] = []
    store = HostMemory.store

    def noted(*args: Any, **kwargs: Any) -> Any:
        storing.append(True)
        try:
            return store(*args, **kwargs)
        finally:
            storing.pop()

    monkeypatch.setattr(HostMemory, "_copy", counted)
    monkeypatch.setattr(HostMemory, "store", noted)
    settings = SequenceConfig(chunk=4)
    ids = torch.randint(0, 31, (2, length), generator=torch.Generator().manual_seed(0))
    places = torch.arange(length).expand(2, -1)
    ChunkedModel(model, settings, None).sum_losses(ids, places, ids).backward()
    planned = chunked(job(model.config, length, settings, batch=2))
    assert copied == {"out": planned["to_host"], "back": planned["to_device"]}


def _plan(capsys: pytest.CaptureFixture[str], *given: str) -> dict[str, Any]:
    assert cli.main([*MACHINE, *given]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_plan_counts_long_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    one, eight = (_plan(capsys, f"zero.sequence.parallel={ranks}")["sequences"] for ranks in (1, 8))
    assert one["tokens"] == 8 * eight["tokens"] == 32768
    assert eight.keys() - one.keys() == {"received_intra_package", "received_intra_node"}
    assert eight["longest"] == pytest.approx(8 * one["longest"], rel=0.01)
    assert one["longest"] > 2 * one["longest_with_checkpointing_alone"]
    # 36 GB/s for each device, and 205 GB/s for all of a node.
    seconds = [max(found["to_host"], found["to_device"]) / 36e9 for found in (one, eight)]
    shared = [8 * (found["to_host"] + found["to_device"]) / 205e9 for found in (one, eight)]
    assert [one["copy_s"], eight["copy_s"]] == pytest.approx(list(map(max, seconds, shared)))
    kept = _plan(capsys, "zero.sequence.offload=false")["sequences"]
    assert kept["host_token"] == kept["to_host"] == 0 and kept["device_token"] > one["device_token"]
