"""Errors that the user can fix, reported on one line, and agreement of all ranks on an error or a value."""

from __future__ import annotations

import contextlib
import difflib
import os
import reprlib
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, TypeVar

#: New names of keys and tiers.
_RENAMED = {
    "gcd": "intra_package",
    "hive": "intra_hive",
    "gpu": "intra_node",
    "node": "inter_node",
    "group": "inter_group",
    "cluster": "inter_cluster",
    "gpus_per_node": "packages_per_node",
    "gcds_per_gpu": "devices_per_package",
    "gpus_per_hive": "packages_per_hive",
}
T = TypeVar("T")
E = TypeVar("E", bound="ConfigError | PlainError")


class _OneLineError(Exception):
    """An error that needs no traceback. Escapes replace control characters, for example in names of files and hosts.

    Args:
        message: Message for the user.
        reported_elsewhere: Whether another rank reports the same error, so that this rank need not report it.

    Attributes:
        reported_elsewhere: See the argument.
        of_all_ranks: Whether all ranks raise it, and rank 0 reports it. See `of_all_ranks`.
    """

    of_all_ranks = False

    def __init__(self, message: str = "", reported_elsewhere: bool = False) -> None:
        super().__init__("\n".join(map(printable, message.split("\n"))))
        self.reported_elsewhere = reported_elsewhere


class ConfigError(_OneLineError, ValueError):
    """Invalid input. The message has one line: ``KEY: found VALUE; expected X or Y (did you mean Z?)``.

    The key may be an option, an argument or a file.
    """

    def __init__(self, message: str = "", reported_elsewhere: bool = False) -> None:
        super().__init__(printable(message), reported_elsewhere)


class PlainError(_OneLineError, RuntimeError):
    """An error of a run that needs no traceback. The message may have several lines."""


class PeerError(PlainError):
    """Other ranks did not join a collective. The message names them and their hosts.

    Attributes:
        ranks: The missing ranks, if they are known.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


#: Seconds that other ranks wait for rank 0 to report an error of all ranks. Import times on a busy file system differ that much.
WAIT_S = 60.0


def of_all_ranks(error: E) -> E:
    """Marks an error that all ranks raise. If it is not caught, rank 0 prints one line and the other ranks exit silently."""
    hook_errors()
    error.of_all_ranks, error.reported_elsewhere = True, error.reported_elsewhere or _rank() > 0
    return error


@contextlib.contextmanager
def on_all_ranks() -> Iterator[None]:
    """Marks every `ConfigError` in the block with `of_all_ranks`."""
    try:
        yield
    except ConfigError as error:
        of_all_ranks(error)
        raise


def from_rank_0(function: Callable[[], T], group: Any = None) -> T:
    """Calls a function on rank 0 and returns its result on all ranks, or raises its error `of_all_ranks`. Collective.

    Args:
        function: Function of rank 0. Its result must be picklable.
        group: The process group that broadcasts the answer, whose first rank calls the function; None is the world.
    """
    import torch.distributed as dist

    answer: list[Any] = [None, None]
    raised: Exception | None = None
    first = 0 if group is None else dist.get_global_rank(group, 0)
    if dist.get_rank() == first:
        try:
            answer[0] = function()
        except Exception as error:  # the other ranks wait for the answer
            raised = error
            answer[1] = (
                error
                if isinstance(error, _OneLineError)
                else PlainError(f"rank {first}: {type(error).__name__}: {error}")
            )
    dist.broadcast_object_list(answer, src=first, group=group)
    if answer[1] is not None:
        of_all_ranks(answer[1])
        raise raised or answer[1]  # rank 0 shows the traceback of an unexpected error
    return answer[0]  # type: ignore[no-any-return]


@contextlib.contextmanager
def agreed() -> Iterator[None]:
    """Collective block: if it fails on some ranks, all ranks raise `ConfigError` with the error of the lowest of them.

    A rank raises an unexpected error of its own instead, with its traceback.
    """
    problem: str | None = None
    try:
        yield
    except ConfigError as error:
        problem = str(error)
    except Exception as error:  # the other ranks wait for the answer
        first_of_ranks(f"{type(error).__name__}: {error}")
        raise
    if found := first_of_ranks(problem):
        raise ConfigError(found)


def first_of_ranks(problem: str | None) -> str | None:
    """The problem of the lowest rank that has one, the same on all ranks; None if no rank has one. Collective."""
    return next(filter(None, of_every_rank(problem)), None)


def of_every_rank(value: T, group: Any = None) -> list[T]:
    """The values of all ranks of a process group, in rank order; None is the world. They must be picklable. Collective."""
    import torch.distributed as dist

    every = [value] * dist.get_world_size(group)
    dist.all_gather_object(every, value, group=group)
    return every


def size_text(count: float) -> str:
    """Formats bytes with a decimal unit, such as 1.50 kB."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.2f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def of_file(error: OSError) -> ConfigError:
    """The error for a failed system call on a file. Raises ``error`` if it names no file."""
    if error.filename is None:
        raise error
    return ConfigError(f"{os.fsdecode(error.filename)}: {(error.strerror or '').lower()}")


