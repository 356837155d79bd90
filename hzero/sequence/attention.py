"""Causal attention over sequences that are split over ranks, chunk by chunk (FPDT, arXiv 2408.16978).

Rank r of a group holds the r-th part of every chunk of the sequence. Projections, norms and MLPs work on these tokens. For
attention an all-to-all gives each rank all tokens of the chunk, for its share of the heads (Ulysses, arXiv 2309.14509). So
an exchange has the size of a chunk, and the next one is under way while a chunk computes. A chunk of queries meets the chunks
of keys and values before it one after the other; partial results are merged by their log-sum-exps, as in ring attention
(arXiv 2310.01889). Chunks that do not compute lie on the host.

Backward goes through the chunks in reverse. When it reaches a chunk, all later ones have added their parts of the gradients of
its keys and values, so these are complete, and the gradients of the chunk's tokens follow at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from typing import Any, TypeAlias, TypeVar

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from hzero.comm.communicator import Communicator
from hzero.sequence.host import HostMemory

#: Queries, keys and values, ``[batch, heads, tokens, size]``.
Projected: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
#: Waits for what is under way, and returns it.
_Exchange: TypeAlias = Callable[[], Sequence[torch.Tensor]]
T = TypeVar("T")
_aten = torch.ops.aten


class Documents:
    """Which tokens belong together: a token sees those of its own document only.

    Args:
        numbers: The document of each token of the whole sequence, ``[batch, tokens]``, ascending.
        length: Tokens of a chunk, of all ranks.
    """

    def __init__(self, numbers: torch.Tensor, length: int) -> None:
        self._chunks = numbers.split(length, 1)
        self._first = [chunk[:, 0].tolist() for chunk in self._chunks]
        self._last = [chunk[:, -1].tolist() for chunk in self._chunks]

    def seen(self, of: int) -> list[int]:
        """The chunks that hold something for the queries of a chunk; it is the last of them."""
        begins = self._first[of]
        return [one for one in range(of + 1) if any(end >= begin for end, begin in zip(self._last[one], begins))]

    def mask(self, of: int, keys: int, dtype: torch.dtype) -> torch.Tensor | None:
        """What is added to the scores of a chunk of queries and one of keys; None if all of them are of one document."""
        if self._first[keys] == self._last[of]:
            return None
        rows, columns = self._chunks[of][:, :, None], self._chunks[keys][:, None, :]
        visible = rows == columns
        if of == keys:
            visible = visible.tril()
        mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)
        # The device's kernel reads rows that start at multiples of 16 bytes.
        return pad(mask, (0, -mask.shape[-1] % 16))[..., : mask.shape[-1]].unsqueeze(1)


@dataclass(frozen=True)
class Attention:
    """Attention of one rank's tokens, chunk by chunk.

    Attributes:
        group: Ranks that share the sequence; None: this rank has all of it.
        memory: Where chunks lie that do not compute.
        chunk: Tokens of a chunk on this rank; the last one may be shorter.
        documents: None if all tokens of a sequence are of one document.
        scale: Of the scores; None: one over the root of a head's size.
    """

    group: Communicator | None
    memory: HostMemory
    chunk: int
    documents: Documents | None = None
    scale: float | None = None

    def slices(self, tokens: int) -> list[slice]:
        """The chunks of this rank's tokens."""
        return [slice(start, min(start + self.chunk, tokens)) for start in range(0, tokens, self.chunk)]

    def forward(
        self, projected: Iterable[Projected], finish: Callable[[int, torch.Tensor], Any], keep: bool
    ) -> list[torch.Tensor]:
        """Attends from the first chunk to the last.

        Args:
            projected: Queries, keys and values of all heads, for this rank's tokens of one chunk after the other. Read one
                ahead of the chunk that computes. Heads are a multiple of the ranks (`for_ranks`).
            finish: Is called with a chunk and what its tokens of this rank have attended to, ``[batch, heads, tokens, size]``.
            keep: Whether backward follows.

        Returns:
            For `backward`, five tensors of every chunk, as `HostMemory` keeps them; without ``keep`` nothing.
        """
        kept: list[torch.Tensor] = []
        # While a chunk computes, the exchanges of the next chunk's queries and of the last one's results are under way.
        for at, arrived in _one_ahead(self._attended(projected, kept if keep else None)):
            finish(at, *arrived())
        self.memory.settle()
        return kept

    def _attended(
        self, projected: Iterable[Projected], kept: list[torch.Tensor] | None
    ) -> Iterator[tuple[int, _Exchange]]:
        stored: list[list[torch.Tensor]] = []
        for at, heads in enumerate(_one_ahead(map(self._to_heads, projected))):
            (query, key, value), (*before, _) = heads(), self._seen(at)
            fetched = self.memory.fetch([stored[one] for one in before])
            stored.append(self.memory.store(key, value))
            mask = self._mask(at, at, query.dtype)
            out, weight = _attend((query, key, value), self.scale, mask, mask is None)
            out = out.float()
            del key, value
            for one, (key, value) in zip(before, fetched):
                mask = self._mask(at, one, query.dtype)
                more, its_weight = _attend((query, key, value), self.scale, mask, False)
                both = torch.logaddexp(weight, its_weight)
                out.mul_((weight - both).exp_().unsqueeze(-1))
                out.add_(more * (its_weight - both).exp_().unsqueeze(-1))
                weight = both
                del key, value, more, its_weight
            out = out.to(query.dtype)
            if kept is not None:
                kept += [*self.memory.store(query, out, weight), *stored[at]]
            yield at, self._to_tokens([out])

    def backward(
        self, kept: Sequence[torch.Tensor], gradients: Iterable[torch.Tensor], finish: Callable[..., Any]
    ) -> None:
        """Makes gradients from the last chunk to the first.

        Args:
            kept: From `forward`.
            gradients: Of what ``finish`` got there, in the same shapes, from the last chunk to the first. Read one ahead.
            finish: Is called with a chunk, and the gradients of its queries, keys and values, in the shapes that they had in
                ``projected``.
        """
        rows = [kept[first : first + 5] for first in range(0, len(kept), 5)]
        for at, arrived in _one_ahead(self._pulled(rows, gradients)):
            finish(at, *arrived())
        self.memory.settle()

    def _pulled(
        self, rows: Sequence[Sequence[torch.Tensor]], gradients: Iterable[torch.Tensor]
    ) -> Iterator[tuple[int, _Exchange]]:
        sums: dict[int, list[torch.Tensor]] = {}
        order = list(reversed(range(len(rows))))
        queries = self.memory.fetch(rows[at][:3] for at in order)
        # Sums are looked up one block ahead, when the chunk of queries before has changed them.
        blocks = self.memory.fetch([*rows[one][3:], *sums.get(one, ())] for at in order for one in self._seen(at))
        incoming = _one_ahead(self._to_heads([one]) for one in gradients)
        for at, (query, out, weight), heads in zip(order, queries, incoming):
            (gradient,), of_query = heads(), torch.zeros(query.shape, dtype=torch.float32, device=query.device)
            for one in self._seen(at):
                key, value, *summed = next(blocks)
                mask = self._mask(at, one, query.dtype)
                tensors = query, key, value, out, weight
                part, *parts = _attend_backward(gradient, tensors, self.scale, mask, at == one and mask is None)
                of_query += part
                pair = [new.float() for new in parts]
                for new, old in zip(pair, summed):
                    new += old
                del key, value, tensors, part, parts, summed
                if one < at:
                    sums[one] = self.memory.store(*pair, into=sums.get(one))
            yield at, self._to_tokens([whole.to(query.dtype) for whole in (of_query, *pair)])

    def for_ranks(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Projected:
        """Of one type, which a rotary embedding may have changed; heads of keys and values are repeated to the ranks."""
        times = (1 if self.group is None else self.group.plan.grid.world_size) // key.shape[1]
        if times > 1:
            key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
        return query.to(value.dtype), key.to(value.dtype), value

    def _seen(self, at: int) -> list[int]:
        return list(range(at + 1)) if self.documents is None else self.documents.seen(at)

    def _mask(self, at: int, keys: int, dtype: torch.dtype) -> torch.Tensor | None:
        return None if self.documents is None else self.documents.mask(at, keys, dtype)

    def _to_heads(self, tensors: Sequence[torch.Tensor]) -> _Exchange:
        """From some tokens of all heads to all tokens of some heads. Under way until the result is called."""
        if self.group is None:
            return lambda: tensors
        ranks = self.group.plan.grid.world_size
        parts = torch.cat([one.unflatten(1, (ranks, -1)) for one in tensors], 2).movedim(1, 0)
        hops, sizes = self.group.all_to_all(parts, async_op=True), [one.shape[1] // ranks for one in tensors]
        return lambda: hops.wait().movedim(0, 2).flatten(2, 3).split(sizes, 1)

    def _to_tokens(self, tensors: Sequence[torch.Tensor]) -> _Exchange:
        """The way back of `_to_heads`."""
        if self.group is None:
            return lambda: tensors
        ranks = self.group.plan.grid.world_size
        parts = torch.cat([one.unflatten(2, (ranks, -1)) for one in tensors], 1).movedim(2, 0)
        hops, sizes = self.group.all_to_all(parts, async_op=True), [one.shape[1] for one in tensors]
        return lambda: [one.flatten(1, 2) for one in hops.wait().movedim(0, 1).split(sizes, 2)]


def _one_ahead(items: Iterable[T]) -> Iterator[T]:
    """Each item when the next one is there, too."""
    for before, _ in pairwise(chain(items, [None])):
        yield before  # type: ignore[misc]


def _once(gradient: torch.Tensor, heads: int) -> torch.Tensor:
    """The gradient of heads that `_widened` has repeated."""
    return gradient.unflatten(1, (heads, -1)).sum(2, dtype=torch.float32).to(gradient.dtype)


# ---- a chunk of queries and one of keys -----------------------------------------------------------------------------


def _flash(query: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether a device's flash kernel takes it, or the memory-efficient one, which needs as many keys' heads as queries'."""
    return mask is None and query.dtype in (torch.bfloat16, torch.float16)


def _attend(
    of: Sequence[torch.Tensor], scale: float | None, mask: torch.Tensor | None, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """What queries attend to, and the log-sum-exps of their scores, float32; ``of`` are queries, keys and values."""
    query, key, value = of
    if query.device.type == "cpu":
        attend_to = _aten._scaled_dot_product_flash_attention_for_cpu
        out, weight = attend_to(*of, 0.0, causal, attn_mask=mask, scale=scale)
    elif _flash(query, mask):
        out, weight, *_ = _aten._scaled_dot_product_flash_attention(*of, 0.0, causal, scale=scale)
    else:
        attend_to = _aten._scaled_dot_product_efficient_attention
        out, weight, *_ = attend_to(query, *_widened(query, key, value, mask), True, 0.0, causal, scale=scale)
        weight = weight[..., : query.shape[2]]  # it has rows up to a multiple of 32
    if mask is not None:  # kernels differ in what they leave for a query that sees none of these keys
        sees = (mask > -torch.inf).any(-1)
        weight, out = weight.where(sees, -torch.inf), out.where(sees.unsqueeze(-1), 0)
    return out, weight


def _attend_backward(
    gradient: torch.Tensor, of: Sequence[torch.Tensor], scale: float | None, mask: torch.Tensor | None, causal: bool
) -> Sequence[torch.Tensor]:
    """Gradients of queries, keys and values.

    Args:
        gradient: Of the results over all keys.
        of: Queries, keys, values, and the results and log-sum-exps over all keys.
        scale: Of the scores.
        mask: Is added to the scores.
        causal: Whether queries see no later keys.
    """
    (query, key, value, out, weight), gradient = of, gradient.contiguous()
    how: dict[str, Any] = {"scale": scale}
    if query.device.type == "cpu":
        backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(gradient, *of, 0.0, causal, attn_mask=mask, **how)  # type: ignore[no-any-return]
    # Numbers of dropout, which there is none of. CUDA's flash kernel has two in one tensor.
    flash, hip = _flash(query, mask), torch.version.hip is not None
    shape, dtype = ((2,), torch.uint64) if flash and not hip else ((), torch.int64)
    seed = torch.zeros(shape, dtype=dtype, device=query.device)
    if flash:
        backward, lengths = _aten._scaled_dot_product_flash_attention_backward, (query.shape[2], key.shape[2])
        return backward(gradient, *of, None, None, *lengths, 0.0, causal, seed, seed, **how)  # type: ignore[no-any-return]
    heads = key.shape[1]
    key, value, bias = _widened(query, key, value, mask)
    if not hip:  # CUDA's kernel reads log-sum-exps in groups of 32
        weight = pad(weight, (0, -weight.shape[-1] % 32), value=torch.inf)
    backward, wanted = _aten._scaled_dot_product_efficient_attention_backward, [True, True, True, False]
    of_query, of_key, of_value, _ = backward(
        gradient, query, key, value, bias, out, weight, seed, seed, 0.0, wanted, causal, **how
    )
    return of_query, _once(of_key, heads), _once(of_value, heads)


def _widened(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Keys, values and mask for all heads of the queries."""
    times = query.shape[1] // key.shape[1]
    bias = None if mask is None else mask.expand(-1, query.shape[1], -1, -1)
    return key.repeat_interleave(times, 1), value.repeat_interleave(times, 1), bias


# ---- in a model's graph ---------------------------------------------------------------------------------------------


class Pieces:
    """Runs a module in pieces, and in backward again, and adds up the gradients of its parameters.

    So each parameter's gradient reaches the graph once, as if the module had run in one piece. Gradients of a narrow type
    are summed in float32. Make it in forward: backward has the same autocast.

    Args:
        parameters: Those that need a gradient.
        of: A tensor of the device.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], of: torch.Tensor) -> None:
        kind = of.device.type
        self.cast = partial(torch.autocast, kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        self._parameters = parameters
        self._sums: list[torch.Tensor | None] = [None] * len(parameters)

    def pull(self, piece: Callable[..., Any], inputs: Sequence[Any], needed: int, gradients: Any) -> list[torch.Tensor]:
        """Runs a piece again, and returns the gradients of its first ``needed`` inputs."""
        with torch.enable_grad(), self.cast():
            leaves = [one.detach().requires_grad_() for one in inputs[:needed]]
            outputs = piece(*leaves, *inputs[needed:])
        found = torch.autograd.grad(outputs, [*leaves, *self._parameters], gradients, allow_unused=True)
        for at, new in enumerate(found[needed:]):
            if new is not None:
                old = self._sums[at]
                self._sums[at] = new.to(torch.float32, copy=True) if old is None else old.add_(new)
        return list(found[:needed])

    def sums(self) -> list[torch.Tensor | None]:
        """Gradients of the parameters, None for one that no piece has used; the next ones begin at none."""
        sums, self._sums = self._sums, [None] * len(self._sums)
        return [one if one is None else one.to(like.dtype) for one, like in zip(sums, self._parameters)]


class Layer(torch.autograd.Function):
    """A decoder layer, which keeps nothing but its input and attends again in backward: its own activation checkpoint.

    Call ``apply`` with an `Attention`; a function from tokens, and cosines and sines of their positions, to queries, keys and
    values; one from tokens and what they have attended to, ``[batch, heads, tokens, size]``, to the layer's result; whether
    gradients are needed; and tokens ``[batch, tokens, width]``, their cosines and sines, and the parameters that need a
    gradient. Neither function needs other tokens.
    """

    @staticmethod
    def forward(
        ctx: Any, attention: Attention, before: Any, after: Any, training: bool, *tensors: torch.Tensor
    ) -> torch.Tensor:
        """Runs the chunks."""
        states, cos, sin, *parameters = tensors
        slices, stored, out = attention.slices(states.shape[1]), list[torch.Tensor](), torch.empty_like(states)

        def finish(at: int, attended: torch.Tensor) -> None:
            part = states[:, slices[at]]
            out[:, slices[at]] = after(part, attended)
            if training:
                stored.extend(attention.memory.store(part))

        def begin(*inputs: torch.Tensor) -> Projected:
            return attention.for_ranks(*before(*inputs))

        attention.forward((begin(states[:, part], cos[:, part], sin[:, part]) for part in slices), finish, keep=False)
        ctx.attention, ctx.begin, ctx.after, ctx.pieces = attention, begin, after, Pieces(parameters, states)
        ctx.save_for_backward(cos, sin, *stored)
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        """Attends again, and goes back through the chunks."""
        attention, pieces, memory, (cos, sin, *stored) = (
            ctx.attention,
            ctx.pieces,
            ctx.attention.memory,
            ctx.saved_tensors,
        )
        slices = attention.slices(gradient.shape[1])
        places = [(cos[:, part], sin[:, part]) for part in slices]
        attended: list[torch.Tensor] = []
        with pieces.cast():
            states = memory.fetch([one] for one in stored)
            projected = (ctx.begin(one, *place) for (one,), place in zip(states, places))
            kept = attention.forward(projected, lambda _, one: attended.extend(memory.store(one)), keep=True)
        result, in_use = torch.empty_like(gradient), dict[int, torch.Tensor]()

        def incoming() -> Iterator[torch.Tensor]:
            pairs = memory.fetch(reversed(list(zip(stored, attended))))
            for at, pair in zip(reversed(range(len(slices))), pairs):
                in_use[at] = pair[0]
                result[:, slices[at]], of_attended = pieces.pull(ctx.after, pair, 2, gradient[:, slices[at]])
                yield of_attended

        def finish(at: int, *gradients: torch.Tensor) -> None:
            inputs = in_use.pop(at), *places[at]
            result[:, slices[at]] += pieces.pull(ctx.begin, inputs, 1, gradients)[0]

        attention.backward(kept, incoming(), finish)
        return None, None, None, None, result, None, None, *pieces.sums()


class Attended(torch.autograd.Function):
    """Attention alone.

    Call ``apply`` with an `Attention`; whether gradients are needed; and queries, keys and values
    ``[batch, heads, tokens, size]`` as `Attention.for_ranks` returns them. The result is ``[batch, tokens, heads, size]``.
    """

    @staticmethod
    def forward(ctx: Any, attention: Attention, training: bool, *whole: torch.Tensor) -> torch.Tensor:
        """Runs the chunks."""
        query, key, value = whole
        slices = attention.slices(query.shape[2])
        out = query.new_empty(query.shape[0], query.shape[2], query.shape[1], query.shape[3])

        def finish(at: int, attended: torch.Tensor) -> None:
            out[:, slices[at]] = attended.transpose(1, 2)

        projected = ((query[:, :, part], key[:, :, part], value[:, :, part]) for part in slices)
        kept = attention.forward(projected, finish, keep=training)
        ctx.attention, ctx.shapes = attention, [one.shape for one in whole]
        ctx.save_for_backward(*kept)
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        """Goes back through the chunks."""
        slices = ctx.attention.slices(gradient.shape[1])
        results = [gradient.new_empty(shape) for shape in ctx.shapes]

        def finish(at: int, *parts: torch.Tensor) -> None:
            for result, part in zip(results, parts):
                result[:, :, slices[at]] = part

        incoming = (gradient[:, part].transpose(1, 2) for part in reversed(slices))
        ctx.attention.backward(ctx.saved_tensors, incoming, finish)
        return None, None, *results


class Tiled(torch.autograd.Function):
    """A module that needs no other tokens, chunk by chunk, and again in backward.

    DeepSpeed's `TiledMLP` and `TiledFusedLogitsLoss` do the same for ZeRO, but write gradients into parameters past the
    graph, which FSDP2 does not see.

    Call ``apply`` with an `Attention`, which gives the chunks and where they lie until backward; with a function from tokens
    and their labels to a result for each; with whether gradients are needed; and with tokens ``[batch, tokens, width]``,
    labels ``[batch, tokens]`` or None, and the module's parameters that need a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, attention: Attention, piece: Any, training: bool, states: torch.Tensor, labels: Any, *parameters: Any
    ) -> torch.Tensor:
        """Runs the chunks."""
        slices, stored, results = attention.slices(states.shape[1]), list[torch.Tensor](), None
        for part in slices:
            one = piece(states[:, part], None if labels is None else labels[:, part])
            if results is None:
                results = one.new_empty(*states.shape[:2], *one.shape[2:])
            results[:, part] = one
            if training:
                stored += attention.memory.store(states[:, part])
        attention.memory.settle()
        ctx.attention, ctx.piece, ctx.pieces = attention, piece, Pieces(parameters, states)
        ctx.save_for_backward(labels, *stored)
        return results  # type: ignore[return-value]

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        """Goes back through the chunks."""
        labels, *stored = ctx.saved_tensors
        results = None
        for part, (states,) in zip(ctx.attention.slices(gradient.shape[1]), ctx.attention.memory.fetch(zip(stored))):
            inputs = states, None if labels is None else labels[:, part]
            (one,) = ctx.pieces.pull(ctx.piece, inputs, 1, gradient[:, part])
            if results is None:
                results = one.new_empty(*gradient.shape[:2], *one.shape[2:])
            results[:, part] = one
        return None, None, None, results, None, *ctx.pieces.sums()
