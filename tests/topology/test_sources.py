"""Sources of a node: what each reader finds, and that whatever a file holds gives a machine or one clear message, soon."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hzero.config import TopologyConfig
from hzero.errors import ConfigError
from hzero.topology import sources
from hzero.topology.node import Device, Link, Nic, Node, packages_of, tiers_of
from hzero.topology.sources import NODES, DeclaredNode, preset, read_node, read_sysfs
from tests.ranks import ROOT
from tests.topology import trees
from tests.topology.hostile import mutated, node_or_error

DUMPS = ROOT.parent / "shared" / "topologies"
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def text(name: str) -> str:
    return (Path(__file__).parent / "texts" / name).read_text()


def read(folder: Path, text: str, name: str = "node") -> Node:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return read_node(str(path))


# KFD


def test_a_frontier_node(tmp_path: Path) -> None:
    machine = read_sysfs(trees.frontier(tmp_path / "sys"))
    assert [device.number for device in machine.devices] == list(range(8))
    assert [device.bus for device in machine.devices] == [f"0000:{bus}:00.0" for bus in trees.FRONTIER_BUSES]
    assert [device.numa for device in machine.devices] == [3, 3, 1, 1, 0, 0, 2, 2]
    assert [device.identity for device in machine.devices] == [f"kfd{node}" for node in range(4, 12)]
    assert {device.kind for device in machine.devices} == {"MI250X"}
    assert machine.devices[3].uuid == "GPU-0000000000000f03"
    assert {(link.a, link.b): link.count for link in machine.links} == trees.FRONTIER_LINKS
    assert all(link.kind == "xgmi" and link.gb_s == 50.0 * (link.count or 0) for link in machine.links)
    assert machine.nics == tuple(Nic(f"hsn{number}", "cxi", 25.0) for number in range(4))
    assert machine.remarks == ()
    for order in ((4, 5, 2, 3, 6, 7, 0, 1), (0, 2, 4, 6, 1, 3, 5, 7)):  # packages follow links, not numbers
        other = read_sysfs(trees.frontier(tmp_path / str(order), order=order))
        packages = {frozenset(order[number] for number in package) for package in packages_of(other)}
        assert packages == {frozenset(pair) for pair in [(0, 1), (2, 3), (4, 5), (6, 7)]}


def test_devices_outside_the_cgroup_are_hidden_but_their_links_are_known(tmp_path: Path) -> None:
    machine = read_sysfs(trees.frontier(tmp_path, unreadable={0, 1, 2, 4, 5, 6, 7}))
    own, *others = machine.devices
    assert (own.number, own.bus, own.hidden) == (0, "0000:ce:00.0", False)
    assert all(device.hidden and not device.bus for device in others)
    counts = {machine.device(link.b).identity: link.count for link in machine.links}
    assert counts == {"kfd6": 4, "kfd5": 1, "kfd11": 1}
    assert len(machine.remarks) == 7 and machine.remarks[0] == "KFD node 4 cannot be read by this process"


def test_old_drivers_single_devices_and_none(tmp_path: Path) -> None:
    old = read_sysfs(trees.frontier(tmp_path / "old", link_mb_s=0))
    assert {(link.a, link.b) for link in old.links} == set(trees.FRONTIER_LINKS)
    assert {(link.count, link.gb_s) for link in old.links} == {(None, None)}
    with pytest.raises(ConfigError, match="ambiguous"):
        packages_of(old)
    one = read_sysfs(trees.write_kfd(tmp_path / "one", [trees.Gpu("03", device=0x740F)], nics={"eno1": 1000}))
    assert [(d.bus, d.kind, d.numa) for d in one.devices] == [("0000:03:00.0", "MI210", 0)]
    assert one.nics == (Nic("eno1", "ethernet", 0.125),)
    assert "no KFD topology" in read_sysfs(tmp_path).remarks[0]
    with pytest.raises(ConfigError, match="nowhere"):
        read_sysfs(tmp_path / "nowhere")


def test_partitions_of_a_module_are_one_package(tmp_path: Path) -> None:
    gpus = [trees.Gpu(bus, device=0x74A1, target=90402) for bus in ("03", "04", "05")]
    trees.write_kfd(tmp_path, gpus, {(0, 1): 1})
    for link in (tmp_path / NODES).glob("*/io_links/*/properties"):  # to the partition of another module
        link.write_text(link.read_text().replace("weight 30", "weight 41"))
    second = tmp_path / NODES / "2/properties"
    second.write_text(second.read_text().replace(f"location_id {4 << 8}", f"location_id {1 << 28 | 3 << 8}"))
    for node in "12":
        link = tmp_path / NODES / node / "io_links/1/properties"
        link.write_text(link.read_text().replace("weight 15", "weight 13"))
    machine = read_sysfs(tmp_path)
    assert [device.bus for device in machine.devices] == ["0000:03:00.0", "0000:03:00.1", "0000:05:00.0"]
    assert {(link.a, link.b): link.count for link in machine.links} == {(0, 1): 1, (0, 2): None, (1, 2): None}
    assert packages_of(machine) == ((0, 1), (2,))


def test_nics_of_the_fabric(tmp_path: Path) -> None:
    nics = {"mlx5_0": 400_000, "mlx5_1": 200_000, "eno1": 1000, "lo": 0}
    machine = read_sysfs(trees.write_kfd(tmp_path, [trees.Gpu("03")], nics=nics))
    assert machine.nics == (Nic("mlx5_0", "rdma", 50.0), Nic("mlx5_1", "rdma", 25.0))
    trees.connect(tmp_path, "mlx5_0", "InfiniBand", subnet=3, manager=0x1C)
    trees.connect(tmp_path, "mlx5_0", "", port=2)
    trees.connect(tmp_path, "mlx5_1", "Ethernet")
    assert [nic.subnets for nic in read_sysfs(tmp_path).nics] == [("ib fe80:0000:0000:0003 0x1c",), ("ethernet",)]


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("5/io_links/1/properties", "node_to 4", "node_to 77", "found node_to 77; expected one of KFD"),
        ("5/io_links/1/properties", "max_bandwidth 200000", "max_bandwidth 100000", "the ends of link 0-1 contradict"),
        ("5/properties", "domain 0", "simd_count 440", "expected a name, once, and a number"),
        ("5/properties", "location_id 50688", "location_id 49408", "0000:c1:00.0 occurs twice"),
    ],
)  # fmt: skip
def test_contradictions_in_sysfs_name_the_file(tmp_path: Path, file: str, old: str, new: str, message: str) -> None:
    path = trees.frontier(tmp_path) / NODES / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ConfigError, match=message) as caught:
        read_sysfs(tmp_path)
    assert str(NODES) in str(caught.value) and "\n" not in str(caught.value)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_change_of_a_tree_gives_a_machine_or_an_error(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root, nics = Path(folder) / "sys", {"mlx5_0": 200_000}
        trees.write_kfd(root, [trees.Gpu("03"), trees.Gpu("04")], {(0, 1): 4}, nics)
        files = [root / NODES / name for name in ("1/properties", "2/properties", "1/io_links/1/properties")]
        files += [root / "class/infiniband/mlx5_0/ports/1/rate", root / "bus/pci/devices/0000:03:00.0/numa_node"]
        file = data.draw(st.sampled_from(files))
        file.write_bytes(data.draw(mutated(file.read_text())))
        node_or_error(root)


# Dumps of RCCL and NCCL

PAIR = text("pair.xml")
SWITCHED = text("switched.xml")


@pytest.mark.parametrize(
    ("name", "devices", "tiers", "gb_s"),
    [
        ("topo_8p1h.xml", 8, {"intra_package": 2, "intra_node": 4},
         {"intra_package": 200.0, "intra_node": 50.0, "inter_node": 12.5}),
        ("topo_16p1h.xml", 16, {"intra_package": 2, "intra_node": 8}, {"intra_package": 200.0, "inter_node": 12.5}),
        ("topo_8p_90a.xml", 8, {"intra_node": 8}, {"intra_node": 50.0}),
        ("topo_8p_940.xml", 8, {"intra_node": 8}, {"intra_node": 64.0, "inter_node": 50.0}),
        ("topo_4p3l_2h.xml", 8, {"intra_hive": 4, "intra_node": 2}, {"intra_hive": 46.0}),
    ],
)  # fmt: skip
def test_recorded_dumps(name: str, devices: int, tiers: dict[str, int], gb_s: dict[str, float]) -> None:
    if not (DUMPS / name).exists():
        pytest.skip("the dumps are not next to this checkout")
    machine = read_node(str(DUMPS / name))
    found = {tier.name: tier for tier in tiers_of(machine)}
    assert len(machine.devices) == devices
    assert {tier.name: tier.size for tier in found.values() if tier.size > 1} == tiers
    assert {level: found[level].gb_s for level in gb_s} == gb_s
    if name == "topo_8p_940.xml":
        rates = {(link.kind, link.count, link.gb_s) for link in machine.links}
        assert len(machine.links) == len(preset("mi300x").links) == 28
        assert rates == {(link.kind, link.count, link.gb_s) for link in preset("mi300x").links}
    if name == "topo_8p1h.xml":
        gcd = (0, 1, 4, 5, 6, 7, 2, 3)  # Frontier's number by the dump's
        pairs = {tuple(sorted((gcd[link.a], gcd[link.b]))): link.count for link in machine.links}
        assert pairs == trees.FRONTIER_LINKS
        assert packages_of(machine) == ((0, 1), (2, 3), (4, 5), (6, 7))


def test_small_dumps(tmp_path: Path) -> None:
    machine = read(tmp_path, PAIR)
    assert [(d.number, d.bus, d.kind, d.numa) for d in machine.devices] == [
        (4, "0000:c1:00.0", "MI250X", 3),
        (5, "0000:c6:00.0", "MI250X", 3),
    ]
    assert machine.links == (Link(4, 5, "xgmi", 4, 200.0),)
    assert machine.nics == (Nic("cxi0", "cxi", 25.0),)
    machine = read(tmp_path, SWITCHED)
    assert machine.links == (Link(0, 1, "nvswitch", 9, 225.0),)
    assert machine.nics == (Nic("eth0", "ethernet", 1.25),)


# NVIDIA


def test_gpus_of_nvidias_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for bus, uuid in (("0000:9d:00.0", "GPU-2"), ("0000:1b:00.0", "GPU-1")):
        (tmp_path / bus).mkdir()
        information = f"Model: \t\t NVIDIA H200\nIRQ:   \t\t 16\nGPU UUID: \t {uuid}\nBus Location: \t {bus}\n"
        (tmp_path / bus / "information").write_text(information)
    monkeypatch.setattr(sources, "_PROCFS", tmp_path)
    monkeypatch.setattr(sources, "read_sysfs", lambda _: Node("sysfs", (), nics=(Nic("eth0", "ethernet", 1.25),)))
    machine = read_node("auto")
    assert [(d.number, d.bus, d.kind, d.uuid) for d in machine.devices] == [
        (0, "0000:1b:00.0", "NVIDIA H200", "GPU-1"),
        (1, "0000:9d:00.0", "NVIDIA H200", "GPU-2"),
    ]
    assert packages_of(machine) == ((0,), (1,)) and machine.nics[0].name == "eth0"
    assert machine.remarks[0].startswith("NVLinks are unknown")


@pytest.mark.parametrize(
    ("good", "old", "new", "message"),
    [
        (PAIR, 'target="0000:c6:00.0"', 'target="0000:aa:00.0"', "found a link to 0000:aa:00.0; expected a gpu of this file"),
        (PAIR, 'count="4"', 'count="2"', "the ends of link 4-5"),
        (PAIR, 'count="4"', 'count="-4"', "xgmi: found count='-4'; expected 1 to 64"),
        (PAIR, 'dev="5"', 'dev="4"', "device 4 is linked to itself"),
        (PAIR, 'busid="0000:c1:00.0"', 'busid="../../etc"', r"found '../../etc'; expected a PCI bus id"),
        (PAIR, "</system>", "", "is not valid XML: .* line 20"),
        (PAIR, "<cpu numaid", '<cpu host_hash="1"/><cpu host_hash="2" numaid', "found 2 hosts|found 3 hosts"),
        (PAIR, "<system", '<!DOCTYPE system [<!ENTITY l0 "lol">]><system', "found a DOCTYPE"),
    ],
)  # fmt: skip
def test_contradictions_in_a_text(tmp_path: Path, good: str, old: str, new: str, message: str) -> None:
    assert old in good
    with pytest.raises(ConfigError, match=message) as caught:
        read(tmp_path, good.replace(old, new, 1))
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


# Declared machines

NODE = text("node.yaml")


def test_every_key_is_read(tmp_path: Path) -> None:
    buses = ("0000:c1:00.0", "0000:c6:00.0", "0000:c9:00.0", "0000:01:00.0")
    machine = Node(
        f"{tmp_path / 'node'} (my node)",
        tuple(Device(n, buses[n], "MI250X", numa=int(n < 2)) for n in range(4)),
        (Link(0, 1, "xgmi", 4, 200.0), Link(0, 2, "xgmi"), Link(2, 3, "xgmi", 4, 200.0)),
        (Nic("hsn0", "cxi", 25.0), Nic("hsn1")),
        ((0, 1), (2, 3)),
        switch_nodes=12,
    )
    assert read(tmp_path, NODE) == machine
    for indent in (None, 1, "\t"):  # JSON, tabs included
        assert read(tmp_path, json.dumps({"topology": yaml.safe_load(NODE)}, indent=indent)) == machine
    assert len(read(tmp_path, "packages: [[0, 1], [2, 3]]").devices) == 4
    assert len(read(tmp_path, "buses: ['c1:00.0', 'c2:00.0']").devices) == 2
    assert len(read(tmp_path, "devices: 3\nlinks: [{kind: nvswitch, pairs: all}]").links) == 3


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("devices: 2\nlink: []", "found key 'link'; expected name, kind, devices"),
        ("devices: 2\nkind: a\ndevices: 3", "a key occurs twice"),
        ("devices: 1025", "devices: found 1025"),
        ("kind: a", "devices: missing; expected their number"),
        ("buses: ['c1:00.0', 'C1:00.0']", "PCI bus id 0000:c1:00.0 occurs twice"),
        ("buses: [01:00.0]", "buses.0: found 60.0; expected a valid string"),
        ("devices: 2\nbuses: ['c1:00.0']", "buses: found 1; expected one for each of 2 devices"),
        ("devices: 2\npackages: [[0, 1], [2]]", "packages [[0, 1], [2]] do not hold each of the devices 0, 1 once"),
        ("devices: 2\nlinks: [{pairs: [[0, 2]]}]", "link 0-2: expected two of the devices 0, 1"),
        ("devices: 2\nlinks: [{kind: xgm, pairs: all}]", "found 'xgm'; expected xgmi, nvlink, nvswitch or pcie (did"),
        ("devices: 2\nlinks: [{gb_s: .inf, pairs: all}]", "links.0.gb_s: found inf"),
        ("packages_per_node: 2", "declares a grid (packages_per_node); expected a node"),
        ("poem: Shall I compare thee", "found no known kind of file; expected an XML dump of RCCL or NCCL"),
        ("devices: &a 2\nnuma: *a", "line 1: is neither YAML nor JSON that can be used: found a reference"),
        ("a: &a [x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefghij", "bcdefghijk")), "a reference"),
        ("[" * 9_000, "nested too deeply"),
        ("#" * 131_073, "larger than 131,072 bytes"),
    ],
)  # fmt: skip
def test_a_wrong_file_says_where_and_what_is_possible(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    message = str(caught.value)
    assert message.startswith(str(tmp_path / "node")) and "\n" not in message and len(message) < 1000
    assert says in message


_NAMES = st.sampled_from([*DeclaredNode.model_fields, *TopologyConfig.model_fields, "pairs", "count", "0", "x"])
_LEAVES = st.sampled_from([None, True, -1, 0, 1, 3, 0.5, float("nan"), "all", "xgmi", "c1:00.0", "", "a\n", "\x1b[2J"])
_TREES = _LEAVES | st.lists(_LEAVES, max_size=3) | st.lists(st.lists(_LEAVES, max_size=3), max_size=3)
_TREES |= st.dictionaries(_NAMES, _TREES, max_size=4) | st.lists(
    st.dictionaries(_NAMES, _TREES, max_size=3), max_size=3
)
_FILES = st.one_of(
    *map(mutated, (PAIR, SWITCHED, NODE)),
    st.binary(max_size=200),
    st.dictionaries(_NAMES, _TREES, max_size=5).map(lambda tree: json.dumps({"devices": 2, **tree}).encode()),
    st.sampled_from([b"\0" * 2**20, b"<" * 2**20, b"<gpu>" * 2**18, b"\x1b[" + b"1;" * 2**19, b"\xff\xfe" * 2**19]),
)


@settings(quick, max_examples=120)
@given(content=_FILES)
def test_any_file_gives_a_machine_or_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    node_or_error(tmp_path / "file")
