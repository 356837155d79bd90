"""Scenario: what a prediction is about, read from the command's arguments."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hzero.config import TIERS
from hzero.model.job import Attention, Job
from hzero.model.profile import Profile, Source, load_profile, profile_names
from hzero.model.shape import ModelShape, gpt_neox_shape
from hzero.plan.links_file import links_for
from hzero.settings.architecture import architecture, is_general
from hzero.settings.buffers import buffers_of, elements_of
from hzero.settings.conf import compose, plain
from hzero.settings.settings import Settings
from hzero.sharding.memory import LIVE_NUMEL
from hzero.sharding.sequence import Scheme
from hzero.topology import Grid
from hzero.validation import ConfigError, one_of

#: What codecs may lose: nothing, bits of the weights alone, bits of everything.
Quality = Literal["lossless", "weights", "all"]
#: Keys of a prediction that the trainer's configuration does not have.
KEYS = ("memory", "attention", "global_batch", "codecs", "profile")
#: The profile that stands for a topology of ``conf/``.
PROFILES = {
    "frontier": "frontier-2026",
    "lumi": "lumi",
    "dgx_h200": "dgx_h200",
    "emulated_2x2x2": "emulated",
}
#: Other engines that predictions compare with.
OTHERS = {
    "DDP": Scheme("ddp"),
    "FSDP2": Scheme("fsdp"),
    "HSDP, node": Scheme("fsdp", shard="node"),
    "HSDP, package": Scheme("fsdp", shard="package"),
    "ZeRO-1": Scheme("deepspeed", stage=1),
    "ZeRO-2": Scheme("deepspeed", stage=2),
    "ZeRO-3": Scheme("deepspeed"),
    "hpZ": Scheme("deepspeed", hpz="node"),
    "ZeRO++": Scheme("deepspeed", hpz="node", quantized=True),
}


@dataclass(frozen=True)
class Scenario:
    """A model on a machine.

    Attributes:
        settings: The trainer's configuration.
        job: What is trained.
        grid: The machine's devices.
        profile: Its constants.
        memory_bytes: Of a device, at most.
        quality: What codecs may lose.
        global_batch: Sequences of a step, of all devices.
        given: The user's overrides of the trainer's configuration.
        batch_given: Whether the user has given the sequences of a step.
    """

    settings: Settings
    job: Job
    grid: Grid
    profile: Profile
    memory_bytes: int
    quality: Quality
    global_batch: int
    given: tuple[str, ...] = ()
    batch_given: bool = False

    def on(self, nodes: int) -> Scenario:
        """The same with other nodes and equal work per device."""
        batch = self.job.micro_batch * self.job.accumulation * nodes * self.grid.scope_size("node")
        group = self.grid.nodes_per_group  # which an automatic grid chooses again
        if group is not None and nodes % group and not self.grid.automatic:
            if nodes > group:
                raise ConfigError(f"nodes: found {nodes:,}, expected a multiple of topology.nodes_per_group, {group}")
            group = None
        grid = replace(self.grid, nodes=nodes, ranks=None, nodes_per_group=group)
        return replace(self, grid=grid, global_batch=batch)

    def others(self) -> dict[str, Scheme]:
        """Other engines; ZeRO++ as the machine's usual launch line has it."""
        found = dict(OTHERS)
        if (visible := self.profile.visible) is not None and visible < self.grid.scope_size("node"):
            found["ZeRO++"] = replace(found["ZeRO++"], visible=visible)
        return found


def read_scenario(overrides: Sequence[str], links: Path | None = None) -> Scenario:
    """Reads a scenario.

    Args:
        overrides: Keys of the trainer's configuration by their long names, and those of `KEYS`.
        links: File of measured rates that replace those of the profile.

    Raises:
        ConfigError: A key is unknown, the machine has no profile, or the profile does not know it.
    """
    own, kept = split_keys(overrides)
    settings = settings_of(kept)
    profile = profile_of(kept, own.get("profile"))
    if profile is None:
        raise ConfigError(
            f"profile: none is known for topology={_topology(kept)}; give profile=NAME or a .yaml, possible: "
            f"{', '.join(profile_names())}"
        )
    scenario = scenario_of(settings, own, profile if links is None else with_links(profile, links, settings.grid))
    return replace(scenario, given=tuple(kept))


