"""The reference trainer: a Hydra application that trains a GPT-NeoX on text under the stage."""

from __future__ import annotations


def main(overrides: list[str]) -> int:
    """``hzero train``: see `hzero.train.application`."""
    from hzero.train.application import run

    return run(overrides)
