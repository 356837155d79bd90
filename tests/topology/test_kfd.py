"""The KFD reader on trees of nodes as the kernel writes them, and on broken ones."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hzero.topology.readers import kfd, read_file
from hzero.topology.tiers import packages_of, tiers_of
from hzero.validation import ConfigError
from tests.topology import trees
from tests.topology.hostile import machine_or_error, mutated

NODES = "class/kfd/kfd/topology/nodes"
OLCF = (4, 5, 2, 3, 6, 7, 0, 1)


def test_a_frontier_node(tmp_path: Path) -> None:
    machine = kfd.read(trees.frontier(tmp_path))
    assert [device.number for device in machine.devices] == list(range(8))
    assert [device.bus for device in machine.devices] == [f"0000:{bus}:00.0" for bus in trees.FRONTIER_BUSES]
    assert [device.numa for device in machine.devices] == [3, 3, 1, 1, 0, 0, 2, 2]
    assert [device.nic for device in machine.devices] == [f"hsn{gcd // 2}" for gcd in range(8)]
    assert [device.node for device in machine.devices] == [f"kfd{node}" for node in range(4, 12)]
    assert {device.kind for device in machine.devices} == {"MI250X"}
    assert machine.devices[3].uuid == "GPU-0000000000000f03"
    assert {(link.a, link.b): link.count for link in machine.links} == trees.FRONTIER_LINKS
    assert all(link.kind == "xgmi" and link.gb_s == 50.0 * (link.count or 0) for link in machine.links)
    assert [(nic.name, nic.kind, nic.gb_s, nic.numa) for nic in machine.nics] == [
        (f"hsn{package}", "cxi", 25.0, numa) for package, numa in enumerate((3, 1, 0, 2))
    ]
    assert machine.remarks == ()
    assert [(tier.name, tier.size) for tier in tiers_of(machine) if tier.size > 1] == [("gcd", 2), ("gpu", 4)]


@pytest.mark.parametrize("order", [OLCF, (0, 2, 4, 6, 1, 3, 5, 7), (7, 6, 5, 4, 3, 2, 1, 0)])
def test_packages_follow_links_not_numbers(tmp_path: Path, order: tuple[int, ...]) -> None:
    machine = kfd.read(trees.frontier(tmp_path, order=order))
    packages = {frozenset(order[number] for number in package) for package in packages_of(machine)}
    assert packages == {frozenset(pair) for pair in [(0, 1), (2, 3), (4, 5), (6, 7)]}


def test_a_missing_gcd(tmp_path: Path) -> None:
    machine = kfd.read(trees.frontier(tmp_path, missing={5}))
    assert [device.bus[5:7] for device in machine.devices] == ["c1", "c6", "c9", "ce", "d1", "d9", "de"]
    assert packages_of(machine) == ((0, 1), (2, 3), (4,), (5, 6))


def test_devices_outside_the_cgroup_are_hidden_but_their_links_are_known(tmp_path: Path) -> None:
    machine = kfd.read(trees.frontier(tmp_path, unreadable={0, 1, 2, 4, 5, 6, 7}))
    own, *others = machine.devices
    assert (own.number, own.bus, own.hidden) == (0, "0000:ce:00.0", False)
    assert all(device.hidden and not device.bus for device in others)
    assert [device.node for device in others] == ["kfd4", "kfd5", "kfd6", "kfd8", "kfd9", "kfd10", "kfd11"]
    counts = {machine.device(link.b).node: link.count for link in machine.links}
    assert counts == {"kfd6": 4, "kfd5": 1, "kfd11": 1}
    assert len(machine.remarks) == 7 and machine.remarks[0].startswith("KFD node 4 cannot be read (")


def test_an_empty_node_is_hidden(tmp_path: Path) -> None:
    trees.one_gpu(tmp_path)
    (tmp_path / NODES / "1/properties").write_text("")
    machine = kfd.read(tmp_path)
    assert machine.remarks == ("KFD node 1 is empty",)
    assert [device.hidden for device in machine.devices] == [True]


def test_drivers_without_bandwidths_leave_the_counts_open(tmp_path: Path) -> None:
    machine = kfd.read(trees.frontier(tmp_path, link_mb_s=0))
    assert {(link.a, link.b) for link in machine.links} == set(trees.FRONTIER_LINKS)
    assert {(link.count, link.gb_s) for link in machine.links} == {(None, None)}
    with pytest.raises(ConfigError, match="ambiguous"):
        packages_of(machine)


def test_single_devices_and_none(tmp_path: Path) -> None:
    (device,) = kfd.read(trees.one_gpu(tmp_path / "one")).devices
    assert (device.bus, device.kind, device.nic, device.numa) == ("0000:03:00.0", "MI210", "eno1", 0)
    assert kfd.read(trees.no_gpu(tmp_path / "none")).devices == ()


def test_a_node_without_the_driver_has_no_devices(tmp_path: Path) -> None:
    machine = kfd.read(tmp_path)
    assert machine.devices == () and "no KFD topology" in machine.remarks[0]
    with pytest.raises(ConfigError, match="nowhere"):
        kfd.read(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("device", "target", "kind"),
    [(0x74A1, 90402, "MI300X"), (0x74A0, 90402, "MI300A"), (0x738C, 90008, "MI100"), (0x1, 90010, "gfx90a")],
)
def test_kinds(tmp_path: Path, device: int, target: int, kind: str) -> None:
    trees.write_kfd(tmp_path, [trees.Gpu("03", "00", device=device, target=target)])
    assert kfd.read(tmp_path).devices[0].kind == kind


def test_partitions_of_a_module_are_one_package(tmp_path: Path) -> None:
    gpus = [trees.Gpu(bus, "00", device=0x74A1, target=90402) for bus in ("03", "04", "05")]
    trees.write_kfd(tmp_path, gpus, {(0, 1): 1})
    for link in (tmp_path / NODES).glob("*/io_links/*/properties"):  # to the partition of another module
        link.write_text(link.read_text().replace("weight 30", "weight 41"))
    second = tmp_path / NODES / "2/properties"
    second.write_text(second.read_text().replace(f"location_id {4 << 8}", f"location_id {1 << 28 | 3 << 8}"))
    for node in "12":
        link = tmp_path / NODES / node / "io_links/1/properties"
        link.write_text(link.read_text().replace("weight 15", "weight 13"))
    machine = kfd.read(tmp_path)
    assert [device.bus for device in machine.devices] == ["0000:03:00.0", "0000:03:00.1", "0000:05:00.0"]
    assert [device.numa for device in machine.devices] == [0, 0, 0]
    assert {(link.a, link.b): link.count for link in machine.links} == {(0, 1): 1, (0, 2): None, (1, 2): None}
    assert packages_of(machine) == ((0, 1), (2,))


def test_nics(tmp_path: Path) -> None:
    gpus = [trees.Gpu("03", "00"), trees.Gpu("83", "80", numa=1), trees.Gpu("c3", "c0", numa=1)]
    nics = [
        trees.Interface("ens1", "05", "00", mbit_s=400_000, rdma="mlx5_0"),
        trees.Interface("ens2", "85", "80", numa=1, rdma="mlx5_1"),
        trees.Interface("eno1", "86", "80", numa=1, mbit_s=1000),
        trees.Interface("lo"),
        trees.Interface("veth0"),
    ]
    machine = kfd.read(trees.write_kfd(tmp_path, gpus, interfaces=nics))
    assert [(nic.name, nic.kind, nic.gb_s) for nic in machine.nics] == [("mlx5_0", "ib", 50.0), ("mlx5_1", "ib", 25.0)]
    assert [device.nic for device in machine.devices] == ["mlx5_0", "mlx5_1", "mlx5_1"]  # the last by NUMA alone
    assert machine.remarks == ("eno1: Ethernet, left out next to the NICs of the fabric",)


def test_of_equally_near_nics_none_is_guessed(tmp_path: Path) -> None:
    nics = [trees.Interface(f"ens{index}", f"0{index}", "00") for index in (5, 6)]
    machine = kfd.read(trees.write_kfd(tmp_path, [trees.Gpu("03", "00")], interfaces=nics))
    assert len(machine.nics) == 2 and machine.devices[0].nic == ""


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("5/io_links/1/properties", "node_to 4", "node_to 77", "77, which is not there"),
        ("5/io_links/1/properties", "node_to 4", "node_to 5", "linked to itself"),
        ("5/io_links/1/properties", "node_from 5", "node_from 6", "node_from 6, expected 5"),
        ("5/io_links/1/properties", "max_bandwidth 200000", "max_bandwidth 199999", "max_bandwidth 199999"),
        ("5/io_links/1/properties", "max_bandwidth 200000", "max_bandwidth 100000", "contradict each other"),
        (
            "5/io_links/1/properties",
            "min_bandwidth 50000",
            "min_bandwidth -1",
            "properties:5: found min_bandwidth '-1'",
        ),
        ("5/properties", "simd_count 440", "simd_count many", "properties:2: found simd_count 'many'"),
        ("5/properties", "simd_count 440", "simd_count", "expected a name and a number"),
        ("5/properties", "domain 0", "simd_count 440", "simd_count occurs twice"),
        ("5/properties", "location_id 50688", "location_id 49408", "0000:c1:00.0 occurs twice"),
        ("5/properties", "location_id 50688", "location_id 99999999", "found location_id 99999999"),
    ],
)
def test_contradictions_name_the_file(tmp_path: Path, file: str, old: str, new: str, message: str) -> None:
    path = trees.frontier(tmp_path) / NODES / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ConfigError, match=message) as caught:
        kfd.read(tmp_path)
    assert NODES in str(caught.value) and "\n" not in str(caught.value)


def test_a_pipe_in_the_tree_does_not_hang(tmp_path: Path) -> None:
    path = trees.one_gpu(tmp_path) / NODES / "1/properties"
    path.unlink()
    os.mkfifo(path)
    assert kfd.read(tmp_path).remarks == ("KFD node 1 is empty",)


@settings(max_examples=25)
@given(data=st.data())
def test_any_change_of_a_file_gives_a_machine_or_an_error(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = trees.write_kfd(
            Path(folder) / "sys",
            [trees.Gpu("03", "00"), trees.Gpu("04", "00")],
            {(0, 1): 4},
            [trees.Interface("ens1", "05", "00", rdma="mlx5_0")],
        )
        files = [root / NODES / name for name in ("1/properties", "2/properties", "1/io_links/1/properties")]
        files += [root / "class/net/ens1/speed", root / "class/infiniband/mlx5_0/ports/1/rate"]
        files += [root / "devices/pci0000:00/0000:00:03.1/0000:03:00.0/numa_node"]
        file = data.draw(st.sampled_from(files))
        file.write_bytes(data.draw(mutated(file.read_text())))
        machine_or_error(read_file, root)


@pytest.mark.parametrize("noise", [b"\xff" * 2**20, b"a 1\n" * 2**18, b"9" * 2**20, b"simd_count " + b"9" * 5000])
def test_noise(tmp_path: Path, noise: bytes) -> None:
    (trees.one_gpu(tmp_path) / NODES / "1/properties").write_bytes(noise)
    assert machine_or_error(kfd.read, tmp_path) is None
