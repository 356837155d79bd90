"""The configuration folder, and what is composed from it."""

from __future__ import annotations

from pathlib import Path

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

import hzero
from hzero.config import ConfigError


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
    """A Hydra or OmegaConf error without its line breaks and type annotations, causes included where they say more."""
    text = " ".join(str(error).split())
    cause = error.__cause__
    if cause is not None and str(cause) not in str(error):
        text += f" ({' '.join(str(cause).split())})"
    for noise in (" full_key:", " object_type="):
        text = text.split(noise)[0] if noise == " object_type=" else text.replace(noise, "; key")
    return text
