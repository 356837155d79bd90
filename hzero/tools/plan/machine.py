"""Machine: the constants of a machine and its software, each with its source, and the costs of a step's tasks.

The cost of a task is a latency, and seconds of every resource that it uses. All-gather and reduce-scatter are rings, since RCCL
and NCCL have no other algorithm for them. A flat ring over p ranks has p - 1 steps, and each step takes at least the time of a
message to the next rank. An all-reduce is a ring on few nodes and a tree on many. An all-to-all sends a message to every peer.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import yaml
from pydantic import Field, FiniteFloat, model_validator

from hzero.config import NET_TIERS, PLAIN, Algorithm, CollectiveOrder, Tier
from hzero.errors import ConfigError, one_of
from hzero.files import read_text
from hzero.program.program import Cross
from hzero.schema import Frozen, validated
from hzero.topology import Grid

Positive = Annotated[int, Field(ge=1)]
#: Resource that transfers and kernels share. ``intra_package`` and ``intra_node`` are a device's links inside its package and
#: between packages. ``inter_node`` are the NICs of a node, and ``uplink`` the links between switch groups.
Resource = Literal["intra_package", "intra_node", "inter_node", "uplink", "memory", "compute"]
_Algorithm: TypeAlias = Algorithm | Literal["hierarchical"]
#: Bytes that Adam reads and writes per element: gradient, float32 master and two moments, 16-bit weight.
ADAM_BYTES = 4 + 2 * 12 + 2
#: From RCCL 2.30 on, all-gathers over at least this many nodes are hierarchical, up to this many bytes. A communicator has a
#: buffer of that size for them (ROCm/rocm-systems#6140, #3856). Reduce-scatters need RCCL_HIERARCHICAL_REDUCE_SCATTER=1 (#7851).
HIERARCHICAL = {8: 64 << 20, 16: 128 << 20}
#: Error of collectives where nothing was measured.
UNKNOWN_ERROR = 0.3
_DIVISORS = ("compute_tflops", "attention_share", "ll_share", "fill_kib")
_OF_COLLECTIVES = re.compile(
    "(launch|stolen|ring_|level|fill_us|fill_node|tree_fill_us|pair|intra_|flat_|node_|net_).*"
)
_FOLDER = Path(__file__).parent / "profiles"
#: Names and meanings of the constants of every profile.
CONSTANTS: dict[str, str] = yaml.safe_load((_FOLDER.parent / "constants.yaml").read_text())


# ---- constants ----------------------------------------------------------------------------------------------------------


class Source(Frozen):
    """Source of figures.

    Attributes:
        what: Publication, file or command.
        date: Date of the measurement or publication.
        stack: Software of the measurement; ``none`` if nothing ran.
        kind: ``measured``; ``calibrated`` on measured rows; ``nominal``, from a vendor or a library's tables; ``assumed``,
            without a publication.
    """

    what: str
    date: str
    stack: str
    kind: Literal["measured", "calibrated", "nominal", "assumed"]


class Constant(Frozen):
    """One figure.

    Attributes:
        value: Value in the unit at the end of its name.
        source: Name of an entry of ``sources``.
    """

    value: Annotated[FiniteFloat, Field(ge=0, le=1e30)]
    source: str


class Profile(Frozen):
    """A machine and its software.

    Attributes:
        name: Name for `hzero plan`.
        about: Description, on one line.
        nodes: Nodes of the machine.
        packages_per_node: Packages of a node.
        devices_per_package: Devices of a package.
        visible: Devices that a rank sees under the machine's usual launch line: 1, or null for all of its node.
        group_nodes: Nodes of a switch group; null: one group. A job's nodes fill one group after the other.
        taper: Total bandwidth of a group's nodes, divided by the bandwidth of the group's links to other groups.
        tree_nodes: Minimum number of nodes for which an all-reduce is a tree.
        order: The stage's order of collectives by default: ``strict`` with RCCL, one at a time on a device.
        library: Library of collectives of the figures, with its version.
        error: Relative error that 9 of 10 measured collectives keep which were not used for calibration; null: there are none.
        step_error: The same of whole training steps.
        sources: Sources by name.
        constants: Constants by name.
    """

    name: str
    about: str
    nodes: Positive
    packages_per_node: Positive
    devices_per_package: Positive
    visible: Literal[1] | None = None
    group_nodes: Positive | None = None
    taper: Annotated[FiniteFloat, Field(ge=1, le=1e6)] = 1.0
    tree_nodes: Positive = 16
    order: CollectiveOrder = "lanes"
    library: str = ""
    error: Annotated[FiniteFloat, Field(gt=0, lt=1)] | None = None
    step_error: Annotated[FiniteFloat, Field(gt=0, lt=1)] | None = None
    sources: dict[str, Source]
    constants: dict[str, Constant]

    @model_validator(mode="after")
    def _sourced(self) -> Profile:
        for name, constant in {**dict.fromkeys(CONSTANTS), **self.constants}.items():
            if name not in CONSTANTS:
                raise one_of("constants", name, CONSTANTS, "key")
            if constant is None:
                raise ValueError(f"constants.{name}: missing")
            if constant.value < 1e-9 and (name.endswith("_gb_s") or name in _DIVISORS):
                raise ValueError(f"constants.{name}.value: found {constant.value:g}; expected at least 1e-9")
            if constant.value > 1 and name.endswith("_share"):
                raise ValueError(f"constants.{name}.value: found {constant.value:g}; expected a share of at most 1")
            if constant.source not in self.sources:
                raise one_of(f"constants.{name}.source", constant.source, self.sources)
        return self

    @property
    def hierarchical(self) -> bool:
        """Whether the library gathers hierarchically: RCCL 2.30 and later."""
        version = re.fullmatch(r"RCCL (\d+)\.(\d+)\S*", self.library)
        return version is not None and (int(version[1]), int(version[2])) >= (2, 30)

    def value(self, name: str) -> float:
        """A constant's value."""
        return self.constants[name].value

    def check(self, grid: Grid) -> None:
        """Raises `ConfigError` if this machine cannot have such a grid."""
        found, expected = (f"{one.packages_per_node} x {one.devices_per_package}" for one in (grid, self))
        if found != expected:
            raise ConfigError(f"profile {self.name}: found nodes of {found} devices; expected {expected}")
        for key, count in (("packages_per_hive", grid.packages_per_hive), ("clusters", grid.clusters)):
            if count > 1:
                raise ConfigError(f"topology.{key}: found {count}; expected 1, without rates in profile {self.name}")
        if grid.nodes > self.nodes:
            raise ConfigError(f"nodes: found {grid.nodes:,}; expected at most the {self.nodes:,} of {self.name}")

    @property
    def slower(self) -> Profile:
        """The profile with collectives that take more time and compute, by their error or `UNKNOWN_ERROR`."""
        error = 1 + (self.error or UNKNOWN_ERROR)
        values = {name: self.value(name) for name in CONSTANTS if _OF_COLLECTIVES.match(name)}
        values = {name: value / error if name.endswith("_gb_s") else value * error for name, value in values.items()}
        values["stolen_share"] = min(values["stolen_share"], 1.0)
        return self.with_values(Source(what="their error", date="", stack="", kind="calibrated"), **values)

    def with_values(self, source: Source, **values: float) -> Profile:
        """The profile with other values of some constants, from one source."""
        constants = self.constants | {name: Constant(value=value, source="given") for name, value in values.items()}
        return self.model_copy(update={"constants": constants, "sources": {**self.sources, "given": source}})


