"""``hzero bench links``: measures as a rank of srun, torchrun or mpiexec; otherwise starts the ranks on this machine.

A rank that the command has started itself is ``python -m hzero.bench.links ARGUMENTS..``.
"""

from __future__ import annotations

import datetime
import os
import platform
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from rich.console import Console

from hzero import __version__
from hzero.bench.settings import LinksSettings, check_output, parse
from hzero.bootstrap import Bootstrap, bootstrap
from hzero.config import Topology
from hzero.launcher import INTERRUPTED, REFUSED, Ranks, end_with_parent, local_ranks, on_rank_0, run_rank
from hzero.plan.links_file import SCHEMA, LinksFile, tier_rate, write_links
from hzero.topology import Grid, declared_grid, resolve_grid
from hzero.topology.local import machine_of
from hzero.validation import ConfigError, PeerError

if TYPE_CHECKING:
    import torch

#: How long the ranks may take to import torch and meet, in seconds; hops wait for --timeout.
START_TIMEOUT_S = 300.0
#: Maximum number of ranks that the command starts on one machine.
MAX_RANKS = 256
#: Environment variable of ranks that the command has started.
_STARTED_HERE = "HZERO_BENCH_RANK"


def run_links(arguments: Sequence[str]) -> int:
    """Runs the command on its arguments.

    Returns:
        Exit status: 0, 1 if a rank failed, 2 for input that the ranks refused, 130 after Ctrl-C.

    Raises:
        ConfigError: Input that cannot be used, or nothing to measure.
    """
    settings = parse(arguments)
    if bootstrap(os.environ, visible=0).world_size > 1:
        _as_launched(settings)
    check_output(settings)
    if settings.transport == "mpi":
        raise ConfigError(
            "--transport: found 'mpi', whose ranks mpiexec or srun starts, as in mpiexec -n 8 hzero bench links --topology 2x2x2 "
            "--transport mpi; possible here: torch"
        )
    ranks = ranks_to_start(settings.topology)
    if ranks == 1:
        raise ConfigError("--topology: a single rank has no links to measure")
    if ranks > MAX_RANKS:
        raise ConfigError(f"--topology: {ranks:,} ranks cannot be started on one machine, at most {MAX_RANKS}")
    logs = Path(tempfile.mkdtemp(prefix="hzero-bench-"))
    command = [sys.executable, "-m", "hzero.bench.links", *arguments]
    status = Ranks(
        command,
        local_ranks(ranks, more={_STARTED_HERE: "1"}),
        logs,
        imports=("torch.distributed", "hzero.bench.probe"),
        stopping="nothing is written",
    ).run()
    if status == INTERRUPTED:
        Console().show_cursor(True)  # the bar of rank 0 had hidden it
    if status in (0, REFUSED, INTERRUPTED):
        shutil.rmtree(logs, ignore_errors=True)
    return status


def ranks_to_start(topology: Topology) -> int:
    """The number of ranks that a topology has on this machine.

    Args:
        topology: As in `LinksSettings`.

    Raises:
        ConfigError: The topology does not say.
    """
    declared = declared_grid(topology, "--topology")
    if declared is not None:
        return (declared.nodes or 1) * declared.gpus_per_node * declared.gcds_per_gpu
    ranks = len(machine_of(str(topology)).devices)
    if not ranks:
        raise ConfigError(
            "--topology: this machine has no GPUs that would say how many ranks to start; give nodes x GPUs x GCDs, as in "
            "--topology 2x2x2, or start the ranks with srun, torchrun or mpiexec"
        )
    return ranks


def _as_launched(settings: LinksSettings) -> NoReturn:
    """Measures as one rank of srun, torchrun or mpiexec, and ends the process: threads can outlive their process group."""
    end_with_parent()
    status = 0
    try:
        measure_as_rank(settings)
    except (ConfigError, PeerError) as error:
        if not getattr(error, "elsewhere", False):
            print(f"hzero: error: {error}", file=sys.stderr)
        status = REFUSED if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        status = INTERRUPTED
    sys.stdout.flush()
    sys.stderr.flush()
    if status == 0 and "mpi4py.MPI" in sys.modules:
        sys.modules["mpi4py.MPI"].Finalize()
    os._exit(status)


