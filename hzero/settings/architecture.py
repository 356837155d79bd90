"""Any causal language model of transformers: its configuration as written, checked, and its parameters counted."""

from __future__ import annotations

import functools
import inspect
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hzero.validation import ConfigError, nearest

#: Keys of a ``config.json`` that do not describe the architecture.
_OF_THE_FILE = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache")


@dataclass(frozen=True)
class Architecture:
    """What is known of an architecture without any memory for it: it is built on torch's meta device.

    Attributes:
        numels: Elements of every parameter; tied ones count once.
        multiplied: Parameters that a token is multiplied with: without the embedding's lookup and idle experts.
        attention: Layers x width of the attention's queries.
        vocab_size: Ids of tokens.
        positions: Maximum length of a sequence; None where the architecture sets none.
        position_ids: Whether it takes ``position_ids``.
        hidden: Width of the embedding.
        layers: Number of layers.
        heads: Heads of attention.
        intermediate: Hidden units of a layer; 4 x ``hidden`` where the configuration does not say.
        before: Of ``numels``, those before the first layer.
        layer: Those of one layer; None where layers differ.
        after: Those behind the last.
    """

    numels: tuple[int, ...]
    multiplied: float
    attention: int
    vocab_size: int
    positions: int | None
    position_ids: bool
    hidden: int
    layers: int
    heads: int
    intermediate: int
    before: tuple[int, ...]
    layer: tuple[int, ...] | None
    after: tuple[int, ...]


def is_general(model: dict[str, Any]) -> bool:
    """Whether a ``model`` group is that of ``model=hf``, and no GPT-NeoX."""
    return "path" in model


def checkpoint_folder(model: dict[str, Any]) -> Path | None:
    """The folder whose weights a ``model=hf`` starts from; None for random weights."""
    path = Path(model["path"]) if is_general(model) and model["path"] else None
    return path if path is not None and path.is_dir() else None


def resolved(model: dict[str, Any]) -> dict[str, Any]:
    """The group with the full path and a name, checked.

    Raises:
        ConfigError: There is no configuration, transformers cannot read it, or ``seq_length`` is too long for it.
    """
    path = Path(model["path"]).expanduser().resolve() if model["path"] else None
    model = {**model, "path": None if path is None else str(path)}
    described = written(model)
    name = model["name"] or (path.name if path is not None and path.is_dir() else str(described["model_type"]))
    folder = checkpoint_folder(model)
    if folder is not None and not any(folder.glob("*.safetensors")):
        raise ConfigError(
            f"model.path: {str(folder)!r} holds no .safetensors; model.path={folder / 'config.json'} starts from random weights"
        )
    found = architecture(model)
    if found.positions is not None and model["seq_length"] > found.positions:
        raise ConfigError(
            f"model.seq_length: found {model['seq_length']}, and the architecture takes at most {found.positions} "
            "(max_position_embeddings)"
        )
    return {**model, "name": name}


def written(model: dict[str, Any]) -> dict[str, Any]:
    """The configuration as it is written: that of ``model.path``, with the keys of ``model.config`` on top.

    Raises:
        ConfigError: The file is missing or no JSON object, or ``model_type`` is none that transformers trains as a causal
            language model.
    """
    found: dict[str, Any] = {}
    if model["path"]:
        path = Path(model["path"])
        file = path / "config.json" if path.is_dir() else path
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"model.path: cannot read {str(file)!r}: {error.strerror}") from None
        except ValueError as error:
            raise ConfigError(f"model.path: {str(file)!r} is not JSON ({error})") from None
        if not isinstance(found, dict):
            raise ConfigError(f"model.path: {str(file)!r} holds no object")
    found = {**found, **(model["config"] or {})}
    if not found:
        raise ConfigError(
            "model.path: not given; a folder of config.json, safetensors and tokenizer, a config.json, or "
            "model.config={model_type: ..}"
        )
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = found.get("model_type")
    if not isinstance(kind, str) or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        near = nearest(kind, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        hint = f"; did you mean {near!r}?" if near else ""
        raise ConfigError(f"model.config.model_type: found {kind!r}, no causal language model of transformers{hint}")
    return found


def shape_of(model: dict[str, Any]) -> dict[str, Any]:
    """What checkpoints of the model must share."""
    described = {key: value for key, value in written(model).items() if key not in _OF_THE_FILE}
    return {"architecture": described, "seq_length": model["seq_length"]}


def takes_positions(model: dict[str, Any]) -> bool:
    """Whether the architecture takes ``position_ids``, without which packed examples cannot be told apart."""
    return not is_general(model) or architecture(model).position_ids


def transformers_config(model: dict[str, Any]) -> Any:
    """The configuration as transformers reads it, of any ``model`` group.

    Raises:
        ConfigError: What it refuses.
    """
    if not is_general(model):
        from transformers import GPTNeoXConfig

        return GPTNeoXConfig(
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
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    described = written(model)
    try:
        return CONFIG_MAPPING[described["model_type"]].from_dict(described)
    except Exception as error:  # whatever an architecture's own checks raise
        raise ConfigError(f"model.config: {' '.join(str(error).split())}") from None


def architecture(model: dict[str, Any]) -> Architecture:
    """The architecture of a group; counted once a process.

    Raises:
        ConfigError: transformers cannot build it.
    """
    return _counted(json.dumps({key: model[key] for key in ("path", "config")}, sort_keys=True))


@functools.lru_cache(maxsize=4)
def _counted(model: str) -> Architecture:
    import torch
    from transformers import AutoModelForCausalLM

    config = transformers_config(json.loads(model))
    try:
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(config)
    except Exception as error:
        raise ConfigError(f"model.config: {' '.join(str(error).split())}") from None
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None) or 0
    width = (getattr(text, "head_dim", None) or text.hidden_size // heads) * heads if heads else 0
    inputs, outputs = built.get_input_embeddings(), built.get_output_embeddings()
    tied = outputs is not None and outputs.weight is inputs.weight
    experts = sum(param.numel() for name, param in built.named_parameters() if ".experts." in name)
    of = next(
        (n for key in ("num_local_experts", "num_experts", "n_routed_experts") if (n := getattr(text, key, 0))), 0
    )
    idle = experts * (1 - getattr(text, "num_experts_per_tok", of) / of) if of else 0
    numels = tuple(param.numel() for param in built.parameters())
    # The first number of a name is that of the layer: model.layers.0.mlp.experts.3.w1.weight.
    places = [re.search(r"\.(\d+)\.", name) for name, _ in built.named_parameters()]
    layers: dict[int, list[int]] = {}
    for place, numel in zip(places, numels):
        if place is not None:
            layers.setdefault(int(place[1]), []).append(numel)
    first = next((index for index, place in enumerate(places) if place is not None), len(places))
    outside = [(index, numel) for index, (place, numel) in enumerate(zip(places, numels)) if place is None]
    distinct = {tuple(layer) for layer in layers.values()}
    return Architecture(
        numels=numels,
        multiplied=sum(numels) - (0 if tied else inputs.weight.numel()) - idle,
        attention=text.num_hidden_layers * width,
        vocab_size=text.vocab_size,
        positions=getattr(text, "max_position_embeddings", None),
        position_ids="position_ids" in inspect.signature(built.forward).parameters,
        hidden=inputs.weight.shape[1],
        layers=len(layers),
        heads=heads,
        intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        before=tuple(numel for index, numel in outside if index < first),
        layer=distinct.pop() if len(distinct) == 1 else None,
        after=tuple(numel for index, numel in outside if index > first),
    )
