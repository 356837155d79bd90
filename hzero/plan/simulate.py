"""Simulation: discrete events of tasks on lanes, which share resources while they run.

All ranks do the same, so one rank's tasks represent all. A lane runs one task at a time in order: a stream, or the host.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hzero.plan.cost import Phase

COMPUTE = "compute"


def speeds(usages: Sequence[Mapping[Any, float]]) -> list[float]:
    """Max-min fair speeds of at most 1: all grow equally until a resource is full, whose users then keep theirs.

    Args:
        usages: For each transfer the share of every resource that it takes at speed 1.

    Returns:
        Speeds such that the shares of no resource add up to more than 1.
    """
    found = [1.0] * len(usages)
    growing, left = set(range(len(usages))), {}
    for usage in usages:
        left.update(dict.fromkeys(usage, 1.0))
    level = 0.0
    while growing:
        demand: dict[Any, float] = {}
        for index in growing:
            for resource, share in usages[index].items():
                demand[resource] = demand.get(resource, 0.0) + share
        step, full = 1.0 - level, None
        for resource, total in demand.items():
            if total > 0 and left[resource] / total < step:
                step, full = left[resource] / total, resource
        level += step
        if full is None:
            return found
        for resource, total in demand.items():
            left[resource] = max(left[resource] - step * total, 0.0)
        for index in [index for index in growing if usages[index].get(full, 0.0) > 0]:
            found[index] = level
            growing.remove(index)
    return found


@dataclass
class Task:
    """One entry of a lane.

    Attributes:
        lane: Its lane; `COMPUTE` for the device's own work.
        name: For tests and debuggers.
        phases: One after the other.
        after: Tasks that end before it starts.
        tier: Outermost tier that it crosses; "" for compute.
        boundary: Whether it waits for the last micro-step.
    """

    lane: str
    name: str
    phases: Sequence[Phase]
    after: Sequence[Task] = field(default=(), repr=False)  # each has its own: a text of all would grow without end
    tier: str = ""
    boundary: bool = False
    start: float = -1.0
    end: float = math.inf
    waits: int = 0


@dataclass(frozen=True)
class Timeline:
    """What was simulated.

    Attributes:
        seconds: From the first start to the last end.
        tasks: With their times.
        exposed: Seconds without compute, by the ``tier`` of the task that compute waits for; "" for one without.
        busy: Seconds for which each resource was full.
    """

    seconds: float
    tasks: list[Task]
    exposed: dict[str, float]
    busy: dict[str, float]


class _Running:
    """A task under way."""

    def __init__(self, task: Task, now: float) -> None:
        self.task, self.index = task, 0
        self.begin(now)

    def begin(self, now: float) -> None:
        phase = self.task.phases[self.index]
        self.until = now + phase.latency_s
        self.left = max(phase.work.values(), default=0.0)
        self.usage = {key: value / self.left for key, value in phase.work.items() if value} if self.left else {}
        self.key = id(phase)
        self.fluid = phase.latency_s <= 0.0


def simulate(tasks: Sequence[Task]) -> Timeline:
    """Runs tasks, given lane by lane in the order of submission; a task comes after those of its `after` in the list.

    Raises:
        ValueError: A task waits for one behind it on its own lane, so nothing can go on.
    """
    lanes: dict[str, deque[Task]] = defaultdict(deque)
    behind: dict[int, list[Task]] = defaultdict(list)
    for task in tasks:
        lanes[task.lane].append(task)
        task.waits = len(task.after)
        for other in task.after:
            behind[id(other)].append(task)
    running: dict[str, _Running] = {}
    known: dict[tuple[int, ...], list[float]] = {}
    now, done = 0.0, 0
    exposed: dict[str, float] = defaultdict(float)
    busy: dict[str, float] = defaultdict(float)
    ready = list(lanes)
    while done < len(tasks):
        for lane in ready:
            if lane not in running and lanes[lane] and not lanes[lane][0].waits:
                task = lanes[lane].popleft()
                task.start = now
                running[lane] = _Running(task, now)
        ready = []
        if not running:
            raise ValueError("nothing can start: a task waits for one behind it")
        flows = [run for run in running.values() if run.fluid]
        key = tuple(run.key for run in flows)
        rates = known.get(key)
        if rates is None:
            rates = known[key] = speeds([run.usage for run in flows])
        step = min((run.until - now for run in running.values() if not run.fluid), default=math.inf)
        for run, rate in zip(flows, rates):
            step = min(step, run.left / rate if run.left > 0 else 0.0)
        if COMPUTE not in running:
            exposed[_waited_for(lanes, running).tier] += step
        full: dict[str, float] = defaultdict(float)
        for run, rate in zip(flows, rates):
            run.left -= step * rate
            for resource, share in run.usage.items():
                full[resource] += share * rate
        for name, share in full.items():
            busy[name] += share * step
        now += step
        for lane, run in list(running.items()):
            if not run.fluid and run.until <= now + 1e-15:
                run.fluid = True
            if run.fluid and run.left <= 1e-15 + 1e-12 * step:
                run.index += 1
                if run.index < len(run.task.phases):
                    run.begin(now)
                    continue
                del running[lane]
                run.task.end = now
                done += 1
                ready.append(lane)
                for task in behind[id(run.task)]:
                    task.waits -= 1
                    if not task.waits:
                        ready.append(task.lane)
    return Timeline(now, list(tasks), dict(exposed), dict(busy))


def _waited_for(lanes: dict[str, deque[Task]], running: dict[str, _Running]) -> Task:
    """The running task that the next compute waits for."""
    task = lanes[COMPUTE][0] if lanes[COMPUTE] else None
    while task is not None:
        if task.lane in running:  # itself, or what its lane has before it
            return running[task.lane].task
        if lanes[task.lane] and lanes[task.lane][0] is not task:
            task = lanes[task.lane][0]
        else:
            task = next((other for other in task.after if other.end == math.inf), None)
    return next(iter(running.values())).task
