"""Buckets of parameters. No process group."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hzero.comm import in_buckets


@given(st.lists(st.integers(0, 20)), st.integers(1, 40))
def test_buckets_are_as_full_as_the_limit_allows(sizes: list[int], limit: int) -> None:
    items = list(enumerate(sizes))
    buckets = list(in_buckets(((item, item[1]) for item in items), limit))
    assert [item for bucket in buckets for item in bucket] == items
    filled = [sum(size for _, size in bucket) for bucket in buckets]
    assert all(total <= limit or len(bucket) == 1 for total, bucket in zip(filled, buckets))
    assert all(total + following[0][1] > limit for total, following in zip(filled, buckets[1:]))
