"""The ``"hzero"`` block of a DeepSpeed configuration, as pydantic models, with its presets."""

from __future__ import annotations

import re
import reprlib
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

from pydantic import BeforeValidator, Field, field_validator, model_validator

from hzero.codecs.formats import BLOCK_CODECS, FIXED, TRAITS, CodecName, RecordFormat, Traits
from hzero.errors import ConfigError, one_of
from hzero.schema import Frozen, validated

#: A level of links. The order of `TIERS` is innermost first.
Tier: TypeAlias = Literal["intra_package", "intra_hive", "intra_node", "inter_node", "inter_group", "inter_cluster"]
#: The ranks over which a state is sharded, see `tiers_inside`. The order of `SCOPES` is narrowest first.
Scope: TypeAlias = Literal["device", "package", "hive", "node", "group", "cluster", "world"]
#: The kind of state that a message carries.
Role: TypeAlias = Literal["weights", "gradients"]
#: A parallel dimension of a model. Its groups exchange activations and their gradients. In ``optimizer``, owners send updated
#: weights: of pipeline stages under ZeRO-1, and of Muon.
Dimension: TypeAlias = Literal["tensor", "sequence", "expert", "pipeline", "optimizer"]
#: How an all-gather between nodes moves its messages, see `hzero.comm.runtime.PreparedHop`.
Algorithm: TypeAlias = Literal["library", "doubling", "pairs"]
#: Transport of hops: torch.distributed, or MPI in addition to it.
TransportName: TypeAlias = Literal["torch", "mpi"]
#: Order of the collectives of several tiers.
CollectiveOrder: TypeAlias = Literal["strict", "lanes"]

TIERS: tuple[Tier, ...] = typing.get_args(Tier)
#: Tiers of every machine, some of size 1. The other tiers must be declared.
BASE_TIERS: tuple[Tier, ...] = ("intra_package", "intra_node", "inter_node")
#: The tiers between nodes, which their NICs carry.
NET_TIERS: tuple[Tier, ...] = TIERS[TIERS.index("inter_node") :]
SCOPES: tuple[Scope, ...] = typing.get_args(Scope)
ROLES: tuple[Role, ...] = typing.get_args(Role)
DIMENSIONS: tuple[Dimension, ...] = typing.get_args(Dimension)
ALGORITHMS: tuple[Algorithm, ...] = typing.get_args(Algorithm)
TRANSPORTS: tuple[TransportName, ...] = typing.get_args(TransportName)


def tiers_inside(scope: Scope) -> tuple[Tier, ...]:
    """Tiers that a scope reaches, innermost first: none of one device, all of the world."""
    return TIERS[: SCOPES.index(scope)]


def tiers_outside(scope: Scope) -> tuple[Tier, ...]:
    """Tiers that a scope does not reach, innermost first."""
    return TIERS[SCOPES.index(scope) :]


def _in_order(value: Any) -> tuple[Any, ...]:
    """Sorts a list of tiers. A list with unknown tiers stays as it is, so that pydantic names them."""
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"found {reprlib.repr(value)}; expected a list of tiers ({', '.join(TIERS)})")
    known = all(tier in TIERS for tier in value)
    return tuple(tier for tier in TIERS if tier in value) if known else tuple(value)


#: A written list of tiers, innermost first.
TierList: TypeAlias = Annotated[tuple[Tier, ...], BeforeValidator(_in_order)]

#: The preset that chooses shard degrees, see `hzero.program.choice`.
FIT = "fit"
DEFAULT_PRESET = FIT
DEFAULT_BLOCK_SIZE = 128
#: Links are measured at the start.
MEASURE = "measure"
#: Groups of nodes are chosen, see `hzero.topology.grid.chosen_group`.
AUTOMATIC: Literal["automatic"] = "automatic"

#: A codec as the user writes it: its name, or `codec` with its settings.
Written: TypeAlias = CodecName | dict[str, Any]


class Preset(NamedTuple):
    """Defaults of a block.

    Attributes:
        weights, gradients: Shard degrees.
        weights_codec, gradients_codec: Codecs on every tier.
        between_nodes: Codec of gradients on the tiers between nodes; None: `gradients_codec`.
    """

    weights: Scope
    gradients: Scope
    weights_codec: Written
    gradients_codec: Written
    between_nodes: Written | None = None

    def codec_of(self, role: Role | Dimension, tier: Tier) -> Written:
        """The codec of a role on a tier."""
        gradients = (self.between_nodes if tier in NET_TIERS else None) or self.gradients_codec
        codec = {"weights": self.weights_codec, "gradients": gradients}.get(role, "none")
        finer = TRAITS[codec].between_groups if tier == "inter_group" and isinstance(codec, str) else None
        return finer or codec


