"""MPI wires: messages as bytes over a communicator of MPI, in host memory or where the MPI library reads it, in a GPU's.

MPI sums nothing here, announces nothing, and moves messages on only while somebody asks: `MpiWork.wait` does. None of its calls
that could wait without end is made where a rank could not give up.
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

from hzero.comm.peers import MissingPeerError
from hzero.comm.wires import DisagreementError, Lane
from hzero.validation import ConfigError, NoAnswer, in_time, some

#: Starts one message, and the bytes that have to arrive; None where it is sent.
_Post: TypeAlias = tuple[Callable[[], Any], int | None]
#: Messages of one collective under way at a time, sent and received, and bytes of one at most. A lane has one collective
#: under way, and a rank at most 6 lanes of a stage and 6 of each parallel dimension, so it stays below 500 messages: Cray
#: MPICH faults with about 1,000 of a GPU's.
MESSAGES, MESSAGE_BYTES = 16, 16 << 20
#: Longest time between two looks that counts as waiting, in seconds: a process that was stopped has not looked for its peers.
_UNSEEN_S = 1.0
#: Looks at which the core is only offered to others; then the first and the longest sleep, in seconds.
_YIELDS, _FIRST_S, _LONGEST_S = 10, 2e-5, 1e-3
#: The tag of all messages, and the tags for making communicators: MPI guarantees 32,767.
_TAG, _TAGS = 0x485A, 32749


def import_mpi() -> Any:
    """mpi4py's ``MPI``. The first import initialises MPI, which waits for all ranks, as its end does.

    Raises:
        ConfigError: It cannot be imported, or finds no MPI library.
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
    """Whether the MPI library says that it reads and writes the memory of this torch's GPUs."""
    mpi = import_mpi()
    if "CRAY MPICH" in mpi.Get_library_version().upper():
        return os.environ.get("MPICH_GPU_SUPPORT_ENABLED") == "1"
    found = ctypes.CDLL(mpi.__file__)
    names = ("rocm", "hip") if torch.version.hip else ("cuda",)  # ROCm is rocm in Open MPI and hip in MPICH
    asks = (getattr(found, f"MPIX_Query_{name}_support", None) for name in names)
    return any(ask() for ask in asks if ask is not None)


@cache
def abort_at_exit() -> None:
    """From now on the process ends by ending the MPI job: MPI_Finalize would wait for ranks that do not come."""
    atexit.register(_abort)


def _abort() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    time.sleep(1.0)  # the first to abort ends the others, which may be saying why as well
    import_mpi().COMM_WORLD.Abort(2)


