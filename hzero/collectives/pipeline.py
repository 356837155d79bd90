"""Pipeline: runs the hops of all chains in flight, and starts them in the order of submission."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.profiler import record_function

from hzero.collectives.transport import Pending
from hzero.collectives.wires import Lane, Pause
from hzero.validation import ConfigError

T = TypeVar("T")

#: Yields None when it has read its inputs, then each hop, or each of its rounds, when it has started it. Is resumed, behind
#: the chains that it comes after and when the hop has arrived, and returns the chain's result.
Hops: TypeAlias = Generator[Pending | None, None, T]
#: Time between two looks at the hops in flight where the backend announces arrivals; the same of the thread that moves them on
#: where it does not; and for which that thread stays when there are none. In seconds.
_LOOK_S, _POLL_S, _LINGER_S = 0.5, 0.001, 1.0
#: As many of `_POLL_S` as that thread lets pass at most, one more after each look at which no hop has arrived.
_MOST_POLLS = 10
#: How long hops under way may take to end after an exception, whose peers may never come, in seconds.
_AFTER_ERROR_S = 3.0
#: Time after which a process that waits for them says so, in seconds.
_TOLD_S = 10.0


class Streams(Protocol):
    """Streams of an asynchronous device."""

    def on(self, lane: Hashable) -> AbstractContextManager[Any]:
        """Makes the stream of a lane current."""

    def event(self) -> Any:
        """An event recorded on the current stream."""

    def wait(self, event: Any) -> None:
        """Makes the current stream wait for an event."""

    def used(self, tensor: torch.Tensor) -> None:
        """Keeps a tensor's memory until the current stream has passed this point."""


