"""Arguments of a communicator's operations: what they have to be."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

import torch

from hzero.codecs.ops import FLOATS
from hzero.validation import one_of


def flat(operation: str, tensor: torch.Tensor, device: str, exp: bool) -> torch.Tensor:
    """The tensor as one contiguous row, without gradient.

    Args:
        operation: Begins messages.
        tensor: Dense, float32, bfloat16 or float16; with ``exp`` bfloat16.
        device: Kind of device that it has to be on.
        exp: Whether a hop has codec ``exp``.

    Raises:
        TypeError: It is something else.
        ValueError: It is on another device.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in FLOATS or tensor.layout != torch.strided:
        found = type(tensor).__name__
        if isinstance(tensor, torch.Tensor):
            found = f"{tensor.dtype} in layout {tensor.layout}"
        raise TypeError(f"{operation}: tensor: found {found}, possible: dense float32, bfloat16, float16")
    if exp and tensor.dtype != torch.bfloat16:
        raise TypeError(f"{operation}: tensor: found {tensor.dtype}, possible with codec exp: bfloat16")
    if tensor.device.type != device:
        raise ValueError(
            f"{operation}: tensor: found on {tensor.device}, possible with the backend of this group: {device}"
        )
    return tensor.detach().reshape(-1).contiguous()  # of an expanded tensor reshape makes a view


def part(operation: str, tensor: torch.Tensor, ranks: int) -> tuple[int, ...]:
    """The shape of one rank's part. Raises ValueError where the first dimension is no multiple of the ranks."""
    rows, *rest = tensor.shape or (0,)
    if tensor.dim() == 0 or rows % ranks:
        raise ValueError(
            f"{operation}: tensor: found shape {list(tensor.shape)}, expected a first dimension that is a multiple of the "
            f"group's {ranks} ranks"
        )
    return (rows // ranks, *rest)


def check_sum(operation: str, op: str, key: int | None, error_feedback: Sequence[str]) -> None:
    """Raises ValueError for an unknown sum, or one without a key where tiers have error feedback."""
    if op not in ("sum", "mean"):
        raise one_of(f"{operation}: op", op, ("sum", "mean"))
    if key is None and error_feedback:
        raise ValueError(
            f"{operation}: key: found None, expected a number that names the tensor from call to call, since "
            f"error_feedback is on ({', '.join(error_feedback)})"
        )


def check_rank(argument: str, rank: int, ranks: int) -> None:
    """Raises ValueError for what is no rank of a group of so many."""
    if isinstance(rank, bool) or not isinstance(rank, Integral) or not 0 <= rank < ranks:
        raise ValueError(f"{argument}: found {rank!r}, possible: 0..{ranks - 1}")
