"""rocm-smi: what ``rocm-smi --showtopo --json`` and its neighbours print.

Source of the keys: ROCm's python_smi_tools/rocm_smi.py (showHwTopology, showNumaTopology, showBus, showNodesBw,
formatMatrixToJSON). Values of a pair are under ``system``, the others under ``card<number>``, all of them text. Weights do
not tell parallel links apart; the bandwidths of ``--shownodesbw`` do. rocm-smi prints those as a table, since its JSON of
them is broken; both forms are read here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hzero.topology.machine import MAX_DEVICES, Device, Link, Machine, TopologyError, bus_id, merge_links
from hzero.topology.readers.source import integer, read_text, run, shown
from hzero.topology.readers.xgmi import PRODUCTS, product_in, unique_uuid, xgmi_link

_QUERY = ("rocm-smi", "--showtopo", "--showbus", "--showproductname", "--showuniqueid", "--json")
_BANDWIDTHS = ("rocm-smi", "--shownodesbw")
_HINT = "rocm-smi --showtopo --showbus --showproductname --showuniqueid --json; rocm-smi --shownodesbw"

_MAX_BYTES = 4 * 2**20

_PAIR = re.compile(r"(?:\(Topology\) )?(.{1,40}) between DRM devices ([0-9]{1,6}) and ([0-9]{1,6})")
_OBJECT = re.compile(r"[ \t]*\{")
_CARD = re.compile(r"card([0-9]{1,6})")
_ROW = re.compile(r"\s*GPU([0-9]{1,6})((?:\s+(?:N/A|0|[0-9]{1,12}-[0-9]{1,12}))+)\s*")
_HEADER = re.compile(r"(?:\s*GPU[0-9]{1,6})+\s*")


@dataclass
class _Output:
    """Values by pair and by card.

    Attributes:
        name: File or command.
        pairs: Value of a pair by what it is (lower case) and the pair, with its place.
        cards: Values by card and key (lower case), with their place.
    """

    name: str
    pairs: dict[tuple[str, int, int], tuple[str, str]] = field(default_factory=dict)
    cards: dict[int, dict[str, tuple[str, str]]] = field(default_factory=dict)

    def add_pair(self, what: str, a: int, b: int, text: str, where: str) -> None:
        if a == b:
            raise TopologyError(f"{where}: device {a} is linked to itself")
        for device in (a, b):
            self.add_card(device)
        key = (what.lower(), min(a, b), max(a, b))
        if self.pairs.setdefault(key, (text, where))[0] != text:
            raise TopologyError(
                f"{where}: {what} of {a} and {b} is {shown(text)}, but {shown(self.pairs[key][0])} before"
            )

    def add_card(self, number: int) -> dict[str, tuple[str, str]]:
        if number not in self.cards and len(self.cards) >= MAX_DEVICES:
            raise TopologyError(f"{self.name}: more than {MAX_DEVICES} devices in one node")
        return self.cards.setdefault(number, {})

    def value(self, card: int, *keys: str) -> tuple[str, str]:
        """The first of some values of a card that is there, and its place; empty where there is none."""
        values = self.cards[card]
        return next(
            (values[key] for key in keys if values.get(key, ("N/A", ""))[0] not in ("N/A", "")), ("", self.name)
        )


def read(path: Path) -> Machine:
    """The node that saved output describes. Devices have rocm-smi's numbers, which need not be HIP's: their bus ids tell.

    Args:
        path: Any number of JSON objects and tables of ``--shownodesbw``, one after the other.

    Raises:
        TopologyError: It is no such output, or contradicts itself; the message names file and line.
    """
    return _machine(read_text(path, _MAX_BYTES), str(path))


def query() -> Machine:
    """The same from the tool itself.

    Raises:
        TopologyError: It is not installed, fails, or does not answer in time.
    """
    return _machine(f"{run(_QUERY)}\n{run(_BANDWIDTHS)}", "rocm-smi")


def _machine(text: str, name: str) -> Machine:
    output = _parse(text, name)
    devices = []
    for number in sorted(output.cards):
        bus, where = output.value(number, "pci bus")
        numa, numa_where = output.value(number, "(topology) numa node", "(topology) numa affinity")
        domain = integer(numa, numa_where, "numa node", -1, 2**32 - 1) if numa else -1
        devices.append(
            Device(
                number=number,
                bus=bus_id(bus, where) if bus else "",
                kind=_kind(output, number),
                numa=domain if 0 <= domain < 2**20 else None,  # an unknown one is -1, also as 32 bits without sign
                uuid=unique_uuid(_hexadecimal(output.value(number, "unique id")[0])),
            )
        )
    links = list(_links(output))
    remarks = []
    if links and not any(link.count for link in links):
        remarks.append(
            "no bandwidths of links, so parallel links are not counted; add the output of rocm-smi --shownodesbw"
        )
    return Machine(name, tuple(devices), merge_links(name, links), remarks=tuple(remarks))


def _links(output: _Output) -> Iterator[Link]:
    bandwidths: dict[tuple[int, int], tuple[int, int]] = {}
    for (what, a, b), (text, where) in output.pairs.items():
        if "bandwidth" in what and text != "N/A":
            ends = text.split("-")
            if len(ends) != 2:
                raise TopologyError(f"{where}: found {shown(text)}, expected a bandwidth such as 50000-200000")
            low, high = (integer(end, where, "bandwidth", 0, 10**9) for end in ends)
            bandwidths[a, b] = (low, high)
    measured = any(most for _, most in bandwidths.values())
    for (what, a, b), (text, where) in output.pairs.items():
        if what != "link type" or text.upper() != "XGMI":
            continue
        weight, weight_where = output.pairs.get(("weight", a, b), ("", where))
        hops, hops_where = output.pairs.get(("hops", a, b), ("", where))
        if hops and integer(hops, hops_where, "hops", 0, 2**32) > 1:
            continue
        least, most = bandwidths.get((a, b), (0, 0))
        if measured and (a, b) in bandwidths and not most:
            continue  # 0-0 beside pairs that have bandwidths: routed
        link = xgmi_link(
            a, b, integer(weight, weight_where, "weight", 0, 2**32) if weight else None, least, most, where
        )
        if link is not None:
            yield link


def _parse(text: str, name: str) -> _Output:
    output = _Output(name)
    decoder = json.JSONDecoder()
    position, line = 0, 1
    columns: list[int] = []
    found = False
    while position < len(text):
        where = f"{name}:{line}"
        if opening := _OBJECT.match(text, position):
            try:
                content, after = decoder.raw_decode(text, opening.end() - 1)
            except json.JSONDecodeError as error:
                raise TopologyError(f"{name}:{error.lineno}: is no JSON: {error.msg}") from None
            except (ValueError, RecursionError):
                raise TopologyError(f"{where}: is no JSON that rocm-smi writes") from None
            found |= _add_json(output, content, where)
        else:
            end = text.find("\n", position)
            after = end + 1 if end >= 0 else len(text)
            row = text[position:after]
            if _HEADER.fullmatch(row):
                columns = [int(number) for number in re.findall(r"[0-9]+", row)]
            elif columns and (cells := _ROW.fullmatch(row)):
                found |= _add_row(output, columns, int(cells.group(1)), cells.group(2).split(), where)
        line += text.count("\n", position, after)
        position = after
    if not found:
        raise TopologyError(f"{name}: has no output of rocm-smi; expected that of {_HINT}")
    return output


def _add_json(output: _Output, content: object, where: str) -> bool:
    """Takes what is known from a JSON object; whether there was anything."""
    found = False
    for group, values in content.items() if isinstance(content, dict) else ():
        card = _CARD.fullmatch(group)
        if not isinstance(values, dict) or not (card or group == "system"):
            continue
        for key, value in values.items():
            pair = _PAIR.fullmatch(key.strip()[:120])
            if card:
                output.add_card(int(card.group(1)))[key.lower()] = (_scalar(value), where)
                found = True
            elif pair:
                output.add_pair(pair.group(1), int(pair.group(2)), int(pair.group(3)), _scalar(value), where)
                found = True
    return found


def _add_row(output: _Output, columns: list[int], row: int, cells: list[str], where: str) -> bool:
    if len(cells) != len(columns):
        raise TopologyError(f"{where}: found {len(cells)} cells, expected {len(columns)}")
    for column, cell in zip(columns, cells):
        if column != row and cell not in ("N/A", "0"):  # 0: the driver did not say
            output.add_pair("bandwidth", row, column, cell, where)
    return True


def _kind(output: _Output, card: int) -> str:
    for key in ("card series", "card model", "card sku", "device name", "gfx version", "device id"):
        text = output.value(card, key)[0][:200]
        if product := product_in(text) or PRODUCTS.get(_hexadecimal(text), ""):
            return product
        if key == "gfx version" and text.startswith("gfx"):
            return text[:40]
    return ""


def _hexadecimal(text: str) -> int:
    return int(text, 16) if re.fullmatch(r"(0x)?[0-9a-fA-F]{1,16}", text) else 0


def _scalar(value: object) -> str:
    if isinstance(value, str):
        return value
    return str(value) if isinstance(value, (int, float)) else type(value).__name__
