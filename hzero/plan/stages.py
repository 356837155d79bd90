"""The plan of a model with pipeline stages: where its groups lie, what each stage holds, and what its devices receive."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from rich.console import Console

from hzero.config import Tier
from hzero.formatting import size_text, table_of
from hzero.plan.tables import TRAFFIC_HEAD, rates_of, say, show_groups, show_links, traffic_cells
from hzero.settings.buffers import REDUCE_BUCKET, elements_of
from hzero.settings.settings import Settings, model_numels
from hzero.sharding import traffic as traffic_plan
from hzero.sharding.memory import REDUCE_NUMEL
from hzero.sharding.plan import ShardPlan, lossy_crossings
from hzero.sharding.tensor_groups import stage_layers
from hzero.validation import some

#: What plans say of a codec whose messages have no fixed size.
MPC_NOTE = "codec mpc: its bytes are the most that it can take; what it takes depends on the data"


def checksum_note(traffic: Iterable[traffic_plan.TierTraffic]) -> list[str]:
    """A note of what checksums add to every hop, where they are on."""
    most: dict[Tier, int] = {}
    for row in traffic:
        most[row.tier] = max(row.checksum_bytes, most.get(row.tier, 0))
    added = [f"{size} bytes on {tier}" for tier, size in most.items() if size]
    if not added:
        return []
    return [
        f"checksums add a second collective to every hop, of {', '.join(added)} per device; these bytes leave them out"
    ]


def layout_of(settings: Settings) -> dict[str, str]:
    """Where sequence groups lie, or tensor groups, data-parallel groups and pipelines, of those that there are."""
    layout, sequence = settings.layout, settings.sequence
    found = {
        "sequence": (sequence.tensor, sequence.tensor_grid, sequence.tensor_group(0)),
        "tensor": (layout.tensor, layout.tensor_grid, layout.tensor_group(0)),
        "data": (layout.data if sequence.tensor == 1 else 1, layout.data_grid, layout.data_group(0)),
        "pipeline": (layout.pipeline, layout.pipeline_grid, layout.pipeline_group(0)),
    }
    return {
        name: f"{count} {'stages' if name == 'pipeline' else 'ranks'}, {grid}, such as {some(list(map(str, ranks)), 8)}"
        for name, (count, grid, ranks) in found.items()
        if count > 1
    }


def sums_of(settings: Settings, layers: int | None = None) -> dict[str, int]:
    """Elements of the activations that a tensor group sums, and how many it sums in a step; ``layers`` are a stage's or all.

    Each layer has two sums in forward, of attention and MLP, and two in backward. Recomputation repeats that of attention
    and ends before that of the MLP, which nothing of backward needs.
    """
    model, train = settings["model"], settings["train"]
    if settings.layout.tensor == 1:
        return {"numel": 0, "sums": 0}
    each = 5 if train["activation_checkpointing"] else 4
    return {
        "numel": train["micro_batch"] * model["seq_length"] * model["hidden_size"],
        "sums": each * (layers or model["num_layers"]) * train["grad_accumulation"],
    }


def compute(
    settings: Settings, plan: ShardPlan, itemsize: int, rates: Mapping[str, float | None], links: dict[str, Any] | None
) -> dict[str, Any]:
    """The plan as plain values: what ``hzero plan --json`` prints with ``model.pipeline_parallel``.

    Args:
        settings: Of the run, with stages.
        plan: Its shard plan, of which codecs count.
        itemsize: Bytes of a weight.
        rates: GB/s of a device on each tier; tiers without a rate have no times.
        links: Where they were measured; None for nominal ones.
    """
    stages = [_stage(settings, plan, itemsize, number) for number in range(settings.layout.pipeline)]
    traffic = [row for stage in stages for row in stage["traffic"]]
    return {
        "model": settings["model"]["name"],
        "grid": {tier: settings.grid.size(tier) for tier in settings.grid.tiers},
        "grid_text": str(settings.grid),
        "world_size": settings.grid.world_size,
        "preset": settings.preset,
        "accumulation": settings["train"]["grad_accumulation"],
        "itemsize": itemsize,
        "layout": layout_of(settings),
        "notes": [
            *([MPC_NOTE] if any(row.codec == "mpc" for row in traffic) else []),
            *checksum_note(traffic),
            *_copies_note(settings, plan, itemsize),
        ],
        "stages": [
            {
                **stage,
                "traffic": traffic_plan.as_dicts(stage["traffic"]),
                "link_seconds": traffic_plan.link_seconds(stage["traffic"], rates),
            }
            for stage in stages
        ],
        "rates_gb_s": dict(rates),
        "links": links,
    }


def _copies_note(settings: Settings, plan: ShardPlan, itemsize: int) -> list[str]:
    """A note of what tensor ranks send each other after lossy codecs, to keep copies alike; see `PipelineState.keep_alike`."""
    layout, model = settings.layout, settings["model"]
    if layout.tensor == 1:
        return []
    split, whole = (model_numels(model, ranks) for ranks in (layout.tensor, 1))
    copied = sum(numel for numel, same in zip(split, whole) if numel == same)
    roles: tuple[Literal["gradients", "optimizer"], ...] = ("gradients", "optimizer")
    lossy = [role for role in roles if lossy_crossings(plan.codecs[role], layout.data_grid)]
    size = ("gradients" in lossy) * 4 * -(-copied // layout.data) + ("optimizer" in lossy) * itemsize * copied
    if not size:
        return []
    return [
        f"after lossy codecs of {' and '.join(lossy)} tensor ranks take norms and biases, and embeddings that are not "
        f"split, from the first of them: {size_text(size)} per step for a device of each stage together, in neither these "
        "tables nor the wire log"
    ]


def _stage(settings: Settings, plan: ShardPlan, itemsize: int, number: int) -> dict[str, Any]:
    """What one device of a stage holds and receives."""
    layout, model, train = settings.layout, settings["model"], settings["train"]
    first, last = stage_layers(model["num_layers"], number, layout.pipeline)
    *numels, scale, shift, head = model_numels({**model, "num_layers": last - first}, layout.tensor)
    if number == layout.pipeline - 1:
        numels += [scale, shift, head]
    numel = sum(numels[0 if number == 0 else 1 :])  # the first one is the embedding's
    own = -(-numel // layout.data)
    neighbours = [other for other in (number - 1, number + 1) if 0 <= other < layout.pipeline]
    tiers = [layout.pipeline_grid.tier_between(number, other) for other in neighbours]
    # DeepSpeed sends from each tensor rank its part.
    message = -(-train["micro_batch"] * model["seq_length"] * model["hidden_size"] // layout.tensor)
    sums: Any = sums_of(settings, last - first)
    sent: Any = {"itemsize": itemsize, "checksum": plan.checksum}
    buckets: Any = {
        "reduced": elements_of(settings, REDUCE_BUCKET, REDUCE_NUMEL),
        "gathered": elements_of(settings, "allgather_bucket_size", REDUCE_NUMEL),
    }
    return {
        "stage": number,
        "layers": last - first,
        "parameters": numel,
        "memory": {"weights": itemsize * numel, "gradients": 4 * numel, "optimizer": 12 * own},
        "traffic": [
            *traffic_plan.zero1_traffic(layout.data_grid, plan.codecs, numel, **buckets, **sent),
            *traffic_plan.pipeline_traffic(tiers, plan.codecs.pipeline, message, train["grad_accumulation"], **sent),
            *traffic_plan.tensor_traffic(layout.tensor_grid, plan.codecs.tensor, **sums, **sent),
        ],
    }


def show(result: dict[str, Any], console: Console) -> None:
    """Prints what `compute` returns."""
    say(
        console,
        f"[bold]{result['model']}[/]: weights of {result['itemsize']} bytes on {result['world_size']:,} devices "
        f"({result['grid_text']})\ncodecs of {result['preset']}, ZeRO-1; micro-batches per step: {result['accumulation']}",
    )
    show_groups(result, console)
    alike = _alike(result["stages"])
    held = [
        (
            name,
            str(stage["layers"]),
            f"{stage['parameters']:,}",
            *(size_text(stage["memory"][state]) for state in ("weights", "gradients", "optimizer")),
        )
        for name, stage in alike
    ]
    head = ("stage", "*layers", "*parameters", "*weights", "*gradients", "*optimizer")
    console.print(
        table_of(
            "memory per device, without activations, gradients of one backward and buffers (gradients: float32 sums)",
            head,
            held,
        )
    )
    rows = [(name, *traffic_cells(row)) for name, stage in alike for row in stage["traffic"]]
    console.print(table_of("bytes received per device and optimizer step", ("stage", *TRAFFIC_HEAD), rows))
    tiers = [tier for tier in result["grid"] if result["rates_gb_s"].get(tier)]
    if tiers:
        times = [(name, *(f"{stage['link_seconds'][tier]:.3f} s" for tier in tiers)) for name, stage in alike]
        names = [f"*{tier}, {result['rates_gb_s'][tier]:.4g} GB/s" for tier in tiers]
        console.print(
            table_of(f"link time per step from bandwidth alone ({rates_of(result)})", ("stage", *names), times)
        )
        say(console, "GB/s: one way per device. Not counted: latency, computation, idle stages, overlap")
    show_links(result, console)


def _alike(stages: Sequence[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """One stage of those that hold and receive the same, with the numbers of all of them."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for stage in stages:
        found[json.dumps({**stage, "stage": None})].append(stage)
    return [(some([str(stage["stage"]) for stage in same], 4), same[0]) for same in found.values()]
