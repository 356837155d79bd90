"""Checksums of messages: sums of their words with odd weights, by torch, on the device where the message is.

A part is read as 64-bit words x_i, in blocks that share one table of weights. Two sums are kept modulo 2**64: that of
w_i x_i, and that of v_i (x_i >> 32), in which the upper halves count as lower ones. Sums of blocks are summed again, with
weights of their own. (Multilinear hashing: Lemire and Kaser, "Strongly universal string hashing is fast", Computer Journal
57(11), 2014.)

An error inside one word changes the first sum for certain, since multiplying by an odd number loses nothing. Any other error
that does not depend on the weights goes unseen with a probability below 2**-25, that of errors which change nothing but
the top bits of 32-bit halves; below 2**-50 where a lowest bit has changed too. The number of the message on its lane, its
sender and its receiver are added, so a message in the place of another one is seen even if its checksum comes with it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from hzero.comm.peers import HopError

#: Words that share a table of weights: 16 KiB, which stays in the first-level cache.
_BLOCK = 2048
_MASK = 2**64 - 1
#: Senders that an error names one by one.
_NAMED = 4
#: Bytes of a checksum.
CHECKSUM_BYTES = 16
#: Factors of a message's number, its sender and its receiver.
_NUMBER, _SENDER, _RECEIVER = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0x8CB92BA72F3D8DD7


def checksums(message: torch.Tensor, parts: int) -> torch.Tensor:
    """The checksums of a message's parts, without a host wait.

    Args:
        message: uint8 ``[parts * b]``.
        parts: Number of parts, of ``b`` bytes each.

    Returns:
        int64 ``[parts, 2]``.
    """
    words = _words(message, parts)
    return torch.stack([_summed(words, 0), _summed(words, 32)], dim=1)


def addressed(sums: torch.Tensor, number: int, sender: int | None, receiver: int | None) -> torch.Tensor:
    """Checksums of messages with an address: those of the same bytes elsewhere, or at another time, are different.

    Args:
        sums: int64 ``[parts, 2]``, of `checksums`.
        number: Of the message on its lane.
        sender: Coordinate in the tier group; None: part i comes from i.
        receiver: The same: None: part i goes to i.

    Returns:
        int64 ``[parts, 2]``.
    """
    sums = sums + _signed(number * _NUMBER + (sender or 0) * _SENDER + (receiver or 0) * _RECEIVER)
    for coordinate, factor in ((sender, _SENDER), (receiver, _RECEIVER)):
        if coordinate is None:
            sums += torch.arange(len(sums), device=sums.device).mul_(_signed(factor)).unsqueeze(1)  # modulo 2**64
    return sums


def signed(message: torch.Tensor, parts: int, number: int, sender: int) -> torch.Tensor:
    """A message with the checksum of each part behind it.

    Args:
        message: uint8 ``[parts * b]``.
        parts: 1 where all peers get the same, or one for each of them.
        number: Of the message on its lane.
        sender: Coordinate in the tier group.

    Returns:
        uint8 ``[parts * (b + 16)]``.
    """
    sums = addressed(checksums(message, parts), number, sender, None if parts > 1 else 0)
    return torch.cat([message.view(parts, -1), sums.view(torch.uint8)], dim=1).view(-1)


def verified(
    arrived: torch.Tensor, senders: list[int], number: int, receiver: int, ranks: Sequence[int], what: Callable[[], str]
) -> tuple[torch.Tensor, Comparison]:
    """The parts of what `signed` has made, as they have arrived, and the comparison of their checksums.

    Args:
        arrived: uint8 ``[senders * (b + 16)]``.
        senders: Coordinates, one for each part.
        number: Of the messages on their lane.
        receiver: Coordinate of this rank; 0 where all peers get the same.
        ranks: Of the tier group.
        what: Describes the collective.
    """
    parts = arrived.view(len(senders), -1)
    message = parts[:, :-CHECKSUM_BYTES].reshape(-1)
    sent = parts[:, -CHECKSUM_BYTES:].reshape(-1).view(torch.int64).view(-1, 2)
    sender = senders[0] if len(senders) == 1 else None
    sums = addressed(checksums(message, len(senders)), number, sender, receiver)
    return message, Comparison(sent, sums, [ranks[sender] for sender in senders], number, what)


class Comparison(NamedTuple):
    """The checksums of one collective, of the messages of all peers.

    Attributes:
        sent: What the senders say, int64 ``[k, 2]``.
        arrived: What the messages have here, int64 ``[k, 2]``.
        ranks: The senders.
        number: Of the messages on their lane.
        what: Describes the collective.
    """

    sent: torch.Tensor
    arrived: torch.Tensor
    ranks: list[int]
    number: int
    what: Callable[[], str]

    def check(self) -> None:
        """Waits for the device and compares.

        Raises:
            HopError: Some differ.
        """
        if torch.equal(self.sent, self.arrived):
            return
        sent, arrived = self.sent.tolist(), self.arrived.tolist()
        wrong = [index for index in range(len(sent)) if sent[index] != arrived[index]]
        named = [
            f"from rank {self.ranks[i]} with checksum {_hex(arrived[i])}, sent with {_hex(sent[i])}"
            for i in wrong[:_NAMED]
        ]
        more = [f"and from {len(wrong) - _NAMED} others"] if len(wrong) > _NAMED else []
        raise HopError(
            f"{self.what()}: message {self.number} of this lane arrived changed {'; '.join([*named, *more])}. No step "
            "was taken with it; look at the links between these ranks, and at the libraries that drive them"
        )


def _hex(checksum: list[int]) -> str:
    return "".join(f"{half & _MASK:016x}" for half in checksum)


def _words(message: torch.Tensor, parts: int) -> torch.Tensor:
    """int64 ``[parts, n]``: the message itself where its parts are whole words, as all payloads are, else a copy with zeros."""
    rows = message.view(parts, message.numel() // parts)
    if rows.shape[1] % 8 or not rows.numel() or message.data_ptr() % 8 or message.storage_offset() % 8:
        padded = rows.new_zeros(parts, max(rows.shape[1] + -rows.shape[1] % 8, 8))
        padded[:, : rows.shape[1]] = rows
        rows = padded
    return rows.view(torch.int64)


def _summed(words: torch.Tensor, shift: int) -> torch.Tensor:
    """int64 ``[parts]`` from ``[parts, n]``, of the words without their lowest bits."""
    blocks = words.unsqueeze(1)
    if words.shape[1] > _BLOCK:
        blocks = torch.nn.functional.pad(words, (0, -words.shape[1] % _BLOCK)).unflatten(1, (-1, _BLOCK))
    weights = _weights(words.device, 17 + shift, _BLOCK)[: blocks.shape[2]]
    sums = (_by_matrix if words.is_cpu else _by_product)(blocks >> shift if shift else blocks, weights)
    count = sums.shape[1]
    return (sums * _weights(words.device, 16, 1 << (count - 1).bit_length())[:count]).sum(1)


def _by_product(blocks: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """For GPUs, where torch has no product of integer matrices."""
    return (blocks * weights).sum(-1)


def _by_matrix(blocks: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """For CPUs: several times as fast there."""
    return torch.mv(blocks.flatten(0, 1), weights).view(blocks.shape[:2])


@functools.cache
def _weights(device: torch.device, seed: int, count: int) -> torch.Tensor:
    """So many odd numbers, int64, the same on all ranks; the copy to a device ends before this returns."""
    drawn = np.random.default_rng(seed).integers(-(2**63), 2**63, count, dtype=np.int64)
    return torch.from_numpy(drawn | 1).to(device)


def _signed(number: int) -> int:
    """A number modulo 2**64 as int64 has it."""
    number &= _MASK
    return number - 2**64 if number >> 63 else number
