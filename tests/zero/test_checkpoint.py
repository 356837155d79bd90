"""Parts of parameters cut anew for another number of ranks, and files that run no code, without ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hzero.manifest import Manifest
from hzero.validation import ConfigError
from hzero.zero import safe_load
from hzero.zero.checkpoint import accumulation_for
from hzero.zero.reshard import MODEL, OPTIMIZER, Layout, Resharding, cut, part

SHAPES = {"embed": (17, 257), "one": (1,), "few": (3,), "square": (8, 8), "odd": (64, 297)}


def _parts(whole: torch.Tensor, world: int) -> list[torch.Tensor]:
    size = -(-whole.numel() // world)
    padded = torch.cat([whole.flatten(), torch.zeros(size * world - whole.numel(), dtype=whole.dtype)])
    return list(padded.split(size))


@pytest.mark.parametrize("old", [1, 3, 8, 31, 384])
@pytest.mark.parametrize("new", [1, 2, 5, 64])
def test_every_part_is_that_of_the_whole_and_few_files_are_read(old: int, new: int) -> None:
    for shape in SHAPES.values():
        whole = torch.arange(1, 1 + int(np.prod(shape)), dtype=torch.float32)
        parts, expected = _parts(whole, old), _parts(whole, new)
        for rank in range(new):
            read: list[int] = []

            def source(other: int, parts: list[torch.Tensor] = parts, read: list[int] = read) -> torch.Tensor:
                read.append(other)
                return parts[other]

            got = cut(len(whole), old, new, rank, source)
            assert torch.equal(got, expected[rank]), (shape, rank)
            if len(whole) > 100 * old * new:
                assert len(set(read)) <= -(-old // new) + 1


def test_a_layout_has_the_place_of_each_part() -> None:
    layout = Layout(4, [{"a": (3,), "b": (2, 5)}, {"c": (8,)}])
    assert layout.counts == {"a": 3, "b": 10, "c": 8}
    assert layout.places == {"a": (0, 0), "b": (0, 1), "c": (1, 0)} and layout.sizes == [1 + 3, 2]
    assert layout == Layout(4, [{"a": (3,), "b": (10,)}, {"c": (8,)}]) and layout != Layout(2, [{"a": (3,)}])
    assert part(10, 4, 3) == (3, 9, 10) and part(3, 8, 7) == (1, 3, 3)


def _resharding(folder: Path, model: Any, optimizer: Any) -> Resharding:
    torch.save(model, folder / f"zero_pp_rank_0_mp_rank_00_{MODEL}")
    torch.save(optimizer, folder / f"bf16_zero_pp_rank_0_mp_rank_00_{OPTIMIZER}")
    layout = Layout(2, [{"a": (4,)}])
    return Resharding(folder, 1, layout, 0, [0], lambda path, mmap: torch.load(path, mmap=mmap))


def test_what_no_run_of_zero3_has_written_is_refused(tmp_path: Path) -> None:
    model = {"dp_world_size": 1, "param_shapes": [{"a": (4,)}], "module": {}}
    zero = {
        "fp32_flat_groups": [torch.arange(4.0)],
        "optimizer_state_dict": {"state": {}, "param_groups": [{"lr": 1.0, "params": [0]}]},
    }
    found = _resharding(tmp_path, model, {"optimizer_state_dict": zero}).load(OPTIMIZER)["optimizer_state_dict"]
    assert torch.equal(found["fp32_flat_groups"][0], torch.tensor([0.0, 1.0]))
    assert found["optimizer_state_dict"] == {"state": {}, "param_groups": [{"lr": 1.0, "params": [0]}]}
    for bad in ({}, {**model, "param_shapes": [3]}, {**model, "dp_world_size": None}):
        with pytest.raises(ConfigError, match="is no checkpoint of ZeRO-3"):
            _resharding(tmp_path, bad, {})
    with pytest.raises(ConfigError, match="is no checkpoint of ZeRO-3"):
        _resharding(tmp_path, model, {"optimizer_state_dict": {}}).load(OPTIMIZER)
    with pytest.raises(ConfigError, match="holds other parameters than the model: b"):
        _resharding(tmp_path, {**model, "param_shapes": [{"a": (4,), "b": (1,)}]}, {})
    two = {**zero, "optimizer_state_dict": {"state": {}, "param_groups": [{"params": []}, {"params": [0]}]}}
    with pytest.raises(ConfigError, match="a is in group 0 of the optimizer, and was in group 1"):
        _resharding(tmp_path, model, {"optimizer_state_dict": two}).load(OPTIMIZER)


def test_a_batch_that_no_accumulation_makes_is_refused_with_what_could() -> None:
    def manifest(batch: int) -> Manifest:
        return Manifest(Path("step"), 4, 8, batch, 0.0, {})

    assert accumulation_for(manifest(36), 12, 2) == 3
    with pytest.raises(
        ConfigError, match=r"expected 1, 2, 4, 8 ranks with micro-batches of 3 or micro-batches of 1, 2, 4 with 6"
    ):
        accumulation_for(manifest(24), 18, 3)
    with pytest.raises(
        ConfigError, match=r"a multiple of 12; expected other ranks, or hzero\.checkpoint\.same_batch false$"
    ):
        accumulation_for(manifest(7), 12, 2)


class _Command:
    """Runs a command where a pickle of it is loaded."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> Any:
        return os.system, (f"touch '{self.made}'",)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_planted_file_runs_nothing_and_is_refused_by_name(tmp_path: Path, zipped: bool) -> None:
    made, path = tmp_path / "made", tmp_path / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    planted = {"optimizer_state_dict": torch.ones(3), "more": _Command(made)}
    torch.save(planted, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(
        ConfigError, match=rf"{path.name}' needs (posix|os)\.system.*\"checkpoint\": .*loads it all the same"
    ):
        safe_load.load(str(path), None, trust=False)
    with (
        pytest.raises(ConfigError, match=r"the checkpoint needs (posix|os)\.system"),
        safe_load.only_tensors(trust=False),
    ):
        torch.load(path, weights_only=False)  # as in DeepSpeed's zero_to_fp32
    assert not made.exists()
    safe_load.load(str(path), None, trust=True)
    assert made.exists()


@pytest.mark.filterwarnings("ignore:.*TorchScript")
def test_what_is_no_file_of_torch_is_one_line(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(999)}, tmp_path / "cut")
    os.truncate(tmp_path / "cut", 2000)
    torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), str(tmp_path / "script"))
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("no pickle")
    for name in ("cut", "script", "empty", "text"):
        with pytest.raises(ConfigError, match=rf"{name}' cannot be loaded as tensors: \w") as error:
            safe_load.load(str(tmp_path / name), None, trust=False)
        assert len(str(error.value)) < len(str(tmp_path)) + 250
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("folder", "pipe", "none"):
        with pytest.raises(ConfigError, match=f"{name}' is no regular file"):
            safe_load.load(str(tmp_path / name), None, trust=False)


def test_the_loss_scalers_of_deepspeed_load(tmp_path: Path) -> None:
    """DeepSpeed trains in float16 on accelerators only, so its state is made here by hand."""
    from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum

    arguments = {"init_scale": 2**16, "scale_window": 9, "min_scale": 1, "delayed_shift": 2}
    for dynamic in (True, False):
        scaler = CreateLossScaler(torch.float16, 128.0, dynamic, {**arguments, "consecutive_hysteresis": False})
        state = {"loss_scaler": scaler, "zero_stage": ZeroStageEnum.weights, "shapes": [{"w": torch.Size([3])}]}
        torch.save(state, tmp_path / "state.pt")
        with safe_load.only_tensors(trust=False):  # inside another, as where DeepSpeed loads
            found = safe_load.load(str(tmp_path / "state.pt"), "cpu", trust=False)
            again = safe_load.load(str(tmp_path / "state.pt"), "cpu", trust=False)
        assert type(found["loss_scaler"]) is type(scaler) and vars(again["loss_scaler"]) == vars(scaler)
        assert found["zero_stage"] is ZeroStageEnum.weights
