"""Numbers of many kinds, and what tests of codecs do with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Generator, Tensor

from hzero.codecs.codec import Codec
from hzero.codecs.formats import BLOCK_CODECS, Rows
from hzero.config import CodecConfig

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def make(codec: str, **settings: Any) -> Codec:
    """A codec; the key ``rounding`` is left out where it has none."""
    if codec not in BLOCK_CODECS:
        settings.pop("rounding", None)
    return Codec.from_config(CodecConfig(codec=codec, **settings))


def round_trip(codec: Codec, x: Tensor, dtype: torch.dtype | None = None, seed: int = 0) -> Tensor:
    return codec.decode(codec.encode([x], [x.numel()], seed=seed), [x.numel()], dtype=dtype or x.dtype)[0]


def encode_feedback(
    codec: Codec, source: Sequence[Tensor], residuals: Any, factors: Any, chunks: Any, *, seed: int = 0, **layout: Any
) -> tuple[Tensor, list[Tensor]]:
    """The message, and what it lost."""
    left = [residual.clone() for residual in residuals]
    encoder = codec.encoder(Rows.of(chunks, **layout), source[0].dtype, source[0].device, feedback=True)
    return encoder(source, seed=seed, residuals=left, factors=factors), left


def decode_sum(
    codec: Codec, payload: Tensor, peers: int, chunks: Any, *, inner: int, dtype: torch.dtype, into: Any = None
) -> list[Tensor]:
    rows = Rows.of(chunks, (peers, inner), outer=peers)
    return codec.decoder(rows, dtype, payload.device, sums=True, add=into is not None)(payload, into)


def decode_sum_encode(
    codec: Codec,
    payload: Tensor,
    peers: int,
    chunks: Any,
    *,
    inner: int,
    dtype: torch.dtype,
    to: Codec,
    outer: int = 1,
    seed: int = 0,
) -> Tensor:
    rows, summed = Rows.of(chunks, (peers, inner), outer=peers), Rows.of(chunks, (inner,), outer=outer)
    return codec.recoder(rows, dtype, payload.device, to, summed)(payload, seed=seed)


def normal(count: int, generator: Generator, info: torch.finfo | None = None) -> Tensor:
    return torch.randn(count, generator=generator)


def any_bits(count: int, generator: Generator, info: torch.finfo | None = None) -> Tensor:
    return torch.randint(-(2**31), 2**31, (count,), generator=generator).to(torch.int32).view(torch.float32)


def _among_others(value: float, count: int, generator: Generator) -> Tensor:
    x = normal(count, generator)
    x[torch.randint(0, max(count, 1), (1,), generator=generator)[:count]] = value
    return x


def _halves(count: int, generator: Generator, info: torch.finfo) -> Tensor:
    """Quotients in the middle between codes, in int8 and in int4."""
    x = (torch.randint(-254, 255, (count,), generator=generator) * 0.5).clamp(-127, 127)
    x[torch.randint(0, max(count, 1), (1,), generator=generator)[:count]] = 127.0
    return x


#: By a generator, for a type.
KINDS: dict[str, Callable[[int, Generator, torch.finfo], Tensor]] = {
    "normal": normal,
    "any bits": any_bits,
    "nans": lambda n, g, info: (any_bits(n, g).view(torch.int32) | 0x7F800001).view(torch.float32),
    "nan": lambda n, g, info: _among_others(torch.nan, n, g),
    "infinite": lambda n, g, info: _among_others(torch.inf * (1 - 2 * (n % 2)), n, g),
    "constant": lambda n, g, info: normal(1, g).expand(n).clone(),
    "zero": lambda n, g, info: normal(n, g).sign() * 0.0,
    "halves": _halves,
    "signs": lambda n, g, info: normal(n, g).sign(),  # both signs reach the magnitude
    "ties": lambda n, g, info: torch.randint(-8, 9, (n,), generator=g).float(),
    "smooth": lambda n, g, info: torch.linspace(-3, 3, n).exp(),
    "bfloat16": lambda n, g, info: normal(n, g).bfloat16().float(),
    "subnormal": lambda n, g, info: normal(n, g) * info.tiny * 2.0 ** torch.randint(-10, 4, (1,), generator=g),
    "subnormal among others": lambda n, g, info: normal(n, g) * torch.tensor([1.0, 1e-42])[torch.arange(n) % 2],
    "tiny range": lambda n, g, info: normal(n, g) * 2.0**-90,
    "one exponent": lambda n, g, info: 1 + torch.rand(n, generator=g),
    "heavy tails": lambda n, g, info: normal(n, g) / (torch.rand(n, generator=g) + 1e-6) ** 2,
    "huge": lambda n, g, info: (normal(n, g) * info.max).clamp(-info.max, info.max),
}


def numbers(kind: str, count: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return KINDS[kind](count, Generator().manual_seed(seed), torch.finfo(dtype)).to(dtype)


def same_bits(got: Tensor, want: Tensor) -> bool:
    """NaNs too."""
    return got.dtype == want.dtype and torch.equal(got.view(torch.uint8), want.view(torch.uint8))


def same(got: Sequence[Tensor], want: Sequence[Tensor]) -> bool:
    """Bit for bit, but for the bits of NaNs, which the format leaves open."""
    for ours, theirs in zip(got, want):
        if ours.dtype.is_floating_point:
            if not torch.equal(ours.isnan(), theirs.isnan()):
                return False
            ours, theirs = ours.masked_fill(ours.isnan(), 0.0), theirs.masked_fill(theirs.isnan(), 0.0)
        if not same_bits(ours, theirs):
            return False
    return len(got) == len(want)
