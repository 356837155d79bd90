"""Rows of a comparison: what is read, what is refused, which of several runs counts, and arithmetic on rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hzero.bench.measured import Chosen, choose, common_loss, elapsed, points, time_to, wire_seconds
from hzero.bench.results import parse_row, read_results
from hzero.bench.rows import StepsRow
from hzero.config import ConfigError
from tests.bench.rows import config, everything, main_rows, run, steps, write

OTHER_MACHINE = {"cores": 4, "processor": "other", "memory_bytes": 1, "system": "Linux", "python": "3.11"}


def _chosen(folder: Path, rows: list[dict[str, Any]]) -> Chosen:
    return choose(read_results([write(folder, rows)])[0])


def _row(**more: Any) -> StepsRow:
    row = parse_row(steps("topo", **more), "here")
    assert isinstance(row, StepsRow)
    return row


def test_rows_of_all_suites_are_read_from_folders_and_files(tmp_path: Path) -> None:
    rows = everything()
    folder = write(tmp_path / "a", rows)
    for path in (folder, folder / "results.jsonl"):
        lines, notes = read_results([path])
        assert [line.content for line in lines] == rows
        assert notes == []
    more = write(tmp_path / "b", [run("mild", 1)])
    assert len(read_results([folder, more, folder])[0]) == len(rows) + 1  # what is named twice is read once


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_file_that_was_cut_anywhere_keeps_its_whole_rows(tmp_path: Path, data: st.DataObject) -> None:
    first, last = json.dumps(steps("topo")), json.dumps(run("topo", 1, number=60))
    cut = data.draw(st.integers(1, len(last) - 1))
    again = data.draw(st.booleans())
    file = tmp_path / "results.jsonl"
    file.write_text(
        f"{first}\n{last[:cut]}" + (f"\n{last}\n" if again else "")
    )  # a run that was taken up goes on below
    lines, notes = read_results([file])
    assert len(lines) == 1 + again
    assert notes == ["Line 2 of results.jsonl is torn, as of a run that was ended, and left out."]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=60))
def test_bytes_that_are_no_rows_are_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "results.jsonl"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        read_results([file])
    assert "\n" not in str(refused.value)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "kind": ({"kind": "step"}, "kind: unknown value 'step'; did you mean 'steps'?"),
    "format": ({"format": 2}, "format: found 2"),
    "engine": ({"engine": "jax"}, "engine: found 'jax'"),
    "date": ({"date": "yesterday"}, "date: found 'yesterday'"),
    "no time": ({"step_s": []}, "step_s: found []"),
    "time of 0": ({"step_s": [1.0, 0.0]}, "step_s: found 0.0, expected seconds above 0"),
    "not a number": ({"step_s": [float("nan")]}, "step_s.0: found nan"),
    "huge": ({"step_s": [10**400]}, ""),
    "losses": ({"losses": [1.0]}, "losses: found 1, fewer than the 4 timed steps"),
    "world": ({"world_size": 4}, "world_size: found 4, but the cluster is 2 nodes x 2 GPUs x 2 GCDs"),
    "tier": ({"hops_s": {"rack": 1.0}}, "hops_s.rack"),
    "bytes": (
        {"bytes": {"measured": {"gcd": -1.0}, "planned": {}, "ideal": {}}},
        "bytes.measured: found {'gcd': -1.0}, expected no number below 0",
    ),
    "trace": ({"trace": "../../etc/passwd"}, "trace: found '../../etc/passwd', expected a path inside"),
    "rates": ({"config": config(node_rate=0)}, "node: found 0.0, expected a rate above 0"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_named_by_file_line_and_key(name: str, tmp_path: Path) -> None:
    change, message = BAD[name]
    folder = write(tmp_path, [steps("zero3"), {**steps("topo"), **change}])
    with pytest.raises(ConfigError) as refused:
        read_results([folder])
    assert f"{folder / 'results.jsonl'}:2: " in str(refused.value)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_missing_key_and_a_line_that_is_no_object_are_refused(tmp_path: Path) -> None:
    row = steps("topo")
    del row["memory"]["optimizer"]
    with pytest.raises(ConfigError, match=r"results.jsonl:1: memory.optimizer: missing"):
        read_results([write(tmp_path, [row])])
    with pytest.raises(ConfigError, match=r"results.jsonl:2: is no JSON"):
        read_results([write(tmp_path, [steps("topo")], tail="nonsense\n")])
    with pytest.raises(ConfigError, match=r"results.jsonl:2: found \[1\], expected an object"):
        read_results([write(tmp_path, [steps("topo")], tail="[1]\n")])


def test_folders_without_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no results\.jsonl"):
        read_results([tmp_path])
    with pytest.raises(ConfigError, match="RESULTS: no folder or file"):
        read_results([tmp_path / "nowhere"])
    with pytest.raises(ConfigError, match="RESULTS: no rows in"):
        read_results([write(tmp_path, [], tail="\n\n")])


@pytest.mark.parametrize("change", [{"id": "new"}, {"machine": OTHER_MACHINE}, {"versions": {"hzero": "0.2.0"}}])
def test_of_two_runs_of_a_measurement_the_newest_whole_one_counts(tmp_path: Path, change: dict[str, Any]) -> None:
    later = {"date": "2026-11-22T08:00:00+00:00", **change}
    chosen = _chosen(tmp_path / "whole", main_rows() + main_rows(scale=2.0, **later))
    assert chosen.measurements[0].fastest()[0].median_s == 2.5
    assert [note for note in chosen.notes if "newest whole one counts, of 2026-11-22 08:00" in note]
    chosen = _chosen(tmp_path / "part", main_rows() + main_rows(scale=2.0, **later)[:-1])
    assert chosen.measurements[0].fastest()[0].median_s == 1.25
    assert len(chosen.lines) == 8
    assert [note for note in chosen.notes if "newest whole one counts, of 2026-11-21 18:02" in note]
    chosen = _chosen(tmp_path / "none", main_rows()[1:] + main_rows(scale=2.0, **later)[:-1])
    assert chosen.measurements[0].row("ddp") is not None
    assert chosen.measurements[0].missing == ("topo",)
    assert any("none of them whole; the newest counts, of 2026-11-22" in note for note in chosen.notes)
    assert "main: no rows of topo." in chosen.notes


def test_of_a_peer_or_run_that_is_there_twice_the_newest_counts(tmp_path: Path) -> None:
    later = {"date": "2026-11-22T08:00:00+00:00"}
    rows = [steps("topo", scale=3.0, **later), *main_rows(), {**run("topo", 1, 0.5), **later}, run("topo", 1)]
    chosen = _chosen(tmp_path, rows)
    assert chosen.measurements[0].rows[-1].median_s == 3.75
    assert chosen.runs[0].row.losses[-1] == 4.5
    assert "main: several rows of topo; the newest of each counts." in chosen.notes
    assert any(
        note.startswith("convergence topo-seed1: 2 runs were found; the one of 2026-11-22") for note in chosen.notes
    )


def test_peers_that_do_other_work_are_told(tmp_path: Path) -> None:
    rows = main_rows()
    rows[0]["tokens_per_step"] = 512
    assert any("the peers differ in tokens a step" in note for note in _chosen(tmp_path, rows).notes)


def test_peers_stand_in_one_order_whatever_the_order_of_rows(tmp_path: Path) -> None:
    mine = {**steps("topo"), "peer": "topo-mine"}
    names = [row.peer for row in _chosen(tmp_path, [mine, *reversed(main_rows())]).measurements[0].rows]
    assert names[:3] == ["ddp", "hsdp-node", "hsdp-package"]
    assert names[-2:] == ["topo", "topo-mine"]


def test_wires_take_at_least_their_bytes_over_their_links() -> None:
    # 20.4, 10.2 and 4.08 MB: over 8 links of 200 Mbit/s, 8 of 75, 2 trunks of 50.
    found = wire_seconds(_row())
    assert found == pytest.approx({"gcd": 20.4 / 200, "gpu": 10.2 / 75, "node": 4.08 * 8 / 2 / 50})
    one = _row(config=config(nodes=1))
    assert set(wire_seconds(one)) == {"gcd", "gpu"}
    setting = config()
    del setting["cluster"]["rates_mbit"]["gpu"]
    assert set(wire_seconds(_row(config=setting))) == {"gcd", "node"}


def test_time_to_a_loss_counts_warm_up_at_the_median() -> None:
    row = _row(step_s=[1.0, 2.0, 3.0], losses=[6.0, None, 5.0, 4.0, 4.5])
    assert row.median_s == 2
    assert elapsed(row) == [2, 4, 5, 7, 10]
    assert time_to(row, 5.0) == 5
    assert time_to(row, 4.2) == 7
    assert time_to(row, 3.9) is None
    other = _row(step_s=[1.0], losses=[5.5])
    assert common_loss([row, other]) == 5.5
    assert common_loss([_row(step_s=[1.0], losses=[None])]) is None


def test_series_take_points_of_main_that_differ_along_the_axis_alone(tmp_path: Path) -> None:
    rows = everything()
    chosen = _chosen(tmp_path / "a", rows)
    assert [(v, m.suite) for v, m in points(chosen, "accumulation", "accumulation")][1] == (2, "main")
    assert [v for v, _ in points(chosen, "nodes_weak", "nodes")] == [1, 2, 4]
    assert {m.suite for _, m in points(chosen, "nodes_strong", "nodes")} == {"nodes_strong"}
    assert [v for v, _ in points(chosen, "sweep", "rate")] == [15, 50, 150]
    for row in rows:
        if row["suite"] == "main":
            row["config"]["train"]["dtype"] = "fp32"
    chosen = _chosen(tmp_path / "b", rows)
    assert [v for v, _ in points(chosen, "accumulation", "accumulation")] == [1, 4, 8]
    assert [v for v, _ in points(chosen, "sweep", "rate")] == [15, 150]
