"""``hzero topology``: shows a node as the stage sees it."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from hzero.arguments import Parser
from hzero.terminal import console
from hzero.topology.local import machine_of
from hzero.topology.machine import Machine
from hzero.topology.preset import PRESETS
from hzero.topology.show import show_machine, show_tiers
from hzero.topology.tiers import tiers_of
from hzero.validation import one_of

_EXAMPLES = f"""sources:
  auto    this machine
  FILE    a declared machine (YAML or JSON), a topology dump of RCCL or NCCL, or a saved nvidia-smi topo -m
  PRESET  {", ".join(PRESETS)}; a file of such a name is ./NAME

examples:
  hzero topology show frontier
  hzero topology show topology.xml --json

Exit status 2 if the packages are ambiguous; all known data is printed first."""


def parser() -> argparse.ArgumentParser:
    """Reads the command's arguments."""
    made = Parser(
        prog="hzero topology",
        description="Shows the packages, links and NICs of a node, and the tiers that follow from them.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("action", metavar="show", help="the only action")
    made.add_argument("source", metavar="FILE|auto|PRESET", help="which node")
    made.add_argument("--json", action="store_true", help="print JSON in place of tables")
    return made


def run_topology(arguments: Sequence[str]) -> int:
    """Runs the command on its arguments. Raises `ConfigError` for input that cannot be used."""
    parsed = parser().parse_args(list(arguments))
    if parsed.action != "show":
        raise one_of("hzero topology", parsed.action, ("show",), "action")
    machine = machine_of(parsed.source)
    if parsed.json:
        print(json.dumps(as_json(machine), indent=1))
        return 0
    show_machine(machine, out := console())
    show_tiers(tiers_of(machine), out)
    return 0


def as_json(machine: Machine) -> dict[str, Any]:
    """The node as plain values: what ``--json`` prints. Devices carry the source's own numbers.

    Raises:
        AmbiguousTopologyError: Its packages are ambiguous.
    """
    values = dataclasses.asdict(machine)
    tiers = [dataclasses.asdict(tier) for tier in tiers_of(machine)]
    return {
        "source": machine.source,
        "tiers": [
            {"name": tier.pop("name"), "size": tier.pop("size"), "members": tier.pop("groups"), **tier}
            for tier in tiers
        ],
        **{key: values[key] for key in ("devices", "links", "nics", "remarks")},
    }
