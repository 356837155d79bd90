"""Muon for FSDP2: each matrix is updated by one rank, without a gather on all ranks."""

from __future__ import annotations

import fnmatch
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard

from hzero.engine.guard import speaks
from hzero.engine.muon import MatrixOwners
from hzero.errors import ConfigError, some
from hzero.fsdp.state import state_of
from hzero.program.matrices import Matrix

#: Key of a group's defaults that only groups of Muon have.
_OF_MUON = "ns_steps"


class Muon(torch.optim.Optimizer):
    """Muon for the matrices of a model and AdamW for its other parameters, after ``hzero.fsdp.apply``.

    It has the hyperparameters, defaults, updates and states of ``torch.optim.Muon`` and ``torch.optim.AdamW``. Its parameter
    groups and its state dict list Muon's groups first, then AdamW's. So torch.distributed.checkpoint saves and loads it with
    and without hzero, at every world size.

    Momentum stays sharded like the weights. Every matrix travels in bfloat16, in which Newton-Schulz computes, to one rank and
    back, tier by tier, with the codecs of ``codecs.optimizer``. Matrices are distributed by their cost.

    By default, Muon steps all parameters of two dimensions except

    - parameters of ``torch.nn.Embedding``, and what is tied to them,
    - output layers: matrices of an embedding's shape outside of numbered layers, and what ``get_output_embeddings()`` returns,
    - names that match ``others``.

    Args:
        model: The model, after ``hzero.fsdp.apply``. All ranks must make the same call.
        lr: Learning rate of Muon. Give AdamW's in ``adamw``.
        adamw: Arguments of ``torch.optim.AdamW``.
        others: Patterns of names, such as ``"*.router.*"``, of matrices that AdamW steps.
        groups: Parameter groups, as torch's optimizers take them. None makes two groups of the whole model. A group has
            matrices for Muon or parameters for AdamW, and may set hyperparameters.
        muon: Other arguments of ``torch.optim.Muon``, such as ``momentum``, ``weight_decay`` or ``adjust_lr_fn``.

    Raises:
        ConfigError: hzero is not applied to the model, a pattern matches no matrix, a group is mixed, or a matrix is not sharded
            by FSDP2 over its first dimension.
        ValueError: torch refuses a hyperparameter.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        lr: float | torch.Tensor = 1e-3,
        adamw: Mapping[str, Any] | None = None,
        *,
        others: Sequence[str] = (),
        groups: Iterable[dict[str, Any]] | None = None,
        **muon: Any,
    ) -> None:
        state = state_of(model)
        if state is None:
            raise ConfigError(f"hzero.fsdp: found {type(model).__name__} without hzero; call hzero.fsdp.apply first")
        self._of = state
        # torch checks the values. Its optimizer of AdamW also steps.
        self._muon = torch.optim.Muon([torch.zeros(1, 1)], lr=lr, **muon).defaults  # type: ignore[arg-type]
        self._adamw = torch.optim.AdamW([torch.zeros(1)], **(adamw or {}))
        self._names = {param: name for name, param in model.named_parameters()}
        self._matrices = _matrices_of(
            model, [others] if isinstance(others, str) else others, state.owners.grid.world_size
        )
        if groups is None:
            chosen = [param for param in self._names if param in self._matrices]
            groups = [{"params": chosen}, {"params": [one for one in self._names if one not in self._matrices]}]
            groups = [group for group in groups if group["params"]]
        super().__init__(groups, self._muon)  # some schedulers look for ``momentum`` in the defaults
        self._owners = MatrixOwners(self._of.config, self._of.owners)
        for group in self._owners.groups:
            self._of.adopt(group)
        if speaks(self._of.group):
            self._announce()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group: matrices for Muon, or other parameters for AdamW. See `torch.optim.Optimizer.add_param_group`.

        Raises:
            ConfigError: See `Muon`.
        """
        given = param_group["params"]
        if isinstance(given, set):
            raise TypeError(
                "hzero.fsdp.Muon: params: found a set; expected a list, whose order is the same on all ranks"
            )
        param_group["params"] = given = [given] if isinstance(given, torch.Tensor) else list(given)
        params = [one[1] if isinstance(one, tuple) else one for one in given]  # torch takes names, too
        if foreign := [f"one of shape {list(param.shape)}" for param in params if param not in self._names]:
            raise ConfigError(
                f"hzero.fsdp.Muon: a parameter group: found {some(foreign, 4)}; expected the model's parameters"
            )
        named = [self._names[param] for param in params]
        matrices = [name for name, param in zip(named, params) if param in self._matrices]
        if matrices and len(matrices) < len(params):
            rest = [name for name in named if name not in matrices]
            raise ConfigError(
                f"hzero.fsdp.Muon: a parameter group: found {some(matrices, 4)} for Muon with {some(rest, 4)} for AdamW; "
                "expected a group each"
            )
        for name, param in zip(matrices, params):
            if not isinstance(param, DTensor) or param.device_mesh.ndim > 1 or param.placements != (Shard(0),):
                found = f"{param.placements}" if isinstance(param, DTensor) else "no shards (ignored_params)"
                raise ConfigError(
                    f"hzero.fsdp.Muon: {name}: found {found}; expected FSDP2's Shard(0) on one mesh dimension, or its name in "
                    "others"
                )
        self.defaults = self._muon if matrices else self._adamw.defaults
        super().add_param_group(param_group)
        self.defaults = self._muon
        _check(param_group)

    def __getstate__(self) -> Any:
        raise ConfigError("hzero.fsdp.Muon: found a copy or pickle of it; expected state_dict(), or a new optimizer")

    @torch.compiler.disable
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates all parameters that have gradients. Collective.

        Args:
            closure: Computes the loss again and returns it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_matrices()
        self._adamw.param_groups = [group for group in self.param_groups if _OF_MUON not in group]
        self._adamw.state = self.state
        # Without the hooks of a step, which are for this optimizer.
        inspect.unwrap(torch.optim.AdamW.step)(self._adamw)
        return loss

    def _step_matrices(self) -> None:
        """Steps Muon's groups as ``torch.optim.Muon`` does, whose order of operations gives the same bits."""
        stepped = [
            (group, lr, param)
            for group, lr in [(group, float(group["lr"])) for group in self.param_groups if _OF_MUON in group]
            for param in group["params"]
            if param.grad is not None
        ]
        for group in self.param_groups:
            _check(group)  # on all ranks, since later only owners use the values
        for *_, param in stepped:
            if "momentum_buffer" not in self.state[param]:
                self.state[param]["momentum_buffer"] = torch.zeros_like(param.grad)

        def send(number: int) -> torch.Tensor:
            group, _, param = stepped[number]
            gradient, buffer = param.grad.to_local(), self.state[param]["momentum_buffer"].to_local()
            buffer.lerp_(gradient, 1 - group["momentum"])
            update = gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
            return update.to(like.device, like.dtype)  # type: ignore[no-any-return]

        def compute(numbers: list[int], wholes: list[torch.Tensor]) -> list[torch.Tensor]:
            alike: dict[Any, list[int]] = {}
            for place, number in enumerate(numbers):
                how = [stepped[number][0][key] for key in ("ns_coefficients", _OF_MUON, "eps")]
                alike.setdefault((wholes[place].shape, tuple(how[0]), *how[1:]), []).append(place)
            updates = list(wholes)
            for (_, coefficients, steps, eps), places in alike.items():
                together = orthogonalized(torch.stack([wholes[place] for place in places]), coefficients, steps, eps)
                for place, update in zip(places, together):
                    updates[place] = update
            return updates

        def receive(number: int, update: torch.Tensor) -> None:
            group, lr, param = stepped[number]
            local = param.to_local()
            update = update[: local.numel()].view(local.shape).to(local.device)
            local.mul_(1 - lr * group["weight_decay"])
            local.add_(update, alpha=-lr * _ratio(group["adjust_lr_fn"], *param.shape))

        if stepped:
            like = torch.empty(0, dtype=torch.bfloat16, device=self._of.device)
            matrices = [self._matrices[param] for *_, param in stepped]
            self._owners.update(matrices, like, send, compute, receive)

    def _announce(self) -> None:
        matrices = [self._matrices[one] for group in self.param_groups if _OF_MUON in group for one in group["params"]]
        rest = [one for group in self.param_groups if _OF_MUON not in group for one in group["params"]]
        wide = [self._names[param] for param in rest if param.ndim > 1]
        among = f", among them {some(wide, 4)}" if wide else ""
        balance = self._owners.owned(tuple(matrices)).balance_text()
        print(
            f"hzero: Muon steps {balance}; AdamW steps {len(rest)} parameters{among}",
            file=sys.stderr,
            flush=True,
        )


