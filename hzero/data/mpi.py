"""Dask's messages over MPI: addresses ``mpi://HOST/RANK/PORT`` for clusters whose processes are ranks of one MPI job.

MPI has ranks and tags, but neither ports nor connections. A listener takes a port, which is a number in its process. To
connect, a process reserves a tag and sends it to the listener's rank, whose process reserves one as well. From then on each
end sends to the other's tag.

Every message starts with a head. Heads of all connections have one tag, so one probe finds the next of any of them. A head
holds the sizes of the frames and the small frames. Large frames follow under the tag of the connection: they are sent from
the memory into which Dask serialised, and received into the memory from which Dask deserialises.

The last head of an end closes it. An end that closes drops what it receives until the other end has closed as well. Nothing
can arrive for its tag after that, so the tag is free again.

MPI moves messages on only while somebody asks. The event loop does, at once after something has happened, and then ever less
often, so that an idle process sleeps.

Use any Dask launcher that starts processes as ranks, such as dask-mpi with ``protocol="mpi"``. Messages travel on
``MPI.COMM_WORLD``, since a communicator of their own would need all ranks at once, and use its 16,385 largest tags.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import logging
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from operator import attrgetter
from typing import Any

from distributed.comm.core import BaseListener, Comm, CommClosedError, Connector, FatalCommClosedError
from distributed.comm.registry import Backend, backends
from distributed.comm.tcp import RequireEncryptionMixin
from distributed.comm.utils import from_frames, to_frames
from distributed.protocol.utils import host_array
from distributed.utils import ensure_memoryview, nbytes
from mpi4py import MPI
from tornado.ioloop import IOLoop

logger = logging.getLogger("distributed.comm.mpi")

PREFIX, HOST, WORLD = "mpi://", socket.gethostname(), MPI.COMM_WORLD
#: The tag of heads, and those of connections: the largest ones, since programs use small ones. Every MPI has 32,768.
HEAD_TAG: int = WORLD.Get_attr(MPI.TAG_UB) or 32767
TAGS = range(HEAD_TAG - 16384, HEAD_TAG)
#: Bytes of a frame that is copied into the head, and of one message, since counts of MPI may be 32 bits wide.
SMALL, PIECE = 8 << 10, 1 << 30
#: The poller asks without a pause for so many seconds after an event, since an answer is likely. Then it pauses for a share of
#: the time since the event, at most for the longest pause. Short pauses hold up the loop, which cannot sleep for less than 1 ms.
EAGER_S, SHARE, SHORT_S, LONGEST_S = 3e-4, 0.1, 5e-4, 0.01
#: Seconds that the end of the process waits for messages under way.
FLUSH_S = 10.0

#: Starts a head: the tag that it is for, its sender's, and the number of frames. With tag 0 it asks for a connection, and the
#: number is a port.
HEAD, CLOSING = struct.Struct("<iiq"), -1
#: In the size of a frame: it is in a GPU's memory.
DEVICE = 1 << 63

_comms: dict[tuple[int, int], MpiComm] = {}  # by the peer's rank and our tag
_listeners: dict[int, MpiListener] = {}  # by port
_under_way: list[tuple[list[MPI.Request], MpiComm | None]] = []
_arriving: deque[tuple[MPI.Request, memoryview, int]] = deque()  # heads that are being received, and their sources
_polls: dict[asyncio.AbstractEventLoop, asyncio.Handle] = {}  # the next one of each loop: a process has one, as a rule
_lock = threading.Lock()
_next_tag, _next_port = itertools.count(), itertools.count(1)


def parsed(address: str) -> tuple[str, int, int]:
    """Host, rank and port of an address, with or without its scheme.

    Raises:
        ValueError: It is no such address.
    """
    try:
        host, rank, port = address.removeprefix(PREFIX).rsplit("/", 2)
        return host, int(rank), int(port)
    except ValueError:
        raise ValueError(f"address: found {address!r}; expected mpi://HOST/RANK/PORT") from None


def _address(port: int) -> str:
    return f"{PREFIX}{HOST}/{WORLD.rank}/{port}"


# ---- moving messages on -----------------------------------------------------------------------------------------------------


def _send(peer: int, tag: int, sender: int, number: int, words: bytes = b"", bodies: Sequence[Any] = ()) -> None:
    """Starts a message, which ends later: whoever reads at the other end may be sending to this one as well."""
    try:
        requests = [WORLD.Isend([HEAD.pack(tag, sender, number) + words, MPI.BYTE], peer, HEAD_TAG)]
        requests += [WORLD.Isend([piece, MPI.BYTE], peer, tag) for body in bodies for piece in _pieces(body)]
        _track(requests)
    except MPI.Exception as error:
        raise CommClosedError(f"rank {peer} cannot be reached: {error}") from error


def _pieces(buffer: Any) -> Iterator[Any]:
    return (buffer[start : start + PIECE] for start in range(0, len(buffer), PIECE))


def _track(requests: list[MPI.Request], comm: MpiComm | None = None) -> None:
    """Moves messages on until all have ended; then the list is empty. Requests keep their buffers alive."""
    if MPI.Request.Testall(requests):
        requests.clear()
    else:
        _under_way.append((requests, comm))
    _poll_soon()


def _poll_soon() -> None:
    """Has this thread's event loop ask MPI without a pause, since something has happened."""
    with contextlib.suppress(RuntimeError):  # no loop: the process ends
        loop = asyncio.get_running_loop()
        if loop in _polls:
            _polls.pop(loop).cancel()
        _polls[loop] = loop.call_soon(_poll, loop, loop.time())


