"""The exchange of a discovery: every rank's report to rank 0, and one answer back, through a store of torch.distributed.

Messages name the ranks that did not come, which a collective of torch cannot. A rank that cannot make its report sends the
reason, and all ranks raise it instead of waiting for the report.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from hzero.validation import ConfigError, some

#: Longest wait for the reports of all ranks, in seconds.
TIMEOUT_S = 300.0


class Exchange:
    """Ranks that can reach one store.

    Args:
        store: A store of torch.distributed; None for a world of one rank.
        rank: This rank.
        world_size: Ranks of the world.
        timeout_s: Longest wait of rank 0 for the others, in seconds; they wait a little longer for its answer.
    """

    def __init__(self, store: Any, rank: int, world_size: int, timeout_s: float = TIMEOUT_S) -> None:
        self.store, self.rank, self.world_size, self.timeout_s = store, rank, world_size, timeout_s

    @classmethod
    def of_group(cls) -> Exchange:
        """Through the store of the process group, which is up. Alone without a group."""
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            return cls(None, 0, 1)
        return cls(dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size())

    @classmethod
    def of_environment(cls, timeout_s: float = TIMEOUT_S, environ: Mapping[str, str] = os.environ) -> Exchange:
        """Through a store of its own, before a process group is up.

        Args:
            timeout_s: Longest wait for other ranks, in seconds.
            environ: Has RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as launchers of torch set them; alone without.

        Raises:
            ConfigError: Rank 0 cannot be reached.
        """
        rank, world_size = int(environ.get("RANK", 0)), int(environ.get("WORLD_SIZE", 1))
        if world_size == 1:
            return cls(None, 0, 1)
        from torch.distributed import PrefixStore, TCPStore
        from torch.distributed.rendezvous import _torchelastic_use_agent_store

        address, port = environ.get("MASTER_ADDR", "127.0.0.1"), int(environ.get("MASTER_PORT", 29500))
        serves = rank == 0 and not _torchelastic_use_agent_store()
        wait, longest = timedelta(seconds=timeout_s), timeout_s + max(1.0, timeout_s / 5)
        made: queue.Queue[Any] = queue.Queue()

        def make() -> None:
            try:
                # Without torch's wait for all ranks, which names no rank.
                made.put(TCPStore(address, port, world_size, serves, wait, wait_for_workers=False, multi_tenant=True))
            except RuntimeError as error:
                made.put(error)

        # In a thread: something that listens on the port but is no store never answers.
        threading.Thread(target=make, daemon=True).start()
        try:
            store = made.get(timeout=longest)
        except queue.Empty:
            store = RuntimeError("what listens there does not answer as a store does")
        if isinstance(store, RuntimeError):
            failed = "cannot serve a store" if serves else f"has not reached rank 0 within {timeout_s:g} s"
            why = str(store).partition("\n")[0][:200]
            raise ConfigError(
                f"topology: rank {rank} {failed} at {address}, port {port} (MASTER_ADDR, MASTER_PORT): {why}"
            )
        # The store of torchrun's agent outlives the ranks of an attempt.
        attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return cls(PrefixStore(f"attempt_{attempt}", store), rank, world_size, timeout_s)

    def agree(self, own: Callable[[], Any], combine: Callable[[list[Any]], Any]) -> Any:
        """One value on all ranks, from a report of each. Collective.

        Args:
            own: Makes this rank's report: what JSON can write.
            combine: Makes the value from the reports, in rank order. Called on rank 0 only.

        Raises:
            ConfigError: A rank has no report, rank 0 makes no value of them, or a rank did not come in time: the same
                message on all ranks.
        """
        report = _tried(own)
        if self.world_size == 1:
            answer = _answered([report], 1, combine)
        else:
            try:
                answer = self._through_store(report, combine)
            except RuntimeError as error:
                reason = str(error).partition("\n")[0][:200]
                raise ConfigError(f"topology: rank {self.rank}: the store has failed: {reason}") from None
        if "error" in answer:
            raise ConfigError(answer["error"], elsewhere=self.rank > 0 and "error" not in report)
        return answer["value"]

    def _through_store(self, report: dict[str, Any], combine: Callable[[list[Any]], Any]) -> dict[str, Any]:
        # Each rank counts its rounds, so that a second exchange of the same job has keys of its own.
        prefix = f"hzero/exchange/{self.store.add(f'hzero/exchange/rounds/{self.rank}', 1)}"
        keys = [f"{prefix}/{rank}" for rank in range(self.world_size)] if self.rank == 0 else []
        self.store.set(f"{prefix}/{self.rank}", json.dumps(report))
        # The others wait longer, so that the reason of rank 0 reaches them before they give up.
        grace_s = max(2.0, self.timeout_s / 5)
        if self.rank:
            patience = self.timeout_s + grace_s
            if not self._wait([f"{prefix}/answer"], patience):
                wait = f"rank {self.rank} has waited {patience:g} s for the answer of rank 0, which did not come"
                return {"error": f"topology: {wait}"}
            answer: dict[str, Any] = json.loads(self.store.get(f"{prefix}/answer"))
            self.store.add(f"{prefix}/heard", 1)
            return answer
        missing: list[int] = []
        if self._wait(keys, self.timeout_s):
            reports = [json.loads(each) for each in self.store.multi_get(keys)]
            answer = _answered(reports, self.world_size, combine)
        else:
            missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
            late, limit = _ranks(missing), self.timeout_s
            error = f"topology: {len(missing)} of {self.world_size} ranks have not reported within {limit:g} s: {late}"
            answer = {"error": error}
        self.store.set(f"{prefix}/answer", json.dumps(answer))
        # Rank 0 may serve the store, so it stays until all have heard.
        deadline = time.monotonic() + grace_s
        while self.store.add(f"{prefix}/heard", 0) < self.world_size - 1 - len(missing) and time.monotonic() < deadline:
            time.sleep(0.005)
        return answer

    def _wait(self, keys: list[str], timeout_s: float) -> bool:
        """Whether all keys come in time."""
        begun = time.monotonic()
        try:
            self.store.wait(keys, timedelta(seconds=timeout_s))
        except RuntimeError:
            if time.monotonic() - begun < timeout_s - 0.5:
                raise  # the store is gone
            return False
        return True


def _tried(act: Callable[[], Any]) -> dict[str, Any]:
    """What a function returns, as JSON brings it to others, or the first line of what it raises."""
    try:
        return {"value": json.loads(json.dumps(act()))}
    except Exception as error:
        return {"error": str(error).strip().partition("\n")[0] or type(error).__name__}


def _answered(reports: list[dict[str, Any]], world_size: int, combine: Callable[[list[Any]], Any]) -> dict[str, Any]:
    failed = {rank: report["error"] for rank, report in enumerate(reports) if "error" in report}
    if not failed:
        return _tried(lambda: combine([report["value"] for report in reports]))
    text = next(iter(failed.values()))
    who = f"all {world_size} ranks" if len(failed) == world_size else _ranks(list(failed))
    return {"error": f"{text} ({who})" if world_size > 1 else text}


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {some([str(rank) for rank in ranks], 8)}"