class Chain(Generic[T]):
    """The hops of one bucket behind one handle; made by `Pipeline.submit`.

    Attributes:
        done: Whether the result is there. On a device: whether all work has been enqueued.
    """

    def __init__(
        self, pipeline: Pipeline, hops: Hops[T], lanes: Sequence[Lane], after: Sequence[Chain[Any]] = ()
    ) -> None:
        self._pipeline = pipeline
        self._hops = hops
        self.done = self._busy = self._prepared = False
        self._after = list(after)
        self._pending: Pending | None = None
        self._result: T | None = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], None]] = []
        # The last step, which makes the result, has a queue too: results appear in the order of submission.
        self._lanes = tuple(dict.fromkeys(lanes))
        self._steps: deque[Hashable] = deque([*lanes, ("result", self._lanes)])
        self._read: Any = None
        self._finished: Any = None

    @torch.compiler.disable
    def wait(self) -> T:
        """Drives older chains as far as this one needs, and returns its result; may be called again.

        On a device the host does not wait: the current stream does.

        Raises:
            HopError: A hop of this chain, or of one that it waits for, failed.
        """
        return self._pipeline._wait(self)

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Calls ``callback`` once `wait` would return or raise at once, on any thread; now if it is so already.

        No chain goes on meanwhile, so it must not wait for another one.
        """
        with self._pipeline._lock:
            if not self.done:
                self._callbacks.append(callback)
                return
        callback()

    @torch.compiler.disable
    def wait_read(self) -> None:
        """On a device: makes the current stream wait until the chain has read its inputs, which may then be overwritten."""
        if self._read is not None:
            self._pipeline.streams.wait(self._read)  # type: ignore[union-attr]

    @property
    def _polled(self) -> bool:
        """Whether it waits for a hop whose arrival nobody announces."""
        return self._pending is not None and not self._pending.announced

    def _prepare(self) -> None:
        """Reads the inputs, once the chains that make them have ended."""
        for other in self._after:
            if other._error is not None:
                raise other._error
        self._after, self._prepared = [], True
        self._resume()

    def _resume(self) -> None:
        try:
            self._pending = next(self._hops)
        except StopIteration as stop:
            self._pending, self._result, self.done = None, stop.value, True


class Pipeline:
    """Starts hops as early as order allows.

    Each role and tier is a lane with a communicator of its own, so a weight never queues behind a gradient. On every
    lane hops start in the order in which their chains were submitted. All ranks submit the chains of a lane in the same
    order, so the ranks of a communicator enter its collectives alike, whatever the order in which results are waited
    for; and the oldest chain can always go on, so no chain waits for ever. (A chain may submit another one when it ends,
    which depends on the wires, if nobody else submits to the lanes of that one meanwhile.)

    On CPUs a lane has one hop in flight, since hops that share a wire all arrive late. Whoever waits moves all
    chains on. While nobody waits, a thread does, which sleeps until a hop arrives. A new chain starts its first hop
    before older ones are looked at, so that no wire idles.

    On a device all hops of a chain are enqueued when it is submitted. Each step runs on the stream of its lane, which
    waits for the hop that the step before it started. So a lane's next chain does not wait for the other hops of this one.

    On a device whose hops MPI carries, chains move as on CPUs, since only the host starts and ends such hops.

    Args:
        streams: Streams of an asynchronous device; None on CPUs, and where the host starts and ends hops.
        around: Made and entered around each step of a chain, where ``streams`` is None.

    Attributes:
        streams: As above.
        failures: Chains that have failed.
    """

    def __init__(
        self, streams: Streams | None = None, around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    ) -> None:
        self.streams = streams
        self._around = around
        self._queues: defaultdict[Hashable, deque[Chain[Any]]] = defaultdict(deque)
        self._running: list[Chain[Any]] = []
        self._lock = threading.RLock()  # of everything that chains do
        self._arrival, self._background = threading.Event(), threading.Event()
        self._mover: threading.Thread | None = None
        self._waited_for = self._polls = False
        self._waited_s, self._waiting_since = 0.0, 0.0
        self._broken: dict[Hashable, BaseException] = {}
        self.failures = 0
        self._steps = 0  # that have ended

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
        chain = Chain(self, hops, lanes, after)
        if self.streams is not None:
            self._enqueue(chain, self.streams)
            return chain
        with self._lock:
            for step in chain._steps:
                self._queues[step].append(chain)
            self._running.append(chain)
            self._advance(chain)
            self.pump()
            if chain._polled and not self._polls:
                self._polls = True
                self._background.set()
            if self._running and self._mover is None:
                self._mover = threading.Thread(target=self._move, name="hzero hops", daemon=True)
                self._mover.start()
        return chain

    def _enqueue(self, chain: Chain[Any], streams: Streams) -> None:
        for lane in chain._lanes:
            if lane in self._broken:
                raise self._broken[lane]
        before = streams.event()
        try:
            with streams.on(chain._steps[0]), lasting():
                for other in chain._after:
                    streams.wait(other._finished)
                streams.wait(before)
                chain._prepare()
                chain._read = streams.event()
            for step in chain._steps:
                with streams.on(step), lasting():
                    chain._resume()
                    chain._finished = streams.event()
        except BaseException as error:  # peers may have started the hops that are missing here
            self.failures += 1
            self._broken.update(dict.fromkeys(chain._lanes, error))
            raise

    def _move(self) -> None:
        """Moves chains on when hops arrive while nobody waits; ends when none has been in flight for a while."""
        torch.set_grad_enabled(False)  # of this thread
        looks, seen = 1, 0
        try:
            while True:
                lingers = not self._polls
                if self._background.wait(_LINGER_S if lingers else _POLL_S * looks):
                    lingers = False
                self._background.clear()
                with self._lock:
                    if lingers and not self._running:
                        self._mover = None
                        return
                    if not self._waited_for:
                        self.pump()
                    self._polls = any(chain._polled for chain in self._running)
                    looks, seen = min(looks + 1, _MOST_POLLS) if seen == self._steps else 1, self._steps
                self._arrival.set()  # what somebody waits for may have been done here
        except BaseException:
            self._mover = None  # the next submission starts another
            raise

    def _arrived(self) -> None:
        self._arrival.set()
        if not self._waited_for:
            self._background.set()

    def pump(self) -> None:
        """Advances all chains as far as they go without waiting."""
        with self._lock:
            for chain in list(self._running):
                self._advance(chain)

    def _advance(self, chain: Chain[Any]) -> None:
        while not chain.done and not chain._busy:
            if chain._pending is not None:
                if not chain._pending.arrived():
                    return
                self._leave(chain)
            if chain._prepared and self._queues[chain._steps[0]][0] is not chain:
                return
            if not all(other.done for other in chain._after):
                return
            try:
                if chain._prepared and chain._steps[0] in self._broken:
                    raise self._broken[chain._steps[0]]
                chain._busy = True  # what it does next may submit, and so pump
                with self._around(), lasting():
                    chain._resume() if chain._prepared else chain._prepare()
            except BaseException as error:
                self._fail(chain, error)
                if isinstance(error, Exception):  # whoever waits for the chain gets it
                    return
                raise
            finally:
                chain._busy = False
            if chain._pending is not None:
                chain._pending.announce(self._arrived)
        if chain.done and chain in self._running:
            self._leave(chain)
            self._running.remove(chain)
            self._tell(chain)

    @staticmethod
    def _tell(chain: Chain[Any]) -> None:
        callbacks, chain._callbacks = chain._callbacks, []
        for callback in callbacks:
            callback()

    def _leave(self, chain: Chain[Any]) -> None:
        """The chain's step is over: the next chain on its lane may take it."""
        chain._pending = None
        self._steps += 1
        self._queues[chain._steps.popleft()].popleft()

    def _fail(self, chain: Chain[Any], error: BaseException) -> None:
        """Keeps the error for whoever waits for the chain, which all ranks do at the same point.

        The chain must not hold up others, whose waits would never end. They fail alike where they need a lane on which
        this one has still to start a hop: its peers may have started theirs, and would pair it with the next chain's.
        """
        self.failures += 1
        chain._error, chain.done, chain._pending = error, True, None
        for step in chain._steps:
            self._queues[step].remove(chain)
            if step != ("result", chain._lanes):
                self._broken.setdefault(step, error)
        self._running.remove(chain)
        self._tell(chain)

    def _wait(self, chain: Chain[T]) -> T:
        if self.streams is not None:
            self.streams.wait(chain._finished)
            for tensor in _tensors(chain._result):
                self.streams.used(tensor)
        try:
            while not chain.done:
                self._arrival.clear()
                with self._lock:
                    self._waited_for = True
                    self._advance(chain)
                    self.pump()
                    pending = None if chain.done else self._needed(chain)
                if pending is not None:
                    # Never on one hop alone: its peers may wait for another chain, which only this rank can move on.
                    self._waiting_since = time.perf_counter()
                    with record_function("hzero: wait"):
                        self._arrival.wait(_LOOK_S) if pending.announced else self._poll()
                    self._waited_s += time.perf_counter() - self._waiting_since
                    self._waiting_since = 0.0
        finally:
            self._waited_for = False
        if self._arrival.is_set():  # since the last look
            self._background.set()
        if chain._error is not None:
            raise chain._error
        return chain._result  # type: ignore[return-value]

    def _poll(self) -> None:
        """Waits until a hop has arrived, any of those under way, where nobody announces it."""
        pause, end = Pause(), time.monotonic() + _LOOK_S
        while time.monotonic() < end:
            with self._lock:
                if any(chain._pending is not None and chain._pending.arrived() for chain in self._running):
                    return
            pause()

    def _needed(self, chain: Chain[Any]) -> Pending | None:
        """The hop whose arrival lets a chain go on: its own, or one of a chain that it comes after."""
        while chain._pending is None or chain._pending.arrived():
            first = next((other for other in chain._after if not other.done), self._queues[chain._steps[0]][0])
            if first is chain:
                return None
            chain = first
        return chain._pending

    def mend(self, lanes: Iterable[Hashable]) -> None:
        """Lets lanes be used again on which a chain has failed, for an engine whose wires are new; see `most_failures`."""
        for lane in lanes:
            self._broken.pop(lane, None)

    def drain(self) -> None:
        """Waits for all chains in flight. On CPUs all ranks must call it, since a hop needs its peers."""
        while True:
            with self._lock:
                first = self._running[0] if self._running else None
            if first is None:
                return
            first.wait()

    def end(self, within_s: float) -> bool:
        """On CPUs: runs chains until none is under way, and ignores their errors.

        Args:
            within_s: Gives up after this time.

        Returns:
            Whether all have ended.
        """
        pause, began, told = Pause(), time.monotonic(), False
        while self._running:
            self.pump()
            waited_s = time.monotonic() - began
            if waited_s > within_s:
                return False
            if waited_s > _TOLD_S and not told:
                told = True
                print(f"hzero: warning: {self._under_way()}: waits to end for its peers", file=sys.stderr, flush=True)
            pause()
        return True

    def _under_way(self) -> str:
        with self._lock:
            return next((str(chain._pending) for chain in self._running if chain._pending is not None), "a hop")


