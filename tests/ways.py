"""Prints which functions of hzero a gather, a reduction of gradients or the block passes, as docs/architecture.md counts them.

python -m tests.ways gather [PRESET]      on simulated ranks, of the second run
python -m tests.ways reduce [PRESET]      the same, of the gradients of one micro-batch
python -m tests.ways block                one deepspeed.initialize
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

#: A function of hzero: its module and its name.
Function = tuple[str, str]


@contextmanager
def entered(counts: Callable[[FrameType], bool] = lambda frame: True) -> Iterator[dict[Function, None]]:
    """Functions of hzero that threads begun inside enter, and this one, in the order of their first entry.

    Comprehensions, lambdas and bodies of modules are left out.

    Args:
        counts: Whether a function counts, by the frame of its call.
    """
    found: dict[Function, None] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        module, code = frame.f_globals.get("__name__", ""), frame.f_code
        if event == "call" and module.startswith("hzero.") and code.co_name[0] != "<" and counts(frame):
            found.setdefault((module, code.co_qualname), None)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def of_run(kind: str, preset: str) -> list[Function]:
    """Those of the second gather, or of the reduction of the second window's gradients, on all ranks.

    Lanes are threads that begin with the first.
    """
    from tests.comm.simulated import on_all
    from tests.engine.test_engine import WORLD, Rank

    second = threading.Event()
    groups: dict[Any, Any] = {}
    ranks = [Rank(rank, {"preset": preset}, groups) for rank in range(WORLD)]
    run = Rank.read if kind == "gather" else Rank.reduce
    with entered(lambda _: second.is_set()) as found:
        on_all(ranks, run)
        second.set()
        on_all(ranks, run)
        second.clear()
    return list(found)


def of_block() -> list[Function]:
    """Those that get the block, as it is written or parsed, or what DeepSpeed keeps it in, until the engine is there."""
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "DS_ACCELERATOR": "cpu"}
    from hzero.tools.launch import free_port

    os.environ.update(variables, MASTER_PORT=str(free_port()))
    import deepspeed
    import torch

    from hzero.config import HZeroConfig

    block = {"preset": "topo", "topology": {"nodes": 1, "packages_per_node": 1}}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3, "hzero": block},
    }

    def carries(value: Any) -> bool:
        if isinstance(value, Mapping):
            return (
                value == block
                or block in value.values()
                or value.get("zero_optimization") == {"stage": 3, "hzero": block}
            )
        held = getattr(value, "_config", value)  # an engine of DeepSpeed holds its configuration
        return isinstance(value, HZeroConfig) or isinstance(getattr(held, "hzero_block", None), HZeroConfig)

    def counts(frame: FrameType) -> bool:
        names = frame.f_code.co_varnames[: frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount + 2]
        given = [frame.f_locals[name] for name in names if name in frame.f_locals]
        return any(carries(one) for value in given for one in (value if isinstance(value, tuple) else (value,)))

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled
    deepspeed.init_distributed("gloo")
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    with entered(counts) as found:
        engine = deepspeed.initialize(model=model, config=config, optimizer=torch.optim.AdamW(model.parameters()))[0]
    engine.destroy()
    # What pydantic calls, and what an engine does once it is built.
    built = next(at for at, (_, name) in enumerate(found) if name == "Engine.__init__")
    return [one for one in list(found)[: built + 1] if not one[1].startswith("Frozen.")]


if __name__ == "__main__":
    kind, *preset = sys.argv[1:]
    functions = of_block() if kind == "block" else of_run(kind, *preset or ["topo"])
    for module, name in functions:
        print(f"{module}:{name}")
    print(f"{len(functions)} functions in {len({module for module, _ in functions})} files")
    sys.stdout.flush()
    os._exit(0)  # threads of lanes, and of gloo, are not waited for
