"""Codec exact: every change of 16-bit weights arrives to the last bit, in the same message from every backend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hzero.codecs import backends, exact
from hzero.codecs.exact import CHECK, WORDS, Layout
from hzero.codecs.launchers import EXACT_ROWS, TENSORS
from tests.kernels.test_kernels import TARGETS, backend_of

DTYPES = (torch.bfloat16, torch.float16)
#: Sizes around those of vectors, lanes and blocks.
AWKWARD = ((0, 1, 3), (255, 256, 257), (16384, 16385), (40000, 0, 700))
CHANGES = {
    "same": lambda bits, draw: bits,
    "low bit": lambda bits, draw: bits ^ 1,
    "sign": lambda bits, draw: bits ^ -0x8000,
    "reversed": lambda bits, draw: bits.flip(0),
    "near": lambda bits, draw: bits + (1.5 * torch.randn(len(bits), generator=draw)).round().short(),
    "far": lambda bits, draw: bits + (300 * torch.randn(len(bits), generator=draw)).round().short(),
    "random": lambda bits, draw: any_bits(len(bits), draw),
}


def any_bits(count: int, draw: torch.Generator) -> Tensor:
    return torch.randint(-0x8000, 0x8000, (count,), generator=draw).short()


def same(got: Sequence[Tensor], want: Sequence[Tensor]) -> bool:
    """NaNs too."""
    return all(
        torch.equal(one.view(torch.int16), other.view(torch.int16)) for one, other in zip(got, want, strict=True)
    )


def record_of(new: Sequence[Tensor], old: Sequence[Tensor]) -> Tensor:
    layout = Layout.of(tuple(map(len, old)))
    head = old[0].new_full((layout.head,), 0xAA, dtype=torch.uint8)
    exact.measure(new, old, head)
    record = head.new_full((layout.record_bytes(words_of(head)),), 0xAA)
    record[: layout.head] = head
    exact.encode(new, old, record)
    return record


def words_of(head: Tensor) -> int:
    return int(head[WORDS : WORDS + 4].view(torch.int32))


def copies_of(tensors: Sequence[Tensor], rows: int) -> list[Tensor]:
    """Each tensor in ``rows`` rows apart in memory, at addresses that are a multiple of 2 alone."""
    wide = [tensor.new_zeros(rows, len(tensor) + 5) for tensor in tensors]
    copies = [one[:, 1 : 1 + len(tensor)] for one, tensor in zip(wide, tensors)]
    for copy, tensor in zip(copies, tensors):
        copy.copy_(tensor.expand(rows, -1))
    return copies


@pytest.fixture(params=["reference", *TARGETS])
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of the backend that all calls use, unless `backends.reference_instead` says otherwise."""
    library: Any = getattr(backend_of("host"), "launcher", None)
    best = getattr(library, "instruction_set", "")
    backend = backends.reference if request.param == "reference" else backend_of(request.param)
    if isinstance(backend, str):
        pytest.skip(backend)
    if request.param in ("avx512", "avx2", "baseline"):
        library.instruction_set = request.param  # one library, so one setting
    monkeypatch.setattr(backends, "choice", lambda kind: backends.Choice(request.param, backend, "of this test"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small tensors are slow to share
    yield request.param
    torch.set_num_threads(threads)
    if best:
        library.instruction_set = best


#: Records of the reference.
EXPECTED: dict[Any, Tensor] = {}


def on_gpu(target: str) -> bool:
    return target == "device"


def assert_exact(target: str, new: Sequence[Tensor], old: Sequence[Tensor]) -> Tensor:
    """The message of the reference arrives, between rows that stay as they are. Returns the record."""
    key = tuple(bytes(one.view(torch.uint8).numpy()) for one in (*new, *old)), old[0].dtype
    if key not in EXPECTED:  # of all targets, since the reference takes long
        with backends.reference_instead():
            EXPECTED[key] = record_of(new, old)
    expected = EXPECTED[key]
    if on_gpu(target):
        new, old = [one.cuda() for one in new], [one.cuda() for one in old]
    record = record_of(new, old)
    assert torch.equal(record.cpu(), expected)
    order = [2] if target == "reference" else [2, 0]
    copies, full = copies_of(old, 4), [torch.cat((a, b[len(a) :])) for a, b in zip(new, old)]
    assert exact.decode(record.repeat(len(order)), copies, order).all()
    for row in range(4):
        assert same([copy[row] for copy in copies], full if row in order else old)
    outside = [copy.as_strided((4, copy.shape[1] + 5), (copy.shape[1] + 5, 1), 0) for copy in copies]
    assert not any(one[:, [0, -1]].any() for one in outside)
    return expected


@pytest.mark.parametrize("change", CHANGES)
def test_every_pattern_arrives(target: str, change: str) -> None:
    """Of all 16 bits; emulated, which takes long, one pattern in 16."""
    draw = torch.Generator().manual_seed(1)
    patterns = torch.arange(-0x8000, 0x8000)[:: 16 if target.startswith("wave") else 1].short()
    for dtype in DTYPES:
        mixed = patterns[torch.randperm(len(patterns), generator=draw)]
        for old in (patterns, mixed) if change == "random" else (mixed,):
            assert_exact(target, [CHANGES[change](old, draw).view(dtype)], [old.view(dtype)])


@pytest.mark.parametrize("chunks", AWKWARD, ids=str)
def test_awkward_sizes(target: str, chunks: tuple[int, ...]) -> None:
    """Weights of a model, of which an optimizer changes some signs, and a shard lacks some at its end."""
    draw = torch.Generator().manual_seed(2)
    for dtype, lacks in zip(DTYPES, (0, 70)):
        old = [(0.02 * torch.randn(chunk, generator=draw)).to(dtype) for chunk in chunks]
        new = [(one.float() + 1e-4 * torch.randn(len(one), generator=draw)).to(dtype) for one in old]
        assert_exact(target, [one[: max(len(one) - lacks, 0)] for one in new], old)


def test_many_tensors_and_records(target: str) -> None:
    """More than the arguments of one launch hold."""
    draw = torch.Generator().manual_seed(3)
    old = [any_bits(1 + index % 3, draw).view(torch.float16) for index in range(2 * TENSORS + 1)]
    new = [any_bits(len(one), draw).view(torch.float16) for one in old]
    device = "cuda" if on_gpu(target) else "cpu"
    record = assert_exact(target, new, old).to(device)
    new, old = [one.to(device) for one in new[:1]], [one.to(device) for one in old[:1]]
    rows, record = EXACT_ROWS + 3, record_of(new, old)
    copies = copies_of(old, rows)
    order = torch.randperm(rows, generator=draw).tolist()[: rows - 1]
    message = record.repeat(rows - 1)
    message[7 * len(record) + CHECK] ^= 1
    right = exact.decode(message, copies, order).tolist()
    assert right.count(False) == 1 and not right[7]
    changed = set(order)
    for row in range(rows):
        assert same([copies[0][row]], new if row in changed else old)


def test_nothing_to_send(target: str) -> None:
    device = "cuda" if on_gpu(target) else "cpu"
    nothing = torch.empty(0, dtype=torch.bfloat16)
    assert_exact(target, [nothing, nothing], [nothing, nothing])
    no_records = exact.decode(
        torch.empty(0, dtype=torch.uint8, device=device), [torch.ones(2, 3).to(device).half()], []
    )
    assert no_records.dtype == torch.bool and no_records.shape == (0,)


def test_a_wrong_copy_is_found(target: str) -> None:
    """One bit of a weight that differs from the sender's copy."""
    device = "cuda" if on_gpu(target) else "cpu"
    old = torch.randn(3000, generator=torch.Generator().manual_seed(4)).bfloat16().to(device)
    record = record_of([old + 0.01], [old])
    copies = copies_of([old], 3)
    copies[0][1, 1234] = -copies[0][1, 1234]
    assert exact.decode(record.repeat(3), copies, [0, 1, 2]).tolist() == [True, False, True]


def test_devices_do_not_wait(target: str) -> None:
    if not on_gpu(target):
        pytest.skip("only a GPU waits")
    old = torch.randn(50_000, device="cuda").bfloat16()
    record, copies = record_of([old * 1.01], [old]), copies_of([old], 2)
    layout, head = Layout.of((len(old),)), record.new_zeros(Layout.of((len(old),)).head)
    torch.cuda.set_sync_debug_mode("error")
    try:
        exact.measure([old * 1.01], [old], head)
        exact.encode([old * 1.01], [old], record)
        right = exact.decode(record, copies, [1])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bool(right) and torch.equal(head, record[: layout.head])


# ---- docs/payload_format.md -----------------------------------------------------------------------------------------


def ordered(bits: int) -> int:
    return bits if bits < 0x8000 else 0x7FFF - bits


def class_of(bits: int, dtype: torch.dtype) -> int:
    found = ((bits & 0x7FFF) >> 7) - 84 if dtype == torch.bfloat16 else (bits & 0x7FFF) >> 9
    return min(max(found, 0), 63)


def code_bits(z: int, k: int) -> int:
    return (z >> k) + 1 + k if z >> k < 15 else 31


def naive_decode(record: bytes, chunks: Sequence[int], olds: list[int], dtype: torch.dtype) -> list[int]:
    """New bits of a row, by the page alone."""

    def word(at: int) -> int:
        return int.from_bytes(record[at : at + 4], "little")

    def padded(size: int) -> int:
        return -(-size // 16) * 16

    table = [record[c // 2] >> c % 2 * 4 & 15 for c in range(64)]
    sizes = [min(chunk - at, 16384) for chunk in chunks for at in range(0, chunk, 16384)]
    lanes = [-(-size // 256) for size in sizes]
    lengths = padded(48 + 4 * len(sizes))
    stream = padded(lengths + sum(lanes))
    bits = int.from_bytes(record[stream:], "little")
    news, first, at = list(olds), 0, 0
    for block, (size, count) in enumerate(zip(sizes, lanes)):
        assert word(48 + 4 * block) == at
        for lane in range(count):
            place = 32 * at
            for i in range(first + lane, first + size, count):
                k, ones = table[class_of(olds[i], dtype)], 0
                while ones < 15 and bits >> place + ones & 1:
                    ones += 1
                if ones == 15:
                    news[i], place = bits >> place + 15 & 0xFFFF, place + 31
                    continue
                z = ones << k | bits >> place + ones + 1 & (1 << k) - 1
                place += ones + 1 + k
                moved = ordered(olds[i]) + (z // 2 if z % 2 == 0 else -(z + 1) // 2)
                moved = (moved + 0x8000) % 0x10000 - 0x8000
                news[i] = moved if moved >= 0 else 0x7FFF - moved
            at += (place - 32 * at + 31) // 32
            assert record[lengths] == (place + 31) // 32 - (at - record[lengths])
            lengths += 1
        first += size
    assert word(36) == at and not bits >> 32 * at
    assert word(32) == sum(new * (2 * p + 1) for p, new in enumerate(news)) % 2**32
    changes = [(ordered(new) - ordered(old) + 0x8000) % 0x10000 - 0x8000 for new, old in zip(news, olds)]
    for c in range(64):  # the fewest bits, and the smallest of several
        zs = [2 * d if d >= 0 else -2 * d - 1 for d, old in zip(changes, olds) if class_of(old, dtype) == c]
        assert table[c] == min(range(16), key=lambda k: sum(code_bits(z, k) for z in zs))
    return news


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_messages_are_as_the_page_says(change: str, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(5)
    chunks = (0, 3, 700, 257)
    old = [(any_bits(chunk, draw) if change == "random" else torch.randn(chunk, generator=draw).to(dtype).view(torch.int16))
           for chunk in chunks]  # fmt: skip
    new = [CHANGES[change](one, draw) for one in old]
    record = record_of([one.view(dtype) for one in new], [one.view(dtype) for one in old])
    joined = [[bits & 0xFFFF for bits in torch.cat(one).tolist()] for one in (old, new)]
    assert naive_decode(bytes(record.tolist()), chunks, joined[0], dtype) == joined[1]
    assert len(record) == Layout.of(chunks).record_bytes(words_of(record))


@settings(max_examples=60, deadline=None)
@given(
    chunks=st.lists(st.sampled_from((0, 1, 2, 31, 64, 255, 700, 3000, 17000)), min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
    scale=st.floats(-8, 16),
    lacks=st.integers(0, 300),
    threads=st.integers(1, 2),
    seed=st.integers(0, 2**31),
)
def test_any_change_arrives(
    chunks: list[int], dtype: torch.dtype, scale: float, lacks: int, threads: int, seed: int
) -> None:
    """With the instructions of this machine, and with the reference: the same message, and the new weights."""
    draw, before = torch.Generator().manual_seed(seed), torch.get_num_threads()
    torch.set_num_threads(threads)
    old = [any_bits(chunk, draw) for chunk in chunks]
    steps = [(2.0**scale * torch.randn(chunk, generator=draw)).round().int() for chunk in chunks]
    full = [(one + step).short() for one, step in zip(old, steps)]
    new = [one[: max(len(one) - lacks, 0)].view(dtype) for one in full]
    full = [torch.cat((one.view(torch.int16), rest[len(one) :])) for one, rest in zip(new, old)]
    record = record_of(new, [one.view(dtype) for one in old])
    with backends.reference_instead():
        assert torch.equal(record, record_of(new, [one.view(dtype) for one in old]))
    for context in (backends.reference_instead, torch.no_grad):
        copies = copies_of([one.view(dtype) for one in old], 2)
        with context():
            assert exact.decode(record, copies, [1]).all()
        assert same([copy[1] for copy in copies], full)
    torch.set_num_threads(before)


# ---- arguments ------------------------------------------------------------------------------------------------------


def test_wrong_arguments_are_refused() -> None:
    """Kernels read and write any address."""
    old, layout = torch.zeros(300).bfloat16(), Layout.of((300,))
    head, copies = torch.zeros(layout.head, dtype=torch.uint8), torch.zeros(2, 300).bfloat16()
    cases: list[tuple[str, Any, tuple[Any, ...]]] = [
        (r"new: found \[301\] elements; expected \[300\]", exact.measure, ([torch.zeros(301).bfloat16()], [old], head)),
        (r"new\[0\]: found torch.float16 on cpu; expected torch.bfloat16", exact.measure, ([old.half()], [old], head)),
        (r"old\[0\]: found torch.float32; expected bfloat16 or float16", exact.measure, ([old.float()], [old.float()], head)),
        ("old: found no tensors; expected at least one", exact.measure, ([], [], head)),
        (r"old\[0\]: found strides \(2,\); expected", exact.measure, ([old[:150]], [copies.view(-1)[: 2 * 150 : 2]], head)),
        ("payload: found 79 bytes; expected 80", exact.measure, ([old], [old], head[:-1])),
        ("payload: found address .*; expected a multiple of 16", exact.measure, ([old], [old], torch.cat((head, head))[8:][:80])),
        ("payload: found 72 bytes; expected 80: 1 records", exact.encode, ([old], [old], head[:72])),
        ("payload: found 88 bytes; expected 80", exact.encode, ([old], [old], torch.cat((head, head))[:88])),
        ("payload: found torch.int8 of 1 dimensions; expected uint8", exact.decode, (head.view(torch.int8), [copies], [0])),
        ("payload: found 80 bytes; expected 160: 2 records", exact.decode, (head, [copies], [0, 1])),
        (r"copies\[0\]: found strides \(1, 2\); expected", exact.decode, (head, [copies.view(300, 2).t()], [0])),
        (r"copies\[0\]: found strides \(0, 1\); expected", exact.decode, (head, [old.expand(2, -1)], [0])),
        (r"copies\[1\]: found shape \(300,\); expected 2 rows", exact.decode, (head, [copies, old], [0])),
        (r"copies\[1\]: found torch.float16 on cpu; expected", exact.decode, (head, [copies, copies.half()], [0])),
        (r"order: found \[2\]; expected each of 2 rows at most once", exact.decode, (head, [copies], [2])),
        (r"order: found \[0, 0\]; expected", exact.decode, (head.repeat(2), [copies], [0, 0])),
    ]  # fmt: skip
    for message, call, arguments in cases:
        with pytest.raises((TypeError, ValueError), match=message):
            call(*arguments)
    freed = torch.zeros(2, 300).bfloat16()
    freed.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"copies\[0\]: found 0 bytes of storage; expected"):
        exact.decode(head, [freed], [0])
