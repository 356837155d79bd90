"""Calls of libraries: with a timeout, with other values of their attributes, quietly, and with errors of one line."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, TimeoutError  # the builtin one from Python 3.11 on
from typing import Any, TypeVar

from hzero.errors import ConfigError

T = TypeVar("T")
#: Error of a wait that timed out.
NoAnswer = TimeoutError


def in_time(call: Callable[[], T], within_s: float) -> T:
    """Calls a function that may never return in a thread, and returns its result.

    Raises:
        NoAnswer: The call has not returned within ``within_s`` seconds.
    """
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name="hzero call", daemon=True).start()
    return answer.result(within_s)


@contextlib.contextmanager
def attributes(*values: tuple[Any, str, Any]) -> Iterator[None]:
    """Sets attributes ``(object, name, value)`` in the block, and restores them afterwards."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in values:
            if name in vars(owner):
                stack.callback(setattr, owner, name, vars(owner)[name])
            else:
                stack.callback(delattr, owner, name)
            setattr(owner, name, value)
        yield


@contextlib.contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Converts an exception of a library to a `ConfigError` that begins with ``what`` and has the cause."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{what}: {' '.join(str(error.__cause__ or error).split())[:1000]}") from None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Imports DeepSpeed in the block without a search for absent accelerators. DeepSpeed logs only errors, to stderr."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    with contextlib.redirect_stdout(sys.stderr):
        yield
