"""Calls: sums, prepared ones, what they accept and what they refuse."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hzero.codecs import backends
from hzero.codecs.codec import Codec, checksums, fingerprints
from hzero.codecs.formats import BLOCK_CODECS, FIXED, TRAITS, RecordFormat, Rows
from tests.codecs import samples
from tests.codecs.samples import FLOATS, decode_sum, decode_sum_encode, numbers, same
from tests.ranks import LONG

from tests.codecs.samples import encode_feedback  # isort: skip

CHUNKS = [21, 0, 1, 64]


def make(codec: str, **settings: Any) -> Codec:
    if codec == "zfp":
        settings = {"rate": 9, **settings, "rounding": "nearest"}
    return samples.make(codec, **{"block_size": 16, **settings})


def bucket(rows: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.Tensor]:
    """Tensors of `CHUNKS`; the last one ends inside its last shard."""
    counts = [max(rows * chunk - (chunk == 64), 0) for chunk in CHUNKS]
    return [numbers("normal", count, dtype, seed + i) for i, count in enumerate(counts)]


def messages(codec: Codec, peers: int, inner: int, dtype: torch.dtype) -> torch.Tensor:
    sent = []
    for peer in range(peers):
        # Of other magnitudes: sums of few codes with scales of 8 bits would be exact, in any order.
        source = [tensor * (1.0, 300.0, 0.004)[peer % 3] for tensor in bucket(inner, dtype, 10 * peer)]
        sent.append(codec.encode(source, CHUNKS, sizes=[inner]))
    return torch.cat(sent)


# ---- sums -----------------------------------------------------------------------------------------------------------


def test_a_codec_with_scales_and_without_kernels_runs_in_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRAITS, "new", replace(TRAITS["int8"], compiled=""))  # type: ignore[misc]
    int8, int4 = make("int8"), make("int4")
    new = Codec(int8.format._replace(codec="new"))  # type: ignore[arg-type]
    payload = messages(new, 3, 2, torch.bfloat16)
    assert torch.equal(payload, messages(int8, 3, 2, torch.bfloat16))
    for own, to in ((new, new), (new, int4), (int4, new)):
        stock = int8 if own is new else own, int8 if to is new else to
        payload = messages(own, 3, 2, torch.bfloat16)
        how = {"inner": 2, "dtype": torch.bfloat16}
        got = decode_sum_encode(own, payload, 3, CHUNKS, to=to, **how)
        assert torch.equal(got, decode_sum_encode(stock[0], payload, 3, CHUNKS, to=stock[1], **how))


@pytest.mark.parametrize(("codec", "dtype"), itertools.product(FIXED, FLOATS))
@pytest.mark.parametrize(("peers", "inner"), [(1, 1), (1, 3), (2, 1), (3, 2), (7, 3)])
def test_decode_sum_adds_in_the_order_of_the_peers(codec: str, dtype: torch.dtype, peers: int, inner: int) -> None:
    own = make(codec)
    payload = messages(own, peers, inner, dtype)
    before = payload.clone()
    got = decode_sum(own, payload, peers, CHUNKS, inner=inner, dtype=dtype)
    assert torch.equal(payload, before)
    wire = dtype if codec == "none" else torch.float32
    parts = [own.decode(message, CHUNKS, dtype=wire) for message in payload.chunk(peers)]
    for index, chunk in enumerate(CHUNKS):
        want = parts[0][index].float()
        for part in parts[1:]:
            want = want + part[index].float()
        assert got[index].dtype == torch.float32 and got[index].shape == (inner * chunk,)
        assert torch.equal(got[index], want)
    sums = [numbers("normal", inner * chunk) for chunk in CHUNKS]
    want_added = [total.clone() for total in sums]
    for part in parts:
        want_added = [total + one.float() for total, one in zip(want_added, part)]
    added = decode_sum(own, payload, peers, CHUNKS, inner=inner, dtype=dtype, into=sums)
    assert all(torch.equal(ours, theirs) and ours is own for ours, theirs, own in zip(added, want_added, sums))


@settings(max_examples=40)
@given(
    codec=st.sampled_from(FIXED),
    to=st.builds(
        make,
        codec=st.sampled_from(FIXED),
        block_size=st.sampled_from([16, 32]),
        rounding=st.sampled_from(["nearest", "stochastic"]),
    ),
    dtype=st.sampled_from(FLOATS),
    peers=st.integers(1, 4),
    rows=st.sampled_from([(1, 1), (4, 2), (6, 3), (3, 3)]),
    bad=st.sampled_from([None, math.nan, math.inf]),
)
def test_decode_sum_encode_is_both_in_one(
    codec: str, to: Codec, dtype: torch.dtype, peers: int, rows: tuple[int, int], bad: float | None
) -> None:
    own, (inner, outer) = make(codec), rows
    source = bucket(inner, dtype)
    if bad is not None:
        source[0][-1] = bad  # in a short block, whose padding must stay out of it
    payload = torch.cat([own.encode(source, CHUNKS, sizes=[inner])] + [messages(own, 1, inner, dtype)] * (peers - 1))
    got = decode_sum_encode(own, payload, peers, CHUNKS, inner=inner, dtype=dtype, to=to, outer=outer, seed=3)
    sums = decode_sum(own, payload, peers, CHUNKS, inner=inner, dtype=dtype)
    if to.format.codec == "none":  # in the type of the elements
        sums = [total.to(dtype) for total in sums]
    want = to.encode(sums, CHUNKS, sizes=[inner], outer=outer, seed=3)
    if to.format.codec == "none" and bad is not None:
        assert torch.equal(got.view(dtype).isnan(), want.view(dtype).isnan())
    else:
        assert torch.equal(got, want)


@pytest.mark.parametrize("codec", BLOCK_CODECS)
def test_a_sum_beyond_the_source_type_is_encoded_as_the_float32_it_is(codec: str) -> None:
    own = make(codec)
    payload = torch.cat([own.encode([torch.full((20,), 65504.0, dtype=torch.float16)], [20])] * 4)
    again = decode_sum_encode(own, payload, 4, [20], inner=1, dtype=torch.float16, to=own, outer=1)
    (sums,) = decode_sum(own, payload, 4, [20], inner=1, dtype=torch.float16)
    assert torch.equal(again, own.encode([sums], [20]))
    assert float(own.decode(again, [20], dtype=torch.float32)[0].min()) > 4 * 65504 * 0.98


def test_an_overflow_of_the_sum_becomes_nan() -> None:
    own = make("int8")
    payload = torch.cat([own.encode([torch.full((20,), 3e38)], [20])] * 2)
    assert decode_sum(own, payload, 2, [20], inner=1, dtype=torch.float32)[0].isinf().all()
    again = decode_sum_encode(own, payload, 2, [20], inner=1, dtype=torch.float32, to=own, outer=1)
    assert own.decode(again, [20], dtype=torch.float32)[0].isnan().all()


@pytest.mark.parametrize("codec", FIXED)
def test_error_feedback_keeps_what_was_lost(codec: str) -> None:
    own, x, residual = make(codec), numbers("normal", 70), numbers("normal", 70, seed=1) * 0.1
    x[9] = math.inf
    message, (left,) = encode_feedback(own, [x], [residual], [0.5], [35], sizes=[2], strides=[1])
    meant = x + residual * 0.5
    assert torch.equal(message, own.encode([meant], [35], sizes=[2]))
    lost = meant - own.decode(message, [35], dtype=torch.float32)[0]
    assert torch.equal(left, torch.where(lost.isfinite(), lost, 0.0))
    assert not left[9] and (left.ne(0).sum() > 40) == (codec != "none")


@pytest.mark.parametrize("codec", FIXED)
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_residuals_are_updated_in_place(codec: str, kept: torch.dtype) -> None:
    own, x = make(codec, rounding="stochastic"), [numbers("normal", 70), numbers("normal", 31, seed=2)]
    residuals = [numbers("normal", tensor.numel(), kept, 1) * 0.1 for tensor in x]
    how = {"sizes": [2], "strides": [1]}
    want, left = encode_feedback(own, x, [one.float() for one in residuals], [0.5, 1.0], [35, 16], **how, seed=4)
    encoder = own.encoder(Rows.of([35, 16], **how), torch.float32, torch.device("cpu"), feedback=True)
    got = encoder(x, seed=4, residuals=residuals, factors=[0.5, 1.0])
    assert torch.equal(got, want) and same(residuals, [one.to(kept) for one in left])


@pytest.mark.parametrize("codec", [name for name, traits in TRAITS.items() if not traits.changes])
def test_prepared_calls_write_where_they_are_told(codec: str) -> None:
    """The bits of single calls, into memory that exists, twice and from several threads."""
    own, device = make(codec, rounding="stochastic"), torch.device("cpu")
    dtype = torch.float32
    how = {"sizes": [2, 2], "strides": [1, 2], "outer": 2}
    rows = Rows.of(CHUNKS, **how)
    encoder, decoder = own.encoder(rows, dtype, device), own.decoder(rows, dtype, device)
    assert own.encoder(Rows.of(CHUNKS, **how), dtype, device) is encoder
    summer = own.decoder(Rows.of(CHUNKS, [2, 2], outer=2), dtype, device, sums=True)

    def check(seed: int) -> None:
        source = bucket(4, dtype, seed)
        want = own.encode(source, CHUNKS, **how, seed=seed)
        message, tensors = torch.empty_like(want), [torch.empty(4 * chunk, dtype=dtype) for chunk in CHUNKS]
        assert encoder.bytes == decoder.bytes == len(want)
        assert encoder(source, out=message, seed=seed) is message and torch.equal(message, want)
        decoder(message, tensors)
        assert same(tensors, own.decode(want, CHUNKS, dtype=dtype, **how))
        sums = [torch.empty(2 * chunk) for chunk in CHUNKS]
        assert same(summer(message, sums), decode_sum(own, want, 2, CHUNKS, inner=2, dtype=dtype))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(check, [*range(8), *range(8)]))


# ---- what is accepted -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", FIXED)
def test_sources_may_be_slices_of_any_shape_that_need_gradients(codec: str) -> None:
    own, flat = make(codec), numbers("normal", 100)
    want = own.encode([flat[3:99].clone()], [50], sizes=[2])
    weight = flat[3:99].view(8, 12).requires_grad_()
    got = own.encode([weight], [50], sizes=[2])
    assert torch.equal(got, want) and not got.requires_grad


# ---- what is refused ------------------------------------------------------------------------------------------------

X = torch.zeros(40)
U = torch.zeros(16, dtype=torch.uint8)
F = torch.float32
INT8, MPC = make("int8"), make("mpc")


def encode(source: Any = (X,), chunks: Any = (10,), own: Codec = INT8, **layout: Any) -> object:
    return own.encode(source, chunks, **{"sizes": (4,), **layout})


def feedback(residuals: Any, factors: Any) -> object:
    return encode_feedback(INT8, [X], residuals, factors, [10], sizes=[4])


def into(tensors: Any) -> None:
    INT8.decoder(Rows.of([10], [1]), tensors[0].dtype, U.device)(U, tensors)


def _freed(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as sharding engines leave it: its shape stays, its memory is gone."""
    gone = tensor.clone()
    gone.untyped_storage().resize_(0)
    return gone


