"""The comparison without its ranks: what a configuration asks for, closed forms of bytes, the store, one run from end to end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import tune_report
from benchmarks.cluster import network
from benchmarks.cluster.shape import Cluster, Rates
from benchmarks.compare import __main__ as compare
from benchmarks.compare import training as training_module
from benchmarks.compare.store import Store
from benchmarks.compare.traffic import step_bytes
from benchmarks.compare.training import Training
from benchmarks.rows import RESULTS, line_of, parse_row, read_rows
from hzero.config import TIERS
from hzero.plan.scenario import read_scenario
from hzero.plan.tune import candidates
from hzero.validation import ConfigError
from tests.benchmarks.rows import steps
from tests.ranks import ROOT

CATALOG: dict[str, Any] = yaml.safe_load((ROOT / "benchmarks" / "conf" / "catalog" / "all.yaml").read_text())
DATA = {"path": None, "max_bytes": 0, "eval_share": 0.05, "cache_dir": None}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the command would measure, in place of measuring it."""
    found: list[Any] = []
    monkeypatch.setattr(compare, "take", lambda wanted, store, *, again: found.extend(wanted) or 0)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    return found


def test_everything_is_one_list(asked: list[Any], tmp_path: Path) -> None:
    assert compare.main([f"results={tmp_path}"]) == 0
    titles = [item.title for item in asked]
    assert len(set(titles)) == len(titles) and len({item.id for item in asked}) == len(titles)
    suites = {title.partition("/")[0] for title in titles}
    assert suites >= {"main", "accumulation", "nodes_weak", "nodes_strong", "sweep", "codecs", "shards", "convergence"}
    main = next(item for item in asked if item.title == "main/main")
    assert main.config.train.accumulation == 2
    assert main.config.cluster.rates_mbit == Rates(gcd=200, gpu=75, node=50)
    assert [item.config.train.accumulation for item in asked if item.title.startswith("accumulation/")] == [
        1,
        2,
        4,
        8,
    ]
    assert {item.seed for item in asked if isinstance(item, Training)} == {0, 1}
    assert all(item.estimated_s() > 0 for item in asked)


