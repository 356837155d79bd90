"""Predictions as plain values, as tables, and as files."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from hzero.config import TIERS
from hzero.files import replacing
from hzero.formatting import size_text, table_of
from hzero.model.profile import Constants
from hzero.model.step import Prediction, predict
from hzero.model.trace import write_trace
from hzero.plan.against import Comparison
from hzero.plan.fit import Fitting, Fittings, fullest
from hzero.plan.scenario import Scenario
from hzero.plan.sweep import Curve
from hzero.plan.tune import Candidate, Found, Tuning
from hzero.settings.conf import key_of
from hzero.sharding.plan import ShardPlan
from hzero.sharding.sequence import Scheme
from hzero.validation import ConfigError


def step_dict(step: Prediction) -> dict[str, Any]:
    """A prediction without its timeline."""
    return {
        "step_s": step.step_s,
        "tflops": step.tflops,
        "tokens_per_s": step.tokens_per_s,
        "compute_s": step.compute_s,
        "exposed_s": step.exposed,
        "latency_s": step.latency_s,
        "busy": step.busy,
        "memory_bytes": step.memory_bytes,
    }


def steps_dict(scenario: Scenario, plan: ShardPlan) -> dict[str, Any]:
    """Predicted steps of the plan's preset and of some others, for a plan."""
    others = scenario.others()
    schemes: dict[str, ShardPlan | Scheme] = {f"hzero {scenario.settings.preset}": plan}
    schemes |= {name: others[name] for name in ("HSDP, node", "ZeRO-3", "hpZ", "ZeRO++")}
    return {
        **_about(scenario),
        "memory_bytes": scenario.memory_bytes,
        "steps": {
            name: step_dict(predict(scheme, scenario.job, scenario.grid, scenario.profile))
            for name, scheme in schemes.items()
        },
    }


def _about(scenario: Scenario) -> dict[str, Any]:
    profile = scenario.profile
    kinds: dict[str, list[str]] = {}
    for name in Constants.model_fields:
        kinds.setdefault(profile.sources[getattr(profile.constants, name).source].kind, []).append(name)
    return {
        "profile": profile.name,
        "error": profile.error,
        "checked": profile.checked,
        "assumed": kinds.get("assumed", []),
    }


#: States that a table shows as one.
_GROUPS = {
    "weights": ("primary weights", "resident weights", "transient parameters", "transient gather", "transient refresh"),
    "gradients": (
        "gradient shard",
        "gradient accumulators",
        "error feedback",
        "gradient buffer",
        "transient reduce",
    ),
    "optimizer": ("optimizer", "transient step"),
    "activations": ("activations", "transient loss", "transient layer"),
    "other": ("communicators", "allocator"),
}


def _busy_text(step: Prediction) -> str:
    return f"{step.full} {step.busy.get(step.full, 0.0):.0%}"


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True, markup=False)


def _error_text(about: dict[str, Any]) -> str:
    if about["error"] is None:
        return "its error is not known"
    return f"its error on {about['checked']} that were not fit is {about['error']:.0%}" + (
        "" if about["checked"] == "steps" else "; no step of this machine could be checked"
    )


def _say_error(scenario: Scenario, console: Console) -> None:
    about = _about(scenario)
    assumed = ", ".join(about["assumed"]) or "nothing"
    _say(console, f"profile {about['profile']}: {_error_text(about)}; assumed: {assumed} (docs/model.md)")


def show_steps(predicted: dict[str, Any], console: Console) -> None:
    """Prints `steps_dict`, for a plan."""
    rows = []
    for name, step in predicted["steps"].items():
        waits = ", ".join(
            f"{step['exposed_s'][t]:.3g} {t}" for t in TIERS if step["exposed_s"].get(t, 0) > 0.005 * step["step_s"]
        )
        rows.append(
            (
                name,
                f"{step['step_s']:.3g} s",
                f"{step['tflops']:.3g}",
                waits or "nothing",
                size_text(step["memory_bytes"]),
            )
        )
    head = ("scheme", "*step", "*TFLOPS per device", "waits for, s", "*memory, activations included")
    title = f"predicted step (profile {predicted['profile']}, devices of {size_text(predicted['memory_bytes'])})"
    console.print(table_of(title, head, rows))
    _say(console, f"a simulation; {_error_text(predicted)} (docs/model.md)")


