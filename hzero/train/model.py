"""The model: GPT-NeoX from a configuration, with random weights."""

from __future__ import annotations

import contextlib
from typing import Any

import deepspeed
import torch
from deepspeed.utils import set_z3_leaf_modules
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXLayer

from hzero.settings.settings import model_numels

#: From this many parameters on, ``zero_init: auto`` partitions each layer as it is built.
ZERO_INIT_FROM = 500_000_000


def build(model: dict[str, Any], seed: int, ds_config: dict[str, Any], checkpointing: bool) -> torch.nn.Module:
    """A model whose weights depend on the configuration and the seed alone; without dropout.

    Args:
        model: The ``model`` group.
        seed: Seed of the random weights.
        ds_config: DeepSpeed's configuration, for ``deepspeed.zero.Init``.
        checkpointing: Whether activations are recomputed in backward.
    """
    config = GPTNeoXConfig(
        vocab_size=model["vocab_size"],
        hidden_size=model["hidden_size"],
        num_hidden_layers=model["num_layers"],
        num_attention_heads=model["num_heads"],
        intermediate_size=model["intermediate_size"],
        max_position_embeddings=model["seq_length"],
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cache=False,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(seed)
    partition = model["zero_init"]
    if partition == "auto":
        partition = sum(model_numels(model)) >= ZERO_INIT_FROM
    if partition:
        import hzero

        hzero.enable()
        context: Any = deepspeed.zero.Init(config_dict_or_path=ds_config)
    else:
        context = contextlib.nullcontext()
    with context:
        built = GPTNeoXForCausalLM(config)
    if partition:
        _initialise_partitioned(built, seed)
    # One gather per layer, as in FSDP: hooks and gathers of every linear and norm cost more than a small layer's compute.
    set_z3_leaf_modules(built, [GPTNeoXLayer])
    if checkpointing:
        built.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return built


def _initialise_partitioned(built: GPTNeoXForCausalLM, seed: int) -> None:
    """Transformers' own initialisation, layer by layer, of a model that was built in shards.

    Under ``zero.Init`` parameters are empty when transformers' ``post_init`` runs over them, so that torch's defaults
    would stay (embeddings of standard deviation 1 instead of 0.02).
    """
    import torch.distributed as dist

    torch.manual_seed(seed)
    for param in built.parameters():
        param._is_hf_initialized = False
    for module in built.modules():
        own = list(module.parameters(recurse=False))
        if not own:
            continue
        with deepspeed.zero.GatheredParameters(own, modifier_rank=0), torch.no_grad():
            if dist.get_rank() == 0:
                built._init_weights(module)


def flops_per_token(model: dict[str, Any]) -> float:
    """Floating-point operations of forward and backward per token, with attention, without recomputation.

    6 per parameter and 12 x layers x hidden x length for the attention scores (Narayanan et al., arXiv 2104.04473,
    without their factor for recomputation). The input embedding is a lookup and is not counted.
    """
    sizes = model_numels(model)
    attention = 12 * model["num_layers"] * model["hidden_size"] * model["seq_length"]
    return 6.0 * (sum(sizes) - sizes[0]) + attention
