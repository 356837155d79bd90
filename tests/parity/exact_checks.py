"""Codec exact trains as codec none, to the last bit, under both front ends. Run by test_parity.py on 8 ranks."""

from __future__ import annotations

import contextlib
import functools
import io
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.deepspeed.training import shared_folder
from tests.parity import deepspeed, fsdp, zoo
from tests.parity.compare import Row
from tests.rank_main import DEVICE, same_on_all_ranks

NONE, EXACT = {"codecs": {"weights": "none"}}, {"codecs": {"weights": "exact"}}
#: Steps between a save and its load. Weights are written after as many more.
APART = 4
#: Of which 20 have warm-up, and are told of.
STEPS = 21


def _save(session: Any, folder: str) -> Callable[[], Any]:
    """Saves a checkpoint, and returns what loads it."""
    if isinstance(session, deepspeed.Session):
        session.engine.save_checkpoint(folder)
        return lambda: session.engine.load_checkpoint(folder)
    saved = {name: value.clone() for name, value in session.model.state_dict().items()}
    return lambda: session.model.load_state_dict(saved)


def _write(session: Any) -> None:
    """Writes in place into the shards of one rank."""
    if isinstance(session, deepspeed.Session):
        session.edit("one rank", 0)
    elif dist.get_rank() == 2:
        with torch.no_grad():
            session.model.blocks[1].up.weight.to_local().mul_(0.5)


def _train(front: Any, row: Row) -> tuple[list[Any], int]:
    """Losses, norms and weights of a training with warm-up, and the bytes of codec exact."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        found, sent = _trained(front(row))
    told = re.findall(
        r"hzero: codec exact took (\S+) bits per weight on inter_node in 20 steps; the plan", said.getvalue()
    )
    assert [0 < float(bits) < 16.3 for bits in told] == [True] * (dist.get_rank() == 0 and sent > 0), told
    return found, sent


def _trained(session: Any) -> tuple[list[Any], int]:
    found = list[Any]()
    groups = (session.engine if isinstance(session, deepspeed.Session) else session).optimizer.param_groups
    folder, middle, load = str(shared_folder()), STEPS // 2, None
    for step in range(STEPS):
        for group in groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / 20)
        loss = session.backward(zoo.batch(step, 0, session.rank).to(DEVICE), True, 1)
        found += [float(loss), session.step()]
        if step == middle:
            load = _save(session, folder)
        elif load is not None and step == middle + APART:
            load()
        elif step == middle + 2 * APART:
            _write(session)
        if step % 10 == 9:
            found.append(float(session.evaluate(zoo.batch(99, 0, session.rank).to(DEVICE))))
    session.state.settle()
    sent = sum(entry.wire_bytes for entry in session.state.wire_log.entries() if (entry.codec == "exact"))
    read = session.read()
    assert same_on_all_ranks(list(read.values()), session.group)
    found += [*session.masters().values(), *read.values()]
    session.end()
    return found, sent


def _equal(front: Any, preset: str, layout: tuple[int, int, int]) -> None:
    options = frozenset({"bf16", "wide"})
    exact, sent = _train(front, Row(preset, options, layout=layout, block=EXACT))
    none, unsent = _train(front, Row(preset, options, layout=layout, block=NONE))
    assert sent > 0 and not unsent, (sent, unsent)
    for place, (one, other) in enumerate(zip(exact, none, strict=True)):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other)), (place, one, other)


#: By layout: refreshes over two tiers, over one between nodes of one package, and of packages of one device.
ROWS = {
    "deepspeed_lossless": functools.partial(_equal, deepspeed.Session, "lossless", (2, 2, 2)),
    "fsdp_lossless": functools.partial(_equal, fsdp.Session, "lossless", (2, 4, 1)),
}
LONG_ROWS = {
    "deepspeed_zero2": functools.partial(_equal, deepspeed.Session, "zero2", (4, 1, 2)),
    "fsdp_zero1": functools.partial(_equal, fsdp.Session, "zero1", (2, 2, 2)),
}
