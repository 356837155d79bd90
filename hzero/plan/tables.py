"""A plan as tables."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from hzero.formatting import size_text, table_of
from hzero.plan.predicted import show_steps

#: Why activations are not known, without tensor parallelism and with it.
_UNKNOWN = ("the layers of the model differ", "predictions know no tensor or sequence parallelism")

#: Of `traffic_cells`; a star begins the names of numbers.
TRAFFIC_HEAD = ("role", "tier", "codec", "*crossings", "*bytes", "*ratio")


def show(result: dict[str, Any], console: Console) -> None:
    """Prints what `hzero.plan.command.compute` returns."""
    say(
        console,
        f"[bold]{result['model']}[/]: {result['parameters']:,} parameters of {result['itemsize']} bytes on "
        f"{result['world_size']:,} devices ({result['grid_text']})\n"
        f"preset {result['preset']}: weights over the {result['weights']}, gradients over the "
        f"{result['gradients']}, optimizer over the world; micro-steps per step: {result['accumulation']}",
    )
    show_groups(result, console)
    console.print(_memory(result))
    say(console, _fits(result))
    console.print(_traffic(result))
    console.print(_nodes(result))
    if result["link_seconds"]:
        console.print(_times(result))
        say(
            console,
            "GB/s: one way per device. Not counted: latency, computation, overlap (assumptions: hzero plan --help)",
        )
    show_links(result, console)
    if result["predicted"] is not None:
        show_steps(result["predicted"], console)


def say(console: Console, text: str) -> None:
    """Prints text as it is, wrapped by the terminal alone."""
    console.print(text, highlight=False, soft_wrap=True)


def show_groups(result: dict[str, Any], console: Console) -> None:
    """Says where the groups of a plan lie, and its notes."""
    for dimension, text in (result["layout"] or {}).items():
        say(console, f"{dimension} parallel: {text}")
    for note in result["notes"]:
        say(console, f"note: {note}")


def show_links(result: dict[str, Any], console: Console) -> None:
    """Says where the rates of a plan were measured, if they were."""
    if (links := result["links"]) is not None:
        shape = " x ".join(f"{size} {tier}" for tier, size in reversed(links["grid"].items()))
        console.print(
            f"rates: {links['file']}, measured {links['date']} on {shape}, {links['backend']} on {links['device']}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )


def rates_of(result: dict[str, Any]) -> str:
    """What the rates of a plan are."""
    return "nominal rates, not measured" if result["links"] is None else "measured rates"


def _memory(result: dict[str, Any]) -> Table:
    stock = {state["name"]: state["bytes"] for state in result["zero3_memory"]}
    rows = []
    for state in result["memory"]:
        plain = size_text(stock[state["name"]]) if state["name"] in stock else ""
        rows.append((state["name"], size_text(state["bytes"]), state["what"], plain))
    moments = result["moments"]
    title = "memory per device (transient: at most, and not all at once)"
    table = table_of(title if moments else f"{title}, without activations", ("state", "*bytes", "of", "*ZeRO-3"), rows)
    if moments:
        fullest = f"at {max(moments, key=lambda name: moments[name])}, when most is there"
        table.add_row(
            "all", size_text(result["memory_bytes"]), fullest, size_text(result["zero3_memory_bytes"]), style="bold"
        )
    return table


def _fits(result: dict[str, Any]) -> str:
    """Whether the plan, and other presets, fit into a device."""
    there, needs = result["device_bytes"], result["presets_bytes"]
    if there is None or not needs:
        return "whether it fits is not known: " + (
            "give memory=64GB" if needs else _UNKNOWN[result["layout"] is not None]
        )
    own = result["memory_bytes"]
    verdict = f"fits into {size_text(there)}"
    if own > there:
        verdict = f"does not fit into {size_text(there)}: {size_text(own - there)} too much"
    fitting = [f"{name} ({size_text(size)})" for name, size in needs.items() if size <= there]
    others = [f"{name} ({size_text(size)})" for name, size in needs.items() if size > there]
    return (
        f"{result['preset']} {verdict}\nof all presets fit: {', '.join(fitting) or 'none'}; do not fit: "
        f"{', '.join(others) or 'none'} (hzero plan --fit: with which micro-batch)"
    )


def _traffic(result: dict[str, Any]) -> Table:
    flat = {(row["role"], row["tier"]): row["wire_bytes"] for row in result["zero3_traffic"]}
    rows = [
        (*traffic_cells(row), size_text(flat[row["role"], row["tier"]])) for row in result["traffic"] if row["used"]
    ]
    head = (*TRAFFIC_HEAD, "*ZeRO-3, average")
    return table_of("bytes received per device and optimizer step (ZeRO-3: flat rings)", head, rows)


def traffic_cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A row of traffic, under `TRAFFIC_HEAD`."""
    ratio = f"{row['raw_bytes'] / row['wire_bytes']:.2f}" if row["wire_bytes"] else ""
    return row["role"], row["tier"], row["codec"], str(row["crossings"]), size_text(row["wire_bytes"]), ratio


def _nodes(result: dict[str, Any]) -> Table:
    counts, stock = result["node_bytes"], result["node_bytes"]["ZeRO-3"]
    rows = [(name, size_text(count), f"{count / stock:.3f}" if stock else "") for name, count in counts.items()]
    title = "bytes into one node per step (other schemes: minimum, by closed forms)"
    return table_of(title, ("scheme", "*bytes", "*against ZeRO-3"), rows)


def _times(result: dict[str, Any]) -> Table:
    links = result["links"]
    rows = []
    for tier, seconds in result["link_seconds"].items():
        latency = () if links is None else (f"{links['tiers'][tier]['latency_us']:.1f} us",)
        rates = (f"{result['rates_gb_s'][tier]:.4g}", *latency)
        rows.append((tier, *rates, f"{seconds:.3f} s", f"{result['zero3_link_seconds'][tier]:.3f} s"))
    head = ("tier", "*GB/s", *(() if links is None else ("*one latency",)), "*hzero", "*ZeRO-3")
    return table_of(f"link time per step from bandwidth alone ({rates_of(result)})", head, rows)
