"""The text of a run as blocks of token ids: read and cached by ``datasets``, with a tokenizer of ``tokenizers``."""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from hzero.experiment import Experiment, checkpoint_folder
from hzero.files import FULL, cache_folder, expanded, refusing
from hzero.validation import ConfigError, library_errors

#: Ends a text where the tokenizer is trained here.
END = "<|endoftext|>"
#: Folders that are not the standard library itself, or not everywhere part of it.
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "__pycache__", "idlelib", "turtledemo", "lib2to3"}
#: Bytes of the standard library, unless ``data.max_bytes`` says otherwise.
_STDLIB_BYTES = 8_000_000


@dataclass(frozen=True)
class Corpus:
    """A tokenised text.

    Attributes:
        train: A ``datasets.Dataset`` of ``input_ids``, ``model.seq_length`` each.
        evaluation: The same for evaluation: the end of the text.
        tokenizer: The tokenizer, which has an end token if it was trained here.
        source: Where the text comes from.
    """

    train: Any
    evaluation: Any
    tokenizer: Any
    source: str


def prepare(experiment: Experiment, say: Callable[[str], None]) -> Corpus:
    """Reads and tokenises the text of the group ``data``; ``datasets`` keeps both in its cache.

    Args:
        experiment: The experiment.
        say: Takes a line on the progress.

    Raises:
        ConfigError: The text cannot be read or is too short, or the tokenizer does not fit the model.
    """
    from datasets import disable_progress_bars, load_dataset

    disable_progress_bars()
    data, model = experiment["data"], experiment["model"]
    vocab, length = experiment.architecture.vocab_size, model["seq_length"]
    source = "Python's standard library" if data["path"] is None else str(data["path"])
    files = _files(data["path"], data["max_bytes"])
    cache = expanded(data["cache_dir"] or cache_folder()).absolute()
    with refusing("data.cache_dir", cache):
        cache.mkdir(parents=True, exist_ok=True)
    if len(of_json := {path.suffix in (".json", ".jsonl") for path in files}) > 1:
        raise ConfigError(f"data.path: found text and JSON in {source!r}; expected only text, or only .json and .jsonl")
    kind = {} if True in of_json else {"sample_by": "document"}
    try:
        texts = load_dataset(
            "text" if kind else "json",
            data_files=[glob.escape(str(path)) for path in files],
            split="train",
            cache_dir=str(cache),
            **kind,
        )
    except Exception as error:  # of many kinds: what it wraps says why
        cause = error.__cause__ or error
        if isinstance(cause, OSError) and cause.errno in FULL:
            raise ConfigError(f"data.cache_dir: cannot write {str(cache)!r}: {cause.strerror}") from None
        raise ConfigError(f"data.path: cannot read {source!r}: {' '.join(str(cause).split())[:300]}") from None
    if "text" not in texts.column_names:
        found = ", ".join(texts.column_names)  # conversations need TRL's SFTTrainer, see docs/recipes/trl.md
        raise ConfigError(f"data.path: found {found} in {source!r}; expected a key 'text'")
    if "string" not in (found := str(getattr(texts.features["text"], "dtype", "lists or objects"))):
        raise ConfigError(f"data.path: found {found} at the key 'text' of {source!r}; expected strings")
    tokenizer = _tokenizer(checkpoint_folder(model), texts, vocab, cache, say)
    with refusing("data.cache_dir", cache):
        blocks = texts.map(
            _cut,
            fn_kwargs={"tokenizer": tokenizer, "length": length},
            batched=True,
            remove_columns=texts.column_names,
            new_fingerprint=_hash("blocks", texts._fingerprint, tokenizer.backend_tokenizer.to_str(), length),
        )
    batch = experiment["train"]["micro_batch"] * experiment.world_size // experiment.tensor
    kept = min(int(len(blocks) * data["eval_share"]), experiment["train"]["eval_batches"] * batch)
    if len(blocks) - kept < batch or not kept:
        found = f"found {len(blocks):,} blocks of {length} tokens, {kept:,} of them for evaluation"
        expected = f"expected {batch:,} for one batch of all ranks and 1 for evaluation"
        raise ConfigError(f"data.path: {source!r} is too short: {found}; {expected}")
    parts = blocks.train_test_split(test_size=kept, shuffle=False)
    return Corpus(parts["train"], parts["test"], tokenizer, source)


def _files(path: str | None, limit: int | None) -> list[Path]:
    """The files of the text, sorted, until they have ``limit`` bytes: of the standard library, a file, or below a folder."""
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        found = [p for p in root.rglob("*.py") if not _NOT_STDLIB & set(p.relative_to(root).parts)]
        limit = _STDLIB_BYTES if limit is None else limit
    else:
        root = expanded(path)
        inside = root.rglob("*") if root.is_dir() else [root]
        found = [p for p in inside if not any(part.startswith(".") for part in p.relative_to(root).parts)]
    found = sorted(p for p in found if p.is_file())
    sizes = accumulate(p.stat().st_size for p in found)
    found = [p for p, size in zip(found, sizes) if not limit or size <= limit] or found[:1]
    if not found:
        raise ConfigError(f"data.path: found no regular file at {str(root)!r}; expected text, or .jsonl")
    return found


def _hash(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def _cut(rows: dict[str, list[str]], tokenizer: Any, length: int) -> dict[str, Any]:
    """Texts, each with its end, as blocks of ``length`` tokens; what is left of a batch is dropped."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    encoded = tokenizer([text for text in rows["text"] if text is not None], add_special_tokens=False)["input_ids"]
    ids = [token for text in encoded for token in (*text, *end)]
    return {"input_ids": [ids[at : at + length] for at in range(0, len(ids) - length + 1, length)]}


def _tokenizer(folder: Path | None, texts: Any, vocab: int, cache: Path, say: Callable[[str], None]) -> Any:
    """The tokenizer of a model's folder. If it has none, a byte-level BPE with an end token, trained on the texts, once."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
    there = [folder / name for name in names if (folder / name).exists()] if folder is not None else []
    if wrong := next((path for path in there if not path.is_file()), None):
        raise ConfigError(f"model.path: {str(wrong)!r} is not a regular file")
    if folder is None or not there:
        folder = cache / f"tokenizer-{_hash(texts._fingerprint, vocab)}"
    if not folder.is_dir():
        say(f"training a tokenizer of {vocab:,} tokens (once; kept in {folder})")
        trained = ByteLevelBPETokenizer()
        trained.train_from_iterator(
            (row["text"] or "" for row in texts),
            vocab_size=vocab,
            min_frequency=2,
            show_progress=False,
            special_tokens=[END],
        )
        made = PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, bos_token=END, eos_token=END, pad_token=END)
        with refusing("data.cache_dir", folder), tempfile.TemporaryDirectory(dir=cache) as work:
            made.save_pretrained(f"{work}/{folder.name}")
            try:
                os.rename(f"{work}/{folder.name}", folder)
            except OSError:
                if not folder.is_dir():  # no other run was faster
                    raise
    with library_errors(f"model.path: cannot read the tokenizer in {str(folder)!r}"):
        found = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    if not found.is_fast:
        raise ConfigError(f"model.path: found {type(found).__name__} in {str(folder)!r}; expected a tokenizer.json")
    if len(found) > vocab:
        tokens = f"{len(found):,} tokens in the tokenizer of {str(folder)!r}"
        raise ConfigError(f"model.path: found {tokens}; expected at most the model's {vocab:,}")
    return found
