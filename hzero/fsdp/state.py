"""FSDP2 over the tiers of a machine: gathers from resident weights, and gradients that cross nodes once per step."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hzero.comm import lasting, shared_watchdog
from hzero.comm.wires import process_group, world_timeout
from hzero.config import Block, HZeroConfig, parse_config
from hzero.engine.engine import Engine, Owners, ranks_of
from hzero.engine.guard import speaks
from hzero.engine.parameter import Parameter, Route, routes_of
from hzero.fsdp.modules import ShardedModule, at_end_of_backward, keep_reducing, sharded_modules, views_in
from hzero.plan.shards import ShardPlan
from hzero.sequence import attach, detacher
from hzero.validation import ConfigError, on_all_ranks, one_of

logger = logging.getLogger("hzero")

#: Keys of the block that say something of DeepSpeed's modules and checkpoints.
_OF_DEEPSPEED = ("unit", "unit_numel", "checkpoint")


def apply(
    model: torch.nn.Module, preset: str = "topo", topology: Any = "discover", accumulation: int = 1, **block: Any
) -> FsdpState:
    """Makes a model that ``fully_shard`` has sharded gather and reduce tier by tier, each tier with its codec.

    FSDP2 keeps its shards, so its optimizers, clipping and checkpoints work as before. The weights are also resident over the
    preset's scope, such as a package or a node: forward and backward gather from there, and a refresh crosses the outer tiers
    once per optimizer step. Gradients are summed over the node in every backward, and cross nodes after the last one of a step.

    Which backward is the last one of a step:

    - the one with ``set_is_last_backward(True)``, ``set_requires_all_reduce(True)`` or ``set_requires_gradient_sync(True)`` after
      some with False, as Accelerate and Trainer set them;
    - else every ``accumulation``-th. Those of modules that alone were told to wait, as for a loss in chunks, do not count.

    Parameters that a backward does not use get zero gradients, as with ``set_reduce_scatter_unused_params(True)``.

    Args:
        model: The model, after ``fully_shard`` for its layers and for itself, on meshes of one dimension or on one dimension
            of a mesh with tensor parallelism. All ranks call this alike.
        preset: Shard degrees and codecs (docs/presets.md).
        topology: Places of the ranks: ``discover``, a preset, a file, or a dictionary such as
            ``{"gpus_per_node": 4, "gcds_per_gpu": 2}``.
        accumulation: Backwards per optimizer step, if nothing sets FSDP2's flags.
        block: Other keys of the block (docs/configuration.md), such as ``codecs`` or ``error_feedback``.

    Returns:
        The state, with plan, wire log and measured memory.

    Raises:
        ConfigError: A wrong key, ranks that do not fill the tiers evenly, or a use of FSDP2 that hzero does not support.
    """
    with on_all_ranks():
        if not dist.is_initialized():
            raise ConfigError("hzero.fsdp.apply: torch.distributed is not initialised; call init_process_group first")
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(f"hzero.fsdp.apply: model: found {type(model).__name__}; expected a torch.nn.Module")
        if type(accumulation) is not int or accumulation < 1:
            raise ConfigError(f"hzero.fsdp.apply: accumulation: found {accumulation!r}; expected a positive integer")
        return FsdpState(model, config_of(preset, topology, block), accumulation)


def config_of(preset: str, topology: Any, block: Mapping[str, Any]) -> HZeroConfig:
    """The block of `apply`.

    Raises:
        ConfigError: A wrong key.
    """
    for key in _OF_DEEPSPEED:
        if key in block:
            raise ConfigError(f"hzero.fsdp.apply: {key}: found {block[key]!r}; this key has no effect under FSDP2")
    known = [key for key in Block.model_fields if key not in _OF_DEEPSPEED]
    for key in (key for key in block if key not in known):
        raise one_of("hzero.fsdp.apply", key, ["accumulation", *known], "key")
    return parse_config({"preset": preset, "topology": topology, **block}, "hzero.fsdp.apply")


@dataclass(eq=False, kw_only=True)
class FlatParam(Parameter):
    """Parameters of one module that travel in one way. They are one parameter of the engine.

    Attributes:
        owner: The module.
        members: Their places in it.
        writes: Those of its shards that are known, see `ShardedModule.writes`.
    """

    owner: Unit
    members: list[int]
    writes: Any = None


@dataclass(eq=False)
class Unit:
    """One module of FSDP2 in the engine.

    Attributes:
        module: The module.
        routes: The route of each parameter.
        layouts: Its flat parameters for each set of trained parameters that there has been.
        trains: Which parameters are trained now.
        divisor: What the sums of gradients are divided by.
        left: The gradients that the last backward has left, see `ShardedModule.gradient_writes`.
    """

    module: ShardedModule
    routes: list[Route]
    layouts: dict[tuple[bool, ...], list[FlatParam]] = field(default_factory=dict)
    trains: tuple[bool, ...] = ()
    divisor: float = 1.0
    left: Any = None

    @property
    def flats(self) -> list[FlatParam]:
        """Its parameters: those of one route that are trained, or frozen, are one flat parameter."""
        return self.layouts[self.trains]

    def lay_out(self, keys: Iterator[int]) -> None:
        """Follows which parameters are trained; ``keys`` are for the engine."""
        self.trains = self.module.trained()
        if self.trains in self.layouts:
            return
        module, alike = self.module, dict[tuple[int, bool], list[int]]()
        for place, (route, trained) in enumerate(zip(self.routes, self.trains)):
            alike.setdefault((route.number, trained), []).append(place)
        made = self.layouts[self.trains] = []
        for (_, trained), members in sorted(alike.items()):
            count = f"{len(members)} of {len(self.routes)}" if len(alike) > 1 else f"{len(members)}"
            flat = FlatParam(
                next(keys),
                f"{module.name} ({count} parameters)",
                module.process_group.size() * sum(module.chunks[place] for place in members),
                module.dtype,
                self.routes[members[0]],
                partial(module.shard, members),
                trained,
                owner=self,
                members=members,
            )
            made.append(flat)

    def trained(self) -> list[FlatParam]:
        """The flat parameters that the optimizer changes."""
        return [flat for flat in self.flats if flat.trained]

    def parts(self, buffer: torch.Tensor, flats: Sequence[FlatParam]) -> list[torch.Tensor]:
        """Each flat parameter's part ``[rank][member]`` of a buffer of FSDP2 that holds all ``flats``."""
        if len(flats) == 1:
            return [buffer]
        return [torch.cat(columns, dim=1).view(-1) for columns in self._columns(buffer, flats)]

    def fill(self, buffer: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        """Puts such parts of all flat parameters into a buffer."""
        for columns, part in zip(self._columns(buffer, self.flats), parts):
            widths = [column.shape[1] for column in columns]
            torch._foreach_copy_(columns, list(part.view(len(columns[0]), -1).split(widths, dim=1)))

    def _columns(self, buffer: torch.Tensor, flats: Sequence[FlatParam]) -> list[list[torch.Tensor]]:
        places = sorted(place for flat in flats for place in flat.members)
        chunks = [self.module.chunks[place] for place in places]
        columns = dict(zip(places, buffer.view(self.module.process_group.size(), -1).split(chunks, dim=1)))
        return [[columns[place] for place in flat.members] for flat in flats]


class FsdpState(Engine):
    """What hzero keeps for one model under FSDP2; `apply` makes it.

    Attributes:
        accumulation: Backwards per optimizer step, if nothing sets FSDP2's flags.

    Args:
        model: The model.
        config: The block.
        accumulation: As above.

    Raises:
        ConfigError: As `apply`.
    """

    ADVICE = (
        "change weights through the parameters and not through .data, or call mark_stale() of the state that hzero.fsdp.apply "
        "returns, on all ranks, afterwards"
    )

    def __init__(self, model: torch.nn.Module, config: HZeroConfig, accumulation: int) -> None:
        modules = sharded_modules(model)
        first, self.accumulation = modules[0], accumulation
        ranks = ranks_of(first.process_group)
        for module in modules:
            if ranks_of(module.process_group) != ranks:
                raise module.refusal("another mesh than that of " + first.name, "one mesh for all modules")
        owners = Owners.of(first.process_group, config.topology)
        plan = ShardPlan.from_config(config, owners.grid, owners.rank)
        if config.sequence is not None and len(owners.ranks) < owners.world.world_size:
            raise first.refusal("the key sequence on a mesh of some ranks", "fully_shard over the world")
        attach(model, config)
        routes, _ = routes_of(model, plan)
        self._keys = itertools.count()
        self._units = [Unit(one, [routes[param.sharded_param] for param in one.params]) for one in modules]
        for unit in self._units:
            unit.lay_out(self._keys)
        weights = [flat for unit in self._units for flat in unit.flats]
        accelerator = torch.cuda if first.device.type == "cuda" else None
        together = max((module.ranks for module in modules), key=len)  # they train the model
        whole_world = len(together) == dist.get_world_size()
        group = None if whole_world else process_group(("model", "node"), together, world_timeout())
        # One refresh for each module: they are as large as FSDP2's own messages.
        super().__init__(config, plan, owners, model, weights, 0, first.device, accelerator, group)
        self.gradients.divisor = 1  # FSDP2 has a divisor for each module
        self._backwards = 0  # of this window that have ended; those of a loss in chunks are a part of the next one
        self._in_backward = self._crosses = self._flagged = self._counts = False
        self._in_chunks: set[Unit] = set()  # modules that have been told alone to wait, as those of a loss in chunks
        self._windows = 0  # since the last optimizer step
        self._discarded = self._warned = False
        for unit in self._units:
            unit.module.attach(_Gather(self, unit), _Reduce(self, unit))
        self._hooks: list[Callable[[], None]] = [
            keep_reducing(model),
            register_optimizer_step_pre_hook(_weakly(self._before_step)).remove,
            register_optimizer_step_post_hook(_weakly(self._after_step)).remove,
            model.register_load_state_dict_post_hook(_weakly(self._loaded)).remove,
            model.register_state_dict_post_hook(_weakly(self._given_away)).remove,
            detacher(model),
            *(unit.module.detach for unit in self._units),
        ]
        if speaks(self.group):
            kinds = Counter(type(one.module).__name__.removeprefix("FSDP") for one in modules)
            named = ", ".join(f"{name} x {count}" for name, count in kinds.items())
            self.announce(f"{self.described()}; gathers by module of FSDP2 ({named})")
            self.warn_of_plan()

    # ---- weights -------------------------------------------------------------------------------------------------

    def _gather(self, unit: Unit, output: torch.Tensor) -> Callable[[], None]:
        """Starts to gather a module's parameters into FSDP2's buffer; the result waits for them."""
        self._notice_cut_short()
        # Refreshes go ahead of gathers, so the first gather notes the writes of all modules before any begins.
        for one in self._units if unit.flats[0].writes is None else (unit,):
            self._follow(one)
        flats = unit.flats
        numel = sum(flat.numel for flat in flats)
        if (output.dtype, output.numel()) != (unit.module.dtype, numel):
            raise unit.module.refusal(
                f"a gather of {output.numel():,} elements of {output.dtype}",
                f"{numel:,} of {unit.module.dtype}, as when apply was called",
            )
        whole = {flats[0].key: output} if len(flats) == 1 else None
        started = self.weights.unshard(flats, whole)

        def wait() -> None:
            arrived = {param.key: flat for params, wait_whole in started for param, flat in zip(params, wait_whole())}
            if whole is None:
                unit.fill(output, [arrived[flat.key] for flat in flats])

        return wait

    def _follow(self, unit: Unit) -> None:
        """Marks what has been written outside of optimizer steps, or is trained from now on, or no more."""
        if unit.trains != unit.module.trained():
            for flat in unit.flats:
                self.weights.remove(flat)
            unit.lay_out(self._keys)
            for flat in unit.flats:
                self.weights.parameters[flat.key] = flat
                flat.writes = None
        for flat in unit.flats:
            writes = unit.module.writes(flat.members)
            if writes != flat.writes:
                flat.writes = writes
                self.weights.mark_edited(flat)

    def mark_stale(self) -> None:
        """The weights have been changed in a way that hzero cannot see, such as through ``.data``. On all ranks."""
        self.weights.mark_stale()

    # ---- gradients -----------------------------------------------------------------------------------------------

    def _reduce(self, unit: Unit, gradients: torch.Tensor) -> None:
        """Starts to reduce a module's whole gradients; the sums arrive at the end of a backward."""
        module, trained = unit.module, unit.trained()
        self._notice_cut_short()
        if not self._in_backward:
            self._begin_backward()
        numel = sum(flat.numel for flat in trained)
        if gradients.numel() != numel:
            if module.changed_whole():
                raise module.refusal(
                    "requires_grad_ on whole parameters, which a forward has left there",
                    "reshard() of the module before requires_grad_",
                )
            raise module.refusal(
                f"gradients of {gradients.numel():,} elements",
                f"those of all trained parameters, {numel:,}; parameters that a backward does not use need torch 2.12",
            )
        members = [place for flat in trained for place in flat.members]
        if module.steps_in_backward(members):
            raise module.refusal("a post-accumulate-grad hook, as of an optimizer in backward", "a step after backward")
        unit.divisor = module.divisor(gradients.dtype)
        if not module.is_last and not self._flagged:
            self._in_chunks.add(unit)
        self._counts |= unit not in self._in_chunks
        last = module.is_last and (self._flagged or self._backwards + 1 >= self.accumulation)
        self._crosses |= last
        parts = unit.parts(gradients, trained)
        self.gradients.accumulate(trained, parts, gradients.dtype, 1.0, last=last, deliver=self._deliver)

    def _begin_backward(self) -> None:
        begun = self._backwards or self._in_chunks
        if begun and any(unit.left != unit.module.gradient_writes() for unit in self._units):
            self._new_window()  # zero_grad has dropped what the last backwards have left
        at_end_of_backward(self._end_backward)
        self._in_backward, self._counts = True, False
        self._flagged |= not any(unit.module.is_last for unit in self._units)
        shared_watchdog().micro += 1

    @torch.no_grad()
    def _end_backward(self) -> None:
        """After a backward: the outer hops if it is the last one of its window."""
        self._in_backward = False
        if self._counts or len(self._in_chunks) == sum(bool(unit.trained()) for unit in self._units):
            self._end_micro_batch()
        for unit in self._units if self._backwards or self._in_chunks else ():
            unit.left = unit.module.gradient_writes()
        self.lanes.before_others()

    def _end_micro_batch(self) -> None:
        self._backwards += 1
        self._in_chunks.clear()
        if not self._crosses:
            return
        self.gradients.finish(torch.float32, 1.0, self._deliver)
        self._windows += 1
        if self._windows > 1 and not self._flagged and not self._warned:
            self._warn_of_crossings()
        self._backwards, self._flagged, self._crosses = 0, False, False

    def _deliver(self, weights: list[Parameter], shards: list[torch.Tensor]) -> None:
        for flat, shard in zip(cast("list[FlatParam]", weights), shards):
            flat.owner.module.add_gradients(flat.members, shard.div_(flat.owner.divisor))

    def _new_window(self) -> None:
        self.gradients.clear()
        self._backwards, self._flagged, self._crosses = 0, False, False
        self._in_chunks.clear()

    def _notice_cut_short(self) -> None:
        """An exception has ended a backward, and FSDP2 has been reset: its window is lost."""
        if self._in_backward and not any(unit.module.in_backward for unit in self._units):
            self._in_backward = False
            self._new_window()

    def _warn_of_crossings(self) -> None:
        self._warned = True
        moved = 0.0
        for flat in itertools.chain.from_iterable(unit.trained() for unit in self._units):
            chunks, itemsize = (flat.numel // self.plan.grid.world_size,), torch.float32.itemsize
            programs = flat.route.programs
            crossings = programs.boundary.crossings + programs.outermost.crossings
            moved += sum(cross.received * cross.message_bytes(chunks, itemsize) for cross in crossings)
        if moved and speaks(self.group):
            logger.warning(
                "hzero: several backwards per optimizer step, and each crosses all tiers, with %.1f MB more into each rank; set "
                "accumulation in hzero.fsdp.apply, or call set_is_last_backward(False) before all backwards but the last",
                moved / 1e6,
            )

    # ---- the optimizer step --------------------------------------------------------------------------------------

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        flats = self._flats_in(optimizer)
        if not flats:
            return
        if self.gradients.waiting:
            raise RuntimeError(
                f"hzero: optimizer.step() after {self._backwards} backwards of a window of {self.accumulation}, whose gradients "
                "have not crossed all tiers; call set_is_last_backward(True) before the last backward of a short window"
            )

        def gradient_of(flat: Any) -> torch.Tensor:
            shards = [one.flatten().float() for one in flat.owner.module.gradients(flat.members)]
            return torch.cat(shards) if shards else torch.empty(0)

        self.before_step(flats, gradient_of)
        # A loss scaler that tells the optimizer itself finds its scale by steps like these.
        guarded = self.config.guard.discarded_steps and getattr(optimizer, "found_inf", None) is None
        if guarded and not self._finite(flats):
            self.guard.discarded(None, flats, gradient_of)
            for flat in flats:
                flat.owner.module.drop_gradients(flat.members)
            self._discarded = True

    def _finite(self, flats: Sequence[FlatParam]) -> bool:
        """Whether the gradients of all ranks are finite; a step with others would spoil the weights."""
        locals_ = [one for flat in flats for one in flat.owner.module.gradients(flat.members) if one.numel()]
        found = torch.zeros((), dtype=torch.uint8, device=self.device)
        if locals_:
            largest = torch.stack(torch._foreach_norm(locals_, float("inf")))
            found = (~largest.isfinite().all()).to(self.device, torch.uint8)
        dist.all_reduce(found, dist.ReduceOp.MAX, self.group)
        return not int(found)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Fused optimizers write without moving version counters."""
        flats = self._flats_in(optimizer)
        if not flats:
            return
        if not self._discarded:
            self.weights.mark_stale(flats)
            for flat in flats:
                flat.writes = flat.owner.module.writes(flat.members)
        self.after_step(done=not self._discarded)
        self._discarded, self._windows = False, 0

    def _flats_in(self, optimizer: torch.optim.Optimizer) -> list[FlatParam]:
        """The trained flat parameters that an optimizer changes."""
        ids = {id(param) for group in optimizer.param_groups for param in group["params"]}
        return [flat for unit in self._units for flat in unit.trained() if unit.module.optimized(flat.members, ids)]

    # ---- checkpoints, and the end --------------------------------------------------------------------------------

    def _given_away(self, _: Any, state_dict: Mapping[str, Any], *__: Any) -> None:
        """``state_dict`` has given views of the weights away, which may be written."""
        views = views_in(state_dict)
        for unit in self._units:
            unit.module.note_views(views)

    def _loaded(self, *_: Any) -> None:
        """``load_state_dict`` has replaced the weights."""
        self._new_window()
        self.replaced()
        self.load_state_dict(None)  # says that residuals start at zero

    def memory(self, optimizer: torch.optim.Optimizer | None = None) -> dict[str, int]:
        """As of `Engine`, and of the primary shards and the optimizer."""
        states = [value for state in optimizer.state.values() for value in state.values()] if optimizer else []
        local = [getattr(one, "_local_tensor", one) for one in states if isinstance(one, torch.Tensor)]
        primary = sum(unit.module.nbytes() for unit in self._units)
        return {"primary weights": primary, **super().memory(), "optimizer": sum(one.nbytes for one in local)}

    def close(self) -> None:
        """Gives FSDP2 its collectives back, and frees resident weights and accumulators. On all ranks."""
        if not self._hooks:
            return
        for remove in self._hooks:
            remove()
        self._hooks.clear()
        super().close()


# ---- what FSDP2 calls ---------------------------------------------------------------------------------------------------


class _Comm:
    """A collective of one module, as FSDP2 calls it."""

    def __init__(self, state: FsdpState, unit: Unit) -> None:
        self._of, self._unit = state, unit

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        with lasting():  # evaluations in inference mode gather too, and lanes write from other threads
            return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Comm):
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        module = self._unit.module
        # With an integer reshard_after_forward backward gathers over a smaller mesh what forward has gathered.
        again = group.size() != module.process_group.size()
        if again or (self._of.config.exact_evaluation and not module.module.training):
            return module.stock_gather(
                output_tensor=output_tensor, input_tensor=input_tensor, group=group, async_op=async_op
            )
        return _Gathering(self._of._gather(self._unit, output_tensor))


class _Gathering(dist.Work):
    """A gather under way: FSDP2 waits for it before it copies the parameters out, so gathers overlap."""

    def __init__(self, wait: Callable[[], None]) -> None:
        super().__init__()
        self._wait = wait

    def wait(self, timeout: Any = None) -> bool:
        self._wait()
        return True


class _Reduce(_Comm):
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        output_tensor.zero_()  # FSDP2 reads it at once; the sums are added when the backward ends
        self._of._reduce(self._unit, input_tensor)


# ---- helpers ------------------------------------------------------------------------------------------------------------


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """A hook that lives longer than the state, and does nothing then."""
    weak = WeakMethod(method)

    def hook(*arguments: Any) -> None:
        own = weak()
        if own is not None:
            own(*arguments)

    return hook
