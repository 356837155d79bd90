"""Lists of parameters that belong to two engines, against what stock ZeRO-3 makes of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.faults.launch import run


def test_lists_of_parameters_of_two_engines(tmp_path: Path) -> None:
    lines = [line for line in run("two_engines.py", folder=tmp_path, ranks=2).splitlines() if line.startswith("{")]
    found = [json.loads(line) for line in lines]
    stock, *others = found
    assert stock["pair"] == ["stock", "stock"] and len(others) == 4
    for one in others:
        exact = "topo" not in one["pair"]
        for direction, want in stock["copied"].items():
            got = one["copied"][direction]
            assert got["held"] == got["expected"] and got["exact"], one
            assert got["after"] == pytest.approx(got["expected"], rel=1e-6 if exact else 0.02), one
            assert got["before"] == pytest.approx(want["before"], rel=1e-6 if exact else 0.02), one
            assert got["expected"] == pytest.approx(want["expected"], rel=1e-6 if exact else 0.1), one
        assert one["unchanged"] == {"seen": [True] * 2, "kept": [True] * 2, "masters": [True] * 2}, one
        for check in ("shared", "watched"):
            for key, want in stock[check].items():
                assert one[check][key] == pytest.approx(
                    want, rel=1e-5 if exact else 0.05, abs=1e-6 if exact else 0.02
                ), (check, one)
