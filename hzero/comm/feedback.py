"""Error feedback: the loss of a lossy gradient hop is added to the next message of the same tier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass
class Residual:
    """What one tier has lost of one parameter until now.

    Attributes:
        values: The loss, bfloat16, flat; updated where it lies.
        scale: Loss scale of it.
    """

    values: torch.Tensor
    scale: float


class ErrorFeedback:
    """Residuals in bfloat16, one per tier and parameter (Seide et al. 2014; Karimireddy et al., arXiv 1901.09847).

    A residual is at most an encoding's error, and bfloat16 loses a 256th of that. It is kept once: an encoding reads it and
    overwrites it (as LoCo does, arXiv 2407.04480). A step that is skipped discards its gradients. Residuals that they have
    changed start at zero again, so such a step loses at most the error of one more encoding. Residuals start at zero.
    """

    def __init__(self) -> None:
        self._residuals: dict[tuple[str, int], Residual] = {}
        self._changed: dict[tuple[str, int], Residual] = {}  # since the last step that is done

    def of(
        self, name: str, keys: Sequence[int], tensors: Sequence[torch.Tensor], scale: float
    ) -> tuple[list[torch.Tensor], list[float]]:
        """The residuals to add to tensors before they are encoded, which the encoding overwrites with what it loses.

        Args:
            name: Of the residuals, such as the tier of the hop.
            keys: Of the tensors.
            tensors: Flat floating tensors.
            scale: Loss scale of ``tensors``, and so of the new residuals.

        Returns:
            Tensors of as many elements as ``tensors``, and the factors to multiply them by, which convert residuals of
            another scale.
        """
        residuals, factors = [], []
        for key, tensor in zip(keys, tensors):
            place = name, key
            kept = self._residuals.get(place)
            if kept is None or kept.values.numel() != tensor.numel():
                kept = self._residuals[place] = Residual(tensor.new_zeros(tensor.numel(), dtype=torch.bfloat16), scale)
            self._changed[place] = kept
            residuals.append(kept.values)
            factors.append(scale / kept.scale)
            kept.scale = scale
        return residuals, factors

    def commit(self) -> None:
        """The step is done: its residuals are added to the next gradients."""
        self._changed.clear()

    def discard(self) -> None:
        """Sets residuals to zero that gradients since the last `commit`, which were discarded, have changed."""
        for kept in self._changed.values():
            kept.values.zero_()
        self._changed.clear()

    @property
    def bytes(self) -> int:
        """Memory of the residuals on this rank."""
        return sum(kept.values.nbytes for kept in self._residuals.values())

    def clear(self) -> None:
        """Forgets all residuals: their weights have been replaced."""
        self._residuals.clear()
        self._changed.clear()
