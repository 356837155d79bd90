"""Installs the stage as soon as DeepSpeed reads a configuration that holds the ``"hzero"`` block.

torch calls `autoload` at the end of its own import (entry point ``torch.backends``, torch 2.5 and later), and
``import hzero`` calls `register`. Either only asks Python to tell when DeepSpeed and Accelerate have been imported: this
module imports nothing that takes time. Then the code of one function of DeepSpeed is replaced,
``DeepSpeedConfig._initialize_params``, which all configurations go through, those of ``zero.Init`` too. The function itself
stays, and so does every attribute of every module and class of DeepSpeed, until a configuration has the block.
"""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

#: ``0`` leaves it to ``import hzero``, `hzero.enable` or ``hzero run`` to install the stage.
VARIABLE = "HZERO_AUTOLOAD"
#: Whether this module is imported by torch's own import, rather than by someone who wants hzero.
BY_TORCH = bool(getattr(getattr(sys.modules.get("torch"), "__spec__", None), "_initializing", False))


def autoload() -> None:
    """What torch calls. Never raises."""
    if not turned_off(os.environ):
        register()
    elif BY_TORCH:
        # A later `import hzero` has to find no module here, or it would not register either.
        for name in [name for name in sys.modules if name.partition(".")[0] == "hzero"]:
            del sys.modules[name]


def turned_off(environ: Mapping[str, str]) -> bool:
    """Whether the environment turns `autoload` off."""
    return environ.get(VARIABLE, "1").strip().lower() in ("0", "false", "no", "off")


def register() -> None:
    """Watches DeepSpeed's configurations, Accelerate's choice and Trainers, now or as soon as they have been imported.

    Raises:
        ConfigError: An engine with a block has been built before, so that it trains plain ZeRO-3.
    """
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    for name, (owner, _) in _WATCHED.items():
        if hasattr(sys.modules.get(name), owner):
            _watch(sys.modules[name])
    _refuse_engines_without_stage()


class _Finder:
    """Finds the watched modules as the other finders do, and calls back once they have been executed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in _WATCHED:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find is not None else None
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader:
    """A module's loader, which watches the module's class once it is there."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: Any) -> None:
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _watch(module)


def _watch(module: Any) -> None:
    owner, watch = _WATCHED[module.__name__]
    try:
        watch(getattr(module, owner))
    except Exception as error:  # whoever imports DeepSpeed may not want hzero at all
        print(f"hzero: cannot watch {module.__name__}.{owner}, so it is off: {error}", file=sys.stderr)


def _watch_configurations(watched: Any) -> None:
    function = watched._initialize_params
    code, own = function.__code__, _initialize_params.__code__
    if code is own:
        return
    if code.co_varnames[: code.co_argcount] != own.co_varnames[: own.co_argcount]:
        raise TypeError(f"_initialize_params takes {code.co_varnames[: code.co_argcount]} in this DeepSpeed")
    _stock.append(types.FunctionType(code, function.__globals__, function.__name__))
    function.__code__ = own


#: One entry for each configuration with a block that DeepSpeed has read in this process.
blocks_read: list[bool] = []
#: ``DeepSpeedConfig._initialize_params`` as DeepSpeed has it.
_stock: list[Callable[[Any, dict[str, Any]], None]] = []


def _initialize_params(self: Any, param_dict: dict[str, Any]) -> None:
    from hzero.autoload import read_configuration  # this code runs in DeepSpeed's namespace

    read_configuration(self, param_dict)


def read_configuration(config: Any, param_dict: dict[str, Any]) -> None:
    """``DeepSpeedConfig._initialize_params``, which installs the stage and checks the configuration if it has a block.

    DeepSpeed sees the block at the top level, where it ignores unknown keys.

    Raises:
        ConfigError: The block is wrong, or the configuration uses a feature that the stage does not support.
    """
    from hzero import block
    from hzero.validation import on_all_ranks

    with on_all_ranks():
        found = block.find(param_dict)
        if found is not None:
            blocks_read.append(True)
            from hzero import zero
            from hzero.zero.refusals import check_block, check_read

            zero.enable()
            parsed = check_block(found)
            config._param_dict = param_dict = block.lifted(param_dict, found)
        _stock[0](config, param_dict)
        if found is not None:
            check_read(config, parsed)


