"""DeepSpeed's own code, in which a few global names mean something else; its modules stay as they are."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any


def with_names(function: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """A copy of a function of DeepSpeed that finds these values under names of its module.

    A subclass so replaces one call in the middle of a long method, and inherits the rest.

    Args:
        function: A plain function, such as an unbound method, without a closure.
        **names: Names that its code looks up in its module (`hzero.zero.versions` checks that it does).
    """
    assert isinstance(function, types.FunctionType) and function.__closure__ is None
    return types.FunctionType(
        function.__code__, {**function.__globals__, **names}, function.__name__, function.__defaults__
    )
