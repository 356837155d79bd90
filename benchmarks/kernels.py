"""Speed of the codec kernels against a copy of the same size, on this machine's processors or on a GPU.

Every kernel, as `kernel` (into outputs that exist), `operator` (torch.ops.hzero: with checks and allocations), `torch
eager` and `torch.compile` (the reference), and `DeepSpeed` (its quantizer, on a GPU). The copy and all variants take
turns. Every output is first compared to the reference's, bit by bit. Writes a report, a roofline plot and all times.

    python benchmarks/kernels.py [--device cpu|cuda] [--mib 64 ...] [--dtypes bf16 fp32 fp16] [--threads 1]
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import functools
import itertools
import json
import math
import os
import platform
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
import timeit
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import matplotlib
import torch
from rich.console import Console
from rich.progress import Progress

import hzero
from hzero.codecs import backends, reference
from hzero.codecs.arguments import Messages, Rounding, Rows
from hzero.codecs.ops import flat
from hzero.config import CodecConfig, CodecName
from hzero.sharding.records import BLOCK_CODECS, RecordFormat
from hzero.validation import ConfigError, validated

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PEERS = 4
MIB = 1 << 20
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
VARIANTS = ("kernel", "operator", "torch eager", "torch.compile", "DeepSpeed")
#: A sample repeats a call that takes less than this.
SAMPLE_S, MAX_CALLS = 5e-3, 200
#: Bytes of memory for each byte of the tensor: the reference's float32 buffers, and outputs kept for all rounds.
MEMORY = 16
#: An element's arithmetic (docs/payload_format.md). Encoding: magnitude, maximum, quotient, rounding, two limits.
OPERATIONS = {"encode": 6.0, "decode": 1.0, "decode_sum": 2 - 1 / PEERS, "decode_sum_encode": 2 - 1 / PEERS + 6 / PEERS}

Call = Callable[[], Any]
#: What to time, what it reads and what it writes.
Made = tuple[Call, list[torch.Tensor], list[torch.Tensor]]


class Kernel(NamedTuple):
    """One kernel; ``to`` is the codec it encodes sums in."""

    operation: str
    codec: CodecName
    to: CodecName | None = None

    def __str__(self) -> str:
        return f"{self.operation} {self.codec}" + (f" to {self.to}" if self.to else "")


CODECS: tuple[CodecName, ...] = (*BLOCK_CODECS, "exp")  # this one for bfloat16 alone
KERNELS = [Kernel(operation, codec) for operation in ("encode", "decode", "decode_sum") for codec in CODECS]
KERNELS += [Kernel("decode_sum_encode", codec, to) for codec in BLOCK_CODECS for to in BLOCK_CODECS if to <= codec]


@dataclass
class KernelTiming:
    """One variant of one kernel on one input; without ``seconds`` it was not measured, and ``note`` says why."""

    mib: int
    dtype: str
    kernel: str
    variant: str
    note: str = ""
    moved_bytes: int = 0
    operations: float = 0.0
    call: Any = None
    calls: int = 1
    seconds: list[float] = field(default_factory=list)

    def rate(self, size: int) -> float:
        """GB/s where one call is ``size`` bytes."""
        return size / statistics.median(self.seconds) / 1e9


class NotMeasuredError(Exception):
    """A variant that does not exist here, with the reason."""


def tensors(outputs: Any) -> list[torch.Tensor]:
    """Outputs of any operation as a list."""
    return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)


def reason_of(error: Exception) -> str:
    """An exception on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300].rstrip(".")


