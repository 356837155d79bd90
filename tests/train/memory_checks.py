"""Memory of the trainer's steps, on real ranks. Run by tests/zero/test_stage.py, whose launch they share."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

#: A small model, whose memory is fullest with the loss by the plan, so that its activations can be compared.
SMALL = ["model.hidden_size=64", "model.num_layers=2", "model.intermediate_size=256"]


def check_memory_of_the_trainer_is_what_the_plan_says() -> None:
    """Within 5 % for every state, and within 10 % in all. A window of one micro-step keeps no accumulators."""
    from benchmarks.memory import measure, overrides_of

    world = dist.get_world_size()
    keys = ("reduce_bucket_size", "stage3_prefetch_bucket_size")
    buckets = [f"++deepspeed.zero_optimization.{key}=50000" for key in keys]
    for case in (("topo", 1, False), ("replica", 2, True)):
        found = measure([*overrides_of(*case), *SMALL, *buckets], world)
        assert {"activations", "resident weights", "gradient buffer", "all"} <= {name for name, *_ in found.rows()}
        for name, planned, measured in found.rows():
            assert measured == pytest.approx(planned, rel=0.1 if name == "all" else 0.05), (case, name, found.rows())


def check_activations_are_those_of_torch() -> None:
    """What forward of a model alone leaves for backward, with and without flash attention and checkpointing, within 2 %."""
    from benchmarks.memory import Storages
    from hzero.model.footprint import activations
    from hzero.model.job import Attention, Job
    from hzero.model.shape import gpt_neox_shape
    from hzero.settings.conf import compose, plain
    from hzero.train.model import build

    shape = plain(compose([*SMALL, "model.seq_length=64"]))["model"]
    cases: tuple[tuple[Attention, bool, torch.dtype], ...] = (
        ("flash", False, torch.float32),
        ("math", False, torch.float32),
        ("math", False, torch.bfloat16),
        ("flash", True, torch.bfloat16),
    )
    for attention, checkpointing, dtype in cases:
        model = build(shape, 0, {}, checkpointing).to(dtype)
        ids = torch.zeros(2, 64, dtype=torch.long)
        kernel = SDPBackend.MATH if attention == "math" else SDPBackend.FLASH_ATTENTION
        storages = Storages(dict)
        for param in model.parameters():
            storages.add(param)
        before = storages.alive
        with sdpa_kernel(kernel), storages.counting():
            loss = model(input_ids=ids, labels=ids).loss
            kept = storages.alive - before
        job = replace(Job(gpt_neox_shape(shape), micro_batch=2, checkpointing=checkpointing), attention=attention)
        planned = activations(job.model, replace(job, itemsize=dtype.itemsize), on_processors=True)
        logarithms = 4 * ids.numel() * job.model.vocab
        assert kept == pytest.approx(planned[0].bytes + logarithms, rel=0.02), (attention, checkpointing, dtype)
        del loss
