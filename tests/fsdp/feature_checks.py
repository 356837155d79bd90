"""Every feature of FSDP2 alone, and every sign of the last backward. Run by test_fsdp.py on 4 ranks."""

from __future__ import annotations

import importlib.util

import pytest
import torch._dynamo  # once, before the ranks are forked

from tests.fsdp.parity_checks import LOSSLESS, assert_equal
from tests.fsdp.training import Case, case, plain, relative, train

if importlib.util.find_spec("torchtitan") is not None:
    from tests.fsdp import titan  # before the ranks are forked too


def check_every_feature() -> None:
    for option in (
        "frozen",
        "checkpointing",
        "tied",
        "grouped",
        "kept",
        "spare",
        "smaller",
        "meta",
        "prefetch",
        "offload",
    ):
        assert_equal(case(option, accumulation=2))
    assert_equal(case("bf16", accumulation=2), exact=True)
    assert_equal(Case(accumulation=2, optimizer="sgd"))


def check_compiled_blocks() -> None:
    torch._dynamo.reset()
    assert_equal(case("compiled", accumulation=2))


def check_signs() -> None:
    for flags in ("sync", "all_reduce", "count", "none"):
        assert_equal(Case(accumulation=2, flags=flags))


def check_sums_in_16_bits() -> None:
    """They are rounded in other places than FSDP2's."""
    for option in ("bf16_wire", "fp16"):
        found, wanted = train(case(option), LOSSLESS), plain(case(option))
        assert relative(found.losses, wanted.losses) < 2e-2, (option, found.losses, wanted.losses)
        assert found.state is not None
        found.state.close()


def check_torchtitans_trainer_gives_the_same_losses() -> None:
    if importlib.util.find_spec("torchtitan") is None:
        pytest.skip("torchtitan is not installed")
    wanted, norms, _ = titan.train(None)
    found, clipped, (state,) = titan.train(
        {"preset": "lossless", "topology": {"packages_per_node": 1, "devices_per_package": 2}}
    )
    assert len(found) == titan.STEPS and wanted[-1] < wanted[0] - 1
    assert relative(found, wanted) < 1e-6 and relative(clipped, norms) < 1e-6, (found, wanted, clipped, norms)
    state.close()
