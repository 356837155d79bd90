"""Runs for the table of arXiv 2409.02423: codecs by parallel dimension, with tensor groups and with pipeline stages.

Trains once for each layout, scheme and seed, and appends a row to results.jsonl of the results folder. A run whose row is
there is not repeated, so the same command continues after an interruption. At the end it writes the report of all rows.

    python -m benchmarks.hybrid --on cluster --steps 20 --seeds 0     # step times, on the emulated cluster: needs root
    python -m benchmarks.hybrid --on machine --steps 1000             # losses
    python -m benchmarks.hybrid --on machine --steps 1000 --layers 2 --sequences 8    # sooner
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from benchmarks.cluster.__main__ import RATES, SHAPE
from benchmarks.cluster.network import Network
from benchmarks.cluster.ranks import run_ranks
from benchmarks.cluster.shape import Cluster
from benchmarks.compare.machine import machine, now, versions
from benchmarks.compare.store import Store
from benchmarks.report import write_report
from benchmarks.rows import LayoutRow, Sent
from benchmarks.training import MODELS, prepare, tokens
from hzero.errors import ConfigError, one_of
from hzero.tools import launch

SUITE = "hybrid"
#: How the 8 ranks are divided: ranks of a tensor group, pipeline stages, micro-batches of a step. Pipelines need several.
LAYOUTS = {"tp2-dp4": (2, 1, 1), "tp2-pp2-dp2": (2, 2, 4)}
#: Files of conf/zero. The paper's schemes keep whole weights on every data-parallel rank, as baseline does; hybrid shards as topo
#: does, and lossless is hybrid without codecs. With pipeline stages all have ZeRO-1's shards.
SCHEMES = {
    "baseline": "zero1",
    "naive": "zhybrid",
    "zhybrid": "zhybrid",
    "mzhybrid": "mzhybrid",
    "hybrid": "hybrid",
    "lossless": "lossless",
}
#: Roles that naive also sends at the low rate.
NAIVE = {"tp2-dp4": ("weights", "tensor"), "tp2-pp2-dp2": ("optimizer", "tensor", "pipeline")}
#: The schemes' blocks.
FILES = Path(__file__).resolve().parents[2] / "conf" / "zero"
#: Bytes of text.
TEXT = 8_000_000


def config_of(layout: str, scheme: str, seed: int, given: argparse.Namespace) -> dict[str, Any]:
    """Configuration of a run."""
    tensor, pipeline, micro_batches = LAYOUTS[layout]
    readers = math.prod(map(int, SHAPE.split("x"))) // tensor // pipeline
    block: Any = OmegaConf.to_container(OmegaConf.load(FILES / f"{SCHEMES[scheme]}.yaml"))
    del block["defaults"]
    if scheme == "naive":
        block["codecs"] |= dict.fromkeys(NAIVE[layout], block["codecs"]["gradients"])
    return {
        "model": {**MODELS["gpt_neox_1m"], "num_layers": given.layers},
        "train": {
            "steps": given.steps,
            "micro_batch": given.sequences // readers // micro_batches,
            "grad_accumulation": micro_batches,
            "seed": seed,
            "lr": 3e-3,
            "warmup_steps": min(10, given.steps),
            "decay_steps": given.steps,
            "betas": [0.9, 0.95],
            "weight_decay": 0.1,
            "eval_batches": given.eval_batches,
        },
        "block": block,
        "tensor": tensor,
        "pipeline": pipeline,
    }


def take(store: Store, layout: str, scheme: str, config: dict[str, Any], rates: str | None) -> int:
    """Trains and stores the row, unless it is there; ``rates`` None runs without the cluster. Returns 0, or 1 if it failed."""
    digest = hashlib.sha256(json.dumps([scheme, config, rates]).encode()).hexdigest()[:16]
    name = f"{layout}-{scheme}-seed{config['train']['seed']}-{digest[:8]}"
    if store.has(digest, 1):
        print(f"{name}: there", flush=True)
        return 0
    print(name, flush=True)
    prepare()
    from benchmarks.hybrid.loop import Work, train

    text, logs = tokens(config["model"]["vocab_size"], TEXT, store.folder), store.logs(name)
    work = functools.partial(train, Work(config, text, logs / "result.json"))
    if rates is None:
        status = launch.run_ranks(work, 8, logs=logs)
    else:
        cluster = Cluster.from_text(SHAPE, rates)
        with Network(cluster):
            status = run_ranks(cluster, work, logs)
    if status:
        return status
    found, train_config = json.loads((logs / "result.json").read_text()), config["train"]
    readers = 8 // config["tensor"] // config["pipeline"]
    sequences = readers * train_config["micro_batch"] * train_config["grad_accumulation"]
    sent = [
        Sent(
            **{key: one[key] for key in ("role", "tier", "codec")},
            **{key: one[key] / train_config["steps"] for key in ("wire_bytes", "raw_bytes")},
        )
        for one in found.pop("sent")
    ]
    store.add(
        [
            LayoutRow(
                suite=SUITE,
                measurement=name,
                id=digest,
                date=now(),
                machine=machine(),
                versions=versions(),
                world_size=8,
                config=config,
                layout=layout,
                scheme=scheme,
                seed=train_config["seed"],
                rates=rates,
                tokens_per_step=sequences * config["model"]["seq_length"],
                sent=sent,
                **found,
            )
        ]
    )
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Takes the missing runs. Returns 1 if a run has failed; the others are taken nevertheless."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", choices=("cluster", "machine"), required=True, help="where ranks run")
    parser.add_argument("--steps", type=int, default=60, help="of each run (default %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="(default 0 1)")
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES)[:5], help=f"of {', '.join(SCHEMES)} (default 5)")
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), help=f"of {', '.join(LAYOUTS)} (default all)")
    parser.add_argument("--layers", type=int, default=4, help="of the model (default %(default)s)")
    parser.add_argument("--sequences", type=int, default=16, help="of a step (default %(default)s)")
    parser.add_argument("--eval-batches", type=int, default=8, help="of an evaluation (default %(default)s)")
    parser.add_argument("--rates", default=RATES, help="of the cluster (default %(default)s)")
    parser.add_argument("--results", type=Path, default=Path("runs/hybrid"), help="folder (default %(default)s)")
    given = parser.parse_args(arguments)
    for key, known in (("schemes", SCHEMES), ("layouts", LAYOUTS)):
        for name in getattr(given, key):
            if name not in known:
                parser.error(str(one_of(f"--{key}", name, known)))
    for key, step in (("steps", 1), ("layers", 2), ("sequences", 8), ("eval_batches", 1)):
        if getattr(given, key) < step or getattr(given, key) % step:
            parser.error(f"--{key.replace('_', '-')}: found {getattr(given, key)}; expected a multiple of {step}")
    failed = []
    try:
        store = Store(given.results)
        for seed in given.seeds:
            for layout in given.layouts:
                for scheme in given.schemes:
                    config = config_of(layout, scheme, seed, given)
                    if take(store, layout, scheme, config, given.rates if given.on == "cluster" else None):
                        failed.append(f"{layout} {scheme} seed {seed}")
        if not store.empty:
            print(f"report: {write_report([store.folder], store.folder / 'report', name=SUITE, overwrite=True)[1][0]}")
    except ConfigError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print("interrupted; the same command continues", file=sys.stderr)
        return 130
    if failed:
        print(f"hybrid: failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
