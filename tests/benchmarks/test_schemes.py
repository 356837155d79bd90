"""Schemes of the comparison on real ranks: one launch."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.ranks import LONG, on_ranks

needs_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="the train extra is not installed")
test_on_ranks = needs_transformers(LONG(on_ranks({4: ("tests.benchmarks.scheme_checks",)})))
