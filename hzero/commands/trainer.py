"""One rank of a run: a model, Hugging Face's Trainer with the stage, and the summary at the end."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import transformers
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.integrations import deepspeed as integration

import hzero
from hzero.comm import blaming
from hzero.commands import summary
from hzero.commands.corpus import Corpus
from hzero.commands.ds_config import build, check_names
from hzero.commands.experiment import Experiment, checkpoint_folder, transformers_config
from hzero.deepspeed import StageState
from hzero.deepspeed.clients import save_together
from hzero.deepspeed.refusals import check_written
from hzero.launch import UNFINISHED
from hzero.validation import ConfigError, from_rank_0, some

#: From this many parameters on, ``zero_init: auto`` partitions each layer as it is built.
ZERO_INIT_FROM = 500_000_000
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# A C++ extension that DeepSpeed would build and stage 3 never uses. The first look at this dictionary makes DeepSpeed try
# compilers, for a second: at import, so that ranks that are forked afterwards need not.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def join(timeout_s: float) -> None:
    """Joins the world of the ranks, quietly. A collective may take ``timeout_s`` seconds."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.utils.logger.setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    accelerator = deepspeed.accelerator.get_accelerator()
    backend = "gloo" if accelerator.device_name() == "cpu" else accelerator.communication_backend_name()
    deepspeed.init_distributed(dist_backend=backend, timeout=timedelta(seconds=timeout_s), verbose=False)


def run_rank(experiment: Experiment, corpus: Corpus, folder: Path, resume: str | None) -> int:
    """Trains on this rank, a member of a world or about to join one, and writes the results.

    Args:
        experiment: The experiment.
        corpus: Its text.
        folder: The run's folder.
        resume: Checkpoint to resume from.

    Returns:
        0, or 75 if the run has saved and stopped before its last step.
    """
    if not dist.is_initialized():
        join(experiment["train"]["timeout_s"])
    stop = hzero.StopAndSave(experiment["train"]["time_limit"])
    partition = experiment["model"]["zero_init"]
    if partition == "auto":
        # Once Trainer has its arguments, transformers would also partition the model that is counted.
        partition = sum(experiment.numels) >= ZERO_INIT_FROM
    arguments = TrainingArguments(**_arguments(experiment, folder))
    model = build_model(experiment, arguments, corpus.tokenizer, partition)
    trainer = ShardTrainer(model, arguments, **_data(corpus))
    trainer.remove_callback(PrinterCallback)
    meter = _Meter(trainer)
    for callback in (meter, _Progress(), _Sample(experiment, trainer), stop):
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
        found = summary.summary_of(
            experiment,
            trainer.state,
            stopped=bool(status),
            accumulation=trainer.args.gradient_accumulation_steps,
            numels=[param.ds_numel for param in trainer.model.parameters()],
            step_seconds=meter.seconds,
            ranks=everyones,
            eval_loss=eval_loss,
        )
        summary.write(found, folder)
        lines = ["", *summary.lines(found), "", summary.closing_line(found), f"run folder: {folder}"]
        if status:
            lines.append(f"stopped after a save: the same command with resume=auto run.dir={folder} goes on")
        print("\n".join(lines), flush=True)
    if not status and experiment["checkpoint"]["model"]:  # last, since it may fail
        with blaming():
            save_whole(trainer, folder / "model", _DTYPES[experiment["checkpoint"]["dtype"] or experiment.dtype])
    return status


def check(experiment: Experiment, corpus: Corpus) -> None:
    """Builds what ranks build from the groups ``trainer`` and ``deepspeed``, around one weight, before ranks start.

    Raises:
        ConfigError: Trainer or DeepSpeed refuses a value.
    """
    model = torch.nn.Linear(1, 1)
    model.config = transformers_config(experiment["model"])
    with tempfile.TemporaryDirectory() as folder:
        # A jit checkpoint would take this process's signals, and a Linear uses no column of the text.
        changes = {"deepspeed": None, "use_cpu": True, "fp16": False, "enable_jit_checkpoint": False}
        with _refused("trainer"):
            given = {**_arguments(experiment, Path(folder)), **changes, "remove_unused_columns": False}
            arguments = TrainingArguments(**given)
            trainer = Trainer(model, arguments, **_data(corpus))
            trainer.get_train_dataloader()
            trainer.create_optimizer_and_scheduler(arguments.max_steps)
    with _refused("deepspeed"):
        filled = integration.HfTrainerDeepSpeedConfig(experiment.deepspeed_config())
        filled.trainer_config_process(arguments)
        filled.trainer_config_finalize(arguments, model, arguments.max_steps)
        read = check_written(filled.config, experiment.data_parallel.world_size)
        check_names(read)
        build(read)


