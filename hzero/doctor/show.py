"""Prints what ``hzero doctor`` found, on one screen."""

from __future__ import annotations

import os
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

#: Rows of the table of ranks; `--json` has all.
MOST_ROWS = 16
#: Columns where there is no terminal.
_WIDTH = 116
_COLUMNS = ("rank", "host", "device", "kind", "bus", "package", "numa", "nic")


def console() -> Console:
    """Where findings go: names that sources give are no markup, and a file or pipe has room for a table."""
    terminal = Console(markup=False, emoji=False)
    return (
        terminal
        if terminal.is_terminal or "COLUMNS" in os.environ
        else Console(markup=False, emoji=False, width=_WIDTH)
    )


def show(found: dict[str, Any], console: Console) -> None:
    """Prints findings as tables, remarks and the verdict.

    Args:
        found: As `hzero.doctor.examine` returns it.
        console: Where to.
    """
    _show_ranks(found["ranks"], found.get("grid"), console)
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
        console.print(
            f"links of {node['node']}: {tiers + '; ' if tiers else ''}{judged}", highlight=False, markup=False
        )
    if len(found["links"]) > 4:
        console.print(f"links of {len(found['links']) - 4} nodes more: see the remarks, or --json", highlight=False)
    access = found.get("peer_access")
    if access and access["devices"]:
        told = (
            access["why"] or f"{len(access['without'])} of the ordered pairs of {access['devices']} devices have none"
        )
        console.print(f"peer access: {told}")
    environment = found.get("environment", [])
    if environment:
        _show_environment(environment, console)
    if found.get("operators"):
        _show_operators(found["operators"], console)
    if found.get("versions"):
        versions = [f"{name} {number or '-'}" for name, number in found["versions"].items()]
        console.print("versions: " + ", ".join(versions), highlight=False)
    said = {row["remark"] for row in environment}
    for remark in [remark for remark in found["remarks"] if remark not in said]:
        console.print(remark, highlight=False, markup=False)
    console.print(f"verdict: {found['verdict']}", highlight=False)


def _show_ranks(ranks: list[dict[str, Any]], grid: str | None, console: Console) -> None:
    if not ranks:
        return
    title = f"{len(ranks)} ranks, {grid}" if grid else "devices"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in _COLUMNS:
        table.add_column(
            column, justify="left" if column in ("host", "kind", "bus", "nic") else "right", overflow="fold"
        )
    shown = ranks[:MOST_ROWS]
    for row in shown:
        table.add_row(*("-" if row[column] in (None, "") else str(row[column]) for column in _COLUMNS))
    console.print(table)
    if len(ranks) > len(shown):
        console.print(f"{len(ranks) - len(shown)} ranks more: --json lists all", highlight=False)


def _show_environment(environment: list[dict[str, Any]], console: Console) -> None:
    good = sum(not row["remark"] for row in environment)
    console.print(f"environment: {good} of {len(environment)} settings as OLCF's guide has them", highlight=False)
    if good == len(environment):
        return
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in ("setting", "found", "expected", "why"):
        table.add_column(column, overflow="fold", no_wrap=column == "setting")
    for row in environment:
        if row["remark"]:
            table.add_row(row["name"], row["found"] or "not set", row["expected"], row["reason"])
    console.print(table)


def _show_operators(operators: list[dict[str, Any]], console: Console) -> None:
    table = Table(title="codec operators", title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in ("device", "codecs", "backend", "tried", "why"):
        table.add_column(column, overflow="fold", no_wrap=column != "why")
    for row in operators:
        tried = "-" if row["backend"] == "reference" else "equal" if row["equal_to_reference"] else "WRONG"
        table.add_row(row["device"], ", ".join(row["codecs"]), row["backend"], tried, row["why"])
    console.print(table)
