"""The block's key ``checkpoint`` under a plain engine. Run by test_stage.py on 4 ranks."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_optimizer_state
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

import hzero
from hzero.deepspeed.clients import save_together
from hzero.deepspeed.resharding import MODEL, OPTIMIZER, Resharding, Sharding
from hzero.deepspeed.safe_loading import load
from hzero.manifest import Manifest, complete_in
from tests.deepspeed.training import (
    AwkwardNet,
    assert_losses,
    assert_masters,
    block_of,
    ds_config,
    engine_of,
    masters_of,
    shared_folder,
    train,
)


class Planted:
    """Makes a file where a pickle of it is loaded."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> Any:
        return os.system, (f"touch '{self.made}'",)


def _engine(preset: str = "topo", accumulation: int = 1, seed: int = 0, **changes: Any) -> Any:
    block = block_of(preset, checkpoint=changes.pop("checkpoint", {}), **changes.pop("block", {}))
    return engine_of(ds_config(block, accumulation, **changes), AwkwardNet(seed))


@contextlib.contextmanager
def small_disk(rank: int, limit: int) -> Iterator[None]:
    """On one rank no file may become larger than ``limit`` bytes: the kernel refuses the write, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if dist.get_rank() == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def _same(text: str) -> str:
    """A text that all ranks have alike."""
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, text)
    assert set(everyones) == {text}, everyones
    return text


def _on_rank_0(action: Any) -> None:
    if dist.get_rank() == 0:
        action()
    dist.barrier()


def _fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise Exception("os error 28")


def check_a_save_that_fails_on_one_rank_fails_on_all() -> None:
    folder = shared_folder()
    engine = _engine()
    train(engine, 1)
    engine.save_checkpoint(str(folder))
    masters = masters_of(engine)
    train(engine, 1, first=1)
    for rank, why in (
        (3, r"_rank_3_mp_rank_00_(model|optim)_states\.pt: File too large \(rank 3\)"),
        (0, r"\(rank 0\)"),
    ):
        with small_disk(rank, 500), pytest.raises(hzero.SaveError, match=why) as error:
            engine.save_checkpoint(str(folder))
        assert "earlier checkpoints are unchanged" in _same(str(error.value))
        assert error.value.reported_elsewhere == (dist.get_rank() != 0)
        dist.barrier()
        assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["global_step1"]
        assert (folder / "latest").read_text() == "global_step1"
    # Files of a client, such as Trainer's and those of tokenizers, whose errors are no OSError.
    for rank in (0, 3):
        with pytest.raises(hzero.SaveError, match=rf"config.json' could not .*os error 28 \(rank {rank}\)"):
            save_together("config.json", functools.partial(_fail_on, rank))
    with small_disk(2, 500), pytest.raises(hzero.SaveError):  # replaces an existing checkpoint
        engine.save_checkpoint(str(folder), tag="global_step1")
    train(engine, 1, first=2)
    engine.save_checkpoint(str(folder))
    dist.barrier()
    assert [path.name for path in complete_in(folder)] == ["global_step3", "global_step1"]
    assert hzero.newest_checkpoint(folder) == str(folder / "global_step3")
    engine.destroy()
    # On ranks of which no accumulation makes the batch of that run.
    resumed = _engine("lossless", seed=9, train_micro_batch_size_per_gpu=5)
    with pytest.raises(hzero.ConfigError) as refused:
        resumed.load_checkpoint(str(folder), tag="global_step1")
    assert (
        "was trained with 8 samples in a step; found 4 ranks with micro-batches of 5, which is 20 at once; expected a divisor "
        "of 8, or hzero.checkpoint.same_batch false"
    ) in _same(str(refused.value))
    assert (resumed.global_steps, resumed.train_batch_size()) == (0, 20)
    resumed.load_checkpoint(str(folder), tag="global_step1", load_optimizer_states=False)  # training does not continue
    files = resumed.checkpoint_engine
    files.config = files.config.model_copy(update={"same_batch": False})
    resumed.load_checkpoint(str(folder), tag="global_step1")
    assert (resumed.global_steps, resumed.train_batch_size()) == (1, 20)
    assert_masters(resumed, masters)
    resumed.destroy()


def check_a_damaged_checkpoint_gives_way_to_the_one_before() -> None:
    folder, made = shared_folder(), shared_folder() / "made"
    engine = _engine()
    for step in range(3):
        train(engine, 1, first=step)
        engine.save_checkpoint(str(folder), client_state={"seen": step + 1})
    engine.destroy()
    dist.barrier()
    third, second = folder / "global_step3", folder / "global_step2"

    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)

    _on_rank_0(lambda: flip(next(third.glob("*rank_2*optim_states.pt"))))
    assert hzero.newest_checkpoint(folder) == str(third), "it compares sizes"
    resumed = _engine(seed=9)
    with pytest.raises(hzero.ConfigError, match=r"global_step3' is incomplete: .*rank_2.* its hash differs") as error:
        resumed.load_checkpoint(str(folder), tag="global_step3")
    assert f"the newest complete one is {str(second)!r}" in _same(str(error.value))
    assert resumed.load_checkpoint(str(folder))[1]["seen"] == 2, "`latest` names the damaged one"
    assert resumed.global_steps == 2
    for path in (third, second):
        _on_rank_0(lambda path=path: os.truncate(next(path.glob("*rank_1*model_states.pt")), 99))
    assert hzero.newest_checkpoint(folder) == str(folder / "global_step1")
    assert resumed.load_checkpoint(str(folder), load_optimizer_states=False)[1]["seen"] == 1
    dist.barrier()

    def plant() -> None:  # with a matching note, as an attacker would write
        path = next((folder / "global_step1").glob("*rank_2*optim_states.pt"))
        state = torch.load(path, weights_only=False)
        torch.save({**state, "more": Planted(made)}, path)
        note = Manifest.read(path.parent)
        planted = path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()
        files = {**note.files, path.name: planted}
        note.model_copy(update={"written": note.written + 1, "files": files}).write()

    _on_rank_0(plant)
    with pytest.raises(hzero.ConfigError, match=r"needs (posix|os)\.system"):
        resumed.load_checkpoint(str(folder), load_optimizer_states=False)  # all ranks read all files
    dist.barrier()
    assert not made.exists()
    files = resumed.checkpoint_engine
    files.config = files.config.model_copy(update={"trust": True})
    resumed.load_checkpoint(str(folder))
    dist.barrier()
    assert made.exists()
    resumed.destroy()


def check_a_checkpoint_of_another_layout_is_loaded_bit_for_bit() -> None:
    """Of three ranks, and cut into other sub-groups: masters, states, frozen weights, and every group's rate."""
    folder = shared_folder()

    def engine(preset: str, seed: int, checkpoint: Any = {}, parts: int = 2, **changes: Any) -> Any:  # noqa: B006
        model = AwkwardNet(seed=seed)
        rates = {"weight_decay": 0.0, "lr": 1e-4} if seed == 0 else {"weight_decay": 0.3}
        trained = [p for p in model.parameters() if p.requires_grad]
        groups = [{"params": trained[:3]}, {"params": trained[3:], **rates}] if parts == 2 else [{"params": trained}]
        block = block_of(preset, checkpoint=checkpoint)
        config = ds_config(block, bf16={"enabled": True}, **changes)
        return hzero.initialize(model=model, model_parameters=groups, config=config)[0]

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
    train(built, 2)
    built.save_checkpoint(str(folder))
    built.save_checkpoint(str(folder), tag="without", exclude_frozen_parameters=True)
    expected = state_of(built)
    assert len(expected) > 20
    next_loss = train(built, 1, first=2)
    shapes = built._get_zero_param_shapes()
    built.destroy()
    dist.barrier()

    # As three ranks would have written it: this world is the one that it is cut from, so both directions are tried.
    source, target = folder / "global_step2", folder / "of_three"

    def write_as_three() -> None:
        read = functools.partial(load, map_location="cpu", trust=False)
        target.mkdir()
        for other in range(3):
            layout = Sharding.of(3, shapes)
            cut = Resharding(source, layout, other, [0, 1], read)
            for kind in (MODEL, OPTIMIZER):
                torch.save(cut.load(kind), target / cut.path(0, kind).name.replace("rank_0", f"rank_{other}", 1))

    _on_rank_0(write_as_three)
    for tag, zero in ((target, {}), (source, {"sub_group_size": 40})):
        resumed = engine("zero3", 9, zero_optimization={"stage": 3, **zero})
        if zero:
            with deepspeed.zero.GatheredParameters([resumed.module.frozen.weight]):
                frozen = resumed.module.frozen.weight.detach().clone()
            resumed.load_checkpoint(str(folder), tag="without", load_module_strict=False)  # as Trainer does
            assert torch.equal(state_of(resumed)["frozen.weight"], frozen)
        resumed.load_checkpoint(str(folder), tag=tag.name)
        assert (len(resumed.optimizer.fp16_groups) > 2) == bool(zero)
        got = state_of(resumed)
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(got[name], value), name
        groups = resumed.optimizer.param_groups
        assert [(group["lr"], group["weight_decay"]) for group in groups] == [(3e-3, 0.01), (1e-4, 0.0)]
        assert resumed.global_steps == 2
        assert_losses(train(resumed, 1, first=2), next_loss, 2e-2)  # of `zero3` the weights are not rounded
        if zero:  # stock's own tool reads the same weights
            weights = get_fp32_state_dict_from_zero_checkpoint(str(folder), tag=source.name)
            assert all(torch.equal(weights[name], expected[name]) for name in weights if name in expected)
        resumed.destroy()
    optimizer = {"type": "SGD", "params": {"lr": 0.1}}
    for key, tag, parts, says in (
        ({}, source, 2, "found optimizer SGD and states without dampening"),
        (None, target, 2, "of 3 ranks; expected a checkpoint of"),
        (None, source, 1, "found 1 parameter groups in the optimizer; expected 2"),
        ({}, source, 1, "is in group 0 of the optimizer, and was in group 1"),
    ):
        other = engine("topo", 9, key, parts, optimizer=optimizer)
        with pytest.raises(hzero.ConfigError, match=says):
            other.load_checkpoint(str(folder), tag=tag.name)
        other.destroy()


