"""The one way to refuse input, as one line: errors, errors that all ranks raise together, arguments, and pydantic models."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import math
import os
import re
import reprlib
import signal
import sys
import time
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

T = TypeVar("T")
E = TypeVar("E", bound="ConfigError | PlainError")
M = TypeVar("M", bound=BaseModel)


class _OneLineError(Exception):
    """An error whose message says all. Escapes replace what could command a terminal, such as in names of files and hosts.

    Args:
        message: For the user.
        elsewhere: Whether another rank reports the same error, so that a command on this rank need not report it again.

    Attributes:
        elsewhere: The same.
        of_all_ranks: Whether all ranks raise it, and rank 0 reports it. See `of_all_ranks`.
    """

    of_all_ranks = False

    def __init__(self, message: str = "", elsewhere: bool = False) -> None:
        super().__init__("\n".join(map(printable, message.split("\n"))))
        self.elsewhere = elsewhere


class ConfigError(_OneLineError, ValueError):
    """Input that cannot be used. The message is one line: the key, file or argument, what was found, what is possible."""

    def __init__(self, message: str = "", elsewhere: bool = False) -> None:
        super().__init__(printable(message), elsewhere)


class PlainError(_OneLineError, RuntimeError):
    """An error of a run that needs no traceback. The message may have several lines."""


class PeerError(PlainError):
    """Other ranks did not come to a collective. The message says which, and where they are.

    Attributes:
        ranks: The ranks to blame, where they are known.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


#: How long other ranks wait for rank 0 to report an error of all ranks. Imports on a busy file system may differ by as much.
WAIT_S = 60.0


def of_all_ranks(error: E) -> E:
    """Marks an error that all ranks raise. If it is not caught, rank 0 prints one line, and the others end quietly."""
    hook_errors()
    error.of_all_ranks, error.elsewhere = True, error.elsewhere or _rank() > 0
    return error


@contextlib.contextmanager
def on_all_ranks() -> Iterator[None]:
    """Inside, a `ConfigError` is one `of_all_ranks`."""
    try:
        yield
    except ConfigError as error:
        of_all_ranks(error)
        raise


def from_rank_0(function: Callable[[], T], group: Any = None) -> T:
    """Calls a function on rank 0 and returns its result on all ranks, or raises its error `of_all_ranks`. Collective.

    Args:
        function: What rank 0 calls. Its result can be pickled.
        group: The process group that carries the answer; None is the world.
    """
    import torch.distributed as dist

    answer: list[Any] = [None, None]
    raised: Exception | None = None
    if dist.get_rank() == 0:
        try:
            answer[0] = function()
        except Exception as error:  # the others would wait for it
            raised = error
            answer[1] = (
                error if isinstance(error, _OneLineError) else PlainError(f"rank 0: {type(error).__name__}: {error}")
            )
    dist.broadcast_object_list(answer, group=group)
    if answer[1] is not None:
        of_all_ranks(answer[1])
        raise raised or answer[1]  # rank 0 shows the traceback of an unexpected error
    return answer[0]  # type: ignore[no-any-return]


def hook_errors() -> None:
    """Sets the one ``sys.excepthook`` of hzero, unless it is set."""
    if not isinstance(sys.excepthook, _Hook):
        sys.excepthook = _Hook(sys.excepthook)


class _Hook:
    """Prints an error of all ranks as one line and another one as before, and tells the ranks that wait for this one."""

    def __init__(self, stock: Any) -> None:
        self._stock = stock

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if isinstance(error, ConfigError) or getattr(error, "of_all_ranks", False):
            report(error)
        else:
            self._stock(kind, error, traceback)
        tell_peers(error)


def tell_peers(error: BaseException) -> None:
    """Tells the other ranks that this one ends with an error, if a watchdog runs."""
    if watchdog := sys.modules.get("hzero.comm.watchdog"):
        watchdog.tell(error)


