"""Small models of Hugging Face, one per architecture, against stock ZeRO-3. Run by test_models.py on 4 ranks."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from tests.parity.compare import assert_row, row
from tests.parity.deepspeed import Session
from tests.ranks import LONG

transformers = pytest.importorskip("transformers")

#: Largest relative difference of a loss, and of a norm, to stock.
TOLERANCES = {"lossless": (1e-6, 1e-6), "topo": (5e-3, 6e-2)}
#: Of all architectures, as far as they have them.
COMMON = {
    "vocab_size": 37, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
ATTENTION_EVERY_OTHER = {
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
}
#: What makes each architecture small.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mamba": {"state_size": 8, "time_step_rank": 4},
    "falcon_mamba": {"state_size": 8, "time_step_rank": 4},
    "mamba2": {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 8},
    "jamba": {**EXPERTS, **ATTENTION_EVERY_OTHER, "mamba_d_state": 8, "mamba_dt_rank": 4},
    "nemotron_h": {"hybrid_override_pattern": "M*-", "num_hidden_layers": 3, "mamba_num_heads": 4, "mamba_head_dim": 16,
     "n_groups": 2, "ssm_state_size": 8, "chunk_size": 8, "head_dim": 8},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"], "mamba_d_state": 8, "n_mamba_heads": 4, "mamba_ngroups": 2,
     "chunk_size": 8, "num_mem_blocks": 1, "adapter_rank": 4, "attention_head_dim": 16},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 8},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 24},
    "qwen3_moe": {**EXPERTS, "head_dim": 8},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 8},
    "deepseek_v3": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1,
     "n_group": 2, "topk_group": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
     "v_head_dim": 8, "num_key_value_heads": 4, "first_k_dense_replace": 1},
    "olmoe": {**EXPERTS, "num_key_value_heads": 4},
    "qwen3_next": {**EXPERTS, "head_dim": 8, "shared_expert_intermediate_size": 24, "linear_num_key_heads": 2,
     "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
     "layer_types": ["linear_attention", "full_attention"]},
}  # fmt: skip
#: One of each kind: state space, hybrid, experts, latent attention with experts, linear attention, sinks and windows.
KINDS = ("mamba2", "jamba", "mixtral", "deepseek_v3", "qwen3_next", "gpt_oss")


class _Causal(torch.nn.Module):
    """Returns the loss alone."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        kind = transformers.models.auto.configuration_auto.CONFIG_MAPPING[name]
        self.model = transformers.AutoModelForCausalLM.from_config(kind(**{**COMMON, **ARCHITECTURES[name]}))
        self._no_split_modules = self.model._no_split_modules

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        # Sequences that follow a rule: routers of experts rarely change their choice then.
        tokens = (tokens[:, :1] + 2 * torch.arange(tokens.shape[1]) + tokens % 3) % COMMON["vocab_size"]
        return self.model(input_ids=tokens, labels=tokens).loss  # type: ignore[no-any-return]


def _compare(architectures: Iterable[str], presets: Iterable[str]) -> None:
    for name in architectures:
        make = functools.partial(_Causal, name)
        silent = ["spare"] if "num_experts_per_tok" in ARCHITECTURES[name] else []  # experts without a token
        for preset in presets:
            assert_row(Session, row(preset, *silent, make=make, within=TOLERANCES[preset]))


def check_one_architecture_of_each_kind_gives_stocks_losses() -> None:
    _compare(KINDS, ["lossless"])


@LONG
def check_all_architectures_give_stocks_losses_and_norms() -> None:
    _compare(ARCHITECTURES, TOLERANCES)