class MpiWork:
    """Messages under way.

    Args:
        wires: Their communicator.
        posts: Start one message each; a message is started when fewer than `MESSAGES` are under way.
        kept: Buffers, which live until all messages have ended.
    """

    def __init__(self, wires: MpiWires, posts: Iterable[_Post], kept: Sequence[torch.Tensor]) -> None:
        self._wires, self._posts, self._kept = wires, iter(posts), kept
        self._requests: list[Any] = []
        self._expected: list[int | None] = []
        self._started = time.monotonic()
        self._error: RuntimeError | None = wires.broken
        if self._error is None:
            for device in {tensor.device for tensor in kept if tensor.is_cuda}:
                torch.cuda.current_stream(device).synchronize()  # MPI knows no streams
            wires.under_way.add(self)
            self._call(self._post)

    def wait(self) -> None:
        """Moves messages on until all have ended.

        Raises:
            RuntimeError: MPI says so, or they have not ended within the timeout; the communicator is not used again.
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
            if looks <= _YIELDS:  # a short message arrives within microseconds, and a sleep takes fifty at least
                os.sched_yield()
            else:  # a rank that looks all the time takes its core from those that it waits for
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
        """Whether messages have ended since the last look; starts the next ones."""
        mpi = self._wires.mpi
        statuses = [mpi.Status() for _ in self._requests]
        try:
            ended = mpi.Request.Testsome(self._requests, statuses)
        except mpi.Exception:  # says no more than that a status has the error
            codes = [status.Get_error() for status in statuses]
            code = next((code for code in codes if code not in (mpi.SUCCESS, mpi.ERR_PENDING)), None)
            if code is None:
                raise
            self._fail(self._error_of(code))
            return True
        for index, status in zip(ended or (), statuses):
            expected = self._expected[index]
            if expected is not None and (count := status.Get_count(mpi.BYTE)) != expected:
                raise DisagreementError(f"a message of {count:,} bytes has come, expected {expected:,}: ranks disagree")
        running = [(request, size) for request, size in zip(self._requests, self._expected) if request]
        self._requests, self._expected = [request for request, _ in running], [size for _, size in running]
        return bool(ended) and self._post()

    def _call(self, act: Callable[[], bool]) -> bool:
        """What a function returns; an error of MPI or of the messages is kept."""
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
            f"a message has come that is longer than the {some([f'{size:,}' for size in sizes], 4)} bytes that were "
            "expected: ranks disagree"
        )

    def _fail(self, error: RuntimeError) -> None:
        """Gives up: peers may not have, so nothing fits together any more, on any communicator of this process."""
        MpiWires.broken = self._error = error
        abort_at_exit()


class MpiWires:
    """A communicator of MPI with the methods of `hzero.comm.wires.TorchWires`.

    All-to-alls are pairwise exchanges of this class, and so are all-gathers but those of short messages between many ranks,
    which MPI does in fewer rounds. Message i of every rank goes to the rank i places behind it, so at any time a rank has as many
    messages to send as to receive, and those with the lowest i can always end.

    Args:
        mpi: mpi4py's ``MPI``.
        comm: The communicator, which nobody else uses.
        timeout_s: Longest wait for one collective or message.

    Attributes:
        broken: Why no communicator of this process can send any more; None while all is well.
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
        return self._swap(output, lambda _: message, (output, message))

    def all_to_all(self, output: torch.Tensor, message: torch.Tensor) -> MpiWork:
        """As `TorchWires.all_to_all`."""
        return self._swap(output, message.view(self._size, -1).__getitem__, (output, message))

    def _swap(self, output: torch.Tensor, part: Callable[[int], torch.Tensor], kept: Sequence[torch.Tensor]) -> MpiWork:
        rows = output.view(self._size, -1)
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
        both = zip(self._one_way(received, source, sends=False), self._one_way(sent, target, sends=True))
        return itertools.chain.from_iterable(both)

    def _one_way(self, message: torch.Tensor, peer: int, *, sends: bool) -> Iterator[_Post]:
        start = self.comm.Isend if sends else self.comm.Irecv
        for segment in _segments(message):
            yield partial(start, self._buffer(segment), peer, _TAG), None if sends else segment.nbytes

    def _buffer(self, tensor: torch.Tensor) -> list[Any]:
        """Address and size, which are all that MPI takes of what DLPack says, of a host's memory as of a GPU's."""
        return [self.mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes), self.mpi.BYTE]


def _segments(message: torch.Tensor) -> Sequence[torch.Tensor]:
    """Messages of at most `MESSAGE_BYTES`; none of an empty one."""
    return message.view(-1).split(MESSAGE_BYTES) if message.numel() else ()


#: The communicators of this process, which live as long as it.
made: dict[tuple[Lane, tuple[int, ...], timedelta], MpiWires] = {}


def check_usable() -> None:
    """Raises `ConfigError` if a wait of this process has failed."""
    if MpiWires.broken is not None:
        raise ConfigError(
            f"transport: found 'mpi', and an earlier wait of this process has failed ({MpiWires.broken}), so its ranks may "
            "send what others no longer expect; start the ranks again"
        )


def communicator_of(lane: Lane, ranks: Sequence[int], timeout: timedelta) -> MpiWires:
    """The communicator of ``ranks``, in this order; made at the first call. All its ranks must call alike.

    Args:
        lane: What it is for.
        ranks: Of the world.
        timeout: Longest wait for one collective or message, and for all ranks to come.

    Raises:
        ConfigError: MPI cannot be used, or a wait of this process has failed.
        MissingPeerError: Not all ranks have come within the timeout.
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
    """MPI's world, once it is known to be torch.distributed's.

    Raises:
        ConfigError: It is not, or mpi4py or the MPI library cannot do what is needed.
    """
    mpi = import_mpi()
    world, where = mpi.COMM_WORLD, "transport: found 'mpi'"
    of_mpi, of_torch = (world.Get_rank(), world.Get_size()), (dist.get_rank(), dist.get_world_size())
    if of_mpi != of_torch:
        raise ConfigError(
            f"{where}, but MPI has this process as rank {of_mpi[0]} of {of_mpi[1]}, and torch.distributed as rank "
            f"{of_torch[0]} of {of_torch[1]}; start the ranks with mpiexec, or with srun and its --mpi; possible without: 'torch'"
        )
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        raise ConfigError(f"{where}, but MPI has been initialised without MPI_THREAD_MULTIPLE, mpi4py's default")
    if "nccl" in dist.get_backend_config() and not gpu_aware():
        library = " ".join(mpi.Get_library_version().split("\n")[0].split())
        raise ConfigError(
            f"{where} on GPUs, but this MPI library does not say that it reads their memory ({library}; on Cray MPICH "
            "MPICH_GPU_SUPPORT_ENABLED=1); possible without: 'torch'"
        )
    return world
