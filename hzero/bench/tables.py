"""Tables of one measurement: targets, times, bytes, memory, and where the time goes."""

from __future__ import annotations

from collections.abc import Mapping

from hzero.bench.markdown import NONE, count, loss, ratio, seconds, size, table
from hzero.bench.measured import Measurement, common_loss, time_to, wire_seconds
from hzero.bench.rows import StepsRow, Tier
from hzero.bench.targets import departs, differences, outcomes

#: What is said of the trace of a row, by `Measurement.key`.
Traces = Mapping[tuple[str, str, str], str]
#: What ratios are taken to.
STOCK = "zero3-deepspeed"


def targets(measurement: Measurement) -> str:
    """Targets beside what was measured, and plain words on those that are missed."""
    found = outcomes(measurement)
    parts = []
    if departs(measurement):
        parts.append(
            f"The targets are set for another setting; this measurement has {', '.join(departs(measurement))}."
        )
    head = ("quantity", "against", "target", "found", "verdict", "where the target comes from")
    rows = [(one.what, one.against, one.limit, one.found, one.verdict, one.source) for one in found]
    parts.append(table(head, rows, left=6))
    missed = [one for one in found if one.met is False]
    if missed:
        traced = [row.label for row in measurement.rows if row.trace]
        parts.append(
            "Missed: "
            + "; ".join(f"{one.what} against {one.against} ({one.found}, target {one.limit})" for one in missed)
            + f". Where the time goes is under [{heading(measurement)}](#{anchor(heading(measurement))})"
            + (f"; traces are named there for {', '.join(traced)}." if traced else ".")
        )
    elif all(one.met for one in found):
        parts.append("Every target is met.")
    return "\n\n".join(parts)


def heading(measurement: Measurement) -> str:
    """Heading of a measurement's part."""
    return f"Measurement {measurement.title}"


def anchor(text: str) -> str:
    """Where GitHub puts a heading."""
    kept = "".join(letter for letter in text.lower() if letter.isalnum() or letter in " -_")
    return kept.replace(" ", "-")


def setting(measurement: Measurement) -> str:
    """What the peers of a measurement did, in a sentence."""
    row, config = measurement.rows[0], measurement.config
    rates = config.cluster.rates_mbit
    of = {"gcd": "a rank", "gpu": "a rank", "node": "a node's trunk"}
    shaped = ", ".join(f"{tier} {rates[tier]:g} Mbit/s {of[tier]}" for tier in row.tiers if rates.get(tier))
    timed, warm = len(row.step_s), len(row.losses) - len(row.step_s)
    return (
        f"{config.cluster.text()}, {row.world_size} ranks; {shaped or 'no tier shaped'}; {row.parameters:,} parameters, "
        f"{config.train.dtype}, micro-batch {config.train.micro_batch}, accumulation {config.train.accumulation}, "
        f"{row.tokens_per_step:,} tokens a step, seed {config.train.seed}; reduce-scatter {config.reduce_scatter}; "
        f"{timed} timed steps of each peer in {config.rounds} interleaved rounds after {warm} warm-up steps."
    )


def times(measurement: Measurement) -> str:
    """Step times, rates and losses by peer."""
    stock = measurement.row(STOCK)
    equal = min(len(row.losses) for row in measurement.rows)
    reached = common_loss(measurement.rows)
    head = (
        *("peer", "step time, s (median)", "min", "max", f"ratio to {stock.label if stock else STOCK}", "tokens/s"),
        *(f"loss at step {equal}", f"s to loss {reached:.4f}" if reached is not None else "s to a common loss"),
    )
    rows = []
    for row in measurement.rows:
        until = time_to(row, reached) if reached is not None else None
        quotient = row.median_s / stock.median_s if stock else None
        least, most = seconds(min(row.step_s)), seconds(max(row.step_s))
        rate = count(row.tokens_per_s)
        cells = [row.label, seconds(row.median_s), least, most, ratio(quotient), rate, loss(row.losses[equal - 1])]
        rows.append([*cells, NONE if until is None else f"{until:.1f}"])
    return table(head, rows)


