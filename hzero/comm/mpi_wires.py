"""MPI wires: messages as bytes over an MPI communicator, in host memory or, if the MPI library can access it, GPU memory.

MPI computes no sums here. It makes progress only during its calls, so `MpiWork.wait` polls. This module makes no MPI call that
could block without limit, unless the rank can give up.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import cache, partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from hzero.calls import NoAnswer, in_time
from hzero.comm.watchdog import MissingPeerError
from hzero.comm.wires import DisagreementError, Lane
from hzero.errors import ConfigError, some

#: Function that starts one message, and the bytes to receive; None for a sent message.
_Post: TypeAlias = tuple[Callable[[], Any], int | None]
#: Maximum messages of one collective in flight (sent and received), and maximum bytes of one. A lane has one collective in
#: flight. A rank has at most 6 lanes for a stage and 6 for each parallel dimension, so fewer than 500 messages are in flight.
#: Cray MPICH fails with about 1,000 messages from GPU memory.
MESSAGES, MESSAGE_BYTES = 16, 16 << 20
#: Maximum seconds between two polls that count as waiting: a stopped process has not polled for its peers.
_UNSEEN_S = 1.0
#: Number of polls that only yield the core; then the first and the maximum sleep, in seconds.
_YIELDS, _FIRST_S, _LONGEST_S = 10, 2e-5, 1e-3
#: Tag of all messages, and number of tags for making communicators: MPI guarantees 32,767.
_TAG, _TAGS = 0x485A, 32749


def import_mpi() -> Any:
    """Returns mpi4py's ``MPI``. The first import initialises MPI, which waits for all ranks, as does its finalisation.

    Raises:
        ConfigError: mpi4py cannot be imported, or finds no MPI library.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"transport: found 'mpi', but mpi4py cannot be used ({why[:200]}); expected 'torch', or the extra mpi "
            "of hzero installed"
        ) from None
    return MPI


@cache
def gpu_aware() -> bool:
    """Whether the MPI library reports that it can access the memory of this torch's GPUs."""
    mpi = import_mpi()
    if "CRAY MPICH" in mpi.Get_library_version().upper():
        return os.environ.get("MPICH_GPU_SUPPORT_ENABLED") == "1"
    found = ctypes.CDLL(mpi.__file__)
    names = ("rocm", "hip") if torch.version.hip else ("cuda",)  # named rocm in Open MPI, hip in MPICH
    queries = (getattr(found, f"MPIX_Query_{name}_support", None) for name in names)
    return any(query() for query in queries if query is not None)


@cache
def abort_at_exit() -> None:
    """From now on, process exit aborts the MPI job: MPI_Finalize would wait for ranks that do not arrive."""
    atexit.register(_abort)


def _abort() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    time.sleep(1.0)  # the first abort ends other ranks, which may be printing their error
    import_mpi().COMM_WORLD.Abort(2)


