"""Loading without running code: the files of a checkpoint are pickles, which may name any function of Python to be called."""

from __future__ import annotations

import contextlib
import os
import pickle
import pkgutil
import re
import zipfile
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from hzero.validation import ConfigError

#: What DeepSpeed's own files need beyond tensors and Python's plain types.
ALLOWED = (
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
#: How torch names what it refuses.
_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")


@contextlib.contextmanager
def only_tensors(trust: bool) -> Iterator[None]:
    """Makes every ``torch.load`` accept nothing but tensors, plain types and `ALLOWED`, whatever its caller asks for.

    DeepSpeed asks for ``weights_only=False`` wherever it loads; torch's own variable overrules it.

    Args:
        trust: True changes nothing.

    Raises:
        ConfigError: A file needs more.
    """
    if trust:
        yield
        return
    before = torch.serialization.get_safe_globals()  # an inner context of torch takes away what the outer one has added
    allowed: list[Any] = [one for one in map(pkgutil.resolve_name, ALLOWED) if one not in before]
    with torch.serialization.safe_globals(allowed), mock.patch.dict(os.environ):
        os.environ.pop("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", None)
        os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
        try:
            yield
        except pickle.UnpicklingError as error:
            raise _refusal("the checkpoint", error) from None


def load(path: str, map_location: Any, trust: bool, *, mmap: bool = False) -> Any:
    """``torch.load`` of a checkpoint's file.

    Args:
        path: The file.
        map_location: As for ``torch.load``.
        trust: Whether it may hold more than tensors.
        mmap: Whether tensors of a zip archive are read where they are used, and not all at once.

    Raises:
        ConfigError: It needs more than `ALLOWED`, is damaged, or is no file of torch.
    """
    if not os.path.isfile(path):  # torch would wait for a pipe
        raise ConfigError(f"{path!r} is no regular file")
    try:
        with only_tensors(trust):
            mmap = mmap and zipfile.is_zipfile(path)
            return torch.load(path, map_location=map_location, weights_only=not trust, mmap=mmap)
    except ConfigError as error:
        raise ConfigError(str(error).replace("the checkpoint", repr(path), 1)) from None
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        raise _refusal(repr(path), error) from None


def _refusal(what: str, error: Exception) -> ConfigError:
    if found := _GLOBAL.search(str(error)):
        return ConfigError(
            f'{what} needs {found[1]}, which is no tensor and could run code, so it is not loaded; "checkpoint": '
            '{"trust": true} loads it all the same, if you trust whoever wrote it'
        )
    reason = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
    return ConfigError(f"{what} cannot be loaded as tensors: {reason.splitlines()[0][:200]}")
