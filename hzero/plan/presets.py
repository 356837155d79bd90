"""``hzero presets``: what every preset costs and saves, for one model on one machine."""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from hzero.arguments import Parser
from hzero.config import PRESETS
from hzero.formatting import size_text, table_of
from hzero.plan.command import compute
from hzero.validation import ConfigError

#: When to take each preset.
PURPOSES = {
    "zero1": "no loss, where 16-bit weights and float32 gradients fit whole: least traffic without a codec",
    "zero2": "no loss, where 16-bit weights fit whole and gradients do not",
    "replica": "in place of DDP: gradients cross once per step, in less than half of its bytes; optimizer over the world",
    "half": "where a copy of the weights per package does not fit: a third less memory than topo",
    "zero3": "to check that only the route has changed",
    "hpz": "where a copy per package does not fit and nothing may be lossy",
    "zeropp": "ZeRO++'s degrees and widths",
    "lossless": "no loss, where memory allows",
    "topo": "the default; arXiv 2501.04266",
    "mild": "after arXiv 2409.02423: where int4 gradients cost convergence",
    "zhybrid": "that paper's ZFP at two rates, to compare with; activations in zfp at rate 16",
    "mzhybrid": "that paper's MPC and ZFP, to compare with; activations in mpc",
    "hybrid": "beside tensor groups: topo, with gradients in int8 inside nodes, and activations in int8 and a rotation of 64",
}
_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))
#: What a model holds, whatever the buffers.
STATES = ("primary weights", "resident weights", "gradient shard", "gradient accumulators", "optimizer")


def parser() -> argparse.ArgumentParser:
    """Reads the command's arguments."""
    made = Parser(
        prog="hzero presets",
        description="Lists the presets: degrees, codecs, bytes and memory for a model on a machine, when to take each.",
        epilog="example: hzero presets model=gpt_neox_20b topology=frontier nodes=48 accumulation=8",
    )
    made.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="keys as of `hzero plan`, but the preset")
    made.add_argument("--json", action="store_true", help="print JSON")
    return made


def run_presets(arguments: Sequence[str]) -> int:
    """Runs the command on its arguments. Raises `ConfigError` for input that cannot be used."""
    parsed = parser().parse_args(list(arguments))
    for override in parsed.overrides:
        if override.partition("=")[0] in ("preset", "zero", "zero.preset"):
            raise ConfigError(f"{override}: given to `hzero presets`, which lists all of {', '.join(PRESETS)}")
    plans = {name: compute([*parsed.overrides, f"zero.preset={name}"]) for name in PRESETS}
    if any("stages" in plan for plan in plans.values()):
        raise ConfigError(
            "model.pipeline_parallel: given to `hzero presets`, whose degrees have no effect with pipeline stages; possible: 1, "
            "or hzero plan"
        )
    rows = [_row(name, plan) for name, plan in plans.items()]
    if parsed.json:
        print(json.dumps(rows, indent=1))
    else:
        _show(rows, next(iter(plans.values())))  # of the same job as all
    return 0


def _row(name: str, plan: dict[str, Any]) -> dict[str, Any]:
    tiers: dict[str, int] = {}
    codecs: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for row in plan["traffic"]:
        if row["used"]:
            tiers[row["tier"]] = tiers.get(row["tier"], 0) + row["wire_bytes"]
            codecs[row["role"]][row["codec"]] = None
    return {
        "preset": name,
        "weights": plan["weights"],
        "weights_codec": "/".join(codecs["weights"]) or "none",
        "gradients": plan["gradients"],
        "gradients_codec": "/".join(codecs["gradients"]) or "none",
        "tier_bytes": tiers,
        "node_bytes": plan["node_bytes"][f"hzero {name}"],
        "state_bytes": sum(state["bytes"] for state in plan["memory"] if state["name"] in STATES),
        "memory_bytes": plan["memory_bytes"],
        "fits": None if plan["device_bytes"] is None else plan["memory_bytes"] <= plan["device_bytes"],
        "purpose": PURPOSES[name],
    }


def _show(rows: Sequence[dict[str, Any]], job: dict[str, Any]) -> None:
    tiers = list(rows[0]["tier_bytes"])
    steps = job["accumulation"]
    # One unit for all: columns are compared.
    largest = max(size for row in rows for size in (row["memory_bytes"], *row["tier_bytes"].values()))
    unit, scale = next((unit, scale) for unit, scale in _UNITS if largest >= scale or unit == "B")
    console = Console()
    console.print(
        f"{job['model']}: {job['parameters']:,} parameters of {job['itemsize']} bytes on {job['world_size']:,} devices, "
        f"{steps} micro-step{'s' * (steps != 1)} per step",
        highlight=False,
        soft_wrap=True,
    )
    title = f"per device, in {unit}: received per step on each tier; memory of the states, and in all"
    if job["device_bytes"] is not None:
        title += f"; devices of {size_text(job['device_bytes'])}"
    head = ("preset", "weights", "gradients", *(f"*{tier}" for tier in tiers), "*states", "*all", "fits")
    console.print(
        table_of(
            title,
            head,
            [
                (
                    row["preset"],
                    f"{row['weights']}, {row['weights_codec']}",
                    f"{row['gradients']}, {row['gradients_codec']}",
                    *(
                        f"{size / scale:,.2f}"
                        for size in (*row["tier_bytes"].values(), row["state_bytes"], row["memory_bytes"])
                    ),
                    {None: "", True: "yes", False: "no"}[row["fits"]],
                )
                for row in rows
            ],
        )
    )
    console.print(table_of("", ("preset", "when to take it"), [(row["preset"], row["purpose"]) for row in rows]))
