"""Exchanges: threads on torch's stores, and real processes under torchrun, mpiexec and by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from hzero.bootstrap import Bootstrap
from hzero.topology.exchange import MAX_REPORT_BYTES, AloneExchange, Exchange, StoreExchange
from hzero.topology.rendezvous import open_exchange
from hzero.validation import ConfigError
from tests.forks import fork, join, run_script, torchrun
from tests.ranks import ROOT, mpiexec

torch = pytest.importorskip("torch")
from torch.distributed import FileStore, HashStore, TCPStore  # noqa: E402


def on_threads(world: int, act: Callable[[int], Any]) -> list[Any]:
    """What `act` returns or raises, a thread for each rank; a rank that hangs fails."""
    results: list[Any] = ["hangs"] * world

    def run(rank: int) -> None:
        try:
            results[rank] = act(rank)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def round_of(exchange: Exchange, report: bytes | Exception) -> tuple[Any, bytes]:
    reports = exchange.gather(report)
    answer = None if reports is None else b"|".join(reports)
    return reports, exchange.broadcast(answer)


def stores(kind: str, folder: Path, world: int) -> Callable[[int], Any]:
    if kind == "hash":
        shared = HashStore()
        return lambda rank: shared
    if kind == "file":
        return lambda rank: FileStore(str(folder / "store"), world)
    server = TCPStore("127.0.0.1", 0, world, True, timedelta(seconds=20), wait_for_workers=False)
    clients = [TCPStore("127.0.0.1", server.port, world, False, timedelta(seconds=20)) for _ in range(world - 1)]
    return lambda rank: server if rank == 0 else clients[rank - 1]


@pytest.mark.parametrize("kind", ["hash", "file", "tcp"])
def test_rounds_through_a_store(kind: str, tmp_path: Path) -> None:
    world = 7
    store = stores(kind, tmp_path, world)

    def act(rank: int) -> list[Any]:
        # Two exchanges of one job, one of them for two rounds: nobody meets the keys of another round.
        first, second = (StoreExchange(store(rank), rank, world, 20.0) for _ in range(2))
        return [round_of(each, b"%d of %d" % (rank, turn)) for turn, each in enumerate((first, second, first))]

    for rank, rounds in enumerate(on_threads(world, act)):
        assert not isinstance(rounds, BaseException), rounds
        for turn, (reports, answer) in enumerate(rounds):
            expected = [b"%d of %d" % (r, turn) for r in range(world)]
            assert reports == (expected if rank == 0 else None)
            assert answer == b"|".join(expected)


def test_keys_are_bounded_and_freed() -> None:
    world, store = 9, HashStore()

    def act(rank: int) -> bytes:
        return round_of(StoreExchange(store, rank, world, 20.0), b"x")[1]

    assert on_threads(world, act) == [b"|".join([b"x"] * world)] * world
    assert store.num_keys() == world  # what counts the rounds of each rank


def test_many_ranks_in_batches() -> None:
    """More ranks than a batch holds; the others are simulated one after the other."""
    world, store = 1300, HashStore()
    others = [StoreExchange(store, rank, world, 20.0) for rank in range(1, world)]
    for other in others:
        assert other.gather(b"%d" % other.rank) is None
    first = StoreExchange(store, 0, world, 20.0)
    assert first.gather(b"0") == [b"%d" % rank for rank in range(world)]
    answers: list[bytes] = []
    listeners = threading.Thread(target=lambda: answers.extend(other.broadcast(None) for other in others))
    listeners.start()
    first.broadcast(b"all")
    listeners.join(30)
    assert answers == [b"all"] * (world - 1)


@pytest.mark.parametrize("kind", ["hash", "tcp"])
def test_a_rank_without_a_report_ends_all(kind: str, tmp_path: Path) -> None:
    world = 4
    store = stores(kind, tmp_path, world)
    reasons = {1: ConfigError("no device\nsecond line"), 3: ConfigError("other")}

    def act(rank: int) -> Any:
        return round_of(StoreExchange(store(rank), rank, world, 20.0), reasons.get(rank, b"x"))

    results = on_threads(world, act)
    assert all(type(result) is ConfigError for result in results), results
    assert {str(result) for result in results} == {
        r"no device\nsecond line (rank 1; 1 other ranks fail for other reasons)"
    }


def test_all_ranks_without_a_report() -> None:
    store = HashStore()
    results = on_threads(3, lambda rank: round_of(StoreExchange(store, rank, 3, 20.0), ConfigError("bad file")))
    assert {str(result) for result in results} == {"bad file (all 3 ranks)"}
    with pytest.raises(ConfigError, match=r"^bad file$"):
        AloneExchange().gather(ConfigError("bad file"))


def test_rank_0_without_an_answer_ends_all() -> None:
    store = HashStore()

    def act(rank: int) -> bytes:
        exchange = StoreExchange(store, rank, 3, 20.0)
        reports = exchange.gather(b"x")
        return exchange.broadcast(None if reports is None else ConfigError("two ways to read it"))

    results = on_threads(3, act)
    assert [(type(result), str(result)) for result in results] == [(ConfigError, "two ways to read it")] * 3


def test_a_report_that_is_too_long_names_its_rank() -> None:
    store = HashStore()
    long = b"x" * (MAX_REPORT_BYTES + 1)
    results = on_threads(3, lambda r: round_of(StoreExchange(store, r, 3, 20.0), long if r == 2 else long[1:]))
    assert {str(result) for result in results} == {"a report of 4097 bytes; at most 4096 are exchanged (rank 2)"}


def test_missing_ranks_are_named_on_all() -> None:
    world, missing, store = 20, [3, *range(8, 18)], HashStore()

    def act(rank: int) -> Any:
        return None if rank in missing else round_of(StoreExchange(store, rank, world, 1.0), b"x")

    results = on_threads(world, act)
    text = "topology: 11 of 20 ranks have not reported within 1 s: ranks 3, 8, 9, 10, 11, 12, 13, 14 and 3 more"
    assert {str(results[rank]) for rank in range(world) if rank not in missing} == {text}


def test_a_missing_rank_0_is_named() -> None:
    store, begun = HashStore(), time.monotonic()
    exchange = StoreExchange(store, 5, 8, 0.5)
    assert exchange.gather(b"x") is None
    with pytest.raises(ConfigError, match=r"rank 5 has waited 2.5 s for the answer of rank 0"):
        exchange.broadcast(None)
    assert time.monotonic() - begun < 10


def test_a_store_that_nobody_serves() -> None:
    server = TCPStore("127.0.0.1", 0, 2, True, timedelta(seconds=5), wait_for_workers=False)
    port = server.port
    del server
    nowhere = Bootstrap(1, 2, 0, None, "127.0.0.1", port, "slurm")
    with pytest.raises(
        ConfigError, match=rf"rank 1 has not reached rank 0 within 1 s at 127.0.0.1, port {port}"
    ) as raised:
        open_exchange(nowhere, 1.0)
    assert "\n" not in str(raised.value)


def test_alone() -> None:
    exchange = open_exchange(Bootstrap(0, 1, 0, None, "127.0.0.1", 1, "alone"), 1.0)
    assert isinstance(exchange, AloneExchange)
    assert exchange.gather(b"x") == [b"x"]
    assert exchange.broadcast(b"y") == b"y"
    with pytest.raises(ConfigError, match="why"):
        exchange.broadcast(ConfigError("why"))


# The ranks below: two rounds before a process group is up and one after, on the same address and port; then a second group.
ROUNDS = """
import json, os, sys, time
from datetime import timedelta
from hzero.bootstrap import bootstrap
from hzero.topology.rendezvous import open_exchange, release_store