# ---- tune ---------------------------------------------------------------------------------------------------------------


def tuning_dict(tuning: Tuning, scenario: Scenario) -> dict[str, Any]:
    """A search's result."""

    def of(found: Found) -> dict[str, Any]:
        one = found.candidate
        return {
            "setting": str(one),
            "block": one.block(),
            "overrides": one.overrides(),
            **step_dict(found.prediction),
        }

    return {
        **_about(scenario),
        "world_size": scenario.grid.world_size,
        "global_batch": scenario.global_batch,
        "memory_bytes": scenario.memory_bytes,
        "codecs": scenario.quality,
        "tried": tuning.tried,
        "left_out": tuning.left_out,
        "best": [of(found) for found in tuning.best],
        "by_codecs": {quality: of(found) for quality, found in tuning.by_quality.items()},
        "command": command(tuning.best[0].candidate, scenario),
        "otherwise": [
            {"if": one.what, "longer": one.longer, "first": str(one.best), "gain": one.gain} for one in tuning.otherwise
        ],
    }


def show_tuning(tuning: Tuning, scenario: Scenario, out: Path | None, console: Console) -> None:
    """Prints a search's result."""
    rows = [
        (
            str(place),
            str(found.candidate),
            f"{found.prediction.step_s:.4g} s",
            f"{found.prediction.tflops:.3g}",
            _busy_text(found.prediction),
            size_text(found.prediction.memory_bytes),
        )
        for place, found in enumerate(tuning.best, 1)
    ]
    head = ("*", "setting", "*step", "*TFLOPS", "fullest", "*memory")
    title = (
        f"best of {tuning.tried:,} settings on {scenario.grid}, {scenario.global_batch:,} sequences per step "
        f"({tuning.left_out:,} do not fit into {size_text(scenario.memory_bytes)})"
    )
    console.print(table_of(title, head, rows))
    _say(console, why(tuning))
    _say(console, tied(tuning, scenario))
    for one in tuning.otherwise:
        same = str(one.best) == str(tuning.best[0].candidate) or one.gain < 1e-3
        then = "it stays first" if same else f"{one.best} would be first, by {one.gain:.1%}"
        _say(console, f"with {one.what}: the first takes {_longer(one.longer)}; {then}")
    _say_error(scenario, console)
    first = tuning.best[0].candidate
    _say(console, f'\n"hzero": {json.dumps(first.block())}')
    _say(console, command(first, scenario))
    if out is not None:
        _say(console, f"written to {out}")


def _longer(share: float) -> str:
    return "as long" if abs(share) < 5e-4 else f"{abs(share):.1%} {'longer' if share > 0 else 'less'}"


def command(candidate: Candidate, scenario: Scenario) -> str:
    """The trainer's command with a setting, and with what the user has given beside it."""
    return _train_command(candidate.overrides(), scenario)


def _train_command(chosen: list[str], scenario: Scenario) -> str:
    keys = set(map(key_of, chosen))
    return shlex.join(["hzero", "train", *(one for one in scenario.given if key_of(one) not in keys), *chosen])


def why(tuning: Tuning) -> str:
    """Why the first wins, in a sentence."""
    first = tuning.best[0].prediction
    text = f"the first wins: {first.full} is full for {first.busy.get(first.full, 0.0):.0%} of its step"
    text += f", which waits {_seconds(first)}"
    if len(tuning.best) > 1:
        second = tuning.best[1].prediction
        longer = second.step_s - first.step_s
        more = {f"waiting for {tier}": second.exposed.get(tier, 0.0) - first.exposed.get(tier, 0.0) for tier in TIERS}
        more["compute"] = second.compute_s - first.compute_s
        most = max(more, key=lambda part: more[part])
        text += f"; the second takes {longer:.3g} s longer"
        text += f", most of it for {most}" if longer > 0 and more[most] > 0 else ""
    return text


def _seconds(step: Prediction) -> str:
    parts = [f"{step.exposed[tier]:.3g} s for {tier}" for tier in TIERS if step.exposed.get(tier, 0.0) > 0]
    return ", ".join(parts) or "for nothing"


