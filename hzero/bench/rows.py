"""Rows of a comparison: of kind ``steps`` one peer in one measurement, of kind ``convergence`` one training run."""

from __future__ import annotations

import statistics
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    field_validator,
    model_validator,
)

#: One of `hzero.config.TIERS`.
Tier = Literal["gcd", "gpu", "node"]
#: Whose links a tier's rate is of.
LINK_OF: dict[Tier, str] = {"gcd": "a rank", "gpu": "a rank", "node": "a node's trunk"}


class _Part(BaseModel):
    # Keys that this release does not know are kept in the copy of the rows and do no harm; those it knows must be there.
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class _Open(BaseModel):
    """A block of which more than the named keys is kept."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)


_Least0 = Field(ge=0)


class Machine(_Part):
    """What the rows were measured on."""

    cores: int = Field(ge=1)
    processor: str
    memory_bytes: int = Field(ge=1)
    system: str
    python: str


class Cluster(_Open):
    """The emulated cluster.

    Attributes:
        nodes: Nodes of the world.
        gpus_per_node: Packages of a node.
        gcds_per_gpu: Devices of a package.
        rates_mbit: Mbit/s each way, by tier: of a rank in gcd and gpu, of a node's trunk in node; a tier that is not
            shaped has None.
    """

    nodes: int = Field(ge=1)
    gpus_per_node: int = Field(ge=1)
    gcds_per_gpu: int = Field(ge=1)
    rates_mbit: dict[Tier, FiniteFloat | None]

    @field_validator("rates_mbit")
    @classmethod
    def _positive(cls, value: dict[str, float | None]) -> dict[str, float | None]:
        for tier, rate in value.items():
            if rate is not None and rate <= 0:
                raise ValueError(f"{tier}: found {rate}, expected a rate above 0")
        return value

    @property
    def world_size(self) -> int:
        """Ranks, one a device."""
        return self.nodes * self.gpus_per_node * self.gcds_per_gpu

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Tiers of more than one rank, innermost first."""
        sizes = (self.gcds_per_gpu, self.gpus_per_node, self.nodes)
        return tuple(tier for tier, size in zip(get_args(Tier), sizes) if size > 1)

    def text(self) -> str:
        """Sizes of the tiers, outermost first."""
        counts = ((self.nodes, "node"), (self.gpus_per_node, "GPU"), (self.gcds_per_gpu, "GCD"))
        return " x ".join(f"{many} {what}{'s' if many != 1 else ''}" for many, what in counts)

    def rates_text(self) -> str:
        """Rates of the tiers of more than one rank, innermost first."""
        said = [
            f"{tier} not limited"
            if (rate := self.rates_mbit.get(tier)) is None
            else f"{tier} {rate:g} Mbit/s {LINK_OF[tier]}"
            for tier in self.tiers
        ]
        return ", ".join(said) or "no links"


class Train(_Open):
    """How every peer trains."""

    micro_batch: int = Field(ge=1)
    accumulation: int = Field(ge=1)
    dtype: str
    seed: int


class StepsConfig(_Open):
    """Configuration of a measurement; keys beyond these are kept."""

    cluster: Cluster
    model: dict[str, Any]
    train: Train
    rounds: int = Field(ge=1)
    warmup: int = Field(ge=0)
    reduce_scatter: str
    peers: list[str]


class Bytes(_Part):
    """Bytes that all ranks send in one optimizer step.

    Attributes:
        measured: By the counters of the emulated interfaces, headers included.
        planned: That the collectives in use move, by the plan or the collectives' closed form.
        ideal: The same with a reduce-scatter that sends nothing twice.
        planned_twice: As planned, with two gathers of every weight a micro-step instead of those that took place.
    """

    measured: dict[Tier, FiniteFloat]
    planned: dict[Tier, FiniteFloat]
    ideal: dict[Tier, FiniteFloat]
    planned_twice: dict[Tier, FiniteFloat]

    @model_validator(mode="after")
    def _not_below_0(self) -> Bytes:
        for name, values in self:
            if min(values.values(), default=0) < 0:
                raise ValueError(f"bytes.{name}: found {values}, expected no number below 0")
        return self


class Memory(_Part):
    """Bytes of a rank, the largest over the ranks.

    Attributes:
        weights: Most that a step holds of them beside passing buffers, copies in other scopes among them.
        gradients: The same of gradients, accumulators and residuals among them; of PyTorch's peers at the end of backward.
        optimizer: Float32 masters and moments.
        kept: Of all tensors that live between two steps.
        peak: Most bytes of tensors that one step adds to that, on rank 0; None where not measured.
    """

    weights: FiniteFloat = _Least0
    gradients: FiniteFloat = _Least0
    optimizer: FiniteFloat = _Least0
    kept: FiniteFloat = _Least0
    peak: FiniteFloat | None


