"""Buckets to try backends on, and a comparison of each with the reference."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from hzero.codecs import reference
from hzero.codecs.codec import Decoder, Encoder, Recoder
from hzero.codecs.formats import BLOCK_CODECS, FIXED, RecordFormat, Rows
from tests.codecs.samples import FLOATS, numbers, same
from tests.kernels.emulated import SANITIZED

KINDS = ("normal", "constant", "zero", "subnormal", "huge", "nan", "infinite", "halves", "signs", "ties")


@dataclass(frozen=True)
class Calls:
    """What a backend does, by formats."""

    backend: Any = reference

    def encode(self, source: Any, rows: Rows, fmt: RecordFormat, seed: int = 0, **feedback: Any) -> torch.Tensor:
        return Encoder(fmt, rows, source[0].dtype, self.backend, bool(feedback))(source, seed=seed, **feedback)

    def encode_feedback(self, source: Any, residuals: Any, factors: Any, *how: Any) -> list[torch.Tensor]:
        left = [residual.clone() for residual in residuals]
        return [self.encode(source, *how, residuals=left, factors=factors), *left]

    def decode(self, payload: torch.Tensor, rows: Rows, fmt: RecordFormat, dtype: torch.dtype) -> list[torch.Tensor]:
        return Decoder(fmt, rows, dtype, self.backend)(payload)

    def decode_sum(self, payload: Any, rows: Rows, fmt: RecordFormat, dtype: Any, sums: Any = None) -> Any:
        return Decoder(fmt, rows, dtype, self.backend, True, sums is not None)(payload, sums)

    def decode_sum_encode(self, payload: Any, rows: Rows, fmt: RecordFormat, dtype: Any, *how: Any) -> torch.Tensor:
        outer, out, seed = how
        summed = Rows.of(rows.chunks, (rows.inner,), outer=outer)
        return Recoder(fmt, rows, dtype, out, summed, self.backend)(payload, seed=seed)


REFERENCE = Calls()


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
    seed: int = 0
    short: int = 0
    unaligned: bool = False

    @property
    def rows(self) -> Rows:
        return Rows.of(self.chunks, self.sizes, self.strides, self.outer)


def source_of(case: Case) -> list[torch.Tensor]:
    """The tensors of a case; the last one ``short`` elements short."""
    source = []
    for index, chunk in enumerate(case.chunks):
        count = case.rows.total * chunk - (case.short if index + 1 == len(case.chunks) else 0)
        x = numbers(case.kind, max(count, 0), case.dtype, case.seed + index)
        source.append(torch.cat([x.new_zeros(1), x])[1:] if case.unaligned else x)
    return source


def _there(argument: Any, device: torch.device) -> Any:
    """A copy of tensors on a device, as unaligned as they are; anything else as it is."""
    if isinstance(argument, list):
        return [_there(one, device) for one in argument]
    if not isinstance(argument, torch.Tensor):
        return argument
    offset = argument.storage_offset()
    return torch.cat([argument.new_zeros(offset), argument]).to(device)[offset:]


def _flat(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result.cpu()]
    return [tensor for one in result for tensor in _flat(one)]


def compared(backend: Any, device: torch.device, name: str, *arguments: Any) -> Iterator[str]:
    """The call, if the backend finds other bits than the reference."""
    there = [_there(argument, device) for argument in arguments]
    if SANITIZED:
        getattr(Calls(backend), name)(*there)
        return
    want, got = (getattr(one, name)(*given) for one, given in ((REFERENCE, arguments), (Calls(backend), there)))
    if not same(_flat(got), _flat(want)):
        yield f"{name}{arguments[1:]}"


def disagreements(backend: Any, case: Case, device: torch.device) -> Iterator[str]:
    """Operators by which the backend finds other bits than the reference."""
    compare = functools.partial(compared, backend, device)
    source, rows, fmt, seed = source_of(case), case.rows, case.fmt, case.seed
    yield from compare("encode", source, rows, fmt, seed)
    if fmt.codec in FIXED:  # of the others nothing is lost that could be fed back
        residuals = [numbers("normal", t.numel(), seed=7) for t in source]
        factors = [(1.0, 0.5, 1.0 / 3.0)[index % 3] for index in range(len(source))]
        for kept in (torch.float32, torch.bfloat16):
            residuals = [residual.to(kept) for residual in residuals]
            yield from compare("encode_feedback", source, residuals, factors, rows, fmt, seed)

    payload = Calls(backend if SANITIZED else reference).encode(source, rows, fmt, seed)
    for dtype in (case.dtype,) if fmt.traits.plain else FLOATS:
        yield from compare("decode", payload, rows, fmt, dtype)

    how = (rows, fmt, case.dtype)
    yield from compare("decode_sum", payload, *how)
    yield from compare("decode_sum", payload, *how, [numbers("normal", rows.inner * c, seed=9) for c in case.chunks])
    outs = itertools.product(BLOCK_CODECS, (True, False))
    for codec, like in itertools.islice(outs, 1 if sum(case.chunks) > 1 << 19 else 6):
        # Other blocks are encoded in a second step.
        size = fmt.block_size if like and fmt.traits.codes else 64
        out = (
            fmt
            if like and not fmt.traits.reference
            else RecordFormat.of(codec, size, fmt.rotation * like, fmt.stochastic)
        )
        yield from compare("decode_sum_encode", payload, *how, rows.inner, out, seed)


def random_case() -> Case:
    """A case of many kinds, awkward sizes on purpose; another one each time."""
    draw = random.Random()
    block_size = draw.choice([16, 32, 48, 64, 128, 192, 256, 384, 512])
    rotation = draw.choice([size for size in (0, 64, 128) if not size or block_size % size == 0])
    fmt = RecordFormat.of(draw.choice(BLOCK_CODECS), block_size, rotation, draw.random() < 0.3)
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
    return Case(chunks, sizes, strides, outer, fmt, dtype, kind, seed, short, draw.random() < 0.3)
