"""Codec ``exp``: the bits of the page, every bit of bfloat16 back, and blocks whose escapes find no place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codecs.samples import make, same_bits

EXP = make("exp")
BF16 = torch.bfloat16
LINE, BLOCK = 512, 32768


def words(x: torch.Tensor) -> torch.Tensor:
    """The bits of bfloat16 numbers, or of what becomes such numbers."""
    return x.to(BF16).view(torch.int16)


def uniform(count: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(-(2**15), 2**15, (count,), generator=generator).to(torch.int16)


#: Ten kinds of numbers, as bits.
KINDS: dict[str, Callable[[int, torch.Generator], torch.Tensor]] = {
    "constant": lambda n, g: words(torch.full((n,), 0.3)),
    "weights": lambda n, g: words(torch.randn(n, generator=g) * 0.02),
    "gradients": lambda n, g: words(torch.randn(n, generator=g) * torch.randn(n, generator=g) * 1e-5),
    "activations": lambda n, g: words(torch.randn(n, generator=g) * (1 + 60 * (torch.arange(n) % 97 == 0))),
    "sparse": lambda n, g: words(torch.randn(n, generator=g).relu() * -1.0),
    "subnormals": lambda n, g: uniform(n, g) & -0x7F81,
    "nans": lambda n, g: uniform(n, g) | 0x7F81,
    "infinities": lambda n, g: (uniform(n, g) & -0x8000) | 0x7F80,
    "magnitudes": lambda n, g: words(torch.randn(n, generator=g) * 2.0 ** (torch.arange(n) // LINE * 9 % 250 - 120)),
    "uniform": uniform,
}


def source_of(kind: str, count: int, seed: int = 0) -> torch.Tensor:
    return KINDS[kind](count, torch.Generator().manual_seed(seed)).view(BF16)


def round_trip(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """What comes back, and the number of lost blocks."""
    message = EXP.encode([x], [x.numel()])
    return EXP.decode(message, [x.numel()], dtype=BF16)[0], int(EXP.lost(message, [x.numel()]))


# ---- the page, naively ----------------------------------------------------------------------------------------------


def naive_record(elements: list[int]) -> bytes:
    """Codec ``exp`` of docs/payload_format.md, from 16-bit words, one by one."""
    tails, codes, starts, bases, lists = [], [], [], [], []
    for first in range(0, len(elements), BLOCK):
        block = elements[first : first + BLOCK]
        escapes: list[int] = []
        parts: list[tuple[list[int], int, int]] = []
        for at in range(0, len(block), LINE):
            exponents = [word >> 7 & 255 for word in block[at : at + LINE]]
            ranked = sorted([*[0] * 64, *exponents], reverse=True)
            bases_tried = [max(ranked[0] - 14, 0), min(max(ranked[63] + 3 - 14, 0), 241)]
            base = min(bases_tried, key=lambda b: sum(not (e == 0 or b < e <= b + 14) for e in exponents))
            line = [0 if e == 0 else e - base if base < e <= base + 14 else 15 for e in exponents]
            parts.append((line, len(escapes), base))
            escapes += [e for e, code in zip(exponents, line) if code == 15]
        limit = min(len(block), 512)
        lost = len(escapes) > limit
        for line, start, base in parts:
            codes += [15] * len(line) if lost else line
            starts.append(65535 if lost else start)
            bases.append(255 if lost else base)
        tails += [255 if lost else word >> 8 & 128 | word & 127 for word in block]
        lists += [255] * limit if lost else escapes + [0] * (limit - len(escapes))
    codes += [0] * (len(codes) % 2)
    record = b""
    heads = b"".join(start.to_bytes(2, "little") for start in starts) + bytes(bases) + bytes(lists)
    for part in (bytes(tails), bytes(a | b << 4 for a, b in zip(codes[::2], codes[1::2])), heads):
        record += part + bytes(-len(part) % 16)
    return record


@pytest.mark.parametrize("kind", KINDS)
def test_records_are_those_of_the_page(kind: str) -> None:
    for count in (1, 3, LINE, LINE + 1, BLOCK + 700):
        source = source_of(kind, count, seed=count)
        elements = [word & 0xFFFF for word in source.view(torch.int16).tolist()]
        assert bytes(EXP.encode([source], [count]).tolist()) == naive_record(elements), count


def test_a_message_has_the_records_of_its_rows() -> None:
    """Several tensors, rows in another order, sources that end early: elements beyond them count as +0."""
    chunks, sizes, strides, outer = [600, 0, 1, 37], [3, 2], [1, 3], 3
    source = [source_of("weights", max(6 * chunk - 5, 0), seed=chunk) for chunk in chunks]
    message = EXP.encode(source, chunks, sizes=sizes, strides=strides, outer=outer)
    want = b""
    for piece in range(outer):
        for tensor, chunk in zip(source, chunks):
            for row in (2 * piece, 2 * piece + 1):
                shard = row // 2 + row % 2 * 3
                found = tensor[shard * chunk : (shard + 1) * chunk].view(torch.int16).tolist()
                if chunk:
                    want += naive_record([word & 0xFFFF for word in found] + [0] * (chunk - len(found)))
    assert bytes(message.tolist()) == want
    decoded = EXP.decode(message, chunks, dtype=BF16, sizes=sizes, strides=strides, outer=outer)
    for got, tensor in zip(decoded, source):
        assert same_bits(got[: tensor.numel()], tensor) and not got[tensor.numel() :].view(torch.int16).any()


# ---- nothing is lost ------------------------------------------------------------------------------------------------


def test_every_word_comes_back() -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(BF16)
    got, lost = round_trip(every)
    assert same_bits(got, every) and not lost


@pytest.mark.parametrize("level", [0, 1, 13, 14, 15, 127, 240, 241, 254, 255])
def test_every_exponent_comes_back_among_any_others(level: int) -> None:
    """Of each exponent as many elements as a list of one line holds, in lines of exponents around a level."""
    generator = torch.Generator().manual_seed(level)
    exponents = (level - torch.randint(0, 3, (256, LINE), generator=generator)).clamp(min=0)
    for place in range(8):
        exponents[:, 60 * place + 7] = torch.arange(256)
    tails = uniform(256 * LINE, generator).view(256, LINE)
    source = (tails & -0x7F81 | exponents << 7).to(torch.int16).view(BF16).view(-1)
    message = EXP.encode([source], [LINE], sizes=[256])
    assert same_bits(EXP.decode(message, [LINE], dtype=BF16)[0], source)
    assert not EXP.lost(message, [LINE])


@settings(max_examples=40)
@given(
    lines=st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=70),
    short=st.integers(0, LINE - 1),
    seed=st.integers(0, 2**20),
)
def test_blocks_come_back_or_are_lost_as_a_whole(lines: list[str], short: int, seed: int) -> None:
    x = torch.cat([source_of(kind, LINE, seed + i) for i, kind in enumerate(lines)])
    x = x[: x.numel() - short]
    got, lost = round_trip(x)
    pairs = list(zip(got.split(BLOCK), x.split(BLOCK)))
    wrong = [part for part, own in pairs if not same_bits(part, own)]
    assert len(wrong) == lost and all((part.view(torch.int16) == -1).all() for part in wrong)


def test_lost_blocks_are_counted_in_every_record() -> None:
    chunks = [BLOCK + 10, 5, 900]
    source = [source_of("weights", 4 * chunk) for chunk in chunks]
    source[0][BLOCK + 10 :][:BLOCK] = source_of("uniform", BLOCK)  # first block of shard 1
    source[2][1800:2700] = source_of("uniform", 900)  # shard 2
    for outer in (1, 2, 4):
        message = EXP.encode(source, chunks, sizes=[4], outer=outer)
        assert int(EXP.lost(message, chunks, outer=outer)) == 2
        first, _, last = EXP.decode(message, chunks, dtype=BF16, outer=outer)
        assert first[BLOCK + 10 :][:BLOCK].isnan().all() and last[1800:2700].isnan().all()
        assert same_bits(first[2 * BLOCK + 10 :], source[0][2 * BLOCK + 10 :]) and same_bits(
            last[2700:], source[2][2700:]
        )
    assert not make("int8").lost(message, chunks)
    assert not EXP.lost(message[:0], [0])


# ---- the operators --------------------------------------------------------------------------------------------------


def test_other_types_are_those_of_bfloat16_converted() -> None:
    x = source_of("activations", 3000)
    x[5:9] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
    message = EXP.encode([x], [3000])
    for dtype in (torch.float32, torch.float16):
        got = EXP.decode(message, [3000], dtype=dtype)[0]
        torch.testing.assert_close(got, x.to(dtype), rtol=0, atol=0, equal_nan=True)
    assert EXP.traits.exact and EXP.error_bound(60.0, BF16) == EXP.error_bound(60.0) == 0.0
    assert EXP.error_bound(1e5, torch.float16) == float("inf")
    assert float((got.float() - x.float()).nan_to_num().abs().max()) <= EXP.error_bound(
        float(x[9:].abs().max()), torch.float16
    )
