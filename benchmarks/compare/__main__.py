"""``make bench``: takes the missing measurements of the chosen suites, then writes the report of all results."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from datetime import timedelta

from benchmarks.cluster.network import check_tools
from benchmarks.compare.measurement import Measurement
from benchmarks.compare.store import Store
from benchmarks.compare.suite import CONF, read
from benchmarks.compare.take import take_measurement
from hzero.errors import ConfigError
from hzero.tools.launch import INTERRUPTED

_HELP = """make bench: step time, bytes by tier, memory and loss of hzero and of other schemes on an emulated cluster. Needs root.

  make bench                                               everything; continues after an interruption
  make bench ARGS="suite=main"                             one suite
  make bench ARGS="suite=main,sweep rounds=3"              several, with fewer rounds
  make bench ARGS="suite=one train.accumulation=16 schemes=[zero3-deepspeed,topo]"    a measurement of your own

Suites: {suites}. All keys, as KEY=VALUE:

{keys}
The report goes to runs/bench/report; `python -m benchmarks.report` writes it elsewhere."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command.

    Returns:
        Exit status: 0, 1 where a measurement failed, 2 for input that cannot be used, 130 after Ctrl-C.
    """
    if {"-h", "--help"} & set(arguments):
        suites = ", ".join(sorted(path.stem for path in (CONF / "suite").glob("*.yaml")))
        print(_HELP.format(suites=suites, keys=(CONF / "bench.yaml").read_text()))
        return 0
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup has SIGHUP ignored
            signal.signal(number, _leave)
    try:
        wanted = read(arguments)
        return take(wanted.measurements, Store(wanted.results), again=wanted.again)
    except ConfigError as error:
        print(f"bench: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command continues with the measurements that are missing", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader closed the pipe, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _leave(number: int, frame: object) -> None:
    """Treats SIGTERM and SIGHUP as Ctrl-C: the cluster is torn down, and ranks end."""
    raise KeyboardInterrupt


def take(wanted: Sequence[Measurement], store: Store, *, again: bool) -> int:
    """Takes the measurements that the store lacks, or all of them again, and writes the report. Returns the exit status."""
    waiting = [item for item in wanted if again or not store.has(item.id, item.rows)]
    if waiting:
        check_tools()
    guesses = [item.estimated_s() for item in waiting]
    there = f"; {store.path} has the other {len(wanted) - len(waiting)}" if len(waiting) < len(wanted) else ""
    print(f"{len(waiting)} measurements to take, about {timedelta(seconds=round(sum(guesses)))}{there}", flush=True)
    failed = []
    factor, took, guessed = 1.0, 0.0, 0.0
    for index, item in enumerate(waiting):
        after = sum(guesses[index + 1 :]) * factor
        left = timedelta(seconds=round(guesses[index] * factor + after))
        print(f"[{index + 1}/{len(waiting)}] {item.title}; about {left} of all left", flush=True)
        began = time.monotonic()
        if status := take_measurement(item, store, after):
            if status == INTERRUPTED:  # a signal came while ranks ran, which has ended them
                raise KeyboardInterrupt
            failed.append(item.title)
            continue
        took, guessed = took + time.monotonic() - began, guessed + guesses[index]
        factor = took / guessed
    for title in failed:
        print(f"bench: error: {title} failed; its messages are above", file=sys.stderr)
    print(f"results: {store.path}", flush=True)
    if not store.empty:
        from benchmarks.report import write_report
        from benchmarks.report.__main__ import show

        show(*write_report([store.folder], store.folder / "report", overwrite=True))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
