"""A shard of a corpus: the texts that belong to it, their token ids, and the file that training maps.

A shard depends only on the input and the settings, not on the worker that writes it. Workers import neither torch nor
transformers, since they start on every core of a machine.
"""

from __future__ import annotations

import json
import os
import reprlib
import shutil
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer

from hzero.files import read_json, refusing, replacing
from hzero.validation import ConfigError

#: Kinds of files by the ends of their names; others are plain text. JSON is one object on each line.
_KINDS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}
#: Texts that one call of the tokenizer encodes.
_BATCH = 256
#: Rows of a record batch.
_ROWS = 1000
#: Bytes that are copied or counted at once.
_BLOCK = 1 << 24
#: Megatron's codes for types of token ids.
_CODES = {"uint16": 8, "int32": 4}


@dataclass(frozen=True)
class Piece:
    """A part of a file: the lines that begin in a range of bytes, or one row group of a Parquet file.

    Attributes:
        file: The file, relative to `Job.source`.
        begin: First byte, or the row group.
        end: Byte after the last.
        size: Bytes, uncompressed; 0 for a file without texts.
    """

    file: str
    begin: int
    end: int
    size: int


@dataclass(frozen=True)
class Job:
    """What all shards share.

    Attributes:
        key: Hash of input and settings.
        source: Folder of the texts.
        output: Folder of the shards. ``tokenizer`` in it holds the tokenizer.
        place: The configuration's key of ``output``.
        end: Id of the token that ends a document; None for none.
        length: Tokens of a sequence.
        limit: Longest line, bytes.
        count: Number of shards.
        dtype: Type of token ids in Megatron's format; None for Arrow.
    """

    key: str
    source: Path
    output: Path
    place: str
    end: int | None
    length: int
    limit: int
    count: int
    dtype: str | None = None

    @property
    def schema(self) -> pa.Schema:
        """Columns of an Arrow file: the token ids of a sequence, and the lengths of the documents in it."""
        return pa.schema({"input_ids": pa.list_(pa.int32(), self.length), "seq_lengths": pa.list_(pa.int32())})

    def file(self, number: int) -> Path:
        """The file of a shard."""
        stem, suffix = ("tokens", "bin") if self.dtype else ("data", "arrow")
        return self.output / f"{stem}-{number:05}-of-{self.count:05}.{suffix}"

    def note(self, number: int) -> Path:
        """The file with the counts of a shard, which is written after the shard."""
        return self.output / "shards" / f"{number:05}.json"

    def done(self, number: int) -> dict[str, Any] | None:
        """The counts of a shard that is complete."""
        note, file = self.note(number), self.file(number)
        found = read_json(note) if note.is_file() and file.is_file() else {}
        return found if found.get("key") == self.key and found["bytes"] == file.stat().st_size else None


def kind_of(file: Path) -> str:
    """``text``, ``json`` or ``parquet``, by the name of a file."""
    return _KINDS.get(file.suffix.lower(), "text")


def cut(source: Path, files: Sequence[Path], limit: int) -> list[list[Piece]]:
    """Cuts files into shards of at most ``limit`` bytes, in their order. A row group is never cut.

    Raises:
        ConfigError: Files of several kinds, or Parquet without texts.
    """
    if len(kinds := {kind_of(file) for file in files}) > 1:
        names, expected = " and ".join(sorted(kinds)), "only text, only .json and .jsonl, or only .parquet"
        raise ConfigError(f"data.path: found {names} in {str(source)!r}; expected {expected}")
    found, size = [list[Piece]()], 0
    for piece in (piece for file in files for piece in _pieces(source, file, limit)):
        if found[-1] and size + piece.size > limit:
            found.append([])
            size = 0
        found[-1].append(piece)
        size += piece.size
    return found


