"""Summary of a run: built at its end, stored as JSON, shown as tables."""

from __future__ import annotations

import math
import platform
import statistics
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rich.console import Console
from rich.table import Table

from hzero.config import DIMENSIONS, ROLES, TIERS
from hzero.formatting import size_text, table_of
from hzero.settings.buffers import buffers_of
from hzero.settings.settings import Settings
from hzero.sharding.memory import as_dicts as memory_dicts
from hzero.sharding.memory import plan_memory, zero3_memory
from hzero.sharding.plan import ShardPlan
from hzero.sharding.traffic import as_dicts as traffic_dicts
from hzero.sharding.traffic import zero3_traffic

#: What a wire log counts, in the order of the tables.
_SENT: tuple[str, ...] = (*ROLES, *DIMENSIONS)
#: Maximum number of steps at either end whose mean is given as first and last loss.
WINDOW = 10


def build_summary(
    settings: Settings,
    *,
    parameters: int,
    steps: int,
    rows: Sequence[dict[str, Any]],
    losses: Sequence[float | None],
    traced: Sequence[dict[str, Any]],
    everyones: Sequence[dict[str, Any]],
    evaluation: dict[str, float],
    status: str,
    plan: ShardPlan | None,
) -> dict[str, Any]:
    """The content of ``summary.json``.

    Args:
        settings: The run's settings.
        parameters: Parameters of the model.
        steps: Steps of the run, including those before a resume.
        rows: Metrics of the steps since the start or the resume: rates and bytes are of these.
        losses: Losses of all steps of the run, including those before a resume; None if not finite.
        traced: Shares of hidden time by tier, of every traced step.
        everyones: Wire log (``traffic``) and ``memory`` of every rank.
        evaluation: Losses with decoded and with exact weights.
        status: ``finished``, or why the run was stopped before.
        plan: The stage's plan; None for stock ZeRO-3.
    """
    sizes, accumulation = settings.numels, settings["train"]["grad_accumulation"]
    itemsize, grid = settings.itemsize, settings.layout.data_grid
    traffic = _summed(rank["traffic"] for rank in everyones)
    raw = sum(row["raw_bytes"] for row in traffic)
    wire = sum(row["wire_bytes"] for row in traffic)
    compressed = sum(row["raw_bytes"] for row in traffic if row["codec"] != "none")
    memory = {name: max(rank["memory"].get(name, 0) for rank in everyones) for name in everyones[0]["memory"]}
    buffers = buffers_of(settings)
    planned = (
        plan_memory(plan, sizes, itemsize=itemsize, accumulation=accumulation, buffers=buffers)
        if plan is not None
        else []
    )
    comparable = settings.layout.pipeline == 1  # ZeRO-3 has no pipeline stages to compare with
    first, last, window = ends(losses)
    fetches = _fetches(traffic, plan, sizes, itemsize, len(rows) * accumulation, settings.world_size)
    return {
        "status": status,
        "steps": steps,
        "steps_here": len(rows),
        "loss_first": first,
        "loss_last": last,
        "loss_window": window,
        "tokens_per_s": statistics.median(row["tokens_per_s"] for row in rows) if rows else None,
        "tflops_per_rank": statistics.median(row["tflops_per_rank"] for row in rows) if rows else None,
        "step_s_median": statistics.median(row["step_s"] for row in rows) if rows else None,
        "model": settings["model"]["name"],
        "parameters": parameters,
        "world_size": settings.world_size,
        "grid": {tier: settings.grid.size(tier) for tier in settings.grid.tiers},
        "preset": settings.preset,
        "tensor_parallel": settings.layout.tensor,
        "sequence_parallel": settings.sequence.tensor,
        "pipeline_parallel": settings.layout.pipeline,
        "accumulation": accumulation,
        "traffic": traffic,
        "traced": _traced(traced),
        "compressed_share": compressed / raw if raw else 0.0,
        "ratio": raw / wire if wire else None,
        "memory": memory,
        "transient": {state.name: state.bytes for state in planned if state.name.startswith("transient")},
        "zero3": {
            "computed": True,
            "fetches": fetches,
            "traffic": traffic_dicts(
                zero3_traffic(grid, sizes, itemsize=itemsize, accumulation=accumulation, fetches=fetches)
            )
            if comparable
            else [],
            "memory": memory_dicts(zero3_memory(grid, sizes, itemsize=itemsize, buffers=buffers)) if comparable else [],
        },
        "eval": evaluation,
        "versions": {"python": platform.python_version(), **_versions("hzero", "torch", "deepspeed", "transformers")},
    }


