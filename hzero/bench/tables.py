"""Tables of one measurement: targets, times, bytes, memory, and where the time goes."""

from __future__ import annotations

from collections.abc import Mapping

from hzero.bench.markdown import NONE, count, loss, names, ratio, seconds, size, table
from hzero.bench.measured import (
    STOCK,
    Measurement,
    common_loss,
    core_bound,
    mean,
    processor_seconds,
    sends_what_it_has,
    time_to,
    wire_seconds,
)
from hzero.bench.rows import StepsRow
from hzero.bench.targets import BYTES_TOLERANCE, SUBJECT, Finding, departs, differences, furthest, outcomes

#: What is said of the trace of a row, by suite, measurement and peer.
Traces = Mapping[tuple[str, str, str], str]
#: Share of the slowest tier's time from which on the processor's is called near.
NEAR = 0.8


def targets(measurements: list[Measurement]) -> str:
    """Targets beside what was measured, and plain words on those that are missed.

    Args:
        measurements: Of the same work with different reduce-scatters; the first is the one that counts.
    """
    first, found = measurements[0], outcomes(measurements)
    parts = []
    if departs(first):
        parts.append(f"The targets are set for another setting; this measurement has {', '.join(departs(first))}.")
    columns = [
        (f"{one.config.reduce_scatter} ({one.title})" if len(measurements) > 1 else "found") for one in measurements
    ]
    head = ("quantity", "against", "target", *columns, "where the target comes from")
    rows = [(one.what, one.against, one.limit, *map(_cell, one.found), one.source) for one in found]
    parts.append(table(head, rows, left=len(head)))
    parts += _handicap(measurements)
    for index, measurement in enumerate(measurements):
        missed = [one for one in found if one.found[index].met is False]
        under = f"[{heading(measurement)}](#{anchor(heading(measurement))})"
        if missed:
            what = [f"{one.what} against {one.against} ({one.found[index].text}, {one.limit})" for one in missed]
            parts.append(f"Missed in {measurement.title}: {'; '.join(what)}. Where the time goes is under {under}.")
        elif all(one.found[index].met for one in found if one.limit != "not judged"):
            parts.append(f"Every target is met in {measurement.title}.")
    return "\n\n".join(parts + _beforehand(measurements))


def _beforehand(measurements: list[Measurement]) -> list[str]:
    """Says where a plan of two gathers a micro-step, which is made before anything ran, is further off than the target."""
    found = [off for one in measurements if (off := furthest(one, twice=True)) is not None]
    difference, row, tier = max(found, key=lambda entry: abs(entry[0]), default=(0.0, None, ""))
    if row is None or abs(difference) <= BYTES_TOLERANCE:
        return []
    return [
        f"What `hzero plan` says beforehand, with two gathers a micro-step, is up to {difference:+.1%} off ({row.label}, tier "
        f"{tier}): DeepSpeed keeps the last weights of forward for backward, which saves {1 - (row.fetches or 2) / 2:.0%} of "
        "the gathers of this small model, and little of a deep one's."
    ]


def _cell(finding: Finding) -> str:
    verdict = "**not met**" if finding.met is False else finding.verdict
    return f"{finding.text}, {verdict}" if verdict else finding.text


def _handicap(measurements: list[Measurement]) -> list[str]:
    """Says where a reduce-scatter makes peers send more than they have to, and the subject not."""
    found = []
    for measurement in measurements:
        subject = measurement.row(SUBJECT)
        others = [row.label for row in measurement.rows if row is not subject and _sends_more(row)]
        if subject is None or not others or _sends_more(subject):
            continue
        many = f"{len(others)} of the {len(measurement.rows)} peers pay"
        if measurement.config.reduce_scatter == "gloo":
            found.append(
                f"A handicap of the peers in {measurement.title}: gloo's reduce-scatter sends its bytes twice, which {many} and "
                f"{subject.label} does not, each of whose reductions is an all-to-all of its own. So a part of the step "
                "times of this column is the reduce-scatter and not the scheme; the columns of other reduce-scatters, where "
                "they were measured, and the bytes with an ideal reduce-scatter below are without that."
            )
        else:
            found.append(
                f"In {measurement.title} the reduce-scatter sends more over some tier than a ring of partial sums, which {many} "
                f"and {subject.label} does not."
            )
    return found