def report(error: BaseException) -> None:
    """Prints the line of an error that is likely to be of all ranks: rank 0 at once, the others only if nothing ends them."""
    rank = _rank()
    if rank:
        # A launcher ends all ranks once one has ended. So rank 0, which reports, has to be the first. A rank that
        # outlives the wait reports too: rank 0 may have read another file, or nothing ends the job. Launchers wait 30 s for a
        # rank that ignores SIGTERM, as a training that saves upon it does.
        with contextlib.suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(WAIT_S)
    print(f"hzero: error: {f'rank {rank}: ' if rank else ''}{error}", file=sys.stderr, flush=True)


def is_rank_0() -> bool:
    """Whether this rank logs for all."""
    return _rank() == 0


def _rank() -> int:
    """This process' rank in its process group, or as torchrun, MPI or Slurm numbers it; otherwise 0.

    Slurm also numbers independent processes. The processes of one world have a master address.
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
    """A text from outside, with escapes for characters that break lines or command a terminal."""
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)


def some(items: Sequence[str], most: int, separator: str = ", ") -> str:
    """The first ``most`` items of a list, and how many follow."""
    left = len(items) - most
    return separator.join(items[:most]) + (f" and {left:,} more" if left > 0 else "")


def nearest(value: Any, possible: Iterable[str], cutoff: float = 0.5) -> str | None:
    """The possible value most similar to ``value``; None where none is similar."""
    return next(iter(difflib.get_close_matches(str(value), list(possible), n=1, cutoff=cutoff)), None)


def one_of(key: str, value: Any, possible: Iterable[str], what: str = "value") -> ConfigError:
    """The error for a value that is not possible; names the nearest possible one."""
    names = [str(name) for name in possible]
    near = nearest(value, names)
    hint = f"; did you mean {near!r}?" if near else "."
    return ConfigError(
        f"{key}{': ' if key else ''}unknown {what} {reprlib.repr(value)}{hint} Possible: {', '.join(names)}"
    )


class Parser(argparse.ArgumentParser):
    """The parser of a command's arguments. It keeps the lines of its texts, and its errors are `ConfigError`."""

    def __init__(self, prog: str, description: str = "", epilog: str = "") -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, description=description, epilog=epilog, formatter_class=formatter)

    def error(self, message: str) -> NoReturn:
        """Raises `ConfigError` instead of argparse's usage and exit, with the option or key that may have been meant."""
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown == message:
            raise ConfigError(f"{self.prog}: {' '.join(message.split())}; see `{self.prog} --help`")
        first = unknown.split()[0]
        options = [name for action in self._actions for name in action.option_strings]
        near = nearest(first, options, 0.75) if first.startswith("-") else None
        hint = f"; did you mean {near!r}?" if near else "."
        raise ConfigError(f"{self.prog}: unknown argument {first!r}{hint} `{self.prog} --help` lists what is possible")


def positive(kind: Callable[[str], float], most: float) -> Callable[[str], float]:
    """The ``type`` of an argument that is a number of more than 0 and at most ``most``."""

    def read(text: str) -> float:
        with contextlib.suppress(ValueError):
            if 0 < (value := kind(text)) <= most:
                return value
        raise argparse.ArgumentTypeError(f"found {text[:40]!r}, expected more than 0 and at most {most:,.0f}")

    return read


_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_DURATION = re.compile(r"(?:\d{1,9}(?:\.\d+)?[dhms])+")
_CLOCK = re.compile(r"(?:(\d{1,4}):)?(\d{1,6}):(\d{1,2})")


def seconds_of(duration: str | float) -> float:
    """Seconds of a duration such as ``2h``, ``1h30m``, ``1:30:00``, ``45s``, or a number of seconds.

    Raises:
        ValueError: Says what was found and what is possible; it follows a key.
    """
    text = str(duration)
    seconds = -1.0
    if _DURATION.fullmatch(text):
        seconds = sum(float(number) * _SECONDS[unit] for number, unit in re.findall(r"([\d.]+)([dhms])", text))
    elif match := _CLOCK.fullmatch(text):
        seconds = sum(int(part or 0) * unit for part, unit in zip(match.groups(), (3600, 60, 1)))
    else:
        with contextlib.suppress(ValueError, TypeError):
            seconds = float(duration)
    if not 0 < seconds < math.inf or isinstance(duration, bool):
        raise ValueError(f"found {reprlib.repr(duration)}, expected seconds, or a duration such as 1h30m or 1:30:00")
    return seconds


