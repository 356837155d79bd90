"""YAML and JSON files as values that know their line. For files that people write: small, shallow, without references."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hzero.config import one_of
from hzero.topology.machine import TopologyError

MAX_BYTES = 1_000_000
#: A declared machine is four levels deep at most.
MAX_DEPTH = 16
#: Most values in a file: YAML is slow to read, and a machine of 1,024 devices needs far fewer.
MAX_VALUES = 100_000

_INTEGER = re.compile(r"[-+]?[0-9]{1,15}")
_NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?")
_WORDS = {"": None, "~": None, "null": None, "true": True, "false": False}


@dataclass(frozen=True)
class Value:
    """A value of a file.

    Attributes:
        content: None, a bool, an int, a float, a str, a list of values, or a dict from str to values.
        file: Where it was read.
        line: Its line, from 1.
        key: Keys that lead to it, such as ``links[0].pairs``; empty at the top.
    """

    content: Any
    file: str
    line: int
    key: str = ""

    @property
    def where(self) -> str:
        """File, line and key, for messages."""
        return f"{self.file}: line {self.line}" + (f": {self.key}" if self.key else "")

    def wrong(self, expected: str) -> TopologyError:
        """The error that says what was found here and what may stand here."""
        return TopologyError(f"{self.where}: found {_short(self.content)}, expected {expected}")

    def text(self, expected: str = "a short text") -> str:
        """A text of printable characters. Raises `TopologyError` for anything else."""
        if not isinstance(self.content, str) or not self.content.isprintable() or len(self.content) > 100:
            raise self.wrong(expected)
        return self.content

    def choice(self, possible: Sequence[str]) -> str:
        """One of several words. Raises `TopologyError` for others."""
        if not isinstance(self.content, str) or len(self.content) > 100:
            raise self.wrong(" or ".join(possible))
        if self.content not in possible:
            raise TopologyError(str(one_of(self.where, self.content, possible)))
        return self.content

    def integer(self, least: int, most: int, what: str = "a whole number") -> int:
        """A whole number within bounds. Raises `TopologyError` otherwise."""
        if isinstance(self.content, bool) or not isinstance(self.content, int) or not least <= self.content <= most:
            raise self.wrong(f"{what} from {least} to {most}")
        return self.content

    def rate(self, unit: str) -> float | None:
        """A number above 0, or None for null. Raises `TopologyError` for anything else."""
        if self.content is None:
            return None
        number = self.content if isinstance(self.content, (int, float)) and not isinstance(self.content, bool) else 0
        if not 0 < number < float("inf"):
            raise self.wrong(f"a number of {unit} above 0, or null where it is not known")
        return float(number)

    def items(self, expected: str) -> list[Value]:
        """Items of a list. Raises `TopologyError` where it is none."""
        if not isinstance(self.content, list):
            raise self.wrong(expected)
        return self.content

    def block(self, expected: str, keys: Sequence[str] | None = None) -> dict[str, Value]:
        """Values by key. Raises `TopologyError` where it is no block, or has a key that is not among ``keys``."""
        if not isinstance(self.content, dict):
            raise self.wrong(expected)
        for key, value in self.content.items():
            if keys is not None and key not in keys:
                raise TopologyError(str(one_of(f"{self.file}: line {value.line}", key[:100], keys, "key")))
        return self.content

    def plain(self) -> Any:
        """The content without lines."""
        if isinstance(self.content, list):
            return [item.plain() for item in self.content]
        if isinstance(self.content, dict):
            return {key: value.plain() for key, value in self.content.items()}
        return self.content


def load(path: Path) -> Value:
    """Reads a file. Numbers are decimal: nothing of the form 01:00.0 becomes a time of day, as YAML 1.1 has it.

    Raises:
        TopologyError: It cannot be read, is larger than `MAX_BYTES`, is neither YAML nor JSON, holds a key twice, or
            uses what no declared machine needs: anchors, aliases, tags, several documents, more than `MAX_DEPTH` levels.
    """
    file = str(path)
    try:
        if not path.is_file():
            raise TopologyError(f"{file}: {'is no regular file' if path.exists() else 'there is no such file'}")
        with open(path, "rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, TopologyError):
            raise
        raise TopologyError(f"{file}: cannot be read: {error}") from None
    if len(data) > MAX_BYTES:
        raise TopologyError(f"{file}: larger than {MAX_BYTES:,} bytes, which no declared machine is")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise TopologyError(f"{file}: line {line}: is not UTF-8 text") from None
    if text.lstrip().startswith("{"):
        text = text.replace("\t", " ")  # between the tokens of JSON, where YAML wants blanks
    try:
        return _document(file, text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}: " if mark is not None else ""
        problem = " ".join(str(error.problem or error.context).split())[:200]
        raise TopologyError(f"{file}: {place}is neither YAML nor JSON: {problem}") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        if isinstance(error, TopologyError):
            raise
        problem = " ".join(str(error).replace(str(path), "").split())[:200]
        raise TopologyError(f"{file}: is neither YAML nor JSON: {problem}") from None


def _document(file: str, text: str) -> Value:
    events = yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    builder = _Builder(file, events)
    top: Value | None = None
    for event in events:
        if isinstance(event, yaml.DocumentStartEvent):
            if top is not None:
                raise builder.refused(event, "a second document", "one document")
            top = builder.value(next(events), "", 0)
    if top is None:
        raise TopologyError(f"{file}: is empty")
    return top


class _Builder:
    """Values from the parser's events, read one by one so that a hostile file is left at its first bad line."""

    def __init__(self, file: str, events: Iterator[Any]) -> None:
        self._file = file
        self._events = events
        self._values = 0

    def value(self, event: Any, key: str, depth: int) -> Value:
        self._check(event, depth)
        line = _line(event)
        if isinstance(event, yaml.ScalarEvent):
            return Value(_scalar(event), self._file, line, key)
        if isinstance(event, yaml.SequenceStartEvent):
            items: list[Value] = []
            while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
                items.append(self.value(event, f"{key}[{len(items)}]", depth + 1))
            return Value(items, self._file, line, key)
        block: dict[str, Value] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            self._check(event, depth)
            if not isinstance(event, yaml.ScalarEvent):
                raise self.refused(event, "a list or block as a key", "a name")
            name = event.value
            if name in block:
                message = f"key {_short(name)} is there twice, first on line {block[name].line}"
                raise TopologyError(f"{self._file}: line {_line(event)}: {message}")
            inner = f"{key}.{name[:100]}" if key else name[:100]
            read = self.value(next(self._events), inner, depth + 1)
            block[name] = Value(read.content, self._file, _line(event), read.key)
        return Value(block, self._file, line, key)

    def refused(self, event: Any, found: str, expected: str) -> TopologyError:
        return TopologyError(f"{self._file}: line {_line(event)}: found {found}, expected {expected}")

    def _check(self, event: Any, depth: int) -> None:
        self._values += 1
        if self._values > MAX_VALUES:
            raise self.refused(event, f"more than {MAX_VALUES:,} values", "a declared machine")
        if depth > MAX_DEPTH:
            raise self.refused(event, f"more than {MAX_DEPTH} levels", "a declared machine")
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            sign = "*" if isinstance(event, yaml.AliasEvent) else "&"
            raise self.refused(event, f"a reference ({sign}{str(event.anchor)[:40]})", "the value itself")
        if event.tag not in (None, "!"):
            raise self.refused(event, f"the tag {_short(event.tag)}", "a value without a tag")


def _line(event: Any) -> int:
    return int(event.start_mark.line) + 1


def _scalar(event: Any) -> Any:
    text: str = event.value
    if event.style not in (None, ""):  # quoted
        return text
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _INTEGER.fullmatch(text):
        return int(text)
    if len(text) <= 40 and _NUMBER.fullmatch(text):
        return float(text)
    return text


def _short(content: Any) -> str:
    """What stands in a file, for messages: short, on one line."""
    if isinstance(content, list):
        return f"a list of {len(content)}"
    if isinstance(content, dict):
        return "a block with the keys " + (", ".join(key[:20] for key in list(content)[:5]) if content else "of none")
    text = "null" if content is None else repr(content)
    return text if len(text) <= 60 else text[:57] + "..."
