"""Dask's messages over MPI: addresses ``mpi://HOST:PORT`` for clusters whose processes are ranks of one MPI job.

A connection is one of Dask's over TCP, on which only the handshake travels, and then for each message the bell, the size of its
head. So Dask listens, connects and closes as usual, and a process that waits sleeps in the kernel, since no call of MPI does. If
a peer dies, the system closes its end over TCP, which soon ends the calls that wait for its messages over MPI. In the handshake
each end names its rank and the tag of the messages to it. A tag is used again when its connection is closed, after what nobody
has read is received.

Anyone who reaches a port can connect, and Dask's handshake runs code. So before it, both ends prove that they have the job's key,
which rank 0 sends to all ranks over MPI. Only ranks of one job can connect.

A message is a head and its frames. Short frames are in the head. Each other frame follows as a message of MPI, from the memory
into which Dask serialised and into the memory from which Dask deserialises, both of which may be a GPU's. MPI makes progress
only during its calls, so both ends poll until it has moved the frames, and every process now and then, since MPI may call a
message sent that it has only copied.

Use any Dask launcher that starts processes as ranks, such as dask-mpi with ``protocol="mpi"``. Messages travel on
``MPI.COMM_WORLD``, since making another communicator would need all ranks at once.
"""

import asyncio
import atexit
import contextlib
import hmac
import itertools
import secrets
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

from distributed.comm.core import CommClosedError
from distributed.comm.registry import backends
from distributed.comm.tcp import TCP, TCPBackend, TCPConnector, TCPListener
from distributed.comm.utils import from_frames, to_frames
from distributed.protocol.utils import host_array
from distributed.utils import nbytes
from mpi4py import MPI
from tornado.ioloop import PeriodicCallback
from tornado.iostream import IOStream, StreamClosedError

from hzero.errors import ConfigError

HOST, WORLD = MPI.Get_processor_name(), MPI.COMM_WORLD
#: Key of the rank and the tag in a handshake.
JOB = "hzero rank and tag"
#: The tags of messages, in turn: large ones, since programs use small ones. Every MPI has 32,767, so at least `MOST` of them.
TAGS, MOST = itertools.cycle(range(16384, int(WORLD.Get_attr(MPI.TAG_UB) or 32767))), 16383
#: Bytes of a frame that is in a head, which MPIs send at once, and of a part of a frame, which every MPI can count.
SHORT, LONGEST = 1 << 12, 1 << 30
#: Seconds for which frames are polled without a pause, and the longest pause between calls of MPI.
BUSY_S, PAUSE_S = 0.05, 0.01
#: Seconds after which nothing more of a closed connection's messages travels, and that the end of the process waits for messages.
LINGER_S, FLUSH_S = 1.0, 10.0

#: The job's key, and the messages that carry it. Connections use higher tags.
_key = bytearray(secrets.token_bytes(32)) if WORLD.rank == 0 else bytearray(32)
_keys = (
    [WORLD.Isend(_key, rank, 16383) for rank in range(1, WORLD.size)]
    if WORLD.rank == 0
    else [WORLD.Irecv(_key, 0, 16383)]
)

_comms: weakref.WeakValueDictionary[int, "MpiComm"] = weakref.WeakValueDictionary()  # by tag
_loops: weakref.WeakSet[Any] = weakref.WeakSet()  # which let MPI make progress
_under_way: list[list[MPI.Request]] = []  # MPI still reads or writes their frames
_lock = threading.Lock()  # loops of several threads must not test the same requests at once


def end_job(why: str) -> None:
    """Ends all ranks."""
    print(f"hzero: {why}; the job ends", file=sys.stderr, flush=True)
    time.sleep(1.0)  # until the launcher has the message: it stops reading when a rank aborts
    WORLD.Abort(1)


@atexit.register  # before mpi4py ends MPI, which waits for all ranks, but not for messages
def _finish() -> None:
    """Receives what the other ranks still send, until all of them end, or `FLUSH_S` have passed."""
    if WORLD.size > 1 and hasattr(sys, "last_value"):  # the others wait for this rank
        end_job(f"rank {WORLD.rank} on {HOST}: {sys.last_value}")
    deadline, all_end = time.monotonic() + FLUSH_S, None
    while (all_end is None or not all_end.Test()) and time.monotonic() < deadline:
        _discard(MPI.ANY_TAG)
        if all_end is None and not _under_way:
            all_end = WORLD.Ibarrier()
        time.sleep(1e-3)
    if all_end is None:
        end_job(f"rank {WORLD.rank} has waited {FLUSH_S:g} s for other ranks to receive messages")