def test_options_may_stand_behind_overrides(asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main(["suite=one", "rounds=7", "--cfg", "job"]) == 0
    assert "rounds: 7" in capsys.readouterr().out and not asked


def test_what_the_user_sets_wins_and_is_named(asked: list[Any], tmp_path: Path) -> None:
    arguments = ["-m", "suite=main,sweep", "rounds=1", "schemes=[ddp,topo]", "train.seed=4", f"results={tmp_path}"]
    assert compare.main(arguments) == 0
    assert [item.title for item in asked] == [
        f"{name},train.seed=4" for name in ("main/main", "sweep/node-16", "sweep/node-160", "sweep/node-unlimited")
    ]
    for item in asked:
        assert item.config.rounds == 1 and item.config.schemes == ["ddp", "topo"] and item.config.train.seed == 4
        assert re.fullmatch(r"[\w.,=+-]+", item.folder)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("suite=mian", "suite: unknown option 'mian'; did you mean 'main'"),
        ("suite=one schemes=[topo,tpoo]", "schemes: unknown scheme 'tpoo'; did you mean 'topo'"),
        ("suite=one schemes=[topo,topo]", "schemes: topo is named 2 times"),
        ("suite=one rounds=0", "rounds: found 0; input should be greater than or equal to 1"),
        ("suite=one train.dtype=fp16", "train.dtype: unknown value 'fp16'"),
        ("suite=one train.lr=nan", "train.lr: found nan"),
        ("suite=one reduce_scatter=nccl", "reduce_scatter: unknown value 'nccl'"),
        ("suite=one model.num_heads=0", "model.num_heads: found 0; input should be greater than or equal to 1"),
        ("suite=one ~model.num_heads", "model.num_heads: key 'num_heads' is not in struct"),
        ("suite=one cluster.rates_mbit.node=fast", "cluster.rates_mbit.node: found 'fast'"),
        ("suite=one catalog.topo.block.preset=mlid", "did you mean 'mild'"),
        ("suite=one catalog.topo.engine=hzreo", "catalog.topo.engine: unknown engine 'hzreo'; did you mean 'hzero'"),
        ("suite=one catalog.fsdp2.shard=rack", "catalog.fsdp2.shard: unknown value 'rack'"),
        ("suite=one +catalog.ddp.hpz=node", "catalog.ddp: unknown key 'hpz'"),
        ("suite=one speed=3", "speed"),
        ("suite=accumulation train.accumulation=2", "suite accumulation varies it"),
        ("suite=one +model.foo=1", "model: unknown key 'foo'"),
        ("suite=one cluster=null", "cluster=null: the group needs an option"),
        ("suite=convergence train.lr=1", "train.lr: suite convergence has no use for it"),
        ("suite=convergence suite.convergence.seeds=[0,0]", "suite.convergence.seeds: found [0, 0]"),
        ("suite=convergence suite.convergence.presets=[mlid]", "zero: unknown option 'mlid'; did you mean 'mild'"),
        ('suite=choices +suite.convergence.choices.topo=["zero=topo"]', "found 'topo', which is a preset too"),
        (
            'suite=choices +suite.convergence.choices.short=["zero=topo","train.steps=10"]',
            "suite.convergence: short overrides train.steps with 10, but all of its trainings have 1000",
        ),
        ('suite=choices +suite.convergence.choices.odd=["zero=tpoo"]', "zero: unknown option 'tpoo'"),
        ("suite=one results=/dev/null/x", "results: cannot write"),
    ],
)
def test_wrong_input_is_one_line(
    arguments: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setattr(compare, "check_tools", lambda: None)
    results = [] if "results=" in arguments else [f"results={tmp_path / 'results'}"]
    assert compare.main([*arguments.split(), *results]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1, error
    assert not list(tmp_path.rglob("*.jsonl")) or (tmp_path / "results" / "results.jsonl").read_text() == ""


def test_without_root_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setattr(network.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(network.shutil, "which", lambda tool: tool)
    assert compare.main(["suite=main", f"results={tmp_path}"]) == 2
    assert "needs root" in capsys.readouterr().err


# --- bytes ---


def _brute_force(cluster: Cluster, ranks: list[int], kind: str, way: str, size: float) -> dict[str, float]:
    """Bytes by tier of one collective, message by message."""
    total = dict.fromkeys(TIERS, 0.0)
    count = len(ranks)

    def send(a: int, b: int) -> None:
        total[cluster.tier_between(ranks[a], ranks[b])] += size / count

    if kind == "reduce_scatter" and way == "all_to_all":
        for a in range(count):
            for b in range(count):
                if a != b:
                    send(a, b)
        return total
    for _ in range(2 if kind == "all_reduce" or (kind == "reduce_scatter" and way == "gloo") else 1):
        for _hop in range(count - 1):
            for a in range(count):
                send(a, (a + 1) % count)
    return total


@given(
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)).filter(
        lambda shape: shape[0] * shape[1] * shape[2] >= 2
    ),
    st.sampled_from(["gloo", "all_to_all", "ring"]),
    st.integers(1, 3),
    st.integers(1, 5000),
)
@settings(max_examples=60)
def test_bytes_of_schemes_are_those_of_their_messages(
    shape: tuple[int, int, int], way: str, accumulation: int, numel: int
) -> None:
    cluster = Cluster.from_text("x".join(map(str, shape)), "none")
    world, node = cluster.world_size, cluster.ranks_per_node
    everyone = [list(range(world))]
    nodes = [list(cluster.ranks_of(n)) for n in range(cluster.nodes)]
    columns = [list(range(first, world, node)) for first in range(node)]
    m, a = numel * 2.0, accumulation
    expected: dict[str, list[tuple[list[list[int]], str, float, float]]] = {
        "ddp": [(everyone, "all_reduce", m, 1)],
        "fsdp2": [(everyone, "all_gather", m, 2 * a), (everyone, "reduce_scatter", m, a)],
        "fsdp2-node": [
            *((everyone, "all_gather", m, a), (nodes, "all_gather", m, a), (everyone, "reduce_scatter", m, a)),
        ],
        "hsdp-node": [
            *((nodes, "all_gather", m, 2 * a), (nodes, "reduce_scatter", m, a), (columns, "all_reduce", m / node, 1)),
        ],
        "zero3-deepspeed": [(everyone, "all_gather", m, 2 * a), (everyone, "reduce_scatter", m, a)],
        "hpz-deepspeed": [
            *((everyone, "all_gather", m, 1), (nodes, "all_gather", m, 2 * a - 1), (everyone, "reduce_scatter", m, a)),
        ],
    }
    for name, collectives in expected.items():
        total = dict.fromkeys(TIERS, 0.0)
        for groups, kind, size, times in collectives:
            for ranks in groups:
                for tier, count in _brute_force(cluster, ranks, kind, way, size).items():
                    total[tier] += times * count
        found = step_bytes(CATALOG[name], cluster, [numel], itemsize=2, accumulation=a, reduce_scatter=way)
        assert set(found) == set(cluster.tiers)
        assert all(found[tier] == pytest.approx(total[tier]) for tier in found), name


def test_bytes_of_hzero_are_the_plans() -> None:
    cluster, numels = Cluster.from_text("2x2x2", "none"), [1 << 20]
    keywords: dict[str, Any] = {"itemsize": 2, "accumulation": 2}
    found = {
        (name, way): step_bytes(CATALOG[name], cluster, numels, reduce_scatter=way, **keywords)
        for name in ("topo", "lossless")
        for way in ("gloo", "ring")
    }
    m = float(2 * numels[0])
    # Between nodes, all ranks: weights once in int8 (M/2 and scales of 2 bytes in 128), gradients once in int4 (M/4), half each.
    assert found["topo", "gloo"]["node"] == pytest.approx(2 * m / 2 * (0.5 + 0.25) * (1 + 2 / 128), rel=0.02)
    # hzero reduces in its own way: nothing goes twice.
    assert all(found[name, "gloo"] == found[name, "ring"] for name in ("topo", "lossless"))
    # Without codec, in the package: weights twice a micro-step, gradients once.
    assert found["lossless", "gloo"]["gcd"] == 8 * m / 2 * (4 + 2)
    fewer = step_bytes(CATALOG["lossless"], cluster, numels, reduce_scatter="ring", fetches=1.5, **keywords)
    assert fewer["gcd"] == 8 * m / 2 * (3 + 2) and fewer["node"] == found["lossless", "ring"]["node"]


# --- store and trainings ---


def test_store_keeps_whole_measurements(tmp_path: Path) -> None:
    store = Store(tmp_path)
    rows = [parse_row(steps(scheme, id="first"), "here") for scheme in ("ddp", "topo")]
    store.add(rows)
    second = json.dumps(steps("ddp", id="second"))
    with open(store.path, "a") as file:
        file.write(f"{second}\n{second[:40]}")
    again = Store(tmp_path)
    assert again.has("first", 2) and not again.has("second", 2) and not again.has("third", 1)
    again.add([parse_row(steps("topo", id="third"), "here")])
    assert Store(tmp_path).has("third", 1)
    found, torn = read_rows(store.path)
    assert [row.id for row in found] == ["first", "first", "second", "third"] and found[:2] == rows and torn == [4]


def _finished_run(folder: Path, seed: int = 0) -> None:
    folder.mkdir(parents=True)
    config = {
        "train": {"seed": seed, "steps": 3},
        "model": {"name": "gpt_neox_1m"},
        "zero": {"preset": "topo"},
        "run": {"dir": str(folder)},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    steps = [{"kind": "step", "step": step, "loss": 7.0 - step} for step in (1, 2, 3)]
    evaluation = {"kind": "eval", "step": 3, "loss_decoded": 4.5, "loss_exact": 4.4}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*steps, evaluation]))
    (folder / "summary.json").write_text(
        json.dumps({"status": "finished", "parameters": 10, "world_size": 8, "versions": {"torch": "2"}})
    )