def decode(payload: torch.Tensor = U, dtype: torch.dtype = F) -> object:
    return INT8.decode(payload, (10,), sizes=(1,), dtype=dtype)


def decode_checked(*sums: torch.Tensor) -> object:
    message = INT8.encode([X], [10], sizes=[4], outer=4, parts=2)
    return INT8.decoder(Rows.of([10], [4], outer=4, parts=2), F, message.device)(message, None, *sums)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.data())
def test_fingerprints_tell_contents_apart(numels: list[int], data: st.DataObject) -> None:
    """Of groups with empty tensors too: one other bit, and the same words in another order, of the group too."""
    numels = [*numels, 2]
    tensors = [torch.arange(numel, dtype=torch.float32) + 10 * place for place, numel in enumerate(numels)]
    others = [[torch.ones(3, dtype=torch.bfloat16)], [torch.empty(0)]]
    before = fingerprints([tensors, *others])
    assert torch.equal(before, fingerprints([[tensor.clone() for tensor in tensors], *others]))
    words = torch.cat(tensors)
    first, second = data.draw(st.lists(st.integers(0, len(words) - 1), min_size=2, max_size=2, unique=True))
    swapped = words.clone()
    swapped[first], swapped[second] = words[second], words[first]
    flipped = words.clone()
    flipped.view(torch.int32)[first] ^= 1 << data.draw(st.integers(0, 30))
    for changed in (swapped, flipped):
        found = fingerprints([list(changed.split(numels)), *others])
        assert found[0] != before[0] and torch.equal(found[1:], before[1:])


