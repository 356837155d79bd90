"""What the codecs promise of numbers: bounds, exact zeros, NaN, the ends of the range, stochastic rounding."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hzero.codecs.codec import Codec
from hzero.codecs.formats import BLOCK_CODECS
from tests.codecs.samples import (
    FLOATS,
    decode_sum,
    decode_sum_encode,
    make,
    numbers,
    round_trip,
)

LOSSY = ("bf16", *BLOCK_CODECS)
BLOCKED = BLOCK_CODECS


# ---- bounds ---------------------------------------------------------------------------------------------------------


def in_small_blocks(codec: str, rounding: str, rotation: int) -> Codec:
    if codec not in BLOCKED:
        return make(codec)
    return make(codec, rounding=rounding, rotation=rotation, block_size=128 if rotation else 16)


@settings(max_examples=120)
@given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=140),
    dtype=st.sampled_from(FLOATS),
    own=st.builds(
        in_small_blocks,
        codec=st.sampled_from(LOSSY),
        rounding=st.sampled_from(["nearest", "stochastic"]),
        rotation=st.sampled_from([0, 0, 64, 128]),
    ),
    seed=st.integers(0, 2**40),
)
@example(values=[65504.0, -65504.0], dtype=torch.float16, own=make("int8", block_size=16), seed=0)
@example(values=[1.0, -1.0], dtype=torch.float32, own=make("int4", block_size=16), seed=0)
@example(values=[-3e38, 3e38], dtype=torch.float32, own=make("int4", block_size=16), seed=0)
@example(values=[0.0, -65489.0], dtype=torch.float16, own=make("int4", block_size=16, rounding="stochastic"), seed=1911)
@example(values=[178 * 2.0**-133, 2.0**-133], dtype=torch.float32, own=make("int8", block_size=16), seed=0)
def test_bound_holds_anywhere(values: list[float], dtype: torch.dtype, own: Codec, seed: int) -> None:
    top = torch.finfo(dtype).max
    x = torch.tensor(values, dtype=torch.float64).clamp(-top, top).to(dtype)
    span = own.format.block_size or 1
    for target in {dtype, torch.float32}:
        error = (round_trip(own, x, target, seed).double() - x.double()).abs()
        for part, errors in zip(x.split(span), error.split(span)):
            worst, bound = float(errors.max()), own.error_bound(float(part.abs().max()), target)
            # Overflow only where the bound says so, which without a rotation only codec bf16 does.
            assert worst <= bound or (math.isnan(worst) and bound == math.inf), (worst, bound)
            assert math.isfinite(bound) or own.format.codec == "bf16" or own.format.rotation


# ---- signal and noise -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("codec", "low", "high"), [("int8", 43.5, 45), ("int4", 19.3, 21)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_signal_to_noise_at_128(codec: str, low: float, high: float, dtype: torch.dtype) -> None:
    x = numbers("normal", 128 * 500 + 77, dtype, 5)
    noise = round_trip(make(codec), x, torch.float32) - x.float()
    assert low < 10 * math.log10(float(x.float().square().mean() / noise.square().mean())) < high


# ---- the special numbers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", BLOCKED)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_block_that_is_not_finite_decodes_wholly_to_nan(codec: str, bad: float, dtype: torch.dtype) -> None:
    x = numbers("normal", 77, dtype)
    own = make(codec, block_size=32)
    for place, block in ((0, slice(0, 32)), (63, slice(32, 64)), (70, slice(64, 77))):
        broken = x.clone()
        broken[place] = bad
        got, want = round_trip(own, broken), round_trip(own, x)
        assert got[block].isnan().all()
        want[block] = math.nan
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("codec", BLOCKED)
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_largest_numbers_stay_finite(codec: str, dtype: torch.dtype) -> None:
    top = torch.finfo(dtype).max
    x = torch.tensor([top, -top, top / 2, 0, 1], dtype=dtype)
    own = make(codec)
    for target in (dtype, torch.float32):
        got = round_trip(own, x, target)
        assert got.isfinite().all()
        assert float((got.double() - x.double()).abs().max()) <= own.error_bound(top, dtype)


# ---- stochastic rounding --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", BLOCKED)
@pytest.mark.parametrize("rotation", [0, 64])
def test_stochastic_rounding_has_no_bias(codec: str, rotation: int) -> None:
    """Of any element, the largest ones of both signs included."""
    own = make(codec, rounding="stochastic", block_size=64 if rotation else 32, rotation=rotation)
    x = numbers("normal", 512, seed=1)
    x[40:43] = torch.tensor([5.0, -5.0, 5.0])
    x[96:128] *= 1e-3
    trials = 1600
    rows = own.encode([x.repeat(trials)], [512], sizes=[trials], seed=3)
    many = own.decode(rows, [512], dtype=torch.float32)[0].view(trials, 512)
    # An element takes two values, one step of its block apart; rotated back, it is a sum of such elements.
    steps = (many.amax(0) - many.amin(0)).view(-1, own.format.block_size).amax(1, keepdim=True)
    deviation = many.std(0) if rotation else 0.5 * steps.expand(-1, own.format.block_size).reshape(-1)
    bias = (many.mean(0) - x) / deviation * math.sqrt(trials)
    assert float(bias.abs().max()) < 4.5
    assert abs(float(bias.mean())) < 4.5 / math.sqrt(512)


def test_the_noise_is_even_and_differs_by_seed_row_and_column() -> None:
    own = make("int8", rounding="stochastic", block_size=512)
    x = torch.full((8, 8, 512), 0.5 / 128)  # half a step: the code is 0 or 1 with equal chance
    x[..., 0] = 127 / 128

    def coins(seed: int) -> torch.Tensor:
        codes = own.encode([x.view(-1)], [4096], sizes=[8], seed=seed)
        return codes.view(8, -1)[:, :4096].view(torch.int8).view(x.shape)[..., 1:].reshape(8, -1).float() * 2 - 1

    seeds = [0, 1, 2, 2**31, 2**32, 2**40 + 1, -1, -(2**63)]
    draws = torch.cat([coins(seed) for seed in seeds])
    assert set(draws.unique().tolist()) == {-1.0, 1.0}
    together = draws @ draws.T / draws.shape[1]
    limit = 5.5 / math.sqrt(draws.shape[1])
    assert float((together - torch.eye(len(draws))).abs().max()) < limit
    assert float(draws.mean(1).abs().max()) < limit
    for lag in (1, 2, 16, 64):
        assert float((draws[:, lag:] * draws[:, :-lag]).mean(1).abs().max()) < limit


@pytest.mark.parametrize("codec", BLOCKED)
def test_the_same_seed_gives_the_same_codes_whatever_the_pieces(codec: str) -> None:
    """The row counts, not the place of its record: cutting a message into pieces changes no record."""
    own = make(codec, rounding="stochastic", block_size=16)
    source = [torch.randn(6 * 21), torch.randn(6 * 5)]
    want = own.decode(own.encode(source, [21, 5], sizes=[6], seed=7), [21, 5], dtype=torch.float32)
    for outer in (2, 3, 6):
        message = own.encode(source, [21, 5], sizes=[6], outer=outer, seed=7)
        assert torch.equal(message, own.encode(source, [21, 5], sizes=[6], outer=outer, seed=7))
        for got, tensor in zip(own.decode(message, [21, 5], dtype=torch.float32, outer=outer), want):
            assert torch.equal(got, tensor)
    assert not torch.equal(
        own.encode(source, [21, 5], sizes=[6], seed=8), own.encode(source, [21, 5], sizes=[6], seed=7)
    )


# ---- rotation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", [64, 65, 96, 100, 127, 128, 192, 1000])
@pytest.mark.parametrize(("rotation", "block"), [(64, 128), (64, 256), (128, 256), (64, 64)])
def test_a_rotation_costs_nothing_on_numbers_that_are_alike(numel: int, rotation: int, block: int) -> None:
    """Also where a record ends inside a block: rotated elements never share a scale with others."""
    x = numbers("normal", 100 * numel, seed=6).view(100, numel)
    for codec in BLOCKED:

        def noise(own: Codec) -> float:
            (got,) = own.decode(own.encode([x.view(-1)], [numel], sizes=[100]), [numel], dtype=torch.float32)
            return float((got.view(100, numel) - x).square().mean())

        plain = make(codec, block_size=block)
        assert noise(make(codec, block_size=block, rotation=rotation)) < 1.12 * noise(plain)


def test_sums_of_rotated_payloads_stay_rotated_between_hops() -> None:
    """So that no accuracy is lost in between: encoded again with more bits, they decode to the sum of the parts."""
    x = numbers("normal", 900, seed=4).view(3, 300)
    rough, fine = make("int4", rotation=64), make("int8", rotation=64)
    payload = torch.cat([rough.encode([row], [300]) for row in x])
    message = decode_sum_encode(rough, payload, 3, [300], inner=1, dtype=torch.float32, to=fine, outer=1)
    (total,) = fine.decode(message, [300], dtype=torch.float32)
    (want,) = decode_sum(rough, payload, 3, [300], inner=1, dtype=torch.float32)
    assert float((total - want).abs().max()) <= 0.2 * float((x.sum(0) - want).abs().max())
    # The result is that of the sums in the rotated numbers: a rotation back and forth would round them.
    flat = make("int4"), make("int8")
    again = decode_sum_encode(flat[0], payload, 3, [300], inner=1, dtype=torch.float32, to=flat[1], outer=1)
    assert torch.equal(message, again)
