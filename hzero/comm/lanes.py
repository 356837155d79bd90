"""Lanes: what runs the hops of all chains, each tier's one after the other.

A lane is a thread on CPUs and a stream on an accelerator. It takes the hops of the chains that use it in the order in which
they were submitted, which is the same on all ranks. So ranks that submit alike start the collectives of a communicator alike.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import math
import os
import queue
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import SimpleNamespace
from typing import Any, Generic, TypeAlias, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.profiler import record_function

from hzero.comm.wires import Lane, Work
from hzero.config import CollectiveOrder, Tier, TransportName
from hzero.validation import ConfigError

T = TypeVar("T")

#: What a chain runs. It yields None when it has read its inputs, then each hop (`hzero.comm.runtime.Pending`) when it has started
#: it; of a hop of several rounds the last one. It is resumed when the hop has ended, and returns the chain's result.
Steps: TypeAlias = Generator[Any, None, T]
#: How long hops under way may take to end after an exception, whose peers may never come, in seconds.
_AFTER_ERROR_S = 3.0


class DeviceStreams:
    """At most six streams of high priority, since a device has few hardware queues, and one per direction of messages.

    Codec kernels before a hop run on the stream of its tier, those of results on streams of their own: so the next message
    is encoded while a hop is under way. From the third tier on, tiers share a stream. Under the order ``strict``
    collectives have a stream, and all results share one.

    Args:
        device: Makes streams and events: ``torch.cuda``, or an accelerator of DeepSpeed.
        order: As for `Lanes`.
    """

    def __init__(self, device: Any, order: CollectiveOrder = "lanes") -> None:
        self.device, self.order = device, order
        self._streams: dict[Any, Any] = {}
        self._tiers: dict[Tier | None, int] = {}

    def on(self, lane: Lane | None, *, results: bool = False) -> AbstractContextManager[Any]:
        """Makes the stream of a lane current, or that of its results."""
        if lane is not None and len(lane) > 2:
            return self._on(lane)
        number = min(self._tiers.setdefault(lane and lane[1], len(self._tiers)), 2)
        return self._on(("results", 0 if self.order == "strict" else number) if results else ("hops", number))

    def _on(self, key: Any) -> AbstractContextManager[Any]:
        if key not in self._streams:
            self._streams[key] = self.device.Stream(priority=-1)
        return self.device.stream(self._streams[key])  # type: ignore[no-any-return]

    def collective(self, start: Callable[..., Any]) -> Work:
        """Starts a collective behind all others, and on their stream."""
        before = self.event()
        with self._on("collectives"):
            self.wait(before)
            start(async_op=False)
            return SimpleNamespace(wait=partial(self.wait, self.event()))

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

    def used_by_all(self, tensor: torch.Tensor) -> None:
        """Keeps a tensor's memory until all streams of lanes have passed this point."""
        for stream in self._streams.values():
            tensor.record_stream(stream)


@contextlib.contextmanager
def host_steps(device: int) -> Iterator[None]:
    """Around a part of a chain on a GPU whose hops the host starts and ends, as those over MPI, which knows no streams.

    Inputs may come from any stream and results go to any, so the host waits before the part for the device and after it for
    the part. It has not run on a GPU, and costs the overlap of encoding with compute.
    """
    torch.cuda.set_device(device)  # of this thread, which may be a lane's
    torch.cuda.synchronize()
    yield
    torch.cuda.current_stream().synchronize()


