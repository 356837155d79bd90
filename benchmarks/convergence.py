"""Loss of the main job under several presets, with the same seed: how far codecs are from none after the last steps.

    python benchmarks/convergence.py [--presets lossless,topo,mild] [--report benchmarks/reports] [KEY=VALUE ...]

What is left over goes to `hzero train`, as train.steps=400 or train.seed=1.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def main() -> int:
    """Trains each preset in a folder of its own, prints the table, writes the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--presets", default="lossless,topo,mild", help="the first is what the others are compared with"
    )
    parser.add_argument("--report", type=Path, help="folder to write a dated report into")
    arguments, overrides = parser.parse_known_args()
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for preset in arguments.presets.split(","):
            run = Path(folder) / preset
            command = ["train", f"zero={preset}", f"run.dir={run}", "checkpoint.every=0", *overrides]
            code = subprocess.run([sys.executable, "-m", "hzero", *command], check=False).returncode
            if code:
                return code
            results[preset] = json.loads((run / "summary.json").read_text())
            config = (run / "config.yaml").read_text()
    report = render(results, config, overrides)
    print(report)
    if arguments.report is not None:
        arguments.report.mkdir(parents=True, exist_ok=True)
        path = arguments.report / f"{datetime.date.today().isoformat()}-convergence.md"
        path.write_text(report)
        print(f"written to {path}", file=sys.stderr)
    return 0


def render(results: dict[str, dict[str, Any]], config: str, overrides: list[str]) -> str:
    """The report as Markdown."""
    base = next(iter(results.values()))
    rows = []
    for preset, summary in results.items():
        evaluation = summary["eval"]
        rows.append(
            f"| {preset} | {summary['loss_first']:.4f} | {summary['loss_last']:.4f} "
            f"| {summary['loss_last'] / base['loss_last'] - 1:+.2%} | {evaluation['loss_decoded']:.4f} "
            f"| {evaluation['loss_exact']:.4f} | {evaluation['loss_exact'] / base['eval']['loss_exact'] - 1:+.2%} |"
        )
    versions = ", ".join(f"{name} {version}" for name, version in base["versions"].items())
    return "\n".join(
        [
            f"# Loss of the main job by preset, {datetime.date.today().isoformat()}",
            "",
            f"Machine: {os.cpu_count()} cores, {platform.processor() or platform.machine()}; {versions}.",
            f"Model {base['model']}, {base['parameters']:,} parameters, {base['world_size']} ranks, {base['steps']} steps, one "
            "seed. Training losses are means of 10 steps.",
            "",
            f"| preset | first loss | last loss | against {next(iter(results))} | eval, decoded | eval, exact "
            f"| against {next(iter(results))} |",
            "|---|---|---|---|---|---|---|",
            *rows,
            "",
            f"Repeat with `python benchmarks/convergence.py --presets {','.join(results)} {' '.join(overrides)}`.",
            "",
            "<details><summary>configuration of the last run</summary>",
            "",
            "```yaml",
            config.rstrip(),
            "```",
            "</details>",
            "",
        ]
    )


if __name__ == "__main__":
    raise SystemExit(main())
