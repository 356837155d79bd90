"""The thread that writes what a rank saves, without ranks."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

from hzero.train.writer import HostCopy, Writer


def test_a_copy_of_states_is_apart_from_them() -> None:
    """A view of a large tensor takes no more than itself, and containers keep their kind."""
    large = torch.arange(1000.0)
    state: dict[str, Any] = OrderedDict(
        view=large[10:20], group=[{"lr": 1.0, "at": (torch.ones(2), 3)}], size=torch.Size([2])
    )
    state._metadata = {"version": 1}  # type: ignore[attr-defined]
    copies = HostCopy()
    made = copies.of(state)
    large.zero_()
    state["group"][0]["lr"] = 2.0
    state["group"][0]["at"][0].zero_()
    assert torch.equal(made["view"], torch.arange(10.0, 20.0)) and made["view"].untyped_storage().nbytes() == 40
    assert made["group"][0]["lr"] == 1.0 and made["group"][0]["at"][0].sum() == 2 and copies.bytes == 48
    assert type(made) is OrderedDict and made._metadata == {"version": 1} and type(made["size"]) is torch.Size


def test_a_task_that_fails_ends_no_writer() -> None:
    writer, order = Writer(), list[int]()
    tasks = [writer.submit(lambda number=number: order.append(1 // number)) for number in (1, 0, 1)]  # type: ignore[misc]
    assert tasks[-1].result(60) is None and order == [1, 1]
    assert isinstance(tasks[1].exception(60), ZeroDivisionError)
