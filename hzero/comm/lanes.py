"""Lanes: what runs the hops of all chains, each tier's one after the other.

A lane is a thread on CPUs and a stream on an accelerator. It takes the hops of the chains that use it in the order in which
they were submitted, which is the same on all ranks. So ranks that submit alike start the collectives of a communicator alike.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.profiler import record_function

from hzero.comm.transport import Pending
from hzero.comm.wires import Lane
from hzero.config import TransportName
from hzero.validation import ConfigError

T = TypeVar("T")

#: Yields None when it has read its inputs, then each hop, or each of its rounds, when it has started it. Is resumed when the
#: hop has ended, and returns the chain's result.
Hops: TypeAlias = Generator[Pending | None, None, T]
#: How long hops under way may take to end after an exception, whose peers may never come, in seconds.
_AFTER_ERROR_S = 3.0
#: Time after which a process that waits for them says so, in seconds.
_TOLD_S = 10.0


class Chain(Generic[T]):
    """The hops of one bucket behind one handle; made by `Lanes.submit`.

    Attributes:
        done: Whether the result is there, or an error. On a device: whether all work has been enqueued.
    """

    def __init__(self, lanes: Lanes, hops: Hops[T], after: Sequence[Chain[Any]]) -> None:
        self.done = False
        self._lanes, self._hops, self._after = lanes, hops, after
        self._ended = 0  # hops
        self._changed = threading.Condition()
        self._result: T | None = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._read: Any = None
        self._finished: Any = None

    @torch.compiler.disable
    def wait(self) -> T:
        """Returns the chain's result when it is there; may be called again.

        On a device the host does not wait: the current stream does.

        Raises:
            HopError: A hop of this chain, or of one that it waits for, failed.
        """
        self._lanes.wait(self)
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Calls ``callback`` once `wait` would return or raise at once, on any thread; now if it is so already.

        A lane does not go on meanwhile, so it must not wait for another chain.
        """
        with self._changed:
            if not self.done:
                self._callbacks.append(callback)
                return
        callback()

    @torch.compiler.disable
    def wait_read(self) -> None:
        """On a device: makes the current stream wait until the chain has read its inputs, which may then be overwritten."""
        if self._read is not None:
            self._lanes.streams.wait(self._read)  # type: ignore[union-attr]

    def _resume(self) -> Pending | None:
        """Goes on to the next hop and starts it; None where there is none, or when the result is there."""
        try:
            return next(self._hops)
        except StopIteration as stop:
            self._end(stop.value, None)
            return None

    def _prepare(self) -> None:
        """Reads the inputs, once the chains that make them have ended."""
        after, self._after = self._after, ()
        for other in after:
            other._await()
            if other._error is not None:
                raise other._error
        self._resume()

    def _end(self, result: T | None, error: BaseException | None) -> None:
        with self._changed:
            self._result, self._error, self.done = result, error, True
            callbacks, self._callbacks = self._callbacks, []
            self._changed.notify_all()
        for callback in callbacks:
            callback()

    def _pass(self, hops: int) -> None:
        with self._changed:
            self._ended = hops
            self._changed.notify_all()

    def _await(self, hops: float = float("inf")) -> None:
        """Waits until as many hops have ended, or until the whole chain has."""
        if not self.done:
            with self._changed:
                self._changed.wait_for(lambda: self.done or self._ended >= hops)