PRESETS: dict[str, Preset] = {
    "zero1": Preset("device", "device", "exact", "none"),
    "zero2": Preset("device", "world", "exact", "none"),
    "replica": Preset("device", "device", "int8", "int4"),
    "half": Preset("node", "node", "int8", "int4"),
    "zero3": Preset("world", "world", "none", "none"),
    "hpz": Preset("node", "world", "none", "none"),
    "zeropp": Preset("node", "world", "int8", "int4"),
    "lossless": Preset("package", "node", "exact", "none"),
    "exact": Preset("package", "node", "exact", "int8", "int4"),
    "topo": Preset("package", "node", "int8", "int4"),
}
#: All presets, the default first. Until `fit` has chosen, it has the shard degrees of `lossless`.
PRESET_NAMES = (FIT, *PRESETS)
#: Former presets, with what replaces each. ``conf/zero`` has a file with the settings of most.
_FORMER = {name: f"the settings in conf/zero/{name}.yaml" for name in ("mild", "hybrid", "zhybrid", "mzhybrid")}
_FORMER["lean"] = "exact, which rounds no weights and sends about as many bytes"


class CodecConfig(Frozen):
    """Settings of one tier's codec for one role.

    Attributes:
        codec: Codec of the hop. Its name instead of the block sets the defaults of the other keys. `zfp` has a fixed `rate`.
            `mpc` keeps every bit in a number of bytes that depends on the data; only a `Communicator` has it. `exact` is
            for weights that are refreshed: it keeps every bit of 16-bit weights, and sends how far an optimizer step has moved
            them from the receivers' copy. Where there is no such copy, it is `none`.
        block_size: Elements that share a scale. The default is the `block_size` of the whole block.
        rounding: To nearest with ties to even, or up with the probability of the remainder, which has no bias and more
            noise.
        rotation: For `int8` and `int4`: number of elements that a Hadamard rotation mixes before they are encoded, 64
            or 128. It must divide `block_size`; 0, the default, mixes none. A rotation loses less if few elements are far
            larger than the rest. Elements near the end of their type's range, such as float16's 65504, may overflow.
        rate: For `zfp`: bits of a value, by default 16.
        dimension: For `mpc`: distance of the earlier value that is subtracted from each, such as the number of interleaved
            series; by default 1.
        bits: For `exact`: bits per weight that `hzero plan` expects, by default 3.5. A run sends as many as it needs.
    """

    codec: CodecName
    block_size: int = Field(DEFAULT_BLOCK_SIZE, ge=16, le=512, multiple_of=16)
    rounding: Literal["nearest", "stochastic"] = "nearest"
    rotation: Literal[0, 64, 128] = 0
    rate: int | None = Field(default=None, ge=4, le=24)
    dimension: int | None = Field(default=None, ge=1, le=32)
    bits: float | None = Field(default=None, gt=0, le=16)

    @model_validator(mode="after")
    def _own_settings(self) -> CodecConfig:
        scaled = " or ".join(BLOCK_CODECS)
        if self.rotation and (not self.traits.codes or self.block_size % self.rotation):
            found = f"found rotation {self.rotation} with codec {self.codec} and block_size {self.block_size}"
            raise ValueError(f"{found}; expected {scaled} and a divisor of block_size")
        if self.rounding != "nearest" and not self.traits.codes:
            raise ValueError(f"found rounding {self.rounding!r} with codec {self.codec}; expected {scaled}")
        for codec, traits in TRAITS.items():
            for setting in traits.settings if codec != self.codec else ():
                if (value := getattr(self, setting)) is not None:
                    raise ValueError(f"found {setting} {value} with codec {self.codec}; expected {codec}")
        return self

    @property
    def traits(self) -> Traits:
        """The properties of the codec."""
        return TRAITS[self.codec]

    @property
    def format(self) -> RecordFormat:
        """The layout of the codec's records."""
        settings: dict[str, Any] = {"rate": self.rate, "dimension": self.dimension, "bits": self.bits}
        return RecordFormat.of(self.codec, self.block_size, self.rotation, **settings)


#: No codec: values in their own type.
PLAIN = CodecConfig(codec="none", block_size=DEFAULT_BLOCK_SIZE)

