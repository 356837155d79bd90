"""Saves that fail on one rank, on real ranks. Run by tests/zero/test_stage.py, whose launch they share."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.runtime import engine as deepspeed_engine

from hzero.train import checkpoint, safe_load
from hzero.train.folder import WriteError
from hzero.train.saver import Saver
from tests.zero.training import AwkwardNet, block_of, ds_config, engine_of, masters_of, shared_folder, train


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


def check_a_save_that_fails_leaves_the_one_before() -> None:
    """Whichever rank fails, all agree and none hangs; the former checkpoint stays, and the next save is whole."""
    folder = shared_folder()
    identity = checkpoint.Identity("shape", "text", 0, dist.get_world_size(), "bf16")
    bf16 = {"bf16": {"enabled": True}}
    engine = engine_of(ds_config(block_of("topo"), **bf16))
    saver = Saver(engine, folder, identity, keep=2, max_failures=3, trust=False)
    train(engine, 1)
    assert saver.save(1) is None

    def left() -> int:
        dist.barrier()
        assert len(list(folder.glob("step_*"))) == 1
        found = checkpoint.newest(folder)
        assert found is not None
        return found.step

    with _failing(3, os, "fsync", errno.ENOSPC):
        said = _same(saver.save(2))
    assert "step_000002/zero_pp_rank_3_mp_rank_00_model_states.pt: No space left on device (rank 3)" in said, said
    assert left() == 1
    with _failing(0, deepspeed_engine, "copyfile", errno.EROFS):
        assert "Read-only file system (rank 0)" in _same(saver.save(3))
    assert left() == 1
    full = mock.patch.object(shutil, "disk_usage", return_value=_Usage())
    with full:
        try:
            saver.save(4)
            raise AssertionError("a third failure in a row was taken")
        except WriteError as error:
            assert "kB, and 99 B are free; 3 saves in a row have failed (checkpoint.max_failures)" in _same(str(error))
            assert error.elsewhere == (dist.get_rank() != 0)
    assert left() == 1
    assert saver.save(5) is None
    dist.barrier()
    with full:  # the count has begun anew, and a last save may not fail
        assert saver.save(6) is not None
        try:
            saver.save(7, last=True)
            raise AssertionError("a run ended without its last checkpoint")
        except WriteError as error:
            assert "the run ends without it" in _same(str(error))

    safe_load.refuse_code(folder, safe_load.TRUST)
    found = checkpoint.find(str(folder), folder, identity, trust=False)
    assert found is not None and found.step == 5
    masters = masters_of(engine)
    engine.destroy()
    resumed = engine_of(ds_config(None, **bf16), AwkwardNet(seed=9))
    Saver(resumed, folder, identity, keep=2, max_failures=1, trust=False).load(found)
    for name, master in masters_of(resumed).items():
        assert torch.equal(master, masters[name]), name
    resumed.destroy()
