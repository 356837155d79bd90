"""hzero: a ZeRO stage for DeepSpeed, and a companion of FSDP2, that follow the hierarchy of a machine.

Weights, gradients and optimizer states each have a shard scope: the device, the package, the node or the world.
Collectives run tier by tier, and each tier has a codec. See docs/architecture.md.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hzero import autoload as _autoload

if TYPE_CHECKING:
    from hzero import comm, fsdp
    from hzero.deepspeed import enable, exact_weights, initialize, state
    from hzero.engine.guard import DivergenceError, StaleWeightsError
    from hzero.errors import ConfigError
    from hzero.manifest import SaveError, newest_checkpoint
    from hzero.stop import StopAndSave

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "DivergenceError",
    "SaveError",
    "StaleWeightsError",
    "StopAndSave",
    "__version__",
    "comm",
    "enable",
    "exact_weights",
    "fsdp",
    "initialize",
    "newest_checkpoint",
    "state",
]

#: Modules of the names that need no DeepSpeed, which takes seconds to import.
_LIGHT = {
    "ConfigError": "hzero.errors",
    "DivergenceError": "hzero.engine.guard",
    "SaveError": "hzero.manifest",
    "StaleWeightsError": "hzero.engine.guard",
    "StopAndSave": "hzero.stop",
    "newest_checkpoint": "hzero.manifest",
}


def __getattr__(name: str) -> Any:
    # torch imports this package with every `import torch`.
    if name not in __all__:
        raise AttributeError(f"module 'hzero' has no attribute {name!r}")
    if name in ("comm", "fsdp"):
        return importlib.import_module(f"hzero.{name}")
    return getattr(importlib.import_module(_LIGHT.get(name, "hzero.deepspeed")), name)


_autoload.autoload()
