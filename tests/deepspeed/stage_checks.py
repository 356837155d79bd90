"""Whatever DeepSpeed does around the stage. Run by test_stage.py on 4 ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

import hzero
from hzero.codecs import backends
from hzero.comm import HopError
from hzero.comm.wires import process_group, world_timeout
from hzero.config import TopologyConfig
from hzero.deepspeed.handles import GatherHandle
from hzero.engine.engine import Owners
from hzero.errors import ConfigError
from tests.deepspeed.training import (
    OFFLOAD,
    AwkwardNet,
    assert_losses,
    assert_masters,
    batch,
    block_of,
    ds_config,
    engine_of,
    masters_of,
    mean_over_ranks,
    run,
    shared_folder,
    train,
)


def check_every_backend_gives_the_same_losses() -> None:
    """The codecs' kernels instead of plain torch change no bit, with error feedback and stochastic rounding too."""
    if backends.choice("cpu").fallback:
        pytest.skip("the host library is not built: the reference is the only backend")
    block = block_of("topo", error_feedback=["intra_package", "inter_node"])
    block["codecs"] = {"gradients": {"inter_node": {"codec": "int4", "rounding": "stochastic"}}}
    compiled = run(block, 2)
    with backends.reference_instead():
        assert run(block, 2).has_bits_of(compiled)


def check_losses_are_stocks_where_those_of_zeropp_were_not() -> None:
    """From the first step on and from the first step after a load, in bf16, with the optimizer on the host, in awkward sizes.

    deepspeedai/DeepSpeed: #4851 and #7164 (another convergence from the first step on), #7606 (a first step, or a first one
    after a load, with stale secondary weights), #4886 (bf16: the loss shoots up), #5059 (bf16: loss 0 from the third step
    on), #6926 (optimizer on the host: the loss does not change).
    """
    folder = shared_folder()
    changes: dict[str, Any] = {"bf16": {"enabled": True}, **OFFLOAD}
    stock = engine_of(ds_config(None, 2, **changes))
    want = train(stock, 4, 2)
    stock.save_checkpoint(str(folder), tag="stock")
    went_on = train(stock, 2, 2, first=4)
    stock.destroy()
    for preset, tolerance in (("hpz", 0.02), ("zeropp", 0.04), ("topo", 0.04)):
        engine = engine_of(ds_config(block_of(preset), 2, **changes))
        assert_losses(train(engine, 4, 2), want, tolerance)
        engine.load_checkpoint(str(folder), tag="stock")
        assert_losses(train(engine, 2, 2, first=4), went_on, tolerance)
        engine.destroy()


def check_zero_init_and_persistent_parameters() -> None:
    """A model made under zero.Init, with and without a persistence threshold, trains as one made whole."""
    want = run(block_of("lossless"), 1, 3).losses
    cases = ((None, "topo", 0.02), (100, "lossless", 1e-5), (10**6, "lossless", 1e-5), (10**6, "topo", 0.02))
    for threshold, preset, tolerance in cases:
        kept_whole = {"stage3_param_persistence_threshold": threshold} if threshold is not None else {}
        config = ds_config(block_of(preset), zero_optimization={"stage": 3, **kept_whole})
        hzero.enable()
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = AwkwardNet()
        engine = engine_of(config, model)
        assert any(param.ds_persist for param in engine.module.parameters()) == (threshold is not None)
        assert_losses(train(engine, 3), want, tolerance)
        if threshold is not None and preset == "topo":
            # The decoded weights that stay available must never be read back as exact ones.
            engine(batch(9, 0))
            masters = masters_of(engine)
            with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
                for name, param in engine.module.named_parameters():
                    if param.requires_grad:
                        assert torch.equal(param.detach(), masters[name]), name
            assert_masters(engine, masters)
            assert {e.codec for e in hzero.state(engine).wire_log.entries() if e.role == "weights"} == {"int8"}
        engine.destroy()


def check_parameters_kept_whole_can_be_read_after_a_step() -> None:
    """As in stock: reading them before the next forward needs no other rank, also after a save and a load."""
    zero = {"stage": 3, "stage3_param_persistence_threshold": 100}
    engine = engine_of(ds_config(block_of("lossless"), zero_optimization=zero))
    train(engine, 2)
    with shared_folder() as folder:
        for act in (lambda: None, lambda: engine.save_checkpoint(folder), lambda: engine.load_checkpoint(folder)):
            act()
            masters, seen = masters_of(engine), 0
            for name, param in engine.module.named_parameters():
                if param.ds_persist and param.requires_grad:
                    assert torch.equal(param.detach(), masters[name]), name
                    seen += 1
            assert seen
    engine.destroy()


