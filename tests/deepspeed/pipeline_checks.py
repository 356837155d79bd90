"""Pipelines with ZeRO-1: PP 2 x DP 4, and TP 2 x PP 2 x DP 2. Run by test_stage.py on 8 ranks as 2 x 2 x 2."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe import p2p
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.utils import groups
from torch.nn import functional as F  # noqa: N812

import hzero
from benchmarks.hybrid.model import ColumnParallel, RowParallel
from hzero.codecs.codec import Codec
from hzero.comm import Communicator, for_dimension
from hzero.comm.wires import group_timeout, world_timeout
from hzero.config import CodecConfig, TopologyConfig
from hzero.deepspeed import pipeline
from hzero.deepspeed.pipeline import StageMessages
from hzero.errors import ConfigError
from hzero.manifest import Manifest
from hzero.topology import discovery, resolve_grid
from tests.deepspeed.training import TOPOLOGY, VOCAB, assert_losses, batch, ds_config, engine_of, shared_folder
from tests.rank_main import same_on_all_ranks
from tests.topology import trees

#: The last is the elements of a bucket of gradients.
WIDTH, INNER, LENGTH, BUCKET = 13, 20, 9, 400
#: Groups of the last pipeline. DeepSpeed makes a dozen a pipeline and keeps them; each has threads that wake 100 times a second.
made: list[dist.ProcessGroup] = []


class Embed(torch.nn.Module):
    """Tokens to ``[batch, length - 1, width]``; tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.weight = torch.nn.Parameter(torch.randn(VOCAB, WIDTH) / 4)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Activations, and positions as int64, which no codec takes."""
        return F.embedding(tokens, self.weight), torch.arange(tokens.shape[1]).expand_as(tokens).contiguous()


class Block(torch.nn.Module):
    """A residual layer whose inner units are split over a tensor group."""

    def __init__(self, seed: int, group: Communicator | None) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.norm = torch.nn.LayerNorm(WIDTH)
        up, down = torch.nn.Linear(WIDTH, INNER), torch.nn.Linear(INNER, WIDTH)
        self.up = up if group is None else ColumnParallel(up, group)
        self.down = down if group is None else RowParallel(down, group)

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """``[batch, length - 1, width]`` and positions to the same."""
        x, positions = inputs
        scale = (1 + positions % 3).unsqueeze(-1).to(x.dtype) / 2
        return x + scale * self.down(torch.relu(self.up(self.norm(x)))), positions


class Head(torch.nn.Linear):
    """The head where it is not tied."""

    def __init__(self) -> None:
        torch.manual_seed(9)
        super().__init__(WIDTH, VOCAB)

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Logits."""
        return super().forward(inputs[0])