start = bootstrap(visible=0)
if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0" and start.rank == 1:
    os._exit(3)  # before it has said anything
def turn(word):
    exchange = open_exchange(start, 30.0)
    reports = exchange.gather(f"{word}{start.rank}".encode())
    return exchange.broadcast(reports and b" ".join(reports)).decode()
said = [turn("a"), turn("b")]
import torch.distributed as dist
os.environ.update(start.environment())
# The agent's store would mix up two groups of one attempt, with torch alone too.
for word in "c" if start.launcher == "torchrun" else "cd":
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    release_store()
    said.append(turn(word))
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(start.rank)  # or the second group of rank 1 may meet the store of rank 0's first one, with torch alone too
# One write: lines of several ranks must not be mixed.
os.write(1, (json.dumps([start.launcher, start.rank, said]) + chr(10)).encode())
"""


def environment(**more: str) -> dict[str, str]:
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("SLURM_", "PMI", "OMPI_", "MPI_", "RANK"))
    }
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def free_port() -> str:
    from hzero.launch import free_port

    return str(free_port())


def _script(tmp_path: Path, code: str) -> str:
    path = tmp_path / "ranks.py"
    path.write_text(code)
    return str(path)


@pytest.fixture
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forked processes inherit our environment: none of a launcher's."""
    for name in set(os.environ) - set(environment()):
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("_no_launcher")
def test_before_and_after_process_groups_without_a_launcher(tmp_path: Path) -> None:
    step = {
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "MASTER_PORT": free_port(),
    }
    script, said = _script(tmp_path, ROUNDS), [tmp_path / f"rank{rank}" for rank in range(2)]
    processes = [
        fork(
            run_script,
            script,
            folder=tmp_path,
            env={**environment(**step), "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            out=out,
            err=out,
        )
        for rank, out in enumerate(said)
    ]
    for rank, (process, out) in enumerate(zip(processes, said)):
        join(process, 90)
        assert process.exitcode == 0, out.read_text()
        assert json.loads(out.read_text().splitlines()[-1]) == ["slurm", rank, ["a0 a1", "b0 b1", "c0 c1", "d0 d1"]]


@pytest.mark.usefixtures("_no_launcher")
def test_a_restart_of_torchrun_starts_anew(tmp_path: Path) -> None:
    """A rank dies in the first attempt; the store of torchrun's agent outlives it."""
    options = ["--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    out, err = tmp_path / "out", tmp_path / "err"
    arguments = (*options, _script(tmp_path, ROUNDS))
    process = fork(torchrun, *arguments, folder=tmp_path, env=environment(), out=out, err=err)
    join(process, 120)
    assert process.exitcode == 0, err.read_text()
    found = sorted(json.loads(line) for line in out.read_text().splitlines() if line.startswith("["))
    assert found == [["torchrun", rank, ["a0 a1", "b0 b1", "c0 c1"]] for rank in range(2)]


MUTE = """
import os, socket
from hzero.topology import rendezvous
from hzero.bootstrap import Bootstrap
from hzero.validation import ConfigError
rendezvous._HANDSHAKE_S = 0.0
with socket.create_server(("127.0.0.1", 0)) as server:
    try:
        rendezvous.open_exchange(Bootstrap(1, 2, 0, None, "127.0.0.1", server.getsockname()[1], "environment"), 1.0)
    except ConfigError as error:
        print(error, flush=True)
    os._exit(0)
"""


@pytest.mark.usefixtures("_no_launcher")
def test_what_listens_but_is_no_store_is_named(tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = fork(run_script, _script(tmp_path, MUTE), folder=tmp_path, env=environment(), out=out, err=out)
    join(process, 60)
    assert process.exitcode == 0
    assert "rank 1 has not reached rank 0 within 1 s at 127.0.0.1, port" in out.read_text()
    assert "what listens there does not answer as a store does" in out.read_text()


def under_mpi(code: str, ranks: int = 4, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [mpiexec(), "-n", str(ranks), sys.executable, "-c", code],
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


MPI_START = """
import json, os, sys, time
from hzero.bootstrap import bootstrap
from hzero.topology.rendezvous import open_exchange
from hzero.validation import ConfigError
start = bootstrap(visible=0)
exchange = open_exchange(start, 1.0 if len(sys.argv) > 1 else 30.0)
"""


def test_a_missing_rank_under_mpiexec() -> None:
    code = (
        MPI_START.replace("len(sys.argv) > 1", "True")
        + """
if start.rank == 1:
    time.sleep(100)
exchange.gather(b"x")
exchange.broadcast(None)
"""
    )
    begun = time.monotonic()
    done = under_mpi(code)
    assert time.monotonic() - begun < 30 and done.returncode != 0
    assert "topology: 1 of 4 ranks have not reported within 1 s: rank 1" in done.stderr
