"""Payloads that no encoder has made: an error that says what was found and expected, or numbers; nothing else is touched."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hzero.codecs import reference
from hzero.codecs.formats import BLOCK_CODECS, TRAITS, RecordFormat, Rows
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


def _messages(draw: random.Random) -> tuple[Rows, RecordFormat, torch.dtype]:
    """A bucket of whole vectors: the format does not define the bytes behind a record's elements."""
    block_size = draw.choice((16, 48, 64, 128, 496))
    rotation = draw.choice([size for size in (0, 64, 128) if not size or block_size % size == 0])
    own = {"rate": draw.randint(4, 24), "dimension": draw.randint(1, 32)}
    fmt = RecordFormat.of(draw.choice(tuple(TRAITS)), block_size, rotation, **own)
    chunks = tuple(16 * draw.choice((0, 1, 2, 5, 9, 33)) for _ in range(draw.randint(1, 3)))
    peers, inner = draw.randint(1, 4), draw.randint(1, 3)
    return Rows.of(chunks, (peers, inner), outer=peers), fmt, draw.choice(FLOATS)


@pytest.mark.parametrize("target", ["host", pytest.param("wave 64", marks=LONG)])
@settings(max_examples=60)
@given(seed=st.integers(0, 2**40))
@example(seed=29_132_163_691)  # sums of scales of -0
def test_any_bytes_are_decoded_alike(target: str, seed: int) -> None:
    """Scales of NaN and infinity, codes that no encoder writes, any address: all backends have the reference's numbers."""
    draw = random.Random(seed)
    rows, fmt, dtype = _messages(draw)
    more = random.Random(seed + 1)
    whole = more.random() < 0.5
    # Otherwise bytes follow a record's elements. The format does not define them after another encoding.
    if not whole:
        rows = rows._replace(chunks=tuple(c + more.choice((0, 1, 7, 15, 17)) for c in rows.chunks))
    payload = _hostile(fmt.message_bytes(rows.chunks, rows.total, dtype.itemsize), draw)
    before, size = payload.clone(), fmt.block_size if fmt.traits.codes else 64
    out = RecordFormat.of(draw.choice(BLOCK_CODECS), size, stochastic=draw.random() < 0.5)
    calls: list[tuple[Any, ...]] = [
        ("decode", rows, fmt, dtype),
        ("decode_onto", rows, fmt, [numbers("normal", rows.total * c, dtype, 3) for c in rows.chunks]),
        ("decode_sum", rows, fmt, dtype),
        ("decode_sum", rows, fmt, dtype, [numbers("normal", rows.inner * c, seed=3) for c in rows.chunks]),
        ("decode_sum_encode", rows, fmt, dtype, rows.inner, out, 5),
    ]
    for name, *how in calls:
        different = list(compared(_backend(target), payload.device, name, payload, *how))
        assert not different or (name == "decode_sum_encode" and not whole), different
    assert torch.equal(payload, before)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**40))
def test_payloads_of_another_size_are_refused(seed: int) -> None:
    draw = random.Random(seed)
    rows, fmt, dtype = _messages(draw)
    size = fmt.message_bytes(rows.chunks, rows.total, dtype.itemsize)
    wrong = draw.choice([n for n in (0, 1, size - 16, size - 1, size + 1, size + 16, 2 * size + 16) if 0 <= n != size])
    out = RecordFormat.of("int4", 64)
    for name, *more in (
        ("decode", rows, fmt, dtype),
        ("decode_sum", rows, fmt, dtype),
        ("decode_sum_encode", rows, fmt, dtype, 1, out, 0),
    ):
        for backend in BACKENDS:
            with pytest.raises(ValueError, match=f"^payload: found {wrong} bytes; expected {size}: "):
                getattr(Calls(_backend(backend)), name)(_hostile(wrong, draw), *more)


@settings(max_examples=100)
@given(
    counts=st.tuples(*[st.sampled_from(COUNTS)] * 4),
    codec=st.sampled_from(tuple(TRAITS)),
    size=st.sampled_from((0, 16, 100)),
)
def test_any_counts_give_an_error_or_the_few_elements_that_they_say(
    counts: tuple[int, ...], codec: str, size: int
) -> None:
    """Zero, negative and huge: nothing is allocated for them, no loop takes for ever."""
    payload, out = torch.zeros(size, dtype=torch.uint8), RecordFormat.of("int4", 16)
    how = RecordFormat.of(codec, 16), torch.float32
    first, second, third, fourth = counts
    calls: dict[str, tuple[Any, ...]] = {
        "decode": (((first,), (second,), (third,), fourth), *how),
        "decode_sum": (((second,), (first, third), None, first), *how),
        "decode_sum_encode": (((second,), (first, third), None, first), *how, fourth, out, 0),
    }
    for backend, (name, (rows, *arguments)) in ((b, call) for b in BACKENDS for call in calls.items()):
        try:
            found = getattr(Calls(_backend(backend)), name)(payload, Rows.of(*rows), *arguments)
        except (TypeError, ValueError) as error:
            assert "found" in str(error), error
        else:
            assert sum(t.numel() for t in (found if isinstance(found, list) else [found])) <= 2 * size