def ends(losses: Sequence[float | None]) -> tuple[float | None, float | None, int]:
    """First and last loss, means over the steps at either end, and the number of those steps; None without a step.

    A loss of None was not finite, and neither is a mean with it.
    """
    known = [math.nan if loss is None else loss for loss in losses]
    window = loss_window(len(known))
    if not known:
        return None, None, window
    return statistics.fmean(known[:window]), statistics.fmean(known[-window:]), window


def loss_window(steps: int) -> int:
    """Steps at either end of a run whose mean is its first and its last loss."""
    return max(min(WINDOW, steps // 2), 1)


def _fetches(
    traffic: Sequence[dict[str, Any]],
    plan: ShardPlan | None,
    sizes: Sequence[int],
    itemsize: int,
    micro_steps: int,
    world: int,
) -> float:
    """How often a micro-step gathered the whole model, by the innermost tier's log; 2 (forward, backward) without a log.

    DeepSpeed keeps parameters that are used again soon (``stage3_max_reuse_distance``), so a small model is gathered once.
    Plain ZeRO-3 would gather as often.
    """
    hops = (plan.fetch_hops() if plan.resident else plan.gather_hops()) if plan is not None else ()
    seen = [row for row in traffic if hops and (row["role"], row["tier"]) == ("weights", hops[-1].tier)]
    if plan is None or not seen or not micro_steps:
        return 2.0
    tier = hops[-1].tier
    once = sum(sizes) * itemsize * (plan.grid.size(tier) - 1) / plan.grid.size(tier) * world
    return float(seen[0]["raw_bytes"] / once / micro_steps)


def _summed(logs: Any) -> list[dict[str, Any]]:
    total: dict[tuple[str, str, str], dict[str, Any]] = {}
    for log in logs:
        for row in log:
            into = total.setdefault((row["role"], row["tier"], row["codec"]), {**row, **dict.fromkeys(_COUNTS, 0)})
            for name in _COUNTS:
                into[name] += row[name]
    return [total[key] for key in sorted(total, key=lambda k: (_SENT.index(k[0]), TIERS.index(k[1]), k[2]))]


def _traced(steps: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By tier: seconds per traced step with a hop in flight, and the shares of all these seconds."""
    means: dict[str, dict[str, float]] = {}
    for tier in TIERS:
        found = [step[tier] for step in steps if tier in step]
        if seconds := sum(share["wire_s"] for share in found):
            hidden = {
                name: sum(share[name] * share["wire_s"] for share in found) / seconds
                for name in ("behind_compute", "behind_tiers")
            }
            means[tier] = {"wire_s": seconds / len(steps), **hidden}
    return means


_COUNTS = ("hops", "elements", "payload_bytes", "wire_bytes", "raw_bytes", "seconds", "hidden_seconds")


def _versions(*names: str) -> dict[str, str]:
    def of(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return "from a checkout, not installed"

    return {name: of(name) for name in names}


def print_summary(summary: dict[str, Any], console: Console | None = None) -> None:
    """Shows a summary as tables: the run, bytes by tier and role against plain ZeRO-3, memory per rank."""
    console = console or Console(soft_wrap=False, width=None)
    console.print(_run_table(summary))
    head = [name if name in ("role", "tier", "codec") else f"*{name}" for name in TRAFFIC_HEAD]
    console.print(
        table_of(
            "bytes received per step, all ranks together (hidden: share of the hops' time in which nobody waited)",
            head,
            traffic_rows(summary),
        )
    )
    if summary.get("traced"):
        console.print(_traced_table(summary))
    if summary.get("memory"):
        console.print(_memory_table(summary))


def _run_table(summary: dict[str, Any]) -> Table:
    table = Table(title=f"{summary['model']}, preset {summary['preset']}: {summary['status']}", show_header=False)
    first, last = summary.get("loss_first"), summary.get("loss_last")
    rows = [
        ("steps", f"{summary['steps']:,}"),
        ("loss, first and last", f"{_figure(first)} → {_figure(last)} (means of {summary['loss_window']} steps)"),
        ("parameters", f"{summary['parameters']:,}"),
    ]
    resumed = summary["steps"] - summary["steps_here"]
    if summary.get("tokens_per_s"):
        if resumed:
            rows.append(("rates and bytes", f"of the {summary['steps_here']:,} steps after step {resumed:,}"))
        rows += [
            ("tokens/s", f"{summary['tokens_per_s']:,.0f} (median)"),
            ("TFLOPS per rank", f"{summary['tflops_per_rank']:.3g} (median)"),
            ("step", f"{summary['step_s_median']:.3f} s (median)"),
        ]
    if evaluation := summary.get("eval"):
        rows += [
            ("evaluation loss, decoded weights", _figure(evaluation["loss_decoded"])),
            ("evaluation loss, exact weights", _figure(evaluation["loss_exact"])),
        ]
    if summary.get("ratio"):
        rows += [
            ("share of bytes compressed", f"{summary['compressed_share']:.1%}"),
            ("compression of all traffic", f"{summary['ratio']:.2f} x"),
        ]
    for row in rows:
        table.add_row(*row)
    return table


def _figure(loss: float | None) -> str:
    return "none" if loss is None else f"{loss:.4f}"


TRAFFIC_HEAD = ("role", "tier", "codec", "hops/step", "hidden", "bytes", "ratio", "ZeRO-3 (computed)")


def zero3_bytes(summary: dict[str, Any]) -> dict[tuple[str, str], float]:
    """Bytes per step that all ranks together would receive under plain ZeRO-3, by role and tier."""
    return {
        (row["role"], row["tier"]): row["wire_bytes"] * summary["world_size"] for row in summary["zero3"]["traffic"]
    }


def traffic_rows(summary: dict[str, Any]) -> list[tuple[str, ...]]:
    """The cells under `TRAFFIC_HEAD`: bytes that all ranks together received per step, and would under plain ZeRO-3."""
    steps, world = max(summary.get("steps_here", 0), 1), summary["world_size"]
    stock = zero3_bytes(summary)
    own: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in summary["traffic"]:
        own.setdefault((row["role"], row["tier"]), []).append(row)
    rows: list[tuple[str, ...]] = []
    for key in sorted({**stock, **own}, key=lambda k: (_SENT.index(k[0]), TIERS.index(k[1]))):  # type: ignore[arg-type]
        plain = size_text(stock[key]) if key in stock else ""
        for row in own.get(key, ()):
            ratio = row["raw_bytes"] / row["wire_bytes"] if row["wire_bytes"] else 1.0
            hops = f"{row['hops'] / steps / world:.1f}"
            hidden = f"{row.get('hidden_seconds', 0) / row['seconds']:.0%}" if row["seconds"] else ""
            cells = (row["codec"], hops, hidden, size_text(row["wire_bytes"] / steps), f"{ratio:.2f}")
            rows.append((*key, *cells, plain))
            plain = ""  # once, in the first of the rows of several codecs
        if key not in own and stock[key]:
            rows.append((*key, "", "", "", "", "", plain))
    return rows


TRACED_HEAD = ("tier", "hops in flight", "hidden behind compute", "behind other tiers")


def traced_rows(summary: dict[str, Any]) -> list[tuple[str, ...]]:
    """The cells under `TRACED_HEAD`: seconds per traced step with a hop in flight on rank 0, and what they hid behind."""
    return [
        (tier, f"{found['wire_s']:.3f} s", f"{found['behind_compute']:.0%}", f"{found['behind_tiers']:.0%}")
        for tier, found in summary.get("traced", {}).items()
    ]


def _traced_table(summary: dict[str, Any]) -> Table:
    title = "time per traced step, rank 0 (a second may count in both shares)"
    return table_of(title, _to_the_right(TRACED_HEAD), traced_rows(summary))


MEMORY_HEAD = ("state", "bytes", "ZeRO-3 (computed)")


def memory_rows(summary: dict[str, Any]) -> list[tuple[str, ...]]:
    """The cells under `MEMORY_HEAD`: maximum over the ranks of every state, and transient buffers as planned."""
    stock = {row["name"]: row["bytes"] for row in summary["zero3"]["memory"]}
    rows: list[tuple[str, ...]] = []
    for name, count in {**summary["memory"], **summary.get("transient", {})}.items():
        shown = f"{size_text(count)} (planned)" if name.startswith("transient") else size_text(count)
        rows.append((name, shown, size_text(stock[name]) if name in stock else ""))
    return rows


def _memory_table(summary: dict[str, Any]) -> Table:
    return table_of("memory of states, maximum over the ranks", _to_the_right(MEMORY_HEAD), memory_rows(summary))


def _to_the_right(head: Sequence[str]) -> list[str]:
    """A table's head whose columns but the first are aligned to the right."""
    return [head[0], *(f"*{name}" for name in head[1:])]
