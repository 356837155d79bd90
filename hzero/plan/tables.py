"""Results of `hzero plan` as tables, from the plain values of `hzero.plan.command`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from hzero.config import TIERS
from hzero.terminal import size_text, table_of


def _say(console: Console, text: str) -> None:
    """Prints text as it is, wrapped by the terminal only."""
    console.print(text, highlight=False, soft_wrap=True, markup=False)


def _say_error(about: dict[str, Any], console: Console) -> None:
    error, assumed = about["error"], ", ".join(about["assumed"]) or "nothing"
    checked = "is not known" if error is None else f"on collectives that were not fit is {error:.0%}"
    text = f"its error {checked}, and no step of this machine could be checked; assumed: {assumed} (docs/model.md)"
    _say(console, f"profile {about['profile']}: {text}")


def show_plan(result: dict[str, Any], console: Console) -> None:
    """Prints a plan."""
    _say(
        console,
        f"{result['model']}: {result['parameters']:,} parameters of {result['itemsize']} bytes on "
        f"{result['world_size']:,} devices ({result['grid_text']})\n"
        f"preset {result['preset']}: weights over the {result['weights']}, gradients over the "
        f"{result['gradients']}, optimizer over the world; micro-steps per step: {result['accumulation']}",
    )
    for note in result["notes"]:
        _say(console, f"note: {note}")
    _show_memory(result, console)
    flat = {(row["role"], row["tier"]): row["wire_bytes"] for row in result["zero3_traffic"]}
    rows: list[Sequence[str]] = []
    for row in filter(lambda row: row["used"], result["traffic"]):
        ratio = f"{row['raw_bytes'] / row['wire_bytes']:.2f}" if row["wire_bytes"] else ""
        sizes = [size_text(size) for size in (row["wire_bytes"], flat[row["role"], row["tier"]])]
        rows.append((row["role"], row["tier"], row["codec"], str(row["crossings"]), sizes[0], ratio, sizes[1]))
    head: Sequence[str] = ("role", "tier", "codec", "*crossings", "*bytes", "*ratio", "*ZeRO-3, average")
    console.print(table_of("bytes received per device and optimizer step (ZeRO-3: flat rings)", head, rows))
    _show_presets(result, console)
    if result["link_seconds"]:
        _show_links(result, console)
    if result["predicted"] is not None:
        _show_steps(result["predicted"], console)


def _show_memory(result: dict[str, Any], console: Console) -> None:
    stock = {state["name"]: size_text(state["bytes"]) for state in result["zero3_memory"]}
    rows = [(s["name"], size_text(s["bytes"]), s["what"], stock.get(s["name"], "")) for s in result["memory"]]
    title = "memory per device (transient: at most, and not all at once)"
    table = table_of(title, ("state", "*bytes", "of", "*ZeRO-3"), rows)
    needs, there, moments = result["memory_bytes"], result["device_bytes"], result["moments"]
    fullest = f"at {max(moments, key=lambda name: moments[name])}, when most is there"
    table.add_row("all", size_text(needs), fullest, size_text(result["zero3_memory_bytes"]), style="bold")
    console.print(table)
    verdict = "fits" if there is None or needs <= there else f"does not fit, {size_text(needs - there)} too much,"
    unknown = "whether it fits is not known: give memory=64GB"
    _say(console, unknown if there is None else f"{result['preset']} {verdict} into {size_text(there)}")


def _show_presets(result: dict[str, Any], console: Console) -> None:
    there, counts = result["device_bytes"], result["node_bytes"]
    rows = []
    for name, one in result["presets"].items():
        fits = "" if there is None else "yes" if one["memory_bytes"] <= there else "no"
        rows.append((name, one["weights"], one["gradients"], one["node_bytes"], size_text(one["memory_bytes"]), fits))
    rows += [(name, "", "", size, "", "") for name, size in counts.items() if not name.startswith("hzero ")]
    stock = counts["ZeRO-3"]
    cells = [(*row[:3], size_text(row[3]), f"{row[3] / stock:.3f}" if stock else "", *row[4:]) for row in rows]
    head = ("preset", "weights over, in", "gradients over, in", "*into one node", "*of ZeRO-3", "*memory", "fits")
    title = "all presets: bytes into one node per step, and memory per device (other schemes: minimum, by closed forms)"
    console.print(table_of(title, head, cells))


def _show_links(result: dict[str, Any], console: Console) -> None:
    links, rows = result["links"], []
    for tier, seconds in result["link_seconds"].items():
        times = (f"{seconds:.3f} s", f"{result['zero3_link_seconds'][tier]:.3f} s")
        rows.append((tier, f"{result['rates_gb_s'][tier]:.4g}", *times))
    head = ("tier", "*GB/s", "*hzero", "*ZeRO-3")
    source = "nominal rates, not measured"
    if links is not None:
        source = f"measured {links['date']} on {links['grid_text']}, {links['backend']} on {links['device']}"
    console.print(table_of(f"link time per step from bandwidth only ({source})", head, rows))
    _say(console, "GB/s: one way per device. Not counted: latency, compute, overlap (assumptions: hzero plan --help)")


def _show_steps(predicted: dict[str, Any], console: Console) -> None:
    rows = []
    for name, step in predicted["steps"].items():
        exposed, least = step["exposed_s"], 0.005 * step["step_s"]
        waits = ", ".join(f"{exposed[tier]:.3g} {tier}" for tier in TIERS if exposed.get(tier, 0) > least) or "nothing"
        memory = size_text(step["memory_bytes"])
        rows.append((name, f"{step['step_s']:.3g} s", f"{step['tflops']:.3g}", waits, memory))
    head = ("scheme", "*step", "*TFLOPS per device", "waits for, s", "*memory")
    console.print(table_of(f"predicted step ({_devices(predicted)})", head, rows))
    _say_error(predicted, console)


def _devices(about: dict[str, Any]) -> str:
    return f"devices of {size_text(about['memory_bytes'])}"


def show_search(result: dict[str, Any], console: Console) -> None:
    """Prints the settings that a search has found."""
    rows = []
    for name, one in result["settings"].items():
        figures, over = ("", "", ""), one["memory_bytes"] - result["memory_bytes"]
        if one["fits"]:
            full, share = max(one["busy"].items(), key=lambda item: item[1])
            figures = (f"{one['sequence_s']:.4g}", f"{one['tflops']:.3g}", f"{full} {share:.0%}")
        at = one["fullest"] if one["fits"] else f"{size_text(over)} too much at {one['fullest']}"
        rows.append((name, one["setting"], *figures, size_text(one["memory_bytes"]), at))
    title = (
        f"{result['tried']:,} settings simulated on {result['world_size']:,} {_devices(result)}, {result['left_out']:,} do "
        "not fit; s: predicted seconds per sequence of a device"
    )
    head = ("", "setting, micro-batch x micro-steps", "*s", "*TFLOPS", "busiest", "*memory", "at")
    console.print(table_of(title, head, rows))
    _say_error(result, console)
    _say(console, "settings that differ by less than the error are equal: of these, take the one that loses less")
    _say(console, f'\nbest: {result["best"]["setting"]}\n"hzero": {json.dumps(result["best"]["block"])}')
    _say(console, result["command"])


def show_sweep(result: dict[str, Any], console: Console) -> None:
    """Prints TFLOPS per device, of eight counts at most."""
    counts = [point["nodes"] for point in next(iter(result["curves"].values()))]
    if len(counts) > 8:
        counts = [counts[round(i * (len(counts) - 1) / 7)] for i in range(8)]
    rows = []
    for name, points in result["curves"].items():
        rates = {point["nodes"]: f"{point['tflops']:.3g}" if point["fits"] else "-" for point in points}
        rows.append((name, *(rates[count] for count in counts)))
    title = f"predicted model TFLOPS per device, by nodes (-: does not fit into {_devices(result)})"
    console.print(table_of(title, ("scheme", *(f"*{count:,}" for count in counts)), rows))
    for note in result["notes"]:
        _say(console, note)
    _say_error(result, console)
    _say(console, f"drawn in {result['picture']}")
