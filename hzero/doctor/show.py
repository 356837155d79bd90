"""Prints what ``hzero doctor`` found, on one screen."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from hzero.topology.show import show_table

#: Rows of the table of ranks; `--json` has all.
MAX_ROWS = 16
_COLUMNS = ("rank", "host", "device", "kind", "bus", "package", "numa", "nic")


def show(found: dict[str, Any], console: Console) -> None:
    """Prints findings as tables, remarks and the verdict.

    Args:
        found: As `hzero.doctor.examine` returns it.
        console: Where to.
    """
    ranks = found["ranks"]
    title = f"{len(ranks)} ranks, {found['grid']}" if found.get("grid") else "devices"
    show_table(console, _COLUMNS, [[row[column] for column in _COLUMNS] for row in ranks[:MAX_ROWS]], title)
    if len(ranks) > MAX_ROWS:
        console.print(f"{len(ranks) - MAX_ROWS} more ranks: --json lists all")
    for node in found["links"][:4]:
        tiers = ", ".join(
            f"{name} {tier['size']}" + (f" at {tier['gb_s']:g} GB/s" if tier["gb_s"] else "")
            for name, tier in node["tiers"].items()
            if tier["size"] > 1
        )
        judged = "not judged"
        if node["expected"]:
            good = sum(pair["state"] == "good" for pair in node["pairs"])
            judged = f"{good} of {len(node['pairs'])} pairs are as in {node['expected']}"
        console.print(f"links of {node['node']}: {tiers + '; ' if tiers else ''}{judged}")
    if len(found["links"]) > 4:
        console.print(f"links of {len(found['links']) - 4} more nodes: see the remarks, or --json")
    access = found.get("peer_access")
    if access and access["devices"]:
        missing = f"{len(access['without'])} of the ordered pairs of {access['devices']} devices have none"
        console.print(f"peer access: {access['why'] or missing}")
    environment = found.get("environment", [])
    if environment:
        wrong = [row for row in environment if row["remark"]]
        good = len(environment) - len(wrong)
        console.print(f"environment: {good} of {len(environment)} settings as expected")
        rows = [(row["name"], row["found"] or "not set", row["expected"], row["reason"]) for row in wrong]
        show_table(console, ("setting", "found", "expected", "why"), rows)
    operators = []
    for row in found.get("operators", []):
        tried = "" if row["backend"] == "reference" else "equal" if row["equal_to_reference"] else "WRONG"
        operators.append((row["device"], ", ".join(row["codecs"]), row["backend"], tried, row["why"]))
    show_table(console, ("device", "codecs", "backend", "tried", "why"), operators, "codec operators")
    if (mpi := found.get("mpi")) and mpi["library"]:
        parts = [mpi["library"], mpi["device"], f"provider {mpi['provider']}" if mpi["provider"] else None]
        parts.append("GPU-aware" if mpi["gpu_aware"] else "not GPU-aware")
        if "all_reduce_us" in mpi:
            parts.append(f"an all-reduce in int8 took {mpi['all_reduce_us']:.0f} us")
        console.print(f"mpi: {'; '.join(part for part in parts if part)}")
    if found.get("deepspeed"):
        console.print(f"deepspeed: {found['deepspeed']}")
    if found.get("autoload"):
        console.print(f"autoload by torch: {found['autoload']}")
    if configuration := found.get("configuration"):
        console.print(f"configuration {configuration['file']}: {configuration['in_effect'] or 'without hzero'}")
        if configuration.get("auto"):
            console.print(f"left to Trainer or Accelerate: {', '.join(configuration['auto'])}")
    if found.get("versions"):
        versions = [f"{name} {number or '-'}" for name, number in found["versions"].items()]
        console.print("versions: " + ", ".join(versions))
    said = {row["remark"] for row in environment}
    for remark in found["remarks"]:
        if remark not in said:
            console.print(remark)
    console.print(f"verdict: {found['verdict']}")
