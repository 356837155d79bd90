"""Gradient accumulators: partial sums of one window, kept in float32 or in bfloat16."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch


class Accumulators:
    """Partial sums by parameter id. They are summed in float32, whatever they are kept in.

    In bfloat16 a sum is rounded up or down by chance, so that what rounding loses is zero on average and small parts are not
    swallowed by a large sum, as they would be to nearest (Gupta et al. 2015, arXiv 1502.02551). It errs by less than a unit in
    the last place, 2^-7 of its magnitude. A sum that is taken with its last part is not rounded.

    Args:
        dtype: In which they are kept, float32 or bfloat16.
        used: Keeps the memory of a tensor, which may be of another stream, for the current one; returns the tensor.

    Attributes:
        dtype: In which they are kept.
        used: As given.
        bytes: Of those that are kept.
    """

    def __init__(
        self, dtype: torch.dtype, used: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
    ) -> None:
        self.dtype, self.used, self.bytes = dtype, used, 0
        self._kept: dict[int, torch.Tensor] = {}
        self._chance: torch.Generator | None = None

    def __contains__(self, key: int) -> bool:
        return key in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def in_order(self) -> list[int]:
        """Parameters with a sum, in order."""
        return sorted(self._kept)

    def tensors(self) -> list[torch.Tensor]:
        """The sums, as they are kept."""
        return list(self._kept.values())

    def to_add_to(self, keys: Iterable[int]) -> list[torch.Tensor] | None:
        """The sums of ``keys`` themselves, for who decodes and adds in one pass; None where one is missing or narrow."""
        found = [self._kept.get(key) for key in keys]
        if self.dtype != torch.float32 or any(one is None for one in found):
            return None
        return found  # type: ignore[return-value]

    def add(self, keys: Sequence[int], parts: Sequence[torch.Tensor], seed: int) -> None:
        """Adds parts of sums.

        Args:
            keys: The parameters.
            parts: One flat floating tensor each, or the very sum that `to_add_to` has given, added to. A float32 tensor that
                is the first is kept as it is: nobody else may keep it.
            seed: Of the rounding.
        """
        if self.dtype != torch.float32 and self._chance is None and parts:
            self._chance = torch.Generator(parts[0].device)
        if self._chance is not None:
            self._chance.manual_seed(seed)
        for key, part in zip(keys, parts):
            (total,) = self.take([key], [part])
            kept = total if self._chance is None else _rounded(total, self._chance)
            self._kept[key] = kept
            self.bytes += kept.nbytes

    def take(self, keys: Sequence[int], parts: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Gives the sums away, float32, with parts that arrive last, which are as those of `add`."""
        totals = []
        for key, part in zip(keys, parts if parts is not None else [None] * len(keys)):
            kept = self._kept.pop(key, None)
            self.bytes -= kept.nbytes if kept is not None else 0
            if kept is None or kept is part:
                assert part is not None, key
                totals.append(part.to(torch.float32))
            else:
                total = self.used(kept).to(torch.float32)
                totals.append(total if part is None else total.add_(part))
        return totals

    def clear(self) -> None:
        """Starts a new window."""
        self._kept.clear()
        self.bytes = 0


def _rounded(total: torch.Tensor, chance: torch.Generator) -> torch.Tensor:
    """Float32 in bfloat16: away from zero with the probability of the bits that are cut off."""
    bits = total.view(torch.int32)
    grown = torch.empty_like(bits).random_(0, 1 << 16, generator=chance).add_(bits).bitwise_and_(-1 << 16)
    # Numbers that are not finite stay: their bits must not grow into others.
    return torch.where(total.isfinite(), grown.view(torch.float32), total).to(torch.bfloat16)
