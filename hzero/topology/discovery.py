"""Discovery: every rank reports its place, rank 0 forms the grid, and all ranks receive the same answer.

A rank reads its node (`hzero.topology.sources`), identifies its device, and sends a few hundred bytes to rank 0 through a store
of torch.distributed. Rank 0 merges the reports of each host into its node, and derives the packages from the links. It groups
nodes that share a network into clusters, and forms the grid. Every rank receives an answer of about the same size as its report,
whatever the world size.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import logging
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from hzero.calls import NoAnswer, in_time
from hzero.errors import ConfigError, some
from hzero.topology.grid import Grid
from hzero.topology.node import Device, Link, Node, bus_id, merge_links, positions
from hzero.topology.sources import read_node

logger = logging.getLogger("hzero")


@dataclass(frozen=True)
class RankReport:
    """Report of a rank: its device and the links of the device.

    Attributes:
        rank: The rank.
        host: Identity of its node.
        device: Its device; None for a rank on a CPU.
        links: Direct links of the device: identity of the other end, kind, count, GB/s.
        package: Identities of the devices of its package, if the source declares packages.
        fabric: Kinds of the node's NICs, such as ``cxi``.
        switch_nodes: Nodes of one switch group of the network, if the source declares it.
        subnets: Networks of the node's NICs. A source that cannot distinguish networks gives the kinds of the NICs.
    """

    rank: int
    host: str
    device: Device | None
    links: tuple[tuple[str, str, int | None, float | None], ...] = ()
    package: tuple[str, ...] = ()
    fabric: str = ""
    switch_nodes: int | None = None
    subnets: tuple[str, ...] = ()

    @classmethod
    def of(cls, rank: int, host: str, node: Node, device: Device | None) -> RankReport:
        """The report of a rank on a device of its node."""
        own = device.number if device is not None else -1
        ends = [(link, link.b if link.a == own else link.a) for link in node.links if own in (link.a, link.b)]
        links = [(node.device(peer).identity, link.kind, link.count, link.gb_s) for link, peer in ends]
        package = next((members for members in node.packages or () if own in members), ())
        identities = tuple(node.device(number).identity for number in package)
        fabric = "+".join(sorted({nic.kind for nic in node.nics if nic.kind}))
        subnets = {one for nic in node.nics for one in (nic.subnets or (nic.kind,)) if one}
        return cls(rank, host, device, tuple(links), identities, fabric, node.switch_nodes, tuple(sorted(subnets)))


@dataclass(frozen=True)
class Place:
    """The place of a rank.

    Attributes:
        rank: The rank.
        host: Its node.
        package: Index of its package in the node, in the order of PCI bus ids, hive after hive.
        device: Index of its device in the package.
    """

    rank: int
    host: str
    package: int
    device: int


@dataclass(frozen=True)
class Discovery:
    """The result of a discovery.

    Attributes:
        grid: The grid of the world; None if the ranks do not form one.
        refusal: The reason why no grid exists; empty with a grid.
        notes: Remarks for the user, for example about several fabrics or ranks without devices.
        reports: The report of each rank, in rank order; empty on all ranks but the first.
        places: The place of each rank, in rank order; empty on all ranks but the first.
    """

    grid: Grid | None
    refusal: str = ""
    notes: tuple[str, ...] = ()
    reports: Sequence[RankReport] = ()
    places: Sequence[Place] = ()

    def required_grid(self) -> Grid:
        """The grid. Raises `ConfigError` with `refusal` if it is None."""
        if self.grid is None:
            raise ConfigError(self.refusal, reported_elsewhere=not self.reports)
        return self.grid


def discover(
    source: str = "auto", exchange: Exchange | None = None, environ: Mapping[str, str] = os.environ
) -> Discovery:
    """Finds the places of all ranks. Collective over the world.

    Args:
        source: The source of a node: ``auto`` for this machine, a preset, or a file.
        exchange: Exchange of the reports; by default over the store of the process group.
        environ: The environment of this rank, with its visible devices and local index.

    Raises:
        ConfigError: A rank cannot identify its device or did not report in time, reports contradict each other, or packages
            are ambiguous. All ranks raise the same message.
    """
    exchange = exchange or Exchange.of_group()
    found: list[Discovery] = []

    def own() -> dict[str, Any]:
        node = read_node(source, environ)
        report = RankReport.of(exchange.rank, host_identity(environ), node, own_device(node, environ))
        return dataclasses.asdict(report)

    def combine(reports: list[Any]) -> dict[str, Any]:
        found.append(assemble(TypeAdapter(list[RankReport]).validate_python(reports)))
        return dataclasses.asdict(dataclasses.replace(found[0], reports=(), places=()))

    answer = exchange.agree(own, combine)
    return found[0] if found else TypeAdapter(Discovery).validate_python(answer)


@functools.cache
def discovered_grid(source: str, world_size: int) -> Grid:
    """The discovered grid of ``world_size`` ranks. Collective, and done once per process."""
    found = discover(source)
    grid = found.required_grid()
    if found.reports:  # only rank 0 logs
        for note in found.notes:
            logger.warning("hzero: %s", note)
    if grid.world_size != world_size:
        raise ConfigError(f"hzero.topology: discovery found {grid.world_size} ranks; expected {world_size}")
    return grid


def host_identity(environ: Mapping[str, str] = os.environ) -> str:
    """The identity of this node: ``NCCL_HOSTID`` if it is set, as in NCCL and RCCL; else host name and boot id.

    The boot id distinguishes machines with the same name.
    """
    if stated := environ.get("NCCL_HOSTID"):
        return stated
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
    except OSError:
        return socket.gethostname()
    return f"{socket.gethostname()}/{boot}"


def assemble(reports: Sequence[RankReport]) -> Discovery:
    """Forms the world from the reports of its ranks, in rank order.

    Raises:
        ConfigError: Reports contradict each other, or packages are ambiguous.
    """
    hosts = by_host(reports)
    places = sorted((place for ranks in hosts.values() for place in places_of(ranks)), key=lambda place: place.rank)
    clusters, notes = clusters_of(hosts), list[str]()
    sizes = Counter(clusters.values())
    uneven = () if len({*sizes.values()}) == 1 else tuple(sizes.values())
    if len(sizes) > 1:
        joined = "form clusters, which tier inter_cluster joins"
        if uneven:
            counts = ", ".join(map(str, uneven))
            joined = f"cannot form clusters of equal size ({counts} nodes), so tier inter_node joins them"
        nodes = {number: host for host, number in reversed(clusters.items())}
        names = ", ".join(f"{'+'.join(hosts[host][0].subnets)} of node {host}" for host in reversed(nodes.values()))
        notes.append(f"nodes on {len(sizes)} fabrics ({names}) {joined}")
    if all(report.device is None for report in reports):
        notes.append("no GPUs found: each rank is treated as a package of one device")
    declared = {report.switch_nodes for report in reports}
    switch = declared.pop() if len(declared) == 1 else None  # None if the nodes differ
    refusal = ""
    try:
        found = grid_of(places, {} if uneven else clusters)
        grid: Grid | None = dataclasses.replace(found, automatic=True, switch_nodes=switch, uneven_clusters=uneven)
        if not found.regular:
            notes.append(
                "ranks are numbered in no regular order, so each gather and reduction needs an extra pass to reorder shards; "
                "number the ranks of a node by PCI bus id to save it"
            )
    except ConfigError as error:
        grid, refusal = None, str(error)
    return Discovery(grid, refusal, tuple(notes), tuple(reports), tuple(places))


def by_host(reports: Iterable[RankReport]) -> dict[str, list[RankReport]]:
    """Reports of each node, nodes in the order of their first report."""
    hosts: dict[str, list[RankReport]] = {}
    for report in reports:
        hosts.setdefault(report.host, []).append(report)
    return hosts


def clusters_of(hosts: Mapping[str, Sequence[RankReport]]) -> dict[str, int]:
    """The cluster of each node, numbered from 0 in the order of nodes. A cluster is a connected set of nodes that share networks.

    A node with unknown NICs may be on any network.
    """
    subnets = {host: {one for report in reports for one in report.subnets} for host, reports in hosts.items()}
    found: list[set[str]] = [] if all(subnets.values()) else [set[str]().union(*subnets.values())]
    for own in filter(None, subnets.values()):
        sharing = [cluster for cluster in found if cluster & own]
        found = [*(cluster for cluster in found if cluster not in sharing), own.union(*sharing)]
    homes = [next((index for index, cluster in enumerate(found) if own <= cluster), 0) for own in subnets.values()]
    numbers = {home: number for number, home in enumerate(dict.fromkeys(homes))}
    return {host: numbers[home] for host, home in zip(hosts, homes)}


def places_of(reports: Sequence[RankReport]) -> list[Place]:
    """The places of the ranks of one node, from all their reports in rank order.

    Raises:
        ConfigError: Reports contradict each other, or the packages are ambiguous. The message names the node.
    """
    host = reports[0].host
    without = [report.rank for report in reports if report.device is None]
    if len(without) == len(reports):
        return [Place(report.rank, host, index, 0) for index, report in enumerate(reports)]
    if without:
        raise ConfigError(
            f"topology: found no device on ranks {without} of node {host}, where other ranks have one; expected one on each: "
            "bind them with --gpus-per-task=1 or LOCAL_RANK, or start no more ranks than devices"
        )
    node = merged_node(reports)
    found = positions(node, of_ranks=True)
    named = {device.identity: found[device.number] for device in node.devices}
    placed = [(report.rank, named[report.device.identity]) for report in reports if report.device is not None]
    return [Place(rank, host, position.package, position.device) for rank, position in placed]


def merged_node(reports: Sequence[RankReport]) -> Node:
    """Merges the reports of a node's ranks into the node.

    A rank may see only a part of the node: under task cgroups it can read its own device only, and numbers the others. So
    this function numbers the devices again. A device without a rank is hidden: only links from other devices to it are known.

    Raises:
        ConfigError: Two ranks contradict each other about a link.
    """
    own = {report.device.identity: report.device for report in reports if report.device is not None}
    packages = {tuple(sorted(report.package)) for report in reports if report.package}
    named = {name for report in reports for name in (*(peer for peer, *_ in report.links), *report.package)}
    names = [*sorted(own, key=lambda name: (own[name].bus, own[name].number)), *sorted(named - {*own})]
    number = {name: index for index, name in enumerate(names)}
    unseen = Device(0, hidden=True)
    devices = [dataclasses.replace(own.get(name, unseen), number=number[name], node=name) for name in names]
    links = [
        Link(number[report.device.identity], number[peer], kind, count, gb_s)
        for report in reports
        if report.device is not None
        for peer, kind, count, gb_s in report.links
    ]
    if packages:
        packages |= {(name,) for name in {*names} - {*itertools.chain(*packages)}}
    declared = tuple(tuple(number[name] for name in package) for package in packages) or None
    source = f"topology: node {reports[0].host}"
    return Node(source, tuple(devices), merge_links(source, links), packages=declared)


# ---- the device of a rank ---------------------------------------------------------------------------------------------------

# The vendors define the lists. AMD ("GPU isolation techniques" in ROCm's documentation): the ROCr runtime applies
# ``ROCR_VISIBLE_DEVICES`` to the devices in the kernel's order. HIP then applies ``HIP_VISIBLE_DEVICES`` or
# ``CUDA_VISIBLE_DEVICES`` to the remaining devices, under new indices. NVIDIA ("CUDA Environment Variables" of the CUDA
# programming guide): ``CUDA_VISIBLE_DEVICES``. Entries are indices, or ``GPU-`` with the beginning of a UUID. A negative index
# ends a list.
_ROCR, _HIP, _CUDA = "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"


def own_device(node: Node, environ: Mapping[str, str]) -> Device | None:
    """The device of this rank; None on a node without devices.

    It is identified by the PCI bus id from torch, since sources number devices in different orders. Without a GPU in torch,
    the lists of the environment decide.

    Raises:
        ConfigError: The node has no device with that bus id, or a list or LOCAL_RANK names a missing device.
    """
    import torch

    if not node.devices:
        return None
    if (bus := runtime_bus_id(_index(environ, torch.cuda.device_count()))) is not None:
        return with_bus(node.devices, bus)
    readable = [device for device in node.devices if not device.hidden]  # runtimes do not count hidden devices
    seen = visible_devices(environ, readable)
    index = _index(environ, len(seen))
    if not 0 <= index < len(seen):
        lists = ", ".join(f"{name}={environ[name]!r}" for name in (_ROCR, _HIP, _CUDA) if name in environ)
        raise ConfigError(
            f"topology: no device with index {index} (LOCAL_RANK) among the {len(seen)} visible devices "
            f"({lists or 'no variable that hides any'}) of {len(readable)}"
        )
    return seen[index]


def with_bus(devices: Sequence[Device], bus: str) -> Device:
    """The device with a PCI bus id, whose function torch does not state. Raises `ConfigError` for none or several."""
    wanted = bus_id(bus, "the runtime's device")
    alike = [device for device in devices if device.bus and device.bus[:-2] == wanted[:-2]]
    same = [device for device in alike if device.bus == wanted] or alike
    if len(same) != 1:
        buses, found = ", ".join(device.bus or "unknown" for device in devices), f"{len(same) or 'no'} devices"
        raise ConfigError(f"topology: found PCI bus id {bus} in torch, which {found} have; expected one of {buses}")
    return same[0]


def runtime_bus_id(index: int) -> str | None:
    """The PCI bus id from torch for a device index; None without a GPU, or if this version of torch has none."""
    import torch

    if not 0 <= index < torch.cuda.device_count():
        return None
    found: Any = torch.cuda.get_device_properties(index)
    try:
        return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    except AttributeError:
        return None


def _index(environ: Mapping[str, str], count: int) -> int:
    """Index of this rank's device among its visible devices."""
    import torch

    local = environ.get("LOCAL_RANK", "")
    if count == 1:  # even if the launcher's local index is not 0
        return 0
    return int(local) if local.isdecimal() else torch.cuda.current_device() if torch.cuda.is_available() else 0


