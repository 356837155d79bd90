"""What `hzero train` takes itself for: one rank of a launcher's, or what starts the ranks."""

from __future__ import annotations

import json
import os
import pkgutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest
from omegaconf import OmegaConf

from hzero import cli
from hzero.settings.conf import compose
from hzero.train import application, folder, status
from hzero.train.application import _rank_of_a_launcher
from hzero.train.stop import TIME_SIGNAL
from hzero.validation import ConfigError, PlainError
from tests.test_bootstrap import mpich, srun, torchrun


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM_", "PMI", "OMPI_", "MPI_", "TORCHELASTIC_", "MASTER_", "LOCAL_")):
            monkeypatch.delenv(name)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (srun(9), ("9", "16", "1", "frontier00001", "3442")),
        (torchrun(9), ("9", "16", "1", "node1", "29400")),
        (mpich(9, MASTER_ADDR="node1"), ("9", "16", "1", "node1", "3442")),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "a"}, ("1", "2", "1", "a", "3442")),
    ],
)
def test_a_rank(environ: dict[str, str], expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    found = _rank_of_a_launcher()
    assert found is not None
    assert tuple(found[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")) == expected
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    found = _rank_of_a_launcher()
    assert found is not None and found["LOCAL_RANK"] == "0"


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "1"},
        mpich(0, size=1, a_node=1),
        # A batch script that has not said srun: the tasks of the job are no ranks.
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "16", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
    ],
)
def test_no_rank(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert _rank_of_a_launcher() is None


def test_two_launchers_that_contradict_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**srun(3), "RANK": "4", "WORLD_SIZE": "16"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="RANK=4 of WORLD_SIZE=16 and SLURM_PROCID=3"):
        _rank_of_a_launcher()


def test_a_rank_of_a_launcher_is_prepared_before_deepspeed_looks_for_accelerators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its warning that it found none would come from every rank."""
    imported = []

    def prepare(threads: int) -> None:
        imported.append("hzero.train.loop" in sys.modules)
        raise KeyboardInterrupt

    for name, value in torchrun(0, WORLD_SIZE="8").items():
        monkeypatch.setenv(name, value)
    monkeypatch.delitem(sys.modules, "hzero.train.loop", raising=False)
    monkeypatch.setattr(application, "prepare_process", prepare)
    with pytest.raises(KeyboardInterrupt):
        application._train_as_rank(compose([]), 0.0)
    assert imported == [False]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A run that goes on, prepared by rank 0, where `_train_as_rank` finds no world to join."""
    for name in (".hzero-run", folder.CONFIG, folder.METRICS):
        (tmp_path / name).touch()
    folder.create(tmp_path, "", False, None)
    status.begin(tmp_path, step=4, steps=12, ranks=8)
    group = {"threads": 1, "start_timeout_s": 60, "timeout_s": 60}
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setattr(application, "Settings", lambda *_, **__: {"launcher": group, "train": group})
    monkeypatch.setattr(application, "prepare_process", lambda threads: None)
    monkeypatch.setattr(application, "on_rank_0", lambda *_: str(tmp_path))
    monkeypatch.setattr(application.stop.Stop, "remember", lambda *_: None)
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setitem(sys.modules, "hzero.train.loop", SimpleNamespace(start_process_group=lambda timeout_s: None))
    monkeypatch.setattr("torch.distributed.new_group", lambda **_: None)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    return tmp_path


@pytest.mark.parametrize(
    ("end", "noted"),
    [
        (lambda *_: application._leave(signal.SIGTERM, None), ["interrupted", "SIGTERM"]),
        (lambda *_: signal.default_int_handler(signal.SIGINT, None), ["interrupted", "SIGINT"]),
        (lambda *_: {}["key"], ["failed", "'key'"]),
    ],
    ids=["scancel", "Ctrl-C", "error"],
)
def test_a_signal_while_ranks_start_is_no_failure(
    started: Path, monkeypatch: pytest.MonkeyPatch, end: Callable[..., object], noted: list[str]
) -> None:
    monkeypatch.setattr(application, "train_rank", end)
    with pytest.raises((SystemExit, KeyboardInterrupt, KeyError)):
        application._train_as_rank(OmegaConf.create({}), 0.0)
    line = json.loads((started / folder.HISTORY).read_text())
    assert [line["state"], line["reason"]] == noted


@pytest.mark.usefixtures("started")
def test_an_error_of_rank_0_that_says_all_is_not_taken_for_its_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> NoReturn:
        raise PlainError("the disk is full")

    monkeypatch.setattr(application, "on_rank_0", refuse)
    with pytest.raises(PlainError, match=r"^the disk is full$"):
        application._train_as_rank(OmegaConf.create({}), 0.0)


def test_a_signal_that_comes_late_does_not_change_the_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes long to end. A caller of `main` goes on and keeps its own handlers."""
    monkeypatch.setitem(cli.COMMANDS, "train", ("builtins:len", ""))
    monkeypatch.setattr(sys, "argv", ["hzero", "train", "a"])
    before = signal.getsignal(TIME_SIGNAL)
    try:
        assert cli.main(["train", "a"]) == 1 and signal.getsignal(TIME_SIGNAL) is before
        assert cli.main() == 1 and signal.getsignal(TIME_SIGNAL) is signal.SIG_IGN
    finally:
        signal.signal(TIME_SIGNAL, before)


def test_a_signal_while_modules_are_imported_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found under Slurm: on busy cores imports take longer than what is left of the job, and ranks died of the signal."""
    monkeypatch.setattr(sys, "argv", ["hzero", "train"])
    monkeypatch.setattr(pkgutil, "resolve_name", lambda _: signal.raise_signal(TIME_SIGNAL))
    monkeypatch.setattr(os, "_exit", sys.exit)
    before = signal.getsignal(TIME_SIGNAL)
    try:
        with pytest.raises(SystemExit) as left:
            cli.main()
        assert left.value.code == 75
    finally:
        signal.signal(TIME_SIGNAL, before)