def hook_errors() -> None:
    """Sets hzero's ``sys.excepthook``, once.

    It prints an error of all ranks as one line, and other errors as before. Then it notifies the ranks that wait for this one.
    """
    stock = sys.excepthook
    if getattr(stock, "__module__", "") == __name__:
        return

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if isinstance(error, ConfigError) or getattr(error, "of_all_ranks", False):
            report(error)
        else:
            stock(kind, error, traceback)
        tell_peers(error)

    sys.excepthook = hook


def tell_peers(error: BaseException) -> None:
    """Notifies the other ranks that this rank ends with an error, if a watchdog runs."""
    if watchdog := sys.modules.get("hzero.comm.watchdog"):
        watchdog.tell(error)


def report(error: BaseException) -> None:
    """Prints the line of an error that probably all ranks have: rank 0 at once, the others after `WAIT_S` seconds."""
    rank = _rank()
    if rank:
        # A launcher ends all ranks once one has ended. So rank 0, which reports, must be the first. If this rank outlives the
        # wait, it reports too: rank 0 may have read another file. A training that saves on SIGTERM would ignore the launcher's
        # SIGTERM, and launchers wait 30 s for such a rank.
        with contextlib.suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(WAIT_S)
    print(f"hzero: error: {f'rank {rank}: ' if rank else ''}{error}", file=sys.stderr, flush=True)


def is_rank_0() -> bool:
    """Whether this rank logs for all ranks."""
    return _rank() == 0


def _rank() -> int:
    """The rank in the process group, or from the variables of torchrun, MPI or Slurm; otherwise 0.

    Slurm also numbers independent processes. Only processes of one world have a master address.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    slurm = ["SLURM_PROCID"] if "MASTER_ADDR" in os.environ else []
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", *slurm):
        if os.environ.get(name, "").isdecimal():
            return int(os.environ[name])
    return 0


def printable(text: str) -> str:
    """Escapes line breaks and control characters of an untrusted text."""
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)


def some(items: Sequence[str], most: int, separator: str = ", ") -> str:
    """The first ``most`` items of a list, and the number of the rest."""
    left = len(items) - most
    return separator.join(items[:most]) + (f" and {left:,} more" if left > 0 else "")


def nearest(value: Any, possible: Iterable[str], cutoff: float = 0.5) -> str | None:
    """The possible value most similar to ``value``; None if none is similar."""
    names, tried = list(possible), (str(value), str(value).lower())  # most names are lower-case
    if (now := _RENAMED.get(str(value))) in names:
        return now
    return next((near[0] for one in tried if (near := difflib.get_close_matches(one, names, 1, cutoff))), None)


def did_you_mean(value: Any, possible: Iterable[str]) -> str:
    """The end of a message that names the possible value most similar to ``value``; empty if none is similar."""
    near = nearest(value, possible)
    return f" (did you mean {near!r}?)" if near else ""


def one_of(key: str, value: Any, possible: Iterable[str], kind: str = "") -> ConfigError:
    """The error for a value that is not possible.

    Args:
        key: The key, which may be empty.
        value: The value that was found.
        possible: The values that are possible. The message lists at most 30.
        kind: Kind of the value, such as ``key``, if the message needs it.
    """
    names = [str(name) for name in possible]
    listed = some(names, 30)
    if len(names) <= 30:
        listed = " or ".join(listed.rsplit(", ", 1))
    found = f"{kind} {reprlib.repr(value)}".strip()
    return ConfigError(f"{key}: found {found}; expected {listed}{did_you_mean(value, names)}".removeprefix(": "))
