"""Checkpoints and cached tokens that were changed, planted or cut, without ranks."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hzero.cli import main
from hzero.train import checkpoint, data, digests, folder, safe_load
from hzero.train.checkpoint import Identity
from hzero.validation import ConfigError

IDENTITY = Identity("shape", "text", 0, 2, "fp32")


def _written(path: Path, content: bytes) -> tuple[int, str]:
    file = digests.HashedFile(path)
    file.write(memoryview(content))
    return file.size, file.close()


def _save(run: Path, step: int, *, keep: int = 9, good: bool | None = True) -> Path:
    """A checkpoint of two files that ranks have written, and one that DeepSpeed has copied."""
    target = run / checkpoint.tag_of(step)
    target.mkdir(parents=True)
    written = {f"rank{rank}.pt": _written(target / f"rank{rank}.pt", os.urandom(5000)) for rank in range(2)}
    (target / "script.py").write_text("pass")
    checkpoint.publish(target, step, IDENTITY, keep, written)
    if good is not None:
        checkpoint.judge(target, good, keep)
    return target


def _flip(path: Path, at: int = 99) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["rank1.pt", "script.py", checkpoint.NOTE])
def test_a_file_changed_in_place_is_named_and_the_checkpoint_before_it_taken(tmp_path: Path, name: str) -> None:
    _save(tmp_path, 4)
    damaged = _save(tmp_path, 8)
    assert checkpoint.newest(tmp_path).step == 8  # type: ignore[union-attr]
    _flip(damaged / name, 1)
    said: list[str] = []
    assert checkpoint.newest(tmp_path, said.append).step == 4  # type: ignore[union-attr]
    assert len(said) == 1 and str(damaged) in said[0] and name in said[0] and said[0].endswith("; skipped")
    with pytest.raises(ConfigError, match=name):
        checkpoint.find(str(damaged), tmp_path, IDENTITY, trust=False)
    if name != checkpoint.NOTE:  # a rank does not read everything again
        assert checkpoint.read(damaged, hashes=False).bytes == 10004


def test_a_changed_step_or_hash_in_the_note_is_noticed(tmp_path: Path) -> None:
    note = json.loads((_save(tmp_path, 8) / checkpoint.NOTE).read_text())
    for change in ({"step": 9}, {"files": {}}, {digests.HASHES: {**note[digests.HASHES], "rank0.pt": "0" * 32}}):
        (tmp_path / "step_000008" / checkpoint.NOTE).write_text(json.dumps({**note, **change}))
        with pytest.raises(ConfigError, match=r"its complete\.json cannot be read"):
            checkpoint.read(tmp_path / "step_000008")


def _outside(*names: str) -> dict[str, Any]:
    return {"files": dict.fromkeys(names, 1), digests.HASHES: dict.fromkeys(names, "0" * 32)}


@pytest.mark.parametrize(
    "change",
    [{"step": 9}, {"files": {}}, {"files": {}, digests.HASHES: {}}, {digests.HASHES: {}}, _outside("a/../../b"), _outside("/b")],
)  # fmt: skip
def test_a_sealed_note_that_nothing_here_wrote_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    path = _save(tmp_path, 8) / checkpoint.NOTE
    path.write_text(json.dumps(digests.sealed({**json.loads(path.read_text()), **change})))
    with pytest.raises(ConfigError, match=r"its complete\.json cannot be read"):
        checkpoint.read(path.parent)


def test_a_note_that_cannot_be_read_is_skipped_at_once(tmp_path: Path) -> None:
    _save(tmp_path, 4)
    pipe, huge = (_save(tmp_path, step) / checkpoint.NOTE for step in (8, 12))
    pipe.unlink()
    os.mkfifo(pipe)
    os.truncate(huge, 3 << 30)
    said: list[str] = []
    assert checkpoint.newest(tmp_path, said.append).step == 4  # type: ignore[union-attr]
    assert len(said) == 2 and all("its complete.json cannot be read; skipped" in line for line in said)


@pytest.mark.parametrize("name", ["n" * 5000, "loop", "\0", "\ud800"])
def test_a_file_that_cannot_be_looked_at_is_named_and_the_checkpoint_before_it_taken(tmp_path: Path, name: str) -> None:
    _save(tmp_path, 4)
    path = _save(tmp_path, 8) / checkpoint.NOTE
    (path.parent / "loop").symlink_to("loop")
    path.write_text(json.dumps(digests.sealed({**json.loads(path.read_text()), **_outside(name)})))
    said: list[str] = []
    assert checkpoint.newest(tmp_path, said.append).step == 4  # type: ignore[union-attr]
    assert len(said) == 1 and " cannot be read: " in said[0] and len(said[0]) < 500


@pytest.mark.parametrize("interrupted", [True, False])
def test_hashing_stops_at_once(tmp_path: Path, interrupted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At Ctrl-C, and at the first file that differs, instead of when 8 GB are read."""
    (tmp_path / "small").write_bytes(b"1")
    for name in ("large", "larger"):
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, 1 << 32)
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    read = 0.0

    def update(self: object, done: float, text: str) -> None:
        nonlocal read
        if interrupted and not read:
            os.kill(os.getpid(), signal.SIGINT)
        read = done

    monkeypatch.setattr(digests.Progress, "update", update)
    if interrupted:
        with pytest.raises(KeyboardInterrupt):
            digests.first_changed(tmp_path, sizes, dict.fromkeys(sizes, ""))
    else:
        found = digests.first_changed(tmp_path, sizes, dict.fromkeys(sizes, ""))
        assert found is not None and "small" in found
    assert read < 2 << 30


