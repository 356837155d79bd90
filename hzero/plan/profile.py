"""Profile: the constants of a machine and its software, each with its source, as a data file."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, FiniteFloat, model_validator

from hzero.config import CollectiveOrder
from hzero.files import read_text
from hzero.topology import Grid
from hzero.validation import ConfigError, Frozen, one_of, validated

Positive = Annotated[int, Field(ge=1)]
_FOLDER = Path(__file__).parent / "profiles"


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


#: Names of the constants that every profile has, and their meanings.
CONSTANTS: dict[str, str] = yaml.safe_load((_FOLDER.parent / "constants.yaml").read_text())


class Profile(Frozen):
    """A machine and its software.

    Attributes:
        name: As in `hzero plan`.
        about: What it stands for, on one line.
        nodes: Nodes of the machine.
        gpus_per_node: Packages of a node.
        gcds_per_gpu: Devices of a package.
        visible: Devices that a rank sees under the machine's usual launch line; null: all of its node.
        group_nodes: Nodes of a switch group; null: one group. A job's nodes fill one group after the other.
        taper: Bandwidth of a group's nodes together over that of its links to other groups.
        tree_nodes: Nodes from which an all-reduce is a tree.
        order: The stage's order of collectives by default: ``strict`` with RCCL, one at a time on a device.
        error: Error on measured collectives that were not used for calibration, as a share; null: there are none.
        sources: By name.
        constants: The figures.
    """

    name: str
    about: str
    nodes: Positive
    gpus_per_node: Positive
    gcds_per_gpu: Positive
    visible: Positive | None = None
    group_nodes: Positive | None = None
    taper: Annotated[FiniteFloat, Field(ge=1)] = 1.0
    tree_nodes: Positive = 16
    order: CollectiveOrder = "lanes"
    error: Annotated[FiniteFloat, Field(gt=0, lt=1)] | None = None
    sources: dict[str, Source]
    constants: dict[str, Constant]

    @model_validator(mode="after")
    def _sourced(self) -> Profile:
        if self.visible not in (None, 1, self.gpus_per_node * self.gcds_per_gpu):
            raise ValueError(f"visible: found {self.visible}, possible: 1, or null for all devices of the node")
        for name in CONSTANTS:
            if (constant := self.constants.get(name)) is None:
                raise ValueError(f"constants.{name}: missing")
            if constant.value == 0 and (name.endswith("_gb_s") or name in ("compute_tflops", "ll_share", "fill_kib")):
                raise ValueError(f"constants.{name}.value: found 0, expected more than 0")
            if constant.value > 1 and name.endswith("_share"):
                raise ValueError(f"constants.{name}.value: found {constant.value:g}, expected a share of at most 1")
            if constant.source not in self.sources:
                raise ValueError(
                    f"constants.{name}.source: found {constant.source!r}, possible: {', '.join(self.sources)}"
                )
        for name in self.constants.keys() - CONSTANTS:
            raise ValueError(str(one_of("constants", name, CONSTANTS, "constant")))
        return self

    def value(self, name: str) -> float:
        """A constant's value."""
        return self.constants[name].value

    def mismatch(self, grid: Grid) -> str | None:
        """Why this machine cannot have such a grid; None if it can."""
        shape = (grid.gpus_per_node, grid.gcds_per_gpu)
        if shape != (self.gpus_per_node, self.gcds_per_gpu):
            expected = f"{self.gpus_per_node} x {self.gcds_per_gpu}"
            return f"profile {self.name}: found nodes of {shape[0]} x {shape[1]} devices, expected {expected}"
        for key, count in (("gpus_per_hive", grid.gpus_per_hive), ("clusters", grid.clusters)):
            if count > 1:
                return f"profile {self.name}: has no rates of the links that topology.{key} declares"
        if grid.nodes > self.nodes:
            return f"nodes: found {grid.nodes:,}; {self.name} has {self.nodes:,}"
        return None

    def with_values(self, source: Source, **values: float) -> Profile:
        """The profile with other values of some constants, from one source."""
        constants = self.constants | {name: Constant(value=value, source="given") for name, value in values.items()}
        return self.model_copy(update={"constants": constants, "sources": {**self.sources, "given": source}})


def profile_names() -> list[str]:
    """Names of the profiles that come with hzero."""
    return sorted(file.stem for file in _FOLDER.glob("*.yaml"))


def load_profile(name: str) -> Profile:
    """A profile by its name, or from a file whose name ends in ``.yaml``.

    Raises:
        ConfigError: There is none, or a constant is missing or wrong, which the message names.
    """
    return _loaded(Path(name), name) if name.endswith(".yaml") else _shipped(name)


@functools.lru_cache(maxsize=32)
def _shipped(name: str) -> Profile:
    if name not in profile_names():
        raise one_of("profile", name, profile_names(), "profile")
    return _loaded(_FOLDER / f"{name}.yaml", name)


def _loaded(path: Path, name: str) -> Profile:
    """The profile in a file, completed by the one that it ``extends``."""
    text = read_text(path)
    try:
        content: Any = yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"profile: {str(path)!r} is not YAML: {' '.join(str(error).split())}") from None
    if isinstance(content, dict) and "extends" in content:
        base = _shipped(str(content.pop("extends"))).model_dump(exclude_none=True)
        for key in ("sources", "constants"):
            if isinstance(own := content.get(key, {}), dict):
                content[key] = {**base[key], **own}
        content = {**base, **content}
    return validated(Profile, content, f"{name}:")
