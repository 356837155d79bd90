"""The engine without DeepSpeed, as another front end drives it: parameters are keys, sizes and tensors. Ranks are threads."""

from __future__ import annotations

import math
import random
import re
import sys
import threading
import time
from typing import Any

import pytest
import torch

from hzero.codecs.formats import chunk_numel
from hzero.comm import Runtime, WireLog
from hzero.comm.watchdog import HopError
from hzero.comm.wires import STAGE
from hzero.config import GuardConfig, parse_config
from hzero.engine.gradients import Gradients
from hzero.engine.guard import Guard
from hzero.engine.parameter import Parameter, Route
from hzero.engine.weights import Weights
from hzero.program.program import StagePrograms
from hzero.program.shards import ShardPlan
from hzero.topology import Grid
from tests.comm.simulated import on_all, peers_of
from tests.ways import of_run

GRID = Grid(2, 1, 2)
WORLD = GRID.world_size
#: Sizes that the world does not divide, the last with empty shards.
NUMELS = (17 * 5, 30, 1)


class Rank:
    """The engine of one rank, whose primary shards are NaN beyond the parameters' ends."""

    def __init__(
        self,
        rank: int,
        block: dict[str, Any],
        groups: dict[Any, Any],
        grid: Grid = GRID,
        dtype: torch.dtype = torch.float32,
        numels: tuple[int, ...] = NUMELS,
    ) -> None:
        self.rank, plan = rank, ShardPlan.from_config(parse_config(block), grid, rank)
        self.numels, self.meeting = numels, groups.setdefault("meeting", (threading.Barrier(grid.world_size), {}))
        self.collectives = Runtime(plan, peers_of(plan, STAGE, groups), WireLog())
        self.shards = [
            torch.full((chunk_numel(numel, grid.world_size),), float("nan"), dtype=dtype) for numel in numels
        ]
        if numels is NUMELS:
            self.set(0)
        route = Route(plan, 0)
        self.params = [
            Parameter(key, f"p{key}", numel, dtype, route, lambda key=key: self.shards[key])
            for key, numel in enumerate(numels)
        ]
        self.weights = Weights(self.collectives, self.params, 40, self.largest)
        self.gradients = Gradients(self.collectives, 40)

    def largest(self, numbers: torch.Tensor) -> list[int]:
        """The largest numbers of all ranks, as an all-reduce has them."""
        barrier, said = self.meeting
        said[self.rank] = numbers.tolist()
        barrier.wait(60)
        found = [max(column) for column in zip(*said.values(), strict=True)]
        barrier.wait(60)
        return found

    def set(self, version: int) -> None:
        """What an optimizer step does."""
        for key, shard in enumerate(self.shards):
            own = whole(key, version)[self.rank * len(shard) : (self.rank + 1) * len(shard)]
            shard[: len(own)] = own

    def read(self, into: dict[int, torch.Tensor] | None = None) -> list[torch.Tensor]:
        """What forward reads, in tensors of its own or in given ones."""
        found: dict[int, torch.Tensor] = {}
        for params, wait in self.weights.unshard(self.params, into):
            found |= {param.key: flat[: param.numel].clone() for param, flat in zip(params, wait())}
        if into is not None:
            assert all(torch.equal(into[key][: NUMELS[key]], flat) for key, flat in found.items())
        return [found[key] for key in sorted(found)]

    def reduce(self) -> None:
        """What the backward of a micro-batch does that is not the last one."""
        gradients = [whole(key, 1) for key in range(len(NUMELS))]
        self.gradients.accumulate(
            self.params, gradients, torch.float32, 1.0, last=False, deliver=lambda params, shards: None
        )
        self.gradients.wait_reduced()


def whole(key: int, version: int) -> torch.Tensor:
    """A parameter after a step."""
    return torch.arange(NUMELS[key]) + 100.0 * key + 1000.0 * version


