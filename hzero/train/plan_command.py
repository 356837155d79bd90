"""``hzero plan``: memory, bytes and times of a model on a machine, computed before hours are spent."""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hzero.config import TIERS, ConfigError
from hzero.sharding import memory as memory_plan
from hzero.sharding import traffic as traffic_plan
from hzero.sharding.plan import ShardPlan
from hzero.sharding.records import chunk_numel, record_format
from hzero.topology.grid import Grid
from hzero.topology.links_file import read_links
from hzero.train.conf import compose, plain
from hzero.train.settings import GROUPS, Settings, model_numels
from hzero.train.summary import size_text

#: Short names of keys that a plan is mostly asked for.
SHORT = {
    "nodes": "topology.nodes",
    "gpus_per_node": "topology.gpus_per_node",
    "gcds_per_gpu": "topology.gcds_per_gpu",
    "preset": "zero.preset",
    "accumulation": "train.grad_accumulation",
}
_EXAMPLES = """examples:
  hzero plan model=gpt_neox_20b topology=frontier nodes=48
  hzero plan model=gpt_neox_10b topology=frontier nodes=12 preset=mild accumulation=8
  hzero plan model=gpt_neox_20b topology=frontier nodes=48 zero.error_feedback=[node] --json
  hzero plan model=gpt_neox_20b topology=frontier nodes=48 --links links.json    with rates that `hzero bench links` measured

short for keys of the trainer's configuration: """ + ", ".join(f"{k}= ({v})" for k, v in SHORT.items())


