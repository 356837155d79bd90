"""Collectives inside a model: of activations in forward, and of their gradients in backward.

The module has Megatron-LM's pairs (arXiv 1909.08053, section 3; for split sequences, arXiv 2205.05198), and the all-to-all of
Ulysses (arXiv 2309.14509) and of experts. They use a `Communicator`, each tier with its codec. Backward ignores the codec's loss
(straight through), and its collective has the same codecs. After an all-reduce, all ranks of the group have the same bits.
Values that depend only on these bits are therefore equal too, such as gradients of parameters that each rank keeps whole.

All ranks of the group call the same functions in the same order, with tensors of the same dtype and, except in `exchange_rows`,
of the same shape. Second-order gradients are not defined. ``torch.compile`` does not compile these functions: its graph breaks
there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.autograd.function import FunctionCtx, once_differentiable

from hzero.comm.communicator import Communicator

#: A blocking collective of a group.
_Operation: TypeAlias = Callable[[Communicator, torch.Tensor], torch.Tensor]


class _Pair(torch.autograd.Function):
    """One operation in forward, and another one for the gradient in backward."""

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
        raise TypeError(f"group: found {type(group).__name__}; expected a Communicator, such as for_dimension makes")
    if group.config.error_feedback:
        raise ValueError(
            f"error_feedback: found {', '.join(group.config.error_feedback)}, but activations differ in every "
            "micro-batch, so no residual applies to the next one; expected a communicator without error_feedback"
        )
    result: torch.Tensor = _Pair.apply(tensor, group, forward, backward)
    return result


@torch.compiler.disable
def copy_to(tensor: torch.Tensor, group: Communicator) -> torch.Tensor:
    """Returns the tensor itself; in backward, the sum of all ranks' gradients.

    Use it for inputs of layers with split outputs: Megatron's ``copy_to_tensor_model_parallel_region``, its function f.

    Args:
        tensor: float32, bfloat16 or float16, of any shape, the same on all ranks.
        group: Ranks that share the layer.

    Raises:
        TypeError: The group is no `Communicator`, or the tensor has another dtype.
        ValueError: The communicator has error feedback.
    """
    return _pair(tensor, group, lambda _, whole: whole.view_as(whole), Communicator.all_reduce)


@torch.compiler.disable
def reduce_from(tensor: torch.Tensor, group: Communicator) -> torch.Tensor:
    """Returns the sum of all ranks' tensors; in backward, the gradient itself.

    Use it for outputs of layers with split inputs: Megatron's ``reduce_from_tensor_model_parallel_region``, its function g. The
    error of an element is bounded as in `Communicator.all_reduce`. Arguments and errors are as in `copy_to`.
    """
    return _pair(tensor, group, Communicator.all_reduce, lambda _, gradient: gradient)


@torch.compiler.disable
def gather_from(tensor: torch.Tensor, group: Communicator, dim: int) -> torch.Tensor:
    """Concatenates all ranks' tensors along a dimension; in backward, returns this rank's part of the sum of gradients.

    Use it for split sequences before a layer that needs them whole: Megatron's ``gather_from_sequence_parallel_region``.

    Args:
        tensor: float32, bfloat16 or float16, of the same shape on all ranks.
        group: Ranks that share the sequence.
        dim: The dimension, which becomes longer by a factor of the group's size.

    Raises:
        ValueError: The communicator has error feedback.
    """
    gather, scatter = partial(_along, Communicator.all_gather, dim), partial(_along, Communicator.reduce_scatter, dim)
    return _pair(tensor, group, gather, scatter)


@torch.compiler.disable
def reduce_scatter_to(tensor: torch.Tensor, group: Communicator, dim: int) -> torch.Tensor:
    """Returns this rank's part of the sum of all ranks' tensors along a dimension; in backward, all ranks' gradients.

    The counterpart of `gather_from` after the layer: Megatron's ``reduce_scatter_to_sequence_parallel_region``.

    Args:
        tensor: float32, bfloat16 or float16, of the same shape on all ranks.
        group: Ranks that share the sequence.
        dim: The dimension, whose length is a multiple of the group's size.

    Raises:
        ValueError: The length is no such multiple, or the communicator has error feedback.
    """
    gather, scatter = partial(_along, Communicator.all_gather, dim), partial(_along, Communicator.reduce_scatter, dim)
    return _pair(tensor, group, scatter, gather)


@torch.compiler.disable
def exchange(tensor: torch.Tensor, group: Communicator, split: int, gather: int) -> torch.Tensor:
    """Sends part i along one dimension to rank i, and concatenates the received parts along another dimension.

    In Ulysses, a rank has some tokens of all heads, ``[batch, length / ranks, heads, size]``. With ``split=2, gather=1`` it gets
    all tokens of some heads, ``[batch, length, heads / ranks, size]``. Tokens that are grouped by the rank of their expert get
    there with ``split=0, gather=0``. Backward sends gradients back. The error of an element is bounded as in
    `Communicator.all_to_all`.

    Args:
        tensor: float32, bfloat16 or float16, of the same shape on all ranks.
        group: The ranks.
        split: The dimension to split, a multiple of the group's size.
        gather: The dimension along which received parts are concatenated.

    Raises:
        RuntimeError: ``split`` cannot be divided evenly.
        ValueError: The communicator has error feedback.
    """
    axes = range(tensor.dim())
    split, gather = axes[split], axes[gather]
    return _pair(tensor, group, partial(_exchanged, split, gather), partial(_exchanged, gather, split))


@torch.compiler.disable
def exchange_rows(
    tensor: torch.Tensor, group: Communicator, sent: Sequence[int], received: Sequence[int]
) -> torch.Tensor:
    """Sends rows, such as tokens, to the ranks of their experts, in uneven numbers. Backward sends gradients back.

    `Communicator.exchange_counts` reports to every rank how many rows it receives. To return rows from the experts, call this
    function with the two counts swapped. The error of an element is at most one encoding error.

    Args:
        tensor: float32, bfloat16 or float16 ``[rows, ...]``, rows for rank 0 first.
        group: The ranks that have the experts.
        sent: Number of rows for each rank.
        received: Number of rows from each rank.

    Returns:
        ``[sum(received), ...]``, rows from rank 0 first.

    Raises:
        ValueError: As in `Communicator.exchange_rows`, or the communicator has error feedback.
    """
    exchange = Communicator.exchange_rows
    there, back = partial(exchange, sent=sent, received=received), partial(exchange, sent=received, received=sent)
    return _pair(tensor, group, there, back)


def _exchanged(split: int, gather: int, group: Communicator, tensor: torch.Tensor) -> torch.Tensor:
    parts = tensor.unflatten(split, (group.plan.grid.world_size, -1)).movedim(split, 0)
    received: torch.Tensor = group.all_to_all(parts)
    return received.movedim(0, gather).flatten(gather, gather + 1)


def _along(operation: _Operation, dim: int, group: Communicator, tensor: torch.Tensor) -> torch.Tensor:
    """Applies an operation on the first dimension to another one."""
    return operation(group, tensor.movedim(dim, 0)).movedim(0, dim).contiguous()
