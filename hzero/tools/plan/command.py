"""Memory per device, bytes per step and tier, link times and a predicted step of `hzero train`, before anything runs.

Examples:
  hzero plan model=gpt_neox_20b topology=frontier nodes=48
  hzero plan model=gpt_neox_10b topology=frontier nodes=12 preset=half accumulation=8
  hzero plan model=gpt_neox_20b topology=frontier nodes=48 zero.error_feedback=[inter_node] --json
  hzero plan model=gpt_neox_20b topology=frontier nodes=48 --links links.json    rates measured by `hzero links`
  hzero plan --best model=gpt_neox_20b topology=frontier nodes=48 global_batch=3072    preset and micro-batch
  hzero plan --against 48 experiment=paper_20b    all schemes, TP x PP x ZeRO-1 too
  hzero plan --against 1..9408 experiment=paper_20b    the same by nodes, and which wins where
  hzero plan model=gpt_neox_1b topology=nic nodes=4 topology.nic_gbit=100      an ordinary cluster

keys of hzero plan only: memory=64GB is the size of a device (default: the profile's). profile=NAME or profile=FILE.yaml is the
machine that predictions simulate (default: the topology's). --best and --against also read
global_batch=SEQUENCES of all devices (default: train.micro_batch x train.grad_accumulation of each).

predictions simulate a step with the constants of a profile. 9 of 10 published runs that were not used for its constants are in
the interval of a step. Two schemes are equal if the interval of the ratio of their steps contains 1: the error of compute is
common to both and cancels, the error of collectives does not (docs/model.md).

link times are the bytes that a device receives over a tier, divided by the device's share of the tier's bandwidth. A link
that devices share counts once. Latency, computation and overlap are left out. ZeRO-3's bytes are an average over the
devices, for flat rings. The time of a tier is a lower bound if its links are not faster than the given rate. On tier
intra_node of topology=frontier, 50 GB/s is the rate of one link, and a GCD has two or three links.
"""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hzero.config import FIT, PRESETS, TIERS, parse_config
from hzero.errors import ConfigError, printable, size_text
from hzero.program import collectives
from hzero.program.choice import EQUAL
from hzero.program.collectives import Scheme, TierTraffic
from hzero.program.shards import Hop, ShardPlan
from hzero.tools.experiment import SHORT, full_names, key_of
from hzero.tools.plan.against import IN_FSDP, Price, against, node_counts
from hzero.tools.plan.machine import CONSTANTS
from hzero.tools.plan.memory import footprint, longest
from hzero.tools.plan.scenario import KEYS, Scenario, read_scenario
from hzero.tools.plan.search import Setting, search
from hzero.tools.plan.sequence import chunked, exchanged
from hzero.tools.plan.step import Prediction, predict_range
from hzero.tools.terminal import Parser

#: Other engines in a plain plan.
_PEERS = ("FSDP2", "FSDP2, RCCL 2.30", "HSDP, node", "ZeRO-3", "ZeRO-3, RCCL 2.30", "hpZ", "ZeRO++")
#: For each mode, how many of `KEYS` it reads, and the keys, or blocks of keys, that it varies itself.
_MODES: dict[str, tuple[int, tuple[str, ...]]] = {
    "": (2, ()),
    "--against": (3, ("zero", "topology.nodes")),
    "--best": (3, ("zero", "train.activation_checkpointing", "train.micro_batch")),
}


