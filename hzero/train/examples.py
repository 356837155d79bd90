"""Examples: JSONL to token ids with a mark on each that the loss counts, and sequences packed from them."""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hzero.files import read_small
from hzero.train import tokenizer as tokenizers
from hzero.train.data import complete, entry, id_type, keep, say_what_is_missing, text_files
from hzero.validation import ConfigError, printable

_FORMAT = 1
#: What a line may hold.
_KINDS = '{"messages": [..]}, {"prompt": .., "completion": ..} or {"text": ..}'


@dataclass(frozen=True)
class Examples:
    """Tokenised examples, mapped from their files.

    Attributes:
        ids: Token ids of all examples, 1-D, uint16 or uint32.
        counted: uint8 of the same length: 1 for a token that the loss counts.
        table: int64 ``[examples, 2]``: the length of each, and 1 for a text, which may be cut into several sequences.
        key: Hash of the files, the tokenizer and its template.
        source: Where they came from.
        eval_share: Share of the sequences, from the end, kept for evaluation.
        chat: Whether some are conversations.
    """

    ids: np.ndarray
    counted: np.ndarray
    table: np.ndarray
    key: str
    source: str
    eval_share: float
    chat: bool


@dataclass(frozen=True)
class Sequences:
    """Sequences of at most a maximum length, each of one piece or more.

    Attributes:
        pieces: For each sequence its pieces: first token and length.
        lengths: Tokens of each sequence.
        counts: Tokens of each that the loss counts.
        cut: Examples that were too long, and lost their end.
        empty: Pieces that were left out, since the loss would count nothing in them.
    """

    pieces: list[list[tuple[int, int]]]
    lengths: np.ndarray
    counts: np.ndarray
    cut: int
    empty: int


def prepare(data: dict[str, Any], vocab_size: int, tokenizer: Any, say: Callable[[str], None]) -> Examples:
    """The tokenised examples that the settings name, from the cache if they are there.

    Args:
        data: The ``data`` group.
        vocab_size: Of the model; maximum for a tokenizer that is trained on the examples.
        tokenizer: That of a checkpoint, or None.
        say: Takes a line on the progress.

    Raises:
        ConfigError: Names the file and the line that cannot be used.
    """
    source = str(data["path"])
    left_out: list[str] = []
    files = text_files(Path(source).expanduser(), left_out)
    if Path(source).expanduser().is_dir():
        files = [file for file in files if file.suffix == ".jsonl"]
        left_out = [line for line in left_out if ".jsonl (" in line]
        if not files:
            raise ConfigError(f"data.path: the folder {source!r} holds no .jsonl")
    limit = data["max_bytes"] or 0
    say_what_is_missing(files, limit, left_out, source, say)
    # The template is a part of the fingerprint; without a tokenizer one is trained, which has the plain template.
    kind = f"{vocab_size} {tokenizers.template_of(data['chat_template'], None)}"
    if tokenizer is not None:
        kind = tokenizers.fingerprint(tokenizers.with_template(tokenizer, data["chat_template"]))
        if not tokenizer.is_fast:
            raise ConfigError(
                "model.path: its tokenizer cannot say which characters a token covers (no fast tokenizer)"
            )
    digest = hashlib.sha256(f"examples {_FORMAT} {kind}".encode())
    for _, line in _lines(files, limit):
        digest.update(line)
    folder = entry(data, digest.hexdigest())
    if not complete(folder, say):
        say(f"tokenising the examples of {source} (once; kept in {folder})")

        def fill(work: Path) -> dict[str, Any]:
            encode = tokenizer
            if encode is None:
                texts = (text for where, line in _lines(files, limit) for text in _texts(_parse(line, where), where))
                trained = tokenizers.train_tokenizer(texts, vocab_size, [tokenizers.END])
                with tokenizers.errors_of_disk(work):
                    trained.save(str(work / "tokenizer.json"))
                encode = tokenizers.with_template(tokenizers.of_file(work / "tokenizer.json"), data["chat_template"])
            return _write(work, files, limit, encode, vocab_size, digest.hexdigest())

        keep(folder, fill)
    return load(folder, data["eval_share"], source)


