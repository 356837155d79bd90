"""Record: where a rank is, as its flight recorder tells the store."""

from __future__ import annotations

import ctypes
import gc
import os
import sysconfig
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from itertools import accumulate, chain, compress, repeat, takewhile
from operator import attrgetter, is_not
from typing import Any, Literal, TypeAlias

from hzero.config import Tier

#: A communicator: the group of one tier, for one role of the stage, or for one use of a `Communicator`.
Lane: TypeAlias = tuple[str, Tier]
#: The main thread waits in a hop, in another collective of torch.distributed, or runs anything else.
Doing: TypeAlias = Literal["hop", "collective", "code"]

#: Folders of frames that say nothing about where a rank is.
_TORCH, _DEEPSPEED = (
    f"{os.path.dirname(spec.origin)}{os.sep}" if (spec := find_spec(name)) and spec.origin else os.devnull
    for name in ("torch", "deepspeed")
)
_COLLECTIVES = (f"{_TORCH}distributed{os.sep}", f"{_DEEPSPEED}comm{os.sep}")
_STANDARD = f"{sysconfig.get_path('stdlib')}{os.sep}"
_HOPS = f"{os.path.dirname(__file__)}{os.sep}"
#: These are C functions all the way, which `frames_of` needs.
_innermost = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p)(("PyThreadState_GetFrame", ctypes.pythonapi))
_place = attrgetter("f_code.co_filename", "f_lineno", "f_code.co_name")


class HopCount:
    """Hops of this rank on one lane, counted on the hot path.

    Attributes:
        started: Hops that this rank has started; the same on all ranks of the group once all have come.
        ended: Those that it has waited for. On a device a wait does not block, so this says little there.
        what: Describes the last one.
        passed: Whether the device is past the last one.
        timeout_s: Longest wait for one hop.
        peers: Ranks of the group of a rank.
    """

    __slots__ = ("ended", "passed", "peers", "started", "timeout_s", "what")

    def __init__(self, timeout_s: float, peers: Callable[[int], Sequence[int]]) -> None:
        self.started = self.ended = 0
        self.what: Callable[[], str] = str
        self.passed: Callable[[], bool] = lambda: True
        self.timeout_s, self.peers = timeout_s, peers

    def start(self, what: Callable[[], str], passed: Callable[[], bool]) -> int:
        """Counts a hop. Returns its number, from 1."""
        self.what, self.passed = what, passed
        self.started += 1
        return self.started


@dataclass
class Record:
    """Where a rank was when it last wrote to the store.

    Attributes:
        rank: The rank.
        host: Its host.
        pid: Its process.
        device: Its device.
        beat: Number of the record.
        time: Seconds since the epoch, by the clock of its host.
        step: Optimizer steps that it has finished.
        micro: Micro-steps that it has begun since.
        doing: What its main thread does.
        place: Where: file, line and function of the innermost frame outside torch, DeepSpeed and the standard library.
        unchanged_s: Seconds for which all of this has been so.
        lanes: Of each lane hops started, hops ended, the last hop, and seconds since the last start.
        waits: Lanes on whose last hop it waits; on a device once that has taken half of its timeout.
        blames: Ranks that it has named because its own wait ran out; None while none has.
    """

    rank: int
    host: str
    pid: int
    device: str
    beat: int = 0
    time: float = 0.0
    step: int = 0
    micro: int = 0
    doing: Doing = "code"
    place: str = ""
    unchanged_s: float = 0.0
    lanes: dict[str, tuple[int, int, str, float]] = field(default_factory=dict)
    waits: list[str] = field(default_factory=list)
    blames: list[int] | None = None

    def __str__(self) -> str:
        """The rank and its process, for messages."""
        at = f"after step {self.step}" + (f", micro-step {self.micro}" if self.micro else "")
        return f"rank {self.rank} (host {self.host}, pid {self.pid}, {self.device}, {at})"

    def silence(self) -> str:
        """That it has stopped writing, for messages."""
        return f"no sign of life for {max(time.time() - self.time, 0):.0f} s: frozen or gone, last in {self.place}"

    def last_hop(self) -> str:
        """The hop that it has started last, for messages."""
        if not self.lanes:
            return ""
        # Of those that one look has found new the one that is under way.
        _, _, what, since_s = min(self.lanes.values(), key=lambda counted: (counted[3], counted[0] <= counted[1]))
        return f"; its last hop: {what.removeprefix('hzero: ')}, started {since_s:.0f} s before" if what else ""


def main_thread() -> int | None:
    """The main thread for `frames_of`, where it is the caller; None elsewhere, since another one may end too soon."""
    if threading.current_thread() is not threading.main_thread():
        return None
    return int(ctypes.PYFUNCTYPE(ctypes.c_void_p)(("PyThreadState_Get", ctypes.pythonapi))())


def frames_of(thread: int | None) -> list[tuple[str, int, str]]:
    """Path, line and function of the frames of a thread that runs on, innermost first, at most 100.

    All is one call of C functions, so no other thread runs Python code meanwhile, and no frame is held longer. The usual ways
    may end or stop a process, with CPython 3.11 at least: Python code that walks the frames of ``sys._current_frames()`` while
    their thread runs on (python/cpython#111363), that function itself, which locks the list of threads (python/cpython#106883),
    and faulthandler, which reads that list without the lock while threads of C++ enter it. So may a collection of garbage, which
    any new object can start before Python 3.12: finalizers let other threads run, and the frames change under the reader.

    Args:
        thread: What `main_thread` returned; None has no frames.
    """
    if thread is None:
        return []
    found: list[tuple[str, int, str]] = []
    collects: list[bool] = []
    frames = accumulate(chain(map(_innermost, [thread]), repeat("f_back", 99)), getattr)
    there = takewhile(partial(is_not, None), frames)  # None is behind the outermost frame
    steps = [
        partial(collects.extend, map(partial.__call__, [partial(gc.isenabled)])),
        partial(gc.disable),
        partial(found.extend, map(_place, there)),
    ]
    calls = chain(steps, compress([partial(gc.enable)], collects))
    # No new object from here until collections are off.
    _in_one_call(deque[Any](maxlen=0), map(partial.__call__, calls), collects)
    return found


def _in_one_call(sink: deque[Any], calls: Iterable[Any], collects: Sequence[bool]) -> None:
    try:
        sink.extend(calls)
    except BaseException as error:
        if any(collects):
            gc.enable()
        if not isinstance(error, ValueError):  # the thread has no frame
            raise


def where(frames: Iterable[tuple[str, int, str]]) -> tuple[Doing, str]:
    """What a thread does and where, from its frames, innermost first."""
    doing: Doing = "code"
    innermost = ""
    for path, line, function in frames:
        here = f"{path}:{line} {function}"
        innermost = innermost or here
        if path.startswith(_HOPS):
            doing = "hop"
        elif path.startswith(_COLLECTIVES):
            doing = "collective" if doing == "code" else doing
        elif not path.startswith((_TORCH, _DEEPSPEED)) and (not path.startswith(_STANDARD) or "site-packages" in path):
            return doing, here
    return doing, innermost
