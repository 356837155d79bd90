"""Lanes: run the hops of all chains, one after the other on each tier.

A chain is one run of a program: steps on this rank, a hop, more steps, the next hop, and so on to its result. A lane runs the
hops of its chains in the order of submission, which is the same on all ranks. So all ranks start the collectives of a
communicator in the same order. On CPU a lane is a thread (`ThreadLanes`), on an accelerator a place on a stream (`StreamLanes`).

A gather over the lanes ``intra_node`` (outer) and ``intra_package`` (inner) on CPU, from the request to the wait::

    thread     call                             effect
    caller     Weights.unshard > BoundProgram.run > ThreadLanes.submit
                   BoundProgram.compute(0)      reads the inputs and encodes them, unless other chains compute them
    outer lane ThreadLanes._serve
                   PreparedHop.start, .end      sends the message and waits for the others
    inner lane ThreadLanes._serve
                   BoundProgram.compute(1)      recodes the message
                   PreparedHop.start, .end
               ThreadLanes._finish              after the start of the lane's next hop, if that hop can start
                   BoundProgram.compute(2)      decodes the message: the result
    caller     Chain.wait                       returns the result

On a device, `StreamLanes.submit` makes the same calls, each on the stream of its lane. `PreparedHop.end` and `Chain.wait` then
make the current stream wait, not the host.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import math
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import SimpleNamespace
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.profiler import record_function

from hzero.comm.arena import Arena, Room
from hzero.comm.checksum import Verdict
from hzero.comm.watchdog import stop_watchdog
from hzero.comm.wires import Lane, Work, messages_dropped
from hzero.config import CollectiveOrder, Tier, TransportName
from hzero.errors import ConfigError

T = TypeVar("T")
#: Maximum wait for hops in flight after an exception, and for each thread at exit, in seconds: peers may never arrive.
_LONGEST_S = 3.0
#: Maximum number of checksum comparisons that wait on a device.
_UNREAD = 256


class Hop(Protocol):
    """A prepared hop, `hzero.comm.runtime.PreparedHop`."""

    lane: Lane
    room: int
    checksum: bool

    def start(self, message: torch.Tensor, output: torch.Tensor | None = None) -> Any:
        """Starts the hop and returns it in flight."""

    def end(self, flight: Any) -> None:
        """Waits for the hop."""


class Program(Protocol):
    """A program prepared for one bucket, `hzero.comm.runtime.BoundProgram`."""

    @property
    def hops(self) -> Sequence[Hop]:
        """The hops."""

    def compute(self, chain: Chain[Any], stage: int) -> None:
        """Runs the steps before hop ``stage``, or after the last hop. ``chain.value`` is their input and their output."""


class Call(NamedTuple):
    """Arguments of one run of a program, see `hzero.comm.runtime.BoundProgram.run`."""

    read: Callable[..., Any]
    then: Callable[[Any], Any] | None = None
    first_seed: int = 0
    seed: int = 0
    scale: float = 1.0
    into: Callable[[], Sequence[torch.Tensor] | None] | None = None


class Chain(Generic[T]):
    """One run of a program: its state between two hops, and a future of its result. `Lanes.submit` makes it.

    Attributes:
        program: The program.
        call: Arguments of the run; None once it has ended.
        after: Chains that compute the inputs, until these have been read.
        value: Output of the last step, at the end the result.
        flight: The hop in flight.
        steps: Steps of the program, prepared for the inputs.
        device: Device of the inputs.
        ended: Number of ended hops; infinite once there is a result or an error.
        error: The reason why there is no result.
        changed: Notifies of changes of the last two.
        on_end: Functions that are called at the end, on any thread.
    """

    def __init__(self, program: Program, call: Call, after: Sequence[Chain[Any]]) -> None:
        self.program, self.after = program, after
        self.call: Call | None = call
        self.value = self.flight = self.steps = self.device = None  # type: Any
        self.ended: float = 0
        self.error: BaseException | None = None
        self.changed = threading.Condition()
        self.on_end: list[Callable[[], None]] = []

    @property
    def done(self) -> bool:
        """Whether there is a result or an error. On a device: whether all work has been enqueued."""
        return self.ended == math.inf

    @torch.compiler.disable
    def wait(self) -> T:
        """Waits for the result and returns it; may be called again.

        On a device, the current stream waits, not the host.

        Raises:
            HopError: A hop of this chain, or of a chain that it depends on, failed.
        """
        if self.ended < math.inf:
            with record_function("hzero: wait"), self.changed:
                self.changed.wait_for(lambda: self.ended == math.inf)
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[no-any-return]

    def keep(self, room: Room | None) -> None:
        """On a device: replaces the buffer of the value, which the current stream has used last."""

    def take(self) -> T:
        """Returns the result and drops it. Only for the single chain that depends on this one."""
        result, self.value = self.value, None
        return result  # type: ignore[no-any-return]

    def wait_read(self) -> None:
        """On a device: makes the current stream wait until the chain has read its inputs. They may then be overwritten."""

    def future(self, device: torch.device) -> torch.futures.Future[T]:
        """Returns a future of PyTorch with the result, which is on ``device``. A failed chain raises in its ``wait``."""
        ended = torch.futures.Future[None](devices=[device] if device.type == "cuda" else None)
        # The error must be raised in a callback: DDP would use the value of `set_exception` as a result.
        result = ended.then(lambda _: self.wait())
        with self.changed:
            if not self.done:
                self.on_end.append(lambda: ended.set_result(None))
                return result
        ended.set_result(None)
        return result

    def await_hops(self, hops: float) -> None:
        """Waits until ``hops`` hops have ended, or the whole chain has."""
        with self.changed:
            self.changed.wait_for(lambda: self.ended >= hops)


class _DeviceChain(Chain[T]):
    """A chain on streams.

    Attributes:
        streams: The lanes.
        room: Buffer of the value.
        arriving: Buffer of the hop in flight.
        read_at: Event after the inputs have been read.
        finished_at: Event after the result.
    """

    def __init__(self, streams: StreamLanes, program: Program, call: Call, after: Sequence[Chain[Any]]) -> None:
        super().__init__(program, call, after)
        self.streams = streams
        self.room: Room | None = None
        self.arriving: Room | None = None
        self.read_at = self.finished_at = None  # type: Any

    def keep(self, room: Room | None) -> None:
        """As in `Chain`."""
        if self.room is not None:
            self.streams.arena.give(self.room)
        self.room = room

    @torch.compiler.disable
    def wait(self) -> T:
        """As in `Chain`."""
        if self.error is not None:
            raise self.error
        result: Any = self.value
        self.streams.wait(self.finished_at)
        for tensor in [result] if isinstance(result, torch.Tensor) else result or ():
            self.streams.used(tensor)
        return result  # type: ignore[no-any-return]

    @torch.compiler.disable
    def wait_read(self) -> None:
        """As in `Chain`."""
        if self.read_at is not None:
            self.streams.wait(self.read_at)

    def future(self, device: torch.device) -> torch.futures.Future[T]:
        """As in `Chain`. All work has been enqueued."""
        averaged = torch.futures.Future[T](devices=[device])
        with self.streams.on(None, results=True):  # the future records this stream, and its user waits for that
            averaged.set_result(self.wait())
        return averaged


class Lanes:
    """What lanes of every kind share.

    A chain takes its place on each of its lanes when it is submitted. All ranks submit chains in the same order, so the places
    have one order on all ranks. A hop runs after the previous hop of its chain, and after the chains that its chain reads. The
    first hop that has not ended can therefore always run, and no rank waits forever.

    Args:
        kind: Name of the device and transport.
        order: ``strict`` runs one hop at a time over all lanes, ``lanes`` one hop per lane.
        around: Makes a context for each computation of a chain.

    Attributes:
        kind: As above.
        order: As above.
        device: Makes streams and events of an asynchronous device; None if lanes are threads.
        arena: Buffers of an asynchronous device.
        in_order: Starts a collective after all earlier ones, see `StreamLanes.collective`; None starts it immediately.
        failures: Number of failed chains.
    """

    device: Any = None
    arena: Arena | None = None
    in_order: Callable[[Callable[..., Any]], Work] | None = None

    def __init__(
        self,
        kind: str = "cpu",
        order: CollectiveOrder = "lanes",
        around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self.kind, self.order, self.failures, self._around = kind, order, 0, around
        self._running: dict[Chain[Any], None] = {}
        self._changed = threading.Condition()  # guards `_running`
        self._broken: dict[Lane | None, BaseException] = {}

    @property
    def running(self) -> list[Chain[Any]]:
        """The chains in flight on threads."""
        return list(self._running)

    @property
    def apart(self) -> bool:
        """Whether each role has separate lanes, so that an urgent gather shares a link with a reduction instead of waiting.

        A device has too few hardware queues for this.
        """
        return self.device is None and self.order == "lanes"

    def submit(self, program: Program, call: Call, after: Sequence[Chain[Any]] = ()) -> Chain[Any]:
        """Starts a chain. All ranks of a lane submit its chains in the same order.

        Args:
            program: The program to run.
            call: Its arguments.
            after: Chains that compute the inputs. ``call.read`` receives them, and may take their results.

        Returns:
            The chain. This call has read its inputs, unless ``after`` has chains.
        """
        raise NotImplementedError

    def used(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns ``tensor``. On a device, keeps its memory until the current stream has passed this point."""
        return tensor

    def compare(self, comparison: Verdict) -> None:
        """Compares checksums: immediately, or in `verify` on an asynchronous device, where the host would have to wait."""
        comparison.check()

    def verify(self) -> None:
        """On an asynchronous device: waits for all messages so far, and compares their checksums.

        Raises:
            HopError: A message arrived corrupted.
        """

    def before_others(self) -> None:
        """Call before collectives outside the lanes. With ``strict``, a device's current stream waits for all submitted hops.

        All ranks call it between the same chains.
        """
        if self.order == "strict":
            self.join()

    def between(self, collective: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Calls a collective outside the lanes. With ``strict``, it and a device's hops have one order.

        Hops may start on streams that do not wait for the current one. All ranks call it between the same chains.
        """
        self.before_others()
        result = collective(*args, **kwargs)
        if self.in_order is not None:
            self.in_order(lambda **_: None)  # starts nothing
        return result

    def join(self) -> None:
        """On a device: makes the current stream wait for all hops submitted so far."""

    def drain(self) -> None:
        """Waits for all chains in flight. All ranks must call it, since a hop needs its peers. Raises the error of a chain.

        On a device, the current stream waits. Memory that is freed afterwards is reused only after the chains.
        """
        self.join()
        while under_way := [chain for chain in self.running if not chain.done]:
            for chain in under_way:
                chain.wait()

    def end(self, within_s: float | None) -> bool:
        """Waits until no chain is in flight on a thread, whether chains succeed or fail. None waits without a limit.

        Returns:
            Whether all chains have ended in time.
        """
        with self._changed:
            return self._changed.wait_for(lambda: not self._running, within_s)

    def _end(self, chain: Chain[Any], error: BaseException | None = None) -> BaseException | None:
        """Computes the result of a chain, or stores an error for its waiters, so that all ranks raise at the same point.

        Returns:
            An interrupt, if that is the error.
        """
        if error is None:
            try:
                with self._around():
                    chain.program.compute(chain, len(chain.program.hops))
            except BaseException as raised:
                error = raised
        if chain.ended < math.inf:
            self.failures += error is not None
            with chain.changed:
                chain.ended, chain.error, chain.after = math.inf, error, ()
                chain.call = chain.flight = None
                if error is not None:
                    chain.value = None
                chain.changed.notify_all()
            for call in chain.on_end:
                call()
        with self._changed:
            self._running.pop(chain, None)
            self._changed.notify_all()
        return None if error is None or isinstance(error, Exception) else error


class ThreadLanes(Lanes):
    """Lanes for CPU, and for a device whose hops the host starts and ends, such as over MPI. Each lane is a thread.

    A chain reads and encodes its inputs in `submit`, or on the thread of its first lane if it depends on other chains, ended or
    not. Each hop, and the computation between two hops, runs on the thread of a lane after the chain's previous hop. The lane of
    the last hop computes the result. If its next hop can start, it starts that one first.

    The threads are no pool of ``concurrent.futures``: at exit Python would wait for these, also for hops whose peers are gone.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._jobs: dict[Lane | None, queue.SimpleQueue[Any]] = {}

    def submit(self, program: Program, call: Call, after: Sequence[Chain[Any]] = ()) -> Chain[Any]:
        """As in `Lanes`."""
        chain = Chain[Any](program, call, after)
        lanes: list[Lane | None] = [*(hop.lane for hop in program.hops)] or [None]
        interrupt: BaseException | None = None
        if not after:
            with lasting():
                if not program.hops:
                    interrupt = self._end(chain)
                else:
                    try:
                        with self._around():
                            program.compute(chain, 0)
                    except BaseException as error:  # its lanes raise it to the waiters
                        interrupt = self._end(chain, error)
        if after or program.hops:
            with self._changed:
                if chain.ended < math.inf:
                    self._running[chain] = None
                for index, lane in enumerate(lanes):
                    place = lane if self.order == "lanes" else None
                    (self._jobs.get(place) or self._jobs_of(place)).put((chain, index, lane))
        if interrupt is not None:
            raise interrupt
        return chain

    def _jobs_of(self, lane: Lane | None) -> queue.SimpleQueue[Any]:
        """Makes the queue and the thread of a lane."""
        jobs = self._jobs[lane] = queue.SimpleQueue()
        name = f"hzero {' '.join(lane or ('lane',))}"
        threading.Thread(target=self._serve, args=(jobs,), name=name, daemon=True).start()
        return jobs

    def _serve(self, jobs: queue.SimpleQueue[Any]) -> None:
        """Runs a lane's hops. To keep links busy, it starts a ready next hop before it computes the result of the last one."""
        torch.set_grad_enabled(False)  # per thread
        arrived: Chain[Any] | None = None  # its last hop has ended, but its result has not been computed
        for chain, index, lane in iter(jobs.get, None):
            late = [other for other in chain.after if other.ended < math.inf]
            if arrived is not None and (late or chain.ended < index):  # maybe it waits for that result
                self._end(arrived)
                arrived = None
            for other in late:
                other.await_hops(math.inf)
            if chain.ended < index:
                chain.await_hops(index)
            errors = [chain.error, self._broken.get(lane), *(other.error for other in chain.after)]
            error, started = next((one for one in errors if one is not None), None), False
            dependent, hops = bool(chain.after), chain.program.hops
            if error is None and lane is not None:
                try:
                    with self._around():
                        if index or dependent:
                            chain.program.compute(chain, index)
                        chain.flight = hops[index].start(chain.value)
                    started = True
                    if arrived is not None:
                        self._end(arrived)
                        arrived = None
                    hops[index].end(chain.flight)
                except BaseException as raised:
                    error = raised
            if error is not None:
                self._end(chain, error)
                if not started and lane is not None:  # peers may have started it, and pair it with the next chain's
                    self._broken.setdefault(lane, error)
            elif lane is None:
                self._end(chain)
            elif index + 1 < len(hops):
                with chain.changed:
                    chain.ended = index + 1
                    chain.changed.notify_all()
            else:
                arrived = chain
            if arrived is not None and jobs.empty():
                self._end(arrived)
                arrived = None
            del chain, late, errors, error  # or the lane would keep the result alive
        if arrived is not None:
            self._end(arrived)

    def end(self, within_s: float | None) -> bool:
        """As in `Lanes`. The threads then end; a later chain would start new ones."""
        ended = super().end(within_s)
        with self._changed:
            for jobs in self._jobs.values():
                jobs.put(None)
            self._jobs = {}
        return ended


class StreamLanes(Lanes):
    """Lanes for an accelerator: places on at most six high-priority streams, and one stream per message direction.

    A device has few hardware queues, so tiers share a stream from the third one on. Steps before a hop run on the stream of its
    tier; results use other streams. The next message is thus encoded while a hop is in flight. With order ``strict``, all
    collectives share one stream, and all results share one.

    `submit` enqueues the whole chain. The stream of a hop's lane waits for the chain's previous hop.

    Args:
        device: Makes streams and events: ``torch.cuda`` or a DeepSpeed accelerator.
        kind: As in `Lanes`.
        order: As in `Lanes`.
    """

    def __init__(self, device: Any, kind: str = "cuda over torch", order: CollectiveOrder = "lanes") -> None:
        super().__init__(kind, order)
        self.device = device
        self.arena: Arena = Arena(self)
        self.in_order = self.collective if order == "strict" else None
        self._streams: dict[Any, Any] = {}
        self._tiers: dict[Tier | None, int] = {}
        self._unread: list[Verdict] = []

    def submit(self, program: Program, call: Call, after: Sequence[Chain[Any]] = ()) -> Chain[Any]:
        """As in `Lanes`."""
        chain = _DeviceChain[Any](self, program, call, after)
        with self._changed:  # threads of autograd submit too
            interrupt = self._enqueue(chain)
        if interrupt is not None:
            raise interrupt
        return chain

    def _enqueue(self, chain: _DeviceChain[Any]) -> BaseException | None:
        hops, started, before = chain.program.hops, 0, self.event()
        first, last = (hops[0].lane, hops[-1].lane) if hops else (None, None)
        try:
            with self.on(first, results=not hops), lasting():
                self.wait(before)
                for other in chain.after:
                    if other.error is not None:
                        raise other.error
                    self.wait(other.finished_at)  # type: ignore[attr-defined]
                if hops:
                    chain.program.compute(chain, 0)
                    chain.read_at = self.event()
            for stage, hop in enumerate(hops):
                if hop.lane in self._broken:
                    raise self._broken[hop.lane]
                with self.on(hop.lane), lasting():
                    if stage:
                        self._end_hop(chain, hops[stage - 1])
                        chain.program.compute(chain, stage)
                    self._start_hop(chain, hop)
                started += 1
            with self.on(last, results=True), lasting():
                if hops:
                    self._end_hop(chain, hops[-1])
                interrupt = self._end(chain)
                chain.keep(None)
                chain.finished_at = self.event()
                chain.read_at = chain.read_at or chain.finished_at
            return interrupt
        except BaseException as error:
            for hop in hops[started:]:  # peers may have started these hops, as in `ThreadLanes`
                self._broken.setdefault(hop.lane, error)
            return self._end(chain, error)

    def _start_hop(self, chain: _DeviceChain[Any], hop: Hop) -> None:
        message, room = chain.value, None
        if hop.room:
            room = self.arena.take(hop.room, message.device)
        chain.flight = hop.start(message, None if room is None else room.view)
        chain.arriving = room

    def _end_hop(self, chain: _DeviceChain[Any], hop: Hop) -> None:
        """Makes the current stream wait for a hop.

        The buffers belong to the lane's stream, which does not wait. They are kept until the current stream has passed this
        point. Buffers of the arena live longer anyway.
        """
        hop.end(chain.flight)
        if chain.room is None or chain.arriving is None or hop.checksum:
            self.used(chain.flight.message)
            self.used(chain.flight.output)
        if chain.flight.output is not chain.flight.message:
            chain.keep(chain.arriving)

    # ---- streams ------------------------------------------------------------------------------------------------

    def on(self, lane: Lane | None, *, results: bool = False) -> AbstractContextManager[Any]:
        """Makes the stream of a lane, or the stream for its results, current."""
        if lane is not None and len(lane) > 2:
            return self._on(lane)
        number = min(self._tiers.setdefault(lane and lane[1], len(self._tiers)), 2)
        return self._on(("results", 0 if self.order == "strict" else number) if results else ("hops", number))

    def _on(self, key: Any) -> AbstractContextManager[Any]:
        if key not in self._streams:
            self._streams[key] = self.device.Stream(priority=-1)
        return self.device.stream(self._streams[key])  # type: ignore[no-any-return]

    def collective(self, start: Callable[..., Any]) -> Work:
        """Starts a collective after all earlier ones, on their common stream."""
        before = self.event()
        with self._on("collectives"):
            self.wait(before)
            start(async_op=False)
            return SimpleNamespace(wait=partial(self.wait, self.event()))

    def event(self) -> Any:
        """Returns an event recorded on the current stream."""
        event = self.device.Event()
        event.record(self.device.current_stream())
        return event

    def wait(self, event: Any) -> None:
        """Makes the current stream wait for an event."""
        self.device.current_stream().wait_event(event)

    def join(self) -> None:
        """As in `Lanes`."""
        for stream in self._streams.values():
            self.device.current_stream().wait_stream(stream)

    def used(self, tensor: torch.Tensor) -> torch.Tensor:
        """As in `Lanes`."""
        tensor.record_stream(self.device.current_stream())
        return tensor

    def used_by_all(self, tensor: torch.Tensor) -> None:
        """Keeps a tensor's memory until all streams of lanes have passed this point."""
        for stream in self._streams.values():
            tensor.record_stream(stream)

    # ---- checksums ----------------------------------------------------------------------------------------------

    def compare(self, comparison: Verdict) -> None:
        """As in `Lanes`."""
        self._unread.append(comparison)
        if len(self._unread) >= _UNREAD:
            self.verify()

    def verify(self) -> None:
        """As in `Lanes`."""
        unread, self._unread = self._unread, []
        if not unread:
            return
        self.join()
        for comparison in unread:
            self.used(comparison.sent)
            self.used(comparison.arrived)
        sent, arrived = (torch.cat([getattr(one, side) for one in unread]) for side in ("sent", "arrived"))
        if not torch.equal(sent, arrived):
            for comparison in unread:
                comparison.check()


@contextlib.contextmanager
def host_steps(device: int) -> Iterator[None]:
    """Wraps a part of a chain on a GPU whose hops the host starts and ends, such as over MPI, which has no streams.

    Inputs may come from any stream, and any stream may read results. So the host waits for the device before the part, and for
    the part after it. This has not run on a GPU. It prevents the overlap of encoding with compute.
    """
    torch.cuda.set_device(device)  # per thread, and lanes have their own
    torch.cuda.synchronize()
    yield
    torch.cuda.current_stream().synchronize()


def lasting() -> AbstractContextManager[Any]:
    """Context in which tensors outlive an evaluation under `torch.inference_mode`, so that backward can save them later."""
    if not torch.is_inference_mode_enabled():
        return torch.no_grad()  # the usual case, without a stack: every module calls this
    stack = contextlib.ExitStack()
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.no_grad())
    return stack


