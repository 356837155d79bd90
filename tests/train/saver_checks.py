"""Saves that fail on one rank, on real ranks. Run by tests/zero/test_stage.py, whose launch they share."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import os
import shutil
import socket
import threading
import time
from typing import Any, NamedTuple
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime import engine as deepspeed_engine
from deepspeed.utils import safe_get_full_optimizer_state

import hzero
from hzero.train import checkpoint, reshard, safe_load
from hzero.train.folder import WriteError
from hzero.train.saver import Saver
from hzero.train.stragglers import EVERY, Stragglers
from hzero.train.writer import HostCopy
from hzero.validation import PlainError
from hzero.zero import saved
from tests.zero.training import (
    LR,
    AwkwardNet,
    assert_losses,
    block_of,
    ds_config,
    engine_of,
    masters_of,
    shared_folder,
    train,
)


class _Usage(NamedTuple):
    total: int = 1 << 40
    used: int = 1 << 40
    free: int = 99


def _failing(rank: int, target: Any, name: str, number: int) -> Any:
    """A function that fails on one rank as on a disk that takes no more."""
    if dist.get_rank() != rank:
        return contextlib.nullcontext()
    return mock.patch.object(target, name, side_effect=OSError(number, os.strerror(number)))


def _same(text: str | None) -> str:
    """A text, which all ranks have."""
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, text)
    assert set(everyones) == {text}, everyones
    return str(text)


def _saved(saver: Saver, step: int, *, last: bool = False) -> str | None:
    """Saves and waits for it. Returns why it has failed."""
    failures = [*saver.save(step, last=last), *saver.settle(last=last)]
    assert len(failures) <= 1 and not saver.busy
    return failures[0] if failures else None


def check_a_resumed_run_rounds_as_one_that_went_on() -> None:
    """Residuals and seeds are saved: same bits. Stock takes such files, and what they lack is a warning and starts anew."""
    folder = shared_folder()
    rounding = {"codec": "int4", "rounding": "stochastic"}
    codecs = {"gradients": {"node": rounding}, "weights": {"node": {**rounding, "codec": "int8"}}}
    codecs = {**codecs, "except": {"norm.*": "none"}}
    more = {"error_feedback": ["gpu", "node"], "accumulators": "bf16", "save_residuals": True}
    block = block_of("topo", codecs=codecs, **more)

    def model(seed: int = 5) -> AwkwardNet:
        made = AwkwardNet(seed)
        made.frozen.weight.requires_grad_(True)  # what no step changes is rounded anew after a load
        return made

    engine = engine_of(ds_config(block, 2), model(0))
    train(engine, 2, 2)
    engine.save_checkpoint(str(folder), tag="two")
    train(engine, 2, 2, first=2)
    want = masters_of(engine)
    engine.load_checkpoint(str(folder), tag="two")
    train(engine, 2, 2, first=2)
    again = masters_of(engine)
    engine.destroy()
    others = {"two": block, "other plan": block_of("mild", error_feedback=["node"]), "stock": None}
    resumed = {}
    with mock.patch.object(saved.logger, "warning") as warning:
        for name, other in others.items():
            engine = engine_of(ds_config(other, 2), model())
            engine.load_checkpoint(str(folder), tag="two")
            if other is None:
                engine.save_checkpoint(str(folder), tag="stock")
            train(engine, 2, 2, first=2)
            resumed[name] = masters_of(engine)
            engine.destroy()
        engine = engine_of(ds_config(block, 2), model())
        engine.load_checkpoint(str(folder), tag="stock")
        assert not hzero.state(engine)._feedback.saved()
        engine.destroy()
    for found in (again, resumed["two"]):
        for name, master in want.items():
            assert torch.equal(master, found[name]), name
    for name in ("other plan", "stock"):
        assert any(not torch.equal(master, resumed[name][key]) for key, master in want.items())
    said = [call.args[0] % call.args[1:] for call in warning.call_args_list]
    assert len(said) == (2 if dist.get_rank() == 0 else 0), said
    if said:
        assert "was written with another plan or on other ranks" in said[0]
        assert said[1].endswith("the checkpoint has none")


def check_a_save_that_fails_leaves_the_one_before() -> None:
    """Whichever rank fails, all agree and none hangs; the former checkpoint stays, and the next save is whole."""
    folder = shared_folder()
    identity = checkpoint.Identity("shape", "text", 0, dist.get_world_size(), "bf16")
    bf16 = {"bf16": {"enabled": True}}
    engine = engine_of(ds_config(block_of("topo"), **bf16))
    saver = Saver(engine, folder, identity, keep=2, max_failures=3, trust=False)
    train(engine, 1)
    assert _saved(saver, 1) is None

    def left() -> int:
        dist.barrier()
        assert len(list(folder.glob("step_*"))) == 1
        found = checkpoint.newest(folder)
        assert found is not None
        return found.step

    with _failing(3, os, "fsync", errno.ENOSPC):
        said = _same(_saved(saver, 2))
    assert "step_000002/zero_pp_rank_3_mp_rank_00_model_states.pt: No space left on device (rank 3)" in said, said
    assert left() == 1
    with _failing(0, deepspeed_engine, "copyfile", errno.EROFS):
        assert "Read-only file system (rank 0)" in _same(_saved(saver, 3))
    assert left() == 1
    full = mock.patch.object(shutil, "disk_usage", return_value=_Usage())
    with full:
        try:
            _saved(saver, 4)
            raise AssertionError("a third failure in a row was taken")
        except WriteError as error:
            assert "kB, and 99 B are free; 3 saves in a row have failed (checkpoint.max_failures)" in _same(str(error))
            assert error.elsewhere == (dist.get_rank() != 0)
    assert left() == 1
    assert _saved(saver, 5) is None
    dist.barrier()
    memory = mock.patch.object(HostCopy, "of", side_effect=RuntimeError("no memory for it\n"))
    with memory if dist.get_rank() == 2 else contextlib.nullcontext():  # the count has begun anew
        said = _same(_saved(saver, 6))
    assert "step_000006/zero_pp_rank_2_mp_rank_00_model_states.pt: no memory for it (rank 2)" in said, said
    assert not (folder / "step_000006").exists()
    with full:  # a last save may not fail
        try:
            _saved(saver, 7, last=True)
            raise AssertionError("a run ended without its last checkpoint")
        except WriteError as error:
            assert "the run ends without it" in _same(str(error))

    with mock.patch.object(shutil, "disk_usage", side_effect=LookupError("odd")):
        try:
            saver.save(8)
            raise AssertionError("an error of rank 0 was not passed on")
        except LookupError:
            assert dist.get_rank() == 0
        except PlainError as error:
            assert str(error) == "rank 0 failed: LookupError: odd" and error.elsewhere and dist.get_rank()

    safe_load.refuse_code(folder, safe_load.TRUST)
    found = checkpoint.find(str(folder), folder, identity, trust=False)
    assert found is not None and found.step == 5
    masters = masters_of(engine)
    engine.destroy()
    resumed = engine_of(ds_config(None, **bf16), AwkwardNet(seed=9))
    assert found.good is None, "no finite step has come after it"
    if dist.get_rank() == 0:
        for step in (6, 9):  # of an earlier life of the run
            shutil.copytree(found.folder, folder / checkpoint.tag_of(step))
    dist.barrier()
    loader = Saver(resumed, folder, identity, keep=2, max_failures=1, trust=False)
    loader.load(found)
    for name, master in masters_of(resumed).items():
        assert torch.equal(master, masters[name]), name
    loader.judge(True)  # the first finite step of the run that goes on
    assert _saved(loader, 7) is None
    loader.close()
    dist.barrier()
    assert checkpoint.read(found.folder).good is True
    assert sorted(path.name for path in folder.glob("step_*")) == ["step_000005", "step_000007"]
    resumed.destroy()


def check_a_checkpoint_of_another_layout_is_loaded_bit_for_bit() -> None:
    """Of three ranks, and cut into other sub-groups: masters, states, frozen weights, and every group's rate."""
    folder = shared_folder()
    world, rank = dist.get_world_size(), dist.get_rank()
    identity = checkpoint.Identity("shape", "text", 0, world, "bf16")

    def engine(preset: str, seed: int, **zero: int) -> Any:
        model = AwkwardNet(seed=seed)
        rates = {"weight_decay": 0.0, "lr": 1e-4} if seed == 0 else {"weight_decay": 0.3}
        trained = [p for p in model.parameters() if p.requires_grad]
        groups = [{"params": trained[:3]}, {"params": trained[3:], **rates}]
        config = ds_config(block_of(preset), bf16={"enabled": True}, zero_optimization={"stage": 3, **zero})
        return hzero.initialize(model=model, model_parameters=groups, config=config)[0]

    def saver_of(built: Any) -> Saver:
        return Saver(built, folder, identity, keep=9, max_failures=1, trust=False)

    def state_of(built: Any) -> dict[str, torch.Tensor]:
        found = masters_of(built)
        for name, param in built.module.named_parameters():
            if param.requires_grad:
                for key in ("exp_avg", "exp_avg_sq"):
                    found[f"{name} {key}"] = safe_get_full_optimizer_state(param, key).clone()
            else:
                with deepspeed.zero.GatheredParameters([param]):
                    found[name] = param.detach().clone()
        return found

    built = engine("topo", 0)
    saver = saver_of(built)
    train(built, 2)
    assert _saved(saver, 2) is None
    dist.barrier()
    expected = state_of(built)
    assert len(expected) > 20
    next_loss = train(built, 1, first=2)
    shapes = built._get_zero_param_shapes()
    built.destroy()

    # As three ranks would have written it: this world is the one that it is cut from, so both directions are tried.
    source, target = folder / "step_000002", folder / "step_000003"
    load = functools.partial(safe_load.load, map_location="cpu", trust=False)
    if rank == 0:
        target.mkdir()
        for other in range(3):
            cut = reshard.Resharding(source, world, reshard.Layout(3, shapes), other, [0, 1], load)
            for kind in (reshard.MODEL, reshard.OPTIMIZER):
                torch.save(cut.load(kind), target / cut.path(0, kind).name.replace("rank_0", f"rank_{other}", 1))
    dist.barrier()
    for tag, old_world, zero in ((target, 3, {}), (source, world, {"sub_group_size": 40})):
        resumed = engine("zero3", 9, **zero)
        found = checkpoint.Checkpoint(tag, 2, dataclasses.replace(identity, world_size=old_world), 1, True)
        saver_of(resumed).load(found)
        assert (len(resumed.optimizer.fp16_groups) > 2) == bool(zero)
        got = state_of(resumed)
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(got[name], value), name
        groups = resumed.optimizer.param_groups
        # The rate is the checkpoint's, until the next step sets it; the decay that of the run that goes on.
        assert [(group["lr"], group["weight_decay"]) for group in groups] == [(LR, 0.01), (1e-4, 0.3)]
        assert resumed.global_steps == 2
        assert_losses(train(resumed, 1, first=2), next_loss, 2e-2)  # of `zero3` the weights are not rounded
        resumed.destroy()


