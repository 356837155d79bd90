"""16 ranks on 2 pretended Frontier nodes: the same grid under every way of launching."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from hzero.config import BASE_TIERS
from hzero.launch import run_ranks
from tests.forks import fork, join
from tests.topology.pretended_ranks import NODES, STYLES, WORLD, leave_outcome, write_trees

TIMEOUT_S = 200


def _launch(folder: Path) -> int:
    imports = ("hzero.collectives.tiered", "hypothesis", "pytest")
    return run_ranks(functools.partial(leave_outcome, folder), WORLD, logs=folder, imports=imports)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What every rank found, from one launch."""
    folder = tmp_path_factory.mktemp("ranks")
    write_trees(folder)
    log = folder / "launcher.log"
    join(fork(_launch, folder, folder=folder, env={}, out=log, err=log), TIMEOUT_S)
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
