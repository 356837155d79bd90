"""Whether packed examples see each other, found out on the model itself."""

from __future__ import annotations

from typing import Any

import torch

from hzero.validation import ConfigError


@torch.no_grad()
def check_packing(model: Any, vocab_size: int, length: int, device: torch.device) -> None:
    """Refuses a model in which an example changes what is computed of the one behind it in the same sequence.

    Masks take positions that begin anew for borders in most architectures of transformers, but not in all of them, nor with
    every implementation of attention; and layers with a state carry it over the border.

    Args:
        model: The engine; all ranks call this together.
        vocab_size: Ids of tokens.
        length: Maximum length of a sequence.
        device: Of the inputs.

    Raises:
        ConfigError: Examples see each other.
    """
    half = max(1, min(8, length // 2))
    chosen = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab_size, (2, 2 * half), generator=chosen)
    ids[1, half:] = ids[0, half:]  # the same second example behind two first ones
    ids[1, :half] = (ids[0, :half] + 1) % vocab_size
    positions = torch.arange(half).repeat(2, 2)
    training = model.training
    model.eval()
    first, second = model(input_ids=ids.to(device), position_ids=positions.to(device)).logits[:, half:]
    model.train(training)
    # Equal shapes give equal bits, but for experts that batch their tokens.
    near = 1e-5 if first.dtype == torch.float32 else 1e-2
    if (first - second).abs().max() > near * first.abs().max():
        raise ConfigError("data.packing: found true, and in this model packed examples see each other; possible: false")
