"""The file of measured rates: what is written is read back, anything else is one line that names file and key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hzero.config import NodeAllGather
from hzero.errors import ConfigError
from hzero.tools.cli import main
from hzero.tools.commands.links import summary
from hzero.tools.plan.scenario import read_scenario
from hzero.topology.links_file import node_all_gather, read_links, write_links
from tests.commands.measured import links, row


def test_rates_are_those_of_rccl_tests() -> None:
    # 16 GB over 8 ranks in 2 s: each receives 7 parts of 2 GB.
    large = row(size=16_000_000_000, us=2e6, ranks=8)
    assert (large.algbw_gb_s, large.busbw_gb_s) == (8.0, 7.0)
    assert row(size=1_000_000_000, us=1e6).busbw_gb_s == 0.5


def test_a_tier_has_the_bandwidth_of_the_largest_all_gather_and_the_time_of_the_smallest() -> None:
    rate = links().tiers["intra_package"]
    assert rate.gb_s == pytest.approx((1 << 20) / 2 / 100e-6 / 1e9)
    assert rate.latency_us == 10.0


@pytest.mark.parametrize(
    ("doubling", "pairs", "algorithm", "below"),
    [
        ((80, 90, 200), (51, 70, 400), "library", 0),
        ((20, 30, 200), (40, 70, 400), "doubling", 2048),
        ((40, 50, 200), (10, 70, 400), "pairs", 512),
        ((20, 62, 50), (40, 70, 400), "doubling", 2049),  # one is noise, all win
        ((49, 60, 90), (48, 60, 90), "library", 0),  # gains of noise
        ((), (), "library", 0),
    ],
)
def test_the_algorithm_between_nodes_is_the_one_that_gains_most(
    doubling: tuple[int, ...], pairs: tuple[int, ...], algorithm: str, below: int
) -> None:
    sizes = (256, 1024, 4096)  # over two ranks
    times = {"library": (50, 60, 90), "doubling": doubling, "pairs": pairs}
    rows = [row(name, size, us, "inter_node") for name, all_us in times.items() for size, us in zip(sizes, all_us)]
    rows += [row(name, 256, us, "intra_package") for name, us in (("library", 100), ("pairs", 1))]
    assert node_all_gather(rows) == NodeAllGather(algorithm=algorithm, below_bytes=below)  # type: ignore[arg-type]
    shown = summary(links(rows=[*links().rows, *rows])).partition('"hzero" block')[2]
    assert shown.endswith(f'"node_all_gather": {{"algorithm": "{algorithm}", "below_bytes": {below}}}' if below else "")
    assert bool(shown) == bool(below)


def test_a_plan_takes_measured_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, frontier = tmp_path / "links.json", ["model=gpt_neox_20b", "topology=frontier"]
    rates = {"intra_package": 150.0, "intra_node": 70.0, "inter_node": 9.0}
    sizes = {
        "intra_package": (9_000_000, 2),
        "intra_node": (2_800_000, 4),
        "inter_node": (540_000, 2),
    }  # these rates in 30 us
    rows = [row(size=size, us=30.0, tier=tier, ranks=ranks) for tier, (size, ranks) in sizes.items()]
    write_links(path, links(grid={"intra_package": 2, "intra_node": 4, "inter_node": 2}, rows=rows))
    profile = read_scenario([*frontier, "topology.nodes=48"], path).machine.profile
    assert (profile.value("net_rails_gb_s"), profile.value("launch_us")) == (72.0, 30.0)
    assert profile.sources["given"].kind == "measured"
    plan = ["plan", *frontier, "nodes=48", "--links"]
    assert main([*plan, str(path), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["rates_gb_s"] == pytest.approx(rates) and links().date in result["rates"]
    for entry in result["traffic"]:
        assert entry["seconds"] == pytest.approx(entry["wire_bytes"] / (rates[entry["tier"]] * 1e9))
    assert main([*plan, str(path)]) == 0
    assert f"measured {links().date} on 2 nodes x 4 packages x 2 devices, gloo" in " ".join(
        capsys.readouterr().out.split()
    )
    inside = tmp_path / "one.json"
    write_links(inside, links(grid={"intra_package": 2, "intra_node": 4, "inter_node": 1}, rows=rows[:2]))
    for file, says in (
        (inside, "tier inter_node: missing, and the plan's grid"),
        (tmp_path / "none.json", "cannot be read"),
    ):
        assert main([*plan, str(file)]) == 2
        assert f"{file}: {says}" in capsys.readouterr().err


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    write_links(path, links())
    assert read_links(path) == links()
    with pytest.raises(ConfigError, match="cannot write"):
        write_links(tmp_path / "missing" / "links.json", links())


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("schema", "hzero-links-9", "schema: found 'hzero-links-9'"),
        ("rows.0.median_us", float("nan"), "rows.0.median_us: found nan"),
        ("rows.0.median_us", 1e-300, "rows.0.median_us: found 1e-300; expected"),
        ("rows.0.max_us", 1e300, "rows.0.max_us: found 1e+300; expected"),
        ("date", "a\0", "date: found 'a\\x00'; expected a text without NUL"),
        ("rows.0.min_us", 10**400, "rows.0.min_us"),
        ("grid.inter_node", 4, "rows.2.ranks: found 2, but tier inter_node has 4"),
        ("rows.1.algorithm", "broadcast", "rows.1.algorithm: found 'broadcast'"),
        ("extra\nline", 1, "found key"),
    ],
)
def test_broken_files_are_named_with_the_key(tmp_path: Path, key: str, value: Any, message: str) -> None:
    path = tmp_path / "bad.json"
    content = inner = links().model_dump(by_alias=True)
    *blocks, last = key.split(".")
    for block in blocks:
        inner = inner[int(block)] if block.isdigit() else inner[block]
    inner[last] = value
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError) as error:
        read_links(path)
    assert str(error.value).startswith(f"{path}: {message}"), error.value
    assert "\n" not in str(error.value)
