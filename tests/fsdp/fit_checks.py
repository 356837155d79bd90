"""Preset fit under both front ends: the same choice on all ranks, and what it is told. Run by test_fsdp.py on 4 ranks."""

from __future__ import annotations

import contextlib
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from hzero import ConfigError
from hzero.errors import of_every_rank
from tests.deepspeed.training import shared_folder
from tests.parity import deepspeed, fsdp, zoo
from tests.parity.compare import LAYOUT, Row
from tests.rank_main import DEVICE

FRONTS: tuple[Any, ...] = (deepspeed.Session, fsdp.Session)
#: Bytes of a weight, its master, moments and gradient.
STATES = 2 + 16
#: Rates at which bytes between nodes cost most.
SLOW = {"intra_package": 10.0, "inter_node": 0.001}


def _links(folder: Path, rates: dict[str, float]) -> str:
    """A links file with rates in GB/s."""
    grid = dict(zip(("inter_node", "intra_node", "intra_package"), LAYOUT))
    rows = []
    for tier, rate in rates.items():
        for size, us in ((1 << 10, 1.0), (1 << 20, (1 << 20) / rate / 1e3 * (grid[tier] - 1) / grid[tier])):
            of_tier = {"tier": tier, "ranks": grid[tier], "algorithm": "library", "size_bytes": size}
            rows.append({**of_tier, "median_us": us, "min_us": us, "max_us": us})
    content = {"schema": "hzero-links-1", "date": "2026-11-30", "machine": {}, "versions": {}, "backend": "gloo"}
    file = folder / f"{len(rates)}.json"
    if dist.get_rank() == 0:
        file.write_text(json.dumps({**content, "device": "cpu", "grid": grid, "rows": rows}))
    dist.barrier()
    return str(file)


def _started(front: Any, layout: Any = LAYOUT, tensor: int = 1, **block: Any) -> tuple[Any, str]:
    """A session, and what it has printed."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        session = front(Row("fit", frozenset({"bf16"}), 2, layout, block, tensor=tensor))
    return session, said.getvalue()


def _losses(session: Any) -> list[float]:
    found = []
    for step in range(4):
        for micro in range(2):
            tokens = zoo.batch(step, micro, session.rank).to(DEVICE)
            found.append(float(session.backward(tokens, micro == 1, 2)))
        found.append(session.step())
    return found


def check_all_ranks_choose_alike_and_train_as_with_the_same_layout_written() -> None:
    folder = shared_folder()
    for front in FRONTS:
        session, said = _started(front, links=_links(folder, SLOW), memory={"device": "1GB"})
        plan = session.state.plan
        assert of_every_rank(str(plan)) == [str(plan)] * dist.get_world_size()
        assert plan.exact and plan.weights_scope != "world"  # between nodes, changes of weights need the fewest bytes
        spoken = re.findall(
            r"hzero: fit chose (.*) of messages per step, (.*) of (.*); next: .*; without hzero: \S+", said
        )
        assert len(spoken) == (dist.get_rank() == 0), said
        found = _losses(session)
        session.end()
        shard = {"weights": plan.weights_scope, "gradients": plan.gradients_scope}
        written = front(replace(session.row, preset="lossless", block={"shard": shard}))
        assert _losses(written) == found
        written.end()


def check_memory_decides() -> None:
    """Without room for anything, states are sharded over the world."""
    file = _links(shared_folder(), SLOW)
    for front in FRONTS:
        session, _ = _started(front, links=file, memory={"device": "1MB", "activations": 0})
        roomy, numel = session.state.plan, sum(param.numel for param in session.state.weights.parameters.values())
        session.end()
        tight_memory = {"device": "1MB", "activations": 1_000_000 - STATES * numel // dist.get_world_size() - 512}
        session, _ = _started(front, links=file, memory=tight_memory)
        tight = session.state.plan
        session.end()
        assert (tight.weights_scope, tight.gradients_scope) == ("world", "world") and not tight.keeps_copies
        assert roomy.keeps_copies
        with pytest.raises(
            ConfigError, match=r"hzero.memory: found room for .*; expected .* for weights over the device"
        ):
            _started(front, links=file, memory=tight_memory, shard={"weights": "device"})


def check_measured_links_are_written_and_read_again() -> None:
    file = shared_folder() / "measured.json"
    session, _ = _started(fsdp.Session, links=str(file))
    session.end()
    first = file.read_bytes()
    content = json.loads(first)
    assert {row["tier"] for row in content["rows"]} == {"intra_package", "inter_node"} and 0 <= content["together"] <= 1
    session, _ = _started(deepspeed.Session, links=str(file))
    session.end()
    assert file.read_bytes() == first


def check_wrong_input_is_one_error_on_all_ranks() -> None:
    folder = shared_folder()
    broken, partial = folder / "broken.json", _links(folder, {"intra_package": 1.0})
    if dist.get_rank() == 0:
        broken.write_text('{"schema": "hzero-links-1"')
    dist.barrier()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"links": str(broken)}, "broken.json: is not valid JSON"),
        ({"links": partial}, "tier inter_node: missing"),
        ({"links": str(folder / "absent" / "links.json")}, "hzero.links: found .*; expected a file in a folder"),
        ({"links": "a" * 300}, "hzero.links: found .*File name too long"),
        (
            {"links": _links(folder, SLOW), "memory": {"device": "1kB"}},
            "memory.device: found 1.00 kB; expected at least",
        ),
    ]
    for front in FRONTS:
        for block, says in cases:
            with pytest.raises(ConfigError, match=says):
                _started(front, **block)


def check_each_engine_has_the_rates_of_its_own_ranks_and_grid() -> None:
    """Also if some of the ranks have measured some of the links before."""
    fsdp.mesh_of(2)  # on all ranks
    if dist.get_rank() < 2:
        session, _ = _started(fsdp.Session, layout=(1, 1, 2))
        session.end()
    for how in ({"layout": (2, 1, 1), "tensor": 2}, {"layout": (1, 2, 2)}, {"layout": LAYOUT}):
        session, _ = _started(fsdp.Session, **how)
        assert set(session.state.plan.grid.crossed) <= {"intra_package", "intra_node", "inter_node"}
        session.go(0)
        session.end()
