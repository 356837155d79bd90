"""The configuration folder, and what is composed from it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.errors import HydraException, MissingConfigException
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


def one_line(error: Exception) -> str:
    """A Hydra or OmegaConf error as one line that names the key or option, with the nearest known one."""
    if isinstance(error, MissingConfigException) and error.options:
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        return str(one_of(group, option, sorted(error.options), "option"))
    text = " ".join(str(error).split())
    found = re.search(r"Could not override '([^']+)'", text)
    if found is not None:
        return str(_unknown_key(found.group(1)))
    message, _, rest = text.partition(" full_key: ")
    return f"{rest.split()[0]}: {message[0].lower()}{message[1:]}" if rest else text


def _unknown_key(key: str) -> ConfigError:
    known = list(_dotted(OmegaConf.to_container(compose([]))))
    same_end = [name for name in known if name.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
    near = same_end[:1] or difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return ConfigError(f"{key}: unknown key{hint} `hzero train --cfg job` shows all of them")


def _dotted(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            name = f"{path}.{key}" if path else str(key)
            yield name
            yield from _dotted(item, name)