#: Tiers that must be declared, and the tier whose codec is the default of each.
OPTIONAL_TIERS: dict[Tier, Tier] = {
    "intra_hive": "intra_node",
    "inter_group": "inter_node",
    "inter_cluster": "inter_group",
}


class TierCodecs(Frozen):
    """One codec for each tier.

    Attributes:
        intra_hive: Codec of this tier, with the keys of `TIER`; null is the codec of `intra_node`.
        inter_group: Codec of this tier; null is the codec of `inter_node`, but `int8` instead of `int4`.
        inter_cluster: Codec of this tier; null is the codec written for `inter_group`, or else the codec of `inter_node`.
    """

    intra_package: CodecConfig
    intra_hive: CodecConfig | None = None
    intra_node: CodecConfig
    inter_node: CodecConfig
    inter_group: CodecConfig | None = None
    inter_cluster: CodecConfig | None = None

    def __getitem__(self, tier: Tier) -> CodecConfig:
        codec = self._written(tier)
        if tier == "inter_group" and self.inter_group is None:
            return codec.model_copy(update={"codec": codec.traits.between_groups or codec.codec})
        return codec

    def _written(self, tier: Tier) -> CodecConfig:
        codec: CodecConfig | None = getattr(self, tier)
        return self._written(OPTIONAL_TIERS[tier]) if codec is None else codec

    @property
    def written(self) -> tuple[Tier, ...]:
        """Tiers with a written codec, innermost first."""
        return tuple(tier for tier in TIERS if getattr(self, tier) is not None)


#: No codec on any tier.
UNCODED = TierCodecs(intra_package=PLAIN, intra_node=PLAIN, inter_node=PLAIN)


class CodecsConfig(Frozen):
    """One codec for each role and tier.

    Attributes:
        tensor: Activations and their gradients in layers that are split over ranks, for example by DeepSpeed's AutoTP. This
            codec and the next two also apply to communicators that your model makes with `hzero.comm.for_dimension`.
        sequence: Activations and their gradients if sequences are split over ranks.
        expert: Activations and their gradients on the way to experts and back.
        pipeline: Activations and their gradients between the stages of a `PipelineModule`, in the codec of the outermost
            tier between two stages.
        optimizer: Updated weights of a `PipelineModule`, sent by the ranks that keep their optimizer states; Muon's matrices.
        exceptions: Codecs of parameters by name; `*` matches any part, as in `{"*norm*": "none"}`. The first
            pattern that matches a name sets the codec of weights and gradients on all tiers.
    """

    weights: TierCodecs
    gradients: TierCodecs
    tensor: TierCodecs = UNCODED
    sequence: TierCodecs = UNCODED
    expert: TierCodecs = UNCODED
    pipeline: TierCodecs = UNCODED
    optimizer: TierCodecs = UNCODED
    exceptions: dict[str, CodecConfig] = Field(default_factory=dict, alias="except")

    def __getitem__(self, role: Role | Dimension) -> TierCodecs:
        return getattr(self, role)

    @property
    def dimensions(self) -> tuple[Dimension, ...]:
        """The dimensions that have a codec other than ``none`` on a tier. The model must use them."""
        return tuple(one for one in DIMENSIONS if any(not self[one][tier].traits.plain for tier in TIERS))


class OtherScopes(Frozen):
    """Shard degrees of the parameters that a pattern matches.

    Attributes:
        weights: Shard degree of their weights; null is the degree of the other parameters.
        gradients: Shard degree of their gradients; null is the degree of the other parameters.
    """

    weights: Scope | None = None
    gradients: Scope | None = None


class ShardConfig(Frozen):
    """Shard degree of weights and of gradients; optimizer states are sharded over the world.

    Attributes:
        weights: Shard degree of the weights.
        gradients: Shard degree of the gradients.
        exceptions: Shard degrees of parameters by name, as in `{"*experts*": {"weights": "world"}}`. The first pattern that
            matches a name counts. A degree that you leave out has the value for the other parameters. Parameters with the
            same degrees share messages.
    """

    weights: Scope
    gradients: Scope
    exceptions: dict[str, OtherScopes] = Field(default_factory=dict, alias="except")