class Frozen(BaseModel):
    """Base of models of user input: immutable, no unknown keys, no silent conversion."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


#: What pydantic calls keys that a model does not have: others, and those that are no text.
_UNKNOWN = ("extra_forbidden", "invalid_key")


def validated(model: type[M], values: Any, where: str) -> M:
    """``values`` as a ``model``.

    Args:
        model: A pydantic model. A validator of its own raises `ValueError` with what follows the key in the message.
        values: What the user wrote: a mapping.
        where: Its key, option or file, which begins the message; "" for none. A file's name ends with a
            colon: ``node.yaml:`` gives ``node.yaml: devices: found ...``.

    Raises:
        ConfigError: The first error, on one line: an unknown key or value with the nearest known one, a missing key, or
            what was found and what was expected.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise explained(error, model, where) from None
    except OverflowError as error:
        raise ConfigError(_one_line(_key(where), f"a number is too large ({error})")) from None


def explained(error: ValidationError, model: type[BaseModel], where: str = "") -> ConfigError:
    """The first error of pydantic as one line; unknown keys go first, since they often explain missing ones."""
    errors = error.errors(include_url=False)
    first = next((e for e in errors if e["type"] in _UNKNOWN), errors[0])
    *parents, last = first["loc"] or ("",)
    key, found, context = _key(where, *first["loc"]), first.get("input"), first.get("ctx", {})
    cause = context.get("error")
    if first["type"] in _UNKNOWN:
        fields = _fields(model, parents)
        return one_of(_key(where, *parents) or "input", last, fields, "key")
    if first["type"] == "missing":
        return ConfigError(f"{key}: missing")
    if first["type"] in ("model_type", "model_attributes_type"):
        fields = _fields(model, list(first["loc"]))
        expected = f"expected a block with keys {', '.join(fields)}"
        return ConfigError(_one_line(key, f"found {reprlib.repr(found)}, {expected}"))
    if first["type"] == "literal_error":
        listed = context["expected"].replace(" or ", ",").split(",")  # pydantic's "'a', 'b' or 'c'"
        return one_of(key, found, [choice.strip().strip("'") for choice in listed])
    if isinstance(cause, ValueError):
        return ConfigError(_one_line(key, str(cause)))
    message = first["msg"][0].lower() + first["msg"][1:]
    return ConfigError(_one_line(key, f"found {reprlib.repr(found)}; {message}"))


def _key(*parts: Any) -> str:
    # "[key]" is pydantic's for a dictionary's key; after a file's name and its colon, a new key begins.
    path = ".".join(str(part) for part in parts if part not in ("", "[key]"))
    return path.replace(":.", ": ", 1).removesuffix(":")


def _one_line(key: str, message: str) -> str:
    # What was found may hold line breaks.
    return " ".join(f"{key}{': ' if key else ''}{message}".split())


def _fields(model: Any, path: list[int | str]) -> list[str]:
    """Keys of the model at ``path`` below ``model``."""
    for part in path:
        fields = getattr(model, "model_fields", {})
        field = fields.get(part) or next((one for one in fields.values() if one.alias == part), None)
        found = next(iter(_models(field.annotation)), None) if field is not None else None
        if found is None and not isinstance(part, int):  # a list's index, a dictionary's key, or a union's branch
            continue
        model = found or model
    return [field.alias or name for name, field in model.model_fields.items()]


def _models(annotation: Any) -> list[type[BaseModel]]:
    """Models that an annotation such as ``dict[str, M] | None`` mentions."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in typing.get_args(annotation) for model in _models(argument)]