class MpiWork:
    """Messages in flight.

    Args:
        wires: Their communicator.
        posts: Functions that start one message each. A message is started while fewer than `MESSAGES` are in flight.
        kept: Buffers to keep until all messages have ended.
    """

    def __init__(self, wires: MpiWires, posts: Iterable[_Post], kept: Sequence[torch.Tensor]) -> None:
        self._wires, self._posts, self._kept = wires, iter(posts), kept
        self._requests: list[Any] = []
        self._expected: list[int | None] = []
        self._started = time.monotonic()
        self._error: RuntimeError | None = wires.broken
        if self._error is None:
            for device in {tensor.device for tensor in kept if tensor.is_cuda}:
                torch.cuda.current_stream(device).synchronize()  # MPI has no streams
            wires.under_way.add(self)
            self._call(self._post)

    def wait(self) -> None:
        """Polls until all messages have ended.

        Raises:
            RuntimeError: MPI reports an error, or the timeout has passed. The communicator is then not used again.
        """
        looks, looked = 0, time.monotonic()
        while self._requests and self._error is None:
            now = time.monotonic()
            if now - looked > _UNSEEN_S:
                self._started += now - looked
            looked = now
            if self._call(self._look):
                continue
            if now - self._started > self._wires.timeout_s:
                self._fail(RuntimeError(f"MPI: not all messages have ended within {self._wires.timeout_s:g} s"))
            looks += 1
            if looks <= _YIELDS:  # a short message takes microseconds, a sleep at least fifty
                os.sched_yield()
            else:  # busy polling would take the core from peers
                time.sleep(min(_FIRST_S * (looks - _YIELDS), _LONGEST_S))
        if self._error is not None:
            raise self._error
        self._wires.under_way.discard(self)

    def _post(self) -> bool:
        for start, expected in itertools.islice(self._posts, MESSAGES - len(self._requests)):
            self._requests.append(start())
            self._expected.append(expected)
        return True

    def _look(self) -> bool:
        """Polls once and starts the next messages. Returns whether messages have ended since the last poll."""
        mpi = self._wires.mpi
        statuses = [mpi.Status() for _ in self._requests]
        try:
            ended = mpi.Request.Testsome(self._requests, statuses)
        except mpi.Exception:  # only says that a status has the error
            codes = [status.Get_error() for status in statuses]
            code = next((code for code in codes if code not in (mpi.SUCCESS, mpi.ERR_PENDING)), None)
            if code is None:
                raise
            self._fail(self._error_of(code))
            return True
        for index, status in zip(ended or (), statuses):
            expected = self._expected[index]
            if expected is not None and (count := status.Get_count(mpi.BYTE)) != expected:
                raise DisagreementError(f"a message of {count:,} bytes arrived; expected {expected:,}: ranks disagree")
        running = [(request, size) for request, size in zip(self._requests, self._expected) if request]
        self._requests, self._expected = [request for request, _ in running], [size for _, size in running]
        return bool(ended) and self._post()

    def _call(self, act: Callable[[], bool]) -> bool:
        """Returns the result of ``act``; stores an error of MPI or of the messages."""
        try:
            return act()
        except DisagreementError as error:
            self._fail(error)
        except self._wires.mpi.Exception as error:
            self._fail(self._error_of(error.Get_error_code()))
        return True

    def _error_of(self, code: int) -> RuntimeError:
        mpi = self._wires.mpi
        if mpi.Get_error_class(code) != mpi.ERR_TRUNCATE:
            return RuntimeError(f"MPI: {mpi.Get_error_string(code)}")
        sizes = sorted({size for size in self._expected if size is not None})
        return DisagreementError(
            f"a message arrived that is longer than the {some([f'{size:,}' for size in sizes], 4)} bytes that were "
            "expected: ranks disagree"
        )

    def _fail(self, error: RuntimeError) -> None:
        """Gives up all communicators of this process: peers may continue, so later messages would not match."""
        MpiWires.broken = self._error = error
        abort_at_exit()