class NodeAllGather(Frozen):
    """The algorithm of the all-gathers between nodes: on tiers ``inter_node``, ``inter_group`` and ``inter_cluster``.

    Attributes:
        algorithm: Algorithm for short messages; long ones use the library's. `doubling` (Bruck et al. 1997) needs log2(nodes)
            rounds, while a ring needs one per node. `pairs` sends to every peer at once. The bytes are the same. `hzero links`
            measures all three, and prints the block if the library's algorithm is not the fastest.
        below_bytes: Messages of fewer bytes per rank are short.
    """

    algorithm: Algorithm = "library"
    below_bytes: int = Field(default=0, ge=0)

    def of(self, message_bytes: int) -> Algorithm:
        """The algorithm for a message of ``message_bytes`` bytes per rank."""
        return self.algorithm if message_bytes < self.below_bytes else "library"

    @model_validator(mode="after")
    def _is_used(self) -> NodeAllGather:
        if self.algorithm != "library" and not self.below_bytes:
            raise ValueError(f"found algorithm {self.algorithm!r} without below_bytes; expected both")
        return self


class GuardConfig(Frozen):
    """Checks of the training, on by default.

    A number instead of the block is ``discarded_steps``.

    Attributes:
        discarded_steps: Steps in a row that DeepSpeed may discard because the norm of the gradients is not finite, if loss
            scaling cannot help. Then the stage raises `hzero.DivergenceError` on all ranks. The message has the names of the
            parameters and the signal-to-noise ratio of each lossy tier. 0 means no limit, as in DeepSpeed.
        every: Optimizer steps between two audits. An audit also runs before the first step, and before the first step after a
            load. It compares secondary partitions with equal copies on other ranks. It also compares them with their owners'
            shards, unless they are rounded stochastically. If a weight differs, all ranks raise
            `hzero.StaleWeightsError` with its name. An audit also logs the signal-to-noise ratios of the codecs
            (`hzero.state(engine).ratios`), without `codecs.except`. 0 disables audits.
    """

    discarded_steps: int = Field(default=10, ge=0)
    every: int = Field(default=100, ge=0)


class CheckpointConfig(Frozen):
    """Safe saves and loads of DeepSpeed's checkpoints. The empty block, ``{}``, switches it on.

    A save is complete or absent, on all ranks; a file next to DeepSpeed's lists sizes and hashes. A load takes the newest
    complete checkpoint, on any number of ranks, and runs no code from it.

    Attributes:
        same_batch: Whether a resumed training keeps the number of samples in a step. The accumulation is adapted to the ranks.
            If no accumulation gives that number, the load raises an error.
        verify: Whether a load compares the hashes of all files, a share on each rank. Otherwise it compares sizes.
        trust: Whether files may contain more than tensors and plain types. Such files can run code when they are loaded.
    """

    same_batch: bool = True
    verify: bool = True
    trust: bool = False


class SequenceConfig(Frozen):
    """Sequences that a group of ranks shares, and that attention, hidden units and loss read in chunks.

    The ranks of a group get the same samples; each keeps every `parallel`-th part of a chunk. The ranks of a group are
    neighbours, on the inner tiers. Attention sends its chunks over the group with the codecs of `codecs.sequence`.

    Attributes:
        parallel: Ranks of a group. It must divide the world size and the model's attention heads.
        chunk: Tokens of a chunk on each rank.
        offload: Whether tensors saved for backward, and chunks of attention that are not in use, are kept in pinned memory of
            the host.
    """

    parallel: int = Field(default=1, ge=1)
    chunk: int = Field(default=4096, ge=1)
    offload: bool = True

    def check(self, count: int, of: str, key: str) -> None:
        """Raises `ConfigError` if groups cannot divide the ranks of the world or the attention heads of a model."""
        if not count or count % self.parallel:
            raise ConfigError(f"{key}: found {self.parallel}; expected a divisor of the {count} {of}")


def _groups(value: Any) -> Any:
    if value in (None, AUTOMATIC) or (type(value) is int and value >= 1):
        return value
    raise ValueError(f"found {reprlib.repr(value)}; expected a number of nodes, null for no groups, or {AUTOMATIC!r}")


Groups: TypeAlias = Annotated[int | Literal["automatic"] | None, BeforeValidator(_groups)]


