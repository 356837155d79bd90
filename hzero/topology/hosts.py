"""Hosts: the names in a list as Slurm writes it."""

from __future__ import annotations

import itertools
import re

from hzero.config import ConfigError

#: Most hosts of a list; more is no machine but a broken list.
MAX_HOSTS = 1 << 20

_HOST = re.compile(r"[A-Za-z0-9._-]*")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")


def hosts_of(text: str, where: str) -> list[str]:
    """Hosts of a list as Slurm writes it: ``frontier[00001-00003,00010],login1``.

    Args:
        text: The list.
        where: The variable that holds it, for messages.

    Raises:
        ConfigError: It is malformed, or has more than `MAX_HOSTS` hosts.
    """
    hosts: list[str] = []
    for item in _items(text, where):
        parts = re.split(r"\[([^\[\]]*)\]", item)
        choices = [_numbers(part, text, where) if odd % 2 else [part] for odd, part in enumerate(parts)]
        count = 1
        for odd, part in enumerate(parts):
            count *= len(choices[odd])
            if not odd % 2 and _HOST.fullmatch(part) is None:
                raise _malformed(text, where, f"{part[:40]!r} is no part of a host name")
        if len(hosts) + count > MAX_HOSTS:
            raise _malformed(text, where, f"it has more than {MAX_HOSTS} hosts")
        hosts += map("".join, itertools.product(*choices))
    return hosts


def _items(text: str, where: str) -> list[str]:
    """The parts between commas outside of brackets."""
    items, depth, begin = [], 0, 0
    for at, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise _malformed(text, where, "brackets are nested" if depth > 1 else "']' has no '['")
        if letter == "," and not depth:
            items.append(text[begin:at])
            begin = at + 1
    if depth:
        raise _malformed(text, where, "'[' has no ']'")
    items.append(text[begin:])
    if not all(items):
        raise _malformed(text, where, "a host has no name")
    return items


def _numbers(ranges: str, text: str, where: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        found = _RANGE.fullmatch(part)
        if found is None:
            raise _malformed(text, where, f"[{ranges[:40]}] is no list of numbers and ranges")
        low, high = found[1], found[2] or found[1]
        count = int(high) - int(low) + 1
        if count < 1:
            raise _malformed(text, where, f"range {part} ends before it begins")
        if len(numbers) + count > MAX_HOSTS:
            raise _malformed(text, where, f"it has more than {MAX_HOSTS} hosts")
        numbers += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
    return numbers


def _malformed(text: str, where: str, why: str) -> ConfigError:
    shown = text if len(text) <= 80 else f"{text[:77]}..."
    return ConfigError(f"{where}: found {shown!r}: {why}; expected hosts such as node[001-003,010],login1")
