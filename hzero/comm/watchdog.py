"""Watchdog: names the ranks that did not arrive when a wait fails.

A thread writes a record of this rank to the store of torch.distributed once per second. It has the step, the number of started
hops on each lane, and the last hop. The hot path only counts (`LaneHops`). A rank whose wait fails reads the records of the
ranks that it waited for. A record has no line of code, since a thread cannot inspect another one without the risk of a crash. It
has host and process id, for ``py-spy dump``.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch.distributed as dist

from hzero.calls import NoAnswer, in_time
from hzero.comm.wires import connection_to_store
from hzero.errors import PeerError, PlainError, hook_errors, some

#: Minimum seconds between two records of a rank, and maximum records per second of all ranks together.
PERIOD_S, WRITES_PER_S = 1.0, 2000
#: Number of periods without a new record after which a rank counts as frozen or gone.
_SILENT = 4
#: Maximum wait for the store, in seconds.
_ANSWER_S = 3.0
#: Maximum number of records that one query reads: the first number, or the second divided by the world size if that is more.
_READ, _READ_BY_ALL = 64, 2**18
#: The missing ranks, if known, and a text that describes them.
Missing: TypeAlias = tuple[Sequence[int], str]


@dataclass
class LaneHops:
    """Hops of this rank on one lane, counted at their start and after their wait.

    Attributes:
        name: Name of the lane and its ranks, the same on all of them.
        ranks: World ranks.
        timeout_s: Maximum wait for one hop, in seconds.
        started: Hops that this rank has started; the same on all ranks once all have arrived.
        ended: Hops that it has waited for. On a device, a wait does not block, so this number says little.
        since: Start time of the last hop.
        size: Bytes of the last hop.
        what: Returns a description of the last hop.
        passed: Returns whether the device has passed the last hop; None: only a wait shows it.
    """

    name: str
    ranks: Sequence[int]
    timeout_s: float
    started: int = 0
    ended: int = 0
    since: float = 0.0
    size: int = 0
    what: Callable[[], str] = str
    passed: Callable[[], bool] | None = None

    def waited_s(self) -> float:
        """Seconds since the start of the last hop, or 0 if it has ended."""
        waited_s, waits = time.monotonic() - self.since, self.started > self.ended
        if self.passed is not None and not waits and waited_s > self.timeout_s / 2:  # earlier, a graph may be captured
            with contextlib.suppress(RuntimeError):  # the device has failed
                waits = not self.passed()
        return waited_s if waits else 0.0


class Watchdog:
    """Writes this rank's record, warns of long waits, and finds the ranks that did not arrive.

    A rank writes every second. In worlds of more than 2,000 ranks it writes less often, so that all ranks together write 2,000
    records per second: every 38 s with 75,264 ranks. A rank counts as frozen or gone after 4 periods without a new record. A
    query reads at most 64 records, or 2^18 divided by the world size if that is more. It reads the ranks that follow in the
    group, so that the ranks of a large group read all records together.

    Args:
        rank: This rank.
        world_size: Number of ranks in the world.
        connect: Makes a connection to the store that no other thread uses.

    Attributes:
        step: Optimizer steps that this rank has completed.
        micro: Micro-batches that it has started since.
        lanes: The hops of this rank, by lane name.
        pid: This process.
        period_s: Seconds between two records.
    """

    def __init__(self, rank: int, world_size: int, connect: Callable[[], Any]) -> None:
        self.step, self.micro, self.pid = 0, 0, os.getpid()
        self.period_s = max(PERIOD_S, world_size / WRITES_PER_S)
        self._rank, self._world_size, self._world = rank, world_size, dist.group.WORLD
        self._store = functools.cache(connect)
        self.lanes: dict[str, LaneHops] = {}
        self._error: Missing | None = None  # the first rank that ended with an error, or the ranks that it missed
        self._missing: tuple[int, Missing] = -1, ((), "")  # ended hops when a wait failed, and the missing ranks
        self._answered, self._warned = time.monotonic(), (-1, -1)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hzero watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Lets the threads end; the last record stays in the store."""
        self._stopped.set()

    def _run(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone
            while dist.group.WORLD is self._world and not self._stopped.is_set():
                self._write()
                late = [lane for lane in list(self.lanes.values()) if lane.waited_s() > lane.timeout_s / 2]
                if late and self._warned != (self.step, self.micro):
                    self._warned = self.step, self.micro
                    # This thread must keep writing, or other ranks would consider this one frozen.
                    late_hop = late[0], late[0].started
                    threading.Thread(target=self._warn, args=late_hop, name="hzero warning", daemon=True).start()
                self._stopped.wait(self.period_s)

    def _warn(self, lane: LaneHops, number: int) -> None:
        what = f"{lane.what()}: no end after {lane.waited_s():.0f} s; {self._find(lane, number)[1]}"
        print(f"hzero: warning: rank {self._rank}: {what}", file=sys.stderr, flush=True)

    def _write(self) -> None:
        lanes = [lane for lane in list(self.lanes.values()) if lane.started]
        last = max(lanes, key=lambda lane: lane.since, default=None)
        record = {
            "who": self._who(),
            "last": f"; its last hop: {last.what().removeprefix('hzero: ')}" if last is not None else "",
            "time": time.time(),
            "hops": {lane.name: (lane.started, lane.size) for lane in lanes},
            "waits": any(lane.waited_s() for lane in lanes),
            "missing": self._missing[1] if self._missing[0] == self._ended() else None,  # None: no wait has failed
        }
        self._store().set(f"hzero rank {self._rank}", json.dumps(record))
        if self._error is None:  # read now: the store may end with that rank
            error = json.loads(self._store().compare_set("hzero error", "", "null"))
            self._error = error if error and self._rank not in error[0] else None
        self._answered = time.monotonic()

    def _who(self) -> str:
        after = f"after step {self.step}" + (f", micro-batch {self.micro}" if self.micro else "")
        return f"rank {self._rank} (host {socket.gethostname()}, pid {self.pid}, {after})"

    def _ended(self) -> int:
        return sum(lane.ended for lane in list(self.lanes.values()))

    def tell(self, error: BaseException) -> None:
        """Reports to all ranks that this one ends with an error, or which ranks it has missed. The first report counts."""
        what = f"{type(error).__name__}: {error}".partition("\n")[0]
        found: Missing = (self._rank,), f"{self._who()}, which has ended with {what}"
        if caused_by_peer(error):  # others may fail only once this rank has ended, perhaps with the store
            found = self._missing[1] if self._missing[1][0] else self.missing()
        report = json.dumps((found[0], found[1].removeprefix("waited for ")))
        with contextlib.suppress(NoAnswer, RuntimeError):
            if found[0]:
                in_time(lambda: self._store().compare_set("hzero error", "null", report), _ANSWER_S)
        if self._rank == 0:  # the store may end with this rank while others read it
            time.sleep(2 * self.period_s)

    def missing(self, lane: LaneHops | None = None, number: int = 0) -> Missing:
        """Finds the ranks that did not arrive at a collective that failed or timed out.

        A rank that ended with an error of its own is to blame. Otherwise, a rank without a record for several periods.
        Otherwise, a rank that is blamed by ranks which have given up. Otherwise, a rank that is behind. The answer takes one to
        two times as long as a rank must be silent to count as gone.

        Args:
            lane: Lane of the hop; None for a collective outside hops.
            number: Number of the hop on its lane.
        """
        failed, found = self._missing
        if failed != self._ended():  # else hops on several lanes failed for one reason
            self._missing = self._ended(), ((), "")  # shows others that this rank has given up
            found = self._find(lane, number)
        if lane is not None:
            lane.ended, lane.passed = lane.started, None  # no wait follows
        self._missing = self._ended(), found
        with contextlib.suppress(NoAnswer, RuntimeError):  # before this rank ends
            in_time(self._write, _ANSWER_S)
        return found

    def _find(self, lane: LaneHops | None, number: int) -> Missing:
        try:
            found = in_time(lambda: self._compare(lane, number), 2 * _SILENT * self.period_s + _ANSWER_S)
        except (NoAnswer, RuntimeError):
            silent_s = time.monotonic() - self._answered
            found = (0,), f"rank 0 or torchrun's agent: its store has not answered for {silent_s:.0f} s: frozen or gone"
        ranks, text = self._error or found
        return ranks, f"waited for {text}" if ranks else "no rank that it asked is missing; others may name one"

    def _compare(self, lane: LaneHops | None, number: int) -> Missing:
        """Compares this rank's record with the records of its peers in the collective, until a rank is to blame.

        No clock of another host is used. A rank is silent if its record does not change during this call.
        """
        self._write()
        store, group = self._store(), range(self._world_size) if lane is None else lane.ranks
        place, most = group.index(self._rank), max(_READ, _READ_BY_ALL // self._world_size)
        ranks = [*group[place + 1 :], *group[:place]][:most]
        keys = [f"hzero rank {rank}" for rank in ranks]
        before, began = [store.compare_set(key, "", "null") for key in keys], time.monotonic()
        found: Missing = self._error or ((), "")
        while not found[0] and not self._stopped.wait(self.period_s / 4):
            now, periods = store.multi_get(keys), (time.monotonic() - began) / self.period_s
            silent = {rank for rank, old, new in zip(ranks, before, now) if old == new}
            if not silent or periods > _SILENT:
                records, last = dict(zip(ranks, map(json.loads, now))), periods > 2 * _SILENT
                found = _judged(records, silent, lane, number, last)
                if last:
                    break
        return found


def _judged(records: dict[int, Any], silent: set[int], lane: LaneHops | None, number: int, last: bool) -> Missing:
    """Finds missing ranks from the records. ``last`` also counts ranks that wait and may yet report whom they blame."""
    unequal, gone, blamed, behind = dict[int, str](), dict[int, str](), dict[int, str](), dict[int, str]()
    for rank, record in records.items():
        if record is None:
            gone[rank] = f"rank {rank}, which has never said where it is"
            continue
        who, hop = record["who"], record["last"]
        started, size = (-1, 0) if lane is None else record["hops"].get(lane.name, (0, 0))
        if lane is not None and started == lane.started == number and size != lane.size:
            unequal[rank] = f"{who}, whose message has {size:,} bytes instead of {lane.size:,}: ranks disagree"
        elif record["missing"] is not None:
            blamed.update(dict.fromkeys(record["missing"][0], f"{who}, which has {record['missing'][1]}"))
        elif rank in silent:
            gone[rank] = f"{who}, no sign of life for {time.time() - record['time']:.0f} s: frozen or gone{hop}"
        elif started < number and (last or not record["waits"]):
            behind[rank] = f"{who}, at hop {started} instead of {number}{hop}" if lane else f"{who}, in no collective"
    found = unequal or gone or blamed or behind
    return sorted(found), some(list(dict.fromkeys(found.values())), 8, "; ")


# ---- the watchdog of this process ----------------------------------------------------------------------------------

_of_world: tuple[Any, Watchdog] | None = None


def shared_watchdog() -> Watchdog:
    """Returns the watchdog of this process, one per world of torch.distributed; the first call starts it."""
    global _of_world
    if _of_world is None or _of_world[0] is not dist.group.WORLD:
        hook_errors()
        _of_world = dist.group.WORLD, Watchdog(dist.get_rank(), dist.get_world_size(), connection_to_store())
    return _of_world[1]


def caused_by_peer(error: BaseException | None) -> bool:
    """Whether an error, or one that it follows, is a collective that failed, of hzero or of torch."""
    if error is None or isinstance(error, (PeerError, dist.DistError)):
        return error is not None
    of_gloo = isinstance(error, RuntimeError) and "/gloo/" in str(error)
    return of_gloo or caused_by_peer(error.__cause__ or error.__context__)


def stop_watchdog() -> None:
    """Lets the threads of this process's watchdog end."""
    if _of_world is not None:
        _of_world[1].stop()


def tell(error: BaseException) -> None:
    """Reports to the other ranks, if there is a world, that this one ends with an error."""
    if _of_world is not None and _of_world[0] is dist.group.WORLD and _of_world[1].pid == os.getpid():  # no fork
        _of_world[1].tell(error)


# ---- errors that name missing ranks ------------------------------------------------------------------------------------


class HopError(PlainError):
    """A hop failed, or a message arrived corrupted. The message names the collective, its payload, tier and ranks."""


class MissingPeerError(HopError, PeerError):
    """A collective failed or timed out because peers are gone or late. The message also names them."""

    @classmethod
    def of(
        cls, what: str, error: Exception | None = None, lane: LaneHops | None = None, number: int = 0
    ) -> MissingPeerError:
        """Returns the error for a failed collective.

        Args:
            what: Description of the collective and how it ended, with a colon at the end; the missing ranks follow.
            error: Error of the library.
            lane: As in `Watchdog.missing`.
            number: As in `Watchdog.missing`.
        """
        ranks, text = shared_watchdog().missing(lane, number)
        said = f" ({str(error).partition(chr(10))[0]})" if error is not None else ""
        return cls(f"{what}{text}{said}", ranks)


@contextlib.contextmanager
def blaming() -> Iterator[None]:
    """Context that names missing ranks if a collective outside hops fails, such as DeepSpeed's all-reduce of the norm.

    Raises:
        MissingPeerError: A collective failed or timed out.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, PeerError) or not caused_by_peer(error) or dist.group.WORLD is None:
            raise
        frames = traceback.extract_tb(error.__traceback__)
        script = [frame for frame in frames if "/torch/" not in frame.filename and "/deepspeed/" not in frame.filename]
        place = f"{script[-1].filename}:{script[-1].lineno} {script[-1].name}"
        raise MissingPeerError.of(f"hzero: rank {dist.get_rank()}, a collective at {place}: ", error) from error
