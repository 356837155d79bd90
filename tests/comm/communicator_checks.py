"""Collectives and messages without a stage against what one process computes. Run by test_tiered.py on several ranks."""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hzero.codecs.codec import Codec, Encoder
from hzero.comm import Communicator, HopError, communicator, peers
from hzero.comm.activations import reduce_from
from hzero.config import TIERS, CodecConfig
from hzero.errors import ConfigError
from hzero.topology.grid import Grid
from tests.comm.faulty import FaultyRuntime
from tests.comm.tiered_checks import GRIDS, WORLD
from tests.rank_main import TRANSPORT, same_on_all_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: One regular grid, one in another order, one in no order.
SOME = [GRIDS[WORLD][0], *GRIDS[WORLD][-2:]]
MIXES = [
    {"codecs": "int8"},
    {"codecs": {"inter_node": "int4", "intra_node": "int8"}, "gather": {"inter_node": "int8", "intra_node": "bf16"}},
    {"codecs": {"inter_node": {"codec": "int8", "rounding": "stochastic"}, "intra_package": "int8"}, "gather": "int4"},
    {"codecs": {"inter_node": {"codec": "zfp", "rate": 9}, "intra_node": {"codec": "zfp", "rate": 16},
     "intra_package": "int8"}},
    {"codecs": "bf16", "gather": {"inter_node": "none", "intra_node": "int4",
     "intra_package": {"codec": "int8", "block_size": 64}}},
]  # fmt: skip


def _communicator(grid: Grid, **config) -> Communicator:
    with mock.patch.object(communicator, "resolve_grid", return_value=grid):
        return Communicator({"transport": TRANSPORT, **config})


def _everyones(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.Tensor]:
    """The tensors of all ranks, not contiguous."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(*reversed(shape), generator=generator).to(dtype).permute(*reversed(range(len(shape))))
        for _ in range(WORLD)
    ]


def _bits_equal(got: torch.Tensor, want: torch.Tensor) -> bool:
    return got.dtype == want.dtype and torch.equal(got.view(torch.uint8), want.contiguous().view(torch.uint8))


def check_copies_with_codec_none_are_the_same_bits() -> None:
    rank = dist.get_rank()
    for grid, dtype in itertools.product(SOME, DTYPES):
        for checksum in (False, True) if dtype == torch.float32 else (False,):
            group = _communicator(grid, checksum=checksum)
            everyone = _everyones((WORLD, 3, 5), dtype)
            everyone[1][2, 1, 1] = float("nan")
            mine = everyone[rank]
            assert not mine.is_contiguous()
            assert _bits_equal(group.all_gather(mine), torch.cat(everyone))
            assert _bits_equal(group.all_to_all(mine), torch.stack([tensor[rank] for tensor in everyone]))
            for source in (0, WORLD - 1):
                assert _bits_equal(group.broadcast(mine, source), everyone[source])
        assert _bits_equal(group.all_gather(mine[0, 0, 0]), torch.stack([tensor[0, 0, 0] for tensor in everyone]))


def check_copies_with_codec_mpc_are_the_same_bits_in_fewer_bytes() -> None:
    """Each rank's data need another number of bytes; some have bits of NaNs."""
    rank = dist.get_rank()
    after, before = (rank + 1) % WORLD, (rank - 1) % WORLD
    algorithm = {"algorithm": "doubling", "below_bytes": 1 << 20}
    for grid, checksum in itertools.product(SOME, (False, True)):
        group = _communicator(grid, gather="mpc", checksum=checksum, node_all_gather=algorithm)
        everyone = [tensor.round(decimals=member) for member, tensor in enumerate(_everyones((WORLD, 601)))]
        everyone[1][1] = torch.arange(601).to(torch.int32).add(0x7F800001).view(torch.float32)
        mine = everyone[rank]
        assert _bits_equal(group.all_gather(mine), torch.cat(everyone))
        assert _bits_equal(group.all_to_all(mine), torch.stack([tensor[rank] for tensor in everyone]))
        for source in (0, 1):
            assert _bits_equal(group.broadcast(mine, source), everyone[source])
        sent = group.send(mine, after, async_op=True)
        assert _bits_equal(group.recv(mine, before), everyone[before])
        sent.wait()
        plain = _communicator(grid)
        whole = [tensor.nan_to_num() for tensor in everyone]
        reduced = group.all_reduce(whole[rank])
        assert same_on_all_ranks([reduced])
        assert torch.equal(reduced, plain.all_reduce(whole[rank]))
        entries = [entry for entry in group.wire_log.entries() if entry.codec == "mpc" and entry.wire_bytes]
        assert {entry.role for entry in entries} >= {"all_gather", "all_to_all", "all_reduce", "recv"}
        slot = Codec.from_config(CodecConfig(codec="mpc")).message_bytes([mine.numel()], 1, 4)
        gathers = [entry.wire_bytes for entry in entries if entry.role == "all_gather"]
        assert sum(gathers) < (WORLD - 1) * 4 * mine.numel() < (WORLD - 1) * slot
    mixed = _communicator(SOME[0], gather={"inter_node": "mpc", "intra_node": "int8", "intra_package": "mpc"})
    gathered = mixed.all_gather(whole[rank])
    assert same_on_all_ranks([gathered])
    bound = Codec.from_config(CodecConfig(codec="int8")).error_bound(float(torch.cat(whole).abs().max()))
    assert float((gathered - torch.cat(whole)).abs().max()) <= bound


