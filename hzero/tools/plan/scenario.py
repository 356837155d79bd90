"""Scenario: the model, the machine and the step of a plan, from the command's arguments."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hzero.calls import library_errors, quiet
from hzero.codecs.formats import TRAITS
from hzero.config import FIT, MEASURE, TIERS, HZeroConfig, SequenceConfig, TierCodecs, bytes_of, parse_config
from hzero.errors import ConfigError
from hzero.program.choice import STATE_BYTES, Choice, Load, Rates, choose, room_of
from hzero.program.collectives import OTHERS, Scheme
from hzero.program.matrices import Matrix, Owned
from hzero.program.shards import ShardPlan
from hzero.tools.experiment import Architecture, Experiment, compose, composed
from hzero.tools.plan.machine import CONSTANTS, Machine, Profile, Source, load_profile, profile_names
from hzero.topology import Grid
from hzero.topology.links_file import LinksFile, TierRate, links_for

#: Keys of `hzero plan` that the trainer's configuration lacks. A plain plan does not read the last one.
KEYS = ("memory", "profile", "global_batch")
#: Bits per weight of refreshes in codec ``exact``, after the warm-up of AdamW, by the ratio of the learning rate to the standard
#: deviation of weights, here `_DEVIATION`. Measured by benchmarks/exact_bits.py.
_BITS = ((5e-4, 1.4), (5e-3, 2.0), (1.6e-2, 2.9), (5e-2, 4.0), (0.1, 5.0))
_DEVIATION = 0.02
#: Seconds to encode and to decode a weight in codec ``exact`` on an MI250X: decoding by counted instructions (docs/model.md),
#: encoding assumed. No device was measured.
_CODING_S = [1e-11, 5.3e-12]


# ---- the job ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """The model, and the batch and buffers of a step. Sizes of buffers are in elements.

    Attributes:
        name: Name of the model.
        model: Shapes of the model.
        seq_length: Tokens of a sequence.
        micro_batch: Sequences per rank and micro-batch.
        accumulation: Micro-batches per step.
        checkpointing: Whether backward recomputes activations.
        itemsize: Bytes of a weight and of a gradient on the wire.
        prefetch: ``stage3_prefetch_bucket_size``: gathered ahead of use. Buckets of a prediction have this size.
        ahead: Number of buckets that are gathered ahead of their use.
        reduce: ``reduce_bucket_size``: reduced together.
        contiguous: ``contiguous_gradients``: whether gradients have a buffer of ``reduce`` elements, even for a small model.
        reuse: ``stage3_max_reuse_distance``: a parameter stays whole until its next use if at most this many elements are used
            in between. DeepSpeed always keeps the last parameter.
        sub_group: ``sub_group_size``: elements that the optimizer updates together.
        gradient_itemsize: Bytes of an element of the gradient shard; None: as for a weight, DeepSpeed's default.
        offload: Whether the optimizer and the gradient shard are on the host.
        state_itemsize: Bytes of an element of the master and of Adam's moments; 2 with ``bf16_optimizer_states``.
        kept: ``stage3_param_persistence_threshold``: stock ZeRO-3 gathers parameters of at most this many elements once per step.
        hierarchical: Whether the library keeps buffers for hierarchical all-gathers.
        tensor: Devices of a tensor group, which divide every matrix. ``model`` then has the parameters of one device.
        sequence: The block's key ``sequence``; None without it.
        stored: Micro-batches whose activations a pipeline stage keeps at once.
        matrices: Shapes of the parameters that Muon updates; empty without Muon.
    """

    name: str
    model: Architecture
    seq_length: int
    micro_batch: int
    accumulation: int
    checkpointing: bool
    itemsize: int
    prefetch: int
    ahead: int
    reduce: int
    contiguous: bool
    reuse: int
    sub_group: int
    gradient_itemsize: int | None
    offload: bool
    kept: int = 0
    hierarchical: bool = False
    state_itemsize: int = 4
    tensor: int = 1
    stored: float = 1.0
    sequence: SequenceConfig | None = None
    matrices: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, experiment: Experiment, profile: Profile | ConfigError) -> Job:
        """The job of a configuration.

        DeepSpeed prefetches one bucket if ``stage3_max_live_parameters`` allows two. Weights have 16 bits by default on a known
        machine, and otherwise the type that a run on this machine would have.
        """
        train, zero = experiment["train"], experiment.deepspeed.zero_optimization
        known = experiment["topology"].get("profile") or experiment["topology"].get("bandwidth_gb_s")
        wide = experiment.itemsize == 4 if train["dtype"] == "fp32" or not known else False
        prefetch = int(zero.stage3_prefetch_bucket_size)
        muon = str(experiment.deepspeed.optimizer.get("type")).lower() == "muon"
        gradient = str(experiment.deepspeed.data_types.get("grad_accum_dtype"))
        return cls(
            str(experiment["model"]["name"]),
            experiment.architecture,
            experiment["model"]["seq_length"],
            micro_batch=train["micro_batch"],
            accumulation=train["grad_accumulation"],
            checkpointing=train["activation_checkpointing"],
            itemsize=4 if wide else 2,
            prefetch=prefetch,
            ahead=int(zero.stage3_max_live_parameters >= 2 * prefetch),
            reduce=int(zero.reduce_bucket_size),
            contiguous=zero.contiguous_gradients,
            reuse=int(zero.stage3_max_reuse_distance),
            kept=int(zero.stage3_param_persistence_threshold),
            sub_group=int(zero.sub_group_size),
            gradient_itemsize={"fp32": 4, "bf16": 2, "fp16": 2}.get(gradient),
            offload=(zero.offload_optimizer or {}).get("device", "none") != "none",
            hierarchical=isinstance(profile, Profile) and profile.hierarchical,
            state_itemsize=2 if experiment.deepspeed.bf16.bf16_optimizer_states else 4,
            sequence=experiment.sequence,
            matrices=experiment.architecture.matrices if muon else (),
        )

    def in_fsdp(self) -> Job:
        """The job under FSDP2: a layer is gathered and reduced as a whole, and not kept until its next use."""
        return replace(self, prefetch=self.layer, reduce=self.layer, reuse=0, ahead=1, contiguous=False)

    def owned(self, grid: Grid) -> Owned:
        """The owners of Muon's matrices."""
        return Owned.of([Matrix.of(shape, grid.world_size) for shape in self.matrices], grid)

    @property
    def state_bytes(self) -> int:
        """Bytes on the device of a weight's master, moments and gradient, as preset ``fit`` counts them."""
        return 0 if self.offload else STATE_BYTES

    @property
    def tokens(self) -> int:
        """Tokens per rank and micro-batch."""
        return self.micro_batch * self.seq_length // self.parallel

    @property
    def parallel(self) -> int:
        """Ranks that share a sequence."""
        return self.sequence.parallel if self.sequence else 1

    @property
    def layer(self) -> int:
        """Elements of a layer; 0 where layers differ."""
        return sum(self.model.layer or ())

    @property
    def layers_together(self) -> int:
        """Whole layers that one bucket holds: DeepSpeed gathers ahead, and reduces, across modules; at least 1."""
        return max(self.prefetch // self.layer, 1)


@dataclass(frozen=True)
class Bucket:
    """Parameters that are gathered and reduced together.

    Attributes:
        name: Equal buckets have equal names.
        numels: Elements of every parameter.
        flops: Operations of forward, per token.
        attention: Those of them in attention.
        layers: Layers whose all-reduces over a tensor group, and whose memory traffic outside matrix products, it contains.
        logits: Logits of a token.
    """

    name: str
    numels: tuple[int, ...]
    flops: float
    attention: float = 0.0
    layers: int = 0
    logits: int = 0

    @property
    def numel(self) -> int:
        """Elements of all its parameters."""
        return sum(self.numels)

    def backward(self, checkpointing: bool) -> int:
        """Time of its backward in that of its forward. Checkpointing computes layers again, but not the head."""
        return 2 + (checkpointing and not self.logits)


def buckets_of(job: Job, layers: int | None = None) -> list[Bucket]:
    """Buckets of a job in the order of forward. A bucket has as many layers as fit, or else parameters of one layer.

    A token needs 2 operations for each weight that it is multiplied with, and 4 x length x width in attention. A tensor group
    sums the results of attention and of the hidden units: two all-reduces per layer (arXiv 1909.08053, section 3).

    Args:
        job: The job. All layers of its model are equal.
        layers: Number of layers; None: the model's.
    """
    model = job.model
    assert model.layer is not None
    layers = model.layers if layers is None else layers
    vocab = model.vocab_size * model.hidden
    weights = 2.0 * (job.layer - model.idle / model.layers)
    attention = 4.0 * job.seq_length * model.attention / model.layers
    head = Bucket("head", model.after, 2.0 * vocab / job.tensor, logits=math.ceil(model.vocab_size / job.tensor))
    embedding = Bucket("embedding", model.before, 0.0)
    if (together := job.layers_together) > 1:
        counts = [min(together, layers - first) for first in range(0, layers, together)]
        whole = (Bucket(f"{n} layers", model.layer * n, (weights + attention) * n, attention * n, n) for n in counts)
        return [embedding, *whole, head]
    of_layer = []
    for index, part in enumerate(_split(model.layer, job.prefetch, job.kept)):
        # The operations of attention belong to the bucket of the first matrix.
        here = attention * (index == 0)
        flops = weights / job.layer * sum(part) + here
        of_layer.append(Bucket(f"layer.{index}", tuple(part), flops, here, int(index == 0)))
    return [embedding, *of_layer * layers, head]


def _split(numels: Sequence[int], limit: int, kept: int) -> list[list[int]]:
    parts: list[list[int]] = [[]]
    for numel in numels:
        # Kept parameters need no gather of their own. Their gradients are reduced with others.
        if parts[-1] and sum(parts[-1]) + numel > limit and min(numel, max(parts[-1])) > kept:
            parts.append([])
        parts[-1].append(numel)
    if len(parts) > 1 and sum(parts[-1]) < limit // 100:  # a remaining bias
        bias = parts.pop()
        parts[-1] += bias
    return parts


def expected_bits(lr: float) -> float:
    """Bits per weight that refreshes in codec ``exact`` are expected to send at a learning rate."""
    ratios, bits = zip(*_BITS)
    return float(np.interp(math.log(max(lr / _DEVIATION, 1e-9)), np.log(ratios), bits))


def expecting(plan: ShardPlan, bits: float) -> ShardPlan:
    """The plan with ``bits`` per weight in codec ``exact``, unless the block states them."""
    codecs = {tier: plan.codecs.weights[tier] for tier in TIERS}
    for tier, codec in codecs.items():
        if codec.traits.changes and codec.bits is None:
            codecs[tier] = codec.model_copy(update={"bits": bits})
    weights = plan.codecs.model_copy(update={"weights": TierCodecs(**codecs)})
    scoped = tuple((pattern, expecting(one, bits)) for pattern, one in plan.scoped)
    return replace(plan, codecs=weights, scoped=scoped) if plan.exact or scoped else plan


# ---- the machine --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scenario:
    """A model on a machine.

    Attributes:
        experiment: The trainer's configuration.
        job: The job.
        grid: The machine's devices.
        links: Measured rates of the tiers; None without a file.
        profile: The machine's constants, or the error that explains why they are unknown.
        memory: Memory of a device in bytes; None if unknown.
        global_batch: Sequences of a step on all devices; None if the user has given none.
        given: The user's overrides of the trainer's configuration.
        bits: Expected bits per weight of refreshes in codec ``exact``.
        choice: What preset ``fit`` chooses; None with another preset, or without a profile.
    """

    experiment: Experiment
    job: Job
    grid: Grid
    links: LinksFile | None
    profile: Profile | ConfigError
    memory: int | None
    global_batch: int | None
    given: tuple[str, ...]
    bits: float = TRAITS["exact"].settings["bits"]
    choice: Choice | None = None

    @property
    def sequences(self) -> int | None:
        """Sequences of a step on each device. Raises `ConfigError` if the devices do not divide the global batch."""
        if self.global_batch is None:
            return None
        devices = self.grid.world_size // self.job.parallel
        sequences, rest = divmod(self.global_batch, devices)
        if not sequences or rest:
            near = max(round(self.global_batch / devices), 1) * devices
            raise ConfigError(
                f"global_batch: found {self.global_batch}; expected a multiple of the {devices:,} devices, such as {near}"
            )
        return sequences

    @property
    def shared_bytes(self) -> int:
        """Bytes of the states that every layout shards over the world, on one device."""
        return (self.job.state_bytes + self.job.itemsize) * sum(self.job.model.numels) // self.grid.world_size

    @property
    def machine(self) -> Machine:
        """The machine that predictions simulate. Raises `ConfigError` without a profile."""
        if isinstance(self.profile, ConfigError):
            raise self.profile
        return Machine(self.grid, self.profile)

    def on(self, nodes: int) -> Scenario:
        """The scenario on another number of nodes, with equal work per device."""
        group = self.grid.nodes_per_group  # an automatic grid chooses it again
        if group is not None and nodes % group and not self.grid.automatic:
            if nodes > group:
                raise ConfigError(f"nodes: found {nodes:,}; expected a multiple of topology.nodes_per_group, {group}")
            group = None
        return replace(self, grid=replace(self.grid, nodes=nodes, ranks=None, nodes_per_group=group))

    def holds(self, size: int) -> bool:
        """Whether ``size`` bytes fit into a device."""
        return size <= (self.memory or 0)

    def shard_plan(self, preset: str) -> ShardPlan:
        """The shard plan of a preset on this machine."""
        return expecting(ShardPlan.from_config(parse_config({"preset": preset}), self.grid, 0), self.bits)

    def others(self) -> dict[str, Scheme]:
        """Other engines: ZeRO++ with the machine's usual launch line, and RCCL's variants if RCCL is the library."""
        profile = None if isinstance(self.profile, ConfigError) else self.profile
        rccl = profile is not None and profile.library.startswith("RCCL")
        others = {name: scheme for name, scheme in OTHERS.items() if rccl or not scheme.hierarchical}
        return {**others, "ZeRO++": replace(OTHERS["ZeRO++"], visible=profile.visible if profile else None)}


def read_scenario(overrides: Sequence[str], links: Path | None = None, bits: float | None = None) -> Scenario:
    """Reads a scenario.

    Args:
        overrides: Keys of the trainer's configuration, and `KEYS`.
        links: File of measured rates, which replace the profile's rates.
        bits: As in `Scenario`; None: as the learning rate lets expect.

    Raises:
        ConfigError: A key or a value is wrong, or the machine of the given profile cannot have such a grid.
    """
    split = [override.partition("=") for override in overrides]
    own = {key: value for key, sign, value in split if sign and key in KEYS}
    kept = tuple("".join(parts) for parts in split if parts[0] not in own)
    experiment = compose(list(kept))
    grid = experiment.grid
    if experiment.tensor > 1:
        raise ConfigError(f"deepspeed.tensor_parallel.autotp_size: found {experiment.tensor}; a plan expects 1")
    profile = _profile_of(own.get("profile"), experiment)
    written = Path(str((experiment.block or {}).get("links", MEASURE)))  # of preset fit, whose run would read it
    links = written if links is None and written.is_file() else links
    measured = None if links is None else links_for(links, grid)
    if measured is not None and links is not None and isinstance(profile, Profile):
        profile = with_links(profile, measured, links)
    job = Job.of(experiment, profile)
    if experiment["deepspeed"] != composed("train", ())["deepspeed"]:  # DeepSpeed takes long to import
        check_as_run(experiment, job.itemsize)
    if (batch := own.get("global_batch")) is not None and not re.fullmatch(r"[1-9]\d{0,11}", batch):
        raise ConfigError(f"global_batch: found {batch!r}; expected a number of sequences")
    try:
        memory = bytes_of(own["memory"]) if "memory" in own else None
    except ValueError as error:
        raise ConfigError(f"memory: {error}") from None
    if memory is None and isinstance(profile, Profile):
        memory = int(profile.value("memory_gb") * 1e9)
    bits = expected_bits(experiment["train"]["lr"]) if bits is None else bits
    choice = None
    if experiment.plan is not None:
        config = parse_config(experiment.block, "zero")
        known = profile if isinstance(profile, Profile) else None
        if config.preset == FIT and experiment.data_parallel.world_size > 1 and (rates := measured or known):
            choice = _fitted(config, experiment.data_parallel, job, rates, known, memory)
            assert choice.best.config is not None
            experiment.plan = ShardPlan.from_config(choice.best.config, experiment.data_parallel, 0)
        experiment.plan = expecting(experiment.plan, bits)
    sequences = int(batch) if batch else None
    return Scenario(experiment, job, grid, measured, profile, memory, sequences, kept, bits, choice)


def _fitted(
    config: HZeroConfig,
    grid: Grid,
    job: Job,
    rates: LinksFile | Profile,
    profile: Profile | None,
    memory: int | None,
) -> Choice:
    """The choice of preset ``fit``, as a run with these rates would make it."""
    numels = tuple(job.model.numels)
    buckets = -(-sum(numels) // min(job.prefetch or job.reduce, job.reduce))
    load = Load(numels, numels, job.itemsize, job.accumulation, job.model.layers + 1, buckets, job.state_bytes)
    order = config.order or (profile.order if profile else "lanes")
    together, coding_s = float(order == "strict"), _CODING_S
    if isinstance(rates, LinksFile):
        together = max(together, rates.together or 0.0)
        coding_s = rates.coding_s or coding_s
        tiers = {tier: rate for tier in grid.crossed if (rate := rates.rate(tier))}
    else:
        between = rates.value("net_rails_gb_s") / grid.scope_size("node")
        inside = {"intra_package": rates.value("intra_package_gb_s"), "intra_node": rates.value("intra_node_ring_gb_s")}
        tiers = {tier: TierRate(inside.get(tier, between), rates.value("launch_us")) for tier in grid.crossed}
    free = None if memory is None else memory - job.itemsize * sum(numels) // grid.world_size
    written = config.memory.device is not None
    room = None if free is None and not written else room_of(config, grid, load, None if written else free)
    return choose(config, grid, load, Rates(tiers, together, *coding_s), room)


def check_as_run(experiment: Experiment, itemsize: int) -> Any:
    """Refuses keys of DeepSpeed, and experts, that a run refuses or ignores. Messages have the keys that the user has written.

    Args:
        experiment: The trainer's configuration.
        itemsize: Bytes of a weight.

    Returns:
        The ``DeepSpeedConfig``.

    Raises:
        ConfigError: See `hzero.deepspeed.refusals` and `hzero.deepspeed.autoep.codes_tokens`.
    """
    ranks, experts = experiment.experts, experiment.architecture.experts
    if ranks > 1 and (not experts or experts % ranks):
        key = "deepspeed.expert_parallel.autoep_size"
        raise ConfigError(f"{key}: found {ranks} for a model with {experts} experts in a layer; expected a divisor")
    written = experiment.deepspeed_config()
    with quiet():
        from hzero.deepspeed import autoep, refusals
    with library_errors("deepspeed"):
        bf16 = {**written["bf16"], "enabled": itemsize == 2 and experiment["train"]["dtype"] != "fp16"}
        read = refusals.check_written({**written, "bf16": bf16}, experiment.data_parallel.world_size, "deepspeed")
        for error in refusals.ignored(read, "deepspeed"):
            raise error
    if ranks > 1 and read.hzero_block is not None:
        autoep.codes_tokens(read.hzero_block, experiment.grid.of_ranks(range(ranks)))
    return read


def _profile_of(name: str | None, experiment: Experiment) -> Profile | ConfigError:
    """The profile by name, or else the topology's; an error if its machine cannot have such a grid."""
    topology, grid = experiment["topology"], experiment.grid
    if not (chosen := name or topology.get("profile")):
        names = ", ".join(profile_names())
        return ConfigError(f"profile: none is known for this topology; expected a file.yaml or one of {names}")
    profile = load_profile(chosen)
    if gbit := topology.get("nic_gbit"):
        # Nodes of another size and with other NICs. The error is known only for the profile's NICs.
        shape = {
            "packages_per_node": grid.packages_per_node,
            "devices_per_package": grid.devices_per_package,
            "error": None,
        }
        source = Source(what="topology.nic_gbit x topology.nics_per_node", date="given", stack="none", kind="nominal")
        rates = dict.fromkeys(filter(re.compile("net_").match, CONSTANTS), gbit * topology.get("nics_per_node", 1) / 8)
        profile = profile.model_copy(update=shape).with_values(source, **rates)
    try:
        profile.check(grid)
    except ConfigError as error:
        if name is not None:
            raise
        return error  # the topology names the machine, but has another shape
    return profile


def with_links(profile: Profile, links: LinksFile, path: Path) -> Profile:
    """The profile with measured rates and latencies. Tiers are matched by name.

    All groups of a tier are measured at once, so a node has the rate of a device times its number of devices.
    """
    values: dict[str, float] = {"launch_us": min(rate.latency_us for rate in links.tiers.values())}
    for tier, measured in links.tiers.items():
        if tier == "intra_package":
            values["intra_package_gb_s"] = measured.gb_s
        elif tier == "intra_node":
            values |= {"intra_node_ring_gb_s": measured.gb_s, "intra_node_pairs_gb_s": measured.gb_s}
        elif tier == "inter_node":  # the model has one rate between nodes, and no hives
            rate = measured.gb_s * links.grid["intra_node"] * links.grid["intra_package"]
            values |= {"net_rails_gb_s": rate, "net_ring_gb_s": rate}
    stack = f"{links.backend} on {links.device}"
    source = Source(what=f"hzero links: {path}", date=links.date, stack=stack, kind="measured")
    return profile.with_values(source, **values)
