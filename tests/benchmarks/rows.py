"""Rows of a comparison that was never run, with round figures that tests compute by hand."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MACHINE = {
    "cores": 2,
    "processor": "AMD EPYC",
    "memory_bytes": 24_000_000_000,
    "system": "Linux 6.18",
    "python": "3.11.7",
}
VERSIONS = {"hzero": "0.1.0", "torch": "2.13.0", "commit": "abc1234"}
#: Scheme: engine, label, step time in seconds, megabytes a step by tier, optimizer bytes as a part of the world's.
SCHEMES: dict[str, tuple[str, str, float, tuple[float, float, float], int]] = {
    "ddp": ("ddp", "PyTorch DDP", 3.0, (20, 20, 20), 8),
    "hsdp-node": ("fsdp", "HSDP, node mesh", 1.6, (40, 40, 8), 2),
    "hsdp-package": ("fsdp", "HSDP, package mesh", 1.5, (40, 10, 9), 4),
    "zero3-deepspeed": ("deepspeed", "DeepSpeed ZeRO-3", 4.0, (60, 60, 24), 1),
    "hpz-deepspeed": ("deepspeed", "DeepSpeed ZeRO-3, hpZ", 2.5, (50, 50, 12), 1),
    "zero3": ("hzero", "hzero zero3", 3.6, (60, 60, 24), 1),
    "lossless": ("hzero", "hzero lossless", 2.0, (40, 20, 8), 1),
    "topo": ("hzero", "hzero topo", 1.25, (20, 10, 4), 1),
}
Row = dict[str, Any]
MODEL = {"hidden_size": 256, "num_layers": 4, "seq_length": 64}


def config(nodes: int = 2, accumulation: int = 2, node_rate: float = 50, **more: Any) -> dict[str, Any]:
    """Configuration of a measurement."""
    return {
        "cluster": {
            "nodes": nodes,
            "gpus_per_node": 2,
            "gcds_per_gpu": 2,
            "rates_mbit": {"gcd": 200, "gpu": 75, "node": node_rate},
        },
        "model": dict(MODEL),
        "data": {},
        "train": {
            "micro_batch": 1,
            "accumulation": accumulation,
            "dtype": "bf16",
            "seed": 0,
            "lr": 1e-3,
            "warmup_steps": 10,
            "betas": [0.9, 0.95],
            "weight_decay": 0.1,
        },
        "rounds": 4,
        "warmup": 2,
        "reduce_scatter": "gloo",
        "timeout_s": 300,
        "threads": 1,
        "schemes": list(SCHEMES),
        **more,
    }


def steps(scheme: str, suite: str = "main", name: str = "main", scale: float = 1.0, **more: Any) -> Row:
    """A row of a scheme: step times are 0.9, 1, 1 and 1.2 of its median, losses fall from 6 by a half a step."""
    engine, label, median, megabytes, optimizer = SCHEMES[scheme]
    settings = more.pop("config", None) or config()
    world = settings["cluster"]["nodes"] * 4
    median *= scale
    planned = {
        tier: value * 1e6
        for tier, value in zip(("gcd", "gpu", "node"), megabytes)
        if tier != "node" or settings["cluster"]["nodes"] > 1
    }
    return {
        "kind": "steps",
        "format": 2,
        "measurement": name,
        "suite": suite,
        "id": "9f0c",
        "date": "2026-11-21T18:02:11+00:00",
        "machine": MACHINE,
        "versions": VERSIONS,
        "config": settings,
        "scheme": scheme,
        "label": label,
        "engine": engine,
        "scheme_config": {
            "engine": engine,
            "label": label,
            **({"block": {"preset": scheme}} if engine == "hzero" else {}),
        },
        "parameters": 1_000_000,
        "world_size": world,
        "tokens_per_step": 64 * world * settings["train"]["accumulation"],
        "step_s": [round(median * part, 6) for part in (0.9, 1, 1, 1.2)],
        "losses": [6.0, 5.5, 5.0, 4.5, 4.0, 3.5],
        "bytes": {
            "measured": {tier: value * 1.02 for tier, value in planned.items()},
            "planned": planned,
            "planned_twice": {tier: value * 1.02 / 0.9 for tier, value in planned.items()},
            "ideal": {tier: value * (1 if scheme in ("ddp", "topo") else 0.75) for tier, value in planned.items()},
        },
        "busiest": {tier: value / (world if tier != "node" else 2) * 1.1 for tier, value in planned.items()},
        "cpu_s": 1.0,
        "fetches": None if engine == "ddp" else 2.0 if engine == "fsdp" else 1.8,
        "memory": {
            "weights": 2_000_000,
            "gradients": 1_000_000,
            "optimizer": 1_500_000 * optimizer,
            "kept": 0,
            "peak": None,
        },
        **more,
    }


def main_rows(**more: Any) -> list[Row]:
    """Every scheme of the main measurement."""
    return [steps(scheme, **copy.deepcopy(more)) for scheme in SCHEMES]


def long_run(seed: int, finals: dict[str, float], **more: Any) -> list[Row]:
    """A measurement of 100 steps, whose losses are constant for the last 50."""
    setting = config(schemes=list(finals))
    setting["train"]["seed"] = seed
    return [
        steps(scheme, "convergence", f"seed-{seed}", config=setting, losses=[6.0] * 50 + [final] * 50, **more)
        for scheme, final in finals.items()
    ]


def everything() -> list[Row]:
    """Rows of every suite."""
    rows = main_rows()
    for kind in ("all_to_all", "ring"):
        rows += main_rows(suite="reduce_scatter", name=kind, scale=0.8, config=config(reduce_scatter=kind))
    for many in (1, 4, 8):
        for scheme, scale in (("zero3-deepspeed", many / 2), ("hsdp-node", many / 2), ("topo", 0.5 + many / 4)):
            setting = config(accumulation=many, schemes=["zero3-deepspeed", "hsdp-node", "topo"])
            rows.append(steps(scheme, "accumulation", f"accumulation-{many}", scale, config=setting))
    for rate in (15, 150):
        for scheme in ("zero3-deepspeed", "hsdp-node", "topo"):
            setting = config(node_rate=rate, schemes=["zero3-deepspeed", "hsdp-node", "topo"])
            scale = 50 / rate if scheme != "topo" else {15: 1.5, 150: 0.9}[rate]
            rows.append(steps(scheme, "sweep", f"node-{rate}", scale, config=setting))
    for suite, name, scale in (("codecs", "topo-weights-int4", 0.9), ("shards", "topo-gradients-world", 1.8)):
        setting = config(schemes=["topo", name])
        rows += [steps("topo", suite, suite, config=setting)]
        rows += [{**steps("topo", suite, suite, scale, config=setting), "scheme": name, "label": f"topo, {name[5:]}"}]
    rows += long_run(0, {"zero3-deepspeed": 4.0, "topo": 4.03})
    rows += long_run(1, {"zero3-deepspeed": 4.02, "topo": 4.07})
    return rows


def write(folder: Path, rows: Iterable[Row], tail: str = "") -> Path:
    """Writes a results folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    return folder
