"""A model that takes whole batches, of which each rank of a sequence group computes its part."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
import torch.distributed as dist

from hzero.comm import Communicator, for_dimension
from hzero.config import HZeroConfig, SequenceConfig
from hzero.topology import Grid
from hzero.validation import ConfigError

#: What a token without a label has as its label, as in transformers.
NO_LABEL = -100
#: What the model's forward takes in a batch besides what a rank takes its part of, and would read as if it were whole.
_REFUSED = ("inputs_embeds", "past_key_values", "shift_labels", "cu_seq_lens_q", "cu_seq_lens_k")


def attach(model: torch.nn.Module, config: HZeroConfig, world: Grid, where: str = "hzero") -> list[torch.nn.Module]:
    """Makes a causal language model compute in chunks, and share each sequence with the ranks of a group. Collective.

    The model takes whole batches with labels as before, the same on all ranks of a group, and each rank computes its part of
    the tokens. Its loss is the mean over the labels of all batches of the world, and gradients that are averaged over all ranks
    are those of that loss. Without labels, as in generation, the model works as before.

    Args:
        model: A causal language model of transformers, its weights whole or already sharded.
        config: The block; without its key ``sequence`` nothing happens.
        world: Grid of the world.
        where: Begins messages.

    Returns:
        Layers that read their weights without calling the modules that have them.

    Raises:
        ConfigError: The groups fit neither the machine nor the model.
    """
    detach(model)
    if (settings := config.sequence) is None:
        return []
    from hzero.sequence.models import patch  # imports transformers

    world.of_neighbours(settings.parallel, f"{where}.sequence.parallel")
    group = None
    if settings.parallel > 1:
        members, _ = dist.new_subgroups(settings.parallel)
        group = for_dimension("sequence", config, members, grid=world, uses=["sums"])
    patched = patch(model, settings, group)
    model.forward = _WholeBatches(model, settings, patched, group).wrapper()
    return patched.layers


def detach(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Undoes `attach`, if it has been called. Returns the layers that it had given."""
    whole = getattr(model.forward, "whole", None)
    if whole is None:
        return []
    model.forward = whole.stock
    whole.patched.remove()
    return whole.patched.layers  # type: ignore[no-any-return]


class _WholeBatches:
    """The forward of a model whose batches are divided.

    Args:
        model: The model.
        settings: The key ``sequence``.
        patched: Computes a rank's part.
        group: The ranks that share a sequence; None: this one alone.
    """

    def __init__(
        self, model: torch.nn.Module, settings: SequenceConfig, patched: Any, group: Communicator | None
    ) -> None:
        self.stock, self.patched, self._settings = model.forward, patched, settings
        self._names = list(inspect.signature(model.forward).parameters)
        self._group, self._index = group, dist.get_rank() % settings.parallel

    def wrapper(self) -> Any:
        """A function with the signature of the model's own, which clients read."""

        @functools.wraps(self.stock)
        def forward(*args: Any, **kwargs: Any) -> Any:
            batch = {**dict(zip(self._names, args)), **kwargs}
            return self.stock(*args, **kwargs) if batch.get("labels") is None else self._forward(batch)

        forward.whole = self  # type: ignore[attr-defined]
        return forward

    def _forward(self, batch: dict[str, Any]) -> Any:
        for name in _REFUSED:
            if batch.pop(name, None) is not None:
                raise ConfigError(
                    f"hzero.sequence: the batch has {name}; expected input_ids and labels of whole sequences"
                )
        ids, labels = batch.pop("input_ids"), batch.pop("labels")
        mask, positions = batch.pop("attention_mask", None), batch.pop("position_ids", None)
        targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=NO_LABEL)
        counted = self._agree(ids, targets, mask)
        natural = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        positions, documents = natural if positions is None else positions.expand_as(ids), None
        if not torch.equal(positions, natural):  # packed
            documents = self._padded(positions.diff(prepend=positions[:, :1] - 1).ne(1).cumsum(-1), -1)
        parts = [self._part(self._padded(ids, 0)), self._part(self._padded(positions, 0))]
        items = batch.pop("num_items_in_batch", None)
        output = self.patched.forward(*parts, self._part(self._padded(targets, NO_LABEL)), documents, **batch)
        if items is not None:  # Trainer's labels of a whole step, in which it counts those of every rank
            output.loss = output.loss * self._settings.parallel / items
            return output
        loss, whole = output.loss * (dist.get_world_size() / counted), output.loss.detach().clone()
        dist.all_reduce(whole)
        output.loss = loss + (whole / counted - loss.detach())
        return output

    def _agree(self, ids: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor | None) -> int:
        """Labels of all batches of the world. Raises `ConfigError` on all ranks for a batch that one of them cannot share."""
        inside = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        if inside.shape != ids.shape:
            raise ConfigError(f"attention_mask: found shape {list(inside.shape)}; expected one number for each token")
        read = torch.cat([ids.reshape(-1), targets.reshape(-1)]).long()
        mixed = ((read + 1) * (2 * torch.arange(read.numel(), device=ids.device) + 1)).sum()
        parallel, valid = self._settings.parallel, targets != NO_LABEL
        # The numbers of a group's ranks cancel if all have the same.
        numbers = [
            mixed * (-1 if self._index else parallel - 1),
            (inside[:, 1:] > inside[:, :-1]).any() | (valid & ~inside).any(),
        ]
        agreed = torch.stack([valid.sum(), *(one.long() for one in numbers)])
        dist.all_reduce(agreed)
        counted, differs, padded = agreed.tolist()
        if differs:
            raise ConfigError(
                f"hzero.sequence: the {parallel} ranks of a group have other samples; expected the same: give the sampler "
                f"num_replicas=world_size // {parallel} and rank=rank // {parallel}"
            )
        if padded:
            raise ConfigError(
                "attention_mask: found padding on the left or inside; expected it on the right, without labels"
            )
        return max(counted // parallel, 1)

    def _padded(self, tokens: torch.Tensor, value: int) -> torch.Tensor:
        """Tokens up to a multiple of the ranks. -1 repeats the last."""
        missing = -tokens.shape[1] % self._settings.parallel
        fill = tokens[:, -1:].expand(-1, missing) if value == -1 else tokens.new_full((len(tokens), missing), value)
        return torch.cat([tokens, fill], dim=1)

    def _part(self, tokens: torch.Tensor) -> torch.Tensor:
        """This rank's part of every chunk."""
        chunks = tokens.split(self._settings.chunk * self._settings.parallel, dim=1)
        return torch.cat([chunk.chunk(self._settings.parallel, dim=1)[self._index] for chunk in chunks], dim=1)
