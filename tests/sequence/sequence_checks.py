"""Sequences over 1, 2 and 4 ranks against one rank without hzero. Run by test_sequence.py on 4 ranks."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch.nn.functional import pad

from hzero.comm import Communicator, for_dimension, shared_lanes
from hzero.config import SequenceConfig, parse_config
from hzero.errors import ConfigError
from hzero.sequence.models import ChunkedModel
from hzero.tools.plan.sequence import exchanged
from hzero.topology import resolve_grid
from tests.deepspeed.race_detector import Event, Trace, recording
from tests.sequence.planned import job
from tests.sequence.training import KINDS, LIKE_LLAMA, batch_of, furthest, gradients, model_of, parts_of, stock

#: Tokens of a rank in a chunk.
CHUNK = 4
TOPOLOGY = {"nodes": 2, "packages_per_node": 1, "devices_per_package": 2}


def _block(codec: str) -> dict[str, Any]:
    return {"preset": "lossless", "topology": TOPOLOGY, "codecs": {"sequence": codec}}


def _group(ranks: int, codec: str = "none") -> Communicator | None:
    """The group of this rank. Collective."""
    members, _ = dist.new_subgroups(ranks)
    config = {"zero_optimization": {"stage": 3, "hzero": _block(codec)}}
    made = for_dimension("sequence", config, members, uses=("sums",))
    return made if ranks > 1 else None


def _shared(
    model: Any, batch: dict[str, torch.Tensor], ranks: int, group: Communicator | None, **settings: Any
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The sum of a batch's losses, and its gradients, over a group."""
    model.zero_grad()
    given = SequenceConfig(parallel=ranks, **{"chunk": CHUNK, **settings})
    parts = parts_of(batch, given.chunk, dist.get_rank() % ranks, ranks)
    loss = ChunkedModel(model, given, group).sum_losses(**parts)
    loss.backward()
    total, sums = loss.detach().clone(), gradients(model)
    for one in (total, *sums):  # all groups have the same samples
        dist.all_reduce(one)
        one /= dist.get_world_size() // ranks
    return total, sums


def check_losses_and_gradients_are_those_of_one_rank() -> str:
    """Models of all kinds, sequences that fill the last chunk or not, offloading or not."""
    seen = []
    alone: dict[tuple[str, int], tuple[torch.Tensor, list[torch.Tensor]]] = {}
    for ranks in (1, 2, 4):
        group = _group(ranks)
        for kind in KINDS if ranks > 1 else (*LIKE_LLAMA, "gpt_neox"):
            model = model_of(kind)
            lengths = ((48, False), (44, True), (52, True))[-ranks:]
            for length, offload in lengths[:1] + lengths[2:] if kind == "qwen3" else lengths[-2:]:
                batch = batch_of(length)
                if (kind, length) not in alone:
                    alone[kind, length] = stock(model, batch)
                loss, expected = alone[kind, length]
                found, sums = _shared(model, batch, ranks, group, offload=offload)
                case = f"{kind} on {ranks} ranks, {length} tokens"
                torch.testing.assert_close(found, loss, rtol=1e-5, atol=0, msg=case)
                seen.append(furthest(sums, expected))
                assert seen[-1] < 1e-5, f"{case}: {seen[-1]}"
    model, batch = model_of("llama", 48, heads=12, keys=6), batch_of(44)  # 4 ranks, 6 heads of keys
    loss, expected = stock(model, batch)
    found, sums = _shared(model, batch, 4, group)
    torch.testing.assert_close(found, loss, rtol=1e-5, atol=0)
    assert furthest(sums, expected) < 1e-5
    return f"gradients within {max(seen):.1e}"


