"""Ranks of test_mpi.py: rank 0 echoes what ranks 1 to 3 send over ``mpi://``; then all of them are a Dask cluster.

Prints ``ok NAME`` for every check that passes. A single process is both ends of its connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import itertools
import pkgutil
import re
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from distributed.comm import Comm, CommClosedError, connect, listen
from distributed.comm.registry import backends
from distributed.protocol import to_serialize
from distributed.utils import wait_for
from mpi4py.run import set_abort_status

from hzero.tools.data import mpi

WORLD = mpi.WORLD


async def echo(comm: Comm) -> None:
    """Serves a connection.

    ``wait`` is never answered, ``close`` by closing, ``ring`` by half a message, the rest with itself.
    """
    with contextlib.suppress(CommClosedError):
        while True:
            message = await comm.read()
            if message == "close":
                break
            if message == "ring":  # and close before the message is sent, like a process that dies
                await comm.stream.write((100).to_bytes(8, "little"))
                late = bytes(100), *comm.remote_info[mpi.JOB]  # so that MPI need not wait for it until the end
                asyncio.get_running_loop().call_later(1.5 * mpi.LINGER_S, WORLD.Send, *late)
                break
            if message != "wait":
                await comm.write({"back": [to_serialize(one) for one in message["there"]]})
    await comm.close()


@contextlib.asynccontextmanager
async def connected(address: str) -> AsyncIterator[Comm]:
    comm = await connect(address, timeout=20)
    yield comm
    await comm.close()


async def answered(comm: Comm, *arrays: Any) -> list[Any]:
    await comm.write({"there": [to_serialize(array) for array in arrays]})
    return list((await wait_for(comm.read(), 60))["back"])


async def check_sizes(address: str) -> None:
    """No byte, one, odd numbers, around the size that is copied; several frames of all kinds in one message."""
    arrays = [np.random.default_rng(n).integers(0, 256, n, dtype=np.uint8) for n in (0, 1, 17, 8191, 8192, 8193, 65537)]
    arrays += [np.arange(17 * 257, dtype=np.float32).reshape(17, 257), np.arange(3_000_001, dtype=np.int64)]
    async with connected(address) as comm:
        for array in arrays:
            (back,) = await answered(comm, array)
            assert back.dtype == array.dtype and np.array_equal(back, array)
            back += 1  # a task may write into what it gets, as over TCP
        back = await answered(comm, *arrays, *arrays[::-1])
        assert all(map(np.array_equal, back, arrays + arrays[::-1]))
        many = [np.full(900, n) for n in range(500)]  # a head of some megabytes, which no MPI sends eagerly
        assert all(map(np.array_equal, await answered(comm, *many), many))


async def check_many_connections(address: str) -> None:
    """One after the other, and at once."""
    for n in range(50):
        async with connected(address) as comm:
            assert (await answered(comm, np.full(9000, n)))[0][-1] == n
    async with contextlib.AsyncExitStack() as stack:
        comms = [await stack.enter_async_context(connected(address)) for _ in range(50)]
        for n, comm in enumerate(comms):
            assert (await answered(comm, np.full(9000, n)))[0][-1] == n


async def check_concurrent(address: str) -> None:
    """Connections of several ranks at once: nothing gets into another's messages."""

    async def talk(which: int) -> None:
        random = np.random.default_rng(100 * WORLD.rank + which)
        async with connected(address) as comm:
            for _ in range(20):
                arrays = [random.integers(0, 256, random.integers(0, 60000), dtype=np.uint8) for _ in range(3)]
                assert all(map(np.array_equal, await answered(comm, *arrays), arrays))

    await asyncio.gather(*map(talk, range(3)))


async def check_closing(address: str) -> None:
    """While the other end sends, or reads; afterwards the tags serve new connections."""
    for _ in range(3):
        async with connected(address) as comm:
            await comm.write(
                {"there": [to_serialize(np.ones(20_000_000, np.uint8))] * 2}
            )  # the answer comes into a closed end
            await asyncio.sleep(0.005)
        async with connected(address) as comm:
            await comm.write("close")
            try:
                await wait_for(comm.read(), 20)
                raise AssertionError("read from a closed connection")
            except CommClosedError:
                assert comm.closed()
            try:
                await comm.write("more")
                raise AssertionError("wrote to a closed connection")
            except CommClosedError:
                pass
        async with connected(address) as comm:
            await comm.write("wait")
            try:
                await wait_for(comm.read(), 0.05)
                raise AssertionError("nothing was sent")
            except asyncio.TimeoutError:
                assert comm.closed()  # as with Dask's other comms
        async with connected(address) as comm:
            assert (await answered(comm, np.full(9000, 3)))[0][-1] == 3


async def check_half_a_message(address: str) -> None:
    """A peer that dies while it sends ends the read."""
    async with connected(address) as comm:
        await comm.write("ring")
        try:
            await wait_for(comm.read(), 20)
            raise AssertionError("read what was not sent")
        except CommClosedError:
            assert comm.closed()
    await asyncio.sleep(mpi.LINGER_S)


