"""Causal language models of transformers whose decoder layers, last norm and loss run chunk by chunk.

A layer runs on a chunk of tokens as transformers wrote it. It attends by `transformers.AttentionInterface`, with the rotated
queries, keys and values of the chunk: there the run ends, and `Attention` takes them. A second run of the layer on the same
tokens gets what they have attended to. So the projections are computed once more than in a layer that is written for chunks,
and any layer whose tokens meet in its attention only can be used. A device has at most a few numbers of the model's width for
each token.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hzero.comm.communicator import Communicator
from hzero.config import SequenceConfig
from hzero.sequence.attention import Attention, Chunks
from hzero.sequence.host import HostMemory
from hzero.validation import ConfigError, attributes, first_of_ranks, of_all_ranks

#: What a token without a label has as its label, as in transformers.
NO_LABEL = -100
#: What a model returns besides its loss, by request.
OUTPUTS = ("output_hidden_states", "output_attentions", "output_router_logits")


class ChunkedModel:
    """A model that can compute a loss in chunks, on one rank's part of sequences. Its own forward is as before.

    Args:
        model: A causal language model of transformers, or what wraps one. Its weights may be partitioned.
        settings: Of the block.
        group: Ranks that share a sequence, neighbours in the world; None: this rank alone.

    Attributes:
        model: The model of transformers itself.
        layers: Decoder layers. Under ZeRO-3 they must be leaf modules, so that all parameters of a layer are there while it
            runs.

    Raises:
        ConfigError: The model's heads do not suit the ranks, or it would train with other results.
    """

    def __init__(self, model: nn.Module, settings: SequenceConfig, group: Communicator | None) -> None:
        found: Any = next((one for one in model.modules() if isinstance(one, PreTrainedModel)), None)
        self.layers = [one for one in model.modules() if isinstance(one, GradientCheckpointingLayer)]
        self._head: Any = None if found is None else found.get_output_embeddings()
        if self._head is None or not self.layers:
            raise ConfigError(f"sequence: found {type(model).__name__}; expected a causal model of transformers")
        self.model, self._settings, self._group = found, settings, group
        self._check()
        self._memory = HostMemory(settings.offload, group.streams.device if group and group.streams else None)
        norms = [one for one in found.base_model.children() if "Norm" in type(one).__name__]
        ALL_ATTENTION_FUNCTIONS.register("hzero", _attention)  # without a mask of that name, models make none
        self._attends = found.config, "_attn_implementation_internal", "hzero"
        self._in_chunks = [
            self._attends,
            *((layer, "forward", partial(self._layer, layer, layer.forward)) for layer in self.layers),
            *((layer, "gradient_checkpointing", False) for layer in self.layers),  # chunks are their own checkpoints
            *((norm, "forward", partial(self._norm, norm, norm.forward)) for norm in norms[-1:]),
            (self._head, "forward", partial(self._losses, self._head.forward)),
        ]

    def _check(self) -> None:
        """Refuses a model that would train with other results."""
        config, ranks = self.model.config, self._settings.parallel
        self._settings.check_heads(config.num_attention_heads, "sequence")
        wrong = [f"{key} true" for key in OUTPUTS if getattr(config, key, False)]
        rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
        if ranks > 1 and rope in ("dynamic", "longrope"):  # each rank would take its own last position for the length
            wrong.append(f"rope_type {rope}")
        for name, one in (found for layer in self.layers for found in layer.named_modules()):
            if isinstance(one, nn.Dropout) and one.p:  # layers run twice, and would draw twice
                wrong.append(f"dropout {one.p} in {name}")
            if isinstance(one, nn.Conv1d):  # tokens meet outside of attention
                wrong.append(f"a convolution in {name}")
        if "position_ids" not in inspect.signature(self.model.base_model.forward).parameters:
            wrong.append("a forward without position_ids")
        if wrong:
            raise ConfigError(f"sequence: found {type(self.model).__name__} with {wrong[0]}; expected a model without")

    # ---- a whole batch ------------------------------------------------------------------------------------------------

    def forward(self, batch: dict[str, Any]) -> CausalLMOutputWithPast:
        """The output of a whole batch, of which this rank computes its part; it has a ``loss`` only. Collective."""
        names = ("input_ids", "attention_mask", "position_ids", "labels", "num_items_in_batch")
        ids, mask, positions, labels, items = (batch.pop(name, None) for name in names)
        # The model would read other tensors as if they had its part of the tokens.
        others = [name for name, one in batch.items() if isinstance(one, Tensor) or (name in OUTPUTS and one)]
        if ids is None or others:
            raise ConfigError(
                f"hzero.sequence: found a batch with {', '.join(others) or 'no ids'}; expected {', '.join(names[:4])}"
            )
        parallel, length = self._settings.parallel, ids.shape[1]
        missing = (0, -length % parallel)
        places = torch.arange(length + missing[1], device=ids.device)
        targets = torch.full_like(ids, NO_LABEL) if labels is None else pad(labels[:, 1:], (0, 1), value=NO_LABEL)
        counts = targets != NO_LABEL
        problem = None
        if labels is None:
            problem = "labels: found None in training; expected labels on all ranks"
        elif mask is not None and ((mask[:, 1:] > mask[:, :-1]).any() or (counts & (mask == 0)).any()):
            problem = "attention_mask: found padding on the left or inside; expected it on the right, without labels"
        elif positions is not None and (counts & (positions != places[:length])).any():
            problem = "position_ids: found several documents in a sequence; expected 0, 1, 2 and so on"
        if problem := first_of_ranks(problem):
            raise of_all_ranks(ConfigError(problem))
        counted = self._count(ids, targets)
        # This rank's part of every chunk.
        chunks, rank = places.split(self._settings.chunk * parallel), dist.get_rank() % parallel
        own = torch.cat([chunk.chunk(parallel)[rank] for chunk in chunks])
        ids, targets = pad(ids, missing), pad(targets, missing, value=NO_LABEL)
        loss = self.sum_losses(ids[:, own], own.expand(len(ids), -1), targets[:, own], **batch)
        if items is not None:  # Trainer's labels of a whole step, in which it counts those of every rank
            return CausalLMOutputWithPast(loss=loss * parallel / items)
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        loss = loss * (dist.get_world_size() / counted)
        return CausalLMOutputWithPast(loss=loss + (whole / counted - loss.detach()))

    def _count(self, ids: Tensor, targets: Tensor) -> int:
        """Labels of all batches of the world. Raises on all ranks if those of a group have other samples."""
        parallel, read = self._settings.parallel, torch.cat([ids.flatten(), targets.flatten()]).long() + 1
        mixed = (read * (2 * torch.arange(len(read), device=ids.device) + 1)).sum()
        own = torch.stack([(targets != NO_LABEL).sum(), mixed])
        rows = own.new_empty(dist.get_world_size() * 2)
        dist.all_gather_into_tensor(rows, own)
        groups = rows.view(-1, parallel, 2)
        if (groups != groups[:, :1]).any():
            sampler = f"num_replicas=world_size // {parallel} and rank=rank // {parallel} of the sampler"
            raise of_all_ranks(ConfigError(f"hzero.sequence: found other samples in a group; expected {sampler}"))
        return max(int(groups[:, 0, 0].sum()), 1)

    # ---- this rank's part ---------------------------------------------------------------------------------------------

    @torch.compiler.disable
    def sum_losses(self, input_ids: Tensor, position_ids: Tensor, labels: Tensor, **rest: Any) -> Tensor:
        """Runs the model on this rank's part of every chunk.

        Args:
            input_ids: ``[batch, tokens]`` of this rank.
            position_ids: Their positions in the sequence.
            labels: The token that follows each of them; -100 if it does not count.
            rest: Further arguments of the model.

        Returns:
            The sum over these labels, float32.
        """
        asked = rest | {"input_ids": input_ids, "position_ids": position_ids, "use_cache": False, "return_dict": True}
        with attributes(*self._in_chunks):
            output = self.model.base_model(**asked)
            like = partial(replace, replace(output, last_hidden_state=None))
            return self._head(output.last_hidden_state, labels, like).sum()  # type: ignore[no-any-return]

    def _layer(self, layer: nn.Module, stock: Any, states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """A decoder layer, whose other tensors have one row for each token."""
        attention, ranks = Attention(self._group, self._memory), self._settings.parallel

        def run(states: Tensor, part: slice, attended: Tensor | None = None) -> Any:
            global _attended
            given = tree_map_only(Tensor, lambda one: one[:, part], kwargs)
            result, _attended = None, attended
            try:
                with attributes(self._attends, (layer, "gradient_checkpointing", False)):
                    result = stock(states, *args, **given)
            except _Projected as projected:
                query, key, value, attention.scale = projected.args
            if attended is None and result is None:
                times = math.lcm(ranks, key.shape[1]) // key.shape[1]  # so that the ranks can divide heads of keys
                return query, *(one.unsqueeze(2).expand(-1, -1, times, -1, -1).flatten(1, 2) for one in (key, value))
            if attended is None or not isinstance(result, Tensor):
                raise ConfigError(f"sequence: found {type(layer).__name__}; expected layers that attend once each")
            return result

        return Chunks(run, self._settings.chunk, self._memory, attention, layer.parameters())(states)

    def _norm(self, norm: nn.Module, stock: Any, states: Tensor) -> Tensor:
        length = self._settings.chunk
        return Chunks(lambda part, *_: stock(part), length, self._memory, None, norm.parameters())(states)

    def _losses(self, stock: Any, states: Tensor, labels: Tensor, like: Any) -> Tensor:
        """The model's loss by token, with its logits as the model makes them of the head's result and its base's output."""
        model, head = self.model, self._head
        # In place of the modules, without their hooks.
        heads: dict[str, Any] = {name: stock for name, child in model.named_children() if child is head}

        def run(states: Tensor, part: slice, *_: Any) -> Tensor:
            base = {model.base_model_prefix: lambda *_, **__: like(last_hidden_state=states)}
            following = labels[:, part].contiguous()
            with attributes((model, "_modules", model._modules | heads | base)):
                given = {"input_ids": following, "labels": following, "shift_labels": following}
                loss = type(model).forward(model, **given, num_items_in_batch=1, return_dict=True).loss
            return (loss / following.numel()).expand(following.shape)  # the tile's sum, divided among its tokens

        # Logits of a chunk would need several times as much memory as its MLP.
        tile = max(4 * self._settings.chunk * states.shape[2] // model.config.vocab_size, 1)
        return Chunks(run, min(tile, self._settings.chunk), self._memory, None, head.parameters())(states)


# ---- attention as transformers calls it -----------------------------------------------------------------------------

#: What each token has attended to, ``[batch, heads, tokens, size]``, in the second run of a layer; None in the first.
_attended: Tensor | None = None


class _Projected(Exception):  # noqa: N818
    """Ends the first run of a layer; its arguments are queries, keys, values and the scale of scores."""


def _attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **given: Any) -> tuple[Tensor, None]:
    global _attended
    wrong = {
        **{name: given.get(name) is not None for name in ("sliding_window", "softcap", "s_aux")},
        "a mask of its own": mask is not None,
        "dropout": given.get("dropout", 0) > 0,
        "no causal order": not getattr(module, "is_causal", True),
        "values of another shape than keys": key.shape != value.shape,
        f"{value.dtype}": value.device.type != "cpu" and value.dtype not in (torch.bfloat16, torch.float16),
    }
    if found := [name for name, present in wrong.items() if present]:
        raise ConfigError(f"sequence: found attention with {found[0]}; expected causal attention, on GPUs in 16 bits")
    if _attended is None:
        # A rotary embedding may have widened two of them.
        raise _Projected(query.to(value.dtype), key.to(value.dtype), value, given.get("scaling"))
    attended, _attended = _attended, None
    return attended.transpose(1, 2), None