def _poll(loop: asyncio.AbstractEventLoop, last: float) -> None:
    """Asks MPI, and then again: without a pause if something has happened lately, later and later otherwise."""
    del _polls[loop]
    happened, now = False, loop.time()
    try:
        with _lock:
            happened = _step()
    except Exception:
        logger.exception("Messages over MPI cannot go on; the job ends")
        time.sleep(1.0)  # until the launcher has the message: it stops reading when a rank aborts
        WORLD.Abort(1)
    last = now if happened else last
    if loop in _polls:
        return  # what has come was answered
    pause = min((now - last) * SHARE, LONGEST_S)
    if pause < SHORT_S:
        if now - last > EAGER_S:
            time.sleep(pause)
        _polls[loop] = loop.call_soon(_poll, loop, last)
    elif _comms or _listeners or _under_way:
        _polls[loop] = loop.call_later(pause, _poll, loop, last)


def _step() -> bool:
    """Asks MPI once. Returns whether anything has happened."""
    happened, status = False, MPI.Status()
    while (message := WORLD.Improbe(MPI.ANY_SOURCE, HEAD_TAG, status)) is not None:
        head = host_array(status.Get_count(MPI.BYTE))
        _arriving.append((message.Irecv([head, MPI.BYTE]), head, status.source))
    while _arriving and _arriving[0][0].Test():
        (_, head, source), happened = _arriving.popleft(), True
        tag, sender, number = HEAD.unpack_from(head)
        words = head[HEAD.size :]
        if tag:
            comm = _comms[source, tag]
            comm.heads.append((sender, number, words))
            comm.loop.add_callback(comm.process)
        elif listener := _listeners.get(number):
            listener.loop.add_callback(listener.accept, source, sender, bytes(words).decode())
        else:
            _send(source, sender, 0, CLOSING, f"nothing listens at {_address(number)}".encode())
    for one in list(_under_way):
        requests, waiting = one
        if MPI.Request.Testall(requests):
            requests.clear()
            _under_way.remove(one)
            happened = True
            if waiting is not None:
                waiting.loop.add_callback(waiting.process)
    return happened


@atexit.register  # before mpi4py ends MPI, which waits for all ranks
def _finish() -> None:
    """Ends the connections: messages under way arrive, unless their receiver is not there within `FLUSH_S`."""
    deadline = time.monotonic() + FLUSH_S
    _listeners.clear()
    while (_under_way or any(comm.theirs for comm in _comms.values())) and time.monotonic() < deadline:
        for comm in list(_comms.values()):
            comm.abort()
        with _lock:
            _step()
        time.sleep(1e-3)
    if time.monotonic() < deadline:
        return
    ranks = ", ".join(map(str, sorted({rank for rank, _ in _comms})[:10]))
    logger.warning("rank %d waited %g s for ranks %s to close their connections", WORLD.rank, FLUSH_S, ranks)


# ---- connections ------------------------------------------------------------------------------------------------------------


