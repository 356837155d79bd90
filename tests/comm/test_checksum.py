"""Checksums of messages: which changes they see, on their own."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hzero.codecs import codec, reference
from hzero.comm import Bucket, HopError, Runtime, WireLog, checksum, runtime
from hzero.comm.checksum import addressed, addresses
from hzero.comm.wires import STAGE
from hzero.config import parse_config
from hzero.program.program import StagePrograms
from hzero.program.shards import ShardPlan
from hzero.topology import Grid
from tests.comm.simulated import AtOnce, on_all, peers_of

#: Bytes of a part: none, less than a word, a word, around vectors of words, and more than what is summed at a time.
SIZES = (0, 1, 3, 4, 7, 8, 16, 63, 64, 65, 257, 4096, 8 * 2048 + 16, (1 << 22) + 5)


def _message(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def _sum_of(message: torch.Tensor, parts: int = 1) -> list[int]:
    return codec.checksums(message.view(parts, message.numel() // parts)).tolist()


@settings(max_examples=80)
@given(size=st.sampled_from([size for size in SIZES if size]), draw=st.randoms(use_true_random=False))
def test_every_flipped_bit_is_seen_whatever_the_message(size: int, draw: random.Random) -> None:
    message = _message(size, draw.randrange(1000)) * draw.randrange(2)
    before = _sum_of(message)
    message[draw.randrange(size)] ^= 1 << draw.randrange(8)
    assert _sum_of(message) != before  # for certain


@settings(max_examples=40)
@given(size=st.sampled_from([size for size in SIZES if size > 16]), draw=st.randoms(use_true_random=False))
def test_other_changes_are_seen(size: int, draw: random.Random) -> None:
    """Zeros from some byte on, words that change places, and two top bits, which a product modulo 2**64 might lose."""
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


def test_an_address_tells_apart_what_is_equal() -> None:
    """The same bytes from another sender, to another receiver, again, or in another format; for the sender and the receiver."""
    peers = range(4)
    seen = {
        address
        for number in (1, 2, 3)
        for sender in peers
        for address in addresses(number, [sender], peers).view(-1).tolist()
    }
    assert len(seen) == 3 * 4 * 4
    for peer in peers:
        sent = torch.stack([addresses(2, [sender], peers)[peer] for sender in peers])
        assert torch.equal(sent, addresses(2, peers, [peer]))
    with mock.patch.object(checksum, "PAYLOAD_FORMAT", checksum.PAYLOAD_FORMAT + 1):
        assert seen.isdisjoint(addresses(1, [0], peers).view(-1).tolist())


@pytest.mark.parametrize("size", SIZES)
def test_an_address_is_added_behind_every_part(size: int) -> None:
    """Behind the bytes of a message, or where a codec has left their checksums."""
    message, address = _message(3 * size), addresses(7, [1], range(3))
    sent = addressed(message, address, checked=False).view(3, size + 16)
    assert torch.equal(sent[:, :size].reshape(-1), message)
    trailers = sent[:, size:].clone().view(torch.int64)
    sums = reference.checksums(message.view(3, size)).unsqueeze(1)
    assert torch.equal(trailers, torch.cat([sums, sums * 0], dim=1) + address)
    if size % 16 == 0:
        bare = torch.cat([message.view(3, size), torch.cat([sums, sums * 0], dim=1).view(torch.uint8)], dim=1)
        assert torch.equal(addressed(bare.view(-1), address, checked=True), sent.view(-1))


def _reduced(grid: Grid, flips: int = -1, **block: Any) -> list[Any]:
    """Sums of all gradients on every rank, or what it raises; ``flips`` is the rank on which a bit of a message flips."""
    plans = [
        ShardPlan.from_config(parse_config({"preset": "topo", **block}), grid, rank) for rank in range(grid.world_size)
    ]
    groups: dict[Any, Any] = {}
    programs, bucket = StagePrograms.of(plans[0]), Bucket((0, 1), (37, 130), torch.float32, "gradients")

    def reduce(plan: ShardPlan) -> Any:
        runtime = Runtime(plan, peers_of(plan, STAGE, groups), WireLog(), AtOnce())
        if plan.rank == flips:
            wires = next(iter(runtime.peers.values())).wires
            arrive = wires.all_to_all

            def flipped(output: torch.Tensor, message: torch.Tensor) -> Any:
                work = arrive(output, message)
                work.wait()
                output[77] ^= 4
                return mock.Mock()

            wires.all_to_all = flipped
        generator = torch.Generator().manual_seed(plan.rank)
        value = [torch.randn(chunk * grid.world_size, generator=generator) for chunk in bucket.chunks]
        try:
            for program in (programs.micro, programs.boundary, programs.outermost):
                chain = runtime.bind(program, bucket).run(lambda value=value: value, seed=5, first_seed=plan.rank)
                value = chain.wait()
        except HopError as error:
            return str(error)
        return value

    return on_all(plans, reduce)


@pytest.mark.parametrize(
    "own",
    [
        {},
        {"codecs": {"gradients": {"inter_node": {"codec": "int8", "block_size": 64}}}},
        {"codecs": {"gradients": "bf16"}},
        {"preset": "lossless"},
    ],
    ids=["int4", "unlike", "bf16", "none"],
)
def test_kernels_make_and_compare_checksums(own: dict[str, Any]) -> None:
    """No hop reads a message for them. The sums have the bits of those without checksums."""
    grid = Grid(2, 1, 2)
    with mock.patch.object(runtime, "checksums") as read, mock.patch.object(checksum, "checksums") as written:
        got = _reduced(grid, checksum=True, **own)
    assert not read.called and not written.called
    for one, other in zip(got, _reduced(grid, **own)):
        assert all(map(torch.equal, one, other))


def test_a_kernel_that_reads_a_changed_message_names_its_sender() -> None:
    *_, found = _reduced(Grid(1, 1, 2), flips=1, checksum=True)
    assert "all-to-all of gradients" in found and "arrived changed from rank 0 with checksum" in found