def profile_names() -> list[str]:
    """Names of the profiles that come with hzero."""
    return sorted(file.stem for file in _FOLDER.glob("*.yaml"))


def _shipped(name: str) -> Path:
    if name not in profile_names():
        raise one_of("profile", name, profile_names())
    return _FOLDER / f"{name}.yaml"


def load_profile(name: str) -> Profile:
    """Loads a profile by name, or from a file ``*.yaml``, completed by the profile that it ``extends``.

    Raises:
        ConfigError: The profile does not exist, or a constant is missing or wrong.
    """
    path = Path(name) if name.endswith(".yaml") else _shipped(name)
    text = read_text(path)
    try:
        content: Any = yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"profile: {str(path)!r} is not YAML: {' '.join(str(error).split())}") from None
    if isinstance(content, dict) and "extends" in content:
        base = load_profile(_shipped(str(content.pop("extends"))).stem).model_dump(exclude_none=True)
        for key in ("sources", "constants"):
            if isinstance(own := content.get(key, {}), dict):
                content[key] = {**base[key], **own}
        content = {**base, **content}
    return validated(Profile, content, f"{name}:")


def gather_buffer(nodes: int) -> int:
    """Bytes of a communicator's buffer for hierarchical all-gathers over ``nodes`` nodes; 0 without such a buffer."""
    return max((most for least, most in HIERARCHICAL.items() if nodes >= least), default=0)