def test_checkpoints_of_earlier_releases_load_with_one_warning(tmp_path: Path) -> None:
    target = _save(tmp_path, 8)
    note = json.loads((target / checkpoint.NOTE).read_text())
    old = {key: note[key] for key in ("step", "identity", "files")}
    (target / checkpoint.NOTE).write_text(json.dumps(old))
    said: list[str] = []
    found = checkpoint.find(str(tmp_path), tmp_path, IDENTITY, trust=False, warn=said.append)
    assert found is not None and found.step == 8
    assert len(said) == 1 and "earlier release" in said[0]


def test_what_ranks_wrote_must_be_there_when_it_is_published(tmp_path: Path) -> None:
    target = tmp_path / "step_000004"
    target.mkdir()
    written = {"rank0.pt": _written(target / "rank0.pt", b"1234")}
    (target / "rank0.pt").write_bytes(b"12")
    with pytest.raises(OSError, match="has lost part of 4 bytes"):
        checkpoint.publish(target, 4, IDENTITY, 2, written)
    assert not (target / checkpoint.NOTE).exists()


def test_a_whole_checkpoint_stays_where_latest_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only DeepSpeed's own tools read ``latest``. An error would have the checkpoint removed."""
    (tmp_path / "latest").mkdir()
    target = _save(tmp_path, 4)
    found = checkpoint.newest(tmp_path)
    assert found is not None and found.folder == target


def test_the_last_good_checkpoint_is_never_rotated_away(tmp_path: Path) -> None:
    for step in range(1, 7):
        _save(tmp_path, step, keep=2, good=step in (1, 2))
    assert sorted(path.name for path in tmp_path.glob("step_*")) == [f"step_{step:06d}" for step in (2, 5, 6)]
    _save(tmp_path, 7, keep=2)
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_000006", "step_000007"]


def test_young_checkpoints_are_kept_as_well(tmp_path: Path) -> None:
    first, second, third = (_save(tmp_path, step) for step in (1, 2, 3))
    os.utime(first / checkpoint.NOTE, (0, 0))
    checkpoint.judge(third, True, 1, keep_s=60.0)
    assert sorted(tmp_path.glob("step_*")) == [second, third]
    checkpoint.judge(third, True, 1)
    assert sorted(tmp_path.glob("step_*")) == [third]


def test_a_checkpoint_is_good_once_a_finite_step_has_come_after_it(tmp_path: Path) -> None:
    """Until then the one before it stays, however few are kept; and one that led to NaN is not resumed from."""
    _save(tmp_path, 1, keep=1)
    second = _save(tmp_path, 2, keep=1, good=None)
    names = lambda: [path.name for path in sorted(tmp_path.glob("step_*"))]  # noqa: E731
    assert names() == ["step_000001", "step_000002"]
    checkpoint.judge(second, True, keep=1)
    assert names() == ["step_000002"]
    third = _save(tmp_path, 3, keep=1, good=None)
    found, said = checkpoint.newest(tmp_path), []
    assert found is not None and found.step == 3  # a run that was stopped goes on from its last checkpoint
    checkpoint.judge(third, False, keep=1)
    found = checkpoint.newest(tmp_path, said.append)
    assert found is not None and found.step == 2
    assert said == [f"resume: {str(third)!r}: the steps around it were not finite; skipped"]
    said.clear()
    chosen = checkpoint.find(str(third), tmp_path, IDENTITY, trust=True, warn=said.append)
    assert chosen is not None and chosen.step == 3, "by name it can be had"
    assert said == [f"resume: {str(third)!r}: the steps around it were not finite"]
    said.clear()
    checkpoint.find(str(second), tmp_path, IDENTITY, trust=True, warn=said.append)
    assert not said
    checkpoint.judge(second, False, keep=1)
    with pytest.raises(ConfigError, match=r"step_000003'?: the steps around it were not finite, and there is no other"):
        checkpoint.newest(tmp_path)


