"""What only the transport over MPI has. Run by test_mpi.py under mpiexec, on four ranks."""

from __future__ import annotations

from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hzero.comm import Communicator, HopError, mpi_wires
from hzero.comm.mpi_wires import communicator_of
from hzero.errors import ConfigError
from tests.rank_main import begin_anew

WORLD, TIMEOUT = 4, timedelta(seconds=60)
SETTINGS = {"transport": "mpi", "topology": {"nodes": 2, "packages_per_node": 1, "devices_per_package": 2}}


def _everyones(numel: int, seed: int = 0) -> torch.Tensor:
    """uint8 ``[rank][numel]``, the same on all ranks."""
    return torch.randint(0, 256, (WORLD, numel), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def check_messages_of_any_size_in_any_window() -> None:
    """Pieces of messages, and fewer of them under way than there are, leave every byte in its place."""
    rank, wires = dist.get_rank(), communicator_of(("checks", "inter_node"), range(WORLD), TIMEOUT)
    for window, piece, largest in ((2, 3, 11), (4, 400, 1001), (32, 16 << 20, 300_001)):
        with mock.patch.multiple(mpi_wires, MESSAGES=window, MESSAGE_BYTES=piece):
            for numel in (0, 1, 5, largest):
                everyone = _everyones(WORLD * numel, numel)
                output = torch.empty(WORLD * numel, dtype=torch.uint8)
                work = wires.all_to_all(output, everyone[rank])
                assert len(work._requests) <= window
                work.wait()
                assert torch.equal(output, everyone.view(WORLD, WORLD, numel)[:, rank].reshape(-1))
                # Parts of other sizes, some of them empty.
                sizes = torch.arange(WORLD * WORLD).view(WORLD, WORLD) % 3 * (numel // 2)
                every = zip(_everyones(int(sizes.sum()), numel), sizes.tolist())
                parts = [one[: sum(side)].split(side) for one, side in every]
                sent, received = sizes[rank].tolist(), sizes[:, rank].tolist()
                output = torch.empty(sum(received), dtype=torch.uint8)
                wires.all_to_all(output, torch.cat(parts[rank]), received, sent).wait()
                assert torch.equal(output, torch.cat([of_rank[rank] for of_rank in parts]))
                gathered = torch.empty(WORLD * WORLD * numel, dtype=torch.uint8)
                wires.all_gather(gathered, everyone[rank]).wait()
                assert torch.equal(gathered, everyone.view(-1))
                message = everyone[rank].clone()
                wires.broadcast(message, WORLD - 1).wait()
                assert torch.equal(message, everyone[WORLD - 1])
                source, target = (rank + 3) % WORLD, (rank - 3) % WORLD
                received = torch.empty_like(message)
                wires.exchange(received, everyone[rank], source, target).wait()
                assert torch.equal(received, everyone[source])
    assert not wires.under_way


def check_a_group_of_half_the_ranks() -> None:
    rank, size = dist.get_rank(), WORLD // 2
    halves = [dist.new_group(list(range(start, WORLD, 2))) for start in (0, 1)]
    settings = {"topology": {"packages_per_node": size, "devices_per_package": 1}, "transport": "mpi"}
    group = Communicator(settings, halves[rank % 2])
    own = group.plan.rank
    everyone = [torch.full((2, 3), float(member)) for member in range(rank % 2, WORLD, 2)]
    assert torch.equal(group.all_gather(everyone[own]), torch.cat(everyone))
    assert torch.equal(group.all_reduce(everyone[own]), torch.stack(everyone).sum(0))
    sent = group.send(everyone[own], (own + 1) % size, async_op=True)
    assert torch.equal(group.recv(everyone[own], (own - 1) % size), everyone[own - 1])
    sent.wait()


def check_sizes_that_differ_are_named_and_nothing_is_sent_after_a_failure() -> None:
    """A communicator that one rank has given up may hold what another has sent, which would come in the next message's place."""
    for expected, said in (
        (5000, "a message of 4,000 bytes arrived; expected 20,000: ranks disagree"),
        (100, "a message arrived that is longer than the 400 bytes that were expected: ranks disagree"),
    ):
        group = Communicator(SETTINGS)
        if dist.get_rank() == 0:
            group.send(torch.ones(1000), 1)
        elif dist.get_rank() == 1:
            with pytest.raises(HopError, match=rf"hzero: recv of float32 .* failed: {said}$"):
                group.recv(torch.empty(expected), 0)
            with pytest.raises(
                ConfigError, match=r"^transport: found 'mpi', and an earlier wait of this process has f"
            ):
                Communicator(SETTINGS)
        begin_anew()


def check_ranks_that_do_not_come_end_a_wait() -> None:
    """Last, since MPI's job is ended with the process. To the making of a communicator, and to a hop."""
    rank, second = dist.get_rank(), timedelta(seconds=1)
    wires = communicator_of(("late", "inter_node"), range(WORLD), timedelta(seconds=60))
    wires.timeout_s = 1
    with mock.patch("atexit.register"):
        if rank:
            with pytest.raises(HopError, match=r"makes the MPI communicator of absent inter_node: no end within 1 s: "):
                communicator_of(("absent", "inter_node"), range(WORLD), second)
            for _ in range(2):  # nothing is sent on it any more
                with pytest.raises(RuntimeError, match=r"MPI: not all messages have ended within 1 s"):
                    wires.all_to_all(*torch.zeros(2, WORLD, dtype=torch.uint8)).wait()
            assert len(wires.under_way) == 1  # whose buffers stay
    dist.barrier()
