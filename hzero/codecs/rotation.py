"""Rotation of elements before they are coded, so that none stands out of its block: a Walsh-Hadamard transform.

SDP4Bit (arXiv 2410.15526) rotates gradients so before it codes them in four bits.
"""

from __future__ import annotations

import torch

from hzero.codecs.formats import RecordFormat


def rotate(rows: torch.Tensor, chunk: int, fmt: RecordFormat, factor: float = 1.0) -> None:
    """Multiplies float32 records, the rows of a matrix, by ``factor`` and rotates them, in place, where the format says so.

    Groups of ``rotation`` elements are rotated. The last block of a record stays as it is unless it consists of such groups:
    rotated elements are smaller, and those beside them would set their scale. The rotation is a Walsh-Hadamard transform: its
    own inverse but for a factor of 1 / rotation, a power of two.
    """
    size = fmt.rotation
    if not size:
        return
    whole = chunk // fmt.block_size * fmt.block_size if chunk % size else chunk
    if not whole:
        return
    groups = rows[:, :whole].reshape(-1, size) * factor
    distance = 1
    while distance < size:
        pairs = groups.view(-1, 2, distance)
        groups = torch.stack((pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]), dim=1)
        distance *= 2
    rows[:, :whole].copy_(groups.view(-1, whole))
