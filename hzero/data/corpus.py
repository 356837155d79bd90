"""The text of a run as token ids in files that `datasets` maps, with a tokenizer of ``tokenizers``."""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from hzero.data import shards
from hzero.data.shards import Job, Piece
from hzero.experiment import Experiment, checkpoint_folder
from hzero.files import cache_folder, expanded, refusing, replacing
from hzero.validation import ConfigError, library_errors

#: Ends a text where the tokenizer is trained here.
END = "<|endoftext|>"
#: Files of a folder of token ids: what they were made of, and what `datasets` reads, which is written last.
IDENTITY, STATE = "prepare.json", "state.json"
#: Bytes of text in a shard of `hzero train`.
_SHARD_BYTES = 64_000_000


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

    data, length = experiment["data"], experiment["model"]["seq_length"]
    source = "Python's standard library" if data["path"] is None else str(data["path"])
    if data["path"] is not None and (expanded(data["path"]) / IDENTITY).is_file():
        folder = expanded(data["path"])
        tokenizer = _tokenizer_of_ids(experiment, folder)
    else:
        folder, tokenizer = _tokenised(experiment, say)
    with library_errors(f"data.path: cannot read {source!r}"):
        blocks = load_from_disk(str(folder))
        width = blocks.features["input_ids"].length
    if width != length:
        raise ConfigError(f"model.seq_length: found {length}; expected {width}, as in {source!r}")
    batch = experiment["train"]["micro_batch"] * experiment.replicas
    kept = min(int(len(blocks) * data["eval_share"]), experiment["train"]["eval_batches"] * batch)
    if len(blocks) - kept < batch or not kept:
        found = f"found {len(blocks):,} blocks of {length} tokens, {kept:,} of them for evaluation"
        expected = f"expected {batch:,} for one batch of all ranks and 1 for evaluation"
        raise ConfigError(f"data.path: {source!r} is too short: {found}; {expected}")
    parts = blocks.train_test_split(test_size=kept, shuffle=False)
    return Corpus(parts["train"], parts["test"], tokenizer, source)


def _tokenizer_of_ids(experiment: Experiment, folder: Path) -> Any:
    """The tokenizer of a folder that `hzero data prepare` has written."""
    if not (folder / STATE).is_file():
        expected = "expected one that `hzero data prepare` has completed, with data.format=arrow"
        raise ConfigError(f"data.path: found no complete data set in {str(folder)!r}; {expected}")
    if limit := experiment["data"]["max_bytes"]:
        raise ConfigError(f"data.max_bytes: found {limit} for the token ids in {str(folder)!r}; expected null")
    found = read_tokenizer(folder / "tokenizer", "data.path", experiment.architecture.vocab_size)
    model = checkpoint_folder(experiment["model"])
    own = read_tokenizer(model, "model.path") if model is not None and _has_tokenizer(model) else found
    if own.get_vocab() != found.get_vocab():
        raise ConfigError(f"data.path: found token ids of another tokenizer in {str(folder)!r}; expected the model's")
    return own


def _tokenised(experiment: Experiment, say: Callable[[str], None]) -> tuple[Path, Any]:
    """The folder in the cache with the token ids of the text, and the tokenizer."""
    data = experiment["data"]
    source, files = files_of(data["path"], data["max_bytes"])
    work = shards.cut(source, files, _SHARD_BYTES)
    cache = expanded(data["cache_dir"] or cache_folder()).absolute()
    with refusing("data.cache_dir", cache):
        cache.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(experiment, source, work, cache, say)
    length, end = experiment["model"]["seq_length"], tokenizer.eos_token_id
    job = Job(source, cache / "tokens-{}", len(work), end, length, _SHARD_BYTES)
    job, missing = begun(job, files, tokenizer)
    for number in missing:
        shards.write(job, number, work[number])
    if missing or not (job.output / STATE).is_file():
        complete(job)
    return job.output, tokenizer


def files_of(path: str | None, limit: int | None) -> tuple[Path, list[Path]]:
    """The files of a text, sorted, until they have ``limit`` bytes: of the standard library, a file, or below a folder.

    Returns:
        A folder, and the files in it.
    """
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        found = list(root.glob("*.py"))
    else:
        root = expanded(path)
        inside = root.rglob("*") if root.is_dir() else [root]
        found = [p for p in inside if not any(part.startswith(".") for part in p.relative_to(root).parts)]
    found = sorted(p for p in found if p.is_file())
    sizes = accumulate(p.stat().st_size for p in found)
    found = [p for p, size in zip(found, sizes) if not limit or size <= limit] or found[:1]
    if not found:
        raise ConfigError(f"data.path: found no regular file at {str(root)!r}; expected text, .jsonl or .parquet")
    return root if root.is_dir() else root.parent, found


