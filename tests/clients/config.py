"""How all clients ask for hzero. It imports nothing heavy."""

from __future__ import annotations

from typing import Any

#: Four ranks stand for two nodes with one package of two devices.
TOPOLOGY = {"packages_per_node": 1, "devices_per_package": 2}
BATCH, ACCUMULATION, CLIP, LR = 2, 2, 0.7, 5e-3
STEPS = 4  # optimizer steps


def config_of(preset: str | None, **changes: Any) -> dict[str, Any]:
    """The DeepSpeed configuration of all clients; without a preset that of plain ZeRO-3.

    Args:
        preset: Of hzero.
        changes: Keys of the configuration, merged one level deep; ``hzero`` are further keys of the block.
    """
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.0, "torch_adam": True}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},  # else little would be gathered
        "steps_per_print": 10**9,
    }
    # Where the ranks sit does not change what `fit` gives, so that every client also has the documented value.
    topology = "discover" if preset == "fit" else TOPOLOGY
    block = {"preset": preset, "topology": topology, **changes.pop("hzero", {})}
    for key, value in changes.items():
        config[key] = {**config.get(key, {}), **value} if isinstance(value, dict) else value
    if preset is not None:
        config["zero_optimization"]["hzero"] = block
    return config