def run_plan(arguments: Sequence[str]) -> int:
    """Runs the command on its arguments. Raises `ConfigError` for invalid input."""
    short = "\n".join(f"  {name:15}{key}" for name, key in SHORT.items())
    parser = Parser("hzero plan", f"{__doc__}\nshort names of keys:\n{short}")
    add = parser.add_argument
    add("overrides", nargs="*", metavar="KEY=VALUE", help="keys of the trainer's configuration, and those below")
    add("--links", metavar="FILE", type=Path, help="use the rates that `hzero links` measured")
    add(
        "--bits",
        metavar="BITS",
        type=float,
        help="bits per weight in codec exact (default: by train.lr); fit expects 3.5, as a run does",
    )
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument(
        "--best", action="store_true", help="find the largest micro-batch that fits by preset, and the shortest step"
    )
    modes.add_argument(
        "--against", metavar="NODES", help="predict all schemes on 48, 2,48 or 1..9408 nodes, and the fastest"
    )
    add("--json", action="store_true", help="print JSON")
    parsed = parser.parse_intermixed_args(arguments)
    overrides = full_names(parsed.overrides)
    mode = next((name for name in _MODES if name and getattr(parsed, name[2:]) not in (None, False)), "")
    _check_keys(list(map(key_of, overrides)), mode)
    if parsed.bits is not None and not 0 < parsed.bits <= 16:
        raise ConfigError(f"--bits: found {parsed.bits:g}; expected more than 0 and at most 16")
    counts = node_counts(parsed.against) if mode == "--against" else []
    # Groups of nodes must divide the largest number.
    scenario = read_scenario(
        [*overrides, *(f"topology.nodes={count}" for count in counts[-1:])], parsed.links, parsed.bits
    )
    if mode and scenario.experiment.experts > 1:
        raise ConfigError(f"deepspeed.expert_parallel.enabled: found True with {mode}; expected False")
    if counts:
        result, show = against_dict(scenario, counts), _show_against
    elif mode:
        result, show = search_dict(scenario), _show_search
    else:
        result, show = plan_dict(scenario), _show_plan
    if parsed.json:
        print(json.dumps(result, indent=1))
    else:
        show(result)
    return 0


def _check_keys(given: Sequence[str], mode: str) -> None:
    """Raises `ConfigError` for keys that a mode does not read or varies itself, since it would ignore their values."""
    read, varied = _MODES[mode]
    if "global_batch" in given:
        varied += (
            ("train.grad_accumulation",) if mode == "--against" else ("train.micro_batch", "train.grad_accumulation")
        )
    for key in given:
        if key in KEYS[read:]:
            modes = " or ".join(name for name, (count, _) in _MODES.items() if key in KEYS[:count])
            raise ConfigError(f"{key}: found with {mode or 'a plain plan'}, which does not read it; expected {modes}")
        if any(key == name or key.startswith(f"{name}.") for name in varied):
            instead = "; expected the nodes after --against" if key == "topology.nodes" else ""
            raise ConfigError(f"{key}: found with {mode or 'global_batch'}, which sets it itself{instead}")


