"""Kernels against the reference, bit for bit: on the host with each instruction set, emulated, and on a GPU."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch

from benchmarks.counts import costs, messages
from hzero.codecs import backends, launchers, reference
from hzero.codecs.backends import KernelBackend
from hzero.codecs.codec import Codec, Decoder, Encoder, Recoder
from hzero.codecs.formats import BLOCK_CODECS, CHECKSUM_BYTES, RecordFormat, Rows
from hzero.codecs.launchers import AXES, TENSORS
from hzero.codecs.reference import checksums, trailers
from hzero.config import CodecConfig
from tests.codecs.samples import FLOATS, numbers, same
from tests.kernels.cases import KINDS, Calls, Case, compared, disagreements, random_case
from tests.kernels.emulated import LIBRARY, EmulatedKernels
from tests.ranks import LONG, run_python

CPU = torch.device("cpu")
ZFP = [RecordFormat.of("zfp", rate=rate) for rate in (4, 9, 16, 23)]
MPC = [RecordFormat.of("mpc", dimension=dimension) for dimension in (1, 5, 32)]
TARGETS = ["avx512", "avx2", "baseline", "wave 64", pytest.param("wave 32", marks=LONG), "device"]


@functools.cache
def backend_of(target: str) -> KernelBackend | str:
    """The backend of a target, or why there is none; "host" leaves the library its choice of instructions."""
    if target == "device":
        if not torch.cuda.is_available():
            return "no GPU"
        chosen = backends.choice("cuda")
        return chosen.why if chosen.fallback else chosen.backend
    if target.startswith("wave"):
        return KernelBackend(EmulatedKernels(int(target.split()[1])))
    try:
        library = launchers.HostLibrary(LIBRARY)
        if target != "host":
            library.instruction_set = target
    except (OSError, ValueError) as error:
        return str(error)
    return KernelBackend(library)


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> tuple[Any, torch.device]:
    """A backend and its device."""
    backend = backend_of(request.param)
    if isinstance(backend, str):
        pytest.skip(backend)
    if request.param in ("avx512", "avx2", "baseline"):
        backend.launcher.instruction_set = request.param  # one library, so one setting
    return backend, torch.device("cuda" if request.param == "device" else "cpu")


@pytest.fixture(autouse=True)
def _restore() -> Any:
    """One thread: small tensors are slow to share. The best instruction set again after each test."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    for name in ("avx512", "avx2", "baseline"):
        backend = backend_of(name)
        if not isinstance(backend, str):
            backend.launcher.instruction_set = name
            break


def assert_agrees(target: tuple[Any, torch.device], case: Case) -> None:
    found = list(disagreements(*target[:1], case, target[1]))
    assert not found, (found, case)


def emulated(target: tuple[Any, torch.device]) -> int:
    """The wave size of the emulation, which takes long; 0 of others."""
    launcher = target[0].launcher
    return launcher.wave if isinstance(launcher, EmulatedKernels) else 0


def test_random_buckets(target: tuple[Any, torch.device]) -> None:
    count, most = (3, 8_000) if emulated(target) else (25, 10**6)
    while count:
        case = random_case()
        if 0 < case.rows.total * sum(case.chunks) <= most:
            assert_agrees(target, case)
            count -= 1


@pytest.mark.parametrize("codec", BLOCK_CODECS)
@pytest.mark.parametrize("kind", KINDS)
def test_special_numbers(target: tuple[Any, torch.device], kind: str, codec: str) -> None:
    """Emulated, which takes long, each wave size has one half of the combinations of a kind."""
    wave = emulated(target)
    for seed, (dtype, stochastic) in enumerate(itertools.product(FLOATS, (False, True))):
        if wave and (seed + KINDS.index(kind)) % 2 == (wave == 32):
            continue
        fmt = RecordFormat.of(codec, 64, stochastic=stochastic)
        assert_agrees(target, Case((130, 64, 7), (2,), (1,), 2, fmt, dtype, kind, 3 * seed))