def settings_of(overrides: Sequence[str]) -> Settings:
    """The settings of the trainer's configuration.

    Raises:
        ConfigError: A key is wrong.
    """
    config = plain(compose(list(overrides)))
    config["sample"]["at_end"] = False  # which pipeline stages refuse, and no plan reads
    return Settings(config)


def split_keys(overrides: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The keys of `KEYS`, and the other overrides."""
    own, kept = {}, []
    for override in overrides:
        key, sign, value = override.partition("=")
        if sign and key in KEYS:
            own[key] = value
        else:
            kept.append(override)
    return own, kept


def scenario_of(settings: Settings, own: dict[str, str], profile: Profile, itemsize: int | None = None) -> Scenario:
    """The scenario of checked settings; ``itemsize`` is that of a weight, None that of ``train.dtype``."""
    grid = settings.grid
    if (grid.gpus_per_node, grid.gcds_per_gpu) != (profile.gpus_per_node, profile.gcds_per_gpu):
        raise ConfigError(
            f"profile {profile.name}: found nodes of {grid.gpus_per_node} x {grid.gcds_per_gpu} devices, expected "
            f"{profile.gpus_per_node} x {profile.gcds_per_gpu}"
        )
    job = replace(job_of(settings, itemsize or itemsize_of(settings, profile)), attention=attention_of(own))
    quality = own.get("codecs", "all")
    if quality not in ("lossless", "weights", "all"):
        raise one_of("codecs", quality, ("lossless", "weights", "all"))
    batch = job.micro_batch * job.accumulation * grid.world_size
    if "global_batch" in own:
        batch = _count("global_batch", own["global_batch"])
        if batch % grid.world_size:
            near = max(round(batch / grid.world_size), 1) * grid.world_size
            raise ConfigError(
                f"global_batch: found {batch:,}, expected a multiple of the {grid.world_size:,} devices, such as {near:,}"
            )
    memory = memory_of(own, profile)
    return Scenario(settings, job, grid, profile, memory, quality, batch, batch_given="global_batch" in own)  # type: ignore[arg-type]


def attention_of(own: dict[str, str]) -> Attention:
    """How attention is computed."""
    found = own.get("attention", "flash")
    if found not in ("flash", "math"):
        raise one_of("attention", found, ("flash", "math"))
    return found  # type: ignore[return-value]


def memory_of(own: dict[str, str], profile: Profile) -> int:
    """Bytes of a device: those given, or else the profile's."""
    return bytes_of(own["memory"]) if "memory" in own else int(profile.value("memory_gb") * 1e9)


def shape_of(model: dict[str, Any]) -> ModelShape | None:
    """The shape of a group ``model``; None where its layers differ. Needs transformers for ``model=hf`` alone."""
    if not is_general(model):
        return gpt_neox_shape(model)
    found = architecture(model)
    if found.layer is None:
        return None
    length, head = model["seq_length"], found.vocab_size * found.hidden
    return ModelShape(
        name=str(model["name"]),
        seq_length=length,
        hidden=found.hidden,
        layers=found.layers,
        heads=found.heads,
        intermediate=found.intermediate,
        vocab=found.vocab_size,
        before=found.before,
        layer=found.layer,
        after=found.after,
        layer_flops=2.0 * (found.multiplied - head) / found.layers,
        attention_flops=4.0 * length * found.attention / found.layers,
        after_flops=2.0 * head,
    )


def itemsize_of(settings: Settings, profile: Profile | None) -> int:
    """Bytes of a weight on the wire: ``train.dtype`` auto is float32 on processors, as in the trainer."""
    on_processors = profile is not None and profile.cores is not None
    return {"fp32": 4, "bf16": 2, "fp16": 2, "auto": 4 if on_processors else 2}[settings["train"]["dtype"]]


def job_of(settings: Settings, itemsize: int) -> Job:
    """What a configuration trains; ``itemsize`` is that of a weight.

    DeepSpeed gathers ahead what its prefetch bucket and the parameters that may be live leave room for, and keeps what is
    used again soon.

    Raises:
        ConfigError: The layers of the model differ, or are split over ranks.
    """
    if settings.layout.pipeline > 1:
        raise ConfigError(
            f"model.pipeline_parallel: found {settings.layout.pipeline}, which predictions do not know; possible: 1"
        )
    if settings.readers.tensor > 1:
        raise ConfigError(
            f"{settings.readers.key}: found {settings.readers.tensor}, which predictions do not know; possible: 1, or hzero plan "
            "without --tune, --fit, --sweep, --from and --trace"
        )
    shape = shape_of(settings["model"])
    if shape is None:
        raise ConfigError(
            f"model: the layers of {settings['model']['name']} differ, and predictions need equal ones; possible: the "
            "models of conf/model, and model=hf with equal layers"
        )
    train = settings["train"]
    buffers = buffers_of(settings, shape.module)
    return Job(
        shape,
        micro_batch=train["micro_batch"],
        accumulation=train["grad_accumulation"],
        checkpointing=train["activation_checkpointing"],
        itemsize=itemsize,
        bucket_numel=buffers.prefetch,
        reuse_numel=buffers.reuse,
        ahead=int(elements_of(settings, "stage3_max_live_parameters", LIVE_NUMEL) >= 2 * buffers.prefetch),
        buffers=buffers,
    )


def profile_of(overrides: Sequence[str], name: str | None) -> Profile | None:
    """The profile of that name, or else the one that stands for the chosen topology; None where there is none."""
    if name is None:
        name = PROFILES.get(_topology(overrides))
    return load_profile(name) if name is not None else None


def _topology(overrides: Sequence[str]) -> str:
    chosen = [override.partition("=")[2] for override in overrides if override.startswith("topology=")]
    return chosen[-1] if chosen else "emulated_2x2x2"


def with_links(profile: Profile, path: Path, grid: Grid) -> Profile:
    """The profile with the rates and latencies that `hzero bench links` has measured, matched by the names of tiers.

    A tier's rate is that of its groups all at once, so a node's is as many times a device's as it had devices.

    Raises:
        ConfigError: As `links_for`.
    """
    links = links_for(path, grid)
    values: dict[str, float] = {}
    for tier in TIERS:
        if tier not in links.tiers:
            continue
        rate = links.tiers[tier].gb_s
        if tier == "gcd":
            values["gcd_gb_s"] = rate
        elif tier == "gpu":
            values |= {"gpu_ring_gb_s": rate, "gpu_pairs_gb_s": rate}
        elif tier == "node":  # the model has one rate between nodes, and no hives
            devices = links.grid["gpu"] * links.grid["gcd"]
            values |= {"net_rails_gb_s": rate * devices, "net_ring_gb_s": rate * devices}
    values["launch_us"] = min(rate.latency_us for rate in links.tiers.values())
    source = Source(
        what=f"hzero bench links: {path}", date=links.date, stack=f"{links.backend} on {links.device}", kind="measured"
    )
    return profile.with_values(source, **values)


def _count(key: str, text: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,9}", text.replace("_", "")):
        raise ConfigError(f"{key}: found {text!r}, expected a number of at least 1")
    return int(text.replace("_", ""))


def bytes_of(text: str) -> int:
    """Bytes of a text such as ``64GB``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(GB|GiB)?", text)
    if found is None:
        raise ConfigError(f"memory: found {text!r}, expected GB as in memory=64GB")
    return int(float(found[1]) * (2**30 if found[2] == "GiB" else 1e9))
