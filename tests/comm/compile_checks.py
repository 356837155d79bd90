"""Collectives inside a compiled model. Run by test_tiered.py on several ranks."""

from __future__ import annotations

import torch
import torch._dynamo  # before the ranks are forked, or each imports the compiler
import torch.distributed as dist

from hzero.comm import activations
from tests.comm.communicator_checks import SOME, _bits_equal, _communicator


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