class TopologyConfig(Frozen):
    """Places of the ranks: a source, or with `packages_per_node` a declared grid.

    Attributes:
        source: ``discover``, the default, finds the places; a file may describe the node. A preset's name declares the grid of
            such nodes. You may write the source instead of the block.
        nodes: Nodes of the world; null derives it from the world size.
        packages_per_node: Packages of a node.
        devices_per_package: Devices of a package.
        packages_per_hive: Packages of a hive, a part of a node with faster links inside than between hives; 1: the node has no
            hives.
        nodes_per_group: Nodes of a group, for example of one switch or cabinet; null for one group of all nodes. Tier
            ``inter_group`` joins the groups, so that collectives between nodes become two of fewer ranks. `automatic`, the
            default, makes groups from 64 nodes on, with the divisor of the number of nodes that is nearest to its square root.
            Together with `source` it overrides the source's.
        switch_nodes: Nodes of one switch group of the network; `automatic` prefers one of its divisors.
        clusters: Parts of the world that slow links connect, on tier ``inter_cluster``. Each has the same number of nodes and
            groups.
        order: Numbering of the ranks, slowest tier first. A tier that you leave out is placed next to the tier that it divides:
            ``intra_hive`` next to ``intra_node``, ``inter_group`` and ``inter_cluster`` next to ``inter_node``.
    """

    source: str = "discover"
    nodes: int | None = Field(default=None, ge=1, le=1_000_000)
    packages_per_node: int | None = Field(default=None, ge=1, le=1000)
    devices_per_package: int = Field(default=1, ge=1, le=1000)
    packages_per_hive: int = Field(default=1, ge=1)
    nodes_per_group: Groups = AUTOMATIC
    switch_nodes: int | None = Field(default=None, ge=1)
    clusters: int = Field(default=1, ge=1)
    order: tuple[Tier, ...] = TIERS[::-1]

    @field_validator("order", mode="before")
    @classmethod
    def _permutation(cls, value: Any) -> Any:
        """All tiers, slowest first."""
        written = tuple(map(str, value)) if isinstance(value, (list, tuple)) else ()
        if not set(BASE_TIERS) <= set(written) <= set(TIERS) or len(set(written)) < len(written):
            raise ValueError(
                f"found {reprlib.repr(value)}; expected inter_node, intra_node and intra_package in some order, slowest first, "
                f"and optionally {', '.join(OPTIONAL_TIERS)}"
            )
        return written

    @model_validator(mode="after")
    def _source_or_grid(self) -> TopologyConfig:
        written = [key for key in type(self).model_fields if key in self.model_fields_set]
        of_grid = [key for key in written if key not in ("source", "nodes_per_group")]
        if of_grid and "source" in written:
            raise ValueError(
                f".{of_grid[0]}: found together with source {self.source!r}, which states the places of ranks; expected only one"
            )
        if of_grid and self.packages_per_node is None:
            raise ValueError(".packages_per_node: missing")
        return self


def _source_alone(value: Any) -> Any:
    if value == "auto":  # not the default's name, since Accelerate and Trainer fill in values that are "auto"
        raise ValueError('found "auto"; expected "discover", which is the default, a file, a preset or a block')
    if not isinstance(value, (str, Mapping, TopologyConfig)):
        raise ValueError(
            f'found {reprlib.repr(value)}; expected "discover", a file, a preset, or '
            '{"nodes": .., "packages_per_node": .., "devices_per_package": ..}'
        )
    return {"source": value} if isinstance(value, str) else value


#: Bytes as the user writes them: a number, or a text with a unit.
_BYTES = re.compile(r"(\d{1,9}(?:\.\d{1,9})?) ?(kB|MB|GB|TB|KiB|MiB|GiB|TiB)")


def bytes_of(value: Any) -> int:
    """Parses bytes, such as ``64GB``. Raises `ValueError` with the message after the key."""
    if type(value) is int and value >= 0:
        return value
    if not isinstance(value, str) or (found := _BYTES.fullmatch(value)) is None:
        raise ValueError(f"found {reprlib.repr(value)}; expected bytes, or a text such as 64GB or 64GiB")
    base = 1024 if "i" in found[2] else 1000
    return int(float(found[1]) * base ** ("kMGT".index(found[2][0].replace("K", "k")) + 1))


Bytes: TypeAlias = Annotated[int, BeforeValidator(bytes_of)]


class MemoryConfig(Frozen):
    """Memory of a device, for preset ``fit``. A value is a number of bytes, or a text such as ``64GB``.

    Attributes:
        device: Memory of a device. Null measures what is free at the start; on CPU, that is divided among the ranks of a host.
        activations: Memory that stays free for activations and messages. Null keeps half of the memory beside ZeRO-3's states.
    """

    device: Bytes | None = None
    activations: Bytes | None = None


#: Sources for the machine on which a process runs. The block calls it ``discover``.
HERE = ("auto", "discover")
#: The key ``topology``. A string is a source.
Topology = Annotated[TopologyConfig, BeforeValidator(_source_alone)]


