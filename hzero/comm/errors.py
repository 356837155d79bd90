"""Errors of hops and of other collectives."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator

import torch.distributed as dist

from hzero.comm.watchdog import shared_watchdog
from hzero.comm.wires import LaneHops
from hzero.validation import PeerError, PlainError


class HopError(PlainError):
    """A hop failed, or a message arrived changed, or with blocks that its codec could not hold.

    It names the collective, its payload, tier and ranks.
    """


class DisagreementError(RuntimeError):
    """A message of another size has come than this rank expects. Wires raise it, and whoever waits makes a `HopError` of it."""


class MissingPeerError(HopError, PeerError):
    """A collective failed or timed out since peers are gone or late. The message also says who did not come."""

    @classmethod
    def of(
        cls, what: str, error: Exception | None = None, lane: LaneHops | None = None, number: int = 0
    ) -> MissingPeerError:
        """The error of a collective that has failed.

        Args:
            what: The collective, how it ended, and a colon, before who is missing.
            error: What the library says of it.
            lane: As for `Watchdog.missing`.
            number: As for `Watchdog.missing`.
        """
        ranks, text = shared_watchdog().missing(lane, number)
        said = f" ({str(error).partition(chr(10))[0]})" if error is not None else ""
        return cls(f"{what}{text}{said}", ranks)


@contextlib.contextmanager
def blaming() -> Iterator[None]:
    """Turns an error of a collective outside hops, such as DeepSpeed's all-reduce of the norm, into one that names who.

    Raises:
        MissingPeerError: A collective failed or timed out.
    """
    try:
        yield
    except RuntimeError as error:
        of_group = isinstance(error, dist.DistError) or "/gloo/" in str(error)
        if isinstance(error, PeerError) or not of_group or dist.group.WORLD is None:
            raise
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if "/torch/" not in frame.filename and "/deepspeed/" not in frame.filename]
        place = f"{own[-1].filename}:{own[-1].lineno} {own[-1].name}"
        raise MissingPeerError.of(f"hzero: rank {dist.get_rank()}, a collective at {place}: ", error) from error