def test_checkpoints_of_an_earlier_life_go_once_the_run_has_saved_again(tmp_path: Path) -> None:
    """One could be taken for the newest once it can be read again, and another one for the newest good one."""
    start, damaged = _save(tmp_path, 4), _save(tmp_path, 5)
    _flip(damaged / "rank0.pt")
    for step in (8, 11):
        _save(tmp_path, step)
    names = lambda: [path.name for path in sorted(tmp_path.glob("step_*"))]  # noqa: E731
    given_up = checkpoint.later_than(start)
    shutil.rmtree(tmp_path / "step_000008")
    (tmp_path / "step_000008").mkdir()
    (tmp_path / "step_000008" / "script.py").write_text("pass")
    with pytest.raises(FileNotFoundError):
        checkpoint.publish(tmp_path / "step_000008", 8, IDENTITY, 1, {"rank0.pt": (1, "")}, given_up=given_up)
    assert names() == [f"step_{step:06d}" for step in (4, 5, 8, 11)], "the run has saved nothing yet"
    checkpoint.publish(tmp_path / "step_000008", 8, IDENTITY, 1, {}, given_up=given_up)
    assert names() == ["step_000004", "step_000008"], "where the run went on from stays until a later one is good"
    checkpoint.judge(tmp_path / "step_000008", True, 1)
    assert names() == ["step_000008"]


def test_a_note_that_cannot_be_read_is_no_good_checkpoint(tmp_path: Path) -> None:
    """Or the good one before it would be removed."""
    _save(tmp_path, 1)
    (_save(tmp_path, 2) / checkpoint.NOTE).write_text("{")
    _save(tmp_path, 3, keep=1, good=None)
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_000001", "step_000003"]


def test_a_note_that_is_damaged_cannot_be_judged(tmp_path: Path) -> None:
    target = _save(tmp_path, 1, good=None)
    for text in ("{", "[]", '{"step": 1, "seal": "x"}'):
        (target / checkpoint.NOTE).write_text(text)
        with pytest.raises(OSError, match="the note is not as it was written"):
            checkpoint.judge(target, True, 1)
        assert (target / checkpoint.NOTE).read_text() == text


