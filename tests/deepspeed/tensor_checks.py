"""The stage beside tensor groups: TP 2 x DP 4, and 4 x 2. Run by test_stage.py on 8 ranks, 2 nodes x 2 packages x 2 devices."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import groups
from torch.nn import functional as F  # noqa: N812

import hzero
from benchmarks.hybrid.model import ColumnParallel, Layout, Mpu, RowParallel
from hzero.comm import Communicator, for_dimension
from hzero.config import TopologyConfig
from hzero.errors import ConfigError
from hzero.topology import resolve_grid
from tests.deepspeed.training import (
    TOPOLOGY,
    VOCAB,
    assert_losses,
    batch,
    block_of,
    ds_config,
    engine_of,
    masters_of,
    train,
)
from tests.rank_main import same_on_all_ranks

WIDTH, INNER = 13, 20


class SplitNet(torch.nn.Module):
    """Two split layers between parameters that every rank has whole; sizes that ranks and blocks do not divide."""

    def __init__(self, group: Communicator | None) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embed = torch.nn.Embedding(VOCAB, WIDTH)
        self.norm = torch.nn.LayerNorm(WIDTH)
        up, down = torch.nn.Linear(WIDTH, INNER), torch.nn.Linear(INNER, WIDTH)
        self.head = torch.nn.Linear(WIDTH, VOCAB)
        self.up = up if group is None else ColumnParallel(up, group)
        self.down = down if group is None else RowParallel(down, group)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean next-token loss, a scalar, of int64 ``[batch, length]``."""
        x = self.embed(tokens[:, :-1])
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        return F.cross_entropy(self.head(x).float().flatten(0, 1), tokens[:, 1:].flatten())


@contextlib.contextmanager
def tensor_groups(tensor: int, **topology: Any) -> Iterator[Mpu]:
    """Groups on the 2 x 2 x 2 grid; afterwards DeepSpeed, which keeps an mpu for all later engines, forgets them."""
    grid = resolve_grid(TopologyConfig(**{**TOPOLOGY, **topology}), dist.get_world_size())
    places = itertools.product(range(grid.nodes), range(grid.packages_per_node), range(grid.devices_per_package))
    layout = Layout([grid.rank((gcd, 0, gpu, node, 0, 0)) for node, gpu, gcd in places], tensor)
    try:
        yield Mpu(layout)
    finally:
        groups.mpu = None


def train_split(
    config: dict[str, Any], mpu: Mpu, steps: int, accumulation: int
) -> tuple[list[float], list[float], dict[str, torch.Tensor], Any]:
    """Losses, gradient norms, this rank's masters, and the engine."""
    grid = resolve_grid(TopologyConfig(**TOPOLOGY), dist.get_world_size())
    group = for_dimension("tensor", config, mpu.get_model_parallel_group(), grid=grid)
    engine = engine_of(config, SplitNet(group), mpu=mpu)
    norms: list[float] = []
    losses = train(engine, steps, accumulation, norms=norms, loss_of=_loss_of(mpu))
    return losses, norms, masters_of(engine), engine


def _loss_of(mpu: Mpu) -> Callable[[Any, int, int], torch.Tensor]:
    """Of the data-parallel rank's tokens."""
    return lambda engine, step, micro: engine(batch(step, micro, mpu.get_data_parallel_rank()))


def check_tensor_groups_give_the_losses_and_masters_of_stock() -> None:
    """With codec none; those of parameters that are whole on every rank are the same bits on all of them.

    Bit for bit those of stock where two ranks are summed, which has one order.
    """
    cases = ((2, 1, "lossless"), (2, 3, "hpz"), (4, 3, "zero1"), (4, 3, "zero3"))
    for tensor, accumulation, preset in cases:
        with tensor_groups(tensor) as mpu:
            config = ds_config(None, accumulation)
            stock, stock_norms, want, engine = train_split(config, mpu, 2, accumulation)
            assert type(engine.optimizer).__name__ == "DeepSpeedZeroOptimizer_Stage3"
            engine.destroy()
            config = ds_config(block_of(preset), accumulation)
            losses, norms, got, engine = train_split(config, mpu, 2, accumulation)
            assert type(engine.optimizer).__name__ == "HZeroStage3"
            assert_losses(losses, stock, what=f"losses of {preset} and ZeRO-3 with {tensor} x {accumulation}")
            assert_losses(norms, stock_norms, what="gradient norms")
            if preset == "zero3":
                assert losses == stock and all(torch.equal(master, want[name]) for name, master in got.items())
            for name, master in got.items():
                torch.testing.assert_close(master, want[name], rtol=1e-5, atol=1e-6)
            whole = [master for name, master in got.items() if name not in ("up.weight", "up.bias", "down.weight")]
            assert same_on_all_ranks(whole)
            engine.destroy()


