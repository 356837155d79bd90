"""Settings of all tests."""

from typing import Any

import pytest
from hypothesis import settings

#: Files that take longest, which begin first: at the end no process should have a long one alone. make test keeps the order.
LONGEST = (
    "kernels/test_sanitizers.py", "deepspeed/test_stage.py", "faults/test_between_steps.py", "comm/test_tiered.py",
    "faults/test_endings.py", "slurm/test_jobs.py", "clients/test_clients.py", "deepspeed/test_units.py",
    "parity/test_parity.py", "fsdp/test_fsdp.py", "faults/test_kinds.py", "comm/test_mpi.py", "deepspeed/test_adoption.py",
    "examples/test_examples.py", "clients/test_resume.py", "train/test_train.py", "kernels/test_kernels.py",
    "faults/test_stops.py", "test_readme.py",
)  # fmt: skip

# A deadline says more of what else the machine does than of the code.
settings.register_profile("hzero", deadline=None)
settings.load_profile("hzero")


#: Why long tests are skipped.
LONG = "takes long: --long runs it, as .ci/run does"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Long tests run on request."""
    parser.addoption("--long", action="store_true", help="run the tests that have the marker `long` too")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Says how many long tests were left out."""
    skipped = terminalreporter.stats.get("skipped", [])
    if left := sum(LONG in str(report.longrepr) for report in skipped):
        terminalreporter.write_line(f"{left} long tests were left out; --long runs them")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files in the order of `LONGEST`, then the others; skips long tests."""
    for item in items:
        if item.get_closest_marker("long") and not config.getoption("--long"):
            item.add_marker(pytest.mark.skip(reason=LONG))

    def place(item: pytest.Item) -> int:
        return next((at for at, name in enumerate(LONGEST) if item.path.match(f"tests/{name}")), len(LONGEST))

    items.sort(key=place)
