"""A checkpoint of another layout, read as if this world had written it.

ZeRO-3 cuts every parameter, and every state of the optimizer, into as many equal parts as there are ranks, in the order of
ranks; a rank's file holds its parts one after the other, in the order of `param_shapes`. So the part of a rank of this world is
a run of elements that few neighbouring files hold, at the same places for all parameters. They are mapped, and no more than
these elements is read: all ranks together read the checkpoint once, and nothing is written.

What DeepSpeed loads is built here, not loaded here: its own strict load does the rest, so parameter groups keep their own
hyperparameters.

DeepSpeed's universal checkpoints would be no simpler. ``ds_to_universal`` has to run between the two trainings and writes a
second copy, one folder per parameter and state. The load needs ``load_universal`` in the configuration, gives all groups the
hyperparameters of the first one, restores Adam's two moments only (stage3.py), and reads pickles without ``weights_only``.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hzero.codecs.formats import chunk_numel
from hzero.validation import ConfigError, some

#: Ends of the names of a rank's two files.
MODEL, OPTIMIZER = "model_states.pt", "optim_states.pt"
_GROUPS, _STATE, _FROZEN = "fp32_flat_groups", "optimizer_state_dict", "frozen_param_fragments"


@dataclass(frozen=True)
class Layout:
    """How ranks have cut parameters.

    Attributes:
        world_size: Ranks.
        counts: Elements of every parameter.
        places: For every parameter its sub-group, and where its part begins in the sub-group's flat tensor.
        sizes: Elements of the flat tensors.
    """

    world_size: int
    counts: dict[str, int]
    places: dict[str, tuple[int, int]]
    sizes: list[int]

    @classmethod
    def of(cls, world_size: int, shapes: Sequence[dict[str, Sequence[int]]]) -> Layout:
        """The layout of DeepSpeed's sub-groups, of which each gives the shapes of its parameters by name, in their order."""
        found = cls(world_size, {}, {}, [0] * len(shapes))
        for index, group in enumerate(shapes):
            for name, shape in group.items():
                found.counts[name] = math.prod(shape)
                found.places[name] = index, found.sizes[index]
                found.sizes[index] += chunk_numel(found.counts[name], world_size)
        return found


