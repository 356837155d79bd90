"""One rank of `tests.ranks.launch`: ``python -m tests.rank_main MODULE``."""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.ranks import HOP_TIMEOUT_S, collect


def main() -> None:
    """Runs the checks of one module on this rank; leaves at the first that fails."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    out = Path(os.environ["HZERO_CHECKS_OUT"])
    rank = int(os.environ["RANK"])
    name = "import"
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=HOP_TIMEOUT_S))
        module = importlib.import_module(sys.argv[1])
        for name in collect(sys.argv[1]):
            started = time.monotonic()
            getattr(module, name)()
            dist.barrier()
            if rank == 0:
                with open(out / "done", "a") as file:
                    file.write(name + "\n")
                print(f"{name}: {time.monotonic() - started:.1f} s", flush=True)
                if "HZERO_CHECKS_TIMES" in os.environ:
                    with open(os.environ["HZERO_CHECKS_TIMES"], "a") as file:
                        file.write(f"{sys.argv[1]}.{name}: {time.monotonic() - started:.1f} s\n")
    except BaseException:
        failure = {"rank": rank, "check": name, "time": time.time(), "traceback": traceback.format_exc()}
        partial = out / f"partial{rank}"
        partial.write_text(json.dumps(failure))
        partial.rename(out / f"failed{rank}.json")
        print(failure["traceback"], flush=True)
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
