"""Addresses of messages: what tells a message from the same bytes elsewhere or at another time, and their comparison.

The number of a message on its lane, its sender and its receiver are added to the checksums of its bytes, which codecs make
(docs/payload_format.md). So a message in the place of another one is seen, too, even if its checksum comes with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from hzero.codecs.codec import checksums
from hzero.codecs.reference import trailers
from hzero.comm.peers import HopError

_MASK = 2**64 - 1
#: Senders that an error names one by one.
_NAMED = 4
#: Factors of a message's number, its sender and its receiver.
_NUMBER, _SENDER, _RECEIVER = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0x8CB92BA72F3D8DD7


def addresses(
    number: int, senders: Sequence[int], receivers: Sequence[int], device: torch.device | None = None
) -> torch.Tensor:
    """The address of each part of a message, int64 ``[parts, 1]``, without a host wait.

    Args:
        number: Of the message on its lane.
        senders: Coordinates in the tier group: one, or 0, 1, .. of the parts.
        receivers: The same; 0 where all peers get the same.
        device: Of the result.
    """
    base = number * _NUMBER + senders[0] * _SENDER + receivers[0] * _RECEIVER
    step = (_SENDER if len(senders) > 1 else 0) + (_RECEIVER if len(receivers) > 1 else 0)
    parts = torch.arange(max(len(senders), len(receivers)), device=device).unsqueeze(1)
    return parts.mul_(_signed(step)).add_(_signed(base))  # modulo 2**64


def addressed(message: torch.Tensor, address: torch.Tensor, *, checked: bool) -> torch.Tensor:
    """A message whose parts are followed by checksums with an address.

    Args:
        message: uint8 ``[parts * b]``, or, changed in place, ``[parts * (b + 16)]``.
        address: Of `addresses`.
        checked: Whether the message has the checksums of its bytes.
    """
    if checked:
        trailers(message, len(address)).add_(address)
        return message
    parts = message.view(len(address), -1)
    sums = torch.nn.functional.pad(checksums(parts).unsqueeze(1), (0, 1)) + address
    return torch.cat([parts, sums.view(torch.uint8)], dim=1).view(-1)


class Arrived(NamedTuple):
    """A message with checksums that what decodes it adds up.

    Attributes:
        message: uint8 ``[parts * (b + 16)]``.
        parts: One of each sender.
        compare: Takes the checksums of the bytes that have come, int64 ``[parts]``.
    """

    message: torch.Tensor
    parts: int
    compare: Callable[[torch.Tensor], None]


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


def _signed(number: int) -> int:
    """A number modulo 2**64 as int64 has it."""
    return (number + 2**63) % 2**64 - 2**63
