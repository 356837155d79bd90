"""Addresses of messages, which distinguish equal bytes sent elsewhere or at another time, and the comparison of checksums.

An address combines the number of a message on its lane, its sender, its receiver and the payload format. It is added to the
checksum of the message's bytes, which codecs compute (docs/payload_format.md). A message in the place of another one is therefore
detected, even if it arrives with its checksum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from hzero.codecs.codec import checksums
from hzero.codecs.formats import PAYLOAD_FORMAT
from hzero.codecs.reference import trailers
from hzero.comm.watchdog import HopError
from hzero.errors import some

_MASK = 2**64 - 1
#: Maximum number of senders that an error lists.
_NAMED = 4
#: Factors for a message's number, its sender, its receiver and its payload format.
_NUMBER, _SENDER, _RECEIVER, _FORMAT = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0x8CB92BA72F3D8DD7, 0xABC98388FB8FAC03


def addresses(
    number: int, senders: Sequence[int], receivers: Sequence[int], device: torch.device | None = None
) -> torch.Tensor:
    """Returns the address of each part of a message, int64 ``[parts, 1]``, without a host wait.

    Args:
        number: Number of the message on its lane.
        senders: Coordinates in the tier group: one for all parts, or 0, 1, .. for the parts.
        receivers: The same; 0 if all peers receive the same part.
        device: Device of the result.
    """
    base = number * _NUMBER + senders[0] * _SENDER + receivers[0] * _RECEIVER + PAYLOAD_FORMAT * _FORMAT
    step = (_SENDER if len(senders) > 1 else 0) + (_RECEIVER if len(receivers) > 1 else 0)
    parts = torch.arange(max(len(senders), len(receivers)), device=device).unsqueeze(1)
    return parts.mul_(_signed(step)).add_(_signed(base))  # modulo 2**64


def addressed(message: torch.Tensor, address: torch.Tensor, *, checked: bool) -> torch.Tensor:
    """Returns a message with an addressed checksum after each part.

    Args:
        message: uint8 ``[parts * b]``. With ``checked``, uint8 ``[parts * (b + 16)]``, changed in place.
        address: Result of `addresses`.
        checked: Whether the message already has the checksums of its bytes.
    """
    if checked:
        trailers(message, len(address)).add_(address)
        return message
    parts = message.view(len(address), -1)
    sums = torch.nn.functional.pad(checksums(parts).unsqueeze(1), (0, 1)) + address
    return torch.cat([parts, sums.view(torch.uint8)], dim=1).view(-1)


class Arrived(NamedTuple):
    """A message whose checksums are added up while it is decoded.

    Attributes:
        message: uint8 ``[parts * (b + 16)]``.
        parts: Number of parts, one per sender.
        compare: Receives the checksums of the arrived bytes, int64 ``[parts]``.
    """

    message: torch.Tensor
    parts: int
    compare: Callable[[torch.Tensor], None]


class Verdict(Protocol):
    """A comparison of int64 ``[k, 2]`` whose result may still be on its way on a device."""

    @property
    def sent(self) -> torch.Tensor:
        """What the senders state."""

    @property
    def arrived(self) -> torch.Tensor:
        """What has arrived."""

    def check(self) -> None:
        """Waits for the device. Raises `HopError` if something has arrived changed."""


class Comparison(NamedTuple):
    """The checksums of one collective, for the messages of all peers.

    Attributes:
        sent: Checksums from the senders, int64 ``[k, 2]``.
        arrived: Checksums computed here, int64 ``[k, 2]``.
        ranks: The senders.
        number: Number of the messages on their lane.
        what: Returns a description of the collective.
    """

    sent: torch.Tensor
    arrived: torch.Tensor
    ranks: list[int]
    number: int
    what: Callable[[], str]

    def check(self) -> None:
        """Waits for the device and compares.

        Raises:
            HopError: At least one checksum differs.
        """
        if torch.equal(self.sent, self.arrived):
            return
        wrong = [
            f"from rank {rank} with checksum {_hex(arrived)}, sent with {_hex(sent)}"
            for rank, sent, arrived in zip(self.ranks, self.sent.tolist(), self.arrived.tolist())
            if sent != arrived
        ]
        raise HopError(
            f"{self.what()}: message {self.number} of this lane arrived changed {some(wrong, _NAMED, '; ')}. No step used "
            "it; check the links between these ranks and their network libraries"
        )


def _hex(checksum: list[int]) -> str:
    return "".join(f"{half & _MASK:016x}" for half in checksum)


def _signed(number: int) -> int:
    """Converts a number to int64 modulo 2**64."""
    return (number + 2**63) % 2**64 - 2**63