@pytest.mark.parametrize("preset", ["zero3", "lossless", "zero2", "topo"])
def test_weights_follow_steps_and_gradients_are_means(preset: str) -> None:
    groups: dict[Any, Any] = {}
    block = {"preset": preset, "codecs": {"weights": "none", "gradients": "none"}}
    ranks = [Rank(rank, block, groups) for rank in range(WORLD)]
    assert bool(torch.stack([rank.shards[-1].isnan().all() for rank in ranks[1:]]).all())

    def step(one: Rank) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
        first, delivered = one.read(), dict[int, torch.Tensor]()

        def deliver(params: list[Parameter], shards: list[torch.Tensor]) -> None:
            for param, shard in zip(params, shards):
                delivered[param.key] = delivered.get(param.key, 0) + shard

        for micro in range(2):
            gradients = [whole(key, micro) * (one.rank + 1) for key in range(len(NUMELS))]
            one.gradients.accumulate(one.params, gradients, torch.float32, 1.0, last=micro == 1, deliver=deliver)
        one.gradients.wait_reduced()
        if one.gradients.waiting:
            one.gradients.finish(torch.float32, 1.0, deliver)
        one.gradients.clear(done=True)
        one.set(1)
        one.weights.note_step(one.params)
        into = {key: torch.full((chunk_numel(numel, WORLD) * WORLD,), math.nan) for key, numel in enumerate(NUMELS)}
        copies = [param.secondary for param in one.params if param.secondary is not None]
        sums = [delivered[key] for key in sorted(delivered)]
        return [*first, *one.read(into)], sums, sum(copy.nbytes for copy in copies)

    results = on_all(ranks, step)
    want = [whole(key, version) for version in (0, 1) for key in range(len(NUMELS))]
    for key in range(len(NUMELS)):
        mean = (whole(key, 0) + whole(key, 1)) * (1 + 2 + 3 + 4) / WORLD
        torch.testing.assert_close(torch.cat([delivered[key] for _, delivered, _ in results]), mean)
    for read, _, resident in results:
        assert all(torch.equal(got, expected) for got, expected in zip(read, want, strict=True))
        assert bool(resident) == ranks[0].weights.plan.keeps_copies


def changed(ranks: list[Rank], actions: random.Random) -> None:
    """Lets an optimizer or a user change weights on all ranks."""
    stepped = actions.sample(range(len(ranks[0].params)), actions.randint(1, len(ranks[0].params)))
    scale, edits = actions.choice([0.0, 1e-4, 1e-2, 1.0]), actions.random() < 0.2
    for one in ranks:
        for key in stepped:
            generator = torch.Generator().manual_seed(actions.randint(0, 2**31) if edits else one.rank)
            shard = one.shards[key]
            shard += scale * torch.randn(shard.shape, generator=generator)
            if edits:  # anything at all, NaN and infinities too
                shard.view(torch.int16)[::7] = torch.randint(
                    -(2**15), 2**15, shard[::7].shape, generator=generator
                ).short()
        params = [one.params[key] for key in stepped]
        (one.weights.note_edit if edits else one.weights.note_step)(params)


@pytest.mark.parametrize(
    ("preset", "dtype"), [("lossless", torch.bfloat16), ("zero2", torch.float16), ("exact", torch.bfloat16)]
)
def test_changes_bring_the_owners_bits(preset: str, dtype: torch.dtype) -> None:
    """Whatever a user does, with and without a read in between; never in more bytes than the weights themselves."""
    actions, groups = random.Random(5), dict[Any, Any]()
    ranks = [Rank(rank, {"preset": preset}, groups, dtype=dtype, numels=(4001, 30, 900, 0, 2)) for rank in range(WORLD)]
    for one in ranks:
        for shard in one.shards:
            shard.copy_(torch.randn(shard.shape) * 0.02)
    on_all(ranks, Rank.read)
    for _ in range(25):
        for _ in range(actions.choice([1, 1, 2])):
            changed(ranks, actions)
        results = on_all(ranks, Rank.read)
        for key, numel in enumerate(ranks[0].numels):
            want = torch.cat([one.shards[key] for one in ranks])[:numel]
            for read in results:
                assert torch.equal(read[key].view(torch.int16), want.view(torch.int16))
    sent = {entry.codec: entry for one in ranks for entry in one.collectives.wire_log.entries()}
    assert sent["exact"].wire_bytes < 0.7 * sent["exact"].raw_bytes