def test_codecs_of_processors_alone(target: tuple[Any, torch.device]) -> None:
    """Codecs zfp and mpc, whose bits end inside bytes and groups of elements; a device leaves them to the REFERENCE."""
    if target[0].launcher.on_device:
        encoder = target[0].encoder(Rows.of((9,), (1,)), ZFP[1], torch.float32)
        assert encoder.__module__ == reference.__name__
        return
    chunks = itertools.cycle([(300, 0, 1, 64), (1025, 5), (63,), (513, 130)])
    for index, (kind, chunk) in enumerate(zip(KINDS, chunks)):
        rows = {"sizes": (3, 2), "strides": (1, 3), "outer": 3, "short": index % 5, "unaligned": index % 2 > 0}
        dtype = FLOATS[index % 3]
        assert_agrees(target, Case(chunk, fmt=ZFP[index % 4], dtype=dtype, kind=kind, seed=index, **rows))
        assert_agrees(target, Case(chunk, fmt=MPC[index % 3], dtype=torch.float32, kind=kind, seed=index, **rows))


@pytest.mark.parametrize("codec", ["none", "bf16"])
def test_codecs_of_elements(target: tuple[Any, torch.device], codec: Any) -> None:
    """Copies and casts, of every type, with records of one workgroup and of less, and rows in another order."""
    fmt = RecordFormat.of(codec)
    chunks = [(1100, 3, 1), (33, 0, 8)] if emulated(target) else [(2500, 17, 1), (1, 3, 0, 15, 1023, 16), (1024, 1025)]
    for seed, (kind, chunk) in enumerate(itertools.product(("normal", "nan"), chunks)):
        rows: dict[str, Any] = {"sizes": (3, 2), "strides": (1, 3), "outer": 3, "short": 4 * (seed % 2)}
        for dtype in FLOATS:
            case = Case(chunk, fmt=fmt, dtype=dtype, kind=kind, seed=seed, unaligned=seed % 3 == 1, **rows)
            assert_agrees(target, case)


def test_codec_none_keeps_every_bit(target: tuple[Any, torch.device]) -> None:
    """Of NaNs too, and of bytes that are no floats."""
    backend, device = target
    rows = Rows.of((300, 1, 17), (4,), outer=2)
    for dtype in (torch.uint8, *FLOATS):
        make = functools.partial(torch.randint, 0, 256, dtype=torch.uint8)
        source = [make((4 * chunk * dtype.itemsize,)).view(dtype).to(device) for chunk in rows.chunks]
        fmt = RecordFormat.of("none")
        decoded = Calls(backend).decode(Calls(backend).encode(source, rows, fmt), rows, fmt, dtype)
        for before, after in zip(source, decoded):
            assert torch.equal(before.view(torch.uint8), after.view(torch.uint8)), dtype


@pytest.mark.parametrize("rotation", [0, 64])
def test_a_workgroup_has_many_rows_of_small_shards(target: tuple[Any, torch.device], rotation: int) -> None:
    """Shards of three blocks or less, of more rows than one workgroup takes, with sums that start from what is there."""
    fmt = RecordFormat.of("int8", 128, rotation)
    sizes, chunks = ((2, 70), (1, 64, 301)) if emulated(target) else ((4, 700), (1, 64, 128, 16, 301))
    assert_agrees(target, Case(chunks, sizes, (1, sizes[0]), sizes[0], fmt, torch.bfloat16, short=5, seed=rotation))


def of_blocks(codec: str, size: int) -> Case:
    return Case((3 * size + 21,), (2,), (1,), 1, RecordFormat.of(codec, size), torch.bfloat16, seed=size)


INT8, INT4 = RecordFormat.of("int8", 64), RecordFormat.of("int4", 32, stochastic=True)
MANY = tuple(17 * index % 90 for index in range(2 * TENSORS + 5))
SIZES, STRIDES = (2,) * AXES, tuple(2**axis for axis in range(AXES))
BLOCK_SIZES = (16, 48, 64, 128, 192, 256, 448, 512)
AWKWARD: dict[str, Case] = {
    "more tensors than one call takes": Case(MANY, (3, 2), (1, 3), 3, INT4, torch.float32, seed=5),
    "as many axes as kernels take": Case((5,), SIZES, STRIDES, 2, INT4, torch.float32),
    # Eight rows of an odd number of elements start at every address that an element of two bytes can have.
    "shards at every address": Case((1111, 35), (4, 2), (1, 4), 2, RecordFormat.of("int8", 128), torch.bfloat16),
    "blocks with idle lanes at every address": Case((1111,), (8,), (1,), 2, RecordFormat.of("int4", 48), torch.float16),
    "rotated shards at every address": Case((777,), (8,), (1,), 4, RecordFormat.of("int4", 64, 64), torch.float32),
    **{f"blocks of {size}, {codec}": of_blocks(codec, size) for size in BLOCK_SIZES for codec in ("int8", "int4")},
}


