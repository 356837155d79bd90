"""Buckets to try backends on, and a comparison of each with the reference."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hzero.codecs import reference
from hzero.codecs.arguments import Messages, Rounding, Rows
from hzero.config import CODED_SCALE_BLOCKS, SUMMED
from hzero.sharding.records import ROTATIONS, RecordFormat
from tests.codecs.samples import FLOATS, numbers, same

KINDS = ("normal", "constant", "zero", "subnormal", "huge", "nan", "infinite", "halves", "signs", "ties")


@dataclass(frozen=True)
class Case:
    """One bucket, and how it is encoded."""

    chunks: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    outer: int
    fmt: RecordFormat
    dtype: torch.dtype
    kind: str = "normal"
    stochastic: bool = False
    seed: int = 0
    short: int = 0
    unaligned: bool = False

    @property
    def rows(self) -> Rows:
        return Rows(self.chunks, self.sizes, self.strides, self.outer)

    @property
    def rounding(self) -> Rounding:
        return Rounding(self.stochastic, self.seed)


def source_of(case: Case) -> list[torch.Tensor]:
    """The tensors of a case; the last one ``short`` elements short."""
    source = []
    for index, chunk in enumerate(case.chunks):
        count = case.rows.total * chunk - (case.short if index + 1 == len(case.chunks) else 0)
        x = numbers(case.kind, max(count, 0), case.dtype, case.seed + index)
        source.append(torch.cat([x.new_zeros(1), x])[1:] if case.unaligned else x)
    return source


def disagreements(backend: Any, case: Case, device: torch.device) -> Iterator[str]:
    """Differences of the backend from the reference, one line each."""
    source = source_of(case)
    there = [tensor.to(device) for tensor in source]
    if case.unaligned:
        there = [torch.cat([t.new_zeros(1), t])[1:] for t in there]
    rows, rounding = case.rows, case.rounding
    message = reference.encode(source, rows, case.fmt, rounding)
    got = backend.encode(there, rows, case.fmt, rounding)
    if not torch.equal(got.cpu(), message):
        places = (got.cpu() != message).nonzero().flatten()[:8].tolist()
        yield f"encode: bytes {places} of {message.numel()} differ"

    if case.fmt.codec in SUMMED:  # of the others nothing is lost that could be fed back
        yield from _feedback_disagreements(backend, case, device, source, there)

    payload = message.to(device)
    for dtype in FLOATS:
        how = (rows, case.fmt, dtype)
        decoded = backend.decode(payload, *how)
        if not same([t.cpu() for t in decoded], reference.decode(message, *how)):
            yield f"decode: {dtype} differs"
        want = [numbers("normal", t.numel(), dtype, 5) for t in decoded]
        got = [t.to(device, copy=True) for t in want]
        reference.decode_onto(message, rows, case.fmt, want)
        backend.decode_onto(payload, rows, case.fmt, got)
        if not same([t.cpu() for t in got], want):
            yield f"decode_onto: {dtype} differs"

    messages = Messages(case.outer, case.chunks, rows.inner)
    sums = reference.decode_sum(message, messages, case.fmt, case.dtype)
    got = backend.decode_sum(payload, messages, case.fmt, case.dtype)
    if not same([t.cpu() for t in got], sums):
        yield "decode_sum: sums differ"
    got = [numbers("normal", total.numel(), torch.float32, 9).to(device) for total in sums]
    want = [total.cpu().clone() for total in got]
    reference.decode_add(message, messages, case.fmt, case.dtype, want)
    backend.decode_add(payload, messages, case.fmt, case.dtype, got)
    if not same([t.cpu() for t in got], want):
        yield "decode_add: sums differ"
    size = case.fmt.block_size if case.fmt.scale_bytes else 64
    outs = itertools.product(
        ("int8", "int4"), ("bf16", "fp32", "int8") if size in CODED_SCALE_BLOCKS else ("bf16", "fp32")
    )
    for codec, scale in itertools.islice(outs, 1 if sum(case.chunks) > 1 << 19 else 6):
        out = RecordFormat.of(codec, size, scale, case.fmt.rotation * (scale != "fp32"))
        how = (messages, case.fmt, case.dtype, rows.inner, out, rounding)
        if not torch.equal(backend.decode_sum_encode(payload, *how).cpu(), reference.decode_sum_encode(message, *how)):
            yield f"decode_sum_encode: to {codec} with {scale} scales differs"


def _feedback_disagreements(
    backend: Any, case: Case, device: torch.device, source: Sequence[torch.Tensor], there: Sequence[torch.Tensor]
) -> Iterator[str]:
    residuals = [numbers("normal", t.numel() * (i % 3 != 2), torch.float32, 7) for i, t in enumerate(source)]
    factors = [(1.0, 0.5, 1.0 / 3.0)[index % 3] for index in range(len(source))]
    how = (factors, case.rows, case.fmt, case.rounding)
    fed, left = reference.encode_feedback(source, residuals, *how)
    got, ours = backend.encode_feedback(there, [r.to(device) for r in residuals], *how)
    if not torch.equal(got.cpu(), fed) or not same([t.cpu() for t in ours], left):
        yield "encode_feedback: message or residuals differ"
    base = [numbers("normal", t.numel(), t.dtype, 8) for t in source]
    message = reference.encode_difference(source, base, *how[1:])
    if not torch.equal(backend.encode_difference(there, [b.to(device) for b in base], *how[1:]).cpu(), message):
        yield "encode_difference: message differs"


def random_case() -> Case:
    """A case of many kinds, awkward sizes on purpose; another one each time."""
    draw = random.Random()
    block_size = draw.choice([16, 32, 48, 64, 128, 192, 256, 384, 512, 1024, 1040, 2048, 4096])
    rotation = draw.choice([size for size in ROTATIONS if not size or block_size % size == 0])
    scale = draw.choice(["bf16", "int8", "fp32"] if block_size in CODED_SCALE_BLOCKS else ["bf16", "bf16", "fp32"])
    fmt = RecordFormat.of(draw.choice(["int8", "int4"]), block_size, scale, rotation)
    outer, inner = draw.choice([1, 2, 3, 4, 5, 8]), draw.choice([1, 2, 3])
    if draw.random() < 0.5:
        sizes, strides = (outer * inner,), (1,)
    elif draw.random() < 0.5:
        sizes, strides = (outer, inner), (1, outer)
    else:
        sizes, strides = (inner, 1, outer), (outer, 1, 1)
    around = (block_size - 1, block_size, block_size + 1, draw.randint(1, 3000))
    lengths = [0, 1, 2, 15, 16, 17, 31, 33, 511, 513, *around]
    chunks = tuple(draw.choice(lengths) for _ in range(draw.randint(1, 4)))
    short = draw.choice([0, 0, 1, 5, chunks[-1], chunks[-1] + 3])
    dtype, kind, seed = draw.choice(FLOATS), draw.choice(KINDS), draw.randint(0, 2**40)
    return Case(chunks, sizes, strides, outer, fmt, dtype, kind, draw.random() < 0.3, seed, short, draw.random() < 0.3)
