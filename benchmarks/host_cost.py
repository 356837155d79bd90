"""What the host does for a hop: time of the stage's own code, and the kernels that it launches for a layer.

One process is a rank of eight (two nodes of two packages of two devices) whose collectives are empty: torch's
fake process group ends each at once and moves nothing. Layers are small, so the cost of preparing, starting
and ending hops remains. A launch is an operator that reads or writes elements; on a device it is one kernel or one
copy. A call of a codec is one launch.

    python benchmarks/host_cost.py [--presets lossless,topo]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("LOCAL_RANK", "0")
import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import set_z3_leaf_modules
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import hzero
from hzero.codecs import backends
from hzero.deepspeed import stage, stage_state
from hzero.engine import gradients

WORLD, HIDDEN, TOKENS = 8, 64, 16
ACCUMULATION = 2
#: Where DeepSpeed calls the stage.
ENTRIES: tuple[tuple[type, str], ...] = (
    (stage_state.StageState, "gather"),
    (stage_state.Managed, "partition"),
    (stage_state.GatherHandle, "wait"),
    (gradients.Gradients, "accumulate"),
    (gradients.Gradients, "settle"),
    (gradients.Gradients, "finish"),
    (stage.HZeroStage3, "partition_grads"),
)
#: Operators that allocate, or look at memory in another way.
FREE = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "detach", "record_stream", "set_"}


class Inside:
    """Seconds in the stage's code, entered by `ENTRIES`."""

    def __init__(self) -> None:
        self.seconds, self.depth = 0.0, 0

    def install(self) -> None:
        """Times the entries that this version of the stage has."""
        for owner, name in ENTRIES:
            if name in vars(owner):
                setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, function: Any) -> Any:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.depth += 1
            started = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.depth -= 1
                self.seconds += 0.0 if self.depth else time.thread_time() - started

        return timed


class Launches(TorchDispatchMode):
    """Counts the operators that the stage starts."""

    def __init__(self, inside: Inside) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._inside = inside

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[-1]
        writes = any(argument.alias_info and argument.alias_info.is_write for argument in func._schema.arguments)
        aliases = any(result.alias_info for result in func._schema.returns)
        if self._inside.depth and name not in FREE and (writes or not aliases):
            self.counts[func._schema.name] += 1
        return func(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Inside, launches are counted: operators, and codec kernels, which pass by the dispatcher."""
        start = backends.Launch.__call__

        def started(launch: backends.Launch, *args: Any, **how: Any) -> None:
            self.counts["codec kernel"] += self._inside.depth > 0
            start(launch, *args, **how)

        with mock.patch.object(backends.Launch, "__call__", started), self:
            yield


def measure(preset: str, arguments: argparse.Namespace, inside: Inside) -> dict[str, float]:
    """Hops, seconds of the stage and launches of one step; also seconds of the whole step."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM
    from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXLayer

    shape = {"vocab_size": 256, "hidden_size": HIDDEN, "num_hidden_layers": arguments.layers, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = GPTNeoXForCausalLM(GPTNeoXConfig(**shape, intermediate_size=4 * HIDDEN, max_position_embeddings=TOKENS))
    set_z3_leaf_modules(model, [GPTNeoXLayer])
    layer = sum(p.numel() for p in model.gpt_neox.layers[0].parameters())
    tokens = torch.zeros(1, TOKENS, dtype=torch.int64)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": ACCUMULATION,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": layer,
            "reduce_bucket_size": layer,
            "stage3_max_reuse_distance": 0,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "steps_per_print": 10**9,
    }
    if preset == "stock":
        engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    else:
        machine = {"nodes": 2, "packages_per_node": 2, "devices_per_package": 2}
        config["hzero"] = {"preset": preset, "topology": machine, "guard": {"every": 0, "discarded_steps": 0}}
        engine = hzero.initialize(model=model, model_parameters=model.parameters(), config=config)[0]

    def step() -> None:
        for _ in range(ACCUMULATION):
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()

    for _ in range(4):  # DeepSpeed records its trace
        step()
    state = hzero.state(engine)
    if state is not None:
        state.wire_log.reset()
    own, whole = [], []
    for _ in range(arguments.steps):
        before, started = inside.seconds, time.process_time()
        step()
        own.append(inside.seconds - before)
        whole.append(time.process_time() - started)
    hops = 0.0 if state is None else sum(entry.hops for entry in state.wire_log.entries()) / arguments.steps
    launches = Launches(inside)
    with launches.counting():
        step()
    engine.destroy()
    return {
        "hops": hops,
        "own": statistics.median(own),
        "whole": statistics.median(whole),
        "launches": sum(launches.counts.values()) / (arguments.layers * ACCUMULATION),
    }


def measured(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """`measure` of stock ZeRO-3 and of every preset, by the hzero that this process imports."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # nothing arrives, so weights are whatever memory holds
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    deepspeed.utils.logger.setLevel("ERROR")
    inside = Inside()
    inside.install()
    return {name: measure(name, arguments, inside) for name in ("stock", *arguments.presets.split(","))}


def main() -> None:
    """Measures, and prints a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", default="lossless,topo", help="presets to measure (default lossless,topo)")
    parser.add_argument("--layers", type=int, default=8, help="layers of the model (default 8)")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each preset (default 20)")
    parser.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    found = measured(arguments)
    if arguments.json:
        print(json.dumps(found))
        return
    print("| preset | hops a step | stage, ms a step | us a hop | CPU of a step, ms | more than stock's, ms ", end="")
    print("| launches a layer and micro-batch |\n|---|---|---|---|---|---|---|")
    for name, row in found.items():
        hops, own, whole, launches = row.values()
        print(f"| {name} | {hops:.0f} | {own * 1e3:.1f} | {own / max(hops, 1) * 1e6:.0f} | {whole * 1e3:.1f} ", end="")
        print(f"| {(whole - found['stock']['whole']) * 1e3:+.1f} | {launches:.1f} |")


if __name__ == "__main__":
    main()
