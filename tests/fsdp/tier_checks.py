"""Three tiers, other layouts, and every feature. Run by test_fsdp.py on 8 ranks."""

from __future__ import annotations

from tests.fsdp import window_checks
from tests.fsdp.parity_checks import LOSSLESS, assert_equal
from tests.fsdp.training import Case, case, plain, relative, train


def check_crossings_of_three_tiers() -> None:
    """Hops, signs of the last backward, and bytes."""
    window_checks.check_signs_of_the_last_backward()
    window_checks.check_bytes_are_those_of_the_plan()


def check_layouts_and_signs() -> None:
    for flags in ("last", "sync", "all_reduce", "count", "none"):
        assert_equal(Case(accumulation=3, flags=flags))
    assert_equal(Case(accumulation=8))
    assert_equal(Case((3, 1, 2), 1))
    assert_equal(Case((3, 1, 2), 3))
    assert_equal(case(layout=(2, 2, 1), tensor=2, accumulation=3))


def check_scopes_between_the_device_and_the_world() -> None:
    uncoded = {"codecs": {"weights": "none", "gradients": "none"}, "guard": {"every": 2}}
    for preset in ("hpz", "zero1"):
        assert_equal(Case(accumulation=3), {"preset": preset, **uncoded})


def check_every_feature() -> None:
    for option in (
        *("frozen", "checkpointing", "tied", "grouped", "kept", "spare", "smaller", "meta", "prefetch", "offload"),
        *("compiled", "bf16"),
    ):
        assert_equal(case(option, accumulation=3), exact=option == "bf16")
    for option in ("frozen", "tied", "spare", "offload", "bf16"):
        assert_equal(case(option, layout=(3, 1, 2)), exact=option == "bf16")
    for option in ("bf16_wire", "fp16"):  # sums are rounded in other places
        found, wanted = train(case(option), LOSSLESS), plain(case(option))
        assert relative(found.losses, wanted.losses) < 2e-2, (option, found.losses, wanted.losses)
        assert found.state is not None
        found.state.close()
    assert_equal(Case(accumulation=3, optimizer="sgd"))