def check_a_slow_rank_is_named() -> None:
    """The one for which the others wait, by what the ranks measure."""
    rank, device = dist.get_rank(), torch.device("cpu")
    engine = engine_of(ds_config(block_of("topo")))
    own = hzero.state(engine)
    assert own is not None
    train(engine, 1)
    before = own.waited_s
    for step in range(1, 5):
        dist.barrier()
        if rank == 3:
            time.sleep(0.4)
        train(engine, 1, first=step)
    measured = Stragglers(device)
    found = [measured.add(0.3, (own.waited_s - before) / 4) for _ in range(EVERY)]
    assert found[:-1] == [None] * (EVERY - 1) and found[-1] is not None
    assert [(row["host"], row["ranks"]) for row in found[-1]] == [(socket.gethostname(), [3])], found[-1]
    assert found[-1][0]["lag_s"] > 0.1
    engine.destroy()


def check_training_goes_on_while_a_save_is_written() -> None:
    """A rank whose disk is slow is named after the timeout; what is published are the states at the save."""
    folder = shared_folder() / "of [1]*"  # no pattern to DeepSpeed
    folder.mkdir(exist_ok=True)
    identity = checkpoint.Identity("shape", "text", 0, dist.get_world_size(), "bf16")
    engine = engine_of(ds_config(block_of("topo"), bf16={"enabled": True}))
    saver = Saver(engine, folder, identity, keep=2, max_failures=9, trust=False, timeout_s=0.5)
    train(engine, 1)
    masters, go, stock = masters_of(engine), threading.Event(), os.fsync

    def slow(handle: int) -> None:
        assert go.wait(60)
        stock(handle)

    with mock.patch.object(os, "fsync", slow) if dist.get_rank() == 3 else contextlib.nullcontext():
        assert saver.save(1) == [] and saver.busy
        train(engine, 1, first=1)
        saver.judge(True)
        assert any(not torch.equal(master, masters[name]) for name, master in masters_of(engine).items())
        for failures in (saver.settle(), saver.save(2)):
            said = _same(" ".join(failures))
            assert "the checkpoint of step 1 could not be saved: it is not written after 0.5 s" in said, said
            assert "rank 3 on " in said and said.endswith("step_000001/zero_pp_rank_3_mp_rank_00_model_states.pt"), said
        assert saver.busy and checkpoint.newest(folder) is None
        try:
            saver.save(2, last=True)
            raise AssertionError("a run ended without its last checkpoint")
        except WriteError as error:
            assert "step 2 could not be saved: that of step 1 is still being written; the run ends without it" in str(
                error
            )
        go.set()
        assert saver.settle() == []
    assert [row["step"] for row in saver.rows] == [1] * (dist.get_rank() == 0)
    for row in saver.rows:
        assert 0 < row["copy_s"] <= row["blocked_s"] <= row["write_s"]
    dist.barrier()
    found = checkpoint.newest(folder)
    assert found is not None and found.step == 1 and found.good, "the step that came meanwhile was finite"
    engine.destroy()
    other = {"params": {"lr": 0.1, "betas": [0.5, 0.6], "weight_decay": 0.7, "torch_adam": True}}
    resumed = engine_of(ds_config(None, bf16={"enabled": True}, optimizer=other), AwkwardNet(seed=9))
    Saver(resumed, folder, identity, keep=2, max_failures=1, trust=False).load(found)
    for group in resumed.optimizer.param_groups:
        assert (list(group["betas"]), group["weight_decay"]) == ([0.5, 0.6], 0.7), "those of the run that goes on"
    for name, master in masters_of(resumed).items():
        assert torch.equal(master, masters[name]), name
    resumed.destroy()
