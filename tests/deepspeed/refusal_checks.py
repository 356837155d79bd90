"""What the stage refuses. Run by test_stage.py on 4 ranks."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import deepspeed
import pytest
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from hzero.deepspeed.versions import check_deepspeed
from hzero.validation import ConfigError
from tests.deepspeed.training import TOPOLOGY, block_of, ds_config, engine_of


def check_unsupported_features_are_refused_by_name() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"zero_optimization": {"stage": 2}}, "zero_optimization.stage 3, found 2"),
        ({"zero_optimization": {"stage": 3, "reduce_scatter": False}}, "reduce_scatter: found False"),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}, "zero_hpz_partition_size: found 2"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "zero_quantized_weights: found True"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}}, "zero_quantized_gradients: found True"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}, "offload_param.device: found cpu"),
        (
            {"zero_optimization": {"stage": 3, "stage3_allgather_sequential": True}},
            "stage3_allgather_sequential: found True",
        ),
        (
            {"zero_optimization": {"stage": 3, "stage3_use_all_reduce_for_fetch_params": True}},
            "stage3_use_all_reduce_for_fetch_params: found True",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True}}},
            "super_offload: found True",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}}},
            "offload_optimizer.device: found nvme",
        ),
        ({"compile": {"deepcompile": True}}, "deepcompile: found True"),
        ({"hybrid_engine": {"enabled": True}}, "hybrid_engine.enabled: found True"),
        (
            {"zero_optimization": {"stage": 3, "zero_quantized_nontrainable_weights": True}},
            "nontrainable_weights: found True",
        ),
        (
            {"zero_optimization": {"stage": 3, "zenflow": {"topk_ratio": 0.1, "select_strategy": "auto"}}},
            "zenflow: found a block",
        ),
        ({"expert_parallel": {"enabled": True, "autoep_size": 2}}, "expert_parallel.enabled (AutoEP): found True"),
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "torch_autocast.enabled: found True"),
        ({"optimizer": {"type": "Muon", "params": {"lr": 1e-3}}}, "optimizer.type: found muon"),
    ]
    for changes, name in cases:
        config = copy.deepcopy(ds_config(block_of("topo")))
        config.update(changes)
        _expect_refusal(config, name)
    _expect_refusal(ds_config({"preset": "topo", "topology": {**TOPOLOGY, "nodes": 3}}), "nodes")
    _expect_refusal(ds_config(block_of("tpoo")), "topo")
    _expect_refusal(ds_config(block_of("topo", shard={"weights": "world", "gradients": "node"})), "weights")
    _expect_refusal({**ds_config(), "hzero": "topo"}, "hzero")


def check_other_versions_of_deepspeed_are_refused() -> None:
    for version in ("0.18.6", "0.18.12", "0.19.0", "0.19.8", "0.19.9+rocm"):
        with mock.patch.object(deepspeed, "__version__", version):
            check_deepspeed()
    for version in ("0.17.6", "0.18.5", "0.20.0", "1.0.0"):
        with (
            mock.patch.object(deepspeed, "__version__", version),
            pytest.raises(ConfigError, match=rf"deepspeed: found {version}; .*>=0.18.6,<0.20"),
        ):
            check_deepspeed()

    def partition_grads(self: Any, others: Any) -> None:
        """As a later DeepSpeed might have it."""

    with (
        mock.patch.object(DeepSpeedZeroOptimizer_Stage3, "partition_grads", partition_grads),
        pytest.raises(ConfigError, match=r"has another DeepSpeedZeroOptimizer_Stage3\.partition_grads"),
    ):
        check_deepspeed()


def _expect_refusal(config: dict[str, Any], name: str) -> None:
    try:
        engine_of(config)
    except ConfigError as error:
        assert name in str(error) and "\n" not in str(error), str(error)
    else:
        raise AssertionError(f"{name} was not refused")
