"""Turns a folder of text, JSON lines or Parquet into token ids that training maps.

Examples:
  hzero data prepare data.path=texts data.output=tokens tokenizer=MODEL_FOLDER
  hzero data prepare data.path=texts data.output=tokens tokenizer=MODEL_FOLDER data.workers=4 model.seq_length=4096
  hzero data prepare data.path=texts data.output=tokens tokenizer=MODEL_FOLDER data.format=megatron
  srun hzero data prepare data.path=texts data.output=tokens tokenizer=MODEL_FOLDER     workers on the ranks, over MPI

The keys are in conf/prepare.yaml. The same command completes a job that was interrupted. docs/corpus.md has more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from datasets import load_from_disk
from distributed import Client, KilledWorker, as_completed
from pydantic import Field
from tqdm import tqdm

from hzero.data import shards
from hzero.data.cluster import cluster
from hzero.data.corpus import begun, complete, files_of, read_tokenizer
from hzero.data.shards import Job
from hzero.experiment import Name, composed
from hzero.files import expanded
from hzero.validation import ConfigError, Frozen, Parser, on_all_ranks, printable, validated


class DataGroup(Frozen):
    """Input, output, and how both are cut."""

    path: Name
    output: Name
    workers: int | None = Field(ge=1, le=100_000)
    format: Literal["arrow", "megatron"]
    shard_bytes: int = Field(ge=1, le=2**40)


class LengthGroup(Frozen):
    """The length of a sequence."""

    seq_length: int = Field(ge=2, le=10_000_000)


class Settings(Frozen):
    """The keys of the command."""

    tokenizer: Name
    model: LengthGroup
    data: DataGroup


def run_data(arguments: Sequence[str]) -> int:
    """Runs ``hzero data prepare``. Raises `ConfigError` for input that cannot be used."""
    parser = Parser("hzero data", __doc__)
    parser.add_argument("action", choices=["prepare"], help="what to do")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="keys of conf/prepare.yaml")
    with on_all_ranks():
        settings = settings_of(parser.parse_args(arguments).overrides)
    with cluster(settings.data.workers) as client:
        prepare(settings, client)
    return 0


def settings_of(overrides: Sequence[str]) -> Settings:
    """The settings that overrides of ``conf/prepare.yaml`` describe. Raises `ConfigError`."""
    return validated(Settings, composed("prepare", [f"++{override}" for override in overrides]), "")


def prepare(settings: Settings, client: Client) -> None:
    """Prepares a corpus on the workers of a Dask client.

    Raises:
        ConfigError: The input cannot be read, the output cannot be written or belongs to another job, or a shard ends its
            workers.
    """
    data, length = settings.data, settings.model.seq_length
    source, output = (expanded(path).resolve() for path in (data.path, data.output))
    if output == source or source in output.parents:
        raise ConfigError(f"data.output: found {data.output!r} inside data.path; expected another folder")
    source, files = files_of(str(source), None)
    tokenizer = read_tokenizer(expanded(settings.tokenizer), "tokenizer")
    end, dtype = tokenizer.eos_token_id, None
    if end is None:
        raise ConfigError(f"tokenizer: found {settings.tokenizer!r} without eos_token; expected one, to end documents")
    if data.format == "megatron":
        largest = max(tokenizer.get_vocab().values())
        dtype = "uint16" if largest < 65_500 else "int32"  # as Megatron itself chooses
    work = shards.cut(source, files, data.shard_bytes)
    job = Job(source, output, len(work), end, length, data.shard_bytes, dtype)
    job, missing = begun(job, files, tokenizer)
    tasks = {client.submit(shards.write, job, number, work[number], pure=False): number for number in missing}
    bar = tqdm(as_completed(tasks), "shards", len(work), initial=len(work) - len(missing), unit="", mininterval=1)
    totals, firsts = Counter[str](), list[str]()
    try:
        for task in bar:
            counts, first = task.result()
            totals.update(counts)
            firsts += first
    except KilledWorker as error:
        begins = work[tasks[task]][0].file
        found = f"found {error.allowed_failures + 1} dead workers in the shard that begins in {begins!r}"
        raise ConfigError(f"data.path: {found}; expected more memory, or a smaller data.shard_bytes") from None
    finally:
        client.cancel(list(tasks))  # of those that are left after an error
    begun(job, files, tokenizer)  # raises if a file has changed meanwhile
    tokenizer.save_pretrained(output / "tokenizer")
    complete(job)
    documents, tokens = totals["documents"], totals["tokens"]
    _say(f"{documents:,} documents, {tokens:,} tokens, {len(missing):,} of {len(work):,} shards written in {output}")
    if firsts:
        _say(f"{totals['empty']:,} empty texts are left out, such as that at {min(firsts)}")
    if dtype is None and not len(load_from_disk(str(output))):
        raise ConfigError(f"data.path: {data.path!r} is too short for model.seq_length {length}")


def _say(line: str) -> None:
    print(printable(line), flush=True)
