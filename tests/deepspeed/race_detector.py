"""A race detector for asynchronous devices that runs on processors.

`StandIn` is a DeepSpeed accelerator whose streams and events do nothing: operators run one after the other, but each belongs
to the stream that was current. `Recorder` writes into a `Trace` every operator and collective with the bytes that it reads
and writes, every wait, and every end of memory. `Trace.races` goes through these with a vector clock for each stream. Two
accesses of the same bytes by streams without an order between them, one of them a write, are a race; so is memory that is
freed while a stream without such an order may still use it. (Vector clocks: as in FastTrack, Flanagan and Freund 2009.)
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import types
import weakref
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hzero.codecs import backends
from hzero.comm import lanes, wires

#: Instead of a stream: the host. Everything that it starts after a wait comes after the wait.
HOST = -1

Clock: TypeAlias = dict[int, int]


class _Span(NamedTuple):
    """Bytes of one memory that are read or written."""

    memory: int
    start: int
    end: int
    write: bool


class _Work(NamedTuple):
    """An operator or a collective."""

    stream: int
    spans: list[_Span]
    site: str
    collective: bool


class _Record(NamedTuple):
    """An event takes the present point of a stream."""

    event: int
    stream: int


class _Wait(NamedTuple):
    """A stream, or the host, waits for an event."""

    stream: int
    event: int


class _Keep(NamedTuple):
    """Memory is kept until a stream has passed this point."""

    memory: int
    stream: int


class _Free(NamedTuple):
    """The last reference to a memory is gone."""

    memory: int
    site: str


class _Access(NamedTuple):
    stream: int
    time: int
    write: bool
    start: int
    end: int
    site: str


@dataclass
class _Memory:
    owner: int
    accesses: list[_Access] = field(default_factory=list)
    kept_for: list[int] = field(default_factory=list)


class Trace:
    """What a run did, in the order in which the host did it."""

    def __init__(self) -> None:
        self.entries: list[_Work | _Record | _Wait | _Keep | _Free] = []

    def _clocked(self) -> Iterator[tuple[_Work | _Keep | _Free, defaultdict[int, Clock]]]:
        """The entries that use memory, and the clocks of all streams at these."""
        clocks: defaultdict[int, Clock] = defaultdict(dict)
        events: defaultdict[int, Clock] = defaultdict(dict)
        for entry in self.entries:
            if isinstance(entry, _Record):
                events[entry.event] = {**clocks[entry.stream]}
            elif isinstance(entry, _Wait):
                _merge(clocks[entry.stream], events[entry.event])
            else:
                if isinstance(entry, _Work):
                    clock = clocks[entry.stream]
                    _merge(clock, clocks[HOST])
                    clock[entry.stream] = clock.get(entry.stream, 0) + 1
                yield entry, clocks

    def unordered(self) -> tuple[list[str], int]:
        """Pairs of collectives of two communicators without an order, and how many collectives may be under way at a time."""
        pairs: list[str] = []
        most = 0
        started: list[tuple[int, int, str]] = []
        for entry, clocks in self._clocked():
            if isinstance(entry, _Work) and entry.collective:
                clock = clocks[entry.stream]
                others = [one for one in started if one[1] > clock.get(one[0], 0)]
                pairs += [f"{site}\n  {entry.site}" for *_, site in others]
                most = max(most, 1 + len({stream for stream, *_ in others}))
                started.append((entry.stream, clock[entry.stream], entry.site))
        return pairs, most

    def races(self) -> list[str]:
        """One text per pair of sites that race."""
        found: dict[tuple[str, str], str] = {}
        memories: dict[int, _Memory] = {}

        def report(first: _Access, second: _Access) -> None:
            if "hzero/" in first.site or "hzero/" in second.site:
                both = (f"{'write' if a.write else 'read'} on stream {a.stream} at {a.site}" for a in (first, second))
                found.setdefault((first.site, second.site), "\n  ".join(both))

        for entry, clocks in self._clocked():
            if isinstance(entry, _Work):
                clock = clocks[entry.stream]
                for span in entry.spans:
                    memory = memories.setdefault(span.memory, _Memory(entry.stream))
                    now = _Access(entry.stream, clock[entry.stream], span.write, span.start, span.end, entry.site)
                    for other in _add(memory.accesses, now, clock):
                        report(other, now)
            elif isinstance(entry, _Free):
                if entry.memory not in memories:
                    continue
                # The allocator gives it to the owner's next operator, once streams that it was kept for have passed.
                memory = memories.pop(entry.memory)
                clock = {**clocks[memory.owner]}
                for stream in (HOST, *memory.kept_for):
                    _merge(clock, clocks[stream])
                for access in memory.accesses:
                    if access.time > clock.get(access.stream, 0):
                        report(
                            access, _Access(memory.owner, 0, True, access.start, access.end, f"freed at {entry.site}")
                        )
            elif entry.memory in memories:
                memories[entry.memory].kept_for.append(entry.stream)
        return list(found.values())


def _merge(into: Clock, other: Clock) -> None:
    for stream, time in other.items():
        if time > into.get(stream, 0):
            into[stream] = time


def _add(accesses: list[_Access], now: _Access, clock: Clock) -> list[_Access]:
    """Adds an access, and returns those that it races with. Drops those whose races it would have too."""
    races, kept = [], []
    for other in accesses:
        if other.start >= now.end or now.start >= other.end:
            kept.append(other)
            continue
        ordered = other.time <= clock.get(other.stream, 0)
        if not ordered and (now.write or other.write):
            races.append(other)
        covered = other.start >= now.start and other.end <= now.end
        if not (ordered and covered and (now.write or (other.stream == now.stream and not other.write))):
            kept.append(other)
    accesses[:] = [*kept, now]
    return races


class World:
    """Streams and events of this process; its trace, while one is written."""

    here: World

    def __init__(self) -> None:
        World.here = self
        self.trace: Trace | None = None
        self.numbers = itertools.count()
        self.default = Stream()
        self.current = self.default
        self.wires: defaultdict[str, Stream] = defaultdict(Stream)  # a communicator's own stream


class Event:
    """A point on a stream."""

    def __init__(self, **_: Any) -> None:
        self.id = next(World.here.numbers)

    def record(self, stream: Stream | None = None) -> None:
        if World.here.trace is not None:
            stream = stream or World.here.current
            World.here.trace.entries.append(_Record(self.id, stream.id))

    def wait(self, stream: Stream | None = None) -> None:
        (stream or World.here.current).wait_event(self)

    def synchronize(self) -> None:
        if World.here.trace is not None:
            World.here.trace.entries.append(_Wait(HOST, self.id))

    def query(self) -> bool:
        return False

    def elapsed_time(self, _: Event) -> float:
        return 0.0


class Stream:
    """A queue of a device: what it does next comes after all that it has done."""

    def __init__(self, priority: int = 0, **_: Any) -> None:
        self.id, self.priority = next(World.here.numbers), priority

    def wait_event(self, event: Event) -> None:
        if World.here.trace is not None:
            World.here.trace.entries.append(_Wait(self.id, event.id))

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def query(self) -> bool:
        return False


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

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, World.here.current = World.here.current, stream
        try:
            yield
        finally:
            World.here.current = before

    def current_stream(self, device_index: Any = None) -> Stream:
        return World.here.current

    def default_stream(self, device_index: Any = None) -> Stream:
        return World.here.default

    def synchronize(self, device_index: Any = None) -> None:
        """Nothing: what hzero does needs an order without DeepSpeed's stops of the whole device."""


