"""Speed of the codec kernels against a copy of the same size, on this machine's CPU or on a GPU.

Every kernel, as `kernel` (alone, into outputs that exist), `call` (with its checks and new outputs), `torch eager` and
`torch.compile` (the reference), on shards that start at multiples of 16 bytes and on others. New outputs get memory that the
process has used before; `call, new pages` has it from the operating system, which clears it first. The copy and all variants
take turns, and the call of a kernel follows it. Each writes two outputs in turn, so that no kernel finds in the cache what it
has just written. Every output is first compared to the reference's, bit by bit. Codec `exact` decodes two records in turn, from
and to the same weights, after several steps of an optimizer; its weights are compared instead. Writes a report and all times.

    python benchmarks/kernels.py [--device cpu|cuda] [--mib 64 ...] [--dtypes bf16 fp32 fp16] [--threads 1]
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import itertools
import json
import math
import mmap
import os
import platform
import re
import shlex
import statistics
import sys
import timeit
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import hzero
from hzero.codecs import backends, exact, reference
from hzero.codecs.codec import Decoder, Encoder, Recoder
from hzero.codecs.formats import BLOCK_CODECS, CodecName, RecordFormat, Rows
from hzero.codecs.reference import DTYPES
from hzero.config import CodecConfig
from hzero.errors import ConfigError
from hzero.schema import validated
from hzero.tools.terminal import positive

PEERS = 4
#: Elements by which a shard is shorter where its successors are to start anywhere: an odd number.
SHORTER = (0, 5)
MIB = 1 << 20
#: Steps of weights of standard deviation 1 that take codec exact 1.3, 2, 3 and 4.6 bits per weight in bfloat16.
STEPS = (4e-4, 1.6e-3, 4.2e-3, 1.25e-2)
VARIANTS = ("kernel", "call", "call, new pages", "torch eager", "torch.compile")
#: A sample repeats a call that takes less than this.
SAMPLE_S, MAX_CALLS = 5e-3, 200
#: Outputs that the copy and every variant write in turn. With a single one, a kernel alone would find its output in the cache,
#: and take up to half the time, whereas new outputs are seldom at the place of the last ones.
OUTPUTS = 2


class Kernel(NamedTuple):
    """One kernel; ``to`` is the codec it encodes sums in."""

    operation: str
    codec: CodecName
    to: CodecName | None = None

    def __str__(self) -> str:
        return f"{self.operation} {self.codec}" + (f" to {self.to}" if self.to else "")


KERNELS = [Kernel(operation, codec) for operation in ("encode", "decode", "decode_sum") for codec in BLOCK_CODECS]
KERNELS += [Kernel("decode_sum_encode", codec, to) for codec in BLOCK_CODECS for to in BLOCK_CODECS if to <= codec]


@dataclass
class KernelTiming:
    """One variant of one kernel on one input; without ``seconds`` it was not measured, and ``note`` says why."""

    mib: int
    dtype: str
    shorter: int
    kernel: str
    variant: str
    note: str = ""
    moved_bytes: int = 0
    call: Any = None
    calls: int = 1
    seconds: list[float] = field(default_factory=list)


class NotMeasuredError(Exception):
    """A variant that does not exist here, with the reason."""


def tensors(outputs: Any) -> list[torch.Tensor]:
    """Outputs of any operation as a list."""
    return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)


class Bucket:
    """One tensor of ``mib`` MiB in four shards, which may be shorter, and its payloads: the input of every kernel."""

    def __init__(self, arguments: argparse.Namespace, mib: int, dtype: str, shorter: int) -> None:
        self.arguments, self.dtype, self.key = arguments, dtype, (mib, dtype, shorter)
        self.numel = mib * MIB // DTYPES[dtype].itemsize - PEERS * shorter
        normal = torch.randn(self.numel, generator=torch.Generator().manual_seed(0)).to(DTYPES[dtype])
        self.source = normal.to(arguments.device)
        self.payloads: dict[str, torch.Tensor] = {}
        for codec in BLOCK_CODECS:
            prepared, inputs = self.prepared(Kernel("encode", codec), reference)
            self.payloads[codec] = prepared(*inputs)

    def prepared(self, kernel: Kernel, backend: Any) -> tuple[Any, tuple[Any, ...]]:
        """A call that makes its outputs, and what it takes."""
        how = (self.arguments.block_size, self.arguments.rotation, self.arguments.stochastic)
        fmt, out = (RecordFormat.of(codec, *how) for codec in (kernel.codec, kernel.to or kernel.codec))
        rows, dtype = Rows.of((self.numel // PEERS,), (PEERS,), outer=PEERS), DTYPES[self.dtype]
        if kernel.operation == "encode":
            return Encoder(fmt, rows, dtype, backend), ([self.source],)
        payload = self.payloads[kernel.codec]
        # Sums take the same payload as a message of one shard from each of four peers.
        if kernel.operation in ("decode", "decode_sum"):
            return Decoder(fmt, rows, dtype, backend, kernel.operation == "decode_sum"), (payload,)
        return Recoder(fmt, rows, dtype, out, Rows.of(rows.chunks, (1,)), backend), (payload,)


class Suite:
    """Builds, checks and times the variants."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.chosen = backends.choice(arguments.device)
        self.groups: list[list[KernelTiming]] = []  # by size, type and alignment, the copy first

    def run(self) -> None:
        """Measures everything."""
        for mib, dtype, shorter in itertools.product(self.arguments.mib, self.arguments.dtypes, SHORTER):
            bucket = Bucket(self.arguments, mib, dtype, shorter)
            group = [self._copy(bucket)]
            for kernel in KERNELS:
                group += self._checked(bucket, kernel)
            if "call" in self.arguments.variants and self.chosen.name != "reference" and DTYPES[dtype].itemsize == 2:
                for step in STEPS:
                    group += self._exact(bucket, step)
            self.groups.append(group)
            timed = [one for one in group if one.call]
            # The copy and what it is compared with, first: a slow variant in between would let the machine change. The sort
            # is stable, so a kernel and its call stay together.
            timed.sort(key=lambda one: VARIANTS[1:].index(one.variant) if one.variant in VARIANTS[2:] else 0)
            for one in timed:
                one.calls = min(max(math.ceil(SAMPLE_S / max(self._sample(one), 1e-9)), 1), MAX_CALLS)
            for index in range(self.arguments.repeats):
                for one in timed if index % 2 == 0 else reversed(timed):
                    one.seconds.append(self._sample(one))
                where = f"{dtype}, {mib} MiB" + ", unaligned" * (shorter > 0)
                print(f"{where}: round {index + 1}/{self.arguments.repeats}", file=sys.stderr, flush=True)
            for one in group:
                del one.call  # and with it the memory of its outputs

    def _sample(self, one: KernelTiming) -> float:
        """Seconds of one call."""
        if self.arguments.device == "cpu":
            one.call()  # so that every variant finds its input in the cache
            return timeit.timeit(one.call, number=one.calls) / one.calls  # by time.perf_counter
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        timeit.timeit(one.call, number=one.calls)
        last.record()
        last.synchronize()
        return first.elapsed_time(last) * 1e-3 / one.calls

    def _copy(self, bucket: Bucket) -> KernelTiming:
        source = bucket.source.view(torch.uint8)
        targets = itertools.cycle([torch.zeros_like(source) for _ in range(OUTPUTS)])
        variant, copy = "copy_", lambda target: target.copy_(source)
        if self.arguments.device == "cpu":
            variant, copy = "memcpy", memcpy(source, self.arguments.threads)
        return KernelTiming(*bucket.key, "copy", variant, "", 2 * source.numel(), lambda: copy(next(targets)))

    def _checked(self, bucket: Bucket, kernel: Kernel) -> list[KernelTiming]:
        """Every variant, after its first call and with its output checked."""
        call, inputs = bucket.prepared(kernel, reference)
        expected = tensors(call(*inputs))
        made = []
        for variant in self.arguments.variants:
            made.append(one := KernelTiming(*bucket.key, str(kernel), variant))
            try:
                call, read, outputs = self._made(bucket, kernel, variant)
            except NotMeasuredError as error:
                one.note = str(error)
                continue
            if not all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(outputs, expected)):
                if variant != "torch.compile":
                    raise SystemExit(f"kernels.py: {kernel}, {variant}, {bucket.key}: not bit-equal to the reference")
                one.note = "not bit-equal"
            one.call, one.moved_bytes = call, sum(tensor.nbytes for tensor in (*read, *outputs))
        return made

    def _exact(self, bucket: Bucket, step: float) -> list[KernelTiming]:
        """Calls of codec exact for weights that have moved by ``step``."""
        old = bucket.source[: bucket.numel]
        draw = torch.Generator().manual_seed(1)
        new = (old + step * torch.randn(len(old), generator=draw).to(old.device)).to(old.dtype)
        layout, copy, records = exact.Layout.of((len(old),)), old.clone(), []
        for before, after in ((old, new), (new, old)):
            head = old.new_zeros(layout.head, dtype=torch.uint8)
            exact.measure([after], [before], head)
            size = layout.record_bytes(int(head[exact.WORDS :][:4].view(torch.int32)))
            records.append(torch.cat((head, head.new_zeros(size - layout.head))))
            exact.encode([after], [before], records[-1])
            right = exact.decode(records[-1], [copy.view(1, -1)], [0])
            if not (right.all() and torch.equal(copy.view(torch.int16), after.view(torch.int16))):
                raise SystemExit(f"kernels.py: exact, {bucket.key}: the weights are not those that were encoded")
        turns, record, weights = itertools.cycle(records), records[1], old.nbytes
        calls = {
            "measure": (2 * weights, lambda: exact.measure([old], [new], head)),
            "encode": (2 * weights + len(record), lambda: exact.encode([old], [new], record)),
            "decode": (2 * weights + len(record), lambda: exact.decode(next(turns), [copy.view(1, -1)], [0])),
        }
        bits = 8 * len(record) / len(old)
        return [
            KernelTiming(*bucket.key, f"{name} exact, {bits:.1f} bits", "call", "", moved, call)
            for name, (moved, call) in calls.items()
        ]

    def _made(
        self, bucket: Bucket, kernel: Kernel, variant: str
    ) -> tuple[Callable[..., Any], list[torch.Tensor], list[torch.Tensor]]:
        """The call to time, its inputs and its outputs."""
        compiled_too = variant in VARIANTS[:3]
        if compiled_too and self.chosen.name == "reference":
            raise NotMeasuredError(f"the backend in use is the reference, which has no kernels: {self.chosen.why}")
        if variant == "call, new pages" and self.arguments.device == "cuda":
            raise NotMeasuredError("torch keeps a device's memory")
        operation, inputs = bucket.prepared(kernel, self.chosen.backend if compiled_too else reference)
        if variant == "torch.compile":
            operation = compiled(operation, inputs)
        outputs = [operation(*inputs) for _ in range(OUTPUTS)]
        first, read = tensors(outputs[0]), tensors(inputs[0])
        if variant == "kernel":  # without the checks of a call
            reads, writes = "payload", "message" if kernel.to else "tensors"
            if kernel.operation == "encode":
                reads, writes = writes, reads
            turns = itertools.cycle([partial(operation._run, **{reads: inputs[0], writes: to}) for to in outputs])
            torch._foreach_zero_(first)
            next(turns)()
            return lambda: next(turns)(), read, first
        kept = deque(outputs[1:], OUTPUTS - 1)  # drops the oldest output after a new one is made
        if variant != "call, new pages":
            return lambda: kept.append(operation(*inputs)), read, first
        sizes, many = [(one.nbytes, one.dtype) for one in first], isinstance(outputs[0], list)

        def call() -> None:
            mapped = [torch.frombuffer(mmap.mmap(-1, size), dtype=dtype) for size, dtype in sizes]
            operation(*inputs, mapped if many else mapped[0])

        return call, read, first


