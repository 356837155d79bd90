"""The emulated cluster: its lines for ip and tc, its messages, and, as root, bytes that arrive in the right counters."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.cluster import counters, namespace
from benchmarks.cluster.__main__ import main
from benchmarks.cluster.network import Network, clear, ours
from benchmarks.cluster.shape import Cluster
from hzero.config import BASE_TIERS
from hzero.errors import ConfigError
from tests.forks import alive
from tests.ranks import ROOT

# --- with a real network ---


def _sent(cluster: Cluster) -> list[dict[str, int]]:
    return [counters.sent(namespace=cluster.namespace(rank)) for rank in range(cluster.world_size)]


def _transfer(cluster: Cluster, source: int, target: int, size: int) -> None:
    """Sends bytes from rank to rank. A socket stays in the namespace in which it is made."""
    at = cluster.address(target), 0
    with namespace.inside(cluster.namespace(target), lambda: socket.create_server(at)) as server:
        where = server.getsockname()
        out = namespace.inside(cluster.namespace(source), lambda: socket.create_connection(where, timeout=10))
        into, _ = server.accept()
    out.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 128 * 1024)
    with into, ThreadPoolExecutor(1) as sender:
        into.settimeout(20)

        def send() -> None:
            with out:
                out.sendall(bytes(size))

        sent, received = sender.submit(send), 0
        while count := len(into.recv(1 << 18)):
            received += count
        sent.result()
    assert received == size


@pytest.mark.usefixtures("emulated_network")
def test_bytes_are_counted_in_their_tier_and_nowhere_else() -> None:
    cluster, size = Cluster.from_text("2x2x2", "400,400,200"), 1_000_000
    with Network(cluster):
        for source, target, tier in (
            (0, 1, "intra_package"),
            (5, 4, "intra_package"),
            (0, 3, "intra_node"),
            (2, 5, "inter_node"),
        ):
            before, trunks_before = _sent(cluster), counters.trunks(cluster)
            _transfer(cluster, source, target, size)
            rise = [{name: new[name] - old[name] for name in BASE_TIERS} for new, old in zip(_sent(cluster), before)]
            assert size < rise[source][tier] < 1.03 * size
            assert 0 < rise[target][tier] < 0.03 * size  # acknowledgements
            rise[source][tier] = rise[target][tier] = 0
            assert all(not count for by_tier in rise for count in by_tier.values())
            out = [new[0] - old[0] for new, old in zip(counters.trunks(cluster), trunks_before)]
            if tier == "inter_node":
                assert size < out[0] < 1.03 * size and 0 < out[1] < 0.03 * size
            else:
                assert max(out) < 1000  # a bridge sends to all ports until it has seen a rank
        # The time has a lower bound whatever else the machine does.
        begun = time.monotonic()
        _transfer(cluster, 0, 4, 4 * size)
        assert time.monotonic() - begun > 0.8 * 4 * size * 8 / 200e6
        assert counters.dropped(cluster) == 0
        with (
            pytest.raises(ConfigError, match=rf"in use by process {os.getpid()} \(2 nodes x 2 packages x 2 devices"),
            Network(cluster),
        ):
            pass
        assert len(ours()) == 11
    assert ours() == [] and clear() == []


@pytest.mark.usefixtures("emulated_network")
def test_what_a_killed_process_leaves_is_cleared(capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "import subprocess, time\n"
        "from benchmarks.cluster.network import Network\n"
        "from benchmarks.cluster.shape import Cluster\n"
        "with Network(Cluster.from_text('1x1x2', 'none')):\n"
        "    print(subprocess.Popen(['nsenter', '--net=/run/netns/hzero-r1', 'sleep', '60']).pid, flush=True)\n"
        "    time.sleep(60)\n"
    )
    killed = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert killed.stdout
        left, deadline = int(killed.stdout.readline()), time.monotonic() + 20
        while namespace.occupants(ours()) != {left: "hzero-r1"}:
            assert time.monotonic() < deadline, "waited 20 s for a process in the namespace"
            time.sleep(0.02)
        with (
            pytest.raises(ConfigError, match=f"in use by process {killed.pid}"),
            Network(Cluster.from_text("1x1x2", "none")),
        ):
            pass
    finally:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    assert "hzero-r1" in ours()
    assert main(["down"]) == 0
    assert ours() == [] and not alive(left) and f"removed: process {left} in hzero-r1" in capsys.readouterr().out