def _head(embed: Embed, inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.linear(inputs[0], embed.weight)


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def pipeline_of(config: dict[str, Any], tensor: int, tied: bool = False) -> Any:
    """An engine of pipeline stages, their embedding and head tied or not; stock where the configuration has no block."""
    deepspeed.init_distributed("gloo", verbose=False)
    dist.barrier()  # a rank may still connect to a group whose engine others have refused
    while made:
        dist.destroy_process_group(made.pop())
    kept, world = set(c10d._world.pg_map), dist.get_world_size()
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=tensor, num_dp=world // 2 // tensor)
    group = None
    if tensor > 1:
        lists = topology.get_axis_comm_lists("model")
        tensor_groups = [dist.new_group(ranks) for ranks in lists]
        own = next(one for one, ranks in zip(tensor_groups, lists) if dist.get_rank() in ranks)
        grid = resolve_grid(TopologyConfig(**TOPOLOGY), world)
        group = for_dimension("tensor", config, own, grid=grid)
    layers = [
        TiedLayerSpec("embed", Embed) if tied else LayerSpec(Embed),
        *(LayerSpec(Block, seed, group) for seed in (2, 3, 4)),
        TiedLayerSpec("embed", Embed, forward_fn=_head) if tied else LayerSpec(Head),
    ]
    model = PipelineModule(layers, topology=topology, loss_fn=_loss, partition_method="uniform")
    # hzero's own live as long as the world.
    made.extend(one for one in c10d._world.pg_map if one not in kept and not one.group_desc.startswith("hzero "))
    return engine_of(config, model)


def train_pipeline(
    block: dict[str, Any] | None,
    tensor: int = 1,
    dtype: str = "fp32",
    steps: int = 3,
    accumulation: int = 3,
    tied: bool = False,
) -> tuple[list[float], list[float], Any]:
    """Losses, norms of gradients, and the engine."""
    config = ds_config(None, accumulation, zero_optimization={"stage": 1, "reduce_bucket_size": BUCKET})
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
        if block is None:  # stock would add up in bfloat16 otherwise, micro-batches and ranks
            config |= {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"}
    if block is not None:
        config["zero_optimization"]["hzero"] = {"topology": TOPOLOGY, **block}
    engine = pipeline_of(config, tensor, tied)
    losses, norms = [], []
    for step in range(steps):
        losses.append(float(engine.train_batch(batches(engine, step, accumulation))))
        norms.append(float(engine.get_global_grad_norm()))
    return losses, norms, engine


def batches(engine: Any, step: int, accumulation: int = 3) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and labels of a step's micro-batches."""
    rank = engine.grid.get_data_parallel_rank()
    for micro in range(accumulation):
        tokens = batch(step, micro, rank)
        yield tokens[:, :-1], tokens[:, 1:]


def end(engine: Any) -> None:
    """DeepSpeed keeps an mpu for all later engines."""
    engine.destroy()
    groups.mpu = None


NONE = {"codecs": {"gradients": "none"}}


@functools.cache
def without_codec(tensor: int) -> list[float]:
    """Losses of six steps."""
    losses, _, engine = train_pipeline(NONE, tensor, steps=6)
    end(engine)
    return losses


def same_weights(engine: Any) -> bool:
    """Whether all ranks that have a weight have the same bits of it: data-parallel ranks, and tensor ranks, masters too."""
    optimizer = engine.optimizer
    whole = [param for param in engine.module.parameters() if not is_model_parallel_parameter(param)]
    for index, master in enumerate(optimizer.single_partition_of_fp32_groups):
        size = int(optimizer.partition_size[index])
        start = optimizer.hzero.gradients.plan.rank * size
        parts = optimizer._parts(index, start, size)
        whole += [master[a - start : b - start] for param, _, a, b in parts if not is_model_parallel_parameter(param)]
    data, model = engine.mpu.get_data_parallel_group(), engine.mpu.get_slice_parallel_group()
    return all([same_on_all_ranks(optimizer.bit16_groups_flat, data), same_on_all_ranks(whole, model)])


def check_pipelines_give_the_losses_of_stock() -> None:
    """Bit for bit: of two or four ranks, sums in float32 in the order of ranks and of gloo's ring are the same here."""
    for tensor, dtype in ((1, "fp32"), (1, "bf16"), (2, "bf16")):
        want, want_norms, engine = train_pipeline(None, tensor, dtype, tied=True)
        assert type(engine) is PipelineEngine and hzero.state(engine) is None
        end(engine)
        losses, norms, engine = train_pipeline(NONE, tensor, dtype, tied=True)
        assert type(engine.optimizer).__name__ == "HZeroStage1"
        assert same_weights(engine)
        end(engine)
        what = f"losses with tensor groups of {tensor} in {dtype}"
        assert losses == want, what
        assert_losses(norms, want_norms, 1e-6, what="gradient norms")


@contextlib.contextmanager
def _unlike_clusters(width: int = 4) -> Iterator[None]:
    """Pretends that nodes have ``width`` ranks, and the last node other devices and another network than the others."""
    node, local = divmod(dist.get_rank(), width)
    tree, last = shared_folder() / f"{node}-{local}", node + 1 == dist.get_world_size() // width
    links = {pair: count for pair, count in {(0, 1): 4, (2, 3): 4, (0, 2): 1, (1, 3): 1}.items() if max(pair) < width}
    gpus = [trees.Gpu(bus, device=(0x7408, 0x740C)[last]) for bus in trees.FRONTIER_BUSES[:width]]
    trees.write_kfd(tree, gpus, links, {"mlx5_0": 100_000})
    trees.connect(tree, "mlx5_0", ("InfiniBand", "Ethernet")[last])
    environ = {"HZERO_SYSFS": str(tree), "NCCL_HOSTID": f"node{node}", "LOCAL_RANK": str(local)}
    discovery.discovered_grid.cache_clear()
    try:
        with mock.patch.dict(os.environ, environ):
            yield
    finally:
        discovery.discovered_grid.cache_clear()


def check_stages_go_one_per_cluster_that_is_discovered() -> None:
    """Only activations and their gradients cross clusters, and the losses are those of the declared machine."""
    with _unlike_clusters():
        losses, _, engine = train_pipeline({**NONE, "topology": {"source": "discover"}}, steps=2)
        own = hzero.state(engine)
        assert str(own.owners.world) == "2 clusters x 1 node x 2 packages x 2 devices"
        own.settle()
        crossed = {(entry.role, entry.tier) for entry in own.wire_log.entries() if entry.wire_bytes}
        assert crossed == {
            ("pipeline", "inter_cluster"),
            *itertools.product(("gradients", "optimizer"), ("intra_package", "intra_node")),
        }
        end(engine)
    assert losses == without_codec(1)[:2]
    with _unlike_clusters(width=2), pytest.raises(ConfigError) as error:
        train_pipeline({**NONE, "topology": {"source": "discover"}})
    groups.mpu = None
    says = (
        "hzero.topology: found pipeline stages on clusters of 3, 1 nodes; expected clusters of one size, or a declared"
    )
    assert str(error.value).startswith(says)


LOSSY = {
    "preset": "topo",
    "codecs": {"gradients": "int8", "pipeline": "int8", "optimizer": {"codec": "int8", "block_size": 64}, "tensor": "int8"},
}  # fmt: skip


def check_lossy_codecs_cost_little_and_leave_the_same_bits() -> None:
    for tensor in (1, 2):
        want = without_codec(tensor)
        block = LOSSY if tensor > 1 else {**LOSSY, "codecs": {**LOSSY["codecs"], "tensor": "none"}}
        feedback = {**block, "error_feedback": ["intra_node"], "checksum": True}
        for one, dtype in ((block, "bf16"),) if tensor > 1 else ((block, "fp32"), (feedback, "fp32")):
            losses, _, engine = train_pipeline(one, tensor, dtype, steps=6)
            assert losses != want and losses[-1] < losses[0]
            assert_losses(losses, want, 0.02)
            assert same_weights(engine)
            # What the owner keeps is its master, as the codec leaves it, once for all tiers.
            optimizer = engine.optimizer
            rank = dist.get_rank(engine.mpu.get_data_parallel_group())
            for partitions, master in zip(
                optimizer.parallel_partitioned_bit16_groups, optimizer.single_partition_of_fp32_groups
            ):
                own = partitions[rank]
                codec = Codec.from_config(CodecConfig(codec="int8", block_size=64))
                bound = codec.error_bound(float(master.abs().max()), own.dtype)
                error = float((own.float() - master.to(own.dtype).float()).abs().max())
                assert 0 < error <= bound
            decoded = [flat.clone() for flat in optimizer.bit16_groups_flat]
            with hzero.exact_weights(engine):
                for partitions, master in zip(
                    optimizer.parallel_partitioned_bit16_groups, optimizer.single_partition_of_fp32_groups
                ):
                    assert torch.equal(partitions[rank], master.to(partitions[rank].dtype))
            assert all(map(torch.equal, optimizer.bit16_groups_flat, decoded))
            end(engine)


def check_what_the_next_stage_receives_as_it_is() -> None:
    """DeepSpeed sends masks as float16, and all but zero is true."""
    generator, me = torch.Generator().manual_seed(1), dist.get_rank()
    numbers = torch.randn(40000, generator=generator).bfloat16()
    mask = torch.randint(0, 2, (1000,), generator=generator).half()
    rotated = {"codec": "int8", "rotation": 64}  # of which zeros come back as other small numbers
    stock = {"send": lambda tensor, to: dist.send(tensor, to), "recv": lambda tensor, of: dist.recv(tensor, of)}
    for codecs, sent in (("mpc", numbers), (rotated, mask)):
        messages = StageMessages(Communicator({"codecs": codecs, "topology": TOPOLOGY}))
        with mock.patch.multiple(p2p, **stock), messages:
            found = torch.zeros_like(sent)
            if me % 2:
                messages.recv(found, me - 1)
                assert torch.equal(found.view(torch.int16), sent.view(torch.int16))
            else:
                messages.send(sent, me + 1)
        dist.barrier()


def check_a_skipped_step_leaves_no_residuals() -> None:
    _, _, engine = train_pipeline({"preset": "topo", "error_feedback": ["intra_node"]}, 2, steps=2)
    feedback = engine.optimizer.hzero.gradients._runtime.feedback

    def residuals() -> dict[Any, torch.Tensor]:
        return {key: kept.values.clone() for key, kept in feedback._residuals.items()}

    before = residuals()
    assert any(bool(kept.any()) for kept in before.values())
    spoiled = next(param for param in engine.module.parameters() if param.requires_grad)
    handle = spoiled.register_hook(lambda gradient: gradient * float("inf"))
    engine.train_batch(batches(engine, 2))
    handle.remove()
    assert engine.optimizer.overflow and not feedback._changed
    after = residuals()
    assert after.keys() == before.keys() and not any(bool(kept.any()) for kept in after.values())
    end(engine)


def check_the_wire_log_counts_what_the_shapes_say() -> None:
    steps, accumulation = 2, 3
    for tensor in (1, 2):
        block = {"codecs": {"gradients": "int8", "pipeline": "int8"}}
        _, _, engine = train_pipeline(block, tensor, steps=steps, accumulation=accumulation)
        own = hzero.state(engine)
        own.settle()
        entries = {(entry.role, entry.tier): entry for entry in own.wire_log.entries()}
        data = dist.get_world_size() // 2 // tensor
        inside = {4: [("intra_package", 2), ("intra_node", 1)], 2: [("intra_node", 1)]}[
            data
        ]  # parts of a partition that come from a peer
        assert set(entries) == {
            *((role, tier) for role in ("gradients", "optimizer") for tier, _ in inside),
            ("pipeline", "inter_node"),
            *([("tensor", "intra_package")] if tensor > 1 else []),
        }
        codec = Codec.from_config(CodecConfig(codec="int8"))
        # DeepSpeed sends a part of the activations for each tensor rank, and gathers them behind the wire.
        values = 2 * (LENGTH - 1) * WIDTH // tensor
        messages = entries["pipeline", "inter_node"]
        assert messages.hops == 2 * steps * accumulation  # as many sent as received
        assert messages.raw_bytes == steps * accumulation * values * 4
        assert messages.wire_bytes == steps * accumulation * codec.message_bytes([values], 1, 4)
        elements = sum(param.numel() for param in engine.module.parameters())
        partition = -(-elements // (2 * data)) * 2
        columns = BUCKET // data
        parts = [min(columns, partition - first) for first in range(0, partition, columns)]
        for tier, rows in inside:
            entry = entries["gradients", tier]
            assert entry.hops == steps * len(parts)
            assert entry.raw_bytes == steps * rows * partition * 4
            assert entry.wire_bytes == steps * sum(codec.message_bytes([part], rows, 4) for part in parts)
        for tier, rows in inside:  # copies cross the outer tier first
            entry = entries["optimizer", tier]
            assert (entry.codec, entry.hops) == ("none", steps)
            assert entry.raw_bytes == steps * rows * partition * 4
        # Groups that DeepSpeed makes do not inherit the world's timeout.
        timeouts = {group_timeout(one) for one in (engine.mpu.get_slice_parallel_group(), engine.grid.pp_proc_group)}
        assert timeouts == {world_timeout()}
        end(engine)


def check_evaluation_and_checkpoints_of_pipelines() -> None:
    """A resumed run repeats the bits of an uninterrupted one: codecs that round to nearest have no state."""
    folder, block = shared_folder(), {"preset": "topo", "codecs": {"pipeline": "int8"}, "checkpoint": {}}
    _, _, engine = train_pipeline(block, steps=2)
    evaluated = float(engine.eval_batch(batches(engine, 7)))
    assert evaluated == float(engine.eval_batch(batches(engine, 7)))
    engine.save_checkpoint(str(folder), tag="here")
    dist.barrier()
    assert len(Manifest.read(folder / "here").files) == len(list((folder / "here").glob("*.pt")))
    want = [float(engine.train_batch(batches(engine, step))) for step in (7, 8)]
    assert want[0] == evaluated
    end(engine)
    _, _, other = train_pipeline(block, steps=1)
    other.load_checkpoint(str(folder), tag="here")
    assert [float(other.train_batch(batches(other, step))) for step in (7, 8)] == want
    end(other)
    _, _, third = train_pipeline({**block, "error_feedback": ["intra_node"]}, steps=1)
    with mock.patch.object(pipeline.logger, "warning") as warned:
        third.load_checkpoint(str(folder), tag="here")
    assert ["residuals of error feedback start at zero" in call.args[0] for call in warned.mock_calls] == [True] * (
        dist.get_rank() == 0
    )
    assert not third.optimizer.hzero.gradients._runtime.feedback.bytes
    end(third)


def check_what_pipelines_do_not_have_is_refused_in_one_line() -> None:
    def refused(message: str, changes: dict[str, Any], tensor: int = 1, tied: bool = False, **block: Any) -> None:
        zero = {"stage": 1, **changes.pop("zero_optimization", {})}
        with pytest.raises(ConfigError, match=message) as error:
            pipeline_of(ds_config({"topology": TOPOLOGY, **block}, zero_optimization=zero, **changes), tensor, tied)
        assert "\n" not in str(error.value)
        groups.mpu = None

    for message, zero in (
        ("zero_optimization.stage: found 3 with a PipelineModule; expected 1", {"stage": 3}),
        ("offload_optimizer.device: found cpu", {"offload_optimizer": {"device": "cpu"}}),
        ("zero_optimization.elastic_checkpoint: found True", {"elastic_checkpoint": True}),
        ("zero_optimization.round_robin_gradients: found True", {"round_robin_gradients": True}),
    ):
        refused(message, {"zero_optimization": zero})
    refused("hzero.shard: has no effect with pipeline stages", {}, shard={"weights": "device", "gradients": "device"})
    refused("hzero.guard: has no effect with pipeline stages", {}, guard=3)
    refused("hzero.codecs.weights: has no effect with pipeline stages", {}, codecs={"weights": "int8"})
    refused("fp16.enabled: found True", {"fp16": {"enabled": True}})
    types = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}}
    refused("data_types.grad_accum_dtype: found bf16", types)
    refused("tensor_parallel.autotp_size: found 2", {"tensor_parallel": {"autotp_size": 2}})
    refused(
        r"gradients.intra_package: found 'int4' with weights that are tied over stages \(embed\)",
        {},
        tied=True,
        preset="topo",
    )
    with mock.patch.object(deepspeed, "PipelineEngine", type("DualPipe", (PipelineEngine,), {})):
        refused("found the engine DualPipe; expected the engine", {})
    differs = r"codecs.gradients.intra_node: found 'int4' with parameter \d.up.weight, which differs between the ranks"
    with mock.patch.object(pipeline, "is_model_parallel_parameter", return_value=False):
        refused(differs, {}, tensor=2, preset="topo")
    with pytest.raises(ConfigError, match="found 1 without a PipelineModule; expected 3"):
        engine_of(ds_config({"topology": TOPOLOGY}, zero_optimization={"stage": 1}))
