"""``python -m benchmarks.report first_run FOLDER``: what slurm/first_run.sbatch measured, beside what was predicted."""

from __future__ import annotations

import contextlib
import json
import math
import re
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hzero.config import NET_TIERS
from hzero.errors import ConfigError, size_text
from hzero.files import refusing, replacing
from hzero.topology.links_file import TierRate, read_links

#: Parts that train: as readers know them, and as the plan calls them.
SCHEMES = {
    "zero3": ("ZeRO-3", "ZeRO-3"),
    "zeropp": ("hzero `zeropp`", "zeropp"),
    "hsdp": ("FSDP2, HSDP over the node", "HSDP, node"),
    "topo": ("hzero `topo`", "topo"),
    "lossless": ("hzero `lossless`", "lossless"),
    "lanes": ("hzero `topo`, order lanes", "topo"),
}
#: Steps that are not timed: connections, compilations, the profiler.
WARMUP = 3
#: Relative differences up to which a prediction counts as confirmed: times, rates and peaks of memory; bytes; losses in bfloat16.
TIME, BYTES, LOSS = 0.15, 0.01, 0.01
KILLED = "**killed** by its limit"


class Folder:
    """What a run left. A part that was killed or failed has left nothing, or less: files may be incomplete."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not (path / "parts.tsv").is_file():
            raise ConfigError(
                f"first_run: found no parts.tsv in {str(path)!r}; expected a folder of slurm/first_run.sbatch"
            )
        parts = map(str.split, self._text("parts.tsv").splitlines())
        self.parts = {row[0]: row[1:] for row in parts if len(row) == 4}
        self.plan, self.doctor = self._json("logs/plan.log"), self._json("logs/doctor.log")
        self.rows = {name: self._lines(f"{name}/steps.jsonl") for name in SCHEMES}
        self.summaries = {name: self._json(f"{name}/summary.json") for name in SCHEMES}
        kernels = sorted(path.glob("*-kernels-*.jsonl"))
        self.kernels = self._lines(kernels[-1].name)[1:] if kernels else []
        self.links: dict[Any, TierRate] = {}
        with contextlib.suppress(ConfigError):  # no such file, or a part of one
            self.links = read_links(path / "links.json").tiers

    def end(self, part: str) -> str:
        """How a part ended: ``done``, `KILLED`, or its status. A killed part has used its time; 137 alone may be a rank's."""
        if part not in self.parts:
            return "not started"
        status, seconds, limit = self.parts[part]
        killed = status in ("124", "137") and int(seconds) >= int(limit)
        return "done" if status == "0" else KILLED if killed else f"**status {status}**"

    def _text(self, name: str) -> str:
        file = self.path / name
        return file.read_text(errors="replace") if file.is_file() else ""

    def _json(self, name: str) -> dict[str, Any]:
        """The object that begins a line of a file, which may have other lines before and after it."""
        text = self._text(name)
        for line in re.finditer(r"^\{", text, re.MULTILINE):
            with contextlib.suppress(ValueError):
                found: dict[str, Any] = json.JSONDecoder().raw_decode(text, line.start())[0]
                return found
        return {}

    def _lines(self, name: str) -> list[dict[str, Any]]:
        rows = []
        for line in self._text(name).splitlines():
            with contextlib.suppress(ValueError):
                rows.append(json.loads(line))
        return [row for row in rows if isinstance(row, dict)]

    def step_s(self, name: str) -> float | None:
        """Median seconds of a step."""
        times = [row["seconds"] for row in self.rows[name][WARMUP:]]
        return statistics.median(times) if times else None

    def losses(self, name: str) -> list[float]:
        """Of every step."""
        return [row["loss"] for row in self.rows[name]]

    def node_bytes(self, name: str, roles: Sequence[str] = ()) -> float | None:
        """Bytes into one node per step by the wire log, of some roles or of all; None without a log."""
        rows, grid = self.summaries[name].get("bytes_per_step"), self.summaries[name].get("grid", {})
        sizes = [
            row["received"] for row in rows or () if row["tier"] in NET_TIERS and row["role"] in (roles or row["role"])
        ]
        return sum(sizes) / grid.get("inter_node", 1) if rows else None

    def planned(self, name: str, key: str) -> float | None:
        """``step_s``, ``memory_bytes`` or ``node_bytes`` by the plan; None where it has none."""
        scheme = self.plan.get("schemes", {}).get(SCHEMES[name][1], {})
        if (found := scheme.get(key)) is None:
            return None
        if key == "node_bytes" and scheme.get("weights", "").startswith("world"):
            # The plan gathers weights for forward and for backward. DeepSpeed keeps those that it uses again soon.
            gathers = self.summaries[name].get("fetches_per_micro_step", 2)
            found -= (self.node_bytes(name, ["weights"]) or 0) * (2 / gathers - 1)
        return float(found)


