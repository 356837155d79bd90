"""A small model of awkward sizes, whose features are options, for both front ends and for training without any."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.nn import functional as F  # noqa: N812

VOCAB, WIDTH, WIDE, BLOCKS = 37, 13, 75, 2


def evaluate(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The loss of a model, or of a front end's engine, in evaluation mode and without gradients."""
    model.eval()
    with torch.no_grad():
        loss: torch.Tensor = model(tokens)
    model.train()
    return loss


class Block(nn.Module):
    """A residual block; with ``spare`` it has parameters that a backward uses by turns."""

    def __init__(self, spare: bool, width: int) -> None:
        super().__init__()
        self.norm, inner = nn.LayerNorm(width), 2 * width + 3
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.gain = nn.Parameter(torch.ones(1))
        self.spare = nn.Linear(width, width) if spare else None
        self.skips = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = x + self.down(F.gelu(self.up(self.norm(x)))) * self.gain
        return made if self.spare is None or self.skips else made + self.spare(x)


class Net(nn.Module):
    """Mean next-token loss, a scalar, of int64 ``[batch, length]``."""

    def __init__(self, tied: bool = False, spare: bool = False, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(Block(spare, width) for _ in range(BLOCKS))
        self.head = nn.Linear(width, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).float()[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def make(options: Collection[str], seed: int = 0) -> Net:
    """Makes the model: ``tied``, ``spare``, ``frozen``, ``wide``, and two kinds of activation ``checkpointing``."""
    torch.manual_seed(seed)
    model = Net("tied" in options, "spare" in options, WIDE if "wide" in options else WIDTH)
    if "frozen" in options:
        model.embed.weight.requires_grad_(False)
        for name in ("up.weight", "norm.bias"):
            model.blocks[0].get_parameter(name).requires_grad_(False)
        model.blocks[1].requires_grad_(False)
    return model


def checkpoint_blocks(model: Net, options: Collection[str]) -> None:
    """Wraps the blocks in activation checkpointing, if an option wants it."""
    kinds = {"checkpointing": CheckpointImpl.NO_REENTRANT, "reentrant": CheckpointImpl.REENTRANT}
    for kind in kinds.keys() & set(options):
        for place, block in enumerate(model.blocks):
            model.blocks[place] = checkpoint_wrapper(block, checkpoint_impl=kinds[kind])


def batch(step: int, micro: int, rank: int) -> torch.Tensor:
    """Deterministic tokens, int64 ``[2, 9]``, other ones for every step, micro-batch and rank."""
    generator = torch.Generator().manual_seed(step * 10_007 + micro * 101 + rank)
    return torch.randint(0, VOCAB, (2, 9), generator=generator)
