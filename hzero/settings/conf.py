"""The folder of Hydra groups, what is composed from it, and Hydra's errors as one line."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import hzero
from hzero.settings.groups import known_keys
from hzero.validation import ConfigError, nearest, one_of

#: ``${parent:PATH}`` in the configuration is the folder that holds a path.
OmegaConf.register_new_resolver("parent", lambda path: str(Path(str(path)).parent), replace=True)


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
    check_values(overrides)
    check_options(overrides, (), "")
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            return hydra_compose("train", overrides)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(one_line(error)) from None


def long_name(override: str, short: Mapping[str, str]) -> str:
    """An override with the whole name of its key.

    Args:
        override: ``KEY=VALUE``.
        short: Short names of keys, with the keys that they stand for.
    """
    key, sign, value = override.partition("=")
    return f"{short[key]}={value}" if sign and key in short else override


def key_of(override: str) -> str:
    """The key of an override, without the signs that add and remove keys."""
    return override.partition("=")[0].lstrip("+~")


def check_values(overrides: Sequence[str]) -> None:
    """Refuses overrides without a value, none of which are Hydra's options. Raises `ConfigError` that names the override."""
    for override in overrides:
        if "=" not in override and not override.startswith("~"):
            raise ConfigError(f"{override}: expected KEY=VALUE")


def check_options(overrides: Sequence[str], groups: Sequence[str], lists: str) -> None:
    """Refuses overrides without a key or that leave a group without an option, for which Hydra has no clear error.

    Args:
        overrides: The user's arguments.
        groups: Groups that need an option.
        lists: The command that lists the options, for the message.

    Raises:
        ConfigError: Names the override.
    """
    for override in overrides:
        if re.match(r"[+~]*=", override):
            raise ConfigError(f"{override}: expected KEY=VALUE")
        if re.fullmatch(rf"({'|'.join(groups)})=(null)?", override):
            raise ConfigError(f"{override}: the group needs an option; {lists} lists them")


def plain(config: DictConfig) -> dict[str, Any]:
    """A composed configuration as plain dictionaries.

    Raises:
        ConfigError: Names the first key that has no value, or whose value cannot be resolved.
    """
    try:
        resolved: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(one_line(error)) from None
    return {str(key): value for key, value in resolved.items()}


def one_line(error: Exception, shown_by: str = "hzero train --cfg job", known: Sequence[str] | None = None) -> str:
    """A Hydra or OmegaConf error as one line that names the key or option, with the nearest known one.

    Args:
        error: The error.
        shown_by: The command that shows all keys.
        known: Those keys; None: the trainer's.
    """
    if isinstance(error, MissingConfigException) and error.options:
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        return str(one_of(group, option, sorted(error.options), "option"))
    text = " ".join(str(error).split())
    if isinstance(error, OverrideParseException):
        return (
            f"{error.override}: cannot be read; a value with blanks, brackets, commas or ~ needs two pairs of quotes: "
            "KEY='\"my book (1)\"'"
        )
    found = re.search(r"Could not override '([^']+)'", text)
    if found is not None:
        return _unknown_key(found.group(1), known_keys() if known is None else known, shown_by)
    message, _, rest = text.partition(" full_key: ")
    return f"{rest.split()[0]}: {message[0].lower()}{message[1:]}" if rest else text


def _unknown_key(key: str, known: Sequence[str], shown_by: str) -> str:
    same_end = (name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2])
    near = next(same_end, None) or nearest(key, known)
    if key in known and key.startswith("model.") and key.endswith("_parallel"):
        return f"{key}: not of this model; possible with model=gpt_neox_.."
    if key in known:
        return f"{key}: not set yet, or with other keys than these, so Hydra needs +{key}=VALUE"
    hint = f"; did you mean {near!r}?" if near else "."
    return f"{key}: unknown key{hint} `{shown_by}` shows all of them"
