"""Models of many kinds beside stock ZeRO-3, on four ranks; ``pytest --long -rP tests/models`` prints the table."""

from __future__ import annotations

from tests.ranks import on_ranks

test_kinds = on_ranks({4: ("tests.models.model_checks",)})
