"""The tokenizer: of a checkpoint's folder, or the one trained on the text, as transformers' classes."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hzero.validation import ConfigError

#: Ends a text, and a turn, where the tokenizer is trained here.
END = "<|endoftext|>"
#: How conversations are written for a tokenizer without a template: Zephyr's form, which needs no token but the end, and
#: ends a turn with a line break where the tokenizer has none.
PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] + (eos_token or '\n') }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")


def of_folder(folder: Path | None, vocab_size: int) -> Any:
    """The tokenizer of a checkpoint's folder; None where it has none, or there is no folder.

    Args:
        folder: The checkpoint's folder.
        vocab_size: Of the architecture.

    Raises:
        ConfigError: It cannot be read, or has ids that the architecture lacks.
    """
    if folder is None or not any((folder / name).is_file() for name in _FILES):
        return None
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # of many kinds, by the tokenizer's class
        raise ConfigError(f"model.path: cannot read the tokenizer in {str(folder)!r}: {_line(error)}") from None
    if len(found) > vocab_size:
        raise ConfigError(
            f"model.path: the tokenizer in {str(folder)!r} has {len(found):,} tokens, and the architecture {vocab_size:,} "
            "(vocab_size)"
        )
    return found


def of_file(file: Path) -> Any:
    """A tokenizer that was trained here, from its ``tokenizer.json``."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    trained = Tokenizer.from_file(str(file))
    end = {"eos_token": END} if trained.token_to_id(END) is not None else {}
    return PreTrainedTokenizerFast(tokenizer_object=trained, **end)


def train_tokenizer(texts: Iterable[str], vocab_size: int, special: Sequence[str] = ()) -> Any:
    """A byte-level BPE of the library ``tokenizers``, trained on texts."""
    from tokenizers import ByteLevelBPETokenizer

    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(
        texts, vocab_size=vocab_size, min_frequency=2, show_progress=False, special_tokens=list(special)
    )
    return trained


def with_end(ids: list[int], tokenizer: Any) -> list[int]:
    """Ids that end with the tokenizer's end of a text, if it has one."""
    end = tokenizer.eos_token_id
    return ids if end is None or ids[-1:] == [end] else [*ids, end]


def template_of(file: str | None, own: str | None) -> str:
    """The chat template to use: that of a file, the tokenizer's own, or `PLAIN_TEMPLATE`.

    Raises:
        ConfigError: The file cannot be read.
    """
    if file is None:
        return own or PLAIN_TEMPLATE
    try:
        return Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"data.chat_template: cannot read {file!r}: {_line(error)}") from None


def with_template(tokenizer: Any, file: str | None) -> Any:
    """The tokenizer with the chat template to use. Raises `ConfigError` as `template_of`."""
    tokenizer.chat_template = template_of(file, tokenizer.chat_template)
    return tokenizer


@contextlib.contextmanager
def errors_of_disk(path: Path) -> Iterator[None]:
    """Makes an `OSError` of what the libraries tokenizers and safetensors raise where a disk is full: a plain exception.

    Args:
        path: The place, for errors that name no file.
    """
    try:
        yield
    except Exception as error:
        if number := re.search(r"\(os error (\d+)\)", str(error)):
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from None
        raise


def fingerprint(tokenizer: Any) -> str:
    """Hash of everything that turns text into ids."""
    digest = hashlib.sha256()
    if getattr(tokenizer, "is_fast", False):
        digest.update(tokenizer.backend_tokenizer.to_str().encode())
    else:
        digest.update(repr(sorted(tokenizer.get_vocab().items())).encode())
    digest.update(repr([tokenizer.bos_token, tokenizer.eos_token, tokenizer.chat_template]).encode())
    return digest.hexdigest()


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
