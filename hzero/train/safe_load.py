"""Loading without running code: the files of a checkpoint are pickles, which may name any function of Python to be called."""

from __future__ import annotations

import contextlib
import os
import pickle
import pkgutil
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from hzero.validation import ConfigError

#: What lets a run load a checkpoint that holds more.
TRUST = "checkpoint.trust=true"
#: What DeepSpeed's own files of ZeRO-3 and, with pipeline stages, ZeRO-1 need beyond tensors and Python's plain types.
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
    """Makes every ``torch.load`` take nothing but tensors, plain types and `ALLOWED`, whatever its caller asks for.

    DeepSpeed asks for ``weights_only=False`` wherever it loads; torch's own variable overrules it.

    Args:
        trust: True changes nothing.
    """
    if trust:
        yield
        return
    import torch

    allowed: list[Any] = [pkgutil.resolve_name(name) for name in ALLOWED]
    with torch.serialization.safe_globals(allowed), mock.patch.dict(os.environ):
        os.environ.pop("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", None)
        os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
        yield


def refuse_code(folder: Path, trust_by: str) -> None:
    """Refuses a checkpoint in which a file needs more than `ALLOWED`. Reads the names in the pickles and loads nothing.

    It sees zip archives, as torch writes them; what else a file may be, `load` refuses.

    Args:
        folder: The checkpoint.
        trust_by: The key or option by which the user trusts it, for the message.

    Raises:
        ConfigError: Names the file and what it needs, or says that it is no regular file.
    """
    from torch.serialization import get_unsafe_globals_in_checkpoint

    for path in sorted(folder.rglob("*.pt")):
        if not path.is_file():  # torch would wait for a pipe
            raise ConfigError(f"{str(path)!r} is no regular file")
        needed: set[str] = set()
        with contextlib.suppress(Exception):  # no archive of torch, which has errors of many kinds: `load` says so
            needed = set(get_unsafe_globals_in_checkpoint(str(path))) - set(ALLOWED)
        if needed:
            raise refusal(path, min(needed), trust_by)


def refusal(path: str | os.PathLike[str], needed: str, trust_by: str) -> ConfigError:
    """The error for a file that needs more than `ALLOWED`."""
    return ConfigError(
        f"{str(path)!r} needs {needed}, which is no tensor and could run code, so it is not loaded; {trust_by} loads "
        "it all the same, if you trust whoever wrote it"
    )


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
    import torch

    try:
        with only_tensors(trust):
            mmap = mmap and zipfile.is_zipfile(path)
            return torch.load(path, map_location=map_location, weights_only=not trust, mmap=mmap)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        if found := _GLOBAL.search(str(error)):
            raise refusal(path, found[1], TRUST) from None
        reason = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
        raise ConfigError(f"{path!r} cannot be loaded as tensors: {reason.splitlines()[0][:200]}") from None