def load(folder: Path, eval_share: float, source: str) -> Examples:
    """Maps tokenised examples."""
    meta = json.loads(read_small(folder / "meta.json"))
    ids = np.memmap(folder / "tokens.bin", dtype=meta["dtype"], mode="r")
    counted = np.memmap(folder / "counted.bin", dtype=np.uint8, mode="r")
    return Examples(ids, counted, np.load(folder / "examples.npy"), meta["key"], source, eval_share, meta["chat"])


def _lines(files: Iterable[Path], limit: int) -> Iterator[tuple[str, bytes]]:
    """Lines that are not blank, each with its file and number, up to ``limit`` bytes in all (0: no limit)."""
    read = 0
    for path in files:
        try:
            with open(path, "rb") as file:
                for number, line in enumerate(file, 1):
                    read += len(line)
                    if limit and read > limit:
                        return
                    if line.strip():
                        yield f"{path}:{number}", line
        except OSError as error:
            raise ConfigError(f"data.path: cannot read {str(path)!r}: {error.strerror}") from None


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        found = json.loads(line.decode("utf-8-sig"))  # of bytes, json would take UTF-16 and half a surrogate pair
        if b"\\u" in line:  # JSON can hold half of a surrogate pair, which is no text
            json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is one
        raise ConfigError(f"data.path: {where}: not JSON ({error})") from None
    if not isinstance(found, dict):
        raise ConfigError(f"data.path: {where}: found {type(found).__name__}; possible: {_KINDS}")
    kinds = [kind for kind in (("messages",), ("prompt", "completion"), ("text",)) if all(k in found for k in kind)]
    if len(kinds) != 1:
        names = ", ".join(map(printable, found))[:200]
        raise ConfigError(f"data.path: {where}: found keys {names or 'none'}; possible: {_KINDS}")
    if "messages" in found:
        messages = found["messages"]
        if not isinstance(messages, list) or not messages:
            raise ConfigError(f"data.path: {where}: messages: expected a list of messages")
        for index, message in enumerate(messages):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
                raise ConfigError(f"data.path: {where}: messages.{index}: expected role and content")
            message["content"] = _content(message, f"{where}: messages.{index}")
        return found
    for key in kinds[0]:
        if not isinstance(found[key], str):
            raise ConfigError(f"data.path: {where}: {key}: found {type(found[key]).__name__}, expected text")
    return found


def _content(message: dict[str, Any], where: str) -> str:
    """The text of a message, also where it is given in parts; a message of tool calls may have none."""
    content = message["content"]
    if content is None and message.get("tool_calls"):
        return ""
    if isinstance(content, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str):
        raise ConfigError(f"data.path: {where}.content: found {type(content).__name__}, expected text or parts of text")
    return content


def _texts(example: dict[str, Any], where: str) -> Iterator[str]:
    """The text of an example, for a tokenizer that is trained on it."""
    for message in example.get("messages", ()):
        yield f"<|{message['role']}|>\n{message['content']}\n"
    yield from (example[key] for key in ("prompt", "completion", "text") if key in example)


def _write(work: Path, files: list[Path], limit: int, tokenizer: Any, vocab_size: int, key: str) -> dict[str, Any]:
    dtype, table, chat = id_type(vocab_size), [], False
    with open(work / "tokens.bin", "wb") as tokens, open(work / "counted.bin", "wb") as marks:
        for where, line in _lines(files, limit):
            example = _parse(line, where)
            ids, counted = _encode(example, tokenizer, where)
            assert len(ids) == len(counted), where
            tokens.write(np.asarray(ids, dtype=dtype).tobytes())  # tofile would not say why a disk takes no more
            marks.write(np.asarray(counted, dtype=np.uint8).tobytes())
            chat = chat or "messages" in example
            table.append((len(ids), int("text" in example)))
    if not table:
        raise ConfigError("data.path: no line holds an example")
    made = io.BytesIO()
    np.save(made, np.asarray(table, dtype=np.int64))
    (work / "examples.npy").write_bytes(made.getvalue())
    return {"examples": len(table), "dtype": dtype.name, "chat": chat, "key": key}


