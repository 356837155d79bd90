"""Parameter sizes of the trainer's models, without building them."""

from __future__ import annotations


def gpt_neox_numels(
    *, hidden: int, layers: int, vocab: int, intermediate: int | None = None, tied: bool = False, tensor: int = 1
) -> list[int]:
    """Elements of every parameter of transformers' ``GPTNeoXForCausalLM``, in order.

    Args:
        hidden: Hidden size h.
        layers: Number of layers.
        vocab: Size of the vocabulary.
        intermediate: Size of the inner layer; 4 h where not given.
        tied: Whether input and output embeddings are one parameter.
        tensor: Ranks that share every layer; the elements are those of one of them.
    """
    inner = 4 * hidden if intermediate is None else intermediate
    layer = [hidden] * 4  # two layer norms, weight and bias
    layer += [3 * hidden * hidden // tensor, 3 * hidden // tensor, hidden * hidden // tensor, hidden]
    layer += [inner * hidden // tensor, inner // tensor, hidden * inner // tensor, hidden]
    head = [] if tied else [vocab * hidden]
    return [vocab * hidden, *layer * layers, hidden, hidden, *head]