@contextlib.contextmanager
def lasting() -> Iterator[None]:
    """Inside, tensors are made that outlive an evaluation under `torch.inference_mode`: backward can save them later."""
    with torch.inference_mode(False), torch.no_grad():
        yield


_of_world: tuple[Any, Pipeline] | None = None


def shared_pipeline(
    streams: Streams | None, around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
) -> Pipeline:
    """The pipeline of this process: its engines share communicators, so their hops need one order.

    Args:
        streams: Streams for a new pipeline: the first of a world of torch.distributed.
        around: As for a pipeline.

    Raises:
        ConfigError: On a GPU: the pipeline is there, and has streams where these hops may have none, or the other way round.
    """
    global _of_world  # as the tier groups: for as long as the world lives
    _end_with_process()
    if _of_world is None or _of_world[0] is not dist.group.WORLD:
        _of_world = dist.group.WORLD, Pipeline(streams, around)
    found, plain = _of_world[1], contextlib.nullcontext
    if (found.streams is not None and around is not plain) or (streams is not None and found._around is not plain):
        raise ConfigError(
            "transport: found 'torch' and 'mpi' in one process on a GPU, where all hops need the same one"
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


def _tensors(result: Any) -> Iterator[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, (list, tuple)):
        for part in result:
            yield from _tensors(part)
