"""Models of Hugging Face whose sequences are split over ranks, and whose layers work chunk by chunk.

Llama, GPT-NeoX, Mistral, Qwen2 and Qwen3 run their decoder layers, the last norm and the loss in chunks, so a device has at
most a few numbers of the model's width for each token. Other models get the attention alone, by
`transformers.AttentionInterface`: they keep whole queries, keys, values and logits, and all that their layers make between
them, and should use activation checkpointing.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hzero.comm.communicator import Communicator
from hzero.config import SequenceConfig
from hzero.sequence.attention import Attended, Attention, Documents, Layer, Projected, Tiled
from hzero.sequence.host import HostMemory
from hzero.validation import ConfigError

#: The name of the attention among those of transformers.
NAME = "hzero"


# ---- decoder layers that are known: what comes before their attention, and after it ---------------------------------


def _before_llama(
    layer: Any, rotate: Callable[..., Any], states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> Projected:
    module, states = layer.self_attn, layer.input_layernorm(states)
    query, key, value = (
        project(states).unflatten(-1, (-1, module.head_dim))
        for project in (module.q_proj, module.k_proj, module.v_proj)
    )
    if hasattr(module, "q_norm"):
        query, key = module.q_norm(query), module.k_norm(key)
    return *rotate(query.transpose(1, 2), key.transpose(1, 2), cos, sin), value.transpose(1, 2)


def _after_llama(layer: Any, states: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    states = states + layer.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
    return states + layer.mlp(layer.post_attention_layernorm(states))  # type: ignore[no-any-return]


def _before_neox(
    layer: Any, rotate: Callable[..., Any], states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> Projected:
    module = layer.attention
    together = module.query_key_value(layer.input_layernorm(states)).unflatten(-1, (-1, 3 * module.head_size))
    query, key, value = together.transpose(1, 2).chunk(3, -1)
    return *rotate(query, key, cos, sin), value


def _after_neox(layer: Any, states: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    attended = layer.attention.dense(attended.transpose(1, 2).flatten(2))
    mlp_input = states if layer.use_parallel_residual else states + attended
    return layer.mlp(layer.post_attention_layernorm(mlp_input)) + attended + states  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Kind:
    """A known decoder layer.

    Attributes:
        norm: The name of the norm after the last layer.
        before: From its tokens to queries, keys and values.
        after: From its tokens and what they have attended to, to its result.
    """

    norm: str
    before: Callable[..., Projected]
    after: Callable[..., torch.Tensor]


_LLAMA = _Kind("norm", _before_llama, _after_llama)
KINDS = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": _LLAMA,
    "Qwen3ForCausalLM": _LLAMA,
    "GPTNeoXForCausalLM": _Kind("final_layer_norm", _before_neox, _after_neox),
}


# ---- a patched model ------------------------------------------------------------------------------------------------


class Patched:
    """A model whose forward can run on one rank's part of sequences; made by `patch`.

    Args:
        model: A causal language model of transformers.
        settings: Of the block.
        group: Ranks that share a sequence; None: this rank alone.

    Attributes:
        layers: Decoder layers that run as a whole; none for models that get the attention alone. Under ZeRO-3 they must be
            leaf modules, so that all parameters of a layer are there while it runs.
    """

    def __init__(self, model: Any, settings: SequenceConfig, group: Communicator | None) -> None:
        self._model, self._group, self._chunk = model, group, settings.chunk
        self._ranks = 1 if group is None else group.plan.grid.world_size
        streams = None if group is None else group.streams
        self._memory = HostMemory(settings.offload, None if streams is None else streams.device)
        self._stock_attention = model.config._attn_implementation
        self.layers: list[nn.Module] = []
        known: Any = next((cls for cls in type(model).__mro__ if cls.__name__ in KINDS), None)
        if known is not None and type(model).forward is not known.forward:  # which may add to the loss
            known = None
        self._known = known is not None
        _check(model, self._ranks, self._known)
        self._changed: dict[nn.Module, Callable[..., Any]] = {}
        if known is None:
            ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
            ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _mask)
            model.config._attn_implementation = NAME
            return
        kind, base, rotate = KINDS[known.__name__], model.base_model, sys.modules[known.__module__].apply_rotary_pos_emb
        self.layers = list(base.layers)
        self._changed = {layer: partial(self._layer, layer, kind, rotate) for layer in self.layers}
        norm = getattr(base, kind.norm)
        self._changed |= {norm: partial(self._norm, norm), model.lm_head: partial(self._head, model.lm_head)}
        for module, forward in self._changed.items():
            module.forward = forward  # type: ignore[method-assign]

    def remove(self) -> None:
        """Gives the model its stock forward back."""
        self._model.config._attn_implementation = self._stock_attention
        for module in self._changed:
            del module.forward
        self._changed.clear()

    @torch.compiler.disable
    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        labels: torch.Tensor,
        documents: torch.Tensor | None = None,
        **rest: Any,
    ) -> CausalLMOutputWithPast:
        """Runs the model on this rank's part of every chunk.

        Args:
            input_ids: ``[batch, tokens]`` of this rank.
            position_ids: Their positions in the sequence, or in their document.
            labels: The token that follows each of them; -100 if it does not count.
            documents: The number of each token's document, in the whole sequence and in its order, ascending; None if there
                is one.
            rest: Further arguments of the model.

        Returns:
            An output whose ``loss`` is the sum over this rank's labels, float32.
        """
        global _running
        together = None if documents is None else Documents(documents, self._chunk * self._ranks)
        before, _running = _running, Attention(self._group, self._memory, self._chunk, together)
        asked = rest | {"input_ids": input_ids, "position_ids": position_ids, "use_cache": False, "return_dict": True}
        try:
            if not self._known:
                losses = {"labels": labels, "shift_labels": labels, "num_items_in_batch": 1}
                return type(self._model).forward(self._model, **asked, **losses)  # type: ignore[no-any-return]
            states = self._model.base_model(**asked).last_hidden_state
            return CausalLMOutputWithPast(loss=self._model.lm_head(states, labels).sum())
        finally:
            _running = before

    def _layer(self, layer: Any, kind: _Kind, rotate: Any, states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _running is None:
            return type(layer).forward(layer, states, *args, **kwargs)
        before, after = partial(kind.before, layer, rotate), partial(kind.after, layer)
        how = _running, before, after, torch.is_grad_enabled()
        return Layer.apply(*how, states, *kwargs["position_embeddings"], *_trained(layer))

    def _norm(self, norm: nn.Module, states: torch.Tensor) -> torch.Tensor:
        stock = partial(type(norm).forward, norm)
        if _running is None:
            return stock(states)  # type: ignore[no-any-return]
        how = _running, lambda part, _: stock(part), torch.is_grad_enabled()
        return Tiled.apply(*how, states, None, *_trained(norm))  # type: ignore[no-any-return]

    def _head(self, head: nn.Module, states: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        stock = partial(type(head).forward, head)
        if _running is None or labels is None:
            return stock(states)  # type: ignore[no-any-return]

        def losses(part: torch.Tensor, following: torch.Tensor | None) -> torch.Tensor:
            assert following is not None
            logits = stock(part).flatten(0, 1).float()
            return cross_entropy(logits, following.flatten(), reduction="none").view(following.shape)

        # Logits of a chunk would need several times as much memory as its MLP.
        tile = max(4 * self._chunk * states.shape[2] // self._model.config.vocab_size, 1)
        tiles = replace(_running, chunk=min(tile, self._chunk))
        return Tiled.apply(tiles, losses, torch.is_grad_enabled(), states, labels, *_trained(head))  # type: ignore[no-any-return]


def patch(model: Any, settings: SequenceConfig, group: Communicator | None) -> Patched:
    """Lets a model run on parts of sequences, without a change of how it runs otherwise.

    Args:
        model: A causal language model of transformers. Its weights may be partitioned.
        settings: Of the block.
        group: Ranks that share a sequence; None: this rank alone.

    Raises:
        ConfigError: The model's heads do not suit the ranks, or it needs what attention by chunks does not do.
    """
    return Patched(model, settings, group)


def _trained(module: nn.Module) -> list[torch.Tensor]:
    return [one for one in module.parameters() if one.requires_grad]


def _check(model: Any, ranks: int, known: bool) -> None:
    """Raises ConfigError for a model that would train with other results."""
    config, name = model.config, type(model).__name__
    heads = config.num_attention_heads
    keys = getattr(config, "num_key_value_heads", None) or heads
    if heads % ranks or (keys % ranks and ranks % keys):
        possible = [count for count in range(1, heads + 1) if not (heads % count or (keys % count and count % keys))]
        raise ConfigError(
            f"sequence.parallel: found {ranks}; {name} has {heads} attention heads and {keys} of keys; expected one of "
            f"{', '.join(map(str, possible))}"
        )
    rates = {key: getattr(config, key, 0) for key in ("attention_dropout", "attn_pdrop")}
    if known:  # its layers run twice, and would draw twice
        rates |= {key: one.p for key, one in model.named_modules() if isinstance(one, nn.Dropout)}
    for key, rate in rates.items():
        if rate:
            raise ConfigError(f"sequence: found {name} with {key} {rate}; expected 0")
    windows = (getattr(one, "sliding_window", None) for one in (config, *model.modules()))
    window = next(filter(None, windows), None)
    if window is not None:
        raise ConfigError(f"sequence: found {name} with a sliding window of {window} tokens; expected full attention")
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    if ranks > 1 and rope in ("dynamic", "longrope"):  # each rank would take its own last position for the length
        raise ConfigError(f"sequence.parallel: found {ranks}; {name} has rope_type {rope}; expected 1")
    if getattr(config, "output_router_logits", False):  # a mean, of each rank's own tokens, beside a sum
        raise ConfigError(f"sequence: found {name} with output_router_logits true; expected false")
    if known:
        return
    mixers = sorted({*(getattr(config, "layer_types", None) or ())} - {"full_attention", "attention"})
    mixers += sorted({type(one).__name__ for one in model.modules() if isinstance(one, nn.Conv1d)})
    if mixers:
        raise ConfigError(f"sequence: found {name} with layers {', '.join(mixers)}; expected full attention alone")
    if not getattr(model, "_supports_attention_backend", False):
        raise ConfigError(f"sequence: found {name}; expected a model that transformers can give another attention")
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        raise ConfigError(f"sequence: found {name}, whose forward has no position_ids; expected a model that has")


# ---- attention of other models --------------------------------------------------------------------------------------

#: How the forward that runs now attends; None outside of `Patched.forward`.
_running: Attention | None = None
#: How each attention module has attended last. Its activation checkpoint asks in backward, when no forward runs.
_last: WeakKeyDictionary[nn.Module, Attention] = WeakKeyDictionary()


def _mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    return None if _running is not None else sdpa_mask(*args, **kwargs)


@torch.compiler.disable
def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it."""
    in_backward = torch._C._current_graph_task_id() != -1
    how = _running or (_last.get(module) if in_backward else None)
    if how is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)  # type: ignore[no-any-return]
    _last[module] = how
    wrong = [name for name in ("sliding_window", "softcap", "s_aux") if kwargs.get(name) is not None]
    wrong += ["a mask of its own"] * (attention_mask is not None) + ["dropout"] * (dropout > 0)
    if wrong:
        raise ConfigError(f"sequence: found attention with {', '.join(wrong)}; expected plain causal attention")
    if not getattr(module, "is_causal", True) or query.shape[2] != key.shape[2] or query.shape[3] != value.shape[3]:
        raise ConfigError(
            f"sequence: found attention of {type(module).__name__} from queries {list(query.shape)} to values "
            f"{list(value.shape)}; expected causal attention of a sequence to itself, with heads of one size"
        )
    how = replace(how, scale=scaling)
    return Attended.apply(how, torch.is_grad_enabled(), *how.for_ranks(query, key, value)), None
