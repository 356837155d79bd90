"""What hzero costs a process that does not use it: the entry point that torch calls, and the watch on DeepSpeed.

Every sample is a fresh process. CPU time, since only the process' own work is asked for. Prints a table in Markdown.

    python benchmarks/autoload.py [--samples 15]
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

CONFIG = {"train_batch_size": 1, "zero_optimization": {"stage": 3}}
#: Configurations read for one figure.
READ = 20
ROWS = {
    "entry": "the entry point, at the end of `import torch`: import of hzero and registration",
    "of torch": "`import torch` itself, without it",
    "hook": "the hook, while `import deepspeed` runs: finding the two watched modules, watching one",
    "of deepspeed": "`import deepspeed` itself, after torch",
    "read": "a configuration without a block, read under the watch: in excess of DeepSpeed's own time",
    "of read": "DeepSpeed's own time for it",
}


def _ms(call: Callable[[], Any]) -> float:
    started = time.process_time()
    call()
    return (time.process_time() - started) * 1e3


def sample() -> dict[str, float]:
    """Milliseconds of this process, by the keys of `ROWS`."""

    def import_torch() -> None:
        import torch  # noqa: F401

    def import_deepspeed() -> None:
        import deepspeed

        deepspeed.utils.logger.setLevel("ERROR")

    def entry() -> None:
        from hzero.autoload import autoload

        autoload()

    found = {"of torch": _ms(import_torch), "entry": _ms(entry)}

    from hzero import autoload

    spent: list[float] = []

    def timed(stock: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            started = time.process_time()
            try:
                return stock(*args)
            finally:
                spent.append((time.process_time() - started) * 1e3)

        return call

    finder = next(finder for finder in sys.meta_path if isinstance(finder, autoload._Finder))
    # Finding is timed whole, though another finder would have found those two modules as well.
    finder.find_spec = timed(finder.find_spec)  # type: ignore[method-assign]
    for name, (owner, watch) in autoload._WATCHED.items():
        autoload._WATCHED[name] = owner, timed(watch)
    found["of deepspeed"] = _ms(import_deepspeed)
    found["hook"] = sum(spent)

    from deepspeed.runtime.config import DeepSpeedConfig

    under_watch = DeepSpeedConfig._initialize_params.__code__

    def read() -> None:
        for _ in range(READ):
            DeepSpeedConfig(dict(CONFIG))

    read()
    watched = _ms(read)
    DeepSpeedConfig._initialize_params.__code__ = autoload._stock[0].__code__  # type: ignore[attr-defined]
    found["of read"] = _ms(read) / READ
    DeepSpeedConfig._initialize_params.__code__ = under_watch
    found["read"] = watched / READ - found["of read"]
    return found


def _in_new_process(env: dict[str, str]) -> dict[str, float]:
    command = [sys.executable, __file__, "--sample"]
    done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Takes the samples and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=15, help="fresh processes (default %(default)s)")
    parser.add_argument("--sample", action="store_true", help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.sample:
        print(json.dumps(sample()))
        return
    env = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as compiled:
        # As installed: with compiled files, which the first process writes.
        env |= {"PYTHONPYCACHEPREFIX": compiled, "PYTHONDONTWRITEBYTECODE": ""}
        samples = [_in_new_process(env) for _ in range(parsed.samples + 1)][1:]
    names = ("hzero", "torch", "deepspeed")
    print(f"# Import cost of hzero, {datetime.date.today()}\n\nWritten by `python benchmarks/autoload.py`. ", end="")
    print(f"{platform.machine()}, Python {platform.python_version()}, " + ", ".join(f"{n} {version(n)}" for n in names))
    print(f"\n| CPU time, {parsed.samples} processes | median, ms | least, ms |\n|---|---|---|")
    for key, what in ROWS.items():
        taken = [one[key] for one in samples]
        print(f"| {what} | {statistics.median(taken):.2f} | {min(taken):.2f} |")


if __name__ == "__main__":
    main()