def visible_devices(environ: Mapping[str, str], devices: Sequence[Device]) -> list[Device]:
    """The devices that a process sees, in the order of its device numbers.

    Args:
        environ: The environment of the process.
        devices: All devices of the node that it may use, in the order of the runtime (ROCr, CUDA).

    Raises:
        ConfigError: A list names a missing device, or a device twice.
    """
    seen = list(devices)
    for variable in (_ROCR, _HIP if _HIP in environ else _CUDA):
        if (value := environ.get(variable)) is None:
            continue
        listed: list[Device] = []
        for entry in [entry.strip() for entry in value.split(",")] if value.strip() else []:
            if re.fullmatch("-[0-9]{1,9}", entry):
                break
            found = [device for index, device in enumerate(seen) if entry == str(index) or _has_uuid(device, entry)]
            if len(found) != 1 or found[0] in listed:
                uuids = "".join(f", {device.uuid}" for device in seen if device.uuid)
                raise ConfigError(
                    f"{variable}={value!r}: found entry {entry!r}, which names {len(found) or 'no'} devices, or one twice; "
                    f"expected 0 to {len(seen) - 1}{uuids}"
                )
            listed += found
        seen = listed
    return seen


def _has_uuid(device: Device, entry: str) -> bool:
    """Whether an entry is the beginning of the UUID. Sources write it with or without ``GPU-``; AMD ignores case."""
    beginning, uuid = entry.upper(), device.uuid.upper().removeprefix("GPU-")
    return len(beginning) > 4 and beginning.startswith("GPU-") and uuid.startswith(beginning[4:])


