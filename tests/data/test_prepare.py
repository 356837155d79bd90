"""`hzero data prepare`: the token ids of a corpus with any number of workers, and failures of workers."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ranks import LONG, ROOT, environment, mpiexec, run

if find_spec("distributed") is None or find_spec("datasets") is None:
    pytest.skip("the extras data and train are not installed", allow_module_level=True)

from hzero.errors import ConfigError
from hzero.tools import cli
from hzero.tools.data import corpus, token_files
from hzero.tools.data.cluster import workers
from hzero.tools.data.prepare import prepare, settings_of
from hzero.tools.experiment import compose

LENGTH = 48
#: Bytes of a shard: no multiple of anything.
SHARD = 20_011


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three corpora of the same documents, and a tokenizer."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("prepare")
    numbers = np.random.default_rng(0)
    words = ["".join(map(chr, numbers.integers(97, 123, size))) for size in numbers.integers(1, 9, 500)] + ["é", "日本"]
    for name, count in (("b.jsonl", 150), ("a/c.jsonl", 400), ("a/b/a.jsonl", 1)):
        texts = [" ".join(numbers.choice(words, size)) for size in numbers.integers(1, 300, count)]
        file = folder / "texts" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    made = ByteLevelBPETokenizer()
    made.train_from_iterator(words, vocab_size=400, special_tokens=["<end>"], show_progress=False)
    PreTrainedTokenizerFast(tokenizer_object=made._tokenizer, eos_token="<end>").save_pretrained(folder / "tokenizer")
    return folder


def words(place: Path, output: str, *more: str) -> list[str]:
    given = [f"data.path={place}/texts", f"data.output={place / output}", f"tokenizer={place}/tokenizer"]
    return [*given, f"model.seq_length={LENGTH}", f"data.shard_bytes={SHARD}", *more]


def content(folder: Path) -> dict[str, str]:
    """A hash of every file."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def one(place: Path) -> dict[str, str]:
    """The output of the command with one worker."""
    assert cli.main(["data", "prepare", *words(place, "one", "data.workers=1")]) == 0
    return content(place / "one")


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    with workers(2) as found:
        yield found


def documents(place: Path) -> list[list[int]]:
    """The token ids of each document, in order, by another way: whole files, one text after the other."""
    tokenizer = corpus.read_tokenizer(place / "tokenizer", "")
    files = sorted((place / "texts").rglob("*.jsonl"))
    texts = [json.loads(line)["text"] for file in files for line in file.read_text().splitlines()]
    return [[*ids, tokenizer.eos_token_id] for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]


