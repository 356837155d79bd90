"""A shard of a corpus: the texts that belong to it, their token ids, and the file that training maps.

A shard depends only on the input and the settings, not on the worker that writes it. Workers import neither torch nor
transformers, since they start on every core of a machine.
"""

from __future__ import annotations

import json
import os
import reprlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer

from hzero.files import replacing
from hzero.validation import ConfigError

#: Kinds of files by the ends of their names; others are plain text. JSON is one object on each line.
_KINDS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}
#: Texts that one call of the tokenizer encodes, and rows of a record batch.
_BATCH, _ROWS = 256, 1000
#: Bytes that are counted at once.
_BLOCK = 1 << 24


class Piece(NamedTuple):
    """A part of a file: the lines that begin in a range of bytes, or one row group of a Parquet file.

    Attributes:
        file: The file, relative to `Job.source`.
        begin: First byte, or the row group.
        end: What follows the last; 0 for a file without texts.
    """

    file: str
    begin: int
    end: int


@dataclass(frozen=True)
class Job:
    """What all shards share.

    Attributes:
        source: Folder of the texts.
        output: Folder of the shards and of ``tokenizer.json``.
        count: Number of shards.
        end: Id of the token that ends a document; None for none.
        length: Tokens of a sequence.
        limit: Bytes of a shard, and of the longest line.
        dtype: Type of token ids in Megatron's format; None for Arrow.
    """

    source: Path
    output: Path
    count: int
    end: int | None
    length: int
    limit: int
    dtype: str | None = None

    def file(self, number: int) -> Path:
        """The file of a shard; in Megatron's format the index, which is written after the token ids."""
        return self.output / f"tokens-{number:05}-of-{self.count:05}.{'idx' if self.dtype else 'arrow'}"


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
    shards, left = list[list[Piece]](), 0
    for file in files:
        name = file.relative_to(source).as_posix()
        if kinds == {"parquet"}:
            pieces = [(Piece(name, at, at + 1), size) for at, size in enumerate(_row_groups(file))]
        else:
            size = file.stat().st_size
            ends = [(at, min(at + limit, size)) for at in range(0, size, limit)]
            pieces = [(Piece(name, at, end), end - at) for at, end in ends]
        for piece, size in pieces or [(Piece(name, 0, 0), 0)]:
            if size > left or not shards:
                shards.append([])
                left = limit
            shards[-1].append(piece)
            left -= size
    return shards


def _row_groups(file: Path) -> list[int]:
    """Bytes of each row group of a Parquet file."""
    try:
        groups = pq.ParquetFile(file)
        what = str(groups.schema_arrow.field("text").type)
    except (pa.ArrowException, KeyError) as error:
        what = str(error).splitlines()[0]
    if what not in ("string", "large_string"):
        raise ConfigError(f"data.path: {file}: found {what}; expected Parquet with strings in a column 'text'")
    return [groups.metadata.row_group(at).total_byte_size for at in range(groups.num_row_groups)]


def read(source: Path, piece: Piece, limit: int) -> Iterator[tuple[str, bool, int]]:
    """Reads the texts of a piece. A file of plain text is one document.

    Args:
        source: Folder of the file.
        piece: The piece.
        limit: Longest line, bytes.

    Yields:
        A text, whether its document ends with it, and its place for `place`.

    Raises:
        ConfigError: A text cannot be read. The message has file and line.
    """
    file = source / piece.file
    if not piece.end:
        yield "", True, 0
    elif kind_of(file) == "parquet":
        try:
            for batch in pq.ParquetFile(file).iter_batches(_BATCH, row_groups=[piece.begin], columns=["text"]):
                yield from ((text or "", True, piece.begin) for text in batch.column(0).to_pylist())
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise _bad(file, piece.begin, str(error).splitlines()[0]) from None
    elif kind_of(file) == "json":
        yield from ((_of_json(file, at, line), True, at) for at, _, line in _lines(file, piece, limit) if line.strip())
    elif lines := list(_lines(file, piece, limit)):
        at, end, _ = lines[-1]
        yield "".join(line for *_, line in lines), end >= file.stat().st_size, at


def _lines(path: Path, piece: Piece, limit: int) -> Iterator[tuple[int, int, str]]:
    """The lines that begin in a piece, each behind its first byte in the file and the one that follows."""
    at = max(piece.begin - 1, 0)
    with open(path, "rb") as file:
        file.seek(at)
        while at < piece.end and (line := file.readline(limit + 1)):
            if len(line) > limit:
                raise _bad(path, at, f"found a line of more than {limit:,} bytes, the most that a shard has")
            if at >= piece.begin:  # a line that began before belongs to the piece before
                yield at, at + len(line), _decoded(path, at, line)
            at += len(line)


