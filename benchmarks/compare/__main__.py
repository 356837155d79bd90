"""``make bench``: takes the missing measurements of the chosen suites, then writes the report of all results."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import main as hydra_main
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from benchmarks.cluster.network import check_tools
from benchmarks.compare.machine import ROOT
from benchmarks.compare.measurement import Measurement
from benchmarks.compare.store import Store
from benchmarks.compare.suite import read
from benchmarks.compare.take import take_measurement
from benchmarks.compare.training import Training
from hzero.formatting import clock
from hzero.launcher import INTERRUPTED
from hzero.settings.conf import check_options, conf_dir, one_line
from hzero.validation import ConfigError


def main(overrides: list[str]) -> int:
    """Runs the application on Hydra's arguments.

    Returns:
        Exit status: 0, 1 where a measurement failed, 2 for input that cannot be used, 130 after Ctrl-C.
    """
    wanted: list[Measurement | Training] = []
    configs: list[tuple[DictConfig, list[str]]] = []

    def collect(config: DictConfig) -> None:
        # Measured once Hydra is done, so that a multirun has one list and one estimate.
        configs.append((config, list(HydraConfig.get().overrides.task)))

    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come to us instead of being printed over several lines
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup has SIGHUP ignored
            signal.signal(number, _leave)
    ours = [f"hydra.searchpath=[file://{conf_dir()}]", "hydra/hydra_logging=none", "hydra/job_logging=none"]
    # Hydra's parser takes overrides in one piece, options before or behind it.
    first = next((at for at, word in enumerate(overrides) if re.match(r"[+~]|[\w./@]+=", word)), len(overrides))
    sys.argv = ["make bench", *overrides[:first], *ours, *overrides[first:]]
    try:
        check_options(overrides, ("model", "data", "cluster", "suite", "catalog"), "--help")
        hydra_main(config_path=str(ROOT / "benchmarks" / "conf"), config_name="bench", version_base="1.3")(collect)()
        for config, given in configs:
            wanted += read(config, given)
        if not configs:  # --help, --cfg
            return 0
        results, again = _same(configs, "results", str), _same(configs, "again", bool)
        return take(list({item.id: item for item in wanted}.values()), Store(Path(results)), again=again)
    except (HydraException, OmegaConfBaseException) as error:
        shown_by, known = (
            'make bench ARGS="--cfg job"',
            ("results", "again", "schemes", "rounds", "warmup", "timeout_s"),
        )
        print(f"bench: error: {one_line(error, shown_by, known)}", file=sys.stderr)
        return 2
    except ConfigError as error:
        print(f"bench: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader closed the pipe, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except SystemExit as left:  # Hydra's --help
        return left.code if isinstance(left.code, int) else 0


def _same(configs: Sequence[tuple[DictConfig, list[str]]], key: str, kind: type) -> Any:
    """A key that is one for all jobs of a multirun."""
    values = [config.get(key) for config, _ in configs]
    if any(not isinstance(value, kind) or value == "" or value != values[0] for value in values):
        expected = "true or false" if kind is bool else "a folder"
        raise ConfigError(
            f"{key}: found {', '.join(map(repr, dict.fromkeys(values)))}, expected {expected}, one for all"
        )
    return values[0]


def _leave(number: int, frame: object) -> None:
    """SIGTERM and SIGHUP as Ctrl-C: the cluster is torn down, and ranks end."""
    raise KeyboardInterrupt


def take(wanted: Sequence[Measurement | Training], store: Store, *, again: bool) -> int:
    """Takes what is not in the store yet, or all of it again, and writes the report. Returns the exit status."""
    waiting = [item for item in wanted if again or not store.has(item.id, item.rows)]
    if any(isinstance(item, Measurement) for item in waiting):
        check_tools()
    guesses = [item.estimated_s() for item in waiting]
    there = f"; {store.path} has the other {len(wanted) - len(waiting)}" if len(waiting) < len(wanted) else ""
    print(f"{len(waiting)} measurements to take, about {clock(sum(guesses))}{there}", flush=True)
    failed = []
    factor, took, guessed = 1.0, 0.0, 0.0
    for index, item in enumerate(waiting):
        after = sum(guesses[index + 1 :]) * factor
        left = clock(guesses[index] * factor + after)
        print(f"[{index + 1}/{len(waiting)}] {item.title}; about {left} of all left", flush=True)
        began = time.monotonic()
        status = item.take(store, again=again) if isinstance(item, Training) else take_measurement(item, store, after)
        if status == INTERRUPTED:
            then = "again=true takes all of it once more" if again else "the same command goes on"
            print(f"interrupted; finished measurements are in {store.path}, and {then}", flush=True)
            return INTERRUPTED
        if status:
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