class Lanes:
    """Runs the hops of chains.

    On CPUs a chain reads its inputs where it is submitted. Each hop, and what is computed before it, runs on the thread of its
    lane, once the chain's hop before it has ended. The last hop's lane makes the result.

    On a device all hops are enqueued when a chain is submitted. The stream of a hop's lane waits for the chain's hop before
    it. So it encodes the next chain's message while its own hop is under way. Results have streams of their own.

    On a device whose hops MPI carries, lanes are threads, since only the host starts and ends such hops.

    Args:
        streams: Streams of a device; None for threads.
        around: Made and entered around each part of a chain, where ``streams`` is None.

    Attributes:
        streams: As above.
        failures: Chains that have failed.
    """

    def __init__(
        self,
        streams: DeviceStreams | None = None,
        around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self.streams, self.failures, self._around = streams, 0, around
        self._jobs: dict[Lane | None, queue.SimpleQueue[Any]] = {}
        self._running: dict[Chain[Any], None] = {}
        self._changed = threading.Condition()  # of both
        self._under_way: dict[Lane | None, Pending] = {}
        self._broken: dict[Lane | None, BaseException] = {}
        self._waited_s = self._waiting_since = 0.0

    @property
    def waited_s(self) -> float:
        """Seconds for which `Chain.wait` has blocked until now, of all chains together."""
        since = self._waiting_since
        return self._waited_s + (time.perf_counter() - since if since else 0.0)

    def submit(self, hops: Hops[T], lanes: Sequence[Lane], after: Sequence[Chain[Any]] = ()) -> Chain[T]:
        """Starts a chain.

        Args:
            hops: Reads its inputs, starts a hop on each of ``lanes``, in this order, and makes the result. It may run on
                another thread.
            lanes: Lanes of the hops; that of a hop of several rounds once per round, one after the other.
            after: Chains whose results this one reads.

        Returns:
            The chain. Its inputs are read on this call, except where it comes after others.
        """
        chain = Chain(self, hops, after)
        if self.streams is not None:
            self._enqueue(chain, lanes, self.streams)
            return chain
        interrupt: BaseException | None = None
        try:
            if not after:
                with self._around(), lasting():
                    chain._resume()
                    if not lanes:
                        chain._resume()
        except BaseException as error:  # its lanes will know of it
            self._fail(chain, error)
            interrupt = None if isinstance(error, Exception) else error
        if lanes or not chain.done:
            with self._changed:  # chains have one order on all lanes
                self._running[chain] = None
                for job in _jobs(lanes):
                    self._lane(job[0]).put((chain, *job))
        if interrupt is not None:
            raise interrupt
        return chain

    # ---- threads ------------------------------------------------------------------------------------------------

    def _lane(self, lane: Lane | None) -> queue.SimpleQueue[Any]:
        if lane not in self._jobs:
            self._jobs[lane] = queue.SimpleQueue()
            name = f"hzero {' '.join(lane)}" if lane else "hzero"
            threading.Thread(target=self._serve, args=(self._jobs[lane],), name=name, daemon=True).start()
        return self._jobs[lane]

    def _serve(self, jobs: queue.SimpleQueue[Any]) -> None:
        torch.set_grad_enabled(False)  # of this thread
        while (job := jobs.get()) is not None:
            job() if callable(job) else self._run(*job)
            del job  # it holds a chain, and so its buffers

    def _run(self, chain: Chain[Any], lane: Lane | None, first: int, end: int, last: bool) -> None:
        """Runs the hops of a chain from ``first`` to ``end`` on their lane; the ``last`` lane makes the result."""
        chain._await(first)
        started = first
        error = chain._error or self._broken.get(lane)
        if error is None:
            try:
                if chain._after:
                    with self._around():
                        chain._prepare()
                while started < end:
                    with self._around():
                        pending = chain._resume()
                    started += 1
                    assert pending is not None, "it has as many hops as it has announced"
                    self._under_way[lane] = pending
                    pending.end()
                if last:
                    with self._around():
                        chain._resume()
                else:
                    chain._pass(end)
            except BaseException as raised:
                error = raised
            self._under_way.pop(lane, None)
        if error is not None:
            self._fail(chain, error)
            if started < end:  # peers may have started these hops, and would pair them with the next chain's
                self._broken.setdefault(lane, error)
        if last:
            with self._changed:
                del self._running[chain]
                self._changed.notify_all()

    def _fail(self, chain: Chain[Any], error: BaseException) -> None:
        """Keeps the error for whoever waits for the chain, which all ranks do at the same point."""
        if not chain.done:
            self.failures += 1
            chain._end(None, error)

    # ---- streams ------------------------------------------------------------------------------------------------

    def _enqueue(self, chain: Chain[Any], lanes: Sequence[Lane], streams: DeviceStreams) -> None:
        for lane in lanes:
            if lane in self._broken:
                raise self._broken[lane]
        before = streams.event()
        steps: list[Hashable] = [*lanes, ("result", *dict.fromkeys(lanes))]
        try:
            with streams.on(steps[0]), lasting():
                for other in chain._after:
                    streams.wait(other._finished)
                streams.wait(before)
                chain._prepare()
                chain._read = streams.event()
            for step in steps:
                with streams.on(step), lasting():
                    chain._resume()
                    chain._finished = streams.event()
        except BaseException as error:  # peers may have started the hops that are missing here
            self.failures += 1
            self._broken.update(dict.fromkeys(lanes, error))
            raise

    # ---- waits --------------------------------------------------------------------------------------------------

    def wait(self, chain: Chain[Any]) -> None:
        """Waits for the end of a chain, on a device as a stream."""
        if self.streams is not None:
            self.streams.wait(chain._finished)
            for tensor in _tensors(chain._result):
                self.streams.used(tensor)
        elif not chain.done:
            self._waiting_since = time.perf_counter()
            with record_function("hzero: wait"):
                chain._await()
            self._waited_s += time.perf_counter() - self._waiting_since
            self._waiting_since = 0.0

    def mend(self, lanes: Iterable[Lane]) -> None:
        """Lets lanes be used again on which a chain has failed, for an engine whose wires are new; see `most_failures`."""
        with self._changed:
            for lane in lanes:
                if lane in self._jobs:  # behind the jobs of chains that have failed
                    self._jobs[lane].put(partial(self._broken.pop, lane, None))
                else:
                    self._broken.pop(lane, None)

    def drain(self) -> None:
        """Waits for all chains in flight, which all ranks must do, since a hop needs its peers. Raises the error of one."""
        while under_way := [chain for chain in list(self._running) if not chain.done]:
            for chain in under_way:
                chain.wait()

    def end(self, within_s: float) -> bool:
        """On CPUs: waits until no chain is under way, whatever becomes of them.

        Args:
            within_s: Gives up after this time.

        Returns:
            Whether all have ended.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._running, min(within_s, _TOLD_S)) and within_s > _TOLD_S:
                hop = next(map(str, self._under_way.copy().values()), "a hop")
                print(f"hzero: warning: {hop}: waits to end for its peers", file=sys.stderr, flush=True)
                timeout = None if within_s == float("inf") else within_s - _TOLD_S
                self._changed.wait_for(lambda: not self._running, timeout)
            return not self._running


def _jobs(lanes: Sequence[Lane]) -> Iterator[tuple[Lane | None, int, int, bool]]:
    """Successive hops on one lane as one job: the lane, the first hop, the end, and whether it is the chain's last job."""
    first = 0
    for lane, same in itertools.groupby(lanes):
        end = first + len(list(same))
        yield lane, first, end, end == len(lanes)
        first = end
    if not lanes:
        yield None, 0, 0, True


@contextlib.contextmanager
def lasting() -> Iterator[None]:
    """Inside, tensors are made that outlive an evaluation under `torch.inference_mode`: backward can save them later."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _tensors(result: Any) -> Iterator[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, (list, tuple)):
        for part in result:
            yield from _tensors(part)


# ---- devices --------------------------------------------------------------------------------------------------------


class DeviceStreams:
    """One stream per lane, and one for the results of each kind of chain.

    Args:
        device: Makes streams and events: ``torch.cuda``, or an accelerator of DeepSpeed.
    """

    def __init__(self, device: Any) -> None:
        self.device = device
        self._streams: dict[Hashable, Any] = {}

    def on(self, lane: Hashable) -> AbstractContextManager[Any]:
        """Makes the stream of a lane current."""
        if lane not in self._streams:
            self._streams[lane] = self.device.Stream()
        return self.device.stream(self._streams[lane])  # type: ignore[no-any-return]

    def event(self) -> Any:
        """An event recorded on the current stream."""
        event = self.device.Event()
        event.record(self.device.current_stream())
        return event

    def wait(self, event: Any) -> None:
        """Makes the current stream wait for an event."""
        self.device.current_stream().wait_event(event)

    def join(self) -> None:
        """Makes the current stream wait for all that the lanes have been given."""
        for stream in self._streams.values():
            self.device.current_stream().wait_stream(stream)

    def used(self, tensor: torch.Tensor) -> None:
        """Keeps a tensor's memory until the current stream has passed this point."""
        tensor.record_stream(self.device.current_stream())


@contextlib.contextmanager
def host_steps(device: torch.device) -> Iterator[None]:
    """Around a part of a chain on a GPU whose hops the host starts and ends, as those over MPI, which knows no streams.

    Inputs may come from any stream and results go to any, so the host waits before the part for the device and after it for
    the part. It has not run on a GPU, and costs the overlap of encoding with compute.
    """
    torch.cuda.set_device(device)  # of this thread, which may be a lane's
    torch.cuda.synchronize(device)
    yield
    torch.cuda.current_stream().synchronize()


def lanes_of(device: str, transport: TransportName) -> Lanes:
    """The lanes of this process for hops of a transport on ``cpu`` or ``cuda``.

    Raises:
        ConfigError: As `shared_lanes`; or the lanes are there, and of the other one.
    """
    if device == "cpu" or transport == "torch":
        found = shared_lanes(None if device == "cpu" else DeviceStreams(torch.cuda))
        made_by = getattr(found.streams, "device", None)
        of_gpu = made_by is torch.cuda or getattr(made_by, "_name", "") == "cuda"  # or DeepSpeed's accelerator
        if of_gpu != (device != "cpu"):
            raise ConfigError(
                f"communicator: found a group of {device} beside hops of {'cuda' if of_gpu else 'cpu'} in one process; "
                "expected groups of one kind"
            )
        return found
    return shared_lanes(None, partial(host_steps, torch.device("cuda", torch.cuda.current_device())))


# ---- one process ----------------------------------------------------------------------------------------------------

_of_world: tuple[Any, Lanes] | None = None


def shared_lanes(
    streams: DeviceStreams | None, around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
) -> Lanes:
    """The lanes of this process: its engines share communicators, so their hops need one order.

    Args:
        streams: Streams for new lanes: the first of a world of torch.distributed.
        around: As for `Lanes`.

    Raises:
        ConfigError: On a GPU: the lanes are there, and have streams where these hops may have none, or the other way round.
    """
    global _of_world  # as the tier groups: for as long as the world lives
    _end_with_process()
    if _of_world is None or _of_world[0] is not dist.group.WORLD:
        _of_world = dist.group.WORLD, Lanes(streams, around)
    found, plain = _of_world[1], contextlib.nullcontext
    if (found.streams is not None and around is not plain) or (streams is not None and found._around is not plain):
        raise ConfigError(
            "transport: found 'torch' and 'mpi' in one process on a GPU; expected the same one for all hops"
        )
    return found


@functools.cache
def _end_with_process() -> None:
    """From now on no hop outlives its process group or the interpreter.

    A thread of gloo that reports a hop's end while the interpreter ends aborts the process. A script may end inside an
    accumulation window, and an exception anywhere.
    """
    stock, process = dist.destroy_process_group, os.getpid()

    @functools.wraps(stock)
    def destroy(group: Any = None) -> None:
        if group is None or group is dist.group.WORLD:
            _end_hops(after_error=sys.exc_info()[0] is not None)
        stock(group)

    def at_exit() -> None:
        if os.getpid() != process:  # a fork, which has no hops of its own
            return
        failed = hasattr(sys, "last_type")  # Python has printed an exception that nobody has caught
        if not _end_hops(after_error=failed) and failed:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    dist.destroy_process_group = c10d.destroy_process_group = destroy
    atexit.register(at_exit)


def _end_hops(after_error: bool) -> bool:
    """Waits for the hops under way: for as long as hops may take, since peers may be late, or shortly after an error."""
    if _of_world is None:
        return True
    return _of_world[1].end(_AFTER_ERROR_S if after_error else float("inf"))
