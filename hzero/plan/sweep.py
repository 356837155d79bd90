"""Sweep: predicted throughput of all schemes over the nodes of a machine, as figures and as a picture."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

from hzero.config import DEFAULT_PRESET, PRESETS
from hzero.files import refusing, replacing
from hzero.plan.scenario import Scenario
from hzero.plan.step import Prediction, predict
from hzero.validation import ConfigError


def node_counts(text: str) -> list[int]:
    """The nodes of ``nodes=1..9408``: both ends and the powers of two between them; or those of ``nodes=2,4,48``.

    Raises:
        ConfigError: It is neither.
    """
    found = re.fullmatch(r"nodes=(\d{1,6})\.\.(\d{1,6})", text)
    if found and 1 <= (first := int(found[1])) <= (last := int(found[2])):
        return sorted({first, last, *(1 << power for power in range(20) if first < 1 << power < last)})
    if re.fullmatch(r"nodes=[1-9]\d{0,5}(,[1-9]\d{0,5})*", text):
        return sorted({int(count) for count in text.partition("=")[2].split(",")})
    raise ConfigError(f"--sweep: found {text!r}, expected nodes=1..9408 or nodes=2,4,48")


def sweep(scenario: Scenario, nodes: Sequence[int]) -> dict[str, dict[int, Prediction]]:
    """Predicts every scheme on every number of nodes, with equal work per device."""
    places = {count: scenario.on(count) for count in nodes}
    curves: dict[str, dict[int, Prediction]] = {}
    for name in PRESETS:
        curves[f"hzero {name}"] = {n: predict(one.shard_plan(name), one.job, one.machine) for n, one in places.items()}
    for name, scheme in scenario.others().items():
        curves[name] = {n: predict(scheme, one.job, one.machine) for n, one in places.items()}
    return curves


def draw(curves: dict[str, dict[int, Prediction]], scenario: Scenario, path: Path) -> None:
    """Draws TFLOPS per device over the nodes; a curve has a gap where the scheme does not fit.

    Raises:
        ConfigError: The file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 4.6), layout="constrained")
    profile, job = scenario.machine.profile, scenario.job
    for index, (name, steps) in enumerate(curves.items()):
        nodes = list(steps)
        rates = [step.tflops if scenario.holds(step) else math.nan for step in steps.values()]
        if all(map(math.isnan, rates)):  # fits nowhere; the table says so
            continue
        style = "-" if name.startswith("hzero ") else "--"
        width = 3.0 if name == f"hzero {DEFAULT_PRESET}" else 1.4
        axes.plot(nodes, rates, style, color=f"C{index % 10}", label=name, linewidth=width)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"nodes of {profile.name}")
    axes.set_ylabel("model TFLOPS per device, predicted")
    error = "is not known" if profile.error is None else f"is {profile.error:.0%}"
    tokens = job.tokens * job.accumulation
    axes.set_title(f"{job.name}, {tokens:,} tokens per device and step; the model's error {error}", fontsize=9)
    axes.legend(fontsize=7, ncols=3)
    axes.grid(alpha=0.2)
    with refusing("--out", path), replacing(path, "wb") as file:
        figure.savefig(file, format="png", dpi=150)
    plt.close(figure)
