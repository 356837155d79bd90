"""The training loop of one rank."""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from omegaconf import OmegaConf

import hzero
from hzero.collectives import WireLog, for_dimension, shared_recorder
from hzero.launcher import STARTED
from hzero.progress import Progress
from hzero.settings.settings import Settings, model_numels, model_vocab
from hzero.train import checkpoint, folder, model
from hzero.train.batches import Batch, batches_of
from hzero.train.data import Tokens
from hzero.train.examples import Examples
from hzero.train.monitor import Monitor
from hzero.train.packing import check_packing
from hzero.train.recordings import Recordings
from hzero.train.sample import Sampler
from hzero.train.saver import Saver
from hzero.train.sequence_parallel import divide, part_of, sequence_group
from hzero.train.status import Status
from hzero.train.stop import Reason, Stop
from hzero.train.stragglers import Stragglers, described
from hzero.train.summary import build_summary, print_summary
from hzero.train.tensor_parallel import Groups
from hzero.validation import PeerError, PlainError, seconds_of
from hzero.zero import StageState
from hzero.zero.guard import scaling_can_help

# A C++ extension that DeepSpeed would build and stage 3 never uses. The first look at this dictionary makes DeepSpeed try
# compilers, for a second: at import, so that ranks that are forked afterwards need not.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

#: Figures of a step that the monitor writes.
MONITORED = ("loss", "lr", "grad_norm", "tokens_per_s", "tflops_per_rank", "step_s")


def deepspeed_config(settings: Settings) -> dict[str, Any]:
    """DeepSpeed's configuration of the run."""
    train = settings["train"]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": train["micro_batch"],
        "gradient_accumulation_steps": train["grad_accumulation"],
        "gradient_clipping": float(train["grad_clip"]),
        "zero_optimization": {"stage": 3 if settings.layout.pipeline == 1 else 1},
        "optimizer": adamw(train),
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
    }
    if settings.block is None and settings.layout.pipeline == 1:
        # Stock keeps small matrices whole by default; a comparison of what is sharded needs all of them sharded.
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    if settings.dtype != "fp32":
        config[settings.dtype] = {"enabled": True}
    config = OmegaConf.to_container(OmegaConf.merge(config, settings["deepspeed"]))  # type: ignore[assignment]
    if settings.block is not None:
        config["zero_optimization"]["hzero"] = settings.block
    return config