def cut(
    into: torch.Tensor, count: int, old_world: int, world_size: int, rank: int, source: Callable[[int], torch.Tensor]
) -> None:
    """Fills a rank's part of a parameter from the parts of another world; padding stays as it is.

    Args:
        into: The part, flat.
        count: Elements of the parameter.
        old_world: Ranks of the other world.
        world_size: Ranks of this one.
        rank: This rank.
        source: The flat part of a rank of the other world.
    """
    size, step = chunk_numel(count, world_size), chunk_numel(count, old_world)
    first, last = min(rank * size, count), min((rank + 1) * size, count)
    for old in range(first // step, -(-last // step)):
        begin, end = max(first, old * step), min(last, (old + 1) * step)
        into[begin - first : end - first] = source(old)[begin - old * step : end - old * step]


class Resharding:
    """The two files that this rank would have written of a checkpoint of another layout.

    Args:
        folder: The checkpoint.
        layout: Of this world.
        rank: This rank.
        param_groups: For every sub-group of this world its parameter group.
        load: Loads a file by its path; with ``mmap=True`` its tensors are read where they are used.

    Attributes:
        old: The layout of the checkpoint.

    Raises:
        ConfigError: The checkpoint is none of ZeRO-3, or of other parameters.
    """

    def __init__(
        self, folder: Path, layout: Layout, rank: int, param_groups: Sequence[int], load: Callable[..., Any]
    ) -> None:
        self._folder, self._layout, self._rank, self._param_groups = folder, layout, rank, list(param_groups)
        self._load, self._files = load, dict[tuple[int, str], Any]()
        with self._as_zero3():
            model = self._file(0, MODEL)  # all ranks read this one; other files may be of a larger world
            self.old = Layout.of(int(model["dp_world_size"]), model["param_shapes"])
            self._first = rank % self.old.world_size  # so that not all ranks read the same large file
        missing = sorted(self.old.counts.items() ^ layout.counts.items())
        if missing:
            names = some(list(dict.fromkeys(name for name, _ in missing)), 4)
            raise ConfigError(f"checkpoint: {str(folder)!r} holds other parameters than the model: {names}")

    def path(self, rank: int, kind: str) -> Path:
        """The file that a rank of the other world has written; files of bf16 runs have a prefix of their own."""
        found = sorted(self._folder.glob(f"*zero_pp_rank_{rank}_mp_rank_00_{kind}"))
        if len(found) != 1:
            raise ConfigError(
                f"checkpoint: {str(self._folder)!r} has {len(found)} files *zero_pp_rank_{rank}_mp_rank_00_{kind}"
            )
        return found[0]

    def load(self, kind: str) -> Any:
        """What this rank's file of a kind would hold."""
        with self._as_zero3():
            return self._model() if kind == MODEL else self._optimizer()

    @contextlib.contextmanager
    def _as_zero3(self) -> Iterator[None]:
        """Inside, what a checkpoint of ZeRO-3 has and this one lacks is one line."""
        try:
            yield
        except ConfigError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise ConfigError(
                f"checkpoint: {str(self._folder)!r} is no checkpoint of ZeRO-3 ({type(error).__name__}: {error})"
            ) from None

    def _file(self, rank: int, kind: str) -> Any:
        if (rank, kind) not in self._files:
            self._files[rank, kind] = self._load(str(self.path(rank, kind)), mmap=True)
        return self._files[rank, kind]

    def _cut(self, into: torch.Tensor, count: int, source: Callable[[int], torch.Tensor]) -> None:
        cut(into, count, self.old.world_size, self._layout.world_size, self._rank, source)

    def _model(self) -> dict[str, Any]:
        own = self._file(self._first, MODEL)
        shapes = own.get("frozen_param_shapes") or {}
        fragments: dict[str, torch.Tensor] = {}
        for name, shape in shapes.items() if own.get(_FROZEN) is not None else ():
            size = chunk_numel(math.prod(shape), self._layout.world_size)
            fragments[name] = torch.zeros(size, dtype=own[_FROZEN][name].dtype)
            self._cut(fragments[name], math.prod(shape), functools.partial(self._frozen, name))
        return {
            **own,
            "dp_world_size": self._layout.world_size,
            _FROZEN: fragments if own.get(_FROZEN) is not None else None,
        }

    def _frozen(self, name: str, rank: int) -> Any:
        return self._file(rank, MODEL)[_FROZEN][name]

    def _optimizer(self) -> dict[str, Any]:
        own = self._file(self._first, OPTIMIZER)
        zero = own[_STATE]
        stock, old, new = zero[_STATE], self.old, self._layout
        group_of = {index: number for number, group in enumerate(stock["param_groups"]) for index in group["params"]}
        for name, (index, _) in new.places.items():
            was = group_of[old.places[name][0]]
            if was != self._param_groups[index]:
                raise ConfigError(
                    f"checkpoint: {name} is in group {self._param_groups[index]} of the optimizer, and was in group {was}"
                )

        def old_part(name: str, key: str | None, rank: int) -> torch.Tensor:
            index, at = old.places[name]
            size = chunk_numel(old.counts[name], old.world_size)
            return _flat(self._file(rank, OPTIMIZER)[_STATE], index, key)[at : at + size]

        flat = [torch.zeros(size) for size in new.sizes]
        states: dict[int, dict[str, Any]] = {index: {} for index in range(len(flat))}
        for name, (index, at) in new.places.items():
            was = old.places[name][0]
            for key in (None, *stock["state"].get(was, {})):
                value = _flat(zero, was, key)
                if not torch.is_tensor(value) or not value.dim() or value.numel() != old.sizes[was]:
                    states[index].setdefault(str(key), value)  # of the whole sub-group, such as the step
                    continue
                into = flat[index]
                if key is not None:
                    into = states[index].setdefault(key, torch.zeros(new.sizes[index], dtype=value.dtype))
                into = into[at : at + chunk_numel(new.counts[name], new.world_size)]
                self._cut(into, old.counts[name], functools.partial(old_part, name, key))
        groups = [
            {**group, "params": [index for index, of in enumerate(self._param_groups) if of == number]}
            for number, group in enumerate(stock["param_groups"])
        ]
        optimizer = {
            **stock,
            "state": {index: state for index, state in states.items() if state},
            "param_groups": groups,
        }
        return {**own, _STATE: {**zero, "partition_count": new.world_size, _STATE: optimizer, _GROUPS: flat}}


def _flat(zero: dict[str, Any], index: int, key: str | None) -> Any:
    """Of a sub-group the masters (None), or a state of the optimizer."""
    return zero[_GROUPS][index] if key is None else zero[_STATE]["state"][index][key]
