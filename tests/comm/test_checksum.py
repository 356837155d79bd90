"""Checksums of messages: which changes they see, on their own."""

from __future__ import annotations

import random
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hzero.comm import checksum
from hzero.comm.checksum import addressed, checksums

#: Bytes of a part: none, less than a word, a word, around one block of words, and of two levels of blocks.
SIZES = (0, 1, 7, 8, 16, 257, 4096, 8 * 2048 - 8, 8 * 2048, 8 * 2048 + 16, 5 * 8 * 2048 + 3)


def _message(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def _sum_of(message: torch.Tensor, parts: int = 1) -> list[list[int]]:
    return checksums(message, parts).tolist()


@settings(max_examples=80)
@given(size=st.sampled_from([size for size in SIZES if size]), draw=st.randoms(use_true_random=False))
def test_every_flipped_bit_is_seen_whatever_the_message(size: int, draw: random.Random) -> None:
    message = _message(size, draw.randrange(1000)) * draw.randrange(2)
    before = _sum_of(message)
    message[draw.randrange(size)] ^= 1 << draw.randrange(8)
    assert _sum_of(message)[0][0] != before[0][0]  # for certain, by the first of the two sums


@settings(max_examples=40)
@given(size=st.sampled_from([size for size in SIZES if size > 16]), draw=st.randoms(use_true_random=False))
def test_other_changes_are_seen(size: int, draw: random.Random) -> None:
    """Zeros from some byte on, words that change places, and two top bits, which sums of products modulo 2**64 would miss."""
    message = _message(size, draw.randrange(1000))
    before = _sum_of(message)
    cut, moved, signs = message.clone(), message.clone(), message.clone()
    cut[draw.randrange(size - 8) :] = 0
    first, second = draw.sample(range(size // 8), 2)
    moved.view(-1)[8 * first : 8 * first + 8] = message[8 * second : 8 * second + 8]
    moved.view(-1)[8 * second : 8 * second + 8] = message[8 * first : 8 * first + 8]
    for word in (first, second):
        signs[8 * word + 7] ^= 0x80
    for changed in (cut, moved, signs):
        assert torch.equal(changed, message) or _sum_of(changed) != before


@pytest.mark.parametrize("size", SIZES)
def test_parts_have_the_checksums_of_messages_at_any_address(size: int) -> None:
    message = _message(3 * size + 5)
    whole = _sum_of(message[: 3 * size].clone(), 3)
    assert whole == _sum_of(message[5:].copy_(message[: 3 * size].clone()), 3)
    assert whole == [_sum_of(part)[0] for part in (message[5 + i * size :][:size] for i in range(3))]


def test_devices_without_integer_matrices_have_the_same() -> None:
    for size in SIZES:
        message = _message(3 * size)
        want = checksums(message, 3)
        with mock.patch.object(checksum, "_by_matrix", checksum._by_product):
            assert torch.equal(checksums(message, 3), want)


def test_an_address_tells_apart_what_is_equal() -> None:
    """The same bytes from another sender, to another receiver, or again; in the form of the sender and of the receiver."""
    same = checksums(_message(64).repeat(4), 4)
    seen = {
        tuple(row)
        for number in (1, 2, 3)
        for sender in range(4)
        for row in addressed(same, number, sender, None).tolist()
    }
    assert len(seen) == 3 * 4 * 4
    for peer in range(4):
        sent = torch.stack([addressed(same, 2, sender, None)[peer] for sender in range(4)])
        assert torch.equal(sent, addressed(same, 2, None, peer))
