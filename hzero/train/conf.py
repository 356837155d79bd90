"""The configuration folder, and what is composed from it."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import hzero
from hzero.config import ConfigError, one_of


def conf_dir() -> Path:
    """The folder of Hydra groups: inside the installed package, or at the root of a checkout."""
    package = Path(hzero.__file__).resolve().parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def compose(overrides: list[str]) -> DictConfig:
    """The main job's configuration with ``overrides``.

    Raises:
        ConfigError: Hydra's complaint, on one line.
    """
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            return hydra_compose("train", overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(one_line(error)) from None


def check_options(overrides: Sequence[str], groups: Sequence[str], lists: str) -> None:
    """Refuses overrides that leave a group without an option, for which Hydra has no error of its own.

    Args:
        overrides: The user's arguments.
        groups: That need an option.
        lists: The command that lists them, for the message.

    Raises:
        ConfigError: Naming the override.
    """
    for override in overrides:
        if re.fullmatch(rf"({'|'.join(groups)})=(null)?", override):
            raise ConfigError(f"{override}: the group needs an option; {lists} lists them")


def plain(config: DictConfig) -> dict[str, Any]:
    """A composed configuration as plain dictionaries, without keys that nothing reads and with all that are read.

    Hydra adds whatever a ``+`` stands before and removes whatever a ``~`` does. The blocks ``zero`` and ``topology`` are
    checked where they are parsed, ``deepspeed`` is DeepSpeed's.

    Raises:
        ConfigError: Naming the first key that is unknown, gone, or has no value.
    """
    try:
        resolved: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(one_line(error)) from None
    parsed_elsewhere = ("zero.", "topology.", "deepspeed.")
    known = {key for key in known_keys() if not key.startswith(parsed_elsewhere)}
    given = {key for key in _dotted(resolved) if not key.startswith(parsed_elsewhere)}
    for key in sorted(given - known):
        raise _unknown_key(key)
    for key in sorted(known - given):
        if "." not in key or isinstance(resolved.get(key.partition(".")[0]), dict):  # else settings tell of the group
            raise ConfigError(f"{key}: removed, and nothing else says what it should be")
    return {str(key): value for key, value in resolved.items()}


def one_line(error: Exception) -> str:
    """A Hydra or OmegaConf error as one line that names the key or option, with the nearest known one."""
    if isinstance(error, MissingConfigException) and error.options:
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        return str(one_of(group, option, sorted(error.options), "option"))
    text = " ".join(str(error).split())
    if isinstance(error, OverrideParseException):
        return f"{error.override}: cannot be read; quote a value with blanks, brackets, commas or ~ twice: KEY='\"my book (1)\"'"
    found = re.search(r"Could not override '([^']+)'", text)
    if found is not None:
        return str(_unknown_key(found.group(1)))
    message, _, rest = text.partition(" full_key: ")
    return f"{rest.split()[0]}: {message[0].lower()}{message[1:]}" if rest else text


def _unknown_key(key: str) -> ConfigError:
    known = known_keys()
    same_end = [name for name in known if name.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
    near = same_end[:1] or difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return ConfigError(f"{key}: unknown key{hint} `hzero train --cfg job` shows all of them")


@functools.cache
def known_keys() -> tuple[str, ...]:
    """Keys of the main job's configuration, groups among them. Not while a Hydra application runs, but for a second time."""
    return tuple(_dotted(OmegaConf.to_container(compose([]))))


def _dotted(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            name = f"{path}.{key}" if path else str(key)
            yield name
            yield from _dotted(item, name)
