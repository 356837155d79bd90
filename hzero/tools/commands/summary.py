"""The summary of a run, as JSON and as text: bytes by tier next to ZeRO-3's, loss, speed and memory."""

from __future__ import annotations

import json
import statistics
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from transformers import Trainer

from hzero.config import NET_TIERS, TIERS
from hzero.errors import size_text
from hzero.files import replacing
from hzero.program.collectives import Scheme, step_traffic
from hzero.program.shards import ShardPlan
from hzero.tools.experiment import Experiment

#: Maximum number of steps in the means of the first and last losses.
WINDOW = 10


def summary_of(
    experiment: Experiment,
    trainer: Trainer,
    step_seconds: Sequence[float],
    ranks: Sequence[tuple[Sequence[dict[str, Any]], dict[str, int]]],
    eval_loss: float | None,
) -> dict[str, Any]:
    """The content of ``summary.json``.

    Args:
        experiment: The experiment.
        trainer: The trainer. Its state has the losses of all steps, including steps before a resume. Its model has the
            parameters of one rank; a tensor group divides some of them. A resume on other ranks adapts its accumulation.
        step_seconds: Seconds of each step since the start or the resume. Bytes are counted over the same steps.
        ranks: Wire log and bytes of every state, by rank.
        eval_loss: Loss of the final evaluation, with exact weights; None if the run has stopped early.
    """
    train, here, world, itemsize = experiment["train"], len(step_seconds), experiment.world_size, experiment.itemsize
    accumulation, numels = trainer.args.gradient_accumulation_steps, [p.ds_numel for p in trainer.model.parameters()]
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    traffic = _per_step([log for log, _ in ranks], max(here, 1))
    fetches = _fetches(experiment.plan, sum(numels) * itemsize * world, traffic, accumulation)
    about: Any = {"itemsize": itemsize, "accumulation": accumulation, "fetches": fetches}
    plain = step_traffic(Scheme("deepspeed"), experiment.data_parallel, numels, **about)
    window = max(min(WINDOW, len(losses) // 2), 1)
    tokens = train["micro_batch"] * accumulation * experiment.replicas * experiment["model"]["seq_length"]
    return {
        "status": "stopped" if eval_loss is None else "finished",
        "model": experiment["model"]["name"],
        "parameters": sum(experiment.architecture.numels),
        "preset": experiment.preset,
        "world_size": world,
        "grid": {tier: experiment.grid.size(tier) for tier in experiment.grid.tiers},
        "steps": trainer.state.global_step,
        "steps_here": here,
        "loss_first": statistics.fmean(losses[:window]) if losses else None,
        "loss_last": statistics.fmean(losses[-window:]) if losses else None,
        "loss_window": window,
        "losses": losses,
        "eval_loss": eval_loss,
        "step_s": statistics.median(step_seconds) if here else None,
        "tokens_per_s": tokens / statistics.median(step_seconds) if here else None,
        # Received by all ranks together.
        "bytes_per_step": traffic,
        "zero3_bytes_per_step": [
            {"role": row.role, "tier": row.tier, "received": row.wire_bytes * world} for row in plain if row.used
        ],
        "fetches_per_micro_step": fetches,
        "memory": {name: max(memory.get(name, 0) for _, memory in ranks) for name in ranks[0][1]},
    }


def _per_step(logs: Iterable[Sequence[dict[str, Any]]], steps: int) -> list[dict[str, Any]]:
    """Bytes that all ranks together received per step, by tier, state and codec, with and without the codec."""
    total: dict[tuple[int, str, str], list[int]] = {}
    for row in (row for log in logs for row in log):
        sums = total.setdefault((TIERS.index(row["tier"]), row["role"], row["codec"]), [0, 0])
        sums[0] += row["wire_bytes"]
        sums[1] += row["raw_bytes"]
    return [
        {"tier": TIERS[tier], "role": role, "codec": codec, "received": wire / steps, "without_codec": raw / steps}
        for (tier, role, codec), (wire, raw) in sorted(total.items())
    ]


def _fetches(plan: ShardPlan | None, whole: int, traffic: Sequence[dict[str, Any]], accumulation: int) -> float:
    """Gathers of the whole model per micro-batch, from the innermost tier's log; without a log 2, for forward and backward.

    DeepSpeed keeps parameters that are used again soon (``stage3_max_reuse_distance``), so a small model is gathered once.
    Plain ZeRO-3 would gather as often.
    """
    if plan is None:
        return 2.0
    hops = plan.unshard_hops() if plan.keeps_copies else plan.gather_hops()
    inner = hops[-1].tier if hops else None
    seen = sum(row["without_codec"] for row in traffic if (row["role"], row["tier"]) == ("weights", inner))
    if inner is None or not seen:
        return 2.0
    return float(seen / (whole * (1 - 1 / plan.grid.size(inner))) / accumulation)


def closing_line(summary: dict[str, Any]) -> str:
    """Bytes received per step over the slowest links, and ZeRO-3's computed bytes."""
    tiers = [tier for tier in NET_TIERS if summary["grid"].get(tier, 1) > 1]
    where = "between nodes " if tiers else ""

    def total(rows: Sequence[dict[str, Any]]) -> str:
        return size_text(sum(row["received"] for row in rows if not tiers or row["tier"] in tiers))

    received = total(summary["bytes_per_step"]) if summary["bytes_per_step"] else "not counted"
    return f"received {where}per step: {received}; ZeRO-3 would receive {total(summary['zero3_bytes_per_step'])}"


def lines(summary: dict[str, Any]) -> list[str]:
    """The summary as text of less than 80 columns. The table of bytes by tier is first."""
    rows = [("tier", "state", "codec", "received per step", "ZeRO-3 (computed)")]
    plain = {(row["tier"], row["role"]): size_text(row["received"]) for row in summary["zero3_bytes_per_step"]}
    for row in summary["bytes_per_step"]:
        zero3 = plain.pop((row["tier"], row["role"]), "")  # only in the first row if a state has several codecs
        rows.append((row["tier"], row["role"], row["codec"], size_text(row["received"]), zero3))
    rows += [(tier, role, "", "", zero3) for (tier, role), zero3 in plain.items()]
    table = [f"{tier:15}{role:11}{codec:7}{received:>17}{zero3:>19}" for tier, role, codec, received, zero3 in rows]
    texts = [f"{summary['steps']:,} steps"]
    if summary["losses"]:
        first, last, window = (summary[f"loss_{which}"] for which in ("first", "last", "window"))
        texts[0] += f", loss {first:.3f} -> {last:.3f} (means of {window} steps)"
    if summary["eval_loss"] is not None:
        texts[0] += f", evaluation {summary['eval_loss']:.3f}"
    if summary["steps_here"]:
        texts.append(f"{summary['tokens_per_s']:,.0f} tokens/s, {summary['step_s']:.3f} s per step (medians)")
    if states := ", ".join(f"{name} {size_text(size)}" for name, size in summary["memory"].items() if size):
        texts.append(f"memory of states, maximum over the ranks: {states}")
    return [*table, "", *(line for text in texts for line in textwrap.wrap(text, 78, subsequent_indent="  "))]


def write(summary: dict[str, Any], folder: Path) -> None:
    """Writes ``summary.json``, with null instead of numbers that are not finite."""
    with replacing(folder / "summary.json") as file:
        json.dump(json.loads(json.dumps(summary), parse_constant=lambda _: None), file, indent=1)
