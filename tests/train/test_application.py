"""What `hzero train` takes itself for: one rank of a launcher's, or what starts the ranks."""

from __future__ import annotations

import os
import sys

import pytest

from hzero.settings.conf import compose
from hzero.train import application
from hzero.train.application import _rank_of_a_launcher
from hzero.validation import ConfigError
from tests.topology.test_bootstrap import mpich, srun, torchrun


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
    with pytest.raises(ConfigError, match="RANK=4 and SLURM_PROCID=3"):
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
