"""What a script sees between and inside steps is what stock ZeRO-3 shows it, or better: one launch for all of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.faults.launch import run

#: Relative difference from stock; int8 weights and int4 gradients of so small a model.
TOLERANCE = {"lossless": 1e-5, "topo": 0.1}
#: Presets whose forward reads resident weights as they are, or primary shards, instead of payloads.
WHOLE = ("replica", "zero3")
PRESETS = pytest.mark.parametrize("preset", list(TOLERANCE))


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    more = [f"{preset}:inference_mode" for preset in WHOLE]
    text = run("between_steps.py", "stock", *TOLERANCE, *more, folder=tmp_path_factory.mktemp("between"), ranks=2)
    lines = [json.loads(line) for line in text.splitlines() if line.startswith('{"preset"')]
    return {(line.pop("preset"), line.pop("trial")): line for line in lines}


def near(got: list[float], want: list[float], tolerance: float) -> None:
    assert got == pytest.approx(want, rel=tolerance, abs=tolerance / 100)


@PRESETS
def test_a_frozen_parameter_gets_a_zero_gradient(seen: Any, preset: str) -> None:
    """With and without offload, as stock without offload: stock with offload applies the last gradient for ever."""
    for accumulation in (1, 3):
        want = seen["stock", "freeze"][f"{accumulation} False"]
        for offload in (False, True):
            near(seen[preset, "freeze"][f"{accumulation} {offload}"], want, TOLERANCE[preset])


@PRESETS
def test_a_gradient_from_before_the_freezing_counts(seen: Any, preset: str) -> None:
    """As in torch, whose optimizers apply it; stock drops it without offload."""
    found = seen[preset, "freeze_inside_a_window"]
    near(found["False"], found["True"], 1e-5)
    near(found["True"], seen["lossless", "freeze_inside_a_window"]["True"], 10 * TOLERANCE[preset])


@PRESETS
def test_parameters_kept_whole_are_there_between_steps(seen: Any, preset: str) -> None:
    for kept, want in seen["stock", "kept_whole"].items():
        found = seen[preset, "kept_whole"][kept]
        for got, values in zip(found["read"], want["read"], strict=True):
            assert all(values)
            near(got, values, TOLERANCE[preset])
        near(found["losses"], want["losses"], TOLERANCE[preset])
        assert found["off"] == 0 or preset == "topo"  # decoded, as forward reads them, and never written back


@PRESETS
def test_the_guard_knows_what_the_optimizer_holds(seen: Any, preset: str) -> None:
    found, want = seen[preset, "optimizer_of_a_part"], seen["stock", "optimizer_of_a_part"]
    near(found["losses"], want["losses"], TOLERANCE[preset])
    assert not want["message"]  # stock drops the steps in silence
    assert found["message"].startswith("DivergenceError: ")
    assert "Not finite in the gradients of 2 of 2 parameters: 4.weight, 4.bias" in found["message"]


@PRESETS
def test_zero_grad_after_an_exception_in_backward_begins_anew(seen: Any, preset: str) -> None:
    found = seen[preset, "cut_short"]
    pairs = [(found[key.replace("False", "True")], found[key]) for key in found if key.endswith("False")]
    assert len(pairs) == (4 if preset == "lossless" else 2)
    for got, want in pairs:
        near(got, want, 1e-6 if preset == "lossless" else TOLERANCE[preset])
    near(
        found["1 100000000 optimizer False"],
        seen["stock", "cut_short"]["1 100000000 optimizer False"],
        TOLERANCE[preset],
    )


@pytest.mark.parametrize("preset", [*TOLERANCE, *WHOLE])
def test_evaluations_in_inference_mode_change_nothing(seen: Any, preset: str) -> None:
    (want,) = seen["stock", "inference_mode"].values()
    found = seen[preset, "inference_mode"]
    assert len(found) == 4
    for losses in found.values():
        near(losses, want, TOLERANCE.get(preset, 0.1))
