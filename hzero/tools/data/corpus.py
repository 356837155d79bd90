"""The text of `hzero train` as token ids in files that `datasets` maps, with a tokenizer of ``tokenizers``."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hzero.calls import library_errors
from hzero.errors import ConfigError
from hzero.files import cache_folder, expanded, read_json, refusing
from hzero.tools.data import token_files
from hzero.tools.experiment import Experiment, checkpoint_folder

#: Ends a text where the tokenizer is trained here.
END = "<|endoftext|>"
#: Files of which a model's folder has one if it has a tokenizer.
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
#: Bytes of text in a shard.
_LIMIT = 64_000_000


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
    """Tokenises the text of the group ``data``, whose token ids a cache keeps, or takes those of `hzero data prepare`.

    Args:
        experiment: The experiment.
        say: Takes a line on the progress.

    Raises:
        ConfigError: The text cannot be read or is too short, or the tokenizer does not fit the model.
    """
    from datasets import load_from_disk

    data, length, vocab = experiment["data"], experiment["model"]["seq_length"], experiment.architecture.vocab_size
    source, model = data["path"] or "Python's standard library", checkpoint_folder(experiment["model"])
    has_own = any((model / name).exists() for name in _TOKENIZERS) if model else False
    own = read_tokenizer(model, "model.path", vocab) if model and has_own else None
    folder = expanded(data["path"] or "")
    if not data["path"] or not (folder / token_files.IDENTITY).is_file():
        folder = _tokenised(experiment, own, say)
    elif data["max_bytes"]:
        raise ConfigError(f"data.max_bytes: found {data['max_bytes']} for the token ids in {source!r}; expected null")
    with library_errors(f"data.path: found no complete data set of `hzero data prepare` in {source!r}"):
        blocks = load_from_disk(str(folder))
    tokenizer = read_tokenizer(folder / "tokenizer", "data.path", vocab)
    if own is not None and own.get_vocab() != tokenizer.get_vocab():
        raise ConfigError(f"data.path: found token ids of another tokenizer in {source!r}; expected the model's")
    if (width := blocks.features["input_ids"].length) != length:
        raise ConfigError(f"model.seq_length: found {length}; expected {width}, as in {source!r}")
    batch = experiment["train"]["micro_batch"] * experiment.replicas
    kept = min(int(len(blocks) * data["eval_share"]), experiment["train"]["eval_batches"] * batch)
    if len(blocks) - kept < batch or not kept:
        found = f"found {len(blocks):,} blocks of {length} tokens, {kept:,} of them for evaluation"
        expected = f"expected {batch:,} for one batch of all ranks and 1 for evaluation"
        raise ConfigError(f"data.path: {source!r} is too short: {found}; {expected}")
    parts = blocks.train_test_split(test_size=kept, shuffle=False)
    return Corpus(parts["train"], parts["test"], tokenizer, source)


def _tokenised(experiment: Experiment, tokenizer: Any, say: Callable[[str], None]) -> Path:
    """The folder in the cache with the token ids of the text. Without a tokenizer one is trained, once."""
    data, length, vocab = experiment["data"], experiment["model"]["seq_length"], experiment.architecture.vocab_size
    files = token_files.files_of(data["path"], data["max_bytes"])
    cache = expanded(data["cache_dir"] or cache_folder()).absolute()
    given = tokenizer.backend_tokenizer.to_str() if tokenizer else vocab
    output = cache / f"tokens-{token_files.hash_of([files, given, length])}"
    with refusing("data.cache_dir", cache):
        output.mkdir(parents=True, exist_ok=True)
    if not (output / token_files.STATE).is_file():
        tokenizer = tokenizer or _trained(files, vocab, output, say)
        work = token_files.begin(files, output, tokenizer, length, _LIMIT, "arrow")
        for file, chunks in work.items():
            if not file.is_file():
                token_files.write(file, chunks)
        token_files.complete(output, work, tokenizer)
    return output


def _trained(files: dict[str, list[int]], vocab: int, output: Path, say: Callable[[str], None]) -> Any:
    """A byte-level BPE with an end token, trained on the files, unless a run that was interrupted has done so."""
    from tokenizers import ByteLevelBPETokenizer, Tokenizer
    from transformers import PreTrainedTokenizerFast

    if (output / token_files.IDENTITY).is_file():
        found = Tokenizer.from_str(
            read_json(output / token_files.IDENTITY, limit=1 << 32, links=False)["tokenizer.json"]
        )
    else:
        say(f"training a tokenizer of {vocab:,} tokens (once; kept in {output})")
        texts = (
            text for _, chunk in token_files.chunks(files, _LIMIT) for text, *_ in token_files.read(*chunk, _LIMIT)
        )
        made = ByteLevelBPETokenizer()
        made.train_from_iterator(texts, vocab_size=vocab, min_frequency=2, show_progress=False, special_tokens=[END])
        found = Tokenizer.from_str(made.to_str())
    return PreTrainedTokenizerFast(tokenizer_object=found, bos_token=END, eos_token=END, pad_token=END)


def read_tokenizer(folder: Path, key: str, vocab: int | None = None) -> Any:
    """The tokenizer in a folder, which is one of ``tokenizers``. No code of the folder runs.

    Raises:
        ConfigError: There is none, or it has more than ``vocab`` tokens. The message begins with ``key``.
    """
    from transformers import AutoTokenizer

    with library_errors(f"{key}: cannot read the tokenizer in {str(folder)!r}"):
        found = AutoTokenizer.from_pretrained(folder.resolve(True), local_files_only=True, trust_remote_code=False)
    if not found.is_fast:
        raise ConfigError(f"{key}: found {type(found).__name__} in {str(folder)!r}; expected a tokenizer.json")
    if vocab is not None and len(found) > vocab:
        tokens = f"{len(found):,} tokens in the tokenizer of {str(folder)!r}"
        raise ConfigError(f"{key}: found {tokens}; expected at most the model's {vocab:,}")
    return found
