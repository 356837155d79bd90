"""Payloads that no encoder has made: an error that says what was found and expected, or numbers; nothing else is touched."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hzero.codecs import reference
from hzero.codecs.formats import CODECS, CODED_SCALE_BLOCKS, ROTATIONS, Messages, RecordFormat, Rows
from tests.codecs.samples import FLOATS, numbers
from tests.kernels.cases import Calls, compared
from tests.kernels.test_kernels import backend_of
from tests.ranks import LONG

BACKENDS = ("reference", "host")
#: Numbers to take for counts: 64-bit integers.
COUNTS = (-1, 0, 1, 2, 3, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1)


def _backend(name: str) -> Any:
    backend = reference if name == "reference" else backend_of(name)
    if isinstance(backend, str):
        pytest.skip(backend)
    return backend


def _hostile(size: int, draw: random.Random) -> torch.Tensor:
    """uint8 ``[size]`` at any address: random, or full of bytes that make scales of NaN, infinity, zero or huge numbers."""
    shift = draw.choice((0, 0, 1, 2, 4, 13))
    generator = torch.Generator().manual_seed(draw.randrange(2**40))
    payload = torch.randint(0, 256, (size + shift,), dtype=torch.uint8, generator=generator)
    for byte in draw.choice(((), (0xFF,), (0x7F, 0x80), (0x00,), (0x7F, 0xFF))):
        payload[torch.rand(size + shift, generator=generator) < 0.4] = byte
    return payload[shift:]


def _scale(draw: random.Random, block_size: int) -> str:
    return draw.choice(("bf16", "fp32", "int8") if block_size in CODED_SCALE_BLOCKS else ("bf16", "fp32"))


def _messages(draw: random.Random) -> tuple[Messages, RecordFormat, torch.dtype]:
    """A bucket of whole vectors: the format leaves open what becomes of bytes behind a record's elements."""
    block_size = draw.choice((16, 48, 64, 128, 1040))
    rotation = draw.choice([size for size in ROTATIONS if not size or block_size % size == 0])
    own = (draw.randint(4, 24), draw.randint(1, 32))
    fmt = RecordFormat.of(draw.choice(CODECS), block_size, _scale(draw, block_size), rotation, *own)
    chunks = tuple(16 * draw.choice((0, 1, 2, 5, 9, 33)) for _ in range(draw.randint(1, 3)))
    return Messages(draw.randint(1, 4), chunks, draw.randint(1, 3)), fmt, draw.choice(FLOATS)


@pytest.mark.parametrize("target", ["host", pytest.param("wave 64", marks=LONG)])
@settings(max_examples=60)
@given(seed=st.integers(0, 2**40))
@example(seed=29_132_163_691)  # sums of scales of -0
def test_any_bytes_are_decoded_alike(target: str, seed: int) -> None:
    """Scales of NaN and infinity, codes that no encoder writes, any address: all backends have the reference's numbers."""
    draw = random.Random(seed)
    messages, fmt, dtype = _messages(draw)
    more = random.Random(seed + 1)
    whole = more.random() < 0.5
    # Otherwise bytes follow a record's elements: the format leaves open what becomes of them when they are encoded again.
    if not whole:
        messages = messages._replace(chunks=tuple(c + more.choice((0, 1, 7, 15, 17)) for c in messages.chunks))
    rows = Rows.of(messages.chunks, (messages.peers * messages.inner,), outer=messages.peers)
    payload = _hostile(fmt.message_bytes(rows.chunks, rows.total, dtype.itemsize), draw)
    before, size = payload.clone(), max(fmt.block_size, 64)
    out = RecordFormat.of(draw.choice(("int8", "int4")), size, _scale(draw, size))
    calls: list[tuple[Any, ...]] = [
        ("decode", rows, fmt, dtype),
        ("decode_onto", rows, fmt, [numbers("normal", rows.total * c, dtype, 3) for c in rows.chunks]),
        ("decode_sum", messages, fmt, dtype),
        ("decode_sum", messages, fmt, dtype, [numbers("normal", messages.inner * c, seed=3) for c in rows.chunks]),
        ("decode_sum_encode", messages, fmt, dtype, messages.inner, out, draw.random() < 0.5, 5),
    ]
    for name, *how in calls:
        different = list(compared(_backend(target), payload.device, name, payload, *how))
        assert not different or (name == "decode_sum_encode" and not whole), different
    assert torch.equal(payload, before)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**40))
def test_payloads_of_another_size_are_refused(seed: int) -> None:
    draw = random.Random(seed)
    messages, fmt, dtype = _messages(draw)
    rows = Rows.of(messages.chunks, (messages.peers * messages.inner,), outer=messages.peers)
    size = fmt.message_bytes(rows.chunks, rows.total, dtype.itemsize)
    wrong = draw.choice([n for n in (0, 1, size - 16, size - 1, size + 1, size + 16, 2 * size + 16) if 0 <= n != size])
    out = RecordFormat.of("int4", 64, "bf16")
    for name, *more in (
        ("decode", rows, fmt, dtype),
        ("decode_sum", messages, fmt, dtype),
        ("decode_sum_encode", messages, fmt, dtype, 1, out),
    ):
        for backend in BACKENDS:
            with pytest.raises(ValueError, match=f"^payload: found {wrong} bytes, expected {size}: "):
                getattr(Calls(_backend(backend)), name)(_hostile(wrong, draw), *more)


@settings(max_examples=100)
@given(
    counts=st.tuples(*[st.sampled_from(COUNTS)] * 4), codec=st.sampled_from(CODECS), size=st.sampled_from((0, 16, 100))
)
def test_any_counts_give_an_error_or_the_few_elements_that_they_say(
    counts: tuple[int, ...], codec: str, size: int
) -> None:
    """Zero, negative and huge: nothing is allocated for them, no loop takes for ever."""
    payload, out = torch.zeros(size, dtype=torch.uint8), RecordFormat.of("int4", 16, "bf16")
    how = RecordFormat.of(codec, 16, "bf16", 0, 9, 1), torch.float32
    first, second, third, fourth = counts
    calls: dict[str, tuple[Any, ...]] = {
        "decode": (Rows((first,), (second,), (third,), fourth), *how),
        "decode_sum": (Messages(first, (second,), third), *how),
        "decode_sum_encode": (Messages(first, (second,), third), *how, fourth, out),
    }
    for backend, (name, arguments) in ((b, call) for b in BACKENDS for call in calls.items()):
        try:
            found = getattr(Calls(_backend(backend)), name)(payload, *arguments)
        except (TypeError, ValueError) as error:
            assert "found" in str(error) or "do not reach each" in str(error), error
        else:
            assert sum(t.numel() for t in (found if isinstance(found, list) else [found])) <= 2 * size
