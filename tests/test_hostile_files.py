"""Hostile content of the files that hzero reads: an error of ours that names the file, or a skip that is counted, and soon.

The readers of topologies are tried in their own tests (`tests/topology/hostile.py`).
"""

from __future__ import annotations

import base64
import contextlib
import copy
import functools
import json
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hzero import block
from hzero.config import PRESETS, parse_config
from hzero.errors import ConfigError
from hzero.files import read_json
from hzero.tools.commands.doctor import check_config
from hzero.tools.experiment import Experiment, compose
from hzero.topology import resolve_grid
from hzero.topology.links_file import read_links
from hzero.topology.node import Node
from tests.commands.measured import links
from tests.topology.hostile import accepts, mutated

quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

#: Values of every kind where one of another kind was.
_LEAVES = st.sampled_from(
    [None, True, False, 0, -1, 2**63, 10**400, 0.5, -0.0, 1e308, float("inf"), float("nan"), "", "a\nb", "\x1b[2J", "\ud800",
     "9" * 50, [], {}, [[]], [None], {"": None}, {"a": {"a": {}}}]
)  # fmt: skip


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _places(item, (*path, key))


@st.composite
def changed(draw: st.DrawFn, good: Any) -> Any:
    """A good value with other things in one to three of its places, keys that are gone, or other keys."""
    made = copy.deepcopy(good)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(list(_places(made))))
        leaf = copy.deepcopy(draw(_LEAVES))
        if not path:
            return leaf
        inner = functools.reduce(operator.getitem, path[:-1], made)
        if draw(st.integers(0, 3)):
            inner[path[-1]] = leaf
            continue
        value = inner.pop(path[-1])
        if isinstance(inner, dict) and draw(st.booleans()):
            inner[draw(st.text(max_size=9))] = value
    return made


def damaged(good: Any) -> st.SearchStrategy[bytes]:
    """JSON with changed values, changed text, or what is no JSON."""
    text = json.dumps(good)
    deep = st.sampled_from(
        [b"[" * 100_000, b'{"a":' * 100_000, b"1" * 5000, b"\xff\xfe{}", b"\0", b"", b"null", b"NaN"]
    )
    return changed(good).map(lambda value: json.dumps(value).encode()) | mutated(text) | st.binary(max_size=60) | deep


BLOCK = {
    "preset": "topo", "shard": {"weights": "package", "gradients": "node"}, "block_size": 128,
    "codecs": {"weights": {"intra_node": "int8"},
               "gradients": {"inter_node": {"codec": "int4", "block_size": 64, "rounding": "nearest"}}},
    "error_feedback": ["inter_node"], "node_all_gather": {"algorithm": "pairs", "below_bytes": 1024}, "exact_evaluation": True,
    "topology": {"nodes": 2, "packages_per_node": 2, "devices_per_package": 2,
                 "order": ["inter_node", "intra_node", "intra_package"]},
}  # fmt: skip
DEEPSPEED = {"train_batch_size": 8, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3, "hzero": BLOCK}}


def test_what_is_damaged_here_is_good(tmp_path: Path) -> None:
    assert parse_config(BLOCK).preset in PRESETS
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(DEEPSPEED))
    assert block.split(read_json(path, block.read_text))[0] == BLOCK


@quick
@given(value=changed(BLOCK))
def test_blocks(value: Any) -> None:
    def read() -> None:
        parsed = parse_config(value)
        if parsed.topology.packages_per_node is not None:
            with contextlib.suppress(ConfigError):  # names the key topology
                resolve_grid(parsed.topology, 8)

    accepts(read, "hzero")


@quick
@given(content=damaged(DEEPSPEED))
def test_configurations_of_deepspeed(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_bytes(content)
    accepts(lambda: read_json(path, block.read_text), str(path))
    for given_as in (str(path), base64.urlsafe_b64encode(content).decode()):
        accepts(lambda given_as=given_as: block.split(block.load(given_as) or {}), "hzero", "hz")  # type: ignore[misc]
    found: list[str] = []

    def examine() -> None:
        found.extend(
            text for _, text in check_config(path, read_json(path, block.read_text), Node("none", ()), 2, None)
        )

    accepts(examine, str(path))
    assert all("\n" not in text and len(text) < 5000 for text in found)


@pytest.fixture(scope="module")
def defaults() -> dict[str, Any]:
    return compose([]).config


@quick
@given(data=st.data())
def test_configurations_of_the_trainer(data: st.DataObject, defaults: dict[str, Any]) -> None:
    value = data.draw(changed(defaults))
    if isinstance(value, dict):
        accepts(lambda: Experiment(value), *defaults, "input", *(str(key) for key in value))


@quick
@given(override=st.text(max_size=12) | st.tuples(st.sampled_from(["train.steps", "+a", "~zero", "topology", "a@b"]),
       st.text("=[]{}(),:'\"\\$\n a1.*-@~+", max_size=9)).map("=".join))  # fmt: skip
def test_overrides(override: str) -> None:
    accepts(lambda: compose([override]), "")


@quick
@given(content=damaged(links().model_dump(by_alias=True)))
def test_links_files(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    path.write_bytes(content)
    accepts(lambda: read_links(path), str(path))
