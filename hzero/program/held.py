"""Held states: what the stage keeps from one step, or micro-batch, to the next, in bytes on one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from hzero.codecs.formats import chunk_numel
from hzero.program.program import StagePrograms
from hzero.program.shards import ShardPlan


class State(NamedTuple):
    """Memory of one state on one device.

    Attributes:
        bytes: Maximum bytes.
        what: Description of the content.
    """

    bytes: int
    what: str


#: States by the names of `hzero.deepspeed.StageState.memory`. States that exist only during a part of a step are ``transient``.
States: TypeAlias = dict[str, State]


def held_states(
    plan: ShardPlan,
    numels: Sequence[int],
    itemsize: int,
    accumulation: int,
    names: Sequence[Sequence[str]] = (),
) -> States:
    """States that the stage keeps from one step, or micro-batch, to the next.

    Args:
        plan: The shard plan.
        numels: Elements of each parameter.
        itemsize: Bytes of one weight.
        accumulation: Micro-batches per step. With one, there are no gradient accumulation buffers.
        names: See `ShardPlan.parts`.
    """
    each = [_held_states(one, part, itemsize, accumulation) for one, part in plan.parts(numels, names)]
    return {
        name: State(sum(one[name].bytes for one in each), "; ".join(dict.fromkeys(one[name].what for one in each)))
        for name in each[0]
    }


def _held_states(plan: ShardPlan, numels: Sequence[int], itemsize: int, accumulation: int) -> States:
    """`held_states` of parameters with one plan."""
    chunks = [chunk_numel(numel, plan.grid.world_size) for numel in numels]
    secondary, what = 0, "none: the weights' scope is the whole world"
    if plan.keeps_copies and plan.whole_copies:
        secondary, what = sum(chunks) * plan.grid.world_size * itemsize, "decoded, whole on every device"
    elif plan.keeps_copies:
        codec = plan.secondary_codec
        secondary = codec.format.message_bytes(chunks, plan.secondary_rows, itemsize)
        what = f"{'uncoded' if codec.traits.plain else codec.codec} over the {plan.weights_scope}"
    summed, how = 0, "none: gradients are over the world"
    if plan.accumulates and accumulation == 1:
        how = "none: a step has one micro-batch"
    elif plan.accumulates:
        how = f"float32 over the {plan.gradients_scope}"
        # Without a hop they are not padded.
        summed = 4 * (sum(chunks) * plan.gradient_rows if plan.micro_hops() else sum(numels))
    programs = StagePrograms.of(plan)
    reductions = programs.micro, programs.boundary, programs.outermost
    residual = 2 * sum(chunks) * sum(program.residual_rows for program in reductions)
    return {
        "secondary partition": State(secondary, what),
        "gradient accumulation buffers": State(summed, how),
        "error feedback": State(residual, "bfloat16 residuals" if residual else "none"),
    }
