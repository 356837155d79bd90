"""Turns a folder of text, JSON lines or Parquet into token ids that training maps.

Examples:
  hzero data prepare data.path=texts data.output=tokens tokenizer=MODEL_FOLDER
  hzero data prepare data.path=texts data.output=tokens tokenizer=MODEL_FOLDER data.workers=4 model.seq_length=4096
  hzero data prepare data.path=texts data.output=tokens tokenizer=MODEL_FOLDER data.format=megatron
  srun hzero data prepare data.path=texts data.output=tokens tokenizer=MODEL_FOLDER     workers on the ranks, over MPI

The keys are in conf/prepare.yaml. The same command completes a job that was interrupted. docs/corpus.md has more.
"""

from __future__ import annotations

import itertools
import shutil
import sys
import time
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from distributed import Client, KilledWorker, as_completed
from pydantic import Field
from rich.console import Console
from rich.progress import track

from hzero.data import shards
from hzero.data.cluster import cluster
from hzero.data.corpus import begun, complete, files_of, read_tokenizer
from hzero.data.shards import Job, Piece
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
    tokenizer = read_tokenizer(expanded(settings.tokenizer), "tokenizer")
    end, dtype = tokenizer.eos_token_id, None
    if end is None:
        raise ConfigError(f"tokenizer: found {settings.tokenizer!r} without eos_token; expected one, to end documents")
    if data.format == "megatron":
        largest = max(tokenizer.get_vocab().values())
        dtype = "uint16" if largest < 65_500 else "int32"  # as Megatron itself chooses
    source, files = files_of(str(source), None)
    work = shards.cut(source, files, data.shard_bytes)
    job = Job("", source, output, "data.output", end, length, data.shard_bytes, len(work), dtype)
    job = begun(job, files, tokenizer)
    _sweep(output)
    done = {number: counts for number in range(len(work)) if (counts := job.done(number))}
    if done:
        _say(f"{len(done):,} of {len(work):,} shards are complete")
    totals = complete(job, itertools.chain(done.values(), _written(job, work, done, client)))
    _sweep(output)
    documents, tokens, rows, empty = (totals[key] for key in ("documents", "tokens", "rows", "empty"))
    _say(f"{documents:,} documents, {tokens:,} tokens, {len(work):,} shards in {output}")
    if empty:
        file, at = empty[0]
        _say(f"{len(empty):,} empty texts are left out, such as that at {shards.place(source / file, at)}")
    if dtype is None:
        left = tokens - rows * length
        _say(f"{rows:,} sequences of {length:,} tokens; {left:,} tokens at the ends of shards are left out")
        if not rows:
            raise ConfigError(f"data.path: {data.path!r} is too short for model.seq_length {length}")


def _written(job: Job, work: list[list[Piece]], done: Container[int], client: Client) -> Iterator[dict[str, Any]]:
    """Writes the shards that are not done, one task each, and yields their counts."""
    tasks = {
        client.submit(shards.write, job, number, parts, pure=False): parts
        for number, parts in enumerate(work)
        if number not in done
    }
    quiet, began, documents = not sys.stderr.isatty(), time.monotonic(), 0
    bar = track(as_completed(tasks), "shards", len(tasks), console=Console(stderr=True), disable=quiet)
    try:
        for number, task in enumerate(bar, 1):
            counts = task.result()
            documents += counts["documents"]
            if number == len(tasks) or (quiet and number % max(len(tasks) // 10, 1) == 0):
                rate = documents / (time.monotonic() - began)
                _say(f"{len(work) - len(tasks) + number:,} of {len(work):,} shards; {rate:,.0f} documents/s")
            yield counts
    except KilledWorker as error:
        found = f"found {error.allowed_failures + 1} dead workers in the shard that begins in {tasks[task][0].file!r}"
        raise ConfigError(f"data.path: {found}; expected more memory, or a smaller data.shard_bytes") from None
    finally:
        client.cancel(list(tasks))  # of those that are left after an error


def _sweep(output: Path) -> None:
    """Removes what processes have left that were killed while they wrote."""
    for left in (*output.glob(".*.partial"), *output.glob("shards/.*.partial")):
        shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)


def _say(line: str) -> None:
    print(printable(line), flush=True)
