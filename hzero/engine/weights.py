"""Secondary partitions (ZeRO++'s term): the weights over their scope, from which forward and backward unshard.

A front end's optimizer owns a primary shard of each parameter over the world. In addition, each rank keeps a secondary partition:
the part of the parameter that it sends to the other ranks of the weights' scope. A parameter passes these methods in a step:

1. `note_step`: the optimizer has changed primary shards.
2. `refresh`: payloads are rebuilt from primary shards. This crosses the outer tiers, once per step. With codec ``exact`` the
   messages have the changes from the old payloads.
3. `unshard`: whole weights are gathered from payloads, at every use, over the inner tiers only.

If the scope is the world, there is no payload, and `unshard` gathers primary shards. If the scope is one device, the
secondary partition is the whole parameter, decoded unless the block has `"resident": "payload"`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch

from hzero.codecs import exact
from hzero.codecs.codec import Codec, fingerprints
from hzero.codecs.formats import chunk_numel
from hzero.comm import Bucket, Chain, Runtime, in_buckets
from hzero.comm.runtime import BoundProgram
from hzero.comm.watchdog import HopError
from hzero.config import PLAIN
from hzero.engine.parameter import READY, Parameter, alike, bucket_of
from hzero.errors import some
from hzero.program.program import IN_FLIGHT, Program

#: Parameters of one message of an unshard, and the program that carries them. None: the copies are whole.
_Gather: TypeAlias = tuple[list[Parameter], BoundProgram | None]
#: Makes the current stream wait for whole parameters, and returns them, flat ``[world * chunk]``.
Unsharded: TypeAlias = Callable[[], list[torch.Tensor]]


@dataclass(eq=False)
class _Refresh:
    """Stale parameters that one message refreshes.

    Attributes:
        params: The parameters.
        changes: Whether the message has their changes.
        record: The encoded changes of this rank's shards; None: not encoded yet.
    """

    params: list[Parameter]
    changes: bool
    record: torch.Tensor | None = None


class _Arrived(NamedTuple):
    """A message of changes that has been decoded.

    Attributes:
        sent, arrived: int64 ``[n, 2]``, equal if the new weights of a sender are what it has stated.
        ranks: The senders.
        label: The bucket.
    """

    sent: torch.Tensor
    arrived: torch.Tensor
    ranks: Sequence[int]
    label: str

    def check(self) -> None:
        """Waits for the device.

        Raises:
            HopError: New weights are wrong.
        """
        pairs = zip(self.ranks, (self.sent != self.arrived).any(dim=1).tolist())
        wrong = [str(rank) for rank, differs in pairs if differs]
        if wrong:
            raise HopError(
                f"hzero: {self.label} in codec exact: the new weights of rank {some(wrong, 8)} are not what it has sent. Either "
                "their secondary partitions were written (call note_edit() after such writes), or the message arrived changed "
                '("checksum": true tells). No step used it'
            )


class Weights:
    """The secondary partitions of one model. Most methods are collective: all ranks call them in the same order.

    Args:
        runtime: The engine's runtime.
        parameters: The parameters.
        bucket_numel: Maximum number of elements in one refresh message, unless the block sets longer ones.
        largest: Returns the largest number over all ranks for each of int32 ``[n]``. Collective; waits for the device.
        accelerator: Makes events of an asynchronous device on which the front end changes primary shards; None on CPU.

    Attributes:
        version: Number of weight changes so far; also the seed of their stochastic rounding.
        parameters: Parameters by key.
        follows_writes: Whether the front end follows what the user writes into primary shards, which needs fingerprints.
    """

    follows_writes = True

    def __init__(
        self,
        runtime: Runtime,
        parameters: Iterable[Parameter],
        bucket_numel: int,
        largest: Callable[[torch.Tensor], list[int]],
        accelerator: Any = None,
    ) -> None:
        self.runtime, self.plan = runtime, runtime.plan
        self.version = 0
        self.parameters = {param.key: param for param in parameters}
        self._bucket_numel, self._largest, self._accelerator = bucket_numel, largest, accelerator
        self._changed = None if accelerator is None else accelerator.Event()
        self._stale: dict[int, _Refresh] = {}  # the refresh of each stale parameter, by key
        self._gathers = functools.lru_cache(READY)(partial(_gathers_of, runtime))  # a layer is gathered often
        self._copies = any(param.route.copies for param in self.parameters.values())
        self._ahead: list[tuple[Chain[None], int]] = []  # refreshes before their first unshard, with their last keys
        self._mark(list(self.parameters.values()))

    # ---- primary shards change -----------------------------------------------------------------------------------

    def note_step(self, stepped: Sequence[Parameter]) -> None:
        """Notes that an optimizer step has changed parameters. Their next use refreshes them, maybe by changes."""
        self.version += 1
        self._mark(stepped)

    def note_edit(self, edited: Sequence[Parameter] | None = None) -> None:
        """Notes that the user has changed parameters, which may have other sizes. Their next use refreshes whole weights.

        Args:
            edited: The parameters; None if anything may have been changed.
        """
        self.version += edited is None
        params = list(self.parameters.values()) if edited is None else edited
        for param in params:
            param.known = False
            if chunk_numel(param.numel, param.route.plan.grid.world_size) * param.code_bytes != param.chunk:
                self._gathers.cache_clear()
        self._mark(params)

    def _mark(self, params: Sequence[Parameter]) -> None:
        """Marks copies as stale. Streams that encode the shards wait for this point of the current stream."""
        outdated = {param.refreshing for param in params}
        self._ahead = [one for one in self._ahead if one[0] not in outdated]
        for bucket in self._in_buckets(param for param in params if param.route.copies) if self._copies else ():
            refresh = _Refresh(bucket, bucket[0].changes)
            self._stale.update((param.key, refresh) for param in bucket)
        if self._changed is not None:
            self._changed.record(self._accelerator.current_stream())

    def await_change(self) -> None:
        """Makes the current stream, which is about to read primary shards, wait for their last change."""
        if self._changed is not None:
            self._accelerator.current_stream().wait_event(self._changed)

    @torch.no_grad()
    def written(self) -> tuple[list[Parameter], torch.Tensor | None]:
        """Compares this rank's primary shards with those from which the copies are made, or their changes encoded. No host wait.

        Returns:
            The compared parameters, the same on all ranks. And for each one, whether its shard was written in whatever way since
            its refresh; bool ``[n]`` on the shards' device, None for none.
        """
        kept = [
            param
            for param in self.parameters.values()
            if (waiting := self._stale.get(param.key)) is None or waiting.record is not None
        ]
        pairs = [(param, param.fingerprint) for param in kept if param.fingerprint is not None]
        if not pairs:
            return [], None
        now = fingerprints([param.memory() for param, _ in pairs])
        return [param for param, _ in pairs], now != torch.stack([then for _, then in pairs])

    def _take_fingerprints(self, params: Sequence[Parameter]) -> None:
        if params and self.follows_writes:
            for param, now in zip(params, fingerprints([param.memory() for param in params])):
                param.fingerprint = now

    def remove(self, param: Parameter) -> None:
        """Removes a parameter that another engine takes over."""
        del self.parameters[param.key]
        self._stale.pop(param.key, None)

    def free(self) -> None:
        """Frees all secondary partitions; their next use rebuilds them."""
        self.runtime.lanes.drain()
        for param in self.parameters.values():
            if param.secondary is not None:
                self.runtime.lanes.used(param.secondary)  # an audit has read it on the current stream
            param.secondary = None
        self._gathers.cache_clear()
        self.note_edit()

    # ---- refresh -------------------------------------------------------------------------------------------------

    def refresh(self, needed: Iterable[Parameter] | None = None) -> None:
        """Starts to rebuild stale secondary partitions: all, or the copies in ``needed`` and a few more.

        Buckets of a route start in the order of keys, which is mostly the order of forward. Few run ahead of `unshard`, since
        each one uses two buffers of its message's size.
        """
        for param in list(self.parameters.values()) if needed is None else needed:
            if param.key in self._stale:
                self._start_refresh(self._stale[param.key])
        while self._stale and len(self._ahead) < IN_FLIGHT:
            self._refresh_ahead(next(iter(self._stale.values())))

    def refresh_stepped(self, stepped: Iterable[Parameter]) -> None:
        """Starts to rebuild copies of parameters whose step is done, while the optimizer steps others."""
        for param in stepped:
            # Changes wait until all parameters are stepped, for one agreement on their sizes.
            refresh = self._stale.get(param.key)
            if refresh is not None and not refresh.changes and len(self._ahead) < IN_FLIGHT:
                self._refresh_ahead(refresh)

    def _refresh_ahead(self, refresh: _Refresh) -> None:
        self._ahead.append((self._start_refresh(refresh), refresh.params[-1].key))

    def _in_buckets(self, params: Iterable[Parameter]) -> list[list[Parameter]]:
        """Messages of refreshes. Only a unit larger than a message is split, so that its first use waits for one message."""
        in_order = sorted(params, key=lambda param: param.key)
        buckets: list[list[Parameter]] = []
        for same in alike(
            in_order, lambda param: (str(param.dtype), param.changes, param.route.number, not param.urgent)
        ):
            limit = same[0].route.plan.refresh_numel(self._bucket_numel, same[0].dtype.itemsize)
            units = itertools.groupby(same, lambda param: param.unit or param)
            parts = [part for _, unit in units for part in in_buckets(((param, param.numel) for param in unit), limit)]
            sized = ((part, sum(param.numel for param in part)) for part in parts)
            buckets += [[param for part in bucket for param in part] for bucket in in_buckets(sized, limit)]
        return buckets

    def _start_refresh(self, refresh: _Refresh) -> Chain[None]:
        if self._waits(refresh):
            self._encode_changes()
        # A parameter may have changed again since, and then belongs to a later refresh.
        params = [param for param in refresh.params if self._stale.get(param.key) is refresh]
        route, bucket = params[0].route, bucket_of(params, params[0].dtype, "weights")
        if refresh.record is not None and len(params) == len(refresh.params):
            chain = self._send_changes(params, bucket, refresh.record)
        else:
            program = route.programs.uncoded if route.plan.exact else route.programs.refresh
            bound = self.runtime.bind(program, bucket)
            keep = partial(self._keep, params, bound.bucket)
            chain = bound.run(partial(self._shards, params, bound.bucket), keep, seed=self.version)
            self._take_fingerprints(params)
        for param, chunk in zip(params, bucket.chunks):
            param.refreshing, param.chunk, param.known = chain, chunk, True
            del self._stale[param.key]
        return chain

    def _shards(self, params: Sequence[Parameter], bucket: Bucket, *_: Any) -> list[torch.Tensor]:
        """Primary shards without padding. The last ranks' shards have fewer elements; the front end may not set the padding."""
        self.await_change()
        return [param.shard()[:numel] for param, numel in zip(params, bucket.owned)]

    def _keep(self, params: Sequence[Parameter], bucket: Bucket, refreshed: Any) -> None:
        """Keeps decoded weights, or reorders a payload ``[rows][tensor][record]`` by parameter, ``[tensor][rows][record]``.

        An unshard of consecutive parameters then sends part of the payload without a copy. The memory is freed when all of them
        have been refreshed again.
        """
        plan = params[0].route.plan
        if plan.whole_copies:
            for param, whole in zip(params, refreshed):
                param.secondary = whole
            return
        rows, codec = plan.secondary_rows, Codec.from_config(plan.secondary_codec)
        sizes = [codec.message_bytes([chunk], 1, bucket.dtype.itemsize) for chunk in bucket.chunks]
        payloads = refreshed.new_empty(refreshed.numel()).split([rows * size for size in sizes])
        for param, payload, records in zip(params, payloads, refreshed.view(rows, -1).split(sizes, dim=1)):
            payload.view(rows, -1).copy_(records)
            param.secondary = payload

    # ---- changes -------------------------------------------------------------------------------------------------

    def _waits(self, refresh: _Refresh) -> bool:
        """Whether changes have not been encoded yet. If a parameter has changed again, whole weights are sent instead."""
        intact = all(self._stale.get(param.key) is refresh for param in refresh.params)
        return refresh.changes and refresh.record is None and intact

    def _encode_changes(self) -> None:
        """Encodes the changes of all stale copies, with sizes that all ranks agree on. Collective; waits for the device once.

        Everything is encoded here, from one state of the shards, so that a write by the user cannot come in between.
        """
        waiting = [one for one in dict.fromkeys(self._stale.values()) if self._waits(one)]
        measured = []
        for one in waiting:
            for chain in _chains(one.params):
                chain.wait()
            bucket = bucket_of(one.params, one.params[0].dtype, "weights")
            new, layout = self._shards(one.params, bucket), exact.Layout.of(bucket.chunks)
            old = [self._copy(param)[param.route.plan.rank_row] for param in one.params]
            head = new[0].new_empty(layout.head, dtype=torch.uint8)
            exact.measure(new, old, head)
            measured.append((one, layout, new, old, head))
        words = torch.stack([exact.words_of(head) for *_, head in measured])
        for (one, layout, new, old, head), most in zip(measured, self._largest(words)):
            size = layout.record_bytes(most)
            if size >= layout.dense_bytes:
                one.changes = False
                continue
            one.record = head.new_empty(size)
            one.record[: len(head)] = head
            exact.encode(new, old, one.record)
            self._take_fingerprints(one.params)

    def _send_changes(self, params: Sequence[Parameter], bucket: Bucket, record: torch.Tensor) -> Chain[None]:
        program = params[0].route.changes(record.numel())
        joined = replace(bucket, chunks=(sum(bucket.chunks),), owned=())  # a record has all tensors
        refresh = self.runtime.bind(program, joined)
        return refresh.run(lambda: record, partial(self._apply_changes, params, joined.label))

    def _apply_changes(self, params: Sequence[Parameter], label: str, message: torch.Tensor) -> None:
        """Replaces the weights of the copies. Compares them with the owners' on arrival, on a device before the next step."""
        plan = params[0].route.plan
        shards = plan.secondary_shards
        rows = shards if plan.whole_copies else range(len(shards))
        for param in params:
            self.runtime.lanes.used(_secondary(param))
        right = exact.decode(message, [self._copy(param) for param in params], rows)
        found = right.long().view(-1, 1).expand(-1, 2)
        self.runtime.lanes.compare(_Arrived(torch.ones_like(found), found, shards, label))

    def _copy(self, param: Parameter) -> torch.Tensor:
        """A view of a decoded secondary partition, ``[rows, chunk]``: all shards, or the `ShardPlan.secondary_shards`."""
        copy, rows = _secondary(param), param.route.plan.secondary_rows
        if param.route.plan.whole_copies:
            return copy.view(rows, param.chunk)
        record = PLAIN.format.record_bytes(param.chunk, param.dtype.itemsize) // param.dtype.itemsize
        return copy.view(param.dtype).view(rows, record)[:, : param.chunk]

    # ---- unshard -------------------------------------------------------------------------------------------------

    def unshard(
        self, params: Sequence[Parameter], into: Mapping[int, torch.Tensor] | None = None
    ) -> list[tuple[list[Parameter], Unsharded]]:
        """Starts to gather whole parameters, after the refreshes that they need.

        Args:
            params: Parameters in the order of keys.
            into: Output tensors by key, flat ``[world * chunk]`` in the parameters' dtype; None makes new ones.

        Returns:
            For each message, its parameters and a function that waits for them.
        """
        if self._stale or self._ahead:
            self._refresh_needed(params)
        started: list[tuple[list[Parameter], Unsharded]] = []
        for same, gather in self._gathers(tuple(params)):
            if gather is None:
                started.append((same, partial(_wait_whole, same, into)))
                continue
            copies = same[0].route.copies
            read = partial(self._payloads, same) if copies else partial(self._shards, same, gather.bucket)
            targets = None if into is None else partial(_targets, same, into)
            # As `_chains`, inlined: every gather passes here.
            after = [chain for chain in dict.fromkeys([param.refreshing for param in same]) if chain is not None]
            started.append((same, gather.run(read, seed=self.version, after=after, into=targets).wait))
        return started

    def _refresh_needed(self, params: Sequence[Parameter]) -> None:
        """Starts the refreshes that parameters need. Forgets refreshes ahead that this forward has reached or passed."""
        used = {param.refreshing for param in params}
        passed = [index for index, (chain, _) in enumerate(self._ahead) if chain in used]
        del self._ahead[: max(passed, default=-1) + 1]
        if self._stale and any(param.key in self._stale for param in params):  # unused ones must not block the next
            self._ahead = [one for one in self._ahead if one[1] > params[0].key]
        self.refresh(params)

    def _payloads(self, params: Sequence[Parameter], *_: Any) -> torch.Tensor:
        """Returns one message of secondary partitions: a view if they are adjacent in memory, else a joined copy."""
        payloads: list[Any] = [param.secondary for param in params]  # set by refreshes
        first = payloads[0]
        memory, start = first.untyped_storage().data_ptr(), first.storage_offset()
        end = start
        for payload in payloads:
            if payload.storage_offset() != end or payload.untyped_storage().data_ptr() != memory:
                joined = torch.cat([self.runtime.lanes.used(one) for one in payloads])
                # A step moves only trained payloads again. In a mixed set, the others would keep both places.
                if len({param.trained for param in params}) == 1:
                    for param, part in zip(params, joined.split([one.numel() for one in payloads])):
                        param.secondary = part
                return joined
            end += payload.numel()
        return first.as_strided((end - start,), (1,))

    # ---- for audits ----------------------------------------------------------------------------------------------

    def up_to_date(self) -> list[Parameter]:
        """Returns the parameters whose secondary partitions are up to date, the same on all ranks."""
        found = [param for param in self.parameters.values() if param.key not in self._stale and param.numel]
        for chain in _chains(found):
            chain.wait()
        return [param for param in found if param.secondary is not None]

    def primary_shard(self, param: Parameter) -> torch.Tensor:
        """Returns this rank's shard of a parameter, flat, without padding."""
        return self._shards([param], bucket_of([param], param.dtype, "weights"))[0]

    def is_stale(self, param: Parameter) -> torch.Tensor:
        """Whether a refresh would now change the bytes of this rank's shard in its copy; bool ``[]``. Not collective.

        False if the bytes depend on more than the shard: on the message with stochastic rounding.
        """
        plan, copy, chunks = param.route.plan, _secondary(param), (param.chunk,)
        codecs = [PLAIN] if plan.exact else [hop.codec for hop in plan.refresh_hops()]
        if not plan.whole_copies:
            codecs.append(plan.secondary_codec)
        if any(codec.rounding == "stochastic" for codec in codecs):
            return torch.zeros((), dtype=torch.bool, device=copy.device)
        fresh = Codec.from_config(codecs[0]).encode([self.primary_shard(param)], chunks)
        for source, target in itertools.pairwise(codecs):
            if source.format != target.format:
                decoded = Codec.from_config(source).decode(fresh, chunks, dtype=param.dtype)
                fresh = Codec.from_config(target).encode(decoded, chunks)
        if plan.whole_copies:
            (fresh,) = Codec.from_config(codecs[-1]).decode(fresh, chunks, dtype=param.dtype)
        held = copy.view(plan.secondary_rows, -1)[plan.rank_row]
        return (held.reshape(-1).view(torch.uint8) != fresh.reshape(-1).view(torch.uint8)).any()


