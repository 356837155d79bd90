"""The launcher's processes, which are no ranks here."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hzero.launcher import GRACE_S, INTERRUPTED, Ranks


def test_an_interruption_while_ranks_are_started_ends_them_at_once(tmp_path: Path) -> None:
    """Ranks that were not started yet are not, and none is left to be waited for."""
    given = 0

    def environments() -> Iterator[Mapping[str, str]]:
        nonlocal given
        for given in range(1, 6):
            yield dict(os.environ)
            if given == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    started: Any = environments()
    begun = time.monotonic()
    command = [sys.executable, "-c", "import time; time.sleep(120)"]
    ranks = Ranks(command, started, tmp_path, start_timeout=60, say=lambda message: None)
    assert ranks.run() == INTERRUPTED
    assert given == 3 and len(list(tmp_path.glob("rank*.log"))) == 2
    assert time.monotonic() - begun < GRACE_S / 2
