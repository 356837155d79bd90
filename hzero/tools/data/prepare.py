"""Turns a folder of text, JSON lines or Parquet into token ids that training maps.

Examples:
  hzero data prepare data.path=texts data.output=tokens tokenizer=MODEL_FOLDER
  hzero data prepare data.path=texts data.output=tokens tokenizer=MODEL_FOLDER data.workers=4 model.seq_length=4096
  hzero data prepare data.path=texts data.output=tokens tokenizer=MODEL_FOLDER data.format=megatron
  srun hzero data prepare data.path=texts data.output=tokens tokenizer=MODEL_FOLDER     workers on the ranks, over MPI

The keys are in conf/prepare.yaml. The same command completes a job that was interrupted. docs/corpus.md has more.
"""

import fcntl
from collections.abc import Sequence
from concurrent.futures import BrokenExecutor, Executor, as_completed
from typing import Literal

from datasets import load_from_disk
from pydantic import Field
from tqdm import tqdm

from hzero.errors import ConfigError, on_all_ranks, printable
from hzero.files import expanded, refusing, regular
from hzero.schema import Frozen, validated
from hzero.tools.data import token_files
from hzero.tools.data.cluster import workers
from hzero.tools.data.corpus import read_tokenizer
from hzero.tools.experiment import Name, composed
from hzero.tools.terminal import Parser


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

    data: DataGroup
    model: LengthGroup
    tokenizer: Name


def run_data(arguments: Sequence[str]) -> int:
    """Runs ``hzero data prepare``. Raises `ConfigError` for input that cannot be used."""
    parser = Parser("hzero data", __doc__)
    parser.add_argument("action", choices=["prepare"], help="what to do")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="keys of conf/prepare.yaml")
    with on_all_ranks():
        settings = settings_of(parser.parse_args(arguments).overrides)
    with workers(settings.data.workers) as executor:
        prepare(settings, executor)
    return 0


def settings_of(overrides: Sequence[str]) -> Settings:
    """The settings that overrides of ``conf/prepare.yaml`` describe. Raises `ConfigError`."""
    return validated(Settings, composed("prepare", [f"++{override}" for override in overrides]), "")


def prepare(settings: Settings, executor: Executor) -> None:
    """Prepares a corpus on the workers of an executor.

    Raises:
        ConfigError: The input cannot be read, the output cannot be written or belongs to another job, or a worker died.
    """
    data, length = settings.data, settings.model.seq_length
    source, output = (expanded(path).resolve() for path in (data.path, data.output))
    if output == source or source in output.parents:
        raise ConfigError(f"data.output: found {data.output!r} inside data.path; expected another folder")
    tokenizer = read_tokenizer(expanded(settings.tokenizer), "tokenizer")
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"tokenizer: found {settings.tokenizer!r} without eos_token; expected one, to end documents")
    files, job = token_files.files_of(str(source)), (output, tokenizer, length, data.shard_bytes, data.format)
    output.mkdir(parents=True, exist_ok=True)
    with open(output / token_files.LOCK, "w", opener=regular) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"data.output: found another run that writes {str(output)!r}; expected one") from None
        except OSError:  # a file system without locks
            pass
        work = token_files.begin(files, *job)
        suffixes = token_files.SUFFIXES[data.format]
        missing = [file for file in work if not all(file.with_suffix(one).is_file() for one in suffixes)]
        tasks = [executor.submit(token_files.write, file, work[file]) for file in missing]
        bar = tqdm(as_completed(tasks), "shards", len(work), initial=len(work) - len(missing), unit="", mininterval=1)
        try:
            with refusing("data.output", output), bar:
                written = [task.result() for task in bar]
        except BrokenExecutor:
            again = "run the same command again, which continues, or with fewer workers"
            raise ConfigError(f"data.workers: a worker died, perhaps out of memory; {again}") from None
        finally:
            for task in tasks:
                task.cancel()
        token_files.begin(token_files.files_of(str(source)), *job)  # raises if a file has changed meanwhile
        for left in output.glob(".tokens-*.partial"):  # of workers that were killed
            left.unlink(missing_ok=True)
        token_files.complete(output, work, tokenizer)
    documents, tokens, empty = (sum(one[at] for one in written) for at in range(3))
    line = f"{documents:,} documents, {tokens:,} tokens, {len(missing):,} of {len(work):,} shards written in {output}"
    if empty:
        line += f"; {empty:,} empty texts are left out, such as that at {min(first for *_, first in written if first)}"
    print(printable(line), flush=True)
    if data.format == "arrow" and not len(load_from_disk(str(output))):
        raise ConfigError(f"data.path: {data.path!r} is too short for model.seq_length {length}")
