"""Models of many kinds beside stock ZeRO-3, on four ranks; ``--long`` adds the others of docs/versions.md."""

from __future__ import annotations

from tests.ranks import on_ranks

test_kinds = on_ranks({4: ("tests.models.model_checks",)})