def test_a_write_behind_encoded_changes_is_noticed() -> None:
    """The first use encodes the changes of all weights. One of them is written before its own use."""
    groups: dict[Any, Any] = {}
    numels = (4001, 5000, 4500, 6000, 5500)
    ranks = [Rank(rank, {"preset": "lossless"}, groups, dtype=torch.bfloat16, numels=numels) for rank in range(WORLD)]

    def step(one: Rank) -> list[torch.Tensor]:
        for shard in one.shards:
            shard.copy_(torch.randn(shard.shape))
        one.read()
        for shard in one.shards:
            shard.mul_(1.01)
        one.weights.note_step(one.params)
        for _, wait in one.weights.unshard(one.params[:1]):
            wait()
        one.shards[4][5] = 7.0
        compared, written = one.weights.written()
        assert written is not None
        edited = [param for param, differs in zip(compared, written.tolist()) if differs]
        assert [param.key for param in edited] == [4]
        one.weights.note_edit(edited)
        return one.read()

    results = on_all(ranks, step)
    for key, numel in enumerate(numels):
        want = torch.cat([one.shards[key] for one in ranks])[:numel]
        assert all(torch.equal(read[key], want) for read in results)


@pytest.mark.parametrize("told", [False, True])
def test_a_copy_that_was_written_is_found_on_arrival(told: bool) -> None:
    """Unless the engine is told, which then sends whole weights."""
    groups: dict[Any, Any] = {}
    ranks = [Rank(rank, {"preset": "lossless"}, groups, dtype=torch.bfloat16, numels=(4001,)) for rank in range(WORLD)]

    def step(one: Rank) -> str:
        (param,) = one.params
        one.shards[0].copy_(torch.randn(one.shards[0].shape))
        one.read()
        if one.rank == 1:
            assert param.secondary is not None
            param.secondary.view(torch.int16).view(2, -1)[1, 3] ^= 1  # of the row of rank 3
        if told:
            one.weights.note_edit()
        one.shards[0].mul_(1.01)
        one.weights.note_step(one.params)
        one.weights.refresh()
        assert param.refreshing is not None
        try:
            param.refreshing.wait()
        except HopError as error:
            return str(error)
        return ""

    says = on_all(ranks, step)
    assert [bool(text) for text in says] == [False, not told, False, False], says
    if not told:
        assert re.search(r"in codec exact: the new weights of rank 3 are not what it has sent", says[1])


@pytest.mark.parametrize(
    ("block", "together", "messages", "micros"),
    [
        ({"preset": "lossless"}, 1, 3, 1),
        ({"preset": "lossless"}, 2, 2, 2),
        ({"preset": "lossless"}, 9, 1, 1),
        ({"preset": "lossless"}, 9, 1, 2),
        ({"preset": "topo"}, 2, 2, 1),
        ({"preset": "topo"}, 2, 2, 2),
        ({"preset": "topo", "error_feedback": ["inter_group"]}, 9, 1, 2),
        ({"preset": "lossless", "checksum": True}, 9, 1, 2),
    ],
)
def test_buckets_share_a_message_of_the_outermost_tier(
    block: dict[str, Any], together: int, messages: int, micros: int
) -> None:
    """Each parameter is a bucket. Sums do not depend on the message, and with codec ``none`` are the flat sum."""
    grid, groups = Grid(4, 1, 2, nodes_per_group=2), dict[Any, Any]()
    (crossing,) = StagePrograms.of(ShardPlan.from_config(parse_config(block), grid, 0)).outermost.crossings
    first = [chunk_numel(numel, 8) for numel in NUMELS[::-1][:together]]
    least = sum(crossing.part_bytes([chunk], 4) for chunk in first) if together < 9 else 1 << 16

    def step(one: Rank) -> tuple[list[torch.Tensor], dict[str, int]]:
        delivered: dict[int, torch.Tensor] = {}

        def deliver(params: list[Parameter], shards: list[torch.Tensor]) -> None:
            delivered.update({param.key: shard for param, shard in zip(params, shards, strict=True)})

        for _ in range(3):  # programs run again, and residuals are carried on
            for micro in range(micros):
                for param in one.params[::-1]:
                    gradient = (whole(param.key, micro) * (one.rank + 1)).fmod(64.0)
                    one.gradients.accumulate(
                        [param], [gradient], torch.float32, 1.0, last=micro + 1 == micros, deliver=deliver
                    )
            one.gradients.finish(torch.float32, 1.0, deliver)
            one.gradients.clear(done=True)
        calls = {
            tier: one.collectives.peers[STAGE, tier].wires.calls
            for tier in ("intra_package", "inter_node", "inter_group")
        }
        return [delivered[key] for key in sorted(delivered)], calls

    collected = {**block, "boundary_message_bytes": least}
    results = on_all([Rank(rank, collected, groups, grid) for rank in range(8)], step)
    assert all(
        calls == {"intra_package": 9 * micros, "inter_node": 9, "inter_group": 3 * messages} for _, calls in results
    )
    alone = dict[Any, Any]()
    apart = on_all([Rank(rank, {**block, "boundary_message_bytes": 0}, alone, grid) for rank in range(8)], step)
    for (got, _), (want, _) in zip(results, apart, strict=True):
        assert all(map(torch.equal, got, want))
    for key in range(len(NUMELS)) if block["preset"] == "lossless" else ():
        flat = sum((whole(key, micro) * rank).fmod(64.0) for micro in range(micros) for rank in range(1, 9)) / 8
        assert torch.equal(torch.cat([got[key] for got, _ in results]), flat)


def test_a_full_message_crosses_while_backward_goes_on_and_a_parameter_is_in_it_once() -> None:
    groups: dict[Any, Any] = {}
    block = {"preset": "lossless", "boundary_message_bytes": 50}

    def step(one: Rank) -> list[torch.Tensor]:
        delivered = [torch.zeros(0)] * len(NUMELS)

        def deliver(params: list[Parameter], shards: list[torch.Tensor]) -> None:
            for param, shard in zip(params, shards):
                delivered[param.key] = delivered[param.key] + shard if len(delivered[param.key]) else shard

        wires, end = one.collectives.peers[STAGE, "inter_node"].wires, time.monotonic() + 20
        for key, messages in ((2, 0), (2, 1), (1, 1), (0, 2)):
            one.gradients.accumulate([one.params[key]], [whole(key, 0)], torch.float32, 1.0, last=True, deliver=deliver)
            while wires.calls < messages:
                assert time.monotonic() < end, (key, wires.calls)
                time.sleep(0.001)
            assert wires.calls == messages, key
        one.gradients.finish(torch.float32, 1.0, deliver)
        return delivered

    results = on_all([Rank(rank, block, groups) for rank in range(WORLD)], step)
    for key, times in ((0, 1), (1, 1), (2, 2)):
        assert torch.equal(torch.cat([shards[key] for shards in results]), whole(key, 0) * times)


def test_a_parameter_that_gets_another_size_is_gathered_whole() -> None:
    """As tokens that are added to an embedding: its next gather has the new size, also if it has been gathered before."""
    groups: dict[Any, Any] = {}
    size = 3 * WORLD + 2

    def grow(one: Rank) -> tuple[torch.Tensor, torch.Tensor]:
        (_, wait), *_ = one.weights.unshard(one.params[1:2])
        before = wait()[0].clone()
        grown = torch.arange(float(size)).split(chunk_numel(size, WORLD))
        one.shards[1], one.params[1].numel = grown[one.rank].clone(), size
        one.weights.note_edit(one.params[1:2])
        (_, wait), *_ = one.weights.unshard(one.params[1:2])
        return before[: NUMELS[1]], wait()[0][:size]

    for before, after in on_all([Rank(rank, {"preset": "lossless"}, groups) for rank in range(WORLD)], grow):
        assert torch.equal(before, whole(1, 0)) and torch.equal(after, torch.arange(float(size)))


def test_a_difference_waits_for_the_copy_to_which_it_is_added() -> None:
    """A step whose refresh starts while the first one is in flight gives the bits of a step that waits."""

    def refreshed(one: Rank, waits: bool) -> list[torch.Tensor]:
        one.weights.refresh()
        if waits:
            one.read()
        one.set(1)
        one.weights.note_step(one.params)
        one.weights.refresh()
        return one.read()

    block = {"preset": "topo", "refresh_message_bytes": 16}  # a refresh is several messages on the same lanes
    every = []
    for waits in (True, False):
        groups: dict[Any, Any] = {}
        every.append(on_all([Rank(rank, block, groups) for rank in range(WORLD)], lambda one: refreshed(one, waits)))  # noqa: B023
    for waited, found in zip(*every, strict=True):
        assert all(map(torch.equal, waited, found))


@pytest.mark.parametrize("preset", ["zero3", "lossless", "topo"])
def test_float16_gradients_whose_sum_overflows_have_a_finite_mean(preset: str) -> None:
    groups: dict[Any, Any] = {}
    block = {"preset": preset, "codecs": {"gradients": "none"}}

    def step(one: Rank) -> list[torch.Tensor]:
        delivered: dict[int, torch.Tensor] = {}

        def deliver(params: list[Parameter], shards: list[torch.Tensor]) -> None:
            delivered.update({param.key: shard for param, shard in zip(params, shards, strict=True)})

        gradients = [torch.full((numel,), 30_000.0, dtype=torch.float16) for numel in NUMELS]
        one.gradients.accumulate(one.params, gradients, torch.float16, 1.0, last=True, deliver=deliver)
        one.gradients.wait_reduced()
        one.gradients.finish(torch.float16, 1.0, deliver)
        return [delivered[key].float() for key in sorted(delivered)]

    results = on_all([Rank(rank, block, groups) for rank in range(WORLD)], step)
    for key, numel in enumerate(NUMELS):
        assert torch.equal(torch.cat([shards[key] for shards in results]), torch.full((numel,), 30_000.0))


def test_ranks_round_equal_gradients_apart() -> None:
    """Or their mean would have the error of a single rank. Codes of these gradients are 0 or 1, with a scale of 1."""
    groups: dict[Any, Any] = {}
    at_random = {"codec": "int8", "rounding": "stochastic"}
    block = {"preset": "zero2", "codecs": {"gradients": {"intra_package": at_random}}}
    gradient = torch.full((NUMELS[0],), 0.5)
    gradient[::11] = 127.0  # in every shard

    def step(one: Rank) -> torch.Tensor:
        found: list[torch.Tensor] = []
        one.gradients.accumulate(
            one.params[:1], [gradient], torch.float32, 1.0, last=True, deliver=lambda _, shards: found.extend(shards)
        )
        one.gradients.wait_reduced()
        return found[0]

    means = torch.cat(on_all([Rank(rank, block, groups) for rank in range(WORLD)], step))[gradient < 1]
    assert set(means.tolist()) == {0.0, 0.25, 0.5, 0.75, 1.0}


def test_padding_behind_the_last_element_is_no_weight() -> None:
    """A front end may leave it as it was allocated, which may look like values that are not finite."""
    groups: dict[Any, Any] = {}
    for rank in range(WORLD):
        one = Rank(rank, {"preset": "zero3"}, groups)
        guard = Guard(one.weights, GuardConfig(), torch.device("cpu"))
        owned = [guard._weights.primary_shard(param) for param in one.params]
        assert [len(shard) for shard in owned] == [[22, 22, 22, 19][rank], [8, 8, 8, 6][rank], [1, 0, 0, 0][rank]]
        assert all(bool(shard.isfinite().all()) for shard in owned)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="code objects have no qualified names")
@pytest.mark.parametrize(("preset", "most"), [("topo", 10), ("zero3", 13)])
def test_a_gather_passes_few_functions_on_its_second_run(preset: str, most: int) -> None:
    """As docs/architecture.md says ("How a gather runs"); `python -m tests.ways gather` prints them."""
    found = min((of_run("gather", preset) for _ in range(3)), key=len)  # on a busy machine, a chain may wait once more
    ours = {(module, name) for module, name in found if not module.startswith("hzero.codecs.")}
    assert {module for module, _ in ours} <= {
        "hzero.engine.weights",
        "hzero.comm.runtime",
        "hzero.comm.lanes",
    }
    assert len(ours) <= most, sorted(ours)
    assert {name for _, name in ours} >= {
        "Weights.unshard",
        "BoundProgram.run",
        "ThreadLanes.submit",
        "PreparedHop.start",
        "Chain.wait",
    }
