"""Profile: the constants of a machine and its software, each with its source, as a data file."""

from __future__ import annotations

import functools
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, FiniteFloat, model_validator

from hzero.files import read_small
from hzero.sharding.memory import CHANNELS
from hzero.validation import ConfigError, Frozen, one_of, validated

Positive = Annotated[int, Field(ge=1)]
_FOLDER = resources.files("hzero") / "model" / "profiles"


class Source(Frozen):
    """Where figures come from.

    Attributes:
        what: Publication, file or command.
        date: When it was measured or written.
        stack: Software that it was measured with; ``none`` where nothing ran.
        kind: ``measured``; ``calibrated`` on measured rows; ``nominal``, by a vendor or from a library's tables; ``assumed``,
            by nobody.
    """

    what: str
    date: str
    stack: str
    kind: Literal["measured", "calibrated", "nominal", "assumed"]


class Constant(Frozen):
    """One figure.

    Attributes:
        value: In the unit that its name ends in.
        source: Name of an entry of ``sources``.
    """

    value: Annotated[FiniteFloat, Field(ge=0)]
    source: str


class Constants(Frozen):
    """Figures of a machine. Rates are one way, in 1e9 bytes per second; bytes are those that a rank or a node sends.

    Attributes:
        memory_gb: Memory of a device.
        compute_tflops: Rate of matrix products that long batches approach.
        half_tokens: Tokens of a micro-batch with which compute reaches half of it.
        hbm_gb_s: Copy rate of a device's memory.
        kernel_us: Start of one kernel.
        stolen_share: Share of compute that a collective under way takes.
        jitter_share: Standard deviation of a node's compute time, as a share of it.
        launch_us: Least time of a collective.
        ring_inside_us: Step of a ring between devices of a node, protocol Simple.
        ring_net_us: Step of a ring between nodes, protocol Simple.
        ring_inside_ll_us: The same by protocol LL, which short messages take.
        ring_net_ll_us: The same by protocol LL.
        ll_share: Share of the bandwidth that protocol LL reaches.
        level_us: Each doubling of the nodes, in an all-reduce.
        fill_us: Each doubling of the nodes, until a long message fills the pipeline of an all-reduce.
        fill_node_us: The same inside the first node.
        fill_kib: Size of the message, in 1024 bytes, with which half of that time passes.
        pair_us: Message to one peer, where a rank sends to all peers.
        gcd_gb_s: All-gather in a package, per device.
        gpu_ring_gb_s: Ring over the packages of a node, per device, all devices of a package at once.
        gpu_pairs_gb_s: The same by messages to all peers.
        flat_ring_gb_s: Ring over all devices of a node.
        flat_pairs_gb_s: Messages to all devices of a node, per device.
        node_all_reduce_gb_s: Ring of an all-reduce over all devices of a node.
        net_ring_gb_s: Flat ring of all-gather and reduce-scatter, per node.
        net_rails_gb_s: As many groups at once as a node has devices, one rank of each per node; per node.
        net_all_reduce_gb_s: Flat ring of an all-reduce, per node.
        net_tree_gb_s: Tree of an all-reduce, per node.
        step_us: Fixed time of an optimizer step: norms, scalars, the host.
        host_us: Host work per bucket and use, which nothing hides.
        core_s_per_gb: Processor seconds per 1e9 bytes sent; 0 where network and device move them.
        codec_s_per_gb: Processor seconds per 1e9 bytes that a codec reads; 0 where it runs on the device's memory.
        optimizer_s_per_g: Processor seconds of the optimizer per 1e9 elements; 0 where memory sets its pace.
    """

    memory_gb: Constant
    compute_tflops: Constant
    half_tokens: Constant
    hbm_gb_s: Constant
    kernel_us: Constant
    stolen_share: Constant
    jitter_share: Constant
    launch_us: Constant
    ring_inside_us: Constant
    ring_net_us: Constant
    ring_inside_ll_us: Constant
    ring_net_ll_us: Constant
    ll_share: Constant
    level_us: Constant
    fill_us: Constant
    fill_node_us: Constant
    fill_kib: Constant
    pair_us: Constant
    gcd_gb_s: Constant
    gpu_ring_gb_s: Constant
    gpu_pairs_gb_s: Constant
    flat_ring_gb_s: Constant
    flat_pairs_gb_s: Constant
    node_all_reduce_gb_s: Constant
    net_ring_gb_s: Constant
    net_rails_gb_s: Constant
    net_all_reduce_gb_s: Constant
    net_tree_gb_s: Constant
    step_us: Constant
    host_us: Constant
    core_s_per_gb: Constant
    codec_s_per_gb: Constant
    optimizer_s_per_g: Constant


#: Constants that others are divided by: a rate of 0 is no rate.
_DIVIDING = (
    "compute_tflops",
    "ll_share",
    "fill_kib",
    *(name for name in Constants.model_fields if name.endswith("_gb_s")),
)