class Chain(Generic[T]):
    """The hops of one bucket behind one handle; made by `Lanes.submit`.

    Attributes:
        lanes: Lanes of the hops.
    """

    def __init__(self, run_by: Lanes, steps: Steps[T], lanes: Sequence[Lane], after: Sequence[Chain[Any]]) -> None:
        self.lanes = lanes
        self._run_by, self._steps, self._after = run_by, steps, after
        self._ended: float = 0  # hops that have; infinite when the result is there, or an error
        self._changed = threading.Condition()
        self._result: T | None = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._read: Any = None
        self._finished: Any = None

    @property
    def done(self) -> bool:
        """Whether the result is there, or an error. On a device: whether all work has been enqueued."""
        return self._ended == math.inf

    @torch.compiler.disable
    def wait(self) -> T:
        """Returns the chain's result when it is there; may be called again.

        On a device the host does not wait: the current stream does.

        Raises:
            HopError: A hop of this chain, or of one that it waits for, failed.
        """
        streams = self._run_by.streams
        if streams is None and self._ended < math.inf:
            with record_function("hzero: wait"), self._changed:  # a call less on the way of a gather
                self._changed.wait_for(lambda: self._ended == math.inf)
        if self._error is not None:
            raise self._error
        result: Any = self._result
        if streams is not None:
            streams.wait(self._finished)
            for tensor in [result] if isinstance(result, torch.Tensor) else result or ():
                streams.used(tensor)
        return result  # type: ignore[no-any-return]

    def take(self) -> T:
        """The result, for the only chain that comes after this one; it is not kept."""
        result, self._result = self._result, None
        return result  # type: ignore[return-value]

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
            self._run_by.streams.wait(self._read)  # type: ignore[union-attr]

    def _resume(self) -> Any:
        """Goes on to the next hop and starts it; None where inputs have been read, or the result is there.

        At first it waits for the chains that make its inputs, and reads these.
        """
        after, self._after = self._after, ()
        for other in after:
            if other._ended < math.inf:
                other._await(math.inf)
            if other._error is not None:
                raise other._error
        try:
            return next(self._steps)
        except StopIteration as stop:
            self._pass(math.inf, stop.value)
            return None

    def _pass(self, hops: float, result: T | None = None, error: BaseException | None = None) -> None:
        """So many hops have ended, or all that the chain does."""
        with self._changed:
            self._result, self._error, self._ended = result, error, hops
            self._changed.notify_all()
        for callback in self._callbacks if hops == math.inf else ():
            callback()

    def _await(self, hops: float) -> None:
        """Waits until as many hops have ended, or the whole chain has."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended >= hops)


class Lanes:
    """Runs the hops of chains.

    A chain takes its places on the lanes of its hops when it is submitted, which all ranks do alike. So the places have one
    order on all ranks. A hop comes behind the one before it in its chain, and behind the chains that its chain reads. So the
    first hop that has not ended can always go on, and no rank waits for ever.

    On CPUs a chain reads its inputs where it is submitted, or on its first lane's thread if it comes after others. Each hop, and
    what is computed before it, runs on the thread of its lane, once the chain's hop before it has ended. The last hop's lane
    makes the result, after it has started its next hop if that can start.

    On a device all of a chain is enqueued when it is submitted. The stream of a hop's lane waits for the chain's hop before it.
    So it encodes the next chain's message while its own hop is under way. Results have streams of their own.

    On a device whose hops MPI carries, lanes are threads, since only the host starts and ends such hops.

    Where lanes are threads, of the order ``lanes``, the roles of a stage have lanes and communicators of their own (`apart`): a
    gather that is needed now shares a link with a reduction, and does not wait behind it. A device has few hardware queues.

    Args:
        streams: Streams of a device; None for threads.
        around: Made and entered around each part of a chain, where ``streams`` is None.
        order: ``strict`` runs one hop at a time, over all lanes; ``lanes`` one of each lane.

    Attributes:
        streams: As above.
        order: As above.
        kind: What carries the hops, in words.
        failures: Chains that have failed.
    """

    def __init__(
        self,
        streams: DeviceStreams | None = None,
        around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
        order: CollectiveOrder = "lanes",
    ) -> None:
        self.streams, self.order, self.failures, self._around = streams, order, 0, around
        self.kind = "cpu"
        self._jobs: dict[Lane | None, queue.SimpleQueue[Any]] = {}
        self._running: dict[Chain[Any], None] = {}
        self._changed = threading.Condition()  # of these
        self._broken: dict[Lane | None, BaseException] = {}

    @property
    def apart(self) -> bool:
        """Whether roles have lanes of their own."""
        return self.streams is None and self.order == "lanes"

    def submit(self, steps: Steps[T], lanes: Sequence[Lane], after: Sequence[Chain[Any]] = ()) -> Chain[T]:
        """Starts a chain. All ranks of a lane submit its chains in the same order.

        Args:
            steps: Read their inputs, start a hop on each of ``lanes``, in this order, and make the result. They may run on
                another thread.
            lanes: Lanes of the hops.
            after: Chains whose results this one reads.

        Returns:
            The chain. Its inputs are read on this call, except where it comes after others.
        """
        chain = Chain(self, steps, lanes, after)
        interrupt: BaseException | None = None
        if self.streams is not None:
            with self._changed:
                interrupt = self._enqueue(chain, self.streams)
        else:
            if not after:
                try:
                    with self._around(), lasting():
                        chain._resume()
                        if not lanes:
                            chain._resume()
                except BaseException as error:  # its lanes will know of it
                    interrupt = self._fail(chain, error)
            with self._changed:
                if lanes or not chain.done:
                    self._running[chain] = None
                    for index, lane in enumerate(lanes or (None,)):
                        place = lane if self.order == "lanes" else None
                        (self._jobs.get(place) or self._jobs_of(place)).put((chain, index, lane))
        if interrupt is not None:
            raise interrupt
        return chain

    def _fail(self, chain: Chain[Any], error: BaseException) -> BaseException | None:
        """Keeps the error for whoever waits for the chain, which all ranks do at the same point; gives an interrupt back."""
        if not chain.done:
            self.failures += 1
            chain._pass(math.inf, error=error)
        return None if isinstance(error, Exception) else error

    # ---- threads ------------------------------------------------------------------------------------------------

    def _jobs_of(self, lane: Lane | None) -> queue.SimpleQueue[Any]:
        """Makes a lane."""
        jobs = self._jobs[lane] = queue.SimpleQueue()
        name = f"hzero {' '.join(lane)}" if lane else "hzero"
        threading.Thread(target=self._serve, args=(jobs,), name=name, daemon=True).start()
        return jobs

    def _serve(self, jobs: queue.SimpleQueue[Any]) -> None:
        """Runs a lane's hops. The next one starts, if it can at once, before the result of the last is made: links stay busy."""
        torch.set_grad_enabled(False)  # of this thread
        ended: Iterator[None] = iter(())
        while True:
            if jobs.empty():
                next(ended, None)
            chain, index, lane = jobs.get()
            waits = chain._ended < index or any(other._ended < math.inf for other in chain._after)
            if waits:  # maybe for that result
                next(ended, None)
            hop = self._run(chain, index, lane)
            del chain  # its result is not this lane's to keep
            next(hop, None)
            next(ended, None)
            next(hop, None)
            ended = hop

    def _run(self, chain: Chain[Any], index: int, lane: Lane | None) -> Iterator[None]:
        """Starts a hop of a chain, ends it, and makes the result if it is the last; yields in between."""
        last, started = index + 1 >= len(chain.lanes), False
        if chain._ended < index:
            chain._await(index)
        error = chain._error or self._broken.get(lane)
        if error is None:
            try:
                with self._around():
                    if chain._after:
                        chain._resume()
                    pending = chain._resume()
                assert (pending is None) == (lane is None), "it has as many hops as it has announced"
                if pending is not None:
                    started = True
                    yield
                    pending.end()
                    del pending  # what was sent is not needed any more
                    if last:
                        yield
                        with self._around():
                            chain._resume()
                    else:
                        chain._pass(index + 1)
            except BaseException as raised:
                error = raised
        if error is not None:
            self._fail(chain, error)
            if not started:  # peers may have started this hop, and would pair it with the next chain's
                self._broken.setdefault(lane, error)
        if last:
            with self._changed:
                del self._running[chain]
                self._changed.notify_all()

    # ---- streams ------------------------------------------------------------------------------------------------

    def _enqueue(self, chain: Chain[Any], streams: DeviceStreams) -> BaseException | None:
        """Enqueues all of a chain."""
        lanes, started, before = chain.lanes, 0, streams.event()
        try:
            with streams.on(lanes[0] if lanes else None, results=not lanes), lasting():
                streams.wait(before)
                for other in chain._after:
                    if other._error is None:
                        streams.wait(other._finished)
                chain._resume()
                chain._read = streams.event()
            for lane in lanes:
                if lane in self._broken:
                    raise self._broken[lane]
                with streams.on(lane), lasting():
                    chain._resume()
                started += 1
            with streams.on(lanes[-1] if lanes else None, results=True), lasting():
                chain._resume()
                chain._finished = streams.event()
        except BaseException as error:
            for lane in lanes[started:]:  # as for threads
                self._broken.setdefault(lane, error)
            return self._fail(chain, error)
        return None

    def before_others(self) -> None:
        """Before collectives of others: under ``strict`` a device's current stream waits for all hops submitted so far.

        All ranks call it between the same chains.
        """
        if self.order == "strict":
            self.join()

    # ---- waits --------------------------------------------------------------------------------------------------

    def join(self) -> None:
        """On a device: makes the current stream wait for all hops submitted so far."""
        if self.streams is not None:
            self.streams.join()

    def drain(self) -> None:
        """Waits for all chains in flight, which all ranks must do, since a hop needs its peers. Raises the error of one.

        On a device the current stream waits: memory that is freed afterwards is used again behind them.
        """
        self.join()
        while under_way := [chain for chain in list(self._running) if not chain.done]:
            for chain in under_way:
                chain.wait()

    def end(self, within_s: float | None) -> bool:
        """On CPUs: waits until no chain is under way, whatever becomes of them. Gives up after a time, if there is one.

        Returns:
            Whether all have ended.
        """
        with self._changed:
            return self._changed.wait_for(lambda: not self._running, within_s)