def predictions(run: Folder) -> Iterator[tuple[str, bool | None, str]]:
    """What README and plan predict, whether the run confirms it (None: not measured), and what it found."""
    ended = run.end("kernels") == "done"
    differs = "not bit-equal" in run._text("logs/kernels.err")
    yield "The kernels give the bits of plain torch", True if ended else False if differs else None, ""
    for name in SCHEMES:
        found, planned = run.node_bytes(name), run.planned(name, "node_bytes")
        if name != "lanes" and found is not None and planned is not None:
            good = abs(found - planned) <= BYTES * planned
            yield (
                f"{SCHEMES[name][0]}: bytes into a node per step",
                good,
                f"{size_text(found)}, planned {size_text(planned)}",
            )
        stock, time = run.step_s("zero3"), run.step_s(name)
        if name not in ("zero3", "lanes") and stock and time:
            ratio, ours, theirs = time / stock, run.planned(name, "step_s"), run.planned("zero3", "step_s")
            if ours and theirs:
                good = abs(ratio / (ours / theirs) - 1) <= TIME
                yield f"{SCHEMES[name][0]}: step over ZeRO-3's", good, f"{ratio:.2f}, predicted {ours / theirs:.2f}"
        peak, room = run.summaries[name].get("peak_bytes"), run.planned(name, "memory_bytes")
        if peak and room and name != "lanes":
            good = abs(peak / room - 1) <= TIME
            yield f"{SCHEMES[name][0]}: peak of memory", good, f"{size_text(peak)}, planned {size_text(room)}"
    states, rows = (
        run.summaries["topo"].get("memory"),
        {row["name"]: row["bytes"] for row in run.plan.get("memory", [])},
    )
    if states and rows:
        held, sizes = sum(states.values()), sum(rows[name] for name in states)
        yield (
            "hzero `topo`: memory of states",
            abs(held / sizes - 1) <= BYTES,
            f"{size_text(held)}, planned {size_text(sizes)}",
        )
    for tier, rate in run.links.items():
        if assumed := (run.plan.get("rates_gb_s") or {}).get(tier):
            good = rate.gb_s >= (1 - TIME) * assumed
            yield f"Links of tier {tier}", good, f"{rate.gb_s:.4g} GB/s per device, assumed {assumed:g}"
    for name in ("lossless", "topo"):
        pairs = list(zip(run.losses(name), run.losses("zero3")))
        if pairs:
            # A loss that is not a number compares with nothing.
            worst = max((abs(ours / theirs - 1) for ours, theirs in pairs), key=lambda one: (math.isnan(one), one))
            yield (
                f"{SCHEMES[name][0]}: loss of ZeRO-3 (in float32)",
                worst <= LOSS,
                f"at most {worst:.2%} in {len(pairs)} steps",
            )
    # A part that failed has not shown whether the order hangs.
    if (end := run.end("lanes")) in ("done", KILLED):
        yield "Order `lanes` does not hang", end == "done", f"{len(run.rows['lanes'])} steps"


