"""What the codecs promise of numbers: bounds, exact zeros, NaN, the ends of the range, stochastic rounding."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hzero.codecs import Codec
from hzero.config import CodecConfig

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LOSSY = ("bf16", "int8", "int4")
BLOCKED = ("int8", "int4")


def make(codec: str, **settings: Any) -> Codec:
    return Codec.from_config(CodecConfig(codec=codec, **settings))


def round_trip(codec: Codec, x: torch.Tensor, dtype: torch.dtype | None = None, seed: int = 0) -> torch.Tensor:
    return codec.decode(codec.encode([x], [x.numel()], seed=seed), [x.numel()], dtype=dtype or x.dtype)[0]


# ---- bounds ---------------------------------------------------------------------------------------------------------


def in_small_blocks(codec: str, scale: str, rounding: str) -> Codec:
    if scale == "int8" and codec in BLOCKED:
        return make(codec, scale=scale, rounding=rounding, block_size=32)
    return make(codec, scale="bf16" if scale == "int8" else scale, rounding=rounding, block_size=16)


def assert_within_bound(codec: Codec, x: torch.Tensor, seed: int = 0) -> None:
    for dtype in {x.dtype, torch.float32}:
        error = (round_trip(codec, x, dtype, seed).double() - x.double()).abs()
        span = 1 if codec.name not in BLOCKED else 512 if codec.scale == "int8" else codec.block_size
        for values, errors in zip(x.split(span), error.split(span)):
            bound = codec.error_bound(float(values.abs().max()), dtype)
            # Only codec bf16 may overflow, and says so.
            worst = float(errors.max())
            assert (worst <= bound) if math.isfinite(worst) else (codec.name == "bf16"), (worst, bound)
            if not math.isfinite(worst):
                assert codec.error_bound(float(values.abs().max()), x.dtype) == math.inf


@settings(max_examples=100)
@given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40),
    dtype=st.sampled_from(FLOATS),
    codec=st.sampled_from(LOSSY),
    scale=st.sampled_from(["bf16", "fp32", "int8"]),
    rounding=st.sampled_from(["nearest", "stochastic"]),
    seed=st.integers(0, 2**40),
)
@example(values=[65504.0, -65504.0], dtype=torch.float16, codec="int8", scale="bf16", rounding="nearest", seed=0)
@example(values=[1.0, -1.0], dtype=torch.float32, codec="int4", scale="bf16", rounding="nearest", seed=0)
@example(
    values=[178 * 2.0**-133, 2.0**-133], dtype=torch.float32, codec="int8", scale="bf16", rounding="nearest", seed=0
)
def test_bound_holds_anywhere(
    values: list[float], dtype: torch.dtype, codec: str, scale: str, rounding: str, seed: int
) -> None:
    x = torch.tensor(values, dtype=torch.float64).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
    assert_within_bound(in_small_blocks(codec, scale, rounding), x, seed)


# ---- signal and noise -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("codec", "low", "high"), [("int8", 43.5, 45), ("int4", 19.3, 21)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_signal_to_noise_at_128(codec: str, low: float, high: float, dtype: torch.dtype) -> None:
    x = torch.randn(128 * 500 + 77, generator=torch.Generator().manual_seed(5)).to(dtype)
    noise = round_trip(make(codec), x, torch.float32) - x.float()
    assert low < 10 * math.log10(float(x.float().square().mean() / noise.square().mean())) < high


# ---- the special numbers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", BLOCKED)
@pytest.mark.parametrize("scale", ["bf16", "fp32"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_block_that_is_not_finite_decodes_wholly_to_nan(
    codec: str, scale: str, bad: float, dtype: torch.dtype
) -> None:
    x = torch.randn(77, generator=torch.Generator().manual_seed(0)).to(dtype)
    own = make(codec, scale=scale, block_size=32)
    for place, block in ((0, slice(0, 32)), (63, slice(32, 64)), (70, slice(64, 77))):
        broken = x.clone()
        broken[place] = bad
        got, want = round_trip(own, broken), round_trip(own, x)
        assert got[block].isnan().all()
        want[block] = math.nan
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("codec", BLOCKED)
@pytest.mark.parametrize("scale", ["bf16", "fp32", "int8"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_largest_numbers_stay_finite(codec: str, scale: str, dtype: torch.dtype) -> None:
    top = torch.finfo(dtype).max
    x = torch.tensor([top, -top, top / 2, 0, 1], dtype=dtype)
    own = make(codec, scale=scale)
    for target in (dtype, torch.float32):
        got = round_trip(own, x, target)
        assert got.isfinite().all()
        assert float((got.double() - x.double()).abs().max()) <= own.error_bound(top, dtype)


# ---- int4's sign ----------------------------------------------------------------------------------------------------


# ---- stochastic rounding --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", BLOCKED)
def test_stochastic_rounding_has_no_bias(codec: str) -> None:
    own = make(codec, rounding="stochastic", scale="fp32", block_size=16)
    x = torch.randn(160, generator=torch.Generator().manual_seed(1))
    trials = 1600
    many = torch.stack([round_trip(own, x, seed=seed) for seed in range(trials)])
    level = 127 if codec == "int8" else 8
    extremes = x.view(-1, 16).abs().amax(1, keepdim=True)
    step = (extremes / level).expand(-1, 16).reshape(-1)
    signed = x.view(-1, 16).gather(1, x.view(-1, 16).abs().argmax(1, keepdim=True)).expand(-1, 16).reshape(-1)
    clamped = (x / signed < -7 / 8) if codec == "int4" else torch.zeros(160, dtype=torch.bool)
    bias = (many.mean(0) - x) / step
    deviation = 0.5 / math.sqrt(trials)  # of a mean of numbers that are one step apart at most
    assert float(bias[~clamped].abs().max()) < 4.5 * deviation
    assert abs(float(bias[~clamped].mean())) < 4.5 * deviation / math.sqrt(100)


def test_the_noise_is_even_and_differs_by_seed_row_and_column() -> None:
    own = make("int8", rounding="stochastic", scale="fp32", block_size=4096)
    x = torch.full((8, 4096), 0.5 / 127)  # half a step: the code is 0 or 1 with equal chance
    x[:, 0] = 1.0

    def coins(seed: int) -> torch.Tensor:
        codes = own.encode([x.view(-1)], [4096], sizes=[8], seed=seed)
        return codes.view(8, -1)[:, 1:4096].view(torch.int8).float() * 2 - 1

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
    """The row counts, not where its record stands: cutting a message into pieces changes no record."""
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


@settings(max_examples=60)
@given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=64, max_size=140),
    dtype=st.sampled_from(FLOATS),
    codec=st.sampled_from(BLOCKED),
    rotation=st.sampled_from([64, 128]),
    rounding=st.sampled_from(["nearest", "stochastic"]),
)
def test_bound_holds_where_elements_are_rotated(
    values: list[float], dtype: torch.dtype, codec: str, rotation: int, rounding: str
) -> None:
    top = torch.finfo(dtype).max
    x = torch.tensor(values, dtype=torch.float64).clamp(-top, top).to(dtype)
    own = make(codec, rotation=rotation, rounding=rounding, block_size=128)
    error = (round_trip(own, x, torch.float32).double() - x.double()).abs()
    for part, errors in zip(x.split(128), error.split(128)):
        bound = own.error_bound(float(part.abs().max()), torch.float32)
        assert float(errors.max()) <= bound, bound


@pytest.mark.parametrize("numel", [64, 65, 96, 100, 127, 128, 192, 1000])
@pytest.mark.parametrize(("rotation", "block"), [(64, 128), (64, 256), (128, 256), (64, 64)])
@pytest.mark.parametrize("scale", ["bf16", "int8"])
def test_a_rotation_costs_nothing_on_numbers_that_are_alike(numel: int, rotation: int, block: int, scale: str) -> None:
    """Also where a record ends inside a block: rotated elements never share a scale with others."""
    x = torch.randn(100, numel, generator=torch.Generator().manual_seed(6))
    for codec in BLOCKED:

        def noise(own: Codec) -> float:
            return sum(float((round_trip(own, row) - row).square().mean()) for row in x)

        plain = make(codec, block_size=block, scale=scale)
        most = 1.3 if (scale, codec) == ("int8", "int8") else 1.12  # blocks of both kinds may share a factor of scales
        assert noise(make(codec, block_size=block, scale=scale, rotation=rotation)) < most * noise(plain)


def test_sums_of_rotated_payloads_stay_rotated_between_hops() -> None:
    """So that no accuracy is lost in between: encoded again with finer scales, they decode to the sum of the parts."""
    x = torch.randn(3, 300, generator=torch.Generator().manual_seed(4))
    rough, fine = make("int4", rotation=64), make("int8", rotation=64, scale="fp32")
    payload = torch.cat([rough.encode([row], [300]) for row in x])
    message = rough.decode_sum_encode(payload, 3, [300], inner=1, dtype=torch.float32, to=fine, outer=1)
    (total,) = fine.decode(message, [300], dtype=torch.float32)
    (want,) = rough.decode_sum(payload, 3, [300], inner=1, dtype=torch.float32)
    assert float((total - want).abs().max()) <= 0.2 * float((x.sum(0) - want).abs().max())
    # The result is that of the sums in the rotated numbers: a rotation back and forth would round them.
    flat = make("int4"), make("int8", scale="fp32")
    again = flat[0].decode_sum_encode(payload, 3, [300], inner=1, dtype=torch.float32, to=flat[1], outer=1)
    assert torch.equal(message, again)


def test_a_difference_is_rounded_once_where_it_is_added() -> None:
    generator = torch.Generator().manual_seed(5)
    base = torch.randn(200, generator=generator).bfloat16()
    new = (base.float() * 1.001 + 0.01).bfloat16()
    for own in (make("int4"), make("int8", rotation=128), make("bf16"), make("none")):
        message = own.encode_difference([new], [base], [100])
        copy = base.clone()
        own.decode_onto(message, [copy], [100], sizes=[2])
        exact = new.float() - base.float()
        meant = exact.bfloat16() if own.name == "none" else exact
        assert torch.equal(message, own.encode([meant], [100]))
        (added,) = own.decode(message, [100], dtype=meant.dtype)
        assert torch.equal(copy, (base.float() + added.float()).bfloat16())