# ---- the exchange of reports through a store --------------------------------------------------------------------------------

#: Maximum seconds of the wait for the reports of all ranks.
TIMEOUT_S = 300.0


class Exchange:
    """Exchanges reports through a store. Its errors name the missing ranks, which a collective of torch cannot do.

    A rank that cannot make its report sends the reason, and all ranks raise it.

    Args:
        store: A store of torch.distributed.
        rank: This rank.
        world_size: Ranks of the world.
        timeout_s: Maximum seconds that rank 0 waits for the reports. The other ranks wait a little longer for its answer.
    """

    def __init__(self, store: Any, rank: int, world_size: int, timeout_s: float = TIMEOUT_S) -> None:
        self.store, self.rank, self.world_size, self.timeout_s = store, rank, world_size, timeout_s

    @classmethod
    def of_group(cls) -> Exchange:
        """An exchange over the store of the process group; without a group, an exchange of one rank."""
        import torch.distributed as dist

        if not dist.is_initialized():
            return cls(dist.HashStore(), 0, 1)
        return cls(dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size())

    @classmethod
    def of_environment(cls, timeout_s: float = TIMEOUT_S, environ: Mapping[str, str] = os.environ) -> Exchange:
        """An exchange over a new store, before the process group is initialised.

        Args:
            timeout_s: Maximum seconds of the wait for other ranks.
            environ: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun sets them; without them, one rank.

        Raises:
            ConfigError: Rank 0 cannot be reached.
        """
        from torch.distributed import HashStore, PrefixStore, TCPStore

        rank, world_size = int(environ.get("RANK", 0)), int(environ.get("WORLD_SIZE", 1))
        if world_size == 1:
            return cls(HashStore(), 0, 1)
        address, port = environ.get("MASTER_ADDR", "127.0.0.1"), int(environ.get("MASTER_PORT", 29500))
        serves = rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        wait, longest = timedelta(seconds=timeout_s), timeout_s + max(1.0, timeout_s / 5)
        # torch's own wait for all ranks would not name the missing ones.
        how: dict[str, Any] = {"wait_for_workers": False, "multi_tenant": True}
        try:
            store = in_time(lambda: TCPStore(address, port, world_size, serves, wait, **how), longest)
        except (NoAnswer, RuntimeError) as error:
            failed = "cannot serve a store" if serves else f"has not reached rank 0 within {timeout_s:g} s"
            why = str(error).partition("\n")[0][:200] or "the process that listens there is not a store"
            raise ConfigError(
                f"topology: rank {rank} {failed} at {address}, port {port} (MASTER_ADDR, MASTER_PORT): {why}"
            ) from None
        # The store of torchrun's agent outlives an attempt, so each attempt has its own prefix.
        attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return cls(PrefixStore(f"attempt_{attempt}", store), rank, world_size, timeout_s)

    def agree(self, own: Callable[[], Any], combine: Callable[[list[Any]], Any]) -> Any:
        """Computes one value for all ranks from the reports of all ranks. Collective.

        Args:
            own: Makes this rank's report, a value for JSON.
            combine: Makes the value from the reports, in rank order. Called on rank 0 only.

        Raises:
            ConfigError: ``own`` or ``combine`` failed, or a rank did not report in time. All ranks raise the same message.
        """
        report = _tried(own)
        try:
            answer = self._through_store(report, combine)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0][:200]
            raise ConfigError(f"topology: rank {self.rank}: the store has failed: {reason}") from None
        if "error" in answer:
            raise ConfigError(answer["error"], reported_elsewhere=self.rank > 0 and "error" not in report)
        return answer["value"]

    def _through_store(self, report: dict[str, Any], combine: Callable[[list[Any]], Any]) -> dict[str, Any]:
        # Each rank counts its rounds, so that a second exchange of the same job has other keys.
        prefix = f"hzero/exchange/{self.store.add(f'hzero/exchange/rounds/{self.rank}', 1)}"
        self.store.set(f"{prefix}/{self.rank}", json.dumps(report))
        # The other ranks wait longer, so that the error of rank 0 reaches them before they time out.
        grace_s = max(2.0, self.timeout_s / 5)
        if self.rank:
            patience = self.timeout_s + grace_s
            if not self._wait([f"{prefix}/answer"], patience):
                wait = f"rank {self.rank} has waited {patience:g} s for the answer of rank 0"
                return {"error": f"topology: {wait}"}
            answer: dict[str, Any] = json.loads(self.store.get(f"{prefix}/answer"))
            self.store.add(f"{prefix}/heard", 1)
            return answer
        keys, missing = [f"{prefix}/{rank}" for rank in range(self.world_size)], list[int]()
        if self._wait(keys, self.timeout_s):
            answer = _answered([json.loads(each) for each in self.store.multi_get(keys)], combine)
        else:
            missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
            late, limit = _ranks(missing), self.timeout_s
            error = f"topology: {len(missing)} of {self.world_size} ranks have not reported within {limit:g} s: {late}"
            answer = {"error": error}
        self.store.set(f"{prefix}/answer", json.dumps(answer))
        # Rank 0 may serve the store, so it stays until all ranks have read the answer.
        deadline = time.monotonic() + grace_s
        while self.store.add(f"{prefix}/heard", 0) < self.world_size - 1 - len(missing) and time.monotonic() < deadline:
            time.sleep(0.005)
        return answer

    def _wait(self, keys: list[str], timeout_s: float) -> bool:
        """Whether all keys arrive in time."""
        from torch.distributed import DistStoreError

        try:
            self.store.wait(keys, timedelta(seconds=timeout_s))
        except DistStoreError:
            return False
        return True