@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_buckets(target: tuple[Any, torch.device], name: str) -> None:
    assert_agrees(target, AWKWARD[name])


@pytest.mark.parametrize("count", [1, 1_000_003])
def test_lengths_up_to_millions(target: tuple[Any, torch.device], count: int) -> None:
    if emulated(target):
        count = min(count, 20_003)  # 5 workgroups, the last one with a block of 35 elements
    for codec, unaligned in (("int8", False), ("int4", True)):
        fmt = RecordFormat.of(codec, 128)
        assert_agrees(target, Case((count,), (1,), (1,), 1, fmt, torch.bfloat16, unaligned=unaligned))


def test_unaligned_shards_are_moved_16_bytes_at_a_time() -> None:
    """As the emulation counts accesses to elements."""
    for name, made in costs.accesses(rows=3):
        assert made[16] > 0.93 * sum(made.values()), (name, made)


def test_parts_between_nodes_reach_the_least_size_where_there_are_many_peers() -> None:
    for preset, nodes in itertools.product(("topo", "lossless"), (48, 384, 1176, 9408)):
        *_, (phase, _, peers, part, layers) = messages.parts(preset, nodes)
        assert phase == "outermost" and peers >= 15
        assert layers * part >= 1 << 16 > (layers - 1) * part, (preset, nodes)


def test_quotients_near_the_middle_between_codes(target: tuple[Any, torch.device]) -> None:
    """Values for which an uncorrected reciprocal instead of the division would round to the other code."""
    backend, device = target
    generator = torch.Generator().manual_seed(0)
    scales = (torch.randint(128, 256, (512, 1), generator=generator) / 128).float()
    halves = scales * (torch.randint(-127, 127, (512, 127), generator=generator) + 0.5)
    near = torch.nextafter(halves, halves * torch.randint(0, 3, halves.shape, generator=generator))
    x = torch.cat([near, 127 * scales], dim=1).reshape(-1)
    how = (Rows.of((x.numel(),), (1,)), RecordFormat.of("int8", 128))
    assert not list(compared(backend, device, "encode", [x], *how))


@pytest.mark.parametrize("codec", BLOCK_CODECS)
def test_every_quotient_of_bfloat16(target: tuple[Any, torch.device], codec: str) -> None:
    """All mantissas of an extreme, with all smaller numbers of the 13 binades below it, of both signs."""
    backend, device = target
    if emulated(target) == 32:
        pytest.skip("the quotients are those of wave 64: a wave's size is in its exchanges alone")
    bits = torch.arange(127 - 12 << 7, 128 << 7, dtype=torch.int32).to(torch.int16)
    magnitudes = bits.view(torch.bfloat16)
    blocks = []
    for extreme in magnitudes[-128:]:
        rest = torch.cat([magnitudes, -magnitudes])
        rest = rest[rest.abs() < extreme]
        rows = torch.nn.functional.pad(rest, (0, -len(rest) % 255)).view(-1, 255)
        blocks.append(torch.cat([extreme.expand(len(rows), 1), rows], dim=1))
    x = torch.cat(blocks).reshape(-1)
    how = (Rows.of((x.numel(),), (1,)), RecordFormat.of(codec, 256))
    for source in (x, (x.float() * (1 + 2.0**-9)).half()):  # other mantissas
        assert not list(compared(backend, device, "encode", [source], *how))


@pytest.mark.parametrize("codec", BLOCK_CODECS)
def test_stochastic_codes_at_the_end_of_the_range_decode_to_finite_numbers(
    target: tuple[Any, torch.device], codec: Any
) -> None:
    """There the scale is limited, so a quotient may exceed the largest code; of both signs it becomes that code."""
    backend, device = target
    fmt, rows = RecordFormat.of(codec, 16, stochastic=True), Rows.of((1024,), (1,))
    for dtype in FLOATS:
        largest = torch.finfo(dtype).max
        x = torch.tensor([-largest, largest]).repeat(512).mul(0.9998).to(dtype)
        assert not list(compared(backend, device, "encode", [x], rows, fmt, 1911))
        (decoded,) = Calls(backend).decode(Calls(backend).encode([x.to(device)], rows, fmt, 1911), rows, fmt, dtype)
        assert (decoded.cpu().double() / x.double() - 1).abs().max() < 0.008, dtype


