"""Declared machines: what is read, and that whatever stands in a file gives a machine or one clear message."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from hzero.topology.machine import Device, Link, Machine, Nic
from hzero.topology.readers import declared
from hzero.topology.tiers import tiers_of
from hzero.validation import ConfigError
from tests.ranks import ROOT

NODE = """\
name: my node
kind: MI250X
devices: 4
packages: [[0, 1], [2, 3]]
buses: ["c1:00.0", 00000000:C6:00.0, "c9:00.0", "01:00.0"]
numa: {0: [2, 3], 1: [0, 1]}
links:
  - {kind: xgmi, count: 4, gb_s: 200, pairs: [[0, 1], [3, 2]]}
  - {kind: xgmi, pairs: [[0, 2]]}
nics:
  - {name: hsn0, kind: cxi, gb_s: 25, bus: "c5:00.0", numa: 1, devices: [0, 1]}
  - {name: hsn1}
tier_gb_s: {gcd: 200, gpu: 50, node: null}
"""


def _read(folder: Path, text: str, name: str = "node.yaml") -> Machine:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return declared.read(path)


def _message(folder: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        _read(folder, text)
    message = str(caught.value)
    assert message.startswith(f"{folder / 'node.yaml'}") and "\n" not in message and len(message) < 1000
    return message.removeprefix(f"{folder / 'node.yaml'}").lstrip(":. ")


def test_every_key_is_read(tmp_path: Path) -> None:
    machine = _read(tmp_path, NODE)
    buses = ("0000:c1:00.0", "0000:c6:00.0", "0000:c9:00.0", "0000:01:00.0")
    assert machine == Machine(
        f"{tmp_path / 'node.yaml'} (my node)",
        tuple(Device(n, buses[n], "MI250X", numa=int(n < 2), nic="hsn0" if n < 2 else "") for n in range(4)),
        (Link(0, 1, "xgmi", 4, 200.0), Link(0, 2, "xgmi"), Link(2, 3, "xgmi", 4, 200.0)),
        (Nic("hsn0", "0000:c5:00.0", "cxi", 25.0, 1), Nic("hsn1")),
        ((0, 1), (2, 3)),
        {"gcd": 200.0, "gpu": 50.0},
    )


def test_json_is_the_same_machine(tmp_path: Path) -> None:
    content = yaml.safe_load(NODE)
    for indent in (None, 1, "\t"):
        machine = _read(tmp_path, json.dumps({"topology": content}, indent=indent))
        assert machine == _read(tmp_path, NODE)


def test_devices_as_blocks_and_all_pairs(tmp_path: Path) -> None:
    machine = _read(
        tmp_path,
        "kind: H200\n"
        "devices:\n"
        "  - {number: 3, bus: 'c1:00.0', numa: 0, uuid: GPU-1}\n"
        "  - {number: 5, kind: A100, module: m1, nic: mlx5_0}\n"
        "  - {number: 9}\n"
        "nics: [{name: mlx5_0}]\n"
        "links: [{kind: nvswitch, count: 18, gb_s: 450, pairs: all}]\n",
    )
    assert machine.devices == (
        Device(3, "0000:c1:00.0", "H200", numa=0, uuid="GPU-1"),
        Device(5, kind="A100", module="m1", nic="mlx5_0"),
        Device(9, kind="H200"),
    )
    assert [(link.a, link.b, link.count) for link in machine.links] == [(3, 5, 18), (3, 9, 18), (5, 9, 18)]
    assert len(_read(tmp_path, "packages: [[0, 1], [2, 3]]").devices) == 4
    assert len(_read(tmp_path, "buses: ['c1:00.0', 'c2:00.0']").devices) == 2


def test_the_older_grid_file_is_a_machine_without_links(tmp_path: Path) -> None:
    machine = declared.read(ROOT / "conf" / "topology" / "frontier.yaml")
    assert machine.packages == ((0, 1), (2, 3), (4, 5), (6, 7)) and not machine.links
    assert machine.tier_gb_s == {"gcd": 200.0, "gpu": 50.0, "node": 12.5}
    assert {tier.name: tier.size for tier in tiers_of(machine)}["gpu"] == 4
    machine = _read(tmp_path, "topology: {name: two, nodes: 2, gpus_per_node: 3}")
    assert machine.packages == ((0,), (1,), (2,)) and "2 nodes" in machine.remarks[1]
    assert len(declared.read(ROOT / "conf" / "topology" / "emulated_2x2x2.yaml").devices) == 4


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("devices: 2\nlink: []", "unknown key 'link'; did you mean 'links'? Possible: name, kind, devices"),
        ("devices: 2\nkind: a\ndevices: 3", "line 3: the key 'devices' occurs twice"),
        ("devices: 2\nnuma: {0: [0], 0x0: [1]}", "line 2: the key '0x0' occurs twice"),
        ('{"devices": 2, "numa": {"0": [0], "00": [1]}}', "numa.00: found '00'"),
        ("devices: 2\n<<: {kind: a}", "line 2: found a merge (<<)"),
        ("devices: -2", "devices: found -2, expected a list of devices or their number from 0 to 1024"),
        ("devices: two", "devices: found 'two'; input should be a valid list"),
        ("devices: 1025", "devices: found 1025"),
        ("devices: -1", "devices: found -1"),
        ("devices: true", "devices: found True"),
        ("kind: a", "devices: missing; expected a list of devices or their number"),
        ("devices: [{number: 1}, {number: 1}]", "devices.1: device 1 occurs twice"),
        ("devices: [{bus: 'c1:00.0'}, {bus: 'C1:00.0'}]", "PCI bus id 0000:c1:00.0 occurs twice"),
        ("devices: [{bus: c1}]", "devices.0.bus: found 'c1', expected a PCI bus id such as"),
        ("devices: [{bus: 01:00.0}]", "devices.0.bus: found 60.0, expected a PCI bus id in quotes, such as"),
        ("devices: [{number: 0, bs: 1}]", "devices.0: unknown key 'bs'; did you mean 'bus'?"),
        ("devices: 2\nbuses: ['c1:00.0']", "buses: found 1, expected one for each of 2 devices"),
        ("devices: [{bus: 'c1:00.0'}]\nbuses: ['c2:00.0']", "buses: device 0 has another bus elsewhere"),
        ("devices: 2\npackages: [[0, 1], [2]]", "packages [[0, 1], [2]] do not hold each of the devices 0, 1 once"),
        ("devices: 3\npackages: [[0, 1]]", "do not hold each of the devices 0, 1, 2 once"),
        ("devices: 2\npackages: [[0, 0], [1]]", "do not hold each of the devices 0, 1 once"),
        ("devices: 2\npackages: 3", "packages: found 3; input should be a valid list"),
        ("devices: 2\nlinks: [{pairs: [[0, 1], [1, 0]]}]", "link 0-1 occurs twice"),
        ("devices: 2\nlinks:\n  - {pairs: [[0, 2]]}", "link 0-2 leads to device 2, which is not there; devices: 0, 1"),
        ("devices: 2\nlinks: [{pairs: [[0, 0]]}]", "link 0-0: expected two devices"),
        ("devices: 2\nlinks: [{pairs: [[0]]}]", "links.0.pairs.0: found [0]; list should have at least 2 items"),
        ("devices: 2\nlinks: [{pairs: some}]", "links.0.pairs: found 'some'; input should be a valid list"),
        ("devices: 2\nlinks: [{kind: xgmi}]", "links.0.pairs: missing"),
        ("devices: 2\nlinks: [{kind: xgm, pairs: all}]", "unknown value 'xgm'; did you mean 'xgmi'? Possible: xgmi, nvlink"),
        ("devices: 2\nlinks: [{count: -4, pairs: all}]", "links.0.count: found -4; input should be greater than"),
        ("devices: 2\nlinks: [{count: 1.5, pairs: all}]", "links.0.count: found 1.5"),
        ("devices: 2\nlinks: [{gb_s: 0, pairs: all}]", "links.0.gb_s: found 0; input should be greater than 0"),
        ("devices: 2\nlinks: [{gb_s: .inf, pairs: all}]", "links.0.gb_s: found inf"),
        ("devices: 2\nlinks: [{gb_s: 9e999, pairs: all}]", "links.0.gb_s: found '9e999'"),
        ("devices: 2\nnics: [{kind: cxi}]", "nics.0.name: missing"),
        ("devices: 2\nnics: [{name: a}, {name: a}]", "nics: found a, a; expected each once"),
        ("devices: [{nic: b}]\nnics: [{name: a}]", "nics: found a; expected each once, and all that devices name"),
        ("devices: 2\nnics: [{name: a, devices: [0]}, {name: b, devices: [0]}]", "nics.1.devices: device 0 has another nic"),
        ("devices: 2\nnics: [{name: a, devices: [2]}]", "nics.0.devices: found device 2, possible: 0, 1"),
        ("devices: 2\nnuma: {zero: [0]}", "numa.zero: found 'zero'; input should be a valid integer"),
        ("devices: 2\nnuma: {0: [0], 1: [0]}", "numa.1: device 0 has another numa elsewhere"),
        ("devices: 2\ntier_gb_s: {gdc: 1}", "unknown key 'gdc'; did you mean 'gcd'? Possible: gcd, hive, gpu, node, cluster"),
        ("devices: 2\ntier_gb_s: {gcd: fast}", "tier_gb_s.gcd: found 'fast'"),
        ("devices: 2\nname: [1]", "name: found [1]; input should be a valid string"),
        ('devices: 2\nname: "a\\nb"', "name: found 'a\\nb', expected printable characters"),
        ("gpus_per_node: 2\nlinks: []", "unknown key 'links'"),
        ("gpus_per_node: 2\ngcds_per_gpu: x", "gcds_per_gpu: found 'x'"),
        ("gpus_per_node: 900\ngcds_per_gpu: 2", "is 1800, expected at most 1024 devices"),
        ("nodes: 2", "gpus_per_node: missing"),
        ("gpus_per_node: 2\norder: [a]", "expected node, gpu and gcd in some order"),
        ("", "is of no known kind; readable are: an XML dump"),
        ("- 1", "is of no known kind"),
        ('{"card0": {"PCI Bus": "0000:C1:00.0"}, "system": {}}', "is of no known kind; readable are: an XML dump"),
        ('{"card0": {"PCI Bus": "0000:C1:00.0"}}\n{"system": {}}', "is neither YAML nor JSON"),
        ("devices: [", "is neither YAML nor JSON"),
        ("devices: 2\n---\ndevices: 3", "line 2: is neither YAML nor JSON: but found another document"),
        ("devices: &a 2\nnuma: *a", "line 1: found a reference"),
        ("devices: !!python/object:os.system 2", "could not determine a constructor for the tag"),
        ("[1]: 2", "found unhashable key"),
        ("devices: \x00", "is neither YAML nor JSON"),
    ],
)  # fmt: skip
def test_a_wrong_file_says_where_and_what_is_possible(tmp_path: Path, text: str, says: str) -> None:
    assert says in _message(tmp_path, text)


def test_hostile_files_end_soon(tmp_path: Path) -> None:
    bomb = "a: &a [x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}, *{a}]\n" for a, b in zip("abcdefghij", "bcdefghijk"))
    begun = time.process_time()
    assert "a reference" in _message(tmp_path, bomb)
    for deep in ("[" * 100_000, "devices: " + "{a: " * 20_000, "".join(" " * i + "a:\n" for i in range(400))):
        assert "nested too deeply" in _message(tmp_path, deep)
    assert "found [1, 1" in _message(tmp_path, "name: [" + "1," * 10_000 + "]")
    assert "the key 'a9' occurs twice" in _message(
        tmp_path, "{" + ",".join(f"a{n}: 1" for n in range(2000)) + ", a9: 1}"
    )
    assert "larger than 131072 bytes" in _message(tmp_path, "#" * 131_073)
    assert "devices" in _message(tmp_path, "devices: " + "9" * 4000)
    assert time.process_time() - begun < 30
    (tmp_path / "node.yaml").write_bytes(b"devices: 2\nname: \xff\n")
    with pytest.raises(ConfigError, match="byte 17 is not UTF-8"):
        declared.read(tmp_path / "node.yaml")
    for path, says in ((tmp_path, "not a regular file"), (tmp_path / "none.yaml", "no such file")):
        with pytest.raises(ConfigError, match=says):
            declared.read(path)


def _fuzz(folder: Path, data: bytes) -> None:
    path = folder / "fuzzed.yaml"
    path.write_bytes(data)
    try:
        machine = declared.read(path)
    except ConfigError as error:
        assert str(path) in str(error) and "\n" not in str(error)
    else:
        assert isinstance(machine, Machine)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@settings(max_examples=60)
@given(data=st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_noise(folder: Path, data: bytes) -> None:
    _fuzz(folder, data)


@settings(max_examples=120)
@given(
    at=st.integers(0, len(NODE)), cut=st.integers(0, 12), put=st.text("0123456789-[]{}:,&*!'\"\n \t#e.~x", max_size=4)
)
def test_a_file_with_a_few_characters_changed(folder: Path, at: int, cut: int, put: str) -> None:
    _fuzz(folder, (NODE[:at] + put + NODE[at + cut :]).encode())


_NAMES = st.sampled_from(
    [
        *declared.DeclaredMachine.model_fields,
        *declared.DeclaredGrid.model_fields,
        "pairs",
        "count",
        "bus",
        "number",
        "0",
        "x",
    ]
)
_LEAVES = st.sampled_from([None, True, -1, 0, 1, 3, 0.5, float("nan"), "all", "xgmi", "c1:00.0", "", "a\n"])
_TREES = _LEAVES | st.lists(_LEAVES, max_size=3) | st.lists(st.lists(_LEAVES, max_size=3), max_size=3)
_TREES |= st.dictionaries(_NAMES, _TREES, max_size=4) | st.lists(
    st.dictionaries(_NAMES, _TREES, max_size=3), max_size=3
)


@settings(max_examples=100)
@given(tree=st.dictionaries(_NAMES, _TREES, max_size=5), devices=st.integers(0, 4))
def test_any_tree_of_known_keys(folder: Path, tree: dict[str, object], devices: int) -> None:
    tree.setdefault("devices", devices)
    _fuzz(folder, json.dumps(tree).encode())
