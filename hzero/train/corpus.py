"""The corpus of a run, text or examples: prepared by the command, mapped by every rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hzero.files import read_small
from hzero.settings import architecture
from hzero.settings.settings import Settings, model_vocab
from hzero.train import data, examples
from hzero.train import tokenizer as tokenizers
from hzero.train.batches import evaluation_sequences
from hzero.validation import ConfigError


def form(group: dict[str, Any]) -> str:
    """``text`` or ``jsonl``: what the files of the ``data`` group are.

    Raises:
        ConfigError: The group does not say, and the folder holds both.
    """
    if group["path"] is None:
        if group["format"] == "jsonl":
            raise ConfigError("data.format: found jsonl without data.path, and the standard library is text")
        return "text"
    if group["format"] != "auto":
        return str(group["format"])
    path = Path(group["path"]).expanduser()
    names = {file.suffix == ".jsonl" for file in data.text_files(path)}
    if len(names) > 1:
        raise ConfigError(f"data.format: auto, and {str(path)!r} holds .jsonl and other files; possible: text, jsonl")
    return "jsonl" if names == {True} else "text"


def prepare(settings: Settings, say: Callable[[str], None]) -> tuple[data.Tokens | examples.Examples, Any]:
    """The tokenised corpus and the tokenizer that the settings name.

    Args:
        settings: The run's settings.
        say: Takes a line on the progress.

    Raises:
        ConfigError: Text or tokenizer cannot be used, or the text is too short.
    """
    group, model = settings["data"], settings["model"]
    vocab, length = model_vocab(model), model["seq_length"]
    least = settings.readers.data * settings["train"]["micro_batch"]
    tokenizer = tokenizers.of_folder(architecture.checkpoint_folder(model), vocab)
    if form(group) == "text":
        text = data.prepare(group, vocab, length, least, say, tokenizer)
        return text, tokenizer or tokenizers.of_file(data.entry(group, text.key) / "tokenizer.json")
    if group["packing"] and not architecture.takes_positions(model):
        raise ConfigError(
            "data.packing: found true, and the architecture takes no position_ids, by which packed examples are kept apart; "
            "possible: false"
        )
    if group["packing"] and settings.sequence.tensor > 1:
        raise ConfigError(
            f"data.packing: found true with model.sequence_parallel {settings.sequence.tensor}, whose attention does not keep "
            "packed examples apart; possible: false"
        )
    found = examples.prepare(group, vocab, tokenizer, say)
    _check_count(found, settings, least, say)
    if tokenizer is None:
        file = data.entry(group, found.key) / "tokenizer.json"
        tokenizer = tokenizers.with_template(tokenizers.of_file(file), group["chat_template"])
    return found, tokenizer


def _check_count(found: examples.Examples, settings: Settings, least: int, say: Callable[[str], None]) -> None:
    laid = examples.sequences(found, settings["model"]["seq_length"], settings["data"]["packing"])
    total = len(laid.pieces)
    kept = evaluation_sequences(laid, found.eval_share)
    if total - kept < least:
        raise ConfigError(
            f"data.path: {found.source!r} is too short: {len(found.table):,} examples make {total:,} sequences, of which "
            f"{kept:,} for evaluation; one batch of all ranks takes {least:,} (data.packing, data.eval_share, "
            "train.micro_batch and model.seq_length set these)"
        )
    filled = laid.lengths.sum() / (total * settings["model"]["seq_length"])
    say(
        f"{len(found.table):,} examples in {total:,} sequences, {filled:.0%} filled"
        + (f"; {laid.cut:,} are longer than model.seq_length and lose their end" if laid.cut else "")
        + (f"; {laid.empty:,} have no token to learn and are left out" if laid.empty else "")
    )


def load(folder: Path, eval_share: float, source: str) -> data.Tokens | examples.Examples:
    """Maps a corpus that `prepare` has made."""
    made = "examples" if "examples" in json.loads(read_small(folder / "meta.json")) else "text"
    return examples.load(folder, eval_share, source) if made == "examples" else data.load(folder, eval_share, source)
