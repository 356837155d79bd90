"""Payloads that no encoder has made: an error that says what was found and expected, or numbers; nothing else is touched."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hzero.codecs import backends, exact, reference
from hzero.codecs.exact import Layout
from hzero.codecs.formats import BLOCK_CODECS, TRAITS, RecordFormat, Rows
from tests.codecs.samples import FLOATS, numbers
from tests.kernels.cases import Calls, compared
from tests.kernels.emulated import SANITIZED
from tests.kernels.test_kernels import backend_of
from tests.ranks import LONG

BACKENDS = ("reference", "host")
#: Numbers to take for counts: 64-bit integers.
COUNTS = (-1, 0, 1, 2, 3, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1)

#: Codecs whose records decode without a copy; tests/codecs/test_exact.py has the other.
CODECS = tuple(name for name, traits in TRAITS.items() if not traits.changes)


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
    fmt = RecordFormat.of(draw.choice(CODECS), block_size, rotation, **own)
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
    codec=st.sampled_from(CODECS),
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


@pytest.mark.parametrize("target", ["host", "avx2", "baseline", pytest.param("wave 64", marks=LONG)])
@settings(max_examples=8 if SANITIZED else 20)
@given(seed=st.integers(0, 2**40))
def test_any_record_of_codec_exact_is_decoded_alike(target: str, seed: int) -> None:
    """Whatever its table, starts and lengths say, and wherever it ends: the reference's weights, and nothing beside them."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    dtype, most = draw.choice(FLOATS[1:]), 4000 if target == "wave 64" else 20_000
    chunks = [min(draw.choice((0, 1, 3, 64, 255, 700, 5000, 16_500)), most) for _ in range(draw.randint(1, 3))]
    layout = Layout.of(tuple(chunks))
    old = [torch.randint(-0x8000, 0x8000, (2, chunk), generator=generator).short().view(dtype) for chunk in chunks]
    new = [torch.randint(-300, 300, (chunk,), generator=generator).short() + one[0].view(torch.int16)
           for chunk, one in zip(chunks, old)]  # fmt: skip
    record = torch.zeros(layout.head, dtype=torch.uint8)
    exact.measure([one.view(dtype) for one in new], [one[0] for one in old], record)
    words = int(record[exact.WORDS : exact.WORDS + 4].view(torch.int32))
    record = torch.cat((record, torch.zeros(layout.record_bytes(words) - layout.head, dtype=torch.uint8)))
    exact.encode([one.view(dtype) for one in new], [one[0] for one in old], record)
    record = record[: layout.head + draw.randint(0, (len(record) - layout.head) // 16) * 16].clone()  # of its very size
    parts = (
        (0, exact.TABLE),
        (exact.FIXED_PART, layout.lane_bytes),
        (layout.lane_bytes, layout.head),
        (layout.head, len(record)),
    )
    for begin, end in draw.sample(parts, draw.randint(0, 4)):
        some = torch.rand(end - begin, generator=generator) < draw.choice((0.001, 0.1, 1.0))
        record[begin:end][some] = _hostile(end - begin, draw)[some]
    before, found = record.clone(), []
    backend = _backend(target)
    best = backend.launcher.instruction_set if target != "wave 64" else ""
    for chosen in (reference, backend):
        copies = [one.clone() for one in old]
        if chosen is backend and target in ("avx2", "baseline"):
            backend.launcher.instruction_set = target
        with mock.patch.object(backends, "choice", lambda kind, c=chosen: backends.Choice(target, c, "of this test")):
            right = exact.decode(record, copies, [1])
        found.append([right, *(copy.view(torch.uint8) for copy in copies)])
    if best:
        backend.launcher.instruction_set = best
    assert all(map(torch.equal, *found)) and torch.equal(record, before)
    assert all(torch.equal(copy[0], one[0].view(torch.uint8)) for copy, one in zip(found[0][1:], old))