def _decoded(file: Path, at: int, line: bytes) -> str:
    try:
        if b"\0" not in line:
            return line.decode() if at else line.decode("utf-8-sig")
        found = "a zero byte"
    except UnicodeDecodeError as error:
        found = f"byte {line[error.start]:#04x}, which is not UTF-8"
    raise _bad(file, at, f"found {found}; expected text")


def _of_json(file: Path, at: int, line: str) -> str:
    try:
        text = json.loads(line)["text"]
        text = "" if text is None else text
        text.encode()  # half a surrogate pair is valid JSON, but no text
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        expected = "expected a JSON object with a string at the key 'text'"
        raise _bad(file, at, f"found {reprlib.repr(line)}; {expected}") from None
    return str(text)


def place(file: Path, at: int) -> str:
    """A file and the number of the line that begins at a byte of it; of Parquet the row group."""
    if kind_of(file) == "parquet":
        return f"{file}, row group {at}"
    with open(file, "rb") as text:
        return f"{file}:{1 + sum(text.read(min(_BLOCK, at - begin)).count(10) for begin in range(0, at, _BLOCK))}"


def _bad(file: Path, at: int, message: str) -> ConfigError:
    return ConfigError(f"data.path: {place(file, at)}: {message}")


def write(job: Job, number: int, pieces: Sequence[Piece]) -> tuple[dict[str, int], list[str]]:
    """Tokenises, packs and writes a shard.

    Returns:
        Numbers of ``documents``, ``tokens`` and ``empty`` texts, which are left out, and the place of the first of these, if any.

    Raises:
        ConfigError: A text cannot be read, with file and line.
        OSError: A file cannot be read or written. The error names it.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # workers already use all cores
    tokenizer, found, documents, empty = _tokenizer(job.output), [np.empty(0, np.int32)], 0, list[tuple[str, int]]()
    texts = ((*text, piece.file) for piece in pieces for text in read(job.source, piece, job.limit))
    while batch := list(islice(texts, _BATCH)):
        encoded = tokenizer.encode_batch_fast([text for text, *_ in batch], add_special_tokens=False)
        for one, (text, whole, at, name) in zip(encoded, batch):
            if not text:
                empty.append((name, at))
                continue
            found.append(np.array([*one.ids, job.end] if whole and job.end is not None else one.ids, np.int32))
            documents += whole
    ids, file = np.concatenate(found), job.file(number)
    if job.dtype:
        with replacing(file.with_suffix(".bin"), "wb") as output:
            output.write(ids.astype(job.dtype).tobytes())
    with replacing(file, "wb") as output:
        output.write(_index(job, [len(one) for one in found[1:]]) if job.dtype else _packed(job, ids))
    first = [place(job.source / name, at) for name, at in empty[:1]]
    return {"documents": documents, "tokens": len(ids), "empty": len(empty)}, first


@lru_cache(maxsize=1)
def _tokenizer(output: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(output / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _packed(job: Job, ids: np.ndarray) -> pa.Buffer:
    """Sequences as Arrow's stream. What is left at the end is no whole sequence, and is dropped."""
    ids = ids[: len(ids) // job.length * job.length]
    rows = pa.table({"input_ids": pa.FixedSizeListArray.from_arrays(pa.array(ids), job.length)})
    stream = pa.BufferOutputStream()  # a file of Python's would hide why it cannot be written
    with pa.ipc.new_stream(stream, rows.schema) as writer:
        writer.write_table(rows, max_chunksize=_ROWS)
    return stream.getvalue()


def _index(job: Job, lengths: list[int]) -> bytes:
    """Megatron's index: each document's length and place.

    Source: ``megatron/core/datasets/indexed_dataset.py`` of NVIDIA/Megatron-LM.
    """
    dtype, ends = np.dtype(job.dtype), np.cumsum(lengths, dtype=np.int64)
    head = struct.pack("<9sQBQQ", b"MMIDIDX", 1, {2: 8, 4: 4}[dtype.itemsize], len(lengths), len(lengths) + 1)
    arrays = np.array(lengths, np.int32), (ends - lengths) * dtype.itemsize, np.arange(len(lengths) + 1)
    return head + b"".join(array.tobytes() for array in arrays)
