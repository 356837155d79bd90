"""Rows of a comparison: the one schema that measurements write and the report reads, one JSON object per line."""

from __future__ import annotations

import json
import reprlib
import statistics
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AwareDatetime, Field, FiniteFloat

from benchmarks.cluster.shape import Cluster
from hzero.config import CodecName, Dimension, Role, Tier
from hzero.errors import ConfigError, one_of
from hzero.schema import Frozen, validated

#: File of a results folder that holds the rows.
RESULTS = "results.jsonl"
FORMAT: Literal[2] = 2

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
#: Adam's two decay rates.
Betas = Annotated[list[Annotated[FiniteFloat, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)]
Amount: TypeAlias = Annotated[FiniteFloat, Field(ge=0)]
Seconds: TypeAlias = Annotated[FiniteFloat, Field(gt=0)]
#: A loss in nats per token; None where it was not finite.
Loss: TypeAlias = "FiniteFloat | None"


class Train(Frozen):
    """How every scheme of a measurement trains.

    Attributes:
        accumulation: Micro-batches per step.
        micro_batch: Sequences per rank and micro-batch.
        dtype: Type of the weights in kernels and on the wires; masters and moments are float32.
        seed: Of weights and batches.
        lr: Learning rate after warm-up.
        warmup_steps: Steps over which the learning rate rises.
        decay_steps: Step at which a cosine has lowered the learning rate to a tenth; None: it stays.
        betas: Of AdamW.
        weight_decay: Of AdamW.
        muon: Whether Muon steps the matrices of layers, and AdamW the rest.
    """

    accumulation: Positive
    micro_batch: Positive
    dtype: Literal["bf16", "fp32"]
    seed: Count
    lr: Amount
    warmup_steps: Count
    decay_steps: Positive | None = None
    betas: Betas
    weight_decay: Amount
    muon: bool = False


class MeasurementConfig(Frozen):
    """Configuration of a measurement.

    Attributes:
        model: Shape of the model (`benchmarks.training.Model`).
        data: ``max_bytes`` of the text.
        cluster: Shape of the emulated cluster and rates of its links.
        train: How every scheme trains.
        schemes: Names in the catalog.
        rounds: In each of them every scheme takes one timed step.
        warmup: Steps of each scheme before the rounds.
        reduce_scatter: A key of older rows.
        timeout_s: Maximum wait for a collective.
        threads: Of each rank.
    """

    model: dict[str, Any]
    data: dict[str, Any]
    cluster: Cluster
    train: Train
    schemes: list[str] = Field(min_length=1)
    rounds: Positive
    warmup: int = Field(ge=2)
    reduce_scatter: Literal["gloo"] = "gloo"
    timeout_s: Annotated[FiniteFloat, Field(ge=1)]
    threads: Positive


class Machine(Frozen):
    """Where a row was measured."""

    cores: Positive
    processor: str
    memory_bytes: Positive
    system: str
    python: str


class Bytes(Frozen):
    """Bytes that all ranks send in one optimizer step, by tier.

    Attributes:
        measured: By the counters of the emulated interfaces, packet headers included.
        planned: Payloads of the collectives in use: of hzero by its plan, of other schemes in closed form.
        planned_twice: As planned, if every weight were gathered twice per micro-batch.
        ideal: As planned, with a reduce-scatter that sends nothing twice.
    """

    measured: dict[Tier, Amount]
    planned: dict[Tier, Amount]
    planned_twice: dict[Tier, Amount]
    ideal: dict[Tier, Amount]


class Memory(Frozen):
    """Bytes of a rank, the maximum over the ranks.

    Attributes:
        weights: Maximum of them that a step holds, copies over narrower scopes included.
        gradients: The same of gradients, gradient accumulation buffers and residuals; of PyTorch's schemes at the end of
            backward.
        optimizer: Float32 masters and moments.
        kept: All tensors that live between two steps.
        peak: Maximum that one step allocates beyond these, on rank 0.
    """

    weights: Amount
    gradients: Amount
    optimizer: Amount
    kept: Amount
    peak: Amount | None

    @property
    def states(self) -> float:
        """Bytes of all model states."""
        return self.weights + self.gradients + self.optimizer


class _Row(Frozen):
    format: Literal[2] = FORMAT
    suite: str = Field(min_length=1)
    measurement: str = Field(min_length=1)
    id: str
    date: AwareDatetime = Field(strict=False)
    machine: Machine
    versions: dict[str, str]
    parameters: Positive
    world_size: Positive

    @property
    def title(self) -> str:
        """Suite and name, or only the name if it contains both."""
        return self.measurement if self.measurement.startswith(self.suite) else f"{self.suite} {self.measurement}"


class StepsRow(_Row):
    """One scheme in one measurement.

    Attributes:
        id: Digest of the configuration; equal for all schemes of a measurement.
        date: When the measurement ended.
        versions: Of the packages that took part, and the commit.
        parameters: Elements of the model.
        config: Of the measurement.
        scheme: Name in the catalog.
        label: The same for readers.
        engine: Of the catalog's entry.
        scheme_config: The catalog's entry.
        tokens_per_step: Of all ranks and micro-batches.
        step_s: Seconds of each timed optimizer step that counts, by round.
        busy_rounds: Rounds that do not count, since something else used the machine.
        said: What hzero wrote while it was built and warmed up: layout, transport and codecs that ran.
        losses: Of every optimizer step, warm-up included.
        bytes: Of one optimizer step.
        busiest: Of the measured bytes, those that the busiest link of each tier carries one way: the link of the rank
            that sends most inside nodes, the trunk of the node that sends most between nodes.
        cpu_s: Processor seconds of all ranks per step.
        fetches: Gathers of each weight per micro-batch, on average; None if the engine gathers nothing.
        memory: Of a rank.
        breakdown: Of the traced step, in older rows.
    """

    kind: Literal["steps"] = "steps"
    config: MeasurementConfig
    scheme: str = Field(min_length=1)
    label: str
    engine: Literal["ddp", "fsdp", "deepspeed", "tensor", "hzero"]
    scheme_config: dict[str, Any]
    tokens_per_step: Positive
    step_s: list[Seconds] = Field(min_length=1)
    busy_rounds: Count = 0
    said: list[str] = []
    losses: list[Loss] = Field(min_length=1)
    bytes: Bytes
    busiest: dict[Tier, Amount]
    cpu_s: Amount
    fetches: Amount | None
    memory: Memory
    breakdown: dict[str, float] | None = None

    @property
    def median_s(self) -> float:
        """Median step time in seconds."""
        return statistics.median(self.step_s)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all ranks, by the median step."""
        return self.tokens_per_step / self.median_s

    @property
    def wire_s(self) -> dict[Tier, float]:
        """Minimum seconds that the measured bytes take on each shaped tier, by its busiest link."""
        cluster = self.config.cluster
        rates = {tier: cluster.rate_mbit(tier) for tier in cluster.tiers}
        return {tier: 8 * self.busiest.get(tier, 0.0) / (rate * 1e6) for tier, rate in rates.items() if rate}

    @property
    def processor_s(self) -> float:
        """Seconds for which a step keeps all cores busy."""
        return self.cpu_s / self.machine.cores

    @property
    def core_bound(self) -> bool:
        """Whether the cores, not the wires, set the pace: they are busy for longer than the slowest shaped tier."""
        wires = max(self.wire_s.values(), default=0.0)
        return bool(wires) and self.processor_s > wires


class Sent(Frozen):
    """Bytes that all ranks receive in one optimizer step in one role, on one tier.

    Attributes:
        role: Weights, gradients or a parallel dimension.
        tier: The tier.
        codec: Of the messages.
        wire_bytes: As sent.
        raw_bytes: The same without codec.
    """

    role: Role | Dimension
    tier: Tier
    codec: CodecName
    wire_bytes: Amount
    raw_bytes: Amount


class LayoutRow(_Row):
    """One run with tensor groups or pipeline stages (`benchmarks.hybrid`).

    Attributes:
        config: Of the run.
        layout: How ranks are divided, by name.
        scheme: Which codecs, by name.
        seed: Of weights and batches.
        rates: Of the emulated cluster's links, Mbit/s by tier (`benchmarks.cluster`); None: it ran without, and its times say
            nothing of wires.
        tokens_per_step: Of all ranks and micro-batches.
        step_s: Seconds of every optimizer step.
        losses: Training loss of every optimizer step, the mean over the batch.
        evaluation: Loss of the evaluation after the last step, with exact weights where the stage has both.
        sent: By role and tier; evaluations are left out.
    """

    kind: Literal["layout"] = "layout"
    config: dict[str, Any]
    layout: str
    scheme: str
    seed: int
    rates: str | None
    tokens_per_step: Positive
    step_s: list[Seconds] = Field(min_length=1)
    losses: list[Loss] = Field(min_length=1)
    evaluation: Loss
    sent: list[Sent]

    @property
    def median_s(self) -> float:
        """Median step time in seconds."""
        return statistics.median(self.timed_s)

    @property
    def timed_s(self) -> list[float]:
        """Seconds of the steps that count: where there are others, all but the first two, which are slower."""
        return self.step_s[2:] or self.step_s


Row: TypeAlias = "StepsRow | LayoutRow"
_KINDS: dict[str, type[StepsRow] | type[LayoutRow]] = {"steps": StepsRow, "layout": LayoutRow}


def line_of(row: Row) -> str:
    """A row as its line of the file."""
    return row.model_dump_json() + "\n"


def parse_row(content: Any, where: str) -> Row:
    """Reads the object of one line.

    Args:
        content: What JSON says.
        where: File and line, for messages.

    Raises:
        ConfigError: It is not a row; names the key.
    """
    if not isinstance(content, dict):
        raise ConfigError(f"{where}: found {reprlib.repr(content)}, expected an object")
    if content.get("format") != FORMAT:
        raise ConfigError(
            f"{where}: found format {reprlib.repr(content.get('format'))}, expected {FORMAT}; other releases wrote this row"
        )
    kind = content.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise one_of(f"{where}: kind", kind, _KINDS)
    return validated(_KINDS[kind], content, where)


def read_rows(file: Path) -> tuple[list[Row], list[int]]:
    """Reads a file of rows.

    Returns:
        The rows, and the numbers of torn lines: an interrupted write leaves the beginning of an object, which does not
        count.

    Raises:
        ConfigError: The file cannot be read, or a line is neither a row nor torn.
    """
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"{file}: cannot read: {error.strerror}") from None
    rows: list[Row] = []
    torn: list[int] = []
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            if number == len(lines) or _is_torn(text, error):
                torn.append(number)
                continue
            raise ConfigError(f"{file}:{number}: not JSON: {' '.join(str(error).split())}") from None
        rows.append(parse_row(content, f"{file}:{number}"))
    return rows, torn


def _is_torn(text: bytes, error: Exception) -> bool:
    """Whether a line is the beginning of an object."""
    at_end = isinstance(error, json.JSONDecodeError) and error.pos >= len(error.doc.rstrip())
    return text.startswith(b"{") and (at_end or not text.rstrip().endswith(b"}"))
