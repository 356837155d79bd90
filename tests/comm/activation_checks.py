"""Collectives inside a model against torch.distributed's, forward and backward. Run by test_tiered.py on several ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch._dynamo  # before the ranks are forked, or each imports the compiler
import torch.distributed as dist

from hzero.codecs.codec import Codec
from hzero.comm import Communicator, activations
from tests.comm.communicator_checks import SOME, _bits_equal, _communicator, _everyones
from tests.comm.tiered_checks import WORLD
from tests.rank_main import same_on_all_ranks

DTYPES = (torch.float32, torch.bfloat16)
#: No sizes that blocks or ranks divide, but for the dimensions that are split.
SHAPE = (3, WORLD * 2, WORLD, 5)


def _sum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """By torch.distributed, from this rank's tensor."""
    total = tensors[dist.get_rank()].contiguous().float()
    dist.all_reduce(total)
    return total


def _part(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    return tensor.chunk(WORLD, dim)[dist.get_rank()]


def _exchanged(tensors: Sequence[torch.Tensor], split: int, gather: int) -> torch.Tensor:
    """By torch.distributed's all-to-all."""
    sent = [part.contiguous() for part in tensors[dist.get_rank()].chunk(WORLD, split)]
    whole = torch.stack(sent)
    arrived = torch.empty_like(whole)
    dist.all_to_all_single(arrived, whole)
    return torch.cat(list(arrived), gather)


#: Function, what forward gives of all ranks' tensors, what backward gives of all ranks' gradients, and whether each of these
#: is a sum, a copy or neither.
Case = tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor], Callable[..., torch.Tensor], str]
CASES: dict[str, Case] = {
    "copy_to": (activations.copy_to, lambda all_: all_[dist.get_rank()], _sum, " sum"),
    "reduce_from": (activations.reduce_from, _sum, lambda all_: all_[dist.get_rank()], "sum "),
    "gather_from": (lambda x, group: activations.gather_from(x, group, 1), lambda all_: torch.cat(all_, 1),
     lambda all_: _part(_sum(all_), 1), "copy part"),
    "reduce_scatter_to": (lambda x, group: activations.reduce_scatter_to(x, group, -3), lambda all_: _part(_sum(all_), 1),
     lambda all_: torch.cat(all_, 1), "part copy"),
    "exchange to heads": (lambda x, group: activations.exchange(x, group, -2, 1), lambda all_: _exchanged(all_, 2, 1),
     lambda all_: _exchanged(all_, 1, 2), "copy copy"),
    "exchange of experts": (lambda x, group: activations.exchange(x, group, 1, 1), lambda all_: _exchanged(all_, 1, 1),
     lambda all_: _exchanged(all_, 1, 1), "copy copy"),
}  # fmt: skip


def _run(
    case: Case, group: Communicator, dtype: torch.dtype
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor], tuple[float, float]]:
    """Result and gradient, those wanted, and the largest sums of magnitudes that enter them."""
    rank, everyone = dist.get_rank(), _everyones(SHAPE, dtype)
    mine = everyone[rank].clone().requires_grad_()
    got = case[0](mine, group)
    gradients = [g.contiguous() for g in _everyones(tuple(got.shape), dtype, seed=1)]
    got.backward(gradients[rank])
    assert mine.grad is not None
    largest = (
        max(float(t.float().abs().max()) for t in everyone) * WORLD,
        max(float(t.float().abs().max()) for t in gradients) * WORLD,
    )
    return (got.detach(), mine.grad), (case[1](everyone), case[2](gradients)), largest


#: Grids, dtypes and codecs.
SETTINGS: list[tuple[Any, torch.dtype, Any]] = [
    *((grid, dtype, "none") for grid, dtype in itertools.product(SOME, DTYPES)),
    (SOME[0], torch.float32, "int8"),
    (SOME[0], torch.float32, {"intra_package": "int8", "intra_node": "int4"}),
    (SOME[0], torch.float32, {"inter_node": {"codec": "int8", "rotation": 64}, "intra_package": "bf16"}),
]


def check_activations_are_those_of_torch_within_the_bounds_of_codecs_both_ways() -> None:
    for (grid, dtype, codecs), (name, case) in itertools.product(SETTINGS, CASES.items()):
        group, exact = _communicator(grid, codecs=codecs), codecs == "none"
        bounds = [Codec.from_config(hop.codec) for hop in group.plan.gather_hops()]
        got, want, largest = _run(case, group, dtype)
        for one, other, most, kind in zip(got, want, largest, case[3].split(" ")):
            what = (name, codecs, kind)
            assert one.dtype == dtype and one.shape == other.shape, what
            assert not exact or kind not in ("", "copy") or _bits_equal(one.contiguous(), other), what
            # Another order of additions, and bfloat16 is rounded once per tier.
            once = 1.2 * sum(codec.error_bound(most) for codec in bounds) + 4 * torch.finfo(dtype).eps * most
            bound = {"": 0.0, "sum": 2 * once, "part": once, "copy": once}[kind]
            error = float((one.float() - other.float()).abs().max())
            assert error <= bound and (error > 0 or exact or not kind), (*what, error, bound)
            assert kind != "sum" or same_on_all_ranks([one]), what


