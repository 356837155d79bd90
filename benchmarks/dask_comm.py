"""Dask over TCP and MPI, in turns on the same ranks.

Prints for each program the median of three rounds over TCP, over MPI, and their ratio: a message of 1 byte and of 64 MB, which
is half of a round trip, and, on two workers, the programs of "Efficient MPI-based Communication for GPU-Accelerated Dask
Applications" (arXiv 2101.08878): an array plus its transpose, and a merge. On CPUs.

    mpiexec -n 4 python -m benchmarks.dask_comm
"""

import asyncio
import logging
import time
from collections import defaultdict

import dask.array as da
import dask.dataframe as dd
import distributed
import numpy as np
import pandas as pd
from dask_mpi import initialize
from distributed.comm import Comm, connect, listen
from distributed.protocol import to_serialize

from hzero.tools.data.mpi import WORLD

# Dask logs connections that the end of a cluster closes, some as errors with a traceback, over TCP too.
logging.getLogger("distributed").setLevel(logging.CRITICAL)
SECONDS: dict[tuple[str, str], list[float]] = defaultdict(list)


async def echo(comm: Comm) -> None:
    """The other end of round trips."""
    while (message := await comm.read()) != "end":
        await comm.write(message)
    await comm.close()


async def round_trips(protocol: str) -> None:
    """Measures messages of 1 byte and of 64 MB from rank 1 to rank 0 and back; a message takes half of that."""
    listener = await listen(f"{protocol}://", echo, deserialize=False) if WORLD.rank == 0 else None
    address = WORLD.bcast(listener and listener.contact_address)
    if WORLD.rank == 1:
        comm = await connect(address, deserialize=False)
        for name, size, count in (("1 byte", 1, 2000), ("64 MB", 64_000_000, 20)):
            message, began = {"data": to_serialize(np.ones(size, np.uint8))}, time.perf_counter()
            for _ in range(count):
                await comm.write(message)
                await comm.read()
            SECONDS[name, protocol].append((time.perf_counter() - began) / count / 2)
        await comm.write("end")
        await comm.close()
    ended = WORLD.Ibarrier()
    while not ended.Test():
        await asyncio.sleep(0.01)


def programs(protocol: str) -> None:
    """Measures the two programs."""
    if not initialize(protocol=protocol, dashboard=False, dashboard_address=":0", exit=False):
        return
    with distributed.Client() as client:
        client.wait_for_workers(2)
        x = da.random.default_rng(0).random((6000, 6000), chunks=(1000, 1000)).persist()
        keys = np.random.default_rng(0).permutation(1_000_000)
        frames = (pd.DataFrame({"key": keys, name: keys}) for name in "ab")
        left, right = (dd.from_pandas(frame, npartitions=4).persist() for frame in frames)
        distributed.wait([x, left, right])
        for name, work in (("transpose", x + x.T), ("merge", left.merge(right, on="key", shuffle_method="tasks"))):
            began = time.perf_counter()
            distributed.wait(work.persist())
            SECONDS[name, protocol].append(time.perf_counter() - began)
        client.shutdown()


for _ in range(3):
    for protocol in ("tcp", "mpi"):
        asyncio.run(round_trips(protocol))
        programs(protocol)
for name in ("1 byte", "64 MB", "transpose", "merge") if WORLD.rank == 1 else ():
    tcp, mpi = (1000 * np.median(SECONDS[name, protocol]) for protocol in ("tcp", "mpi"))
    print(f"| {name} | {tcp:.3f} ms | {mpi:.3f} ms | {tcp / mpi:.2f} |")
