"""The report of `benchmarks.hybrid`: the table of arXiv 2409.02423 by runs of the trainer.

python -m benchmarks.hybrid_report      # writes benchmarks/reports/DATE-hybrid.md with its rows, and its line in mkdocs.yml
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.calibration import REPORTS
from benchmarks.compare.machine import ROOT
from benchmarks.hybrid import LAYOUTS, SCHEMES
from benchmarks.report.tables import NONE, rate, table
from benchmarks.rows import RESULTS, LayoutRow, Sent, line_of, read_rows
from hzero.formatting import size_text
from hzero.train.summary import ends
from hzero.validation import ConfigError

#: What mkdocs.yml says in front of the first report.
_NAV = "      - How they are made: benchmarks.md\n"


def rows_of(folder: Path) -> list[LayoutRow]:
    """The rows of a results folder, in the order of layouts, schemes and seeds.

    Raises:
        ConfigError: It holds none, or they cannot be read.
    """
    rows = [row for row in read_rows(folder / RESULTS)[0] if isinstance(row, LayoutRow)]
    if not rows:
        raise ConfigError(f"{folder / RESULTS}: found no row of benchmarks.hybrid, expected at least one")
    return sorted(rows, key=lambda row: (list(LAYOUTS).index(row.layout), list(SCHEMES).index(row.scheme), row.seed))


def report(rows: Sequence[LayoutRow]) -> str:
    """The report in Markdown.

    Args:
        rows: In the order of `rows_of`.
    """
    date, machine = max(row.date for row in rows).date().isoformat(), rows[0].machine
    versions = sorted({", ".join(f"{name} {one}" for name, one in row.versions.items()) for row in rows})
    lines = [
        f"# Codecs by parallel dimension, {date}",
        "",
        "The schemes of arXiv 2409.02423 and `hybrid`, trained by `python -m benchmarks.hybrid`. `naive` is `zhybrid` with the "
        "low rate in every role. `docs/presets.md` lists codecs and rates. Evaluations read exact weights. Bytes are those "
        "of the wire log: without the copies that tensor ranks of a stage are given after lossy codecs, and without "
        "DeepSpeed's gather of divided activations (`docs/configuration.md`, *With pipeline stages*).",
        "",
        f"Machine: {machine.cores} cores ({machine.processor}), {size_text(machine.memory_bytes)} of memory, {machine.system}. "
        f"Versions: {'; '.join(versions)}. All ranks share these cores, and no GPU takes part. So a codec costs processor time "
        f"that a GPU would not need, ZFP and MPC most. [The rows]({date}-hybrid.jsonl) have the full configuration of each run.",
    ]
    for group in _groups(rows):
        lines += ["", f"## {_title(group[0])}", "", *([_times(group), ""] if group[0].rates else []), _losses(group)]
        lines += ["", "Bytes that all ranks receive per step, by role and tier:", "", _sent(group)]
    return "\n".join([*lines, ""])


def _groups(rows: Sequence[LayoutRow]) -> list[list[LayoutRow]]:
    """Rows that differ in scheme and seed alone, in the order of layouts; of each those of the cluster first."""
    found: dict[tuple[int, bool, str, int, int, int], list[LayoutRow]] = {}
    for row in rows:
        size = (row.parameters, row.tokens_per_step, len(row.losses))
        key = (list(LAYOUTS).index(row.layout), row.rates is None, row.rates or "", *size)
        found.setdefault(key, []).append(row)
    return [found[key] for key in sorted(found)]


def _title(row: LayoutRow) -> str:
    train = row.config["train"]
    where = f"links of {row.rates} Mbit/s (gcd, gpu, node)" if row.rates else "without emulated links"
    return (
        f"{row.layout}, {where}, {len(row.losses):,} steps; {row.config['model']['name']}, {row.parameters:,} parameters, "
        f"{train['grad_accumulation']} x {train['micro_batch']} sequences per rank, {row.tokens_per_step:,} tokens per step"
    )


def _schemes(rows: Sequence[LayoutRow]) -> dict[str, list[LayoutRow]]:
    return {name: found for name in SCHEMES if (found := [row for row in rows if row.scheme == name])}


def _times(rows: Sequence[LayoutRow]) -> str:
    """Step time and tokens per second: of the seeds' medians the median, and the change against baseline."""
    medians = {name: statistics.median(row.median_s for row in found) for name, found in _schemes(rows).items()}
    base = medians.get("baseline")
    return table(
        ("scheme", "step, s", "min to max, s", "tokens/s", "tokens/s against baseline", "runs"),
        [
            (
                name,
                f"{medians[name]:.3f}",
                f"{min(min(row.timed_s) for row in found):.3f} to {max(max(row.timed_s) for row in found):.3f}",
                rate(found[0].tokens_per_step / medians[name]),
                NONE if base is None else f"{base / medians[name] - 1:+.1%}",
                str(len(found)),
            )
            for name, found in _schemes(rows).items()
        ],
    )


