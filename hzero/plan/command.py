"""``hzero plan``: the command, and the plan as plain values."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from hzero.arguments import Parser
from hzero.config import UNCODED
from hzero.model.footprint import footprint
from hzero.model.profile import Profile
from hzero.model.step import predict
from hzero.plan import predicted, stages
from hzero.plan.against import against
from hzero.plan.fit import fit, fits
from hzero.plan.links_file import links_for
from hzero.plan.scenario import (
    KEYS,
    attention_of,
    bytes_of,
    itemsize_of,
    job_of,
    memory_of,
    profile_of,
    read_scenario,
    scenario_of,
    settings_of,
    shape_of,
    split_keys,
    with_links,
)
from hzero.plan.sweep import draw, node_counts, sweep
from hzero.plan.tables import show
from hzero.plan.tune import tune
from hzero.settings.buffers import buffers_of
from hzero.settings.conf import key_of
from hzero.settings.groups import Configuration
from hzero.settings.settings import Settings, model_numels
from hzero.sharding import memory as memory_plan
from hzero.sharding import traffic as traffic_plan
from hzero.sharding.memory import CHANNELS
from hzero.sharding.plan import ShardPlan
from hzero.sharding.records import chunk_numel, record_format
from hzero.sharding.sequence import Scheme
from hzero.topology import Grid
from hzero.validation import ConfigError, nearest

#: Short names of the keys that plans are mostly about.
SHORT = {
    "nodes": "topology.nodes",
    "gpus_per_node": "topology.gpus_per_node",
    "gcds_per_gpu": "topology.gcds_per_gpu",
    "preset": "zero.preset",
    "accumulation": "train.grad_accumulation",
}
#: Of the keys of a prediction those that ``--sweep`` reads.
SWEPT: tuple[str, ...] = ("memory", "attention", "profile")
#: And those that ``--fit`` reads.
FITTED = (*SWEPT, "global_batch")
_EPILOG = """examples:
  hzero plan model=gpt_neox_20b topology=frontier nodes=48
  hzero plan model=gpt_neox_10b topology=frontier nodes=12 preset=mild accumulation=8
  hzero plan model=gpt_neox_20b topology=frontier nodes=48 zero.error_feedback=[node] --json
  hzero plan model=gpt_neox_20b topology=frontier nodes=48 --links links.json    rates measured by `hzero bench links`
  hzero plan model=gpt_neox_20b topology=frontier nodes=48 model.tensor_parallel=8 model.pipeline_parallel=4
  hzero plan --tune model=gpt_neox_20b topology=frontier nodes=48 memory=64GB global_batch=3072 codecs=weights
  hzero plan --fit model=gpt_neox_20b topology=frontier nodes=48 memory=64GB    what fits, by preset
  hzero plan --sweep nodes=1..9408 model=gpt_neox_20b topology=frontier train.micro_batch=2 --out scaling.png
  hzero plan --from runs/default                       the prediction of a finished run beside what was measured
  hzero plan model=gpt_neox_20b topology=frontier nodes=48 --trace step.json.gz     a predicted step for Perfetto

