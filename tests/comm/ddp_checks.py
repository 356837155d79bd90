"""The hook of DistributedDataParallel, and the examples of its page. Run by test_tiered.py on several ranks."""

from __future__ import annotations

import contextlib
import itertools
import re
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hzero
from hzero.comm import DdpState, communicator, ddp_hook
from hzero.topology.grid import Grid
from tests.comm.tiered_checks import GRIDS, WORLD
from tests.rank_main import TRANSPORT, same_on_all_ranks
from tests.ranks import ROOT

#: In MB: several buckets, the last of them short.
SMALL = 0.002


def _net(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Weights of awkward sizes, in several buckets; and one without a gradient."""
    torch.manual_seed(3)
    widths = (17, 31, 29, 23, 1)
    layers = [torch.nn.Linear(before, after) for before, after in itertools.pairwise(widths)]
    net = torch.nn.Sequential(layers[0], torch.nn.Tanh(), *layers[1:])
    net[2].bias.requires_grad_(False)
    return net.to(dtype)


def _state(grid: Grid, timeout: timedelta | None = None, **config) -> DdpState:
    with mock.patch.object(communicator, "resolve_grid", return_value=grid):
        return DdpState({"transport": TRANSPORT, **config}, timeout=timeout)


def _train(state: DdpState | None, steps: int, *, dtype=torch.float32, accumulate=1, **ddp) -> tuple[list, list]:
    """Losses, the same on all ranks, and the gradients of every step."""
    module = _net(dtype)
    model = DistributedDataParallel(module, bucket_cap_mb=SMALL, **ddp)
    if state is not None:
        model.register_comm_hook(state, ddp_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses, gradients = [], []
    for _ in range(steps):
        total = torch.zeros(())
        for micro in range(accumulate):
            inputs = torch.randn(8, 17, generator=generator)
            with model.no_sync() if micro < accumulate - 1 else contextlib.nullcontext():
                found = model(inputs.to(dtype))
                loss = (found.float()[:, 0] - inputs.sum(1).sin()).square().mean() / accumulate
                loss.backward()
            total += loss.detach()
        gradients.append([p.grad.clone() for p in module.parameters() if p.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(float(total) / WORLD)
    assert same_on_all_ranks(list(module.parameters()))
    return losses, gradients


def check_the_hook_with_codec_none_is_ddp() -> None:
    """Of accumulated gradients, of views, and in bfloat16; rank order changes nothing but rounding."""
    for number, grid in enumerate(GRIDS[WORLD][:1] + GRIDS[WORLD][-1:]):
        for dtype, accumulate in ((torch.float32, 1), (torch.float32, 3), (torch.bfloat16, 1)):
            options = {"dtype": dtype, "accumulate": accumulate, "gradient_as_bucket_view": bool(number)}
            state = _state(grid)
            losses, gradients = _train(state, 2, **options)
            plain, wanted = _train(None, 2, **options)
            unit = torch.finfo(dtype).eps
            assert losses == pytest.approx(plain, rel=16 * unit)
            pairs = [pair for step in zip(gradients, wanted) for pair in zip(*step)]
            largest = max(float(want.abs().max()) for _, want in pairs)
            for got, want in pairs:
                assert got.dtype == dtype
                torch.testing.assert_close(got, want, rtol=16 * unit, atol=16 * unit * largest)
            entries = state.communicator.wire_log.entries()
            # One bucket in the first step, more in the second, each summed and spread; micro-batches under no_sync send nothing.
            hops = {entry.tier: entry.hops for entry in entries}
            assert set(hops.values()) == {2 * (1 + len(state._layouts))} and len(state._layouts) > 1, hops


def check_lossy_hooks_train_and_error_feedback_helps() -> None:
    exact, _ = _train(None, 8)
    found = {}
    for name, config in {
        "int8": {"codecs": "int8"},
        "int4": {"codecs": "int4"},
        "int4 with feedback": {"codecs": "int4", "error_feedback": ["intra_package", "intra_node", "inter_node"]},
    }.items():
        state = _state(GRIDS[WORLD][0], **config)
        losses, _gradients = _train(state, 8)
        found[name] = sum(abs(loss - want) for loss, want in zip(losses, exact)) / 8
        kept = {key for _, key in state.communicator.feedback._changed}
        assert len(kept) == (len(state._layouts) if "feedback" in name else 0)
        for entry in state.communicator.wire_log.entries():
            assert entry.role == "all_reduce" and entry.wire_bytes < entry.raw_bytes
    assert found["int8"] < found["int4"] and found["int4 with feedback"] < found["int4"], found
    assert found["int8"] < 0.01 * exact[0], (found, exact)


def check_gradients_that_cannot_be_sent_are_an_error_of_backward() -> None:
    model = DistributedDataParallel(_net(torch.float64))
    model.register_comm_hook(_state(GRIDS[WORLD][0]), ddp_hook)
    wrong = DistributedDataParallel(_net())
    wrong.register_comm_hook({"codecs": "int8"}, ddp_hook)
    with pytest.raises(TypeError, match=r"ddp_hook: state: found dict; expected an hzero\.comm\.DdpState"):
        wrong(torch.ones(2, 17)).sum().backward()
    with pytest.raises(TypeError, match=r"all_reduce: tensor: found torch.float64.*expected dense float32"):
        model(torch.ones(1, 17, dtype=torch.float64)).sum().backward()


def check_examples_of_the_page_run() -> None:
    """Every block of Python, and the script beside them."""
    from examples import ddp

    page = (ROOT / "docs" / "collectives.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 2
    names = {
        "hzero": hzero,
        "torch": torch,
        "dist": dist,
        "model": _net(),
        "TOPOLOGY": {"packages_per_node": 2, "devices_per_package": 1},
    }
    for block in blocks:
        if TRANSPORT == "mpi" or '"mpi"' not in block:
            exec(compile(block, "docs/collectives.md", "exec"), names)
    losses = ddp.train(steps=12)
    assert losses[-1] < losses[0]