def test_threads_share_the_work() -> None:
    """Blocks of a large bucket are split over threads, at any block, also inside a record; by no instruction set's code."""
    backend = backend_of("baseline")
    if isinstance(backend, str):
        pytest.skip(backend)
    fmt = RecordFormat.of("int4", 128)
    # 256 Ki elements are worth a thread: the two rows of sums have 4 of them, the four rows to encode 9.
    case = Case((350_001, 0, 33, 250_000), (2, 2), (1, 2), 2, fmt, torch.float32)
    for threads in (2, 7):
        torch.set_num_threads(threads)
        assert_agrees((backend, CPU), case)


def test_a_forked_process_can_go_on() -> None:
    """Threads of a call end with it: a child forked afterwards shares the work again."""
    if isinstance(backend_of("baseline"), str):
        pytest.skip(str(backend_of("baseline")))
    code = (
        "import os, torch\n"
        "from hzero.codecs.codec import Codec\n"
        "from hzero.config import CodecConfig\n"
        "torch.set_num_threads(2)\n"
        "x = torch.randn(3_000_000)\n"
        "codec = Codec.from_config(CodecConfig(codec='int8'))\n"
        "want = codec.encode([x], [x.numel()])\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    os._exit(not torch.equal(codec.encode([x], [x.numel()]), want))\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
    )
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_graph_captures_the_calls() -> None:
    x = torch.randn(100_000, device="cuda", dtype=torch.bfloat16)
    own, to = (Codec.from_config(CodecConfig(codec=codec)) for codec in ("int8", "int4"))
    chunks, rows = [x.numel()], Rows.of([x.numel()], (1,))

    def everything() -> list[torch.Tensor]:
        message = own.encode([x], chunks)
        again = own.recoder(rows, torch.bfloat16, x.device, to, rows)(message)
        sums = own.decoder(rows, torch.bfloat16, x.device, sums=True)(message)
        return [message, *own.decode(message, chunks, dtype=torch.bfloat16), *sums, again]

    backends.choice("cuda")  # compiles and loads
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = everything()
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    with backends.reference_instead():
        assert same(captured, everything())


@pytest.mark.parametrize(
    ("codec", "block_size", "rotation", "stochastic"),
    [
        ("int8", 128, 0, False),
        ("int4", 128, 0, True),
        ("int4", 16, 0, False),
        ("int8", 48, 0, True),
        ("int4", 64, 64, False),
        ("none", 0, 0, False),
        ("bf16", 0, 0, False),
        ("zfp", 0, 0, False),
        ("mpc", 0, 0, False),
    ],
)
def test_checksums_are_of_the_bytes_behind_which_they_are(
    target: tuple[Any, torch.device], codec: Any, block_size: int, rotation: int, stochastic: bool
) -> None:
    """As kernels write them, and as they read them: padding counts, so no bit of a message is left out."""
    backend, device = target
    fmt, dtype = RecordFormat.of(codec, block_size, rotation, stochastic), torch.bfloat16
    chunks = (83,) if emulated(target) else (130, 64, 7, 0, 1)
    for pieces, inner, parts in (
        ((2, 1, 2), (2, 2, 1)) if emulated(target) else ((1, 1, 1), (5, 2, 5), (6, 3, 2), (3, 2, 1))
    ):
        rows = Rows.of(chunks, (pieces * inner,), outer=pieces)
        checked = rows._replace(parts=parts)
        source = [numbers("normal", rows.total * chunk, dtype, chunk).to(device) for chunk in chunks]
        bare = Encoder(fmt, rows, dtype, backend)(source, seed=5)
        message = Encoder(fmt, checked, dtype, backend)(source, seed=5)
        assert torch.equal(message, _signed(bare, parts))
        want = trailers(message, parts)[:, 0]

        def read(call: Any, *arguments: Any, message: Any = message, parts: int = parts) -> list[Any]:
            sums = torch.zeros(parts, dtype=torch.int64, device=device)
            return [call(message, *arguments, sums), sums]

        decoded, sums = read(Decoder(fmt, checked, dtype, backend), None)
        assert torch.equal(sums, want) and same(decoded, Decoder(fmt, rows, dtype, backend)(bare))
        if parts < pieces:
            continue
        totals, sums = read(Decoder(fmt, checked, dtype, backend, True), None)
        assert torch.equal(sums, want) and same(totals, Decoder(fmt, rows, dtype, backend, True)(bare))
        for other in {block_size or 32, 32}:  # in one kernel, or in two
            out, summed = (
                RecordFormat.of("int8", other, rotation if other == block_size else 0),
                Rows.of(chunks, (inner,)),
            )
            again, sums = read(Recoder(fmt, checked, dtype, out, summed._replace(parts=1), backend), None, 7)
            plain = Recoder(fmt, rows, dtype, out, summed, backend)(bare, None, 7)
            assert torch.equal(sums, want) and torch.equal(again, _signed(plain, 1))


