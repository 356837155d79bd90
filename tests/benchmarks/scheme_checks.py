"""Schemes of the comparison, on four ranks: they do the same work, and reduce-scatters of other kinds give the same sums."""

from __future__ import annotations

import math
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import yaml

from benchmarks.compare import schemes
from benchmarks.compare.scheme import Job, Scheme
from benchmarks.training import numels
from hzero.topology.grid import Grid
from tests.ranks import ROOT

CATALOG: dict[str, Any] = yaml.safe_load((ROOT / "benchmarks" / "conf" / "catalog.yaml").read_text())
GRID = Grid(2, 1, 2)
MODEL = dict(
    name="tiny", hidden_size=32, num_layers=2, num_heads=2, intermediate_size=72, vocab_size=263, seq_length=16
)
TRAIN = dict(accumulation=2, micro_batch=2, seed=3, lr=1e-2, betas=[0.9, 0.95], weight_decay=0.1, muon=False)
STEPS = 2


def _job(dtype: str) -> Job:
    return Job(MODEL, {**TRAIN, "dtype": dtype}, GRID, bucket_numel=12_000)


def _batches() -> list[torch.Tensor]:
    made = []
    for micro in range(2):
        generator = torch.Generator().manual_seed(10 * micro + dist.get_rank())
        made.append(torch.randint(0, 263, (2, 16), generator=generator))
    return made


def _losses(scheme: Scheme) -> list[float]:
    losses = torch.stack([scheme.step(_batches(), 1e-2) for _ in range(STEPS)])
    dist.all_reduce(losses)
    return list((losses / dist.get_world_size()).tolist())


def _one(name: str, dtype: str) -> tuple[Scheme, list[float]]:
    scheme = schemes.build(CATALOG[name], _job(dtype))
    scheme.start_counting()
    return scheme, _losses(scheme)


def check_schemes_without_codec_have_the_losses_of_ddp() -> None:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False)
    parameters = sum(numels(MODEL))
    _, expected = _one("ddp", "fp32")
    assert expected[0] > expected[-1]
    shards = {"hsdp-package": 2}
    names = (
        "fsdp2", "fsdp2-node", "fsdp2-lossless", "hsdp-package", "zero3-deepspeed", "hpz-deepspeed", "hpz", "lossless",
    )  # fmt: skip
    for name in names:
        scheme, losses = _one(name, "fp32")
        assert scheme.parameters == parameters, name
        assert all(math.isclose(a, b, rel_tol=2e-5) for a, b in zip(losses, expected)), (name, losses, expected)
        optimizer = scheme.memory()["optimizer"] / (12 * parameters / shards.get(name, 4))
        assert 0.98 < optimizer < 1.1, (name, optimizer)  # FSDP cuts rows: the last rank may have fewer
        fetches = scheme.fetches()
        assert fetches is not None and 1 <= fetches <= 2, (name, fetches)


def check_tensor_groups_with_zero1_train_as_ddp_does() -> None:
    for dtype, tolerance in (("fp32", 2e-5), ("bf16", 1e-2)):
        _, expected = _one("ddp", dtype)
        scheme, losses = _one("tp2-zero1", dtype)
        assert all(math.isclose(a, b, rel_tol=tolerance) for a, b in zip(losses, expected)), (losses, expected)
        memory, parameters = scheme.memory(), sum(numels(MODEL))
        # Half of the layers and all of the embeddings; of these, two ranks share the optimizer.
        layers = parameters - 2 * 263 * 32
        assert memory["weights"] < (4 if dtype == "fp32" else 2) * (parameters - 0.4 * layers), memory
        assert 0.9 < memory["optimizer"] / (12 * (parameters - layers / 2) / 2) < 1.15, memory
        assert memory["gradients"] > 0 and scheme.fetches() is None
