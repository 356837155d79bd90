"""PyTorch's own: DistributedDataParallel, FSDP2, HSDP."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import hzero
import hzero.fsdp
from benchmarks.compare.scheme import Job, Scheme, tensor_bytes
from hzero.config import Scope
from hzero.fsdp.muon import orthogonalized


class _TorchScheme(Scheme):
    """A module with torch's AdamW, shared by the two engines."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._module = job.build()
        self.parameters = sum(param.numel() for param in self._module.parameters())
        self._optimizers: list[torch.optim.Optimizer]
        self._gradient_bytes = 0

    def _finish_step(self, rate: float, keep_gradients: bool = False) -> None:
        self._gradient_bytes = tensor_bytes(param.grad for param in self._module.parameters())
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=not keep_gradients)

    def memory(self) -> dict[str, int]:
        """As in `Scheme`: the float32 parameters are the masters, and no narrow copy outlives its use."""
        optimizer = tensor_bytes(self._module.parameters()) + self._optimizer_bytes()
        return {"weights": 0, "gradients": self._gradient_bytes, "optimizer": optimizer}

    def _optimizer_bytes(self) -> int:
        states = [state for optimizer in self._optimizers for state in optimizer.state.values()]
        return tensor_bytes(value for state in states for value in state.values())


class Ddp(_TorchScheme):
    """All states on every rank. Gradients are reduced once per step, in the type of the other schemes' wires.

    Args:
        job: Shared by all schemes.
        hook: torch's hook ``fp16`` or ``powersgd``, or the configuration of hzero's (`hzero.comm.DdpState`).
    """

    def __init__(self, job: Job, hook: str | dict[str, Any] | None = None) -> None:
        super().__init__(job)
        # PowerSGD starts its second collective in a callback, which on gloo runs in another order on every rank.
        megabytes = job.bucket_numel * 4 / 2**20 if hook != "powersgd" else 1000.0
        self._ddp = DistributedDataParallel(self._module, bucket_cap_mb=megabytes, gradient_as_bucket_view=True)
        if hook == "fp16":
            self._ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif hook == "powersgd":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=3)
            self._ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif isinstance(hook, dict):
            own = hzero.comm.DdpState({**hook, "topology": job.topology})
            self._ddp.register_comm_hook(own, hzero.comm.ddp_hook)
        elif job.dtype == torch.bfloat16:
            self._ddp.register_comm_hook(None, lambda _, bucket: _narrow_all_reduce(bucket))
        self._optimizers = job.optimizers(self._module, torch.optim.Muon)

    def step(self, batches: Sequence[torch.Tensor], rate: float) -> torch.Tensor:
        """As in `Scheme`; micro-batches but the last are not synchronised."""
        total = torch.zeros(())
        narrow = torch.autocast("cpu", dtype=torch.bfloat16, enabled=self._job.dtype == torch.bfloat16)
        for index, ids in enumerate(batches):
            last = index == len(batches) - 1
            with contextlib.nullcontext() if last else self._ddp.no_sync():
                with narrow:
                    loss = self._ddp(input_ids=ids, labels=ids).loss
                total += loss.detach().float()
                (loss / len(batches)).backward()
        self._finish_step(rate, keep_gradients=True)  # views of the buckets, which DDP keeps
        return total / len(batches)

    def fetches(self) -> None:
        """As in `Scheme`: nothing is sharded."""


class Fsdp(_TorchScheme):
    """``fully_shard`` of every layer and of the root, released after forward.

    Args:
        job: Shared by all schemes.
        shard: Scope over which all states are sharded; replicated across the rest (HSDP).
        reshard_after_forward: Scope over which weights stay sharded between forward and backward; None: as `shard`.
        block: Of hzero, without its topology; None is FSDP2 alone.
        dion: Whether to use Dion's Muon (https://github.com/microsoft/dion), which Python must be able to import.
    """

    def __init__(
        self,
        job: Job,
        shard: Scope,
        reshard_after_forward: Scope | None,
        block: dict[str, Any] | None,
        dion: bool = False,
    ) -> None:
        super().__init__(job)
        size, world = job.grid.scope_size(shard), job.grid.world_size
        self._hybrid = size < world
        if self._hybrid:
            mesh = init_device_mesh("cpu", (world // size, size), mesh_dim_names=("replicate", "shard"))
        else:
            mesh = init_device_mesh("cpu", (world,))
        narrow = job.dtype if job.dtype != torch.float32 else None
        policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=narrow)
        between: bool | int = True
        if reshard_after_forward is not None and job.grid.scope_size(reshard_after_forward) < size:
            between = job.grid.scope_size(reshard_after_forward)
        layers: Any = self._module.get_submodule("gpt_neox.layers")
        for layer in layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=between, mp_policy=policy)
        self._root = fully_shard(self._module, mesh=mesh, reshard_after_forward=between, mp_policy=policy)
        self._state = None if block is None else hzero.fsdp.apply(self._module, topology=job.topology, **block)
        muon: Any = torch.optim.Muon
        if dion:
            from dion import Muon

            # The same Newton-Schulz iteration, without a compiler.
            how = ((3.4445, -4.775, 2.0315), 5, 1e-7)
            alike = {"nesterov": True, "newton_schulz_func": lambda x, epsilon: orthogonalized(x.bfloat16(), *how)}
            muon = partial(Muon, distributed_mesh=mesh, weight_decay=0.1, **alike)
        if job.train["muon"] and block is not None:
            self._optimizers = [hzero.fsdp.Muon(self._module, job.train["lr"], job.adamw)]
        else:
            self._optimizers = job.optimizers(self._module, muon)

    def step(self, batches: Sequence[torch.Tensor], rate: float) -> torch.Tensor:
        """As in `Scheme`; replicas are reduced in the last micro-batch only."""
        total = torch.zeros(())
        for index, ids in enumerate(batches):
            last = index == len(batches) - 1
            self._root.set_is_last_backward(last)
            if self._hybrid:
                self._root.set_requires_all_reduce(last)
            loss = self._module(input_ids=ids, labels=ids).loss
            total += loss.detach().float()
            (loss / len(batches)).backward()
        self._finish_step(rate)
        return total / len(batches)

    def memory(self) -> dict[str, int]:
        """As in `Scheme`; includes hzero's secondary partitions, gradient accumulation buffers and residuals."""
        found, own = super().memory(), {} if self._state is None else self._state.memory()
        found["weights"] += own.get("secondary partition", 0)
        found["gradients"] += own.get("gradient accumulation buffers", 0) + own.get("error feedback", 0)
        return found

    def fetches(self) -> float:
        """As in `Scheme`: forward and backward each gather, with `reshard_after_forward`."""
        return 2.0


def _narrow_all_reduce(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket in bfloat16. torch's own hook does the same, and is refused without NCCL."""
    buffer = bucket.buffer()
    narrow = buffer.to(torch.bfloat16).div_(dist.get_world_size())
    work = dist.all_reduce(narrow, async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: buffer.copy_(done.value()[0]))
