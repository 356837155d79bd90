"""The catalog of schemes: checks its entries and builds their engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import model_validator

from hzero.config import SCOPES, Scope
from hzero.errors import ConfigError, one_of
from hzero.schema import Frozen, validated

if TYPE_CHECKING:  # both import torch and transformers
    from benchmarks.compare.scheme import Job, Scheme


class _Entry(Frozen):
    label: str | None = None


class _Ddp(_Entry):
    engine: Literal["ddp"]
    hook: Literal["fp16", "powersgd"] | dict[str, Any] | None = None


class _Fsdp(_Entry):
    engine: Literal["fsdp"]
    shard: Scope = "world"
    reshard_after_forward: Scope | None = None
    block: dict[str, Any] | None = None
    dion: bool = False

    @model_validator(mode="after")
    def _nested(self) -> _Fsdp:
        between = self.reshard_after_forward
        if between is not None and SCOPES.index(between) > SCOPES.index(self.shard):
            raise ValueError(f"reshard_after_forward {between!r} is wider than shard {self.shard!r}")
        if self.block is not None and (self.shard != "world" or between is not None):
            raise ValueError("found a block of hzero with shard or reshard_after_forward, which the block says")
        return self


class _DeepSpeed(_Entry):
    engine: Literal["deepspeed"]
    hpz: Literal["package", "node"] | None = None


class _Tensor(_Entry):
    engine: Literal["tensor"]
    size: int


class _HZero(_Entry):
    engine: Literal["hzero"]
    block: dict[str, Any]


ENGINES: dict[str, type[_Entry]] = {
    "ddp": _Ddp, "fsdp": _Fsdp, "deepspeed": _DeepSpeed, "tensor": _Tensor, "hzero": _HZero,
}  # fmt: skip


def check(name: str, entry: Any) -> dict[str, Any]:
    """Returns an entry of the catalog once it is checked.

    Raises:
        ConfigError: Names the key of the catalog.
    """
    where = f"catalog.{name}"
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: found {entry!r}, expected a block with the key engine")
    engine = entry.get("engine")
    if not isinstance(engine, str) or engine not in ENGINES:
        raise one_of(f"{where}.engine", engine, ENGINES)
    validated(ENGINES[engine], entry, where)
    return entry


def build(entry: dict[str, Any], job: Job) -> Scheme:
    """Builds the engine of a catalog entry. Collective: all ranks build the same schemes in the same order."""
    if entry["engine"] in ("ddp", "fsdp"):
        from benchmarks.compare.torch_schemes import Ddp, Fsdp

        if entry["engine"] == "ddp":
            return Ddp(job, entry.get("hook"))
        between = entry.get("reshard_after_forward")
        return Fsdp(job, entry.get("shard", "world"), between, entry.get("block"), entry.get("dion", False))
    if entry["engine"] == "tensor":
        from benchmarks.compare.tensor_scheme import TensorZero1

        return TensorZero1(job, entry["size"])
    from benchmarks.compare.deepspeed_schemes import DeepSpeedZero3

    return DeepSpeedZero3(job, hpz=entry.get("hpz"), block=entry.get("block"))