# ---- one process ----------------------------------------------------------------------------------------------------

_of_world: tuple[Any, Lanes] | None = None


def shared_lanes(device: Any = None, transport: TransportName = "torch", order: CollectiveOrder | None = None) -> Lanes:
    """Returns the lanes of this process, one set per world of torch.distributed: engines share communicators.

    Args:
        device: An asynchronous device whose memory hops carry: ``torch.cuda`` or a DeepSpeed accelerator. None: CPU.
        transport: Transport of the messages.
        order: As in `Lanes`; None accepts the order of existing lanes. New lanes are strict on ROCm, since RCCL can deadlock
            with several communicators in flight (ROCm/rccl#2191).

    Raises:
        ConfigError: Lanes exist with another device, transport or order. Or MPI is no longer usable.
    """
    global _of_world
    if transport == "mpi":
        from hzero.comm.mpi_wires import check_usable

        check_usable()
    _end_with_process()
    name = "cpu" if device is None else getattr(device, "_name", "cuda")
    kind = name if name == "cpu" else f"{name} over {transport}"
    if _of_world is None or _of_world[0] is not dist.group.WORLD:
        if _of_world is not None:  # a destroyed world
            _of_world[1].end(0)
        new_order = order or ("strict" if device is not None and torch.version.hip else "lanes")
        lanes: Lanes
        if device is None:
            lanes = ThreadLanes(kind, new_order)
        elif transport == "mpi":  # only the host can start and end its hops
            lanes = ThreadLanes(kind, new_order, partial(host_steps, device.current_device()))
        else:
            lanes = StreamLanes(device, kind, new_order)
        _of_world = dist.group.WORLD, lanes
    found = _of_world[1]
    if found.kind != kind:
        raise ConfigError(
            f"transport: found hops of {kind} and of {found.kind} in one process; expected one kind, since their order must be "
            "the same on all ranks: give all engines and communicators one device and transport"
        )
    if order not in (None, found.order):
        raise ConfigError(f"order: found {order!r}; expected {found.order!r}, the order of this process's earlier hops")
    return found


