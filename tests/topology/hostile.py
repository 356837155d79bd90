"""Hostile input: what a broken or malicious source may hold, made from a good one."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

from hypothesis import strategies as st

from hzero.errors import ConfigError
from hzero.tools.commands.topology import text_of
from hzero.topology.node import Node
from hzero.topology.sources import read_node

#: Replacements of a number.
_NUMBERS = ["-1", "0", "1e999", "NaN", "9" * 30, "9" * 5000, "1_0", "٣", "0x10", "-", "", "1.5", "true", "null"]
#: Insertions at any place.
_PIECES = [*'<>"{}[]\n\x00X', "\ufffd", "😀", "&x;", "&lt;", "<gpu>", "0-0", "[" * 3000]


@st.composite
def mutated(draw: st.DrawFn, good: str) -> bytes:
    """A good text after one to four changes: a number becomes another, or a part is cut, doubled or replaced."""
    text = good
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, max(len(text) - 1, 0)))
        end = start + draw(st.sampled_from([0, 1, 7, 100, len(text)]))
        number = re.compile(r"\d+").search(text, start)
        if number and draw(st.booleans()):
            text = text[: number.start()] + draw(st.sampled_from(_NUMBERS)) + text[number.end() :]
        else:
            text = text[:start] + draw(st.sampled_from(["", 2 * text[start:end], *_PIECES])) + text[end:]
    noise = draw(st.just(b"") | st.binary(max_size=40))
    return text.encode(errors="replace") + noise


def accepts(read: Callable[[], object], *names: str) -> bool:
    """Whether something was read; else the error was ours: one printable line with one of the names. Either came soon."""
    start = time.process_time()
    try:
        read()
        refused = False
    except ConfigError as error:
        message, refused = str(error), True
        assert any(name in message for name in names), message[:300]
        assert message.isprintable() and len(message) < 3000, message[:300]
    assert time.process_time() - start < 5
    return not refused


def node_or_error(path: Path) -> Node | None:
    """What `accepts` reads, which can be printed, too; else None."""
    found: list[Node] = []

    def read_and_draw() -> None:
        found.append(machine := read_node(str(path)))
        assert all(line.isprintable() for line in text_of(machine).split("\n"))

    return found[0] if accepts(read_and_draw, str(path)) else None
