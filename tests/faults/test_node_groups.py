"""Groups of nodes, as a user runs them: losses of stock ZeRO-3, bytes of the plan, and the same bits on all ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.faults.launch import run


def test_16_ranks_as_8_nodes_in_2_groups(tmp_path: Path) -> None:
    text = run("node_groups.py", folder=tmp_path, ranks=16)
    assert "lossless on 2 groups x 4 nodes x 2 GPUs x 1 GCD" in text, "the start line"
    result = json.loads(text.partition("RESULT ")[2].splitlines()[0])
    stock, lossless, topo = result["None"], result["lossless"], result["topo"]
    assert lossless["losses"] == pytest.approx(stock["losses"], rel=1e-6)
    assert lossless["norms"] == pytest.approx(stock["norms"], rel=1e-5)
    assert topo["losses"] == pytest.approx(stock["losses"], rel=5e-3) and topo["losses"] != stock["losses"]
    for seen in (lossless, topo):
        assert seen["same bits"]
        assert {"weights node", "weights group", "gradients node", "gradients group"} == set(seen["bytes"])
        for crossing, (logged, planned) in seen["bytes"].items():
            assert logged == planned, crossing
    assert (topo["codecs"]["gradients node"], topo["codecs"]["gradients group"]) == ("int4", "int8")
    assert set(lossless["codecs"].values()) == {"none"}
