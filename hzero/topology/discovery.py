"""Discovery: every rank reports where it sits, rank 0 finds the grid, and all ranks receive the same answer.

A rank sends a few hundred bytes and receives about as many, whatever the size of the world: nothing is sent from every
rank to every other.
"""

from __future__ import annotations

import dataclasses
import json
import os
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hzero.bootstrap import Bootstrap, bootstrap
from hzero.topology.exchange import Exchange
from hzero.topology.grid import Grid
from hzero.topology.local import machine_of, own_report, visible_count
from hzero.topology.placement import Place, grid_of
from hzero.topology.rank_report import RankReport, by_host, places_of
from hzero.topology.rendezvous import open_exchange
from hzero.topology.visible import current_device
from hzero.validation import ConfigError

#: Longest wait for the reports of all ranks, in seconds.
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Discovery:
    """The result of a discovery.

    Attributes:
        grid: The grid of the world; None where it is not rectangular.
        refusal: Why no grid exists, and which ranks to drop; empty with a grid.
        notes: Remarks for the user: several fabrics, ranks without devices.
        clusters: Fabrics and how many nodes each joins; one where all nodes are alike.
        reports: The report of each rank, in rank order; empty on all ranks but the first.
        places: Where each rank sits, in rank order; empty on all ranks but the first.
    """

    grid: Grid | None
    refusal: str = ""
    notes: tuple[str, ...] = ()
    clusters: Mapping[str, int] = field(default_factory=dict)
    reports: Sequence[RankReport] = ()
    places: Sequence[Place] = ()

    def required_grid(self) -> Grid:
        """The grid. Raises `ConfigError` with `refusal` if it is None."""
        if self.grid is None:
            raise ConfigError(self.refusal) if self.reports else ConfigError.of_rank_0(self.refusal)
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
        source: The source of a node: ``auto`` for this machine, a preset, or a file.
        environ: The environment of this rank: its place in the world and the devices it sees.
        exchange: Carries the reports; by default the process group's store, one made from the environment, or MPI.
        timeout_s: Longest wait for the other ranks, in seconds.

    Raises:
        ConfigError: A rank cannot identify its device, reports contradict each other, or packages are ambiguous: the same
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
    """The discovery of ``ranks`` ranks on this node, if they were started with ``LOCAL_RANK`` from 0.

    Raises:
        ConfigError: As `discover`; also if ranks outnumber devices.
    """
    machine = machine_of(source, environ)
    places = (Bootstrap(rank, ranks, rank, ranks, "127.0.0.1", 0, "alone") for rank in range(ranks))
    return assemble([own_report(place, machine, environ) for place in places])


def exchanged(exchange: Exchange, own: Callable[[], bytes]) -> Discovery:
    """The collective part: gathers reports, finds the grid on rank 0, and spreads the answer.

    Args:
        exchange: Carries the reports.
        own: Makes this rank's report; all ranks raise its errors.

    Raises:
        ConfigError: A rank could not report, did not come in time, or the reports do not go together.
    """
    try:
        report: bytes | Exception = own()
    except Exception as error:
        report = error
    reports = exchange.gather(report)
    if reports is None:
        return _decode(exchange.broadcast(None))
    try:
        found = assemble([RankReport.decode(each) for each in reports])
        answer: bytes | Exception = _encode(found)
    except Exception as error:
        answer = error
    exchange.broadcast(answer)
    return found


def assemble(reports: Sequence[RankReport]) -> Discovery:
    """The world that the reports of its ranks, in rank order, add up to.

    Raises:
        ConfigError: Reports contradict each other, or packages are ambiguous.
    """
    for rank, report in enumerate(reports):
        if (report.rank, report.world_size) != (rank, len(reports)):
            raise ConfigError(
                f"topology: rank {rank} of {len(reports)} was assigned rank {report.rank} of {report.world_size}: ranks do not "
                "have the same world size (WORLD_SIZE, or that of their launcher)"
            )
    hosts = by_host(reports)
    places = sorted((place for ranks in hosts.values() for place in places_of(ranks)), key=lambda place: place.rank)
    clusters = Counter(ranks[0].fabric for ranks in hosts.values())
    notes = []
    if len(clusters) > 1:
        joined = ", ".join(
            f"{count} nodes with {fabric or 'no known NIC'}" for fabric, count in sorted(clusters.items())
        )
        notes.append(f"nodes are on {len(clusters)} fabrics ({joined}), which tier node joins")
    if all(report.device is None for report in reports):
        notes.append("no GPUs found: each rank is treated as a package of one device")
    declared = {report.switch_nodes for report in reports}
    switch_nodes = declared.pop() if len(declared) == 1 else None  # unknown if the sources of the nodes differ
    try:
        grid, refusal = dataclasses.replace(grid_of(places), automatic=True, switch_nodes=switch_nodes), ""
        if not grid.regular:
            notes.append(
                "ranks are numbered in no regular order, so each gather and reduction reorders shards in a pass of its own; "
                "numbering the ranks of a node by PCI bus id saves it"
            )
    except ConfigError as error:
        grid, refusal = None, str(error)
    return Discovery(grid, refusal, tuple(notes), clusters, tuple(reports), tuple(places))


def _encode(found: Discovery) -> bytes:
    grid = dataclasses.asdict(found.grid) if found.grid is not None else None
    answer = {"grid": grid, "refusal": found.refusal, "notes": found.notes, "clusters": dict(found.clusters)}
    return zlib.compress(json.dumps(answer, separators=(",", ":")).encode())  # the ranks of an irregular grid are many


def _decode(answer: bytes) -> Discovery:
    values = json.loads(zlib.decompress(answer))
    grid: dict[str, Any] | None = values["grid"]
    if grid is not None:
        grid = {key: tuple(value) if isinstance(value, list) else value for key, value in grid.items()}
    return Discovery(Grid(**grid) if grid else None, values["refusal"], tuple(values["notes"]), values["clusters"])