@LONG
def test_checksum_of_a_record_with_more_than_32_bits_of_bits() -> None:
    """Offsets of its last blocks, in bits, exceed 2**32."""
    numel = 2**29 + 5000
    source = torch.zeros(numel, dtype=torch.bfloat16)
    source[::1000] = 1
    message = Codec(RecordFormat.of("int8", 128)).encode([source], [numel], sizes=[1], parts=1)
    parts = message.view(1, -1)
    assert torch.equal(parts[:, -16:-8].contiguous().view(torch.int64)[:, 0], checksums(parts[:, :-16].contiguous()))


def sum_in_parts(to: Codec | None) -> object:
    """Two pieces share a checksum: kernels would write behind the checksums."""
    message, rows = INT8.encode([X], [10], sizes=[4], outer=4, parts=2), Rows.of([10], [4], outer=4, parts=2)
    run = INT8.recoder(rows, F, X.device, to, Rows.of([10], [1])) if to else INT8.decoder(rows, F, X.device, sums=True)
    return run(message, None, *([0] if to else []), torch.zeros(2, dtype=torch.int64))


def on_cpu(kind: str, **how: Any) -> Callable[..., object]:
    return getattr(INT8, kind)(Rows.of([10], [4], outer=4), F, torch.device("cpu"), **how)


