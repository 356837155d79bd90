"""One rank of a run: the model, Hugging Face's Trainer with the stage, and the summary."""

from __future__ import annotations

import json
import logging
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import transformers
from transformers import AutoModelForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

import hzero
from hzero.calls import library_errors
from hzero.comm import blaming
from hzero.config import FIT
from hzero.deepspeed.clients import save_together
from hzero.errors import ConfigError, one_of, printable, size_text, some
from hzero.files import regular
from hzero.tools.commands import summary
from hzero.tools.data.corpus import Corpus
from hzero.tools.experiment import Experiment, checkpoint_folder, transformers_config
from hzero.tools.launch import UNFINISHED
from hzero.tools.plan.scenario import check_as_run

#: From this many parameters on, each layer is partitioned when it is built, so that no rank needs memory for the model.
ZERO_INIT_FROM = 500_000_000
#: Arguments of Trainer that would have no effect, or would build the engine twice.
_NOT_TAKEN = ("auto_find_batch_size", "fsdp", "num_train_epochs", "resume_from_checkpoint")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# Stage 3 never uses this C++ extension, which DeepSpeed would build. The first access makes DeepSpeed try compilers for a
# second. It happens at import, before ranks are forked.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def join(timeout_s: float) -> None:
    """Initialises the process group without log lines. Collectives time out after ``timeout_s`` seconds."""
    deepspeed.utils.logger.setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    accelerator = deepspeed.accelerator.get_accelerator()
    backend = "gloo" if accelerator.device_name() == "cpu" else accelerator.communication_backend_name()
    deepspeed.init_distributed(dist_backend=backend, timeout=timedelta(seconds=timeout_s), verbose=False)


def run_rank(experiment: Experiment, corpus: Corpus, folder: Path, resume: str | None) -> int:
    """Trains on this rank and writes the results. Collective. Initialises the process group if necessary.

    Args:
        experiment: The experiment.
        corpus: The text.
        folder: The run's folder.
        resume: Checkpoint to resume from.

    Returns:
        0, or 75 if the run has saved and stopped before its last step.
    """
    if not dist.is_initialized():
        join(experiment["train"]["timeout_s"])
    stop = hzero.StopAndSave(experiment["train"]["time_limit"])
    # Once TrainingArguments exist, transformers builds and loads each layer under zero.Init.
    whole = build_model(experiment, corpus.tokenizer) if sum(experiment.architecture.numels) < ZERO_INIT_FROM else None
    with library_errors("trainer"):
        arguments = TrainingArguments(**arguments_of(experiment, folder), **experiment["trainer"])
    model = build_model(experiment, corpus.tokenizer) if whole is None else whole
    text = {"train_dataset": corpus.train, "eval_dataset": corpus.evaluation}
    with library_errors("trainer"):
        trainer = ShardTrainer(model, arguments, batch_of, **text, processing_class=corpus.tokenizer)
    trainer.remove_callback(PrinterCallback)
    meter = _Meter(trainer)
    trace = _Trace(experiment["train"]["trace_step"], folder)
    for callback in (meter, _Losses(folder), trace, stop):
        trainer.add_callback(callback)
    status = 0
    with blaming():
        try:
            trainer.train(resume_from_checkpoint=resume)
        except SystemExit as left:  # StopAndSave has saved
            if left.code != UNFINISHED:
                raise
            status = UNFINISHED
        eval_loss = None if status else trainer.evaluate()["eval_loss"]
        everyones: list[Any] = [None] * dist.get_world_size()
        dist.gather_object((meter.log, meter.memory), everyones if dist.get_rank() == 0 else None)
        if dist.get_rank() == 0:
            if (stage := hzero.state(trainer.model_wrapped)) is not None and experiment.preset == FIT:
                experiment.plan = stage.plan  # chosen at the start
            found = summary.summary_of(experiment, trainer, meter.seconds, everyones, eval_loss)
            found["peak_bytes"] = torch.cuda.max_memory_allocated()  # of rank 0; 0 without devices
            summary.write(found, folder)
            lines = ["", *summary.lines(found), "", summary.closing_line(found), f"run folder: {folder}"]
            if status:
                lines.append(f"stopped after a save: to continue, add resume=auto run.dir={folder} to the command")
            print("\n".join(map(printable, lines)), flush=True)
        if not status and experiment["checkpoint"]["model"]:  # last, since it can fail
            save_whole(trainer, folder / "model")
    return status


