"""FSDP2 with hzero: gathers from resident weights, and gradients that cross nodes once per optimizer step."""

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

#: Keys of the block that only have an effect with DeepSpeed.
_OF_DEEPSPEED = ("unit", "unit_numel", "checkpoint")


def apply(
    model: torch.nn.Module, preset: str = "topo", topology: Any = "discover", accumulation: int = 1, **block: Any
) -> FsdpState:
    """Makes a model gather and reduce tier by tier, each tier with its codec, after ``fully_shard``.

    FSDP2 keeps its shards, so its optimizers, clipping and checkpoints work as before. The weights are also resident over the
    preset's scope, such as a package or a node. Forward and backward gather from this scope, and a refresh crosses the outer
    tiers once per optimizer step. Every backward sums gradients over the node. The sums cross nodes after the last backward of a
    step.

    The last backward of a step is

    - the backward with ``set_is_last_backward(True)``, ``set_requires_all_reduce(True)`` or ``set_requires_gradient_sync(True)``
      after backwards with False. Accelerate and Trainer set these flags.
    - otherwise every ``accumulation``-th backward. If the flags defer only some modules, as for a loss in chunks, the backward
      does not count.

    Parameters that a backward does not use get zero gradients, as with ``set_reduce_scatter_unused_params(True)``.

    Args:
        model: The model, after ``fully_shard`` for its layers and for itself. The mesh has one dimension, or is one dimension of
            a mesh with tensor parallelism. All ranks must make the same call.
        preset: Shard degrees and codecs (docs/presets.md).
        topology: Places of the ranks: ``discover``, a preset, a file, or a dictionary such as
            ``{"gpus_per_node": 4, "gcds_per_gpu": 2}``.
        accumulation: Number of backwards per optimizer step, if FSDP2's flags are not used.
        block: Other keys of the block (docs/configuration.md), such as ``codecs`` or ``error_feedback``.

    Returns:
        The state, with plan, wire log and measured memory.

    Raises:
        ConfigError: A key or value is wrong, the ranks do not fill the tiers evenly, or hzero does not support the use of FSDP2.
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
    """Parses the block of `apply`.

    Raises:
        ConfigError: A key or value is wrong.
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
    """Parameters of one module with the same route, as one parameter of the engine.

    Attributes:
        owner: The module.
        members: Indices of the parameters in the module.
        writes: The last known counters of writes. See `ShardedModule.writes`.
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
        layouts: The flat parameters for each set of trained parameters so far.
        trains: Whether each parameter is trained now.
        divisor: Divisor of gradient sums.
        left: Counters of the gradients after the last backward. See `ShardedModule.gradient_writes`.
    """

    module: ShardedModule
    routes: list[Route]
    layouts: dict[tuple[bool, ...], list[FlatParam]] = field(default_factory=dict)
    trains: tuple[bool, ...] = ()
    divisor: float = 1.0
    left: Any = None

    @property
    def flats(self) -> list[FlatParam]:
        """The current flat parameters. Trained and frozen parameters of one route are separate flat parameters."""
        return self.layouts[self.trains]

    def lay_out(self, keys: Iterator[int]) -> None:
        """Updates the flat parameters to the parameters that are trained now. ``keys`` are the engine's keys."""
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
        """Returns the trained flat parameters."""
        return [flat for flat in self.flats if flat.trained]

    def parts(self, buffer: torch.Tensor, flats: Sequence[FlatParam]) -> list[torch.Tensor]:
        """Returns the part ``[rank][member]`` of each of ``flats`` in a buffer of FSDP2 that contains all of them."""
        if len(flats) == 1:
            return [buffer]
        return [torch.cat(columns, dim=1).view(-1) for columns in self._columns(buffer, flats)]

    def fill(self, buffer: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        """Copies the parts of all flat parameters into a buffer of FSDP2. See `parts`."""
        for columns, part in zip(self._columns(buffer, self.flats), parts):
            widths = [column.shape[1] for column in columns]
            torch._foreach_copy_(columns, list(part.view(len(columns[0]), -1).split(widths, dim=1)))

    def _columns(self, buffer: torch.Tensor, flats: Sequence[FlatParam]) -> list[list[torch.Tensor]]:
        places = sorted(place for flat in flats for place in flat.members)
        chunks = [self.module.chunks[place] for place in places]
        columns = dict(zip(places, buffer.view(self.module.process_group.size(), -1).split(chunks, dim=1)))
        return [[columns[place] for place in flat.members] for flat in flats]


class FsdpState(Engine):
    """hzero's engine for one model under FSDP2. `apply` creates it.

    Attributes:
        accumulation: Number of backwards per optimizer step, if FSDP2's flags are not used.

    Args:
        model: The model.
        config: The block.
        accumulation: As above.

    Raises:
        ConfigError: See `apply`.
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
                raise module.refusal("another mesh than module " + first.name, "one mesh for all modules")
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
        together = max((module.ranks for module in modules), key=len)  # the ranks that train the model
        whole_world = len(together) == dist.get_world_size()
        group = None if whole_world else process_group(("model", "node"), together, world_timeout())
        # One refresh for each module, with the size of FSDP2's messages.
        super().__init__(config, plan, owners, model, weights, 0, first.device, accelerator, group)
        self.gradients.divisor = 1  # FSDP2 has a divisor for each module
        self._backwards = 0  # completed in this window; backwards of a loss in chunks count with the next one
        self._in_backward = self._crosses = self._flagged = self._counts = False
        self._in_chunks: set[Unit] = set()  # modules that the flags defer without the others, as for a loss in chunks
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
        """Starts to gather a module's parameters into FSDP2's buffer. The returned function waits for them."""
        self._notice_cut_short()
        # Refreshes run before gathers, so the first gather checks the writes to all modules.
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
        """Marks parameters that were written outside of optimizer steps, and updates the set of trained parameters."""
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
        """Marks all weights as changed. Call it on all ranks after changes that hzero cannot detect, as through ``.data``."""
        self.weights.mark_stale()

    # ---- gradients -----------------------------------------------------------------------------------------------

    def _reduce(self, unit: Unit, gradients: torch.Tensor) -> None:
        """Starts to reduce a module's whole gradients. The sums arrive at the end of a backward."""
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
            raise module.refusal("a post-accumulate-grad hook (an optimizer in backward)", "a step after backward")
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
            self._new_window()  # zero_grad has dropped the gradients of the last backwards
        at_end_of_backward(self._end_backward)
        self._in_backward, self._counts = True, False
        self._flagged |= not any(unit.module.is_last for unit in self._units)
        shared_watchdog().micro += 1

    @torch.no_grad()
    def _end_backward(self) -> None:
        """Ends a backward. If it is the last one of its window, the sums cross the outer tiers."""
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
        """Drops the window of a backward that an exception has ended, once FSDP2 has been reset."""
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
                "hzero: several backwards per optimizer step, and each crosses all tiers, with %.3g MB more into each rank; set "
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
        # A loss scaler that passes found_inf to the optimizer handles such steps.
        guarded = self.config.guard.discarded_steps and getattr(optimizer, "found_inf", None) is None
        if guarded and not self._finite(flats):
            self.guard.discarded(None, flats, gradient_of)
            for flat in flats:
                flat.owner.module.drop_gradients(flat.members)
            self._discarded = True

    def _finite(self, flats: Sequence[FlatParam]) -> bool:
        """Returns whether the gradients of all ranks are finite. Collective."""
        locals_ = [one for flat in flats for one in flat.owner.module.gradients(flat.members) if one.numel()]
        found = torch.zeros((), dtype=torch.uint8, device=self.device)
        if locals_:
            largest = torch.stack(torch._foreach_norm(locals_, float("inf")))
            found = (~largest.isfinite().all()).to(self.device, torch.uint8)
        dist.all_reduce(found, dist.ReduceOp.MAX, self.group)
        return not int(found)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Marks stepped weights as stale, since fused optimizers write without changing version counters."""
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
        """Returns the trained flat parameters that an optimizer steps."""
        ids = {id(param) for group in optimizer.param_groups for param in group["params"]}
        return [flat for unit in self._units for flat in unit.trained() if unit.module.optimized(flat.members, ids)]

    # ---- checkpoints, and the end --------------------------------------------------------------------------------

    def _given_away(self, _: Any, state_dict: Mapping[str, Any], *__: Any) -> None:
        """Notes the views in a new ``state_dict``, which may be written."""
        views = views_in(state_dict)
        for unit in self._units:
            unit.module.note_views(views)

    def _loaded(self, *_: Any) -> None:
        """Drops all state of the weights that ``load_state_dict`` has replaced."""
        self._new_window()
        self.after_load()
        self.load_state_dict(None)  # logs that residuals start at zero

    def memory(self, optimizer: torch.optim.Optimizer | None = None) -> dict[str, int]:
        """Measures bytes as `Engine.memory` does, also for the primary shards and the optimizer."""
        states = [value for state in optimizer.state.values() for value in state.values()] if optimizer else []
        local = [getattr(one, "_local_tensor", one) for one in states if isinstance(one, torch.Tensor)]
        primary = sum(unit.module.nbytes() for unit in self._units)
        return {"primary weights": primary, **super().memory(), "optimizer": sum(one.nbytes for one in local)}

    def close(self) -> None:
        """Restores FSDP2's collectives, and frees resident weights and accumulators. Call it on all ranks."""
        if not self._hooks:
            return
        for remove in self._hooks:
            remove()
        self._hooks.clear()
        super().close()


# ---- functions that FSDP2 calls -----------------------------------------------------------------------------------------


class _Comm:
    """A custom collective of one module."""

    def __init__(self, state: FsdpState, unit: Unit) -> None:
        self._of, self._unit = state, unit

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        with lasting():  # inference mode also gathers, and other threads write
            return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Comm):
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        module = self._unit.module
        # With an integer reshard_after_forward, backward gathers the same parameters over a smaller mesh.
        again = group.size() != module.process_group.size()
        if again or (self._of.config.exact_evaluation and not module.module.training):
            return module.stock_gather(
                output_tensor=output_tensor, input_tensor=input_tensor, group=group, async_op=async_op
            )
        return _Gathering(self._of._gather(self._unit, output_tensor))


class _Gathering(dist.Work):
    """A gather in flight. FSDP2 waits for it before it copies the parameters out, so gathers overlap with compute."""

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
        output_tensor.zero_()  # FSDP2 reads it immediately; the sums are added at the end of backward
        self._of._reduce(self._unit, input_tensor)


# ---- helpers ------------------------------------------------------------------------------------------------------------


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Returns a hook that does nothing after the state has been freed."""
    weak = WeakMethod(method)

    def hook(*arguments: Any) -> None:
        own = weak()
        if own is not None:
            own(*arguments)

    return hook
