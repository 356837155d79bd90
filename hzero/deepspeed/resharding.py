"""Checkpoints that another number of ranks has written.

ZeRO-3 divides every parameter and optimizer state into one equal part for each rank, in the order of ranks. A rank's file has
its parts one after the other, in the order of `param_shapes`. So the part of a rank in this world is a range of elements in
few neighbouring files, at the same places for all parameters. The files are mapped, and only these elements are read. All ranks
together read the checkpoint once, and no file is written.

This code builds the objects that DeepSpeed loads. DeepSpeed's strict load does the rest, so each parameter group keeps its
hyperparameters.

DeepSpeed's universal checkpoints would not be simpler. ``ds_to_universal`` must run between the two trainings, and writes a
second copy with one folder per parameter and state. The load needs ``load_universal`` in the configuration. It gives all groups
the hyperparameters of the first one, restores only Adam's two moments (stage3.py) and reads pickles without ``weights_only``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hzero.codecs.formats import chunk_numel
from hzero.errors import ConfigError, some

#: Suffixes of the names of a rank's two files.
MODEL, OPTIMIZER = "model_states.pt", "optim_states.pt"
_GROUPS, _STATE, _FROZEN = "fp32_flat_groups", "optimizer_state_dict", "frozen_param_fragments"


@dataclass(frozen=True)
class Sharding:
    """How parameters are divided among ranks.

    Attributes:
        world_size: Number of ranks.
        counts: Number of elements of each parameter, by name.
        places: Sub-group of each parameter, and start of its part in the sub-group's flat tensor, by name.
        sizes: Number of elements of each flat tensor.
    """

    world_size: int
    counts: dict[str, int]
    places: dict[str, tuple[int, int]]
    sizes: list[int]

    @classmethod
    def of(cls, world_size: int, shapes: Sequence[dict[str, Sequence[int]]]) -> Sharding:
        """Returns the sharding of sub-groups. An element of ``shapes`` has a sub-group's shapes by name, in order."""
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
    """Fills a rank's part of a parameter from the parts of another world. Padding does not change.

    Args:
        into: The part to fill, flat.
        count: Number of elements of the parameter.
        old_world: Size of the other world.
        world_size: Size of this world.
        rank: This rank.
        source: Returns the flat part of a rank of the other world.
    """
    size, step = chunk_numel(count, world_size), chunk_numel(count, old_world)
    first, last = min(rank * size, count), min((rank + 1) * size, count)
    for old in range(first // step, -(-last // step)):
        begin, end = max(first, old * step), min(last, (old + 1) * step)
        into[begin - first : end - first] = source(old)[begin - old * step : end - old * step]


class Resharding:
    """Builds this rank's two files from a checkpoint with another sharding.

    Args:
        folder: The checkpoint.
        sharding: The sharding of this world.
        rank: This rank.
        param_groups: The parameter group of each sub-group of this world.
        load: Loads a file by its path. With ``mmap=True`` tensors are read when they are used.

    Attributes:
        old: The sharding of the checkpoint.

    Raises:
        ConfigError: The checkpoint has other parameters.
    """

    def __init__(
        self, folder: Path, sharding: Sharding, rank: int, param_groups: Sequence[int], load: Callable[..., Any]
    ) -> None:
        self._folder, self._sharding, self._rank, self._param_groups = folder, sharding, rank, list(param_groups)
        self._load, self._files = load, dict[tuple[int, str], Any]()
        model = self._file(0, MODEL)  # all ranks read this file, since others may be left from a larger world
        self.old = Sharding.of(int(model["dp_world_size"]), model["param_shapes"])
        self._first = rank % self.old.world_size  # so that not all ranks read the same large file
        if differing := dict(sorted(self.old.counts.items() ^ sharding.counts.items())):
            raise ConfigError(
                f"checkpoint: found other parameters in {str(folder)!r} than in the model: {some(list(differing), 4)}; expected "
                "the model, and the expert_parallel, of the run that saved it"
            )

    def path(self, rank: int, kind: str) -> Path:
        """Returns the path of the file that a rank of the other world has written. Files of bf16 runs have a prefix."""
        found = sorted(self._folder.glob(f"*zero_pp_rank_{rank}_mp_rank_00_{kind}"))
        if len(found) != 1:
            raise ConfigError(
                f"checkpoint: {str(self._folder)!r} has {len(found)} files *zero_pp_rank_{rank}_mp_rank_00_{kind}; expected 1"
            )
        return found[0]

    def load(self, kind: str) -> Any:
        """Returns the content of this rank's file of a kind (`MODEL` or `OPTIMIZER`)."""
        return self._model() if kind == MODEL else self._optimizer()

    def _file(self, rank: int, kind: str) -> Any:
        if (rank, kind) not in self._files:
            self._files[rank, kind] = self._load(str(self.path(rank, kind)), mmap=True)
        return self._files[rank, kind]

    def _part(self, count: int, dtype: torch.dtype, source: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """Returns this rank's part of a parameter. See `cut`."""
        part = torch.zeros(chunk_numel(count, self._sharding.world_size), dtype=dtype)
        cut(part, count, self.old.world_size, self._sharding.world_size, self._rank, source)
        return part

    def _model(self) -> dict[str, Any]:
        saved = self._file(self._first, MODEL)
        fragments, shapes = saved.get(_FROZEN), saved.get("frozen_param_shapes") or {}
        if fragments is not None:
            fragments = {
                name: self._part(math.prod(shape), fragments[name].dtype, functools.partial(self._frozen, name))
                for name, shape in shapes.items()
            }
        return {**saved, "dp_world_size": self._sharding.world_size, _FROZEN: fragments}

    def _frozen(self, name: str, rank: int) -> torch.Tensor:
        return self._file(rank, MODEL)[_FROZEN][name]  # type: ignore[no-any-return]

    def _run(self, index: int, key: str | None, start: int, end: int, rank: int) -> torch.Tensor:
        """Returns elements of a sub-group's tensor from the file of a rank of the other world."""
        return _tensors(self._file(rank, OPTIMIZER)[_STATE], index)[key][start:end]  # type: ignore[no-any-return]

    def _optimizer(self) -> dict[str, Any]:
        saved = self._file(self._first, OPTIMIZER)
        zero = saved[_STATE]
        stock, old, new = zero[_STATE], self.old, self._sharding
        group_of = {index: number for number, group in enumerate(stock["param_groups"]) for index in group["params"]}
        states: list[dict[str | None, Any]] = [{None: torch.zeros(size)} for size in new.sizes]
        for name, (index, at) in new.places.items():
            (was, start), count = old.places[name], old.counts[name]
            if group_of[was] != self._param_groups[index]:
                raise ConfigError(
                    f"checkpoint: {name} is in group {self._param_groups[index]} of the optimizer, and was in group "
                    f"{group_of[was]}, whose settings it would lose; expected the optimizer's groups of the run that saved it"
                )
            end = start + chunk_numel(count, old.world_size)
            for key, value in _tensors(zero, was).items():
                if not torch.is_tensor(value) or not value.dim() or value.numel() != old.sizes[was]:
                    states[index].setdefault(key, value)  # a state of the whole sub-group, such as the step
                    continue
                into = states[index].setdefault(key, torch.zeros(new.sizes[index], dtype=value.dtype))
                part = self._part(count, value.dtype, functools.partial(self._run, was, key, start, end))
                into[at : at + part.numel()] = part
        flat = [state.pop(None) for state in states]
        groups = [
            {**group, "params": [index for index, of in enumerate(self._param_groups) if of == number]}
            for number, group in enumerate(stock["param_groups"])
        ]
        optimizer = {
            **stock,
            "state": {index: state for index, state in enumerate(states) if state},
            "param_groups": groups,
        }
        return {**saved, _STATE: {**zero, "partition_count": new.world_size, _STATE: optimizer, _GROUPS: flat}}


def _tensors(zero: dict[str, Any], index: int) -> dict[str | None, Any]:
    """Returns a sub-group's masters, by the key None, and its optimizer states by name."""
    return {None: zero[_GROUPS][index], **zero[_STATE]["state"].get(index, {})}