def _tried(act: Callable[[], Any]) -> dict[str, Any]:
    """The result of a function after a round trip through JSON, or the first line of its error."""
    try:
        return {"value": json.loads(json.dumps(act()))}
    except Exception as error:
        return {"error": str(error).strip().partition("\n")[0] or type(error).__name__}


def _answered(reports: list[dict[str, Any]], combine: Callable[[list[Any]], Any]) -> dict[str, Any]:
    failed = {rank: report["error"] for rank, report in enumerate(reports) if "error" in report}
    if not failed:
        return _tried(lambda: combine([report["value"] for report in reports]))
    text = next(iter(failed.values()))
    who = f"all {len(reports)} ranks" if len(failed) == len(reports) else _ranks(list(failed))
    return {"error": f"{text} ({who})" if len(reports) > 1 else text}


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {some([str(rank) for rank in ranks], 8)}"


# ---- the grid of all places ---------------------------------------------------------------------------------------------


def grid_of(places: Sequence[Place], clusters: Mapping[str, int] | None = None) -> Grid:
    """Forms the grid of a world whose nodes have equal packages, and whose packages have equally many devices.

    Coordinates follow physical places. A group of tier ``intra_node`` contains devices at the same position of their packages,
    and a group of tier ``inter_node`` contains devices of the same packages. If one of the six orders of axes matches the ranks,
    the grid has that order. Nodes whose ranks visit packages in different orders are matched by rank. If no order matches, the
    grid lists the rank of every place.

    Args:
        places: One per rank, in rank order.
        clusters: The cluster of each node, from 0; clusters have equal sizes. None: the world is one cluster.

    Raises:
        ConfigError: Two ranks are on one device, or the world is not rectangular. The message names the nodes that differ.
    """
    hosts = {host: index for index, host in enumerate(dict.fromkeys(place.host for place in places))}
    taken, packages = dict[tuple[str, int, int], int](), Counter((place.host, place.package) for place in places)
    for place in places:
        if (other := taken.setdefault((place.host, place.package, place.device), place.rank)) != place.rank:
            raise ConfigError(
                f"topology: ranks {other} and {place.rank} are on the same device of node {place.host}; each rank needs a "
                "device of its own: bind them with --gpus-per-task=1, LOCAL_RANK or ROCR_VISIBLE_DEVICES"
            )
    sizes = {host: list[int]() for host in hosts}
    for (host, _), count in packages.items():
        sizes[host].append(count)
    shapes = {host: tuple(sorted(found, reverse=True)) for host, found in sizes.items()}
    first = next(iter(shapes.values()))
    if any(shape != first for shape in shapes.values()) or len(set(first)) != 1:
        raise ConfigError(_refusal(shapes))
    ordered = sorted(places, key=lambda place: (hosts[place.host], place.package, place.device))
    by_place = np.array([place.rank for place in ordered]).reshape(len(hosts), len(first), first[0])
    # The labels of each axis, in the order of the ranks on rank 0's node and package.
    node, package, device = np.argwhere(by_place == 0)[0]
    own = (by_place[:, package, device], by_place[node, :, device], by_place[node, package])
    homes = np.array([(clusters or {}).get(host, 0) for host in hosts])
    by_place = by_place[np.ix_(np.lexsort((own[0], homes)), *map(np.argsort, own[1:]))]
    by_rank = np.take_along_axis(by_place, np.argsort(by_place.min(axis=2), axis=1)[:, :, None], axis=1)
    nodes, gpus, gcds = by_place.shape
    machine = Grid(nodes, gpus, gcds, clusters=int(homes.max()) + 1)
    grids = [machine.numbered(cells.ravel().tolist()) for cells in (by_place, by_rank)]
    return next((grid for grid in grids if grid.regular), grids[0])


def _refusal(shapes: dict[str, tuple[int, ...]]) -> str:
    even = Counter(shape for shape in shapes.values() if len(set(shape)) == 1)
    usual = even.most_common(1)[0][0] if even else ()
    odd = [f"node {host} has {_shape(shape)}" for host, shape in shapes.items() if shape != usual]
    others = f"; every other node has {_shape(usual)}" if len(odd) < len(shapes) else ""
    return (
        f"topology: the ranks do not form a grid of nodes x packages x devices: {some(odd, 4)}{others}. Start the same number of "
        "ranks on the same packages of every node"
    )


def _shape(shape: Sequence[int]) -> str:
    return f"{sum(shape)} ranks on packages of {'/'.join(map(str, shape))}"