def page(run: Folder) -> str:
    """The page as Markdown."""
    about, *variables = run._text("environment.txt").splitlines() or [""]
    verdict, remarks = run.doctor.get("verdict", "no answer"), run.doctor.get("remarks", [])
    sections = [f"# First run: {about}", "Keys: " + " ".join(f"`{key}`" for key in run._text("keys.txt").splitlines())]
    rows = []
    for name, (status, seconds, limit) in run.parts.items():
        end = run.end(name)
        if name in ("doctor", "faults") and status in ("1", "2"):  # its verdict
            end = "done, see below"
        rows.append((name, end, seconds, limit))
    sections += ["## Parts", table("part | end | seconds | limit", rows)]
    said = {True: "**confirmed**", False: "**refuted**", None: "not measured"}
    checked = [(what, said[good], found) for what, good, found in predictions(run)]
    sections += ["## Predictions", table("prediction | this run | found", checked)]
    times = []
    for name, (label, _) in SCHEMES.items():
        step, planned, losses = run.step_s(name), run.planned(name, "step_s"), run.losses(name)
        ends = (f"{losses[0]:.4f}", f"{losses[-1]:.4f}") if losses else ("", "")
        times.append((label, len(losses), *beside(step, planned, "{:.3f}"), *ends))
    head = "scheme | steps | s per step (median) | predicted | difference | first loss | last loss"
    sections += ["## Steps", table(head, times)]
    wires = [(SCHEMES[name][0], row["tier"], row["role"], row["codec"], size_text(row["received"])) for name in SCHEMES
             for row in run.summaries[name].get("bytes_per_step", [])]  # fmt: skip
    sections += ["## Bytes", table("scheme | tier | state | codec | received per step, all ranks", wires)]
    rates = run.plan.get("rates_gb_s") or {}
    tiers = [
        (tier, *beside(rate.gb_s, rates.get(tier), "{:.4g}"), f"{rate.latency_us:.1f}")
        for tier, rate in run.links.items()
    ]
    sections += ["## Links", table("tier | GB/s per device | assumed | difference | latency, us", tiers)]
    timed = [
        (row["kernel"], row["moved_bytes"] / statistics.median(row["seconds"]) / 1e9)
        for row in run.kernels
        if row["seconds"]
    ]
    speeds = [(name, f"{rate:.1f}", f"{rate / timed[0][1]:.2f}") for name, rate in timed]
    sections += ["## Kernels", table("kernel, shards aligned, then not | GB/s moved | to the copy", speeds)]
    faults = [line for line in run._text("logs/faults.log").splitlines() if line]
    sections += [
        f"## Doctor: {verdict}",
        *(f"- {text}" for text in (*remarks, *faults)),
        f"- {run.doctor.get('versions', '')}",
    ]
    sections += ["## Environment", "\n".join(["```", *variables, "```"])]
    ratios = [
        f"{step / stock:.2f}" if (step := run.step_s(name)) and (stock := run.step_s("zero3")) else "-"
        for name in SCHEMES
    ]
    cells = [
        f"step over ZeRO-3's: {about.split(', commit')[0]}",
        ratios[4],
        ratios[3],
        f"`zeropp` {ratios[1]}, HSDP {ratios[2]}",
    ]
    sections += ["## Row for the README", f"| {' | '.join(cells)} | `slurm/first_run.sbatch` |"]
    return "\n\n".join(sections).replace("\n\n- ", "\n- ") + "\n"


def beside(found: float | None, planned: float | None, form: str) -> tuple[str, str, str]:
    """A figure, its prediction, and their difference."""
    difference = f"{found / planned - 1:+.0%}" if found and planned else ""
    return form.format(found) if found else "", form.format(planned) if planned else "", difference


def table(head: str, rows: Sequence[Sequence[Any]]) -> str:
    """A table of Markdown."""
    lines = ["not measured"] if not rows else [f"| {head} |", "|---" * len(rows[0]) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def write(path: Path) -> Path:
    """Writes ``first_run.md`` into the folder of a run. Raises `ConfigError` for another folder, or one of another user."""
    text = page(Folder(path))
    with refusing("first_run", path), replacing(path / "first_run.md") as file:
        file.write(text)
    return path / "first_run.md"