async def check_strangers(address: str) -> None:
    """A client without the job's key learns nothing useful, and its messages are not read."""
    host, port = address.removeprefix("mpi://").rsplit(":", 1)
    for proof in (None, bytes(32)):
        reader, writer = await asyncio.open_connection(host, port)
        theirs = await reader.readexactly(32)
        writer.write(theirs)  # to have the listener prove to itself
        mirrored = await wait_for(reader.readexactly(32), 20)
        writer.write(mirrored if proof is None else proof)
        assert await wait_for(reader.read(), 20) == b"", "the handshake has begun"
        writer.close()


async def together() -> None:
    """Waits for all ranks."""
    ranks = WORLD.Ibarrier()
    while not ranks.Test():
        await asyncio.sleep(1e-3)


async def checks() -> None:
    # As an installation does it, where Dask reads the entry point.
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    entry = re.search(r'^\[project.entry-points."distributed.comm.backends"\]\nmpi = "(.+)"', text, re.MULTILINE)
    backends["mpi"] = pkgutil.resolve_name(entry[1])()
    mpi.LONGEST = 1_000_003  # frames are cut at both ends
    mpi.TAGS = itertools.cycle(range(32_000, 32_060))  # which are used again
    listener = await listen("mpi://", echo)
    address = WORLD.bcast(listener.contact_address)
    for name, check in list(globals().items()):
        if not name.startswith("check_"):
            continue
        await together()
        if WORLD.size == 1 or WORLD.rank == 1 or (WORLD.rank and name == "check_concurrent"):
            began = time.monotonic()
            await check(address)
            print(f"ok {name} {time.monotonic() - began:.2f} s", flush=True)
    await together()
    ends = time.monotonic() + 10
    while mpi._comms or mpi._under_way:
        assert time.monotonic() < ends, f"rank {WORLD.rank} keeps connections: {dict(mpi._comms)} {mpi._under_way}"
        await asyncio.sleep(1e-3)
    listener.stop()


async def opened() -> Comm:
    """A connection of this process to itself, whose other end is closed."""
    async with listen("mpi://", lambda comm: comm.close()) as listener:
        comm = await connect(listener.contact_address, timeout=20)
        await asyncio.sleep(0.1)
    return comm


#: Addresses at which this process listened before the cluster started, such as MPI's.
BEFORE: set[tuple[str, int]] = set()


def listening() -> set[tuple[str, int]]:
    """The addresses at which this process listens for the cluster."""
    every = psutil.Process().net_connections("tcp")
    return {one.laddr for one in every if one.status == psutil.CONN_LISTEN} - BEFORE


def asks_for_proof(host: str, port: int) -> bool:
    """Whether a listener speaks first, as a listener of ``mpi://`` does, instead of waiting for a request."""
    with socket.create_connection((host, port), 5) as stream:
        stream.settimeout(2)
        try:
            return len(stream.recv(32)) == 32
        except TimeoutError:
            return False


def cluster_checks() -> None:
    from hzero.tools.data.cluster import cluster

    BEFORE.update(listening())
    with cluster() as client:
        import dask.array as da
        import dask.dataframe as dd
        import pandas as pd

        whole = np.random.default_rng(0).random((900, 900))
        x = da.from_array(whole, chunks=(200, 250))
        assert np.array_equal((x + x.T).compute(), whole + whole.T)
        print("ok transposed", flush=True)
        left = pd.DataFrame({"key": np.arange(4001) % 97, "a": np.arange(4001)})
        right = pd.DataFrame({"key": np.arange(97), "b": np.arange(97) ** 2})
        merged = dd.from_pandas(left, npartitions=5).merge(dd.from_pandas(right, npartitions=3), on="key").compute()
        wanted = left.merge(right, on="key")
        assert merged.sort_values("a").reset_index(drop=True).equals(wanted.sort_values("a").reset_index(drop=True))
        print("ok merged", flush=True)
        for addresses in (*client.run(listening).values(), client.run_on_scheduler(listening)):
            others = [(host, port) for host, port in addresses if host != "127.0.0.1"]
            assert others and all(asks_for_proof(host, port) for host, port in others), addresses
        print("ok ports", flush=True)
        workers = client.scheduler_info()["workers"]
        assert len(workers) == WORLD.size - 2 and all(address.startswith("mpi://") for address in workers)
    print("ok ended", flush=True)


def main() -> None:
    """All checks, in this order, on all ranks."""
    faulthandler.dump_traceback_later(110)
    try:
        asyncio.run(checks())
        comm = asyncio.run(opened())
        comm.abort()  # after the end of its loop
        print("ok aborted", flush=True)
        if WORLD.size > 1:
            cluster_checks()
    except Exception as error:
        set_abort_status(error)  # the others wait
        raise
