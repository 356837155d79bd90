"""One rank of a run: trains with tensor groups, and with pipeline stages if the layout has them."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import hzero
from benchmarks.hybrid.model import Layout, Mpu, pipeline_of, split
from benchmarks.training import adamw, batch, build, learning_rate, numels, start_rank
from hzero.comm import for_dimension
from hzero.files import replacing
from hzero.topology import Grid

TOPOLOGY = {"nodes": 2, "packages_per_node": 2, "devices_per_package": 2}
GRID = Grid(2, 2, 2)
#: Share of the tokens, at the end, that evaluations read.
EVALUATION = 0.02
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Work:
    """What a rank trains.

    Attributes:
        config: ``model``, ``train``, ``block``, ``tensor``, ``pipeline``.
        tokens: File of token ids.
        result: File that rank 0 writes.
    """

    config: dict[str, Any]
    tokens: Path
    result: Path


def train(work: Work) -> None:
    """Trains; rank 0 writes times, losses and bytes."""
    start_rank(1, TIMEOUT_S)
    result = _Run(work).results()
    if dist.get_rank() == 0:
        with replacing(work.result) as file:
            json.dump(result, file)
    dist.barrier()


class _Run:
    def __init__(self, work: Work) -> None:
        self._model, self._train = work.config["model"], work.config["train"]
        self._layout = Layout(range(GRID.world_size), work.config["tensor"], work.config["pipeline"])
        self._reader = self._layout.places(dist.get_rank())[1]
        ids = np.load(work.tokens, mmap_mode="r")
        cut = len(ids) - int(len(ids) * EVALUATION)
        self._ids, self._held_out = ids[:cut], ids[cut:]
        block = {**work.config["block"], "topology": TOPOLOGY}
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": self._train["micro_batch"],
            "gradient_accumulation_steps": self._train["grad_accumulation"],
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 3 if self._layout.pipeline == 1 else 1, "hzero": block},
            "optimizer": adamw(self._train),
            "steps_per_print": 10**9,
        }
        mpu = Mpu(self._layout)
        group = for_dimension("tensor", config, mpu.get_model_parallel_group(), grid=GRID)
        model = build(self._model, self._train["seed"])
        split(model, group)
        if self._layout.pipeline > 1:
            staged = pipeline_of(model, self._layout, dist.get_rank())
            self._engine = hzero.initialize(model=staged, model_parameters=staged.parameters(), config=config)[0]
        else:
            self._engine = hzero.initialize(model=model, model_parameters=model.parameters(), config=config, mpu=mpu)[0]

    def results(self) -> dict[str, Any]:
        """Trains all steps, then evaluates with exact weights."""
        log = hzero.state(self._engine).wire_log
        log.reset()
        losses, seconds = [], []
        for step in range(1, self._train["steps"] + 1):
            begun = time.perf_counter()
            for group in self._engine.optimizer.param_groups:
                group["lr"] = learning_rate(self._train, step)
            losses.append(self._mean(self._step(step)))
            seconds.append(time.perf_counter() - begun)
        hzero.state(self._engine).settle()
        sent = _of_all_ranks(log.as_dicts())
        with hzero.exact_weights(self._engine):
            evaluation = self._mean(self._evaluate())
        return {
            "parameters": sum(numels(self._model)),
            "losses": losses,
            "step_s": seconds,
            "evaluation": evaluation,
            "sent": sent,
        }

    def _step(self, step: int) -> torch.Tensor:
        count, size = self._train["grad_accumulation"], self._train["micro_batch"]
        firsts = [(micro * self._layout.data + self._reader) * size for micro in range(count)]
        batches = [self._batch(self._ids, (self._train["seed"], step), first) for first in firsts]
        if self._layout.pipeline > 1:
            loss: torch.Tensor = self._engine.train_batch(_pairs(batches))
            return loss.detach()
        total = torch.zeros(())
        for ids in batches:
            loss = self._engine(input_ids=ids, labels=ids).loss
            self._engine.backward(loss)
            self._engine.step()
            total += loss.detach() / count
        return total

    def _evaluate(self) -> torch.Tensor:
        """Mean loss of batches that are the same in every run."""
        count, size = self._train["eval_batches"], self._train["micro_batch"]
        firsts = [(index * self._layout.data + self._reader) * size for index in range(count)]
        batches = [self._batch(self._held_out, (0, 0), first) for first in firsts]
        if self._layout.pipeline > 1:
            loss: torch.Tensor = self._engine.eval_batch(_pairs(batches), num_micro_batches=count)
            return loss.detach()
        self._engine.eval()
        with torch.no_grad():
            losses = [self._engine(input_ids=ids, labels=ids).loss for ids in batches]
        return torch.stack(losses).mean()

    def _batch(self, ids: np.ndarray, key: tuple[int, int], first: int) -> torch.Tensor:
        return torch.from_numpy(batch(ids, key, first, self._train["micro_batch"], self._model["seq_length"]))

    def _mean(self, loss: torch.Tensor) -> float:
        """Mean over all ranks. Ranks of a tensor group, and of a pipeline, have the same loss."""
        loss = loss.float().clone()
        dist.all_reduce(loss)
        return float(loss) / dist.get_world_size()


def _of_all_ranks(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Bytes of the wire logs of all ranks, added up: pipeline stages receive different ones."""
    logs: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(logs, entries)
    total: dict[tuple[str, ...], dict[str, Any]] = {}
    for entry in itertools.chain(*logs):
        named = {key: entry[key] for key in ("role", "tier", "codec")}
        own = total.setdefault(tuple(named.values()), {**named, "wire_bytes": 0, "raw_bytes": 0})
        own["wire_bytes"] += entry["wire_bytes"]
        own["raw_bytes"] += entry["raw_bytes"]
    return list(total.values())


def _pairs(batches: list[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Ids and labels, as DeepSpeed's first and last stage read them."""
    return ((ids, ids) for ids in batches)