def begun(job: Job, files: Sequence[Path], tokenizer: Any) -> tuple[Job, list[int]]:
    """Makes the output folder of a job, or checks that it belongs to the job.

    Args:
        job: The job. ``{}`` in the name of its output is the place of a hash of all that the shards depend on.
        files: Its input.
        tokenizer: The tokenizer.

    Returns:
        The job with the name of its output, and the numbers of the shards that are missing.

    Raises:
        ConfigError: The folder belongs to another job. The message names the first difference.
    """
    identity: dict[str, Any] = {
        "data.format": "megatron" if job.dtype else "arrow",
        "data.shard_bytes": job.limit,
        "model.seq_length": job.length,
        "tokenizer": _hash([tokenizer.backend_tokenizer.to_str(), job.end]),
    }
    for file in files:
        identity[f"data.path: {file.relative_to(job.source)}"] = [file.stat().st_size, file.stat().st_mtime_ns]
    output = Path(str(job.output).replace("{}", _hash(identity)))
    if (output / IDENTITY).is_file():
        before = json.loads((output / IDENTITY).read_bytes())
        for name in {**before, **identity}:
            if (found := identity.get(name)) != (wanted := before.get(name)):
                raise ConfigError(f"{name}: found {found}; expected {wanted}, as for {output}, or another folder")
    elif output.is_dir() and any(output.iterdir()):
        raise ConfigError(f"data.output: found other files in {str(output)!r}; expected an empty folder")
    output.mkdir(parents=True, exist_ok=True)
    with replacing(output / IDENTITY) as written:
        json.dump(identity, written, indent=1)
    with replacing(output / "tokenizer.json") as written:
        written.write(tokenizer.backend_tokenizer.to_str())
    job = replace(job, output=output)
    return job, [number for number in range(job.count) if not job.file(number).is_file()]


def complete(job: Job) -> None:
    """Makes a data set of a job's shards, which ``datasets`` reads; Megatron reads them as they are."""
    for left in job.output.glob(".*.partial"):  # of workers that were killed
        left.unlink(missing_ok=True)
    state: dict[str, Any] = dict.fromkeys(("_format_columns", "_format_type", "_split"))
    state |= {"_format_kwargs": {}, "_output_all_columns": False}
    state["_fingerprint"] = _hash((job.output / IDENTITY).read_text())
    state["_data_files"] = [{"filename": job.file(number).name} for number in range(job.count)]
    for name, content in {"dataset_info.json": {}, STATE: state}.items() if job.dtype is None else ():
        with replacing(job.output / name) as file:
            json.dump(content, file, indent=1)


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:24]


def _has_tokenizer(folder: Path) -> bool:
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
    there = [folder / name for name in names if (folder / name).exists()]
    if wrong := next((path for path in there if not path.is_file()), None):
        raise ConfigError(f"model.path: {str(wrong)!r} is not a regular file")
    return bool(there)


def _tokenizer(
    experiment: Experiment, source: Path, work: list[list[Piece]], cache: Path, say: Callable[[str], None]
) -> Any:
    """The tokenizer of a model's folder. If it has none, a byte-level BPE with an end token, trained on the texts, once."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    folder, vocab = checkpoint_folder(experiment["model"]), experiment.architecture.vocab_size
    if folder is not None and _has_tokenizer(folder):
        return read_tokenizer(folder, "model.path", vocab)
    pieces = [piece for pieces in work for piece in pieces]
    changed = [(source / piece.file).stat().st_mtime_ns for piece in pieces]
    file = cache / f"tokenizer-{_hash([str(source), pieces, changed, vocab])}.json"
    if not file.is_file():
        say(f"training a tokenizer of {vocab:,} tokens (once; kept in {file})")
        trained = ByteLevelBPETokenizer()
        texts = (text for piece in pieces for text, *_ in shards.read(source, piece, _SHARD_BYTES))
        trained.train_from_iterator(texts, vocab_size=vocab, min_frequency=2, show_progress=False, special_tokens=[END])
        with replacing(file) as written:
            written.write(trained.to_str())
    return PreTrainedTokenizerFast(tokenizer_file=str(file), bos_token=END, eos_token=END, pad_token=END)


def read_tokenizer(folder: Path, key: str, vocab: int | None = None) -> Any:
    """The tokenizer in a folder, which is one of ``tokenizers``. No code of the folder runs.

    Raises:
        ConfigError: There is none, or it has more than ``vocab`` tokens. The message begins with ``key``.
    """
    from transformers import AutoTokenizer

    with library_errors(f"{key}: cannot read the tokenizer in {str(folder)!r}"):
        found = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    if not found.is_fast:
        raise ConfigError(f"{key}: found {type(found).__name__} in {str(folder)!r}; expected a tokenizer.json")
    if vocab is not None and len(found) > vocab:
        tokens = f"{len(found):,} tokens in the tokenizer of {str(folder)!r}"
        raise ConfigError(f"{key}: found {tokens}; expected at most the model's {vocab:,}")
    return found
