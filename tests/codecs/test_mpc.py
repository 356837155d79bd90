"""Codec ``mpc``: every bit back, the bytes of the page by another decoder, and messages that are cut and made whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hzero.codecs import mpc
from hzero.codecs.codec import Codec
from tests.codecs.samples import make, numbers, round_trip, same_bits

DIMENSIONS = (1, 2, 7, 32)
KINDS = ("any bits", "nans", "normal", "constant", "zero", "smooth", "subnormal", "bfloat16")


def codec_of(dimension: int | None = None) -> Codec:
    return make("mpc", dimension=dimension)


# ---- the page, naively, in the other direction ------------------------------------------------------------------------


def naive_decoded(record: bytes, count: int, dimension: int) -> np.ndarray:
    """The words of a record: one stage of the paper undone after the other, with matrices of bits."""
    chunks = -(-count // 1024)
    used = int.from_bytes(record[:8], "little")
    assert used % 16 == 0 and not any(record[8:16]) and not any(record[used:])
    bitmaps = np.frombuffer(record, np.uint8, chunks * 128, 16)
    kept = np.unpackbits(bitmaps, bitorder="little").astype(bool)
    total = int(kept.sum())
    assert used == -(-(16 + 128 * chunks + 4 * total) // 16) * 16
    planes = np.zeros(1024 * chunks, np.uint32)
    planes[kept] = np.frombuffer(record, np.uint32, total, 16 + 128 * chunks)
    words = []
    for chunk in planes.reshape(-1, 1024):
        summed = np.cumsum(chunk, dtype=np.uint32)
        for square in summed.reshape(-1, 32):
            bits = np.unpackbits(square.astype(">u4").view(np.uint8)).reshape(32, 32)
            words.append(np.packbits(bits.T, axis=1).reshape(-1).view(">u4").astype(np.uint32))
    found = np.concatenate(words).reshape(-1, 1024)
    for chunk in found:
        for place in range(dimension, 1024):
            chunk[place] += chunk[place - dimension]
    return found.reshape(-1)[:count]


@pytest.mark.parametrize("dimension", DIMENSIONS)
@pytest.mark.parametrize("kind", KINDS)
@np.errstate(over="ignore")
def test_every_bit_comes_back_also_in_another_decoder(kind: str, dimension: int) -> None:
    own = codec_of(dimension)
    for count in (1, 2, 31, 32, 33, 992, 1023, 1024, 1025, 1057, 3000):
        x = numbers(kind, count, seed=count)
        record = own.encode([x], [count])
        assert same_bits(own.decode(record, [count], dtype=torch.float32)[0], x)
        words = naive_decoded(bytes(record.tolist()), count, dimension)
        assert np.array_equal(words, x.numpy().view(np.uint32)), count
    assert own.format.traits.exact and own.error_bound(3e38) == 0.0


# ---- nothing is lost ------------------------------------------------------------------------------------------------


@settings(max_examples=80)
@given(data=st.binary(min_size=4, max_size=600), dimension=st.integers(1, 32), repeats=st.integers(1, 9))
def test_any_words_come_back(data: bytes, dimension: int, repeats: int) -> None:
    x = torch.frombuffer(bytearray(data[: len(data) // 4 * 4] * repeats), dtype=torch.float32)
    assert same_bits(round_trip(codec_of(dimension), x), x)


def test_data_decide_on_the_bytes() -> None:
    used = {}
    for kind in KINDS:
        record = codec_of().encode([numbers(kind, 8192)], [8192])
        used[kind] = int(record[:8].view(torch.int64))
        assert used[kind] <= record.numel() == codec_of().message_bytes([8192], 1, 4)
    assert used["any bits"] == codec_of().message_bytes([8192], 1, 4) > 4 * 8192
    assert used["constant"] < 2500 and used["zero"] < 4000 and used["smooth"] < 3 * 8192 and used["bfloat16"] < 3 * 8192
    pairs = torch.stack((torch.full((4096,), 1.0), torch.full((4096,), -7.3)), 1).view(-1)
    one, two = (int(codec_of(d).encode([pairs], [8192])[:8].view(torch.int64)) for d in (1, 2))
    assert two < one


def test_other_types_are_those_of_float32_converted() -> None:
    own, x = codec_of(), torch.cat([numbers("nans", 40), numbers("normal", 1000) * 1e3])
    message = own.encode([x], [1040])
    for dtype in (torch.bfloat16, torch.float16):
        got = own.decode(message, [1040], dtype=dtype)[0]
        torch.testing.assert_close(got, x.to(dtype), rtol=0, atol=0, equal_nan=True)
        largest = float(x[40:].abs().max())
        assert float((got[40:].float() - x[40:]).abs().max()) <= own.error_bound(largest, dtype)


# ---- cut messages ---------------------------------------------------------------------------------------------------


def test_messages_are_cut_and_made_whole() -> None:
    own, count = codec_of(), 1500
    source = torch.cat([numbers(kind, count, seed=5) for kind in (*KINDS, *KINDS)])
    message, size = own.encode([source], [count], sizes=[2 * len(KINDS)]), own.message_bytes([count], 1, 4)
    parts = mpc.cut(message, 2, size)
    assert len(parts) == 2 and torch.equal(*parts) and parts[0].numel() < message.numel() // 2
    longer = torch.cat([torch.nn.functional.pad(part, (0, 48), value=7) for part in parts])
    assert torch.equal(mpc.whole(longer, 2, len(KINDS), size), message)
    for place, bad in ((0, 8), (0, 0), (6, 1), (1, 127)):  # no multiple of 16, nothing, more than there is
        broken = parts[0].clone()
        broken[place] = bad
        with pytest.raises(ValueError, match=rf"found a record of -?\d+ bytes; expected a multiple of 16 to {size}"):
            mpc.whole(broken, 1, len(KINDS), size)