def lasting() -> AbstractContextManager[Any]:
    """Inside, tensors are made that outlive an evaluation under `torch.inference_mode`: backward can save them later."""
    if not torch.is_inference_mode_enabled():
        return torch.no_grad()  # this is called at every module
    stack = contextlib.ExitStack()
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.no_grad())
    return stack


# ---- one process ----------------------------------------------------------------------------------------------------

_of_world: tuple[Any, Lanes] | None = None


def shared_lanes(device: Any = None, transport: TransportName = "torch", order: CollectiveOrder | None = None) -> Lanes:
    """The lanes of this process, for as long as torch.distributed's world lives: its engines share communicators.

    Args:
        device: An asynchronous device, whose memory hops carry: ``torch.cuda``, or an accelerator of DeepSpeed. None: CPUs.
        transport: What carries them.
        order: As for `Lanes`; None takes that of lanes that are there. New ones are strict on ROCm: RCCL can deadlock with
            several communicators in flight (ROCm/rccl#2191).

    Raises:
        ConfigError: The lanes are there, and for other hops or in another order; or MPI cannot be used any more.
    """
    global _of_world
    if transport == "mpi":
        from hzero.comm.mpi_wires import check_usable

        check_usable()
    _end_with_process()
    name = "cpu" if device is None else getattr(device, "_name", "cuda")
    kind = name if name == "cpu" else f"{name} over {transport}"
    if _of_world is None or _of_world[0] is not dist.group.WORLD:
        new_order = order or ("strict" if device is not None and torch.version.hip else "lanes")
        if device is None or transport == "mpi":
            around = contextlib.nullcontext if device is None else partial(host_steps, device.current_device())
            lanes = Lanes(None, around, new_order)
        else:
            lanes = Lanes(DeviceStreams(device, new_order), order=new_order)
        lanes.kind = kind
        _of_world = dist.group.WORLD, lanes
    found = _of_world[1]
    if found.kind != kind:
        raise ConfigError(f"transport: found hops of {kind} and of {found.kind} in one process; expected one kind")
    if order not in (None, found.order):
        raise ConfigError(f"order: found {order!r}, expected {found.order!r}, which hops of this process already have")
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
    return _of_world is None or _of_world[1].end(_AFTER_ERROR_S if after_error else None)