class Breakdown(_Part):
    """Seconds of the traced step on rank 0.

    Attributes:
        step: All of it.
        operators: The main thread was inside operators of torch or hzero.
        collectives: A collective was under way, also beside operators.
    """

    step: FiniteFloat = _Least0
    operators: FiniteFloat = _Least0
    collectives: FiniteFloat = _Least0


class _Row(_Part):
    """What all rows have.

    Attributes:
        content: The row as it was read, keys unknown to this release among them.
        folder: Where it was read, which its trace is relative to.
    """

    content: dict[str, Any]
    folder: Path
    format: Literal[1]
    suite: str = Field(min_length=1)
    measurement: str = Field(min_length=1)
    id: str
    date: AwareDatetime = Field(strict=False)
    machine: Machine
    versions: dict[str, str]
    parameters: int = Field(ge=1)
    world_size: int = Field(ge=1)
    losses: list[FiniteFloat | None] = Field(min_length=1)


class StepsRow(_Row):
    """One peer in one measurement.

    Attributes:
        config: Of the measurement, the same for all of its peers.
        peer: Name of the peer.
        label: The same for a reader.
        engine: What the peer is made of.
        peer_config: What defines the peer.
        tokens_per_step: Of all ranks and micro-steps.
        step_s: Seconds of the timed optimizer steps, in order.
        losses: Of every optimizer step, warm-up steps first; None where one was not finite.
        bytes: Of one optimizer step.
        busiest: Of these, what the busiest link of each tier carries one way: in gcd and gpu that of the rank that sends
            most, in node the trunk of the node that sends most.
        cpu_s: Processor seconds of all ranks together a step.
        fetches: Gathers of every weight a micro-step, on average; None where the engine gathers nothing.
        memory: Of a rank.
        trace: Chrome trace of one step, relative to the results' folder.
        breakdown: Of the traced step.
    """

    kind: Literal["steps"]
    config: StepsConfig
    peer: str = Field(min_length=1)
    label: str
    engine: Literal["ddp", "fsdp", "deepspeed", "hzero"]
    peer_config: dict[str, Any]
    tokens_per_step: int = Field(ge=1)
    step_s: list[FiniteFloat] = Field(min_length=1)
    bytes: Bytes
    busiest: dict[Tier, Annotated[FiniteFloat, _Least0]]
    cpu_s: FiniteFloat = _Least0
    fetches: FiniteFloat | None = Field(ge=0)
    memory: Memory
    trace: str | None
    breakdown: Breakdown | None

    @field_validator("trace")
    @classmethod
    def _inside(cls, value: str | None) -> str | None:
        if value is not None and (PurePosixPath(value).is_absolute() or ".." in PurePosixPath(value).parts):
            raise ValueError(f"trace: found {value!r}, expected a path inside the results' folder")
        return value

    @model_validator(mode="after")
    def _agrees(self) -> StepsRow:
        if min(self.step_s) <= 0:
            raise ValueError(f"step_s: found {min(self.step_s)}, expected seconds above 0")
        if len(self.losses) < len(self.step_s):
            raise ValueError(f"losses: found {len(self.losses)}, fewer than the {len(self.step_s)} timed steps")
        if self.world_size != self.config.cluster.world_size:
            raise ValueError(f"world_size: found {self.world_size}, but the cluster is {self.config.cluster.text()}")
        return self

    @property
    def median_s(self) -> float:
        """Median of the timed steps, in seconds."""
        return statistics.median(self.step_s)

    @property
    def tokens_per_s(self) -> float:
        """Of all ranks, by the median step."""
        return self.tokens_per_step / self.median_s

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Tiers of more than one rank, innermost first."""
        return self.config.cluster.tiers


class Evaluation(_Part):
    """Evaluation after a step, with the weights that forward reads and with the exact ones."""

    step: int
    loss_decoded: FiniteFloat | None
    loss_exact: FiniteFloat | None


class ConvergenceRow(_Row):
    """One training run.

    Attributes:
        config: The trainer's.
        preset: Of hzero, or ``stock`` for DeepSpeed ZeRO-3.
        seed: Of weights and data.
        losses: Training loss of every optimizer step, mean over the batch.
        evaluations: In order; the last is of the last step.
    """

    kind: Literal["convergence"]
    config: dict[str, Any]
    preset: str
    seed: int
    evaluations: list[Evaluation]

    @property
    def title(self) -> str:
        """Name for a reader."""
        return f"convergence {self.measurement}"