def check(experiment: Experiment) -> None:
    """Checks the model, the keys of Trainer and the configuration of DeepSpeed, before ranks start.

    Raises:
        ConfigError: This machine cannot train the model, DeepSpeed refuses a value, or another group sets a key of Trainer.
    """
    if not torch.cuda.is_available():
        if experiment.dtype == "fp16":
            raise ConfigError("train.dtype: found fp16, which DeepSpeed trains on GPUs only; expected fp32 or bf16")
        # Bytes of a parameter: its weight, its gradient, and AdamW's float32 master and moments.
        needed = 16 * sum(experiment.architecture.numels)
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if needed > there and not dist.is_initialized():
            raise ConfigError(
                f"model: found states of {size_text(needed)} for {experiment['model']['name']}; expected at most "
                f"{size_text(there)}, the memory of this machine (`hzero plan` shows what needs it)"
            )
    owned, fields = arguments_of(experiment, Path("run")), TrainingArguments.__dataclass_fields__
    for key, value in experiment["trainer"].items():
        if key in owned or key in _NOT_TAKEN:
            raise ConfigError(f"trainer.{key}: found {value!r}; expected the groups run, topology, train, checkpoint")
        if key not in fields:
            raise one_of("trainer", key, fields, "key")
    read = check_as_run(experiment, experiment.itemsize)
    if experiment.tensor > 1 and read.tensor_parallel_config.get_partition_config_object() is None:
        from deepspeed.module_inject.tp_plan_converter import TPPlanConverter

        with library_errors("deepspeed.tensor_parallel.partition_config"):
            TPPlanConverter.convert(getattr(transformers_config(experiment["model"]), "base_model_tp_plan", None))


def arguments_of(experiment: Experiment, folder: Path) -> dict[str, Any]:
    """Arguments of ``TrainingArguments`` that follow from groups other than ``trainer``."""
    train, checkpoint = experiment["train"], experiment["checkpoint"]
    return {
        "output_dir": str(folder),
        "use_cpu": not torch.cuda.is_available(),
        "deepspeed": experiment.deepspeed_config(),
        "max_steps": train["steps"],
        "per_device_train_batch_size": train["micro_batch"],
        "per_device_eval_batch_size": train["micro_batch"],
        "gradient_accumulation_steps": train["grad_accumulation"],
        "learning_rate": train["lr"],
        "warmup_steps": train["warmup_steps"],
        "weight_decay": train["weight_decay"],
        "adam_beta1": train["betas"][0],
        "adam_beta2": train["betas"][1],
        "max_grad_norm": train["grad_clip"],
        "seed": train["seed"],
        "bf16": experiment.dtype == "bf16",
        "fp16": experiment.dtype == "fp16",
        "gradient_checkpointing": train["activation_checkpointing"],
        "eval_strategy": "steps" if train["eval_every"] else "no",
        "eval_steps": train["eval_every"] or None,
        "save_strategy": "steps" if checkpoint["every"] else "no",
        "save_steps": checkpoint["every"] or 1,
        "save_total_limit": checkpoint["keep"],
        "ddp_timeout": int(train["timeout_s"]),
    }