class _Command:
    """Runs a command where a pickle of it is loaded."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> Any:
        return os.system, (f"touch '{self.made}'",)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_planted_file_runs_nothing_and_is_refused_by_name(tmp_path: Path, zipped: bool) -> None:
    made, path = tmp_path / "made", tmp_path / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    planted = {"optimizer_state_dict": torch.ones(3), "more": _Command(made)}
    torch.save(planted, path, _use_new_zipfile_serialization=zipped)
    if zipped:
        with pytest.raises(
            ConfigError, match=rf"{path.name}' needs (posix|os)\.system.*checkpoint\.trust=true loads it"
        ):
            safe_load.refuse_code(tmp_path, safe_load.TRUST)
    with pytest.raises(ConfigError, match=rf"{path.name}' needs (posix|os)\.system"):
        safe_load.load(str(path), None, trust=False)
    with safe_load.only_tensors(trust=False), pytest.raises(Exception, match="system"):
        torch.load(path, weights_only=False)  # as in DeepSpeed's zero_to_fp32
    assert not made.exists()
    safe_load.load(str(path), None, trust=True)
    assert made.exists()


@pytest.mark.filterwarnings("ignore:.*TorchScript")
def test_what_is_no_file_of_torch_is_one_line(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(999)}, tmp_path / "cut")
    os.truncate(tmp_path / "cut", 2000)
    torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), str(tmp_path / "script"))
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("no pickle")
    (tmp_path / "folder").mkdir()
    for name in ("cut", "script", "empty", "text", "folder", "none"):
        with pytest.raises(ConfigError, match=rf"{name}' cannot be loaded as tensors: \w") as error:
            safe_load.load(str(tmp_path / name), None, trust=False)
        assert len(str(error.value)) < len(str(tmp_path)) + 250
    os.mkfifo(tmp_path / "pipe.pt")
    with pytest.raises(ConfigError, match=r"pipe\.pt' is no regular file"):
        safe_load.refuse_code(tmp_path, safe_load.TRUST)


def test_the_loss_scalers_of_deepspeed_load(tmp_path: Path) -> None:
    """DeepSpeed trains in float16 on accelerators only, so its state is made here by hand."""
    from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum

    arguments = {"init_scale": 2**16, "scale_window": 9, "min_scale": 1, "delayed_shift": 2}
    for dynamic in (True, False):
        scaler = CreateLossScaler(torch.float16, 128.0, dynamic, {**arguments, "consecutive_hysteresis": False})
        state = {"loss_scaler": scaler, "zero_stage": ZeroStageEnum.weights, "shapes": [{"w": torch.Size([3])}]}
        torch.save(state, tmp_path / "state.pt")
        safe_load.refuse_code(tmp_path, safe_load.TRUST)
        found = safe_load.load(str(tmp_path / "state.pt"), "cpu", trust=False)
        assert type(found["loss_scaler"]) is type(scaler) and vars(found["loss_scaler"]) == vars(scaler)
        assert found["zero_stage"] is ZeroStageEnum.weights


def test_metrics_wait_while_the_disk_is_full(tmp_path: Path) -> None:
    said: list[str] = []
    metrics = folder.Metrics(tmp_path, said.append)
    disk = metrics._file

    class Filling:
        room = 20

        def write(self, piece: bytes) -> int:
            if not self.room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            count = disk.write(piece[: self.room])
            self.room -= count
            return count

        close = disk.close

    metrics._file = full = Filling()  # type: ignore[assignment]
    rows: list[dict[str, Any]] = [{"kind": "step", "step": step, "loss": 1.0} for step in range(4)]
    rows[1] = {"kind": "audit", "step": 0, "signal_to_noise_db": {"weights": 44.0}}
    for row in rows[:3]:
        metrics.add(row)
    assert len(set(said)) == 1 and "metrics.jsonl': No space left on device" in said[0]
    full.room = 1000
    metrics.add(rows[3])
    assert folder.read_metrics(tmp_path) == (rows, 0)
    full.room = 0
    metrics.add(rows[0])
    metrics.close()
    assert said[-1].endswith("lacks the last 1 rows")


BOOK = "the quick brown fox\n" * 500


def _prepare(tmp_path: Path, say: list[str]) -> tuple[np.ndarray, Path]:
    (tmp_path / "book.txt").write_text(BOOK)
    group = {"path": str(tmp_path / "book.txt"), "cache_dir": str(tmp_path / "cache"), "max_bytes": 0}
    found = data.prepare({**group, "eval_share": 0.1}, 300, 8, 1, say.append)
    return np.array(found.train), data.entry(group, found.key)


def test_cached_tokens_changed_in_place_are_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    ids, cached = _prepare(tmp_path, said)
    assert len(said) == 1
    assert np.array_equal(_prepare(tmp_path, said)[0], ids) and len(said) == 1  # whole, and taken as it is

    def old() -> None:
        meta = json.loads((cached / "meta.json").read_text())
        del meta[digests.HASHES], meta[digests.SEAL]
        (cached / "meta.json").write_text(json.dumps(meta))

    changes = {
        "tokens.bin is not what was written": lambda: _flip(cached / "tokens.bin"),
        "tokenizer.json has": lambda: (cached / "tokenizer.json").write_text("{}"),
        "meta.json is not what was written": lambda: (cached / "meta.json").write_text(
            (cached / "meta.json").read_text().replace("uint16", "uint32")
        ),
        "meta.json cannot be read": lambda: (cached / "meta.json").write_text("{"),
        "an earlier release wrote it": old,
    }
    for message, change in changes.items():
        change()
        said.clear()
        assert np.array_equal(_prepare(tmp_path, said)[0], ids)
        assert str(cached) in said[0] and message in said[0], said
    _flip(cached / "tokens.bin")

    def read_only(path: Path, **_: Any) -> None:
        if path == cached:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(shutil, "rmtree", read_only)
    with pytest.raises(ConfigError, match=r"data\.cache_dir: cannot write .*: Read-only file system"):
        _prepare(tmp_path, said)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 8 kB."""
    if os.geteuid():
        pytest.skip("mounting a small disk needs root")
    path = tmp_path / "small"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", str(path)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small disk: {mounted.stderr.strip()}")
    yield path
    subprocess.run(["umount", str(path)], check=True)


@pytest.mark.parametrize("key", ["run.dir", "data.cache_dir"])
def test_a_small_disk_is_one_line(
    small_disk: Path, tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "book.txt").write_text(BOOK * 40)
    assert main(["train", "data.path=book.txt", f"{key}={small_disk / 'here'}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"hzero: error: {key}: cannot write '{small_disk}") and error.count("\n") == 1, error
    assert "No space left on device" in error
    assert not list(small_disk.rglob("*.*")), "something half-written was left"
