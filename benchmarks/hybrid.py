"""Runs for the table of arXiv 2409.02423: codecs by parallel dimension, with tensor groups and with pipeline stages.

Runs `hzero train` once for each layout, scheme and seed, and appends its row to results.jsonl of the results folder. A run whose
row is there is not repeated, so an interrupted command goes on where it was. `benchmarks.hybrid_report` writes the report.

    python -m benchmarks.hybrid --on cluster --steps 20 --seeds 0     # step times, on the emulated cluster: needs root
    python -m benchmarks.hybrid --on machine --steps 1000             # losses
    python -m benchmarks.hybrid --on machine --steps 1000 --set model.num_layers=2 train.micro_batch=2    # sooner
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from benchmarks.cluster.__main__ import RATES
from benchmarks.compare.machine import machine, now, versions
from benchmarks.compare.store import Store
from benchmarks.rows import LayoutRow, Sent
from hzero.train.folder import CONFIG, SUMMARY, read_metrics
from hzero.validation import ConfigError, one_of

SUITE = "hybrid"
#: How the 8 ranks are divided. Both have 16 sequences in a step; pipelines need micro-batches.
LAYOUTS = {
    "tp2-dp4": ("model.tensor_parallel=2", "train.micro_batch=4", "train.grad_accumulation=1"),
    "tp2-pp2-dp2": (
        *("model.tensor_parallel=2", "model.pipeline_parallel=2"),
        *("train.micro_batch=2", "train.grad_accumulation=4"),
    ),
}
#: Option of the trainer's group ``zero``. The paper's keep whole weights on every data-parallel rank, as baseline does, and
#: hybrid shards as topo does; lossless is hybrid without codecs. With pipeline stages all have ZeRO-1's shards.
SCHEMES = {
    "baseline": "zero1",
    "naive": "zhybrid",
    "zhybrid": "zhybrid",
    "mzhybrid": "mzhybrid",
    "hybrid": "hybrid",
    "lossless": "lossless",
}
#: Roles that naive sends at the low rate too.
NAIVE = {"tp2-dp4": ("weights", "tensor"), "tp2-pp2-dp2": ("optimizer", "tensor", "pipeline")}
JOB = ("checkpoint.every=0", "sample.at_end=false")


def overrides(layout: str, scheme: str, seed: int, steps: int, model: str, settings: Sequence[str] = ()) -> list[str]:
    """Arguments of `hzero train` for one run, without its folder; ``settings`` come last and so replace the others."""
    low = "{gcd: {rate: 8}, gpu: {rate: 8}, node: {rate: 8}}"
    codecs = [f"zero.codecs.{role}={low}" for role in NAIVE[layout]] if scheme == "naive" else []
    common = [f"model={model}", *JOB, f"train.steps={steps}", f"train.seed={seed}"]
    return [*common, *LAYOUTS[layout], f"zero={SCHEMES[scheme]}", *codecs, *settings]


def identity(arguments: Sequence[str], rates: str | None) -> str:
    """Digest of a run: of the trainer's arguments, and of the emulated links."""
    return hashlib.sha256(json.dumps([list(arguments), rates]).encode()).hexdigest()[:16]


def take(store: Store, layout: str, scheme: str, seed: int, arguments: Sequence[str], rates: str | None) -> int:
    """Trains and stores the row, unless it is there.

    Args:
        store: The results.
        layout: Of `LAYOUTS`.
        scheme: Of `SCHEMES`.
        seed: Of weights and batches.
        arguments: Of the trainer, as `overrides` gives them.
        rates: Of the emulated cluster; None runs without it.

    Returns:
        Exit status of the trainer.
    """
    digest = identity(arguments, rates)
    name = f"{layout}-{scheme}-seed{seed}-{digest[:8]}"
    if store.has(digest, 1):
        print(f"{name}: there", flush=True)
        return 0
    print(f"{name}: {' '.join(arguments)}", flush=True)
    folder = store.folder / name
    command = [sys.executable, "-m", "hzero", "train", *arguments, f"run.dir='{folder}'", "run.overwrite=true"]
    if rates is not None:
        command = [sys.executable, "-m", "benchmarks.cluster", "run", "--rates", rates, "--", *command]
    if status := subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
        return status
    store.add([_row(folder, digest, layout, scheme, rates)])
    return 0


def _row(folder: Path, digest: str, layout: str, scheme: str, rates: str | None) -> LayoutRow:
    config = yaml.safe_load((folder / CONFIG).read_text())
    config["run"]["dir"] = folder.name  # rows are published and must not name this machine's paths
    summary = json.loads((folder / SUMMARY).read_text())
    steps = [one for one in read_metrics(folder)[0] if one["kind"] == "step"]
    return LayoutRow(
        suite=SUITE,
        measurement=folder.name,
        id=digest,
        date=now(),
        machine=machine(),
        versions={**summary["versions"], **versions()},
        parameters=summary["parameters"],
        world_size=summary["world_size"],
        config=config,
        layout=layout,
        scheme=scheme,
        seed=config["train"]["seed"],
        rates=rates,
        tokens_per_step=steps[-1]["tokens"] // len(steps),  # it counts all so far
        step_s=[one["step_s"] for one in steps],
        losses=[one["loss"] for one in steps],
        evaluation=summary["eval"]["loss_exact"],
        sent=[
            Sent(
                **{key: each[key] for key in ("role", "tier", "codec")},
                **{key: each[key] / len(steps) for key in ("wire_bytes", "raw_bytes")},
            )
            for each in summary["traffic"]
        ],
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what is missing. Returns 1 if a run has failed; the others are made nevertheless."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", choices=("cluster", "machine"), required=True, help="where ranks run")
    parser.add_argument("--steps", type=int, default=60, help="of each run (default %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="(default 0 1)")
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES)[:5], help=f"of {', '.join(SCHEMES)} (default 5)")
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), help=f"of {', '.join(LAYOUTS)} (default all)")
    parser.add_argument("--model", default="gpt_neox_1m", help="(default %(default)s)")
    parser.add_argument("--set", nargs="+", default=[], help="settings of all runs, such as model.num_layers=2")
    parser.add_argument("--rates", default=RATES, help="of the cluster (default %(default)s)")
    parser.add_argument("--results", type=Path, default=Path("runs/hybrid"), help="folder (default %(default)s)")
    given = parser.parse_args(arguments)
    for key, known in (("schemes", SCHEMES), ("layouts", LAYOUTS)):
        for name in getattr(given, key):
            if name not in known:
                parser.error(str(one_of(f"--{key}", name, known)))
    if given.steps < 1:
        parser.error(f"--steps: found {given.steps}, expected at least 1")
    rates = given.rates if given.on == "cluster" else None
    failed = []
    try:
        store = Store(given.results)
        for seed in given.seeds:
            for layout in given.layouts:
                for scheme in given.schemes:
                    one = overrides(layout, scheme, seed, given.steps, given.model, given.set)
                    if status := take(store, layout, scheme, seed, one, rates):
                        failed.append(f"{layout} {scheme} seed {seed} (status {status})")
    except ConfigError as error:
        parser.error(str(error))
    if failed:
        print(f"hybrid: failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
