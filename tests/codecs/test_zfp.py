"""Codec ``zfp`` against zfpy: the same bytes, the same numbers; what zfp leaves undefined; the stated bound."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hzero.codecs import Codec
from hzero.config import CodecConfig

RATES = (4, 5, 8, 13, 16, 24)
#: The largest number of a block that is written as zero is below this.
TINY = 2.0**-98
LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 63, 64, 65, 1001)


def codec_of(rate: int) -> Codec:
    return Codec.from_config(CodecConfig(codec="zfp", rate=rate))


def _normal(count: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(count, generator=generator)


KINDS: dict[str, Callable[[int, torch.Generator], torch.Tensor]] = {
    "normal": _normal,
    "heavy tails": lambda n, g: _normal(n, g) / (torch.rand(n, generator=g) + 1e-6) ** 2,
    "constant": lambda n, g: torch.full((n,), 0.3),
    "zero": lambda n, g: torch.zeros(n),
    "smooth": lambda n, g: torch.linspace(-1, 1, n).sin(),
    "subnormal among others": lambda n, g: _normal(n, g) * torch.tensor([1.0, 1e-42])[torch.arange(n) % 2],
    "tiny range": lambda n, g: _normal(n, g) * 2.0**-90,
    "one exponent": lambda n, g: 1 + torch.rand(n, generator=g),
    "huge": lambda n, g: (_normal(n, g) * 1e38).clamp(-3.4e38, 3.4e38),
    "bfloat16": lambda n, g: _normal(n, g).bfloat16().float(),
}


def numbers(kind: str, count: int, seed: int = 0) -> torch.Tensor:
    return KINDS[kind](count, torch.Generator().manual_seed(seed))


def round_trip(x: torch.Tensor, rate: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    own = codec_of(rate)
    return own.decode(own.encode([x], [x.numel()]), [x.numel()], dtype=dtype)[0]


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
        x = numbers(kind, count, count)
        message, want = codec_of(rate).encode([x], [count]), zfpy_bytes(x, rate)
        used = -(-(-(-count // 4) * rate) // 2)
        assert message.numel() == -(-used // 16) * 16  # zfpy pads to 8 bytes
        assert bytes(message.tolist())[:used] == want[:used] and not any(want[used:]) and not message[used:].any()
        got = codec_of(rate).decode(message, [count], dtype=torch.float32)[0]
        assert torch.equal(got.view(torch.int32), zfpy_numbers(want, count, rate).view(torch.int32)), count


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
    assert torch.equal(got[~lost].view(torch.int32), want[~lost].view(torch.int32))
    bits = int.from_bytes(stream, "little")
    heads = [bits >> (4 * rate * block) & 511 for block in range(count // 4)]
    assert lost.view(-1, 4).all(1).tolist() == [head == 1 for head in heads] == lost.view(-1, 4).any(1).tolist()


# ---- what zfp leaves open -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_block_that_is_not_finite_decodes_to_nan(bad: float) -> None:
    for rate, place in ((4, 5), (9, 17), (24, 20)):
        x = numbers("normal", 21)
        clean = round_trip(x, rate)
        x[place] = bad
        got, first = round_trip(x, rate), place // 4 * 4
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
    assert torch.equal(round_trip(x, 24), x)


# ---- bounds ---------------------------------------------------------------------------------------------------------


@settings(max_examples=200)
@given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=4, max_size=4),
    rate=st.integers(4, 24),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_errors_stay_in_the_stated_bound(values: list[float], rate: int, dtype: torch.dtype) -> None:
    x = torch.tensor(values)
    if dtype != torch.float32:
        x = x.to(dtype).nan_to_num(0.0, 0.0, 0.0)
    bound = codec_of(rate).error_bound(float(x.abs().max()), dtype)
    got = round_trip(x, rate, dtype)
    if math.isfinite(bound):
        assert float((got.double() - x.double()).abs().max()) <= bound


def test_a_bit_more_halves_the_error_and_block_integers_lose_less() -> None:
    """Signal-to-noise ratios on normal numbers, as docs/payload_format.md states them."""
    x = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))

    def ratio(got: torch.Tensor) -> float:
        return float(10 * (x.double().square().sum() / (got - x).double().square().sum()).log10())

    ratios = {rate: ratio(round_trip(x, rate)) for rate in (8, 9, 12, 16)}
    int8 = Codec.from_config(CodecConfig(codec="int8"))
    blocks = ratio(int8.decode(int8.encode([x], [x.numel()]), [x.numel()], dtype=torch.float32)[0])
    assert 24 < ratios[8] < 27 and 4 < ratios[9] - ratios[8] < 8 and 22 < ratios[12] - ratios[8] < 26, ratios
    assert blocks > ratios[8] + 15 and ratios[12] > blocks, (blocks, ratios)


# ---- planes ---------------------------------------------------------------------------------------------------------


# ---- the operators --------------------------------------------------------------------------------------------------


def test_sums_are_those_of_the_decoded_values_in_float32() -> None:
    own = codec_of(11)
    parts = [numbers("normal", 1202, seed) for seed in range(3)]
    payload = torch.cat([own.encode([part], [601], sizes=[2]) for part in parts])
    first, *others = [own.decode(message, [601], dtype=torch.float32)[0] for message in payload.chunk(3)]
    want = (first + others[0]) + others[1]
    assert torch.equal(own.decode_sum(payload, 3, [601], inner=2, dtype=torch.float32)[0], want)
    to = codec_of(7)
    again = own.decode_sum_encode(payload, 3, [601], inner=2, dtype=torch.float32, to=to, outer=2)
    assert torch.equal(again, to.encode([want], [601], sizes=[2], outer=2))


def test_error_feedback_keeps_what_was_lost() -> None:
    own, x, residual = codec_of(6), numbers("normal", 70), numbers("normal", 70, 1) * 0.1
    x[9] = math.inf
    message, (left,) = own.encode_feedback([x], [residual], [0.5], [35], sizes=[2], strides=[1])
    meant = x + residual * 0.5
    assert torch.equal(message, own.encode([meant], [35]))
    lost = meant - own.decode(message, [35], dtype=torch.float32)[0]
    assert torch.equal(left, torch.where(lost.isfinite(), lost, torch.zeros(70)))
    assert left[8:12].eq(0).all() and left.ne(0).sum() > 50