def batch_of(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Collates rows of tokens into int64 tensors ``[batch, seq_length]``. A causal model shifts its labels itself."""
    ids = torch.tensor([row["input_ids"] for row in rows])
    return {"input_ids": ids, "labels": ids}


def build_model(experiment: Experiment, tokenizer: Any) -> Any:
    """Builds the model, with random weights from the seed or with the weights of ``model.path``. No code of its folder runs.

    Raises:
        ConfigError: Weights and architecture differ, and ``model.allow_other_weights`` is false.
    """
    model, config = experiment["model"], transformers_config(experiment["model"])
    if config.eos_token_id is None:  # without it, generation never ends
        config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    transformers.set_seed(experiment["train"]["seed"])
    source, dtype = checkpoint_folder(model), _DTYPES[experiment.dtype]
    if source is None:
        return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    with library_errors(f"model.path: cannot load the weights in {str(source)!r}"):
        built, loaded = AutoModelForCausalLM.from_pretrained(
            str(source),
            config=config,
            dtype=dtype,
            trust_remote_code=False,
            local_files_only=True,
            use_safetensors=any(source.glob("*.safetensors")) or None,
            weights_only=True,
            ignore_mismatched_sizes=True,  # listed below
            output_loading_info=True,
        )
    if getattr(built, "is_quantized", False):
        why = "expected weights that can be trained; docs/recipes.md, QLoRA, trains adapters"
        raise ConfigError(f"model.path: found quantised weights in {str(source)!r}; {why}")
    try:
        built.generation_config.validate(strict=True)
    except ValueError:  # for example a temperature without sampling, which transformers loads but refuses to save
        built.generation_config = transformers.GenerationConfig.from_model_config(config)
    tied = set(getattr(built, "all_tied_weights_keys", ()) or ())
    wrong = {
        "lacks": sorted(set(loaded["missing_keys"]) - tied),
        "has more than the architecture:": sorted(loaded["unexpected_keys"]),
        "has other sizes of": sorted(str(key[0]) for key in loaded["mismatched_keys"]),
    }
    if any(wrong.values()) and not model["allow_other_weights"]:
        found = "; ".join(f"{what} {len(keys)} weights ({some(keys, 2)})" for what, keys in wrong.items() if keys)
        raise ConfigError(
            f"model.path: {str(source)!r} {found}; expected the architecture's weights, or "
            "model.allow_other_weights=true"
        )
    return built


class ShardTrainer(Trainer):
    """Trainer whose checkpoints contain weights only as DeepSpeed's shards."""

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        """The batches of a step; none after the last step, for a resumed run that only lacks its evaluation."""
        num_batches = num_batches if self.state.global_step < self.state.max_steps else 0
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False, weights: Any = None) -> None:
        """Saves configuration and tokenizer, and ``weights`` if given. A checkpoint has its weights in the shards."""

        def save() -> None:
            if self.args.should_save:
                os.makedirs(str(output_dir), exist_ok=True)
                self.model.config.save_pretrained(output_dir)
                self.processing_class.save_pretrained(output_dir)
                if weights is not None:
                    self.model.save_pretrained(output_dir, state_dict=weights)
                for file in Path(str(output_dir)).glob("*.safetensors"):  # safetensors ignores the umask
                    file.chmod(file.with_name("config.json").stat().st_mode)

        if output_dir is not None:
            save_together(output_dir, save)


def save_whole(trainer: ShardTrainer, folder: Path) -> None:
    """Saves the model with its exact weights, for ``from_pretrained``. Collective."""
    with hzero.exact_weights(trainer.model_wrapped):
        weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    trainer.save_model(str(folder), weights=weights)


class _Meter(TrainerCallback):
    """Measures time, received bytes and memory of the steps on this rank.

    Attributes:
        seconds: Seconds of each step.
        log: Wire log of this rank.
        memory: Bytes of every state of this rank.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self.seconds = trainer, list[float]()
        self.log: list[dict[str, Any]] = []
        self.memory: dict[str, int] = {}

    def _settled(self) -> Any:
        """The stage's state after the refresh that belongs to the last step, so that its wire log has whole steps."""
        if (stage := hzero.state(self._trainer.model_wrapped)) is not None:
            stage.weights.refresh()
            stage.settle()
        return stage

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (stage := self._settled()) is not None:
            stage.wire_log.reset()
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        began, self._began = self._began, time.perf_counter()
        self.seconds.append(self._began - began)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (stage := self._settled()) is not None:
            self.log = stage.wire_log.as_dicts()
            self.memory = stage.memory(self._trainer.model_wrapped.optimizer)


class _Losses(TrainerCallback):
    """Writes ``steps.jsonl`` on rank 0, and prints a line for every tenth of the run."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "steps.jsonl"

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._began = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or "loss" not in (logs or {}):
            return
        step, last = state.global_step, state.max_steps
        began, self._began = self._began, time.perf_counter()
        row = {"step": step, "loss": logs["loss"], "seconds": round(self._began - began, 6)}
        with open(self._file, "a", opener=regular) as file:  # flushed at once, since a run may be killed
            print(json.dumps(row), file=file)
        if step in (1, last) or step % max(last // 10, 1) == 0:
            line = f"step {step}/{last}  loss {logs['loss']:.4f}  gradient norm {logs.get('grad_norm', 0):.3f}"
            print(line, flush=True)


class _Trace(TrainerCallback):
    """Writes torch's profile of one step on rank 0, as ``trace.json.gz``."""

    def __init__(self, step: int, folder: Path) -> None:
        self._step, self._file = step, folder / "trace.json.gz"

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero and state.global_step + 1 == self._step:
            self._profile = torch.profiler.profile()
            self._profile.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero and state.global_step == self._step:
            self._profile.stop()
            os.close(regular(self._file, os.O_WRONLY | os.O_CREAT))  # torch would follow a link
            self._profile.export_chrome_trace(str(self._file))
