"""Dask's messages over MPI: addresses ``mpi://HOST/RANK/PORT`` for clusters whose processes are ranks of one MPI job.

MPI has ranks and tags, but neither ports nor connections. A listener takes a port, which is a number in its process. A
connection is one of Dask's in one process, `InProc`, whose far ends are ranks. It has a number of the process that connects,
which every message names, negative towards that process. So all connections share one tag, and numbers need not be used again.

A message is a head and its frames. Short frames are in the head, so that there is one message of MPI. Otherwise each frame
follows with another tag, from the memory into which Dask serialised and into the memory from which Dask deserialises, both of
which may be a GPU's.

MPI makes progress only during its calls. So the event loop polls, at first without a pause, and then ever less often.

Use any Dask launcher that starts processes as ranks, such as dask-mpi with ``protocol="mpi"``. Messages travel on
``MPI.COMM_WORLD``, since making another communicator would need all ranks at once.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

from distributed.comm.core import Comm, CommClosedError, Connector, FatalCommClosedError
from distributed.comm.inproc import _EOF, InProc, InProcBackend, InProcListener, Queue, global_manager
from distributed.comm.registry import backends
from distributed.comm.tcp import RequireEncryptionMixin
from distributed.comm.utils import from_frames, to_frames
from distributed.protocol.utils import host_array
from distributed.utils import nbytes
from mpi4py import MPI
from tornado.ioloop import IOLoop

PREFIX, HOST, WORLD = "mpi://", socket.gethostname(), MPI.COMM_WORLD
#: The tags of heads and of frames: large ones, since programs use small ones. Every MPI has 32,768.
HEAD, FRAME = 32767, 32766
#: Bytes of frames in a head, which MPIs send at once, and of a part of a frame, which every MPI can count.
SHORT, LONGEST = 1 << 12, 1 << 30
#: The poller polls so many times without a pause after an event, since an answer is likely. Then each pause is longer than the
#: one before, up to the longest.
EAGER, STEP_S, LONGEST_S = 30, 2e-5, 0.01
#: Seconds that the end of the process waits for messages under way.
FLUSH_S = 10.0

_ends: dict[tuple[int, int], tuple[Queue, IOLoop]] = {}  # of connections, by the peer's rank and the number
# Messages: the end that receives it, or the receiver's rank and 0, what MPI still does, and what follows.
_under_way: list[tuple[tuple[int, int], list[MPI.Request], Callable[[], None] | None]] = []
_polls: dict[asyncio.AbstractEventLoop, asyncio.Handle] = {}  # the next one of each loop: a process has one, as a rule
_lock, _numbers, _ports = threading.RLock(), itertools.count(1), itertools.count(1)


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


def end_job(why: str) -> None:
    """Ends all ranks."""
    print(f"hzero: {why}; the job ends", file=sys.stderr, flush=True)
    time.sleep(1.0)  # until the launcher has the message: it stops reading when a rank aborts
    WORLD.Abort(1)


# ---- moving messages on -----------------------------------------------------------------------------------------------------


def _on_device(frame: Any) -> bool:
    return hasattr(frame, "__cuda_array_interface__")


def _parts(frame: Any) -> list[Any]:
    size = nbytes(frame)
    return [[frame, (min(LONGEST, size - at), at), MPI.BYTE] for at in range(0, size, LONGEST)]


def _send(end: tuple[int, int], content: list[Any], port: int = 0) -> None:
    """Starts a message, which ends later: the other end may be sending to this one before it reads."""
    (rank, number), on_device = end, any(map(_on_device, content))
    short = sum(map(nbytes, content)) <= SHORT and not on_device
    head = [bytearray(frame) if short else (_on_device(frame), nbytes(frame)) for frame in content]
    parts = [] if short else [part for frame in content for part in _parts(frame)]
    if on_device:
        sys.modules["cupy"].cuda.runtime.deviceSynchronize()  # MPI has no streams
    try:
        with _lock:
            requests = [WORLD.isend((-number, port, head), rank, HEAD)]
            requests += [WORLD.Isend(part, rank, FRAME) for part in parts]
    except MPI.Exception as error:
        raise CommClosedError(f"rank {rank} cannot be reached: {error}") from error
    _under_way.append(((rank, 0), requests, None))
    _poll_later()


def _poll_later(idle: int = 0) -> None:
    """Has this thread's event loop poll, after a pause if it has polled in vain too often."""
    with contextlib.suppress(RuntimeError):  # no loop: the process ends
        loop = asyncio.get_running_loop()
        if loop in _polls:
            _polls[loop].cancel()
        pause = min(max(idle - EAGER, 0) * STEP_S, LONGEST_S)
        if 0 < pause < 1e-3:  # for which the loop cannot sleep
            time.sleep(pause)
            pause = 0.0
        _polls[loop] = loop.call_later(pause, _poll, idle)