def _gathers_of(runtime: Runtime, params: tuple[Parameter, ...]) -> list[_Gather]:
    """Returns the messages of an unshard, one per dtype and route."""
    kinds = [(same, same[0].route) for same in alike(params, lambda param: (str(param.dtype), param.route.number))]
    return [
        (same, None if route.plan.whole_copies else _bound(runtime, route.programs.unshard, same))
        for same, route in kinds
    ]


def _bound(runtime: Runtime, program: Program, params: list[Parameter]) -> BoundProgram:
    return runtime.bind(program, bucket_of(params, params[0].dtype, "weights"))


def _secondary(param: Parameter) -> torch.Tensor:
    assert param.secondary is not None, "a refresh has made it"
    return param.secondary


def _chains(params: Iterable[Parameter]) -> list[Chain[Any]]:
    """Returns the refreshes of parameters, each once."""
    return [chain for chain in dict.fromkeys(param.refreshing for param in params) if chain is not None]


def _wait_whole(params: Sequence[Parameter], into: Mapping[int, torch.Tensor] | None) -> list[torch.Tensor]:
    for chain in _chains(params):
        chain.wait()
    wholes, targets = [_secondary(param) for param in params], _targets(params, into)
    return wholes if targets is None else [target.copy_(whole) for target, whole in zip(targets, wholes)]


def _targets(params: Sequence[Parameter], into: Mapping[int, torch.Tensor] | None) -> list[torch.Tensor] | None:
    return None if into is None else [into[param.key] for param in params]
