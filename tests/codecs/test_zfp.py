"""Codec ``zfp`` against zfpy: the same bytes, the same numbers; what zfp leaves undefined; the stated bound."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hzero.codecs.codec import Codec
from tests.codecs.samples import FLOATS, make, numbers, round_trip, same_bits

RATES = (4, 5, 8, 13, 16, 24)
#: The largest number of a block that is written as zero is below this.
TINY = 2.0**-98
LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 63, 64, 65, 1001)
KINDS = (
    *("normal", "heavy tails", "constant", "zero", "smooth", "subnormal among others"),
    *("tiny range", "one exponent", "huge", "bfloat16"),
)


def codec_of(rate: int) -> Codec:
    return make("zfp", rate=rate)


# ---- zfpy -----------------------------------------------------------------------------------------------------------


def zfpy_bytes(x: torch.Tensor, rate: int) -> bytes:
    zfpy = pytest.importorskip("zfpy", reason="zfpy is not installed")
    return zfpy.compress_numpy(x.numpy(), rate=rate, write_header=False)


def zfpy_numbers(stream: bytes, count: int, rate: int) -> torch.Tensor:
    import zfpy

    kind = zfpy.dtype_to_ztype(np.dtype("float32"))
    return torch.from_numpy(zfpy._decompress(stream, kind, (count,), rate=rate).copy())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rate", RATES)
def test_bytes_and_numbers_are_those_of_zfpy(rate: int, kind: str) -> None:
    for count in LENGTHS:
        x = numbers(kind, count, seed=count)
        message, want = codec_of(rate).encode([x], [count]), zfpy_bytes(x, rate)
        used = -(-(-(-count // 4) * rate) // 2)
        assert message.numel() == -(-used // 16) * 16  # zfpy pads to 8 bytes
        assert bytes(message.tolist())[:used] == want[:used] and not any(want[used:]) and not message[used:].any()
        got = codec_of(rate).decode(message, [count], dtype=torch.float32)[0]
        assert same_bits(got, zfpy_numbers(want, count, rate)), count


@settings(max_examples=60)
@given(data=st.binary(min_size=48, max_size=48), rate=st.integers(4, 24))
def test_any_stream_is_decoded_as_zfpy_does(data: bytes, rate: int) -> None:
    """But for the head that only this codec writes, one of a block that is lost."""
    pytest.importorskip("zfpy", reason="zfpy is not installed")
    count = 4 * (96 // rate)
    record = codec_of(rate).message_bytes([count], 1, 4)
    stream = data[: count * rate // 8]
    got = codec_of(rate).decode(
        torch.frombuffer(bytearray(stream.ljust(record, b"\0")), dtype=torch.uint8), [count], dtype=torch.float32
    )[0]
    want = zfpy_numbers(stream.ljust(64, b"\0"), count, rate)
    lost = got.isnan()
    assert same_bits(got[~lost], want[~lost])
    bits = int.from_bytes(stream, "little")
    heads = [bits >> (4 * rate * block) & 511 for block in range(count // 4)]
    assert lost.view(-1, 4).all(1).tolist() == [head == 1 for head in heads] == lost.view(-1, 4).any(1).tolist()


# ---- what zfp leaves open -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_block_that_is_not_finite_decodes_to_nan(bad: float) -> None:
    for rate, place in ((4, 5), (9, 17), (24, 20)):
        x = numbers("normal", 21)
        clean = round_trip(codec_of(rate), x)
        x[place] = bad
        got, first = round_trip(codec_of(rate), x), place // 4 * 4
        assert got[first : first + 4].isnan().all() and got.isnan().sum() == min(21 - first, 4)
        kept = ~got.isnan()
        assert torch.equal(got[kept], clean[kept])


def test_a_block_of_tiny_numbers_decodes_to_zero() -> None:
    """zfp's conversion of them to integers overflows, which C leaves undefined."""
    below, limit = np.nextafter(np.float32(TINY), np.float32(0)), TINY
    for rate in RATES:
        for tiny in (1e-45, 1e-40, float(below)):
            assert not codec_of(rate).encode([torch.tensor([tiny, -tiny, 0.0, tiny])], [4]).any()
        x = torch.tensor([limit, limit, limit, limit])
        assert codec_of(rate).encode([x], [4]).any()
    assert torch.equal(round_trip(codec_of(24), x), x)


# ---- bounds ---------------------------------------------------------------------------------------------------------


@settings(max_examples=200)
@given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=4, max_size=4),
    rate=st.integers(4, 24),
    dtype=st.sampled_from(FLOATS),
)
def test_errors_stay_in_the_stated_bound(values: list[float], rate: int, dtype: torch.dtype) -> None:
    x = torch.tensor(values)
    if dtype != torch.float32:
        x = x.to(dtype).nan_to_num(0.0, 0.0, 0.0)
    bound = codec_of(rate).error_bound(float(x.abs().max()), dtype)
    got = round_trip(codec_of(rate), x)
    if math.isfinite(bound):
        assert float((got.double() - x.double()).abs().max()) <= bound


def test_a_bit_more_halves_the_error_and_block_integers_lose_less() -> None:
    """Signal-to-noise ratios on normal numbers, as hzero/codecs/zfp.py states them."""
    x = numbers("normal", 1 << 16)

    def ratio(got: torch.Tensor) -> float:
        return float(10 * (x.double().square().sum() / (got - x).double().square().sum()).log10())

    ratios = {rate: ratio(round_trip(codec_of(rate), x)) for rate in (8, 9, 12, 16)}
    blocks = ratio(round_trip(make("int8"), x))
    assert 24 < ratios[8] < 27 and 4 < ratios[9] - ratios[8] < 8 and 22 < ratios[12] - ratios[8] < 26, ratios
    assert blocks > ratios[8] + 15 and ratios[12] > blocks, (blocks, ratios)
