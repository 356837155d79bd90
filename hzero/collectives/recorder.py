"""Flight recorder: every rank tells the world's store where it is, so a wait that runs out can name who did not come.

The hot path only counts hops (`HopCount.start`). A thread writes this rank's `Record` every `period_s`, and reads nobody's.
Records of others are read when a wait has lasted half of its timeout (a warning) and when it fails (`Recorder.missing`).
All talk to the store is done by a thread of its own with a connection of its own: a store whose process is frozen does not
answer, and neither a rank that asks nor the recorder may hang with it.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import os
import queue
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer  # the builtin one from Python 3.11 on
from datetime import timedelta
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.constants import default_pg_timeout

from hzero.collectives.record import HopCount, Lane, Record, frames_of, main_thread, where
from hzero.validation import PeerError, some

T = TypeVar("T")
#: Shortest time between two records of a rank in seconds, and most records that all ranks write per second.
PERIOD_S, WRITES_PER_S = 1.0, 2000
#: Periods without a new record after which a rank counts as frozen or gone.
_SILENT = 4
#: How long the store may take to answer, in seconds.
_ANSWER_S = 3.0
#: Records that one question may read: at least the first, and at most so many that all ranks together read the second.
_READ, _READ_BY_ALL = 64, 2**18
#: Ranks that an answer describes one by one.
_NAMED = 8


class Missing(NamedTuple):
    """The answer to who did not come.

    Attributes:
        ranks: The ranks to blame; empty where none was found.
        text: The answer in words, which follow "waited for" or the like.
    """

    ranks: tuple[int, ...]
    text: str


class _Line:
    """The connection to the store. Who asks waits a limited time; the call itself may never return.

    Args:
        connect: Makes the connection.
    """

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect
        self._calls: queue.SimpleQueue[tuple[Callable[[Any], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="hzero store", daemon=True)
        self._thread.start()

    def ask(self, call: Callable[[Any], T], within_s: float) -> T:
        """The result of ``call`` on the store.

        Raises:
            NoAnswer: The store has not answered in time.
            RuntimeError: It is gone.
        """
        answer: Future[T] = Future()
        self._calls.put((call, answer))
        try:
            return answer.result(within_s)
        except NoAnswer:
            answer.cancel()
            raise

    def close(self, within_s: float) -> None:
        """Ends the thread, if the store answers in time."""
        self._calls.put(None)
        self._thread.join(within_s)

    def _serve(self) -> None:
        store: Any = None
        while (asked := self._calls.get()) is not None:
            call, answer = asked
            if answer.set_running_or_notify_cancel():
                try:
                    store = store or self._connect()
                    answer.set_result(call(store))
                except BaseException as error:
                    answer.set_exception(error)


class Recorder:
    """Writes this rank's record, warns of long waits, and finds out who did not come.

    A rank writes every second or, in worlds of more than 2,000 ranks, so seldom that all of them together write 2,000
    records a second: every 38 s with 75,264 ranks. It counts as frozen or gone after 4 periods without a new record.
    A question reads at most 64 records, or 2^18 divided by the ranks where that is more: those of the ranks that follow in
    the group, so that the ranks of a large group read all of them together.

    Args:
        rank: This rank.
        world_size: Ranks of the world.
        connect: Makes a connection to the store, which no other thread uses. None: there is no store, so nobody is named.
        timeout_s: Of collectives outside hops.
        device: Of this rank.
        store_at: Where the store is, for messages.
        store_rank: The rank that serves it; None where none does.
        alive: Whether the world still lives; the thread ends with it.

    Attributes:
        step: Optimizer steps that this rank has finished.
        micro: Micro-steps that it has begun since.
        period_s: Seconds between two records.
        awaited: Whether the main thread waits for a hop elsewhere than in a wait of ours, as in DDP's backward.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        connect: Callable[[], Any] | None,
        *,
        timeout_s: float,
        device: str = "cpu",
        store_at: str = "",
        store_rank: int | None = None,
        alive: Callable[[], bool] = lambda: True,
    ) -> None:
        self.step = self.micro = 0
        self.awaited: Callable[[], bool] = lambda: False
        self.period_s = max(PERIOD_S, world_size / WRITES_PER_S)
        self._world_size, self._timeout_s, self._alive = world_size, timeout_s, alive
        self._store_at, self._store_rank = store_at, store_rank
        self._hops: dict[Lane, HopCount] = {}
        self._record = Record(rank, socket.gethostname(), os.getpid(), device)
        self._main = main_thread()
        self._changed: dict[Any, tuple[Any, float]] = {}
        self._beats: dict[int, tuple[int, float]] = {}
        self._verdict: tuple[Missing, int] | None = None
        self._warned: tuple[int, int] | None = None
        self._server: Record | None = None  # of the rank that serves the store, read while it answers
        self._answered = time.monotonic()
        self._stopped = threading.Event()
        self._line = _Line(connect) if connect is not None else None
        if self._line is not None:
            self._thread = threading.Thread(target=self._run, name="hzero recorder", daemon=True)
            self._thread.start()
            # A thread inside the store's client must not see the interpreter end, which would abort the process. On full
            # cores its last call, or the connection itself, takes longer than a stop may take elsewhere.
            atexit.register(self.stop, 3.0)

    def hops(self, lane: Lane, timeout_s: float, peers: Callable[[int], Sequence[int]]) -> HopCount:
        """The count of a lane, which all transports of the world share."""
        count = self._hops.setdefault(lane, HopCount(timeout_s, peers))
        count.timeout_s, count.peers = timeout_s, peers
        return count

    def stop(self, within_s: float = 0.5) -> None:
        """Ends the threads; a last record stays in the store.

        Args:
            within_s: Waits so long for each; the call of a store that has gone may never return.
        """
        if self._line is not None and not self._stopped.is_set():
            self._stopped.set()
            if self._thread is not threading.current_thread():
                self._thread.join(within_s)
            self._line.close(within_s)
            atexit.unregister(self.stop)

    # ---- writing -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        gone = False
        while self._alive():
            self._sample()
            try:
                if not gone:
                    self._write(min(_ANSWER_S, self.period_s))
                if not gone and self._server is None and self._store_rank is not None:
                    self._server = self._get([self._store_rank])[self._store_rank]
            except NoAnswer:  # said when somebody asks
                pass
            except RuntimeError:  # for good, as where rank 0 has ended; torch prints a page for every attempt
                gone = True
            self._warn_of_waits()
            if self._stopped.wait(self.period_s):
                return
        self._stopped.set()

    def _write(self, within_s: float) -> None:
        assert self._line is not None
        text = json.dumps(dataclasses.asdict(self._record))
        self._line.ask(lambda store: store.set(_key(self._record.rank), text), within_s)
        self._answered = time.monotonic()

    def _sample(self) -> None:
        own = self._record
        own.beat, own.time, own.step, own.micro = own.beat + 1, time.time(), self.step, self.micro
        own.doing, own.place = where(frames_of(self._main))
        if own.doing == "code" and self.awaited():
            own.doing = "hop"
        lanes: dict[str, tuple[int, int, str, float]] = {}
        waits = []
        for lane, count in list(self._hops.items()):
            name, started = " ".join(lane), count.started
            since_s = self._since(lane, started)
            lanes[name] = started, count.ended, count.what(), round(since_s, 1)
            if own.device == "cpu":
                waiting = started > count.ended and own.doing == "hop"
            else:  # the host does not wait, and an event is better not asked while a graph is captured
                waiting = since_s > count.timeout_s / 2 and not _passed(count)
            if waiting:
                waits.append(name)
        own.lanes, own.waits = lanes, waits  # whole, since `missing` may write the record meanwhile
        counts = [counted[:2] for counted in lanes.values()]
        own.unchanged_s = round(self._since("all", (own.step, own.micro, own.doing, own.place, counts)), 1)
        own.blames = list(self._verdict[0].ranks) if self._verdict and self._verdict[1] == self._ended else None

    def _since(self, what: Any, value: Any) -> float:
        """Seconds for which something has had its value, by looks one period apart."""
        now = time.monotonic()
        before, since = self._changed.get(what, (None, now))
        if before != value:
            since = now
            self._changed[what] = value, since
        return now - since

    @property
    def _ended(self) -> int:
        return sum(count.ended for count in list(self._hops.values()))

    # ---- waits ---------------------------------------------------------------------------------------------------

    def _warn_of_waits(self) -> None:
        """Warns once per micro-step of a wait that has lasted half of its timeout."""
        own, now = self._record, (self.step, self.micro)
        if self._warned == now:
            return
        for lane, count in list(self._hops.items()):
            waited_s = own.lanes[" ".join(lane)][3] if " ".join(lane) in own.waits else 0.0
            if waited_s > count.timeout_s / 2:
                self._warned = now
                what = own.lanes[" ".join(lane)][2]
                self._warn(f"{what}: no end after {waited_s:.0f} s", lane, count.started)
                return
        if own.doing == "collective" and own.unchanged_s > self._timeout_s / 2:
            self._warned = now
            self._warn(f"a collective at {own.place}: no end after {own.unchanged_s:.0f} s", None, 0)

    def _warn(self, what: str, lane: Lane | None, number: int) -> None:
        def say() -> None:
            found = self._find(lane, number)
            print(f"hzero: warning: rank {self._record.rank}: {what}; {found.text}", file=sys.stderr, flush=True)

        # This rank must go on writing meanwhile, or others would take it for frozen.
        threading.Thread(target=say, name="hzero warning", daemon=True).start()

    def missing(self, lane: Lane | None = None, number: int = 0) -> Missing:
        """Who did not come to a collective that has failed or timed out.

        A rank counts as missing if it has been silent for several periods. Where none has, one that is behind and runs
        other code does. One that is behind and waits itself leads to those that it waits for. The answer takes about
        as long as a rank's silence has to last, and as `_ANSWER_S` where the store does not answer.

        Args:
            lane: Of the hop; None for a collective outside hops.
            number: Of the hop on its lane.
        """
        if self._verdict is not None and self._verdict[1] == self._ended:
            return self._verdict[0]  # hops on several lanes fail for one reason
        found = self._find(lane, number)
        if found.ranks:
            self._verdict = found, self._ended
            self._record.blames = list(found.ranks)
            with contextlib.suppress(NoAnswer, RuntimeError):  # before this rank ends
                self._write(min(_ANSWER_S, self.period_s))
        return found

    def _find(self, lane: Lane | None, number: int) -> Missing:
        if self._line is None:
            return Missing((), "no store tells where the other ranks are")
        try:
            return self._follow(lane, number)
        except (NoAnswer, RuntimeError):
            silent_s = time.monotonic() - self._answered
            if self._store_rank is None:
                return Missing((), f"{self._store_at} has not answered for {silent_s:.0f} s")
            who = self._server or f"rank {self._store_rank}"
            return Missing(
                (self._store_rank,),
                f"waited for {who}: the store that it serves, {self._store_at}, has not answered for {silent_s:.0f} s, so "
                "it is frozen or gone",
            )

    def _follow(self, first: Lane | None, hop: int) -> Missing:
        """Goes from who waits to whom it waits for, until somebody does not wait."""
        silent: dict[int, str] = {}
        busy: dict[int, str] = {}
        waiting: dict[int, str] = {}
        asked: set[tuple[Lane | None, int]] = set()
        todo: deque[tuple[int, Lane | None, int, Sequence[int] | None]] = deque([(self._record.rank, first, hop, None)])
        lanes = {" ".join(known): known for known in self._hops}
        read = 0
        while todo:
            rank, lane, number, named = todo.popleft()
            peers = named if named is not None else self._peers(rank, lane)
            peers = [peer for peer in peers if peer != self._record.rank and (lane, peer) not in asked]
            asked |= {(lane, peer) for peer in peers}
            read += len(peers)
            for peer, (record, is_silent) in self._read(peers).items():
                counted = record.lanes.get(" ".join(lane), (0,))[0] if record is not None and lane is not None else 0
                if record is None:
                    silent[peer] = f"rank {peer}, which has never said where it is"
                elif record.blames is not None:
                    todo.append((peer, None, 0, record.blames))
                elif is_silent:
                    silent[peer] = f"{record}, {record.silence()}{record.last_hop()}"
                elif (record.doing == "collective") if lane is None else (counted >= number):
                    continue  # it has come
                elif record.doing == "code" and not record.waits:
                    busy[peer] = f"{record}, in {record.place} for {record.unchanged_s:.0f} s{record.last_hop()}"
                else:
                    waiting[peer] = f"{record}, which waits itself{record.last_hop()}"
                    waits = [name for name in record.waits if name in lanes]
                    todo.extend((peer, lanes[name], record.lanes[name][0], None) for name in waits)
                    if not waits and lane is not None:
                        todo.append((peer, None, 0, None))
        found = silent or busy or waiting
        if found:
            return Missing(tuple(sorted(found)), f"waited for {some(list(found.values()), _NAMED, '; ')}")
        return Missing((), f"none of the {read} ranks that it asked is missing; others may name one")

    def _peers(self, rank: int, lane: Lane | None) -> list[int]:
        """The ranks to ask: those that follow in the group, as many as a question may read."""
        group = range(self._world_size) if lane is None else self._hops[lane].peers(rank)
        own = group.index(rank)
        count = min(len(group) - 1, max(_READ, _READ_BY_ALL // self._world_size))
        return [group[(own + distance) % len(group)] for distance in range(1, count + 1)]

    def _read(self, ranks: Sequence[int]) -> dict[int, tuple[Record | None, bool]]:
        """Records that were written after this call, or the last ones of ranks that are silent.

        No clock of another host is used: a rank is silent if its record does not change while this rank looks.
        """
        first: dict[int, int] = {}
        found: dict[int, tuple[Record | None, bool]] = {}
        silent_s = _SILENT * self.period_s
        while left := [rank for rank in ranks if rank not in found]:
            records = self._get(left)
            now = time.monotonic()
            for rank, record in records.items():
                beat = record.beat if record is not None else 0
                if self._beats.get(rank, (-1, 0.0))[0] != beat:
                    self._beats[rank] = beat, now
                silent = now - self._beats[rank][1] >= silent_s
                if beat != first.setdefault(rank, beat) or silent:
                    found[rank] = record, silent
            if len(found) < len(ranks):
                time.sleep(self.period_s / 4)
        return found

    def _get(self, ranks: Sequence[int]) -> dict[int, Record | None]:
        def call(store: Any) -> list[bytes | None]:
            keys = [_key(rank) for rank in ranks]
            if store.check(keys):
                return list(store.multi_get(keys)) if store.has_extended_api() else [store.get(key) for key in keys]
            return [store.get(key) if store.check([key]) else None for key in keys]

        assert self._line is not None
        texts = self._line.ask(call, _ANSWER_S)
        return {rank: Record(**json.loads(text)) if text else None for rank, text in zip(ranks, texts)}


def _key(rank: int) -> str:
    return f"hzero recorder {rank}"


def _passed(count: HopCount) -> bool:
    try:
        return count.passed()
    except RuntimeError:  # of a device that has failed
        return True


# ---- the recorder of this process ----------------------------------------------------------------------------------

_of_world: tuple[Any, Recorder] | None = None


def shared_recorder() -> Recorder:
    """The recorder of this process, for as long as torch.distributed's world lives; started by the first call."""
    global _of_world
    world = dist.group.WORLD
    if _of_world is None or _of_world[0] is not world:
        if _of_world is not None:
            _of_world[1].stop()
        connect, place, rank = _store()
        device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
        recorder = Recorder(
            dist.get_rank(),
            dist.get_world_size(),
            connect,
            timeout_s=world_timeout().total_seconds(),
            device=device,
            store_at=place,
            store_rank=rank,
            alive=lambda: dist.group.WORLD is world,
        )
        _of_world = world, recorder
    return _of_world[1]


def _store() -> tuple[Callable[[], Any] | None, str, int | None]:
    """Makes connections to the world's store; where it is, and the rank that serves it."""
    try:
        given = found = c10d._get_default_store()
    except (ValueError, RuntimeError):  # a world without one, as with MPI
        return None, "", None
    while isinstance(found, dist.PrefixStore):
        found = found.underlying_store
    if not isinstance(found, dist.TCPStore):
        return lambda: given, "the store", None
    host, port = found.host, found.port
    # Worlds that torchrun starts again share its agent's store.
    prefix = f"hzero/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"

    def connect() -> Any:  # a clone would keep the server of rank 0 alive
        client = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30))
        return dist.PrefixStore(prefix, client)

    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return connect, f"the store of torchrun's agent at {host}, port {port}", None
    return connect, f"at {host}, port {port}", 0