@contextlib.contextmanager
def _refused(group: str) -> Iterator[None]:
    """Inside, an error of Trainer or DeepSpeed is a `ConfigError` that names the group of the configuration."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # of many types, by the key
        raise ConfigError(f"{group}: {' '.join(str(error).split())}") from None


def _arguments(experiment: Experiment, folder: Path) -> dict[str, Any]:
    """Arguments of ``TrainingArguments``."""
    return {
        **experiment.trainer_arguments(),
        "output_dir": str(folder),
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "report_to": "none",
        "log_on_each_node": False,
        "use_cpu": not torch.cuda.is_available(),
        "deepspeed": experiment.deepspeed_config(),
        **experiment["trainer"],
    }


def _data(corpus: Corpus) -> dict[str, Any]:
    """Arguments of ``Trainer`` that are about the text."""
    return {
        "train_dataset": corpus.train,
        "eval_dataset": corpus.evaluation,
        "processing_class": corpus.tokenizer,
        "data_collator": _batch,
    }


def _batch(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    ids = torch.tensor([row["input_ids"] for row in rows])
    return {"input_ids": ids, "labels": ids}


def build_model(experiment: Experiment, arguments: TrainingArguments, tokenizer: Any, partition: bool) -> Any:
    """The model: random weights that depend on the seed, or those of ``model.path``. No code of its folder runs.

    Raises:
        ConfigError: Weights and architecture differ, and ``model.allow_other_weights`` is false.
    """
    model, config = experiment["model"], transformers_config(experiment["model"])
    if config.eos_token_id is None:  # without it, generation never ends
        config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    transformers.set_seed(experiment["train"]["seed"])
    source, dtype = checkpoint_folder(model), _DTYPES[experiment.dtype]
    if not partition:
        integration.unset_hf_deepspeed_config()  # or transformers would build under zero.Init
    if source is None:
        built = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    else:
        try:
            built, loaded = AutoModelForCausalLM.from_pretrained(
                str(source),
                config=config,
                dtype=dtype,
                trust_remote_code=False,
                local_files_only=True,
                use_safetensors=any(source.glob("*.safetensors")) or None,
                weights_only=True,
                ignore_mismatched_sizes=True,  # they are named below
                output_loading_info=True,
            )
        except Exception as error:  # of many kinds, by the format of the weights
            why = " ".join(str(error).split())[:300]
            raise ConfigError(f"model.path: cannot load the weights in {str(source)!r}: {why}") from None
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
    integration.set_hf_deepspeed_config(arguments.hf_deepspeed_config)
    return built


class ShardTrainer(Trainer):
    """Trainer whose checkpoints are DeepSpeed's shards alone."""

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        """The batches of a step; none after the last, for a run that stopped there and has its evaluation left."""
        num_batches = num_batches if self.state.global_step < self.state.max_steps else 0
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves configuration and tokenizer, for a checkpoint, whose shards hold the weights."""

        def save() -> None:
            if self.args.should_save:
                os.makedirs(str(output_dir), exist_ok=True)
                self.model.config.save_pretrained(output_dir)
                self.processing_class.save_pretrained(output_dir)

        if output_dir is not None:
            save_together(output_dir, save)


def save_whole(trainer: Trainer, folder: Path, dtype: torch.dtype) -> None:
    """Saves the model with its exact weights, for ``from_pretrained``. Collective.

    Raises:
        ConfigError: A weight is too large for float16. The message names it.
    """
    with hzero.exact_weights(trainer.model_wrapped):
        weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if dtype == torch.float16:
        from_rank_0(lambda: _check_float16(weights))

    def save() -> None:
        if trainer.args.should_save:
            for name, tensor in weights.items():  # one after the other: a second copy may not fit
                if tensor.is_floating_point():
                    weights[name] = tensor.to(dtype)
            trainer.model.config.dtype = dtype
            trainer.model.save_pretrained(folder, state_dict=weights)
            trainer.processing_class.save_pretrained(folder)
            for file in folder.glob("*.safetensors"):
                file.chmod((folder / "config.json").stat().st_mode)  # safetensors ignores the umask

    save_together(str(folder), save)


def _check_float16(weights: dict[str, torch.Tensor]) -> None:
    limit = torch.finfo(torch.float16).max
    for name, tensor in weights.items():
        if tensor.is_floating_point() and not bool((tensor.abs() <= limit).all()):
            raise ConfigError(
                f"checkpoint.dtype: found fp16, but weight {name!r} reaches {float(tensor.abs().max()):,.0f}, more than "
                f"{limit:,.0f}; expected bf16 or fp32"
            )


class _Meter(TrainerCallback):
    """Measures what the steps of this process received and took.

    Attributes:
        seconds: Seconds of each step.
        log: Wire log of this rank.
        memory: Bytes of every state of this rank.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self.seconds = trainer, list[float]()
        self.log: list[dict[str, Any]] = []
        self.memory: dict[str, int] = {}

    def _settled(self) -> StageState | None:
        """The stage's state, whose wire log holds whole steps: the refresh that follows a step is part of it."""
        state = hzero.state(self._trainer.model_wrapped)
        if isinstance(state, StageState):
            state.weights.resident.refresh()
            state.settle()
            return state
        return None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (stage := self._settled()) is not None:
            stage.wire_log.reset()
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self._began)
        self._began = now

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (stage := self._settled()) is not None:
            self.log = stage.wire_log.as_dicts()
            self.memory = stage.memory(self._trainer.model_wrapped.optimizer)