def _check(group: Mapping[str, Any]) -> None:
    """Raises `ValueError` for values of a group that ``torch.optim.Muon`` checks only in its step."""
    if _OF_MUON not in group:
        return
    steps, coefficients, eps = group[_OF_MUON], group["ns_coefficients"], group["eps"]
    for key, value, right, expected in (
        (_OF_MUON, steps, isinstance(steps, int) and 0 <= steps < 100, "an integer below 100"),
        (
            "ns_coefficients",
            coefficients,
            isinstance(coefficients, Sequence) and len(coefficients) == 3,
            "three numbers",
        ),
        ("eps", eps, isinstance(eps, float | int), "a number"),
    ):
        if not right:
            raise ValueError(f"hzero.fsdp.Muon: {key}: found {value!r}; expected {expected}")


def orthogonalized(
    matrices: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """Returns nearly orthogonal matrices with the same singular vectors, by ``torch.optim.Muon``'s Newton-Schulz iteration.

    Source: https://kellerjordan.github.io/posts/muon.

    Args:
        matrices: bfloat16 ``[n, rows, columns]``.
        coefficients: Factors of the matrix, its cube and its fifth power.
        steps: Number of iterations.
        eps: Least norm by which a matrix is divided.
    """
    a, b, c = coefficients
    tall = matrices.shape[1] > matrices.shape[2]
    found = matrices.mT if tall else matrices
    found = found / torch.linalg.vector_norm(found, dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = found @ found.mT
        found = torch.baddbmm(found, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.mT if tall else found


def _ratio(adjust: str | None, rows: int, columns: int) -> float:
    """Returns ``torch.optim.Muon``'s factor of the learning rate for a matrix."""
    if adjust == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))


def _matrices_of(model: torch.nn.Module, others: Sequence[str], ranks: int) -> dict[torch.Tensor, Matrix]:
    """Returns the parameters that Muon steps, each as a matrix on some ranks. See `Muon`."""
    named = {name: param for name, param in model.named_parameters() if param.ndim == 2}
    embeddings = {one.weight for one in model.modules() if isinstance(one, torch.nn.Embedding | torch.nn.EmbeddingBag)}
    shapes = {one.shape for one in embeddings}
    # A matrix of a layer may have the shape of an embedding of positions.
    outside = {name for name in named if not any(part.isdigit() for part in name.split("."))}
    embeddings |= {named[name] for name in outside if named[name].shape in shapes}
    if (output := getattr(model, "get_output_embeddings", lambda: None)()) is not None:
        embeddings.add(output.weight)
    for pattern in others:
        found = fnmatch.filter(named, pattern)
        if not found:
            known = some(list(named), 8)
            raise ConfigError(
                f"hzero.fsdp.Muon: others: found {pattern!r}, which matches no matrix; the matrices are {known}"
            )
        embeddings |= {named[name] for name in found}
    return {
        param: Matrix(tuple(param.shape), math.ceil(param.shape[0] / ranks) * param.shape[1])
        for param in named.values()
        if param not in embeddings
    }
