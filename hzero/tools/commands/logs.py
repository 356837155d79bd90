"""``hzero doctor --log``: searches logs for the messages of RCCL, libfabric, Slurm and MIOpen about known faults."""

from __future__ import annotations

import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from hzero.errors import ConfigError, of_file
from hzero.schema import Frozen

#: Verdicts of the doctor; its exit status is the worst one.
GOOD, DEGRADED, UNUSABLE = range(3)
#: A verdict and one line of text. Each check yields its findings.
Finding = tuple[int, str]
#: Bytes that are read at once. Logs of large jobs have gigabytes.
_BLOCK = 1 << 20


class Cause(Frozen):
    """A known fault: a row of ``log_sentences.yaml``.

    Attributes:
        cause: The fault.
        remedy: The next step of the user.
        source: Public issues with these sentences.
        says: The sentences, as parts of lines.
        unless: Sentences that follow each of ``says`` if there is no fault.
        fatal: Whether a run cannot continue.
    """

    cause: str
    remedy: str
    source: str
    says: list[str]
    unless: list[str] = []
    fatal: bool = False


CAUSES = [Cause(**row) for row in yaml.safe_load(Path(__file__).with_name("log_sentences.yaml").read_text())]


def check_logs(paths: Sequence[Path]) -> Iterator[Finding]:
    """Findings for logs: the number of files and lines, and the known causes in the order of their first lines.

    Raises:
        ConfigError: A file is missing, not a regular file, or not text.
    """
    counts: Counter[str] = Counter()
    places: dict[str, tuple[int, int]] = {}  # file and line of each sentence's first occurrence
    lines = 0
    for number, path in enumerate(paths):
        read = 0
        for block in _blocks(path):
            for sentence in (sentence for one in CAUSES for sentence in (*one.says, *one.unless)):
                if times := block.count(sentence.encode()):
                    counts[sentence] += times
                    before = block.count(b"\n", 0, block.index(sentence.encode()))
                    places.setdefault(sentence, (number, read + before + 1))
            read += block.count(b"\n") + (not block.endswith(b"\n"))
        lines += read
    found = []
    for one in CAUSES:
        says = [sentence for sentence in one.says if counts[sentence]]
        times = sum(counts[sentence] for sentence in says)
        if times > max((counts[sentence] for sentence in one.unless), default=0):
            found.append((min(places[sentence] for sentence in says), times, says, one))
    yield GOOD, f"files: {len(paths)}, lines: {lines:,}, known causes: {len(found)}"
    for (number, line), times, says, one in sorted(found, key=lambda row: row[0]):
        said = " / ".join(says)
        text = f"{paths[number]}:{line}: {said!r}, times: {times:,}: {one.cause}: {one.remedy} ({one.source})"
        yield UNUSABLE if one.fatal else DEGRADED, text


def _blocks(path: Path) -> Iterator[bytes]:
    """A text file in blocks of whole lines."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe waits for its writer
            raise ConfigError(f"--log: {path} is not a regular file; expected a text file")
        with path.open("rb") as file:
            if b"\0" in file.read(4096):
                raise ConfigError(f"--log: {path} is binary; expected a text file, unpacked")
            file.seek(0)
            while lines := file.readlines(_BLOCK):
                yield b"".join(lines)
    except OSError as error:
        raise of_file(error) from None