@functools.cache
def _end_with_process() -> None:
    """Ensures that no hop outlives its process group or the interpreter, and that no thread of hzero outlives the latter.

    CPython before 3.14 ends a thread that needs the GIL during shutdown. If this happens inside a C++ destructor, the process
    aborts. A script may end inside an accumulation window, and an exception may occur anywhere.
    """
    stock, process = dist.destroy_process_group, os.getpid()

    @functools.wraps(stock)
    def destroy(group: Any = None) -> None:
        if group is None or group is dist.group.WORLD:
            _end_hops(after_error=sys.exc_info()[0] is not None)
        stock(group)

    def at_exit() -> None:
        if os.getpid() != process:  # a forked process has no hops
            return
        failed = hasattr(sys, "last_type")  # set after an uncaught exception
        ended = _end_hops(after_error=failed)
        stop_watchdog()  # only now, or other ranks would consider this one frozen while it waits
        for thread in threading.enumerate():
            if ended and thread.name.startswith("hzero "):
                thread.join(_LONGEST_S)
                ended = not thread.is_alive()
        if failed and not ended:  # peers may never come; the interpreter's shutdown could abort
            print("hzero: the script has failed, so hops in flight are not waited for", file=sys.stderr, flush=True)
            with contextlib.suppress(OSError):  # nobody reads it any more
                sys.stdout.flush()
            if sys.last_type is KeyboardInterrupt:  # the status that Python gives
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                signal.raise_signal(signal.SIGINT)
            os._exit(1)

    dist.destroy_process_group = c10d.destroy_process_group = destroy
    atexit.register(at_exit)


def _end_hops(after_error: bool) -> bool:
    """Waits for hops in flight: until their timeout, since peers may be late, or shortly after an error.

    Returns:
        Whether all have ended.
    """
    chains = [] if _of_world is None or after_error else _of_world[1].running
    ended = _of_world is None or _of_world[1].end(_LONGEST_S if after_error else None)
    for error in dict.fromkeys(str(chain.error) for chain in chains if chain.error is not None):
        print(f"hzero: warning: in flight at the end of the script: {error}", file=sys.stderr, flush=True)
    return ended and messages_dropped(_LONGEST_S)