def test_a_finished_training_is_read_and_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, training = Store(tmp_path), Training("topo", 0, "gpt_neox_1m", 3, 0, DATA)
    _finished_run(tmp_path / training.folder)
    monkeypatch.setattr(training_module, "_run", lambda command: pytest.fail(f"trained again: {command}"))
    assert training.take(store, again=False) == 0 and store.has(training.id, 1)
    row: Any = read_rows(tmp_path / RESULTS)[0][0]
    assert row.versions == {"torch": "2"} and row.config["run"]["dir"] == training.folder
    assert row.losses == [6.0, 5.0, 4.0] and row.evaluations[0].loss_exact == 4.4
    other = Training("topo", 1, "gpt_neox_1m", 3, 0, DATA)
    assert other.id != training.id
    _finished_run(tmp_path / other.folder, seed=7)
    with pytest.raises(ConfigError, match="holds a run of seed, steps, model and preset"):
        other.take(store, again=False)


def test_what_interrupts_the_bench_interrupts_the_trainer(tmp_path: Path) -> None:
    """A terminal's Ctrl-C or SIGTERM is passed on to the trainer, whose end is awaited."""
    ready, told = tmp_path / "ready", tmp_path / "told"
    trainer = f"""
import pathlib, signal, sys, time
def leave(number, frame):
    pathlib.Path({str(told)!r}).write_text(signal.Signals(number).name)
    sys.exit(130)
signal.signal(signal.SIGINT, leave)
pathlib.Path({str(ready)!r}).touch()
time.sleep(60)
"""

    def terminate() -> None:
        deadline = time.monotonic() + 60
        while not ready.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    former = signal.signal(signal.SIGTERM, compare._leave)
    thread = threading.Thread(target=terminate)
    try:
        thread.start()
        assert training_module._run([sys.executable, "-c", trainer]) == 130
    finally:
        thread.join()
        signal.signal(signal.SIGTERM, former)
    assert told.read_text() == "SIGINT"


