"""Causal language models of transformers whose decoder layers, last norm and loss run chunk by chunk.

A layer runs on a chunk of tokens as transformers defines it. It calls `transformers.AttentionInterface` with the rotated
queries, keys and values of the chunk. There the first run ends, and `Attention` takes over. A second run of the layer on the
same tokens gets their attention output. So the projections are computed once more than in a layer that is written for chunks,
and any layer works whose tokens mix only in attention. A device stores a few numbers of the model's width for each token.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.functional import pad
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hzero.calls import attributes
from hzero.comm.communicator import Communicator
from hzero.config import SequenceConfig
from hzero.errors import ConfigError, of_all_ranks, of_every_rank
from hzero.sequence.attention import Attention, in_chunks
from hzero.sequence.host import HostMemory

#: The label of a token that does not count, as in transformers.
NO_LABEL = -100
#: Arguments of a forward in chunks.
ARGUMENTS = ("input_ids", "attention_mask", "position_ids", "labels", "num_items_in_batch")


class ChunkedModel:
    """Computes the loss of a model in chunks, on one rank's part of each sequence. The model itself is not changed.

    Args:
        model: A causal language model of transformers, or a wrapper of one. Its weights may be partitioned.
        settings: The block's key ``sequence``.
        group: Ranks that share a sequence, neighbours in the world. None: only this rank.

    Attributes:
        model: The model of transformers inside the wrapper.
        layers: Decoder layers. Under ZeRO-3 they must be leaf modules: all parameters of a layer are used while it runs.

    Raises:
        ConfigError: The ranks cannot divide the model's heads, or the model would train with different results.
    """

    def __init__(self, model: nn.Module, settings: SequenceConfig, group: Communicator | None) -> None:
        found: Any = next((one for one in model.modules() if isinstance(one, PreTrainedModel)), None)
        self.layers = [one for one in model.modules() if isinstance(one, GradientCheckpointingLayer)]
        self._head: Any = None if found is None else found.get_output_embeddings()
        if self._head is None or not self.layers:
            raise ConfigError(f"hzero.sequence: found {type(model).__name__}; expected a causal model of transformers")
        self.model, self._settings, self._group = found, settings, group
        self._check()
        self._memory = HostMemory(settings.offload, group.accelerator if group else None)
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
        """Refuses a model that would train with different results."""
        config, ranks = self.model.config, self._settings.parallel
        self._settings.check(getattr(config, "num_attention_heads", 0), "attention heads", "hzero.sequence.parallel")
        outputs = ("output_hidden_states", "output_attentions", "output_router_logits")
        rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
        inner = [found for layer in self.layers for found in layer.named_modules()]
        wrong = {
            **{f"{key} true": getattr(config, key, False) for key in outputs},
            # Each rank would use its own last position as the length of the sequence.
            f"rope_type {rope}": ranks > 1 and rope in ("dynamic", "longrope"),
            # Layers run twice, with different random numbers.
            **{f"dropout {one.p} in {name}": one.p for name, one in inner if isinstance(one, nn.Dropout)},
            # Tokens mix outside attention.
            **{f"a convolution in {name}": True for name, one in inner if isinstance(one, nn.Conv1d)},
            "a forward without position_ids": "position_ids" not in signature(self.model.base_model.forward).parameters,
        }
        _refuse(type(self.model).__name__, wrong, "a model without")

    # ---- a whole batch ------------------------------------------------------------------------------------------------

    def forward(self, stock: Callable[..., Any], batch: dict[str, Any]) -> Any:
        """Computes this rank's part of a whole batch. Collective.

        Args:
            stock: The model's forward, which is called if no rank has labels, as in generation.
            batch: Arguments of the forward.

        Returns:
            The output of ``stock``; with labels an output whose only value is ``loss``. Without ``num_items_in_batch`` the
            loss is the mean over the labels of all batches of the world.

        Raises:
            ConfigError: On all ranks, if a batch cannot be divided, or if the batches of the ranks do not match.
        """
        counted = self._agree(batch)
        if batch.get("labels") is None:
            return stock(**batch)
        ids, labels, items = batch["input_ids"], batch["labels"], batch.get("num_items_in_batch")
        # Positions of this rank's part of every chunk.
        parallel, rank = self._settings.parallel, dist.get_rank() % self._settings.parallel
        missing = -ids.shape[1] % parallel
        places = torch.arange(ids.shape[1] + missing, device=ids.device)
        own = torch.cat([chunk.chunk(parallel)[rank] for chunk in places.split(self._settings.chunk * parallel)])
        ids, targets = pad(ids, (0, missing)), pad(labels[:, 1:], (0, missing + 1), value=NO_LABEL)
        loss = self.sum_losses(ids[:, own], own.expand(len(ids), -1), targets[:, own])
        # Trainer counts the labels of a whole step on every rank, so each group's labels `parallel` times.
        loss = all_reduce(loss) / max(counted, 1) if items is None else loss * parallel / items
        return CausalLMOutputWithPast(loss=loss)

    def _agree(self, batch: dict[str, Any]) -> int:
        """Returns the number of labels of the world. Raises on all ranks if their batches do not match."""
        labels, own = batch.get("labels"), None
        try:
            problem = self._problem(batch)
        except (AttributeError, IndexError, RuntimeError, TypeError) as error:  # the other ranks would wait
            problem = f"found a batch of other shapes or types ({error}); expected tensors [batch, tokens]"
        if problem is None and labels is not None:
            read = torch.cat([batch["input_ids"].flatten(), labels.flatten()]).cpu().numpy().data
            own = int((labels[:, 1:] != NO_LABEL).sum()), zlib.crc32(read)
        every = of_every_rank((problem, own))
        problems, batches = [one for one, _ in every if one is not None], [one for _, one in every]
        parallel = self._settings.parallel
        groups = [set(batches[at : at + parallel]) for at in range(0, len(batches), parallel)]
        if None in batches and any(batches):
            problems.append("labels: found None on some ranks; expected labels on all ranks, or in evaluation on none")
        if max(map(len, groups)) > 1:
            expected = f"a sampler with num_replicas=world_size // {parallel} and rank=rank // {parallel}"
            problems.append(f"found other samples in a group; expected {expected}")
        if problems:
            raise of_all_ranks(ConfigError(f"hzero.sequence: {problems[0]}"))
        return sum(count for group in groups for count, _ in filter(None, group))

    def _problem(self, batch: dict[str, Any]) -> str | None:
        """Returns why this rank's batch cannot be divided, None if it can."""
        ids, mask, positions, labels, _ = (batch.get(name) for name in ARGUMENTS)
        if labels is None:
            trains = self.model.training and torch.is_grad_enabled()
            return "labels: found None in training; expected labels, and a model's own loss" if trains else None
        # Other tensors would not be divided, and outputs other than the loss would be missing.
        given = {name for name, one in batch.items() if one is not None and one is not False}
        if (others := sorted(given - {*ARGUMENTS, "use_cache", "return_dict"})) or ids is None:
            return f"found a batch with {', '.join(others) or 'no ids'}; expected {', '.join(ARGUMENTS[:4])}"
        for name, one in (("labels", labels), ("attention_mask", mask)):
            if one is not None and one.shape != ids.shape:
                return f"{name}: found {list(one.shape)}; expected {list(ids.shape)}, as input_ids"
        counts, places = labels[:, 1:] != NO_LABEL, torch.arange(ids.shape[1] - 1, device=ids.device)
        if mask is not None and ((mask[:, 1:] > mask[:, :-1]).any() or (counts & (mask[:, :-1] == 0)).any()):
            return "attention_mask: found padding on the left or inside; expected it on the right, without labels"
        if positions is not None and (counts & (positions[:, :-1] != places)).any():
            return "position_ids: found several documents in a sequence; expected 0, 1, 2 and so on"
        return None

    # ---- this rank's part ---------------------------------------------------------------------------------------------

    @torch.compiler.disable
    def sum_losses(self, input_ids: Tensor, position_ids: Tensor, labels: Tensor) -> Tensor:
        """Runs the model on this rank's part of every chunk.

        Args:
            input_ids: ``[batch, tokens]``, tokens of this rank.
            position_ids: Positions of these tokens in the sequence.
            labels: The token that follows each of these tokens; -100 if it does not count.

        Returns:
            The sum over these labels, float32.
        """
        with attributes(*self._in_chunks):
            output = self.model.base_model(input_ids, position_ids=position_ids, use_cache=False, return_dict=True)
            like = partial(replace, replace(output, last_hidden_state=None))
            return self._head(output.last_hidden_state, labels, like).sum()  # type: ignore[no-any-return]

    def _layer(self, layer: nn.Module, stock: Any, states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Runs a decoder layer in chunks. Tensors in its keyword arguments have one row for each token."""
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
                raise ConfigError(
                    f"hzero.sequence: found {type(layer).__name__}; expected layers that attend once each"
                )
            return result

        return in_chunks(run, layer, states, self._settings.chunk, self._memory, attention)

    def _norm(self, norm: nn.Module, stock: Any, states: Tensor) -> Tensor:
        return in_chunks(lambda part, *_: stock(part), norm, states, self._settings.chunk, self._memory)

    def _losses(self, stock: Any, states: Tensor, labels: Tensor, like: Any) -> Tensor:
        """Returns losses of tokens. The model's own forward computes them in tiles, from the output of its base model."""
        model, head = self.model, self._head
        # These functions replace modules, so that hooks of the modules do not run again.
        heads: dict[str, Any] = {name: stock for name, child in model.named_children() if child is head}

        def run(states: Tensor, part: slice, *_: Any) -> Tensor:
            base = {model.base_model_prefix: lambda *_, **__: like(last_hidden_state=states)}
            following = labels[:, part].contiguous()
            with attributes((model, "_modules", model._modules | heads | base)):
                given = {"input_ids": following, "labels": following, "shift_labels": following}
                loss = type(model).forward(model, **given, num_items_in_batch=1, return_dict=True).loss
            return (loss / following.numel()).expand(following.shape)  # the sum of the tile, divided among its tokens

        # Logits of a chunk would need several times as much memory as its MLP.
        tile = max(4 * self._settings.chunk * states.shape[2] // model.config.vocab_size, 1)
        return in_chunks(run, head, states, min(tile, self._settings.chunk), self._memory)


# ---- attention as transformers calls it -----------------------------------------------------------------------------

#: The attention output of a chunk, ``[batch, heads, tokens, size]``, in the second run of a layer; None in the first.
_attended: Tensor | None = None


def _refuse(found: str, wrong: dict[str, Any], expected: str) -> None:
    """Raises `ConfigError` with the first key of ``wrong`` whose value is true."""
    if problem := next(filter(wrong.get, wrong), None):
        raise ConfigError(f"hzero.sequence: found {found} with {problem}; expected {expected}")


class _Projected(Exception):  # noqa: N818
    """Ends the first run of a layer. Its arguments are queries, keys, values and the scale of scores."""


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
    _refuse("attention", wrong, "causal attention, on GPUs in 16 bits")
    if _attended is None:
        # A rotary embedding may have converted queries and keys to float32.
        raise _Projected(query.to(value.dtype), key.to(value.dtype), value, given.get("scaling"))
    attended, _attended = _attended, None
    return attended.transpose(1, 2), None
