"""Step time of the stage with codec `none` against stock DeepSpeed ZeRO-3, in one run, on this machine's processors.

The model and the batch are the main job's. All engines live in the same eight ranks and take turns, block of steps by
block of steps, so that whatever else the machine does meets all of them. Prints the median step time of each preset as a
ratio to ZeRO-3's, and writes a dated report.

    python benchmarks/step_time.py [--accumulation 1] [--presets lossless,zero3,topo] [--report benchmarks/reports]
    python benchmarks/step_time.py --presets topo,topo:trace    the price of a trace: the ratio of the two medians
    python benchmarks/step_time.py --presets topo,topo:checksum,topo:canary    that of checksums, and of a canary at every step
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hzero.config import PRESETS
from hzero.launcher import STARTED, Ranks, local_ranks, run_rank
from hzero.validation import one_of

STEPS_PER_ROUND = 5
RESULT = "result.json"
#: Behind a preset: with the codecs in plain torch, whatever backend this machine has.
REFERENCE = ":reference"
#: Behind a preset: while every rank records a trace. The file is written between the blocks of steps, outside their time.
TRACE = ":trace"
#: Behind a preset: keys of the block. The canary of ``:canary`` is sent at every step.
KEYS: dict[str, dict[str, Any]] = {":checksum": {"checksum": True}, ":canary": {"canary": {"every_steps": 1}}}


def worker(arguments: argparse.Namespace) -> None:
    """One rank: builds all engines, then times them in turn."""
    import deepspeed
    import torch
    import torch.distributed as dist
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    import hzero
    from hzero.codecs import backends

    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False, timeout=datetime.timedelta(seconds=arguments.timeout))
    deepspeed.utils.logger.setLevel("ERROR")
    nodes = arguments.ranks // 4
    topology = {"nodes": nodes, "gpus_per_node": 2, "gcds_per_gpu": 2}
    shape = {
        "vocab_size": 1024,
        "hidden_size": arguments.hidden,
        "num_hidden_layers": arguments.layers,
        "num_attention_heads": 4,
        "intermediate_size": 4 * arguments.hidden,
        "max_position_embeddings": 128,
    }
    engines: dict[str, Any] = {}
    for name in ["stock ZeRO-3", *arguments.presets]:
        torch.manual_seed(0)
        model = GPTNeoXForCausalLM(GPTNeoXConfig(**shape))
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": arguments.micro_batch,
            "gradient_accumulation_steps": arguments.accumulation,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "steps_per_print": 10**9,
        }
        if name != "stock ZeRO-3":
            preset, colon, more = name.partition(":")
            keys = KEYS.get(colon + more, {})
            config["zero_optimization"]["hzero"] = {"preset": preset, "topology": topology, **keys}
        engines[name] = hzero.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    tokens = torch.randint(
        0, 1024, (arguments.micro_batch, 128), generator=torch.Generator().manual_seed(dist.get_rank())
    )

    out = Path(os.environ["HZERO_BENCH_OUT"])

    def steps(name: str, count: int) -> list[float]:
        engine, times = engines[name], []
        with contextlib.ExitStack() as way:
            if name.endswith(REFERENCE):
                way.enter_context(backends.reference_instead())
            if name.endswith(TRACE):
                way.enter_context(engine.optimizer.hzero.trace(out / f"trace{dist.get_rank()}.json.gz"))
            for _ in range(count):
                dist.barrier()
                started = time.perf_counter()
                for _ in range(arguments.accumulation):
                    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
                    engine.step()
                dist.barrier()
                times.append(time.perf_counter() - started)
        return times

    if dist.get_rank() == 0:
        (out / STARTED).touch()
    times: dict[str, list[float]] = {name: [] for name in engines}
    for name in engines:
        steps(name, 3)  # DeepSpeed records its trace in the first steps
    for round_index in range(arguments.rounds):
        order = list(engines) if round_index % 2 == 0 else list(reversed(engines))
        for name in order:
            times[name] += steps(name, STEPS_PER_ROUND)
        if dist.get_rank() == 0:
            print(f"round {round_index + 1}/{arguments.rounds}", file=sys.stderr, flush=True)
    if dist.get_rank() == 0:
        parameters = sum(p.ds_numel for p in next(iter(engines.values())).module.parameters())
        result = {
            "times": times,
            "parameters": parameters,
            "shape": shape,
            "versions": {"torch": torch.__version__, "deepspeed": deepspeed.__version__, "hzero": hzero.__version__},
            "codecs": f"{(chosen := backends.choice('cpu')).name} ({chosen.why})",
        }
        (out / RESULT).write_text(json.dumps(result))
    dist.barrier()


def render(arguments: argparse.Namespace, result: dict[str, Any]) -> str:
    """The report as Markdown."""
    times = result["times"]
    stock = statistics.median(times["stock ZeRO-3"])
    rows = [
        f"| {name} | {statistics.median(t) * 1e3:.1f} | {min(t) * 1e3:.1f} | {max(t) * 1e3:.1f} "
        f"| {statistics.median(t) / stock:.3f} |"
        for name, t in times.items()
    ]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return "\n".join(
        [
            f"# Step time against stock ZeRO-3, {datetime.date.today().isoformat()}",
            "",
            f"Machine: {os.cpu_count()} cores, {platform.processor() or platform.machine()}, Python "
            f"{platform.python_version()}; {versions}. All ranks share these cores, so this shows the cost of the stage's",
            "own work; the links between real nodes, which it is made for, are not in it.",
            "",
            f"Configuration: {arguments.ranks} ranks as {arguments.ranks // 4} nodes x 2 GPUs x 2 GCDs, gloo, fp32, GPT-NeoX "
            f"of {result['parameters']:,} parameters ({result['shape']}), {arguments.micro_batch} x 128 tokens per rank and "
            f"micro-step, accumulation {arguments.accumulation}, persistence threshold 0 for all, {arguments.rounds} "
            f"interleaved rounds of {STEPS_PER_ROUND} steps. Codecs: {result['codecs']}.",
            "",
            "| engine | median, ms | min | max | ratio of medians |",
            "|---|---|---|---|---|",
            *rows,
            "",
            f"Repeat with `python benchmarks/step_time.py --ranks {arguments.ranks} --presets "
            f"{','.join(arguments.presets)} --hidden {arguments.hidden} --layers {arguments.layers} "
            f"--micro-batch {arguments.micro_batch} --accumulation {arguments.accumulation} "
            f"--rounds {arguments.rounds}`.",
            "",
        ]
    )


def main() -> int:
    """Starts the ranks, prints the table, writes the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8, help="a multiple of 4: nodes of 2 GPUs x 2 GCDs (default 8)")
    parser.add_argument(
        "--presets",
        default="lossless,zero3,topo",
        help="presets to time, each also as PRESET:reference, with the codecs in plain torch, or as PRESET:trace, recording "
        "a trace, as PRESET:checksum, or as PRESET:canary, with one at every step (default lossless,zero3,topo)",
    )
    parser.add_argument("--hidden", type=int, default=128, help="hidden size (default 128)")
    parser.add_argument("--layers", type=int, default=4, help="layers (default 4)")
    parser.add_argument("--micro-batch", type=int, default=2, help="sequences per rank and micro-step (default 2)")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-steps per step (default 1)")
    parser.add_argument("--rounds", type=int, default=30, help=f"of {STEPS_PER_ROUND} steps per engine (default 30)")
    parser.add_argument(
        "--timeout",
        type=float,
        default=900,
        help="seconds to build the engines, and for one collective (default 900)",
    )
    parser.add_argument("--report", type=Path, help="folder to write a dated report into")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.presets = arguments.presets.split(",")
    for name in arguments.presets:
        preset, colon, more = name.partition(":")
        if preset not in PRESETS or (colon and colon + more not in (REFERENCE, TRACE, *KEYS)):
            parser.error(str(one_of("--presets", name, PRESETS, "preset")))
    if arguments.ranks < 4 or arguments.ranks % 4:
        parser.error(f"--ranks: found {arguments.ranks}, expected a multiple of 4")
    if arguments.worker:
        run_rank(lambda: worker(arguments))
    folder = Path(tempfile.mkdtemp(prefix="hzero-step-time-"))
    # Stock DeepSpeed's calls warn of deprecation each time, and printing that would be timed.
    more = {"HZERO_BENCH_OUT": str(folder), "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}
    status = Ranks(
        [sys.executable, __file__, "--worker", *sys.argv[1:]],
        local_ranks(arguments.ranks, more=more),
        folder,
        start_timeout=arguments.timeout,
        timeout_key="--timeout",
    ).run()
    if status:
        return status
    report = render(arguments, json.loads((folder / RESULT).read_text()))
    shutil.rmtree(folder, ignore_errors=True)
    print(report)
    if arguments.report is not None:
        arguments.report.mkdir(parents=True, exist_ok=True)
        accumulated = f"-accumulation-{arguments.accumulation}" if arguments.accumulation > 1 else ""
        path = arguments.report / f"{datetime.date.today().isoformat()}-step-time{accumulated}.md"
        path.write_text(report)
        print(f"written to {path}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
