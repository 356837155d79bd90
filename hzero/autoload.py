"""Installs the stage as soon as DeepSpeed reads a configuration that contains the ``"hzero"`` block.

``import hzero`` calls `autoload`. torch imports hzero at the end of its own import (entry point ``torch.backends``, see
``hzero_autoload.py``), so this module imports nothing that takes time. `autoload` only registers an import hook. When
DeepSpeed, Accelerate or Trainer is imported, the hook wraps one method of a class. Every configuration passes through
``DeepSpeedConfig._initialize_params``, also for ``zero.Init``. The rest of DeepSpeed is unchanged until a configuration has
the block.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from hzero import block

#: With ``0``, only ``import hzero``, `hzero.enable` or ``hzero run`` install the stage.
VARIABLE = "HZERO_AUTOLOAD"
#: One entry per configuration with a block that DeepSpeed has read in this process.
blocks_read: list[bool] = []


def autoload() -> None:
    """Wraps the methods in `_WATCHED`, now or as soon as their modules have been imported."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    for name, (owner, _, _) in _WATCHED.items():
        if hasattr(sys.modules.get(name), owner):
            _watch(sys.modules[name])


class _Finder:
    """Import hook that leaves finding to the other finders, and wraps a watched module after its execution."""

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
    """Wraps the method that `_WATCHED` names for a module, once."""
    owner, method, function = _WATCHED[module.__name__]
    try:
        stock = getattr(getattr(module, owner), method)
        if not hasattr(stock, "watched_by_hzero"):

            @functools.wraps(stock)
            def watching(*args: Any, **kwargs: Any) -> Any:
                return function(stock, *args, **kwargs)

            watching.watched_by_hzero = True  # type: ignore[attr-defined]
            setattr(getattr(module, owner), method, watching)
    except Exception as error:  # the process may not use hzero at all, so its import must not fail
        print(f"hzero: cannot watch {module.__name__}.{owner}, so it is off: {error}", file=sys.stderr)


def _read(stock: Callable[..., Any], config: Any, param_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Wraps ``DeepSpeedConfig._initialize_params``: installs the stage and checks the configuration if it has a block.

    DeepSpeed does not see the block. The engine reads the parsed block from the attribute ``hzero_block``.
    """
    from hzero.errors import on_all_ranks

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
            config.world_size = max(config.world_size // sequence.parallel, 1)  # the ranks of a group share one batch
            if {"train_micro_batch_size_per_gpu", "gradient_accumulation_steps"} <= rest.keys():
                rest.pop("train_batch_size", None)  # Trainer and Accelerate count every rank in it
        stock(config, rest, *args, **kwargs)
        check_config(config)
    return None


def _shard(stock: Callable[..., None], state: Any) -> None:
    """Wraps ``FSDPState._init_shared_state``, which FSDP2 calls once for each root: applies the environment's block to it."""
    stock(state)
    if written := os.environ.get("HZERO_FSDP"):
        from hzero.fsdp.state import apply_written

        apply_written(written, state)


def _constructing(then: Callable[..., None]) -> Callable[..., None]:
    """A constructor that calls ``then(self, keyword arguments)`` after the stock one."""

    def init(stock: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        from hzero.errors import on_all_ranks

        stock(self, *args, **kwargs)
        with on_all_ranks():
            then(self, kwargs)

    return init


def _check_as_written(read: Any, _: Any) -> None:
    """Checks a configuration before a model exists. Trainer and Accelerate fill in its ``auto`` values later."""
    from hzero.errors import ConfigError

    if block.split(read.config)[0] is None:
        return
    from hzero.deepspeed.refusals import check_written

    try:
        check_written(read.config)
    except ConfigError:
        raise
    except Exception:  # DeepSpeed refuses a value that Trainer or Accelerate may still change
        return


def _follow_accelerator(accelerator: Any, given: Any) -> None:
    """Applies the block's keys ``checkpoint`` and ``sequence`` to an ``Accelerator``.

    Raises:
        ConfigError: The DeepSpeed configuration has the block, but the accelerator would train DDP on CPUs.
    """
    if "DEEPSPEED" in str(accelerator.distributed_type):
        _follow("follow_accelerator", accelerator, accelerator)
        if (parallel := (_key(accelerator, "sequence") or {}).get("parallel", 1)) > 1:
            from torch.distributed.device_mesh import init_device_mesh

            # Accelerate gives the ranks of a mesh's axis "tp" the same samples. Neighbours share a sequence.
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
        from hzero.errors import ConfigError

        raise ConfigError(
            f"{block.KEY}: the configuration has the block, but Accelerate does not use DeepSpeed (found "
            f"{accelerator.distributed_type}); cpu=True and ACCELERATE_USE_CPU turn it off: leave them out, or remove the block"
        )


def _follow_trainer(trainer: Any, _: Any) -> None:
    """Applies the block's keys ``checkpoint`` and ``sequence`` to a Trainer."""
    if getattr(trainer, "is_deepspeed_enabled", False):
        if (parallel := (_key(trainer.accelerator, "sequence") or {}).get("parallel", 1)) > 1:
            stock = trainer.get_total_train_batch_size
            trainer.get_total_train_batch_size = lambda args: stock(args) // parallel
        _follow("follow_trainer", trainer, trainer.accelerator)


def _key(accelerator: Any, key: str) -> Any:
    """The value of a key of the block; None if the key or the block is missing."""
    found, _ = block.split(accelerator.state.deepspeed_plugin.deepspeed_config)
    return (found or {}).get(key)


def _follow(function: str, client: Any, accelerator: Any) -> None:
    if (written := _key(accelerator, "checkpoint")) is not None:
        from hzero.config import CheckpointConfig
        from hzero.deepspeed import clients
        from hzero.schema import validated

        getattr(clients, function)(client, validated(CheckpointConfig, written, f"{block.KEY}.checkpoint"))


#: By module: the class to watch, its method, and the function that replaces it and receives the stock method first.
_WATCHED: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "deepspeed.runtime.config": ("DeepSpeedConfig", "_initialize_params", _read),
    "accelerate.accelerator": ("Accelerator", "__init__", _constructing(_follow_accelerator)),
    "transformers.trainer": ("Trainer", "__init__", _constructing(_follow_trainer)),
    "torch.distributed.fsdp._fully_shard._fsdp_state": ("FSDPState", "_init_shared_state", _shard),
    # Trainer's own class is a subclass.
    "accelerate.utils.deepspeed": ("HfDeepSpeedConfig", "__init__", _constructing(_check_as_written)),
}