def check_lengths_that_codec_mpc_does_not_write_end_a_hop() -> None:
    rank, encode = dist.get_rank(), Encoder.__call__
    group = _communicator(Grid(WORLD, 1, 1), gather="mpc")
    for wrong in (0, 40, 1 << 40):

        def spoilt(encoder: Encoder, *arguments: Any, wrong: int = wrong) -> torch.Tensor:
            message = encode(encoder, *arguments)
            message[:8] = torch.tensor([wrong]).view(torch.uint8)
            return message

        says = f"codec mpc: found a record of {wrong} bytes; expected a multiple of 16"
        with mock.patch.object(Encoder, "__call__", spoilt), pytest.raises(HopError, match=says):
            group.all_gather(torch.ones(9))
        group = _communicator(Grid(WORLD, 1, 1), gather="mpc")
    assert torch.equal(group.broadcast(torch.full((9,), float(rank)), 1), torch.ones(9))


def check_sums_with_lossless_codecs_are_the_bits_of_codec_none() -> None:
    """Alone, mixed with each other and beside lossy tiers, with checksums and on grids in no order; NaN and infinity stay."""
    rank = dist.get_rank()
    mixes = [
        "mpc",
        {"inter_node": "mpc", "intra_package": "mpc"},
        {"intra_node": {"codec": "mpc", "dimension": 7}, "inter_node": "none"},
    ]
    some = slice(0, None, 2) if WORLD == 8 else slice(1, None, 4)
    for number, (codecs, grid) in list(enumerate(itertools.product(mixes, SOME)))[some]:
        dtype = DTYPES[(number + number // 3) % 3]
        plain = _communicator(grid)
        group = _communicator(grid, codecs=codecs, checksum=dtype == torch.float16)
        for shape, op in (((WORLD, 601), "sum"), ((2 * WORLD, 3), "mean"), ((WORLD, 1), "sum")):
            everyone = _everyones(shape, dtype)
            assert _bits_equal(group.all_reduce(everyone[rank], op), plain.all_reduce(everyone[rank], op))
            own = group.reduce_scatter(everyone[rank], op)
            assert _bits_equal(own, plain.reduce_scatter(everyone[rank], op)), (codecs, grid, dtype)
        assert torch.equal(group.all_gather(everyone[rank]), torch.cat(everyone))
        everyone[1][0, 0], everyone[0][1, 0] = float("inf"), float("nan")
        found = group.all_reduce(everyone[rank])
        assert same_on_all_ranks([found.nan_to_num()])
        assert found[0, 0].isinf() and found[1, 0].isnan() and found[2:].isfinite().all()
        sent = {
            entry.codec for entry in group.wire_log.entries() if entry.wire_bytes and entry.role == "reduce_scatter"
        }
        assert sent == {hop.codec.codec for hop in group.plan.reduce_hops()}
    for first, second in (("mpc", "int8"), ("int8", "mpc")):  # a lossy tier before or behind
        beside, plain = (
            _communicator(SOME[0], codecs={"intra_package": a, "intra_node": b}, gather="none")
            for a, b in ((first, second), (first.replace("mpc", "none"), second.replace("mpc", "none")))
        )
        everyone = _everyones((WORLD, 77), torch.bfloat16)
        assert _bits_equal(beside.all_reduce(everyone[rank]), plain.all_reduce(everyone[rank]))


def check_sums_with_codec_none_are_made_in_float32() -> None:
    """They are rounded once per tier."""
    rank = dist.get_rank()
    for grid, dtype, shape in itertools.product(SOME, DTYPES, ((WORLD, 17), (2 * WORLD, 3))):
        group, everyone = _communicator(grid), _everyones(shape, dtype)
        total, unit = torch.stack(everyone).double().sum(0), torch.finfo(dtype).eps
        most = unit * len(group.plan.reduce_hops()) * torch.stack(everyone).double().abs().sum(0)
        got, mean = group.all_reduce(everyone[rank]), group.all_reduce(everyone[rank], "mean")
        assert got.dtype == mean.dtype == dtype and _bits_equal(
            group.reduce_scatter(everyone[rank]), got.chunk(WORLD)[rank]
        )
        assert ((got.double() - total).abs() <= most).all(), (grid, dtype)
        assert ((mean.double() - total / WORLD).abs() <= 2 * most / WORLD + unit).all(), (grid, dtype)
    for numel in (1, 5, 257):  # no multiples of the ranks
        whole = torch.full((numel,), rank + 1.0)
        assert torch.equal(group.all_reduce(whole), torch.full((numel,), WORLD * (WORLD + 1) / 2))
    large = torch.full((3,), 60000.0, dtype=torch.float16)
    assert torch.isfinite(group.all_reduce(large, "mean")).all()


def check_codecs_keep_their_bounds_and_all_ranks_the_same_bits() -> None:
    rank = dist.get_rank()
    for grid, mix in itertools.product(SOME, MIXES):
        group = _communicator(grid, **mix)
        everyone = _everyones((WORLD, 301))

        def bound(hops, largest: float) -> float:
            return 1.2 * sum(Codec.from_config(hop.codec).error_bound(largest) for hop in hops) + 1e-6

        copies, sums = group.plan.gather_hops(), group.plan.reduce_hops()
        largest = max(float(tensor.abs().max()) for tensor in everyone)
        gathered, sent = group.all_gather(everyone[rank]), group.broadcast(everyone[rank], 2)
        assert same_on_all_ranks([gathered, sent])
        swapped = group.all_to_all(everyone[rank])
        for got, want in (
            (gathered, torch.cat(everyone)),
            (sent, everyone[2]),
            (swapped, torch.stack([tensor[rank] for tensor in everyone])),
        ):
            error = float((got - want).abs().max())
            assert 0 < error <= bound(copies, largest), (grid, mix, error)
        largest = sum(float(tensor.abs().max()) for tensor in everyone)
        total = torch.stack(everyone).double().sum(0).float()
        reduced, part = group.all_reduce(everyone[rank]), group.reduce_scatter(everyone[rank])
        assert same_on_all_ranks([reduced])
        for got, want, allowed in (
            (reduced, total, bound(sums, largest) + bound(copies, largest)),
            (part, total[rank : rank + 1], bound(sums, largest)),
        ):
            error = float((got - want).abs().max())
            assert 0 < error <= allowed, (grid, mix, error, allowed)


def check_error_feedback_of_both_halves_recovers_what_was_lost() -> None:
    everyone = _everyones((5, 129))
    total, errors = torch.stack(everyone).sum(0), []
    for codec, tiers in (("int4", ()), ({"codec": "int4", "rotation": 64}, TIERS), ("int4", TIERS)):
        group = _communicator(SOME[0], codecs=dict.fromkeys(TIERS, codec), error_feedback=list(tiers))
        mean = sum(group.all_reduce(everyone[dist.get_rank()], key=3) for _ in range(30)) / 30
        errors.append(float((mean - total).square().sum()))
        assert same_on_all_ranks([mean])
    codecs = dict.fromkeys(TIERS, "int4")
    beside = _communicator(
        SOME[0], codecs=codecs, gather="mpc", error_feedback=list(TIERS)
    )  # the second half loses nothing
    mean = sum(beside.all_reduce(everyone[dist.get_rank()], key=3) for _ in range(30)) / 30
    errors.append(float((mean - total).square().sum()))
    assert same_on_all_ranks([mean])
    assert max(errors[1:]) < errors[0] / 10, errors
    assert float((group.all_reduce(everyone[dist.get_rank()], key=4) - total).square().sum()) > errors[2]
    group.feedback.clear()
    assert group.feedback._changed == {}
    with pytest.raises(ValueError, match="all_reduce: key: found None; expected a number"):
        group.all_reduce(everyone[0])


def check_tensors_without_elements_and_without_dimensions() -> None:
    group = _communicator(SOME[0], codecs="int8")
    group.wire_log.reset()
    empty = torch.empty(WORLD, 0, 3)
    assert (
        group.all_reduce(empty).shape == group.all_to_all(empty).shape == group.broadcast(empty, 1).shape == empty.shape
    )
    assert group.all_gather(empty).shape == (WORLD * WORLD, 0, 3) and group.reduce_scatter(empty).shape == (1, 0, 3)
    assert group.all_reduce(torch.empty(0), async_op=True).wait().shape == (0,)
    peer = (dist.get_rank() + 1) % WORLD
    assert group.send(empty, peer) is None and group.recv(empty, peer).shape == empty.shape
    assert group.wire_log.entries() == []
    got = group.all_reduce(torch.tensor(2.0, requires_grad=True))
    assert got.shape == () and float(got) == pytest.approx(2.0 * WORLD, rel=0.1) and not got.requires_grad


def check_ranks_with_other_formats_or_settings_are_named_before_any_message() -> None:
    """As with another installation of hzero: messages may have the same sizes, so wrong numbers would arrive."""
    rank, outer = dist.get_rank(), [1, WORLD - 1]
    own = mock.patch.object(peers, "PAYLOAD_FORMAT", 99 if rank in outer else peers.PAYLOAD_FORMAT)
    found = (
        f"99 on rank 1, 99 on rank {WORLD - 1}; expected {peers.PAYLOAD_FORMAT}, as on rank 0: install the same hzero"
    )
    with own, pytest.raises(ConfigError, match=f"payload format: found {found}"):
        _communicator(SOME[0], codecs="int8")
    found = f"communicator.codecs.intra_package.rotation: found 64 on rank 1, 64 on rank {WORLD - 1}; expected 128, as on rank 0$"
    with pytest.raises(ConfigError, match=found):
        _communicator(SOME[0], codecs={"intra_package": {"codec": "int8", "rotation": 64 if rank in outer else 128}})
    total = _communicator(SOME[0]).all_reduce(torch.ones(3))
    assert total.tolist() == [float(WORLD)] * 3


def check_groups_smaller_than_the_world() -> None:
    """Ranks that are in more groups than others find each other still."""
    rank, half = dist.get_rank(), WORLD // 2
    members = list(range(half)) if rank < half else list(range(half, WORLD))
    halves = [dist.new_group(list(range(half))), dist.new_group(list(range(half, WORLD)))]
    mine, everyone = halves[rank >= half], _everyones((half, 9))
    total = torch.stack([everyone[member] for member in members]).sum(0)
    settings = {"topology": {"packages_per_node": half, "devices_per_package": 1}, "transport": TRANSPORT}
    groups = [Communicator(settings, mine)]
    if rank < half:
        groups.append(Communicator(settings, mine, timeout=timedelta(seconds=71)))  # with groups of its own
    groups.append(Communicator({"codecs": "none", "transport": TRANSPORT}, mine))  # discovered
    for group in groups:
        assert group.plan.grid.world_size == half
        torch.testing.assert_close(group.all_reduce(everyone[rank]), total)
        assert _bits_equal(group.broadcast(everyone[rank], 1), everyone[members[1]])
        sent = group.send(everyone[rank], (group.plan.rank + 1) % half, async_op=True)
        before = (group.plan.rank - 1) % half
        assert _bits_equal(group.recv(everyone[rank], before), everyone[members[before]])
        sent.wait()
    whole = _communicator(Grid(1, WORLD, 1)).all_reduce(everyone[rank])
    torch.testing.assert_close(whole, torch.stack(everyone).sum(0))
    outside = mock.patch.object(dist, "get_rank", lambda group=None: -1 if group is not None else rank)
    with outside, pytest.raises(ConfigError, match=r"rank \d is not in the group of ranks"):
        Communicator(settings, mine)


def check_arguments_that_cannot_be_used_are_refused() -> None:
    group, fine = _communicator(SOME[0]), torch.zeros(WORLD, 2)
    own = dist.get_rank()
    refused = [
        (lambda: group.all_reduce(fine.long()), "all_reduce: tensor: found torch.int64 .*expected dense float32, bfloat16"),
        (lambda: group.broadcast(fine.to_sparse(), 0), "broadcast: tensor: .*torch.sparse_coo"),
        (lambda: group.send([1.0], 0), "send: tensor: found list"),
        (lambda: group.all_reduce(fine.to("meta")), "all_reduce: tensor: found on meta; expected cpu"),
        (lambda: group.all_to_all(fine[1:]),
         rf"all_to_all: tensor: found shape \[{WORLD - 1}, 2\]; expected a first .*{WORLD} ranks"),
        (lambda: group.all_reduce(fine, "max"), "all_reduce: op: found 'max'; expected sum or mean"),
        (lambda: group.broadcast(fine, WORLD), rf"broadcast: src: found {WORLD}; expected 0\.\.{WORLD - 1}"),
        (lambda: group.send(fine, own), rf"send: dst: found {own}, this rank itself"),
        (lambda: Communicator({"codec": "int8"}), "communicator: found key 'codec'; expected .*did you mean 'codecs'"),
        (lambda: Communicator({"codecs": {"inter_node": "int3"}}), r"communicator.codecs.inter_node.codec: found 'int3'"),
        (lambda: Communicator(uses=["sum"]), "communicator: uses: found 'sum'; expected sums, copies or messages"),
        (lambda: Communicator(timeout=3), r"communicator: timeout: found 3; expected a positive datetime\.timedelta"),
        (lambda: Communicator(group=[0, 1]), r"communicator: group: found \[0, 1\]; expected a process group"),
        (lambda: Communicator({"topology": None}), 'communicator.topology: found None; expected "discover"'),
        (lambda: Communicator({"codecs": {"inter_node": "mpc"}, "error_feedback": ["inter_node"]}),
         "communicator.error_feedback: found 'inter_node', whose codec 'mpc' loses nothing"),
        (lambda: reduce_from(fine, dist.group.WORLD), "group: found ProcessGroup; expected a Communicator"),
        (lambda: Communicator({"topology": {"packages_per_node": 5, "devices_per_package": 1}}),
         f"communicator.topology: packages_per_node=5 x devices_per_package=1 is 5 ranks a node, but the world has {WORLD}"),
    ]  # fmt: skip
    for call, message in refused:
        with pytest.raises((TypeError, ValueError), match=message) as error:
            call()
        assert "\n" not in str(error.value)
    assert torch.equal(group.all_reduce(fine), fine)  # nothing was begun


def check_messages_from_rank_to_rank_leave_what_all_ranks_hold_alike() -> None:
    """Where a message of two ranks is rounded stochastically, the others' next one is still rounded with the same seed."""
    stochastic = {"codec": "int8", "rounding": "stochastic"}
    codecs = {"inter_node": stochastic, "intra_node": {**stochastic, "codec": "int4"}}
    group = _communicator(SOME[0], codecs=codecs, gather=codecs)
    mine = torch.randn(999, generator=torch.Generator().manual_seed(dist.get_rank()))
    if dist.get_rank() == 0:
        group.send(mine, 1)
    elif dist.get_rank() == 1:
        group.recv(torch.empty(999), 0)
    assert same_on_all_ranks([group.all_reduce(mine), group.all_gather(mine), group.broadcast(mine, 0)])


def check_messages_from_rank_to_rank() -> None:
    """Around a ring both ways at once, several in flight, and between two ranks alone."""
    rank = dist.get_rank()
    after, before = (rank + 1) % WORLD, (rank - 1) % WORLD
    for config in ({}, {"checksum": True}, {"gather": "int8"}):
        group, everyone = _communicator(SOME[-1], **config), _everyones((3, 100), torch.bfloat16)
        like = torch.empty(3, 100, dtype=torch.bfloat16)
        sent = [group.send(everyone[rank] * k, to, async_op=True) for k in (1, 2) for to in (after, before)]
        for factor in (1, 2):
            for source in (before, after):
                got, want = group.recv(like, source), everyone[source] * factor
                if "gather" in config:
                    codec = Codec.from_config(group.config.gather.inter_node)
                    bound = codec.error_bound(float(want.abs().max()), torch.bfloat16)
                    assert 0 < float((got.float() - want.float()).abs().max()) <= bound
                else:
                    assert _bits_equal(got, want)
        assert [chain.wait() for chain in sent] == [None] * 4
        if rank == 0:
            group.send(everyone[0], 2)
        elif rank == 2:
            group.recv(like, 0)
        entries = {entry.role: entry for entry in group.wire_log.entries() if entry.role in ("send", "recv")}
        assert entries["recv"].wire_bytes > 0 and entries["send"].wire_bytes == 0


def check_checksums_of_broadcasts_and_messages_name_the_sender() -> None:
    rank = dist.get_rank()
    with mock.patch.object(communicator, "Runtime", FaultyRuntime):
        group = _communicator(Grid(WORLD, 1, 1), checksum=True)
    group._runtime.faults = ["flip"] if rank == 1 else []
    chain = group.broadcast(torch.ones(9), 3, async_op=True)
    other = group.send(torch.ones(9), 1, async_op=True) if rank == 0 else None
    if rank == 1:
        with pytest.raises(HopError, match=r"broadcast of broadcast of float32 .* changed from rank 3"):
            chain.wait()
        with pytest.raises(HopError, match=r"recv of float32 .* from rank 0 .* changed from rank 0"):
            group.recv(torch.ones(9), 0)
    else:
        chain.wait()
        if other is not None:
            other.wait()
