"""Loads files of checkpoints without running the code that they may contain."""

from __future__ import annotations

import contextlib
import os
import pickle
import pkgutil
import re
import zipfile
from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.runtime.zero.config import ZeroStageEnum

from hzero.errors import ConfigError
from hzero.files import regular

#: Classes that DeepSpeed's files need, besides tensors and plain Python types.
_ALLOWED = (
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.utils.tensor_fragment.fragment_address",
)


def _member(owner: Any, name: str) -> Any:
    """``getattr``, with which Python before 3.11.4 and 3.12 pickles members of DeepSpeed's enumeration, for these alone."""
    if owner is not ZeroStageEnum or name not in ZeroStageEnum.__members__:
        raise pickle.UnpicklingError("GLOBAL getattr")
    return ZeroStageEnum[name]


@contextlib.contextmanager
def only_tensors(trust: bool, what: str = "the checkpoint") -> Iterator[None]:
    """Context in which every ``torch.load`` accepts only tensors, plain types and `_ALLOWED`.

    DeepSpeed always loads with ``weights_only=False``. A variable of torch overrides this argument.

    Args:
        trust: If True, the context has no effect.
        what: Start of the error message.

    Raises:
        ConfigError: A file needs other classes or functions.
    """
    if trust:
        yield
        return
    forbids, forces = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = {name: os.environ.pop(name, None) for name in (forbids, forces)}
    os.environ[forces] = "1"
    torch.serialization.add_safe_globals([*map(pkgutil.resolve_name, _ALLOWED), (_member, "builtins.getattr")])
    try:
        yield
    except pickle.UnpicklingError as error:
        raise _refusal(what, error) from None
    finally:
        del os.environ[forces]
        os.environ.update({name: value for name, value in before.items() if value is not None})


def load(path: str, map_location: Any, trust: bool, *, mmap: bool = False) -> Any:
    """``torch.load`` of a checkpoint's file.

    Args:
        path: The file.
        map_location: As for ``torch.load``.
        trust: Whether the file may contain code.
        mmap: Whether tensors of a zip archive are read when they are used, instead of all at once.

    Raises:
        ConfigError: The file needs classes or functions that are not in `_ALLOWED`, is damaged, or is not a file of torch.
    """
    try:
        os.close(regular(path))  # torch would wait for a pipe
    except OSError as error:
        missing = "; a run with another dtype has other names" if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"{path!r} cannot be read: {(error.strerror or '').lower()}{missing}") from None
    try:
        with only_tensors(trust, repr(path)):
            return torch.load(path, map_location, weights_only=not trust, mmap=mmap and zipfile.is_zipfile(path))
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        raise _refusal(repr(path), error) from None


def _refusal(what: str, error: Exception) -> ConfigError:
    if found := re.search(r"GLOBAL ([\w.]+)", str(error)):  # torch's message has the refused name
        return ConfigError(
            f'{what} needs {found[1]}, which is not a tensor and could run code, so it is not loaded; "checkpoint": '
            '{"trust": true} loads it, if you trust its author'
        )
    reason = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
    return ConfigError(f"{what} cannot be loaded as tensors: {reason.splitlines()[0][:200]}")
