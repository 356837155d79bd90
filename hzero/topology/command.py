"""``hzero topology``: shows a node as the stage sees it."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from hzero.config import one_of
from hzero.topology.draw import png, text, tier_text
from hzero.topology.local import machine_of
from hzero.topology.machine import Machine
from hzero.topology.preset import PRESETS
from hzero.topology.tiers import tiers_of

_EXAMPLES = f"""sources:
  auto    the machine this runs on
  FILE    a declared machine (YAML or JSON), or what a tool recorded, such as a topology dump of RCCL or NCCL
  PRESET  {", ".join(PRESETS)}; a file of such a name is ./NAME

examples:
  hzero topology show auto
  hzero topology show frontier --png frontier.png
  hzero topology show topology.xml --json
  hzero topology show my_node.yaml --png          the picture goes to topology.png

Packages that cannot be told from the links are an error (status 2), after what can be drawn."""


def run_topology(arguments: Sequence[str]) -> int:
    """Runs the command on its arguments. Raises `ConfigError` for input that cannot be used."""
    parser = argparse.ArgumentParser(
        prog="hzero topology",
        description="Shows the packages, links and NICs of a node, and the tiers that follow from them.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", metavar="show", help="the only action: draws the node as text")
    parser.add_argument("source", metavar="FILE|auto|PRESET", help="which node")
    parser.add_argument("--json", action="store_true", help="for machines, instead of the drawing")
    parser.add_argument(
        "--png",
        nargs="?",
        const="topology.png",
        metavar="OUT",
        help="also draw a picture; OUT is topology.png by default",
    )
    parsed = parser.parse_args(list(arguments))
    if parsed.action != "show":
        raise one_of("hzero topology", parsed.action, ("show",), "action")
    machine = machine_of(parsed.source)
    if parsed.json:
        print(json.dumps(as_json(machine), indent=1))
    else:
        print(text(machine))
    if parsed.png is not None:
        png(machine, parsed.png)
    if not parsed.json:
        print(tier_text(tiers_of(machine)), end="")
        if parsed.png is not None:
            print(f"\npicture: {parsed.png}")
    return 0


def as_json(machine: Machine) -> dict[str, Any]:
    """The node as plain values: what ``--json`` prints. Members and devices carry the source's own numbers.

    Raises:
        AmbiguousTopologyError: Its packages cannot be told.
    """
    return {
        "source": machine.source,
        "tiers": [
            {
                "name": tier.name,
                "size": tier.size,
                "members": [list(group) for group in tier.groups],
                "gb_s": tier.gb_s,
                "latency_us": tier.latency_us,
            }
            for tier in tiers_of(machine)
        ],
        "devices": [dataclasses.asdict(device) for device in machine.devices],
        "links": [dataclasses.asdict(link) for link in machine.links],
        "nics": [dataclasses.asdict(nic) for nic in machine.nics],
        "remarks": list(machine.remarks),
    }
