"""A race detector for asynchronous devices that runs on processors.

`StandIn` is a DeepSpeed accelerator whose streams and events only keep vector clocks: operators still run one after the
other, but each belongs to the stream that was current. `Recorder` sees every operator and collective, and what each
reads and writes. Two accesses of the same bytes by streams without an order between them, one of them a write, are a
race; so is memory that is freed while a stream without such an order may still use it.
(Vector clocks: as in FastTrack, Flanagan and Freund 2009.)
"""

from __future__ import annotations

import contextlib
import sys
import typing
import weakref
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hzero.collectives import pipeline, transport

Clock = dict[int, int]
_HOST = -1


def _merge(into: Clock, other: Clock) -> None:
    for stream, time in other.items():
        into[stream] = max(into.get(stream, 0), time)


class Event:
    """A point on a stream."""

    def __init__(self, **_: Any) -> None:
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        self.clock = dict((stream or World.here.current).clock)

    def wait(self, stream: Stream | None = None) -> None:
        _merge((stream or World.here.current).clock, self.clock)

    def synchronize(self) -> None:
        _merge(World.here.host, self.clock)

    def query(self) -> bool:
        return False

    def elapsed_time(self, _: Event) -> float:
        return 0.0


class Stream:
    """A queue of a device: what it does next comes after all that it has done."""

    def __init__(self, **_: Any) -> None:
        self.id = len(World.here.streams)
        World.here.streams.append(self)
        self.clock: Clock = {}

    def wait_event(self, event: Event) -> None:
        _merge(self.clock, event.clock)

    def wait_stream(self, other: Stream) -> None:
        _merge(self.clock, other.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        _merge(World.here.host, self.clock)

    def query(self) -> bool:
        return False

    def tick(self) -> Clock:
        """The clock of the next thing that this stream does, which the host starts now."""
        _merge(self.clock, World.here.host)
        self.clock[self.id] = self.clock.get(self.id, 0) + 1
        return self.clock


class World:
    """Streams of this process."""

    here: World

    def __init__(self) -> None:
        World.here = self
        self.host: Clock = {}
        self.streams: list[Stream] = []
        self.default = Stream()
        self.current = self.default
        self.wires: defaultdict[str, Stream] = defaultdict(Stream)  # a communicator's own stream


class StandIn(CPU_Accelerator):  # type: ignore[misc]
    """Processors that say that they are an asynchronous device."""

    def is_synchronized_device(self) -> bool:
        return False

    def use_host_timers(self) -> bool:
        return True

    def resolves_data_dependency(self) -> bool:
        return False

    def handles_memory_backpressure(self) -> bool:
        return False

    Stream = Stream  # type: ignore[assignment]
    Event = Event  # type: ignore[assignment]

    def stream(self, stream: Stream) -> Any:
        @contextlib.contextmanager
        def on() -> Iterator[None]:
            before, World.here.current = World.here.current, stream
            try:
                yield
            finally:
                World.here.current = before

        return on()

    def current_stream(self, device_index: Any = None) -> Stream:
        return World.here.current

    def default_stream(self, device_index: Any = None) -> Stream:
        return World.here.default

    def synchronize(self, device_index: Any = None) -> None:
        for stream in World.here.streams:
            stream.synchronize()


@dataclass
class _Access:
    stream: int
    time: int
    write: bool
    start: int
    end: int
    site: str


@dataclass
class _Memory:
    """What is known of one storage."""

    owner: int
    accesses: list[_Access] = field(default_factory=list)
    kept_for: set[int] = field(default_factory=set)


class Recorder(TorchDispatchMode):
    """Records operators and collectives, and collects races.

    Attributes:
        races: One text per pair of call sites.
    """

    def __init__(self) -> None:
        super().__init__()
        self.races: dict[tuple[str, str], str] = {}
        self.last = Event()
        self.in_transport = False
        self._world = World.here
        self._memory: dict[int, _Memory] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        schema = func._schema
        if schema.name.startswith("c10d::"):
            self._collective(args, kwargs)
            return out
        read, written = [], []
        for argument, value in [
            *zip(schema.arguments, args),
            *((a, kwargs[a.name]) for a in schema.arguments if a.name in kwargs),
        ]:
            target = written if argument.alias_info is not None and argument.alias_info.is_write else read
            if argument.alias_info is None or argument.alias_info.is_write:
                target.extend(_tensors(value))
        for result, value in zip(
            schema.returns, out if isinstance(out, (tuple, list)) and len(schema.returns) > 1 else [out]
        ):
            if result.alias_info is None:
                written.extend(_tensors(value))
        stream = World.here.current
        clock = stream.tick()
        for write, tensors in ((False, read), (True, written)):
            for tensor in tensors:
                self._access(tensor, stream, clock, write)
        return out

    def _collective(self, args: Any, kwargs: Any) -> None:
        """It comes after the current stream, on a stream of its communicator; `wait` orders what follows."""
        boxed = next(one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.ScriptObject))
        wire = World.here.wires[dist.ProcessGroup.unbox(boxed).group_name]
        wire.wait_stream(World.here.current)
        clock = wire.tick()
        for tensor in _tensors((args, kwargs)):
            self._access(tensor, wire, clock, True)  # of all it may be the output
        self.last = wire.record_event()
        if not self.in_transport:  # of DeepSpeed: it waits where it starts it
            World.here.current.wait_event(self.last)

    def _access(self, tensor: torch.Tensor, stream: Stream, clock: Clock, write: bool) -> None:
        if tensor.numel() == 0 or tensor.device.type != "cpu":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        memory = self._memory.get(key)
        if memory is None:
            memory = self._memory[key] = _Memory(stream.id)
            weakref.finalize(storage, self._freed, key)
        start = tensor.storage_offset() * tensor.element_size()
        span = sum((size - 1) * abs(stride) for size, stride in zip(tensor.shape, tensor.stride())) + 1
        now = _Access(stream.id, clock[stream.id], write, start, start + span * tensor.element_size(), _site())
        kept = []
        for other in memory.accesses:
            ordered = other.time <= clock.get(other.stream, 0)
            overlap = other.start < now.end and now.start < other.end
            if overlap and not ordered and (write or other.write):
                self._report(f"{other.site} on stream {other.stream} and", other, now)
            if not (ordered and overlap and write and other.start >= now.start and other.end <= now.end):
                kept.append(other)
        memory.accesses = [*kept, now][-64:]

    def _freed(self, key: int) -> None:
        memory = self._memory.pop(key, None)
        if memory is None:
            return
        # The allocator gives the memory to the owner's next operator, once streams it was recorded for have passed.
        clock = dict(self._world.streams[memory.owner].clock)
        _merge(clock, self._world.host)
        for stream in memory.kept_for:
            _merge(clock, self._world.streams[stream].clock)
        for access in memory.accesses:
            if access.time > clock.get(access.stream, 0):
                now = _Access(memory.owner, 0, True, access.start, access.end, f"freed at {_site()}")
                self._report("memory in use is freed:", access, now)

    def _report(self, what: str, first: _Access, second: _Access) -> None:
        if "hzero/" in first.site or "hzero/" in second.site:
            self.races.setdefault(
                (first.site, second.site),
                f"{'write' if first.write else 'read'} on stream {first.stream} at {first.site}\n  "
                f"{'write' if second.write else 'read'} on stream {second.stream} at {second.site}",
            )

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """What ``tensor.record_stream`` does."""
        memory = self._memory.get(tensor.untyped_storage()._cdata)
        if memory is not None:
            memory.kept_for.add(stream.id)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _site() -> str:
    """The innermost calls of hzero and DeepSpeed, innermost first."""
    found: list[str] = []
    frame = sys._getframe(2)
    while frame is not None and len(found) < 3:
        code = frame.f_code
        if (
            "/hzero/" in code.co_filename and not code.co_filename.endswith("install.py")
        ) or "/deepspeed/runtime/zero/" in code.co_filename:
            found.append(f"{'/'.join(code.co_filename.split('/')[-3:])}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(found) or "elsewhere"


@contextlib.contextmanager
def detecting() -> Iterator[Recorder]:
    """Inside, this process has a `StandIn` device, and on rank 0 `Recorder.races` fills; other ranks do the same things."""
    before = get_accelerator()
    World()
    set_accelerator(StandIn())
    recorder = Recorder()
    init, wait = transport.Pending.__init__, transport.Pending.wait

    def of_transport(start: Any) -> Any:
        def started(*args: Any) -> Any:
            recorder.in_transport = True
            try:
                return start(*args)
            finally:
                recorder.in_transport = False

        return started

    def started(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.event = recorder.last

    def waited(self: Any) -> torch.Tensor:
        World.here.current.wait_event(self.event)
        return wait(self)

    try:
        with contextlib.ExitStack() as patches:
            for kind in typing.get_args(transport.Collective):
                start = of_transport(getattr(transport.Transport, kind))
                patches.enter_context(mock.patch.object(transport.Transport, kind, start))
            for owner, name, function in (
                (torch.Tensor, "record_stream", lambda self, stream: recorder.record_stream(self, stream)),
                (transport.Pending, "__init__", started),
                (transport.Pending, "wait", waited),
                (pipeline, "_of_world", None),  # one with streams, which ends with this device
            ):
                patches.enter_context(mock.patch.object(owner, name, function))
            with recorder if dist.get_rank() == 0 else contextlib.nullcontext():
                yield recorder
    finally:
        set_accelerator(before)
