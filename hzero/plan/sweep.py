"""Sweep: predicted throughput of all schemes over the nodes of a machine, as figures and as a picture."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hzero.config import DEFAULT_PRESET, PRESETS
from hzero.files import replacing
from hzero.model.step import Prediction, predict
from hzero.parsing import parse_config
from hzero.plan.scenario import Scenario
from hzero.sharding.plan import ShardPlan
from hzero.sharding.sequence import Scheme
from hzero.validation import ConfigError


@dataclass(frozen=True)
class Curve:
    """One scheme over the nodes.

    Attributes:
        name: The scheme.
        ours: Whether it is a preset of the stage.
        nodes: Nodes.
        steps: Predictions.
        memory_bytes: Of a device, at most; where a scheme needs more its curve has a gap.
    """

    name: str
    ours: bool
    nodes: list[int]
    steps: list[Prediction]
    memory_bytes: int

    def tflops(self) -> list[float]:
        """Per device; NaN where it does not fit."""
        return [step.tflops if step.memory_bytes <= self.memory_bytes else float("nan") for step in self.steps]


def node_counts(text: str) -> list[int]:
    """The nodes of ``nodes=1..9408``: both ends and the powers of two between them; or those of ``nodes=2,4,48``.

    Raises:
        ConfigError: It is neither.
    """
    found = re.fullmatch(r"nodes=(\d{1,6})\.\.(\d{1,6})", text)
    if found:
        first, last = int(found[1]), int(found[2])
        if 1 <= first <= last:
            return sorted({first, last, *(1 << power for power in range(20) if first < 1 << power < last)})
    elif re.fullmatch(r"nodes=[1-9]\d{0,5}(,[1-9]\d{0,5})*", text):
        return sorted({int(count) for count in text.partition("=")[2].split(",")})
    raise ConfigError(f"--sweep: found {text!r}, expected nodes=1..9408 or nodes=2,4,48")


def sweep(scenario: Scenario, nodes: Sequence[int]) -> list[Curve]:
    """Predicts every scheme on every number of nodes, with equal work per device."""
    schemes: dict[str, Scheme | str] = {**{f"hzero {name}": name for name in PRESETS}, **scenario.others()}
    curves = []
    for name, scheme in schemes.items():
        steps = []
        for count in nodes:
            there = scenario.on(count)
            made = (
                ShardPlan.from_config(parse_config({"preset": scheme}), there.grid, 0)
                if isinstance(scheme, str)
                else scheme
            )
            steps.append(predict(made, there.job, there.grid, there.profile))
        curves.append(Curve(name, isinstance(scheme, str), list(nodes), steps, scenario.memory_bytes))
    return curves


def draw(curves: Sequence[Curve], scenario: Scenario, path: Path) -> None:
    """Draws TFLOPS per device over the nodes, with bands of the profile's error; whole or not at all.

    Raises:
        ConfigError: The file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 4.6), layout="constrained")
    error = scenario.profile.error
    for index, curve in enumerate(curves):
        rates = curve.tflops()
        if all(math.isnan(rate) for rate in rates):  # fits nowhere; the table says so
            continue
        style = "-" if curve.ours else "--"
        width = 3.0 if curve.name == f"hzero {DEFAULT_PRESET}" else 1.4
        [line] = axes.plot(curve.nodes, rates, style, color=f"C{index % 10}", label=curve.name, linewidth=width)
        if error is not None:
            low, high = ([rate / (1 + sign * error) for rate in rates] for sign in (1, -1))
            axes.fill_between(curve.nodes, low, high, color=line.get_color(), alpha=0.07, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"nodes of {scenario.profile.name}")
    axes.set_ylabel("model TFLOPS per device, predicted")
    job = scenario.job
    band = "no error is stated" if error is None else f"bands: step times off by {error:.0%}"
    axes.set_title(
        f"{job.model.name}, {job.tokens * job.accumulation:,} tokens per device and step; {band}", fontsize=9
    )
    axes.legend(fontsize=7, ncols=3)
    axes.grid(alpha=0.2)
    try:
        with replacing(path, "wb") as file:
            figure.savefig(file, format="png", dpi=150)
    except OSError as failure:
        raise ConfigError(f"--out: cannot write {str(path)!r}: {failure.strerror}") from None
    finally:
        plt.close(figure)
