"""Text to tokens: reads a corpus, trains a BPE tokenizer once, and keeps the tokens in a file that is mapped."""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import shutil
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hzero.files import distrust, read_small, refusing
from hzero.train import digests
from hzero.train.tokenizer import errors_of_disk, fingerprint, train_tokenizer, with_end
from hzero.validation import ConfigError, some

#: Folders that are not the standard library itself, or not everywhere part of it.
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "__pycache__", "idlelib", "turtledemo", "lib2to3"}
_FORMAT = 1
#: Age of a half-built corpus that nobody is building any more, in seconds.
_ABANDONED_S = 86_400
#: Of the standard library, unless ``data.max_bytes`` says otherwise.
_STDLIB_BYTES = 8_000_000


def stdlib_files() -> list[Path]:
    """Sources of Python's standard library on this machine, sorted."""
    root = Path(sysconfig.get_path("stdlib"))
    found = (p for p in root.rglob("*.py") if not _NOT_STDLIB & set(p.relative_to(root).parts))
    return sorted(p for p in found if p.is_file())


def text_files(path: Path, left_out: list[str] | None = None) -> list[Path]:
    """The file itself, or every visible text file below a folder, sorted.

    Args:
        path: The file or folder.
        left_out: Takes a line on each visible file of a folder that begins with no text or cannot be read.

    Raises:
        ConfigError: The path is missing, cannot be read, or holds no text.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ConfigError(f"data.path: no file or folder {str(path)!r}")
    found = []
    try:
        visible = [p for p in path.rglob("*") if not any(part.startswith(".") for part in p.relative_to(path).parts)]
        for file in sorted(p for p in visible if p.is_file()):
            why = _no_text(file)
            if not why:
                found.append(file)
            elif left_out is not None:
                left_out.append(why)
    except OSError as error:
        raise ConfigError(f"data.path: cannot read the folder {str(path)!r}: {error.strerror}") from None
    if not found:
        raise ConfigError(f"data.path: the folder {str(path)!r} holds no text file")
    return found


def _no_text(path: Path) -> str:
    """Why a file is not read, by its first bytes; empty for text."""
    try:
        with open(path, "rb") as file:
            place = file.read(4096).find(b"\0")
    except OSError as error:
        return f"{path} ({error.strerror})"
    return f"{path} (a NUL byte at offset {place:,})" if place >= 0 else ""


def read_texts(files: Iterable[Path], max_bytes: int, left_out: list[str] | None = None) -> Iterator[str]:
    """Texts of files of UTF-8, up to ``max_bytes`` in all (0: no limit).

    Args:
        files: The files.
        max_bytes: Where to stop, if need be inside a file.
        left_out: Takes a line on each file that is no text; None refuses such a file.

    Raises:
        ConfigError: A file cannot be read, or is no text; names the first byte that is none, and its offset.
    """
    left = max_bytes or None
    for file in files:
        try:
            with open(file, "rb") as opened:
                content = opened.read(left)
                cut = left is not None and len(content) == left
        except OSError as error:
            raise ConfigError(f"data.path: cannot read {str(file)!r}: {error.strerror}") from None
        try:
            text = _decoded(content, cut)
        except ValueError as error:
            if left_out is None:
                raise ConfigError(f"data.path: {str(file)!r} is not a text file of UTF-8: {error}") from None
            left_out.append(f"{file} ({error})")
            continue
        yield text
        if left is not None:
            left -= len(content)
            if left <= 0:
                return


def _decoded(content: bytes, cut: bool) -> str:
    """UTF-8 as text, without half a character at the end if it was cut. Raises ValueError with the first bad offset."""
    nul = content.find(b"\0")
    if nul >= 0:
        raise ValueError(f"a NUL byte at offset {nul:,}")
    try:
        return codecs.utf_8_decode(content, "strict", not cut)[0]
    except UnicodeDecodeError as error:
        raise ValueError(f"byte 0x{content[error.start]:02x} at offset {error.start:,}") from None


def say_what_is_missing(
    files: Iterable[Path], limit: int, left_out: list[str], source: str, say: Callable[[str], None]
) -> None:
    """Says in one line each which part of the files a limit leaves away, and which files are left out."""
    total = sum(file.stat().st_size for file in files)
    if limit and total > limit:
        say(f"data.max_bytes: taking the first {limit:,} of the {total:,} bytes of {source}")
    if left_out:
        say(
            f"warning: {len(left_out):,} files of {source} are left out, since they are not text of UTF-8: "
            f"{some(left_out, 3)}"
        )


@dataclass(frozen=True)
class Tokens:
    """A tokenised corpus, mapped from its file.

    Attributes:
        train: Token ids for training, 1-D, uint16 or uint32.
        evaluation: Token ids for evaluation.
        key: Hash of the text and of the vocabulary size.
        source: Where the text came from.
    """

    train: np.ndarray
    evaluation: np.ndarray
    key: str
    source: str

    def batch(self, *, seed: int, step: int, first: int, size: int, length: int) -> np.ndarray:
        """Sequences of a step, each of which depends on seed, step and its number alone: on no rank, and on no run before.

        Args:
            seed: Of the run.
            step: The step.
            first: Number of the first sequence in the step.
            size: Sequences.
            length: Tokens of each.

        Returns:
            int64 ``[size, length]``: windows at random places.
        """
        places = len(self.train) - length + 1
        starts = [np.random.default_rng([seed, step, first + i]).integers(0, places) for i in range(size)]
        return np.stack([self.train[s : s + length] for s in starts]).astype(np.int64)

    def evaluation_batch(self, *, index: int, size: int, length: int) -> np.ndarray:
        """An evaluation batch, the same in every run: windows spread over the text, int64 ``[size, length]``."""
        last = len(self.evaluation) - length
        starts = [((index * size + i) * length) % (last + 1) for i in range(size)]
        return np.stack([self.evaluation[s : s + length] for s in starts]).astype(np.int64)


def cache_root(data: dict[str, Any]) -> Path:
    """The folder of tokenised corpora."""
    if data["cache_dir"]:
        return Path(data["cache_dir"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hzero"


def prepare(
    data: dict[str, Any],
    vocab_size: int,
    length: int,
    batch_sequences: int,
    say: Callable[[str], None] = lambda message: None,
    tokenizer: Any = None,
) -> Tokens:
    """The tokenised corpus that the settings name, from the cache if it is there.

    Args:
        data: The ``data`` group.
        vocab_size: Of the model; maximum for the tokenizer.
        length: Tokens of a sequence.
        batch_sequences: Sequences of one micro-step of all ranks; the minimum for the text.
        say: Takes a line on the progress.
        tokenizer: That of a checkpoint; None trains one on the text.

    Raises:
        ConfigError: The path is missing, unreadable, empty or too short, or the cache cannot be written.
    """
    path = data["path"]
    left_out: list[str] = []
    files = stdlib_files() if path is None else text_files(Path(path).expanduser(), left_out)
    if not files:
        raise ConfigError("data.path: this Python has no sources of its standard library; give a text file or folder")
    limit = data["max_bytes"]
    if limit is None:
        limit = _STDLIB_BYTES if path is None else 0
    named = path is not None and Path(path).expanduser().is_file()
    texts = list(read_texts(files, limit, None if named else left_out))
    source = "Python standard library" if path is None else str(path)
    say_what_is_missing(files, limit, left_out, source, say)
    if not any(text.strip() for text in texts):
        raise ConfigError(f"data.path: {source!r} is empty")

    def check_length(count: int) -> None:
        evaluation, needed = int(count * data["eval_share"]), batch_sequences * length
        if count - evaluation < needed or evaluation < length:
            raise ConfigError(
                f"data.path: {source!r} is too short: {count:,} tokens, of which {evaluation:,} for evaluation; one batch of "
                f"all ranks takes {needed:,} tokens and evaluation {length:,} (data.eval_share, train.micro_batch and "
                "model.seq_length set these)"
            )

    key = _key(texts, str(vocab_size) if tokenizer is None else fingerprint(tokenizer))
    folder = entry(data, key)
    if not complete(folder, say):
        say(f"tokenising {sum(map(len, texts)) / 1e6:.1f} million characters of {source} (once; kept in {folder})")

        def fill(work: Path) -> dict[str, Any]:
            encoded = _encoded(texts, tokenizer) if tokenizer is not None else _trained(texts, vocab_size, work)
            dtype = id_type(vocab_size)
            count = 0
            with open(work / "tokens.bin", "wb") as file:
                for ids in encoded:
                    file.write(np.asarray(ids, dtype=dtype).tobytes())  # tofile would not say why a disk takes no more
                    count += len(ids)
            check_length(count)  # text that is refused leaves nothing behind
            return {"tokens": count, "dtype": dtype.name, "vocab_size": vocab_size, "key": key}

        keep(folder, fill)
    tokens = load(folder, data["eval_share"], source)
    check_length(len(tokens.train) + len(tokens.evaluation))
    return tokens


def load(folder: Path, eval_share: float, source: str) -> Tokens:
    """Maps a tokenised corpus."""
    meta = json.loads(read_small(folder / "meta.json"))
    mapped = np.memmap(folder / "tokens.bin", dtype=meta["dtype"], mode="r")
    cut = len(mapped) - int(len(mapped) * eval_share)
    return Tokens(mapped[:cut], mapped[cut:], meta["key"], source)


def entry(data: dict[str, Any], key: str) -> Path:
    """The cache folder of a key.

    Raises:
        ConfigError: It is there, and another user could change what is trained on.
    """
    folder = cache_root(data) / f"tokens-{key[:24]}"
    if why := distrust(folder):
        raise ConfigError(f"data.cache_dir: not trusted: {why}; remove the entry, or give a folder of your own")
    return folder


def _key(texts: list[str], tokenizer: str) -> str:
    digest = hashlib.sha256(f"{_FORMAT} {tokenizer}".encode())
    for text in texts:
        encoded = text.encode()
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.hexdigest()


def complete(folder: Path, say: Callable[[str], None] = lambda message: None) -> bool:
    """Whether an entry of the cache holds what was written. All of it is read.

    Args:
        folder: The entry.
        say: Takes a line on an entry that is there and has to be built again.
    """
    if not folder.is_dir():
        return False
    try:
        meta = digests.read_note(folder / "meta.json")
        hashes = {str(name): str(digest) for name, digest in meta.get(digests.HASHES, {}).items()}
        if not hashes:
            wrong: str | None = "an earlier release wrote it, without hashes"
        elif not digests.holds(meta):
            wrong = "meta.json is not what was written"
        else:
            wrong = digests.first_changed(folder, meta["files"], hashes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        wrong = "meta.json cannot be read"
    if wrong:
        say(f"warning: data.cache_dir: {str(folder)!r} is built again: {wrong}")
    return not wrong


def id_type(vocab_size: int) -> np.dtype[Any]:
    """Type in which ids are kept."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def _encoded(texts: list[str], tokenizer: Any) -> Iterator[list[int]]:
    """Ids of texts by a checkpoint's tokenizer, each text with the tokens that it puts around one, and an end."""
    for start in range(0, len(texts), 64):
        for ids in tokenizer(texts[start : start + 64])["input_ids"]:
            yield with_end(ids, tokenizer)