class _Progress(TrainerCallback):
    """On rank 0 a progress bar with the loss, if stderr is a terminal, and a line for every tenth of the run."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        hidden = None if state.is_world_process_zero else True  # None: without a terminal
        self._bar = tqdm(total=state.max_steps, initial=state.global_step, disable=hidden, dynamic_ncols=True)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or "loss" not in (logs or {}):
            return
        step, last = state.global_step, state.max_steps
        self._bar.set_postfix_str(f"loss {logs['loss']:.3f}", refresh=False)
        self._bar.update(step - self._bar.n)
        if step in (1, last) or step % max(last // 10, 1) == 0:
            say(f"step {step}/{last}  loss {logs['loss']:.4f}  gradient norm {logs.get('grad_norm', 0):.3f}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._bar.close()


def say(line: str) -> None:
    """Prints a line above the progress bar."""
    tqdm.write(line, file=sys.stdout)
    sys.stdout.flush()


class _Sample(TrainerCallback):
    """Lets the model write text after every evaluation."""

    def __init__(self, experiment: Experiment, trainer: Trainer) -> None:
        sample, length = experiment["sample"], experiment["model"]["seq_length"]
        self._trainer, self._tokens = trainer, min(sample["tokens"], length // 2)
        ids = trainer.eval_dataset[0]["input_ids"][:16]
        if sample["prompt"]:
            ids = trainer.processing_class(sample["prompt"])["input_ids"]
        self._prompt = torch.tensor([ids[self._tokens - length :]], device=trainer.args.device)

    @torch.no_grad()
    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        engine, tokenizer = self._trainer.model_wrapped, self._trainer.processing_class
        with hzero.exact_weights(engine), torch.random.fork_rng(enabled=True):
            torch.manual_seed(state.global_step)
            # Ranks call forward equally often, since every one gathers; weights that are not finite end no run.
            written = engine.module.generate(
                self._prompt,
                attention_mask=torch.ones_like(self._prompt),
                synced_gpus=True,
                remove_invalid_values=True,
                do_sample=True,
                temperature=0.8,
                top_k=0,
                max_new_tokens=self._tokens,
                pad_token_id=tokenizer.pad_token_id or 0,
            )
        if dist.get_rank() == 0:
            prompt, answer = (tokenizer.decode(ids[0]) for ids in (self._prompt, written[:, self._prompt.shape[1] :]))
            text = f"sample after step {state.global_step}: {prompt!r} -> {answer!r}"
            say(textwrap.fill(text, 78, subsequent_indent="  "))
