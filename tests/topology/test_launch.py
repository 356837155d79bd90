"""16 ranks on 2 pretended Frontier nodes: the same grid under every way of launching, by mpiexec and by hzero itself."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from hzero.config import BASE_TIERS
from hzero.launcher import Ranks, free_port, local_ranks
from tests.forks import fork, join
from tests.ranks import ROOT
from tests.topology.pretended_ranks import NODES, STUBBED, STYLES, WORLD, write_trees

TIMEOUT_S = 200


def _by_mpiexec(folder: Path) -> None:
    scripts = sysconfig.get_path("scripts")
    mpiexec = shutil.which("mpiexec", path=scripts) or shutil.which("mpiexec")
    pytest.importorskip("mpi4py", reason='mpi4py is not installed: pip install "hzero[mpi]"')
    if mpiexec is None:
        pytest.skip("mpiexec is not installed")
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    subprocess.run(
        [mpiexec, "-n", str(WORLD), sys.executable, "-m", "tests.topology.pretended_ranks", str(folder)],
        env={**env, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MASTER_PORT": str(free_port()), STUBBED: "1"},
        cwd=folder,
        timeout=TIMEOUT_S,
        check=False,
        capture_output=True,
    )


def _by_hzero(folder: Path) -> None:
    log = folder / "launcher.log"
    process = fork(_launch, folder, folder=folder, env={}, out=log, err=log)
    join(process, TIMEOUT_S)


def _launch(folder: Path) -> int:
    command = [sys.executable, "-m", "tests.topology.pretended_ranks", str(folder)]
    imports = ("hzero.collectives.tiered", "hypothesis", "pytest")
    return Ranks(command, local_ranks(WORLD), folder, imports=imports, start_timeout=TIMEOUT_S).run()


@pytest.fixture(scope="module", params=[_by_mpiexec, _by_hzero], ids=["mpiexec", "hzero"])
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What every rank found, from one launch."""
    folder = tmp_path_factory.mktemp("ranks")
    write_trees(folder)
    request.param(folder)
    results = [folder / f"rank{rank}.json" for rank in range(WORLD)]
    missing = [path.name for path in results if not path.exists()]
    outcomes = [json.loads(path.read_text()) for path in results if path.exists()]
    failures = [outcome["failure"] for outcome in outcomes if "failure" in outcome]
    assert not failures, failures[0]
    assert not missing, missing
    return outcomes


def test_every_way_of_launching_finds_the_same_machine(outcomes: list[dict[str, Any]]) -> None:
    physical = outcomes[0]["physical"]
    assert set(physical) == {style.__name__ for style in STYLES}
    for groups in physical.values():
        assert groups == physical["one_device"]
    assert [len(physical["one_device"][tier]) for tier in ("gcd", "gpu", "node")] == [
        WORLD // 2,
        WORLD // 4,
        WORLD // NODES,
    ]
    packages = {("c1", "c6"), ("c9", "ce"), ("d1", "d6"), ("d9", "de")}
    found = {tuple(name.split()[1][5:7] for name in group) for group in physical["one_device"]["gcd"]}
    assert found == packages


def test_all_ranks_have_the_same_grid(outcomes: list[dict[str, Any]]) -> None:
    for outcome in outcomes:
        assert outcome["grids"] == outcomes[0]["grids"]
        assert outcome.get("after", True), "before and after torch.distributed is up"
    orders = {name: order for name, (_, order, ranks) in outcomes[0]["grids"].items() if ranks is None}
    orders = {name: [tier for tier in order if tier in BASE_TIERS] for name, order in orders.items()}
    assert orders.pop("one_device_cyclic") == ["gpu", "gcd", "node"]
    assert orders.pop("strided") == ["node", "gcd", "gpu"]
    assert set(map(tuple, orders.values())) == {("node", "gpu", "gcd")}
    assert len(orders) == len(STYLES) - 3, "all but the scrambled one are regular"


def test_errors_are_the_same_on_all_ranks(outcomes: list[dict[str, Any]]) -> None:
    assert len({outcome["uneven"] for outcome in outcomes}) == 1
    assert "node frontier00002 has 7 ranks" in outcomes[0]["uneven"] and "Dropping the ranks" in outcomes[0]["uneven"]
    assert len({outcome["failing"] for outcome in outcomes}) == 1
    assert "ROCR_VISIBLE_DEVICES" in outcomes[0]["failing"] and "99" in outcomes[0]["failing"]