def adamw(train: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed's optimizer block: torch's AdamW, which nothing has to be compiled for."""
    params = {key: train[key] for key in ("lr", "betas", "weight_decay")}
    return {"type": "AdamW", "params": {**params, "torch_adam": True}}


def learning_rate(train: dict[str, Any], step: int) -> float:
    """Rate of a step (from 1): linear warm-up, then a cosine down to ``min_lr_ratio``."""
    warmup, total = train["warmup_steps"], train["steps"]
    if step <= warmup:
        return float(train["lr"]) * step / warmup
    done = min((step - warmup) / max(total - warmup, 1), 1.0)
    low = train["min_lr_ratio"]
    return float(train["lr"]) * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done)))


class Loop:
    """Trains one run on one rank.

    Args:
        settings: The checked settings.
        run_dir: The run's folder, which exists.
        corpus: The tokenised text or examples.
        resume_from: Checkpoint to resume from.
        stop: Knows whether this rank has been asked to stop.
    """

    def __init__(
        self,
        settings: Settings,
        run_dir: Path,
        corpus: Tokens | Examples,
        resume_from: checkpoint.Checkpoint | None,
        stop: Stop,
    ) -> None:
        self._settings, self._run_dir = settings, run_dir
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._layout = settings.layout
        self._batches = batches_of(corpus, settings, settings.readers.data_rank(self._rank))
        self._sampler = Sampler(settings, run_dir, self._batches, corpus)
        self._flops_per_token = model.flops_per_token(settings["model"])
        self._device = torch.device(get_accelerator().current_device_name())
        config = deepspeed_config(settings)
        train = settings["train"]
        groups = self._tensor = self._sequence = None
        if self._layout.tensor > 1:
            groups = Groups(self._layout)
            self._tensor = for_dimension("tensor", config, groups.get_model_parallel_group(), grid=settings.grid)
        if settings.sequence.tensor > 1:
            self._sequence = sequence_group(settings, config)
        recompute = train["activation_checkpointing"]
        built = model.build(settings["model"], train["seed"], config, recompute, self._tensor)
        if self._sequence is not None:
            divide(built, self._sequence)
        self._parameters = sum(getattr(p, "ds_numel", p.numel()) for p in built.parameters())
        if self._tensor is not None or self._layout.pipeline > 1:
            self._parameters = sum(model_numels(settings["model"]))
        self._engine = self._start(built, config, groups)
        saves = settings["checkpoint"]
        self._saver = Saver(
            self._engine,
            run_dir / folder.CHECKPOINTS,
            checkpoint.identity_of(settings, corpus.key),
            keep=saves["keep"],
            keep_s=seconds_of(saves["keep_for"]) if saves["keep_for"] is not None else 0.0,
            max_failures=saves["max_failures"],
            trust=saves["trust"],
            direct=saves["direct"],
            timeout_s=saves["timeout_s"],
        )
        self._stragglers = Stragglers(self._device)
        self._done = 0
        if resume_from is not None:
            self._saver.load(resume_from)
            self._done = resume_from.step
        self._stop = stop
        self._waited_here_s = 0.0
        self._not_finite = 0  # steps in a row
        self._rows: list[dict[str, Any]] = []
        self._said: set[str] = set()
        stop.remember(signal.SIGTERM)

    def _start(self, built: torch.nn.Module, config: dict[str, Any], groups: Groups | None) -> Any:
        """The engine of a model."""
        return hzero.initialize(model=built, model_parameters=built.parameters(), config=config, mpu=groups)[0]

    def _warn(self, message: str) -> None:
        """Says a warning once, on the user's terminal: the logs may be on the disk that is full."""
        if message not in self._said:
            self._said.add(message)
            print(f"warning: {message}", flush=True)

    def run(self) -> Reason | None:
        """Trains to the last step or until asked to stop; evaluates, saves and writes the summary.

        Returns:
            Why it has stopped before, the same on all ranks.
        """
        train, every = self._settings["train"], self._settings["checkpoint"]["every"]
        sample, first = self._settings["sample"], self._rank == 0
        metrics = folder.Metrics(self._run_dir, self._warn) if first else None
        status = Status(self._run_dir, self._warn) if first else None
        stopped: Reason | None = None
        evaluation: dict[str, float] = {}
        own, stage = hzero.state(self._engine), self._stage
        ratios = stage.ratios if stage is not None else {}
        if self._batches.packs:
            shape = self._settings["model"]
            check_packing(self._engine, model_vocab(shape), shape["seq_length"], self._device)
        if stage is not None:
            stage.weights.refresh()  # this one belongs to no step
        if own is not None:
            own.settle()
        if (log := self._wire_log) is not None:
            log.reset()
        if first:
            with folder.must_write(self._run_dir):
                (self._run_dir / folder.LOGS / STARTED).touch()
                folder.begun(self._run_dir)
        monitor = Monitor(train["monitor"] if first else None, self._run_dir, self._settings["run"]["name"], self._warn)
        with (
            Progress(train["steps"], start=self._done, enabled=first) as progress,
            Recordings(self._settings, self._run_dir, own, metrics) as recordings,
        ):
            if self._done:
                progress.message(f"going on after step {self._done}")
            for step in range(self._done + 1, train["steps"] + 1):
                began = time.monotonic()
                if status is not None:
                    status.set("saving" if self._saver.busy else "running", self._done)
                recordings.before(step)
                shared_recorder().step, waited_s = step - 1, self._waited_s
                try:
                    row, stopped, written = self._step(step)
                except (hzero.DivergenceError, hzero.StaleWeightsError) as error:
                    self._saver.judge(False)
                    raise self._spoilt(f"step {step}: {error}", type(error)) from None
                self._done = step
                if metrics is not None:
                    metrics.add(row)
                    monitor.write(step, {f"train/{name}": row[name] for name in MONITORED})
                    if stage is not None and stage.ratios and stage.ratios is not ratios:
                        ratios = stage.ratios
                        metrics.add({"kind": "audit", "step": step, "signal_to_noise_db": ratios})
                        monitor.write(step, {f"signal_to_noise_db/{name}": one for name, one in ratios.items()})
                self._guard(row, progress)
                self._warn_of_saves(self._saver.advance(written), metrics)
                slow = self._stragglers.add(row["step_s"], self._waited_s - waited_s)
                if slow is not None and status is not None:
                    status.set(status.state, step, stragglers=slow)
                    for found in slow:
                        progress.message(f"warning: {described(found)}")
                with folder.may_write(self._run_dir, self._warn):
                    recordings.after(step, stopped is not None)
                last = step == train["steps"]
                progress.update(
                    step,
                    f"step {step}/{train['steps']}  loss {row['loss']:.4f}  {row['tokens_per_s']:,.0f} tokens/s  "
                    f"{row['tflops_per_rank']:.3g} TFLOPS per rank",
                    always=last or len(self._rows) == 1,
                )
                if not last and not stopped and train["eval_every"] and step % train["eval_every"] == 0:
                    evaluation = self._evaluate(step, metrics, monitor)
                if not last and not stopped and sample["every"] and step % sample["every"] == 0:
                    self._write_sample(step, progress)
                self._stop.stepped(time.monotonic() - began)
                if (every and (last or step % every == 0)) or stopped:
                    if status is not None:
                        status.set("saving", step)
                    self._warn_of_saves(self._saver.save(step, last=last or stopped is not None), metrics)
                if stopped:
                    self._warn_of_saves(self._saver.settle(last=True), metrics)
                    again = f"the same command with resume=auto run.dir={self._run_dir} goes on from there"
                    why = "stopped" if stopped == "interrupted" else "stopped in time for the end of the job"
                    progress.message(f"{why} after step {step}; {again}")
                    break
        if stage is not None:
            stage.weights.refresh()  # the last step's
        if own is not None:
            own.settle()
        log = self._wire_log
        traffic = log.as_dicts() if log is not None else []
        if not stopped:
            evaluation = self._evaluate(self._done, metrics, monitor)
            self._warn_of_saves(self._saver.settle(last=True), metrics)
            loss = evaluation["loss_exact"]
            self._saver.judge(math.isfinite(loss))
            if train["guard"] and not math.isfinite(loss):
                raise self._spoilt(f"the loss of the last evaluation is {loss:g}: the weights are spoilt (train.guard)")
            if sample["every"] or sample["at_end"]:
                self._write_sample(self._done, progress)
        self._saver.close()
        if metrics is not None:
            metrics.close()
        monitor.close()
        self._sum_up(evaluation, traffic, stopped)
        if status is not None:
            status.end(stopped or "done", self._done)
        return stopped

    @property
    def _stage(self) -> StageState | None:
        """The state of hzero's stage 3; None for stock, and with pipeline stages."""
        own = hzero.state(self._engine)
        return own if isinstance(own, StageState) else None

    @property
    def _wire_log(self) -> WireLog | None:
        """That of the stage, which counts the hops of parallel dimensions too; of stock ZeRO-3 beside them theirs alone."""
        counted = hzero.state(self._engine) or self._tensor or self._sequence
        return counted.wire_log if counted is not None else None

    @property
    def _waited_s(self) -> float:
        """Seconds in which this rank has waited for others until now."""
        own = hzero.state(self._engine)
        return self._waited_here_s + (own.waited_s if own is not None else 0.0)

    def _warn_of_saves(self, failures: list[str], metrics: folder.Metrics | None) -> None:
        if metrics is not None:  # on rank 0
            for failure in failures:
                self._warn(f"{failure}; training goes on")
            while self._saver.rows:
                metrics.add(self._saver.rows.pop(0))

    def _step(self, step: int) -> tuple[dict[str, Any], Reason | None, bool]:
        """One optimizer step.

        Returns:
            Its metrics, why a rank was asked to stop, and whether all ranks have written their part of the save under way;
            all the same on all ranks.
        """
        train = self._settings["train"]
        started = time.perf_counter()
        rate = learning_rate(train, step)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate
        torch.manual_seed(
            np.random.SeedSequence([train["seed"], step, self._layout.data_rank(self._rank)]).generate_state(1).item()
        )  # of dropout
        loss = self._micro_steps(step)
        # The ranks agree on the loss, on stopping and on saves in one message; of the clocks rank 0's counts.
        timed = self._stop.timed or (
            self._rank == 0 and self._stop.is_due(self._saver.longest_s * (1 + self._saver.busy))
        )
        flags = torch.tensor([self._stop.asked, timed, self._saver.ready], dtype=torch.float32, device=self._device)
        shared = torch.cat([loss.reshape(1), flags])
        arrived = time.perf_counter()
        dist.all_reduce(shared)
        loss_mean, asked, times, ready = shared.tolist()
        seconds = time.perf_counter() - started
        if self._device.type == "cpu":  # on a device this also waits for this rank's own work
            self._waited_here_s += time.perf_counter() - arrived
        tokens = self._batches.tokens(step)
        per_second = (tokens - self._batches.tokens(step - 1)) / seconds
        norm = self._engine.get_global_grad_norm()
        row = {
            "kind": "step",
            "step": step,
            "loss": loss_mean / self._world,
            "lr": rate,
            "grad_norm": float(norm) if norm is not None else None,
            "tokens": tokens,
            "tokens_per_s": per_second,
            "tflops_per_rank": per_second * self._flops_per_token / self._world / 1e12,
            "step_s": seconds,
            "skipped": bool(getattr(self._engine.optimizer, "overflow", False)),
            "time": round(time.time(), 3),
        }
        self._rows.append(row)
        return row, "timed out" if times else "interrupted" if asked else None, ready == self._world

    def _micro_steps(self, step: int) -> torch.Tensor:
        """Forward and backward of all micro-steps, and the optimizer's step; their mean loss on this rank, a scalar."""
        count = self._settings["train"]["grad_accumulation"]
        total = torch.zeros((), device=self._device)
        for micro in range(count):
            loss = self._loss(self._batches.training(step, micro))
            total += loss.detach().float()
            self._engine.backward(loss)
            self._engine.step()
        return total / count

    def _guard(self, row: dict[str, Any], progress: Progress) -> None:
        """Notices a step that is not finite; with too many in a row the run ends, on all ranks, since they share the row.

        The stage has a guard of its own, which says where gradients are not finite and ends the run first; stock ZeRO-3
        has none, and a loss may be infinite where gradients are not.
        """
        in_vain = row["skipped"] and not scaling_can_help(self._engine.optimizer.loss_scaler)
        finite, limit = math.isfinite(row["loss"]) and not in_vain, self._settings["train"]["guard"]
        self._not_finite = 0 if finite else self._not_finite + 1
        found = f"the loss is {row['loss']:g} and the optimizer {'discarded' if row['skipped'] else 'did'} the step"
        if self._not_finite == 1 and self._rank == 0:
            progress.message(f"warning: step {row['step']}: {found}")
        if finite and not row["skipped"]:
            self._saver.judge(True)
        if limit and self._not_finite == limit:
            self._saver.judge(False)
            raise self._spoilt(
                f"step {row['step']}: {found}; {limit} steps in a row were not finite, so training ends (train.guard)"
            )

    def _spoilt(self, message: str, kind: type[PlainError] = hzero.DivergenceError) -> PlainError:
        error = kind(message)
        error.elsewhere = self._rank != 0
        return error

    def _loss(self, batch: Batch) -> torch.Tensor:
        """The mean loss of a batch, weighted by its share of the tokens that the loss counts."""
        if self._sequence is not None:
            batch = part_of(batch, self._sequence.plan.rank, self._sequence.plan.grid.world_size)
        inputs = {name: torch.from_numpy(array).to(self._device) for name, array in batch.inputs.items()}
        loss: torch.Tensor = self._engine(**inputs).loss
        return loss if batch.share == 1 else loss * batch.share

    def _write_sample(self, step: int, progress: Progress) -> None:
        row = self._sampler.write(self._engine, step)
        if self._rank == 0:
            with folder.may_write(self._run_dir, self._warn):
                self._sampler.keep(row)
            progress.message(f"sample after step {step}: {row['prompt']!r} → {row['text']!r}")

    def _evaluate(self, step: int, metrics: folder.Metrics | None, monitor: Monitor) -> dict[str, float]:
        losses = self._losses()
        if metrics is not None:
            metrics.add({"kind": "eval", "step": step, **losses})
        monitor.write(step, {f"eval/{name}": loss for name, loss in losses.items()})
        return losses

    def _losses(self) -> dict[str, float]:
        """Losses of an evaluation with decoded and with exact weights."""
        decoded = self._evaluation_loss()
        with hzero.exact_weights(self._engine):
            return {"loss_decoded": decoded, "loss_exact": self._evaluation_loss()}

    @torch.no_grad()
    def _evaluation_loss(self) -> float:
        train = self._settings["train"]
        self._engine.eval()
        total = torch.zeros((), device=self._device)
        for index in range(train["eval_batches"]):
            total += self._loss(self._batches.evaluation(index)).float()
        self._engine.train()
        dist.all_reduce(total)
        return float(total) / self._world / train["eval_batches"]

    def _sum_up(self, evaluation: dict[str, float], traffic: list[dict[str, Any]], stopped: Reason | None) -> None:
        own = hzero.state(self._engine)
        mine = {"traffic": traffic, "memory": own.memory(self._engine.optimizer) if own is not None else {}}
        everyones: list[Any] = [None] * self._world if self._rank == 0 else []
        dist.gather_object(mine, everyones if self._rank == 0 else None)
        if self._rank == 0:
            rows = folder.read_metrics(self._run_dir)[0]
            summary = build_summary(
                self._settings,
                parameters=self._parameters,
                steps=self._done,
                rows=self._rows,
                losses=[row["loss"] for row in rows if row["kind"] == "step"],
                traced=[row["tiers"] for row in rows if row["kind"] == "trace"],
                everyones=everyones,
                evaluation=evaluation,
                status=stopped or "finished",
                plan=self._stage.plan if self._stage is not None else None,
            )
            print_summary(summary)
            folder.write_summary(self._run_dir, summary)
            print(f"run folder: {self._run_dir}", flush=True)


def start_process_group(timeout_s: float) -> None:
    """Joins the run's world, quietly.

    Ends the process if that takes longer than its two waits together may: for the store, and for the other ranks. torch
    waits without a timeout where the process that serves the store, rank 0, is frozen.
    """
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.utils.logger.setLevel(logging.ERROR)
    backend = "gloo" if get_accelerator().device_name() == "cpu" else get_accelerator().communication_backend_name()
    started = time.monotonic()
    patience = threading.Timer(2 * timeout_s + 5, _give_up, [2 * timeout_s + 5])
    patience.daemon = True
    patience.start()
    try:
        deepspeed.init_distributed(dist_backend=backend, timeout=timedelta(seconds=timeout_s), verbose=False)
    except RuntimeError as error:  # torch's, of many lines
        raise PeerError(
            f"hzero: rank {os.environ.get('RANK', '?')}: not all ranks have joined within "
            f"{time.monotonic() - started:.0f} s (train.timeout_s={timeout_s:g}): {str(error).splitlines()[0]}"
        ) from error
    finally:
        patience.cancel()


def _give_up(seconds: float) -> None:
    rank, host, port = (os.environ.get(name, "?") for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"))
    why = "one of them is frozen or has not been started"
    if rank != "0":
        why = f"the store at {host}:{port} does not answer, which rank 0 serves: "
        why += "rank 0 is frozen, or another process has that port"
    print(
        f"hzero: rank {rank} has not met the others within {seconds:g} s (train.timeout_s, twice): {why}",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)