def check_a_resumed_run_rounds_as_one_that_went_on() -> None:
    """Seeds are saved: same bits. Stock takes such files. Residuals start at zero, with a warning."""
    folder = shared_folder()
    rounding = {"codec": "int4", "rounding": "stochastic"}
    codecs = {"gradients": {"inter_node": rounding}, "weights": {"inter_node": {**rounding, "codec": "int8"}}}
    codecs = {**codecs, "except": {"norm.*": "none"}}
    block = block_of("topo", codecs=codecs, checkpoint={})

    def model(seed: int = 5) -> AwkwardNet:
        made = AwkwardNet(seed)
        made.frozen.weight.requires_grad_(True)  # weights that no step changes are rounded again after a load
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
    feeding = {**block, "error_feedback": ["inter_node"]}
    others = {"two": block, "other plan": block_of("half"), "stock": None}
    resumed = {}
    with mock.patch.object(logging.getLogger("hzero"), "warning") as warning:
        for name, other in others.items():
            engine = engine_of(ds_config(other, 2), model())
            engine.load_checkpoint(str(folder), tag="two")
            if other is None:
                engine.save_checkpoint(str(folder), tag="stock")
            train(engine, 2, 2, first=2)
            resumed[name] = masters_of(engine)
            engine.destroy()
        engine = engine_of(ds_config(feeding, 2), model())
        train(engine, 1, 2)
        engine.load_checkpoint(str(folder), tag="stock")
        assert not hzero.state(engine).memory()["error feedback"]
        engine.destroy()
    for found in (again, resumed["two"]):
        for name, master in want.items():
            assert torch.equal(master, found[name]), name
    for name in ("other plan", "stock"):
        assert any(not torch.equal(master, resumed[name][key]) for key, master in want.items())
    said = [call.args[0] % call.args[1:] for call in warning.call_args_list]
    said = [one for one in said if "without the key" not in one]
    start = "hzero: residuals of error feedback start at zero: checkpoints have none"
    assert said == ([start] if dist.get_rank() == 0 else []), said
