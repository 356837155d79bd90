"""Reduce-scatters for gloo, whose own moves about twice the bytes of RCCL's."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

#: ``gloo``: torch's own. ``all_to_all``: everyone sends everyone its part, sums in float32. ``ring``: partial sums travel
#: around the ring, as RCCL's do, in the type of the wire.
KINDS = ("gloo", "all_to_all", "ring")


class _Done:
    """A collective that has ended."""

    def wait(self, *arguments: Any) -> bool:
        """Nothing is left to wait for."""
        return True

    def is_completed(self) -> bool:
        """It has ended."""
        return True

    def get_future(self) -> Any:
        """None: like some of torch's works, it announces nothing."""
        raise RuntimeError("ended already")


def install(kind: str) -> None:
    """Has every reduce-scatter of this process done in one way: torch.distributed's, FSDP's, DeepSpeed's, hzero's."""
    if kind == "gloo":
        return
    from deepspeed.comm import comm as deepspeed_comm

    way = {"all_to_all": _all_to_all, "ring": _ring}[kind]

    def reduce_scatter(
        output: torch.Tensor,
        input: torch.Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> _Done | None:
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(f"reduce-scatter of kind {kind}: found {op}, possible: SUM, AVG")
        world = dist.get_world_size(group)
        way(output.view(-1), input.reshape(world, -1), group)
        if op == dist.ReduceOp.AVG:
            output.div_(world)
        return _Done() if async_op else None

    for name in ("reduce_scatter_tensor", "reduce_scatter_single"):  # torch 2.13 has the second name as well
        if hasattr(dist, name):
            setattr(dist, name, reduce_scatter)
    deepspeed_comm.cdb.reduce_scatter_function = reduce_scatter


def _all_to_all(output: torch.Tensor, parts: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    received = torch.empty_like(parts)
    dist.all_to_all_single(received.view(-1), parts.contiguous().view(-1), group=group)
    output.copy_(received.float().sum(0))


def _ring(output: torch.Tensor, parts: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    ahead, behind = (rank + 1) % world, (rank - 1) % world
    moving = parts[behind].clone()
    arriving = torch.empty_like(moving)
    # The part that ends at rank r sets out at r + 1 and comes by everyone.
    for hop in range(1, world):
        sent = dist.isend(moving, group=group, group_dst=ahead)
        dist.recv(arriving, group=group, group_src=behind)
        assert sent is not None
        sent.wait()
        moving, arriving = arriving, moving
        moving += parts[(rank - 1 - hop) % world]
    output.copy_(moving)
