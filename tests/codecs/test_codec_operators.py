"""The operators: opcheck, sums, what they accept and what they refuse, and that outputs share no memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hzero.codecs.codec import Codec
from hzero.config import SUMMED
from tests.codecs import samples
from tests.codecs.samples import FLOATS, numbers, same

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
    sent = [codec.encode(bucket(inner, dtype, 10 * peer), CHUNKS, sizes=[inner]) for peer in range(peers)]
    return torch.cat(sent)


# ---- operators ------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("codec", SUMMED)
def test_opcheck(codec: str) -> None:
    """Schemas, shapes without memory, and tracing."""
    dtype = torch.bfloat16
    own, ops = make(codec, rounding="stochastic"), torch.ops.hzero
    source, like = bucket(4, dtype), [numbers("normal", 4 * chunk, dtype, 3) for chunk in CHUNKS]
    axes, how = ([2, 2], [1, 2], 2), own.format
    payload = own.encode(source, CHUNKS, sizes=axes[0], strides=axes[1], outer=axes[2])
    summed, rounding = (messages(own, 3, 2, dtype), 3, CHUNKS, 2, *how, dtype), (True, 5)
    base = [tensor[: own.numel()] for tensor, own in zip(like, source)]
    fed = [[tensor.float() for tensor in base], [0.5] * len(source)]
    calls: list[tuple[Any, ...]] = [
        (ops.encode, source, CHUNKS, *axes, *how, *rounding),
        (ops.encode_feedback, source, *fed, CHUNKS, *axes, *how, *rounding),
        (ops.encode_difference, source, base, CHUNKS, *axes, *how, *rounding),
        (ops.decode, payload, CHUNKS, *axes, *how, dtype),
        (ops.decode_onto, payload, CHUNKS, *axes, *how, like),
        (ops.decode_sum, *summed),
        (ops.decode_add, *summed, [numbers("normal", 2 * chunk) for chunk in CHUNKS]),
        (ops.decode_sum_encode, *summed, 2, *make("int4", block_size=32, scale="fp32").format, False, 0),
    ]
    # Tracing does not depend on the codec, and takes long.
    kinds = ("test_schema", "test_faketensor", *["test_aot_dispatch_dynamic"] * (codec == "int8"))
    for operator, *arguments in calls:
        torch.library.opcheck(operator, tuple(arguments), test_utils=kinds)


def test_compiled_callers_see_the_operators() -> None:
    """Dynamo takes the operators as they are, and does not look into what computes them."""
    own = make("int8")

    def round_trip(x: torch.Tensor) -> torch.Tensor:
        return own.decode(own.encode([x * 2], [x.numel()]), [x.numel()], dtype=x.dtype)[0] + 1

    x = numbers("normal", 100)
    assert torch.equal(torch.compile(round_trip, backend="eager")(x), round_trip(x))


@pytest.mark.parametrize("codec", SUMMED)
def test_outputs_share_no_memory(codec: str) -> None:
    """Nor with the inputs, in the cases that could do with a view: one row, aligned records."""
    own, source = make(codec), [numbers("normal", 64), numbers("normal", 32)]
    message = own.encode(source, [64, 32])
    decoded = own.decode(message, [64, 32], dtype=torch.float32)
    summed = own.decode_sum(message, 1, [64, 32], inner=1, dtype=torch.float32)
    tensors = [*source, message, *decoded, *summed]
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    assert len(storages) == len(tensors)
    single = own.encode(source[:1], [64])
    assert single.untyped_storage().data_ptr() != source[0].untyped_storage().data_ptr()


# ---- sums -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", SUMMED)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("peers", "inner"), [(1, 1), (1, 3), (2, 1), (3, 2), (7, 3)])
def test_decode_sum_adds_in_the_order_of_the_peers(codec: str, dtype: torch.dtype, peers: int, inner: int) -> None:
    own = make(codec, scale="fp32")  # sums of products with bf16 scales are often exact, in any order
    payload = messages(own, peers, inner, dtype)
    before = payload.clone()
    got = own.decode_sum(payload, peers, CHUNKS, inner=inner, dtype=dtype)
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
    added = own.decode_sum(payload, peers, CHUNKS, inner=inner, dtype=dtype, into=sums)
    assert all(torch.equal(ours, theirs) and ours is own for ours, theirs, own in zip(added, want_added, sums))


@settings(max_examples=40)
@given(
    codec=st.sampled_from(SUMMED),
    to=st.builds(
        make,
        codec=st.sampled_from(SUMMED),
        block_size=st.sampled_from([16, 32]),
        scale=st.sampled_from(["bf16", "fp32"]),
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
    own, target, (inner, outer) = make(codec), to, rows
    source = bucket(inner, dtype)
    if bad is not None:
        source[0][-1] = bad  # in a short block, whose padding must stay out of it
    payload = torch.cat([own.encode(source, CHUNKS, sizes=[inner])] + [messages(own, 1, inner, dtype)] * (peers - 1))
    got = own.decode_sum_encode(payload, peers, CHUNKS, inner=inner, dtype=dtype, to=target, outer=outer, seed=3)
    sums = own.decode_sum(payload, peers, CHUNKS, inner=inner, dtype=dtype)
    want = target.encode(sums, CHUNKS, sizes=[inner], outer=outer, seed=3)
    if to.name == "none" and bad is not None:
        assert torch.equal(got.view(torch.float32).isnan(), want.view(torch.float32).isnan())
    else:
        assert torch.equal(got, want)


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_a_sum_beyond_the_source_type_is_encoded_as_the_float32_it_is(codec: str) -> None:
    own = make(codec)
    payload = torch.cat([own.encode([torch.full((20,), 65504.0, dtype=torch.float16)], [20])] * 4)
    again = own.decode_sum_encode(payload, 4, [20], inner=1, dtype=torch.float16, to=own, outer=1)
    (sums,) = own.decode_sum(payload, 4, [20], inner=1, dtype=torch.float16)
    assert torch.equal(again, own.encode([sums], [20]))
    assert float(own.decode(again, [20], dtype=torch.float32)[0].min()) > 4 * 65504 * 0.98


def test_an_overflow_of_the_sum_becomes_nan() -> None:
    own = make("int8")
    payload = torch.cat([own.encode([torch.full((20,), 3e38)], [20])] * 2)
    assert own.decode_sum(payload, 2, [20], inner=1, dtype=torch.float32)[0].isinf().all()
    again = own.decode_sum_encode(payload, 2, [20], inner=1, dtype=torch.float32, to=own, outer=1)
    assert own.decode(again, [20], dtype=torch.float32)[0].isnan().all()


@pytest.mark.parametrize("codec", SUMMED)
def test_error_feedback_keeps_what_was_lost(codec: str) -> None:
    own, x, residual = make(codec), numbers("normal", 70), numbers("normal", 70, seed=1) * 0.1
    x[9] = math.inf
    message, (left,) = own.encode_feedback([x], [residual], [0.5], [35], sizes=[2], strides=[1])
    meant = x + residual * 0.5
    assert torch.equal(message, own.encode([meant], [35]))
    lost = meant - own.decode(message, [35], dtype=torch.float32)[0]
    assert torch.equal(left, torch.where(lost.isfinite(), lost, 0.0))
    assert not left[9] and (left.ne(0).sum() > 40) == (codec != "none")


# ---- what is accepted -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", SUMMED)
@pytest.mark.parametrize("offset", [1, 2, 3, 4, 6, 8])
def test_a_payload_may_start_anywhere_in_its_storage(codec: str, offset: int) -> None:
    own = make(codec, scale="fp32")
    message = own.encode(bucket(3), CHUNKS, sizes=[3])
    moved = torch.cat([torch.zeros(offset, dtype=torch.uint8), message])[offset:]
    assert same(own.decode(moved, CHUNKS, dtype=F), own.decode(message, CHUNKS, dtype=F))
    sums = [own.decode_sum(one, 3, CHUNKS, inner=1, dtype=F) for one in (moved, message)]
    assert same(*sums)


@pytest.mark.parametrize("codec", SUMMED)
def test_sources_may_be_slices_of_any_shape_that_need_gradients(codec: str) -> None:
    own, flat = make(codec), numbers("normal", 100)
    want = own.encode([flat[3:99].clone()], [50], sizes=[2])
    weight = flat[3:99].view(8, 12).requires_grad_()
    got = own.encode([weight], [50], sizes=[2])
    assert torch.equal(got, want) and not got.requires_grad


# ---- what is refused ------------------------------------------------------------------------------------------------

X = torch.zeros(40)
U = torch.zeros(32, dtype=torch.uint8)
F = torch.float32
HOW = ("int8", 16, "bf16", 0, 0, 0)


def encode(
    source: Sequence[torch.Tensor] = (X,),
    chunks: Sequence[int] = (10,),
    sizes: Sequence[int] = (4,),
    strides: Sequence[int] = (1,),
    outer: int = 1,
    how: tuple[str, int, str, int, int, int] = HOW,
) -> object:
    return torch.ops.hzero.encode(list(source), list(chunks), list(sizes), list(strides), outer, *how, False, 0)


def feedback(residuals: Sequence[torch.Tensor], factors: Sequence[float]) -> object:
    return torch.ops.hzero.encode_feedback([X], list(residuals), list(factors), [10], [4], [1], 1, *HOW, False, 0)


def difference(base: Sequence[torch.Tensor]) -> object:
    return torch.ops.hzero.encode_difference([X], list(base), [10], [4], [1], 1, *HOW, False, 0)


def onto(tensors: Sequence[torch.Tensor]) -> None:
    torch.ops.hzero.decode_onto(U, [10], [1], [1], 1, *HOW, list(tensors))


def _freed(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as sharding engines leave it: its shape stays, its memory is gone."""
    gone = tensor.clone()
    gone.untyped_storage().resize_(0)
    return gone


