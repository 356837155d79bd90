"""FSDP2 with hzero: gathers from secondary partitions, and gradients that cross nodes once per optimizer step."""

from __future__ import annotations

import itertools
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hzero.codecs.codec import FLOAT_DTYPES
from hzero.comm import lasting, shared_lanes, shared_watchdog
from hzero.comm.wires import process_group, world_timeout
from hzero.config import DEFAULT_PRESET, FIT, Block, HZeroConfig, parse_config
from hzero.engine.engine import STEP, USE, Engine, Owners, ranks_of
from hzero.engine.guard import StaleWeightsError, speaks
from hzero.engine.parameter import Parameter, Route, routes_of
from hzero.errors import ConfigError, of_all_ranks, on_all_ranks, one_of, some
from hzero.fsdp.modules import (
    ShardedModule,
    at_end_of_backward,
    backward_number,
    before_forwards,
    gathers_of,
    keep_reducing,
    root_module,
    sharded_modules,
)
from hzero.program.shards import ShardPlan
from hzero.sequence import attach, detacher

if TYPE_CHECKING:
    from hzero.program.choice import Load

logger = logging.getLogger("hzero")

#: Environment variable with a preset or a block in JSON, for programs that cannot be edited.
VARIABLE = "HZERO_FSDP"
#: Keys of the block that only have an effect with DeepSpeed.
_OF_DEEPSPEED = ("unit", "unit_numel", "checkpoint")