class _PartlyUsed(torch.nn.Module):
    """Two layers that no forward uses, in front of four that it does."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = torch.nn.ModuleList(torch.nn.Linear(9, 9) for _ in range(2))
        self.layers = torch.nn.ModuleList(torch.nn.Linear(9, 9) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def check_parameters_that_nobody_uses_do_not_keep_others_from_being_refreshed_ahead() -> None:
    zero = {"stage": 3, "stage3_prefetch_bucket_size": 90, "stage3_param_persistence_threshold": 0}
    engine = engine_of(ds_config(block_of("topo"), zero_optimization=zero), _PartlyUsed())
    state, events = hzero.state(engine), []
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 9)))
        engine.step()
    refresh, gather = state.weights._start_refresh, state.gather

    def refreshing(params: Any) -> Any:
        events.extend(("refresh", param.key) for param in params)
        return refresh(params)

    def gathering(params: Any, *rest: Any, **keywords: Any) -> Any:
        params = list(params)
        events.extend(("gather", param.ds_id) for param in params)
        return gather(params, *rest, **keywords)

    state.weights._start_refresh = refreshing
    for param in engine.module.parameters():
        param.all_gather_coalesced = gathering
    engine(torch.ones(2, 9))
    for layer in engine.module.layers[2:]:
        number = layer.weight.ds_id
        assert events.index(("refresh", number)) < events.index(("gather", number)), events
    engine.destroy()


def check_a_gather_that_fails_leaves_no_parameter_under_way() -> None:
    """Or the next engine on the model could not partition it."""
    engine = engine_of(ds_config(block_of("topo")))
    train(engine, 1)
    with (
        mock.patch.object(GatherHandle, "wait", side_effect=HopError("a gather")),
        pytest.raises(HopError, match="a gather"),
    ):
        engine(batch(1, 0))
    params = list(engine.module.parameters())
    assert any(param.ds_status == ZeroParamStatus.INFLIGHT for param in params)
    engine.destroy()
    assert not any(param.ds_status == ZeroParamStatus.INFLIGHT for param in params)


def check_a_world_in_another_order_is_refused() -> None:
    """A permuted group has the right size, and would give every rank another one's shard."""
    ranks = [1, 0, *range(2, dist.get_world_size())]
    permuted = process_group(("permuted", "inter_node"), ranks, world_timeout())
    with pytest.raises(ConfigError, match="its rank 0 is rank 1 of the world"):
        Owners.of(permuted, TopologyConfig())


def _plain(masters: dict[str, torch.Tensor]) -> AwkwardNet:
    """A model without an engine that has these weights."""
    model = AwkwardNet()
    model.load_state_dict(masters, strict=False)
    return model


def check_gathered_parameters_and_exact_readers() -> None:
    """Exact readers see primary shards; a modifier rank's edit reaches forward; exact_weights differs from decoded."""
    engine = engine_of(ds_config(block_of("topo")))
    train(engine, 2)
    masters = masters_of(engine)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        for name, param in engine.module.named_parameters():
            if param.requires_grad:
                assert torch.equal(param.detach(), masters[name])
    with torch.no_grad():
        decoded = mean_over_ranks(engine(batch(50, 0)))
        with hzero.exact_weights(engine):
            exact = mean_over_ranks(engine(batch(50, 0)))
        again = mean_over_ranks(engine(batch(50, 0)))
    reference = _plain(masters)
    assert abs(exact - mean_over_ranks(reference(batch(50, 0)))) < 1e-6
    assert decoded == again and decoded != exact and abs(decoded - exact) < 0.05
    with deepspeed.zero.GatheredParameters(engine.module.gain, modifier_rank=1):
        if dist.get_rank() == 1:
            engine.module.gain.data.fill_(5.0)
    with torch.no_grad():
        assert abs(mean_over_ranks(engine(batch(50, 0))) - decoded) > 0.01
    engine.destroy()


def check_master_weights_set_by_the_user() -> None:
    """A master weight that the user sets reaches forward with the next step, as in stock DeepSpeed."""
    # DeepSpeed's setter wants sizes that the world divides.
    model = AwkwardNet(inner=32)
    engine = engine_of(ds_config(block_of("topo"), optimizer={"type": "SGD", "params": {"lr": 0.0}}), model)
    train(engine, 1)
    weight = engine.module.norm.weight
    safe_set_full_fp32_param(weight, torch.full_like(safe_get_full_fp32_param(weight), 3.0))
    train(engine, 1)
    seen = []
    hook = engine.module.norm.register_forward_hook(lambda module, *_: seen.append(module.weight.detach().clone()))
    with torch.no_grad():
        engine(batch(0, 0))
    hook.remove()
    torch.testing.assert_close(seen[0], torch.full_like(seen[0], 3.0), rtol=2**-7, atol=0.0)
    engine.destroy()


