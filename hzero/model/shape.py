"""Shape of a model: its parameters in order, and what a token costs, without building it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hzero.sharding.shapes import gpt_neox_numels


@dataclass(frozen=True)
class ModelShape:
    """A model of equal layers, as a step sees it.

    Attributes:
        name: For titles.
        seq_length: Tokens of a sequence.
        hidden: Width of the residual stream.
        layers: Number of layers.
        heads: Heads of attention.
        intermediate: Hidden units of a layer.
        vocab: Ids of tokens.
        before: Elements of every parameter before the first layer.
        layer: Of every parameter of one layer.
        after: Of those behind the last.
        layer_flops: Operations of one layer's products with weights, of forward, per token.
        attention_flops: Of one layer's scores and of their product with the values.
        after_flops: Of the head.
    """

    name: str
    seq_length: int
    hidden: int
    layers: int
    heads: int
    intermediate: int
    vocab: int
    before: tuple[int, ...]
    layer: tuple[int, ...]
    after: tuple[int, ...]
    layer_flops: float
    attention_flops: float
    after_flops: float

    @property
    def module(self) -> int:
        """Elements of the largest part that the trainer gathers as a whole."""
        return max(sum(self.layer), *self.before, *self.after)

    @property
    def numels(self) -> list[int]:
        """Elements of every parameter."""
        return [*self.before, *self.layer * self.layers, *self.after]


def gpt_neox_shape(model: dict[str, Any]) -> ModelShape:
    """The shape of a GPT-NeoX of the trainer's group ``model``."""
    hidden, length = model["hidden_size"], model["seq_length"]
    whole = gpt_neox_numels(hidden=hidden, layers=1, vocab=model["vocab_size"], intermediate=model["intermediate_size"])
    layer, after = tuple(whole[1:-3]), tuple(whole[-3:])
    return ModelShape(
        name=model["name"],
        seq_length=length,
        hidden=hidden,
        layers=model["num_layers"],
        heads=model["num_heads"],
        intermediate=model["intermediate_size"],
        vocab=model["vocab_size"],
        before=(whole[0],),
        layer=layer,
        after=after,
        layer_flops=2.0 * sum(layer),
        attention_flops=4.0 * length * hidden,
        after_flops=2.0 * after[-1],
    )