class Block(Frozen):
    """The keys of a block. `HZeroConfig` documents them."""

    preset: str = Field(json_schema_extra={"enum": list(PRESET_NAMES)})
    # Before the codecs that inherit it, so that an error names this key.
    block_size: int = Field(ge=16, le=512, multiple_of=16)
    shard: ShardConfig
    codecs: CodecsConfig
    rounding: Literal["none", "int8", "int4"] = "none"
    memory: MemoryConfig = MemoryConfig()
    links: str = MEASURE
    resident: Literal["decoded", "payload"] | None = None
    unit: Literal["layer", "module"] = "layer"
    unit_numel: int = Field(10**9, ge=0)  # as many as DeepSpeed keeps live by default
    error_feedback: TierList = ()
    refresh_message_bytes: int = Field(0, ge=0, le=1 << 30)
    boundary_message_bytes: int | None = Field(None, ge=0, le=1 << 24)
    node_all_gather: NodeAllGather = NodeAllGather()
    exact_evaluation: bool = False
    checksum: bool = False
    transport: TransportName = "torch"
    order: CollectiveOrder | None = None
    guard: GuardConfig = GuardConfig()
    checkpoint: CheckpointConfig | None = None
    sequence: SequenceConfig | None = None
    topology: Topology = TopologyConfig()

    @field_validator("guard", mode="before")
    @classmethod
    def _number_alone(cls, value: Any) -> Any:
        return {"discarded_steps": value} if isinstance(value, (int, float)) else value


class HZeroConfig(Block):
    """The block with its preset applied.

    Attributes:
        preset: Defaults of the other keys. Keys that you write override single values.
        shard: Shard degrees.
        codecs: Codecs per role and tier.
        block_size: Elements that share a scale; a codec may have its own.
        rounding: Codec of gradients: `none`; `int8`; or `int4`, which is between nodes only, with `int8` inside nodes. It is the
            one key by which a preset without rounding starts to round.
        memory: Memory that preset `fit` may use.
        links: Rates of the links for preset `fit`: `measure`, the default, measures them for a few seconds at the start. A file
            has the rates that `hzero links` has written; if it does not exist, the measurement of this run is written there.
        resident: Form of weights over the device. `decoded`, the default, decodes once per step into the weights' type.
            `payload` keeps the codec's bytes, which forward and backward decode at every use. Weights over a wider scope are
            always kept as payload. Forward reads decoded weights in place, so no module may write to its weights in forward,
            as ``torch.nn.Embedding`` with ``max_norm`` does.
        unit: Parameters in one gather of forward or backward: all of a `layer`, or of each `module` in it, such as a linear, as
            in stock DeepSpeed. Layers are the classes in the model's `_no_split_modules`; without these, modules of one class
            in a `ModuleList` or `Sequential`. DeepSpeed's leaf modules are kept. Set `module` for layers with many
            experts of which a forward uses few.
        unit_numel: Maximum elements of a layer that is gathered as a whole. A larger layer is divided into its children. This
            limits the memory of a device. DeepSpeed's `stage3_max_live_parameters` limits only what is live besides one layer.
        error_feedback: Tiers whose gradient encoding keeps its error (bfloat16) and adds it in the next step. The error starts at
            zero after a resume.
        refresh_message_bytes: Minimum bytes that a rank sends in one refresh message, 0 to 1 GiB. With 0 a message has
            DeepSpeed's `stage3_prefetch_bucket_size` elements, which are few bytes per rank on many ranks. `hzero links` prints
            the size from which latency is less than a tenth of a hop.
        boundary_message_bytes: Minimum bytes of a peer's part in a message of the outermost tier at the boundary, 0 to 16 MiB.
            Buckets with smaller parts wait and share a message, since with many peers latency dominates the time of a small
            part. Until then their float32 sums stay in memory. With 0 every bucket has a message. Default: 64 KiB if the tier
            has 16 ranks or more, else 0.
        node_all_gather: Algorithm of the all-gathers on tier ``inter_node``.
        exact_evaluation: Whether a forward in evaluation mode (`model.eval()`) reads the exact weights that checkpoints store.
            Logged evaluations, and the choice of the best checkpoint, then use the saved weights; otherwise they use the
            decoded weights. An evaluation then uses DeepSpeed's flat gathers over the world, which the wire log does not
            count. All ranks must change the mode together.
        checksum: Whether every message has a checksum of 16 bytes. CPUs compare it before they decode the message, GPUs before
            the optimizer steps. A difference stops the run. Costs two more passes over every message.
        transport: `torch` sends messages over the process group's backend. `mpi` sends them over mpi4py (extra `mpi`), for ranks
            that mpiexec or srun has started as MPI ranks. torch.distributed must be initialised in both cases.
        order: `strict` runs one collective at a time per device. `lanes` runs one at a time per tier, so tiers overlap. By
            default `strict` on ROCm, where RCCL can deadlock with several communicators in flight (ROCm/rccl#2191), and
            `lanes` elsewhere. All engines of a process have the same order. Messages between pipeline stages are not ordered.
        guard: Checks that stop a training if it diverges or its secondary partitions are wrong.
        checkpoint: Safe saves and loads of DeepSpeed's checkpoints; null leaves them to DeepSpeed.
        sequence: Long sequences, in chunks and over groups of ranks; null leaves the model as it is.
        topology: Places of the ranks. `discover`, the default, finds them; a preset's name or a file names a machine; a block
            declares one.
        written: The keys that the user has written, with ``shard.KEY`` and ``codecs.KEY``. The preset sets the others.
    """

    written: tuple[str, ...] = ()

    @property
    def by_module(self) -> str:
        """The setting that switches layers as units off. Empty if there is none."""
        return 'unit "module"' if self.unit == "module" else "" if self.unit_numel else "unit_numel 0"

    def in_scopes(self, weights: Scope, gradients: Scope) -> HZeroConfig:
        """The block with these shard degrees for all parameters, as if the user had written them."""
        written = (*self.written, "shard.weights", "shard.gradients")
        shard = ShardConfig(weights=weights, gradients=gradients)
        return self.model_copy(update={"shard": shard, "written": written})

    def laid_out(self, weights: Scope, gradients: Scope, exact: bool) -> HZeroConfig:
        """The block with these shard degrees, except for parameters with their own; without codec ``exact`` if not ``exact``."""
        shard = self.shard.model_copy(update={"weights": weights, "gradients": gradients})
        config = self.in_scopes(weights, gradients).model_copy(update={"shard": shard})
        if exact:
            return config
        tiers = {tier: getattr(self.codecs.weights, tier) for tier in TIERS}
        plain = {tier: PLAIN if codec and codec.traits.changes else codec for tier, codec in tiers.items()}
        codecs = self.codecs.model_copy(update={"weights": TierCodecs(**plain)})
        return config.model_copy(update={"codecs": codecs})


