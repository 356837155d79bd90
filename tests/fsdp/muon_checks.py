"""`hzero.fsdp.Muon` beside ``torch.optim.Muon`` in one process. Run by test_fsdp.py on 4 ranks."""

from __future__ import annotations

import contextlib
import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import hzero.fsdp
from hzero.errors import ConfigError
from hzero.fsdp.muon import orthogonalized
from hzero.program.matrices import Matrix, Owned
from tests.deepspeed.training import mean_over_ranks, shared_folder
from tests.rank_main import DEVICE

MICRO, STEPS = 3, 10
VOCABULARY, WIDTH = 37, 13
#: Rows of the matrices: also fewer than ranks, more than columns, and several of one shape.
ROWS = (29, 3, 17, 29, 3, 13)
MUON, ADAMW = {"lr": 0.002, "weight_decay": 0.05, "momentum": 0.9}, {"lr": 0.002, "weight_decay": 0.1}
TOPOLOGIES: tuple[dict[str, int], ...] = (
    {"packages_per_node": 1, "devices_per_package": 2},
    {"packages_per_node": 2, "devices_per_package": 2},
    {"packages_per_node": 1, "devices_per_package": 1},
)
#: Batches of a micro-step that any number of ranks that resume a checkpoint can share.
SHARED = 12
FULL = StateDictOptions(full_state_dict=True)


