"""A folder of token ids: the texts that belong to it, the shards in which they are written, and how it is completed.

A shard depends only on the input and the settings, not on the worker that writes it. Workers import neither torch nor
transformers, since they start on every core of a machine.
"""

import hashlib
import json
import logging
import os
import reprlib
import struct
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer

from hzero.calls import library_errors
from hzero.errors import ConfigError
from hzero.files import expanded, read_json, read_text, replacing

#: Files of a folder: what it is made of, what a run locks, and what `datasets` reads, which is written last.
IDENTITY, LOCK, STATE = "prepare.json", ".prepare.json.lock", "state.json"
#: Ends of the names of a shard's files, by format.
SUFFIXES = {"arrow": (".arrow",), "megatron": (".idx", ".bin")}
#: Begins the name of a file in the identity.
FILE = "data.path: "
#: Kinds of files by the ends of their names; others are plain text. JSON is one object on each line.
_KINDS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}
#: Texts that one call of the tokenizer encodes, rows of a record batch, and bytes whose lines are counted at once.
_BATCH, _ROWS, _BLOCK = 256, 1000, 1 << 24


def files_of(path: str | None, limit: int | None = None) -> dict[str, list[int]]:
    """The files of a text, sorted, until they have ``limit`` bytes: of the standard library, a file, or below a folder.

    Names that begin with a dot are left out, and links to folders, which may form a circle.

    Returns:
        Size in bytes and time of the last change of each file, by `FILE` and its name.

    Raises:
        ConfigError: There are no files, or files of several kinds.
        OSError: A folder cannot be listed.
    """
    root = Path(sysconfig.get_path("stdlib")) if path is None else expanded(path)
    found = list(_below(root)) if path is not None else sorted(root.glob("*.py"))
    sizes = accumulate(p.stat().st_size for p in found)
    found = [p for p, size in zip(found, sizes) if not limit or size <= limit] or found[:1]
    kinds = " and ".join(sorted({_kind(p) for p in found}))
    if kinds not in ("json", "parquet", "text"):
        what = f"{kinds or 'no regular file'} in" if root.exists() else "no such file or folder:"
        raise ConfigError(f"data.path: found {what} {str(root)!r}; expected only text, only .json(l), or only .parquet")
    return {f"{FILE}{p}": [p.stat().st_size, p.stat().st_mtime_ns] for p in found}


def _below(path: Path) -> Iterator[Path]:
    if path.is_dir():
        for inside in sorted(path.iterdir()):
            if not inside.name.startswith(".") and not (inside.is_symlink() and inside.is_dir()):
                yield from _below(inside)
    elif path.is_file():
        yield path


def _kind(file: Path) -> str:
    return _KINDS.get(file.suffix.lower(), "text")


def chunks(files: dict[str, list[int]], limit: int) -> Iterator[tuple[int, tuple[Path, int]]]:
    """The parts of at most ``limit`` bytes into which files are cut.

    The files, one after the other, are cut into shards of ``limit`` bytes. A chunk belongs to the shard in which it begins.

    Yields:
        The number of the shard, and the first two arguments of `read`.
    """
    start = 0
    for key, (size, _) in files.items():
        for at in range(0, size or 1, limit):
            yield (start + at) // limit, (Path(key.removeprefix(FILE)), at)
        start += size


