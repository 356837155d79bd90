"""Choice: the shard degrees whose messages take the least time, among those whose states fit into a device.

It decides for preset ``fit``, at the start of a run and in `hzero plan`. It only computes, so equal inputs give equal choices.
Compute is left out: it is the same for every layout, and no layout sends more in order to compute less.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from hzero.codecs.formats import chunk_numel
from hzero.config import ROLES, HZeroConfig, Tier
from hzero.errors import ConfigError, size_text
from hzero.program.collectives import OTHERS, Scheme, chains_of, ring_links
from hzero.program.held import held_states
from hzero.program.program import Program
from hzero.program.shards import ShardPlan
from hzero.topology import Grid
from hzero.topology.links_file import TierRate

#: Bytes of a trained weight's states that every layout shards over the world: master, Adam's moments and gradient in float32.
STATE_BYTES = 16
#: Times that differ by less are equal. Among equal ones, the layout with the least memory is chosen.
EQUAL = 0.03
#: Other engines that a choice is compared with.
_PEERS = {name: OTHERS[name] for name in ("DDP", "FSDP2", "HSDP, node", "HSDP, package")}


@dataclass(frozen=True)
class Load:
    """A model and its step, as far as they decide about a layout.

    Attributes:
        numels: Elements of each parameter.
        trained: The same of trained parameters: only these are refreshed, and have gradients and states.
        itemsize: Bytes of a weight, and of a gradient on the wire.
        accumulation: Micro-batches per step.
        gathers: Messages in which forward gathers all weights.
        buckets: Messages in which all weights are refreshed, and all gradients reduced.
        state_bytes: Bytes of a trained weight's states on the devices that share it; 0 if they are on the host.
    """

    numels: tuple[int, ...]
    trained: tuple[int, ...]
    itemsize: int
    accumulation: int
    gathers: int
    buckets: int
    state_bytes: int = STATE_BYTES

    @property
    def all_state_bytes(self) -> int:
        """Bytes of the states of all weights, on all devices that share them."""
        return self.state_bytes * sum(self.trained)


@dataclass(frozen=True)
class Rates:
    """What messages cost.

    Attributes:
        tiers: Bandwidth and latency of every tier with more than one rank.
        together: How much of the shorter tiers' times adds to the longest one if all tiers are busy: 0 on independent links, 1
            if one collective runs at a time.
        encode_s: Seconds to measure and encode one weight in codec ``exact``.
        decode_s: Seconds to decode one weight.
    """

    tiers: Mapping[Tier, TierRate]
    together: float
    encode_s: float
    decode_s: float


@dataclass(frozen=True)
class Candidate:
    """A layout, or another engine.

    Attributes:
        name: What it shards, or the engine.
        seconds: Time of a step's messages.
        bytes: Memory on a device, beside the states that all layouts share.
        config: The block with this layout; None for another engine.
        coded: Whether refreshes have codec ``exact``.
    """

    name: str
    seconds: float
    bytes: int
    config: HZeroConfig | None = None
    coded: bool = False


@dataclass(frozen=True)
class Choice:
    """The result.

    Attributes:
        best: The chosen layout.
        every: All layouts and engines, the shortest time first.
        room: Bytes that a layout may use on a device, beside the states that all layouts share; None: no limit.
    """

    best: Candidate
    every: tuple[Candidate, ...]
    room: int | None

    def __str__(self) -> str:
        """The choice and its reason, on one line."""
        fits = [one for one in self.every if self.room is None or one.bytes <= self.room]
        mine, other = (
            next((one for one in fits if one is not self.best and bool(one.config) is own), None)
            for own in (True, False)
        )
        of = "" if self.room is None else f" of {size_text(self.room)}"
        text = f"fit chose {self.best.name}: {_seconds_text(self.best)} of messages per step, {size_text(self.best.bytes)}{of}"
        if mine is not None:
            text += f"; next: {mine.name}, {_seconds_text(mine)}"
        if other is None:
            return text
        text += f"; without hzero: {other.name}, {_seconds_text(other)}"
        if other.seconds <= self.best.seconds * (1 + EQUAL):
            faster = other.seconds * (1 + EQUAL) < self.best.seconds
            text += f", which is {'faster' if faster else 'as fast'}: hzero saves no time here"
        return text


def _seconds_text(one: Candidate) -> str:
    return f"{one.seconds:.3g} s" if one.seconds >= 1 else f"{1e3 * one.seconds:.3g} ms"


def room_of(config: HZeroConfig, grid: Grid, load: Load, free: int | None = None) -> int:
    """Bytes that a layout may use on a device, beside the states that all layouts share.

    Args:
        config: The block.
        grid: The ranks that share every parameter.
        load: The model and its step.
        free: Free bytes of a device that holds the weights' shards already; None: ``memory.device`` is the whole device.

    Raises:
        ConfigError: ``memory.device`` is too small for the shared states, or ``memory.activations`` is too large.
    """
    given, activations = config.memory.device, config.memory.activations
    shared = load.all_state_bytes // grid.world_size
    if free is None:
        free = (given or 0) - load.itemsize * sum(load.numels) // grid.world_size
    if given is not None and free < shared:
        needed = given - free + shared
        raise ConfigError(
            f"hzero.memory.device: found {size_text(given)}; expected at least {size_text(needed)} for the states of ZeRO-3: use "
            "more ranks"
        )
    left = max(free - shared, 0)
    if activations is not None and activations > left:
        raise ConfigError(
            f"hzero.memory.activations: found {size_text(activations)}; expected at most {size_text(left)}, which the states of "
            "ZeRO-3 leave of a device: use more ranks, or smaller micro-batches"
        )
    return left // 2 if activations is None else left - activations


def choose(config: HZeroConfig, grid: Grid, load: Load, rates: Rates, room: int | None) -> Choice:
    """Chooses the layout of a block with preset ``fit``. What the user has written is kept.

    Args:
        config: The block.
        grid: The ranks that share every parameter.
        load: The model and its step.
        rates: What messages cost.
        room: See `Choice`.

    Raises:
        ConfigError: No layout that the user's keys leave fits.
    """
    every = [*_layouts(config, grid, load, rates), *_engines(grid, load, rates)]
    every.sort(key=lambda one: one.seconds)
    own = [one for one in every if one.config is not None]
    fitting = [one for one in own if room is None or one.bytes <= room]
    if not fitting:
        least = min(own, key=lambda one: one.bytes)
        raise ConfigError(
            f"hzero.memory: found room for {size_text(room or 0)}; expected {size_text(least.bytes)} for {least.name}: use more "
            "ranks, write a smaller hzero.memory.activations, or leave hzero.shard to fit"
        )
    equal = [one for one in fitting if one.seconds <= fitting[0].seconds * (1 + EQUAL)]
    return Choice(min(equal, key=lambda one: (one.bytes, one.coded, one.seconds)), tuple(every), room)


def _layouts(config: HZeroConfig, grid: Grid, load: Load, rates: Rates) -> list[Candidate]:
    """The layouts that the written keys leave."""
    # Among scopes that reach the same ranks, the innermost. Sums over the world need no gradient accumulation buffers.
    by_size = {grid.scope_size(scope): scope for scope in reversed(grid.scopes)} | {grid.world_size: grid.scopes[-1]}
    scopes = [by_size[size] for size in sorted(by_size)]
    found, chosen = [], "codecs.weights" in config.written
    of_role = [[getattr(config.shard, role)] if f"shard.{role}" in config.written else scopes for role in ROLES]
    for weights, gradients in itertools.product(*of_role):
        if grid.scope_size(weights) > grid.scope_size(gradients) and "shard.gradients" not in config.written:
            continue  # more memory than gradients over the weights' scope
        for changes in (True,) if chosen else (True, False):
            own = config.laid_out(weights, gradients, changes)
            plan = ShardPlan.from_config(own, grid, 0)
            exact = plan.exact and load.itemsize == 2
            if changes and not (exact or chosen):
                continue  # equal to the other
            kept = held_states(plan, load.numels, load.itemsize, load.accumulation)["secondary partition"].bytes
            sums = held_states(plan, load.trained, load.itemsize, load.accumulation)
            kept += sum(state.bytes for name, state in sums.items() if name != "secondary partition")
            name = f"weights over the {weights}, gradients over the {gradients}"
            name += ", refreshes in codec exact" if exact else ""
            seconds = _seconds(plan, grid, load, rates)
            if exact:
                coded = sum(load.trained) / grid.world_size
                seconds += coded * (rates.encode_s + rates.decode_s * plan.secondary_rows)
                seconds += sum(rate.latency_us for rate in rates.tiers.values()) / 1e6  # ranks agree on sizes
            found.append(Candidate(name, seconds, kept, own, exact))
    return found


def _engines(grid: Grid, load: Load, rates: Rates) -> list[Candidate]:
    total = load.all_state_bytes + load.itemsize * (sum(load.numels) - sum(load.trained))
    shared = load.all_state_bytes // grid.world_size
    found = []
    for name, scheme in _PEERS.items():
        ranks = 1 if scheme.engine == "ddp" else grid.scope_size(scheme.shard)
        if ranks == 1 and scheme.engine != "ddp":
            continue
        found.append(Candidate(name, _seconds(scheme, grid, load, rates), total // ranks - shared))
    return found


def _seconds(scheme: Scheme | ShardPlan, grid: Grid, load: Load, rates: Rates) -> float:
    """Seconds of a step's messages. Messages of one forward, or of one backward, overlap."""
    every, trained = ([chunk_numel(numel, grid.world_size) for numel in each] for each in (load.numels, load.trained))

    @functools.cache  # micro-batches have the same programs
    def of_program(program: Program, gathers: bool) -> dict[Tier, float]:
        """By tier. A flat ring is as slow as its links on average (`ring_links`)."""
        found = defaultdict[Tier, float](float)
        chunks, messages = (every, load.gathers) if gathers else (trained, load.buckets)
        for cross in program.crossings:
            received = cross.message_bytes(chunks, load.itemsize) * cross.received
            for tier, links in zip(cross.tiers, ring_links([grid.size(one) for one in cross.tiers])):
                found[tier] += received * links / cross.ranks / rates.tiers[tier].gb_s / 1e9
            found[cross.tiers[-1]] += messages * rates.tiers[cross.tiers[-1]].latency_us / 1e6
        return found

    phases: dict[tuple[int, bool], dict[Tier, float]] = {}
    for (phase, micro), program in chains_of(scheme, grid, load.accumulation).items():
        tiers = phases.setdefault((micro, phase in ("refresh", "forward")), defaultdict(float))
        for tier, seconds in of_program(program, phase in ("forward", "backward")).items():
            tiers[tier] += seconds
    longest = [max(tiers.values(), default=0.0) for tiers in phases.values()]
    return sum(longest) + rates.together * (sum(sum(tiers.values()) for tiers in phases.values()) - sum(longest))