def _pieces(source: Path, file: Path, limit: int) -> list[Piece]:
    name, size = file.relative_to(source).as_posix(), file.stat().st_size
    if kind_of(file) != "parquet":
        ends = [(at, min(at + limit, size)) for at in range(0, size, limit)]
        found = [Piece(name, at, end, end - at) for at, end in ends]
    else:
        try:
            groups = pq.ParquetFile(file)
            what = str(groups.schema_arrow.field("text").type)
        except (pa.ArrowException, KeyError) as error:
            what = str(error).splitlines()[0]
        if what not in ("string", "large_string"):
            raise ConfigError(f"data.path: {file}: found {what}; expected Parquet with strings in a column 'text'")
        sizes = [groups.metadata.row_group(at).total_byte_size for at in range(groups.num_row_groups)]
        found = [Piece(name, at, at + 1, size) for at, size in enumerate(sizes)]
    return found or [Piece(name, 0, 0, 0)]


def write(job: Job, number: int, parts: Sequence[Piece]) -> dict[str, Any]:
    """Tokenises, packs and writes a shard, and then its counts, which it returns.

    Raises:
        ConfigError: A text cannot be read, with file and line, or the output cannot be written.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # workers already use all cores
    tokenizer = _tokenizer(str(job.output / "tokenizer" / "tokenizer.json"))
    found, documents, empty = [np.empty(0, np.int32)], 0, list[tuple[str, int]]()
    texts = (text for part in parts for text in read(job.source, part, job.limit, empty))
    while batch := list(islice(texts, _BATCH)):
        encoded = tokenizer.encode_batch_fast([text for text, _ in batch], add_special_tokens=False)
        for one, (_, whole) in zip(encoded, batch):
            documents += whole
            found.append(np.array([*one.ids, job.end] if whole and job.end is not None else one.ids, np.int32))
    ids, ends = np.concatenate(found), np.cumsum([len(one) for one in found[1:]], dtype=np.int64)
    rows = 0 if job.dtype else len(ids) // job.length
    content = ids.astype(job.dtype).tobytes() if job.dtype else _packed(job, ids, ends, rows)
    counts = {"key": job.key, "bytes": len(content), "documents": documents, "tokens": len(ids), "rows": rows}
    counts["empty"] = empty
    lengths = np.diff(ends, prepend=0).tolist() if job.dtype else None
    with refusing(job.place, job.output):
        with replacing(job.file(number), "wb") as file:
            file.write(content)
        with replacing(job.note(number)) as file:
            json.dump({**counts, "lengths": lengths}, file)
    return counts


@lru_cache(maxsize=1)
def _tokenizer(file: str) -> Tokenizer:
    tokenizer = Tokenizer.from_file(file)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def read(source: Path, piece: Piece, limit: int, empty: list[tuple[str, int]]) -> Iterator[tuple[str, bool]]:
    """Reads the texts of a piece. A file of plain text is one document.

    Args:
        source: Folder of the file.
        piece: The piece.
        limit: Longest line, bytes.
        empty: Takes file and place of each text without characters, which is left out.

    Yields:
        A text, and whether its document ends with it.

    Raises:
        ConfigError: A text cannot be read. The message has file and line.
    """
    for text, whole, at in _texts(source / piece.file, piece, limit):
        if text:
            yield text, whole
        else:
            empty.append((piece.file, at))


def _texts(file: Path, piece: Piece, limit: int) -> Iterator[tuple[str, bool, int]]:
    """Texts, whether a document ends with each, and their places in the file."""
    if not piece.size:
        yield "", False, 0
    elif kind_of(file) == "parquet":
        try:
            for batch in pq.ParquetFile(file).iter_batches(_BATCH, row_groups=[piece.begin], columns=["text"]):
                yield from ((text, True, piece.begin) for text in batch.column(0).to_pylist())
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise _bad(file, piece.begin, str(error).splitlines()[0]) from None
    elif kind_of(file) == "json":
        yield from ((_of_json(file, at, line), True, at) for at, line in _lines(file, piece, limit) if line.strip())
    elif lines := list(_lines(file, piece, limit)):
        at, line = lines[-1]
        yield "".join(_decoded(file, at, line) for at, line in lines), at + len(line) >= file.stat().st_size, at


def _of_json(file: Path, at: int, line: bytes) -> str:
    content = _decoded(file, at, line)
    try:
        text = json.loads(content)["text"]
        text = "" if text is None else text
        text.encode()  # half a surrogate pair is valid JSON, but no text
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        expected = "expected a JSON object with a string at the key 'text'"
        raise _bad(file, at, f"found {reprlib.repr(content)}; {expected}") from None
    return str(text)


def _lines(path: Path, piece: Piece, limit: int) -> Iterator[tuple[int, bytes]]:
    """The lines that begin in a piece, each with its place in the file."""
    at = max(piece.begin - 1, 0)
    with open(path, "rb") as file:
        file.seek(at)
        while at < piece.end and (line := file.readline(limit + 1)):
            if len(line) > limit:
                raise _bad(path, at, f"found a line of more than {limit:,} bytes, the most that a shard has")
            if at >= piece.begin:  # a line that began before belongs to the piece before
                yield at, line
            at += len(line)


def _decoded(file: Path, at: int, line: bytes) -> str:
    try:
        if b"\0" not in line:
            return line.decode() if at else line.decode("utf-8-sig")
        found = "a zero byte"
    except UnicodeDecodeError as error:
        found = f"byte {line[error.start]:#04x}, which is not UTF-8"
    raise _bad(file, at, f"found {found}; expected text")


def place(file: Path, at: int) -> str:
    """A file and the number of the line that begins at a byte of it; of Parquet the row group."""
    if kind_of(file) == "parquet":
        return f"{file}, row group {at}"
    with open(file, "rb") as text:
        return f"{file}:{1 + sum(text.read(min(_BLOCK, at - begin)).count(10) for begin in range(0, at, _BLOCK))}"


def _bad(file: Path, at: int, message: str) -> ConfigError:
    return ConfigError(f"data.path: {place(file, at)}: {message}")


def _packed(job: Job, ids: np.ndarray, ends: np.ndarray, rows: int) -> pa.Buffer:
    """The rows of a shard as Arrow's stream. What is left at its end is no whole row, and is dropped."""
    borders = np.arange(rows + 1) * job.length
    cuts = np.union1d(ends[ends < borders[-1]], borders)
    starts = np.searchsorted(cuts, borders).astype(np.int32)
    sequences = pa.FixedSizeListArray.from_arrays(pa.array(ids[: borders[-1]]), job.length)
    lengths = pa.ListArray.from_arrays(pa.array(starts), pa.array(np.diff(cuts).astype(np.int32)))
    stream = pa.BufferOutputStream()  # a file of Python's would hide why it cannot be written
    with pa.ipc.new_stream(stream, job.schema) as writer:
        writer.write_table(pa.table([sequences, lengths], schema=job.schema), max_chunksize=_ROWS)
    return stream.getvalue()


def merge(job: Job) -> None:
    """Joins the shards in Megatron's format: ``.bin`` has the token ids, ``.idx`` each document's length and place.

    Source: ``megatron/core/datasets/indexed_dataset.py`` of NVIDIA/Megatron-LM.
    """
    lengths = np.concatenate(
        [np.array(read_json(job.note(number))["lengths"], np.int64) for number in range(job.count)]
    )
    with replacing(job.output / "tokens.bin", "wb") as whole:
        for number in range(job.count):
            with open(job.file(number), "rb") as part:
                shutil.copyfileobj(part, whole, _BLOCK)
    starts = (np.cumsum(lengths, dtype=np.int64) - lengths) * np.dtype(job.dtype).itemsize
    with replacing(job.output / "tokens.idx", "wb") as index:
        index.write(struct.pack("<9sQBQQ", b"MMIDIDX", 1, _CODES[str(job.dtype)], len(lengths), len(lengths) + 1))
        for array in (lengths.astype(np.int32), starts, np.arange(len(lengths) + 1)):
            index.write(array.tobytes())