#: Row counts from rank to rank: zeros, all to one rank, nothing at all, and by chance.
COUNTS: dict[str, Callable[[], torch.Tensor]] = {
    "by chance": lambda: torch.randint(0, 5, (WORLD, WORLD), generator=torch.Generator().manual_seed(3)),
    "all to rank 1": lambda: torch.zeros(WORLD, WORLD, dtype=torch.int64).index_fill_(1, torch.tensor([1]), 7),
    "neighbours": lambda: torch.eye(WORLD, dtype=torch.int64).roll(1, 1) * torch.arange(WORLD),
    "nothing": lambda: torch.zeros(WORLD, WORLD, dtype=torch.int64),
}


def _rows(counts: torch.Tensor, group: Communicator, dtype: torch.dtype, row: tuple[int, ...]) -> list[torch.Tensor]:
    """Rows from all ranks and gradients of the rows that were sent, each before what torch.distributed brings."""
    rank, brought = dist.get_rank(), []
    sent, received = counts[rank].tolist(), counts[:, rank].tolist()
    assert group.exchange_counts(counts[rank]).tolist() == received
    torch.manual_seed(rank)
    mine = torch.randn(sum(sent), *row).to(dtype).requires_grad_()
    got = activations.exchange_rows(mine, group, sent, received)
    gradient = torch.randn(sum(received), *row).to(dtype)
    got.backward(gradient)
    for made, given, (to, of) in ((got, mine, (sent, received)), (mine.grad, gradient, (received, sent))):
        want = torch.empty(sum(of), *row, dtype=dtype)
        dist.all_to_all_single(want, given.detach(), of, to)
        brought += [made.detach(), want]
    return brought


def check_uneven_rows_keep_bounds_of_codecs_and_bytes_of_the_plan() -> None:
    """With codec none those of torch.distributed."""
    rank, lossy = dist.get_rank(), {"intra_package": "int8", "intra_node": "int4"}
    settings = [*itertools.product(["none"], DTYPES, ((7,), (3, 5), ())), (lossy, torch.float32, (37,))]
    for grid, (name, counts), (codecs, dtype, row) in itertools.product(SOME, COUNTS.items(), settings):
        group, matrix = _communicator(grid, codecs=codecs), counts()
        got, want, gradient, wanted = _rows(matrix, group, dtype, row)
        changed = coded = 0
        received, sent = matrix[:, rank].tolist(), matrix[rank].tolist()
        expected: dict[str, int] = {}
        for one, other, rows in ((got, want, received), (gradient, wanted, sent)):
            of = torch.tensor([peer for peer, count in enumerate(rows) for _ in range(count)])
            for peer, count in enumerate(rows):
                if peer == rank or codecs == "none":
                    assert _bits_equal(one[of == peer], other[of == peer]), (grid, name, dtype, row)
                if peer == rank:
                    continue
                tier = grid.tier_between(rank, peer)
                codec = Codec.from_config(group.plan.codecs.weights[tier])
                size = codec.format.message_bytes((math.prod(row),), count, dtype.itemsize)
                expected[tier] = expected.get(tier, 0) + size
                for part, whole in zip(one[of == peer], other[of == peer]):
                    error = float((part - whole).abs().max())
                    assert error <= codec.error_bound(float(whole.abs().max())) * 1.001, (name, tier, error)
                    changed, coded = changed + (error > 0), coded + (not codec.format.traits.exact)
        assert changed == coded, (grid, name)
        logged = {entry.tier: entry.wire_bytes for entry in group.wire_log.entries()}
        assert logged == expected, (grid, name, logged, expected)


def check_uneven_rows_refuse_counts_that_do_not_fit() -> None:
    group, ones = _communicator(SOME[0]), [1] * WORLD
    rank, rows = dist.get_rank(), torch.zeros(WORLD, 3)
    wrong = [one + (peer == rank) for peer, one in enumerate(ones)]
    for sent, received in (
        (ones[1:], ones),
        (ones, ones[1:]),
        ([2, *ones[1:]], ones),
        (ones, wrong),
        (ones, [-1, *ones[1:]]),
    ):
        with pytest.raises(
            ValueError, match=f"exchange_rows: found sent .* expected {WORLD} counts each, {WORLD} rows sent"
        ):
            group.exchange_rows(rows, sent, received)
    refused: dict[str, dict[str, Any]] = {"codec 'mpc'": {"codecs": "mpc"}, "checksum True": {"checksum": True}}
    for message, settings in refused.items():
        with pytest.raises(ValueError, match=f"exchange_rows: found {message}"):
            _communicator(SOME[0], **settings).exchange_rows(rows, ones, ones)
    with pytest.raises(ValueError, match="exchange_counts: tensor: found shape"):
        group.exchange_counts(torch.ones(WORLD + 1, dtype=torch.int64))


def check_a_compiled_model_has_the_bits_of_an_eager_one() -> None:
    """The graph breaks at the collectives of activations, and at a communicator's own."""
    group = _communicator(SOME[0])

    def model(tokens: torch.Tensor) -> torch.Tensor:
        inner = activations.reduce_from((activations.copy_to(tokens, group) * 3).relu(), group) / 7
        return inner.sin() + group.all_reduce(tokens.detach() * 2) + group.all_gather(tokens, async_op=True).wait()[:5]

    found = []
    for run in (model, torch.compile(model, backend="eager")):
        tokens = torch.randn(5, 9, generator=torch.Generator().manual_seed(dist.get_rank())).requires_grad_()
        result = run(tokens)
        result.square().sum().backward()
        found.append((result.detach(), tokens.grad))
    for one, other in zip(*found):
        assert _bits_equal(one, other)