class Bucket:
    """One tensor of ``mib`` MiB in four shards, and its payloads: the input of every kernel."""

    def __init__(self, arguments: argparse.Namespace, mib: int, dtype: str) -> None:
        self.arguments, self.mib, self.dtype = arguments, mib, dtype
        self.numel = mib * MIB // DTYPES[dtype].itemsize
        normal = torch.randn(self.numel, generator=torch.Generator().manual_seed(0)).to(DTYPES[dtype])
        self.source, codecs = normal.to(arguments.device), CODECS if dtype == "bf16" else BLOCK_CODECS
        self.payloads = {codec: reference.encode(*self.inputs(Kernel("encode", codec))) for codec in codecs}

    def inputs(self, kernel: Kernel) -> tuple[Any, ...]:
        """Arguments of a kernel, as a backend takes them."""
        how = (self.arguments.block_size, "bf16", self.arguments.rotation)
        fmt, out = (RecordFormat.of(codec, *how) for codec in (kernel.codec, kernel.to or kernel.codec))
        chunks, dtype, rounding = (self.numel // PEERS,), DTYPES[self.dtype], Rounding(self.arguments.stochastic, 1)
        rows = Rows.in_order(chunks, PEERS, outer=PEERS)
        if kernel.operation == "encode":
            return ([self.source], rows, fmt, rounding)
        payload = self.payloads[kernel.codec]
        if kernel.operation == "decode":
            return (payload, rows, fmt, dtype)
        # The same payload, taken as a message of one shard from each of four peers.
        peers = (payload, Messages(PEERS, chunks, 1), fmt, dtype)
        return peers if kernel.operation == "decode_sum" else (*peers, 1, out, rounding)


class Suite:
    """Builds, checks and times the variants; ``bar`` shows which."""

    def __init__(self, arguments: argparse.Namespace, bar: Progress) -> None:
        self.arguments, self.bar = arguments, bar
        self.chosen = backends.choice(arguments.device)
        self.groups: list[list[KernelTiming]] = []  # by size and type, the copy first
        self.quantizer: Any = None
        self.no_quantizer = "" if arguments.device == "cuda" else "its quantizer is for GPUs"
        if "DeepSpeed" in arguments.variants:
            try:
                from deepspeed.ops.op_builder import QuantizerBuilder

                self.quantizer = QuantizerBuilder().load()
            except Exception as error:  # whatever a missing or failing compiler raises
                self.no_quantizer = f"its quantizer needs CUDA or ROCm and does not build here: {reason_of(error)}"

    def run(self) -> None:
        """Measures everything."""
        rounds = self.arguments.repeats
        plan = list(itertools.product(self.arguments.mib, self.arguments.dtypes))
        self.bar.add_task("", total=len(plan) * (len(KERNELS) + rounds))
        for mib, dtype in plan:
            bucket = Bucket(self.arguments, mib, dtype)
            group = [self._copy(bucket)]
            for kernel in KERNELS:
                group += self._checked(bucket, kernel) if kernel.codec in bucket.payloads else []
                self._show(f"{dtype}, {mib} MiB: checked {kernel}", 1)
            self.groups.append(group)
            timed = [one for one in group if one.call]
            # The fast ones stand next to the copy: a slow one in between would let the machine change.
            timed.sort(key=lambda one: VARIANTS.index(one.variant) if one.kernel != "copy" else -1)
            for one in timed:
                one.calls = min(max(math.ceil(SAMPLE_S / max(self._sample(one), 1e-9)), 1), MAX_CALLS)
            for index in range(rounds):
                for one in timed if index % 2 == 0 else reversed(timed):
                    self._show(f"{dtype}, {mib} MiB, round {index + 1}/{rounds}: {one.kernel}, {one.variant}")
                    one.seconds.append(self._sample(one))
                self._show(f"{dtype}, {mib} MiB: round {index + 1}/{rounds} done", 1)
            for one in group:
                del one.call  # and with it the memory of its outputs

    def _show(self, text: str, steps: int = 0) -> None:
        task = self.bar.tasks[0]
        self.bar.update(task.id, description=text, advance=steps)
        if steps and not self.bar.console.is_terminal:
            left = "?" if task.time_remaining is None else datetime.timedelta(seconds=round(task.time_remaining))
            self.bar.console.print(f"{task.completed:.0f}/{task.total:.0f}  {text}, {left} left", highlight=False)

    def _sample(self, one: KernelTiming) -> float:
        """Seconds of one call."""
        if self.arguments.device == "cpu":
            return timeit.timeit(one.call, number=one.calls) / one.calls  # by time.perf_counter
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        timeit.timeit(one.call, number=one.calls)
        last.record()
        last.synchronize()
        return first.elapsed_time(last) * 1e-3 / one.calls

    def _copy(self, bucket: Bucket) -> KernelTiming:
        source = bucket.source.view(torch.uint8)
        target = torch.zeros_like(source)
        variant, call = "copy_", lambda: target.copy_(source)
        if self.arguments.device == "cpu":
            variant, call = "memcpy", memcpy(source, target, self.arguments.threads)
        return KernelTiming(bucket.mib, bucket.dtype, "copy", variant, moved_bytes=2 * source.numel(), call=call)

    def _checked(self, bucket: Bucket, kernel: Kernel) -> list[KernelTiming]:
        """Every variant, after its first call and with its output checked."""
        expected = tensors(getattr(reference, kernel.operation)(*bucket.inputs(kernel)))
        made = []
        for variant in self.arguments.variants:
            self._show(f"{bucket.dtype}, {bucket.mib} MiB: checking {kernel}, {variant}")
            made.append(one := KernelTiming(bucket.mib, bucket.dtype, str(kernel), variant))
            try:
                call, read, outputs = self._made(bucket, kernel, variant)
            except NotMeasuredError as error:
                one.note = str(error)
                continue
            if variant == "DeepSpeed":
                one.note = "its own format"
            elif not all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(outputs, expected)):
                if variant != "torch.compile":
                    where = f"{kernel}, {variant}, {bucket.dtype}, {bucket.mib} MiB, backend {self.chosen.name}"
                    raise SystemExit(f"kernels.py: {where}: not bit-equal to the reference; nothing is written")
                one.note = "not bit-equal"
            one.call, one.moved_bytes = call, sum(tensor.nbytes for tensor in (*read, *outputs))
            one.operations = OPERATIONS[kernel.operation] * bucket.numel
        return made

    def _made(self, bucket: Bucket, kernel: Kernel, variant: str) -> Made:
        if variant == "DeepSpeed":
            return self._deepspeed(bucket, kernel)
        inputs = bucket.inputs(kernel)
        read = tensors(inputs[0])
        operation = getattr(reference, kernel.operation)
        if variant == "kernel":
            if self.chosen.name == "reference":
                raise NotMeasuredError(f"the backend in use is the reference, which has no kernels: {self.chosen.why}")
            prepared = getattr(self.chosen.backend, f"prepare_{kernel.operation}")(*inputs)
            if prepared is None:
                raise NotMeasuredError("the backend has no kernel for this input")
            return prepared.run, read, tensors(prepared.run())
        if variant == "operator":
            inputs = tuple(flat(inputs))
            operation = getattr(torch.ops.hzero, kernel.operation)
        elif variant == "torch.compile":
            operation = compiled(operation, inputs, self.arguments.compile_timeout)
        return functools.partial(operation, *inputs), read, tensors(operation(*inputs))

    def _deepspeed(self, bucket: Bucket, kernel: Kernel) -> Made:
        """`_made` of DeepSpeed's quantizer, which has a format of its own."""
        if self.no_quantizer:
            raise NotMeasuredError(self.no_quantizer)
        if bucket.dtype != "fp16" or kernel.operation == "decode_sum" or kernel.to not in (None, kernel.codec):
            raise NotMeasuredError("its quantizer takes fp16 only, sums only to encode again, and keeps the codec")
        groups, theirs = bucket.numel // self.arguments.block_size, self.quantizer
        how = (int(kernel.codec.removeprefix("int")), theirs.QuantizationType.Symmetric)
        try:
            coded = theirs.quantize(bucket.source, groups, *how)
            operation, inputs = {
                "encode": (theirs.quantize, (bucket.source, groups, *how)),
                "decode": (theirs.dequantize, (*coded, groups, *how)),
                "decode_sum_encode": (theirs.quantized_reduction, (*coded, groups, groups // PEERS, *how, PEERS)),
            }[kernel.operation]
            outputs = tensors(operation(*inputs))
            torch.cuda.synchronize()
        except Exception as error:  # an extension's own
            raise NotMeasuredError(reason_of(error)) from error
        return functools.partial(operation, *inputs), [x for x in inputs if isinstance(x, torch.Tensor)], outputs


def memcpy(source: torch.Tensor, target: torch.Tensor, threads: int) -> Call:
    """The C library's copy, in as many pieces as threads; ctypes lets them run at once."""
    cuts = [source.numel() * index // threads for index in range(threads + 1)]

    def copy(piece: int = 0) -> None:
        begin, end = cuts[piece], cuts[piece + 1]
        ctypes.memmove(target.data_ptr() + begin, source.data_ptr() + begin, end - begin)

    pool = ThreadPoolExecutor(threads)
    return copy if threads == 1 else lambda: list(pool.map(copy, range(threads)))


def compiled(function: Callable[..., Any], inputs: Sequence[Any], timeout: float) -> Callable[..., Any]:
    """The function through torch.compile, compiled for these inputs; `NotMeasuredError` says why that cannot be."""
    warnings.filterwarnings("ignore", module="torch._dynamo")
    # Beyond its limit of versions of a function dynamo runs it eagerly, without a word.
    torch._dynamo.config.cache_size_limit = torch._dynamo.config.accumulated_cache_size_limit = 10_000
    made = torch.compile(function, dynamic=False)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    # Again every second: an alarm that strikes in a destructor has no effect.
    signal.setitimer(signal.ITIMER_REAL, timeout, 1.0)
    started = time.monotonic()
    try:
        made(*inputs)
    except KeyboardInterrupt:
        if time.monotonic() - started < timeout:
            raise  # a person's
        raise NotMeasuredError(f"not compiled after {timeout:g} s (--compile-timeout)") from None
    except Exception as error:  # a compiler's own
        raise NotMeasuredError(f"does not compile: {reason_of(error)}") from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return made


def machine() -> dict[str, str]:
    """Hardware and versions."""
    listed = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    named = re.search(r"model name\s*: (.*)", listed)
    found = {"cores": str(os.cpu_count()), "cpu": named[1] if named else platform.machine()}
    found |= {"python": platform.python_version(), "torch": torch.__version__, "hzero": hzero.__version__}
    if torch.cuda.is_available():
        runtime = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
        found["gpu"] = f"{torch.cuda.get_device_name()}, {runtime}"
    if compiler := shutil.which(os.environ.get("CXX", "c++")):
        found["compiler found"] = subprocess.getoutput(shlex.join([compiler, "--version"])).partition("\n")[0]
    return found


def missing(suite: Suite) -> list[str]:
    """What was not measured and why, as items of a list."""
    arguments, lines = suite.arguments, list[str]()
    reasons: dict[tuple[str, str], list[str]] = {}
    kernels = [one for _, *others in suite.groups for one in others]
    for one in kernels:
        if not one.seconds:
            reasons.setdefault((one.variant, one.note), []).append(f"{one.kernel} ({one.dtype}, {one.mib} MiB)")
    for (variant, note), names in reasons.items():
        which = "all" if len(names) == sum(one.variant == variant for one in kernels) else ", ".join(names)
        lines.append(f"- {variant}, {which}: {note}.")
    if arguments.device == "cpu":
        why = "--device cpu" if torch.cuda.is_available() else "there is no GPU that torch can use"
        lines.append(f"- Kernels of GPUs: not measured on a device ({why}).")
    lines += [f"- {variant}: not asked for (--variants)." for variant in VARIANTS if variant not in arguments.variants]
    return lines or ["- Nothing was left out."]


def tables(suite: Suite) -> list[str]:
    """One table for each size and type."""
    head = "kernel | variant | median, ms | min | max | moved, GB/s | to the copy (min, max) | elements, GB/s | to the copy"
    lines = []
    for group in suite.groups:
        copy = group[0]
        lines += [f"## {copy.mib} MiB of {copy.dtype}", "", f"| {head} | |", "|---" * 10 + "|"]
        for one in (one for one in group if one.seconds):
            # Of the same round: what else the machine did met both.
            ratios = [theirs / own for theirs, own in zip(copy.seconds, one.seconds)]
            moved = [ratio * one.moved_bytes / copy.moved_bytes for ratio in ratios]
            lines.append(
                f"| {one.kernel} | {one.variant} | {statistics.median(one.seconds) * 1e3:.3f} "
                f"| {min(one.seconds) * 1e3:.3f} | {max(one.seconds) * 1e3:.3f} | {one.rate(one.moved_bytes):.2f} "
                f"| {statistics.median(moved):.3f} ({min(moved):.3f}, {max(moved):.3f}) | {one.rate(one.mib * MIB):.2f} "
                f"| {statistics.median(ratios):.3f} | {one.note} |"
            )
        lines.append("")
    return lines


def render(suite: Suite, stem: str) -> str:
    """The report as Markdown."""
    arguments = suite.arguments
    threads = f"threads: {arguments.threads}; " if arguments.device == "cpu" else ""
    copied = "libc memcpy into a buffer that exists" if arguments.device == "cpu" else "copy_ on the device"
    command = ["python", "benchmarks/kernels.py", *["--stochastic"] * arguments.stochastic]
    for name, value in vars(arguments).items():
        if name not in ("out", "stochastic"):
            command += [f"--{name.replace('_', '-')}", *map(str, value if isinstance(value, list) else [value])]
    rounding = "stochastic rounding" if arguments.stochastic else "rounding to nearest"
    lines = "\n".join
    return f"""# Codec kernels on {arguments.device}, {datetime.date.today().isoformat()}

Machine: {"; ".join(f"{name} {value}" for name, value in machine().items())}.

Configuration: backend `{suite.chosen.name}` ({suite.chosen.why}); {threads}{arguments.repeats} interleaved rounds; block
size {arguments.block_size}, bf16 scales, {rounding}; one tensor of normal numbers in {PEERS} shards. Sums are over {PEERS}
payloads that together hold the tensor; the tensor's type decides only how many elements they have.

Moved: bytes read and written, each once. Elements: bytes of the tensor before it is encoded or after it is decoded. The
copy is {copied}, of as many bytes as the tensor has; it moves them twice, and its elements are the bytes copied a second.
Ratios are medians of the ratios of each round. Every output was bit-equal to the reference's, except where the last
column says otherwise.

![roofline]({stem}.png)

{lines(tables(suite))}
## Not measured

{lines(missing(suite))}

All times: `{stem}.jsonl`. Repeat with `{shlex.join(command)}`.
"""


def plot(suite: Suite, path: Path) -> None:
    """Roofline: moved bytes a second over operations a byte, the copy as the roof; one panel a size and type."""
    columns, height = len(suite.arguments.dtypes), len(suite.arguments.mib)
    size = (4.2 * columns + 2.6, 3.6 * height + 0.8)
    figure, panels = plt.subplots(height, columns, figsize=size, squeeze=False, layout="constrained")
    markers = dict(zip(map(str, KERNELS), "osD^v<>PX*hd"))
    colours = dict(zip(VARIANTS, plt.rcParams["axes.prop_cycle"].by_key()["color"]))
    for axes, (copy, *others) in zip(panels.flat, suite.groups):
        axes.axhline(copy.rate(copy.moved_bytes), color="black")
        slow, fast = (copy.moved_bytes / limit(copy.seconds) / 1e9 for limit in (max, min))
        axes.axhspan(slow, fast, color="black", alpha=0.1)
        for one in (one for one in others if one.seconds):
            place = (one.operations / one.moved_bytes, one.rate(one.moved_bytes))
            axes.plot(*place, markers[one.kernel], color=colours[one.variant], alpha=0.8)
        title = f"{copy.mib} MiB of {copy.dtype}"
        axes.set(title=title, xscale="log", yscale="log", xlabel="operations a byte moved", ylabel="GB/s moved")
        axes.set_xticks([0.25, 0.5, 1, 2, 4], labels=["1/4", "1/2", "1", "2", "4"])
        axes.minorticks_off()
        axes.grid(alpha=0.3, which="both")
    keys = [plt.Line2D([], [], color="black", label=f"{suite.groups[0][0].variant} (the roof)")]
    measured = {one.variant for group in suite.groups for one in group[1:] if one.seconds}
    keys += [plt.Line2D([], [], color=colours[name], lw=6, label=name) for name in VARIANTS if name in measured]
    keys += [plt.Line2D([], [], color="gray", ls="", marker=sign, label=name) for name, sign in markers.items()]
    figure.legend(handles=keys, loc="outside right center", fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def write(suite: Suite) -> None:
    """The report, its plot and all times; prints the report."""
    arguments = suite.arguments
    device = "cpu" if arguments.device == "cpu" else torch.cuda.get_device_name()
    stem = f"{datetime.date.today().isoformat()}-kernels-{re.sub(r'[^a-z0-9]+', '-', device.lower())}"
    plot(suite, arguments.out / f"{stem}.png")
    configuration = {name: value for name, value in vars(arguments).items() if name != "out"}
    lines: list[dict[str, Any]] = [{"machine": machine(), "backend": suite.chosen.name, "configuration": configuration}]
    lines += [vars(one) for group in suite.groups for one in group]
    (arguments.out / f"{stem}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (arguments.out / f"{stem}.md").write_text(report := render(suite, stem))
    print(report)
    print(f"written to {arguments.out / stem}.md, .png and .jsonl", file=sys.stderr)


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Ends with status 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def parse() -> argparse.Namespace:
    """The command line, checked."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda is any GPU (default cpu)")
    parser.add_argument("--mib", type=int, nargs="+", default=[64], help="sizes of the tensor (default 64)")
    parser.add_argument("--threads", type=int, default=1, help="on processors, of the copy too (default 1)")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="types (default all)")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="(default all)")
    parser.add_argument("--repeats", type=int, default=9, help="rounds (default 9)")
    parser.add_argument("--block-size", type=int, default=128, help="elements of a scale (default 128)")
    parser.add_argument("--rotation", type=int, default=0, help="elements rotated together: 64 or 128 (default none)")
    parser.add_argument("--stochastic", action="store_true", help="round stochastically")
    parser.add_argument("--compile-timeout", type=float, default=120, help="seconds for one kernel (default 120)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/reports"), help="folder (default %(default)s)")
    arguments = parser.parse_args()
    positive = {"mib": min(arguments.mib), "threads": arguments.threads, "repeats": arguments.repeats}
    for name, value in (positive | {"compile-timeout": arguments.compile_timeout}).items():
        if not value > 0:
            parser.error(f"--{name}: found {value:g}, expected more than 0")
    if (on_gpu := arguments.device == "cuda") and not torch.cuda.is_available():
        parser.error("--device: found cuda, but there is no GPU that torch can use")
    memory = torch.cuda.mem_get_info()[0] if on_gpu else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if max(arguments.mib) * MIB * MEMORY > memory:
        parser.error(f"--mib: found {max(arguments.mib)}, expected at most {memory // MIB // MEMORY} on this machine")
    try:
        validated(CodecConfig, {"codec": "int8"} | {k: vars(arguments)[k] for k in ("block_size", "rotation")}, "")
        backends.choice(arguments.device)
        arguments.out.mkdir(parents=True, exist_ok=True)
    except (ConfigError, OSError) as error:
        parser.error(str(error))
    return arguments


def main() -> None:
    """Measures, then writes and prints the report."""
    # One graph at a time is compiled here: workers for it would only compete with what is timed.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    arguments = parse()
    if arguments.device == "cpu":
        torch.set_num_threads(arguments.threads)
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with Progress(console=Console(stderr=True, soft_wrap=True), transient=True) as bar:
        suite = Suite(arguments, bar)
        suite.run()
    write(suite)


if __name__ == "__main__":
    main()