# ---- costs --------------------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """A part of a phase.

    Attributes:
        seconds: Its time without contention.
        shares: Share of every resource that it uses at full speed.
    """

    seconds: float
    shares: dict[Resource, float]


@dataclass(frozen=True)
class Phase:
    """A phase of a task.

    Attributes:
        latency_s: Seconds without use of any resource.
        work: Seconds of each resource after the latency, without contention. The longest determines the time.
    """

    latency_s: float
    work: Mapping[Resource, float] = field(default_factory=dict)

    @property
    def alone_s(self) -> float:
        """Its time without contention."""
        return self.latency_s + max(self.work.values(), default=0.0)

    @cached_property
    def parts(self) -> list[Part]:
        """Its latency, and its work if there is any."""
        longest = max(self.work.values(), default=0.0)
        shares = _shares(tuple((key, value / longest) for key, value in self.work.items() if value))
        return [Part(self.latency_s, _shares(())), *[Part(longest, shares)] * (longest > 0)]


@functools.lru_cache(1 << 14)
def _shares(shares: tuple[tuple[Resource, float], ...]) -> dict[Resource, float]:
    """One object for equal shares, so that `hzero.tools.plan.step.simulate` recognises combinations by identity."""
    return dict(shares)


class Machine:
    """Costs of collectives, kernels and compute on a machine of accelerators. All groups of a kind run at once.

    Attributes:
        grid: The devices; with tensor parallelism, one device of every tensor group.
        profile: The constants.
        tensor: Devices of a tensor group, neighbours in a node.

    Args:
        grid: All devices.
        profile: The constants.
        tensor: Devices of a tensor group.

    Raises:
        ConfigError: The profile's machine cannot have such a grid.
    """

    def __init__(self, grid: Grid, profile: Profile, tensor: int = 1) -> None:
        profile.check(grid)
        if tensor > 1:
            gcds = max(grid.devices_per_package // tensor, 1)
            gpus = grid.scope_size("node") // tensor // gcds
            grid = replace(grid, packages_per_node=gpus, devices_per_package=gcds)
        self.grid, self.profile, self.tensor = grid, profile, tensor
        self._value = profile.value

    def transfer(self, crossing: Cross, size: float, algorithm: _Algorithm = "library") -> Phase:
        """Time of one collective.

        Args:
            crossing: The collective.
            size: Bytes of the whole array over a group.
            algorithm: Algorithm of an all-gather between nodes. ``hierarchical`` is RCCL's from 2.30 on, for the sizes that
                RCCL uses it for.
        """
        if crossing.ranks == 1 or not size:
            return Phase(0.0)
        if crossing.kind == "all_to_all" or (algorithm == "pairs" and set(crossing.tiers) <= set(NET_TIERS)):
            phase = self._pairs(crossing, size)
        elif crossing.kind == "all_reduce":
            phase = self._all_reduce(crossing, size)
        else:
            phase = self._ring(crossing, size, algorithm)
        stolen = self._value("stolen_share") * max(phase.work.values(), default=0.0)
        return Phase(phase.latency_s, {**phase.work, "compute": stolen}) if stolen else phase

    def places(self, crossing: Cross) -> tuple[int, int, int]:
        """Nodes of a group, its ranks on each node, and the number of groups that share a node."""
        nodes = math.prod(self.grid.size(tier) for tier in crossing.tiers if tier in NET_TIERS)
        ranks = crossing.ranks // nodes
        return nodes, ranks, self.grid.scope_size("node") * self.tensor // ranks

    def tensor_reduce(self, size: float) -> Phase:
        """An all-reduce of ``size`` bytes over a tensor group."""
        gcds = self.profile.devices_per_package
        both: tuple[Tier, ...] = ("intra_package", "intra_node")
        tiers = both[:1] if self.tensor <= gcds else both if gcds > 1 else both[1:]
        return self.transfer(Cross("gradients", "all_reduce", tiers, self.tensor, PLAIN, 1), size)

    def message(self, size: float) -> float:
        """Seconds for every device to send ``size`` bytes to a device of another node, and to receive as many."""
        latency = self._value("launch_us") + self._value("pair_us")
        return latency / 1e6 + self._seconds(size * self.grid.scope_size("node") * self.tensor, "net_rails_gb_s")

    def _seconds(self, sent: float, rate: str) -> float:
        return sent / self._value(rate) / 1e9

    def _inside(self, crossing: Cross, sent: float, pairs: bool) -> dict[Resource, float]:
        """Seconds of a node's links for the bytes that a device sends to the other devices of its group on the node."""
        within, how = [tier for tier in crossing.tiers if tier not in NET_TIERS], "pairs" if pairs else "ring"
        if not within:
            return {}
        if within == ["intra_package"]:
            return {"intra_package": self._seconds(sent, "intra_package_gb_s")}
        if within == ["intra_node"]:
            return {"intra_node": self._seconds(sent, f"intra_node_{how}_gb_s")}
        seconds = self._seconds(sent, f"flat_{how}_gb_s")
        return {"intra_package": seconds, "intra_node": seconds}

    def _ring(self, crossing: Cross, size: float, algorithm: _Algorithm) -> Phase:
        nodes, ranks, groups = self.places(crossing)
        sent = size * (crossing.ranks - 1) / crossing.ranks
        work = self._inside(crossing, sent, pairs=False)
        between, inside, launches = nodes - 1, crossing.ranks - nodes, 1
        if algorithm == "hierarchical" and crossing.kind == "all_gather" and size <= gather_buffer(nodes):
            inside = ranks - 1  # devices gather their parts between the nodes first, and then all parts inside
        if nodes > 1:
            work["inter_node"] = self._seconds(sent * groups, "net_ring_gb_s" if ranks > 1 else "net_rails_gb_s")
            doubling = algorithm == "doubling" and ranks == 1
            if doubling:
                between = launches = (nodes - 1).bit_length()  # every round is one exchange
            work |= self._uplink(work["inter_node"], nodes, crossing, neighbours=not doubling)
        choices = []
        for protocol, share in (("", 1.0), ("_ll", self._value("ll_share"))):
            steps = inside * self._value(f"ring_inside{protocol}_us") + between * self._value(f"ring_net{protocol}_us")
            slowed = {resource: seconds / share for resource, seconds in work.items()}
            choices.append(Phase((launches * self._value("launch_us") + steps) / 1e6, slowed))
        return min(choices, key=lambda phase: phase.alone_s)

    def _pairs(self, crossing: Cross, size: float) -> Phase:
        nodes, ranks, groups = self.places(crossing)
        part = size / crossing.ranks
        work = self._inside(crossing, part * (ranks - 1), pairs=True)
        latency = self._value("launch_us") + (nodes - 1) * ranks * self._value("pair_us")
        if nodes > 1:
            # Every rank of the node sends to all ranks of the group on other nodes.
            work["inter_node"] = self._seconds(part * (nodes - 1) * ranks * ranks * groups, "net_rails_gb_s")
            work |= self._uplink(work["inter_node"], nodes, crossing)
        return Phase(latency / 1e6, work)

    def _uplink(self, node_s: float, nodes: int, crossing: Cross, *, neighbours: bool = False) -> dict[Resource, float]:
        """Seconds of the links between switch groups.

        Of messages to all peers, the share of the nodes outside the switch group leaves it. A ring, and nearly all edges of a
        tree, join neighbours. Nodes are numbered group by group, so one message per group leaves. On ``inter_group`` all leave.
        """
        group = self.profile.group_nodes
        if group is None or ("inter_node" in crossing.tiers and nodes <= group):
            return {}
        leaving = node_s * self.profile.taper
        if "inter_node" in crossing.tiers:
            leaving *= 1 / group if neighbours else (nodes - group) / nodes
        return {"uplink": leaving}

    def _all_reduce(self, crossing: Cross, size: float) -> Phase:
        nodes, ranks, groups = self.places(crossing)
        levels, tree = math.log2(nodes), nodes == 2 or nodes >= self.profile.tree_nodes
        filled = size / (size + 1024 * self._value("fill_kib"))
        latency = self._value("launch_us") + levels * self._value("level_us")
        latency += filled * self._value("fill_node_us") * (ranks > 1)
        if tree:
            # The best chunks of a pipeline take time by the root of the size (2 x root of its latency x its transfer). From
            # some size on, chunks do not grow. All groups of a node share its NICs.
            chunks = math.sqrt(min(size * groups / 2**20, self._value("tree_fill_mib")))
            latency += levels**2 * chunks * self._value("tree_fill_us")
        else:
            latency += filled * levels * self._value("fill_us")
        work: dict[Resource, float] = {}
        if ranks > 1:
            inside = 2 * size * (ranks - 1) / ranks
            if "intra_package" in crossing.tiers and "intra_node" in crossing.tiers:
                seconds = self._seconds(inside, "node_all_reduce_gb_s")
                work |= {"intra_package": seconds, "intra_node": seconds}
            else:
                work |= self._inside(crossing, inside, pairs=False)
        if nodes > 1:
            sent = 2 * size if tree else 2 * size * (crossing.ranks - 1) / crossing.ranks
            if nodes == 2:  # each of the two trees is one message each way
                sent = size
            work["inter_node"] = self._seconds(sent * groups, "net_tree_gb_s" if tree else "net_all_reduce_gb_s")
            work |= self._uplink(work["inter_node"], nodes, crossing, neighbours=True)
        return Phase(latency / 1e6, work)

    def kernel(self, touched: float) -> Phase:
        """A codec's kernel that reads and writes ``touched`` bytes."""
        return Phase(self._value("kernel_us") / 1e6, {"memory": self._seconds(touched, "hbm_gb_s")})

    def compute(self, flops: float, tokens: int, moved: float = 0.0) -> Phase:
        """``flops`` operations in a micro-batch of ``tokens`` tokens per rank, and kernels that move ``moved`` bytes."""
        host, memory = self._value("host_us") / 1e6, self._seconds(moved, "hbm_gb_s")
        return Phase(host, {"compute": flops / self.rate(tokens) + memory, "memory": memory}) if flops else Phase(host)

    def rate(self, tokens: int) -> float:
        """Operations per second of a device. Short micro-batches have a lower rate."""
        return self._value("compute_tflops") * 1e12 * tokens / (tokens + self._value("half_tokens"))

    def host(self, out: float, back: float) -> float:
        """Seconds for every device to copy ``out`` bytes to the host's memory and ``back`` bytes from it, at the same time."""
        link = self._seconds(max(out, back), "host_gb_s")
        return max(link, self._seconds((out + back) * self.grid.scope_size("node") * self.tensor, "ddr_gb_s"))

    def optimizer(self, numel: int) -> Phase:
        """Adam on a rank's ``numel`` elements."""
        return Phase(self._value("step_us") / 1e6, {"memory": self._seconds(numel * ADAM_BYTES, "hbm_gb_s")})
