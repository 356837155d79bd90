"""Error feedback: what a lossy gradient hop lost, added to the next message of the same tier."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hzero.collectives.bucket import Bucket


class ErrorFeedback:
    """Residuals in float32, one a tier and parameter (Seide et al. 2014; Karimireddy et al., arXiv 1901.09847).

    What a window of gradients leaves is pending until its step is done: a skipped step throws its gradients away, and
    with them must go what they left. They start at zero, also after a resume: checkpoints are stock DeepSpeed's and do
    not carry them.
    """

    def __init__(self) -> None:
        self._residuals: dict[tuple[str, int], tuple[torch.Tensor, float]] = {}
        self._pending: dict[tuple[str, int], tuple[torch.Tensor, float]] = {}
        self._most_held = 0

    def of(
        self, tier: str, bucket: Bucket, tensors: Sequence[torch.Tensor], scale: float
    ) -> tuple[list[torch.Tensor], list[float]]:
        """The residuals to add to tensors before they are encoded, and the factors to add them with.

        Args:
            tier: Tier of the hop.
            bucket: The tensors' keys.
            tensors: Flat floating tensors.
            scale: Loss scale of ``tensors``; a residual kept at another scale is brought to this one.

        Returns:
            float32 tensors of as many elements as ``tensors``, or of none where there is no residual yet; the factors.
        """
        residuals, factors = [], []
        for key, tensor in zip(bucket.keys, tensors):
            kept = self._pending.get((tier, key)) or self._residuals.get((tier, key))
            if kept is None or kept[0].numel() != tensor.numel():
                kept = (tensor.new_empty(0, dtype=torch.float32), scale)
            residuals.append(kept[0])
            factors.append(scale / kept[1])
        return residuals, factors

    def keep(self, tier: str, bucket: Bucket, residuals: Sequence[torch.Tensor], scale: float) -> None:
        """Keeps what encoding lost: float32, at this loss scale."""
        for key, residual in zip(bucket.keys, residuals):
            self._pending[(tier, key)] = (residual, scale)

    def commit(self) -> None:
        """The step is done: what its gradients left is added to the next ones."""
        held = [*self._residuals.values(), *self._pending.values()]
        self._most_held = max(self._most_held, sum(kept.numel() * kept.element_size() for kept, _ in held))
        self._residuals.update(self._pending)
        self._pending.clear()

    def discard(self) -> None:
        """The gradients since the last `commit` were thrown away: what they left is forgotten."""
        self._pending.clear()

    def bytes(self) -> int:
        """Most memory that residuals have taken on this rank at a step, in bytes: twice their size from the second on."""
        return self._most_held

    def clear(self) -> None:
        """Forgets all residuals: the weights they belonged to have been replaced."""
        self._residuals.clear()
        self._pending.clear()