def run_plan(arguments: Sequence[str]) -> int:
    """Runs the command on its arguments. Raises `ConfigError` for input that cannot be used."""
    parser = argparse.ArgumentParser(
        prog="hzero plan",
        description="Computes memory a device, bytes a step by tier, and least times from the links' bandwidths.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="keys of the trainer's configuration")
    parser.add_argument(
        "--itemsize", type=int, choices=(2, 4), help="bytes of a weight; by default those of train.dtype, auto being 2"
    )
    parser.add_argument(
        "--links",
        metavar="FILE",
        type=Path,
        help="measured rates, as `hzero bench links` writes them, instead of topology.bandwidth_gb_s",
    )
    parser.add_argument("--json", action="store_true", help="for machines")
    parsed = parser.parse_intermixed_args(list(arguments))
    result = compute(parsed.overrides, parsed.itemsize, parsed.links)
    if parsed.json:
        print(json.dumps(result, indent=1))
    else:
        show(result, Console())
    return 0


def compute(overrides: Sequence[str], itemsize: int | None = None, links: Path | None = None) -> dict[str, Any]:
    """The plan as plain values: what ``--json`` prints.

    Args:
        overrides: Overrides of the trainer's configuration, short names allowed.
        itemsize: Bytes of a weight; None takes those of ``train.dtype``.
        links: File of measured rates; None takes ``topology.bandwidth_gb_s``.
    """
    settings = Settings(plain(compose([_long(override) for override in overrides])))
    if itemsize is None:
        itemsize = 4 if settings["train"]["dtype"] == "fp32" else 2
    plan = settings.plan
    if plan is None:
        raise ConfigError("zero.preset: none given; a plan is of the stage, beside plain ZeRO-3 (as in preset=topo)")
    model, train, grid = settings["model"], settings["train"], settings.grid
    numels = model_numels(model)
    accumulation = train["grad_accumulation"]
    traffic = traffic_plan.plan_traffic(plan, numels, itemsize=itemsize, accumulation=accumulation)
    stock = traffic_plan.zero3_traffic(grid, numels, itemsize=itemsize, accumulation=accumulation)
    into_node = {
        f"hzero {settings.preset}": traffic_plan.node_bytes(traffic, plan),
        **traffic_plan.peers_node_bytes(grid, numels, itemsize=itemsize, accumulation=accumulation),
    }
    measured = None if links is None else _measured(links, grid)
    bandwidth = settings["topology"].get("bandwidth_gb_s") or {}
    if measured is not None:
        bandwidth = {tier: rate["gb_s"] for tier, rate in measured["tiers"].items()}
    return {
        "model": model["name"],
        "parameters": sum(numels),
        "grid": {tier: grid.size(tier) for tier in TIERS},
        "world_size": grid.world_size,
        "preset": settings.preset,
        "weights": plan.weights_scope,
        "gradients": plan.gradients_scope,
        "accumulation": accumulation,
        "itemsize": itemsize,
        "notes": [*plan.notes, *_padding_note(plan, numels)],
        "memory": memory_plan.as_dicts(memory_plan.plan_memory(plan, numels, itemsize=itemsize)),
        "zero3_memory": memory_plan.as_dicts(memory_plan.zero3_memory(grid, numels, itemsize=itemsize)),
        "traffic": traffic_plan.as_dicts(traffic),
        "zero3_traffic": traffic_plan.as_dicts(stock),
        "node_bytes": into_node,
        "least_seconds": _least_seconds(traffic, bandwidth),
        "zero3_least_seconds": _least_seconds(stock, bandwidth),
        "links": measured,
    }


def _measured(path: Path, grid: Grid) -> dict[str, Any]:
    """What a links file says of the tiers of a grid, by their names: its own grid may be another.

    Raises:
        ConfigError: A tier of more than one rank has not been measured.
    """
    links = read_links(path)
    needed = [tier for tier in TIERS if grid.size(tier) > 1]
    for tier in needed:
        if tier not in links.tiers:
            raise ConfigError(
                f"{path}: tiers.{tier}: missing, and the plan's grid ({grid}) needs it; measured: "
                f"{', '.join(links.tiers) or 'none'}, on a grid of {links.grid_text()}"
            )
    return {
        "file": str(path),
        "date": links.date,
        "grid": dict(links.grid),
        "backend": links.backend,
        "device": links.device,
        "tiers": {tier: links.tiers[tier].model_dump() for tier in needed},
    }


def _padding_note(plan: ShardPlan, numels: Sequence[int]) -> list[str]:
    """A note where shards are so small that padding and scales cost more than a tenth on top of the codes."""
    chunks = [chunk_numel(numel, plan.grid.world_size) for numel in numels]
    fmt = record_format(plan.gather_hops()[0].codec) if plan.gather_hops() else None
    if fmt is None or fmt.codec == "none":
        return []
    long = fmt.record_bytes(1 << 20, 2) / (1 << 20)
    ratio = fmt.message_bytes(chunks, 1, 2) / (sum(numels) / plan.grid.world_size * long)
    if ratio < 1.1:
        return []
    return [
        f"shards are of {sum(chunks) / len(chunks):,.0f} elements on average, so padding makes {fmt.codec} records "
        f"{ratio:.1f} times as long as those of a large model; the closed forms of the peers know no padding"
    ]


def _long(override: str) -> str:
    key, sign, value = override.partition("=")
    near = difflib.get_close_matches(key, SHORT, n=1, cutoff=0.7) if sign and key.isidentifier() else []
    if near and key not in SHORT and key not in GROUPS:
        raise ConfigError(f"{key}: unknown key; did you mean {near[0]!r}?")
    return f"{SHORT.get(key, key)}{sign}{value}"


def _least_seconds(traffic: Sequence[traffic_plan.TierTraffic], bandwidth: dict[str, float]) -> dict[str, float]:
    """Bytes a rank receives over what its link carries, by tier: no step can take less."""
    return {
        tier: sum(row.wire_bytes for row in traffic if row.tier == tier) / (bandwidth[tier] * 1e9)
        for tier in TIERS
        if bandwidth.get(tier)
    }


def show(result: dict[str, Any], console: Console) -> None:
    """Prints a plan as tables."""
    grid = " x ".join(f"{result['grid'][t]} {n}" for t, n in zip(TIERS[::-1], ("nodes", "GPUs", "GCDs")))
    console.print(
        f"[bold]{result['model']}[/]: {result['parameters']:,} parameters of {result['itemsize']} bytes on "
        f"{result['world_size']:,} devices ({grid})\npreset {result['preset']}: weights over the {result['weights']}, "
        f"gradients over the {result['gradients']}, optimizer over the world; {result['accumulation']} micro-steps a step",
        highlight=False,
    )
    for note in result["notes"]:
        console.print(f"note: {note}", highlight=False)
    memory = Table(title="memory a device, without activations")
    for name, justify in (("state", "left"), ("bytes", "right"), ("of", "left"), ("ZeRO-3", "right")):
        memory.add_column(name, justify=justify)  # type: ignore[arg-type]
    stock = {state["name"]: state["bytes"] for state in result["zero3_memory"]}
    for state in result["memory"]:
        beside = size_text(stock[state["name"]]) if state["name"] in stock else ""
        memory.add_row(state["name"], size_text(state["bytes"]), state["what"], beside)
    total = sum(state["bytes"] for state in result["memory"])
    memory.add_row("all", size_text(total), "", size_text(sum(stock.values())), style="bold")
    console.print(memory)

    traffic = Table(title="bytes received a device and optimizer step")
    for name in ("role", "tier", "codec", "crossings", "bytes", "ratio", "ZeRO-3"):
        traffic.add_column(name, justify="left" if name in ("role", "tier", "codec") else "right")
    flat = {(row["role"], row["tier"]): row["wire_bytes"] for row in result["zero3_traffic"]}
    for row in result["traffic"]:
        if not row["used"]:
            continue
        ratio = f"{row['raw_bytes'] / row['wire_bytes']:.2f}" if row["wire_bytes"] else ""
        key = (row["role"], row["tier"])
        traffic.add_row(
            *key, row["codec"], str(row["crossings"]), size_text(row["wire_bytes"]), ratio, size_text(flat[key])
        )
    console.print(traffic)

    nodes = Table(title="bytes into one node a step (all but the first by their schemes' closed forms)")
    nodes.add_column("scheme")
    nodes.add_column("bytes", justify="right")
    nodes.add_column("against ZeRO-3", justify="right")
    for name, count in result["node_bytes"].items():
        against = f"{count / result['node_bytes']['ZeRO-3']:.3f}" if result["node_bytes"]["ZeRO-3"] else ""
        nodes.add_row(name, size_text(count), against)
    console.print(nodes)

    if result["least_seconds"]:
        _show_times(result, console)


def _show_times(result: dict[str, Any], console: Console) -> None:
    links = result["links"]
    if links is None:
        times = Table(title="least time of the links a step: computed from bandwidths, not measured")
    else:
        times = Table(title="least time of the links a step, by measured rates")
    names = ("tier", "hzero", "ZeRO-3") if links is None else ("tier", "GB/s", "one latency", "hzero", "ZeRO-3")
    for name in names:
        times.add_column(name, justify="left" if name == "tier" else "right")
    for tier, seconds in result["least_seconds"].items():
        rates = []
        if links is not None:
            rate = links["tiers"][tier]
            rates = [f"{rate['gb_s']:.4g}", f"{rate['latency_us']:.1f} us"]
        times.add_row(tier, *rates, f"{seconds:.3f} s", f"{result['zero3_least_seconds'][tier]:.3f} s")
    console.print(times)
    if links is not None:
        grid = " x ".join(f"{links['grid'][tier]} {tier}" for tier in TIERS[::-1])
        console.print(
            f"rates: {links['file']}, measured {links['date']} on {grid}, {links['backend']} on {links['device']}. Times "
            "leave out latencies, since how many collectives a step has depends on DeepSpeed's buckets, and the codecs' own "
            "work.",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