def memcpy(source: torch.Tensor, threads: int) -> Callable[..., Any]:
    """The C library's copy to a tensor, in as many pieces as threads; ctypes lets them run at once."""
    cuts = [source.numel() * index // threads for index in range(threads + 1)]

    def copy(target: torch.Tensor, piece: int = 0) -> None:
        begin, end = cuts[piece], cuts[piece + 1]
        ctypes.memmove(target.data_ptr() + begin, source.data_ptr() + begin, end - begin)

    pool = ThreadPoolExecutor(threads)
    return copy if threads == 1 else lambda target: list(pool.map(copy, [target] * threads, range(threads)))


def compiled(function: Callable[..., Any], inputs: Sequence[Any]) -> Callable[..., Any]:
    """The function through torch.compile, compiled for these inputs; `NotMeasuredError` says why that cannot be."""
    warnings.filterwarnings("ignore", module="torch._dynamo")
    # Beyond its limit of versions of a function dynamo runs it eagerly, without a word.
    torch._dynamo.config.cache_size_limit = torch._dynamo.config.accumulated_cache_size_limit = 10_000
    made = torch.compile(function, dynamic=False)
    try:
        made(*inputs)
    except Exception as error:  # a compiler's own
        raise NotMeasuredError(f"does not compile: {' '.join(str(error).split())[:300]}") from error
    return made


def machine() -> dict[str, str]:
    """Hardware and versions."""
    named = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    found = {"cores": str(os.cpu_count()), "cpu": named[1] if named else platform.machine()}
    found |= {"python": platform.python_version(), "torch": torch.__version__, "hzero": hzero.__version__}
    if torch.cuda.is_available():
        runtime = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
        found["gpu"] = f"{torch.cuda.get_device_name()}, {runtime}"
    return found


def tables(suite: Suite) -> list[str]:
    """One table for each size and type."""
    head = "kernel | variant | median, ms | min | max | moved, GB/s | to the copy (min, max) | elements, GB/s | to the kernel"
    lines = []
    for group in suite.groups:
        copy, kernels = group[0], {one.kernel: one.seconds for one in group if one.variant == "kernel"}
        start = "anywhere" if copy.shorter else "at multiples of 16 bytes"
        lines += [f"## {copy.mib} MiB of {copy.dtype}, shards start {start}", "", f"| {head} | |", "|---" * 10 + "|"]
        for one in (one for one in group if one.seconds):
            # Of the same round: other load on the machine affected both.
            ratios = [theirs / own for theirs, own in zip(copy.seconds, one.seconds)]
            moved = [ratio * one.moved_bytes / copy.moved_bytes for ratio in ratios]
            median = statistics.median(one.seconds)
            alone = [theirs / own for theirs, own in zip(kernels.get(one.kernel, ()), one.seconds)] or [math.nan]
            lines.append(
                f"| {one.kernel} | {one.variant} | {median * 1e3:.3f} "
                f"| {min(one.seconds) * 1e3:.3f} | {max(one.seconds) * 1e3:.3f} | {one.moved_bytes / median / 1e9:.2f} "
                f"| {statistics.median(moved):.3f} ({min(moved):.3f}, {max(moved):.3f}) | {one.mib * MIB / median / 1e9:.2f} "
                f"| {statistics.median(alone):.3f} | {one.note} |"
            )
        lines.append("")
    return lines


def render(suite: Suite, stem: str) -> str:
    """The report as Markdown."""
    arguments = suite.arguments
    notes = {
        f"- {one.variant}, {one.kernel}: {one.note}." for group in suite.groups for one in group if not one.seconds
    }
    lines = "\n".join
    return f"""# Codec kernels on {arguments.device}, {datetime.date.today().isoformat()}

Machine: {"; ".join(f"{name} {value}" for name, value in machine().items())}.

Configuration: backend `{suite.chosen.name}` ({suite.chosen.why}); threads: {arguments.threads}; {arguments.repeats} rounds;
block size {arguments.block_size}, bf16 scales, rounding {"stochastic" if arguments.stochastic else "to nearest"}; one tensor of
normal numbers in {PEERS} shards. Sums are over {PEERS} payloads that together hold the tensor.

Moved: bytes read and written, each once. Elements: bytes of the tensor as such. Ratios are medians of the ratios of each round.
The copy is {"libc memcpy into buffers that exist" if arguments.device == "cpu" else "copy_ on the device"}, of as many bytes.
`kernel` has no checks. Each row writes {OUTPUTS} outputs in turn.
Every output was bit-equal to the reference's, except where the last column says otherwise.

{lines(tables(suite))}
## Not measured

{lines(sorted(notes)) or "Nothing was left out."}

All times: `{stem}.jsonl`. Command: `{shlex.join(["python", *sys.argv])}`.
"""


def write(suite: Suite) -> None:
    """The report, its plot and all times; prints the report."""
    arguments = suite.arguments
    device = "cpu" if arguments.device == "cpu" else torch.cuda.get_device_name()
    stem = f"{datetime.date.today().isoformat()}-kernels-{re.sub(r'[^a-z0-9]+', '-', device.lower())}"
    configuration = {name: value for name, value in vars(arguments).items() if name != "out"}
    lines: list[dict[str, Any]] = [{"machine": machine(), "backend": suite.chosen.name, "configuration": configuration}]
    lines += [vars(one) for group in suite.groups for one in group]
    (arguments.out / f"{stem}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (arguments.out / f"{stem}.md").write_text(report := render(suite, stem))
    print(report)
    print(f"written to {arguments.out / stem}.md and .jsonl", file=sys.stderr)


def parse() -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda is any GPU (default cpu)")
    count = positive(int, 1 << 16)
    parser.add_argument("--mib", type=count, nargs="+", default=[64], help="sizes of the tensor (default 64)")
    parser.add_argument("--threads", type=count, default=1, help="on CPU, of the copy too (default 1)")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="types (default all)")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="(default all)")
    parser.add_argument("--repeats", type=count, default=9, help="rounds (default 9)")
    parser.add_argument("--block-size", type=int, default=128, help="elements of a scale (default 128)")
    parser.add_argument("--rotation", type=int, default=0, help="elements rotated together: 64 or 128 (default none)")
    parser.add_argument("--stochastic", action="store_true", help="round stochastically")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/reports"), help="folder (default %(default)s)")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: found cuda, but there is no GPU that torch can use")
    try:
        validated(CodecConfig, {"codec": "int8"} | {k: vars(arguments)[k] for k in ("block_size", "rotation")}, "")
        backends.choice(arguments.device)
        arguments.out.mkdir(parents=True, exist_ok=True)
    except (ConfigError, OSError) as error:
        parser.error(str(error))
    return arguments


def main() -> None:
    """Measures, then writes and prints the report."""
    # One graph at a time is compiled here: workers would only compete with the timed calls.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    arguments = parse()
    if arguments.device == "cpu":
        torch.set_num_threads(arguments.threads)
        for option, value in ((-1, 2**31 - 1), (-4, 0)):  # M_TRIM_THRESHOLD, M_MMAP_MAX: freed memory is kept
            ctypes.CDLL(None).mallopt(option, value)
    suite = Suite(arguments)
    suite.run()
    write(suite)


if __name__ == "__main__":
    main()