class Net(nn.Module):
    """An embedding tied to the output layer, matrices of odd shapes, one of them frozen, norms and biases."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in zip((WIDTH, *ROWS), ROWS))
        self.norm = nn.LayerNorm(WIDTH)
        self.layers[3].weight.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens[:, :-1])
        for layer in self.layers:
            x = torch.tanh(layer(x)) + 0.1
        logits = self.norm(x) @ self.embed.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _batch(step: int, micro: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    return torch.randint(VOCABULARY, (3, 6), generator=generator).to(DEVICE)


class Loop:
    """Trains one model, sharded or whole, and records losses and norms."""

    def __init__(self, model: nn.Module, optimizers: list[Any], ranks: list[int]) -> None:
        self.model, self.optimizers, self.ranks, self.found = model, optimizers, ranks, list[float]()
        self.schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in optimizers]

    @classmethod
    def sharded(cls, preset: str, topology: dict[str, int], mesh: DeviceMesh | None = None, **block: Any) -> Loop:
        """A model over all ranks, each with its own batches, or over a mesh, whose ranks share the batches of `SHARED`."""
        model = Net().to(DEVICE)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        hzero.fsdp.apply(model, preset, topology, accumulation=MICRO, **block)
        ranks = [dist.get_rank()] if mesh is None else list(range(mesh.get_local_rank(), SHARED, mesh.size()))
        return cls(model, [hzero.fsdp.Muon(model, adamw=ADAMW, **MUON)], ranks)

    @classmethod
    def whole(cls) -> Loop:
        model = Net().to(DEVICE)
        matrices = [layer.weight for layer in model.layers]
        rest = [param for param in model.parameters() if all(param is not one for one in matrices)]
        optimizers = [torch.optim.Muon(matrices, **MUON), torch.optim.AdamW(rest, **ADAMW)]
        return cls(model, optimizers, list(range(dist.get_world_size())))

    def train(self, steps: range) -> None:
        for step in steps:
            for micro in range(MICRO):
                losses = [self.model(_batch(step, micro, rank)) for rank in self.ranks]
                loss = torch.stack(losses).mean()
                (loss / MICRO).backward()
                self.found.append(mean_over_ranks(loss.detach()))
            norm: Any = nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self.found.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
            for one in self.optimizers:
                one.step()
                one.zero_grad()
            for one in self.schedules:
                one.step()

    def load(self, folder: Path, group: Any = None) -> None:
        """Loads a checkpoint of `save`."""
        model, optimizer = get_state_dict(self.model, self.optimizers)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=str(folder), process_group=group)
        set_state_dict(self.model, self.optimizers, model_state_dict=model, optim_state_dict=optimizer)

    def save(self, folder: Path, group: Any = None) -> None:
        """Saves model and optimizers with torch.distributed.checkpoint."""
        model, optimizer = get_state_dict(self.model, self.optimizers)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=str(folder), process_group=group)

    def states(self) -> dict[str, Any]:
        """By name of the parameter: the states of the optimizers, whole."""
        return get_optimizer_state_dict(self.model, self.optimizers, options=FULL)["state"]


def check_training_equals_one_process_with_torchs_muon() -> None:
    """Odd shapes, tied and frozen parameters, clipping, a scheduler, accumulation; the bytes are the plan's."""
    whole = Loop.whole()
    whole.train(range(STEPS))
    scopes = {"weights": "device", "gradients": "package"}
    for preset, topology, block in zip(("lossless", "lossless", "zero3"), TOPOLOGIES, ({}, {"shard": scopes}, {})):
        loop = Loop.sharded(preset, topology, **block)
        loop.train(range(STEPS))
        torch.testing.assert_close(loop.found, whole.found, rtol=1e-5, atol=1e-6)
        states = loop.states()
        for name, state in whole.states().items() if dist.get_rank() == 0 else ():
            torch.testing.assert_close(states[name], state, rtol=1e-3, atol=1e-5)
        of = hzero.fsdp.state.state_of(loop.model)
        of.settle()
        shapes = [tuple(layer.weight.shape) for place, layer in enumerate(loop.model.layers) if place != 3]
        matrices = [Matrix(one, -(-one[0] // dist.get_world_size()) * one[1]) for one in shapes]
        planned = {row.tier: row.wire_bytes * STEPS for row in Owned.of(matrices, of.plan.grid).traffic(of.plan, 2)}
        entries = [entry for entry in of.wire_log.entries() if entry.role == "optimizer"]
        assert {entry.tier: entry.wire_bytes for entry in entries} == planned
        of.close()


def check_states_load_in_plain_torch_and_back() -> None:
    """A checkpoint of torch.distributed.checkpoint has what torch's two optimizers save, by name."""
    folder = shared_folder()
    loop = Loop.sharded("exact", TOPOLOGIES[0])
    loop.train(range(2))
    loop.save(folder / "hzero")
    plain = Loop.whole()
    plain.load(folder / "hzero")
    plain.save(folder / "torch")
    again = Loop.sharded("lossless", TOPOLOGIES[1])
    again.load(folder / "torch")
    for one in (plain, again):
        one.train(range(2, 5))
    torch.testing.assert_close(again.found, plain.found, rtol=1e-5, atol=1e-6)
    restored = copy.deepcopy(again.optimizers[0].state_dict())
    again.optimizers[0].load_state_dict(restored)
    again.train(range(5, 6))


def check_a_step_with_a_gradient_that_is_not_finite_changes_nothing() -> None:
    found = []
    for spoils in (False, True):
        loop = Loop.sharded("lossless", TOPOLOGIES[0])
        loop.train(range(1))
        if spoils:
            hook = loop.model.norm.weight.register_hook(lambda gradient: gradient * float("inf"))
            (loop.model(_batch(9, 0, dist.get_rank())) * float("nan")).backward()
            hook.remove()
            loop.optimizers[0].step()
            loop.optimizers[0].zero_grad()
        loop.train(range(1, 3))
        found.append(loop.found)
    assert found[0] == found[1]


def check_newton_schulz_of_several_matrices_gives_torchs_update() -> None:
    for shape in ((5, 9), (9, 5), (64, 64)):
        matrices = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0)).bfloat16()
        updates = orthogonalized(matrices, (3.4445, -4.775, 2.0315), 5, 1e-7)
        for matrix, update in zip(matrices, updates):
            param = nn.Parameter(torch.zeros(shape))
            param.grad = matrix.float()
            torch.optim.Muon([param], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False).step()
            scale = max(1, shape[0] / shape[1]) ** 0.5
            torch.testing.assert_close(-param.detach() / scale, update.float(), rtol=0.02, atol=0.02)


class Head(nn.Module):
    """An embedding of tokens, one of positions with the shape of the only layer, and an output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(WIDTH, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
        self.head = nn.Linear(WIDTH, VOCABULARY)


def check_output_layers_and_embeddings_are_adamws() -> None:
    model = Head().to(DEVICE)
    fully_shard(model)
    hzero.fsdp.apply(model, "exact", TOPOLOGIES[0])
    with contextlib.redirect_stderr(io.StringIO()) as said:
        groups = hzero.fsdp.Muon(model).param_groups
    assert ("found int4 with Muon" in said.getvalue()) == (dist.get_rank() == 0)
    assert groups[0]["params"] == [model.layers[0].weight] and len(groups) == 2


def check_wrong_input_is_refused() -> None:
    model = Net().to(DEVICE)
    with pytest.raises(ConfigError, match=r"hzero.fsdp: found Net without hzero; call hzero.fsdp.apply first"):
        hzero.fsdp.Muon(model)
    fully_shard(model, ignored_params={model.layers[5].weight})
    hzero.fsdp.apply(model, "lossless", TOPOLOGIES[0])
    with pytest.raises(
        ConfigError, match=r"layers.5.weight: found no shards \(ignored_params\); expected FSDP2's Shard"
    ):
        hzero.fsdp.Muon(model)
    with pytest.raises(ConfigError, match=r"others: found 'router', which matches no matrix; the matrices are embed.w"):
        hzero.fsdp.Muon(model, others=["router"])
    with pytest.raises(ValueError, match="Learning rate"):
        hzero.fsdp.Muon(model, lr=-1.0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'beta'"):
        hzero.fsdp.Muon(model, beta=0.9)
    for wrong in (
        {"ns_coefficients": (1.0, 2.0)},
        {"ns_steps": 150},
        {"eps": "small"},
    ):  # one rank would fail in a step
        with pytest.raises(ValueError, match=f"hzero.fsdp.Muon: {next(iter(wrong))}: found .*; expected"):
            hzero.fsdp.Muon(model, others=["layers.5.*"], **wrong)
    with pytest.raises(TypeError, match="found a set; expected a list"):
        hzero.fsdp.Muon(model, groups=[{"params": {model.embed.weight}}])
    with pytest.raises(ConfigError, match=r"found one of shape \[3, 3\]; expected the model's parameters"):
        hzero.fsdp.Muon(model, groups=[{"params": nn.Parameter(torch.ones(3, 3))}])
    mixed = [{"params": [model.layers[0].weight, model.layers[0].bias]}]
    with pytest.raises(
        ConfigError, match=r"found layers.0.weight for Muon with layers.0.bias for AdamW; expected a gr"
    ):
        hzero.fsdp.Muon(model, groups=mixed)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        groups = [{"params": model.layers[0].weight, "lr": 0.5}, {"params": [model.embed.weight], "lr": 0.25}]
        optimizer = hzero.fsdp.Muon(model, others="layers.5.*", groups=groups)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.5, 0.25], total_steps=4).step()
    with pytest.raises(ConfigError, match="found a copy or pickle of it; expected state_dict"):
        copy.deepcopy(optimizer)
    assert [("ns_steps" in group, "betas" in group) for group in optimizer.param_groups] == [
        (True, False),
        (False, True),
    ]
    if dist.get_rank() == 0:
        assert "Muon steps 1 matrices" in said.getvalue() and "among them embed.weight" in said.getvalue()