predictions: a simulation of the step with the constants of a profile (profile=NAME or a .yaml; by default that of the
topology), see docs/model.md for its errors. memory=64GB is the size of a device (by default the profile's), attention=math
says that the machine has no flash attention and keeps scores. --tune and --fit also take global_batch=SEQUENCES of all
devices (by default train.micro_batch x train.grad_accumulation of each), --tune also codecs=lossless|weights|all, what
codecs may lose (by default all).

link times: the bytes that a device receives over a tier, divided by the device's share of the tier's bandwidth. A link
that devices share counts once. Latency, computation and overlap are left out. ZeRO-3's bytes are those of flat rings,
an average over the devices. The time of a tier is a lower bound if its links carry no more than the given rate; for the
gpu tier of topology=frontier, 50 GB/s is the rate of one link, and a GCD has two or three of them.

short names of keys:\n""" + "\n".join(f"  {short:15}{key}" for short, key in SHORT.items())


def parser() -> argparse.ArgumentParser:
    """Reads the command's arguments."""
    made = Parser(
        prog="hzero plan",
        description="Computes memory per device, bytes per step and tier, and bandwidth-only times of the links.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("overrides", nargs="*", metavar="KEY=VALUE", help="keys of the trainer's configuration")
    add(
        "--itemsize",
        type=int,
        choices=(2, 4),
        help="bytes of one weight (default: of train.dtype; for auto 2, on processors 4)",
    )
    add("--links", metavar="FILE", type=Path, help="rates of `hzero bench links`, for topology.bandwidth_gb_s")
    mode = made.add_mutually_exclusive_group()
    mode.add_argument("--tune", action="store_true", help="search the settings with the shortest predicted step")
    mode.add_argument(
        "--fit", action="store_true", help="find the largest micro-batch that fits into a device, by preset"
    )
    mode.add_argument("--sweep", metavar="nodes=A..B", help="predict all schemes on these nodes, and draw them")
    mode.add_argument("--from", dest="run", metavar="RUN", type=Path, help="compare a finished run with its prediction")
    mode.add_argument("--trace", metavar="FILE", type=Path, help="write the predicted step for Perfetto")
    add("--out", metavar="FILE", type=Path, help="where --tune writes its choice (JSON) and --sweep its picture (PNG)")
    add("--json", action="store_true", help="print JSON")
    return made


def run_plan(arguments: Sequence[str]) -> int:
    """Runs the command on its arguments. Raises `ConfigError` for input that cannot be used."""
    parsed = parser().parse_intermixed_args(list(arguments))
    overrides = [_long(override) for override in parsed.overrides]
    if parsed.out is not None and not (parsed.tune or parsed.sweep):
        raise ConfigError("--out: given without --tune or --sweep")
    if parsed.tune or parsed.fit or parsed.sweep or parsed.run or parsed.trace:
        if parsed.itemsize is not None:
            raise ConfigError("--itemsize: a prediction takes that of train.dtype")
        result, text = _prediction(parsed, overrides)
    else:
        result = compute(parsed.overrides, parsed.itemsize, parsed.links)
        text = partial(stages.show if "stages" in result else show, result)
    if parsed.json:
        print(json.dumps(result, indent=1))
    else:
        text(Console())
    return 0


def _prediction(parsed: argparse.Namespace, overrides: list[str]) -> tuple[dict[str, Any], Callable[[Console], None]]:
    """What ``--tune``, ``--fit``, ``--sweep``, ``--from`` and ``--trace`` print, as plain values and as text."""
    if parsed.run is not None:
        own, others = split_keys(overrides)
        if others or parsed.links is not None or set(own) - {"profile"}:
            raise ConfigError("--from: takes profile=NAME alone beside it; all else is in the run's folder")
        comparison = against(parsed.run, own.get("profile"))
        return predicted.comparison_dict(comparison), partial(predicted.show_comparison, comparison)
    if parsed.tune or parsed.fit or parsed.sweep is not None:
        _refuse_varied(parsed, overrides)
    if parsed.sweep is not None:
        counts = node_counts(parsed.sweep)
        overrides = [*overrides, f"topology.nodes={counts[-1]}"]  # groups of nodes have to divide it
    reads = {"--tune": KEYS, "--fit": FITTED, "--sweep": SWEPT, "--trace": ("profile",)}[mode := _mode(parsed)]
    for key in split_keys(overrides)[0]:
        if key not in reads:
            raise ConfigError(f"{key}: given with {mode}, which does not read it; it reads {', '.join(reads)}")
    scenario = read_scenario(overrides, parsed.links)
    if parsed.sweep is not None:
        if counts[-1] > (most := scenario.profile.nodes):
            raise ConfigError(f"--sweep: found {counts[-1]:,} nodes; profile {scenario.profile.name} has {most:,}")
        out = parsed.out or Path("scaling.png")
        curves = sweep(scenario, counts)
        draw(curves, scenario, out)
        return predicted.sweep_dict(curves, scenario), partial(predicted.show_sweep, curves, scenario, out)
    if parsed.trace is not None:
        found = predict(_plan_of(scenario.settings), scenario.job, scenario.grid, scenario.profile, exact=True)
        predicted.write_step(parsed.trace, found, scenario)
        return predicted.step_dict(found), partial(predicted.show_trace, parsed.trace, found, scenario)
    if parsed.fit:
        fitting = fit(scenario)
        return predicted.fitting_dict(fitting, scenario), partial(predicted.show_fitting, fitting, scenario)
    tuning = tune(scenario)
    if parsed.out is not None:
        predicted.write_choice(parsed.out, tuning, scenario)
    return predicted.tuning_dict(tuning, scenario), partial(predicted.show_tuning, tuning, scenario, parsed.out)


def _mode(parsed: argparse.Namespace) -> str:
    return next((f"--{name}" for name in ("tune", "fit", "sweep") if getattr(parsed, name)), "--trace")


def _refuse_varied(parsed: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Refuses keys that a search or a sweep varies itself: their values would be ignored."""
    given, mode = list(map(key_of, overrides)), _mode(parsed)
    for key in given:
        if key.partition(".")[0] == "zero":
            what = {"--tune": "searches the block", "--fit": "looks at all presets", "--sweep": "predicts all presets"}
            raise ConfigError(f"{key}: given with {mode}, which {what[mode]}")
        if (parsed.tune or parsed.fit) and key == "train.activation_checkpointing":
            raise ConfigError(f"{key}: given with {mode}, which searches it")
        if parsed.fit and key == "train.micro_batch":
            raise ConfigError(f"{key}: given with --fit, which finds the largest that fits")
        if not parsed.sweep and key in ("train.micro_batch", "train.grad_accumulation") and "global_batch" in given:
            raise ConfigError(f"{key}: given with global_batch, which {mode} splits into micro-batches")
        if parsed.sweep is not None and key == "topology.nodes":
            raise ConfigError("nodes: given twice; --sweep says them")


def _plan_of(settings: Settings) -> ShardPlan:
    if settings.plan is None:
        raise ConfigError("zero.preset: none given; hzero plan compares a preset with plain ZeRO-3 (as in preset=topo)")
    return settings.plan


def compute(overrides: Sequence[str], itemsize: int | None = None, links: Path | None = None) -> dict[str, Any]:
    """The plan as plain values: what ``--json`` prints.

    Args:
        overrides: Overrides of the trainer's configuration, short names allowed.
        itemsize: Bytes of one weight; None takes those of ``train.dtype``.
        links: File of measured rates; None takes ``topology.bandwidth_gb_s``.
    """
    own, kept = split_keys([_long(override) for override in overrides])
    for key in set(own) - set(SWEPT):
        modes = "--tune or --fit, which alone read it" if key in FITTED else "--tune, which alone reads it"
        raise ConfigError(f"{key}: given without {modes}")
    settings = settings_of(kept)
    plan, grid, layout = _plan_of(settings), settings.grid, settings.layout
    profile = profile_of(kept, own.get("profile"))
    if profile is not None and "profile" not in own and not _holds(profile, grid):
        profile = None  # the topology's name stands for the machine, but not its shape here
    if profile is not None and links is not None:
        profile = with_links(profile, links, grid)
    model, accumulation = settings["model"], settings["train"]["grad_accumulation"]
    itemsize = itemsize or itemsize_of(settings, profile)
    measured = None if links is None else _measured(links, grid)
    rates = settings["topology"].get("bandwidth_gb_s") or {}
    if measured is not None:
        rates = {tier: rate["gb_s"] for tier, rate in measured["tiers"].items()}
    if layout.pipeline > 1:
        for key in own:
            raise ConfigError(
                f"{key}: given with model.pipeline_parallel {layout.pipeline}, whose plans do not read it"
            )
        return stages.compute(settings, plan, itemsize, rates, measured)
    for hop in plan.gather_hops() if itemsize != 2 else ():
        if hop.codec.codec == "exp":
            raise ConfigError(
                f"zero.codecs.weights.{hop.tier}: found 'exp', which holds bfloat16 numbers, with weights of {itemsize} bytes; "
                "possible with train.dtype=bf16 or --itemsize 2"
            )
    numels = settings.numels
    traffic = traffic_plan.plan_traffic(plan, numels, itemsize=itemsize, accumulation=accumulation)
    stock = traffic_plan.zero3_traffic(layout.data_grid, numels, itemsize=itemsize, accumulation=accumulation)
    into_node = {
        f"hzero {settings.preset}": traffic_plan.node_bytes(traffic, plan),
        **traffic_plan.schemes_node_bytes(layout.data_grid, numels, itemsize=itemsize, accumulation=accumulation),
    }
    sums: Any = stages.sums_of(settings) | {"itemsize": itemsize, "checksum": plan.checksum}
    traffic += traffic_plan.tensor_traffic(layout.tensor_grid, plan.codecs.tensor, **sums)
    stock += traffic_plan.tensor_traffic(layout.tensor_grid, UNCODED, **sums)
    exchanges: Any = _exchanges(settings) | {"itemsize": itemsize, "checksum": plan.checksum}
    traffic += traffic_plan.sequence_traffic(settings.sequence.tensor_grid, plan.codecs.sequence, **exchanges)
    stock += traffic_plan.sequence_traffic(settings.sequence.tensor_grid, UNCODED, **exchanges)
    scenario = None
    if profile is not None and shape_of(model) is not None and not _divided(settings):
        scenario = scenario_of(settings, own, profile, itemsize)
    return {
        "model": model["name"],
        "parameters": sum(model_numels(model)),
        "grid": {tier: grid.size(tier) for tier in grid.tiers},
        "grid_text": str(grid),
        "world_size": grid.world_size,
        "preset": settings.preset,
        "weights": plan.weights_scope,
        "gradients": plan.gradients_scope,
        "accumulation": accumulation,
        "itemsize": itemsize,
        "layout": stages.layout_of(settings) if _divided(settings) else None,
        "notes": [
            *plan.adaptations,
            *plan.notes,
            *_padding_note(plan, numels),
            *_reuse_note(settings, plan, numels),
            *stages.checksum_note(traffic),
            *_exceptions_note(plan),
            *_layout_note(settings),
        ],
        **_memory(settings, own, profile, itemsize),
        "traffic": traffic_plan.as_dicts(traffic),
        "zero3_traffic": traffic_plan.as_dicts(stock),
        "node_bytes": {scheme: layout.tensor * count for scheme, count in into_node.items()},
        "link_seconds": traffic_plan.link_seconds(traffic, rates),
        "zero3_link_seconds": traffic_plan.link_seconds(stock, rates),
        "rates_gb_s": rates,
        "links": measured,
        "predicted": None if scenario is None else predicted.steps_dict(scenario, plan),
    }


def _memory(settings: Settings, own: dict[str, str], profile: Profile | None, itemsize: int) -> dict[str, Any]:
    """Memory of a plan and of plain ZeRO-3, and what each preset would take of a device."""
    plan, grid, numels = _plan_of(settings), settings.layout.data_grid, settings.numels
    channels = CHANNELS if profile is None else profile.channels
    there = None
    if profile is not None or "memory" in own:
        there = bytes_of(own["memory"]) if profile is None else memory_of(own, profile)
    attention = attention_of(own)
    if shape_of(settings["model"]) is None or _divided(settings):  # activations are not known
        about: Any = {"itemsize": itemsize, "channels": channels, "buffers": buffers_of(settings)}
        accumulation = settings["train"]["grad_accumulation"]
        states = memory_plan.plan_memory(plan, numels, accumulation=accumulation, **about)
        return {
            "memory": memory_plan.as_dicts(states),
            "zero3_memory": memory_plan.as_dicts(memory_plan.zero3_memory(grid, numels, **about)),
            "moments": {},
            "memory_bytes": sum(state.bytes for state in states),
            "zero3_memory_bytes": None,
            "device_bytes": there,
            "presets_bytes": {},
        }
    job = replace(job_of(settings, itemsize), attention=attention)
    own_one, stock = (footprint(one, grid, numels, job, channels=channels) for one in (plan, Scheme("deepspeed")))
    return {
        "memory": memory_plan.as_dicts(own_one.states),
        "zero3_memory": memory_plan.as_dicts(stock.states),
        "moments": own_one.moments,
        "memory_bytes": own_one.bytes,
        "zero3_memory_bytes": stock.bytes,
        "device_bytes": there,
        "presets_bytes": {**fits(job, grid, channels=channels), settings.preset: own_one.bytes},
    }


def _exchanges(settings: Settings) -> dict[str, Any]:
    """Elements of the activations that a sequence group exchanges, and how often it does in a step.

    Each layer exchanges queries, keys and values together, and what attention makes of them, in forward and in backward;
    recomputation repeats those of forward.
    """
    model, train, ranks = settings["model"], settings["train"], settings.sequence.tensor
    if ranks == 1:
        return {"numels": (), "times": 0}
    own = train["micro_batch"] * model["seq_length"] * model["hidden_size"] // ranks
    passes = 3 if train["activation_checkpointing"] else 2
    return {"numels": (3 * own, own), "times": passes * model["num_layers"] * train["grad_accumulation"]}


def _divided(settings: Settings) -> bool:
    """Whether layers or sequences are divided over ranks."""
    return settings.layout.tensor * settings.sequence.tensor > 1


def _holds(profile: Profile, grid: Grid) -> bool:
    """Whether a profile's machine has such a grid."""
    shape = grid.gpus_per_node, grid.gcds_per_gpu, grid.gpus_per_hive, grid.clusters
    return shape == (profile.gpus_per_node, profile.gcds_per_gpu, 1, 1) and grid.nodes <= profile.nodes


def _measured(path: Path, grid: Grid) -> dict[str, Any]:
    """Rates of a grid's tiers from a links file."""
    links = links_for(path, grid)
    return {
        "file": str(path),
        "date": links.date,
        "grid": dict(links.grid),
        "backend": links.backend,
        "device": links.device,
        "tiers": {tier: links.tiers[tier].model_dump() for tier in grid.crossed},
    }


def _exceptions_note(plan: ShardPlan) -> list[str]:
    return ["codecs.except: bytes and memory are those without exceptions"] if plan.exceptions else []


def _layout_note(settings: Settings) -> list[str]:
    if not _divided(settings):
        return []
    notes = [
        "with tensor parallelism degrees are over data-parallel ranks, and memory leaves out activations and the communicators "
        "of tensor groups"
    ]
    grid, codecs = settings.layout.tensor_grid, _plan_of(settings).codecs.tensor
    if settings.sequence.tensor > 1:
        notes = ["with sequence parallelism memory leaves out activations and the communicators of sequence groups"]
        grid, codecs = settings.sequence.tensor_grid, _plan_of(settings).codecs.sequence
    if any(codecs[tier].codec == "mpc" for tier in grid.crossed):
        notes.append(stages.MPC_NOTE)
    return notes


def _padding_note(plan: ShardPlan, numels: Sequence[int]) -> list[str]:
    """A note if shards are so small that padding and scales cost more than a tenth on top of the codes."""
    chunks = [chunk_numel(numel, plan.grid.world_size) for numel in numels]
    fmt = record_format(plan.gather_hops()[0].codec) if plan.gather_hops() else None
    if fmt is None or fmt.codec == "none":
        return []
    long = fmt.record_bytes(1 << 20, 2) / (1 << 20)
    ratio = fmt.message_bytes(chunks, 1, 2) / (sum(numels) / plan.grid.world_size * long)
    if ratio < 1.1:
        return []
    return [
        f"shards have {sum(chunks) / len(chunks):,.0f} elements on average, so padding makes {fmt.codec} records "
        f"{ratio:.1f} times as long as those of a large model; the closed forms of other schemes know no padding"
    ]


def _reuse_note(settings: Settings, plan: ShardPlan, numels: Sequence[int]) -> list[str]:
    """A note where DeepSpeed gathers weights less often than in every forward and backward, see `traffic.stage_traffic`."""
    if not plan.gather_hops() or sum(numels) > buffers_of(settings).reuse:
        return []
    return [
        "the model has no more parameters than stage3_max_reuse_distance, within which DeepSpeed keeps weights for their next "
        "use: a run fetches less than these bytes"
    ]


def _long(override: str) -> str:
    key, sign, value = override.partition("=")
    near = nearest(key, SHORT, cutoff=0.7) if sign and key.isidentifier() else None
    if near and key not in SHORT and key not in KEYS and key not in Configuration.model_fields:
        raise ConfigError(f"{key}: unknown key; did you mean {near!r}?")
    return f"{SHORT.get(key, key)}{sign}{value}"