def check_codecs_by_dimension_and_their_wire_log() -> None:
    """Aggressive on gradients, mild on activations: losses stay near, and the wire log has the role by tier and codec."""
    with tensor_groups(2) as mpu:
        exact, *_, engine = train_split(ds_config(block_of("lossless"), 2), mpu, 3, 2)
        engine.destroy()
        block = block_of("topo", codecs={"tensor": {"intra_package": "int8"}}, guard={"every": 2})
        losses, _, masters, engine = train_split(ds_config(block, 2), mpu, 3, 2)
        assert_losses(losses, exact, 0.02)
        own = hzero.state(engine)
        own.settle()
        assert own.plan.grid == resolve_grid(TopologyConfig(nodes=2, packages_per_node=2), 4)
        entries = {(entry.role, entry.tier): entry for entry in own.wire_log.entries()}
        assert {tier for role, tier in entries if role == "tensor"} == {"intra_package"}
        assert entries["tensor", "intra_package"].codec == "int8" and entries["gradients", "inter_node"].codec == "int4"
        # Of every micro-batch one sum in forward and one in backward, each a reduction and a copy, of 2 x 8 x 13 values.
        assert entries["tensor", "intra_package"].hops == 3 * 2 * 2 * 2
        assert entries["tensor", "intra_package"].raw_bytes == 3 * 2 * 2 * 2 * (2 * 8 * WIDTH * 4 // 2)
        assert {name.partition("/")[0] for name in own.ratios} == {"weights", "gradients"}
        assert same_on_all_ranks([masters["norm.weight"]])
        engine.destroy()


def check_groups_that_do_not_fit_are_refused_in_one_line() -> None:
    config = ds_config(block_of("lossless"))

    def refused(mpu: Any, message: str) -> None:
        with pytest.raises(ConfigError, match=message) as error:
            engine_of(config, SplitNet(None), mpu=mpu)
        assert "\n" not in str(error.value)
        groups.mpu = None

    with tensor_groups(
        2, order=["intra_package", "intra_node", "inter_node"]
    ) as mpu:  # as if the ranks were numbered otherwise than the block says
        refused(
            mpu, r"mpu: found a tensor group of ranks \d, \d, which crosses nodes \(2 nodes x 2 packages x 2 devices\)"
        )
    with tensor_groups(2) as mpu:
        mpu.get_pipe_parallel_world_size = lambda: 2  # type: ignore[attr-defined]
        refused(mpu, "mpu: found 2 pipeline stages")
        del mpu.get_pipe_parallel_world_size
        with deepspeed.zero.Init(config_dict_or_path=ds_config()):
            model = SplitNet(None)
        with pytest.raises(
            ConfigError, match=r"parameter embed.weight: found a partition over 8 ranks; expected the engine's 4 ranks"
        ):
            engine_of(config, model, mpu=mpu)


def check_models_built_in_shards_of_the_data_parallel_group() -> None:
    with tensor_groups(2) as mpu:
        with deepspeed.zero.Init(config_dict_or_path=ds_config(), data_parallel_group=mpu.get_data_parallel_group()):
            model = SplitNet(None)  # the same on both tensor ranks, which is enough here
        engine = engine_of(ds_config(block_of("topo")), model, mpu=mpu)
        assert len(hzero.state(engine).owners.ranks) == 4
        losses = train(engine, 3, loss_of=lambda engine, *_: engine(batch(0, 0, mpu.get_data_parallel_rank())))
        assert losses[2] < losses[0]
        engine.destroy()
