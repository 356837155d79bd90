"""The report of a calibration: errors of the performance model on what was fit and on what was not.

python -m benchmarks.calibration_report      # writes benchmarks/reports/DATE-model.md
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path

from benchmarks.calibration import (
    HELD_OUT,
    Check,
    calibrates,
    collective_checks,
    emulated_checks,
    emulated_rows,
    fit_emulated,
    link_checks,
    misordered,
    regret,
    training_checks,
)
from benchmarks.rows import StepsRow
from hzero.model.profile import Profile, load_profile

REPORTS = Path(__file__).parent / "reports"


def write_report() -> Path:
    """Writes the report of today."""
    base = load_profile("emulated")
    frontier = load_profile("frontier-2026")
    published = [*collective_checks(frontier), *link_checks(), *training_checks(load_profile("frontier-2023"))]
    days = {day: emulated_rows(day) for day in ("2026-11-22", "2026-11-23", "2026-11-21")}
    again = {day: fit_emulated([row for row in days[day] if calibrates(row)], base) for day in list(days)[1:]}
    text = [
        f"# Errors of the performance model, {date.today().isoformat()}",
        "",
        "Rows C were fit, rows K were not. `python -m benchmarks.calibration` fits,",
        "`python -m benchmarks.calibration_report` writes this report again; the published rows stand in",
        "[measured_rows.yaml](../measured_rows.yaml). No constant was fit on a row K. The form of the equations, and what an",
        "engine waits for on processors, were chosen by people who had seen rows K too.",
        "",
        "## Published rows",
        "",
        *_summary(published),
        "",
        *table(
            ("use", "what", "bytes", "measured", "predicted", "error"),
            (
                (check.use, check.what, f"{check.size:,}" if check.size else "", f"{check.measured:,.4g}",
                 f"{check.predicted:,.4g}", f"{check.error:+.1%}")
                for check in published
            ),
        ),
        "",
        "Collectives in microseconds unless a unit is named.",
        "",
        "## Emulated cluster, rows of 2026-11-22",
        "",
        "Fit on the suite `main` and on the measurement of gpt_neox_10m without limits. No constant was fit on the rates of the"
        f" suite `sweep` ({', '.join(HELD_OUT)}) or on the trunk of 6 Mbit/s; but the form of the model was chosen by people "
        "who had seen all rows.",
        "",
        *_emulated(days["2026-11-22"], base),
        "",
        "## Emulated cluster, rows of 2026-11-23",
        "",
        "The cores of that day took about half the time for the same work, so the constants of cores are fit again, on the same"
        " rows of that day.",
        "",
        *_emulated(days["2026-11-23"], again["2026-11-23"]),
        "",
        "## Emulated cluster, rows of 2026-11-21",
        "",
        "As on 2026-11-23, but fit on the suite `main` alone. Rows whose reductions the stage did otherwise then are left out,"
        " and so are reduce-scatters of the benchmark's own.",
        "",
        *_emulated(days["2026-11-21"], again["2026-11-21"]),
        "",
    ]  # fmt: skip
    path = REPORTS / f"{date.today().isoformat()}-model.md"
    path.write_text("\n".join(text), encoding="utf-8")
    return path


def _summary(checks: Sequence[Check]) -> list[str]:
    def of(kind: str, use: str, big: bool | None) -> tuple[str, ...]:
        errors = [
            abs(check.error)
            for check in checks
            if check.use == use and _kind(check) == kind and (big is None or (check.size >= 1 << 24) == big)
        ]
        if not errors:
            return "", ""
        return f"{statistics.fmean(errors):.1%}", f"{max(errors):.1%}"

    rows = []
    for kind, big, label, target in (
        ("collective", True, "collectives of 16 MiB and more", "10 %"),
        ("collective", False, "shorter collectives", "25 %"),
        ("link", None, "pairs of devices without a link", "10 %"),
        ("training", None, "training, TFLOPS", "8 %"),
    ):
        rows.append((label, *of(kind, "C", big), *of(kind, "K", big), target))
    return table(("rows", "C: mean", "max", "K: mean", "max", "target on K"), rows)


def _kind(check: Check) -> str:
    return "training" if check.what.startswith("training") else "link" if "routed" in check.what else "collective"


def _cores(row: StepsRow) -> bool:
    """Whether the cores set the pace, as they do without limits."""
    return row.core_bound or not row.wire_s


def _emulated(rows: Sequence[StepsRow], profile: Profile) -> list[str]:
    checks = emulated_checks(rows, profile)
    wrong = misordered(checks)
    groups = (
        ("C, the wires set the pace", [c for r, c in checks if calibrates(r) and not _cores(r)]),
        ("C, the cores set the pace", [c for r, c in checks if calibrates(r) and _cores(r)]),
        ("K, the wires set the pace", [c for r, c in checks if not calibrates(r) and not _cores(r)]),
        ("K, the cores set the pace", [c for r, c in checks if not calibrates(r) and _cores(r)]),
    )
    summary = [
        (
            name,
            str(len(group)),
            f"{statistics.fmean(abs(c.error) for c in group):.1%}",
            f"{max(abs(c.error) for c in group):.1%}",
            str(sum(abs(c.error) > 0.10 for c in group)),
            str(sum(abs(c.error) > 0.15 for c in group)),
        )
        for name, group in groups
        if group
    ]
    text = "; ".join(f"{first} before {second}" for first, second in wrong) or "none"
    return [
        *table(("rows", "count", "mean error", "max", "over 10 %", "over 15 %"), summary),
        "",
        f"Pairs of schemes in the wrong order whose measured ranges do not overlap: {text}.",
        "",
        *(
            f"{title}: of {count} settings of the stage the model chooses {chosen}, measured {lost:.1%} above the best."
            for title, count, chosen, lost in regret(checks)
        ),
        "",
        *table(
            ("use", "measurement", "scheme", "measured, s", "predicted, s", "error", "pace"),
            (
                (check.use, row.title, row.scheme, f"{check.measured:.3f}", f"{check.predicted:.3f}",
                 f"{check.error:+.1%}", "cores" if _cores(row) else "wires")
                for row, check in checks
            ),
        ),
    ]  # fmt: skip


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table in Markdown."""
    lines = [" | ".join(head), " | ".join("---" for _ in head), *(" | ".join(row) for row in rows)]
    return [f"| {line} |" for line in lines]


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(write_report())
