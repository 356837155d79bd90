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

    def add(
        self, tier: str, bucket: Bucket, tensors: Sequence[torch.Tensor], rows: int, scale: float
    ) -> list[torch.Tensor]:
        """The tensors with their residuals added.

        Args:
            tier: Tier of the hop.
            bucket: The tensors' keys and chunks.
            tensors: Flat floating tensors, at most ``rows * chunk`` elements each.
            rows: Shards that each holds.
            scale: Loss scale of ``tensors``; a residual kept at another scale is brought to this one.

        Returns:
            New float32 tensors of ``rows * chunk`` elements.
        """
        summed = []
        for key, chunk, tensor in zip(bucket.keys, bucket.chunks, tensors):
            total = torch.zeros(rows * chunk, dtype=torch.float32, device=tensor.device)
            total[: tensor.numel()] = tensor
            kept = self._pending.get((tier, key)) or self._residuals.get((tier, key))
            if kept is not None and kept[0].numel() == total.numel():
                total.add_(kept[0], alpha=scale / kept[1])
            summed.append(total)
        return summed

    def keep(
        self, tier: str, bucket: Bucket, meant: Sequence[torch.Tensor], sent: Sequence[torch.Tensor], scale: float
    ) -> None:
        """Keeps ``meant - sent``, both float32 of the same sizes. Overflowed elements keep nothing."""
        for key, wanted, got in zip(bucket.keys, meant, sent):
            # An overflow makes a block NaN, and not every configuration skips the step: residuals must not carry it on.
            residual = torch.nan_to_num_(wanted - got, nan=0.0, posinf=0.0, neginf=0.0)
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