def _sends_more(row: StepsRow) -> bool:
    return any(row.bytes.planned.get(tier, 0) > 1.01 * row.bytes.ideal.get(tier, 0) for tier in row.tiers)


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
    timed, warm = len(row.step_s), len(row.losses) - len(row.step_s)
    return (
        f"{config.cluster.text()}, {row.world_size} ranks; {config.cluster.rates_text()}; {row.parameters:,} parameters, "
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
        f"loss at step {equal}",
        *([f"steps x step time until loss {reached:.4f}, s"] if reached is not None else []),
    )
    rows = []
    for row in measurement.rows:
        quotient = row.median_s / stock.median_s if stock else None
        least, most = seconds(min(row.step_s)), seconds(max(row.step_s))
        rate = count(row.tokens_per_s)
        cells = [row.label, seconds(row.median_s), least, most, ratio(quotient), rate, loss(row.losses[equal - 1])]
        if reached is not None:
            until = time_to(row, reached)
            cells.append(NONE if until is None else f"{until:.1f}")
        rows.append(cells)
    return table(head, rows)


def same_losses(measurement: Measurement) -> str:
    """How far the losses of peers without codecs are apart after the same steps, and the others from their mean."""
    equal = min(len(row.losses) for row in measurement.rows)
    at = {row.label: row.losses[equal - 1] for row in measurement.rows}
    bare = [row.label for row in measurement.rows if sends_what_it_has(row)]
    known = [value for label in bare if (value := at[label]) is not None]
    middle = mean(known)
    if middle is None or len(known) < 2:
        return ""
    text = (
        f"Losses of the last step that all took, {equal}, of the {len(known)} peers without codecs, which should differ by "
        f"rounding alone: {min(known):.5f} to {max(known):.5f}, a spread of {max(known) - min(known):.5f}."
    )
    if len(known) < len(bare):
        text += f" Not finite: {names([label for label in bare if at[label] is None])}."
    coded = [row.label for row in measurement.rows if row.label not in bare]
    apart = [f"{label} {'not finite' if (value := at[label]) is None else f'{value - middle:+.5f}'}" for label in coded]
    return f"{text} From their mean: {', '.join(apart)}." if apart else text


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
        rows.append([*cells, NONE if row.fetches is None else f"{row.fetches:.2f}"])
    parts = [table(("peer", *(f"{tier}, MB" for tier in tiers), "gathers a micro-step"), rows)]
    fewer = [row for row in measurement.rows if row.fetches is not None and row.fetches < 1.995]
    if fewer:
        kept = max((2 - (row.fetches or 0)) / 2 for row in fewer)
        text = (
            "DeepSpeed keeps the last weights of forward for backward, so its engine, hzero's too, gathers weights less than "
            "twice a micro-step; planned bytes have the gathers that took place."
        )
        if any(row.engine == "fsdp" for row in measurement.rows):
            text += (
                " FSDP gathers these twice, since its root is released after forward here: it pays about "
                f"{kept:.0%} of the gathers more for that, which is a choice of the comparison and grows small in deep models."
            )
        parts.append(text)
    return "\n\n".join(parts)


def memory(measurement: Measurement) -> str:
    """Memory of a rank by peer and state."""
    head = ("peer", "weights", "gradients", "optimizer", "states in all", "kept between steps", "passing in a step")
    rows = []
    for row in measurement.rows:
        states = [row.memory.weights, row.memory.gradients, row.memory.optimizer]
        rows.append([row.label, *map(size, states), size(sum(states)), size(row.memory.kept), size(row.memory.peak)])
    return table(head, rows)