class MpiComm(Comm):
    """One end of a connection.

    Args:
        peer: Rank of the other end.
        local: Address of this end.
        remote: Address of the other end.
        deserialize: Whether messages are deserialised.
        theirs: Tag of the other end; 0 if it has not answered yet.

    Attributes:
        loop: The event loop of this end.
        heads: Heads that nobody has read: tag of the sender, number of frames, and what follows.

    Raises:
        CommClosedError: All tags are in use.
    """

    def __init__(self, peer: int, local: str, remote: str, deserialize: bool = True, theirs: int = 0) -> None:
        super().__init__(deserialize)
        self._local_addr, self._peer_addr, self._peer, self.theirs = local, remote, peer, theirs
        self.loop = IOLoop.current()  # the only thread that uses this end
        self._waiter: asyncio.Future[None] | None = None
        self._why, self._said = "", False  # why this end is closed; whether the other end has been told
        self._receiving: list[MPI.Request] = []  # of the message that is read
        self.heads: deque[tuple[int, int, memoryview]] = deque()
        tags = (TAGS[next(_next_tag) % len(TAGS)] for _ in TAGS)
        self.tag = next((tag for tag in tags if (peer, tag) not in _comms), 0)
        if not self.tag:
            raise CommClosedError(f"rank {WORLD.rank} on {HOST} uses all {len(TAGS)} tags for rank {peer}")
        _comms[peer, self.tag] = self

    local_address = property(attrgetter("_local_addr"))
    peer_address = property(attrgetter("_peer_addr"))

    def closed(self) -> bool:
        """Whether this end is closed, or the other one is and everything is read."""
        return bool(self._why)

    async def write(self, msg: Any, serializers: Any = None, on_error: str = "message") -> int:
        """Sends a message. Returns its bytes, which may still be under way."""
        frames = await to_frames(
            msg,
            allow_offload=self.allow_offload,
            serializers=_families(serializers),
            on_error=on_error,
            context={"sender": self.local_info, "recipient": self.remote_info, **self.handshake_options},
            frame_split_size=sys.maxsize,  # parts of a frame would have to be joined by a copy
        )
        if self._why:
            raise CommClosedError(self._why)
        sizes = [nbytes(frame) | DEVICE * hasattr(frame, "__cuda_array_interface__") for frame in frames]
        small = [frame for frame, size in zip(frames, sizes) if size <= SMALL]
        large = [frame for frame, size in zip(frames, sizes) if size > SMALL]
        words = b"".join([struct.pack(f"<{len(sizes)}Q", *sizes), *small])
        _send(self._peer, self.theirs, self.tag, len(sizes), words, list(map(_readable, large)))
        return sum(size & ~DEVICE for size in sizes)

    async def read(self, deserializers: Any = None) -> Any:
        """Waits for the next message.

        Raises:
            CommClosedError: The connection is closed.
        """
        try:
            await self.until(lambda: bool(self.heads) and self.heads[0][1] != CLOSING)
            _, number, words = self.heads.popleft()
            frames, self._receiving = self._receive(number, words)
            _track(self._receiving, self)
            await self.until(lambda: not self._receiving)
        except BaseException:
            self.abort()  # as Dask's other comms do: nobody could say which message is next
            raise
        return await from_frames(
            frames,
            deserialize=self.deserialize,
            deserializers=_families(deserializers),
            allow_offload=self.allow_offload,
        )

    def _receive(self, number: int, words: memoryview) -> tuple[list[Any], list[MPI.Request]]:
        """Starts to receive frames. They are in the order of heads, so this happens in that order."""
        small, frames, requests = words[8 * number :], [], []
        for size in struct.unpack_from(f"<{number}Q", words):
            if size <= SMALL:
                frames.append(small[:size])
                small = small[size:]
            else:
                frames.append(_memory(size))
                requests += [WORLD.Irecv([piece, MPI.BYTE], self._peer, self.tag) for piece in _pieces(frames[-1])]
        return frames, requests

    async def until(self, ready: Callable[[], bool]) -> None:
        """Waits until something is so that `process` may have changed.

        Raises:
            CommClosedError: The connection is closed before.
        """
        while not ready():
            if self._why:
                raise CommClosedError(self._why)
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def process(self) -> None:
        """Looks at what has come, and lets who waits do so."""
        if self.heads and not self.theirs:
            self.theirs = self.heads[0][0]
        if self.heads and self.heads[0][1] == CLOSING and not self._receiving:
            self._why = self._why or bytes(self.heads[0][2]).decode() or f"{self._peer_addr} has closed the connection"
        if self._why and self.theirs and not self._said:
            self._said = True
            with contextlib.suppress(CommClosedError):
                _send(self._peer, self.theirs, self.tag, CLOSING)
        while self._why and self.heads:
            _, number, words = self.heads.popleft()
            if number == CLOSING:
                del _comms[self._peer, self.tag]
            else:
                _track(self._receive(number, words)[1])
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def abort(self) -> None:
        """Closes this end. What was sent arrives; who waits gets a `CommClosedError`."""
        self._why = self._why or "the connection is closed"
        self.process()

    async def close(self) -> None:
        """Closes this end, as `abort` does."""
        self.abort()


@cache
def _gpu_aware() -> bool:
    from hzero.comm.mpi_wires import gpu_aware  # imports torch

    return gpu_aware()


def _families(given: Any) -> Any:
    """Serialisers that leave arrays of GPUs where they are, if MPI can read them there and Dask names no others."""
    return ("cuda", "dask", "pickle", "error") if given is None and "cupy" in sys.modules and _gpu_aware() else given