def check_weights_written_into_shards_reach_the_next_unshard() -> None:
    """All ranks or one rank write in every way, before a forward or a backward. Losses equal stock's."""
    ways: dict[str, Callable[[Any], Any]] = {
        "copy": lambda shard: shard.copy_(shard * 0.9),
        "lerp": lambda shard: shard.lerp_(torch.ones_like(shard), 0.1),
        "data": lambda shard: shard.data.mul_(0.9),
        "foreach": lambda shard: torch._foreach_mul_([shard], 0.9),
        "replaced": lambda shard: setattr(shard, "data", shard * 0.9),
        "one rank": lambda shard: shard.mul_(0.9) if dist.get_rank() == 2 else None,
    }
    # Stock would otherwise keep what it has gathered.
    zero = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
    found: list[list[float]] = []
    for block in (None, block_of("lossless"), block_of("zero1")):
        engine, norms = engine_of(ds_config(block, 2, zero_optimization={"stage": 3, **zero})), list[float]()
        losses = train(engine, 1, 2)
        with torch.no_grad():
            for write in ways.values():
                for param in engine.module.parameters():
                    write(param.ds_tensor)
                losses.append(mean_over_ranks(engine(batch(1, 0))))

        def loss_of(engine: Any, step: int, micro: int) -> torch.Tensor:
            loss = engine(batch(step, micro))
            if dist.get_rank() == 1:
                engine.module.up.weight.ds_tensor.data.mul_(0.5)
            return loss

        losses += train(engine, 1, 2, first=1, norms=norms, loss_of=loss_of)
        found.append(losses + norms)
        engine.destroy()
    assert len({round(loss, 4) for loss in found[0]}) == len(found[0])
    for losses in found[1:]:
        assert_losses(losses, found[0])


def check_checkpoints_are_stock() -> None:
    """Saved under one preset, loaded under another, and by stock; and converted by stock's tool. Resume is bit for bit."""
    folder, lossless, topo = str(shared_folder()), block_of("lossless"), block_of("topo")
    writer = engine_of(ds_config(lossless, 2))
    train(writer, 2, 2)
    writer.save_checkpoint(folder, tag="here")
    masters = masters_of(writer)
    want = train(writer, 2, 2, first=2)
    writer.destroy()
    state = get_fp32_state_dict_from_zero_checkpoint(folder, tag="here")
    for name, master in masters.items():
        assert torch.equal(state[name].cpu(), master), name
    for block, tolerance in ((lossless, 0.0), (None, 1e-5), (block_of("zero3"), 1e-5), (topo, 0.02)):
        other = engine_of(ds_config(block, 2), AwkwardNet(seed=9))
        train(other, 1, 2)
        other.load_checkpoint(folder, tag="here")
        assert_masters(other, masters)
        assert_losses(train(other, 2, 2, first=2), want, tolerance)
        if block is topo:
            other.save_checkpoint(folder, tag="lossy")
            of_lossy, exported = masters_of(other), other._zero3_consolidated_16bit_state_dict()
        other.destroy()
    without_optimizer = []
    for block in (None, lossless):
        other = engine_of(ds_config(block, 2), AwkwardNet(seed=9))
        train(other, 1, 2)
        other.load_checkpoint(folder, tag="here", load_optimizer_states=False)
        without_optimizer.append(train(other, 2, 2, first=2))
        if block is None:
            other.load_checkpoint(folder, tag="lossy")
            for name, master in masters_of(other).items():
                assert torch.equal(master, of_lossy[name])
                assert dist.get_rank() or torch.equal(exported[name], master)
        other.destroy()
    assert_losses(without_optimizer[1], without_optimizer[0])


def check_several_engines_and_no_optimizer() -> None:
    """Two stages (one configured by a file), a stock engine, one without an optimizer, interleaved in one process."""
    file = shared_folder() / "ds_config.json"
    if dist.get_rank() == 0:
        file.write_text(json.dumps(ds_config(block_of("lossless"))))
    dist.barrier()
    first = engine_of(file)
    stock = engine_of(ds_config(None))
    second = engine_of(ds_config(block_of("topo")), AwkwardNet(seed=1))
    no_optimizer = {k: v for k, v in ds_config(block_of("topo")).items() if k != "optimizer"}
    judge = hzero.initialize(model=AwkwardNet(), config=no_optimizer)[0]
    assert hzero.state(stock) is None and hzero.state(judge) is not None
    reference = AwkwardNet()
    for step in range(3):
        a, b = train(first, 1, first=step), train(stock, 1, first=step)
        assert_losses(a, b)
        train(second, 1, first=step)
        with torch.no_grad():
            assert abs(mean_over_ranks(judge(batch(step, 0))) - mean_over_ranks(reference(batch(step, 0)))) < 0.05
    assert {e.tier for e in hzero.state(judge).wire_log.entries()} == {"intra_package", "inter_node"}
    for engine in (first, stock, second, judge):
        engine.destroy()


