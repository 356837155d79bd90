"""Islands of examples/islands.py: they meet with equal weights, and one that is killed comes back without a checkpoint."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.ranks import LONG, ROOT

EVERY = 5
#: More than the others take until the killed island is back.
STEPS = 10**6
LINE = re.compile(r"island (\d) step (\d+): loss ([\d.]+); sum ([-\d.]+); (\d+) meetings, the last of (\d)")


class Island:
    """Two ranks of one island, and what they have printed in all of its lives."""

    def __init__(self, number: int, folder: Path, lighthouse: str) -> None:
        self.number, self.log, self._lighthouse = number, folder / f"{number}.log", lighthouse
        self.start()

    def start(self, steps: int = STEPS) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command += [str(ROOT / "examples" / "islands.py"), f"--steps={steps}", f"--every={EVERY}", "--timeout=20"]
        environment = {"TORCHFT_LIGHTHOUSE": self._lighthouse, "ISLAND": str(self.number), "OMP_NUM_THREADS": "1"}
        with self.log.open("a") as log:
            self.process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=log, stderr=log)

    def kill(self) -> None:
        """SIGKILL of all of its processes."""
        for one in [*psutil.Process(self.process.pid).children(recursive=True), self.process]:
            one.kill()
        self.process.wait()

    def lines(self) -> list[tuple[str, ...]]:
        return LINE.findall(self.log.read_text())

    def wait_for(self, lines: int) -> None:
        until = time.monotonic() + 240
        while len(self.lines()) < lines:
            assert time.monotonic() < until and self.process.poll() is None, self.log.read_text()[-3000:]
            time.sleep(0.1)


@pytest.fixture
def lighthouse() -> Iterator[str]:
    coordination = pytest.importorskip("torchft.coordination", reason="torchft (extra islands) is not installed")
    server = coordination.LighthouseServer("[::]:0", 1, join_timeout_ms=3000, heartbeat_timeout_ms=2000)
    yield server.address()
    server.shutdown()


@LONG
def test_an_island_that_is_killed_comes_back_with_the_weights_of_the_others(lighthouse: str, tmp_path: Path) -> None:
    islands = [Island(number, tmp_path, lighthouse) for number in range(3)]
    try:
        islands[1].wait_for(4 * EVERY)
        islands[1].kill()
        before = len(islands[1].lines())
        islands[1].start(3 * EVERY)
        assert islands[1].process.wait(240) == 0, islands[1].log.read_text()[-3000:]
        assert islands[0].process.poll() is None and islands[2].process.poll() is None, "the others train on"
    finally:
        for island in islands:
            if island.process.poll() is None:
                island.kill()
    for island in (islands[0], islands[2]):
        assert [int(line[1]) for line in island.lines()] == [*range(1, len(island.lines()) + 1)], "they lose no step"
    sums: dict[int, set[str]] = defaultdict(set)
    members: dict[int, int] = defaultdict(int)
    for island in islands:
        met = 0
        for _, _, loss, total, meetings, _ in island.lines():
            if int(meetings) != met:  # this step ended with a meeting
                met = int(meetings)
                sums[met].add(total)
                members[met] += 1
            assert float(loss) < 8
    assert max(members.values()) == 3 and all(len(equal) == 1 for equal in sums.values()), sums
    first = int(islands[1].lines()[before:][EVERY - 1][4])
    assert first > int(islands[1].lines()[before - 1][4]) and members[first] == 3, "it joins at its first meeting"
