"""Discovery: the device of a rank, what ranks' reports add up to, and the exchange that names who did not come."""

from __future__ import annotations

import random
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hzero.config import BASE_TIERS, TIERS
from hzero.errors import ConfigError
from hzero.topology.discovery import (
    Discovery,
    Exchange,
    Place,
    RankReport,
    assemble,
    discover,
    grid_of,
    merged_node,
    own_device,
    runtime_bus_id,
    visible_devices,
    with_bus,
)
from hzero.topology.node import AmbiguousTopologyError, Device, Link, Node
from tests.topology import trees

torch = pytest.importorskip("torch")
from torch.distributed import HashStore  # noqa: E402

#: GCDs by local rank with `--gpu-bind=closest` (OLCF user guide).
OLCF = (4, 5, 2, 3, 6, 7, 0, 1)
BUSES = [f"0000:{bus}:00.0" for bus in trees.FRONTIER_BUSES]
GCDS = [Device(n, bus, "MI250X", uuid=f"GPU-{0x7A5C30E2F1B40D00 + 0x1000000 * n:016x}") for n, bus in enumerate(BUSES)]
H200S = [
    Device(n, bus, "NVIDIA H200", uuid=f"GPU-{n}932f937-d72c-4106-c12f-20bd9faed9f6") for n, bus in enumerate(BUSES)
]


def on_threads(world: int, act: Callable[[int], Any]) -> list[Any]:
    """What `act` returns or raises, a thread for each rank; a rank that hangs fails."""
    results: list[Any] = ["hangs"] * world

    def run(rank: int) -> None:
        try:
            results[rank] = act(rank)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


# The device of a rank


def seen(environ: dict[str, str], devices: list[Device]) -> list[int]:
    return [device.number for device in visible_devices(environ, devices)]


@given(st.permutations(range(8)), st.integers(1, 8), st.data(), st.booleans())
def test_hip_counts_what_rocr_leaves(order: list[int], count: int, data: st.DataObject, by_uuid: bool) -> None:
    rocr = order[:count]
    hip = data.draw(st.lists(st.integers(0, count - 1), unique=True))
    environ = {"ROCR_VISIBLE_DEVICES": ", ".join(GCDS[n].uuid if by_uuid else str(n) for n in rocr)}
    assert seen(environ, GCDS) == rocr
    second = data.draw(st.sampled_from(["HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"]))
    assert seen({**environ, second: ",".join(map(str, hip))}, GCDS) == [rocr[index] for index in hip]


def test_lists() -> None:
    assert seen({}, GCDS) == list(range(8)) and seen({"ROCR_VISIBLE_DEVICES": ""}, GCDS) == []
    assert seen({"ROCR_VISIBLE_DEVICES": "5,-1,2"}, GCDS) == [5]
    assert seen({"CUDA_VISIBLE_DEVICES": "GPU-3932F9,0"}, H200S) == [3, 0]
    assert seen({"CUDA_VISIBLE_DEVICES": "1"}, [Device(3), Device(7)]) == [7], "a source without kinds"
    for entry, says in (
        ("8", "no devices"),
        ("GPU-7a5c", "8 devices"),
        ("1,1", "twice"),
        ("1,,2", "found entry '', which names no devices"),
        ("MIG-GPU-0932f937/1/2", "no devices"),
    ):
        with pytest.raises(ConfigError, match=says) as raised:
            visible_devices({"ROCR_VISIBLE_DEVICES": entry}, GCDS)
        assert f"ROCR_VISIBLE_DEVICES={entry!r}" in str(raised.value)


