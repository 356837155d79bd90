"""Programs that run again: what they allocate, and which rules of plans and formats they ask."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hzero.codecs import backends
from hzero.comm import Bucket, Runtime, WireLog
from hzero.comm.arena import Arena
from hzero.comm.lanes import StreamLanes
from hzero.comm.wires import STAGE
from hzero.config import parse_config
from hzero.program.program import Program, StagePrograms
from hzero.program.shards import ShardPlan
from hzero.topology import Grid
from tests.comm.simulated import peers
from tests.kernels.launches import launches

#: Awkward on purpose: chunks of no multiple of 16 bytes, and one without elements.
CHUNKS = (33, 1, 0, 129, 7)


class _Alone:
    """Wires on which a rank receives zeros."""

    library_sums = True

    def __getattr__(self, kind: str) -> Callable[..., Any]:
        return lambda output, *_: SimpleNamespace(wait=output.zero_)


class _Allocations(TorchDispatchMode):
    """Counts the memories that operators make."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        fresh = [
            result for result in func._schema.returns if result.alias_info is None and "Tensor" in str(result.type)
        ]
        self.made += [str(func)] if fresh else []
        return out


@pytest.fixture(autouse=True)
def _no_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)


def _device() -> Any:
    """A device whose streams and events do nothing."""
    return mock.Mock(stream=lambda _: contextlib.nullcontext(), Stream=lambda priority: mock.Mock())


def _collectives(preset: str, **block: Any) -> Runtime:
    plan = ShardPlan.from_config(parse_config({"preset": preset, **block}), Grid(2, 2, 2), 3)
    groups = {(STAGE, tier): (_Alone(), list(plan.tier_group(tier))) for tier in plan.grid.crossed}
    return Runtime(plan, peers(3, groups), WireLog(), StreamLanes(_device()))


def _run(collectives: Runtime, program: Program, bucket: Bucket, value: Any) -> Any:
    return collectives.bind(program, bucket).run(lambda: value, seed=5, first_seed=6).wait()


@pytest.mark.parametrize("block", [{}, {"error_feedback": ["intra_package", "inter_node"]}], ids=["plain", "feedback"])
@pytest.mark.parametrize("preset", ["lossless", "topo", "zero3"])
def test_a_second_run_allocates_its_result_alone_and_looks_nothing_up(preset: str, block: dict[str, Any]) -> None:
    collectives = _collectives(preset, **block)
    plan, programs = collectives.plan, StagePrograms.of(collectives.plan)
    shards = [torch.ones(chunk, dtype=torch.bfloat16) for chunk in CHUNKS]
    whole = [torch.ones(8 * chunk, dtype=torch.bfloat16) for chunk in CHUNKS]
    sums = [torch.ones(plan.gradient_rows * chunk) for chunk in CHUNKS]
    held = shards
    if plan.keeps_copies:
        size = plan.secondary_codec.format.message_bytes(CHUNKS, plan.secondary_rows, 2)
        held = torch.zeros(size, dtype=torch.uint8)
    runs = {
        "refresh": (programs.refresh if plan.keeps_copies else None, shards),
        "fetch": (programs.unshard, held),
        "micro": (programs.micro, whole),
        "boundary": (programs.outermost, sums),
    }
    for name, (program, value) in runs.items():
        if program is None or not program.steps:
            continue
        bucket = Bucket(
            tuple(range(5)), CHUNKS, torch.bfloat16, "weights" if name in ("refresh", "fetch") else "gradients"
        )
        first, asked = _run(collectives, program, bucket, value), set()

        def noted(frame: Any, event: str, _: Any, asked: set[str] = asked) -> None:
            module = frame.f_globals.get("__name__", "")
            if event == "call" and module.startswith(
                ("hzero.tools.plan", "hzero.codecs.formats", "hzero.topology", "hzero.config")
            ):
                asked.add(f"{module}.{frame.f_code.co_name}")

        sys.setprofile(noted)
        try:
            with _Allocations() as allocations:
                second = _run(collectives, program, bucket, value)
        finally:
            sys.setprofile(None)
        left = 1 if isinstance(second, torch.Tensor) else len(second)
        assert len(allocations.made) <= left, (name, allocations.made)
        assert not asked, (name, asked)
        for before, after in zip(first, second):
            assert torch.equal(before, after) or block


@pytest.mark.parametrize(("preset", "gather", "micro"), [("lossless", 1, 2), ("zero3", 2, 2), ("topo", 1, 3)])
def test_a_bucket_starts_one_kernel_a_step_whatever_its_tensors(preset: str, gather: int, micro: int) -> None:
    """As `python -m tests.kernels.launches` prints; torch would start one or two for each of the twelve tensors."""
    if backends.choice("cpu").name != "host":
        pytest.skip("the host library is not built")
    found = launches(preset)
    for started in found.values():
        del started["page faults"]  # of the machine, not of the program
    assert (found["gather"].total(), found["micro"].total()) == (gather, micro), found
    assert found["refresh"].total() <= 1 and found["boundary"].total() + found["outermost"].total() <= 2, found


def test_streams_keep_buffers_that_an_engine_has_left() -> None:
    """An engine that is dropped without an end, or a chain that fails: what they used may still be under way on any stream."""
    gc.collect()  # arenas of other tests
    kept: list[tuple[int, Any]] = []
    streams = StreamLanes(_device())
    for tier in ("intra_package", "inter_node"):
        streams.on((STAGE, tier))
    arena, cpu = Arena(streams), torch.device("cpu")
    rooms = [arena.take(size, cpu) for size in (100, 1 << 20)]
    arena.give(rooms.pop())
    with mock.patch.object(torch.Tensor, "record_stream", lambda buffer, of: kept.append((buffer.numel(), of))):
        del arena, rooms
        gc.collect()
    assert len(kept) == 4
    assert set(kept) == {(size, of) for size in (100, 1 << 20) for of in streams._streams.values()}
