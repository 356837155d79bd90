"""Parts of parameters cut again for another number of ranks, and files that run no code, without ranks."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum

from hzero.deepspeed.resharding import cut
from hzero.deepspeed.safe_loading import load, only_tensors
from hzero.errors import ConfigError
from tests.deepspeed.checkpoint_checks import Planted

SHAPES = [(17, 257), (1,), (3,), (8, 8), (64, 297)]


def _parts(whole: torch.Tensor, world: int) -> list[torch.Tensor]:
    size = -(-whole.numel() // world)
    padded = torch.cat([whole.flatten(), torch.zeros(size * world - whole.numel(), dtype=whole.dtype)])
    return list(padded.split(size))


@pytest.mark.parametrize("old", [1, 3, 8, 31, 384])
@pytest.mark.parametrize("new", [1, 2, 5, 64])
def test_every_part_is_that_of_the_whole_and_few_files_are_read(old: int, new: int) -> None:
    for shape in SHAPES:
        whole = torch.arange(1, 1 + math.prod(shape), dtype=torch.float32)
        parts, expected = _parts(whole, old), _parts(whole, new)
        for rank in range(new):
            read: list[int] = []

            def source(other: int, parts: list[torch.Tensor] = parts, read: list[int] = read) -> torch.Tensor:
                read.append(other)
                return parts[other]

            got = torch.zeros_like(expected[rank])
            cut(got, len(whole), old, new, rank, source)
            assert torch.equal(got, expected[rank]), (shape, rank)
            if len(whole) > 100 * old * new:
                assert len(set(read)) <= -(-old // new) + 1


def test_members_of_an_enumeration_load_as_each_python_pickles_them(tmp_path: Path) -> None:
    class By:
        def __init__(self, *of: Any) -> None:
            self.of = of

        def __reduce__(self) -> Any:  # Python 3.11.2, of Debian 12, and others
            return getattr, self.of

    path = str(tmp_path / "a.pt")
    for of in ((ZeroStageEnum, "weights"), (ZeroStageEnum, "mro")):
        torch.save(By(*of), path)
        if of[1] == "weights":
            assert load(path, None, trust=False) is ZeroStageEnum.weights
        else:
            with pytest.raises(ConfigError, match="needs getattr"):
                load(path, None, trust=False)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_planted_file_runs_nothing_and_is_refused_by_name(tmp_path: Path, zipped: bool) -> None:
    made, path = tmp_path / "made", tmp_path / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    planted = {"optimizer_state_dict": torch.ones(3), "more": Planted(made)}
    torch.save(planted, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(
        ConfigError, match=rf"{path.name}' needs (posix|os)\.system.*\"checkpoint\": .*loads it, if you trust"
    ):
        load(str(path), None, trust=False)
    with pytest.raises(ConfigError, match=r"the checkpoint needs (posix|os)\.system"), only_tensors(trust=False):
        torch.load(path, weights_only=False)  # as in DeepSpeed's zero_to_fp32
    assert not made.exists()
    load(str(path), None, trust=True)
    assert made.exists()


@pytest.mark.filterwarnings("ignore:.*TorchScript")
def test_what_is_no_file_of_torch_is_one_line(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(999)}, tmp_path / "cut")
    os.truncate(tmp_path / "cut", 2000)
    torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), str(tmp_path / "script"))
    (tmp_path / "text").write_text("no pickle")
    (tmp_path / "empty").touch()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("text")
    names = dict.fromkeys(("cut", "script", "empty", "text"), r"' cannot be loaded as tensors: \w")
    for name, says in {
        **names,
        "pipe": "' cannot be read: not a regular file",
        "link": "' cannot be read: a symbolic link",
        "none": "' cannot be read: no such file or directory; a run with another dtype has other names",
    }.items():
        with pytest.raises(ConfigError, match=name + says) as error:
            load(str(tmp_path / name), None, trust=False)
        assert len(str(error.value)) < len(str(tmp_path)) + 250


def test_the_loss_scalers_of_deepspeed_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed trains in float16 on accelerators only, so its state is made here by hand."""
    from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum

    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    arguments = {"init_scale": 2**16, "scale_window": 9, "min_scale": 1, "delayed_shift": 2}
    for dynamic in (True, False):
        scaler = CreateLossScaler(torch.float16, 128.0, dynamic, {**arguments, "consecutive_hysteresis": False})
        state = {"loss_scaler": scaler, "zero_stage": ZeroStageEnum.weights, "shapes": [{"w": torch.Size([3])}]}
        torch.save(state, tmp_path / "state.pt")
        with only_tensors(trust=False):  # inside another, as where DeepSpeed loads
            found = load(str(tmp_path / "state.pt"), "cpu", trust=False)
            again = torch.load(tmp_path / "state.pt", weights_only=False)
        assert type(found["loss_scaler"]) is type(scaler) and vars(again["loss_scaler"]) == vars(scaler)
        assert found["zero_stage"] is ZeroStageEnum.weights
    assert os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] == "1" and "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ
