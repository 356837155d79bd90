"""Faults of the transport: who notices. Run by test_tiered.py on several ranks."""

from __future__ import annotations

import contextlib
import itertools
import re
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from hzero.comm import Chain, HopError, WireLog, peers_of, shared_watchdog
from hzero.comm.wires import TorchWires, process_group
from hzero.config import ALGORITHMS
from hzero.program.program import gather_program, reduce_program
from hzero.topology.grid import Grid
from tests.comm.faulty import CORRUPTIONS, Fault, FaultyRuntime
from tests.comm.tiered_checks import GRIDS, WORLD, _bucket, _collectives, _everyones
from tests.rank_main import TRANSPORT, begin_anew


def _faulty(grid: Grid, *, timeout: timedelta | None = None, seed: int = 0, **block) -> FaultyRuntime:
    plan = _collectives(grid, **block).plan
    how = {"seed": seed * WORLD + dist.get_rank(), "timeout_s": timeout.total_seconds() if timeout else 60.0}
    return FaultyRuntime(plan, peers_of(plan, timeout), WireLog(), **how)


def _operations(collectives: FaultyRuntime, decoded: list) -> dict:
    """A gather and a reduction of these collectives, of new contents at every call; ``decoded`` fills when one decodes."""
    plan, rank, turn = collectives.plan, dist.get_rank(), itertools.count()

    gathering = gather_program(plan, plan.gather_hops(), result=plan.gather_hops()[-1].codec)
    reducing = reduce_program(plan, plan.reduce_hops(), WORLD, shard_order=True)

    def gather() -> Chain:
        bucket = _bucket("weights", torch.float32)
        whole = _everyones(torch.float32, next(turn))[0]
        shards = [t[rank * c : (rank + 1) * c] for t, c in zip(whole, bucket.chunks)]

        def then(message: torch.Tensor) -> list[torch.Tensor]:
            decoded.append(True)
            return [message]

        return collectives.bind(gathering, bucket).run(lambda: shards, then)

    def reduce() -> Chain:
        tensors = _everyones(torch.float32, next(turn))[rank]
        bucket = _bucket("gradients", torch.float32)

        def then(sums: list[torch.Tensor]) -> list[torch.Tensor]:  # kernels compare what they read as they sum it
            decoded.append(True)
            return sums

        return collectives.bind(reducing, bucket).run(lambda: tensors, then)

    return {"gather": gather, "reduce": reduce}


def check_checksums_name_every_corruption_before_anything_is_decoded() -> None:
    """Of every algorithm, by codec and without; wherever in payload and checksum."""
    grid, rank, found = Grid(WORLD, 1, 1), dist.get_rank(), 0
    for index, (algorithm, codec) in enumerate(itertools.product(ALGORITHMS, ("none", "int8"))):
        codecs, setting = {"inter_node": codec}, {"algorithm": algorithm, "below_bytes": 1 << 30}
        collectives = _faulty(
            grid, seed=index, weights=codecs, gradients=codecs, node_all_gather=setting, checksum=True
        )
        decoded: list = []
        for name, start in _operations(collectives, decoded).items():
            collectives.faults = ()
            start().wait()  # what a duplicate repeats
            for turn, fault in enumerate(CORRUPTIONS * 3):
                if name == "reduce" and algorithm != "library":  # has one
                    continue
                collectives.faults = [fault] if rank == turn % WORLD else []
                collectives.done.clear()
                decoded.clear()
                chain = start()
                if rank != turn % WORLD:
                    with contextlib.suppress(HopError) if algorithm == "doubling" else contextlib.nullcontext():
                        chain.wait()  # by doubling, the victim passes on what it has received
                    continue
                with pytest.raises(HopError) as error:
                    chain.wait()
                case, text = (name, algorithm, codec, fault), str(error.value)
                assert collectives.done and not decoded, case
                summed = "reduce-scatter" if codec == "none" else "all-to-all"
                role, kind = ("weights", "all-gather") if name == "gather" else ("gradients", summed)
                assert f"{kind} of {role} of 6 parameters (ids 0..5) in codec {codec} on tier 'inter_node'" in text, (
                    case
                )
                senders = {int(sender) for sender in re.findall(r"from rank (\d+) with", text)}
                checksums = re.findall(r"with checksum ([0-9a-f]{32}), sent with ([0-9a-f]{32})", text)
                assert senders and senders <= set(range(WORLD)) and all(a != b for a, b in checksums), (case, text)
                if fault == "flip" and algorithm != "doubling":
                    assert len(senders) == 1, (case, text)
                found += 1
    everyones: list = [None] * WORLD
    dist.all_gather_object(everyones, found)
    assert sum(everyones) == 2 * (3 + 1) * 9, everyones


def check_a_group_needs_nothing_of_other_ranks() -> None:
    """A world that is bound to a device would be asked to split its communicator, and waits for all ranks."""
    rank, world, seconds = dist.get_rank(), dist.group.WORLD, timedelta(seconds=20)
    assert world is not None
    with mock.patch.object(c10d, "_get_split_source", return_value=None) as split:
        world.bound_device_id = torch.device("cuda", 0)
        try:
            if rank < 2:
                group, ones = process_group(("alone", "inter_node"), [1, 0], seconds), torch.ones(3)
                dist.all_reduce(ones, group=group)
                assert ones.tolist() == [2.0] * 3
                assert dist.get_process_group_ranks(group) == [1, 0]
            assert not split.called
            dist.new_group(timeout=seconds)
            assert split.called
        finally:
            world.bound_device_id = None


def check_an_exchange_waits_for_no_other_rank() -> None:
    """An all-to-all with empty parts does: it has a message to every rank, and from it."""
    rank, seconds = dist.get_rank(), timedelta(seconds=20)
    wires = TorchWires(process_group(("exchange", "inter_node"), range(WORLD), seconds), seconds)
    order = c10d._get_default_store()
    for pair in range(WORLD // 2):  # one after the other
        if rank // 2 == pair:
            arrived = torch.empty(3, dtype=torch.uint8)
            wires.exchange(arrived, torch.full((3,), rank, dtype=torch.uint8), rank ^ 1, rank ^ 1).wait()
            assert arrived.tolist() == [rank ^ 1] * 3
            order.set(f"exchange of {rank}", "")
        order.wait([f"exchange of {2 * pair + place}" for place in (0, 1)], seconds)


def check_an_exchange_with_all_ranks_has_one_timeout() -> None:
    """Rank 0 waits for ranks of which each is less than a timeout later than the one before it."""
    if TRANSPORT != "torch":
        pytest.skip("gloo's messages apply the timeout one by one")
    rank, seconds = dist.get_rank(), timedelta(seconds=0.8)
    wires, part = TorchWires(process_group(("slow", "inter_node"), range(WORLD), seconds), seconds), torch.ones(3)
    wires.all_gather(torch.empty(WORLD * 3), part).wait()  # connects
    dist.barrier()
    time.sleep(0.6 * min(-rank % WORLD, 3))  # rank 0 receives from its last peer first
    started, failed = time.monotonic(), False
    try:
        wires.all_gather(torch.empty(WORLD * 3), part).wait()
    except RuntimeError:
        failed = True
    assert rank or (failed and 0.7 < time.monotonic() - started < 1.6)
    dist.barrier()


def check_delays_change_no_bit() -> None:
    for checksum in (False, True):
        results = []
        for faults in ((), ("delay",)):
            collectives = _faulty(GRIDS[WORLD][0], seed=7, gradients={"intra_package": "int8"}, checksum=checksum)
            collectives.faults, collectives.chance = faults, 0.5
            operations = _operations(collectives, [])
            chains = [operations[name]() for name in ("gather", "reduce", "reduce", "gather")]
            results.append([tensor for chain in reversed(chains) for tensor in chain.wait()])
            assert bool(collectives.done) == bool(faults)
        assert all(map(torch.equal, *results))


def check_everyone_ends_in_time_when_one_rank_stops() -> None:
    """A dropped message, and a rank that a checksum stops between two hops: `HopError` everywhere, and nobody hangs."""
    if WORLD != 8:
        pytest.skip("takes a timeout")
    collectives = _faulty(Grid(2, 2, 2), timeout=timedelta(seconds=1.5), checksum=True)
    operations, rank = _operations(collectives, []), dist.get_rank()
    for start in operations.values():
        start().wait()  # connects
    dist.barrier()
    faults: dict[str, Fault] = {"weights": "flip", "gradients": "drop"}
    victims, errors, started = {"weights": 3, "gradients": 4}, {}, time.monotonic()
    for name, role in (("gather", "weights"), ("reduce", "gradients")):
        collectives.faults = [faults[role]] if rank == victims[role] else []
        try:
            with mock.patch.object(shared_watchdog(), "period_s", 0.3):  # after 4 of which a rank is silent
                operations[name]().wait()
        except HopError as error:
            errors[role] = str(error)
    assert time.monotonic() - started < 20
    everyones: list = [None] * WORLD
    dist.all_gather_object(everyones, errors)
    assert "arrived changed" in everyones[3]["weights"] and "no message after 1.5 s" in everyones[4]["gradients"]
    plan = collectives.plan
    for role, tier, victim in (
        ("weights", "intra_node", 3),
        ("gradients", "intra_package", 4),
    ):  # those that wait for it
        for peer in set(plan.grid.tier_group(victim, tier)) - {victim}:
            assert f"tier {tier!r}" in everyones[peer][role] and "failed after" in everyones[peer][role], everyones
    begin_anew()