def _trained(texts: list[str], vocab_size: int, work: Path) -> Iterator[list[int]]:
    """Ids of texts by a tokenizer that is trained on them and saved."""
    tokenizer = train_tokenizer(texts, vocab_size)
    with errors_of_disk(work):
        tokenizer.save(str(work / "tokenizer.json"))
    for start in range(0, len(texts), 64):
        for encoding in tokenizer.encode_batch(texts[start : start + 64]):
            yield encoding.ids


def keep(folder: Path, fill: Callable[[Path], dict[str, Any]]) -> None:
    """Makes an entry of the cache, whole or not at all.

    Args:
        folder: The entry.
        fill: Writes its files into the folder that it is given, and returns what its ``meta.json`` says.

    Raises:
        ConfigError: The cache cannot be written.
    """
    with refusing("data.cache_dir", folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        for left in folder.parent.glob(".building-*"):  # by a process that was killed
            if time.time() - left.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(left, ignore_errors=True)
        work = Path(tempfile.mkdtemp(prefix=".building-", dir=folder.parent))
    try:
        with refusing("data.cache_dir", work):
            meta, files = fill(work), sorted(work.iterdir())
            meta["files"] = {path.name: path.stat().st_size for path in files}
            meta[digests.HASHES] = {path.name: digests.of_file(path) for path in files}
            (work / "meta.json").write_text(json.dumps(digests.sealed(meta)))
            if folder.exists() and not complete(folder):
                shutil.rmtree(folder)  # torn or changed since
            try:
                work.rename(folder)
            except OSError:
                if not complete(folder):  # else another run was faster, with the same content
                    raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
