"""Finds the ``"hzero"`` block of a DeepSpeed configuration. Imports neither DeepSpeed nor pydantic: see `hzero.autoload`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

#: The block's key.
KEY = "hzero"
#: DeepSpeed's block that contains it. The top level of the configuration may contain it too.
PARENT = "zero_optimization"


def load(ds_config: Any) -> Mapping[str, Any] | None:
    """Reads a DeepSpeed configuration as a mapping.

    Args:
        ds_config: A dictionary, the path of a JSON file, or a JSON text in base64, as DeepSpeed accepts them.

    Returns:
        The mapping; None if DeepSpeed cannot read the configuration either, and will report it.
    """
    if ds_config is None or isinstance(ds_config, Mapping):
        return ds_config
    import base64

    try:
        if os.path.exists(ds_config):
            from hzero.files import read_text as read_file

            text = read_file(ds_config)  # refuses a pipe, which would be empty for DeepSpeed afterwards
        else:
            text = base64.urlsafe_b64decode(ds_config).decode("utf-8")
        found = read_text(text)
    except (OSError, TypeError, ValueError, AttributeError):
        return None
    return found if isinstance(found, Mapping) else None


def read_text(text: str) -> Any:
    """Parses a configuration as DeepSpeed does. Raises `ValueError` with the position, or with a key that occurs twice."""
    import hjson  # a dependency of DeepSpeed

    try:
        return hjson.loads(text, object_pairs_hook=_without_duplicates)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except OverflowError as error:  # hjson reads 1e999 as an integer
        raise ValueError(str(error)) from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} is given twice")
        found[key] = value
    return found


def split(config: Mapping[str, Any]) -> tuple[Mapping[str, Any] | None, dict[str, Any]]:
    """Splits a DeepSpeed configuration into the block as written, or None, and a copy of the rest for DeepSpeed.

    Raises:
        ConfigError: The block is not a mapping, its key is misspelt, or both places have one.
    """
    from hzero.errors import ConfigError

    rest, parent = dict(config), config.get(PARENT)
    places = {KEY: rest}
    if isinstance(parent, Mapping):
        rest[PARENT] = places[f"{PARENT}.{KEY}"] = dict(parent)
    for where, place in places.items():
        for name in place:
            if name != KEY and str(name).lower().replace("_", "").replace("-", "") == KEY:
                raise ConfigError(f"{where.removesuffix(KEY)}{name}: found key {name!r}; expected {KEY!r}")
    found = {where: place.pop(KEY) for where, place in places.items() if KEY in place}
    if len(found) == 2:
        raise ConfigError(f"{KEY}: found at the top level and in {PARENT}; expected it in {PARENT} only")
    for where, block in found.items():
        if not isinstance(block, Mapping):
            raise ConfigError(f"{where}: found {block!r}; expected a block of keys")
        return block, rest
    return None, rest
