"""Discovery: every rank says where it sits, rank 0 finds the grid, and all ranks hear the same answer.

A rank sends a few hundred bytes and receives about as many, whatever the size of the world: nothing is sent from every
rank to every other.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hzero.topology.bootstrap import Bootstrap, bootstrap
from hzero.topology.exchange import Exchange, open_exchange
from hzero.topology.grid import Grid
from hzero.topology.local import machine_of, own_report, visible_count
from hzero.topology.machine import TopologyError
from hzero.topology.placement import Place, grid_of
from hzero.topology.report import RankReport, by_host, places_of
from hzero.topology.visible import current_device

#: Longest wait for all ranks to say where they sit, in seconds.
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Discovery:
    """What a discovery found.

    Attributes:
        grid: The grid of the world; None where it is not rectangular.
        refusal: Why there is no grid, and which ranks to drop; empty where there is one.
        notes: What the user should be told: several fabrics, ranks without devices.
        clusters: Fabrics and how many nodes each joins; one where all nodes are alike.
        reports: What each rank said, in rank order; on rank 0 alone, empty on the others.
        places: Where each rank sits, in rank order; on rank 0 alone.
    """

    grid: Grid | None
    refusal: str = ""
    notes: tuple[str, ...] = ()
    clusters: Mapping[str, int] = field(default_factory=dict)
    reports: Sequence[RankReport] = ()
    places: Sequence[Place] = ()

    def required_grid(self) -> Grid:
        """The grid. Raises `TopologyError` with `refusal` where there is none."""
        if self.grid is None:
            raise TopologyError(self.refusal) if self.reports else TopologyError.of_rank_0(self.refusal)
        return self.grid


def discover(
    source: str = "auto",
    *,
    environ: Mapping[str, str] = os.environ,
    exchange: Exchange | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Discovery:
    """Finds where all ranks sit. Collective: every rank of the world calls it.

    Args:
        source: What describes a node: ``auto`` for what this machine offers, a preset, or a file.
        environ: The environment of this rank: its place in the world and the devices it sees.
        exchange: What carries reports; by default the process group's store, one made from the environment, or MPI.
        timeout_s: Longest wait for the other ranks, in seconds.

    Raises:
        TopologyError: A rank cannot tell its device, reports contradict each other, or packages are ambiguous: the same
            message on all ranks.
    """
    start = bootstrap(environ, visible=0)
    exchange = exchange or open_exchange(start, timeout_s)
    # With the address known it is not collective, so that a rank that fails here keeps nobody waiting.
    address = {"MASTER_ADDR": start.master_addr, "MASTER_PORT": str(start.master_port)}

    def own() -> bytes:
        machine = machine_of(source, environ)
        place = bootstrap({**environ, **address}, visible=visible_count(machine, environ))
        if place.launcher == "alone":  # a process group was made without the environment's help
            place = dataclasses.replace(
                place, rank=exchange.rank, world_size=exchange.world_size, local_rank=current_device()
            )
        return own_report(place, machine, environ).encode()

    return exchanged(exchange, own)


def foresee(source: str, ranks: int, environ: Mapping[str, str] = os.environ) -> Discovery:
    """What ``ranks`` ranks on this node would discover, were they started with ``LOCAL_RANK`` from 0.

    Raises:
        TopologyError: As `discover`; also where there are more ranks than devices.
    """
    machine = machine_of(source, environ)
    places = (Bootstrap(rank, ranks, rank, rank, ranks, "127.0.0.1", 0, "alone") for rank in range(ranks))
    return assemble([own_report(place, machine, environ) for place in places])


def exchanged(exchange: Exchange, own: Callable[[], bytes]) -> Discovery:
    """The collective part: gathers reports, finds the grid on rank 0, and spreads the answer.

    Args:
        exchange: Carries the reports.
        own: Makes this rank's report; what it raises, all ranks raise.

    Raises:
        TopologyError: A rank could not report, did not come in time, or the reports do not go together.
    """
    try:
        record: bytes | Exception = own()
    except Exception as error:
        record = error
    records = exchange.gather(record)
    if records is None:
        return _decode(exchange.broadcast(None))
    try:
        found = assemble([RankReport.decode(record) for record in records])
        answer: bytes | Exception = _encode(found)
    except Exception as error:
        answer = error
    exchange.broadcast(answer)
    return found


def assemble(reports: Sequence[RankReport]) -> Discovery:
    """What the reports of a world, in rank order, add up to.

    Raises:
        TopologyError: Reports contradict each other, or packages are ambiguous.
    """
    for rank, report in enumerate(reports):
        if (report.rank, report.world_size) != (rank, len(reports)):
            raise TopologyError(
                f"topology: rank {rank} of {len(reports)} was told to be rank {report.rank} of {report.world_size}: ranks do not "
                "have the same world size (WORLD_SIZE, or that of their launcher)"
            )
    hosts = by_host(reports)
    places = sorted((place for ranks in hosts.values() for place in places_of(ranks)), key=lambda place: place.rank)
    clusters: dict[str, int] = {}
    for ranks in hosts.values():
        clusters[ranks[0].fabric] = clusters.get(ranks[0].fabric, 0) + 1
    notes = []
    if len(clusters) > 1:
        joined = ", ".join(
            f"{count} nodes with {fabric or 'no known NIC'}" for fabric, count in sorted(clusters.items())
        )
        notes.append(f"nodes are on {len(clusters)} fabrics ({joined}), which tier node joins")
    if all(report.device is None for report in reports):
        notes.append("no GPUs are there: every rank counts as a package of one device")
    try:
        grid, refusal = grid_of(places), ""
        if not grid.regular:
            notes.append(
                "ranks are numbered in no regular order, so each gather and reduction reorders shards in a pass of its own; "
                "numbering the ranks of a node by PCI bus id saves it"
            )
    except TopologyError as error:
        grid, refusal = None, str(error)
    return Discovery(grid, refusal, tuple(notes), clusters, tuple(reports), tuple(places))


def _encode(found: Discovery) -> bytes:
    answer: dict[str, Any] = {"refusal": found.refusal, "notes": found.notes, "clusters": dict(found.clusters)}
    if found.grid is not None:
        grid = found.grid
        answer["grid"] = [grid.nodes, grid.gpus_per_node, grid.gcds_per_gpu]
        answer["order"] = grid.order
        if grid.ranks is not None:
            answer["ranks"] = base64.b64encode(zlib.compress(array("I", grid.ranks).tobytes())).decode()
    return json.dumps(answer).encode()


def _decode(answer: bytes) -> Discovery:
    values = json.loads(answer)
    grid = None
    if "grid" in values:
        ranks = None
        if "ranks" in values:
            numbers = array("I")
            numbers.frombytes(zlib.decompress(base64.b64decode(values["ranks"])))
            ranks = tuple(numbers)
        nodes, gpus, gcds = values["grid"]
        grid = Grid(nodes, gpus, gcds, tuple(values["order"]), ranks)
    return Discovery(grid, values["refusal"], tuple(values["notes"]), values["clusters"])
