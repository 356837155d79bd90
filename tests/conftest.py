"""Settings of all tests."""

import pytest
from hypothesis import settings

#: Files that take longest, which begin first: at the end no process should have a long one alone. make test keeps the order.
LONGEST = (
    "zero/test_stage.py",
    "faults/test_between_steps.py",
    "collectives/test_tiered.py",
    "clients/test_clients.py",
    "zero/test_units.py",
    "faults/test_kinds.py",
    "faults/test_endings.py",
    "collectives/test_mpi.py",
    "clients/test_resume.py",
    "zero/test_adoption.py",
    "test_packaging.py",
    "kernels/test_kernels.py",
    "faults/test_two_engines.py",
    "test_readme.py",
    "faults/test_stops.py",
    "kernels/test_device_code.py",
    "benchmarks/test_compare.py",
    "zero/test_parity.py",
    "examples/test_examples.py",
    "benchmarks/test_schemes.py",
)

# A deadline says more of what else the machine does than of the code.
settings.register_profile("hzero", deadline=None)
settings.load_profile("hzero")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files in the order of `LONGEST`, then the others."""

    def place(item: pytest.Item) -> int:
        return next((at for at, name in enumerate(LONGEST) if item.path.match(f"tests/{name}")), len(LONGEST))

    items.sort(key=place)
