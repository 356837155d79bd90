"""Sizes of records and messages, and records as the unit in which payloads are cut and joined."""

from __future__ import annotations

import pytest
import torch

from hzero.codecs.formats import FIXED, RecordFormat, chunk_numel
from tests.codecs.samples import make, numbers


@pytest.mark.parametrize(
    ("codec", "block_size", "numel", "itemsize", "offsets", "record"),
    [
        ("none", 128, 1, 2, [0], 16),
        ("none", 128, 9, 4, [0], 48),
        ("bf16", 16, 9, 2, [0], 32),
        ("int8", 128, 1, 4, [0, 14], 16),
        ("int8", 128, 14, 4, [0, 14], 16),
        ("int8", 128, 15, 4, [0, 16], 32),
        ("int4", 32, 28, 2, [0, 14], 16),
        ("int4", 32, 29, 2, [0, 16], 32),
        ("int4", 16, 24, 2, [0, 16], 32),
        ("int8", 128, 1024, 2, [0, 1024], 1040),
        ("int8", 128, 1025, 2, [0, 1040], 1072),
        ("int8", 16, 65, 4, [0, 80], 96),
        ("int4", 128, 33, 4, [0, 32], 48),
        ("int4", 512, 4097, 2, [0, 2064], 2096),
        ("zfp", 16, 29, 2, [0], 48),
        ("mpc", 128, 1, 4, [0], 288),
        ("mpc", 128, 2048 + 33, 2, [0], 8864),
    ],
)
def test_record_sizes(codec: str, block_size: int, numel: int, itemsize: int, offsets: list[int], record: int) -> None:
    fmt = make(codec, block_size=block_size, rate=9 if codec == "zfp" else None).format
    assert fmt.offsets(numel, itemsize) == (*offsets, record)
    assert fmt.record_bytes(numel, itemsize) == record and fmt.record_bytes(0, itemsize) == 0
    assert fmt.message_bytes([numel, 3], 5, itemsize) == 5 * (record + fmt.record_bytes(3, itemsize))


def test_formats_without_blocks_do_not_differ_by_block_size() -> None:
    for codec in ("none", "bf16"):
        assert make(codec, block_size=16).format == make(codec).format == RecordFormat(codec)
    assert make("int4", block_size=64).format == RecordFormat("int4", 64)
    assert make("zfp").format == RecordFormat("zfp", 4, rate=16) and make("mpc").format.dimension == 1


@pytest.mark.parametrize(("numel", "world", "chunk"), [(0, 8, 0), (1, 8, 1), (8, 8, 1), (9, 8, 2), (17 * 257, 6, 729)])
def test_chunk_is_deepspeeds_partition(numel: int, world: int, chunk: int) -> None:
    assert chunk_numel(numel, world) == chunk


@pytest.mark.parametrize("codec", FIXED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_records_can_be_cut_out_and_joined_into_other_buckets(codec: str, dtype: torch.dtype) -> None:
    """Three tensors in one bucket, [outer][tensor][inner]; then two of them in another, by bytes alone."""
    own = make(codec, block_size=16, rate=9 if codec == "zfp" else None)
    chunks, outer, inner = [21, 1, 40], 2, 3
    source = [numbers("normal", outer * inner * chunk, dtype, chunk) for chunk in chunks]
    message = own.encode(source, chunks, sizes=[outer * inner], outer=outer)
    whole = own.decode(message, chunks, dtype=dtype, outer=outer)

    sizes = [own.message_bytes([chunk], inner, dtype.itemsize) for chunk in chunks]
    first, middle, last = message.view(outer, -1).split(sizes, dim=1)
    joined = torch.cat([last, first], dim=1).reshape(-1)
    for got, want in zip(own.decode(joined, [40, 21], dtype=dtype, outer=outer), (whole[2], whole[0])):
        assert torch.equal(got, want)
    assert torch.equal(own.decode(middle.reshape(-1), [1], dtype=dtype, outer=outer)[0], whole[1])

    # One row of one tensor, from the middle of the message: its storage starts where the record does.
    at = sum(sizes) + sizes[0] + sizes[1] + own.message_bytes([40], 2, dtype.itemsize)
    row = message[at : at + own.message_bytes([40], 1, dtype.itemsize)]
    assert torch.equal(own.decode(row, [40], dtype=dtype)[0], whole[2][5 * 40 :])


def test_bits_an_element() -> None:
    for bits, codec in {
        8.125: make("int8"),
        4.125: make("int4"),
        4.25: make("int4", block_size=64),
        16: make("bf16"),
        32: make("none"),
        9: make("zfp", rate=9),
        33 + 1 / 2**9: make("mpc"),
    }.items():
        assert 8 * codec.format.element_bytes(4) == bits, codec
