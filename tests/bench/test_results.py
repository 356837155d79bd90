"""Rows of a comparison: what is read, what is refused, which of several runs counts, and arithmetic on rows."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hzero.bench.measured import Chosen, choose, common_loss, elapsed, time_to, wire_seconds
from hzero.bench.reach import reach
from hzero.bench.results import parse_row, read_results
from hzero.bench.rows import StepsRow
from hzero.bench.series import series_of
from hzero.config import ConfigError
from tests.bench.rows import config, everything, main_rows, run, steps, training, write

OTHER_MACHINE = {"cores": 4, "processor": "other", "memory_bytes": 1, "system": "Linux", "python": "3.11"}


def _chosen(folder: Path, rows: list[dict[str, Any]]) -> Chosen:
    return choose(read_results([write(folder, rows)])[0])


def _row(**more: Any) -> StepsRow:
    row = parse_row(steps("topo", **more), Path(), "here")
    assert isinstance(row, StepsRow)
    return row


def test_rows_of_all_suites_are_read_from_folders_and_files(tmp_path: Path) -> None:
    rows = everything()
    folder = write(tmp_path / "a", rows)
    for path in (folder, folder / "results.jsonl"):
        lines, notes = read_results([path])
        assert [row.content for row in lines] == rows
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
    "tier": ({"busiest": {"rack": 1.0}}, "busiest.rack"),
    "busiest": ({"busiest": {"node": -1.0}}, "busiest.node: found -1.0"),
    "processor": ({"cpu_s": -1.0}, "cpu_s: found -1.0"),
    "bytes": (
        {"bytes": {"measured": {"gcd": -1.0}, "planned": {}, "ideal": {}, "planned_twice": {}}},
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
    assert [note for note in chosen.notes if "the newest whole one counts, of 2026-11-22 08:00" in note]
    chosen = _chosen(tmp_path / "part", main_rows() + main_rows(scale=2.0, **later)[:-1])
    assert chosen.measurements[0].fastest()[0].median_s == 1.25
    assert len(chosen.rows) == 8
    assert [note for note in chosen.notes if "the newest whole one counts, of 2026-11-21 18:02" in note]
    chosen = _chosen(tmp_path / "none", main_rows()[1:] + main_rows(scale=2.0, **later)[:-1])
    assert chosen.measurements[0].row("ddp") is not None
    assert chosen.measurements[0].missing == ("topo",)
    assert any(
        "none of them whole; of those with most peers and then most rounds the newest counts, of 2026-11-22" in note
        for note in chosen.notes
    )
    assert "main: no rows of topo." in chosen.notes


def test_of_several_whole_runs_more_peers_then_more_rounds_count_before_newer_ones(tmp_path: Path) -> None:
    later = {"date": "2026-11-22T08:00:00+00:00"}
    fewer = config(peers=["topo", "zero3"])
    newer = [steps(peer, scale=2.0, config=fewer, id="few", **later) for peer in fewer["peers"]]
    short = main_rows(scale=3.0, config=config(rounds=2), id="short", **later)
    chosen = _chosen(tmp_path, [*main_rows(), *newer, *short])
    assert len(chosen.rows) == 8
    assert chosen.measurements[0].fastest()[0].median_s == 1.25
    assert any(note.endswith("whole one counts, of 2026-11-21 18:02 (id 9f0c).") for note in chosen.notes)


def test_of_a_peer_or_run_that_is_there_twice_the_newest_counts(tmp_path: Path) -> None:
    later = {"date": "2026-11-22T08:00:00+00:00"}
    rows = [steps("topo", scale=3.0, **later), *main_rows(), {**run("topo", 1, 0.5), **later}, run("topo", 1)]
    chosen = _chosen(tmp_path, rows)
    assert chosen.measurements[0].rows[-1].median_s == 3.75
    assert [row.losses[-1] for row in chosen.runs] == [4.5]
    assert "main: several rows of topo; the newest of each counts." in chosen.notes
    assert any(
        note.startswith("convergence topo-seed1: 2 runs were found; the one of 2026-11-22") for note in chosen.notes
    )


def test_a_short_trial_displaces_no_long_run(tmp_path: Path) -> None:
    later = {"date": "2026-11-22T08:00:00+00:00"}
    trials = [{**run(preset, 1, number=60), **later} for preset in ("stock", "topo", "mild")]
    chosen = _chosen(tmp_path, [run("stock", 1), run("topo", 1), *trials])
    assert [(row.preset, len(row.losses)) for row in chosen.runs] == [("stock", 100), ("topo", 100)]
    assert [note for note in chosen.notes if "stock-seed1, topo-seed1, mild-seed1, of 60 steps" in note]


def test_runs_of_another_configuration_do_not_mix(tmp_path: Path) -> None:
    rows = [run("stock", 1), run("topo", 1), run("topo", 2)]
    rows[2]["config"]["train"]["lr"] = 0.001
    chosen = _chosen(tmp_path, rows)
    assert [(row.preset, row.seed) for row in chosen.runs] == [("stock", 1), ("topo", 1)]


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
    # Busiest: 1.1 of an even part of 20, 10 and 4 MB over 8 links of 200 Mbit/s, 8 of 75, 2 trunks of 50.
    even = {"gcd": 20 / 200, "gpu": 10 / 75, "node": 4 * 8 / 2 / 50}
    assert wire_seconds(_row()) == pytest.approx({tier: 1.1 * value for tier, value in even.items()})
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


def _points(chosen: Chosen, suite: str) -> list[tuple[float, str]]:
    series = series_of(chosen, suite)
    assert series is not None
    return [(value, measurement.suite) for value, measurement in series.points]


def test_series_take_points_of_lenders_that_differ_along_the_axis_alone(tmp_path: Path) -> None:
    rows = everything()
    chosen = _chosen(tmp_path / "a", rows)
    own = "accumulation"
    assert _points(chosen, own) == [(1, own), (2, "main"), (4, own), (8, own)]
    assert _points(chosen, "nodes_weak") == [(1, "nodes_weak"), (2, "main"), (4, "nodes_weak")]
    assert _points(chosen, "nodes_strong") == [(nodes, "nodes_strong") for nodes in (1, 2, 4)]
    assert _points(chosen, "sweep") == [(15, "sweep"), (50, "main"), (150, "sweep")]
    for row in rows:
        if row["suite"] == "main":
            row["config"]["train"]["dtype"] = "fp32"
    chosen = _chosen(tmp_path / "b", rows)
    assert [value for value, _ in _points(chosen, own)] == [1, 4, 8]
    assert [value for value, _ in _points(chosen, "sweep")] == [15, 150]
    for row in rows:
        if row.get("measurement") == "strong-2":
            row["suite"] = "nodes_weak"
    chosen = _chosen(tmp_path / "c", rows)
    assert _points(chosen, "nodes_strong") == [(1, "nodes_strong"), (2, "nodes_weak"), (4, "nodes_strong")]


def test_a_trunk_without_limit_comes_last_and_a_point_without_peers_is_none(tmp_path: Path) -> None:
    setting = config(peers=["zero3"])
    setting["cluster"]["rates_mbit"]["node"] = None
    only = config(node_rate=10, peers=["zero3"])
    rows = [steps("zero3", "sweep", "node-none", config=setting), steps("zero3", "sweep", "node-10", config=only)]
    chosen = _chosen(tmp_path, [*rows, steps("topo", config=config(peers=["topo"]))])
    assert [value for value, _ in _points(chosen, "sweep")] == [10, math.inf]
    series = series_of(chosen, "sweep")
    assert series is not None
    assert series.columns() == ["10 Mbit/s a node", "not limited between nodes"]


def _job(tmp_path: Path, rows: list[dict[str, Any]]) -> tuple[Any, str]:
    return reach(_chosen(tmp_path, rows))


def test_time_to_a_loss_takes_steps_of_one_and_step_times_of_the_other(tmp_path: Path) -> None:
    runs = [run(preset, 1) for preset in ("stock", "lossless", "topo")]
    for row, level in zip(runs, (4.0, 3.0, 4.5)):
        row["losses"] = [level] * 100
    found, note = _job(tmp_path / "a", runs + training())
    assert note == "" and found.losses == (4.0,) and found.seeds == (1,)
    assert {row.peer: found.steps_to(row.peer, 4.0) for row in found.rows()} == {
        "hsdp-node": 1,  # PyTorch peers take stock's steps
        "zero3-deepspeed": 1,
        "lossless": 1,
        "topo": None,
    }
    runs = [run(preset, seed) for preset in ("stock", "topo") for seed in (1, 2)]
    found, _ = _job(tmp_path / "b", [*runs[:3], *training()])
    assert found.seeds == (1,)  # topo has no other
    assert list(found.losses) == sorted(found.losses, reverse=True) and len(found.losses) == 3
    steps_of = [found.steps_to("zero3-deepspeed", loss) for loss in found.losses]
    assert [many <= most for many, most in zip(steps_of, (25, 50, 100))] == [True] * 3
    assert steps_of == sorted(steps_of)


def test_jobs_that_differ_give_no_time_to_a_loss(tmp_path: Path) -> None:
    rows = training()
    for row in rows:
        row["config"]["train"]["micro_batch"] = 4
        row["config"]["model"]["hidden_size"] = 512
    found, note = _job(tmp_path / "a", [run("stock", 1), *rows])
    assert found is None and note.endswith("main-job differs from the runs of training in model, micro_batch.")
    assert "suite training was not measured" in _job(tmp_path / "b", [run("stock", 1)])[1]
    assert "no seed is common" in _job(tmp_path / "c", [run("stock", 1), run("topo", 2), *training()])[1]
    assert _job(tmp_path / "d", main_rows()) == (None, "")