def _losses(rows: Sequence[LayoutRow]) -> str:
    """Loss of each seed at the end of training and of the evaluation behind it, against baseline's of the same seed."""
    seeds = sorted({row.seed for row in rows})
    of = {(row.scheme, row.seed): (_last(row), _nan(row.evaluation)) for row in rows}
    head = ["scheme"]
    for what in ("training", "evaluation"):
        head += [f"{what}, seed {seed}" for seed in seeds] + [f"{what} against baseline"]
    lines = []
    for name in _schemes(rows):
        line = [name]
        for place in (0, 1):
            line += [f"{of[name, seed][place]:.4f}" if (name, seed) in of else NONE for seed in seeds]
            shared = [seed for seed in seeds if (name, seed) in of and ("baseline", seed) in of]
            ratios = [of[name, seed][place] / of["baseline", seed][place] - 1 for seed in shared]
            mean = f"; mean {statistics.fmean(ratios):+.2%}" if len(ratios) > 1 else ""
            line.append((", ".join(f"{one:+.2%}" for one in ratios) or NONE) + mean)
        lines.append(line)
    return table(head, lines)


def _last(row: LayoutRow) -> float:
    """Mean loss of the last steps, as in the trainer's summary; NaN where one of them was not finite."""
    return _nan(ends(row.losses)[1])


def _nan(loss: float | None) -> float:
    return math.nan if loss is None else loss


def _sent(rows: Sequence[LayoutRow]) -> str:
    """Bytes by role and tier, with the codec, of a scheme's first seed."""
    of: dict[str, dict[tuple[str, str], list[Sent]]] = {}
    for name, found in _schemes(rows).items():
        of[name] = {}
        for one in found[0].sent:
            of[name].setdefault((one.role, one.tier), []).append(one)
    keys = sorted({key for sent in of.values() for key in sent})
    return table(
        ["scheme", *(f"{role}, {tier}" for role, tier in keys), "all"],
        [
            [
                name,
                *(
                    f"{size_text(sum(one.wire_bytes for one in sent[key]))} ({', '.join(one.codec for one in sent[key])})"
                    if key in sent
                    else NONE
                    for key in keys
                ),
                size_text(sum(one.wire_bytes for each in sent.values() for one in each)),
            ]
            for name, sent in of.items()
        ],
    )


def with_page(nav: str, date: str) -> str:
    """The text of mkdocs.yml with a line for the report, first of its section; unchanged where it has one."""
    page = f"benchmarks/reports/{date}-hybrid.md"
    if page in nav:
        return nav
    return nav.replace(_NAV, f"{_NAV}      - {date}, codecs by parallel dimension: {page}\n", 1)


def main() -> int:
    """Writes report, rows and the line of the site."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("runs/hybrid"), help="folder (default %(default)s)")
    parser.add_argument("-o", "--out", type=Path, default=REPORTS, help="folder (default: benchmarks/reports)")
    given = parser.parse_args()
    try:
        rows = rows_of(given.results)
    except ConfigError as error:
        print(f"hybrid_report: error: {error}", file=sys.stderr)
        return 2
    date = max(row.date for row in rows).date().isoformat()
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / f"{date}-hybrid.jsonl").write_text("".join(map(line_of, rows)), encoding="utf-8")
    (given.out / f"{date}-hybrid.md").write_text(report(rows), encoding="utf-8")
    if given.out == REPORTS:
        nav = ROOT / "mkdocs.yml"
        nav.write_text(with_page(nav.read_text(encoding="utf-8"), date), encoding="utf-8")
    print(given.out / f"{date}-hybrid.md")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