def apply(
    model: torch.nn.Module,
    preset: str = DEFAULT_PRESET,
    topology: Any = "discover",
    accumulation: int | None = None,
    **block: Any,
) -> FsdpState:
    """Makes a model gather and reduce tier by tier, each tier with its codec, after ``fully_shard``.

    FSDP2 keeps its shards, so its optimizers, clipping and checkpoints work as before. The weights are also resident over the
    preset's scope, such as a package or a node. Forward and backward gather from this scope, and a refresh crosses the outer
    tiers once per optimizer step. Every backward sums gradients over the node. The sums cross nodes once per optimizer step.

    You may write weights in any way at any time. At the beginning of each forward and backward, hzero compares fingerprints of
    the shards, and refreshes written ones.

    The sums cross nodes in the backward that is expected to be the last of the step. That is

    - the backward with ``set_is_last_backward(True)``, ``set_requires_all_reduce(True)`` or ``set_requires_gradient_sync(True)``
      after backwards with False. Accelerate and Trainer set these flags.
    - otherwise every ``accumulation``-th backward, by default as many as in the longer one of the last two steps. If the flags
      defer only some modules, as for a loss in chunks, the backward does not count.

    If the step, clipping or your own code uses a gradient earlier, the sums cross at that point (`PendingGradient`). So the
    expectation has no influence on results.

    Parameters that a backward does not use get zero gradients, as with ``set_reduce_scatter_unused_params(True)``.

    Args:
        model: The model, after ``fully_shard`` for its layers and for itself. The mesh has one dimension, or is one dimension of
            a mesh with tensor parallelism. All ranks must make the same call.
        preset: Shard degrees and codecs (docs/presets.md).
        topology: Places of the ranks: ``discover``, a preset, a file, or a dictionary such as
            ``{"packages_per_node": 4, "devices_per_package": 2}``.
        accumulation: Expected number of backwards per optimizer step. None observes it.
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
        if accumulation is not None and (type(accumulation) is not int or accumulation < 1):
            raise ConfigError(
                f"hzero.fsdp.apply: accumulation: found {accumulation!r}; expected a positive integer or None"
            )
        return FsdpState(model, config_of(preset, topology, block), accumulation)


def config_of(preset: str, topology: Any, block: Mapping[str, Any], where: str = "hzero.fsdp.apply") -> HZeroConfig:
    """Parses the block of `apply`. ``where`` names it in messages.

    Raises:
        ConfigError: A key or value is wrong.
    """
    for key in _OF_DEEPSPEED:
        if key in block:
            raise ConfigError(f"{where}: {key}: found {block[key]!r}; this key has no effect under FSDP2")
    known = [key for key in Block.model_fields if key not in _OF_DEEPSPEED]
    for key in (key for key in block if key not in known):
        raise one_of(where, key, ["accumulation", *known], "key")
    return parse_config({"preset": preset, "topology": topology, **block}, where)


def apply_written(written: str, root: Any) -> None:
    """Applies hzero to a root module, in a program that cannot be edited. A model that has hzero already is left as it is.

    Args:
        written: Value of the environment variable `VARIABLE`: a preset, or a block in JSON.
        root: The root's FSDP state, which knows its modules.

    Raises:
        ConfigError: See `apply`. Or the value is not a preset or a JSON object.
    """
    if state_of(model := root_module(root)) is not None:
        return
    with on_all_ranks():
        block: dict[str, Any] = {"preset": written}
        if written.lstrip().startswith("{"):
            try:
                block = json.loads(written)
            except ValueError as error:
                raise ConfigError(
                    f"{VARIABLE}: found {written!r}; expected a preset or a JSON object ({error})"
                ) from None
        preset, topology = block.pop("preset", DEFAULT_PRESET), block.pop("topology", "discover")
        accumulation = block.pop("accumulation", None)
        FsdpState(model, config_of(preset, topology, block, VARIABLE), accumulation)  # the model's collectives keep it


def state_of(model: torch.nn.Module) -> FsdpState | None:
    """Returns the state of a model, or of the model that contains it; None without `apply`, or if the state is closed."""
    return next((gather.state for gather in gathers_of(model) if isinstance(gather, _Gather)), None)


@dataclass(eq=False, kw_only=True)
class FlatParam(Parameter):
    """Parameters of one module with the same route, as one parameter of the engine.

    Attributes:
        owner: The module.
        members: Indices of the parameters in the module.
    """

    owner: Unit
    members: list[int]

    def memory(self) -> list[torch.Tensor]:
        """Returns the shards as FSDP2 has them."""
        return self.owner.module.shards(self.members)


@dataclass(eq=False)
class Unit:
    """One module of FSDP2 in the engine.

    Attributes:
        module: The module.
        routes: The route of each parameter.
        layouts: The flat parameters for each set of trained parameters so far.
        trains: Whether each parameter is trained now.
        divisor: Divisor of gradient sums.
    """

    module: ShardedModule
    routes: list[Route]
    layouts: dict[tuple[bool, ...], list[FlatParam]] = field(default_factory=dict)
    trains: tuple[bool, ...] = ()
    divisor: float = 1.0

    @property
    def flats(self) -> list[FlatParam]:
        """The current flat parameters. Trained and frozen parameters of one route are separate flat parameters."""
        return self.layouts[self.trains]

    def lay_out(self, keys: Iterator[int]) -> None:
        """Updates the flat parameters to the parameters that are trained now. ``keys`` are the engine's keys."""
        self.trains = self.module.trained()
        if self.trains in self.layouts:
            return
        module, alike = self.module, dict[tuple[int, bool, str], list[int]]()
        for place, (route, trained, dtype) in enumerate(zip(self.routes, self.trains, module.dtypes)):
            alike.setdefault((route.number, trained, str(dtype)), []).append(place)
        made = self.layouts[self.trains] = []
        for (_, trained, _), members in sorted(alike.items()):
            count = f"{len(members)} of {len(self.routes)}" if len(alike) > 1 else f"{len(members)}"
            dtype = module.dtypes[members[0]]
            flat = FlatParam(
                next(keys),
                f"{module.name} ({count} parameters)",
                module.process_group.size() * sum(module.chunks[place] for place in members),
                dtype if dtype in FLOAT_DTYPES else torch.uint8,
                self.routes[members[0]],
                partial(module.shard, members, dtype),
                trained,
                code_bytes=1 if dtype in FLOAT_DTYPES else dtype.itemsize,
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
        columns = self._columns(buffer, flats, self.module.chunks)
        return [torch.cat(of_flat, dim=1).view(-1) for of_flat in columns]

    def fill(self, buffer: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        """Copies the parts of all flat parameters into a buffer of FSDP2. See `parts`."""
        for columns, part in zip(self._columns(buffer, self.flats, self.module.widths), parts):
            widths = [column.shape[1] for column in columns]
            torch._foreach_copy_(columns, list(part.view(buffer.dtype).view(len(columns[0]), -1).split(widths, dim=1)))

    def _columns(
        self, buffer: torch.Tensor, flats: Sequence[FlatParam], widths: Sequence[int]
    ) -> list[list[torch.Tensor]]:
        places = sorted(place for flat in flats for place in flat.members)
        by_rank = buffer.view(self.module.process_group.size(), -1)
        columns = dict(zip(places, by_rank.split([widths[place] for place in places], dim=1)))
        return [[columns[place] for place in flat.members] for flat in flats]


class FsdpState(Engine):
    """hzero's engine for one model under FSDP2. `apply` creates it.

    Args:
        model: The model.
        config: The block.
        accumulation: Expected number of backwards per optimizer step. None observes it.

    Raises:
        ConfigError: See `apply`.
    """

    LATER = ("optimizer",)  # `hzero.fsdp.Muon`
    ADVICE = "call note_edit() of the state that hzero.fsdp.apply returns, on all ranks, after changing weights"

    def __init__(self, model: torch.nn.Module, config: HZeroConfig, accumulation: int | None) -> None:
        if accumulation is not None and (type(accumulation) is not int or accumulation < 1):
            raise ConfigError(
                f"hzero.fsdp.apply: accumulation: found {accumulation!r}; expected a positive integer or None"
            )
        modules = sharded_modules(model)
        first, self._given = modules[0], accumulation
        ranks = ranks_of(first.process_group)
        for module in modules:
            if ranks_of(module.process_group) != ranks:
                raise module.refusal("another mesh than module " + first.name, "one mesh for all modules")
        owners = Owners.of(first.process_group, config.topology)
        accelerator = torch.cuda if first.device.type == "cuda" else None
        together = max((module.ranks for module in modules), key=len)  # the ranks that train the model
        whole_world = len(together) == dist.get_world_size()
        group = None if whole_world else process_group(("model", "inter_node"), together, world_timeout())
        choice: Any = None
        if config.preset == FIT:
            from hzero.engine.fit import fitted

            lanes = shared_lanes(accelerator, config.transport, config.order)
            load = _load_of(modules, accumulation)
            config, choice = fitted(config, owners, load, first.device, lanes, group)
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
        # One refresh for each module, with the size of FSDP2's messages.
        super().__init__(config, plan, owners, model, weights, 0, first.device, accelerator, group)
        self.gradients.divisor = 1  # FSDP2 has a divisor for each module
        self.most_marks = 2 + sum(len(unit.routes) for unit in self._units)
        self._backwards = 0  # since the last step; backwards of a loss in chunks count with the next one
        self._recent = (1, 1)  # backwards of the last two steps
        self._in_backward = self._crosses = self._flagged = self._counts = False
        self._in_chunks: set[Unit] = set()  # modules that the flags defer without the others, as for a loss in chunks
        self._forwards = 0  # begun so far
        self._phase: int | None = None  # forward or backward for which shards were compared last
        self._gathered: set[Unit] = set()  # since then
        self._evaluated = True  # whether that was without gradients
        self._late: list[tuple[list[Parameter], torch.Tensor]] = []  # comparisons that the host has not read
        self._discarded = False
        for unit in self._units:
            unit.module.attach(_Gather(self, unit), _Reduce(self, unit))
        self._hooks: list[Callable[[], None]] = [
            keep_reducing(model),
            register_optimizer_step_pre_hook(_weakly(self._before_step)).remove,
            register_optimizer_step_post_hook(_weakly(self._after_step)).remove,
            model.register_load_state_dict_post_hook(_weakly(self._loaded)).remove,
            before_forwards(model, _weakly(self._begin_forward)),
            detacher(model),
            *(unit.module.detach for unit in self._units),
        ]
        if speaks(self.group):
            kinds = Counter(type(one.module).__name__.removeprefix("FSDP") for one in modules)
            named = ", ".join(f"{name} x {count}" for name, count in kinds.items())
            self.announce(f"{self.described()}; gathers by module of FSDP2 ({named})", choice)
            self.warn_of_plan()

    # ---- weights -------------------------------------------------------------------------------------------------

    def _begin_forward(self) -> None:
        self._forwards += 1

    def _gather(self, unit: Unit, output: torch.Tensor) -> Callable[[], None]:
        """Starts to gather a module's parameters into FSDP2's buffer. The returned function waits for them."""
        self._notice_cut_short()
        self._follow_writes(unit)
        module, flats = unit.module, unit.flats
        numel = module.process_group.size() * sum(module.widths)
        if (output.dtype, output.numel()) != (module.dtype, numel):
            raise module.refusal(
                f"a gather of {output.numel():,} elements of {output.dtype}",
                f"{numel:,} of {module.dtype}, as when apply was called",
            )
        whole = {flats[0].key: output.view(flats[0].dtype)} if len(flats) == 1 else None
        started = self.weights.unshard(flats, whole)

        def wait() -> None:
            arrived = {param.key: flat for params, wait_whole in started for param, flat in zip(params, wait_whole())}
            if whole is None:
                unit.fill(output, [arrived[flat.key] for flat in flats])

        return wait

    def _follow_writes(self, unit: Unit) -> None:
        """Compares all shards with their last fingerprints, if user code may have run since the last comparison.

        That is at the first gather of each forward and backward, at the second gather of the same module in it, and at gathers
        outside of both.
        """
        number = backward_number()
        in_backward = number >= 0
        outside = not in_backward and not unit.module.in_forward
        phase = number if in_backward else -self._forwards - 1
        if outside or phase != self._phase or unit in self._gathered:
            self._follow_training()
            self._compare(evaluates=not in_backward and not torch.is_grad_enabled())
            self._phase, self._gathered = phase, set()
        self._gathered.add(unit)

    def _follow_training(self) -> None:
        """Makes other flat parameters for modules with other trained parameters than before."""
        for unit in self._units:
            if unit.trains != unit.module.trained():
                for flat in unit.flats:
                    self.weights.remove(flat)
                unit.lay_out(self._keys)
                self.weights.parameters.update((flat.key, flat) for flat in unit.flats)
                self.weights.note_edit(unit.flats)

    def _compare(self, *, evaluates: bool) -> None:
        """Marks the parameters whose shards were written since their refresh, on any rank. Collective.

        On a device, a host wait per forward and backward would cost more than the comparison. While the model trains, the
        optimizer step therefore reads the result, and raises an error. A comparison without gradients, and the first one after
        it, are read at once.

        Args:
            evaluates: Whether gradients are off.
        """
        reads, self._evaluated = self._synchronous or evaluates or self._evaluated, evaluates
        if reads:
            self.follow_writes()
            return
        compared, written = self.weights.written()
        if written is not None:
            self._late.append((compared, written.to(self.device, non_blocking=True)))

    def note_edit(self) -> None:
        """Refreshes all weights before their next use. Call it on all ranks.

        Only needed on an accelerator, after writing weights inside an accumulation window.
        """
        self.weights.note_edit()

    # ---- gradients -----------------------------------------------------------------------------------------------

    @property
    def accumulation(self) -> int:
        """Expected number of backwards per optimizer step."""
        return self._given or max(self._recent)

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
        last = module.is_last and (self._flagged or (self._backwards + 1) % self.accumulation == 0)
        self._crosses |= last
        parts = unit.parts(gradients, trained)
        self.gradients.accumulate(trained, parts, gradients.dtype, 1.0, last=last, deliver=self._deliver)

    def _begin_backward(self) -> None:
        counting = [counts for unit in self._units for counts in unit.module.counting()]
        if any(counting) and not all(counting):
            self._complete()  # so that sums of other parameters than the dropped ones are kept
        elif (counting and not any(counting)) or not any(unit.module.has_gradients() for unit in self._units):
            self._new_window()
        self._release()
        at_end_of_backward(self._end_backward)
        self._in_backward, self._counts = True, False
        self._flagged |= not any(unit.module.is_last for unit in self._units)
        shared_watchdog().micro += 1

    @torch.no_grad()
    def _end_backward(self) -> None:
        """Ends a backward. If it is the last one of its window, the sums cross the outer tiers."""
        self._in_backward = False
        if self._counts or len(self._in_chunks) == sum(bool(unit.trained()) for unit in self._units):
            self._backwards += 1
            self._in_chunks.clear()
            if self._crosses:
                self._cross()
        self._hold()
        self.lanes.before_others()

    def _cross(self) -> None:
        self.gradients.finish(torch.float32, 1.0, self._deliver)
        self._flagged = self._crosses = False

    def _deliver(self, weights: list[Parameter], shards: list[torch.Tensor]) -> None:
        for flat, shard in zip(cast("list[FlatParam]", weights), shards):
            flat.owner.module.add_gradients(flat.members, shard.div_(flat.owner.divisor))

    def _hold(self) -> None:
        """Replaces the gradients by `PendingGradient` if sums have not crossed all tiers."""
        for unit in self._units if self.gradients.waiting else ():
            unit.module.hold_gradients(self._use)

    def _release(self) -> None:
        for unit in self._units:
            unit.module.release_gradients()

    def _use(self, where: str = USE) -> None:
        """Completes the sums because gradients are used. Collective."""
        if self.gradients.waiting:
            self.meet(where)
            self._complete()

    @torch.no_grad()
    def _complete(self) -> None:
        """Sends sums over the outer tiers before the expected backward, and puts the gradients back. Collective."""
        if self.gradients.waiting:
            self._in_chunks.clear()
            self._cross()
        self._release()

    def _new_window(self) -> None:
        self.gradients.clear()
        self._backwards, self._flagged, self._crosses = 0, False, False
        self._in_chunks.clear()

    def _notice_cut_short(self) -> None:
        """Ends a backward that an exception has ended, once FSDP2 has been reset. As in FSDP2, its sums so far count."""
        if self._in_backward and not any(unit.module.in_backward for unit in self._units):
            self._in_backward = False
            self._hold()

    # ---- the optimizer step --------------------------------------------------------------------------------------

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Prepares for a step. With a closure, gradients exist only after it."""
        flats = self._flats_in(optimizer)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not flats or closure is None:
            return self._prepare_step(optimizer, flats)

        def prepared() -> Any:
            loss = closure()
            self._prepare_step(optimizer, flats)
            return loss

        if len(args) > 1:
            return (args[0], prepared, *args[2:]), kwargs
        return args, {**kwargs, "closure": prepared}

    @torch.no_grad()
    def _prepare_step(self, optimizer: torch.optim.Optimizer, flats: list[FlatParam]) -> None:
        if not flats:
            return
        self._use(STEP)

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
        """Returns whether the gradients of all ranks are finite. Collective.

        Raises:
            StaleWeightsError: Weights were written while the device trained on the old ones.
        """
        locals_ = [one for flat in flats for one in flat.owner.module.gradients(flat.members) if one.numel()]
        found = torch.zeros(1, dtype=torch.bool, device=self.device)
        if locals_:
            largest = torch.nn.utils.get_total_norm(locals_, float("inf"))
            found = (~largest.isfinite()).to(self.device).view(1)
        late = torch.cat([found[:0], *(edited for _, edited in self._late)]).any().view(1)
        not_finite, written, *_ = self.meet(STEP, torch.cat([found, late]))
        if written:
            self._refuse_late()
        self._late.clear()
        return not not_finite

    def _refuse_late(self) -> None:
        names: dict[str, None] = {}
        for flats, edited in self._late:
            marked = list(itertools.compress(flats, self.meet(STEP, edited)))
            self.weights.note_edit(marked)
            names.update((flat.name, None) for flat in marked)
        self._late.clear()
        raise of_all_ranks(
            StaleWeightsError(
                f"weights were written between an optimizer step and the end of the next one, and the device has trained on the "
                f"old ones: {some(list(names), 8)}. Call note_edit() of the state on all ranks after such a write"
            )
        )

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Marks stepped weights as stale, and learns how many backwards a step has."""
        flats = self._flats_in(optimizer)
        if not flats:
            return
        if not self._discarded:
            self.weights.note_step(flats)
        self.after_step(done=not self._discarded)
        if self._backwards:
            self._recent = self._recent[1], self._backwards
        self._backwards, self._flagged, self._discarded = 0, False, False

    def _flats_in(self, optimizer: torch.optim.Optimizer) -> list[FlatParam]:
        """Returns the trained flat parameters that an optimizer steps."""
        ids = {id(param) for group in optimizer.param_groups for param in group["params"]}
        return [flat for unit in self._units for flat in unit.trained() if unit.module.optimized(flat.members, ids)]

    # ---- checkpoints, and the end --------------------------------------------------------------------------------

    def _loaded(self, *_: Any) -> None:
        """Drops residuals, which belong to the weights that ``load_state_dict`` has replaced."""
        self.guard.audit_due = True
        self.lanes.drain()
        self._runtime.feedback.clear()
        self.load_state_dict(None)  # logs that residuals start at zero

    def memory(self, optimizer: torch.optim.Optimizer | None = None) -> dict[str, int]:
        """Measures bytes as `Engine.memory` does, also for the primary shards and the optimizer."""
        states = [value for state in optimizer.state.values() for value in state.values()] if optimizer else []
        local = [getattr(one, "_local_tensor", one) for one in states if isinstance(one, torch.Tensor)]
        primary = sum(unit.module.nbytes() for unit in self._units)
        return {"primary weights": primary, **super().memory(), "optimizer": sum(one.nbytes for one in local)}

    def close(self) -> None:
        """Completes sums, restores FSDP2's collectives, and frees secondary partitions. Call it on all ranks."""
        if not self._hooks:
            return
        try:
            self._complete()
        finally:
            self._release()
            for remove in self._hooks:
                remove()
            self._hooks.clear()
            super().close()


# ---- functions that FSDP2 calls -----------------------------------------------------------------------------------------


class _Comm:
    """A custom collective of one module."""

    def __init__(self, state: FsdpState, unit: Unit) -> None:
        self.state, self._unit = state, unit

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
        if again or (self.state.config.exact_evaluation and not module.module.training):
            return module.stock_gather(
                output_tensor=output_tensor, input_tensor=input_tensor, group=group, async_op=async_op
            )
        return _Gathering(self.state._gather(self._unit, output_tensor))


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
        self.state._reduce(self._unit, input_tensor)


# ---- helpers ------------------------------------------------------------------------------------------------------------


def _load_of(modules: Sequence[ShardedModule], accumulation: int | None) -> Load:
    """Returns what decides about a layout. With two micro-batches or more, sums should not cross nodes in each of them.

    Their number is not known before the first step.
    """
    from hzero.program.choice import Load

    ranks = modules[0].process_group.size()
    numels = tuple(ranks * sum(module.chunks) for module in modules)
    trained = tuple(ranks * sum(itertools.compress(module.chunks, module.trained())) for module in modules)
    return Load(numels, trained, modules[0].dtype.itemsize, accumulation or 2, len(modules), len(modules))


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a hook that does nothing after the state has been freed. torch.compile does not trace it."""
    weak = WeakMethod(method)

    @torch.compiler.disable
    def hook(*arguments: Any) -> Any:
        method = weak()
        return None if method is None else method(*arguments)

    return hook