def world_timeout() -> timedelta:
    """Timeout of the world's process group; groups made later do not inherit it."""
    assert dist.group.WORLD is not None, "torch.distributed is not initialised"
    return group_timeout(dist.group.WORLD)


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """Timeout of a process group."""
    options = getattr(group._get_backend(group._device_types[0]), "options", None)  # not every torch exposes them
    return options._timeout if options is not None else default_pg_timeout


@contextlib.contextmanager
def blaming() -> Iterator[None]:
    """Turns an error of a collective outside hops, such as DeepSpeed's all-reduce of the norm, into one that names who.

    Raises:
        PeerError: A collective failed or timed out.
    """
    try:
        yield
    except PeerError:
        raise
    except RuntimeError as error:
        if dist.group.WORLD is None or not (isinstance(error, dist.DistError) or "/gloo/" in str(error)):
            raise
        recorder = shared_recorder()
        _, place = where(reversed(list(_frames(error.__traceback__))))
        missing = recorder.missing()
        raise PeerError(
            f"hzero: rank {dist.get_rank()}, a collective at {place}: {missing.text} ({_short(error)})", missing.ranks
        ) from error


def _frames(at: TracebackType | None) -> Iterator[tuple[str, int, str]]:
    for frame, line in traceback.walk_tb(at):
        yield frame.f_code.co_filename, line, frame.f_code.co_name


def _short(error: BaseException) -> str:
    return str(error).splitlines()[0].rpartition("] ")[2] if str(error) else type(error).__name__