class Recorder(TorchDispatchMode):
    """Writes operators and collectives into a trace.

    Attributes:
        last: The end of the last collective.
        in_transport: Whether hzero's transport starts what comes now.
    """

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.last = Event()
        self.in_transport = False
        self._entries = trace.entries
        self._memory: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        of_wire, writes, new = _uses(func)
        used: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for write, value in [*zip(writes.values(), args), *((writes[name], kwargs[name]) for name in kwargs)]:
            if write is not None:
                used[write].extend(_tensors(value))
        if of_wire:
            self._collective((args, kwargs), *used)
            return out
        for is_new, value in zip(new, out if isinstance(out, (tuple, list)) and len(new) > 1 else [out]):
            if is_new:
                used[True].extend(_tensors(value))
        self._work(World.here.current, *used)
        return out

    def _collective(self, arguments: Any, read: list[torch.Tensor], written: list[torch.Tensor]) -> None:
        """It comes after the current stream, on a stream of its communicator; `wait` orders what follows."""
        boxed = next(one for one in tree_leaves(arguments) if isinstance(one, torch.ScriptObject))
        wire = World.here.wires[dist.ProcessGroup.unbox(boxed).group_name]
        wire.wait_stream(World.here.current)
        self._work(wire, read, written, collective=True)
        self.last = wire.record_event()
        if not self.in_transport:  # of DeepSpeed: it waits where it starts it
            World.here.current.wait_event(self.last)
            if "other_ranks" in _site():  # a check that reads on the host what has come
                self.last.synchronize()

    def _work(
        self, stream: Stream, read: list[torch.Tensor], written: list[torch.Tensor], collective: bool = False
    ) -> None:
        spans = []
        for write, tensors in ((False, read), (True, written)):
            for tensor in tensors:
                if tensor.numel() == 0 or tensor.device.type != "cpu":
                    continue
                start = tensor.storage_offset() * tensor.element_size()
                last = tensor.numel() - 1
                if not tensor.is_contiguous():
                    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
                end = start + (last + 1) * tensor.element_size()
                spans.append(_Span(self._memory_of(tensor), start, end, write))
        if spans or collective:
            self._entries.append(_Work(stream.id, spans, _site(), collective))

    def _memory_of(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._memory:
            self._memory[key] = next(World.here.numbers)
            weakref.finalize(storage, self._freed, key)
        return self._memory[key]

    def _freed(self, key: int) -> None:
        self._entries.append(_Free(self._memory.pop(key), _site()))

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """What ``tensor.record_stream`` does."""
        if World.here.trace is not None:
            self._entries.append(_Keep(self._memory_of(tensor), stream.id))


@functools.cache
def _uses(func: Any) -> tuple[bool, dict[str, bool | None], list[bool]]:
    """Whether an operator is a collective, whether it writes or reads each argument (None: neither), which results are new."""
    schema, writes = func._schema, dict[str, bool | None]()
    of_wire = schema.name.startswith("c10d::")
    for one in schema.arguments:
        if "Tensor" not in str(one.type):
            writes[one.name] = None
        elif of_wire:  # their schemas do not say what they write
            writes[one.name] = not one.name.startswith("input")
        elif one.alias_info is None or one.alias_info.is_write:
            writes[one.name] = one.alias_info is not None
        else:
            writes[one.name] = None
    return of_wire, writes, [result.alias_info is None for result in schema.returns]


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for one in value for leaf in _tensors(one)] if isinstance(value, (list, tuple)) else []


