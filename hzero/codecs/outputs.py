"""Outputs of the codec operators, allocated and not filled: what tracing needs (the fake), and where kernels write.

Only what determines a size is named; further arguments are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hzero.codecs.arguments import Messages, Rows
from hzero.codecs.formats import RecordFormat


def encode(source: Sequence[torch.Tensor], rows: Rows, fmt: RecordFormat, *_: Any) -> torch.Tensor:
    """The message."""
    size = fmt.message_bytes(rows.chunks, rows.total, source[0].dtype.itemsize)
    return source[0].new_empty(size, dtype=torch.uint8)


def encode_feedback(
    source: Sequence[torch.Tensor], residuals: Any, factors: Any, rows: Rows, fmt: RecordFormat, *_: Any
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The message, and the new residuals. Sums are encoded, which are float32."""
    left = [tensor.new_empty(tensor.numel(), dtype=torch.float32) for tensor in source]
    return encode(left, rows, fmt), left


def encode_difference(
    source: Sequence[torch.Tensor], base: Any, rows: Rows, fmt: RecordFormat, *_: Any
) -> torch.Tensor:
    """The message. Differences are float32, but those of codec ``none``, which have the type of the source."""
    return encode(source, rows, fmt)


def decode_onto(*_: Any) -> None:
    """None: the tensors exist."""


def decode(payload: torch.Tensor, rows: Rows, fmt: RecordFormat, dtype: torch.dtype) -> list[torch.Tensor]:
    """The decoded tensors."""
    total = rows.total
    return [payload.new_empty(total * chunk, dtype=dtype) for chunk in rows.chunks]


def decode_sum(payload: torch.Tensor, messages: Messages, *_: Any) -> list[torch.Tensor]:
    """The sums."""
    return [payload.new_empty(messages.inner * chunk, dtype=torch.float32) for chunk in messages.chunks]


def decode_add(*_: Any) -> None:
    """None: the sums exist."""


def decode_sum_encode(
    payload: torch.Tensor, messages: Messages, fmt: Any, dtype: Any, outer: int, out: RecordFormat, *_: Any
) -> torch.Tensor:
    """The message of the sums, which are float32."""
    size = out.message_bytes(messages.chunks, messages.inner, torch.float32.itemsize)
    return payload.new_empty(size, dtype=torch.uint8)
