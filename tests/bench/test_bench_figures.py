"""Figures of the comparison: what is drawn in them, by their axes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hzero.bench import figures
from hzero.bench.measured import Chosen, choose
from hzero.bench.results import read_results
from hzero.bench.styles import styles
from tests.bench.rows import config, everything, main_rows, run, steps, write


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    figures.plt.close("all")


def _chosen(folder: Path, rows: list[dict[str, Any]]) -> Chosen:
    return choose(read_results([write(folder, rows)])[0])


def _drawn(figure: Any, panel: int = 0) -> dict[str, tuple[list[float], list[float]]]:
    """Points of the lines of a panel, by their label in the figure's legend."""
    lines = [line for line in figure.axes[panel].lines if len(line.get_xdata()) > 1 and line.get_linestyle() != ":"]
    legend = figure.legends[0]
    labels = {
        handle.get_color() + handle.get_linestyle(): text.get_text()
        for handle, text in zip(legend.legend_handles, legend.texts)
    }
    return {
        labels[line.get_color() + line.get_linestyle()]: (list(line.get_xdata()), list(line.get_ydata()))
        for line in lines
    }


def test_bars_have_the_medians_and_every_measurement_its_panel(tmp_path: Path) -> None:
    rows = everything() + [steps("topo", "one", name, 2.0) for name in ("a", "b")]
    drawn = figures.step_time(_chosen(tmp_path, rows).detailed())
    panels = [axes for axes in drawn.axes if axes.get_visible()]
    assert len(panels) == 5 and not drawn.axes[5].get_visible()
    assert [bar.get_width() for bar in panels[0].patches] == [3.0, 1.6, 1.5, 4.0, 2.5, 3.6, 2.0, 1.25]
    assert [bar.get_width() for bar in panels[4].patches] == [2.5]
    sent = figures.traffic(_chosen(tmp_path, rows).of("main")[0])
    assert [bar.get_width() for bar in sent.axes[2].patches][-1] == pytest.approx(4.08)
    marks = [line.get_xdata()[0] for line in sent.axes[2].lines]
    assert marks[-4:] == [8.0, 6.0, 4.0, 4.0]  # planned and ideal of lossless and topo


def test_lines_have_the_values_of_their_series(tmp_path: Path) -> None:
    chosen = _chosen(tmp_path, everything())
    drawn = figures.figures(chosen)
    assert _drawn(drawn["accumulation"])["hzero topo"][0] == [1, 2, 4, 8]
    assert _drawn(drawn["accumulation"])["hzero topo"][1] == pytest.approx(
        [512 / 0.9375, 819.2, 1024 / 0.9375, 1310.72]
    )
    assert _drawn(drawn["nodes"])["DeepSpeed ZeRO-3"][1] == [64.0, 32.0, 8.0]
    assert _drawn(drawn["scaling"])["DeepSpeed ZeRO-3"] == ([1, 2, 4], [1.0, 0.5, 0.125])
    assert _drawn(drawn["scaling"], 1)["hzero topo"][1] == [1.0, 0.5, 0.25]
    assert _drawn(drawn["sweep"])["HSDP, node mesh"][0] == [15, 50, 150]
    assert _drawn(drawn["sweep"])["hzero topo"][1] == [1.875, 1.25, 1.125]
    curves = _drawn(drawn["loss-time"])
    assert curves["hzero topo"][0] == pytest.approx([1.25 * step for step in range(1, 101)])
    assert curves["DeepSpeed ZeRO-3"][0][-1] == 400 and curves["DeepSpeed ZeRO-3"][1][-1] == pytest.approx(
        4.01, abs=0.01
    )


def test_one_loss_that_was_not_finite_leaves_the_rest_of_its_curve(tmp_path: Path) -> None:
    rows = [run("stock", 1), run("topo", 1)]
    rows[1]["losses"][10] = None
    drawn = figures.convergence(_chosen(tmp_path, rows).runs)
    whole, torn = (_drawn(drawn)[name][1] for name in ("stock (DeepSpeed ZeRO-3)", "topo"))
    assert [step for step, value in enumerate(torn) if math.isnan(value)] == [10]
    assert torn[-1] == pytest.approx(whole[-1], abs=0.01)
    apart = _drawn(
        figures.convergence(_chosen(tmp_path, [run("stock", 1), run("stock", 2), run("topo", 1, 0.25)]).runs), 1
    )
    assert apart["topo"][1] == pytest.approx([0.25] * 100)  # to the seed that both have


def test_a_rate_without_limit_stands_right_of_all_others(tmp_path: Path) -> None:
    rows = []
    for rate, scale in ((10, 3.0), (None, 1.0)):
        setting = config(peers=["topo"])
        setting["cluster"]["rates_mbit"]["node"] = rate
        rows.append(steps("topo", "sweep", f"node-{rate}", scale, config=setting))
    drawn = figures.figures(_chosen(tmp_path, rows))["sweep"]
    assert _drawn(drawn)["hzero topo"] == ([10, 20], [3.75, 1.25])
    assert [tick.get_text() for tick in drawn.axes[0].get_xticklabels()] == ["10", "not\nlimited"]


def test_peers_of_one_figure_look_different(tmp_path: Path) -> None:
    mine = [{**steps("topo"), "peer": f"topo-{name}", "label": name} for name in ("a", "b", "c")]
    style = styles(_chosen(tmp_path, [*main_rows(), *mine]).measurements[0].rows)
    assert len({(one.colour, one.marker) for one in style.values()}) == 11
    assert len({one.marker for one in style.values()}) == 11