def _poll(idle: int) -> None:
    """Polls, and then again: without a pause if something has happened lately, later and later otherwise."""
    try:
        with _lock:
            idle = 0 if _step() else idle + 1
    except Exception:
        end_job(f"rank {WORLD.rank} on {HOST}: {traceback.format_exc()}")
    if _ends or global_manager.listeners or _under_way:
        _poll_later(idle)


def _step() -> bool:
    """Polls once. Returns whether anything has happened."""
    happened, status, waiting = False, MPI.Status(), set[tuple[int, int]]()
    while (message := WORLD.improbe(MPI.ANY_SOURCE, HEAD, status)) is not None:
        rank, (number, port, head) = status.source, message.recv()
        content = [_room(*frame) if isinstance(frame, tuple) else frame for frame in head]
        parts = [part for frame, one in zip(content, head) if frame is not one for part in _parts(frame)]
        requests = [WORLD.Irecv(part, rank, FRAME) for part in parts]
        _under_way.append(((rank, number), requests, partial(_dispatch, (rank, number), port, content)))
    for one in list(_under_way):
        end, requests, arrived = one
        if end in waiting or not MPI.Request.Testall(requests):
            waiting.add(end)  # messages of a connection keep their order
            continue
        _under_way.remove(one)
        happened = True
        if arrived:
            arrived()
    return happened


def _room(on_device: bool, size: int) -> Any:
    """Memory for a frame: a GPU's, unless this process only passes the frame on. Dask's has large pages, which fault less."""
    cupy = sys.modules.get("cupy") if on_device else None
    return cupy.empty(size, "u1") if cupy else host_array(size)


def _dispatch(end: tuple[int, int], port: int, content: list[Any]) -> None:
    """Handles a message: one with a port requests a connection, one with frames has content, and an empty one closes."""
    if port and (listener := global_manager.listeners.get(_address(port))):
        comm = MpiComm(listener.address, content[0].decode(), end, listener.loop, listener.deserialize)
        listener.loop.add_callback(listener._handle_stream, comm)
    elif port:
        _send(end, [])
    elif known := _ends.get(end) if content else _ends.pop(end, None):  # none if it is closed
        queue, loop = known
        loop.add_callback(queue.put_nowait, content or _EOF)


@atexit.register  # before mpi4py ends MPI, which waits for all ranks, but not for messages
def _finish() -> None:
    """Receives what the other ranks still send, until all of them end, or `FLUSH_S` have passed."""
    if WORLD.size > 1 and hasattr(sys, "last_value"):  # the others wait for this rank
        end_job(f"rank {WORLD.rank} on {HOST}: {sys.last_value}")
    deadline, all_end = time.monotonic() + FLUSH_S, None
    while not (all_end and all_end.Test()) and time.monotonic() < deadline:
        with _lock:
            _step()
        if not _under_way and not all_end:
            all_end = WORLD.Ibarrier()
        time.sleep(1e-3)
    if any(not arrived for *_, arrived in _under_way):
        end_job(f"rank {WORLD.rank} has waited {FLUSH_S:g} s for other ranks to receive messages")


# ---- connections ------------------------------------------------------------------------------------------------------------