def _watch_constructor(then: Callable[..., None]) -> Callable[[Any], None]:
    """Gives a function that has ``then(self, arguments)`` called after each construction of a class."""

    def watch(watched: Any) -> None:
        stock = watched.__init__
        if getattr(stock, "watched_by_hzero", False):
            return

        @functools.wraps(stock)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            import inspect

            from hzero.validation import on_all_ranks

            stock(self, *args, **kwargs)
            with on_all_ranks():
                then(self, inspect.signature(stock).bind(self, *args, **kwargs).arguments)

        init.watched_by_hzero = True  # type: ignore[attr-defined]
        watched.__init__ = init

    return watch


def _check_as_written(own: Any, _: Mapping[str, Any]) -> None:
    """Checks the configuration that Trainer and Accelerate read before there is a model, and fill in later."""
    from hzero import block
    from hzero.validation import ConfigError

    if block.find(own.config) is None:
        return
    from hzero.zero.refusals import check_written

    try:
        check_written(own.config)
    except ConfigError:
        raise
    except Exception:  # DeepSpeed's own refusals, for what Trainer or Accelerate may still change
        return


def _check_accelerator(accelerator: Any, given: Mapping[str, Any]) -> None:
    """Refuses an ``Accelerator`` that trains DDP on CPUs although its DeepSpeed configuration has the block.

    One that uses DeepSpeed gets what the block's key ``checkpoint`` changes.
    """
    plugins = given.get("deepspeed_plugins") or given.get("deepspeed_plugin")
    if "DEEPSPEED" in str(accelerator.distributed_type):
        if _has_checkpoints(accelerator):
            from hzero.zero import clients

            clients.follow_accelerator(accelerator)
        return
    from hzero import block

    configs = [
        getattr(one, "deepspeed_config", None) for one in (plugins.values() if isinstance(plugins, dict) else [plugins])
    ]
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":
        configs.append(os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE"))
    if any(block.find(config) is not None for config in configs):
        from hzero.validation import ConfigError

        raise ConfigError(
            f"{block.KEY}: the block is asked for, but Accelerate does not use DeepSpeed (found "
            f"{accelerator.distributed_type}); cpu=True and ACCELERATE_USE_CPU turn it off: leave them out, or remove the block"
        )


def _follow_trainer(trainer: Any, _: Mapping[str, Any]) -> None:
    """Lets a Trainer choose complete checkpoints if the block of its DeepSpeed configuration has the key ``checkpoint``."""
    if getattr(trainer, "is_deepspeed_enabled", False) and _has_checkpoints(trainer.accelerator):
        from hzero.zero import clients

        clients.follow_trainer(trainer)


def _has_checkpoints(accelerator: Any) -> bool:
    from hzero import block

    found = block.find(getattr(accelerator.state.deepspeed_plugin, "deepspeed_config", None))
    return found is not None and found.get("checkpoint") is not None


#: Module: the class to watch, and what watches it.
_WATCHED: dict[str, tuple[str, Callable[[Any], None]]] = {
    "deepspeed.runtime.config": ("DeepSpeedConfig", _watch_configurations),
    "accelerate.accelerator": ("Accelerator", _watch_constructor(_check_accelerator)),
    "transformers.trainer": ("Trainer", _watch_constructor(_follow_trainer)),
    # Trainer's class is a subclass of it.
    "accelerate.utils.deepspeed": ("HfDeepSpeedConfig", _watch_constructor(_check_as_written)),
}


def _refuse_engines_without_stage() -> None:
    """Refuses engines that were built before anything watched: their block has been ignored in silence."""
    module = sys.modules.get("deepspeed.runtime.engine")
    engine = getattr(module, "DeepSpeedEngine", None)
    if engine is None:
        return
    import gc

    from hzero import block

    for thing in gc.get_objects():
        if not issubclass(type(thing), engine) or hasattr(getattr(thing, "optimizer", None), "hzero"):
            continue
        if block.find(getattr(thing, "config", None)) is not None:
            from hzero.validation import ConfigError

            raise ConfigError(
                f"{block.KEY}: an engine with the block was built before hzero was there, and trains plain ZeRO-3; import "
                f"hzero before deepspeed.initialize is called, or leave {VARIABLE} at 1"
            )