def test_the_runtime_decides_and_nothing_is_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node("test", tuple(GCDS))
    properties = [SimpleNamespace(pci_domain_id=0, pci_bus_id=0xC9, pci_device_id=0), SimpleNamespace(name="old")]
    cuda = SimpleNamespace(
        is_available=lambda: True, device_count=lambda: 2, get_device_properties=properties.__getitem__
    )
    with mock.patch.object(torch, "cuda", cuda):
        assert runtime_bus_id(0) == "0000:c9:00.0" and runtime_bus_id(1) is None and runtime_bus_id(2) is None
        # A list that this source cannot read does not matter then.
        own = own_device(node, {"LOCAL_RANK": "0", "ROCR_VISIBLE_DEVICES": "GPU-beef"})
        assert own is not None and own.number == 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"index 2 \(LOCAL_RANK\) among the 2 visible .*='4,5'\) of 8"):
        own_device(node, {"ROCR_VISIBLE_DEVICES": "4,5", "LOCAL_RANK": "2"})
    with pytest.raises(ConfigError, match=r"0000:aa:00.0 in torch, which no devices have; expected one of 0000:c1"):
        with_bus(GCDS, "0000:aa:00.0")
    # torch states no function: it finds a device whose function is not 0, but not one of several.
    assert with_bus([Device(0, "0000:01:00.1")], "0000:01:00.0").number == 0
    with pytest.raises(ConfigError, match="which 2 devices"):
        with_bus([Device(n, f"0000:01:00.{n + 1}") for n in range(2)], "0000:01:00.0")


# What reports add up to


def node(see: set[int] | None = None) -> Node:
    """A node of four MI250X; of the devices that are not in ``see`` only the number is known."""
    visible = set(range(8)) if see is None else see
    devices = [
        Device(i, BUSES[i], "gfx90a", node=f"kfd{i}") if i in visible else Device(i, node=f"kfd{i}", hidden=True)
        for i in range(8)
    ]
    links = [Link(a, b, "xgmi", n, 50.0 * n) for (a, b), n in trees.FRONTIER_LINKS.items() if {a, b} & visible]
    return Node("test", tuple(devices), tuple(links))


def reports(machines: list[Node], devices: list[int]) -> list[RankReport]:
    """Of ranks 0.. on ``devices``, each from its own view of the node."""
    return [
        RankReport.of(rank, "n", machine, machine.device(device))
        for rank, (machine, device) in enumerate(zip(machines, devices))
    ]


def places(said: list[RankReport]) -> list[tuple[int, int]]:
    return [(place.package, place.device) for place in assemble(said).places]


@pytest.mark.parametrize("order", [list(range(8)), list(OLCF)])
def test_whole_views_and_views_of_one_device_give_the_same_places(order: list[int]) -> None:
    whole = places(reports([node()] * 8, order))
    assert whole == places(reports([node({device}) for device in order], order))
    assert whole == [divmod(device, 2) for device in order]
    hidden = merged_node(reports([node({device}) for device in (1, 6)], [1, 6]))
    assert sum(device.hidden for device in hidden.devices) == len(hidden.devices) - 2
    packages = [package for package, _ in places(reports([node({device}) for device in (1, 3, 4, 6)], [1, 3, 4, 6]))]
    assert sorted(set(packages)) == packages, "packages are known where only one of their devices has a rank"


def test_reports_that_cannot_be_true_are_refused() -> None:
    said = reports([node()] * 2, [0, 1])
    thinner = reports([Node("test", node().devices, (Link(0, 1, "xgmi", 2, 100.0),))] * 2, [0, 1])
    with pytest.raises(ConfigError, match=r"node n: the ends of link 0-1 contradict: 4 xgmi links .*2 xgmi links"):
        assemble([said[0], thinner[1]])
    with pytest.raises(ConfigError, match=r"found no device on ranks \[1\] of node n"):
        assemble([said[0], RankReport(1, "n", None)])
    ring = [Link(a, b, "xgmi", 2) for a, b in ((0, 1), (1, 2), (2, 3), (0, 3))] + [Link(0, 2, "xgmi", 1)]
    with pytest.raises(AmbiguousTopologyError, match="node n: ambiguous"):
        assemble(reports([Node("test", tuple(Device(i) for i in range(4)), tuple(ring))] * 4, [0, 1, 2, 3]))


