"""A job of the plan for a small model."""

from typing import Any

from hzero.config import SequenceConfig
from hzero.tools.experiment import _counted
from hzero.tools.plan.scenario import Job


def job(config: Any, length: int, sequence: SequenceConfig, itemsize: int = 4, batch: int = 1) -> Job:
    """The job of a model's configuration."""
    sizes: dict[str, Any] = {"prefetch": 1, "ahead": 0, "reduce": 1, "reuse": 0, "sub_group": 1}
    flags: dict[str, Any] = {"checkpointing": False, "contiguous": False, "offload": False, "gradient_itemsize": None}
    return Job(
        "small", _counted(config), length, batch, accumulation=1, itemsize=itemsize, sequence=sequence, **sizes, **flags
    )
