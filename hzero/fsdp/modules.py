"""Access to FSDP2's modules. This file has all uses of private attributes of FSDP2, and checks that they exist."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from hzero.calls import attributes
from hzero.codecs.codec import FLOAT_DTYPES
from hzero.engine.parameter import plain_name
from hzero.errors import ConfigError

_divide_factors: Any = None
with contextlib.suppress(ImportError):  # otherwise `torch_support` raises
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors as _divide_factors

#: The oldest supported release of torch, and the releases with which the tests have passed.
OLDEST, TESTED = (2, 10), ("2.10", "2.13", "2.14", "2.15")
#: Required attributes of FSDP2's objects.
_READ = {
    "state": ("_state_ctx", "_root_pre_forward"),
    "context": ("is_last_backward", "iter_forward_root", "post_backward_final_callback_queued"),
    "group": (
        *("fsdp_params", "mesh_info", "device", "all_reduce_grads", "gradient_divide_factor"),
        *("_all_gather_comm", "_reduce_scatter_comm", "_all_reduce_hook", "force_sum_reduction_for_comms", "lazy_init"),
    ),
    "mesh": ("shard_process_group",),
    "parameter": (
        *("mp_policy", "sharded_param", "_sharded_param_data", "padded_sharded_param_size", "grad_offload_event"),
    ),
}


class PendingGradient(DTensor):
    """Stands in ``.grad`` for a sum that has not crossed all tiers. Its first use completes the sums of all parameters.

    So ``.grad`` has FSDP2's value wherever it is read or written: for clipping, logging, masks, and optimizers of any kind. All
    ranks must use it, as the sums cross in collectives. Zeroing it, or setting ``.grad`` to None or to another tensor, drops the
    sum without communication.

    Attributes:
        stored: The gradient to which the sum is added.
        dropped: Whether the sum was zeroed.
    """

    stored: DTensor
    dropped: bool
    _complete: Callable[[], None]

    @staticmethod
    def __new__(cls, stored: DTensor, complete: Callable[[], None]) -> PendingGradient:  # noqa: D102
        self: Any = super().__new__(cls, stored._local_tensor, stored._spec, requires_grad=False)
        self.__dict__.update(stored=stored, dropped=False, _complete=complete)
        return self  # type: ignore[no-any-return]

    def __init__(self, stored: DTensor, complete: Callable[[], None]) -> None:
        """Does nothing, since `__new__` has set the attributes. ``complete`` completes the sums of all parameters, once."""

    def whole(self) -> DTensor:
        """Returns the gradient with its sum. Collective."""
        if not self.dropped:
            self._complete()
        return self.stored

    @property
    def _local_tensor(self) -> torch.Tensor:  # what DTensor's own methods read, such as to_local
        return self.whole()._local_tensor

    @_local_tensor.setter
    def _local_tensor(self, _: torch.Tensor) -> None:  # DTensor's constructor sets it
        pass

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Runs an operator on the gradients themselves."""
        zeroes = func in (torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default)

        def gradient_of(pending: PendingGradient) -> DTensor:
            pending.dropped |= zeroes
            return pending.whole()

        return func(*tree_map_only(cls, gradient_of, args), **tree_map_only(cls, gradient_of, kwargs or {}))


