"""Rows of a comparison that was never run, with round figures that tests compute by hand."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from hzero.config import BASE_TIERS

Row = dict[str, Any]
ROW, LAYOUT = yaml.safe_load_all(Path(__file__).with_name("row.yaml").read_text())
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


def config(accumulation: int = 2, node_rate: float | None = 50, **more: Any) -> dict[str, Any]:
    """Configuration of a measurement."""
    made = {**copy.deepcopy(ROW["config"]), "schemes": list(SCHEMES), **more}
    made["train"]["accumulation"], made["cluster"]["rates_mbit"]["node"] = accumulation, node_rate
    return made


def steps(scheme: str, suite: str = "main", name: str = "main", scale: float = 1.0, **more: Any) -> Row:
    """A row of a scheme: step times are 0.9, 1, 1 and 1.2 of its median, losses fall from 6 by a half a step."""
    engine, label, median, megabytes, optimizer = SCHEMES[scheme]
    settings = more.pop("config", None) or config()
    planned = {tier: value * 1e6 for tier, value in zip(BASE_TIERS, megabytes)}
    twice = {"ddp": 1, "topo": 1}.get(scheme, 0.75)
    block = {"block": {"preset": scheme}} if engine == "hzero" else {}
    row = copy.deepcopy(ROW)
    row["memory"]["optimizer"] *= optimizer
    row |= {"measurement": name, "suite": suite, "config": settings, "scheme": scheme, "label": label, "engine": engine}
    row["scheme_config"] = {"engine": engine, "label": label, **block}
    row["tokens_per_step"] = 64 * 8 * settings["train"]["accumulation"]
    row["step_s"] = [round(scale * median * part, 6) for part in (0.9, 1, 1, 1.2)]
    row["bytes"] = {
        "measured": {tier: value * 1.02 for tier, value in planned.items()},
        "planned": planned,
        "planned_twice": {tier: value * 1.02 / 0.9 for tier, value in planned.items()},
        "ideal": {tier: value * twice for tier, value in planned.items()},
    }
    row["busiest"] = {tier: value / (8 if tier != "node" else 2) * 1.1 for tier, value in planned.items()}
    row["fetches"] = None if engine == "ddp" else 2.0 if engine == "fsdp" else 1.8
    return {**row, **more}


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