def _discard(tag: int) -> None:
    """Receives messages that nobody reads, unless a connection has the tag, and forgets those that others have received."""
    status = MPI.Status()
    while tag not in _comms and (message := WORLD.improbe(MPI.ANY_SOURCE, tag, status)):
        message.Recv(host_array(status.Get_count(MPI.BYTE)))
    with _lock:
        _under_way[:] = itertools.filterfalse(MPI.Request.Testall, _under_way)


async def _done(requests: list[MPI.Request], comm: TCP) -> None:
    """Waits until MPI has done all requests. Raises `CommClosedError` if the connection has been closed for `LINGER_S`."""
    began = now = opened = time.monotonic()
    with _lock:
        _under_way.append(requests)
    # Calls of MPI are few, since each lets another thread run, which may keep Python's lock for milliseconds.
    while not _tested(requests):
        if now - opened > LINGER_S:
            raise CommClosedError(f"{comm.peer_address} has closed the connection")
        await asyncio.sleep(min(max(now - began - BUSY_S, 0.0) / 4, PAUSE_S))
        now = time.monotonic()
        opened = opened if comm.closed() else now


def _tested(requests: list[MPI.Request]) -> bool:
    """Returns whether MPI has done all requests, and then forgets them."""
    with _lock:
        if (done := MPI.Request.Testall(requests)) and requests in _under_way:
            _under_way.remove(requests)
        return bool(done)


def _described(frame: Any) -> bytearray | tuple[bool, int]:
    """What the head has of a frame: its bytes if they are few, otherwise whether a GPU has it, and its size."""
    if on_device := hasattr(frame, "__cuda_array_interface__"):
        sys.modules["cupy"].cuda.runtime.deviceSynchronize()  # MPI has no streams
    return (on_device, nbytes(frame)) if on_device or nbytes(frame) > SHORT else bytearray(frame)


def _room(on_device: bool, size: int) -> Any:
    """Memory for a frame: a GPU's, unless this process only passes the frame on. Dask's has large pages, which fault less."""
    cupy = sys.modules.get("cupy") if on_device else None
    return cupy.empty(size, "u1") if cupy else host_array(size)


def _parts(frames: list[Any], head: list[Any]) -> Iterator[list[Any]]:
    """What MPI sends or receives of the frames that are not in the head."""
    for frame, (_, size) in ((frame, one) for frame, one in zip(frames, head) if isinstance(one, tuple)):
        yield from ([frame, (min(LONGEST, size - at), at), MPI.BYTE] for at in range(0, size, LONGEST))


