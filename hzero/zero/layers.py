"""The layers of a model, each gathered as a whole when DeepSpeed requests the first of its parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import torch
from deepspeed.utils import z3_leaf_module

from hzero.zero.refusals import ZeroParameter


def layers_of(module: torch.nn.Module, limit: int) -> list[torch.nn.Module]:
    """The layers of a model, whose parameters DeepSpeed has partitioned, from the outside in.

    They are the innermost modules that ``_no_split_modules`` names, as models of transformers do, since that list may also
    name a whole encoder; elsewhere those of a class that repeats in a ``ModuleList`` or ``Sequential``. A layer of more
    than ``limit`` elements is divided into its children. DeepSpeed's leaf modules are none: it requests their parameters
    together anyway.
    """
    names = {name for one in module.modules() for name in getattr(one, "_no_split_modules", None) or ()}

    def found(parent: torch.nn.Module) -> Iterator[torch.nn.Module]:
        in_list = isinstance(parent, (torch.nn.ModuleList, torch.nn.Sequential))
        kinds = Counter(type(child) for child in parent._modules.values()) if in_list else Counter()
        for child in parent.children():
            if z3_leaf_module(child):
                continue
            has_named = any(type(one).__name__ in names for one in child.modules() if one is not child)
            if not has_named and (type(child).__name__ in names or kinds[type(child)] > 1):
                yield from fitting(child)
            else:
                yield from found(child)

    def fitting(layer: torch.nn.Module) -> Iterator[torch.nn.Module]:
        if sum(param.ds_numel for param in layer.parameters()) > limit:  # type: ignore[attr-defined]
            for child in layer.children():
                yield from fitting(child)
        elif sum(any(True for _ in one.parameters(recurse=False)) for one in layer.modules()) > 1:
            yield layer  # one module's parameters come together anyway

    return list(found(module))


def members_of(module: torch.nn.Module, layers: Iterable[torch.nn.Module]) -> list[list[ZeroParameter]]:
    """The parameters of each layer, without those that another part of the model shares or that are kept whole."""
    users: dict[torch.nn.Parameter, set[int]] = {}
    inside = {one: number for number, layer in enumerate(layers) for one in layer.modules()}
    for one in module.modules():
        for param in one._parameters.values():
            if param is not None:
                users.setdefault(param, set()).add(inside.get(one, -1))
    return [
        [param for param in layer.parameters() if users[param] == {number} and not param.ds_persist]  # type: ignore[attr-defined]
        for number, layer in enumerate(layers)
    ]
