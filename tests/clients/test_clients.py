"""The clients of DeepSpeed under hzero, on four ranks, QLoRA on two, one launch for each. docs/versions.md has their table."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.ranks import on_ranks

needs_clients = pytest.mark.skipif(
    not all(map(find_spec, ("transformers", "accelerate", "lightning", "trl", "peft", "datasets", "bitsandbytes"))),
    reason="a client is not installed; the extra `clients` has all of them",
)

CHECKS = (
    "tests.clients.trainer_checks", "tests.clients.accelerate_checks", "tests.clients.lightning_checks",
    "tests.clients.trl_checks", "tests.clients.deepspeed_checks", "tests.clients.ulysses_checks",
)  # fmt: skip


test_client = needs_clients(on_ranks({4: CHECKS, 2: ("tests.clients.qlora_checks",)}))