# --- from end to end ---


@pytest.mark.usefixtures("emulated_network")
def test_a_measurement_from_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", reason="the train extra is not installed")
    book = tmp_path / "book.txt"
    book.write_text("".join(f"{i} tiers of links, {i * i} bytes\n" for i in range(8000)))
    arguments = [
        *("suite=one", f"results={tmp_path / 'results'}", "rounds=2"),
        *("schemes=[hsdp-package,zero3-deepspeed,topo]", "cluster.gpus_per_node=1", "model=gpt_neox_1m"),
        *("model.seq_length=32", "model.vocab_size=300", f"data.path={book}", f"data.cache_dir={tmp_path / 'cache'}"),
        *("cluster.rates_mbit={gcd: 400, gpu: 150, node: 200}",),
    ]
    command = [sys.executable, "-m", "benchmarks.compare", *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0 and "1 measurements to take" in done.stdout, done.stdout + done.stderr
    rows: list[Any] = read_rows(tmp_path / "results" / RESULTS)[0]
    assert [row.scheme for row in rows] == ["hsdp-package", "zero3-deepspeed", "topo"]
    links = {"gcd": 4, "node": 2}
    for row in rows:
        assert {"hzero", "torch", "deepspeed"} <= set(row.versions)
        assert row.cpu_s > 0 and row.breakdown.operators > 0
        for tier, many in links.items():
            assert row.bytes.measured[tier] / many <= row.busiest[tier] * 1.001 <= 1.001 * row.bytes.measured[tier]
        assert len(row.step_s) == 2 and len(row.losses) == 4 and row.world_size == 4
        trace = next((tmp_path / "results" / "traces").glob(f"*/{row.scheme}.json.gz"))
        assert trace.stat().st_size > 1000
        for tier in ("gcd", "node"):
            # Of messages this small headers and acknowledgements are a larger share. hzero's prefetch for backward finds a
            # part of the last layer still there, and does not gather it again.
            assert (
                (0.98 if (row.scheme, tier) == ("topo", "gcd") else 1)
                <= row.bytes.measured[tier] / row.bytes.planned[tier]
                < 1.25
            ), (row.scheme, tier, row.bytes)
    by_scheme = {row.scheme: row for row in rows}
    assert by_scheme["topo"].bytes.measured["node"] < by_scheme["zero3-deepspeed"].bytes.measured["node"] / 4
    report = next((tmp_path / "results" / "report").glob("*-comparison.md"))
    assert "| hzero topo |" in report.read_text() and f"report: {report}" in done.stdout
    report.unlink()
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    assert compare.main(arguments) == 0 and "0 measurements to take" in capsys.readouterr().out
    assert report.exists()  # written again from the same rows


def test_the_suite_tune_has_what_the_search_chooses_among(
    asked: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every setting of the search without checkpointing is one row, and the report is about the one it chooses."""
    assert compare.main(["suite=tune"]) == 0
    rows = [
        parse_row({**steps("topo", "tune", item.name), "scheme": scheme, "scheme_config": item.catalog[scheme],
                   "config": item.config.model_dump(), "step_s": [3.0], "tokens_per_step": 16 * 128}, scheme)
        for item in asked for scheme in item.config.schemes
    ]  # fmt: skip
    scenario = read_scenario(tune_report.arguments_of(rows[0]))
    searched = [one for one in candidates(scenario) if not one.checkpointing]
    assert len(searched) == len(rows) == 100
    assert all(sum(tune_report.is_setting(one, row) for row in rows) == 1 for one in searched)

    pick = tune_report.chosen(rows)
    measured = [
        row.model_copy(update={"step_s": [1.03 if row is pick else 1.0 + index]}) for index, row in enumerate(rows)
    ]
    (tmp_path / RESULTS).write_text("".join(map(line_of, measured)))
    monkeypatch.setattr(sys, "argv", ["tune_report", str(tmp_path), "-o", str(tmp_path)])
    assert tune_report.main() == 0
    report = (tmp_path / "2026-11-21-tune.md").read_text()
    assert "**3.0%** is the measured step" in report and f"Chosen: {pick.scheme}, 2 x 1" in report
    assert "It is number 2 of 100 settings" in report
    assert len(read_rows(tmp_path / "2026-11-21-tune.jsonl")[0]) == 100
    assert tune_report.rank_correlation([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(0.8)
    assert tune_report.rank_correlation([1, 2, 3], [5, 5, 9]) == pytest.approx(0.866, abs=1e-3)

    (tmp_path / RESULTS).write_text("".join(line_of(row) for row in measured if row.scheme != pick.scheme))
    assert tune_report.main() == 2
    assert "which was not measured" in capsys.readouterr().err