class Profile(Frozen):
    """A machine and its software.

    Attributes:
        name: As in `hzero plan`.
        about: What it stands for, on one line.
        library: Which collectives it has: ``rccl`` (NCCL alike) or ``gloo``.
        nodes: Nodes of the machine.
        gpus_per_node: Packages of a node.
        gcds_per_gpu: Devices of a package.
        visible: Devices that a rank sees under the machine's usual launch line; null: all of its node.
        group_nodes: Nodes of a switch group; null: one group. A job's nodes fill one group after the other.
        taper: Bandwidth of a group's nodes together over that of its links to other groups.
        tree_nodes: Nodes from which an all-reduce is a tree.
        cores: Processor cores that the ranks of all nodes share; null: every rank has its own device.
        overlap: Whether FSDP and DeepSpeed's reductions overlap with compute: not on processors.
        error: Error on rows that were not used for calibration, as a share; null: no such rows.
        checked: What these rows are: whole steps, or collectives alone.
        sources: By name.
        constants: The figures.
    """

    name: str
    about: str
    library: Literal["rccl", "gloo"]
    nodes: Positive
    gpus_per_node: Positive
    gcds_per_gpu: Positive
    visible: Positive | None = None
    group_nodes: Positive | None = None
    taper: Annotated[FiniteFloat, Field(ge=1)] = 1.0
    tree_nodes: Positive = 16
    cores: Positive | None = None
    overlap: bool = True
    error: Annotated[FiniteFloat, Field(gt=0, lt=1)] | None = None
    checked: Literal["steps", "collectives"] = "collectives"
    sources: dict[str, Source]
    constants: Constants

    @model_validator(mode="after")
    def _sourced(self) -> Profile:
        if self.visible not in (None, 1, self.gpus_per_node * self.gcds_per_gpu):
            raise ValueError(f"visible: found {self.visible}, possible: 1, or null for all devices of the node")
        for name in Constants.model_fields:
            if self.value(name) == 0 and name in _DIVIDING:
                raise ValueError(f"constants.{name}.value: found 0, expected more than 0")
            if self.value(name) > 1 and name.endswith("_share"):
                raise ValueError(f"constants.{name}.value: found {self.value(name):g}, expected a share of at most 1")
            if (source := getattr(self.constants, name).source) not in self.sources:
                raise ValueError(f"constants.{name}.source: found {source!r}, possible: {', '.join(self.sources)}")
        return self

    def value(self, name: str) -> float:
        """A constant's value."""
        return float(getattr(self.constants, name).value)

    @property
    def channels(self) -> int:
        """Channels of a communicator, each with buffers; none on processors."""
        return 0 if self.library == "gloo" else CHANNELS

    @property
    def groups(self) -> int:
        """Switch groups of the machine."""
        return -(-self.nodes // (self.group_nodes or self.nodes))

    def spread(self, nodes: int) -> Profile | None:
        """The machine for a job whose nodes are spread evenly over all switch groups, in place of packed into few.

        The job has the share of a group's links to others that its nodes have of the group: other jobs use theirs.

        Returns:
            None where that makes no difference.
        """
        share = -(-nodes // self.groups)
        if self.group_nodes is None or share >= min(nodes, self.group_nodes):
            return None
        return self.model_copy(update={"group_nodes": share})

    def with_values(self, source: Source, **values: float) -> Profile:
        """The profile with other values of some constants, from one source."""
        constants = self.constants.model_dump()
        constants |= {name: {"value": value, "source": "given"} for name, value in values.items()}
        return self.model_copy(
            update={"constants": Constants(**constants), "sources": {**self.sources, "given": source}}
        )


def profile_names() -> list[str]:
    """Names of the profiles that come with hzero."""
    return sorted(file.name.removesuffix(".yaml") for file in _FOLDER.iterdir() if file.name.endswith(".yaml"))


def load_profile(name: str) -> Profile:
    """A profile by its name, or from a file whose name ends in ``.yaml``.

    Raises:
        ConfigError: There is none, it lacks a constant, which the message names, or it extends itself.
    """
    if not name.endswith(".yaml"):
        return _shipped(name)
    content = _content(Path(name), ())
    return validated(Profile, content, f"{name}:")


@functools.lru_cache(maxsize=32)
def _shipped(name: str) -> Profile:
    if name not in profile_names():
        raise one_of("profile", name, profile_names(), "profile")
    return validated(Profile, _content(Path(str(_FOLDER / f"{name}.yaml")), ()), f"{name}:")


def _content(path: Path, extending: tuple[Path, ...]) -> Any:
    """The keys of a file, those of what it extends included.

    Args:
        path: The file.
        extending: Files that lead here, the first first.
    """
    if (real := path.resolve()) in extending:
        chain = " -> ".join(one.name for one in (*extending[extending.index(real) :], real))
        raise ConfigError(f"profile: {str(path)!r} extends itself: {chain}")
    try:
        content: Any = yaml.safe_load(read_small(path).decode())
    except OSError as error:
        raise ConfigError(f"profile: cannot read {str(path)!r}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"profile: {str(path)!r} is not UTF-8: {error.reason} at byte {error.start}") from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"profile: {str(path)!r} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict) or (base := content.pop("extends", None)) is None:
        return content
    if not isinstance(base, str):
        raise ConfigError(f"profile: {str(path)!r}: extends: found {base!r}, expected a profile's name or a .yaml")
    if base.endswith(".yaml"):  # beside the file that names it
        parent = _content(path.parent / base, (*extending, real))
    else:
        parent = _shipped(base).model_dump(exclude_none=True)
    if not isinstance(parent, dict):
        return parent
    for key in ("sources", "constants"):
        own, theirs = content.get(key) or {}, parent.get(key) or {}
        if isinstance(own, dict) and isinstance(theirs, dict):
            content[key] = {**theirs, **own}
    return {**parent, **content}