def where_time_goes(measurement: Measurement, traces: Traces) -> str:
    """Step time beside the least time of wires and processor, and what was traced."""
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
        cells = [row.label, seconds(row.median_s), *cells, seconds(largest), seconds(total), over]
        rows.append([*cells, seconds(processor_seconds(row))])
    parts = [table([*head, "processor, s"], rows), _pace(measurement)]
    traced = [row for row in measurement.rows if row.breakdown is not None or row.trace is not None]
    if traced:
        parts.append("One traced step on rank 0, in seconds; collectives may be under way beside operators:")
        head = ["peer", "step", "in operators", "a collective under way", "trace"]
        said = [traces.get((row.suite, row.measurement, row.peer), NONE) for row in traced]
        parts.append(table(head, [_traced(row, trace) for row, trace in zip(traced, said)]))
    return "\n\n".join(part for part in parts if part)


def _pace(measurement: Measurement) -> str:
    """Of which peers the cores, and not the wires, set the pace."""
    shares = {row.label: share for row in measurement.rows if (share := core_bound(row))}
    if not shares:
        return ""
    above = [f"{label} ({share:.0%})" for label, share in shares.items() if share > 1]
    near = [f"{label} ({share:.0%})" for label, share in shares.items() if NEAR <= share <= 1]
    parts = (
        [f"Processor over slowest tier is above 100 % for {names(above)}: there the cores set the pace."]
        if above
        else []
    )
    parts += [f"It is near, from {NEAR:.0%} on, for {names(near)}: there cores and wires do."] if near else []
    if not parts:
        label = max(shares, key=lambda name: shares[name])
        return (
            f"The processor's time is below {NEAR:.0%} of the slowest tier's for every peer (most for {label}, "
            f"{shares[label]:.0%}): the wires set the pace."
        )
    rest = len(shares) - len(above) - len(near)
    return " ".join([*parts, *([f"For the others ({rest}) the wires do."] if rest else [])])


def _traced(row: StepsRow, trace: str) -> list[str]:
    parts = row.breakdown
    spent = [parts.step, parts.operators, parts.collectives] if parts else [None, None, None]
    return [row.label, *map(seconds, spent), trace]


def measurement_part(measurement: Measurement, traces: Traces) -> str:
    """All tables of a measurement under its heading.

    Args:
        measurement: The measurement.
        traces: What is said of the traces of rows.
    """
    parts = [
        f"### {heading(measurement)}",
        setting(measurement),
        times(measurement),
        same_losses(measurement),
        "MB that all ranks send in one optimizer step: measured / planned / with an ideal reduce-scatter (measured over "
        "planned). Measured bytes are counted by the emulated interfaces and have headers (66 bytes of a packet of 9,000) and "
        "acknowledgements in them, which make 1 to 2.5 % and more where messages are small; the other two are payloads alone.",
        traffic(measurement),
        "Memory of a rank, the largest over the ranks. States are the most that a step holds of each kind: of weights the "
        "copies in narrower scopes too, of gradients the accumulators and residuals too; gradients of PyTorch's peers are "
        "their shards at the end of backward, and their weights are the float32 masters, which count as optimizer (the copy "
        "that FSDP2 keeps until backward where it reshards to a node is not counted). What lives between two steps is less "
        "where these are freed, and more by buffers that an engine keeps. Passing is the most that one step allocates beyond, "
        "activations among it (traced, rank 0).",
        memory(measurement),
        "Where the time goes. The least time of a tier's wires is what its busiest link carries (of a rank in gcd and gpu, a "
        "node's trunk in node) at the rate of the link; the step takes at least that of the slowest tier, and the sum where "
        "nothing overlaps. Processor is the time for which the step keeps all cores of this machine busy (processor seconds "
        "of all ranks over cores): where it is near or above the slowest tier's time, the cores set the pace and not the "
        "wires.",
        where_time_goes(measurement, traces),
    ]
    return "\n\n".join(part for part in parts if part)
