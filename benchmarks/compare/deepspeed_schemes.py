"""DeepSpeed's ZeRO-3, plain, with hpZ, and with hzero."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import groups, set_z3_leaf_modules
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXLayer

import hzero
from benchmarks.compare.scheme import Job, Scheme, tensor_bytes
from benchmarks.training import adamw
from hzero.config import Scope
from hzero.deepspeed.stage_state import optimizer_bytes


class DeepSpeedZero3(Scheme):
    """An engine of stage 3.

    Args:
        job: Shared by all schemes.
        hpz: Scope of DeepSpeed's secondary copy of the weights (ZeRO++'s hpZ).
        block: The ``"hzero"`` block without its topology.
    """

    def __init__(self, job: Job, hpz: Scope | None = None, block: dict[str, Any] | None = None) -> None:
        built = job.build()
        if block is None:  # a layer is gathered and released as one; hzero does it unasked
            set_z3_leaf_modules(built, [GPTNeoXLayer])
        self.parameters = sum(param.numel() for param in built.parameters())
        self._engine = hzero.initialize(
            model=built, model_parameters=built.parameters(), config=deepspeed_config(job, hpz, block)
        )[0]
        # DeepSpeed keeps hpZ's group for the process, and would give it to the engines that come after.
        groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
        self._state = hzero.state(self._engine)
        self._secondary_bytes = 0
        self._gathered = self._micro_steps = 0
        self._count_gathers()

    def step(self, batches: Sequence[torch.Tensor], rate: float) -> torch.Tensor:
        """As in `Scheme`."""
        total = torch.zeros(())
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate
        for ids in batches:
            loss = self._engine(input_ids=ids, labels=ids).loss
            total += loss.detach().float()
            self._engine.backward(loss)
            self._note_secondary()
            self._micro_steps += 1
            self._engine.step()
        return total / len(batches)

    def _count_gathers(self) -> None:
        """Counts the gathers of DeepSpeed's coordinator: not every use of a parameter is a gather."""
        coordinator = self._engine.optimizer.parameter_offload.get_param_coordinator()
        name = "_PartitionedParameterCoordinator__all_gather_params_"
        gather = getattr(coordinator, name)

        def counting(params: Any, *arguments: Any, **keywords: Any) -> Any:
            missing = [p for p in params if p.ds_status == ZeroParamStatus.NOT_AVAILABLE]
            self._gathered += sum(p.ds_numel for p in missing)
            return gather(params, *arguments, **keywords)

        setattr(coordinator, name, counting)

    def fetches(self) -> float:
        """As in `Scheme`."""
        return self._gathered / self.parameters / max(self._micro_steps, 1)

    def _note_secondary(self) -> None:
        """Notes the size of hpZ's copy, which is gone after the step."""
        copies = (getattr(param, "ds_secondary_tensor", None) for param in self._engine.module.parameters())
        self._secondary_bytes = max(self._secondary_bytes, tensor_bytes(copies))

    def memory(self) -> dict[str, int]:
        """As in `Scheme`; secondary partitions count as weights, gradient accumulation buffers and residuals as gradients."""
        optimizer = self._engine.optimizer
        primary = tensor_bytes(param.ds_tensor for param in self._engine.module.parameters())
        sizes = {
            "weights": primary + self._secondary_bytes,
            "gradients": tensor_bytes([optimizer.grad_partitions_flat_buffer]),
            "optimizer": optimizer_bytes(optimizer),
        }
        if self._state is not None:
            own = self._state.memory(optimizer)
            sizes["weights"] += own["secondary partition"]
            others = ("primary weights", "secondary partition", "optimizer")
            sizes["gradients"] = sum(size for state, size in own.items() if state not in others)
        return sizes

    def start_counting(self) -> None:
        """As in `Scheme`."""
        self._gathered = self._micro_steps = 0


def deepspeed_config(job: Job, hpz: Scope | None, block: dict[str, Any] | None) -> dict[str, Any]:
    """DeepSpeed's configuration: parameters are released after each use, and a bucket is one layer."""
    train = job.train
    rates = {"lr": train["lr"], "weight_decay": train["weight_decay"], "ns_method": "standard", "torch_adam": True}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": train["micro_batch"],
        "gradient_accumulation_steps": train["accumulation"],
        "gradient_clipping": 0.0,  # 1 by default, and no other scheme clips
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_max_live_parameters": job.bucket_numel,
            "stage3_prefetch_bucket_size": job.bucket_numel,
            "reduce_bucket_size": job.bucket_numel,
            "reduce_scatter": not train["muon"],  # as DeepSpeed's Muon wants it
        },
        "optimizer": {"type": "Muon", "params": rates} if train["muon"] else adamw(train),
        "steps_per_print": 10**9,
    }
    if hpz is not None:
        config["zero_optimization"]["zero_hpz_partition_size"] = job.grid.scope_size(hpz)
    if train["dtype"] != "fp32":
        config[train["dtype"]] = {"enabled": True}
    if block is not None:
        config["zero_optimization"]["hzero"] = {**block, "topology": job.topology}
    return config
