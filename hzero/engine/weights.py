"""Weights of one engine: resident payloads, and the gathers of forward and backward from them.

Each parameter keeps DeepSpeed's primary shard over the world, which the optimizer owns and the checkpoint stores. In addition
this rank holds a resident payload: the shards that it contributes inside the weights' scope. Forward and backward gather from
resident payloads, over the inner tiers only. A change of primary shards makes payloads stale. On a device, payloads of
the parameters that a step has updated are rebuilt immediately on a side stream; otherwise the next gather starts to rebuild
all of them. The outer tiers are crossed once, and a gather waits for its own parameters only.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial, wraps
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus, free_param

from hzero.codecs.codec import Codec
from hzero.codecs.formats import record_format
from hzero.comm import Bucket, Chain, Collectives, in_buckets, lasting
from hzero.deepspeed.refusals import ZeroParameter, check_types
from hzero.engine.managed import (
    GatherHandle,
    Gathering,
    Handles,
    Managed,
    ResidentHandle,
    StockHandle,
    Units,
    form_units,
)
from hzero.engine.primary import PrimaryShards
from hzero.engine.routes import Route, Routes
from hzero.plan.program import IN_FLIGHT

#: Functions that DeepSpeed sets on every parameter and the stage replaces.
_PATCHED = ("all_gather_coalesced", "all_gather", "partition")


class Weights:
    """The weights of one engine.

    Args:
        module: The model, its parameters partitioned by DeepSpeed over the world.
        collectives: The stage's tiered collectives.
        routes: How each parameter travels.
        bucket_numel: Max elements of the parameters that share one refresh message, unless the block asks for longer ones.
        layers: Modules whose parameters are gathered together.

    Attributes:
        version: Changes of the weights so far; the seed with which they are rounded stochastically.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        collectives: Collectives,
        routes: Routes,
        bucket_numel: int,
        layers: Sequence[torch.nn.Module] = (),
    ) -> None:
        self.collectives = collectives
        self._module = module
        self._plan = collectives.plan
        self._bucket_numel = bucket_numel
        self._routes = routes
        self._lossy = any(route.lossy for route in routes.all)
        check_types(module, lambda param: routes.of(param).plan)
        self._exact = False
        self._evaluating = False  # see `follow_mode`
        self._mode_hook: Any = None
        self.version = 0
        self._managed: dict[int, Managed] = {}
        self._stale: set[int] = set()
        self._primary = PrimaryShards(collectives, routes)
        self._ahead: list[tuple[Chain[None], int]] = []  # refreshes that no gather has come to, and their last ids
        for param in module.parameters():
            self._manage(param)
        self._primary.note_change()
        self._units = Units()
        form_units(module, layers, self._managed)
        units = self._units  # functions that hold nothing else, so that a copy of the model copies no engine
        self._unit_hooks = (
            module.register_forward_pre_hook(torch.compiler.disable(lambda *_: units.drop())),
            module.register_forward_hook(torch.compiler.disable(lambda *_: units.end())),
        )

    # ---- attaching to DeepSpeed's parameters ------------------------------------------------------------------------

    def _manage(self, param: ZeroParameter) -> None:
        if param.ds_id in self._managed:
            return
        stock = {name: getattr(param, name) for name in _PATCHED}
        managed = Managed(param, stock)
        managed.own = {
            "all_gather_coalesced": self.gather,
            "all_gather": partial(self._all_gather, managed),
            "partition": partial(self._partition, managed),
        }
        for name, function in managed.own.items():
            setattr(param, name, function)
        param.hzero_weights = self
        self._managed[param.ds_id] = managed
        self._mark(managed)

    def close(self) -> None:
        """Frees payloads and restores DeepSpeed's functions on the parameters; the next engine may be a stock one."""
        for hook in (*self._unit_hooks, *([self._mode_hook] if self._mode_hook is not None else [])):
            hook.remove()
        try:
            self.collectives.lanes.drain()
        finally:
            for managed in list(self._managed.values()):
                self._release(managed)

    def _release(self, managed: Managed) -> None:
        managed.release()
        del managed.param.hzero_weights
        if managed.unit is not None:
            managed.unit.members.remove(managed)
        del self._managed[managed.param.ds_id]
        self._stale.discard(managed.param.ds_id)

    @staticmethod
    def release_all(module: torch.nn.Module) -> None:
        """Releases the parameters of a module from an earlier engine that was not destroyed."""
        param: ZeroParameter
        for param in module.parameters():
            owner = Weights.of(param)
            if owner is not None:
                owner.collectives.lanes.drain()
                owner._release(owner._managed[param.ds_id])

    @staticmethod
    def of(param: ZeroParameter) -> Weights | None:
        """The weights that a parameter belongs to; None for those of a stock engine."""
        return getattr(param, "hzero_weights", None)

    def _all_gather(self, managed: Managed, param_list: Any = None, async_op: bool = False, hierarchy: int = 0) -> Any:
        """``param.all_gather``: stock, see `gathers_exactly`, unless a forward reads it outside its own module."""
        param = managed.param
        in_forward = getattr(self._module._parameters, "_in_forward", False)
        if param_list is None and in_forward and param.ds_status == ZeroParamStatus.NOT_AVAILABLE:
            return self.gather([param]).wait()
        return managed.stock["all_gather"](param_list=param_list, async_op=async_op, hierarchy=hierarchy)

    @staticmethod
    def gathers_exactly(stock: Callable[..., Any]) -> Callable[..., Any]:
        """``Init._all_gather``, through which ``param.all_gather`` of stock goes, for parameters of any engines.

        DeepSpeed calls ``params[0].all_gather(params)``, and the others may belong to other engines, with the stage or
        without. Available data may have been decoded. A reader that may write back must not see it, and must not write to
        the resident copy: such parameters are partitioned first, and DeepSpeed gathers their primary shards.
        """

        @wraps(stock)
        def all_gather(init: Any, param_list: list[ZeroParameter], *args: Any, **kwargs: Any) -> Any:
            owned = _owned(param_list)
            # DeepSpeed cannot free those in use: a context over one of them fails when it ends.
            idle = [own for _, own in owned if not own.param.ds_active_sub_modules]
            for own in idle:
                if own.param.ds_status == ZeroParamStatus.AVAILABLE and (own.decoded or own.whole is not None):
                    own.param.partition()
            with lasting() if owned else contextlib.nullcontext():
                gathered = stock(init, param_list, *args, **kwargs)
            for own in idle:
                own.decoded = False
            return gathered

        return all_gather

    def _partition(
        self,
        managed: Managed,
        param_list: Any = None,
        hierarchy: int = 0,
        has_been_updated: bool = False,
        free_data: bool = True,
    ) -> None:
        """``param.partition``: stock, see `notes_changes`."""
        if (
            param_list is None
            and free_data
            and not has_been_updated
            and managed.param.ds_status == ZeroParamStatus.AVAILABLE
        ):
            with lasting():
                # All that stock does here, without the texts that it makes and does not print.
                free_param(managed.param)
            managed.decoded = False
            if managed.unit is not None:
                managed.unit.take_back(managed)
            return
        managed.stock["partition"](
            param_list=param_list, hierarchy=hierarchy, has_been_updated=has_been_updated, free_data=free_data
        )

    @staticmethod
    def notes_changes(stock: Callable[..., Any]) -> Callable[..., Any]:
        """``Init._partition``, through which ``param.partition`` of stock goes: payloads of written parameters become stale.

        As for `gathers_exactly`, the parameters may belong to other engines than the first of them.
        """

        @wraps(stock)
        def partition(
            init: Any,
            param_list: list[ZeroParameter],
            force: bool = False,
            has_been_updated: bool = False,
            **kwargs: Any,
        ) -> None:
            owned = _owned(param_list)
            for owner in dict.fromkeys(owner for owner, _ in owned) if has_been_updated else ():
                owner.before_change()
            with lasting() if owned else contextlib.nullcontext():
                stock(init, param_list, force=force, has_been_updated=has_been_updated, **kwargs)
            for owner, own in owned:
                own.decoded = False
                if own.unit is not None:
                    own.unit.take_back(own)
                if has_been_updated:
                    owner._mark(own)
                    owner._primary.note_change()

        return partition

    @staticmethod
    def notes_steps(stock: Callable[..., None]) -> Callable[..., None]:
        """The end of a step of DeepSpeed's optimizer, whose parameters a later engine with the stage may gather."""

        @wraps(stock)
        def reassign(optimizer: Any, sub_group_id: int) -> None:
            owned = [] if hasattr(optimizer, "hzero") else _owned(optimizer.fp16_groups[sub_group_id])
            for owner in dict.fromkeys(owner for owner, _ in owned):
                owner.before_change()
            stock(optimizer, sub_group_id)
            if owned:
                owned[0][0].mark_stale([own.param for _, own in owned])

        return reassign

    # ---- staleness --------------------------------------------------------------------------------------------------

    def mark_stale(self, params: Iterable[ZeroParameter] | None = None) -> None:
        """Marks the payloads of ``params``, which a step has changed, or of all, to be rebuilt before their next use.

        A later engine may have taken over some of ``params``; then it keeps their payloads. All ranks must call this alike,
        since rebuilding is a collective.
        """
        marked = [(self, own) for own in self._managed.values()] if params is None else _owned(params)
        replaced = {own.refresh for _, own in marked}
        for owner in dict.fromkeys([self, *(owner for owner, _ in marked)]):
            owner.version += 1
            owner._units.drop()
            owner._ahead = [one for one in owner._ahead if one[0] not in replaced]
            owner._primary.note_change()
        for owner, own in marked:
            owner._mark(own, stepped=params is not None)

    def _mark(self, managed: Managed, stepped: bool = False) -> None:
        self._stale.add(managed.param.ds_id)
        managed.part = None
        if managed.unit is not None:
            managed.unit.forget(managed)
        if not stepped:
            managed.age = None

    def before_change(self) -> None:
        """Makes the current stream, which is about to write primary shards, wait until they have been encoded."""
        self._primary.before_change()

    def drop(self) -> None:
        """Frees all resident payloads; their next use rebuilds them."""
        self.collectives.lanes.drain()
        for managed in self._managed.values():
            managed.payload = managed.whole = None
            self._mark(managed)

    def resident_bytes(self) -> int:
        """Memory of the resident payloads, or of the resident weights, on this rank, in bytes."""
        return sum(m.kept.nbytes for m in self._managed.values() if m.kept is not None)

    def primary_bytes(self) -> int:
        """Memory of the primary shards on this rank, in bytes."""
        return sum(m.param.ds_tensor.nbytes for m in self._managed.values())

    @contextlib.contextmanager
    def exact(self) -> Iterator[None]:
        """Inside, forward and backward gather the primary shards without codecs, as stock DeepSpeed does."""
        before, self._exact = self._exact, True
        self._units.drop()
        for managed in self._managed.values():
            managed.put_away(decoded=True)
        try:
            yield
        finally:
            self._put_away_all()
            self._exact = before
        self.gather_kept_whole()

    def follow_mode(self) -> None:
        """From now on a forward in evaluation mode, and its backward, read exact weights, as inside `exact`.

        The mode is that of the whole module (``module.training``) when its forward begins. All ranks must call this alike,
        and set the mode alike. Codec ``none`` is exact anyway.
        """
        if self._lossy and self._mode_hook is None:
            self._mode_hook = self._module.register_forward_pre_hook(self._enter_mode, prepend=True)

    @torch.compiler.disable
    def _enter_mode(self, module: torch.nn.Module, *_: Any) -> None:
        """Where the mode has changed, puts away what the other mode has left available. No collective."""
        if self._evaluating == module.training:
            self._evaluating = not module.training
            self._put_away_all()

    def _put_away_all(self) -> None:
        self._units.drop()
        for managed in self._managed.values():
            managed.put_away()

    @property
    def fallible(self) -> bool:
        """Whether a codec may fail to hold a block of weights."""
        return any(route.fallible for route in self._routes.all)

    def fall_back(self) -> None:
        """From now on weights travel without such codecs. All ranks must call this alike."""
        for route in self._routes.all:
            route.follow(route.plan.without_fallible())
        self._put_away_all()
        self.mark_stale()

    # ---- gather -----------------------------------------------------------------------------------------------------

    def gather(self, params: Iterable[ZeroParameter], safe_mode: bool = False, quantize: bool = False) -> Any:
        """Starts the gather of whole parameters for forward or backward (``param.all_gather_coalesced``).

        Args:
            params: Parameters that are not available, the same on all ranks in any order; of any engines.
            safe_mode: DeepSpeed's; only the exact path uses it.
            quantize: DeepSpeed's own weight quantisation; always False, since the stage refuses it at start.

        Returns:
            A handle whose ``wait`` sets ``param.data``, ``[ds_shape]``, and the status AVAILABLE.

        Raises:
            RuntimeError: A parameter is already available or under way.
        """
        params = sorted(params, key=lambda param: param.ds_id)
        others: dict[Weights | None, list[ZeroParameter]] = {}
        for param in params:
            if (owner := Weights.of(param)) is not self:
                others.setdefault(owner, []).append(param)
        if others:  # their functions are those of their engine, or DeepSpeed's
            params = [param for param in params if Weights.of(param) is self]
            handles = [same[0].all_gather_coalesced(same, safe_mode=safe_mode) for same in others.values()]
            return Handles([self.gather(params, safe_mode=safe_mode), *handles])
        wanted = [self._managed[param.ds_id] for param in params]
        if wanted and (self._exact or self._evaluating or self._plan.grid.world_size == 1):
            self._primary.await_change()
            with lasting():
                return StockHandle(
                    wanted[0].stock["all_gather_coalesced"](params, safe_mode=safe_mode, quantize=quantize)
                )
        for managed in wanted:
            if managed.param.ds_status != ZeroParamStatus.NOT_AVAILABLE:
                raise RuntimeError(
                    f"hzero: cannot gather a parameter that is not partitioned: {managed.param.ds_summary()}"
                )
            # The shard may have changed its size: users can resize a parameter inside GatheredParameters.
            if managed.refresh is not None and managed.chunk != self._primary.chunk(managed.param):
                self._mark(managed)
        self._units.turn_to(wanted, waiting=False)
        missing = self._units.widened(wanted)
        if missing:
            self._start(missing)
        for managed in wanted:
            managed.param.ds_status = ZeroParamStatus.INFLIGHT
            managed.decoded = self._routes.of(managed.param).lossy
        return ResidentHandle(wanted) if self._plan.decoded else GatherHandle(wanted, self._units)

    def _start(self, missing: Sequence[Managed]) -> None:
        """Starts to gather parameters, after the refreshes that they need."""
        params = [managed.param for managed in missing]
        used = {managed.refresh for managed in missing}
        passed = [index for index, (chain, _) in enumerate(self._ahead) if chain in used]
        del self._ahead[: max(passed, default=-1) + 1]  # with those that this forward passes over
        if any(param.ds_id in self._stale for param in params):  # else those of parameters that nobody uses would stay
            self._ahead = [one for one in self._ahead if one[1] > params[0].ds_id]
        self.refresh(params)
        if self._plan.decoded:
            return
        alike: dict[tuple[str, int], list[Managed]] = {}
        for managed in missing:
            kind = str(self._primary.dtype(managed.param)), self._routes.of(managed.param).number
            alike.setdefault(kind, []).append(managed)
        for _, same in sorted(alike.items()):
            chain = self._gathered([managed.param for managed in same], self.collectives)
            if not self._routes.usual.refreshes and self.collectives.lanes.streams is not None:
                self._primary.read_by(chain)
            gathering = Gathering(chain, self.collectives.lanes.streams is not None)
            for managed in same:
                managed.part = gathering.add()
                self._units.bring(managed)

    def end_backward(self) -> None:
        """Lets go of the layers that backward has gathered."""
        self._units.end()

    def drop_units(self) -> None:
        """Lets go of all layers, also of those gathered ahead."""
        self._units.drop()

    def gather_kept_whole(self) -> None:
        """Gathers the parameters that are kept whole, and waits: scripts read them at any time without a request."""
        kept = (own.param for own in self._managed.values() if own.param.ds_persist)
        self.gather(param for param in kept if param.ds_status == ZeroParamStatus.NOT_AVAILABLE).wait()

    def _gathered(self, params: Sequence[ZeroParameter], collectives: Collectives) -> Chain[list[torch.Tensor]]:
        bucket, route = self._primary.bucket(params), self._routes.of(params[0])
        read: Callable[[], Any] = partial(self._primary.of, params, bucket)
        if route.refreshes:
            read = partial(self._payloads, params)
        refreshes = dict.fromkeys(self._managed[param.ds_id].refresh for param in params)
        after = [one for one in refreshes if one is not None]
        return collectives.run(route.fetch, bucket, read, _unchanged, seed=self.version, after=after)

    def _payloads(self, params: Sequence[ZeroParameter]) -> torch.Tensor:
        """One message of resident payloads, as they lie in memory; they are laid together where they do not yet."""
        managed = [self._managed[param.ds_id] for param in params]
        payloads = [own.payload for own in managed if own.payload is not None]
        assert len(payloads) == len(managed), "refresh has built them"
        first, *others = payloads
        end = first.storage_offset() + first.numel()
        for payload in others:
            if (
                payload.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
                or payload.storage_offset() != end
            ):
                joined = torch.cat([self.collectives.used(payload) for payload in payloads])
                if len({own.param.requires_grad for own in managed}) > 1:
                    # A step moves only some of them away again, and the others would keep both places.
                    return joined
                for own, part in zip(managed, joined.split([payload.numel() for payload in payloads])):
                    own.payload = part
                return joined
            end += payload.numel()
        return self.collectives.used(first).as_strided((end - first.storage_offset(),), (1,))

    # ---- audit ------------------------------------------------------------------------------------------------------

    def resident(self) -> list[tuple[Managed, torch.Tensor]]:
        """Parameters whose resident copies are up to date, with these; the same parameters on all ranks."""
        found = []
        for key, managed in self._managed.items():
            if key not in self._stale and managed.refresh is not None and managed.param.ds_numel:
                managed.refresh.wait()
                if managed.kept is not None:
                    found.append((managed, managed.kept))
        return found

    def gatherable(self) -> list[ZeroParameter]:
        """Parameters that can be gathered without a refresh, the same on all ranks."""
        if self._routes.usual.refreshes:
            return [managed.param for managed, _ in self.resident()]
        return [managed.param for managed in self._managed.values() if managed.param.ds_numel]

    def is_usual(self, param: ZeroParameter) -> bool:
        """Whether a parameter has the codecs of its tiers, and no exception."""
        return self._routes.of(param) is self._routes.usual

    def primary_shard(self, param: ZeroParameter) -> torch.Tensor:
        """This rank's shard of a parameter, flat, without padding."""
        return self._primary.of([param], self._primary.bucket([param]))[0]

    def own_shard(self, managed: Managed) -> tuple[torch.Tensor, torch.Tensor] | None:
        """This rank's shard as its resident copy has it, and as a refresh would make it now; no collective.

        None where that depends on more than the shard: differences on the steps before, stochastic rounding on the message.
        """
        route = self._routes.of(managed.param)
        codecs = [hop.codec for hop in route.plan.refresh_hops()]
        if not self._plan.decoded:
            codecs.append(route.plan.resident_codec)
        if route.plan.differences or any(codec.rounding == "stochastic" for codec in codecs):
            return None
        bucket = self._primary.bucket([managed.param])
        message = Codec.from_config(codecs[0]).encode(self._primary.of([managed.param], bucket), bucket.chunks)
        for source, target in itertools.pairwise(codecs):
            if record_format(source) != record_format(target):
                message = self.collectives.recode(bucket, message, source, target, pieces=1, rows=1, seed=0)
        if managed.whole is not None:
            (fresh,) = Codec.from_config(codecs[-1]).decode(message, bucket.chunks, dtype=bucket.dtype)
            return managed.whole.view(-1, managed.chunk)[self._plan.rank], fresh
        assert managed.payload is not None, "it is resident"
        return managed.payload.view(self._plan.resident_rows, -1)[self._plan.own_row], message

    def whole(self, param: ZeroParameter, collectives: Collectives) -> torch.Tensor:
        """A parameter as forward reads it, ``[world * chunk]``. Collective; it must be `gatherable`."""
        whole = self._managed[param.ds_id].whole
        return whole if whole is not None else self._gathered([param], collectives).wait()[0]

    # ---- refresh ----------------------------------------------------------------------------------------------------

    def refresh(
        self, needed: Iterable[ZeroParameter] | None = None, among: Iterable[ZeroParameter] | None = None
    ) -> None:
        """Starts to rebuild stale resident payloads, by collectives.

        Buckets of a route are started in the order in which their parameters were made, mostly that of forward. Few are ahead
        of the gathers at a time, since each holds its message twice. All ranks must call it alike.

        Args:
            needed: Parameters whose payloads are built in any case, before a few more; None: all.
            among: Parameters whose primary shards are up to date; None: all.
        """
        if not self._routes.usual.refreshes or not self._stale:
            return
        missing = self._stale.intersection(self._managed if needed is None else (param.ds_id for param in needed))
        if not missing and len(self._ahead) >= IN_FLIGHT:
            return
        alike: dict[tuple[str, bool, int, bool], list[Managed]] = {}
        ready = self._stale if among is None else self._stale.intersection(param.ds_id for param in among)
        for managed in (self._managed[key] for key in sorted(ready)):
            dtype, number = str(self._primary.dtype(managed.param)), self._routes.of(managed.param).number
            # Those kept whole are needed at once, after every step: they must not wait for the others.
            kind = dtype, self._differs(managed), number, not managed.param.ds_persist
            alike.setdefault(kind, []).append(managed)
        buckets: list[list[Managed]] = []
        for _, same in sorted(alike.items()):
            itemsize = self._primary.dtype(same[0].param).itemsize
            numel = self._routes.of(same[0].param).plan.refresh_numel(self._bucket_numel, itemsize)
            buckets += in_buckets(((managed, self._primary.numel(managed.param)) for managed in same), numel)
        now = [any(managed.param.ds_id in missing for managed in bucket) for bucket in buckets]
        for bucket, is_needed in sorted(zip(buckets, now), key=lambda item: not item[1]):
            if not is_needed and len(self._ahead) >= IN_FLIGHT:
                return
            chain = self._start_refresh(bucket)
            if not is_needed:
                self._ahead.append((chain, bucket[-1].param.ds_id))
            self._stale -= {managed.param.ds_id for managed in bucket}

    def _differs(self, managed: Managed) -> bool:
        """Whether the next refresh of a parameter sends a difference."""
        return managed.age is not None and managed.age + 1 < self._routes.of(managed.param).plan.differences

    def _start_refresh(self, managed: Sequence[Managed]) -> Chain[None]:
        """Starts the refresh of parameters that are alike, see `_differs`."""
        params, differs = [m.param for m in managed], self._differs(managed[0])
        route, bucket = self._routes.of(params[0]), self._primary.bucket(params)
        program = route.whole if route.plan.differences else route.refresh
        read: Callable[[], Any] = partial(self._primary.of, params, bucket)
        keep: Callable[[Any], None] = partial(self._keep, managed, bucket, route)
        after: Sequence[Chain[Any]] = ()
        if differs:
            program = route.difference
            read = partial(self._difference, managed, bucket, route, self.version)
            keep = partial(self._add_difference, managed, bucket, route)
            after = [one for one in dict.fromkeys(own.refresh for own in managed) if one is not None]
        chain = self.collectives.run(program, bucket, read, keep, seed=self.version, after=after)
        self._primary.read_by(chain)
        for own, chunk in zip(managed, bucket.chunks):
            own.refresh, own.chunk = chain, chunk
            own.age = (own.age or 0) + 1 if differs else 0
        return chain

    def _difference(self, managed: Sequence[Managed], bucket: Bucket, route: Route, seed: int) -> torch.Tensor:
        """A message of what is new in this rank's shards, against the copy that all ranks hold."""
        row = self._plan.rank if self._plan.decoded else self._plan.own_row
        shards = self._primary.of([own.param for own in managed], bucket)
        copies = [own.copy(self._plan.resident_rows, bucket.dtype)[row] for own in managed]
        base = [copy[: weights.numel()] for copy, weights in zip(copies, shards)]
        codec = Codec.from_config(route.plan.refresh_hops()[0].codec)
        return codec.encode_difference(shards, base, bucket.chunks, seed=seed)

    def _add_difference(self, managed: Sequence[Managed], bucket: Bucket, route: Route, message: torch.Tensor) -> None:
        """Adds what has come to the resident copies, in their own type: one rounding, the same on all ranks."""
        copies = [own.copy(self._plan.resident_rows, bucket.dtype) for own in managed]
        # Rows of a payload may be padded: then the sums are made in a contiguous copy.
        whole = [copy.contiguous() for copy in copies]
        if self._plan.decoded:
            self.collectives.add_decoded(route.difference, bucket, message, whole)
        else:
            codec, pieces = Codec.from_config(route.difference.codec), route.difference.pieces
            codec.decode_onto(message, whole, bucket.chunks, sizes=(self._plan.resident_rows,), outer=pieces)
        for copy, tensor in zip(copies, whole):
            if tensor.data_ptr() != copy.data_ptr():
                copy.copy_(tensor)

    def _keep(self, managed: Sequence[Managed], bucket: Bucket, route: Route, refreshed: Any) -> None:
        """Keeps decoded weights, or a payload ``[rows][tensor][record]`` by parameter, ``[tensor][rows][record]``.

        A gather of parameters that follow each other then sends a part of it as it is. The memory is freed when all of
        them have been refreshed again.
        """
        if self._plan.decoded:
            for own, whole in zip(managed, refreshed):
                own.whole = whole
            return
        rows, codec = self._plan.resident_rows, route.resident_codec
        sizes = [codec.message_bytes([chunk], 1, bucket.dtype.itemsize) for chunk in bucket.chunks]
        payloads = refreshed.new_empty(refreshed.numel()).split([rows * size for size in sizes])
        for own, payload, records in zip(managed, payloads, refreshed.view(rows, -1).split(sizes, dim=1)):
            payload.view(rows, -1).copy_(records)
            own.payload = payload


def _unchanged(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return tensors


def _owned(params: Iterable[ZeroParameter]) -> list[tuple[Weights, Managed]]:
    """The parameters that engines with the stage gather, each with the weights of its own engine."""
    owners = [(param, Weights.of(param)) for param in params]
    return [(owner, owner._managed[param.ds_id]) for param, owner in owners if owner is not None]
