"""Memory of the trainer's steps, on real ranks. Run by tests/zero/test_stage.py, whose launch they share."""

from __future__ import annotations

import pytest
import torch.distributed as dist

#: A model whose activations are few beside its states.
SMALL = ["model.hidden_size=64", "model.num_layers=2", "model.intermediate_size=256", "model.vocab_size=512"]


def check_memory_of_the_trainer_is_what_the_plan_says() -> None:
    """Within 5 % for every state, and within 10 % in all."""
    from benchmarks.memory import measure, overrides_of

    world = dist.get_world_size()
    keys = ("reduce_bucket_size", "stage3_prefetch_bucket_size")
    buckets = [f"++deepspeed.zero_optimization.{key}=50000" for key in keys]
    for case in (("topo", 2, False), ("replica", 1, True)):
        found = measure([*overrides_of(*case), *SMALL, *buckets], world)
        assert {"activations", "resident weights", "gradient buffer", "all"} <= {name for name, *_ in found.rows()}
        for name, planned, measured in found.rows():
            assert measured == pytest.approx(planned, rel=0.1 if name == "all" else 0.05), (case, name, found.rows())
