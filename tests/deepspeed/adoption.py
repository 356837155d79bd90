"""Fresh processes that test_adoption.py starts: ``python -m tests.deepspeed.adoption NAME``. Each prints what it saw."""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import io
import json
import os
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

BLOCK = {"preset": "topo", "topology": {"packages_per_node": 1, "devices_per_package": 1}}


def _config(place: str = "", stage: int = 3) -> dict[str, Any]:
    """A DeepSpeed configuration with the block ``inside`` zero_optimization, at the ``top``, or nowhere."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }
    if place in ("top", "both"):
        config["hzero"] = BLOCK
    if place in ("inside", "both"):
        config["zero_optimization"]["hzero"] = BLOCK
    return config


def _train(config: dict[str, Any] | str, model: Any = None) -> Any:
    """An engine after one step; its DeepSpeed has not been told of hzero by anyone here."""
    import deepspeed
    import torch

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    model = torch.nn.Linear(4, 4) if model is None else model
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    return engine


def _say(**found: Any) -> None:
    print(json.dumps(found), flush=True)


def _stage_of(config: dict[str, Any] | str, model: Any = None) -> str:
    try:
        return type(_train(config, model).optimizer).__name__
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"


def places() -> None:
    """What torch's entry point imports; what DeepSpeed builds for the block in each place, a file, and after ``zero.Init``."""
    import torch

    loaded = sorted(name for name in sys.modules if name.split(".")[0] in ("hzero", "deepspeed"))
    import deepspeed

    found = {place: _stage_of(_config(place)) for place in ("", "inside", "top", "both")}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ds_config.json"
        path.write_text(json.dumps(_config("inside")))
        found["file"] = _stage_of(str(path))
        with deepspeed.zero.Init(config_dict_or_path=str(path)):
            model = torch.nn.Linear(4, 4)
        found["zero.Init"] = _stage_of(str(path), model)
    found["stage 2"] = _stage_of(_config("inside", stage=2))
    found["stock again"] = _stage_of(_config())
    misspelt = _config()
    misspelt["zero_optimization"]["h_zero"] = BLOCK
    found["misspelt"] = _stage_of(misspelt)
    _say(**found, loaded=loaded, files=sorted(name for name in sys.modules if name.split(".")[0] == "hzero"))


def without_autoload() -> None:
    """The block where nothing loads hzero, and after ``import hzero``, with DeepSpeed imported before."""
    inside = _stage_of(_config("inside"))
    loaded = [name for name in sys.modules if name.startswith("hzero")]
    importlib.import_module("hzero")
    _say(inside=inside, loaded=loaded, late=_stage_of(_config("inside")))


def without_extras() -> None:
    """Training with the block, and the commands that need an extra, where importing a package of an extra fails."""
    extras = {
        "hydra",
        "omegaconf",
        "rich",
        "matplotlib",
        "argcomplete",
        "transformers",
        "tokenizers",
        "accelerate",
        "xxhash",
    }
    sys.modules.update(dict.fromkeys(extras))  # type: ignore[arg-type]  # as if they were not installed
    stage = _stage_of(_config("inside"))

    from hzero.tools import cli

    def ran(command: str) -> list[Any]:
        with contextlib.redirect_stderr(io.StringIO()) as errors:
            return [cli.main([command]), errors.getvalue()]

    said = {command: ran(command) for command in cli.NEEDS}
    _say(stage=stage, said=said)


def untouched() -> None:
    """What of DeepSpeed is another object after hzero has come by an import, and engines without a block have trained."""
    _train(_config()).destroy()
    before, alone = _attributes(), "hzero" not in sys.modules
    import hzero

    engine = _train(_config())
    after = _attributes()
    changed = sorted(name for name in before if before[name] is not after.get(name))
    without = {"changed": changed, "new": sorted(set(after) - set(before)), "seen": len(before)}
    with_block = type(_train(_config("inside")).optimizer).__name__
    _say(
        **without,
        alone=alone,
        stock=type(engine.optimizer).__name__,
        with_block=with_block,
        state=hzero.state(engine) is None,
    )


def _attributes() -> dict[str, Any]:
    """All attributes of DeepSpeed's modules and classes, and all parts of its functions, by name.

    Only what code is made of: functions, classes, modules, methods and descriptors; engines count in other values.
    """
    gc.collect()
    found: dict[str, Any] = {}
    modules = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "deepspeed"}
    for name, module in modules.items():
        for key, value in vars(module).items():
            _enter(found, f"{name}.{key}", value)
    return found


def _enter(found: dict[str, Any], name: str, value: Any) -> None:
    kinds = (type, types.FunctionType, types.ModuleType, staticmethod, classmethod, property, types.MethodType)
    if not isinstance(value, kinds):
        return
    found[name] = value
    if inspect.isclass(value) and value.__module__.startswith("deepspeed") and not name.endswith(".__class__"):
        found[f"{name} (bases)"] = value.__bases__
        found[f"{name} (metaclass)"] = type(value)
        for key, inner in vars(value).items():
            if not inspect.isclass(inner):
                _enter(found, f"{name}.{key}", inner)
    if isinstance(value, types.FunctionType):
        for part in ("__code__", "__defaults__", "__kwdefaults__", "__closure__", "__globals__"):
            found[f"{name}.{part}"] = getattr(value, part)


def accelerate() -> None:
    """Accelerators that do not use DeepSpeed, with and without the block in the plugin or in the environment's file."""
    import torch.distributed as dist
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.state import AcceleratorState

    dist.init_process_group("gloo")
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ds_config.json"
        path.write_text(json.dumps(_config("inside")))
        for name, plugin in (
            ("without", DeepSpeedPlugin(hf_ds_config=_config())),
            ("plugin", DeepSpeedPlugin(hf_ds_config=_config("inside"))),
            ("environment", None),
        ):
            if plugin is None:
                os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(path)
            try:
                found[name] = str(Accelerator(cpu=True, deepspeed_plugin=plugin).distributed_type)
            except ValueError as error:
                found[name] = str(error)
            AcceleratorState._reset_state(reset_partial_state=True)
    _say(**found)


def by_script() -> None:
    """What a script does that has no word of hzero in it."""
    _say(inside=_stage_of(_config("inside")))


if __name__ == "__main__":
    globals()[sys.argv[1]]()
