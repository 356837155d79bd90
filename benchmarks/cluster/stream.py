"""Stream: plain TCP between ranks, by one process that makes each socket in its rank's namespace."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.cluster.namespace import inside
from benchmarks.cluster.shape import Cluster
from hzero.validation import ConfigError

CONNECT_TIMEOUT_S = 10.0
#: Longest time in which nothing at all arrives.
SILENCE_S = 20.0
#: What one call sends, and what a socket may hold: what is left in it when time is up is awaited too.
CHUNK = memoryview(bytes(64 * 1024))
SEND_BUFFER = 128 * 1024


@dataclass(frozen=True)
class Transfer:
    """What went over a set of streams.

    Attributes:
        payload: Bytes that arrived, without headers, by (sender, receiver).
        mbit: Payload that arrived, in Mbit/s of all streams together, while all were sending, without the first quarter.
    """

    payload: dict[tuple[int, int], int]
    mbit: float


def transfer(
    cluster: Cluster, pairs: Sequence[tuple[int, int]], *, seconds: float | None = None, size: int | None = None
) -> Transfer:
    """Sends from rank to rank over all pairs at once, until time is up or each has sent a number of bytes.

    Args:
        cluster: As set up.
        pairs: Sender and receiver, two ranks.
        seconds: How long to send; None: as long as ``size`` takes.
        size: Bytes for every pair; None: as many as go.

    Raises:
        ConfigError: Ranks cannot connect, or nothing arrives for `SILENCE_S`.
    """
    if (seconds is None) == (size is None):
        raise ValueError("transfer: one of seconds and size")
    with contextlib.ExitStack() as stack:
        senders, receivers = {}, {}
        for source, target in pairs:
            out, into = _connect(cluster, source, target)
            senders[stack.enter_context(out)] = (source, target)
            receivers[stack.enter_context(into)] = (source, target)
        return _run(stack.enter_context(selectors.DefaultSelector()), senders, receivers, seconds, size)


def _run(
    selector: selectors.BaseSelector,
    senders: dict[socket.socket, tuple[int, int]],
    receivers: dict[socket.socket, tuple[int, int]],
    seconds: float | None,
    size: int | None,
) -> Transfer:
    left = {pair: size for pair in senders.values()}
    payload = {pair: 0 for pair in senders.values()}
    for out in senders:
        selector.register(out, selectors.EVENT_WRITE)
    for into in receivers:
        selector.register(into, selectors.EVENT_READ)
    buffer = bytearray(256 * 1024)
    begun = heard = time.monotonic()
    ends = None if seconds is None else begun + seconds
    arrivals: list[tuple[float, int]] = [(begun, 0)]
    sending, open_ends = len(senders), len(receivers)
    while open_ends:
        ready = selector.select(timeout=0.1)
        now = time.monotonic()
        for key, _ in ready:
            end = key.fileobj
            assert isinstance(end, socket.socket)
            if end in receivers:
                count = end.recv_into(buffer)
                payload[receivers[end]] += count
                heard = now
                if not count:
                    selector.unregister(end)
                    open_ends -= 1
                continue
            pair = senders[end]
            rest = left[pair]
            if rest != 0 and (ends is None or now < ends):
                sent = end.send(CHUNK if rest is None else CHUNK[:rest])
                left[pair] = None if rest is None else rest - sent
            else:
                selector.unregister(end)
                end.shutdown(socket.SHUT_WR)
                sending -= 1
        if sending == len(senders):
            arrivals.append((now, sum(payload.values())))
        if now > heard + SILENCE_S:
            raise ConfigError(f"streams {sorted(set(payload))}: nothing has arrived for {SILENCE_S:.0f} s")
    return Transfer(payload, _rate(arrivals))


def _rate(arrivals: Sequence[tuple[float, int]]) -> float:
    """Mbit/s from (time, bytes so far), without the first quarter of the time: bursts pass there."""
    (begun, _), (ended, last) = arrivals[0], arrivals[-1]
    when, first = next(((t, count) for t, count in arrivals if t >= begun + (ended - begun) / 4), arrivals[0])
    return (last - first) * 8e-6 / (ended - when) if ended > when else 0.0


def _connect(cluster: Cluster, source: int, target: int) -> tuple[socket.socket, socket.socket]:
    """A connected pair of sockets, each in its rank's namespace, where a socket stays once it is made."""
    try:
        with inside(cluster.namespace(target), lambda: socket.create_server((cluster.address(target), 0))) as server:
            server.settimeout(CONNECT_TIMEOUT_S)
            where = server.getsockname()
            out = inside(cluster.namespace(source), lambda: socket.create_connection(where, timeout=CONNECT_TIMEOUT_S))
            into, _ = server.accept()
    except OSError as error:
        raise ConfigError(f"rank {source} cannot connect to rank {target}: {error}") from None
    out.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    for end in (out, into):
        end.setblocking(False)
    return out, into
