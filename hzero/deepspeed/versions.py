"""The supported versions of DeepSpeed and their differences.

No other module depends on the version. ``releases.json`` lists the methods of DeepSpeed that hzero overrides, wraps or calls. For
each one it has the required arguments, and the hash of the source in every tested release. It also lists the attributes that
hzero reads. A method that is missing or has other arguments is an error. If a body has changed, ``hzero doctor`` warns and a test
fails. After reading the change, add the release with ``scripts/deepspeed_sources.py``.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import inspect
import json
import pkgutil
import re
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed

from hzero.errors import ConfigError

#: The first supported version, and the first version after it that is not supported.
VERSIONS = ((0, 18, 6), (0, 20))
SUPPORTED = "hzero supports deepspeed >=0.18.6,<0.20"
#: Features that only newer supported versions have, with the first such version.
NEWER = {
    "pipeline stages": "0.19.8",
    "AutoTP": "0.19.8",
    "Muon": "0.19.8",
    "managed_gradient_accumulation false": "0.19.4",
}
#: Parts of ``releases.json`` that only these features need.
_PARTS = {"pipeline": "pipeline stages", "muon": "Muon"}
#: ``{"methods": {part: {"module:Class.method": {"arguments": "...", "sources": {hash: "releases"}}}}, "attributes": {...}}``.
RELEASES = json.loads((Path(__file__).parent / "releases.json").read_text())


def check_deepspeed() -> None:
    """Checks that hzero supports this DeepSpeed.

    Raises:
        ConfigError: The version is outside ``>=0.18.6,<0.20``, or `differences` finds a method.
    """
    if not VERSIONS[0] <= installed() < VERSIONS[1]:
        raise ConfigError(f"deepspeed: found {deepspeed.__version__}; {SUPPORTED}")
    for difference in differences():
        raise ConfigError(f"deepspeed {deepspeed.__version__} has another {difference}; {SUPPORTED}")


def differences() -> Iterator[str]:
    """Yields one line for each method that this DeepSpeed lacks or that has other arguments."""
    for part in _parts():
        for place, known in RELEASES["methods"][part].items():
            name, expected = place.split(":")[1], known["arguments"].split()
            found: list[str] | None = None  # the method is missing
            with contextlib.suppress(ImportError, AttributeError):
                found = _arguments(pkgutil.resolve_name(f"deepspeed.{place}"))
            if found is None or found[: len(expected)] != expected:
                yield f"{name} than the stage expects (arguments {found}, expected {expected})"


def changes() -> Iterator[str]:
    """Yields one line for each source that differs from a tested release.

    The sources are compared with the tested release of this version, or with the newest tested release if there is none.
    """
    methods = [known for part in RELEASES["methods"].values() for known in part.values()]
    releases = {release for known in methods for of_hash in known["sources"].values() for release in of_hash.split()}
    version = ".".join(map(str, installed()))
    compared = version if version in releases else max(releases, key=_numbers)
    for part in _parts():
        for place, known in RELEASES["methods"][part].items():
            module, name = place.split(":")
            found = sources(_file(module)).get(name)
            if found is None or compared not in known["sources"].get(found, "").split():
                yield f"{name} has another body than in deepspeed {compared}"
        for place, names in RELEASES["attributes"][part].items():
            tree = ast.parse(_file(place.split(":")[0]).read_text())
            present = {getattr(node, "attr", getattr(node, "name", None)) for node in ast.walk(tree)}
            for name in sorted(set(names) - present):
                yield f"{place.split(':')[1]} has no attribute {name}"


@functools.cache
def sources(file: Path) -> dict[str, str]:
    """Returns hashes of the sources of a file's functions and, by ``Class.method``, of its methods."""
    text = file.read_text()
    lines, body = text.splitlines(), ast.parse(text).body
    found = {one.name: one for one in body if isinstance(one, ast.FunctionDef)}
    for owner in [one for one in body if isinstance(one, ast.ClassDef)]:
        for method in [one for one in owner.body if isinstance(one, ast.FunctionDef)]:
            hidden = method.name.startswith("__") and not method.name.endswith("__")  # as Python mangles it
            found[f"{owner.name}.{f'_{owner.name}' * hidden}{method.name}"] = method
    return {
        name: hashlib.sha256("\n".join(lines[one.lineno - 1 : one.end_lineno]).encode()).hexdigest()[:12]
        for name, one in found.items()
    }


def lacking() -> list[str]:
    """Returns the features of `NEWER` that the installed version lacks."""
    return [feature for feature, first in NEWER.items() if installed() < _numbers(first)]


def describe() -> str:
    """Describes the installed version and hzero's support for it, on one line."""
    missing = [f"{feature} (deepspeed >={NEWER[feature]})" for feature in lacking()]
    return f"{deepspeed.__version__}: stage 3 is supported; {', '.join(missing) or 'nothing'} missing"


def installed() -> tuple[int, ...]:
    """Returns the numbers of the installed version."""
    return _numbers(deepspeed.__version__.split("+")[0])


# ---- differences between versions -------------------------------------------------------------------------------------


def at_boundary(optimizer: Any) -> bool:
    """Returns whether an optimizer is in the last micro-batch of a window. Before DeepSpeed 0.19.5 this is an attribute."""
    found = optimizer.is_gradient_accumulation_boundary
    return bool(found() if callable(found) else found)


def set_boundary(optimizer: Any) -> None:
    """Makes the current micro-batch of an optimizer the last one of its window."""
    if callable(optimizer.is_gradient_accumulation_boundary):
        optimizer.set_gradient_accumulation_boundary(True)
    else:
        optimizer.is_gradient_accumulation_boundary = True


def with_names(function: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """Copies a method of DeepSpeed, and replaces global names in the copy. The method's module does not change.

    A subclass can thus replace one call in the middle of a long method.

    Args:
        function: The method.
        **names: New values of global names.

    Raises:
        ConfigError: The method does not use one of the names.
    """
    function = inspect.unwrap(function)
    assert isinstance(function, types.FunctionType) and function.__closure__ is None
    for name in names.keys() - set(function.__code__.co_names):
        raise ConfigError(
            f"deepspeed {deepspeed.__version__} has another {function.__qualname__} than the stage expects (it does not use "
            f"{name}); {SUPPORTED}"
        )
    return types.FunctionType(
        function.__code__, {**function.__globals__, **names}, function.__name__, function.__defaults__
    )


# ---- helpers ----------------------------------------------------------------------------------------------------------


def _parts() -> list[str]:
    missing = lacking()
    return ["stage3"] + [part for part, feature in _PARTS.items() if feature not in missing]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def _file(module: str) -> Path:
    return Path(deepspeed.__file__).parent.joinpath(*module.split(".")).with_suffix(".py")


def _arguments(method: Any) -> list[str]:
    """Returns the names of a method's arguments, also for methods under DeepSpeed's profiling decorator (*args, **kwargs)."""
    method = inspect.unwrap(method)
    found = list(inspect.signature(method).parameters)
    for cell in getattr(method, "__closure__", None) or () if found == ["args", "kwargs"] else ():
        if inspect.isfunction(cell.cell_contents):
            return _arguments(cell.cell_contents)
    return found
