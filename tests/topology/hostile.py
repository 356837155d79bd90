"""Hostile input: what a broken or malicious source may hold, made from a good one."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path

from hypothesis import strategies as st

from hzero.commands.topology import as_json, show_machine
from hzero.terminal import console
from hzero.topology.machine import AmbiguousTopologyError, Machine
from hzero.validation import ConfigError

#: What stands where a number was.
_NUMBERS = ["-1", "0", "1e999", "NaN", "9" * 30, "9" * 5000, "1_0", "٣", "0x10", "-", "", "1.5", "true", "null"]
#: What stands anywhere.
_PIECES = [*'<>"{}[]\n\x00X', "\ufffd", "😀", "&x;", "GPU0", "NV4", "&lt;", "<gpu>", "0-0"]


@st.composite
def mutated(draw: st.DrawFn, good: str) -> bytes:
    """A good text after one to four changes."""
    text = good
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["truncate", "delete", "duplicate", "number", "insert", "swap", "bytes"]))
        start = draw(st.integers(0, max(len(text) - 1, 0)))
        end = min(len(text), start + draw(st.integers(1, 200)))
        if kind == "truncate":
            text = text[:start]
        elif kind == "delete":
            text = text[:start] + text[end:]
        elif kind == "duplicate":
            text = text[:end] + text[start:]
        elif kind == "insert":
            text = text[:start] + draw(st.sampled_from(_PIECES)) * draw(st.sampled_from([1, 2, 3000])) + text[start:]
        elif kind == "swap":
            lines = text.splitlines(keepends=True) or [""]
            first, second = draw(st.integers(0, len(lines) - 1)), draw(st.integers(0, len(lines) - 1))
            lines[first], lines[second] = lines[second], lines[first]
            text = "".join(lines)
        elif kind == "number":
            digits = next((place for place in range(start, len(text)) if text[place].isdigit()), None)
            if digits is not None:
                stop = next((place for place in range(digits, len(text)) if not text[place].isdigit()), len(text))
                text = text[:digits] + draw(st.sampled_from(_NUMBERS)) + text[stop:]
        else:
            return text[:start].encode() + draw(st.binary(min_size=1, max_size=40)) + text[start:].encode()
    return text.encode("utf-8", errors="replace")


def machine_or_error(read: Callable[[Path], Machine], path: Path) -> Machine | None:
    """Reads; None after an error of ours that is one line, names the file and came quickly. Other errors are the test's."""
    start = time.process_time()
    try:
        machine = read(path)
    except ConfigError as error:
        machine = None
        message = str(error)
        assert str(path) in message, message[:300]
        assert "\n" not in message and len(message) < 2000, message[:300]
    if machine is not None:  # what can be read can be drawn and printed
        with (out := console()).capture() as shown:
            show_machine(machine, out)
        assert "\x1b" not in shown.get() and shown.get().encode(errors="backslashreplace")
        with contextlib.suppress(AmbiguousTopologyError):
            json.dumps(as_json(machine), allow_nan=False)
    assert time.process_time() - start < 5.0
    return machine
