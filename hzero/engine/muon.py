"""Owners of matrices: a rank collects the shards of a matrix, computes its update and sends it back.

Muon orthogonalises whole matrices (Newton-Schulz, https://kellerjordan.github.io/posts/muon). Gradients, momentum and weights
stay sharded, so clipping, loss scaling and checkpoints see what they see without hzero.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import TypeAlias

import torch

from hzero.codecs.codec import Codec
from hzero.comm import Communicator, for_dimension
from hzero.comm.wires import process_group, world_timeout
from hzero.config import HZeroConfig, Tier
from hzero.engine.engine import Owners
from hzero.program.matrices import LEGS, Matrix, Owned, Round, along
from hzero.program.shards import ShardPlan

#: Returns this rank's shard of the input of a matrix's update, ``[<= chunk]``.
Send: TypeAlias = Callable[[int], torch.Tensor]
#: Returns the updates of whole matrices, given their numbers and values.
Compute: TypeAlias = Callable[[list[int], list[torch.Tensor]], list[torch.Tensor]]
#: Receives this rank's shard of an update, ``[chunk]`` with padding.
Receive: TypeAlias = Callable[[int, torch.Tensor], None]

#: Largest error of a rounded gradient that Muon bears, relative to the largest value of its block. int8 has half of it.
_BEARABLE = 0.01


class MatrixOwners:
    """Updates of sharded matrices, with the codecs of dimension ``optimizer``.

    Args:
        config: The block.
        owners: The ranks over which matrices are sharded.

    Attributes:
        groups: The communicators that send the matrices.
        owned: Returns the owners of a tuple of matrices; kept, since every step has the same.
    """

    def __init__(self, config: HZeroConfig, owners: Owners) -> None:
        self.owned = functools.lru_cache(partial(Owned.of, grid=owners.grid))
        self._across, self._inside = (_Leg(config, owners, tiers) for tiers in LEGS)
        self.groups = [leg.group for leg in (self._across, self._inside) if leg.group is not None]
        # The rank of each shard that an owner receives, ``[peers inside the node][peers across nodes]``.
        by_node = [along(owners.grid, rank, LEGS[1]) for rank in along(owners.grid, owners.rank, LEGS[0])]
        senders = [[by_node[node][place] for node in self._across.places] for place in self._inside.places]
        self._senders = torch.tensor(senders).flatten()
        self._by_rank = self._senders.argsort()
        # Newton-Schulz gives all directions of a matrix one length, also those that are noise.
        hops = ShardPlan.from_config(config, owners.grid, owners.rank).reduce_hops()
        coarse = {hop.codec.codec: None for hop in hops if Codec.from_config(hop.codec).error_bound(1.0) > _BEARABLE}
        if coarse and owners.rank == 0:
            print(
                f"hzero: codecs.gradients: found {' and '.join(coarse)} with Muon, whose updates amplify the rounding; expected "
                "none, or int8, which costs a tenth of the loss (docs/muon.md)",
                file=sys.stderr,
                flush=True,
            )

    def update(
        self, matrices: Sequence[Matrix], like: torch.Tensor, send: Send, compute: Compute, receive: Receive
    ) -> None:
        """Updates matrices. Collective. Messages of other rounds overlap with compute.

        Args:
            matrices: The matrices, in the same order on all ranks.
            like: A tensor with the dtype and device of the messages.
            send: See `Send`.
            compute: See `Compute`.
            receive: See `Receive`.
        """
        owned = self.owned(tuple(matrices))
        rounds = [self._round(owned, one, like, send, compute, receive) for one in owned.rounds]
        under_way: list[Iterator[None]] = []
        while rounds or under_way:
            under_way[:0] = [rounds.pop(0)] if rounds else []
            under_way = [one for one in under_way if next(one, "done") is None]

    def _round(
        self, owned: Owned, one: Round, like: torch.Tensor, send: Send, compute: Compute, receive: Receive
    ) -> Iterator[None]:
        """Runs one round. Yields while messages are in flight."""
        across, inside, (wide, narrow) = self._across, self._inside, owned.parts(one)
        nodes, peers = len(across.places), len(inside.places)
        of_node, mine = one[across.mine], one[across.mine][inside.mine]
        narrow //= nodes

        def places(numbers: Sequence[int], message: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
            """The part of each matrix in the last dimension of a message."""
            sizes = [owned.matrices[number].chunk for number in numbers]
            return list(zip(numbers, message.split([*sizes, message.shape[-1] - sum(sizes)], dim=-1)))

        # To the node of the owner: a rank sends its shards.
        message = like.new_zeros(nodes, wide)
        for row, node in zip(message, across.places):
            for number, shard in places([*chain(*one[node])], row):
                sent = send(number).flatten()
                shard[: sent.numel()] = sent
        arrives = across.start(message)
        yield

        # To the owner: a rank sends its shards and those of its peers in other nodes.
        arrived = dict(places([*chain(*of_node)], arrives()))
        message = like.new_zeros(peers, nodes, narrow)
        for part, place in zip(message, inside.places):
            for number, shards in places(of_node[place], part):
                shards.copy_(arrived[number])
        arrives = inside.start(message)
        yield

        shards, answer = arrives().view(peers * nodes, narrow)[self._by_rank], like.new_zeros(peers * nodes, narrow)
        wholes = []
        for number, part in places(mine, shards):
            shape = torch.Size(owned.matrices[number].shape)
            wholes.append(part.reshape(-1)[: shape.numel()].view(shape))
        for (_, part), update in zip(places(mine, answer), compute(mine, wholes) if mine else []):
            padding = part.numel() - update.numel()
            part.copy_(torch.nn.functional.pad(update.reshape(-1), (0, padding)).view(part.shape))
        arrives = inside.start(answer[self._senders].view(peers, nodes, narrow))
        yield

        message = like.new_zeros(nodes, wide)
        back = dict(places([*chain(*of_node)], message))
        for part, place in zip(arrives(), inside.places):
            for number, updates in places(of_node[place], part):
                back[number].copy_(updates)
        arrives = across.start(message)
        yield

        for row, node in zip(arrives(), across.places):
            for number, update in places([*chain(*one[node])], row):
                receive(number, update)


class _Leg:
    """The ranks that differ only on some tiers, and their communicator.

    Attributes:
        places: Place of each rank of the communicator, in the order of `along`.
        mine: This rank's place.
        group: The communicator; None for one rank.
    """

    def __init__(self, config: HZeroConfig, owners: Owners, tiers: tuple[Tier, ...]) -> None:
        by_place = along(owners.grid, owners.rank, tiers)
        self.places, self.mine = [by_place.index(rank) for rank in sorted(by_place)], by_place.index(owners.rank)
        self.group: Communicator | None = None
        if len(by_place) > 1:
            ranks = [owners.ranks[rank] for rank in sorted(by_place)]
            group = process_group(("matrices", tiers[0]), ranks, world_timeout())
            self.group = for_dimension("optimizer", config, group, grid=owners.world, uses=["sums"])

    def start(self, message: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Starts to send part i of a message to rank i. Returns a function that waits for the parts of all ranks."""
        return (lambda: message) if self.group is None else self.group.all_to_all(message, async_op=True).wait
