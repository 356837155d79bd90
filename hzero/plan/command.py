"""Memory per device, bytes per step and tier, link times and a predicted step of `hzero train`, before anything runs.

Examples:
  hzero plan model=gpt_neox_20b topology=frontier nodes=48
  hzero plan model=gpt_neox_10b topology=frontier nodes=12 preset=mild accumulation=8
  hzero plan model=gpt_neox_20b topology=frontier nodes=48 zero.error_feedback=[node] --json
  hzero plan model=gpt_neox_20b topology=frontier nodes=48 --links links.json    rates measured by `hzero links`
  hzero plan --tune model=gpt_neox_20b topology=frontier nodes=48 memory=64GB global_batch=3072 codecs=weights
  hzero plan --fit model=gpt_neox_20b topology=frontier nodes=48 memory=64GB    largest micro-batch by preset
  hzero plan --sweep nodes=1..9408 model=gpt_neox_20b topology=frontier train.micro_batch=2 --out scaling.png

keys of a plan only: memory=64GB is the size of a device (default: the profile's). profile=NAME or a .yaml is the machine
that predictions simulate (default: the topology's). --tune and --fit also take global_batch=SEQUENCES of all devices
(default: train.micro_batch x train.grad_accumulation of each). --tune also takes codecs=lossless|weights|all, which
limits lossy codecs (default: all).

predictions simulate a step with the constants of a profile; docs/model.md states their errors.

link times are the bytes that a device receives over a tier, divided by the device's share of the tier's bandwidth. A link
that devices share counts once. Latency, computation and overlap are left out. ZeRO-3's bytes are an average over the
devices, for flat rings. The time of a tier is a lower bound if its links carry no more than the given rate; for the
gpu tier of topology=frontier, 50 GB/s is the rate of one link, and a GCD has two or three of them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from hzero.commands.experiment import SHORT, full_names, key_of
from hzero.config import PRESETS
from hzero.plan import tables
from hzero.plan.collectives import Scheme, TierTraffic, link_seconds, node_bytes, schemes_node_bytes, step_traffic
from hzero.plan.machine import CONSTANTS
from hzero.plan.memory import footprint
from hzero.plan.scenario import KEYS, Scenario, read_scenario
from hzero.plan.search import Setting, draw, fit, node_counts, sweep, tune
from hzero.plan.shards import ShardPlan
from hzero.plan.step import predict
from hzero.validation import ConfigError, Parser

#: Of `KEYS` those that each mode reads.
_READS = {"": KEYS[:2], "--sweep": KEYS[:2], "--fit": KEYS[:3], "--tune": KEYS}
#: Keys, or blocks of keys, that a mode varies itself.
_VARIES: dict[str, tuple[str, ...]] = {
    "": (),
    "--sweep": ("zero", "topology.nodes"),
    "--fit": ("zero", "train.activation_checkpointing", "train.micro_batch"),
    "--tune": ("zero", "train.activation_checkpointing"),
}


def run_plan(arguments: Sequence[str]) -> int:
    """Runs the command on its arguments. Raises `ConfigError` for input that cannot be used."""
    about, _, more = (__doc__ or "").partition("\n\n")
    short = "\n".join(f"  {name:15}{key}" for name, key in SHORT.items())
    parser = Parser("hzero plan", about, f"{more}\nshort names of keys:\n{short}")
    add = parser.add_argument
    add("overrides", nargs="*", metavar="KEY=VALUE", help="keys of the trainer's configuration, and those below")
    add("--links", metavar="FILE", type=Path, help="use the rates that `hzero links` measured")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--tune", action="store_true", help="search the settings with the shortest predicted step")
    modes.add_argument("--fit", action="store_true", help="find the largest micro-batch that fits, by preset")
    modes.add_argument("--sweep", metavar="nodes=A..B", help="predict all schemes on these nodes, and draw them")
    add("--out", metavar="FILE", type=Path, help="picture of --sweep (PNG; default: scaling.png)")
    add("--json", action="store_true", help="print JSON")
    parsed = parser.parse_intermixed_args(arguments)
    overrides = full_names(parsed.overrides)
    mode = next((f"--{name}" for name in ("tune", "fit", "sweep") if getattr(parsed, name)), "")
    _check_keys(list(map(key_of, overrides)), mode)
    if parsed.out is not None and mode != "--sweep":
        raise ConfigError("--out: found without --sweep, whose picture it is")
    counts = node_counts(parsed.sweep) if mode == "--sweep" else []
    # Groups of nodes have to divide the largest number.
    scenario = read_scenario([*overrides, *(f"topology.nodes={count}" for count in counts[-1:])], parsed.links)
    if mode == "--sweep":
        result, show = sweep_dict(scenario, counts, parsed.out or Path("scaling.png")), tables.show_sweep
    elif mode:
        result, show = search_dict(scenario, mode), tables.show_search
    else:
        result, show = plan_dict(scenario), tables.show_plan
    if parsed.json:
        print(json.dumps(result, indent=1))
    else:
        show(result, Console())
    return 0


def _check_keys(given: Sequence[str], mode: str) -> None:
    """Refuses keys that a mode does not read or varies itself: their values would be ignored."""
    varied = _VARIES[mode]
    if "global_batch" in given:
        varied += ("train.micro_batch", "train.grad_accumulation")
    for key in given:
        if key in KEYS and key not in _READS[mode]:
            modes = " or ".join(name for name, keys in _READS.items() if key in keys)
            raise ConfigError(f"{key}: found with {mode or 'a plain plan'}, which does not read it; expected {modes}")
        if any(key == name or key.startswith(f"{name}.") for name in varied):
            raise ConfigError(f"{key}: found with {mode or 'global_batch'}, which sets it itself")


# ---- a plan -------------------------------------------------------------------------------------------------------------


def plan_dict(scenario: Scenario) -> dict[str, Any]:
    """A plan: what ``--json`` prints. Raises `ConfigError` without a preset, and where a codec cannot hold the weights."""
    experiment, job, grid = scenario.experiment, scenario.job, scenario.grid
    plan, numels, itemsize = experiment.plan, job.model.numels, job.itemsize
    if plan is None:
        raise ConfigError("zero.preset: found none; expected one to compare with plain ZeRO-3, as in preset=topo")
    narrow = [hop.tier for hop in plan.gather_hops() if hop.codec.traits.narrow]
    if narrow and itemsize != 2:
        codec = plan.codecs.weights[narrow[0]].codec
        raise ConfigError(
            f"zero.codecs.weights.{narrow[0]}: found {codec!r}, which holds bfloat16; expected train.dtype=bf16"
        )
    about: Any = {"itemsize": itemsize, "accumulation": job.accumulation}
    traffic = step_traffic(plan, grid, numels, **about)
    stock = step_traffic(Scheme("deepspeed"), grid, numels, **about)
    rates, links = experiment["topology"].get("bandwidth_gb_s") or {}, None
    if scenario.links is not None:
        measured = {tier: scenario.links.tiers[tier].model_dump() for tier in grid.crossed}
        rates = {tier: rate["gb_s"] for tier, rate in measured.items()}
        links = scenario.links.model_dump(include={"date", "grid", "backend", "device"})
        links |= {"grid_text": scenario.links.grid_text(), "tiers": measured}
    own, other = (footprint(one, grid, job) for one in (plan, Scheme("deepspeed")))
    plans = {name: scenario.shard_plan(name) for name in PRESETS} | {experiment.preset: plan}
    return {
        "model": job.name,
        "parameters": sum(numels),
        "grid": {tier: grid.size(tier) for tier in grid.tiers},
        "grid_text": str(grid),
        "world_size": grid.world_size,
        "preset": experiment.preset,
        "weights": plan.weights_scope,
        "gradients": plan.gradients_scope,
        "accumulation": job.accumulation,
        "itemsize": itemsize,
        "notes": [*plan.adaptations, *plan.notes, *_notes(scenario, plan, traffic)],
        "memory": [{"name": name, **state._asdict()} for name, state in own.states.items()],
        "zero3_memory": [{"name": name, **state._asdict()} for name, state in other.states.items()],
        "moments": own.moments,
        "memory_bytes": own.bytes,
        "zero3_memory_bytes": other.bytes,
        "device_bytes": scenario.memory,
        "traffic": [asdict(row) for row in traffic],
        "zero3_traffic": [asdict(row) for row in stock],
        "node_bytes": {
            f"hzero {experiment.preset}": node_bytes(traffic, grid),
            **schemes_node_bytes(grid, numels, **about),
        },
        "presets": {
            name: {
                "weights": _state_text(one, "weights"),
                "gradients": _state_text(one, "gradients"),
                "node_bytes": node_bytes(step_traffic(one, grid, numels, **about), grid),
                "memory_bytes": footprint(one, grid, job).bytes,
            }
            for name, one in plans.items()
        },
        "link_seconds": link_seconds(traffic, rates),
        "zero3_link_seconds": link_seconds(stock, rates),
        "rates_gb_s": rates,
        "links": links,
        "predicted": None if isinstance(scenario.profile, ConfigError) or not job.layer else steps_dict(scenario, plan),
    }


def _state_text(plan: ShardPlan, role: str) -> str:
    """Scope and codecs of a role, innermost first."""
    scope, hops = plan.weights_scope, plan.gather_hops()[::-1]
    if role == "gradients":
        scope, hops = plan.gradients_scope, plan.reduce_hops()
    return f"{scope}, {'/'.join(dict.fromkeys(hop.codec.codec for hop in hops)) or 'none'}"


def _notes(scenario: Scenario, plan: ShardPlan, traffic: Sequence[TierTraffic]) -> list[str]:
    """What makes a run's bytes other than a plan's, or a plan's longer than one expects."""
    notes = []
    if plan.gather_hops() and sum(scenario.job.model.numels) <= scenario.job.reuse:
        notes.append(
            "the model has no more parameters than stage3_max_reuse_distance, within which DeepSpeed keeps weights for their "
            "next use: a run fetches less than these bytes"
        )
    checksums = {row.tier: row.checksum_bytes for row in traffic if row.checksum_bytes}
    if checksums:
        added = ", ".join(f"{size} bytes on {tier}" for tier, size in checksums.items())
        notes.append(f"checksums add to every collective {added}; these bytes leave them out")
    if plan.exceptions:
        notes.append("codecs.except: bytes and memory are those without exceptions")
    return notes


