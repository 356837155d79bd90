"""Error feedback: the loss of a lossy gradient hop is added to the next message of the same tier."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hzero.comm.bucket import Bucket


class ErrorFeedback:
    """Residuals in float32, one per tier and parameter (Seide et al. 2014; Karimireddy et al., arXiv 1901.09847).

    The residuals of an accumulation window are pending until its step is done: a skipped step discards its gradients,
    and their residuals with them. Residuals start at zero, or with those of a checkpoint.
    """

    def __init__(self) -> None:
        self._residuals: dict[tuple[str, int], tuple[torch.Tensor, float]] = {}
        self._pending: dict[tuple[str, int], tuple[torch.Tensor, float]] = {}
        self._peak_bytes = 0

    def of(
        self, name: str, bucket: Bucket, tensors: Sequence[torch.Tensor], scale: float
    ) -> tuple[list[torch.Tensor], list[float]]:
        """The residuals to add to tensors before they are encoded, and the factors to multiply them by.

        Args:
            name: Of the residuals, such as the tier of the hop.
            bucket: Keys of the tensors.
            tensors: Flat floating tensors.
            scale: Loss scale of ``tensors``; the factors convert residuals kept at another scale.

        Returns:
            float32 tensors of as many elements as ``tensors``, empty where no residual is kept yet; the factors.
        """
        residuals, factors = [], []
        for key, tensor in zip(bucket.keys, tensors):
            kept = self._pending.get((name, key)) or self._residuals.get((name, key))
            if kept is None or kept[0].numel() != tensor.numel():
                kept = (tensor.new_empty(0, dtype=torch.float32), scale)
            residuals.append(kept[0])
            factors.append(scale / kept[1])
        return residuals, factors

    def keep(self, name: str, bucket: Bucket, residuals: Sequence[torch.Tensor], scale: float) -> None:
        """Keeps the loss of an encoding: float32 tensors, at this loss scale."""
        for key, residual in zip(bucket.keys, residuals):
            self._pending[(name, key)] = (residual, scale)

    def commit(self) -> None:
        """The step is done: its residuals are added to the next gradients."""
        held = [*self._residuals.values(), *self._pending.values()]
        self._peak_bytes = max(self._peak_bytes, sum(kept.numel() * kept.element_size() for kept, _ in held))
        self._residuals.update(self._pending)
        self._pending.clear()

    def discard(self) -> None:
        """Forgets the residuals of gradients since the last `commit`, which were discarded."""
        self._pending.clear()

    @property
    def peak_bytes(self) -> int:
        """Peak memory of residuals at a step on this rank, in bytes: twice their size from the second step on."""
        return self._peak_bytes

    def saved(self) -> dict[str, dict[int, tuple[torch.Tensor, float]]]:
        """The residuals of steps that are done, by tier and key, each with the loss scale that it is kept at."""
        found: dict[str, dict[int, tuple[torch.Tensor, float]]] = {}
        for (name, key), kept in self._residuals.items():
            found.setdefault(name, {})[key] = kept
        return found

    def restore(self, name: str, key: int, residual: torch.Tensor, scale: float) -> None:
        """Starts from a residual that `saved` has given."""
        self._residuals[name, key] = residual, scale

    def clear(self) -> None:
        """Forgets all residuals: their weights have been replaced."""
        self._residuals.clear()
        self._pending.clear()