def _say(text: str) -> None:
    """Prints text without markup and without wrapping."""
    Console().print(text, highlight=False, soft_wrap=True, markup=False)


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table. Columns whose name begins with * are aligned to the right. Control characters are escaped."""
    table = Table(title=title)
    for name in head:
        # On narrow terminals, cells are folded instead of cut, and names are not broken.
        justify: Any = "right" if name.startswith("*") else "left"
        table.add_column(name.lstrip("*"), justify=justify, overflow="fold", no_wrap=name is head[0])
    for row in rows:
        table.add_row(*map(printable, row))
    # For a file or a pipe, rich would use 80 columns.
    wide = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160
    Console(width=wide).print(table)


# ---- a plan -------------------------------------------------------------------------------------------------------------


def plan_dict(scenario: Scenario) -> dict[str, Any]:
    """The plan, as printed by ``--json``. Raises `ConfigError` without a preset."""
    experiment, job, grid = scenario.experiment, scenario.job, scenario.grid
    plan, numels, itemsize = experiment.plan, job.model.numels, job.itemsize
    if plan is None:
        raise ConfigError("zero.preset: found none; expected one to compare with plain ZeRO-3, as in preset=topo")
    about: Any = {"itemsize": itemsize, "accumulation": job.accumulation}
    sent: Any = {**about, "names": job.model.names}
    without = replace(scenario, job=replace(job, sequence=None))  # other engines have no chunks
    own, other = footprint(plan, grid, job), footprint(Scheme("deepspeed"), grid, without.job)
    rates, source = experiment["topology"].get("bandwidth_gb_s") or {}, "nominal rates, not measured"
    if gbit := experiment["topology"].get("nic_gbit"):
        rates = {
            **rates,
            "inter_node": gbit * experiment["topology"].get("nics_per_node", 1) / 8 / grid.scope_size("node"),
        }
    if links := scenario.links:
        rates = {tier: rate.gb_s for tier in grid.crossed if (rate := links.rate(tier))}
        source = f"measured {links.date} on {links.grid_text()}, {links.backend} on {links.device}"
    by_tier, ranks, model = [], experiment.experts, job.model
    sent_to_each = job.tokens * model.experts_per_token // ranks
    times = (4 + 2 * job.checkpointing) * model.expert_layers * job.accumulation
    tokens = collectives.token_traffic(plan, grid.of_ranks(range(ranks)), sent_to_each, model.hidden, itemsize, times)

    owned = job.owned(grid)

    def traffic_of(one: ShardPlan) -> list[TierTraffic]:
        found = collectives.step_traffic(one, grid, numels, **sent)
        return found + owned.traffic(one, itemsize) + (tokens if one is plan else [])

    traffic, stock = traffic_of(plan), collectives.step_traffic(Scheme("deepspeed"), grid, numels, **sent)
    for row, flat in itertools.zip_longest(traffic, stock):
        if row.used:
            # From bandwidth only: average bytes over a device's share of the links (see the command's help).
            seconds = row.wire_bytes / rate / 1e9 if (rate := rates.get(row.tier)) else None
            by_tier.append({**asdict(row), "seconds": seconds, "zero3_bytes": flat and flat.wire_bytes})
    minimum = collectives.schemes_node_bytes(grid, numels, **about)
    schemes: dict[str, dict[str, Any]] = {}
    for name, one in {**{name: scenario.shard_plan(name) for name in PRESETS}, experiment.preset: plan}.items():
        schemes[name] = {
            "weights": _state_text(one.weights_scope, one.gather_hops()[::-1]),
            "gradients": _state_text(one.gradients_scope, one.reduce_hops()),
            "node_bytes": collectives.node_bytes(traffic_of(one), grid),
            **_step_dict(scenario, one),
        }
    # Steps under hzero.fsdp, which has no AutoEP; the bytes are computed for DeepSpeed.
    for name in IN_FSDP if experiment.experts == 1 else ():
        under = replace(scenario, job=job.in_fsdp())
        schemes[f"FSDP2, {name}"] = {**schemes[name], **_step_dict(under, scenario.shard_plan(name))}
    others = scenario.others()
    for name in (name for name in _PEERS if name in others):
        into = {"weights": "", "gradients": "", "node_bytes": minimum.get(name, minimum.get(name.partition(",")[0]))}
        schemes[name] = {**into, **_step_dict(without, others[name])}
    return {
        "model": job.name,
        "parameters": sum(numels),
        "grid": {tier: grid.size(tier) for tier in grid.tiers},
        "world_size": grid.world_size,
        "preset": experiment.preset,
        "plan": str(plan),
        "accumulation": job.accumulation,
        "tokens": job.tokens,
        "checkpointing": job.checkpointing,
        "itemsize": itemsize,
        "notes": [*plan.adaptations, *plan.notes, *_notes(scenario, plan, traffic)],
        "choice": _choice_dict(scenario),
        "advice": _advice(scenario, schemes),
        "memory": [{"name": name, **state._asdict()} for name, state in own.states.items()],
        "zero3_memory": {name: state.bytes for name, state in other.states.items()},
        "moments": own.moments,
        "fullest": own.fullest,
        "memory_bytes": own.bytes,
        "zero3_memory_bytes": other.bytes,
        "device_bytes": scenario.memory,
        "sequences": _sequences(scenario, plan) if job.sequence else None,
        "traffic": by_tier,
        "rates_gb_s": rates,
        "rates": source,
        "schemes": schemes,
        "predicted": _about(scenario) if "step_s" in schemes["ZeRO-3"] else None,
    }


def _advice(scenario: Scenario, schemes: dict[str, dict[str, Any]]) -> str:
    """Says whether another engine is predicted to be as fast as the layout that ``fit`` chose; empty for other presets."""
    own = schemes[scenario.experiment.preset]
    if scenario.choice is None or "step_s" not in own:
        return ""
    others = {
        name: one["step_s"] for name, one in schemes.items() if name in _PEERS and scenario.holds(one["memory_bytes"])
    }
    needed = own["memory_bytes"] - scenario.choice.best.bytes - scenario.shared_bytes
    lines = [
        f'activations and buffers of this step need {size_text(needed)}: with "memory": {{"activations": '
        f'"{math.ceil(needed / 1e9)}GB"}} in the block, fit keeps as much free instead of half of the memory'
    ]
    if others and others[best := min(others, key=others.__getitem__)] <= own["step_s"] * (1 + EQUAL):
        ratio = others[best] / own["step_s"]
        lines.append(f"{best} is predicted to take {ratio:.2f} of the step of fit: hzero saves no time for this job")
    return "\n".join(lines)


def _choice_dict(scenario: Scenario) -> dict[str, Any] | None:
    """The layouts that preset ``fit`` compares, the shortest time first."""
    if (choice := scenario.choice) is None:
        return None
    room = choice.room
    every = [
        {
            "name": one.name,
            "message_s": one.seconds,
            "bytes": one.bytes,
            "fits": room is None or one.bytes <= room,
            "chosen": one is choice.best,
        }
        for one in choice.every
    ]
    return {"text": str(choice), "room": room, "candidates": every}


def _sequences(scenario: Scenario, plan: ShardPlan) -> dict[str, Any]:
    """Bytes and times of chunks in a micro-batch of one device, and the longest sequence that fits with and without chunks."""
    job, grid, codecs = scenario.job, scenario.grid, parse_config(scenario.experiment.block).codecs.sequence
    assert job.sequence is not None
    received = {f"received_{tier}": size for tier, size in exchanged(job, grid, codecs).items()}
    found: dict[str, Any] = {"tokens": job.tokens, **chunked(job), **received}
    if not isinstance(scenario.profile, ConfigError):
        machine, stock = scenario.machine, replace(job, sequence=None, checkpointing=True)
        found["copy_s"] = machine.host(found["to_host"], found["to_device"])
        # The rate of attention counts pairs that are masked, twice the operations here.
        attended = 2 * found["attention_flops"] / machine.profile.value("attention_share")
        rate = machine.rate(min(job.tokens, job.sequence.chunk * job.micro_batch))
        found["compute_s"] = (found["flops"] - found["attention_flops"] + attended) / rate
        host = scenario.profile.value("ddr_gb") * 1e9 / grid.scope_size("node")
        for key, one in (("longest", job), ("longest_with_checkpointing_alone", stock)):
            found[key] = longest(plan, grid, one, scenario.memory or 0, host)
    return found


def _state_text(scope: str, hops: Sequence[Hop]) -> str:
    """Scope and codecs, innermost first."""
    return f"{scope}, {'/'.join(dict.fromkeys(hop.codec.codec for hop in hops)) or 'none'}"


def _step_dict(scenario: Scenario, scheme: ShardPlan | Scheme) -> dict[str, Any]:
    """A predicted step; only the memory if the machine or the model cannot be simulated."""
    divided = scheme is scenario.experiment.plan and scenario.experiment.experts > 1
    if isinstance(scenario.profile, ConfigError) or not scenario.job.layer or divided:
        return {"memory_bytes": footprint(scheme, scenario.grid, scenario.job).bytes}
    return _predicted(scenario, predict_range(scheme, scenario.job, scenario.machine))


def _notes(scenario: Scenario, plan: ShardPlan, traffic: Sequence[TierTraffic]) -> list[str]:
    """Notes on differences between the bytes of a run and of the plan, and on the limits of predictions."""
    notes = []
    if scenario.experiment.preset == FIT and scenario.choice is None:
        notes.append(
            "fit chooses at the start of a run, by measured links; without a profile, this is the layout of lossless"
        )
    if plan.exact and scenario.job.itemsize == 2:
        bits, lr = plan.refresh_hops()[0].codec.format.bits, scenario.experiment["train"]["lr"]
        notes.append(
            f"codec exact: {bits:.1f} bits per weight expected at learning rate {lr:g}; --bits sets another number"
        )
    if plan.gather_hops() and sum(scenario.job.model.numels) <= scenario.job.reuse:
        notes.append(
            "the model has no more parameters than stage3_max_reuse_distance, so DeepSpeed keeps weights for their next use: "
            "a run fetches less than these bytes"
        )
    if checksums := {row.tier: row.checksum_bytes for row in traffic if row.checksum_bytes}:
        added = ", ".join(f"{size} bytes on {tier}" for tier, size in checksums.items())
        notes.append(f"checksums add to every collective {added}; these bytes leave them out")
    if scenario.job.matrices:
        balance = scenario.job.owned(scenario.grid).balance_text()
        notes.append(
            f"Muon: {balance}; steps and bytes of other engines leave it out, and stock ZeRO-3 gathers every matrix on all ranks"
        )
    if scenario.experiment.experts > 1:
        notes.append("expert parallelism: other schemes are without it, transient memory too; no step is predicted")
    return notes


def _show_plan(result: dict[str, Any]) -> None:
    _say(
        f"{result['model']}: {result['parameters']:,} parameters of {result['itemsize']} bytes on {result['world_size']:,} "
        f"devices; micro-batches per step: {result['accumulation']}, each of {result['tokens']:,} tokens per device, "
        f"{'with' if result['checkpointing'] else 'without'} activation checkpointing\n"
        f"preset {result['preset']}: {result['plan']}"
    )
    for note in result["notes"]:
        _say(f"note: {note}")
    if choice := result["choice"]:
        _show_choice(choice)
    stock = {name: size_text(size) for name, size in result["zero3_memory"].items()}
    rows: list[Sequence[str]] = []
    for state in result["memory"]:
        rows.append((state["name"], size_text(state["bytes"]), state["what"], stock.get(state["name"], "")))
    needs, there = result["memory_bytes"], result["device_bytes"]
    at = f"at {result['fullest']}, the maximum"
    rows.append(("all", size_text(needs), at, size_text(result["zero3_memory_bytes"])))
    title = "memory per device (transient: maximum of each, not all at once)"
    _table(title, ("state", "*bytes", "of", "*ZeRO-3"), rows)
    if there is None:
        _say("the memory of a device is unknown: add memory=64GB to see whether the plan fits")
    else:
        verdict = "fits" if needs <= there else f"does not fit, {size_text(needs - there)} too much,"
        _say(f"{result['preset']} {verdict} into {size_text(there)}")
    if sequences := result["sequences"]:
        numbers = [(key, f"{one:,}" if isinstance(one, int) else f"{one:.3g}") for key, one in sequences.items()]
        _table("long sequences: tokens, bytes and seconds (s) per device and micro-batch", ("name", "*number"), numbers)
    rows.clear()
    for row in result["traffic"]:
        ratio = f"{row['raw_bytes'] / row['wire_bytes']:.2f}" if row["wire_bytes"] else ""
        seconds = "" if row["seconds"] is None else f"{row['seconds']:.3f} s"
        stock_bytes = "" if row["zero3_bytes"] is None else size_text(row["zero3_bytes"])
        received = (size_text(row["wire_bytes"]), ratio, seconds, stock_bytes)
        rows.append((row["role"], row["tier"], row["codec"], str(row["crossings"]), *received))
    head = ("role", "tier", "codec", "*times", "*bytes", "*ratio", "*link time", "*ZeRO-3")
    _table("bytes received per device and optimizer step (ZeRO-3: average of flat rings)", head, rows)
    if rates := ", ".join(f"{tier} {rate:.4g}" for tier, rate in result["rates_gb_s"].items() if rate):
        _say(f"link time: from bandwidth only (hzero plan --help); {result['rates']}, GB/s one way per device: {rates}")
    _show_schemes(result["schemes"], there)
    if result["advice"]:
        _say(result["advice"])
    if result["predicted"]:
        _say(result["predicted"]["about"])


def _show_choice(choice: dict[str, Any]) -> None:
    least = min(one["message_s"] for one in choice["candidates"] if one["chosen"])
    rows = []
    for one in choice["candidates"]:
        why = "chosen" if one["chosen"] else f"{one['message_s'] / least:.2f} of the chosen one's time"
        if not one["fits"]:
            why = f"{size_text(one['bytes'] - choice['room'])} too much"
        rows.append((one["name"], f"{one['message_s']:.3g} s", size_text(one["bytes"]), why))
    has = "" if choice["room"] is None else f", for which a device has {size_text(choice['room'])}"
    title = f"layouts that fit compares: time of a step's messages, and memory beside the states of ZeRO-3{has}"
    _table(title, ("layout", "*messages", "*memory", "why"), rows)


def _show_schemes(schemes: dict[str, dict[str, Any]], there: int | None) -> None:
    rows, steps, stock = [], [], schemes["ZeRO-3"]["node_bytes"]
    made = {name: Prediction(**_figures(one)) for name, one in schemes.items() if "step_s" in one}
    fitting = [one for name, one in made.items() if there is None or schemes[name]["memory_bytes"] <= there]
    fastest = min(fitting or made.values(), key=lambda one: one.step_s, default=None)
    for name, one in schemes.items():
        size, into = one["node_bytes"], ("", "")
        if size is not None:
            into = (size_text(size), f"{size / stock:.3f}" if stock else "")
        fits = "" if there is None else "yes" if one["memory_bytes"] <= there else "no"
        rows.append((name, one["weights"], one["gradients"], *into, size_text(one["memory_bytes"]), fits))
        if "step_s" in one:
            exposed, least = one["exposed_s"], 0.005 * one["step_s"]
            waits = ", ".join(f"{exposed[tier]:.3g} {tier}" for tier in TIERS if exposed.get(tier, 0) > least)
            assert fastest is not None
            times = f"{one['step_s']:.3g} s", _range_text(one["interval_s"], 3), _ratio_text(fastest.ratio(made[name]))
            steps.append((name, *times, f"{one['tflops']:.3g}", waits or "nothing", fits))
    head = ("scheme", "weights", "gradients", "*into a node", "*of ZeRO-3", "*memory", "fits")
    _table("scopes and codecs; bytes into one node per step (other engines: minimum); memory per device", head, rows)
    if steps:
        head = ("scheme", "*step", "*interval", "*to the fastest", "*TFLOPS per device", "waits for, s", "fits")
        _table("predicted step; equal: the interval of the ratio contains 1", head, steps)


def _figures(step: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in step.items() if key in Prediction.__dataclass_fields__}


def _range_text(interval: Sequence[float] | None, digits: int) -> str:
    return "unknown" if interval is None else " to ".join(f"{end:.{digits}g}" for end in interval)


def _ratio_text(ratio: tuple[float, float, float]) -> str:
    """A ratio with its interval, or ``equal``."""
    found, low, high = ratio
    return "equal" if low <= 1 <= high else f"{found:.2f} ({low:.2f} to {high:.2f})"


# ---- predictions --------------------------------------------------------------------------------------------------------


def _predicted(scenario: Scenario, step: Prediction) -> dict[str, Any]:
    """A predicted step, and the interval in which 9 of 10 steps are expected."""
    error = scenario.machine.profile.step_error
    return {**asdict(step), "interval_s": error and [step.step_s / (1 + error), step.step_s * (1 + error)]}


def _about(scenario: Scenario) -> dict[str, Any]:
    """The machine of a prediction, and the known errors of its profile."""
    profile = scenario.machine.profile
    kinds = {name: profile.sources[profile.constants[name].source].kind for name in CONSTANTS}
    assumed = [name for name, kind in kinds.items() if kind == "assumed"]
    library = f" ({profile.library})" if profile.library else ""
    errors = {"training steps": profile.step_error, "collectives": profile.error}
    known = " and ".join(f"{name} within {error:.0%}" for name, error in errors.items() if error)
    known = f"9 of 10 published {known}" if known else "its errors are not known"
    return {
        "profile": profile.name,
        "error": profile.error,
        "step_error": profile.step_error,
        "assumed": assumed,
        "memory_bytes": scenario.memory,
        "about": f"profile {profile.name}{library}: {known} (docs/model.md); assumed: {', '.join(assumed) or 'nothing'}",
    }


def against_dict(scenario: Scenario, counts: Sequence[int]) -> dict[str, Any]:
    """All schemes by number of nodes, and the fastest on each."""
    about = _about(scenario)
    scenarios = [scenario.on(count) for count in counts]
    with ProcessPoolExecutor(min(len(counts), os.cpu_count() or 1), multiprocessing.get_context("fork")) as pool:
        found = dict(zip(counts, pool.map(against, scenarios)))
    curves: dict[str, list[dict[str, Any]]] = {}
    for count, prices in found.items():
        for name, price in prices.items():
            point = {"nodes": count, "setting": price.setting, "fits": price.fits, **_predicted(scenario, price.step)}
            curves.setdefault(name, []).append(point)
    job, batch = scenario.job, scenario.global_batch
    grids = [one.grid for one in scenarios]
    return {
        **about,
        "work": f"{batch:,} sequences" if batch else f"sequences per device: {job.micro_batch * job.accumulation}",
        "library": scenario.machine.profile.library,
        "node_gb_s": scenario.machine.profile.value("net_rails_gb_s"),
        "notes": [grid.groups_text for grid in grids if grid.nodes_per_group is None and grid.groups_text],
        "curves": curves,
        "winners": [_winner(count, prices) for count, prices in found.items()],
    }


def _winner(nodes: int, prices: dict[str, Price]) -> dict[str, Any]:
    """The fastest schemes that fit, with and without hzero, the ratio of their steps, and what is equal to the fastest."""
    step = {name: price.step for name, price in prices.items() if price.fits}

    def fastest(hzero: bool) -> str | None:
        return min(
            (name for name in step if ("hzero" in name) == hzero), key=lambda name: step[name].step_s, default=None
        )

    own, other = fastest(True), fastest(False)
    best = min((name for name in (own, other) if name), key=lambda name: step[name].step_s, default=None)

    def ratio(name: str | None) -> tuple[float, float, float] | None:
        return step[own].ratio(step[name]) if own and name in step else None

    lead, stock = ratio(other), ratio("ZeRO-3")
    return {"nodes": nodes, "best": best, "setting": prices[best].setting if best else None, "hzero": own, "other": other,
            "lead": lead and lead[0], "lead_interval": lead and lead[1:],
            "over_zero3": stock and stock[0], "over_zero3_interval": stock and stock[1:],
            "equal": [name for name in step if best and name != best and step[best].equal(step[name])]}  # fmt: skip


def _show_against(result: dict[str, Any]) -> None:
    """Prints TFLOPS per device for at most eight numbers of nodes, and the fastest scheme on each."""
    winners = result["winners"]
    counts = [row["nodes"] for row in winners]
    if len(counts) > 8:
        counts = [counts[round(i * (len(counts) - 1) / 7)] for i in range(8)]
    rows = []
    for name, points in result["curves"].items():
        rates = {point["nodes"]: f"{point['tflops']:.3g}" if point["fits"] else "-" for point in points}
        rows.append((name, *(rates.get(count, "") for count in counts)))
    title = f"predicted model TFLOPS per device, by nodes, {result['work']} (-: does not fit; empty: batch cannot be divided)"
    _table(title, ("scheme", *(f"*{count:,}" for count in counts)), rows)
    rows = []
    for row in winners:
        ratios = (
            _ratio_text((row[key], *row[f"{key}_interval"])) if row[key] else "" for key in ("lead", "over_zero3")
        )
        names = (row[key] or "" for key in ("best", "setting", "hzero", "other"))
        rows.append((f"{row['nodes']:,}", *names, *ratios))
    head = ("*nodes", "fastest", "its setting", "best with hzero", "best without", "*ratio", "*to ZeRO-3")
    title = "fastest scheme; ratio: step without hzero to step with it, with its interval"
    _table(f"{title}; ZeRO-3 with {result['library']}", head, rows)
    for (name, equal), group in itertools.groupby(
        winners, key=lambda row: (row["best"] or "nothing fits", row["equal"])
    ):
        nodes = [row["nodes"] for row in group]
        others = f"; equal to it: {'; '.join(equal)}" if equal else ""
        _say(f"fastest on {nodes[0]:,}{f' to {nodes[-1]:,}' * (len(nodes) > 1)} nodes: {name}{others}")
    for note in result["notes"]:
        _say(note)
    _say(result["about"])


def search_dict(scenario: Scenario) -> dict[str, Any]:
    """Settings that ``--best`` finds."""
    about, found = _about(scenario), search(scenario)

    def of(one: Setting) -> dict[str, Any]:
        return {
            "setting": str(one),
            "block": {"preset": one.preset},
            "overrides": one.overrides,
            "micro_batch": one.job.micro_batch,
            "accumulation": one.job.accumulation,
            "checkpointing": one.job.checkpointing,
            "memory_bytes": one.memory.bytes,
            "fullest": one.memory.fullest,
            "states": {name: state.bytes for name, state in one.memory.states.items()},
            "fits": one.fits,
            **({"sequence_s": one.sequence_s, **_predicted(scenario, one.step)} if one.fits else {}),
        }

    return {
        **about,
        "world_size": scenario.grid.world_size,
        "left_out": found.left_out,
        "settings": {name: of(one) for name, one in found.settings.items()},
        "best": of(found.best),
        "rounded": of(found.rounded),
        "command": found.best.command,
    }


def _show_search(result: dict[str, Any]) -> None:
    rows = []
    for name, one in result["settings"].items():
        figures, over = ("", "", ""), one["memory_bytes"] - result["memory_bytes"]
        if one["fits"]:
            full, share = max(one["busy"].items(), key=lambda item: item[1])
            figures = (f"{one['sequence_s']:.4g}", f"{one['tflops']:.3g}", f"{full} {share:.0%}")
        at = one["fullest"] if one["fits"] else f"{size_text(over)} too much at {one['fullest']}"
        rows.append((name, one["setting"], *figures, size_text(one["memory_bytes"]), at))
    title = (
        f"{len(result['settings'])} settings on {result['world_size']:,} devices of {size_text(result['memory_bytes'])}, "
        f"{result['left_out']:,} do not fit; s: predicted seconds per sequence of a device"
    )
    _table(title, ("", "setting, sequences x micro-batches", "*s", "*TFLOPS", "busiest", "*memory", "at"), rows)
    _say(result["about"])
    best, rounded = result["best"], result["rounded"]
    _say(f'\nbest without rounding: {best["setting"]}\n"hzero": {json.dumps(best["block"])}\n{result["command"]}')
    if rounded != best:
        ratio = rounded["sequence_s"] / best["sequence_s"]
        _say(f"with rounding, {json.dumps(rounded['block'])} takes {ratio:.2f} of its time: {rounded['setting']}")
