"""Buckets of parameters, and the canary's patterns. No process group."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hzero.collectives import Canary, HopError, in_buckets


@given(st.lists(st.integers(0, 20)), st.integers(1, 40))
def test_buckets_are_as_full_as_the_limit_allows(sizes: list[int], limit: int) -> None:
    items = list(enumerate(sizes))
    buckets = list(in_buckets(((item, item[1]) for item in items), limit))
    assert [item for bucket in buckets for item in bucket] == items
    filled = [sum(size for _, size in bucket) for bucket in buckets]
    assert all(total <= limit or len(bucket) == 1 for total, bucket in zip(filled, buckets))
    assert all(total + following[0][1] > limit for total, following in zip(filled, buckets[1:]))


def test_patterns_differ_by_sender_receiver_and_turn() -> None:
    ranks = np.arange(4)
    one = np.arange(1)
    patterns = [
        row.tobytes()
        for sent in (1, 2)
        for receiver in ranks
        for row in Canary._pattern(SimpleNamespace(_sent=sent), ranks, one + receiver, 2)  # type: ignore[arg-type]
    ]
    assert len(set(patterns)) == len(patterns) == 32 and {len(pattern) for pattern in patterns} == {16}


@pytest.mark.parametrize(("size", "words"), [(1, 2), (64, 2), (4096, 128)])
def test_a_canary_sends_what_its_size_leaves_each_peer(size: int, words: int) -> None:
    grid = mock.Mock(size=lambda tier: 4 if tier == "node" else 1)
    plan = mock.Mock(grid=grid, rank=2, tier_group=lambda tier: range(4), **{"node_all_gather.algorithm": "library"})
    collectives = mock.Mock(plan=plan)
    canary = Canary(collectives, size, torch.device("cpu"))

    def echo(lane: tuple[str, str], message: torch.Tensor, name: str, algorithm: str) -> mock.Mock:
        """What all four ranks have sent arrives, as from wires that work."""
        everyone, own = np.arange(4), np.array([2])
        to_all = lane[0] == "weights"
        arrived = canary._pattern(everyone, np.zeros(1) if to_all else own, words)
        return mock.Mock(wait=lambda: torch.from_numpy(arrived.reshape(-1)))

    collectives.send.side_effect = echo
    canary.send()
    lengths = {call.args[0][0]: call.args[1].numel() for call in collectives.send.call_args_list}
    assert lengths == {"weights": 8 * words, "gradients": 4 * 8 * words}


def test_a_canary_tries_every_algorithm_of_a_lane() -> None:
    plan = mock.Mock(rank=0, tier_group=lambda tier: range(2), **{"node_all_gather.algorithm": "doubling"})
    plan.grid = mock.Mock(size=lambda tier: 2 if tier in ("node", "gcd") else 1)
    collectives = mock.Mock(plan=plan)
    tried = []

    def send(lane: tuple[str, str], message: torch.Tensor, name: str, algorithm: str) -> mock.Mock:
        tried.append((*lane, algorithm))
        return mock.Mock(**{"wait.side_effect": HopError})

    collectives.send.side_effect = send
    with pytest.raises(HopError):
        Canary(collectives, 64, torch.device("cpu")).send()
    assert sorted(tried) == [
        ("gradients", "gcd", "library"),
        ("gradients", "node", "library"),
        ("weights", "gcd", "library"),
        ("weights", "node", "doubling"),
        ("weights", "node", "library"),
    ]