def test_rows_are_the_documents_of_each_shard(place: Path, one: dict[str, str]) -> None:
    import datasets

    found, want, row = datasets.load_from_disk(str(place / "one"))["input_ids"], documents(place), 0
    begins, start = [], 0  # of each document: its shard, the one in which its part of SHARD bytes of the file begins
    for file in sorted((place / "texts").rglob("*.jsonl")):
        lines = file.read_bytes().splitlines(True)
        begins += [(start + at - at % SHARD) // SHARD for at in np.cumsum([0, *map(len, lines)])[:-1]]
        start += file.stat().st_size
    count = max(begins) + 1
    assert count > 5 and len(begins) == len(want) and len(list((place / "one").glob("*.arrow"))) == count
    for number in range(count):
        ids = [token for document, shard in zip(want, begins) if shard == number for token in document]
        rows = len(ids) // LENGTH
        assert [token for line in found[row : row + rows] for token in line] == ids[: rows * LENGTH]
        row += rows
    assert row == len(found)


def test_the_output_does_not_depend_on_the_workers(place: Path, one: dict[str, str], executor: Executor) -> None:
    prepare(settings_of(words(place, "two")), executor)
    assert content(place / "two") == one
    with workers(4) as four:
        prepare(settings_of(words(place, "four")), four)
    assert content(place / "four") == one


def test_after_a_worker_was_killed_the_next_start_continues(place: Path, one: dict[str, str]) -> None:
    with workers(2) as executor:
        for _ in executor.map(abs, range(8)):  # so that both have started
            pass
        killed = next(iter(executor._processes))  # type: ignore[attr-defined]
        kill = threading.Thread(target=_kill_with, args=(place / "killed", killed))
        kill.start()
        with pytest.raises(ConfigError, match=r"^data.workers: a worker died, perhaps out of memory; run the same"):
            prepare(settings_of(words(place, "killed")), executor)
        kill.join()
    with workers(1) as executor:
        prepare(settings_of(words(place, "killed")), executor)
    assert content(place / "killed") == one


def _kill_with(folder: Path, pid: int) -> None:
    """Ends a worker when the first shard is there."""
    while not list(folder.glob("*.arrow")):
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def files_of_at_most(executor: Executor, size: int) -> Iterator[None]:
    """The kernel refuses larger files of the workers, as a full disk does."""
    kind, before = resource.RLIMIT_FSIZE, resource.getrlimit(resource.RLIMIT_FSIZE)
    for _ in executor.map(abs, range(8)):
        pass
    pids = list(executor._processes)  # type: ignore[attr-defined]
    for pid in pids:
        resource.prlimit(pid, kind, (size, before[1]))
    yield
    for pid in pids:
        resource.prlimit(pid, kind, before)


class _Full:
    """A tokenizer whose folder fills the disk, with the error of ``tokenizers``."""

    def save_pretrained(self, folder: str) -> None:
        Path(folder).mkdir()
        (Path(folder) / "tokenizer.json").write_text("{")
        raise Exception("No space left on device (os error 28)")


def test_a_disk_that_the_tokenizer_fills_has_no_half_of_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer: cannot be written: No space left on device"):
        token_files.complete(tmp_path, [], _Full())
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_one_error_and_the_next_start_completes(
    place: Path, one: dict[str, str], executor: Executor
) -> None:
    with (
        files_of_at_most(executor, 2000),
        pytest.raises(ConfigError, match=r"^data.output: .*full/tokens-000..-of-00023.arrow': File too large"),
    ):
        prepare(settings_of(words(place, "full")), executor)
    deadline = time.monotonic() + 20  # other workers may still be writing
    while list((place / "full").rglob("*.partial")) and time.monotonic() < deadline:
        time.sleep(0.01)
    left = content(place / "full")  # whole files only
    assert left.items() <= one.items() and not left.keys() & {
        "state.json",
        "tokens-00000-of-00023.arrow",
    }
    prepare(settings_of(words(place, "full")), executor)
    assert content(place / "full") == one


def test_finished_shards_are_not_written_again(
    place: Path, one: dict[str, str], executor: Executor, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(settings_of(words(place, "again")), executor)
    folder = place / "again"
    files = sorted(folder.glob("*.arrow"))
    for file in (folder / "state.json", files[2], files[4]):
        file.unlink()
    (folder / ".tokens-00003.arrow.0123.partial").write_text("of a worker that was killed")
    (folder / ".thesis.partial").touch()
    before = {file: file.stat().st_mtime_ns for file in files if file.exists()}
    capsys.readouterr()
    prepare(settings_of(words(place, "again")), executor)
    assert f"2 of {len(files)} shards written in" in capsys.readouterr().out
    changed = [number for number, file in enumerate(files) if file.stat().st_mtime_ns != before.get(file)]
    (folder / ".thesis.partial").unlink()  # is not this command's, so it has stayed
    assert changed == [2, 4] and content(folder) == one
    files[1].unlink()  # of a complete data set
    prepare(settings_of(words(place, "again")), executor)
    assert content(folder) == one


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("model.seq_length=32", "model.seq_length: found 32; expected 48, as for"),
        ("data.format=megatron", "data.format: found 'megatron'; expected 'arrow', as for"),
        ("data.path={place}/other", r"data.path: .*/a/b/a.jsonl: found None; expected \["),
    ],
)
def test_another_job_is_refused(place: Path, one: dict[str, str], executor: Executor, change: str, says: str) -> None:
    (place / "other").mkdir(exist_ok=True)
    (place / "other" / "b.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(ConfigError, match=says):
        prepare(settings_of([*words(place, "one"), change.format(place=place)]), executor)
    assert content(place / "one") == one


BAD: dict[str, tuple[str, bytes, str]] = {
    "binary": ("a.jsonl", b'{"text": "a"}\n\x89\xff\n', "a.jsonl:2: found '.*'; expected a JSON object"),
    "zero": ("a.txt", b"a\n" * 9 + b"\0", "a.txt:10: found byte 0x00; expected UTF-8"),
    "latin": ("a.txt", b"a\nb\xe9", "a.txt:2: found byte 0xe9; expected UTF-8"),
    "no JSON": ("a.jsonl", b'{"text": "a"}\n\n{"text"\n', "a.jsonl:3: found '{\"text\"\\\\n'; expected a JSON object"),
    "a list": (
        "a.json",
        b'["text"]',
        r"a.json:1: found '\[\"text\"\]'; expected a JSON object with a string at the key 'text'",
    ),
    "a number": ("a.json", b'{"text": 1}', "a.json:1: found '{\"text\": 1}'; expected a JSON object"),
    "no text": ("a.json", b'{"body": "a"}', 'a.json:1: found \'{"body": "a"}\'; expected a JSON object'),
    "half a pair": ("a.json", b'{"text": "\\ud800"}', "a.json:1: found .*ud800.*; expected a JSON object"),
    "huge line": (
        "a.jsonl",
        b'{"text": "a"}\n{"text": "' + b"a" * 90_000,
        "a.jsonl:2: found a line of more than 20,011 bytes",
    ),
    "empty": ("a.jsonl", b"", "too short for model.seq_length"),
    "no Parquet": (
        "a.parquet",
        b"PAR1",
        "a.parquet, row group 0: found Parquet file size is 4 bytes.*; expected Parquet with strings",
    ),
    "empty Parquet": ("a.parquet", b"", "a.parquet, row group 0: found Parquet file size is 0 bytes"),
    "two kinds": ("a.txt", b"a", "found json and text in"),
    "nothing": (".hidden", b"a", "found no regular file"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_input_is_named_with_file_and_line(place: Path, executor: Executor, kind: str, tmp_path: Path) -> None:
    name, text, says = BAD[kind]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(text)
    if kind == "two kinds":
        (tmp_path / "in" / "b.jsonl").write_text("{}")
    with pytest.raises(ConfigError, match=f"^data.path: .*{says}") as error:
        prepare(settings_of(words(place, "", f"data.path={tmp_path}/in", f"data.output={tmp_path}/out")), executor)
    assert "\n" not in str(error.value)


def test_empty_texts_are_left_out_and_named(
    place: Path, executor: Executor, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text('{"text": "%s"}\n{"text": ""}\n{"text": null}\n' % ("a b " * 200))
    (tmp_path / "in" / "b.JSONL").touch()
    (tmp_path / "in" / "c.jsonl").write_text('{"text": ""}\n' + '{"text": "%s"}\n' % ("c " * 9900))
    (tmp_path / "in" / "d.jsonl").write_text('{"text": "d"}\n')
    (tmp_path / "out").mkdir()
    given = [f"data.path={tmp_path}/in", f"data.output={tmp_path}/out"]
    prepare(settings_of(words(place, "", *given)), executor)
    said = capsys.readouterr().out
    assert "3 documents" in said and f"4 empty texts are left out, such as that at {tmp_path}/in/a.jsonl:2" in said, (
        said
    )
    before = content(tmp_path / "out")
    (tmp_path / "out" / "state.json").unlink()
    sorted((tmp_path / "out").glob("*.arrow"))[1].unlink()
    prepare(settings_of(words(place, "", *given)), executor)
    assert content(tmp_path / "out") == before


def test_links_to_files_are_read_and_links_to_folders_are_not(tmp_path: Path) -> None:
    """A link may lead to the folder that it is in."""
    (tmp_path / "in" / "b").mkdir(parents=True)
    (tmp_path / "in" / "b" / "a.txt").write_text("a")
    (tmp_path / "in" / "b" / "again").symlink_to(tmp_path / "in")
    (tmp_path / "in" / "a.txt").symlink_to(tmp_path / "in" / "b" / "a.txt")
    found = [token_files.FILE + str(tmp_path / "in" / name) for name in ("a.txt", "b/a.txt")]
    assert list(token_files.files_of(str(tmp_path / "in"))) == found


def test_files_of_others_stay(place: Path, executor: Executor, tmp_path: Path) -> None:
    (tmp_path / ".mine.partial").mkdir()
    (tmp_path / ".mine.partial" / "x").touch()
    (tmp_path / ".thesis.partial").touch()
    with pytest.raises(ConfigError, match="found other files in"):
        prepare(settings_of(words(place, "", f"data.output={tmp_path}")), executor)
    assert sorted(file.name for file in tmp_path.iterdir()) == [".mine.partial", ".thesis.partial"]
    assert (tmp_path / ".mine.partial" / "x").exists()
    (place / "theirs").mkdir()
    (place / "theirs" / token_files.IDENTITY).write_text("[1]")
    with pytest.raises(ConfigError, match=r"prepare.json: found \[1\]; expected a JSON object"):
        prepare(settings_of(words(place, "theirs")), executor)
    assert (place / "theirs" / token_files.IDENTITY).read_text() == "[1]"


def test_a_lock_that_is_a_link_or_a_pipe_is_refused(place: Path, executor: Executor, tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    lock = tmp_path / "out" / token_files.LOCK
    lock.parent.mkdir()
    for kind, make in (
        ("a symbolic link", lambda: lock.symlink_to(tmp_path / "victim")),
        ("not a regular file", lambda: os.mkfifo(lock)),
    ):
        lock.unlink(missing_ok=True)
        make()
        with pytest.raises(OSError, match=kind):
            prepare(settings_of(words(place, "", f"data.output={lock.parent}")), executor)
    assert (tmp_path / "victim").read_text() == "precious"


def test_two_runs_do_not_write_one_folder(place: Path, executor: Executor) -> None:
    prepare(settings_of(words(place, "locked")), executor)
    partial = place / "locked" / ".tokens-00003.arrow.0123.partial"  # of the run that has the lock
    partial.touch()
    with open(place / "locked" / token_files.LOCK) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match=r"^data.output: found another run that writes"):
            prepare(settings_of(words(place, "locked")), executor)
    assert partial.exists()
    (place / "new").mkdir()
    with open(place / "new" / token_files.LOCK, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match=r"^data.output: found another run that writes"):
            prepare(settings_of(words(place, "new")), executor)
    assert not (place / "new" / token_files.IDENTITY).exists()  # the other run has not chosen its settings yet


def test_parquet_and_text_give_the_same_ids(
    place: Path, one: dict[str, str], executor: Executor, tmp_path: Path
) -> None:
    """Row groups become shards; a file of text is one document, even in several shards."""
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = [json.loads(line)["text"] for line in (place / "texts" / "b.jsonl").read_text().splitlines()]
    (tmp_path / "rows").mkdir()
    pq.write_table(
        pa.table({"id": range(len(texts)), "text": texts}), tmp_path / "rows" / "a.parquet", row_group_size=17
    )
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "a.txt").write_text("\n".join(texts))
    found = {}
    for name in ("rows", "plain"):
        given = [f"data.path={tmp_path / name}", f"data.output={tmp_path}/out-{name}", "model.seq_length=2"]
        prepare(settings_of(words(place, "", *given)), executor)
        rows = datasets.load_from_disk(str(tmp_path / f"out-{name}"))
        found[name] = [token for row in rows["input_ids"] for token in row]
    tokenizer = corpus.read_tokenizer(place / "tokenizer", "")
    end = tokenizer.eos_token_id
    assert len([token for token in found["rows"] if token == end]) > 0.8 * len(texts)
    assert found["plain"].count(end) <= 1
    assert tokenizer.decode(found["plain"][:200]) == "\n".join(texts)[: len(tokenizer.decode(found["plain"][:200]))]


def _megatron(prefix: Path) -> list[list[int]]:
    """Documents of Megatron's format, read as its source says: a header, lengths, places in bytes, documents."""
    raw = prefix.with_suffix(".idx").read_bytes()
    magic, version, code, sequences, count = struct.unpack_from("<9sQBQQ", raw)
    assert (magic, version) == (b"MMIDIDX\0\0", 1) and count == sequences + 1
    lengths = np.frombuffer(raw, np.int32, sequences, 34)
    starts = np.frombuffer(raw, np.int64, sequences, 34 + lengths.nbytes)
    borders = np.frombuffer(raw, np.int64, count, 34 + lengths.nbytes + starts.nbytes)
    assert len(raw) == 34 + lengths.nbytes + starts.nbytes + borders.nbytes and list(borders) == list(range(count))
    dtype = {8: np.uint16, 4: np.int32}[code]
    ids = prefix.with_suffix(".bin").read_bytes()
    return [np.frombuffer(ids, dtype, length, start).tolist() for length, start in zip(lengths, starts)]


def test_megatron_reads_the_documents(place: Path, executor: Executor) -> None:
    given = words(place, "megatron", "data.format=megatron")
    prepare(settings_of(given), executor)
    whole, shards = content(place / "megatron"), sorted((place / "megatron").glob("*.idx"))
    assert len(shards) > 5
    assert [document for shard in shards for document in _megatron(shard)] == documents(place)
    shards[1].unlink()  # written after its token ids
    shards[2].with_suffix(".bin").unlink()
    prepare(settings_of(given), executor)
    assert content(place / "megatron") == whole
    if find_spec("megatron") is not None and find_spec("megatron.core") is not None:
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        theirs = [IndexedDataset(str(shard.with_suffix(""))) for shard in shards]
        assert [one[number].tolist() for one in theirs for number in range(len(one))] == documents(place)


@LONG
def test_a_dead_rank_ends_the_job_and_the_next_start_completes(place: Path, one: dict[str, str]) -> None:
    """Over MPI: rank 0 is the client, rank 1 schedules, ranks 2 and 3 work."""
    import psutil

    command = [mpiexec(), "-n", "4", sys.executable, "-m", "hzero", "data", "prepare", *words(place, "ranks")]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=environment(), cwd=ROOT, **streams) as job:  # type: ignore[call-overload]
        deadline = time.monotonic() + 60
        while not list(place.glob("ranks/*.arrow")) and time.monotonic() < deadline:
            time.sleep(0.01)
        processes = psutil.Process(job.pid).children(recursive=True)
        rank_3 = [process for process in processes if process.environ().get("PMI_RANK") == "3"]
        rank_3[0].kill()
        said = job.stdout.read()
        assert job.wait(60) != 0
    assert not (place / "ranks" / "state.json").exists() and list(place.glob("ranks/*.arrow")), said
    done = run(*command, timeout=100)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert " 23 of 23 shards" not in done.stdout and content(place / "ranks") == one


@LONG
def test_an_error_over_mpi_is_one_line_at_once(place: Path) -> None:
    given = words(place, "unread", f"data.path={place}/nothing")
    done = run(mpiexec(), "-n", "3", sys.executable, "-m", "hzero", "data", "prepare", *given, timeout=50)
    errors = [line for line in done.stderr.splitlines() if "hzero" in line]
    assert done.returncode != 0 and len(errors) == 1, done.stderr
    assert errors[0].startswith("hzero: error: data.path: found no such file or folder:"), done.stderr


def _experiment(place: Path, output: str, *more: str) -> Any:
    model = [
        "hidden_size=32",
        "num_layers=2",
        "num_heads=2",
        "intermediate_size=64",
        "vocab_size=500",
        f"seq_length={LENGTH}",
    ]
    ranks = ["topology=single_node", "topology.devices_per_package=1", "train.eval_batches=1"]
    return compose([*(f"model.{key}" for key in model), *ranks, f"data.path={place / output}", *more])


def test_training_resumes_with_the_tokenizer_that_it_has_trained(place: Path, tmp_path: Path) -> None:
    experiment = _experiment(place, "texts", f"data.cache_dir={tmp_path}", "model.vocab_size=300")
    said: list[str] = []
    corpus.prepare(experiment, said.append)
    whole = content(tmp_path)
    (folder,) = tmp_path.iterdir()
    (folder / "state.json").unlink()
    next(folder.glob("*.arrow")).unlink()
    corpus.prepare(experiment, said.append)
    assert len(said) == 1 and said[0].startswith("training a tokenizer of 300 tokens") and content(tmp_path) == whole


def test_training_maps_the_output(place: Path, one: dict[str, str]) -> None:
    import datasets

    found = corpus.prepare(_experiment(place, "one"), lambda line: pytest.fail(f"is tokenised again: {line}"))
    rows = datasets.load_from_disk(str(place / "one"))["input_ids"]
    assert [*found.train["input_ids"], *found.evaluation["input_ids"]] == list(rows)
    assert found.train.cache_files and found.tokenizer.eos_token == "<end>"


@pytest.mark.parametrize(
    ("output", "more", "says"),
    [
        ("one", ["model.seq_length=32"], "model.seq_length: found 32; expected 48, as in"),
        (
            "one",
            ["model.vocab_size=300"],
            "data.path: found 4.. tokens in the tokenizer of .*; expected at most the model's 300",
        ),
        ("one", ["data.max_bytes=1000"], "data.max_bytes: found 1000 for the token ids in"),
        ("part", [], "data.path: found no complete data set of `hzero data prepare` in"),
    ],
)
def test_training_refuses_what_does_not_fit(
    place: Path, one: dict[str, str], output: str, more: Sequence[str], says: str
) -> None:
    (place / "part").mkdir(exist_ok=True)
    (place / "part" / token_files.IDENTITY).write_text("{}")
    with pytest.raises(ConfigError, match=says):
        corpus.prepare(_experiment(place, output, *more), print)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["made"], "hzero data: argument action: invalid choice: 'made'"),
        (
            ["prepare", "data.path=a", "data.output=b", "tokenizer=c", "tokeniser=a"],
            "found key 'tokeniser'; expected",
        ),
        (
            ["prepare", "data.path=a", "data.output=b", "tokenizer=c", "data.pth=a"],
            "data: found key 'pth'; expected",
        ),
        (["prepare", "data.path=a", "data.output=b"], "tokenizer: missing"),
        (["prepare", "data.path=a", "data.output=b", "tokenizer=c", "data.workers=0"], "data.workers: found 0"),
    ],
)
def test_wrong_keys_are_one_line(given: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["data", *given]) == 2
    said = capsys.readouterr().err
    assert said.startswith("hzero: error: ") and says in said and said.count("\n") == 1, said
