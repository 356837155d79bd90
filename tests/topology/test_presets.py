"""Presets: the tiers of each, and that they say what they are meant to."""

from __future__ import annotations

import importlib.resources
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from hzero.settings.conf import compose, plain
from hzero.settings.settings import Settings
from hzero.topology import resolve_grid
from hzero.topology.preset import PRESETS, preset
from hzero.topology.tiers import tiers_of
from hzero.validation import ConfigError

SIZES = {
    "frontier": (2, 1, 4), "lumi": (2, 1, 4), "el_capitan": (1, 1, 4), "mi300x": (1, 1, 8), "dgx_h200": (1, 1, 8),
    "laptop": (1, 1, 1),
}  # fmt: skip


def test_every_file_is_a_preset_and_every_preset_has_a_file() -> None:
    folder = importlib.resources.files("hzero.topology") / "presets"
    files = {Path(entry.name).stem: entry for entry in folder.iterdir()}
    assert set(files) == set(PRESETS) == set(SIZES)
    for name, file in files.items():
        text = file.read_text(encoding="utf-8")
        assert yaml.safe_load(text)["name"] == name  # plain YAML for others, too
        assert name == "laptop" or "Source" in text


@pytest.mark.parametrize("name", PRESETS)
def test_tiers(name: str) -> None:
    machine = preset(name)
    assert machine.source == f"preset {name}"
    tiers = {tier.name: tier for tier in tiers_of(machine)}
    assert tuple(tiers[tier].size for tier in ("gcd", "hive", "gpu")) == SIZES[name]
    # What is declared by tier is what follows from links and NICs.
    for tier in tiers_of(replace(machine, tier_gb_s={})):
        if tier.name in machine.tier_gb_s:
            assert tier.gb_s == machine.tier_gb_s[tier.name]


def test_frontier() -> None:
    machine = preset("frontier")
    assert [device.bus[5:7] for device in machine.devices] == ["c1", "c6", "c9", "ce", "d1", "d6", "d9", "de"]
    assert [device.numa for device in machine.devices] == [3, 3, 1, 1, 0, 0, 2, 2]
    counts = {(link.a, link.b): link.count for link in machine.links}
    assert {pair for pair, count in counts.items() if count == 4} == {(0, 1), (2, 3), (4, 5), (6, 7)}
    assert {pair for pair, count in counts.items() if count == 2} == {(0, 6), (2, 4)}
    assert {pair for pair, count in counts.items() if count == 1} == {(0, 2), (1, 3), (1, 5), (3, 7), (4, 6), (5, 7)}
    assert all(link.gb_s == 50.0 * link.count for link in machine.links if link.count)
    assert sum(nic.gb_s or 0 for nic in machine.nics) == 100.0
    # The same board, and the same links.
    assert preset("lumi").links == machine.links


def test_dgx_h200_has_a_nic_a_gpu() -> None:
    machine = preset("dgx_h200")
    assert [device.nic for device in machine.devices] == [nic.name for nic in machine.nics]
    assert [nic.numa for nic in machine.nics] == [device.numa for device in machine.devices]


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown preset 'frontie'; did you mean 'frontier'"):
        preset("frontie")


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "laptop"])
def test_presets_are_options_of_the_trainer_and_the_plan(name: str) -> None:
    settings = Settings(plain(compose([f"topology={name}", "topology.nodes=2"])))
    assert settings.grid == resolve_grid(name, settings.world_size)
    rates = {tier: rate for tier, rate in preset(name).tier_gb_s.items() if rate is not None}
    assert settings["topology"]["bandwidth_gb_s"].items() >= rates.items()