def decode(
    payload: torch.Tensor = U, chunks: Sequence[int] = (10,), sizes: Sequence[int] = (1,), dtype: torch.dtype = F
) -> object:
    return torch.ops.hzero.decode(payload, list(chunks), list(sizes), [1], 1, *HOW, dtype)


def transcode(peers: int = 1, inner: int = 1, outer: int = 1, out: tuple[str, int, str, int, int, int] = HOW) -> object:
    return torch.ops.hzero.decode_sum_encode(U, peers, [10], inner, *HOW, F, outer, *out, False, 0)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: encode(how=("int3", 16, "bf16", 0, 0, 0)), ValueError, "codec: found 'int3', possible: none, bf16, int8, int4"),
        (lambda: encode(how=("int8", 24, "bf16", 0, 0, 0)), ValueError, "block_size: found 24, expected a multiple of 16"),
        (lambda: encode(how=("int4", 16, "fp16", 0, 0, 0)), ValueError, "scale: found 'fp16', possible: bf16, fp32, int8"),
        (
            lambda: encode(how=("int4", 48, "int8", 0, 0, 0)),
            ValueError,
            "block_size: found 48 with scale 'int8', possible: 32, 64, 128, 256",
        ),
        (lambda: encode(how=("int4", 64, "bf16", 32, 0, 0)), ValueError, "rotation: found 32, possible: 0, 64, 128, if it div"),
        (lambda: encode(how=("zfp", 4, "", 0, 25, 0)), ValueError, "rate: found 25, possible with codec zfp: 4 to 24"),
        (lambda: encode(how=("mpc", 4, "", 0, 0, 33)), ValueError, "dimension: found 33, possible with codec mpc: 1 to 32"),
        (lambda: difference([X[:3]]), ValueError, r"base: found \[3\] elements, expected \[40\]"),
        (lambda: onto([X]), ValueError, r"tensors: found \[40\] elements, expected \[10\]"),
        (lambda: onto([X.view(10, 4)[:, 0]]), ValueError, r"tensors\[0\]: found strides \(4,\), expected a contiguous"),
        (lambda: onto([X[:10].long()]), TypeError, "dtype: found torch.int64, expected float32, bfloat16 or float16"),
        (lambda: encode([X.double()]), TypeError, r"source\[0\]: found torch.float64, expected float32"),
        (lambda: encode([X, X.half()], [10, 10]), TypeError, r"source\[1\]: found torch.float16 .*is torch.float32"),
        (lambda: encode([X.view(8, 5).t()]), ValueError, r"source\[0\]: found strides \(1, 5\), expected a contiguous"),
        (lambda: encode(chunks=[9]), ValueError, r"source\[0\]: found 40 elements, expected at most 36: 4 shards of 9"),
        (lambda: encode(chunks=[10, 10]), ValueError, "source: found 1 tensors for 2 chunks"),
        (lambda: encode(outer=3), ValueError, "outer: found 3, which does not divide the 4 rows"),
        (lambda: encode(sizes=[4, 0]), ValueError, r"sizes: found \[4, 0\]"),
        (lambda: encode(sizes=[2, 2]), ValueError, "strides: found 1 of them for 2 sizes"),
        (lambda: encode(sizes=[2, 2], strides=[1, 1]), ValueError, r"strides: \[1, 1\] with sizes \[2, 2\] do not"),
        (lambda: decode(torch.zeros(64, dtype=torch.uint8)[::2]), ValueError, "payload: found stride 2, expected a cont"),
        (lambda: decode(_freed(U)), ValueError, "payload: found 0 bytes of storage, expected 32: its memory was freed"),
        (lambda: encode([X, X.to("meta")], [10, 10]), TypeError, r"source\[1\]: found .* on meta, but source\[0\] is"),
        (lambda: feedback([X[:3]], [1.0]), ValueError, r"residuals\[0\]: found 3 elements, expected none or the 40"),
        (lambda: feedback([], [1.0]), ValueError, "residuals: found 0 for 1 sources"),
        (lambda: decode(U.view(1, -1)), TypeError, "payload: found torch.uint8 of 2 dimensions, expected uint8 of one"),
        (lambda: decode(U.to(torch.int8)), TypeError, "payload: found torch.int8 of 1 dimensions, expected uint8 of one"),
        (lambda: decode(U[:31]), ValueError, r"payload: found 31 bytes, expected 32: 1 rows of chunks \[10\]"),
        (lambda: decode(X), TypeError, "payload: found torch.float32 of 1 dimensions, expected uint8"),
        (lambda: decode(dtype=torch.int8), TypeError, "dtype: found torch.int8, expected float32"),
        (lambda: decode(sizes=[2]), ValueError, "payload: found 32 bytes, expected 64"),
        (lambda: transcode(peers=0), ValueError, "peers: found 0, expected at least 1"),
        (lambda: transcode(peers=2), ValueError, "payload: found 32 bytes, expected 64"),
        (lambda: transcode(out=("int9", 16, "bf16", 0, 0, 0)), ValueError, "out_codec: found 'int9'"),
        (lambda: make("int8").encode([X], [10], strides=[1]), ValueError, r"sizes: found None, .* strides \[1\]"),
        (lambda: make("int8").decode(U[:9], [10], dtype=F), ValueError, "payload: found 9 bytes, expected 32"),
    ],
)  # fmt: skip
def test_errors_name_the_argument(call: Callable[[], object], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says) as caught:
        call()
    assert "\n" not in str(caught.value)