def _readable(frame: Any) -> Any:
    """The bytes of a frame, which stay where they are."""
    if not hasattr(frame, "__cuda_array_interface__"):
        return ensure_memoryview(frame)
    import cupy

    cupy.cuda.runtime.deviceSynchronize()  # MPI knows no streams
    return cupy.asarray(frame).reshape(-1).view("u1")


def _memory(size: int) -> Any:
    """Memory for a frame: a GPU's, unless this process only passes the frame on."""
    cupy = sys.modules.get("cupy") if size & DEVICE else None
    return cupy.empty(size ^ DEVICE, "u1") if cupy else host_array(size & ~DEVICE)


# ---- what Dask calls --------------------------------------------------------------------------------------------------------


class MpiListener(BaseListener, RequireEncryptionMixin):
    """Accepts connections at a port of this process.

    Args:
        location: What Dask was told to listen at. Only a port in it counts; 0 or none is a new one.
        handler: Called with each connection.
        deserialize: Whether connections deserialise messages.
        allow_offload: Whether they may do so in a thread.
        arguments: Of Dask's security.
    """

    prefix, encrypted = PREFIX, False

    def __init__(
        self, location: str, handler: Any, deserialize: bool, allow_offload: bool = True, **arguments: Any
    ) -> None:
        super().__init__()
        self._check_encryption(location, arguments)
        digits = location.replace("/", ":").rpartition(":")[2]
        self._port = int(digits or 0) or next(port for port in _next_port if port not in _listeners)
        self._handler, self._deserialize, self._allow_offload = handler, deserialize, allow_offload

    async def start(self) -> None:
        """Begins to listen."""
        self.loop = IOLoop.current()
        if _listeners.setdefault(self._port, self) is not self:
            raise OSError(f"{self.listen_address}: a listener has this port already")
        _poll_soon()

    def stop(self) -> None:
        """Ends listening. Connections stay."""
        _listeners.pop(self._port, None)

    @property
    def listen_address(self) -> str:
        """The address."""
        return _address(self._port)

    contact_address = listen_address

    async def accept(self, peer: int, theirs: int, remote: str) -> None:
        """Serves a rank that asks for a connection."""
        try:
            comm = MpiComm(peer, self.listen_address, remote, self._deserialize, theirs)
        except CommClosedError as error:
            _send(peer, theirs, 0, CLOSING, str(error).encode())
            return
        comm.allow_offload = self._allow_offload
        try:
            await self.on_connection(comm)
        except CommClosedError:
            logger.info("Connection from %s closed before handshake completed", remote)
            return
        await self._handler(comm)


class MpiConnector(Connector, RequireEncryptionMixin):
    """Connects to listeners of ranks."""

    prefix, encrypted = PREFIX, False

    async def connect(self, address: str, deserialize: bool = True, **arguments: Any) -> MpiComm:
        """Connects to an address without its scheme.

        Raises:
            CommClosedError: Its rank refuses, such as if nothing listens there yet.
            FatalCommClosedError: There is no such rank.
        """
        self._check_encryption(address, arguments)
        host, rank, port = parsed(address)
        if not 0 <= rank < WORLD.size:
            raise FatalCommClosedError(
                f"mpi://{address}: found rank {rank}; expected 0 to {WORLD.size - 1}, the MPI job's"
            )
        began, comm = time.monotonic(), MpiComm(rank, _address(0), PREFIX + address, deserialize)
        _send(rank, 0, comm.tag, port, comm.local_address.encode())
        try:
            await comm.until(lambda: bool(comm.theirs))  # a listener's handshake has it
        except asyncio.CancelledError:  # Dask's time is over: its error will have this one as its cause
            comm.abort()
            waited = f"waited {time.monotonic() - began:.1f} s for rank {rank} on {host} to accept a connection"
            raise asyncio.CancelledError(waited) from None
        return comm


class MpiBackend(Backend):
    """The scheme ``mpi`` of Dask's registry."""

    def get_connector(self) -> MpiConnector:
        """What connects."""
        return MpiConnector()

    def get_listener(self, loc: str, handle_comm: Any, deserialize: bool, **connection_args: Any) -> MpiListener:
        """What listens."""
        return MpiListener(loc, handle_comm, deserialize, **connection_args)

    def get_address_host(self, loc: str) -> str:
        """The host in an address."""
        return parsed(loc)[0]

    def resolve_address(self, loc: str) -> str:
        """The address, which has one form."""
        return loc

    def get_local_address_for(self, loc: str) -> str:
        """Where to listen to reach an address."""
        return _address(0).removeprefix(PREFIX)


backends["mpi"] = MpiBackend()  # a checkout on the path has no entry points