class MpiWires:
    """An MPI communicator with the methods of `hzero.comm.wires.TorchWires`.

    This class implements all-to-alls as pairwise exchanges. All-gathers too, except short messages between many ranks, for which
    MPI needs fewer rounds. Message i of every rank goes to the rank i positions after it. A rank therefore always has as many
    messages to send as to receive, and the messages with the lowest i can always end.

    Args:
        mpi: mpi4py's ``MPI``.
        comm: The communicator, used only here.
        timeout_s: Maximum wait for one collective or message, in seconds.

    Attributes:
        broken: The reason why no communicator of this process can send; None if they can.
        under_way: Work that has not ended, whose buffers MPI may still use.
    """

    library_sums = False
    broken: RuntimeError | None = None

    def __init__(self, mpi: Any, comm: Any, timeout_s: float) -> None:
        self.mpi, self.comm, self.timeout_s = mpi, comm, timeout_s
        self.under_way: set[MpiWork] = set()
        self._rank, self._size = comm.Get_rank(), comm.Get_size()

    def all_gather(self, output: torch.Tensor, message: torch.Tensor) -> MpiWork:
        """As `TorchWires.all_gather`."""
        if message.nbytes <= MESSAGE_BYTES and 2 * (self._size - 1) > MESSAGES:
            post = partial(self.comm.Iallgather, self._buffer(message), self._buffer(output))
            return MpiWork(self, [(post, None)], (output, message))
        return self._swap(output.view(self._size, -1), lambda _: message, (output, message))

    def all_to_all(self, output: torch.Tensor, message: torch.Tensor, *uneven: Sequence[int]) -> MpiWork:
        """As `TorchWires.all_to_all`."""
        ranks, wholes = self._size, (output, message)
        sizes = [list(side) for side in uneven] or [[whole.numel() // ranks] * ranks for whole in wholes]
        return self._swap(output.split(sizes[0]), message.split(sizes[1]).__getitem__, wholes)

    def reduce_scatter(self, output: torch.Tensor, message: torch.Tensor) -> MpiWork:
        """Not there: the runtime computes all sums."""
        raise NotImplementedError

    def _swap(self, rows: Any, part: Callable[[int], torch.Tensor], kept: Sequence[torch.Tensor]) -> MpiWork:
        rows[self._rank].copy_(part(self._rank))
        places = [((self._rank - i) % self._size, (self._rank + i) % self._size) for i in range(1, self._size)]
        posts = (self._pair(rows[source], source, part(target), target) for source, target in places)
        return MpiWork(self, itertools.chain.from_iterable(posts), kept)

    def exchange(self, output: torch.Tensor, message: torch.Tensor, source: int, target: int) -> MpiWork:
        """As `TorchWires.exchange`."""
        return MpiWork(self, self._pair(output, source, message, target), (output, message))

    def broadcast(self, message: torch.Tensor, root: int) -> MpiWork:
        """As `TorchWires.broadcast`."""
        posts = [(partial(self.comm.Ibcast, self._buffer(segment), root), None) for segment in _segments(message)]
        return MpiWork(self, posts, (message,))

    def message(self, message: torch.Tensor, peer: int, *, sends: bool) -> MpiWork:
        """As `TorchWires.message`."""
        return MpiWork(self, self._one_way(message, peer, sends=sends), (message,))

    def _pair(self, received: torch.Tensor, source: int, sent: torch.Tensor, target: int) -> Iterator[_Post]:
        ways = self._one_way(received, source, sends=False), self._one_way(sent, target, sends=True)
        return (post for pair in itertools.zip_longest(*ways) for post in pair if post is not None)

    def _one_way(self, message: torch.Tensor, peer: int, *, sends: bool) -> Iterator[_Post]:
        start = self.comm.Isend if sends else self.comm.Irecv
        for segment in _segments(message):
            yield partial(start, self._buffer(segment), peer, _TAG), None if sends else segment.nbytes

    def _buffer(self, tensor: torch.Tensor) -> list[Any]:
        """Address and size of a tensor in host or GPU memory; MPI needs nothing else from DLPack."""
        return [self.mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes), self.mpi.BYTE]


def _segments(message: torch.Tensor) -> Sequence[torch.Tensor]:
    """Splits a message into parts of at most `MESSAGE_BYTES`; none for an empty message."""
    return message.view(-1).split(MESSAGE_BYTES) if message.numel() else ()


#: Communicators of this process, kept until its end.
made: dict[tuple[Lane, tuple[int, ...], timedelta], MpiWires] = {}


def check_usable() -> None:
    """Raises `ConfigError` if a wait of this process has failed."""
    if MpiWires.broken is not None:
        raise ConfigError(
            f"transport: found 'mpi', and an earlier wait of this process has failed ({MpiWires.broken}), so its ranks may "
            "send messages that no rank expects; restart the ranks"
        )


def communicator_of(lane: Lane, ranks: Sequence[int], timeout: timedelta) -> MpiWires:
    """Returns the communicator of ``ranks``, in this order; made at the first call. All its ranks must make the same call.

    Args:
        lane: Name of the communicator.
        ranks: World ranks.
        timeout: Maximum wait for one collective or message, and for all ranks to arrive.

    Raises:
        ConfigError: MPI cannot be used, or a wait of this process has failed.
        MissingPeerError: Not all ranks arrived within the timeout.
    """
    check_usable()
    key = (lane, tuple(ranks), timeout)
    if key not in made:
        world, within_s = world_of_mpi(), timeout.total_seconds()
        what = f"hzero: rank {dist.get_rank()} makes the MPI communicator of {lane[0]} {lane[1]}"
        tag = zlib.crc32(repr(key[:2]).encode()) % _TAGS
        try:
            comm = in_time(partial(world.Create_group, world.Get_group().Incl(list(ranks)), tag), within_s)
        except NoAnswer:
            abort_at_exit()
            raise MissingPeerError.of(f"{what}: no end within {within_s:g} s: ") from None
        except RuntimeError as error:
            raise MissingPeerError(f"{what}: {error}") from error
        made[key] = MpiWires(import_mpi(), comm, within_s)
    return made[key]


def world_of_mpi() -> Any:
    """Returns MPI's world, after checking that it equals torch.distributed's.

    Raises:
        ConfigError: It does not, or mpi4py or the MPI library lacks a required feature.
    """
    mpi = import_mpi()
    world, where = mpi.COMM_WORLD, "transport: found 'mpi'"
    of_mpi, of_torch = (world.Get_rank(), world.Get_size()), (dist.get_rank(), dist.get_world_size())
    if of_mpi != of_torch:
        raise ConfigError(
            f"{where}, but MPI has this process as rank {of_mpi[0]} of {of_mpi[1]}, and torch.distributed as rank "
            f"{of_torch[0]} of {of_torch[1]}; start the ranks with mpiexec or srun --mpi, or set 'torch'"
        )
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        raise ConfigError(f"{where}, but MPI has been initialised without MPI_THREAD_MULTIPLE, mpi4py's default")
    if "nccl" in dist.get_backend_config() and not gpu_aware():
        library = " ".join(mpi.Get_library_version().split("\n")[0].split())
        raise ConfigError(
            f"{where} on GPUs, but this MPI library does not report that it can access their memory ({library}; on Cray MPICH "
            "MPICH_GPU_SUPPORT_ENABLED=1); expected such a library, or 'torch'"
        )
    return world