def _encode(example: dict[str, Any], tokenizer: Any, where: str) -> tuple[list[int], list[bool]]:
    """Ids of an example, and which of them the loss counts: all of a text, the completion, what the assistant says."""
    if "messages" in example:
        return _encode_messages(example, tokenizer, where)
    prompt = example.get("prompt", "")
    out = tokenizer(
        example["text"] if "text" in example else prompt + example["completion"], return_offsets_mapping=True
    )
    ids = tokenizers.with_end(out["input_ids"], tokenizer)
    # A token that holds characters of both sides belongs to what is learnt.
    counted = [end > len(prompt) for _, end in out["offset_mapping"]]
    counted += [True] * (len(ids) - len(counted))
    if counted:
        counted[-1] = True  # the end is learnt, whoever has put it there
    return ids, counted


def _encode_messages(example: dict[str, Any], tokenizer: Any, where: str) -> tuple[list[int], list[bool]]:
    messages, tools = example["messages"], example.get("tools")

    def rendered(count: int, more: bool = False) -> str:
        return str(
            tokenizer.apply_chat_template(messages[:count], tools=tools, tokenize=False, add_generation_prompt=more)
        )

    try:
        if re.search(r"\{%-?\s*generation\b", str(tokenizer.chat_template)):
            out = tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            return out["input_ids"], [bool(mark) for mark in out["assistant_masks"]]
        # Without marks in the template, a turn is what the conversation up to it has more than the prompt for it.
        whole, spans = rendered(len(messages)), []
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                before, after = rendered(index, more=True), rendered(index + 1)
                if not (after.startswith(before) and whole.startswith(after)):
                    raise ConfigError(
                        f"data.path: {where}: messages.{index}: the chat template writes this turn otherwise when others "
                        "follow it; give a template with {% generation %} marks (data.chat_template)"
                    )
                spans.append((len(before), len(after)))
    except ConfigError:
        raise
    except Exception as error:  # of jinja, and of what templates themselves raise
        raise ConfigError(f"data.path: {where}: the chat template refuses it: {' '.join(str(error).split())}") from None
    out = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    counted = [
        any(first < token_end and start < end for first, end in spans) for start, token_end in out["offset_mapping"]
    ]
    return out["input_ids"], counted


def sequences(examples: Examples, length: int, packing: bool) -> Sequences:
    """Lays examples into sequences, the same on every rank.

    With packing examples lie one after the other, in the order of the files; one that does not fit begins the next sequence.
    A text that is longer than a sequence goes on in further ones; other examples lose their end.
    """
    pieces: list[tuple[int, int, int]] = []
    start = cut = empty = 0
    for size, is_text in examples.table.tolist():
        cut += size > length and not is_text
        for first in range(0, size if is_text else 1, length):
            part = min(length, size - first)
            # The first token of a piece is predicted from nothing.
            counted = int(examples.counted[start + first + 1 : start + first + part].sum())
            if counted:
                pieces.append((start + first, part, counted))
            else:
                empty += 1
        start += size
    rows: list[list[tuple[int, int]]] = []
    lengths: list[int] = []
    counts: list[int] = []
    for first, part, counted in pieces:
        if packing and rows and lengths[-1] + part <= length:
            rows[-1].append((first, part))
            lengths[-1] += part
            counts[-1] += counted
        else:
            rows.append([(first, part)])
            lengths.append(part)
            counts.append(counted)
    return Sequences(rows, np.asarray(lengths, np.int64), np.asarray(counts, np.int64), cut, empty)
