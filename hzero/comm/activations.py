"""Collectives inside a model: of activations in forward, and of their gradients in backward.

Megatron-LM's pairs (arXiv 1909.08053, section 3; with sequences that are split, arXiv 2205.05198), the all-to-all of Ulysses
(arXiv 2309.14509) and of experts, over a `Communicator`, each tier with its codec. Backward takes the codec's loss for none
(straight through), and its own collective has the same codecs. After an all-reduce all ranks of the group have the same bits. So
what is computed from them alone, as the gradients of parameters that each of them keeps whole, is the same bits, too.

All ranks of the group call the same functions in the same order, with tensors of the same type and, except in `exchange_rows`,
the same shape. Gradients of the second order are not defined. ``torch.compile`` leaves them out: its graph breaks there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.autograd.function import FunctionCtx, once_differentiable

from hzero.comm.communicator import Communicator

#: One blocking collective of a group.
_Operation: TypeAlias = Callable[[Communicator, torch.Tensor], torch.Tensor]


class _Pair(torch.autograd.Function):
    """An operation in forward, and another one on the gradient in backward."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, group: Communicator, forward: _Operation, backward: _Operation
    ) -> torch.Tensor:
        ctx.of_gradient = partial(backward, group)
        return forward(group, tensor)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.of_gradient(gradient), None, None, None  # type: ignore[attr-defined]


def _pair(tensor: torch.Tensor, group: Communicator, forward: _Operation, backward: _Operation) -> torch.Tensor:
    if not isinstance(group, Communicator):
        raise TypeError(f"group: found {type(group).__name__}, expected a Communicator, such as for_dimension makes")
    if group.config.error_feedback:
        raise ValueError(
            f"error_feedback: found {', '.join(group.config.error_feedback)}, but activations are other ones in every "
            "micro-step, so nothing of one belongs to the next; possible: a communicator without error_feedback"
        )
    result: torch.Tensor = _Pair.apply(tensor, group, forward, backward)
    return result


@torch.compiler.disable
def copy_to(tensor: torch.Tensor, group: Communicator) -> torch.Tensor:
    """The tensor itself; in backward the sum of all ranks' gradients.

    For what enters layers whose outputs are split: Megatron's ``copy_to_tensor_model_parallel_region``, its function f.

    Args:
        tensor: float32, bfloat16 or float16, of any shape, the same on all ranks.
        group: Ranks that share the layer.

    Raises:
        TypeError: The group is no `Communicator`, or the tensor of another type.
        ValueError: The communicator has error feedback.
    """
    return _pair(tensor, group, lambda _, whole: whole.view_as(whole), Communicator.all_reduce)


@torch.compiler.disable
def reduce_from(tensor: torch.Tensor, group: Communicator) -> torch.Tensor:
    """The sum of all ranks' tensors; in backward the gradient itself.

    For what leaves layers whose inputs are split: Megatron's ``reduce_from_tensor_model_parallel_region``, its function g. The
    error of an element is that of `Communicator.all_reduce`. Arguments and errors as of `copy_to`.
    """
    return _pair(tensor, group, Communicator.all_reduce, lambda _, gradient: gradient)


@torch.compiler.disable
def gather_from(tensor: torch.Tensor, group: Communicator, dim: int) -> torch.Tensor:
    """All ranks' tensors one after the other along a dimension; in backward this rank's part of the sum of their gradients.

    For sequences that are split before a layer that needs them whole: Megatron's ``gather_from_sequence_parallel_region``.

    Args:
        tensor: float32, bfloat16 or float16, of the same shape on all ranks.
        group: Ranks that share the sequence.
        dim: The dimension, which becomes as many times as long as the group has ranks.

    Raises:
        ValueError: The communicator has error feedback.
    """
    gather, scatter = partial(_along, Communicator.all_gather, dim), partial(_along, Communicator.reduce_scatter, dim)
    return _pair(tensor, group, gather, scatter)


@torch.compiler.disable
def reduce_scatter_to(tensor: torch.Tensor, group: Communicator, dim: int) -> torch.Tensor:
    """This rank's part of the sum of all ranks' tensors along a dimension; in backward all ranks' gradients.

    The counterpart of `gather_from` behind the layer: Megatron's ``reduce_scatter_to_sequence_parallel_region``.

    Args:
        tensor: float32, bfloat16 or float16, of the same shape on all ranks.
        group: Ranks that share the sequence.
        dim: The dimension, whose length is a multiple of the group's size.

    Raises:
        ValueError: It is not, or the communicator has error feedback.
    """
    gather, scatter = partial(_along, Communicator.all_gather, dim), partial(_along, Communicator.reduce_scatter, dim)
    return _pair(tensor, group, scatter, gather)


@torch.compiler.disable
def exchange(tensor: torch.Tensor, group: Communicator, split: int, gather: int) -> torch.Tensor:
    """Part i along one dimension goes to rank i, and what comes from all ranks is laid one after the other along another one.

    In Ulysses a rank that has some tokens of all heads, ``[batch, length / ranks, heads, size]``, gets all tokens of some heads,
    ``[batch, length, heads / ranks, size]``, by ``split=2, gather=1``. Experts' tokens, grouped by the rank of the expert, go
    there by ``split=0, gather=0``. Backward is the way back. The error of an element is that of `Communicator.all_to_all`.

    Args:
        tensor: float32, bfloat16 or float16, of the same shape on all ranks.
        group: The ranks.
        split: The dimension that is divided, a multiple of the group's size.
        gather: The dimension along which parts are laid.

    Raises:
        RuntimeError: ``split`` cannot be divided.
        ValueError: The communicator has error feedback.
    """
    axes = range(tensor.dim())
    split, gather = axes[split], axes[gather]
    return _pair(tensor, group, partial(_exchanged, split, gather), partial(_exchanged, gather, split))


@torch.compiler.disable
def exchange_rows(
    tensor: torch.Tensor, group: Communicator, sent: Sequence[int], received: Sequence[int]
) -> torch.Tensor:
    """Rows, such as tokens, go to the ranks of their experts, as many to each as are for it. Backward is the way back.

    `Communicator.exchange_counts` tells every rank how many rows it receives. The way back from the experts is this function
    with the counts exchanged. The error of an element is that of one encoding.

    Args:
        tensor: float32, bfloat16 or float16 ``[rows, ...]``, rows for rank 0 first.
        group: The ranks that have the experts.
        sent: Rows for each rank.
        received: Rows from each rank.

    Returns:
        ``[sum(received), ...]``, rows from rank 0 first.

    Raises:
        ValueError: As of `Communicator.exchange_rows`, or the communicator has error feedback.
    """
    exchange = Communicator.exchange_rows
    there, back = partial(exchange, sent=sent, received=received), partial(exchange, sent=received, received=sent)
    return _pair(tensor, group, there, back)


def _exchanged(split: int, gather: int, group: Communicator, tensor: torch.Tensor) -> torch.Tensor:
    parts = tensor.unflatten(split, (group.plan.grid.world_size, -1)).movedim(split, 0)
    received: torch.Tensor = group.all_to_all(parts)
    return received.movedim(0, gather).flatten(gather, gather + 1)


def _along(operation: _Operation, dim: int, group: Communicator, tensor: torch.Tensor) -> torch.Tensor:
    """An operation on the first dimension, on another one."""
    return operation(group, tensor.movedim(dim, 0)).movedim(0, dim).contiguous()
