"""Causal attention over sequences that are split over ranks, chunk by chunk (FPDT, arXiv 2408.16978).

Rank r of a group has the r-th part of every chunk of the sequence. Projections, norms and MLPs work on these tokens. For
attention, an all-to-all gives each rank all tokens of the chunk, for its share of the heads (Ulysses, arXiv 2309.14509). An
exchange has the size of a chunk, so the next one is in flight while a chunk computes. A chunk of queries attends to its own
and all earlier chunks of keys and values, one at a time. Partial results are merged by their log-sum-exps, as in ring
attention (arXiv 2310.01889). Chunks that are not in use are in host memory.

Backward processes the chunks in reverse. When it reaches a chunk, all later chunks have added their parts of the gradients of
its keys and values. These are then complete, and the gradients of the chunk's tokens follow at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Module

from hzero.comm.communicator import Communicator
from hzero.sequence.host import HostMemory, one_ahead

Tensors: TypeAlias = Sequence[Tensor]
#: Waits for tensors that are in flight.
Arriving: TypeAlias = Callable[[], Tensors]
_aten = torch.ops.aten


@dataclass
class Attention:
    """Attention of one rank's tokens.

    Attributes:
        group: Ranks that share the sequence. None: this rank has the whole sequence.
        memory: Stores the chunks that are not in use.
        scale: Factor of the scores. None: one over the square root of a head's size. Set it before the first chunk attends.
    """

    group: Communicator | None
    memory: HostMemory
    scale: float | None = None

    def forward(self, projected: Iterable[Tensors], kept: list[list[Tensor]] | None = None) -> Iterator[Arriving]:
        """Attends from the first chunk to the last.

        Args:
            projected: For each chunk, queries, keys and values ``[batch, heads, tokens, size]`` of this rank's tokens. They
                have all heads, whose number is a multiple of the ranks. They are read one chunk ahead.
            kept: A list to which tensors for `backward` are appended. None: no backward follows.

        Returns:
            An iterator for `one_ahead`. For each chunk it gives a sequence of one tensor, the attention output of this rank's
            tokens, in the shape of the queries. While a chunk computes, the exchanges of the next chunk's queries and of the
            last chunk's results are in flight.
        """
        pairs: list[list[Tensor]] = []
        for query, *pair in one_ahead(self._exchange(one, 1) for one in projected):
            out = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
            weight = torch.full(query.shape[:-1], -torch.inf, device=query.device)
            # The chunk attends to its own keys first, while the first pair is on its way from the host.
            blocks: Iterator[Tensors] = one_ahead(chain([partial(tuple, pair)], map(self.memory.start, pairs[:])))
            pairs.append(self.memory.store(*pair))
            del pair
            for one, (key, value) in enumerate(blocks):
                more, its_weight = _attend((query, key, value), self.scale, causal=one == 0)
                both = torch.logaddexp(weight, its_weight)
                out.mul_((weight - both).exp_().unsqueeze(-1))
                out.add_(more * (its_weight - both).exp_().unsqueeze(-1))
                weight = both
                del key, value, more, its_weight
            out = out.to(query.dtype)
            if kept is not None:
                kept.append([*self.memory.store(query, out, weight), *pairs[-1]])
            yield self._exchange([out], 2)

    def backward(self, kept: Sequence[list[Tensor]], gradients: Iterable[Tensors]) -> Iterator[Arriving]:
        """Makes gradients from the last chunk to the first.

        Args:
            kept: The list that `forward` has filled. Sums of gradients of keys and values are appended to its elements.
            gradients: For each chunk, from the last to the first, a sequence of one tensor, the gradient of the attention
                output. They are read one chunk ahead.

        Returns:
            An iterator for `one_ahead`. For each chunk it gives the gradients of queries, keys and values, in the shapes that
            ``projected`` had.
        """
        order = list(reversed(range(len(kept))))
        queries = self.memory.fetch(kept[at][:3] for at in order)
        # Keys, values and sums are looked up one block ahead, when the chunk of queries before has changed the sums.
        blocks = self.memory.fetch(kept[one][3:] for at in order for one in range(at + 1))
        incoming = one_ahead(self._exchange(one, 1) for one in gradients)
        for at, (query, out, weight), (gradient,) in zip(order, queries, incoming):
            of_query = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
            for one in range(at + 1):
                key, value, *summed = next(blocks)
                parts = _attend_backward(gradient, (query, key, value, out, weight), self.scale, causal=at == one)
                of_query += parts[0]
                pair = [part.float() for part in parts[1:]]
                for new, old in zip(pair, summed):
                    new += old
                del key, value, parts, summed
                if one < at:
                    kept[one][5:] = self.memory.store(*pair)
            yield self._exchange([whole.to(query.dtype) for whole in (of_query, *pair)], 2)

    def _exchange(self, tensors: Tensors, split: int) -> Arriving:
        """Starts to exchange this rank's tokens of all heads for all tokens of its heads, or back.

        Args:
            tensors: ``[batch, heads, tokens, size]``.
            split: The dimension that is divided among the ranks: 1, or 2 for the way back.

        Returns:
            A function that waits for the exchanged tensors.
        """
        if self.group is None:
            return lambda: tensors
        ranks, joined = self.group.plan.grid.world_size, 3 - split
        parts = [one.unflatten(split, (ranks, -1)).movedim(split, 0) for one in tensors]
        hops, heads = self.group.all_to_all(torch.cat(parts, 2), async_op=True), [part.shape[2] for part in parts]
        return lambda: [one.movedim(0, joined).flatten(joined, joined + 1) for one in hops.wait().split(heads, 2)]


def _attend(of: Tensors, scale: float | None, causal: bool) -> Tensors:
    """Attends with ``of``, which are queries, keys and values. Returns the output and log-sum-exps in float32."""
    if of[0].device.type == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu(*of, 0.0, causal, scale=scale)  # type: ignore[no-any-return]
    return _aten._scaled_dot_product_flash_attention(*of, 0.0, causal, scale=scale)[:2]  # type: ignore[no-any-return]


def _attend_backward(gradient: Tensor, of: Tensors, scale: float | None, causal: bool) -> Tensors:
    """Gradients of queries, keys and values.

    Args:
        gradient: Gradient of the output over all keys.
        of: Queries, keys, values, and the output and log-sum-exps over all keys.
        scale: Factor of the scores.
        causal: Whether queries attend to no later keys.
    """
    query, key, *_ = of
    if query.device.type == "cpu":
        backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(gradient.contiguous(), *of, 0.0, causal, scale=scale)  # type: ignore[no-any-return]
    # The random state of dropout, which is off. CUDA's kernel has two numbers in one tensor.
    shape, dtype = ((), torch.int64) if torch.version.hip else ((2,), torch.uint64)
    seed = torch.zeros(shape, dtype=dtype, device=query.device)
    lengths = None, None, query.shape[2], key.shape[2]
    backward = _aten._scaled_dot_product_flash_attention_backward
    return backward(gradient.contiguous(), *of, *lengths, 0.0, causal, seed, seed, scale=scale)  # type: ignore[no-any-return]


# ---- in a model's graph ---------------------------------------------------------------------------------------------


def in_chunks(
    run: Callable[..., Any], module: Module, states: Tensor, length: int, memory: HostMemory, attention: Any = None
) -> Tensor:
    """Runs a module on one chunk of a rank's tokens after the other, and in backward again.

    Gradients of parameters are summed over the chunks in float32. Each reaches the graph once, as if the module had run on
    all tokens together.

    Args:
        run: Runs the module on tokens ``[batch, tokens, width]``. It also gets their slice of all tokens and, if the module
            attends, their attention output. A module that attends is called without that output first; it then returns
            queries, keys and values.
        module: The module whose parameters get gradients.
        states: ``[batch, tokens, width]`` of all chunks.
        length: Tokens of a chunk on this rank. The last chunk may be shorter.
        memory: Stores the inputs until backward.
        attention: The `Attention` of a module that attends. None: the module mixes no tokens.

    Returns:
        The module's results, ``[batch, tokens, ...]``.
    """
    slices = [slice(start, min(start + length, states.shape[1])) for start in range(0, states.shape[1], length)]
    given, trained = (run, slices, memory, attention), [one for one in module.parameters() if one.requires_grad]
    return _InChunks.apply(given, torch.is_grad_enabled(), states, *trained)  # type: ignore[no-any-return]


class _InChunks(torch.autograd.Function):
    """Stores only the module's input, and attends again in backward. So it is its own activation checkpoint."""

    @staticmethod
    def forward(ctx: Any, given: Any, trains: bool, states: Tensor, *parameters: Tensor) -> Tensor:
        """Runs the chunks."""
        (run, slices, memory, attention), kind = given, states.device.type
        attended: Iterable[Any] = [[]] * len(slices)
        if attention is not None:
            attended = one_ahead(attention.forward(run(states[:, part], part) for part in slices))
        stored, results = list[Tensor](), None
        with closing(memory):
            for part, one in zip(slices, attended):
                result = run(states[:, part], part, *one)
                if results is None:
                    results = result.new_empty(*states.shape[:2], *result.shape[2:])
                results[:, part] = result
                if trains:
                    stored += memory.store(states[:, part])
        ctx.cast = partial(torch.autocast, kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        ctx.given, ctx.parameters, ctx.shape, ctx.dtype = given, parameters, states.shape, states.dtype
        ctx.save_for_backward(*stored)
        return results  # type: ignore[return-value]

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        """Attends again, then processes the chunks in reverse."""
        (run, slices, memory, attention), parameters = ctx.given, ctx.parameters
        inputs, result = [[one] for one in ctx.saved_tensors], gradient.new_empty(ctx.shape, dtype=ctx.dtype)
        sums: list[Tensor | None] = [None] * len(parameters)

        def pull(part: slice, tensors: Tensors, gradients: Any) -> Tensors:
            """Runs a chunk again. Returns the gradients of its inputs, and adds the gradients of parameters to ``sums``."""
            with torch.enable_grad(), ctx.cast():
                leaves = [one.detach().requires_grad_() for one in tensors]
                outputs = run(leaves[0], part, *leaves[1:])
            found = torch.autograd.grad(outputs, [*leaves, *parameters], gradients, allow_unused=True)
            for at, new in enumerate(found[len(leaves) :]):
                if new is not None:
                    old = sums[at]
                    sums[at] = new.to(torch.float32, copy=True) if old is None else old.add_(new)
            return found[: len(leaves)]

        def through_results() -> Iterator[Tensors]:
            """Goes from the results of each chunk, the last first, back to the gradients of its attention output."""
            for part, tensors in zip(reversed(slices), memory.fetch(reversed(inputs))):
                result[:, part], *of_attended = pull(part, tensors, gradient[:, part])
                yield of_attended

        with closing(memory):
            if attention is None:
                list(through_results())
            else:
                states, kept = inputs, list[list[Tensor]]()
                with ctx.cast():
                    projected = (run(one, part) for part, (one,) in zip(slices, memory.fetch(states)))
                    attended = one_ahead(attention.forward(projected, kept))
                    inputs = [[*one, *memory.store(*found)] for one, found in zip(states, attended)]
                again = memory.fetch(reversed(states))
                pulled = one_ahead(attention.backward(kept, through_results()))
                for part, tensors, gradients in zip(reversed(slices), again, pulled):
                    result[:, part] += pull(part, tensors, gradients)[0]
        return None, None, result, *(one if one is None else one.to(like.dtype) for one, like in zip(sums, parameters))