def tied(tuning: Tuning, scenario: Scenario) -> str:
    """Which setting loses least among those that the model cannot tell from the first."""
    error = scenario.profile.error
    first = tuning.best[0]
    for quality, found in tuning.by_quality.items():
        longer = found.prediction.step_s / first.prediction.step_s - 1
        if error is not None and found is not first and quality != scenario.quality and longer < error:
            return (
                f"within the model's error of {error:.0%}: {found.candidate}, {longer:.1%} longer, is the best with "
                f"codecs={quality}, which prints its block; the model cannot tell the two apart, so take the one that loses less"
            )
    return (
        "no setting that loses less is within the model's error"
        if error is not None
        else "the model's error is not known"
    )


def write_choice(path: Path, tuning: Tuning, scenario: Scenario) -> None:
    """Writes a search's result as JSON, the block and the overrides in it.

    Raises:
        ConfigError: It cannot be written.
    """
    try:
        with replacing(path) as file:
            file.write(json.dumps(tuning_dict(tuning, scenario), indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"--out: cannot write {str(path)!r}: {error.strerror}") from None


# ---- fit ----------------------------------------------------------------------------------------------------------------


def fitting_dict(fittings: Fittings, scenario: Scenario) -> dict[str, Any]:
    """What fits, by preset."""

    def of(one: Fitting) -> dict[str, Any]:
        return {
            "preset": one.preset,
            "checkpointing": one.job.checkpointing,
            "micro_batch": one.job.micro_batch,
            "accumulation": one.job.accumulation,
            "fits": one.fits,
            "memory_bytes": one.footprint.bytes,
            "fullest": one.footprint.fullest,
            "states": {state.name: state.bytes for state in one.footprint.states},
            "over_bytes": max(one.footprint.bytes - scenario.memory_bytes, 0),
            "sequence_s": one.sequence_s if one.fits else None,
        }

    best = fittings.best
    return {
        **_about(scenario),
        "memory_bytes": scenario.memory_bytes,
        "fittings": [of(one) for one in fittings.found],
        "best": of(best),
        "block": {"preset": best.preset},
        "overrides": best.overrides(),
        "command": _train_command(best.overrides(), scenario),
    }


def show_fitting(fittings: Fittings, scenario: Scenario, console: Console) -> None:
    """Prints what fits, by preset; where nothing does, what fills the device."""
    pairs = list(zip(fittings.found[::2], fittings.found[1::2]))
    shown = [again if again.fits and not plain.fits else plain for plain, again in pairs]
    micro = [(plain.preset, *_fitting_cells(plain), *_fitting_cells(again)) for plain, again in pairs]
    head = ("preset", "*without", "*memory", "*s", "*with", "*memory", "*s")
    title = (
        f"largest micro-batch x micro-steps without and with checkpointing that fits into "
        f"{size_text(scenario.memory_bytes)} on {scenario.grid}; s: predicted, per sequence"
    )
    console.print(table_of(title, head, micro))
    held = [
        (
            f"{one.preset}{', checkpointing' * one.job.checkpointing}",
            *(size_text(sum(s.bytes for s in one.footprint.states if s.name in names)) for names in _GROUPS.values()),
        )
        for one in shown
    ]
    title = "what it holds, each at most (with checkpointing where nothing else fits)"
    console.print(table_of(title, ("preset", *(f"*{name}" for name in _GROUPS)), held))
    for _, one in pairs:
        if not one.fits:
            over = size_text(one.footprint.bytes - scenario.memory_bytes)
            most = ", ".join(f"{name} {size_text(size)}" for name, size in fullest(one.footprint))
            _say(console, f"{one.preset}: {over} too much at {one.footprint.fullest}, even with checkpointing: {most}")
    best = fittings.best
    job = best.job
    _say(
        console,
        f"shortest predicted time per sequence: {best.preset} with {job.micro_batch} x {job.accumulation} sequences"
        f"{' and checkpointing' if job.checkpointing else ''}, {size_text(best.footprint.bytes)} at "
        f"{best.footprint.fullest}; `hzero plan --tune` searches further",
    )
    states = [(state.name, size_text(state.bytes), state.what) for state in best.footprint.states if state.bytes]
    console.print(table_of("its memory", ("state", "*bytes", "of"), states))
    _say_error(scenario, console)
    _say(console, f'\n"hzero": {json.dumps({"preset": best.preset})}')
    _say(console, _train_command(best.overrides(), scenario))


def _fitting_cells(one: Fitting) -> tuple[str, str, str]:
    if not one.fits:
        return "none", size_text(one.footprint.bytes), ""
    return f"{one.job.micro_batch} x {one.job.accumulation}", size_text(one.footprint.bytes), f"{one.sequence_s:.3g}"


# ---- sweep --------------------------------------------------------------------------------------------------------------


def sweep_dict(curves: Sequence[Curve], scenario: Scenario) -> dict[str, Any]:
    """All curves of a sweep."""
    return {
        **_about(scenario),
        "tokens_per_device": scenario.job.tokens * scenario.job.accumulation,
        "curves": {
            curve.name: [
                {"nodes": nodes, "fits": step.memory_bytes <= curve.memory_bytes, **step_dict(step)}
                for nodes, step in zip(curve.nodes, curve.steps)
            ]
            for curve in curves
        },
    }


def show_sweep(curves: Sequence[Curve], scenario: Scenario, out: Path, console: Console) -> None:
    """Prints TFLOPS per device."""
    counts = curves[0].nodes
    chosen = counts if len(counts) <= 8 else [counts[round(i * (len(counts) - 1) / 7)] for i in range(8)]
    rows = []
    for curve in curves:
        rates = dict(zip(curve.nodes, curve.tflops()))
        rows.append((curve.name, *("-" if math.isnan(rates[n]) else f"{rates[n]:.3g}" for n in chosen)))
    head = ("scheme", *(f"*{count:,}" for count in chosen))
    memory = size_text(scenario.memory_bytes)
    title = f"predicted model TFLOPS per device, by nodes (-: does not fit into {memory})"
    console.print(table_of(title, head, rows))
    for count in counts:
        if (grid := scenario.on(count).grid).nodes_per_group is None and grid.groups_text:
            _say(console, grid.groups_text)
    _say_error(scenario, console)
    _say(console, f"drawn in {out}")


# ---- a run, a trace -----------------------------------------------------------------------------------------------------


def comparison_dict(found: Comparison) -> dict[str, Any]:
    """A run beside its prediction."""
    return {
        "run": str(found.run),
        "profile": found.profile,
        "waiting_by": "trace" if found.traced else "wire log",
        "step": {"measured_s": found.step.measured, "predicted_s": found.step.predicted},
        "parts": {part.name: {"measured_s": part.measured, "predicted_s": part.predicted} for part in found.parts},
        "largest_gap": found.largest.name,
        "prediction": step_dict(found.prediction),
    }


def show_comparison(found: Comparison, console: Console) -> None:
    """Prints a run beside its prediction."""
    rows = [
        (part.name, f"{part.measured:.3f}", f"{part.predicted:.3f}", f"{part.gap:+.3f}")
        for part in (found.step, *found.parts)
    ]
    waiting = "trace" if found.traced else "wire log"
    title = f"{found.run} and its prediction (profile {found.profile}), seconds; waiting by its {waiting}"
    console.print(table_of(title, ("", "*measured", "*predicted", "*gap"), rows))
    largest = found.largest
    share = abs(largest.gap) / found.step.measured
    longer = "longer" if largest.gap > 0 else "shorter"
    _say(
        console,
        f"largest gap: {largest.name} took {abs(largest.gap):.3f} s {longer} than predicted, {share:.0%} of the step",
    )


def write_step(path: Path, step: Prediction, scenario: Scenario) -> None:
    """Writes a predicted step for Perfetto.

    Raises:
        ConfigError: It cannot be written.
    """
    assert step.timeline is not None
    try:
        write_trace(path, step.timeline, f"{scenario.settings.preset} on {scenario.profile.name}")
    except OSError as error:
        raise ConfigError(f"--trace: cannot write {str(path)!r}: {error.strerror}") from None


def show_trace(path: Path, step: Prediction, scenario: Scenario, console: Console) -> None:
    """Prints what a written step is."""
    _say(
        console,
        f"{path}: a step of {step.step_s:.3f} s, {step.tflops:.3g} TFLOPS per device, which waits {_seconds(step)}",
    )
    _say_error(scenario, console)