def test_a_flipped_bit_anywhere_changes_what_a_kernel_reads(target: tuple[Any, torch.device]) -> None:
    backend, device = target
    fmt, rows = RecordFormat.of("int4", 64), Rows.of((70,), (2,), outer=2, parts=2)
    message = Encoder(fmt, rows, torch.float32, backend)([torch.randn(140, device=device)])
    decode, size = Decoder(fmt, rows, torch.float32, backend), message.numel() // 2 - CHECKSUM_BYTES
    for byte in range(0, size, 16 if emulated(target) else 1):
        changed, sums = message.clone(), torch.zeros(2, dtype=torch.int64, device=device)
        changed[byte] ^= 1 << byte % 8
        decode(changed, None, sums)
        assert (sums == trailers(message, 2)[:, 0]).tolist() == [False, True], byte


def _signed(message: torch.Tensor, parts: int) -> torch.Tensor:
    bare = message.view(parts, -1)
    sums = torch.nn.functional.pad(checksums(bare.cpu()).unsqueeze(1), (0, 1)).view(torch.uint8)
    return torch.cat([bare, sums.to(message.device)], dim=1).view(-1)


GUARD = 256


def test_nothing_is_written_beyond_the_outputs(target: tuple[Any, torch.device]) -> None:
    """Payloads, residuals, decoded tensors and sums with a border around each."""
    backend, device = target
    fmt, out = RecordFormat.of("int4", 64), RecordFormat.of("int8", 64)
    borders: list[torch.Tensor] = []

    def bordered(numel: int, dtype: torch.dtype) -> torch.Tensor:
        borders.append(torch.full((numel * dtype.itemsize + 2 * GUARD,), 77, dtype=torch.uint8, device=device))
        return borders[-1][GUARD:-GUARD].view(dtype)

    for chunk in (1, 63, 64, 4097):
        source = [numbers("normal", 6 * chunk, torch.bfloat16, chunk).to(device)]
        rows = Rows.of((chunk,), (6,), outer=2)
        message = Calls(backend).encode(source, rows, fmt)
        size, other = message.numel(), out.message_bytes((chunk,), 3, 4)
        encode = backend.encoder(rows, fmt, torch.bfloat16, True)
        for kept in (torch.float32, torch.bfloat16):
            residual = bordered(6 * chunk, kept).fill_(1.0)
            encode(bordered(size, torch.uint8), source, residuals=[residual], factors=[1.0])
        for rotation in (0, 64):
            rotated, half = fmt._replace(rotation=rotation), [bordered(6 * chunk, torch.float16)]
            backend.decoder(rows, rotated, torch.float16)(message, half)
        backend.decoder(rows, fmt, torch.float32, True)(message, [bordered(3 * chunk, torch.float32)])
        backend.recoder(rows, fmt, torch.float32, Rows.of((chunk,), (3,)), out)(
            message, message=bordered(other, torch.uint8)
        )
        if device.type == "cuda":
            torch.cuda.synchronize()
        for border in borders:
            assert (border[:GUARD] == 77).all() and (border[-GUARD:] == 77).all()
        borders.clear()


def test_a_payload_is_written_where_wide_stores_can(target: tuple[Any, torch.device]) -> None:
    """Elsewhere the call is refused, since a device would write beside it or end the process."""
    backend, device = target
    encoder = Encoder(INT4, Rows.of((64,), (1,)), torch.float32, backend)
    memory = torch.zeros(encoder.bytes + 1, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match=r"payload: found address 0x[0-9a-f]+; expected a multiple of"):
        encoder([torch.ones(64, device=device)], out=memory[1:])
    assert not memory.any()
