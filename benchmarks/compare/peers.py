"""Peers: the same model, data and optimizer under every engine that is compared, behind one interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hzero.config import SCOPES, ConfigError, one_of
from hzero.topology.grid import Grid
from hzero.train import model

#: Kinds of peers, with the keys that each may have in the catalog beside ``engine`` and ``label``.
ENGINES: dict[str, tuple[str, ...]] = {
    "ddp": (),
    "fsdp": ("shard", "reshard_after_forward"),
    "deepspeed": ("hpz",),
    "hzero": ("block",),
}


@dataclass(frozen=True)
class Job:
    """What all peers of a measurement have in common.

    Attributes:
        model: The ``model`` group.
        train: The ``train`` block: accumulation, micro_batch, dtype, seed, lr, betas, weight_decay.
        grid: Where ranks stand, numbered node by node, package by package.
        bucket_numel: Elements that are gathered or reduced together: those of one transformer layer.
    """

    model: dict[str, Any]
    train: dict[str, Any]
    grid: Grid
    bucket_numel: int

    @property
    def dtype(self) -> torch.dtype:
        """Of weights on the wire and in kernels."""
        return {"fp32": torch.float32, "bf16": torch.bfloat16}[self.train["dtype"]]

    def build(self) -> torch.nn.Module:
        """The model in float32, the same on all ranks; its weights are representable in `dtype`, so that all start equal."""
        built = model.build({**self.model, "zero_init": False}, self.train["seed"], {}, False)
        with torch.no_grad():
            for param in built.parameters():
                param.copy_(param.to(self.dtype))
        return built

    def adamw(self, params: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer that all peers use."""
        train = self.train
        return torch.optim.AdamW(
            params, lr=train["lr"], betas=tuple(train["betas"]), weight_decay=train["weight_decay"]
        )


class Peer(ABC):
    """One engine with its model.

    Attributes:
        parameters: Elements of the whole model.
    """

    parameters: int

    @abstractmethod
    def step(self, batches: Sequence[torch.Tensor], rate: float) -> torch.Tensor:
        """One optimizer step.

        Args:
            batches: Token ids of this rank, int64 ``[micro_batch, length]``, one a micro-step.
            rate: Learning rate.

        Returns:
            Mean loss of this rank, float32 of no dimensions.
        """

    @abstractmethod
    def memory(self) -> dict[str, int]:
        """Bytes of this rank's states, by kind: the most that a step holds of each beside passing buffers.

        Returns:
            ``weights``, ``gradients``, ``optimizer`` (float32 masters and moments).
        """

    @abstractmethod
    def fetches(self) -> float | None:
        """Gathers of every weight a micro-step since `start_counting`, on average; None where nothing is gathered."""

    def start_counting(self) -> None:  # noqa: B027 - most count nothing
        """Forgets what has been counted so far, where the peer counts."""


def check(name: str, peer: Any) -> dict[str, Any]:
    """An entry of the catalog, checked.

    Raises:
        ConfigError: Naming the key of the catalog.
    """
    where = f"catalog.{name}"
    if not isinstance(peer, dict):
        raise ConfigError(f"{where}: found {peer!r}, expected a block with the key engine")
    if not isinstance(peer.get("engine"), str) or peer["engine"] not in ENGINES:
        raise one_of(f"{where}.engine", peer.get("engine"), ENGINES, "engine")
    for key in peer:
        if key not in ("engine", "label", *ENGINES[peer["engine"]]):
            possible = ("label", *ENGINES[peer["engine"]])
            raise one_of(where, key, possible, f"key of engine {peer['engine']}")
    for key, possible in (
        ("shard", SCOPES),
        ("reshard_after_forward", SCOPES),
        ("hpz", SCOPES[:2]),
    ):
        if key in peer and peer[key] not in possible:
            raise one_of(f"{where}.{key}", peer[key], possible, "scope")
    if peer["engine"] == "hzero" and not isinstance(peer.get("block"), dict):
        raise ConfigError(f'{where}.block: found {peer.get("block")!r}, expected the keys of the "hzero" block')
    shard, between = peer.get("shard", "world"), peer.get("reshard_after_forward")
    if between is not None and SCOPES.index(between) > SCOPES.index(shard):
        raise ConfigError(f"{where}.reshard_after_forward: {between!r} is wider than shard {shard!r}")
    return peer


def build(peer: dict[str, Any], job: Job) -> Peer:
    """The engine of a catalog entry. All ranks build the same peers in the same order."""
    if peer["engine"] in ("ddp", "fsdp"):
        from benchmarks.compare.torch_peers import DdpPeer, FsdpPeer

        if peer["engine"] == "ddp":
            return DdpPeer(job)
        return FsdpPeer(job, peer.get("shard", "world"), peer.get("reshard_after_forward"))
    from benchmarks.compare.deepspeed_peers import DeepSpeedPeer

    return DeepSpeedPeer(job, hpz=peer.get("hpz"), block=peer.get("block"))


def tensor_bytes(tensors: Iterable[Any]) -> int:
    """Bytes of tensors; of a sharded one, of this rank's part."""
    total = 0
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            total += local.numel() * local.element_size()
    return total