class MpiComm(InProc):
    """One end of a connection.

    Args:
        local: Address of this end.
        remote: Address of the other end.
        end: Rank of the other end, and number of the connection, negative at the end that connects.
        loop: The event loop that reads.
        deserialize: Whether messages are deserialised.
    """

    def __init__(self, local: str, remote: str, end: tuple[int, int], loop: IOLoop, deserialize: bool) -> None:
        def put(frames: Any) -> None:
            if frames is _EOF:
                _ends.pop(end, None)
            _send(end, [] if frames is _EOF else frames)

        queue = Queue()
        _ends[end] = queue, loop
        super().__init__(local, remote, queue, SimpleNamespace(put_nowait=put), loop, deserialize)

    same_host = Comm.same_host  # type: ignore[assignment]

    async def write(self, msg: Any, serializers: Any = None, on_error: str | None = "message") -> int:
        """Sends a message. Returns its bytes, which may still be under way."""
        context = {"sender": self.local_info, "recipient": self.remote_info, **self.handshake_options}
        # Not in shards: parts of a frame would have to be joined by a copy.
        options = {"serializers": _families(serializers), "on_error": on_error, "frame_split_size": sys.maxsize}
        frames = await to_frames(msg, self.allow_offload, context=context, **options)
        if self.closed():
            raise CommClosedError(f"{self.peer_address} has closed the connection")
        self._write_q.put_nowait(frames)
        return sum(map(nbytes, frames))

    async def frames(self) -> Any:
        """Waits for the next message, and returns its frames. Raises `CommClosedError` if the connection is closed."""
        try:
            return await super().read()
        except BaseException:
            self.abort()  # as Dask's other comms do: the next message would be unknown
            raise

    async def read(self, deserializers: Any = None) -> Any:
        """Waits for the next message. Raises `CommClosedError` if the connection is closed."""
        return await from_frames(await self.frames(), self.deserialize, _families(deserializers), self.allow_offload)


def _families(given: Any) -> Any:
    """Serialisers that leave arrays of GPUs where they are, if MPI can read them there and Dask names no others."""
    if given is not None or "cupy" not in sys.modules:
        return given
    from hzero.comm.mpi_wires import gpu_aware  # imports torch

    return ("cuda", "dask", "pickle", "error") if gpu_aware() else None


# ---- what Dask calls --------------------------------------------------------------------------------------------------------


class MpiListener(InProcListener):
    """Accepts connections at a port of this process.

    Args:
        location: What Dask was told to listen at. Only a port in it counts; 0 or none is a new one.
        handler: Called with each connection.
        deserialize: Whether connections deserialise messages.
    """

    def __init__(self, location: str, handler: Any, deserialize: bool) -> None:
        digits = location.replace("/", ":").rpartition(":")[2]
        port = int(digits or 0) or next(port for port in _ports if _address(port) not in global_manager.listeners)
        super().__init__(_address(port), handler, deserialize)

    async def start(self) -> None:
        """Begins to listen. Raises ``RuntimeError`` if a listener has the port already."""
        await super().start()
        _poll_later()

    listen_address = contact_address = property(attrgetter("address"))  # type: ignore[assignment]


class MpiBackend(InProcBackend, Connector, RequireEncryptionMixin):
    """The scheme ``mpi`` of Dask's registry."""

    prefix, encrypted = PREFIX, False

    def get_connector(self) -> MpiBackend:
        """What connects."""
        return self

    def get_listener(self, loc: str, handle_comm: Any, deserialize: bool, **arguments: Any) -> MpiListener:
        """What listens."""
        self._check_encryption(loc, arguments)
        return MpiListener(loc, handle_comm, deserialize)

    async def connect(self, address: str, deserialize: bool = True, **arguments: Any) -> MpiComm:
        """Connects to an address without its scheme.

        Raises:
            CommClosedError: Nothing listens there yet.
            FatalCommClosedError: There is no such rank.
        """
        self._check_encryption(address, arguments)
        _, rank, port = parsed(address)
        if not 0 <= rank < WORLD.size:
            raise FatalCommClosedError(f"mpi://{address}: found rank {rank}; expected 0 to {WORLD.size - 1}")
        end = rank, -next(_numbers)
        comm = MpiComm(_address(0), PREFIX + address, end, IOLoop.current(), deserialize)
        _send(end, [comm.local_address.encode()], port)
        try:  # listeners begin with a handshake, which `distributed.comm.connect` reads again
            comm._read_q.put_nowait(await comm.frames())
        except CommClosedError:
            raise CommClosedError(f"nothing listens at {comm.peer_address}") from None
        return comm

    def get_address_host(self, loc: str) -> str:
        """The host in an address."""
        return parsed(loc)[0]

    def get_local_address_for(self, loc: str) -> str:
        """Where to listen to reach an address."""
        return _address(0).removeprefix(PREFIX)


backends["mpi"] = MpiBackend()  # a checkout on the path has no entry points