# ---- predictions --------------------------------------------------------------------------------------------------------


def _about(scenario: Scenario) -> dict[str, Any]:
    profile = scenario.machine.profile
    kinds = {name: profile.sources[profile.constants[name].source].kind for name in CONSTANTS}
    return {
        "profile": profile.name,
        "error": profile.error,
        "assumed": [name for name, kind in kinds.items() if kind == "assumed"],
        "memory_bytes": scenario.memory,
    }


def steps_dict(scenario: Scenario, plan: ShardPlan) -> dict[str, Any]:
    """Predicted steps of a plan and of some other engines."""
    others = scenario.others()
    schemes: dict[str, ShardPlan | Scheme] = {f"hzero {scenario.experiment.preset}": plan}
    schemes |= {name: others[name] for name in ("HSDP, node", "ZeRO-3", "hpZ", "ZeRO++")}
    steps = {name: predict(one, scenario.job, scenario.machine) for name, one in schemes.items()}
    return {**_about(scenario), "steps": {name: asdict(step) for name, step in steps.items()}}


def sweep_dict(scenario: Scenario, counts: Sequence[int], picture: Path) -> dict[str, Any]:
    """All schemes on some numbers of nodes; draws them too."""
    curves = sweep(scenario, counts)
    draw(curves, scenario, picture)
    grids = [scenario.on(count).grid for count in counts]
    return {
        **_about(scenario),
        "tokens_per_device": scenario.job.tokens * scenario.job.accumulation,
        "picture": str(picture),
        "notes": [grid.groups_text for grid in grids if grid.nodes_per_group is None and grid.groups_text],
        "curves": {
            name: [{"nodes": nodes, "fits": scenario.holds(step), **asdict(step)} for nodes, step in steps.items()]
            for name, steps in curves.items()
        },
    }


def search_dict(scenario: Scenario, mode: str) -> dict[str, Any]:
    """Settings that ``--fit`` and ``--tune`` find."""
    about = _about(scenario)
    search = fit(scenario) if mode == "--fit" else tune(scenario)

    def of(one: Setting) -> dict[str, Any]:
        return {
            "setting": str(one),
            "block": one.block(),
            "overrides": one.overrides(scenario),
            "micro_batch": one.job.micro_batch,
            "accumulation": one.job.accumulation,
            "checkpointing": one.job.checkpointing,
            "memory_bytes": one.memory.bytes,
            "fullest": one.memory.fullest,
            "states": {name: state.bytes for name, state in one.memory.states.items()},
            "fits": one.prediction is not None,
            **({"sequence_s": one.sequence_s, **asdict(one.prediction)} if one.prediction else {}),
        }

    return {
        **about,
        "world_size": scenario.grid.world_size,
        "tried": search.tried,
        "left_out": search.left_out,
        "settings": {name: of(one) for name, one in search.settings.items()},
        "best": of(search.best),
        "command": search.best.command(scenario),
    }
