"""DeepSpeed in the parity tables: ZeRO-3 without hzero and with it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist

import hzero
from hzero.deepspeed import versions
from tests.deepspeed.training import CLIP, LR, OFFLOAD, ds_config, engine_of, masters_of, shared_folder
from tests.parity import zoo
from tests.parity.compare import Row
from tests.rank_main import DEVICE

#: Stock keeps no gathered weight for its next use, so that both read the shards again; bucket and unit sizes are small.
ZERO = {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0, "reduce_bucket_size": 700}
#: Keys of DeepSpeed's configuration by option.
OPTIONS: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": {"enabled": True}},
    "states16": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
    "offload": OFFLOAD,
    "unmanaged": {"managed_gradient_accumulation": False},
    "kept": {"zero_optimization": {"stage3_param_persistence_threshold": 10**6}},
    "small": {"zero_optimization": {"stage3_prefetch_bucket_size": 400, "sub_group_size": 500}},
    "prefetch": {"zero_optimization": {"stage3_prefetch_bucket_size": 5000, "stage3_max_reuse_distance": 10**9}},
}
#: Ways to write into the shards. DeepSpeed's next step replaces what they write.
WRITES: dict[str, Callable[[Any], Any]] = {
    "copy": lambda shard: shard.copy_(shard * 0.9),
    "lerp": lambda shard: shard.lerp_(torch.ones_like(shard), 0.1),
    "data": lambda shard: shard.data.mul_(0.9),
    "foreach": lambda shard: torch._foreach_mul_([shard], 0.9),
    "replaced": lambda shard: setattr(shard, "data", shard * 0.9),
    "one rank": lambda shard: shard.mul_(0.9) if dist.get_rank() == 2 else None,
}


@functools.cache
def _folder(row: Row) -> str:
    return str(shared_folder())


class Plain:
    """One model on each rank, as DDP has it. Stock may step the gradient of an earlier window again."""

    state = group = None

    def __init__(self, row: Row) -> None:
        self.model, self.rank = zoo.make(row.options).to(DEVICE), dist.get_rank()
        self.trained = [param for param in self.model.parameters() if param.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=LR, betas=(0.9, 0.99), weight_decay=0.01)
        self.blocks = self.model.blocks

    def backward(self, tokens: torch.Tensor, last: bool, count: int) -> torch.Tensor:
        loss = self.model(tokens)
        (loss / count).backward()
        return loss.detach()

    def step(self) -> float:
        for param in self.trained:
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
        norm = torch.nn.utils.clip_grad_norm_(self.trained, CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)

    def edit(self, way: str, step: int) -> None:
        """A window that is given up leaves nothing; there is no other edit."""

    def evaluate(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.model(tokens)

    def masters(self) -> dict[str, torch.Tensor]:
        return {name: param.detach() for name, param in self.model.named_parameters() if param.requires_grad}

    def end(self) -> None:
        """Nothing is kept."""


class Session:
    """An engine; see `tests.parity.compare.Session`."""

    def __init__(self, row: Row) -> None:
        if "unmanaged" in row.options and "managed_gradient_accumulation false" in versions.lacking():
            pytest.skip("the installed DeepSpeed has no such key")
        zero, config = {"stage": 3, "stage3_param_persistence_threshold": 0, **ZERO}, dict[str, Any]()
        for option in row.options & OPTIONS.keys():
            changes = dict(OPTIONS[option])
            zero |= changes.pop("zero_optimization", {})
            config |= changes
        block = None if row.preset is None else row.whole_block
        config = ds_config(block, row.windows[0], zero_optimization=zero, **config)
        model = row.make or functools.partial(zoo.make, row.options)
        if "zero.Init" in row.options:
            hzero.enable()
            with deepspeed.zero.Init(config_dict_or_path=config):
                made = model()
        else:
            made = model()
        zoo.checkpoint_blocks(made, row.options)
        self.engine, self.row = engine_of(config, made), row
        self.state, self.group, self.rank = hzero.state(self.engine), None, dist.get_rank()
        assert (self.state is None) == (row.preset is None)
        self.writes, self.managed = False, "unmanaged" not in row.options
        self.wire = next(made.parameters()).dtype
        self.blocks = [module for module in made.modules() if isinstance(module, zoo.Block)]

    def backward(self, tokens: torch.Tensor, last: bool, count: int) -> torch.Tensor:
        loss = self.engine(tokens)
        if self.writes and dist.get_rank() == 1:
            self.engine.module.blocks[0].up.weight.ds_tensor.data.mul_(0.5)
        self.writes = False
        self.engine.backward(loss)
        if self.managed and not last:
            self.engine.step()
        return loss.detach()

    def step(self) -> float:
        self.engine.step()
        return float(self.engine.get_global_grad_norm())

    def edit(self, way: str, step: int) -> None:
        params = list(self.engine.module.parameters())
        if way == "load":  # stock's checkpoint
            if self.row.preset is None:
                self.engine.save_checkpoint(_folder(self.row), tag=str(step))
            dist.barrier()
            self.engine.load_checkpoint(_folder(self.row.of_stock), tag=str(step))
        elif way == "gathered":
            with deepspeed.zero.GatheredParameters(params, modifier_rank=1):
                if dist.get_rank() == 1:
                    for param in params:
                        param.data.mul_(0.9)
        elif way == "given up":  # a window without a step
            self.engine.backward(self.engine(zoo.batch(77, step, self.rank).to(DEVICE)))
            self.engine.optimizer.zero_grad()
        elif way == "before backward":  # of the next step
            self.writes = True
        else:
            with torch.no_grad():
                for param in params:
                    WRITES[way](param.ds_tensor)

    def evaluate(self, tokens: torch.Tensor) -> torch.Tensor:
        return zoo.evaluate(self.engine, tokens)

    def masters(self) -> dict[str, torch.Tensor]:
        return masters_of(self.engine)

    def read(self) -> dict[str, torch.Tensor]:
        found = {}
        if "kept" not in self.row.options:
            self.engine.empty_partition_cache()
        for name, param in self.engine.module.named_parameters():
            if not param.ds_persist:
                self.state.gather([param]).wait()
            found[name] = param.detach().clone()
            if not param.ds_persist:
                param.partition()
        return found

    def end(self) -> None:
        self.engine.destroy()
