"""Compares the setting that `hzero plan --tune` chooses with the best of all settings, each of which was measured.

make bench ARGS="suite=tune"                      # measures them, on the emulated cluster
python -m benchmarks.tune_report runs/bench       # writes benchmarks/reports/DATE-tune.md and its rows
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.calibration import REPORTS, prediction
from benchmarks.calibration_report import table
from benchmarks.rows import RESULTS, StepsRow, line_of, read_rows
from hzero.model.profile import load_profile
from hzero.parsing import parse_config
from hzero.plan.scenario import read_scenario
from hzero.plan.tune import Candidate, tune
from hzero.settings.buffers import BUCKET
from hzero.settings.settings import model_numels
from hzero.validation import ConfigError

SUITE = "tune"


def rows_of(folder: Path) -> list[StepsRow]:
    """The last take of every setting of the suite.

    Raises:
        ConfigError: The folder has none, or they differ in more than the setting.
    """
    found = {
        (row.measurement, row.scheme): row
        for row in read_rows(folder / RESULTS)[0]
        if isinstance(row, StepsRow) and row.suite == SUITE
    }
    rows = list(found.values())
    if not rows:
        raise ConfigError(f'{folder}: has no rows of the suite {SUITE}; possible: make bench ARGS="suite={SUITE}"')
    same = [(row.config.model, row.config.cluster, row.config.train.dtype, row.tokens_per_step) for row in rows]
    if any(one != same[0] for one in same):
        raise ConfigError(f"{folder}: rows of the suite {SUITE} differ in model, cluster, type or batch")
    return rows


def arguments_of(row: StepsRow) -> list[str]:
    """Arguments of `hzero plan --tune` that leave it the settings of the suite, with what all of them share."""
    config = row.config
    model = {**config.model, "num_layers": 1}
    layer = sum(model_numels(model)) - sum(model_numels({**model, "num_layers": 0}))
    keys = {BUCKET: layer, "stage3_max_live_parameters": layer, "stage3_max_reuse_distance": 0}
    deepspeed = [f"+deepspeed.zero_optimization.{key}={value}" for key, value in keys.items()]
    batch = row.tokens_per_step // config.model["seq_length"]
    return [
        f"model={config.model['name']}",
        "topology=emulated_2x2x2",
        f"train.dtype={config.train.dtype}",
        f"global_batch={batch}",
        "codecs=weights",
        *deepspeed,
    ]


def chosen(rows: Sequence[StepsRow]) -> StepsRow:
    """The row of the setting that `hzero plan --tune` chooses.

    Raises:
        ConfigError: It was not measured.
    """
    best = tune(read_scenario(arguments_of(rows[0]))).best[0].candidate
    for row in rows:
        if is_setting(best, row):
            return row
    raise ConfigError(f"rows: hzero plan --tune chooses {best}, which was not measured")


def is_setting(candidate: Candidate, row: StepsRow) -> bool:
    """Whether a row measured a setting of the search. Activations are never computed again in a comparison."""
    train = row.config.train
    batch = (candidate.micro_batch, candidate.accumulation) == (train.micro_batch, train.accumulation)
    block, measured = parse_config(candidate.block()), parse_config(row.scheme_config["block"])
    same = (block.shard, block.codecs) == (measured.shard, measured.codecs)
    return batch and same and not candidate.checkpointing


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's: the correlation of ranks, where equal values share the mean of theirs."""
    ranks = []
    for values in (np.asarray(first), np.asarray(second)):
        below = (values[:, None] > values).sum(1)
        ranks.append(below + (values[:, None] == values).sum(1) / 2)
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def report(rows: Sequence[StepsRow]) -> str:
    """The report's text."""
    base = load_profile("emulated")
    ordered = sorted(rows, key=lambda row: row.median_s)
    predicted = {id(row): prediction(row, base).step_s for row in rows}
    first, pick = ordered[0], chosen(rows)
    by_model = sorted(rows, key=lambda row: predicted[id(row)])
    correlation = rank_correlation([row.median_s for row in rows], [predicted[id(row)] for row in rows])
    errors = [abs(predicted[id(row)] / row.median_s - 1) for row in rows]
    date, config = max(row.date for row in rows).date().isoformat(), first.config
    versions = ", ".join(f"{name} {version}" for name, version in first.versions.items())
    shared = config.model_dump(exclude={"schemes", "rounds"})
    shared["train"] = {
        key: value for key, value in shared["train"].items() if key not in ("micro_batch", "accumulation")
    }
    lines = [
        f"# The choice of `hzero plan --tune` beside every setting measured, {date}",
        "",
        f"- **{pick.median_s / first.median_s - 1:.1%}** is the measured step of the chosen setting above the shortest"
        f" measured one ({pick.median_s:.3f} and {first.median_s:.3f} s); the aim is 5 %. It is number"
        f" {ordered.index(pick) + 1} of {len(rows)} settings.",
        f"- **{correlation:.3f}** is the rank correlation (Spearman) of predicted and measured steps of all settings; the"
        f" mean error is {np.mean(errors):.1%}, the max {max(errors):.1%}.",
        "",
        f"Chosen: {_name(pick)}. Shortest: {_name(first)}.",
        "",
        f"Machine: {first.machine.processor}, {first.machine.cores} cores, {first.machine.memory_bytes / 2**30:.0f} GiB,"
        f" {first.machine.system}, Python {first.machine.python}. Versions: {versions}.",
        "",
        "Nothing was fit on these rows; the constants of cores in the profile `emulated` are those of 2026-11-22's `main`.",
        "This machine's cores are up to 1.6 times as fast on one day as on another, which moves all predictions one way.",
        "The shortest of many medians is shorter by chance than its setting is, so the first figure is an upper estimate.",
        "",
        "```sh",
        f'make bench ARGS="suite={SUITE}"',
        "python -m benchmarks.tune_report runs/bench",
        f"hzero plan --tune {' '.join(arguments_of(first))}",
        "```",
        "",
        f"All settings share: `{shared}`. [The rows]({date}-tune.jsonl) have the full configuration of each.",
        "",
        *table(
            ("measured", "predicted", "setting", "median, s", "min to max, s", "predicted, s", "error"),
            (
                (
                    str(place),
                    str(by_model.index(row) + 1),
                    _name(row),
                    f"{row.median_s:.3f}",
                    f"{min(row.step_s):.3f} to {max(row.step_s):.3f}",
                    f"{predicted[id(row)]:.3f}",
                    f"{predicted[id(row)] / row.median_s - 1:+.1%}",
                )
                for place, row in enumerate(ordered, 1)
            ),
        ),
        "",
    ]
    return "\n".join(lines)


def _name(row: StepsRow) -> str:
    train = row.config.train
    return f"{row.scheme}, {train.micro_batch} x {train.accumulation}"


def main() -> int:
    """Writes report and rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="folder of `make bench`")
    parser.add_argument("-o", "--out", type=Path, default=REPORTS, help="folder (default: benchmarks/reports)")
    parsed = parser.parse_args()
    try:
        rows = rows_of(parsed.results)
        text = report(rows)
    except ConfigError as error:
        print(f"tune_report: error: {error}", file=sys.stderr)
        return 2
    date = max(row.date for row in rows).date().isoformat()
    (parsed.out / f"{date}-tune.jsonl").write_text("".join(map(line_of, rows)), encoding="utf-8")
    (parsed.out / f"{date}-tune.md").write_text(text, encoding="utf-8")
    print(parsed.out / f"{date}-tune.md")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
