"""Parts of parameters cut anew for another number of ranks, and batches that stay the same, without ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hzero.settings.conf import compose, plain
from hzero.settings.settings import Settings
from hzero.train import checkpoint
from hzero.train.batches import batches_of
from hzero.train.data import Tokens
from hzero.train.reshard import MODEL, OPTIMIZER, Layout, Resharding, cut, part
from hzero.validation import ConfigError

SHAPES = {"embed": (17, 257), "one": (1,), "few": (3,), "square": (8, 8), "odd": (64, 297)}


def _parts(whole: torch.Tensor, world: int) -> list[torch.Tensor]:
    size = -(-whole.numel() // world)
    padded = torch.cat([whole.flatten(), torch.zeros(size * world - whole.numel(), dtype=whole.dtype)])
    return list(padded.split(size))


@pytest.mark.parametrize("old", [1, 2, 3, 8, 31, 384])
@pytest.mark.parametrize("new", [1, 2, 5, 8, 64])
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


def test_a_layout_knows_where_each_part_begins() -> None:
    layout = Layout(4, [{"a": (3,), "b": (2, 5)}, {"c": (8,)}])
    assert layout.counts == {"a": 3, "b": 10, "c": 8}
    assert layout.places == {"a": (0, 0), "b": (0, 1), "c": (1, 0)} and layout.sizes == [1 + 3, 2]
    assert layout == Layout(4, [{"a": (3,), "b": (10,)}, {"c": (8,)}]) and layout != Layout(2, [{"a": (3,)}])
    assert part(10, 4, 3) == (3, 9, 10) and part(3, 8, 7) == (1, 3, 3)


def _written(folder: Path, model: Any, optimizer: Any) -> Resharding:
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
    found = _written(tmp_path, model, {"optimizer_state_dict": zero}).load(OPTIMIZER)["optimizer_state_dict"]
    assert torch.equal(found["fp32_flat_groups"][0], torch.tensor([0.0, 1.0]))
    assert found["optimizer_state_dict"] == {"state": {}, "param_groups": [{"lr": 1.0, "params": [0]}]}
    for bad in ({}, {**model, "param_shapes": [3]}, {**model, "dp_world_size": None}):
        with pytest.raises(ConfigError, match="is no checkpoint of ZeRO-3"):
            _written(tmp_path, bad, {})
    with pytest.raises(ConfigError, match="is no checkpoint of ZeRO-3"):
        _written(tmp_path, model, {"optimizer_state_dict": {}}).load(OPTIMIZER)
    with pytest.raises(ConfigError, match="holds other parameters than the model: b"):
        _written(tmp_path, {**model, "param_shapes": [{"a": (4,), "b": (1,)}]}, {})
    two = {**zero, "optimizer_state_dict": {"state": {}, "param_groups": [{"params": []}, {"params": [0]}]}}
    with pytest.raises(ConfigError, match="a is in group 0 of the optimizer, and was in group 1"):
        _written(tmp_path, model, {"optimizer_state_dict": two}).load(OPTIMIZER)
    (tmp_path / f"bf16_zero_pp_rank_0_mp_rank_00_{OPTIMIZER}").unlink()
    with pytest.raises(ConfigError, match="has 0 files"):
        Resharding(tmp_path, 1, Layout(2, [{"a": (4,)}]), 0, [0], torch.load).load(OPTIMIZER)


def _settings(*overrides: str) -> Settings:
    return Settings(plain(compose(["model.seq_length=16", *overrides])))


def _found(sequences: int | None) -> checkpoint.Checkpoint:
    return checkpoint.Checkpoint(Path("step_4"), 4, checkpoint.Identity("", "", 0, 8, "fp32", sequences), 1, True)


def test_a_step_has_the_same_sequences_on_any_ranks() -> None:
    text = Tokens(train=np.arange(9999, dtype=np.uint16), evaluation=np.arange(99, dtype=np.uint16), key="", source="")
    layouts: tuple[list[str], ...] = ([], ["topology.nodes=1"], ["topology.gcds_per_gpu=1", "train.micro_batch=1"])
    steps = []
    for overrides in layouts:
        settings = checkpoint.with_its_batch(_settings(*overrides), _found(16))
        ranks = [batches_of(text, settings, rank) for rank in range(settings.world_size)]
        micros = range(settings["train"]["grad_accumulation"])
        batch = np.concatenate([one.training(3, micro).inputs["input_ids"] for micro in micros for one in ranks])
        assert ranks[0].tokens(3) == 3 * 16 * 16
        steps.append(batch)
    assert steps[0].shape == (16, 16) and len(np.unique(steps[0][:, 0])) == 16
    assert all(np.array_equal(step, steps[0]) for step in steps)


def test_a_batch_that_no_accumulation_makes_is_refused_with_what_could() -> None:
    given = _settings("topology.nodes=3", "topology.gcds_per_gpu=1")
    message = (
        r"was trained with 24 sequences in a step, which 6 ranks with train.micro_batch=3 cannot do; possible: "
        r"1, 2, 4, 8 ranks; train.micro_batch=1, 2, 4 with 6 ranks"
    )
    with pytest.raises(ConfigError, match=message):
        checkpoint.with_its_batch(
            _settings("topology.nodes=3", "topology.gcds_per_gpu=1", "train.micro_batch=3"), _found(24)
        )
    with pytest.raises(ConfigError, match=r"6 ranks with train\.micro_batch=2 cannot do; possible: other ranks$"):
        checkpoint.with_its_batch(given, _found(7))
    assert checkpoint.with_its_batch(given, _found(None)) is given
    assert checkpoint.with_its_batch(given, _found(36))["train"]["grad_accumulation"] == 3
