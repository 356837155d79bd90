"""Messages bit for bit against a naive version of docs/payload_format.md: numpy scalars, one by one."""

from __future__ import annotations

import itertools
import math
import re
import struct
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hzero.codecs.codec import Codec
from hzero.codecs.formats import BLOCK_CODECS, FIXED
from hzero.config import CodecConfig
from tests.codecs.samples import FLOATS, make, numbers
from tests.ranks import ROOT

DOCUMENT = ROOT / "docs" / "payload_format.md"


# ---- the page, naively ----------------------------------------------------------------------------------------------


def bits_of(x: np.float32) -> int:
    return struct.unpack("<I", struct.pack("<f", x))[0] if not math.isnan(x) else 0x7FC00000


def float_of(bits: int) -> np.float32:
    return np.float32(struct.unpack("<f", struct.pack("<I", bits))[0])


def to_bf16(x: np.float32) -> int:
    if math.isnan(x):
        return 0x7FC0
    bits = bits_of(x)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


def mix(w: int) -> int:
    w ^= w >> 16
    w = w * 0x7FEB352D % 2**32
    w ^= w >> 15
    w = w * 0x846CA68B % 2**32
    return w ^ (w >> 16)


def noise(seed: int, row: int, column: int) -> np.float32:
    lo, hi = seed % 2**32, (seed >> 32) % 2**32
    key = mix(mix((lo + 0x9E3779B9) % 2**32) ^ hi)
    bits = mix(mix(row ^ key) ^ column % 2**32 // 2) >> column % 2 * 16 & 0xFFFF
    return np.float32((bits + 0.5) * 2.0**-16)


def up_to_bf16(x: np.float32) -> int:
    """The next bfloat16 that is not below a number, which is not negative."""
    bits = bits_of(x)
    return (bits >> 16) + (bits % 2**16 > 0)


#: Bits of a code.
BITS = {"int8": 8, "int4": 4}


def limits_of(cfg: CodecConfig) -> tuple[int, int]:
    """The lowest code and the highest."""
    high = 2 ** (BITS[cfg.codec] - 1) - 1
    return (-high if cfg.codec == "int8" else -high - 1), high


def level_of(cfg: CodecConfig) -> int:
    return limits_of(cfg)[1] if cfg.rounding == "stochastic" else -limits_of(cfg)[0]


def limited(scale_bits: int, level: int, dtype: torch.dtype) -> int:
    """The scale's bits after the limit, by walking down from it."""
    largest = Fraction(torch.finfo(dtype).max)
    low, high = 0, min(scale_bits & 0x7FFF, 0x7F7F)
    while low < high:  # the largest magnitude that does not exceed the limit
        middle = (low + high + 1) // 2
        if Fraction(float(float_of(middle << 16))) * level <= largest:
            low = middle
        else:
            high = middle - 1
    return (scale_bits & 0x8000) | low if low else 0


def rotated(values: list[np.float32], cfg: CodecConfig, factor: float = 1) -> list[np.float32]:
    """Groups in blocks of whole groups, times a factor: rounds of sums and differences instead of a product with a matrix."""
    values, size, blocks = list(values), cfg.rotation, range(0, len(values), cfg.block_size)
    for first in (at for block in blocks for at in range(block, block + cfg.block_size, size)):
        block = first // cfg.block_size * cfg.block_size
        if first >= len(values) or len(values[block : block + cfg.block_size]) % size:
            continue
        values[first : first + size] = [x * np.float32(factor) for x in values[first : first + size]]
        distance = 1
        while distance < size:
            for i in range(first, first + size):
                if not (i - first) & distance:
                    a, b = values[i], values[i + distance]
                    values[i], values[i + distance] = a + b, a - b
            distance *= 2
    return values


def exact_scale(block: list[np.float32], cfg: CodecConfig) -> np.float32:
    extreme = np.float32(0)
    for x in block:
        if abs(x) > abs(extreme):
            extreme = x
    if cfg.codec != "int8" and cfg.rounding == "nearest":
        return extreme / np.float32(limits_of(cfg)[0])
    return abs(extreme) / np.float32(level_of(cfg))


def naive_record(
    values: list[np.float32], cfg: CodecConfig, dtype: torch.dtype, seed: int, row: int, column: int
) -> bytes:
    codes, scales = [], b""
    if cfg.rotation:
        values = rotated(values, cfg, 1 / cfg.rotation)
    for first in range(0, len(values), cfg.block_size):
        block = values[first : first + cfg.block_size]
        if all(math.isfinite(x) for x in block):
            exact = exact_scale(block, cfg)
            narrow = up_to_bf16 if cfg.rounding == "stochastic" else to_bf16
            scale_bits = limited(narrow(exact), level_of(cfg), dtype)
        else:
            scale_bits = 0x7FC0
        scales += scale_bits.to_bytes(2, "little")
        scale = float_of(scale_bits << 16)
        low, high = limits_of(cfg)
        for i, x in enumerate(block):
            if scale == 0 or math.isnan(scale):
                codes.append(0)
                continue
            q = x / scale
            if cfg.rounding == "stochastic":
                q = np.floor(q + noise(seed, row, column + first + i))
            codes.append(int(min(max(np.rint(q), low), high)))
    bits = BITS[cfg.codec]
    whole = sum(code % 2**bits << bits * place for place, code in enumerate(codes))
    encoded = whole.to_bytes(-(-bits * len(codes) // 8), "little")
    if len(scales) == 2 and len(encoded) <= 14:
        return encoded + bytes(14 - len(encoded)) + scales
    return encoded + bytes(-len(encoded) % 16) + scales + bytes(-len(scales) % 16)


def naive_message(
    source: list[torch.Tensor],
    chunks: list[int],
    sizes: list[int],
    strides: list[int],
    outer: int,
    cfg: CodecConfig,
    seed: int,
) -> bytes:
    rows = [sum(i * s for i, s in zip(index, strides)) for index in itertools.product(*map(range, sizes))]
    inner, dtype, message = len(rows) // outer, source[0].dtype, b""
    for piece in range(outer):
        column = 0
        for tensor, chunk in zip(source, chunks):
            for row in range(piece * inner, (piece + 1) * inner):
                shard = torch.zeros(chunk, dtype=dtype)
                found = tensor.reshape(-1)[rows[row] * chunk : (rows[row] + 1) * chunk]
                shard[: found.numel()] = found
                if cfg.codec == "none" or (cfg.codec == "bf16" and dtype == torch.bfloat16):
                    record = bytes(shard.view(torch.uint8).tolist())
                elif cfg.codec == "bf16":
                    record = b"".join(to_bf16(np.float32(x)).to_bytes(2, "little") for x in shard.tolist())
                else:
                    values = [np.float32(x) for x in shard.tolist()]
                    record = naive_record(values, cfg, dtype, seed, row, column)
                message += record + bytes(-len(record) % 16)
            column += -(-chunk // cfg.block_size) * cfg.block_size
    return message


def naive_decoded(message: bytes, chunk: int, cfg: CodecConfig) -> list[np.float32]:
    """One record of a block codec."""
    bits = BITS[cfg.codec]
    whole = int.from_bytes(message, "little")
    codes = [whole >> bits * place & 2**bits - 1 for place in range(chunk)]
    half = 2 ** (bits - 1)
    start = 14 if chunk <= min(cfg.block_size, 112 // bits) else -(-bits * chunk // 128) * 16
    out = []
    for i, code in enumerate(codes):
        at = start + i // cfg.block_size * 2
        scale = float_of(int.from_bytes(message[at : at + 2], "little") << 16)
        out.append(np.float32((code + half) % (2 * half) - half) * scale)
    return rotated(out, cfg) if cfg.rotation else out


# ---- what is encoded ------------------------------------------------------------------------------------------------


def awkward(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Numbers of many magnitudes in stretches: normal, tiny, huge, zero, tied, and now and then not finite."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, generator=generator, dtype=torch.float64)
    stretch = torch.arange(count) // 13
    kinds = (
        torch.randint(0, 9, (int(stretch.max()) + 1 if count else 0,), generator=generator)[stretch]
        if count
        else stretch
    )
    top = torch.finfo(dtype).max
    x = torch.where(kinds == 1, x * 2.0**-130, x)
    x = torch.where(kinds == 2, (x / 3).clamp(-1, 1) * top, x)
    x = torch.where(kinds == 3, 0.0, x)
    x = torch.where(kinds == 4, x.sign() * 3, x)
    x = torch.where(kinds == 5, (x * 4).round() / 2, x)
    x = torch.where(kinds == 6, x * 2.0**-16, x)
    rare = torch.rand(count, generator=generator) < 0.004
    x = torch.where(rare, torch.tensor([math.nan, math.inf, -math.inf, top])[torch.arange(count) % 4].double(), x)
    return x.to(dtype)


LAYOUTS = [
    ([1], [1], 1),
    ([3], [1], 1),
    ([6], [1], 3),
    ([2, 3], [1, 2], 2),
    ([2, 3], [3, 1], 6),
    ([3, 2], [1, 3], 3),
    ([4, 3], [3, 1], 2),  # the outer index ends inside an axis, which is as well two
    ([2, 2, 2], [1, 2, 4], 2),
    ([2, 2, 2], [1, 4, 2], 4),
    ([1, 4, 1, 2], [9, 1, 7, 4], 8),
    ([6, 2], [2, 1], 4),
]


@st.composite
def buckets(draw: st.DrawFn) -> tuple[list[torch.Tensor], list[int], tuple[list[int], list[int], int], torch.dtype]:
    dtype, layout = draw(st.sampled_from(FLOATS)), draw(st.sampled_from(LAYOUTS))
    chunks = draw(st.lists(st.sampled_from([0, 1, 2, 7, 15, 16, 17, 33, 48, 65, 530]), min_size=1, max_size=3))
    source = []
    for chunk in chunks:
        whole = math.prod(layout[0]) * chunk
        count = draw(st.sampled_from([whole, max(whole - 3, 0), whole // 2, min(1, whole), 0]))
        source.append(awkward(count, dtype, draw(st.integers(0, 2**20))))
    return source, chunks, layout, dtype


def config(codec: str, blocks: tuple[int, int], rounding: str) -> CodecConfig:
    own = {"rotation": blocks[1], "rounding": rounding} if codec in BLOCK_CODECS else {}
    return CodecConfig(codec=codec, block_size=blocks[0], **own)


#: Sizes of a block, and of what is rotated together.
BLOCKS = [(16, 0), (32, 0), (128, 64), (384, 128)]
configs = st.builds(
    config,
    codec=st.sampled_from([codec for codec in FIXED if codec != "zfp"]),
    blocks=st.sampled_from([(16, 0), (32, 0), (48, 0), (64, 64), (128, 64)]),
    rounding=st.sampled_from(["nearest", "stochastic"]),
)


@settings(max_examples=80)
@given(
    bucket=buckets(),
    cfg=configs,
    seed=st.sampled_from([0, 1, -1, 2**31, 2**32, 2**63 - 1, -(2**63)]) | st.integers(-(2**63), 2**63 - 1),
)
@np.errstate(all="ignore")
def test_encode_is_the_page_bit_for_bit(bucket: Any, cfg: CodecConfig, seed: int) -> None:
    source, chunks, (sizes, strides, outer), _ = bucket
    message = Codec.from_config(cfg).encode(source, chunks, sizes=sizes, strides=strides, outer=outer, seed=seed)
    assert message.dtype == torch.uint8
    assert bytes(message.tolist()) == naive_message(source, chunks, sizes, strides, outer, cfg, seed)


@pytest.mark.parametrize("codec", BLOCK_CODECS)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("blocks", BLOCKS)
@np.errstate(all="ignore")
def test_many_blocks_bit_for_bit(codec: str, rounding: str, blocks: tuple[int, int]) -> None:
    """Enough values to show a reciprocal instead of a division, or another last bit."""
    cfg = config(codec, blocks, rounding)
    for dtype in FLOATS:
        source = [numbers("normal", 4000, dtype, 4), awkward(1600, dtype, 8)]
        message = Codec.from_config(cfg).encode(source, [1000, 400], sizes=[4], seed=11)
        assert bytes(message.tolist()) == naive_message(source, [1000, 400], [4], [1], 1, cfg, 11)


@settings(max_examples=40)
@given(bucket=buckets(), cfg=configs)
def test_decode_puts_every_shard_back(bucket: Any, cfg: CodecConfig) -> None:
    """Whatever the order of the rows, the tensors are those that rows in order give."""
    source, chunks, (sizes, strides, outer), dtype = bucket
    codec = Codec.from_config(cfg.model_copy(update={"rounding": "nearest"}))
    rows = math.prod(sizes)
    permuted = codec.encode(source, chunks, sizes=sizes, strides=strides, outer=outer)
    got = codec.decode(permuted, chunks, dtype=dtype, sizes=sizes, strides=strides, outer=outer)
    want = codec.decode(codec.encode(source, chunks, sizes=[rows]), chunks, dtype=dtype)
    for tensor, expected, chunk in zip(got, want, chunks):
        assert tensor.dtype == dtype and tensor.shape == (rows * chunk,) and tensor.is_contiguous()
        torch.testing.assert_close(tensor, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("codec", BLOCK_CODECS)
@pytest.mark.parametrize("blocks", BLOCKS)
@np.errstate(all="ignore")
def test_decode_is_code_times_scale(codec: str, blocks: tuple[int, int]) -> None:
    """Of any bytes, well formed or not, all codes and many scales among them."""
    cfg = config(codec, blocks, "nearest")
    own, chunk = Codec.from_config(cfg), 547
    generator = torch.Generator().manual_seed(3)
    record = torch.randint(0, 256, (own.message_bytes([chunk], 1, 4),), generator=generator, dtype=torch.uint8)
    for dtype in FLOATS:
        (got,) = own.decode(record, [chunk], dtype=dtype)
        want = torch.tensor(np.array(naive_decoded(bytes(record.tolist()), chunk, cfg))).to(dtype)
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_the_example_of_the_page() -> None:
    (block,) = re.findall(r"```hex\n(.*?)```", DOCUMENT.read_text(), flags=re.DOTALL)
    wanted = [int(byte, 16) for line in block.splitlines() for byte in line.split()[:16]]
    codec = make("int4", block_size=16)
    source = torch.tensor([1, -2, 0.25, 0.5, -0.75, 0, math.inf, 0, 1, 0, 3])
    assert codec.encode([source], [5], sizes=[3], strides=[1]).tolist() == wanted


def test_limits_are_those_of_the_page() -> None:
    found = re.findall(r"^ +\| `(int8|int4)` \|(.*)\|$", DOCUMENT.read_text(), flags=re.MULTILINE)
    assert len(found) == 2
    for codec, cells in found:
        for dtype, cell in zip(FLOATS, cells.split("|")):
            top = torch.full((16,), torch.finfo(dtype).max, dtype=dtype)
            top[0] *= 1 if codec == "int8" else -1
            record = make(codec, block_size=16).encode([top], [16])
            stored = bytes(record[16:18] if codec == "int8" else record[14:])
            assert int.from_bytes(stored, "little") == int(cell.split("`")[1], 16)
