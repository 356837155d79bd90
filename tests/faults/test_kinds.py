"""Parameters of all types, sharded and kept whole, against what stock ZeRO-3 makes of them: one launch for all."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.faults.kinds import REFUSED, RUNS, SCALAR, TYPES
from tests.faults.launch import run

#: Of codec int8 relative to a block's largest magnitude, once more where a payload is encoded again.
INT8 = 0.02


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the script prints."""
    folder = tmp_path_factory.mktemp("kinds")
    return run("kinds.py", str(folder / "saved"), folder=folder, timeout=600)


@pytest.fixture(scope="module")
def found(output: str) -> dict[str, Any]:
    """What the script has found, by run."""
    return dict(json.loads(line) for line in output.splitlines() if line.startswith('["'))


@pytest.mark.parametrize("name", RUNS)
def test_codes_arrive_as_they_are(found: dict[str, Any], name: str) -> None:
    """And numbers within the bound of their codec; what is gathered to be read, written or saved is exact."""
    got, stock = found[name], found["stock"]
    assert "error" not in got, got["error"]
    exact = name in ("stock", "lossless")
    for key in ("forward", "written", "loaded"):
        assert all(error <= (0 if exact else INT8) for error in got[key].values()), (key, got[key])
    assert not got["gathered"] and not got["exact"] and not got["loaded, gathered"] and got["no master"] and got["peer"]
    close = {"rel": 1e-6 if exact else 0.05}
    assert got["losses"] == pytest.approx(stock["losses"], **close)
    assert got["master"] == pytest.approx(stock["master"], **close)
    assert got["loaded master"] == got["master"]


def test_the_start_line_counts_codes(output: str) -> None:
    """Those that are no float16, bfloat16 or float32, the scalars, two packed ones; a tied one counts once."""
    codes = 3 * (len(TYPES) - 3) + len(SCALAR) + 2 + 3
    assert f"parameters that hold codes, sent as bytes: {codes}" in output


@pytest.mark.parametrize("preset", ["lossless", "topo"])
def test_bytes_on_the_wire_are_those_of_the_plan(found: dict[str, Any], preset: str) -> None:
    got = found[f"bytes of {preset}"]
    assert got and all(logged == planned > 0 for logged, planned in got.values()), got


@pytest.mark.parametrize("preset", ["lossless", "topo"])
def test_types_that_stock_trains(found: dict[str, Any], preset: str) -> None:
    stock, got = found["trained stock"], found[f"trained {preset}"]
    assert stock.keys() == got.keys()
    for kind, (weights, dtype, masters) in stock.items():
        assert got[kind][1] == dtype
        for ours, theirs in ((got[kind][0], weights), (got[kind][2], masters)):
            assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-7 if preset == "lossless" else 0.03), kind


@pytest.mark.parametrize("preset", ["lossless", "topo"])
def test_an_empty_module_that_is_not_used(found: dict[str, Any], preset: str) -> None:
    assert found[f"unused {preset}"] == pytest.approx(found["unused stock"], rel=1e-6 if preset == "lossless" else 0.05)


@pytest.mark.parametrize("preset", ["lossless", "topo"])
def test_what_stock_refuses_is_refused_by_name(found: dict[str, Any], preset: str) -> None:
    names = ("short", "eight", "scale", "count", "nothing", "sixteen", "subclass")
    assert len(names) == len(REFUSED)
    for (kind, why), name in zip(found[f"refused {preset}"].items(), names):
        if found["refused stock"][kind] == "accepted":  # 0-dim parameters, by older versions of DeepSpeed
            assert why == "accepted"
        else:
            when = "forward" if kind == "empty" else "start"  # an empty parameter does no harm until its module is used
            assert why.startswith(f"{when}: ConfigError: parameter {name}: found "), why
