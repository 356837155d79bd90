"""A model that takes whole batches, of which each rank of a sequence group computes its part."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from hzero.comm import for_dimension
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
    stock, names = model.forward, list(inspect.signature(model.forward).parameters)

    @functools.wraps(stock)  # clients read its signature
    def forward(*args: Any, **kwargs: Any) -> Any:
        batch = {**dict(zip(names, args)), **kwargs}
        return stock(*args, **kwargs) if batch.get("labels") is None else _shared(patched, settings, batch)

    forward.patched = patched  # type: ignore[attr-defined]
    model.forward = forward
    return patched.layers


def detach(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Undoes `attach`, if it has been called. Returns the layers that it had given."""
    patched = getattr(model.forward, "patched", None)
    if patched is None:
        return []
    model.forward = model.forward.__wrapped__  # type: ignore[union-attr,attr-defined]
    patched.remove()
    return patched.layers  # type: ignore[no-any-return]


def _shared(patched: Any, settings: SequenceConfig, batch: dict[str, Any]) -> Any:
    """The output of a whole batch, of which this rank computes its part."""
    if wrong := [name for name in _REFUSED if batch.pop(name, None) is not None]:
        raise ConfigError(f"hzero.sequence: the batch has {wrong[0]}; expected input_ids and labels of whole sequences")
    ids, mask, positions, items = (
        batch.pop(name, None) for name in ("input_ids", "attention_mask", "position_ids", "num_items_in_batch")
    )
    targets = pad(batch.pop("labels")[:, 1:], (0, 1), value=NO_LABEL)
    counted = _agree(settings.parallel, ids, targets, mask)
    missing = (0, -ids.shape[1] % settings.parallel)
    natural, documents = torch.arange(ids.shape[1] + missing[1], device=ids.device).expand(len(ids), -1), None
    positions = natural if positions is None else pad(positions.expand_as(ids), missing)
    if not torch.equal(positions[:, : ids.shape[1]], natural[:, : ids.shape[1]]):  # packed
        documents = positions.diff(prepend=positions[:, :1] - 1).ne(1).cumsum(-1)
    parts = (_part(one, settings) for one in (pad(ids, missing), positions, pad(targets, missing, value=NO_LABEL)))
    output = patched.forward(*parts, documents, **batch)
    if items is not None:  # Trainer's labels of a whole step, in which it counts those of every rank
        output.loss = output.loss * settings.parallel / items
        return output
    loss, whole = output.loss * (dist.get_world_size() / counted), output.loss.detach().clone()
    dist.all_reduce(whole)
    output.loss = loss + (whole / counted - loss.detach())
    return output


def _agree(parallel: int, ids: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor | None) -> int:
    """Labels of all batches of the world. Raises `ConfigError` on all ranks for a batch that one of them cannot share."""
    inside = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    if inside.shape != ids.shape:
        raise ConfigError(f"attention_mask: found shape {list(inside.shape)}; expected one number for each token")
    read = torch.cat([ids.reshape(-1), targets.reshape(-1)]).long()
    mixed = ((read + 1) * (2 * torch.arange(read.numel(), device=ids.device) + 1)).sum()
    valid = targets != NO_LABEL
    # The numbers of a group's ranks cancel if all have the same.
    differs = mixed * (-1 if dist.get_rank() % parallel else parallel - 1)
    padded = (inside[:, 1:] > inside[:, :-1]).any() | (valid & ~inside).any()
    agreed = torch.stack([valid.sum(), differs, padded.long()])
    dist.all_reduce(agreed)
    if agreed[1]:
        raise ConfigError(
            f"hzero.sequence: the {parallel} ranks of a group have other samples; expected the same: give the sampler "
            f"num_replicas=world_size // {parallel} and rank=rank // {parallel}"
        )
    if agreed[2]:
        raise ConfigError(
            "attention_mask: found padding on the left or inside; expected it on the right, without labels"
        )
    return max(int(agreed[0]) // parallel, 1)


def _part(tokens: torch.Tensor, settings: SequenceConfig) -> torch.Tensor:
    """This rank's part of every chunk."""
    index, chunks = dist.get_rank() % settings.parallel, tokens.split(settings.chunk * settings.parallel, dim=1)
    return torch.cat([chunk.chunk(settings.parallel, dim=1)[index] for chunk in chunks], dim=1)
