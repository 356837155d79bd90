"""Arguments of ``hzero train`` before Hydra acts on them: unknown ones, and configuration that would run code, are refused."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import OmegaConf

from hzero.arguments import refused
from hzero.settings.conf import check_options, check_values, conf_dir, key_of
from hzero.validation import ConfigError

_GROUPS = ("model", "data", "topology", "zero", "launcher")
#: Blocks of Hydra's by which a configuration names functions to call, or variables that load code into every rank.
_CODE = ("callbacks", "job_logging", "hydra_logging", "job.env_set")
#: Hydra's own launcher and sweeper, and its plugins, which are installed packages.
_PLUGIN = ("hydra._internal.core_plugins.", "hydra_plugins.")
_NAMED = re.compile(r"[+~]*(?:hydra[./](?:callbacks|job_logging|hydra_logging)\b|hydra\.job\.env_set\b|[^=]*@hydra\b)")


def check(arguments: Sequence[str]) -> list[str]:
    """Refuses arguments that Hydra does not know, or by which it would run code that the configuration names.

    Hydra calls whatever ``_target_`` names, from the command line as from a file in a folder that ``--config-dir`` adds.
    So its blocks are composed here first, which calls nothing.

    Returns:
        The arguments with the overrides first: Hydra's own parser takes none that stand on both sides of an option.

    Raises:
        ConfigError: Names the argument, or the key.
        SystemExit: From Hydra's ``--version``.
    """
    parser = get_args_parser()
    parser.prog = "hzero train"

    def refuse(message: str) -> None:
        raise refused(parser, message)

    parser.error = refuse  # type: ignore[assignment, method-assign]
    parsed = parser.parse_intermixed_args(list(arguments))
    ordered = list(arguments)
    for override in parsed.overrides:
        ordered.remove(override)
    ordered = [*parsed.overrides, *ordered]
    check_values(parsed.overrides)
    check_options(parsed.overrides, _GROUPS, "`hzero train --help`")
    if parsed.experimental_rerun is not None:
        raise ConfigError("--experimental-rerun: it loads a pickle, which can run any code; give the overrides instead")
    if parsed.config_path is not None:
        raise ConfigError("--config-path: hzero's own groups are needed; --config-dir adds a folder to them")
    for override in parsed.overrides:
        if _NAMED.match(override):
            raise _refusal(key_of(override))
    if parsed.config_dir is None and not any("hydra" in text for text in arguments):
        return ordered
    path = create_config_search_path(str(conf_dir()))
    if parsed.config_dir is not None:
        path.prepend("command-line", f"file://{os.path.abspath(parsed.config_dir)}")
    try:
        composed = Hydra.create_main_hydra2("train", path).compose_config(
            parsed.config_name or "train", parsed.overrides, RunMode.MULTIRUN if parsed.multirun else RunMode.RUN
        )
    finally:
        GlobalHydra.instance().clear()
    found = OmegaConf.to_container(composed.hydra, resolve=False)
    for key in _CODE:
        block: Any = found
        for part in key.split("."):
            block = block.get(part)
        if block and not (key.endswith("_logging") and set(block) <= {"version", "root", "disable_existing_loggers"}):
            raise _refusal(f"hydra.{key}")
    for key, target in _targets(found, "hydra"):
        if not str(target).startswith(_PLUGIN):
            raise _refusal(key)
    return ordered


def _targets(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        if name == "_target_":
            yield f"{key}.{name}", item
        yield from _targets(item, f"{key}.{name}")


def _refusal(key: str) -> ConfigError:
    return ConfigError(
        f"{key}: it names code to run, or sets variables that load code, which hzero takes from no configuration"
    )