def _site() -> str:
    """The innermost calls of hzero and DeepSpeed, innermost first."""
    found: list[str] = []
    frame = sys._getframe(2)
    while frame is not None and len(found) < 3:
        if (file := _file_of(frame.f_code)) is not None:
            found.append(f"{file}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(found) or "elsewhere"


@functools.cache
def _file_of(code: types.CodeType) -> str | None:
    """The file of a function's code as sites name it, if they do. Every operator looks up all its frames."""
    path = code.co_filename
    named = ("/hzero/" in path and not path.endswith("install.py")) or "/deepspeed/runtime/zero/" in path
    return "/".join(path.split("/")[-3:]) if named else None


@contextlib.contextmanager
def recording() -> Iterator[Trace]:
    """Inside, this process has a `StandIn` device, and on rank 0 the trace fills; other ranks do the same things."""
    before = get_accelerator()
    World()
    set_accelerator(StandIn())
    trace = Trace()
    recorder = Recorder(trace)
    start, message = wires.TorchWires._starts, wires.TorchWires.message

    def of_wires(function: Any, *args: Any, **rest: Any) -> Any:
        recorder.in_transport = True
        try:
            work = function(*args, **rest)
        finally:
            recorder.in_transport = False
        if work is None:  # it runs on the current stream
            World.here.current.wait_event(recorder.last)
            return None
        return _OnDevice(work, recorder.last)

    def starts(self: Any, function: Any) -> Any:
        return start(self, functools.partial(of_wires, function))

    def sends(self: Any, *args: Any, **rest: Any) -> Any:
        return of_wires(functools.partial(message, self), *args, **rest)

    def record_stream(self: torch.Tensor, stream: Stream) -> None:
        recorder.record_stream(self, stream)

    try:
        with contextlib.ExitStack() as patches:
            for owner, name, function in (
                (wires.TorchWires, "_starts", starts),
                (wires.TorchWires, "message", sends),
                (torch.Tensor, "record_stream", record_stream),
                (lanes, "_of_world", None),  # one with streams, which ends with this device
            ):
                patches.enter_context(mock.patch.object(owner, name, function))
            # Compiled codecs pass by the dispatcher. The reference reads and writes the same tensors, in operators.
            patches.enter_context(backends.reference_instead())
            if dist.get_rank() == 0:
                World.here.trace = trace
                patches.enter_context(recorder)
            yield trace
    finally:
        World.here.trace = None
        set_accelerator(before)


class _OnDevice:
    """A collective whose `wait` makes the current stream wait."""

    def __init__(self, work: dist.Work, event: Event) -> None:
        self._work = work
        self._event = event

    def wait(self) -> None:
        World.here.current.wait_event(self._event)
        self._work.wait()