def transcode(peers: int) -> object:
    return decode_sum_encode(INT8, U, peers, [10], inner=1, dtype=F, to=INT8, outer=1)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: encode_feedback(MPC, [X], [X], [1.0], [40], sizes=[1]), ValueError, "codec: found 'mpc' with residuals; exp"),
        (lambda: on_cpu("decoder", add=True), ValueError, "add: found True without sums; expected sums=True"),
        (lambda: into([X]), ValueError, r"tensors: found \[40\] elements; expected \[10\]"),
        (lambda: into([X.view(10, 4)[:, 0]]), ValueError, r"tensors\[0\]: found strides \(4,\); expected a contiguous"),
        (lambda: into([X[:10].long()]), TypeError, "dtype: found torch.int64; expected float32 or bfloat16 or float16"),
        (lambda: encode([X.double()]), TypeError, "dtype: found torch.float64; expected float32 or bfloat16"),
        (lambda: encode([X, X.half()], [10, 10]), TypeError, r"source\[1\]: found torch.float16 .*expected torch.float32"),
        (lambda: encode([X.view(8, 5).t()]), ValueError, r"source\[0\]: found strides \(1, 5\); expected a contiguous"),
        (lambda: encode(chunks=[9]), ValueError, r"source\[0\]: found 40 elements; expected at most 36: 4 shards of 9"),
        (lambda: encode(chunks=[10, 10]), ValueError, "source: found 1 tensors for 2 chunks"),
        (lambda: INT8.encoder(Rows.of([10], [1]), F, X.device)([]), ValueError, "source: found 0 tensors for 1 chunks"),
        (lambda: encode(outer=3), ValueError, r"outer: found 3, which does not divide rows of \[4\]"),
        (lambda: decode_checked(), ValueError, r"checksums: found \[\] elements; expected \[2\]"),
        (lambda: decode_checked(torch.zeros(1, dtype=torch.int64)), ValueError, r"checksums: found \[1\] elements; exp"),
        (lambda: decode_checked(torch.zeros(1, 2, dtype=torch.int64)), ValueError, r"checksums: found shape \(1, 2\); exp"),
        (lambda: decode_checked(torch.zeros(2, dtype=torch.int32)), TypeError, r"checksums\[0\]: found torch.int32"),
        (lambda: encode(outer=4, parts=3), ValueError, "parts: found 3; expected a divisor of the 4 pieces, or 0"),
        (lambda: encode(outer=4, parts=-1), ValueError, "parts: found -1; expected a divisor of the 4 pieces, or 0"),
        (lambda: sum_in_parts(INT8), ValueError, "parts: found 2; expected 4, one for each piece of a sum, or 0"),
        (lambda: sum_in_parts(None), ValueError, "parts: found 2; expected 4, one for each piece of a sum, or 0"),
        (lambda: encode(sizes=[2, 3], strides=[1, 2], outer=3), ValueError, r"outer: found 3, .* divide rows of \[2, 3\]"),
        (lambda: encode(sizes=[4, 0]), ValueError, r"sizes: found \[4, 0\]"),
        (lambda: encode(sizes=[2, 2], strides=[1]), ValueError, r"strides: found \[1\], which miss or repeat shards"),
        (lambda: encode(sizes=[2, 2], strides=[1, 1]), ValueError, r"strides: found \[1, 1\], which miss or repeat shards"),
        (lambda: decode(torch.zeros(64, dtype=torch.uint8)[::2]), ValueError, "payload: found stride 2; expected a cont"),
        (lambda: decode(_freed(U)), ValueError, "payload: found 0 bytes of storage; expected 16: its memory was freed"),
        (lambda: encode([X, X.to("meta")], [10, 10]), TypeError, r"source\[1\]: found .* on meta; expected torch.float32 on cpu"),
        (lambda: feedback([X[:3]], [1.0]), ValueError, r"residuals: found \[3\] elements; expected \[40\]"),
        (lambda: feedback([], [1.0]), ValueError, "residuals: found 0 with 1 factors for 1 sources"),
        (lambda: decode(U.view(1, -1)), TypeError, "payload: found torch.uint8 of 2 dimensions; expected uint8 of one"),
        (lambda: decode(U[:15]), ValueError, r"payload: found 15 bytes; expected 16: 1 rows of chunks \[10\]"),
        (lambda: decode(X), TypeError, "payload: found torch.float32 of 1 dimensions; expected uint8"),
        (lambda: decode(dtype=torch.int8), TypeError, "dtype: found torch.int8; expected float32"),
        (lambda: transcode(peers=0), ValueError, r"sizes: found \[0, 1\]; expected sizes of at least 1"),
        (lambda: transcode(peers=2), ValueError, "payload: found 16 bytes; expected 32"),
        (lambda: on_cpu("encoder")([X], U.repeat(4).to("meta")), TypeError, "payload: found meta; expected cpu"),
    ],
)  # fmt: skip
def test_errors_name_the_argument(call: Callable[[], object], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(backends.choice("cpu").name == "reference", reason="the reference computes on any device")
@pytest.mark.parametrize(
    "call",
    [
        lambda: on_cpu("encoder")([X.to("meta")]),
        lambda: on_cpu("decoder")(U.repeat(4).to("meta")),
        lambda: on_cpu("decoder", sums=True)(U.repeat(4).to("meta")),
        lambda: on_cpu("recoder", to=INT8, summed=Rows.of([10], [1]))(U.repeat(4).to("meta")),
    ],
)
def test_kernels_refuse_tensors_of_another_device(call: Callable[[], object]) -> None:
    """They would read the addresses of another memory."""
    with pytest.raises(TypeError, match="device: found meta; expected cpu"):
        call()