class ShardedModule:
    """A parameter group of FSDP2: one or more modules whose parameters FSDP2 gathers and reduces together.

    FSDP2's flat buffers are ``[rank][parameter]``. Each shard in them is padded to the size of the first rank's shard.

    Args:
        name: Name of the module.
        module: The module, after ``fully_shard``.

    Attributes:
        name: As given, or the class of a root module.
        module: As given.
        params: FSDP2's parameters, in the order of its buffers.
        chunks: Number of elements in a padded shard of each parameter.
        process_group: The ranks over which the parameters are sharded.
        ranks: Ranks of the world that have a part of the parameters, including tensor parallelism.
        device: The device that computes the module.
        stock_gather: FSDP2's all-gather.
        dtypes: Dtype of each gathered parameter.
        dtype: Dtype of FSDP2's buffer of gathered parameters. Parameters of several dtypes travel as bytes.
        widths: Elements of this buffer for each parameter of one rank.
        pending: Gradients whose sums have not crossed all tiers, by index in ``params``.

    Raises:
        ConfigError: hzero does not support this use of FSDP2. The message has the reason.
    """

    def __init__(self, name: str, module: Any) -> None:
        self.module = module
        self.name = plain_name(name) or type(module).__name__.removeprefix("FSDP")
        self._state = _checked("state", module._get_fsdp_state())
        (self._group,) = (_checked("group", group) for group in _groups_of(self._state))
        group = self._group
        if not any(param.is_meta for param in module.parameters()):
            group.lazy_init()  # a load may have replaced parameters; FSDP2 checks this before the first forward
        self.stock_gather, self._stock_reduce = group._all_gather_comm, group._reduce_scatter_comm
        self._stock_flags = group.force_sum_reduction_for_comms, getattr(group, "reduce_scatter_unused_params", None)
        self.params: list[Any] = [_checked("parameter", param) for param in self._group.fsdp_params]
        self.chunks = [math.prod(param.padded_sharded_param_size) for param in self.params]
        self.device: torch.device = self._group.device
        wanted = [(param.mp_policy.param_dtype, param.sharded_param.dtype) for param in self.params]
        self.dtypes = [given or dtype if dtype.is_floating_point else dtype for given, dtype in wanted]
        self.dtype = self.dtypes[0] if len(set(self.dtypes)) == 1 else torch.uint8
        self.widths = [
            chunk * (1 if self.dtype == dtype else dtype.itemsize) for chunk, dtype in zip(self.chunks, self.dtypes)
        ]
        self.pending: dict[int, PendingGradient] = {}
        self._check()
        self.process_group = _checked("mesh", self._group.mesh_info).shard_process_group
        widest = max((param.sharded_param.device_mesh for param in self.params), key=lambda mesh: mesh.size())
        self.ranks: list[int] = widest.mesh.flatten().tolist()

    def _check(self) -> None:
        group = self._group
        trained = [place for place, trains in enumerate(self.trained()) if trains]
        types = {self.params[place].sharded_param.dtype for place in trained}
        if type(group.mesh_info).__name__ != "FSDPMeshInfo":
            raise self.refusal(
                "mesh of replicas (HSDP)",
                "a mesh of one dimension over all ranks; hzero keeps copies in the node itself",
            )
        if len(types) > 1 or not {self.dtypes[place] for place in trained} <= set(FLOAT_DTYPES):
            listed = ", ".join(sorted(map(str, types)))
            raise self.refusal(
                f"trained parameters of {listed}", "one of float32, bfloat16 and float16 (mp_policy, or a module each)"
            )
        if any(hasattr(param.sharded_param._local_tensor, "fsdp_pre_all_gather") for param in self.params):
            raise self.refusal("parameters with fsdp_pre_all_gather (float8 gathers)", "parameters without it")
        if group._all_reduce_hook is not None:
            raise self.refusal("set_all_reduce_hook, which would see no gradients", "no hook")
        for comm in (self.stock_gather, self._stock_reduce):
            if not type(comm).__module__.startswith("torch."):
                found = "hzero.fsdp.apply already; close the state that it has returned first"
                if not type(comm).__module__.startswith("hzero."):
                    found = f"another collective, {type(comm).__name__}"
                raise self.refusal(found, "FSDP2's collectives")

    def refusal(self, found: str, expected: str) -> ConfigError:
        """Returns the error for a use of this module that hzero does not support."""
        return ConfigError(f"hzero.fsdp.apply: module {self.name}: found {found}; expected {expected}")

    def attach(self, gather: Any, reduce: Any) -> None:
        """Replaces FSDP2's collectives. Since torch 2.12, parameters that a backward does not use get zero gradients.

        Otherwise hzero would not know which parameters a reduction contains. Older torch leaves unused ones out.
        """
        self.module.set_custom_all_gather(gather)
        self.module.set_custom_reduce_scatter(reduce)
        # Sums are divided on delivery, since Gloo has no PREMUL_SUM and AVG is slow on AMD.
        self._set_flags(True, True)

    def detach(self) -> None:
        """Restores FSDP2's collectives and flags."""
        self._group._all_gather_comm, self._group._reduce_scatter_comm = self.stock_gather, self._stock_reduce
        self._set_flags(*self._stock_flags)

    def _set_flags(self, forces_sums: bool, reduces_unused: bool | None) -> None:
        self.module.set_force_sum_reduction_for_comms(forces_sums)
        if self._stock_flags[1] is not None:
            self.module.set_reduce_scatter_unused_params(reduces_unused, recurse=False)

    # ---- weights -------------------------------------------------------------------------------------------------

    def shards(self, members: Sequence[int]) -> list[torch.Tensor]:
        """Returns this rank's shards of some parameters, flat and padded, as FSDP2 reads them: the parameters' own memory."""
        return [self.params[place]._sharded_param_data.detach() for place in members]

    def shard(self, members: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns this rank's shards, concatenated, ``[sum of chunks]``, in the dtype of gathers; as bytes for other dtypes."""
        joined = torch.cat([shard.to(self.device, dtype) for shard in self.shards(members)])
        return joined if dtype in FLOAT_DTYPES else joined.view(torch.uint8)

    def trained(self) -> tuple[bool, ...]:
        """Returns whether each parameter requires a gradient."""
        return tuple(param.sharded_param.requires_grad for param in self.params)

    def changed_whole(self) -> bool:
        """Returns whether ``requires_grad_`` was called on whole parameters. FSDP2 does not pass this on to the shards."""
        pairs = [(param.sharded_param, getattr(param, "_unsharded_param", None)) for param in self.params]
        return any(whole is not None and whole.requires_grad != shard.requires_grad for shard, whole in pairs)

    def optimized(self, members: Sequence[int], ids: set[int]) -> bool:
        """Returns whether ``ids``, the ids of an optimizer's parameters, include one of some parameters."""
        return any(id(self.params[place].sharded_param) in ids for place in members)

    def nbytes(self) -> int:
        """Returns the memory of the primary shards in bytes."""
        return sum(param._sharded_param_data.nbytes for param in self.params)

    # ---- gradients -----------------------------------------------------------------------------------------------

    @property
    def in_forward(self) -> bool:
        """Whether a forward of this module's root is running in FSDP2."""
        return self._state._state_ctx.iter_forward_root is not None

    @property
    def in_backward(self) -> bool:
        """Whether a backward of this module's root is running in FSDP2."""
        return bool(self._state._state_ctx.post_backward_final_callback_queued)

    @property
    def is_last(self) -> bool:
        """Whether the user's flags mark this backward as the last one of the window."""
        return bool(self._state._state_ctx.is_last_backward and self._group.all_reduce_grads)

    def divisor(self, dtype: torch.dtype) -> float:
        """Returns FSDP2's divisor for sums of this dtype. For float16, FSDP2 has divided by a part of it before the reduction."""
        factor = self._group.gradient_divide_factor
        _, divisor, _, _ = _divide_factors(self.process_group, None, dtype, self.device.type, factor, True)
        return float(divisor)

    def steps_in_backward(self, members: Sequence[int]) -> bool:
        """Returns whether a hook reads gradients as soon as FSDP2 has them, for example an optimizer in backward."""
        return any(getattr(self.params[place].sharded_param, "_post_accumulate_grad_hooks", None) for place in members)

    def gradients(self, members: Sequence[int]) -> list[torch.Tensor]:
        """Returns this rank's shards of the existing gradients, without padding."""
        found = [self.params[place].sharded_param.grad for place in members]
        return [gradient._local_tensor for gradient in found if gradient is not None]

    def has_gradients(self) -> bool:
        """Returns whether a parameter has a gradient."""
        return any(param.sharded_param.grad is not None for param in self.params)

    def add_gradients(self, members: Sequence[int], shards: torch.Tensor) -> None:
        """Adds this rank's padded shards of gradients, concatenated, to the gradients, except to dropped ones."""
        parts = shards.split([self.chunks[place] for place in members])
        for place, part in zip(members, parts):
            if place in self.pending and not self._counts(place):
                continue
            param = self.params[place]
            if param.grad_offload_event is not None:  # the copy of the zeros to the host is in flight
                param.grad_offload_event.synchronize()
            held = self.pending.get(place)
            local = (param.sharded_param.grad if held is None else held.stored)._local_tensor
            local += part[: local.numel()].view(local.shape).to(local.device, local.dtype)

    def drop_gradients(self, members: Sequence[int]) -> None:
        """Sets gradients to None."""
        for place in members:
            self.params[place].sharded_param.grad = None

    def hold_gradients(self, complete: Callable[[], None]) -> None:
        """Replaces the gradients by `PendingGradient`, which calls ``complete`` when it is used."""
        for place, param in enumerate(self.params):
            gradient = param.sharded_param.grad
            if gradient is not None and place not in self.pending:
                self.pending[place] = param.sharded_param.grad = PendingGradient(gradient, complete)

    def counting(self) -> list[bool]:
        """Returns for each held gradient whether the user still has it: it was neither replaced nor zeroed."""
        return [self._counts(place) for place in self.pending]

    def _counts(self, place: int) -> bool:
        held = self.pending[place]
        return self.params[place].sharded_param.grad is held and not held.dropped

    def release_gradients(self) -> None:
        """Puts the gradients themselves back."""
        for place, held in self.pending.items():
            if self.params[place].sharded_param.grad is held:
                self.params[place].sharded_param.grad = held.stored
        self.pending.clear()


def torch_support() -> str:
    """Describes whether hzero was tested with this torch.

    Raises:
        ConfigError: This torch is too old, or its FSDP2 lacks a required function.
    """
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if release < OLDEST or _divide_factors is None:
        raise ConfigError(f"torch: found {torch.__version__}; expected 2.10 or newer, tested are {', '.join(TESTED)}")
    known = "tested" if ".".join(map(str, release)) in TESTED else "not tested"
    return f"torch {torch.__version__}: {known}"


def sharded_modules(model: torch.nn.Module) -> list[ShardedModule]:
    """Returns the modules with parameters for which ``fully_shard`` has been called, parents first.

    Raises:
        ConfigError: There are no such modules, or hzero does not support their use or this release of torch.
    """
    torch_support()
    found: dict[Any, ShardedModule] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # a forward may have left whole parameters
            state = module._get_fsdp_state()
            groups = _groups_of(state)
            if len(groups) > 1:
                raise ConfigError(
                    f"hzero.fsdp.apply: module {name}: found {len(groups)} parameter groups (shard_placement_fn with several "
                    "meshes); expected one"
                )
            if groups and state not in found:
                found[state] = ShardedModule(name, module)
    if not found:
        raise ConfigError(
            f"hzero.fsdp.apply: found {type(model).__name__} without fully_shard; call fully_shard for its layers and for the "
            "model first"
        )
    return list(found.values())


def root_module(state: Any) -> torch.nn.Module:
    """Returns the module of a root's FSDP state."""
    return state._modules[0]  # type: ignore[no-any-return]


def gathers_of(model: torch.nn.Module) -> list[Any]:
    """Returns the collectives by which the modules of a model gather: FSDP2's, or those that `ShardedModule.attach` has set."""
    states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
    return [group._all_gather_comm for one in states for group in _groups_of(one)]


def keep_reducing(model: torch.nn.Module) -> Callable[[], None]:
    """Changes ``set_requires_gradient_sync(False)``, so that backward still reduces over the inner tiers.

    FSDP2 would keep whole gradients until the next reduction. Sums over the inner tiers need less memory.

    Returns:
        A function that undoes the change.
    """

    def keep(module: Any, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        module.set_requires_all_reduce(requires_gradient_sync, recurse=recurse)

    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    undo = contextlib.ExitStack()
    undo.enter_context(attributes(*((one, "set_requires_gradient_sync", partial(keep, one)) for one in modules)))
    return undo.close


def before_forwards(model: torch.nn.Module, call: Callable[[], None]) -> Callable[[], None]:
    """Calls a function before each forward of a model or of one of its modules, but not of the modules inside that one.

    Methods of ``register_fsdp_forward_method`` have no hooks but also pass `_root_pre_forward`.

    Returns:
        A function that undoes the change.
    """

    def begin(state: Any, stock: Callable[..., Any], *args: Any) -> Any:
        if state._state_ctx.iter_forward_root is None:
            call()
        return stock(*args)

    states = dict.fromkeys(one._get_fsdp_state() for one in model.modules() if isinstance(one, FSDPModule))
    undo = contextlib.ExitStack()
    undo.enter_context(
        attributes(*((one, "_root_pre_forward", partial(begin, one, one._root_pre_forward)) for one in states))
    )
    # After an exception in a forward, FSDP2 takes the next one for its continuation.
    undo.callback(model.register_forward_pre_hook(torch.compiler.disable(lambda *_: call()), prepend=True).remove)
    return undo.close


def backward_number() -> int:
    """Returns the number of the running backward; -1 outside of backward."""
    return torch._C._current_graph_task_id()


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Calls a function at the end of the running backward, after FSDP2's callback.

    Raises:
        ConfigError: No backward is running. Schedules of torch.distributed.pipelining reduce outside of backward.
    """
    try:
        torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]
    except RuntimeError:
        raise ConfigError(
            "hzero.fsdp: found a reduction outside of backward (torch.distributed.pipelining); expected no pipeline stages"
        ) from None


def _groups_of(state: Any) -> list[Any]:
    """Returns the parameter groups of an FSDP state. Before torch 2.12 there is at most one."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group] if getattr(state, "_fsdp_param_group", None) is not None else []
    return list(groups)


def _checked(kind: str, found: Any) -> Any:
    """Returns one of FSDP2's objects, after a check of its required attributes."""
    if kind == "state":
        _checked("context", getattr(found, "_state_ctx", None))
    for name in _READ[kind]:
        if not hasattr(found, name):
            raise ConfigError(
                f"torch: found {torch.__version__}, whose {type(found).__name__} has no {name}; expected {', '.join(TESTED)}"
            )
    return found