class MpiComm(TCP):
    """One end of a connection, with the arguments of Dask's `TCP`."""

    def __init__(self, stream: IOStream, *arguments: Any) -> None:
        super().__init__(stream, *arguments)
        self.bells, self.loop = stream, stream.io_loop
        if self.loop not in _loops:
            _loops.add(self.loop)
            PeriodicCallback(WORLD.Iprobe, 1000 * PAUSE_S).start()  # type: ignore[arg-type]
        self.tag = next((tag for tag in itertools.islice(TAGS, MOST) if tag not in _comms), -1)
        if self.tag < 0:
            self.abort()
            raise ConfigError(f"{self.peer_address}: found {MOST:,} connections of this process; expected fewer")
        _discard(self.tag)
        _comms[self.tag] = self

    def handshake_info(self) -> dict[str, Any]:
        """What the other end gets to know of this one."""
        return {**super().handshake_info(), JOB: (WORLD.rank, self.tag)}

    async def write(self, msg: Any, serializers: Any = None, on_error: str = "message") -> int:
        """Sends a message. Returns its bytes when they may be changed."""
        if JOB not in self.remote_info:  # the handshake
            return int(await super().write(msg, serializers, on_error))
        if serializers is None and "cupy" in sys.modules:
            from hzero.comm.mpi_wires import gpu_aware  # imports torch

            # Arrays stay in the GPU's memory if MPI can read them there.
            serializers = ("cuda", "dask", "pickle", "error") if gpu_aware() else None
        context = {"sender": self.local_info, "recipient": self.remote_info, **self.handshake_options}
        # Not in shards: parts of a frame would have to be joined by a copy.
        options = {"serializers": serializers, "on_error": on_error, "frame_split_size": sys.maxsize}
        frames = await to_frames(msg, self.allow_offload, context=context, **options)
        if self.bells.closed():
            raise CommClosedError(f"{self.peer_address} has closed the connection")
        (rank, tag), head = self.remote_info[JOB], [_described(frame) for frame in frames]
        packed = MPI.pickle.dumps(head)
        requests = [WORLD.Isend(part, rank, tag) for part in (packed, *_parts(frames, head))]
        self.bells.write(len(packed).to_bytes(8, "little"))
        await _done(requests, self)
        return sum(map(nbytes, frames))

    async def read(self, deserializers: Any = None) -> Any:
        """Waits for the next message. Raises `CommClosedError` if the connection is closed, or closes before all has come."""
        if JOB not in self.remote_info:
            return await super().read(deserializers)
        rank, _ = self.remote_info[JOB]
        try:
            packed = host_array(int.from_bytes(await self.bells.read_bytes(8), "little"))
            await _done([WORLD.Irecv(packed, rank, self.tag)], self)
            head = MPI.pickle.loads(packed)
            frames = [_room(*one) if isinstance(one, tuple) else one for one in head]
            await _done([WORLD.Irecv(part, rank, self.tag) for part in _parts(frames, head)], self)
        except BaseException as error:
            self.abort()  # as Dask's other comms do: the next message would be unknown
            if isinstance(error, (StreamClosedError, MPI.Exception)):  # of MPI: the peer is gone
                raise CommClosedError(f"{self.peer_address} has closed the connection") from None
            raise
        return await from_frames(frames, self.deserialize, deserializers, self.allow_offload)

    def abort(self) -> None:
        """Closes the connection. What has not been read is lost."""
        # After the end of the loop, the tag's next connection discards what has not been read.
        if _comms.pop(self.tag, None) and not self.loop.asyncio_loop.is_closed():  # type: ignore[attr-defined]
            self.loop.call_later(LINGER_S, _discard, self.tag)
        super().abort()

    async def close(self) -> None:  # type: ignore[override]
        """Closes the connection when all bells are sent."""
        await super().close()
        self.abort()


async def _proves(stream: IOStream, listens: bool) -> bool:
    """Shows the other end of a stream that this one has the job's key, and returns whether the other end has it."""
    if WORLD.rank:
        MPI.Request.Waitall(_keys)
    roles, ours = (b"listens", b"connects")[:: 1 if listens else -1], secrets.token_bytes(32)
    await stream.write(ours)
    await stream.write(hmac.digest(_key, roles[0] + await stream.read_bytes(32), "sha256"))
    return hmac.compare_digest(hmac.digest(_key, roles[1] + ours, "sha256"), await stream.read_bytes(32))


class MpiConnector(TCPConnector):
    """Connects to an address."""

    prefix, comm_class = "mpi://", MpiComm  # type: ignore[assignment]

    async def connect(self, *arguments: Any, **options: Any) -> Any:
        """Raises `CommClosedError` if the listener is of another job."""
        comm = await super().connect(*arguments, **options)
        with contextlib.suppress(StreamClosedError):
            if await _proves(comm.bells, listens=False):
                return comm
        comm.abort()
        raise CommClosedError(f"{comm.peer_address} is of another job")


class MpiListener(TCPListener):
    """Accepts connections at an address."""

    prefix, comm_class = "mpi://", MpiComm  # type: ignore[assignment]

    async def _prepare_stream(self, stream: IOStream, address: str) -> IOStream | None:
        with contextlib.suppress(StreamClosedError):
            if await _proves(stream, listens=True):
                return stream
        stream.close()
        return None


class MpiBackend(TCPBackend):
    """The scheme ``mpi`` of Dask's registry."""

    _connector_class, _listener_class = MpiConnector, MpiListener


backends["mpi"] = MpiBackend()  # a checkout on the path has no entry points