# ---- from a written block to its configuration ------------------------------------------------------------------------------


def parse_config(block: Any, path: str = "hzero") -> HZeroConfig:
    """Parses a block. Written values override the preset's, leaf by leaf.

    Args:
        block: The block as written.
        path: Key of the block, for messages.

    Raises:
        ConfigError: A key, preset, codec, tier or scope does not exist, a value has a wrong type, or values exclude each
            other. The message names the nearest possible value.
    """
    if not isinstance(block, Mapping):
        validated(Block, block, path)  # refuses it
    preset = block.get("preset", DEFAULT_PRESET)
    if isinstance(preset, str) and preset in _FORMER:
        raise ConfigError(f"{path}.preset: found {preset!r}, which is gone; expected {_FORMER[preset]}")
    if former := sorted({"refresh_differences", "full_refresh_every"} & block.keys()):
        raise ConfigError(
            f"{path}.{former[0]}: found a key that is gone; expected codec 'exact' in {path}.codecs.weights"
        )
    if preset not in PRESET_NAMES:
        raise one_of(f"{path}.preset", preset, PRESET_NAMES)
    start = _rounded(preset_of(preset), block.get("rounding", "none"))
    written, size = block.get("shard", {}), block.get("block_size", DEFAULT_BLOCK_SIZE)
    shard = {"weights": start.weights, "gradients": start.gradients}
    codecs = _codecs(start, block.get("codecs", {}), size)
    values = {**block, "preset": preset, "block_size": size, "shard": written, "codecs": codecs}
    if isinstance(written, Mapping):
        values["shard"] = {**shard, **written}
    parsed = validated(Block, values, path)
    _check_together(parsed, path)
    below = (f"{key}.{name}" for key in ("shard", "codecs") for name in block.get(key, {}))
    return HZeroConfig(**dict(parsed), written=(*block, *below))


def preset_of(name: str) -> Preset:
    """The defaults of a preset."""
    return PRESETS["lossless" if name == FIT else name]


