"""Installs the stage as soon as DeepSpeed reads a configuration that holds the ``"hzero"`` block.

``import hzero`` calls `autoload`, and torch imports hzero at the end of its own import (entry point ``torch.backends``, see
``hzero_autoload.py``). It only asks Python to tell when DeepSpeed, Accelerate and Trainer have been imported: this module
imports nothing that takes time. Then one method of each watched class is wrapped. All configurations go through
``DeepSpeedConfig._initialize_params``, those of ``zero.Init`` too. Everything else of DeepSpeed stays as it is until a
configuration has the block.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from hzero import block

#: ``0`` leaves it to ``import hzero``, `hzero.enable` or ``hzero run`` to install the stage.
VARIABLE = "HZERO_AUTOLOAD"
#: One entry for each configuration with a block that DeepSpeed has read in this process.
blocks_read: list[bool] = []


def autoload() -> None:
    """Watches DeepSpeed's configurations, Accelerate's choice and Trainers, now or as soon as they have been imported."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    for name, (owner, _, _) in _WATCHED.items():
        if hasattr(sys.modules.get(name), owner):
            _watch(sys.modules[name])


class _Finder:
    """Finds the watched modules as the other finders do, and watches them once they have been executed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in _WATCHED:
            return None
        others = [finder.find_spec for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec: Any = next(filter(None, (find(name, path, target) for find in others)), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                if module.__name__ == name:
                    _watch(module)

            spec.loader.exec_module = exec_module
        return spec


def _watch(module: Any) -> None:
    """Replaces the method of a module's class that `_WATCHED` names, once."""
    owner, method, function = _WATCHED[module.__name__]
    try:
        stock = getattr(getattr(module, owner), method)
        if not hasattr(stock, "watched_by_hzero"):

            @functools.wraps(stock)
            def watching(*args: Any, **kwargs: Any) -> Any:
                return function(stock, *args, **kwargs)

            watching.watched_by_hzero = True  # type: ignore[attr-defined]
            setattr(getattr(module, owner), method, watching)
    except Exception as error:  # whoever imports DeepSpeed may not want hzero at all
        print(f"hzero: cannot watch {module.__name__}.{owner}, so it is off: {error}", file=sys.stderr)


def _read(stock: Callable[..., Any], config: Any, param_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """``DeepSpeedConfig._initialize_params``, which installs the stage and checks the configuration if it has a block.

    DeepSpeed does not see the block. The engine finds it parsed, as the configuration's attribute ``hzero_block``.
    """
    from hzero.validation import on_all_ranks

    with on_all_ranks():
        found, rest = block.split(param_dict)
        if found is None:
            return stock(config, param_dict, *args, **kwargs)
        blocks_read.append(True)
        from hzero import deepspeed as zero
        from hzero.config import parse_config
        from hzero.deepspeed.refusals import check_config

        zero.enable()
        config.hzero_block = parse_config(found)
        config._param_dict = rest
        if (sequence := config.hzero_block.sequence) is not None:
            config.world_size = max(config.world_size // sequence.parallel, 1)  # a batch counts a group once
            if {"train_micro_batch_size_per_gpu", "gradient_accumulation_steps"} <= rest.keys():
                rest.pop("train_batch_size", None)  # Trainer and Accelerate fill in one that counts every rank
        stock(config, rest, *args, **kwargs)
        check_config(config)
    return None


def _constructing(then: Callable[..., None]) -> Callable[..., None]:
    """A constructor that calls ``then(self, keyword arguments)`` after the stock one."""

    def init(stock: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        from hzero.validation import on_all_ranks

        stock(self, *args, **kwargs)
        with on_all_ranks():
            then(self, kwargs)

    return init


def _check_as_written(read: Any, _: Any) -> None:
    """Checks the configuration that Trainer and Accelerate read before there is a model, and fill in later."""
    from hzero.validation import ConfigError

    if block.split(read.config)[0] is None:
        return
    from hzero.deepspeed.refusals import check_written

    try:
        check_written(read.config)
    except ConfigError:
        raise
    except Exception:  # DeepSpeed's own refusals, for what Trainer or Accelerate may still change
        return


def _follow_accelerator(accelerator: Any, given: Any) -> None:
    """Lets an ``Accelerator`` obey the block's keys ``checkpoint`` and ``sequence``.

    Refuses one that trains DDP on CPUs although its DeepSpeed configuration has the block.
    """
    if "DEEPSPEED" in str(accelerator.distributed_type):
        _follow("follow_accelerator", accelerator, accelerator)
        if (parallel := (_key(accelerator, "sequence") or {}).get("parallel", 1)) > 1:
            from torch.distributed.device_mesh import init_device_mesh

            # Its loaders give the ranks of a tensor group the same samples. They count the groups of neighbours.
            shape = accelerator.num_processes // parallel, parallel
            mesh = init_device_mesh(accelerator.device.type, shape, mesh_dim_names=("dp", "tp"))
            accelerator._prepare_device_mesh = lambda: mesh
        return
    plugins = given.get("deepspeed_plugins") or given.get("deepspeed_plugin")
    plugins = plugins.values() if isinstance(plugins, dict) else [plugins]
    configs = [getattr(one, "deepspeed_config", None) for one in plugins]
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":
        configs.append(os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE"))
    if any(block.split(block.load(config) or {})[0] is not None for config in configs):
        from hzero.validation import ConfigError

        raise ConfigError(
            f"{block.KEY}: the block is asked for, but Accelerate does not use DeepSpeed (found "
            f"{accelerator.distributed_type}); cpu=True and ACCELERATE_USE_CPU turn it off: leave them out, or remove the block"
        )


def _follow_trainer(trainer: Any, _: Any) -> None:
    """Lets a Trainer obey the block's keys ``checkpoint`` and ``sequence``."""
    if getattr(trainer, "is_deepspeed_enabled", False):
        if (parallel := (_key(trainer.accelerator, "sequence") or {}).get("parallel", 1)) > 1:
            stock = trainer.get_total_train_batch_size
            trainer.get_total_train_batch_size = lambda args: stock(args) // parallel
        _follow("follow_trainer", trainer, trainer.accelerator)


def _key(accelerator: Any, key: str) -> Any:
    """A key of the block, None without it."""
    found, _ = block.split(accelerator.state.deepspeed_plugin.deepspeed_config)
    return (found or {}).get(key)


def _follow(function: str, client: Any, accelerator: Any) -> None:
    if (written := _key(accelerator, "checkpoint")) is not None:
        from hzero.config import CheckpointConfig
        from hzero.deepspeed import checkpoint
        from hzero.validation import validated

        getattr(checkpoint, function)(client, validated(CheckpointConfig, written, f"{block.KEY}.checkpoint"))


#: Module: the class to watch, its method, and what replaces that; it gets the method first.
_WATCHED: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "deepspeed.runtime.config": ("DeepSpeedConfig", "_initialize_params", _read),
    "accelerate.accelerator": ("Accelerator", "__init__", _constructing(_follow_accelerator)),
    "transformers.trainer": ("Trainer", "__init__", _constructing(_follow_trainer)),
    # Trainer's class is a subclass of it.
    "accelerate.utils.deepspeed": ("HfDeepSpeedConfig", "__init__", _constructing(_check_as_written)),
}
