"""The model: an architecture of transformers with random weights, or those of a checkpoint."""

from __future__ import annotations

import contextlib
from typing import Any

import deepspeed
import torch
import transformers
from deepspeed.utils import set_z3_leaf_modules
from transformers import AutoModelForCausalLM, GPTNeoXForCausalLM

import hzero
from hzero.collectives import Communicator
from hzero.settings import architecture
from hzero.settings.settings import model_numels
from hzero.train.tensor_parallel import split
from hzero.validation import ConfigError

#: From this many parameters on, ``zero_init: auto`` partitions each layer as it is built.
ZERO_INIT_FROM = 500_000_000


def build(
    model: dict[str, Any],
    seed: int,
    ds_config: dict[str, Any],
    checkpointing: bool,
    tensor_group: Communicator | None = None,
) -> torch.nn.Module:
    """A model whose weights depend on the configuration, the seed and the checkpoint alone.

    A GPT-NeoX has no dropout; of ``model=hf`` the configuration says so.

    Args:
        model: The ``model`` group.
        seed: Seed of the random weights.
        ds_config: DeepSpeed's configuration, for ``deepspeed.zero.Init``.
        checkpointing: Whether activations are recomputed in backward.
        tensor_group: Ranks that share the layers of a GPT-NeoX; each builds the whole model, in host memory, and keeps its
            parts.
    """
    torch.manual_seed(seed)
    partition = model["zero_init"]
    if tensor_group is not None:
        partition = False
    elif partition == "auto":
        partition = sum(model_numels(model)) >= ZERO_INIT_FROM
    if partition:
        hzero.enable()
    if architecture.is_general(model):
        built = _of_transformers(model, seed, ds_config, partition)
    else:
        context: Any = deepspeed.zero.Init(config_dict_or_path=ds_config) if partition else contextlib.nullcontext()
        with context:
            built = GPTNeoXForCausalLM(architecture.transformers_config(model))
        if partition:
            _initialise_partitioned(built, seed)
    if tensor_group is not None:
        split(built, tensor_group)
    layers = _layers(built)
    if layers:
        # One gather per layer, as in FSDP: hooks and gathers of every linear and norm cost more than a small layer's compute.
        set_z3_leaf_modules(built, layers)
    if checkpointing:
        built.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return built  # type: ignore[no-any-return]


def _of_transformers(model: dict[str, Any], seed: int, ds_config: dict[str, Any], partition: bool) -> Any:
    """A model of ``model=hf``.

    Raises:
        ConfigError: The checkpoint lacks weights of the architecture.
    """
    config, folder = architecture.transformers_config(model), architecture.checkpoint_folder(model)
    config.use_cache = False
    enabled = [kind for kind in ("bf16", "fp16") if ds_config.get(kind, {}).get("enabled")]
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[enabled[0]] if enabled else torch.float32
    # While this object lives, transformers builds and loads under zero.Init, parameter by parameter.
    alive = transformers.integrations.HfDeepSpeedConfig(ds_config) if partition else None
    if folder is None:
        built = AutoModelForCausalLM.from_config(config, torch_dtype=dtype)
        if partition and not hasattr(transformers.integrations.deepspeed, "initialize_weights_zero3"):
            _initialise_partitioned(built, seed)  # before transformers 5
    else:
        built, loaded = AutoModelForCausalLM.from_pretrained(
            str(folder), config=config, torch_dtype=dtype, local_files_only=True, output_loading_info=True
        )
        missing = sorted(set(loaded["missing_keys"]) - set(getattr(built, "all_tied_weights_keys", ()) or ()))
        if missing:
            raise ConfigError(
                f"model.path: {str(folder)!r} lacks {len(missing)} weights of the architecture, such as {missing[0]}"
            )
    del alive
    return built


def _layers(built: Any) -> list[type[torch.nn.Module]]:
    """Classes of the layers that the model repeats, by transformers' list of modules that stay on one device."""
    names = set(built._no_split_modules or ())
    return list(dict.fromkeys(type(module) for module in built.modules() if type(module).__name__ in names))


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
    without their factor for recomputation). The input embedding is a lookup and is not counted, unless it is the output's
    too; of experts those count that a token visits.
    """
    if architecture.is_general(model):
        found = architecture.architecture(model)
        return 6.0 * found.multiplied + 12 * found.attention * model["seq_length"]
    sizes = model_numels(model)
    attention = 12 * model["num_layers"] * model["hidden_size"] * model["seq_length"]
    return 6.0 * (sum(sizes) - sizes[0]) + attention