def _rounded(start: Preset, rounding: Any) -> Preset:
    """The preset with the codec of gradients that key ``rounding`` names. pydantic refuses other values."""
    if rounding not in ("int8", "int4"):
        return start
    return start._replace(gradients_codec="int8", between_nodes=rounding)


def _check_together(block: Block, path: str) -> None:
    """Refuses values that exclude each other."""

    def refuse(key: str, found: str, possible: str) -> ConfigError:
        return ConfigError(f"{path}.{key}: {found}; expected {possible}")

    if "rounding" in block.model_fields_set and preset_of(block.preset).gradients_codec != "none":
        found = f"found {block.rounding!r} with preset {block.preset!r}, which has its own codecs of gradients"
        raise refuse("rounding", found, f"a preset without rounding; {path}.codecs.gradients sets other codecs")
    for key in ("memory", "links"):
        if key in block.model_fields_set and block.preset != FIT:
            raise refuse(key, f"found with preset {block.preset!r}, which chooses nothing", f"preset {FIT!r}")
    scope = block.shard.weights
    if block.resident == "decoded" and scope != "device":
        raise refuse("resident", f"found 'decoded' with weights over the {scope}", "weights over the device")
    for key, patterns in (("shard", block.shard.exceptions), ("codecs", block.codecs.exceptions)):
        if any(not pattern.strip() for pattern in patterns):
            raise refuse(f"{key}.except", "found an empty pattern", "one such as *norm*")
    of_role = {role: block.codecs[role] for role in (*ROLES, *DIMENSIONS)}
    codecs = {f"{role}.{tier}": tiers[tier] for role, tiers in of_role.items() for tier in tiers.written}
    codecs |= {f"except.{pattern}": codec for pattern, codec in block.codecs.exceptions.items()}
    for key, codec in codecs.items():
        role, traits = key.partition(".")[0], codec.traits
        if traits.changes and role != "weights":
            found = f"found {codec.codec!r}, which sends changes of weights"
            raise refuse(f"codecs.{key}", found, f"{', '.join(FIXED)}; {codec.codec!r} only in {path}.codecs.weights")
        if not traits.fixed and not traits.changes and role not in DIMENSIONS:
            found = f"found {codec.codec!r}, whose messages have no fixed size"
            raise refuse(f"codecs.{key}", found, ", ".join(FIXED))


def _codecs(start: Preset, written: Any, size: Any) -> Any:
    """The preset's codecs, overridden leaf by leaf by the written ones."""
    if not isinstance(written, Mapping):
        return written
    codecs = dict(written)
    for role in (*ROLES, *DIMENSIONS):
        preset = {tier: start.codec_of(role, tier) for tier in TIERS}
        codecs[role] = codecs_by_tier(written.get(role, {}), preset, size, groups_as_nodes=role in DIMENSIONS)
    if isinstance(exceptions := written.get("except"), Mapping):
        codecs["except"] = {pattern: _leaf(codec, None, size) for pattern, codec in exceptions.items()}
    return codecs


def codecs_by_tier(written: Any, default: Mapping[Any, Any], size: Any, *, groups_as_nodes: bool) -> Any:
    """Completes a written role of `CodecsConfig` to the block of `TierCodecs`.

    A value that is neither a name nor a block stays as it is, so that pydantic refuses it.

    Args:
        written: One codec for all tiers, or codecs by tier.
        default: Default codecs of the tiers.
        size: The ``block_size`` of codecs that write none.
        groups_as_nodes: Whether tier ``inter_group`` has the codec of ``inter_node`` by default. Copies and activations need
            this, since all of their bytes cross groups. Otherwise `TierCodecs` chooses.
    """
    if isinstance(written, str) or (isinstance(written, Mapping) and "codec" in written):
        written = dict.fromkeys(BASE_TIERS, written)
    if not isinstance(written, Mapping):
        return written
    tiers = {**{tier: {} for tier in BASE_TIERS}, **written}
    if groups_as_nodes:
        tiers = {"inter_group": tiers["inter_node"], **tiers}
        default = {**default, "inter_group": default["inter_node"]}
    return {tier: _leaf(codec, default.get(tier), size) for tier, codec in tiers.items()}


def _leaf(written: Any, default: Written | None, size: Any) -> Any:
    """A codec's block: the written keys, and the default's if no codec is written, since settings belong to one codec."""
    written = written if isinstance(written, Mapping) else {"codec": written}
    kept = {} if default is None or "codec" in written else default
    return {"block_size": size, **(kept if isinstance(kept, Mapping) else {"codec": kept}), **written}
