"""All-gathers by rounds, on simulated ranks: coordinate order for any number of ranks and bytes, in as few rounds as promised."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.comm.simulated import Wires, boxes, on_all, transport

LANE: Any = ("stage", "node")


@settings(max_examples=40)
@given(st.integers(2, 20), st.integers(0, 3), st.randoms(use_true_random=False))
def test_doubling_gives_coordinate_order_in_the_fewest_rounds(size: int, count: int, random: Any) -> None:
    ranks = random.sample(range(1000), size)  # a tier group in no order
    messages = [torch.tensor([random.randrange(256) for _ in range(count)], dtype=torch.uint8) for _ in ranks]
    shared = boxes(size)
    wires = [Wires(own, size, shared) for own in range(size)]

    def gather(own: int) -> torch.Tensor:
        made = transport(ranks[own], {LANE: (wires[own], ranks)})
        return made.start(LANE, "all_gather", messages[own], "a message", algorithm="doubling").wait()

    results = on_all(range(size), gather)
    assert all(torch.equal(result, torch.cat(messages)) for result in results)
    for own in wires:  # one peer a round
        assert own.calls == math.ceil(math.log2(size)) and own.received == (size - 1) * count
