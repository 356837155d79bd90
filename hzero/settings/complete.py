"""Completions of an override of the trainer's configuration: groups, their options, and keys with their present values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.plugins.completion_plugin import DefaultCompletionPlugin
from omegaconf.errors import OmegaConfBaseException

from hzero.config import PRESETS
from hzero.settings.conf import conf_dir, long_name


def matches(word: str, before: Sequence[str], short: Mapping[str, str]) -> list[str]:
    """Overrides that begin with ``word``.

    Args:
        word: What is written of the override.
        before: The overrides before it.
        short: Short names of keys, with the keys that they stand for.
    """
    key, sign, _ = word.partition("=")
    if sign and short.get(key, key) == "zero.preset":
        return [f"{key}={preset}" for preset in PRESETS]
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            loader = GlobalHydra.instance().config_loader()
            line = " ".join([*(long_name(override, short) for override in before), long_name(word, short)])
            found = DefaultCompletionPlugin(loader)._query("train", line)
            if len(found) == 1 and found[0].endswith("."):  # a shell would put a blank behind the only answer
                found = DefaultCompletionPlugin(loader)._query("train", line.rpartition(" ")[0] + f" {found[0]}")
    except (HydraException, OmegaConfBaseException):  # the overrides before are wrong, which the command will say
        return []
    if sign and key in short:
        found = [f"{key}={override.partition('=')[2]}" for override in found]
    return found if sign else [*found, *(f"{name}=" for name in short)]