def measure_as_rank(settings: LinksSettings) -> None:
    """Measures together with all other ranks; rank 0 shows and writes.

    Raises:
        ConfigError: Input that cannot be used.
        HopError: A collective failed or timed out.
    """
    warnings.simplefilter("ignore")  # torch's, about its own calls
    import torch
    import torch.distributed as dist

    use_gpu = settings.device == "auto" and torch.cuda.is_available()
    if use_gpu and _STARTED_HERE in os.environ and torch.cuda.device_count() < int(os.environ["WORLD_SIZE"]):
        raise ConfigError(
            f"--topology: {os.environ['WORLD_SIZE']} ranks were to be started, but torch sees {torch.cuda.device_count()} "
            "GPUs; --device cpu measures between processors"
        )
    start = bootstrap(os.environ, visible=torch.cuda.device_count() if use_gpu else 0)
    # Ctrl-C and SIGTERM end a rank at once, also while it waits inside torch, where Python's handlers do not run.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.update(start.environment())
    device = torch.device("cuda", start.local_rank) if use_gpu else torch.device("cpu")
    if use_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    patience = datetime.timedelta(seconds=max(settings.timeout, START_TIMEOUT_S))
    dist.init_process_group("nccl" if use_gpu else "gloo", timeout=patience)
    on_rank_0(lambda: check_output(settings))
    grid = resolve_grid(settings.topology, start.world_size, "--topology")
    _check_memory(settings, start, device)
    _measure(settings, start, grid, device)


def _check_memory(settings: LinksSettings, start: Bootstrap, device: torch.device) -> None:
    """Refuses sizes for which any rank has too little memory, on all ranks alike. Collective."""
    import torch
    import torch.distributed as dist

    needed = 4 * settings.sizes()[-1]  # what is sent and received, encoded and decoded
    if device.type == "cpu":
        local = start.local_size or int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // local
    else:
        there = torch.cuda.mem_get_info(device)[0]
    smallest = torch.tensor([there], device=device)
    dist.all_reduce(smallest, dist.ReduceOp.MIN)
    if needed > int(smallest):
        message = (
            f"--max-bytes: {settings.sizes()[-1]:,} needs {needed:,} bytes of memory per rank, and a rank has "
            f"{int(smallest):,}"
        )
        raise ConfigError(message) if start.rank == 0 else ConfigError.of_rank_0(message)


def _measure(settings: LinksSettings, start: Bootstrap, grid: Grid, device: torch.device) -> None:
    import torch
    import torch.distributed as dist

    from hzero.bench.probe import Probe, timings
    from hzero.bench.show import Table, summary
    from hzero.codecs.backends import choice

    dtypes = {"auto": torch.float32 if device.type == "cpu" else torch.bfloat16, "fp32": torch.float32}
    plan = timings(grid, settings, dtypes.get(settings.dtype, torch.bfloat16))
    table = Table(plan, start.world_size, enabled=start.rank == 0)
    backend = "mpi" if settings.transport == "mpi" else dist.get_backend()
    name = "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)
    codecs = choice(device.type).name
    table.say(
        f"# hzero bench links: {start.world_size:,} ranks, {grid}; {backend} on {name}, codecs by {codecs}; "
        f"{settings.warmup} untimed and {settings.iterations} timed iterations"
    )
    rows = table.follow(Probe(grid, settings, device).rows(plan))
    if start.rank == 0:
        from hzero.bench.plot import draw

        tiers = grid.crossed
        links = LinksFile(
            schema=SCHEMA,
            date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            machine={"host": platform.node(), "processor": platform.processor() or platform.machine()},
            versions={"python": platform.python_version(), "hzero": __version__, "torch": torch.__version__},
            backend=backend,
            device=name,
            codecs=codecs,
            launcher="hzero" if _STARTED_HERE in os.environ else start.launcher,
            grid={tier: grid.size(tier) for tier in grid.tiers},
            settings=settings.model_dump(mode="json", exclude={"topology", "device", "out", "overwrite"}),
            tiers={tier: tier_rate([row for row in rows if row.tier == tier]) for tier in tiers},
            rows=rows,
        )
        write_links(settings.out, links)
        draw(links, settings.plot)
        table.say(summary(links))
        table.say(
            f"written: {settings.out} and {settings.plot}; `hzero plan ... --links {settings.out}` computes with it"
        )
    dist.barrier()  # mpiexec ends all ranks with the first that leaves


def main() -> None:
    """Entry point of a rank that the command has started itself."""
    arguments = sys.argv[1:]
    run_rank(lambda: measure_as_rank(parse(arguments)))


if __name__ == "__main__":
    main()