def check_labels_that_the_trainer_counts_divide_the_loss() -> None:
    """Trainer counts the labels of all ranks, so those of a group as often as it has ranks."""
    ranks, model, batch = 2, model_of("llama"), batch_of(44)
    total, _ = stock(model, batch)
    items = 2 * int((batch["labels"] != -100).sum()) * ranks
    chunked = ChunkedModel(model, SequenceConfig(parallel=ranks, chunk=CHUNK), _group(ranks))
    given = {"input_ids": batch["input_ids"], "labels": pad(batch["labels"], (1, 0), value=-100)[:, :-1]}
    loss = chunked.forward(model.forward, {**given, "num_items_in_batch": items}).loss.detach().clone()
    dist.all_reduce(loss)
    # Two groups of two ranks have the same samples.
    torch.testing.assert_close(loss, 2 * ranks * total / items)


def check_activation_checkpointing_changes_nothing() -> None:
    """Chunks are their own checkpoints, so layers do not run a third time."""
    group, model, batch = _group(2), model_of("gpt2"), batch_of(44)
    _, expected = _shared(model, batch, 2, group)
    model.gradient_checkpointing_enable()
    with mock.patch.object(model.transformer.h[0], "_gradient_checkpointing_func", side_effect=AssertionError):
        _, sums = _shared(model, batch, 2, group)
    assert all(torch.equal(one, other) for one, other in zip(sums, expected, strict=True))


def check_bf16_is_as_good_as_stock() -> None:
    """Partial results are merged, and gradients summed, in float32: no worse than one rank, with autocast or narrow weights."""
    model, batch, group = model_of("llama"), batch_of(48), _group(4)
    _, exact = stock(model, batch)
    for trained, cast in ((model, True), (copy.deepcopy(model).bfloat16(), False)):
        with torch.autocast("cpu", torch.bfloat16, cast):
            _, alone = stock(trained, batch)
            _, sums = _shared(trained, batch, 4, group)
        mine, its = (furthest([one.float() for one in ones], exact) for ones in (sums, alone))
        assert mine < 1.5 * its, (cast, mine, its)


def check_bytes_of_the_exchanges_are_those_of_the_plan() -> None:
    """On each tier, in a forward and its backward, with heads that are repeated and a last chunk that is short."""
    for ranks, codec in ((2, "none"), (4, "none"), (4, "int8")):
        group, model, length = _group(ranks, codec), model_of("llama", 48, heads=12, keys=6), 13 * ranks
        assert group is not None
        group.wire_log.reset()
        _shared(model, batch_of(length), ranks, group)
        counted = {entry.tier: entry.wire_bytes for entry in group.wire_log.entries()}
        planned = job(model.config, length, SequenceConfig(parallel=ranks, chunk=CHUNK), batch=2)
        world, codecs = resolve_grid(parse_config(_block(codec)).topology, 4), group.config.codecs
        assert counted == exchanged(planned, world, codecs), counted


def check_models_that_do_not_suit_the_ranks_are_refused() -> None:
    group, settings = _group(4), SequenceConfig(parallel=4)
    with pytest.raises(ConfigError, match="found 4; expected a divisor of the 6 attention heads"):
        ChunkedModel(model_of("llama", width=36, heads=6), settings, group)
    model = model_of("llama")
    model.config.rope_parameters["rope_type"] = "dynamic"
    with pytest.raises(ConfigError, match="found LlamaForCausalLM with rope_type dynamic"):
        ChunkedModel(model, settings, group)


# ---- copies to the host and back, beside what computes ----------------------------------------------------------------


def _recorded() -> Trace:
    """A forward and its backward on a device, whose copies have a stream."""
    with recording() as trace:
        shared_lanes(get_accelerator())
        _shared(model_of("llama", keys=4), batch_of(48), 2, _group(2))
    return trace


def check_copies_run_beside_attention_without_a_race() -> None:
    trace = _recorded()
    races = trace.races()
    assert not races, f"{len(races)} races\n" + "\n".join(races[:6])


def check_copies_without_a_wait_have_races() -> None:
    """The detector sees the copies: without their waits it finds races."""
    with mock.patch.object(Event, "wait"):
        trace = _recorded()
    assert dist.get_rank() or trace.races()
