"""The stage with DeepSpeed's AutoEP, which spreads the experts of a model over ranks. Run by test_stage.py on four ranks."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import groups
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.utils import output_capturing

import hzero
from hzero.deepspeed.autoep import is_expert
from hzero.errors import ConfigError
from hzero.tools.plan.command import plan_dict
from hzero.tools.plan.scenario import read_scenario
from tests.deepspeed.race_detector import recording
from tests.deepspeed.training import VOCAB, assert_losses, batch, block_of, ds_config, engine_of, shared_folder, train
from tests.parity.compare import count_gathers, logged_bytes, planned_bytes

#: Stock keeps no gathered weight for its next use.
NOTHING_KEPT = {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0, "sub_group_size": 700}
EXPERT, STEPS, HIDDEN, LAYERS = 2, 2, 20, 2
SHAPE: dict[str, int] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 28, "num_hidden_layers": LAYERS, "num_attention_heads": 2,
    "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip


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
    config = MixtralConfig(num_key_value_heads=2, tie_word_embeddings=False, **SHAPE)
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


def check_experts_over_ranks_give_the_same_losses() -> str:
    """Experts over neighbours, over all ranks, and on every rank; also where DeepSpeed keeps parameters whole."""
    stock, stock_norms = _stock()
    table = [f"{'EP':>2} {'preset':8} {'losses':>21} {'norms':>19} {'bytes into a node':>17} {'bytes of states':>15}"]
    for expert, preset, threshold in (
        (2, "zero3", 10**5),
        *((expert, preset, 0) for preset in ("lossless", "topo") for expert in (0, 2, 4)),
    ):
        block = block_of(preset, guard={"every": 1})
        engine, norms = _engine(block, expert, stage3_param_persistence_threshold=threshold), list[float]()
        state, experts = hzero.state(engine), [param for param in engine.module.parameters() if is_expert(param)]
        assert len(experts) == 3 * LAYERS * (expert > 0)
        ranks = {dist.get_world_size(param.ds_process_group) for param in experts}
        assert not expert or ranks == {dist.get_world_size() // expert}
        losses = train(engine, STEPS, 2, norms=norms, loss_of=_loss)
        exact = preset != "topo"
        what = f"losses of {preset} with experts over {expert} ranks, and of ZeRO-3 without"
        assert_losses(losses, stock, what=what) if exact else assert_losses(losses, stock, 0.01, what)
        assert norms == pytest.approx(stock_norms, rel=1e-5 if exact else 0.1)
        state.settle()
        assert {entry.role for entry in state.wire_log.entries()} == {"weights", "gradients"}
        node = state.wire_log.wire_bytes("inter_node") * 2 // STEPS
        shown = [" ".join(f"{value:.7g}" for value in values) for values in (losses, norms)]
        memory = sum(state.memory(engine.optimizer).values())
        table.append(f"{expert:2} {preset:8} {shown[0]:>21} {shown[1]:>19} {node:17,} {memory:15,}")
        _end(engine)
    return "\n".join(table)


def check_tokens_go_to_experts_in_the_codec_of_their_tier() -> None:
    stock, _ = _stock()
    codec = {"intra_package": "int8", "inter_node": "none"}
    engine = _engine(block_of("lossless", codecs={"expert": codec}), EXPERT)
    losses = train(engine, STEPS, 2, loss_of=_loss)
    assert losses != stock and losses == pytest.approx(stock, rel=0.02)
    layers = [layer for layer in engine.module.modules() if hasattr(layer, "hzero_group")]
    assert len(layers) == LAYERS
    (entry,) = [entry for entry in hzero.state(engine).wire_log.entries() if entry.role == "expert"]
    assert (entry.tier, entry.codec) == ("intra_package", "int8")
    # There and back, forward and backward, in every layer and micro-batch.
    assert entry.hops == 4 * LAYERS * 2 * STEPS
    rows, rest = divmod(entry.raw_bytes, HIDDEN * 4)
    assert rows > 0 and rest == 0
    assert entry.wire_bytes == layers[0].hzero_group.plan.codecs.weights["intra_package"].format.message_bytes(
        (HIDDEN,), rows, 4
    )
    engine.destroy()
    assert not any("hzero_group" in vars(layer) or "forward" in vars(layer) for layer in layers)
    _end()


def check_tokens_that_cannot_be_sent_are_refused_at_start() -> None:
    for own, found in (({"checksum": True}, "checksum: found True"), ({}, "codecs.expert.intra_package: found 'mpc'")):
        block = block_of("lossless", codecs={"expert": {"intra_package": "int8" if own else "mpc"}}, **own)
        with pytest.raises(ConfigError, match=f"hzero.{found} with coded tokens; expected codecs of fixed size"):
            _engine(block, EXPERT)
        _end()
    with pytest.raises(
        ConfigError, match=r"hzero.codecs.expert: found none on the tiers .* of 2 ranks cross \(intra_package\)"
    ):
        _engine(block_of("lossless", codecs={"expert": {"inter_node": "int8"}}), EXPERT)
    _end()


def check_bytes_of_experts_and_tokens_are_those_of_the_plan() -> None:
    """With even routing: of the plan of each partition, and of ``hzero plan``."""
    router = pytest.importorskip("deepspeed.moe.ep_router", reason="this DeepSpeed has no AutoEP").TokenChoiceTopKRouter
    route = router.forward

    def evenly(self: Any, *arguments: Any) -> Any:
        scores, chosen, counts = route(self, *arguments)
        chosen = torch.arange(chosen.numel()).view_as(chosen) % self.num_experts
        return scores, chosen, torch.bincount(chosen.flatten(), minlength=self.num_experts).to(counts)

    for preset in ("lossless", "topo"):
        block = block_of(preset, codecs={"expert": {"intra_package": "int8"}})
        with mock.patch.object(router, "forward", evenly):
            engine = _engine(block, EXPERT, **NOTHING_KEPT)
            state = hzero.state(engine)
            train(engine, 1, 2, loss_of=_loss)
            gathers = count_gathers(state)
            train(engine, 1, 2, first=1, loss_of=_loss)
            state.settle()
        logged, planned = logged_bytes(state), planned_bytes(state, gathers, 2, torch.float32)
        rows = {(row["role"], row["tier"]): row["wire_bytes"] for row in _planned(preset)["traffic"]}
        planned["expert", "intra_package"] = rows["expert", "intra_package"]
        assert logged == +planned, (preset, logged, planned)
        if preset == "lossless":  # codecs have scales, whose number depends on how parameters are stacked
            assert all(logged[place] == size for place, size in rows.items() if place[0] != "weights"), (logged, rows)
        _end(engine)


def _planned(preset: str) -> dict[str, Any]:
    """What ``hzero plan`` says of these engines."""
    config = {"model_type": "mixtral", "tie_word_embeddings": False, "num_key_value_heads": 2, **SHAPE}
    keys: dict[str, Any] = {"model": "hf", "model.config": config, "model.seq_length": 9, "zero": preset}
    keys |= {f"topology.{key}": value for key, value in block_of(preset)["topology"].items()}
    keys |= {"train.dtype": "fp32", "train.micro_batch": 2, "train.grad_accumulation": 2}
    keys |= {
        "deepspeed.expert_parallel": {"enabled": True, "autoep_size": EXPERT},
        "zero.codecs.expert.intra_package": "int8",
    }
    text = {key: str(value).replace("'", "") for key, value in keys.items()}
    return plan_dict(read_scenario([f"{key}={value}" for key, value in text.items()]))


def check_a_checkpoint_of_experts_continues() -> None:
    """Training and exact evaluation after a load are those of the run that saved. Experts have a codec of their own."""
    folder, losses = shared_folder(), list[list[float]]()
    block = block_of("topo", exact_evaluation=True, codecs={"except": {"*.experts.*": "int8"}})
    for resumes in (False, True):
        engine = _engine(block, EXPERT)
        plans = [param.hzero_managed.route.plan for param in engine.module.parameters() if is_expert(param)]
        assert {hop.codec.codec for plan in plans for hop in plan.reduce_hops()} == {"int8"}
        if resumes:
            engine.load_checkpoint(str(folder))
        else:
            train(engine, 1, 2, loss_of=_loss)
            engine.save_checkpoint(str(folder))
        losses.append(train(engine, 2, 2, first=1, loss_of=_loss))
        engine.eval()
        with torch.no_grad():  # gathers primary shards of both partitions
            losses[-1].append(float(_loss(engine, 3, 0)))
        _end(engine)
    assert losses[0] == losses[1]
    for expert in (0, 4):
        engine = _engine(block, expert)
        with pytest.raises(ConfigError, match=r"found other parameters .*mlp\.experts.*the expert_parallel"):
            engine.load_checkpoint(str(folder))
        _end(engine)


def check_collectives_of_autoep_have_one_order() -> None:
    """Under the order ``strict``: DeepSpeed's exchanges of tokens and counts, in forward and backward, too."""
    for order in ("strict", "lanes"):
        with recording() as trace:
            engine = _engine(block_of("topo", order=order), EXPERT)
            train(engine, 1, 2, loss_of=_loss)
            _end(engine)
        pairs, _ = trace.unordered()
        if dist.get_rank() == 0:
            assert bool(pairs) == (order == "lanes"), f"{order}: {len(pairs)} pairs\n" + "\n".join(pairs[:3])


def _end(engine: Any = None) -> None:
    """DeepSpeed keeps the groups of AutoEP for the next engine, which may divide experts otherwise."""
    if engine is not None:
        engine.destroy()
    groups._get_expert_parallel_group_dict().clear()
    groups._get_expert_data_parallel_group_dict().clear()