def test_declared_packages_count() -> None:
    flat = Node("test", tuple(Device(i) for i in range(4)), packages=((0, 2), (1, 3)))
    assert places(reports([flat] * 4, [0, 1, 2, 3])) == [(0, 0), (1, 0), (0, 1), (1, 1)]
    many = Node("test", tuple(Device(i) for i in range(24)), packages=tuple((i, i + 12) for i in range(12)))
    assert places(reports([many] * 24, list(range(24)))) == [(i % 12, i // 12) for i in range(24)]


# 16 ranks on 2 pretended Frontier nodes, under every way of launching

WORLD, NODES, LOCAL = 16, 2, 8
SCRAMBLED = random.Random(4).sample(range(WORLD), WORLD)


def _list(variable: str, *numbers: int) -> dict[str, str]:
    return {variable: ",".join(map(str, numbers))}


#: Node and environment of a rank. SEES: a task's cgroup hides all other devices.
STYLES: dict[str, Callable[[int], tuple[int, dict[str, str]]]] = {
    # srun -n16 --gpus-per-task=1 --gpu-bind=closest: all ranks see one device; the same with -m cyclic
    "one device": lambda r: (r // LOCAL, {**_list("ROCR_VISIBLE_DEVICES", OLCF[r % LOCAL]), "LOCAL_RANK": str(r % LOCAL)}),
    "cyclic": lambda r: (r % NODES, _list("ROCR_VISIBLE_DEVICES", OLCF[r // NODES])),
    "cgroups": lambda r: (r // LOCAL, {"SEES": str(OLCF[r % LOCAL])}),
    # torchrun: all devices are visible, LOCAL_RANK chooses; wrappers list them in another order
    "all devices": lambda r: (r // LOCAL, {"LOCAL_RANK": str(r % LOCAL)}),
    "strided": lambda r: (r // LOCAL, {"LOCAL_RANK": str(r % LOCAL), **_list("ROCR_VISIBLE_DEVICES", 0, 2, 4, 6, 1, 3, 5, 7)}),
    "scrambled": lambda r: (SCRAMBLED[r] // LOCAL, _list("CUDA_VISIBLE_DEVICES", SCRAMBLED[r] % LOCAL)),
}  # fmt: skip
#: The last rank has found its device on a third node; rank 5 needs one that its node does not have.
WRONG: dict[str, Callable[[int], tuple[int, dict[str, str]]]] = {
    "uneven": lambda r: (2, {"LOCAL_RANK": "0"}) if r == WORLD - 1 else (r // LOCAL, {"LOCAL_RANK": str(r % LOCAL)}),
    "failing": lambda r: (r // LOCAL, {"LOCAL_RANK": "99" if r == 5 else str(r % LOCAL)}),
}


@pytest.fixture(scope="module")
def sysfs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One tree with all devices readable, and one a device in which a cgroup hides the others."""
    folder = tmp_path_factory.mktemp("sysfs")
    trees.frontier(folder / "all")
    for device in range(LOCAL):
        trees.frontier(folder / f"sees{device}", unreadable=set(range(LOCAL)) - {device})
    return folder


def discovered(sysfs: Path, style: Callable[[int], tuple[int, dict[str, str]]]) -> list[Any]:
    store = HashStore()

    def act(rank: int) -> Discovery:
        number, said = style(rank)
        tree = f"sees{said.pop('SEES')}" if "SEES" in said else "all"
        environ = {**said, "NCCL_HOSTID": f"frontier0000{number + 1}", "HZERO_SYSFS": str(sysfs / tree)}
        return discover(exchange=Exchange(store, rank, WORLD, 60), environ=environ)

    return on_threads(WORLD, act)


def test_every_way_of_launching_finds_the_same_machine(sysfs: Path) -> None:
    orders, groups = {}, {}
    for name, style in STYLES.items():
        found = discovered(sysfs, style)
        first = found[0]
        assert isinstance(first, Discovery), first
        assert all(each.grid == first.grid and each.notes == first.notes for each in found), name
        assert not any(each.reports for each in found[1:])
        names = [f"{r.host} {r.device.bus[5:7]}" for r in first.reports]
        groups[name] = {
            tier: {frozenset(names[r] for r in first.grid.tier_group(rank, tier)) for rank in range(WORLD)}
            for tier in TIERS
        }
        orders[name] = [tier for tier in first.grid.order if tier in BASE_TIERS] if first.grid.regular else None
        assert any("no regular order" in note for note in first.notes) == (name == "scrambled")
    assert all(found == groups["one device"] for found in groups.values())
    packages = {frozenset(name.split()[1] for name in group) for group in groups["one device"]["intra_package"]}
    assert packages == {frozenset(pair) for pair in (("c1", "c6"), ("c9", "ce"), ("d1", "d6"), ("d9", "de"))}
    assert [len(groups["one device"][tier]) for tier in ("intra_package", "intra_node", "inter_node")] == [8, 4, 8]
    assert orders.pop("cyclic") == ["intra_node", "intra_package", "inter_node"]
    assert orders.pop("strided") == ["inter_node", "intra_package", "intra_node"]
    assert orders.pop("scrambled") is None
    assert all(order == ["inter_node", "intra_node", "intra_package"] for order in orders.values())


def test_what_is_wrong_is_said_on_all_ranks(sysfs: Path) -> None:
    found = discovered(sysfs, WRONG["uneven"])
    said = set()
    for rank, each in enumerate(found):
        with pytest.raises(ConfigError) as refused:
            each.required_grid()
        said.add(str(refused.value))
        assert refused.value.reported_elsewhere == (rank > 0)
    (message,) = said
    assert "node frontier00002 has 7 ranks on packages of 2/2/2/1, node frontier00003 has 1" in message
    assert "every other node has 8 ranks on packages of 2/2/2/2. Start the same number of ranks" in message
    found = discovered(sysfs, WRONG["failing"])
    (message,) = {str(each) for each in found}
    assert message.startswith("topology: no device with index 99 (LOCAL_RANK) among the 8 visible devices")
    assert message.endswith("(rank 5)")
    assert [each.reported_elsewhere for each in found] == [rank not in (0, 5) for rank in range(WORLD)]


# Clusters


def on_networks(networks: list[list[str]], width: int, node: Callable[[int], int]) -> Discovery:
    """Assembles reports of ranks without devices. ``node`` returns the node of a rank, ``networks`` the networks of a node."""
    homes = [node(rank) for rank in range(width * len(networks))]
    return assemble([RankReport(rank, f"n{at}", None, subnets=tuple(networks[at])) for rank, at in enumerate(homes)])


NETWORKS = st.lists(st.lists(st.sampled_from("abcd"), min_size=1, max_size=2), min_size=1, max_size=6)


@given(NETWORKS, st.integers(1, 2), st.booleans())
def test_a_cluster_has_the_nodes_that_share_networks(networks: list[list[str]], width: int, cyclic: bool) -> None:
    count = len(networks)
    found = on_networks(networks, width, lambda rank: rank % count if cyclic else rank // width)
    joined = [{*own} for own in networks]
    for _ in networks:  # nodes that share a network with what is joined are joined
        joined = [set[str]().union(*(other for other in joined if other & own)) for own in joined]
    sizes = Counter(frozenset(own) for own in joined)
    grid, equal = found.required_grid(), len({*sizes.values()}) == 1
    assert grid.clusters == (len(sizes) if equal else 1)
    assert any("fabrics" in note for note in found.notes) == (len(sizes) > 1)
    assert any("cannot form clusters of equal size" in note for note in found.notes) == (not equal)
    for rank in range(grid.world_size if equal else 0):
        peers = [int(found.places[peer].host[1:]) for peer in grid.tier_group(rank, "inter_node")]
        assert len({frozenset(joined[node]) for node in peers}) == 1 and len(peers) == count // len(sizes)


@pytest.mark.parametrize("unknown", range(3))
def test_unknown_nics_form_no_clusters(unknown: int) -> None:
    networks = [["cxi"], ["ethernet"]]
    found = on_networks([*networks[:unknown], [], *networks[unknown:]], 2, lambda rank: rank // 2)
    assert found.required_grid().clusters == 1 and not any("fabrics" in note for note in found.notes)


# The exchange


def failing(text: str) -> Callable[..., Any]:
    def act(*_: Any) -> Any:
        raise ConfigError(text)

    return act


@pytest.mark.parametrize(
    ("wrong", "combine", "says"),
    [
        ({1: failing("no device"), 3: failing("other")}, len, "no device (ranks 1, 3)"),
        (dict.fromkeys(range(4), failing("bad file")), len, "bad file (all 4 ranks)"),
        ({}, failing("two ways to read it"), "two ways to read it"),
        ({2: lambda: object()}, len, "Object of type object is not JSON serializable (rank 2)"),
    ],
)
def test_an_error_of_one_rank_is_one_of_all(wrong: dict[int, Any], combine: Any, says: str) -> None:
    store = HashStore()
    results = on_threads(4, lambda rank: Exchange(store, rank, 4, 20.0).agree(wrong.get(rank, lambda: 1), combine))
    assert [(type(result), str(result)) for result in results] == [(ConfigError, says)] * 4


def test_missing_ranks_are_named_on_all() -> None:
    world, missing, store = 20, [3, *range(8, 18)], HashStore()

    def act(rank: int) -> Any:
        if rank == world:  # another world, whose rank 0 does not come
            return Exchange(HashStore(), 5, 8, 0.5).agree(lambda: 1, len)
        return None if rank in missing else Exchange(store, rank, world, 1.0).agree(lambda: 1, len)

    results = on_threads(world + 1, act)
    text = "topology: 11 of 20 ranks have not reported within 1 s: ranks 3, 8, 9, 10, 11, 12, 13, 14 and 3 more"
    assert {str(results[rank]) for rank in range(world) if rank not in missing} == {text}
    assert "rank 5 has waited 2.5 s for the answer of rank 0" in str(results[world])
    assert Exchange.of_environment(1.0, {}).agree(lambda: 3, list) == [3], "alone"


def test_ranks_meet_at_the_master_address_before_a_process_group_is_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environ = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

    def act(rank: int) -> Any:
        exchange = Exchange.of_environment(20.0, {**environ, "RANK": str(rank)})
        return [exchange.agree(lambda turn=turn: rank + turn, sum) for turn in range(3)]

    assert on_threads(3, act) == [[3, 6, 9]] * 3


@pytest.mark.parametrize("listening", [False, True], ids=["nobody", "no store"])
def test_a_store_that_nobody_serves_is_named_soon(listening: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if not listening:
            server.close()
        environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        begun = time.monotonic()
        with pytest.raises(ConfigError, match=rf"rank 1 has not reached rank 0 within 0.5 s at 127.0.0.1, port {port}"):
            Exchange.of_environment(0.5, environ)
        assert time.monotonic() - begun < 15


# The grid of all places

SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))


@given(SHAPES, st.lists(st.integers(0, 200), max_size=6))
def test_a_world_is_a_grid_or_its_uneven_nodes_are_named(shape: tuple[int, int, int], missing: list[int]) -> None:
    nodes, gpus, gcds = shape
    cells = [(f"n{n}", p, g) for n in range(nodes) for p in range(gpus) for g in range(gcds)]
    cells = [cell for index, cell in enumerate(cells) if index not in missing] or cells
    by_package: dict[tuple[str, int], int] = Counter((host, package) for host, package, _ in cells)
    by_host: dict[str, int] = Counter(host for host, _ in by_package)
    try:
        grid = grid_of([Place(rank, *cell) for rank, cell in enumerate(cells)])
    except ConfigError as error:
        assert len({*by_package.values()}) > 1 or len({*by_host.values()}) > 1
        assert "the ranks do not form a grid of nodes x packages x devices: node n" in str(error) and "\n" not in str(
            error
        )
        for host, size in re.findall(r"node (n\d+) has (\d+) ranks", str(error)):
            assert sum(count for (name, _), count in by_package.items() if name == host) == int(size)
    else:
        assert grid.world_size == len(cells) and len({*by_package.values()}) == len({*by_host.values()}) == 1


def test_two_ranks_on_one_device_are_refused() -> None:
    with pytest.raises(ConfigError, match="ranks 0 and 1 are on the same device of node n0"):
        grid_of([Place(0, "n0", 0, 0), Place(1, "n0", 0, 0)])