def check_an_engine_leaves_the_model_to_the_next() -> None:
    """Stock after hzero is stock, and hzero after hzero reads its own payloads; destroyed before, late or never."""
    zero = {"stage3_param_persistence_threshold": 0}
    topo = block_of("topo")
    for block, destroyed in ((topo, "before"), (None, "late"), (topo, "late"), (None, "never")):
        model = AwkwardNet()
        first = engine_of(ds_config(block_of("topo"), zero_optimization=zero), model)
        train(first, 2)
        if destroyed == "before":
            first.destroy()
        second = engine_of(ds_config(block, zero_optimization=zero), model)
        if destroyed == "late":
            first.destroy()
        train(second, 2, first=2)
        reference = _plain(masters_of(second))
        with torch.no_grad(), hzero.exact_weights(second):
            exact, want = mean_over_ranks(second(batch(50, 0))), mean_over_ranks(reference(batch(50, 0)))
            assert abs(exact - want) < 1e-5, (block, destroyed, exact, want)
        with torch.no_grad():
            decoded = mean_over_ranks(second(batch(50, 0)))
            assert abs(decoded - want) < (1e-5 if block is None else 0.02), (block, destroyed, decoded, want)
        second.destroy()


def check_saving_changes_nothing() -> None:
    """A run that saves rounds as one that does not, and crosses nodes no more often."""
    weights = {"codec": "int8", "rounding": "stochastic"}
    block = block_of("topo", codecs={"weights": dict.fromkeys(("intra_package", "intra_node", "inter_node"), weights)})
    folder, losses, hops = shared_folder(), [], []
    for saves in (False, True):
        engine = engine_of(ds_config(block))
        losses.append(train(engine, 2))
        if saves:
            engine.save_checkpoint(str(folder), tag="here")
        losses[-1] += train(engine, 2, first=2)
        hzero.state(engine).settle()
        hops.append({(e.role, e.tier): e.hops for e in hzero.state(engine).wire_log.entries()})
        engine.destroy()
    assert losses[0] == losses[1] and hops[0] == hops[1]


def check_states_in_bfloat16() -> None:
    """6 bytes per parameter instead of 12: losses are stock's, a resume repeats the bits, and presets with codecs train."""
    states = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    folder, stock = shared_folder(), run(None, 2, 4, bf16=states)
    wide = run(block_of("lossless"), 2, 4, bf16={"enabled": True})
    for preset, tolerance in (("lossless", 1e-3), ("topo", 2e-2), ("lean", 2e-2)):
        engine = engine_of(ds_config(block_of(preset), 2, bf16=states))
        losses = train(engine, 2, 2)
        engine.save_checkpoint(str(folder), tag=preset)
        losses += train(engine, 2, 2, first=2)
        assert_losses(losses, stock.losses, tolerance, preset)
        shards = [p.ds_tensor for p in engine.module.parameters() if p.requires_grad]
        elements = sum(shard.numel() for shard in shards)
        masters = engine.optimizer.fp32_partitioned_groups_flat
        held = hzero.state(engine).memory(engine.optimizer)["optimizer"]
        assert all(master.dtype == torch.bfloat16 for master in masters)
        assert 6 * elements <= held < 6 * elements + 64, "a master and two moments"
        engine.destroy()
        again = engine_of(ds_config(block_of(preset), 2, bf16=states))
        again.load_checkpoint(str(folder), tag=preset)
        if preset != "lean":  # whose first refresh after a load is whole
            assert train(again, 2, 2, first=2) == losses[2:]
        again.destroy()
    assert stock.losses != wide.losses


def check_memory_is_what_the_plan_says() -> None:
    from hzero.tools.plan.memory import held_states

    for preset, changes in (("topo", {"error_feedback": ["inter_node"]}), ("replica", {"resident": "payload"})):
        engine = engine_of(ds_config(block_of(preset, **changes), 2))
        train(engine, 2, 2)
        state = hzero.state(engine)
        state.settle()
        measured = state.memory(engine.optimizer)
        numels = [p.ds_numel for p in engine.module.parameters()]
        planned = {name: one.bytes for name, one in held_states(state.plan, numels, 4, 2).items()}
        assert measured["secondary partition"] == planned["secondary partition"] > 0, preset
        trainable = [p.ds_numel for p in engine.module.parameters() if p.requires_grad]
        planned = {name: one.bytes for name, one in held_states(state.plan, trainable, 4, 2).items()}
        assert measured["gradient accumulation buffers"] == planned["gradient accumulation buffers"] > 0, preset
        assert measured["error feedback"] == planned["error feedback"]
        engine.destroy()