def hash_of(value: Any) -> str:
    """A name for a value that JSON can describe."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:24]


def begin(
    files: dict[str, list[int]], output: Path, tokenizer: Any, length: int, limit: int, kind: str
) -> dict[Path, list[tuple[Path, int]]]:
    """Gives an empty folder to these token ids, or checks that it belongs to the same input and settings.

    Args:
        files: What `files_of` returns.
        output: Folder of the token ids, which exists.
        tokenizer: A fast tokenizer of transformers.
        length: Tokens of a sequence.
        limit: Bytes of text in a shard, and of the longest line.
        kind: The format, ``arrow`` or ``megatron``.

    Returns:
        All shards: the file of each, and its `chunks`. In Megatron's format the file is
        the index, which is written after the token ids.

    Raises:
        ConfigError: The folder belongs to another job. The message names the first difference.
        OSError: The folder cannot be written.
    """
    text, end = tokenizer.backend_tokenizer.to_str(), tokenizer.eos_token_id
    identity = {"data.format": kind, "data.shard_bytes": limit, "model.seq_length": length, "eos_token_id": end}
    identity |= {"tokenizer": hash_of(text), **files, "tokenizer.json": text}
    if (output / IDENTITY).is_file():
        before = read_json(output / IDENTITY, limit=1 << 32, links=False)
        for name in {**before, **identity}:
            if (found := identity.get(name)) != (wanted := before.get(name)):
                expected = f"expected {reprlib.repr(wanted)}, as for {output}, or another data.output"
                raise ConfigError(f"{name}: found {reprlib.repr(found)}; {expected}")
    elif any(not one.name.startswith(f".{IDENTITY}") for one in output.iterdir()):
        (output / LOCK).unlink(missing_ok=True)
        raise ConfigError(f"data.output: found other files in {str(output)!r}; expected an empty folder")
    with replacing(output / IDENTITY) as file:
        json.dump(identity, file, indent=1)
    cut = [[chunk for _, chunk in shard] for _, shard in groupby(chunks(files, limit), lambda one: one[0])]
    return {output / f"tokens-{at:05}-of-{len(cut):05}{SUFFIXES[kind][0]}": shard for at, shard in enumerate(cut)}


def complete(output: Path, files: Iterable[Path], tokenizer: Any) -> None:
    """Makes a data set of shards, which ``datasets`` reads; Megatron reads them as they are."""
    if not (made := output / "tokenizer").exists():
        # Whole or not at all. The library writes in place.
        with tempfile.TemporaryDirectory(prefix=".tokenizer.", dir=output) as folder:
            with library_errors(f"{made}: cannot be written"):
                tokenizer.save_pretrained(f"{folder}/whole")
            os.rename(f"{folder}/whole", made)
    empty = dict.fromkeys(("_format_columns", "_format_type", "_split"))
    names = [{"filename": file.name} for file in files if file.suffix == ".arrow"]
    state: dict[str, Any] = {**empty, "_format_kwargs": {}, "_output_all_columns": False, "_data_files": names}
    state["_fingerprint"] = hash_of(read_text(output / IDENTITY, 1 << 32, links=False))
    for name, content in {"dataset_info.json": {}, STATE: state}.items() if names else ():
        with replacing(output / name) as written:
            json.dump(content, written, indent=1)


# ---- reading ----------------------------------------------------------------------------------------------------------------


def read(file: Path, begin: int, limit: int) -> Iterator[tuple[str, bool, tuple[Path, int]]]:
    """Reads the texts of a chunk: the lines, or the row groups of Parquet, that begin in ``limit`` bytes of a file.

    The lines of plain text are one text, and a file of plain text is one document.

    Args:
        file: The file.
        begin: First byte of the chunk.
        limit: Bytes of the chunk, and of the longest line.

    Yields:
        A text, whether its document ends with it, and the arguments of `place`.

    Raises:
        ConfigError: A text cannot be read. The message has file and line.
    """
    size = file.stat().st_size
    if _kind(file) == "parquet":
        yield from ((text, True, (file, group)) for group, text in _rows(file, begin, limit))
    elif not size:
        yield "", True, (file, 0)
    elif _kind(file) == "json":
        lines = ((at, line) for at, line in _lines(file, begin, limit) if line.strip())
        yield from ((_of_json(file, at, line), True, (file, at)) for at, line in lines)
    elif block := list(_lines(file, begin, limit)):
        at, text = block[0][0], b"".join(line for _, line in block)
        yield _decoded(file, at, text), at + len(text) >= size, (file, at)


def _rows(file: Path, begin: int, limit: int) -> Iterator[tuple[int, str]]:
    """The texts of the row groups that begin in a chunk, each behind the number of its group."""
    group = 0
    try:
        rows = pq.ParquetFile(file)
        found = str(rows.schema_arrow.field("text").type)
        if found not in ("string", "large_string"):
            raise TypeError(found)
        for group in range(rows.num_row_groups):
            if begin <= rows.metadata.row_group(group).column(0).data_page_offset < begin + limit:
                for batch in rows.iter_batches(_BATCH, row_groups=[group], columns=["text"]):
                    yield from ((group, text or "") for text in batch.column(0).to_pylist())
    except (pa.ArrowException, KeyError, TypeError, OSError, UnicodeDecodeError) as error:
        found = str(error).splitlines()[0]
        raise _bad(file, group, f"found {found}; expected Parquet with strings in a column 'text'") from None


def _lines(path: Path, begin: int, limit: int) -> Iterator[tuple[int, bytes]]:
    """The lines that begin in a chunk, each behind its first byte in the file."""
    at = max(begin - 1, 0)
    with open(path, "rb") as file:
        file.seek(at)
        while at < begin + limit and (line := file.readline(limit + 1)):
            if len(line) > limit:
                raise _bad(path, at, f"found a line of more than {limit:,} bytes, the most that a shard has")
            if at >= begin:  # a line that began before belongs to the chunk before
                yield at, line
            at += len(line)


def _decoded(file: Path, at: int, text: bytes) -> str:
    try:
        if b"\0" in text:  # no file of text has it, but it is UTF-8
            raise UnicodeDecodeError("", text, text.index(0), 0, "")
        return text.decode() if at else text.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise _bad(file, at + error.start, f"found byte {text[error.start]:#04x}; expected UTF-8") from None


def _of_json(file: Path, at: int, line: bytes) -> str:
    try:
        text = json.loads(line)["text"]
        text = "" if text is None else text
        text.encode()  # half a surrogate pair is valid JSON, but no text
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        expected = "expected a JSON object with a string at the key 'text'"
        raise _bad(file, at, f"found {reprlib.repr(line.decode(errors='replace'))}; {expected}") from None
    return str(text)


def place(file: Path, at: int) -> str:
    """A file and the number of the line that begins at a byte of it; of Parquet the row group."""
    if _kind(file) == "parquet":
        return f"{file}, row group {at}"
    with open(file, "rb") as text:
        return f"{file}:{1 + sum(text.read(min(_BLOCK, at - begin)).count(10) for begin in range(0, at, _BLOCK))}"


def _bad(file: Path, at: int, message: str) -> ConfigError:
    return ConfigError(f"data.path: {place(file, at)}: {message}")


# ---- writing ----------------------------------------------------------------------------------------------------------------


def write(file: Path, chunks: Sequence[tuple[Path, int]]) -> tuple[int, int, int, str]:
    """Tokenises, packs and writes a shard that `begin` returns.

    Returns:
        Numbers of documents, of tokens, and of empty texts, which are left out, and the `place` of the first of these.

    Raises:
        ConfigError: A text cannot be read, with file and line.
        OSError: A file cannot be read or written. The error names it.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # workers already use all cores
    # It would say again, with a traceback, what the client raises.
    logging.getLogger("distributed.worker").disabled = True
    identity = read_json(file.parent / IDENTITY, limit=1 << 32, links=False)
    tokenizer, end = Tokenizer.from_str(identity["tokenizer.json"]), identity["eos_token_id"]
    tokenizer.no_truncation()
    tokenizer.no_padding()
    found, documents, empty = [np.empty(0, np.int32)], 0, list[tuple[Path, int]]()
    texts = (text for chunk in chunks for text in read(*chunk, identity["data.shard_bytes"]))
    while batch := list(islice(texts, _BATCH)):
        encoded = tokenizer.encode_batch_fast([text for text, *_ in batch], add_special_tokens=False)
        for one, (text, whole, where) in zip(encoded, batch):
            if text:
                found.append(np.array([*one.ids, end] if whole and end is not None else one.ids, np.int32))
                documents += whole
            else:
                empty.append(where)
    ids = np.concatenate(found)
    if file.suffix == ".arrow":
        content = _packed(identity["model.seq_length"], ids)
    else:
        largest = max(tokenizer.get_vocab().values())
        ids = ids.astype("uint16" if largest < 65_500 else "int32")  # as Megatron itself chooses
        with replacing(file.with_suffix(".bin"), "wb") as written:
            written.write(ids.tobytes())
        content = _index(ids.dtype, [len(one) for one in found[1:]])
    with replacing(file, "wb") as written:
        written.write(content)
    return documents, len(ids), len(empty), place(*empty[0]) if empty else ""


def _packed(length: int, ids: np.ndarray) -> pa.Buffer:
    """Sequences as Arrow's stream. The incomplete sequence at the end is dropped."""
    ids = ids[: len(ids) // length * length]
    rows = pa.table({"input_ids": pa.FixedSizeListArray.from_arrays(pa.array(ids), length)})
    stream = pa.BufferOutputStream()  # a file of Python's would hide why it cannot be written
    with pa.ipc.new_stream(stream, rows.schema) as writer:
        writer.write_table(rows, max_chunksize=_ROWS)
    return stream.getvalue()


def _index(dtype: np.dtype, lengths: list[int]) -> bytes:
    """Megatron's index: each document's length and place.

    Source: ``megatron/core/datasets/indexed_dataset.py`` of NVIDIA/Megatron-LM.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    head = struct.pack("<9sQBQQ", b"MMIDIDX", 1, {2: 8, 4: 4}[dtype.itemsize], len(lengths), len(lengths) + 1)
    arrays = np.array(lengths, np.int32), (ends - lengths) * dtype.itemsize, np.arange(len(lengths) + 1)
    return head + b"".join(array.tobytes() for array in arrays)
