"""Three tiers, and nodes of an odd number. Run by test_fsdp.py on 8 ranks."""

from __future__ import annotations

from tests.fsdp import window_checks
from tests.fsdp.parity_checks import assert_equal, uncoded
from tests.fsdp.training import Case, case


def check_crossings_of_three_tiers() -> None:
    """Hops, signs of the last backward, and bytes."""
    window_checks.check_signs_of_the_last_backward()
    window_checks.check_bytes_are_those_of_the_plan()


def check_layouts_and_accumulation() -> None:
    for layout in ((2, 2, 2), (3, 1, 2)):
        assert_equal(Case(layout, (1, 3, 8)))
    assert_equal(case("bf16"), exact=True)
    assert_equal(case("frozen", "tied", "offload", layout=(3, 1, 2)))
    assert_equal(case(layout=(2, 2, 1), tensor=2, accumulation=2))


def check_scopes_between_the_device_and_the_world() -> None:
    for preset in ("hpz", "zero1"):
        assert_equal(Case(), uncoded(preset))


def check_all_ranks_of_three_tiers_hold_the_same_bits() -> None:
    for codec in ("int4", window_checks.AT_RANDOM):
        window_checks.assert_same_bits(codec)
