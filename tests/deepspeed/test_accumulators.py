"""Gradient accumulators without ranks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hzero.engine.gradients import Accumulators

FINITE = st.floats(allow_nan=False, allow_infinity=False, width=32, min_value=-(2.0**100), max_value=2.0**100)


@given(st.lists(FINITE, min_size=1, max_size=9), st.integers(0, 2**31))
def test_a_rounded_sum_is_one_of_its_two_neighbours(values: list[float], seed: int) -> None:
    total = torch.tensor(values)
    kept = Accumulators(torch.bfloat16)
    kept.add([7], [total.clone()], seed)
    assert kept.bytes == 2 * len(values) and 7 in kept and len(kept) == 1
    (got,) = kept.take([7])
    below = (total.view(torch.int32) & (-1 << 16)).view(torch.float32)  # towards zero
    above = ((total.view(torch.int32) & (-1 << 16)) + (1 << 16)).view(torch.float32)
    assert got.dtype == torch.float32
    assert bool(((got == below) | ((got == above) & (total != below))).all())
    assert not kept.bytes and not len(kept)


def test_what_bfloat16_holds_and_what_is_not_finite_stays() -> None:
    value = torch.tensor([0.0, -0.0, 1.5, -3.0e38, math.inf, -math.inf, math.nan, 2.0**-133])
    kept = Accumulators(torch.bfloat16)
    for seed in range(20):
        kept.add([0], [value.clone()], seed)
        (got,) = kept.take([0])
        torch.testing.assert_close(got[4:], value[4:], rtol=0, atol=0, equal_nan=True)
        assert torch.equal(got[:3].view(torch.int32), value[:3].view(torch.int32))
        assert abs(got[3] / value[3] - 1) < 2**-7


def test_small_parts_are_not_swallowed_by_a_large_sum() -> None:
    """To nearest, 64 parts of a thousandth of the sum would vanish one after the other."""
    numel, parts = 20_000, 64
    kept = Accumulators(torch.bfloat16)
    kept.add([0], [torch.ones(numel)], 0)
    for seed in range(1, parts):
        kept.add([0], [torch.full((numel,), 1e-3)], seed)
    (got,) = kept.take([0], [torch.full((numel,), 1e-3)])
    # The mean of that many elements errs by some thousandths of a unit in the last place.
    assert float(got.double().mean()) == pytest.approx(1 + parts * 1e-3, abs=1e-3)
    assert float((got - 1 - parts * 1e-3).abs().max()) < parts * 2**-7
