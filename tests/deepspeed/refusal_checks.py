"""What the stage refuses. Run by test_stage.py on 4 ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch.distributed as dist

from hzero.errors import ConfigError
from tests.deepspeed.training import TOPOLOGY, block_of, ds_config, engine_of


def check_unsupported_features_are_refused_by_name() -> None:
    of_zero: dict[str, tuple[Any, str]] = {
        "stage": (2, ": found 2"),
        "reduce_scatter": (False, ": found False"),
        "zero_hpz_partition_size": (2, ": found 2"),
        "zero_quantized_weights": (True, ": found True"),
        "zero_quantized_gradients": (True, ": found True"),
        "zero_quantized_nontrainable_weights": (True, ": found True"),
        "stage3_allgather_sequential": (True, ": found True"),
        "stage3_use_all_reduce_for_fetch_params": (True, ": found True"),
        "offload_param": ({"device": "cpu"}, ".device: found cpu"),
        "offload_optimizer": ({"device": "nvme", "nvme_path": "/tmp"}, ".device: found nvme"),
        "zenflow": ({"topk_ratio": 0.1, "select_strategy": "auto"}, ": found a block"),
    }
    offload = {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True}}
    experts = {"expert_parallel": {"enabled": True, "autoep_size": 2, "preset_model": "mixtral"}}
    cases: list[tuple[dict[str, Any], str]] = [
        *(({"zero_optimization": {"stage": 3, key: value}}, key + says) for key, (value, says) in of_zero.items()),
        ({"zero_optimization": offload}, "offload_optimizer.super_offload: found True"),
        ({"compile": {"deepcompile": True}}, "compile.deepcompile: found True"),
        ({"hybrid_engine": {"enabled": True}}, "hybrid_engine.enabled: found True"),
        ({**experts, "hzero": block_of("topo", checkpoint={})}, "expert_parallel.enabled: found True"),
        ({**experts, "tensor_parallel": {"autotp_size": 2}}, "autotp_size: found 2, which hzero does not support with expert"),
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "torch_autocast.enabled: found True"),
        ({"optimizer": {"type": "Muon", "params": {"lr": 1e-3}}},
         "zero_optimization.reduce_scatter: found True, which hzero does not support with Muon"),
    ]  # fmt: skip
    for changes, name in cases:
        _expect_refusal({**copy.deepcopy(ds_config(block_of("topo"))), **changes}, name)
    says = _expect_refusal(
        ds_config(block_of("topo"), optimizer={"type": "Muoon"}), "optimizer.type: found 'Muoon'; expected"
    )
    assert says.endswith("(did you mean 'Muon'?)")
    _expect_refusal(ds_config({"preset": "topo", "topology": {**TOPOLOGY, "nodes": 3}}), "nodes")
    _expect_refusal({**ds_config(), "hzero": "topo"}, "hzero")
    # Before a group is made, on all ranks; also where another pattern comes first.
    for patterns, found in (({"nrom*": "none"}, "nrom*"), ({"norm*": "int8", "norm.weight": "none"}, "norm.weight")):
        says = f"hzero.codecs.except: found {found!r}, which matches no parameter that an earlier"
        assert "first: norm." in _expect_refusal(ds_config(block_of("topo", codecs={"except": patterns})), says)
    says = "hzero.shard.except: found '*dowm*', which matches no parameter that an earlier pattern has not taken; parameters of "
    nearest = "the model, the nearest first: down.weight, down.bias"
    _expect_refusal(ds_config(block_of("topo", shard={"except": {"*dowm*": {"weights": "world"}}})), says + nearest)
    says = "hzero.shard.except.*norm*.gradients: found 'hive', which this machine does not have"
    _expect_refusal(ds_config(block_of("topo", shard={"except": {"*norm*": {"gradients": "hive"}}})), says)
    says = "hzero.error_feedback: found ('inter_node',) on rank 2; expected (), as on rank 0"
    _expect_refusal(ds_config(block_of("topo", error_feedback=["inter_node"] if dist.get_rank() == 2 else [])), says)


def _expect_refusal(config: dict[str, Any], name: str) -> str:
    with pytest.raises(ConfigError) as error:
        engine_of(config)
    text = str(error.value)
    assert name in text and "\n" not in text, text
    return text
