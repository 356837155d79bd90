"""Lanes: run the hops of all chains, one after the other on each tier.

A lane is a thread on CPU, and a place on a stream of an accelerator. It runs the hops of its chains in the order of submission,
which is the same on all ranks. So all ranks start the collectives of a communicator in the same order.

A gather over the lanes ``intra_node`` (outer) and ``intra_package`` (inner) on CPU, from the request to the wait. ``resume``
is `Chain._resume`, which runs `hzero.comm.runtime.BoundProgram.steps` to its next ``yield``::

    thread     call                                           effect
    caller     Weights.unshard > BoundProgram.run > Lanes.submit
                   resume, if it reads no other chain         reads the inputs, encodes them
                                                              the chain takes a place on both lanes
    outer lane Lanes._serve > Lanes._run
                   resume, if it reads other chains           reads their results, encodes them
                   resume > Collective.start                  starts the hop
                   resume > Pending.end                       waits for the hop
                   Chain._pass                                the inner lane may continue
    inner lane Lanes._serve > Lanes._run
                   resume > Pending.wait, Collective.start    takes the message, recodes it, starts the hop
                   resume > Pending.end                       waits for the hop
               Lanes._serve                                   starts the lane's next hop, if its inputs are ready
                   resume > Pending.wait, Chain._pass         takes the message, decodes it, stores the result
    caller     Chain.wait                                     returns the result

On a device, `Lanes._enqueue` resumes the chain inside `Lanes.submit`, each time on the stream of the next lane. `Pending.end`
makes that stream wait, and `Chain.wait` the caller's.
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
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import SimpleNamespace
from typing import Any, Generic, TypeAlias, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.profiler import record_function

from hzero.comm.watchdog import stop_watchdog
from hzero.comm.wires import Lane, Work, messages_dropped
from hzero.config import CollectiveOrder, Tier, TransportName
from hzero.errors import ConfigError

T = TypeVar("T")

#: Generator of a chain. It yields after reading its inputs, after starting each hop and, if lanes are threads, after waiting for
#: each hop. It returns the result of the chain.
Steps: TypeAlias = Generator[None, None, T]
#: Maximum wait for hops in flight after an exception, and for each thread at exit, in seconds: peers may never arrive.
_LONGEST_S = 3.0


class DeviceStreams:
    """At most six high-priority streams, since a device has few hardware queues, and one stream per message direction.

    Codec kernels before a hop run on the stream of its tier; kernels for results run on other streams. The next message is thus
    encoded while a hop is in flight. From the third tier on, tiers share a stream. With order ``strict``, all collectives share
    one stream, and all results share one.

    Args:
        device: Makes streams and events: ``torch.cuda`` or a DeepSpeed accelerator.
        order: As in `Lanes`.
    """

    def __init__(self, device: Any, order: CollectiveOrder = "lanes") -> None:
        self.device, self.order = device, order
        self._streams: dict[Any, Any] = {}
        self._tiers: dict[Tier | None, int] = {}

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
        """Makes the current stream wait for everything that was submitted to the lanes."""
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
    """Wraps a part of a chain on a GPU whose hops the host starts and ends, such as over MPI, which has no streams.

    Inputs may come from any stream, and any stream may read results. So the host waits for the device before the part, and for
    the part after it. This has not run on a GPU. It prevents the overlap of encoding with compute.
    """
    torch.cuda.set_device(device)  # per thread, and lanes have their own
    torch.cuda.synchronize()
    yield
    torch.cuda.current_stream().synchronize()


class Chain(Generic[T]):
    """The hops of one bucket; made by `Lanes.submit`.

    Attributes:
        lanes: Lanes of the hops.
    """

    def __init__(self, run_by: Lanes, steps: Steps[T], lanes: Sequence[Lane], after: Sequence[Chain[Any]]) -> None:
        self.lanes = lanes
        self._run_by, self._steps, self._after = run_by, steps, after
        self._ended: float = 0  # ended hops; infinite once there is a result or an error
        self._changed = threading.Condition()
        self._result: T | None = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._read: Any = None
        self._finished: Any = None

    @property
    def done(self) -> bool:
        """Whether there is a result or an error. On a device: whether all work has been enqueued."""
        return self._ended == math.inf

    @torch.compiler.disable
    def wait(self) -> T:
        """Waits for the result and returns it; may be called again.

        On a device, the current stream waits, not the host.

        Raises:
            HopError: A hop of this chain, or of a chain that it depends on, failed.
        """
        streams = self._run_by.streams
        if streams is None and self._ended < math.inf:
            with record_function("hzero: wait"), self._changed:  # inlined: every gather waits here
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
        """Returns the result and drops it. Only for the single chain that depends on this one."""
        result, self._result = self._result, None
        return result  # type: ignore[return-value]

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Calls ``callback`` on any thread once `wait` would not block; immediately if that is already so.

        The lane is blocked during the call, so ``callback`` must not wait for another chain.
        """
        with self._changed:
            if not self.done:
                self._callbacks.append(callback)
                return
        callback()

    @torch.compiler.disable
    def wait_read(self) -> None:
        """On a device: makes the current stream wait until the chain has read its inputs. They may then be overwritten."""
        if self._read is not None:
            self._run_by.streams.wait(self._read)  # type: ignore[union-attr]

    def _resume(self) -> None:
        """Runs the generator to its next ``yield``, or to its end.

        The first call waits for the chains that compute the inputs.
        """
        after, self._after = self._after, ()
        for other in after:
            if other._ended < math.inf:
                other._await(math.inf)
            if other._error is not None:
                raise other._error
        try:
            next(self._steps)
        except StopIteration as stop:
            self._pass(math.inf, stop.value)

    def _pass(self, hops: float, result: T | None = None, error: BaseException | None = None) -> None:
        """Records that ``hops`` hops have ended; infinite: the whole chain has."""
        with self._changed:
            self._result, self._error, self._ended = result, error, hops
            self._changed.notify_all()
        for callback in self._callbacks if hops == math.inf else ():
            callback()

    def _await(self, hops: float) -> None:
        """Waits until ``hops`` hops have ended, or the whole chain has."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended >= hops)


class Lanes:
    """Runs the hops of chains.

    A chain takes its place on each of its lanes when it is submitted. All ranks submit chains in the same order, so the places
    have one order on all ranks. A hop runs after the previous hop of its chain, and after the chains that its chain reads. The
    first hop that has not ended can therefore always run, and no rank waits forever.

    On CPU, a chain reads and encodes its inputs in `submit`, or on the thread of its first lane if it depends on other chains,
    ended or not. Each hop, and the computation between two hops, runs on the thread of a lane after the chain's previous hop.
    The lane of the last hop computes the result. If its next hop can start, it starts that one first.

    On a device, `submit` enqueues the whole chain. The stream of a hop's lane waits for the chain's previous hop. It can thus
    encode the next chain's message while its hop is in flight. Results use other streams.

    On a device with transport MPI, lanes are threads, since only the host can start and end such hops.

    If lanes are threads with order ``lanes``, each role of a stage has separate lanes and communicators (`apart`). An urgent
    gather then shares a link with a reduction instead of waiting for it. A device has too few hardware queues for this.

    Args:
        streams: Streams of a device; None for threads.
        around: Makes a context for each part of a chain; only without ``streams``.
        order: ``strict`` runs one hop at a time over all lanes, ``lanes`` one hop per lane.

    Attributes:
        streams: As above.
        order: As above.
        kind: Name of the device and transport.
        failures: Number of failed chains.
    """

    def __init__(
        self,
        streams: DeviceStreams | None = None,
        around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
        order: CollectiveOrder = "lanes",
    ) -> None:
        self.streams, self.order, self.kind, self.failures, self._around = streams, order, "cpu", 0, around
        self._jobs: dict[Lane | None, queue.SimpleQueue[Any]] = {}
        self._running: dict[Chain[Any], None] = {}
        self._changed = threading.Condition()  # guards `_running`
        self._broken: dict[Lane | None, BaseException] = {}

    @property
    def apart(self) -> bool:
        """Whether each role has separate lanes."""
        return self.streams is None and self.order == "lanes"

    def submit(self, steps: Steps[T], lanes: Sequence[Lane], after: Sequence[Chain[Any]] = ()) -> Chain[T]:
        """Starts a chain. All ranks of a lane submit its chains in the same order.

        Args:
            steps: Reads its inputs, starts a hop on each of ``lanes``, in this order, and computes the result. It may run on
                another thread.
            lanes: Lanes of the hops.
            after: Chains whose results this one reads.

        Returns:
            The chain. This call has read its inputs, unless ``after`` has chains.
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
                except BaseException as error:  # its lanes raise it to the waiters
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
        """Stores the error for waiters of the chain, so that all ranks raise at the same point. Returns an interrupt."""
        if not chain.done:
            self.failures += 1
            chain._pass(math.inf, error=error)
        return None if isinstance(error, Exception) else error

    # ---- threads ------------------------------------------------------------------------------------------------

    def _jobs_of(self, lane: Lane | None) -> queue.SimpleQueue[Any]:
        """Makes the queue and the thread of a lane."""
        jobs = self._jobs[lane] = queue.SimpleQueue()
        name = f"hzero {' '.join(lane or ('lane',))}"
        threading.Thread(target=self._serve, args=(jobs,), name=name, daemon=True).start()
        return jobs

    def _serve(self, jobs: queue.SimpleQueue[Any]) -> None:
        """Runs a lane's hops. To keep links busy, it starts a ready next hop before it computes the result of the last one."""
        torch.set_grad_enabled(False)  # per thread
        ended: Iterator[None] = iter(())
        for chain, index, lane in iter(jobs.get, None):
            waits = chain._ended < index or any(other._ended < math.inf for other in chain._after)
            if waits:  # maybe for the result that this thread has not computed yet
                next(ended, None)
            hop = self._run(chain, index, lane)
            del chain  # or the lane would keep its result alive
            next(hop, None)
            next(ended, None)
            next(hop, None)
            ended = hop
            if jobs.empty():
                next(ended, None)
        next(ended, None)

    def _run(self, chain: Chain[Any], index: int, lane: Lane | None) -> Iterator[None]:
        """Starts a hop of a chain, ends it, and computes the result if it is the last hop; yields in between."""
        last, started = index + 1 >= len(chain.lanes), False
        if chain._ended < index:
            chain._await(index)
        error = chain._error or self._broken.get(lane)
        if error is None:
            try:
                with self._around():
                    if chain._after:
                        chain._resume()
                    chain._resume()
                if lane is not None:
                    started = True
                    yield
                    chain._resume()
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
        """Enqueues the whole chain."""
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
            for lane in lanes[started:]:  # peers may have started these hops, as in `_run`
                self._broken.setdefault(lane, error)
            return self._fail(chain, error)
        return None

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
        if self.order == "strict" and self.streams is not None:
            self.streams.collective(lambda **_: None)  # starts nothing
        return result

    # ---- waits --------------------------------------------------------------------------------------------------

    def join(self) -> None:
        """On a device: makes the current stream wait for all hops submitted so far."""
        if self.streams is not None:
            self.streams.join()

    def drain(self) -> None:
        """Waits for all chains in flight. All ranks must call it, since a hop needs its peers. Raises the error of a chain.

        On a device, the current stream waits. Memory that is freed afterwards is reused only after the chains.
        """
        self.join()
        while under_way := [chain for chain in list(self._running) if not chain.done]:
            for chain in under_way:
                chain.wait()

    def end(self, within_s: float | None) -> bool:
        """On CPU: waits until no chain is in flight, whether chains succeed or fail. None waits without a limit.

        The threads of the lanes then end. A later chain would start new ones.

        Returns:
            Whether all chains have ended in time.
        """
        with self._changed:
            ended = self._changed.wait_for(lambda: not self._running, within_s)
            for jobs in self._jobs.values():
                jobs.put(None)
            self._jobs = {}
        return ended


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
        streams = None if device is None or transport == "mpi" else DeviceStreams(device, new_order)
        around = contextlib.nullcontext if device is None or streams else partial(host_steps, device.current_device())
        lanes = Lanes(streams, around, new_order)
        lanes.kind = kind
        _of_world = dist.group.WORLD, lanes
    found = _of_world[1]
    if found.kind != kind:
        raise ConfigError(f"transport: found hops of {kind} and of {found.kind} in one process; expected one kind")
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
    chains = [] if _of_world is None or after_error else list(_of_world[1]._running)
    ended = _of_world is None or _of_world[1].end(_LONGEST_S if after_error else None)
    for error in dict.fromkeys(str(chain._error) for chain in chains if chain._error is not None):
        print(f"hzero: warning: in flight at the end of the script: {error}", file=sys.stderr, flush=True)
    return ended and messages_dropped(_LONGEST_S)
