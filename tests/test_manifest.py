"""Which checkpoints count as complete, without ranks."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
from pathlib import Path

import pytest
import torch

import hzero
from hzero import manifest
from hzero.deepspeed.checkpoint import CheckpointFiles
from hzero.manifest import NOTE, HashedFile, IncompleteError, Manifest, complete_in, publish, reason_of, recover

NAME = "zero_pp_rank_0_mp_rank_00_optim_states.pt"


def _written(folder: Path, step: int, written: float = 0.0) -> Manifest:
    """A checkpoint of one file."""
    folder.mkdir(parents=True)
    content = os.urandom(100)
    (folder / NAME).write_bytes(content)
    (folder / NAME.replace("optim", "model")).write_bytes(b"")
    files = {NAME: (100, hashlib.sha256(content).hexdigest())}
    note = Manifest(folder=folder, step=step, ranks=4, batch=12, written=written, files=files)
    note.write()
    return note


def test_the_newest_complete_checkpoint_of_every_client_is_found(tmp_path: Path) -> None:
    assert hzero.newest_checkpoint(tmp_path / "missing") is None and hzero.newest_checkpoint(tmp_path) is None
    _written(tmp_path / "global_step9", 9)
    assert hzero.newest_checkpoint(tmp_path) == str(tmp_path / "global_step9")
    _written(tmp_path / "state_10" / "pytorch_model", 10)  # of Accelerate
    _written(tmp_path / "last.ckpt" / "checkpoint", 11)  # of Lightning
    _written(tmp_path / "again", 11, written=5.0)
    _written(tmp_path / "checkpoint-12" / "global_step12", 12)  # of Trainer, killed before it had written its state
    order = ["again", "last.ckpt", "state_10", "global_step9"]
    assert [path.name for path in complete_in(tmp_path)] == order
    for text in ('{"global_step": 12', "[]", "{}"):
        (tmp_path / "checkpoint-12" / "trainer_state.json").write_text(text)
        assert [path.name for path in complete_in(tmp_path)] == order, "the text is cut off or another"
    (tmp_path / "checkpoint-12" / "trainer_state.json").write_text('{"global_step": 12}')
    _written(tmp_path / "state_13" / ".model.partial", 13)  # clients look for their names
    assert hzero.newest_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-12")
    note = Manifest.read(tmp_path / "checkpoint-12" / "global_step12")
    (tmp_path / "checkpoint-12" / "rng_state_0.pth").write_bytes(bytes(200))
    note.model_copy(update={"beside": {"rng_state_0.pth": 200}}).write()
    assert hzero.newest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-12")
    for change in (lambda path: os.truncate(path, 100), os.unlink):
        change(tmp_path / "checkpoint-12" / "rng_state_0.pth")
        assert [path.name for path in complete_in(tmp_path)] == order
    note.write()
    os.truncate(tmp_path / "checkpoint-12" / "global_step12" / NAME, 99)
    (tmp_path / "again" / NAME).unlink()
    _written(tmp_path / "checkpoint-13", 13)  # a tag of the engine, not of Trainer
    assert [path.name for path in complete_in(tmp_path)] == ["checkpoint-13", *order[1:]]


def test_a_checkpoint_without_a_note_is_taken_only_if_no_other_has_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("checkpoint-1", "checkpoint-2"):
        (_written(tmp_path / name / "global_step", 1).folder / NOTE).unlink()
    os.utime(tmp_path / "checkpoint-1", (1, 1))
    with caplog.at_level(logging.WARNING, "hzero"):
        assert hzero.newest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-2")
    assert "written without the key checkpoint" in caplog.text
    note = _written(tmp_path / "global_step0", 0)
    assert hzero.newest_checkpoint(tmp_path) == str(note.folder)
    (tmp_path / "checkpoint-1" / "trainer_state.json").write_text('{"global_step": 1}')  # Trainer has finished it
    assert hzero.newest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-1")
    (tmp_path / "latest").write_text("checkpoint-1/global_step")  # by another run, after the note
    assert CheckpointFiles._candidates(tmp_path, None) == ("checkpoint-1/global_step", [])
    os.utime(tmp_path / "latest", (-1, -1))
    assert CheckpointFiles._candidates(tmp_path, None) == (None, [note])


def test_a_note_or_a_file_that_changed_is_named(tmp_path: Path) -> None:
    note = _written(tmp_path / "one", 1)
    assert note.changed() is None and Manifest.read(note.folder) == note
    (note.folder / NAME).write_bytes(bytes(100))
    assert note.changed(hashes=False) is None
    assert note.changed() == f"{NAME} has changed: its hash differs"
    assert note.changed([]) is None, "another rank's share"
    os.truncate(note.folder / NAME, 7)
    assert note.changed() == f"{NAME} has 7 bytes instead of 100"
    with pytest.raises(OSError, match="has 7 bytes instead of 100"):
        note.write()  # the file system has lost what was written
    path = note.folder / NOTE
    text, found = path.read_text(), json.loads(path.read_text())
    found.pop("sha256")
    notes = [{**found, "step": None}, {**found, "files": {"../other": [1, ""]}}, {**found, "files": {}}, [found]]
    for changed in (text[:-9], text.replace("12", f"1{'0' * 5000}"), "[" * 100_000, *map(json.dumps, notes)):
        path.write_text(manifest._sealed(changed))
        with pytest.raises(IncompleteError, match=rf"one' is incomplete: its {NOTE} cannot be read"):
            Manifest.read(note.folder)
        assert not complete_in(tmp_path)
    path.unlink()
    os.mkfifo(path)  # never waits for a writer
    with pytest.raises(IncompleteError, match="cannot be read"):
        Manifest.read(note.folder)


def test_every_flipped_bit_of_a_note_is_found(tmp_path: Path) -> None:
    folder = _written(tmp_path / "one", 12).folder
    content = (folder / NOTE).read_bytes()
    for bit in range(8 * len(content)):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        (folder / NOTE).write_bytes(changed)
        with pytest.raises(IncompleteError, match="or has changed"):
            Manifest.read(folder)
    (folder / NOTE).write_bytes(content)
    assert Manifest.read(folder).step == 12


@pytest.mark.parametrize("name", ["pipe", "zero", "link", "n\0"])
def test_a_note_of_what_is_no_file_is_refused_at_once(name: str, tmp_path: Path) -> None:
    """Their sizes are 0, but reading the first two never ends."""
    note, digest = _written(tmp_path / "one", 1), hashlib.sha256(b"").hexdigest()
    os.mkfifo(note.folder / "pipe")
    (note.folder / "zero").symlink_to("/dev/zero")
    (note.folder / "link").symlink_to(NAME.replace("optim", "model"))
    found = note.model_copy(update={"files": {name: (0, digest)}})
    assert "cannot be read: " in (found.changed() or "") and "cannot be read: " in (found.changed(hashes=False) or "")


def test_a_save_that_was_cut_short_before_it_had_its_name_gets_it(tmp_path: Path) -> None:
    _written(tmp_path / ".last.partial", 2)
    (_written(tmp_path / "last", 1).folder / NAME).unlink()  # being removed for it
    _written(tmp_path / "best", 3)
    (tmp_path / ".best.partial").mkdir()  # no note
    (tmp_path / ".latest.x.partial").write_text("a file of another process")
    before = sorted(tmp_path.iterdir())
    for tag, name in ((None, "best"), ("last", ".last.partial"), ("best", "best")):
        assert CheckpointFiles._candidates(tmp_path, tag)[1][0].folder == tmp_path / name
    assert [path.name for path in complete_in(tmp_path)] == ["best", ".last.partial"]
    assert sorted(tmp_path.iterdir()) == before, "another job may be saving: a load renames nothing"
    recover(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".latest.x.partial", "best", "last"]
    assert [Manifest.read(tmp_path / name).step for name in ("last", "best")] == [2, 3]


def test_a_save_that_cannot_be_renamed_leaves_the_one_before(tmp_path: Path) -> None:
    note = _written(tmp_path / "last", 1)
    with pytest.raises(FileNotFoundError):  # there is no .last.partial
        publish(tmp_path / "last")
    assert Manifest.read(tmp_path / "last") == note and len(list(tmp_path.iterdir())) == 1


def test_an_error_of_the_disk_keeps_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own error would give a position in its archive."""
    state = {"a": torch.arange(100_000), "b": [torch.ones(3)]}
    with HashedFile(tmp_path / "whole.pt") as whole:
        torch.save(state, whole)
        size = whole.tell()
    content = (tmp_path / "whole.pt").read_bytes()
    assert (size, whole.hash.hexdigest()) == (len(content), hashlib.sha256(content).hexdigest())
    assert torch.equal(torch.load(tmp_path / "whole.pt", weights_only=True, mmap=True)["a"], state["a"])
    monkeypatch.setattr(manifest, "regular", os.open)
    with pytest.raises(Exception) as error, HashedFile("/dev/full") as full:
        torch.save(state, full)
    assert reason_of(error.value) == os.strerror(errno.ENOSPC)