def traffic(measurement: Measurement) -> str:
    """Bytes of a step by peer and tier: measured, planned, and with an ideal reduce-scatter."""
    tiers = measurement.rows[0].tiers
    rows = []
    for row in measurement.rows:
        apart = differences(row)
        cells = [row.label]
        for tier in tiers:
            kinds = (row.bytes.measured, row.bytes.planned, row.bytes.ideal)
            off = f" ({apart[tier]:+.1%})" if tier in apart else ""
            cells.append(" / ".join(f"{kind.get(tier, 0) / 1e6:,.2f}" for kind in kinds) + off)
        rows.append([*cells, f"{row.fetches:.2f}"])
    return table(("peer", *(f"{tier}, MB" for tier in tiers), "gathers a micro-step"), rows)


def memory(measurement: Measurement) -> str:
    """Memory of a rank by peer and state."""
    head = ("peer", "weights", "gradients", "optimizer", "states in all", "kept between steps", "passing in a step")
    rows = []
    for row in measurement.rows:
        states = [row.memory.weights, row.memory.gradients, row.memory.optimizer]
        rows.append([row.label, *map(size, states), size(sum(states)), size(row.memory.kept), size(row.memory.peak)])
    return table(head, rows)


def where_time_goes(measurement: Measurement, traces: Traces) -> str:
    """Step time beside the least time of the wires, and what was traced."""
    tiers = measurement.rows[0].tiers
    columns = [f"{tier} wires, s" for tier in tiers]
    head = ["peer", "step time, s", *columns, "slowest tier, s", "sum of tiers, s", "step time over slowest tier"]
    rows = []
    for row in measurement.rows:
        wires = wire_seconds(row)
        largest = max(wires.values(), default=None)
        cells = [seconds(wires.get(tier)) for tier in tiers]
        total = sum(wires.values()) if wires else None
        over = f"{row.median_s / largest:.2f}" if largest else NONE
        rows.append([row.label, seconds(row.median_s), *cells, seconds(largest), seconds(total), over])
    parts = [table(head, rows)]
    hops = [row for row in measurement.rows if row.hops_s is not None]
    if hops:
        parts.append(
            "Seconds a step that hops of a tier were under way (mean over the ranks; tiers overlap each other and "
            "compute, and a hop includes its waiting for other ranks):"
        )
        parts.append(table(("peer", *tiers), [_hops(row, tiers) for row in hops]))
    traced = [row for row in measurement.rows if row.breakdown is not None or row.trace is not None]
    if traced:
        parts.append("One traced step on rank 0, in seconds; collectives may be under way beside operators:")
        head = ["peer", "step", "in operators", "a collective under way", "trace"]
        parts.append(table(head, [_traced(row, traces.get(measurement.key(row), NONE)) for row in traced]))
    return "\n\n".join(parts)


def _hops(row: StepsRow, tiers: tuple[Tier, ...]) -> list[str]:
    assert row.hops_s is not None
    return [row.label, *(seconds(row.hops_s.get(tier)) for tier in tiers)]


def _traced(row: StepsRow, trace: str) -> list[str]:
    parts = row.breakdown
    spent = [parts.step, parts.operators, parts.collectives] if parts else [None, None, None]
    return [row.label, *map(seconds, spent), trace]


def measurement_part(measurement: Measurement, traces: Traces) -> str:
    """All tables of a measurement under its heading.

    Args:
        measurement: The measurement.
        traces: What is said of the traces of rows, by `Measurement.key`.
    """
    return "\n\n".join(
        [
            f"### {heading(measurement)}",
            setting(measurement),
            times(measurement),
            "MB that all ranks send in one optimizer step: measured / planned / with an ideal reduce-scatter (measured over "
            "planned). Measured bytes are counted by the emulated interfaces and have the headers of Ethernet, IP and TCP "
            "(66 bytes a packet of at most 9,000) and the acknowledgements in them; the other two are payloads alone. "
            "DeepSpeed keeps the last weights of forward for backward and gathers weights less than twice a micro-step; "
            "planned bytes have the gathers that took place (last column).",
            traffic(measurement),
            "Memory of a rank, the largest over the ranks. States are the most that a step holds of each, narrow copies and "
            "accumulators among them; what lives between two steps is less where these are freed, and more by buffers that an "
            "engine keeps. Passing is the most that one step allocates beyond, activations among it (traced, rank 0).",
            memory(measurement),
            "Where the time goes. The least time of a tier's wires is its measured bytes, spread evenly over its links, at "
            "the rate of the link; the step takes at least that of the slowest tier, and the sum where nothing overlaps.",
            where_time_goes(measurement, traces),
        ]
    )
