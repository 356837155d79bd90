"""Hugging Face's Trainer against plain ZeRO-3. Run by test_clients.py on 4 ranks."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

from hzero.deepspeed import versions
from tests.clients.cells import Run, assert_equal, assert_trains, llama, reset, samples
from tests.clients.config import ACCUMULATION, BATCH, CLIP, LR, STEPS, config_of
from tests.deepspeed.training import assert_losses, shared_folder
from tests.ranks import LONG

#: Of every Trainer.
ARGUMENTS: dict[str, Any] = {
    "per_device_train_batch_size": BATCH, "per_device_eval_batch_size": 4, "gradient_accumulation_steps": ACCUMULATION,
    "max_grad_norm": CLIP, "learning_rate": LR, "lr_scheduler_type": "constant", "max_steps": STEPS, "logging_steps": 1,
    "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True,
}  # fmt: skip


def trainer_of(
    config: dict[str, Any],
    folder: Path,
    model: Any = None,
    callbacks: Any = (),
    rows: int = STEPS * ACCUMULATION * BATCH * 4,
    **changes: Any,
) -> Trainer:
    """A Trainer of `STEPS` steps; ``changes`` are TrainingArguments."""
    return Trainer(
        llama() if model is None else model,
        TrainingArguments(output_dir=str(folder), deepspeed=config, **{**ARGUMENTS, **changes}),
        train_dataset=samples(rows),
        eval_dataset=samples(32, seed=1),
        callbacks=list(callbacks),
    )


def logged(trainer: Trainer, key: str) -> list[float]:
    """Values that the Trainer has logged, in order."""
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def trained(preset: str | None, folder: Path | None = None, resume: str | None = None, **changes: Any) -> Run:
    """A training; ``config`` changes the DeepSpeed configuration, the rest the arguments of the Trainer."""
    config = config_of(preset, **changes.pop("config", {}))
    trainer = trainer_of(config, folder or shared_folder(), **changes)
    trainer.train(resume_from_checkpoint=resume)
    run = Run(logged(trainer, "loss"), logged(trainer, "grad_norm"), logged(trainer, "eval_loss"))
    return run.end(trainer.model_wrapped)


@functools.cache
def saved(preset: str | None) -> tuple[Run, Path]:
    """A training with accumulation and clipping, and its checkpoint after half of the steps."""
    folder = shared_folder()
    return trained(preset, folder, save_strategy="steps", save_steps=STEPS // 2), folder / f"checkpoint-{STEPS // 2}"


def stock() -> Run:
    """Plain ZeRO-3."""
    return saved(None)[0]


def check_trainer_accumulates_and_clips() -> None:
    """Also with the clipping in effect."""
    assert max(stock().norms) > CLIP
    assert_equal(saved("fit")[0], stock())
    assert_trains(trained("topo"), stock())


BEST = {
    "eval_strategy": "steps", "save_strategy": "steps", "eval_steps": STEPS // 2, "save_steps": STEPS // 2,
    "load_best_model_at_end": True, "metric_for_best_model": "eval_loss",
}  # fmt: skip


@LONG
def check_trainer_evaluates_and_loads_the_best_model() -> None:
    """The best is asked to be the worst, which is not the last."""
    best = {**BEST, "greater_is_better": True}
    want = trained(None, **best)
    assert len(want.evaluations) == 2 and want.evaluations[1] < want.evaluations[0]
    torch.testing.assert_close(want.losses, stock().losses)
    name = "model.norm.weight"
    assert not torch.allclose(want.masters[name], stock().masters[name], rtol=1e-3), "the best was not loaded"
    assert_equal(trained("fit", **best), want)


def check_trainer_logs_losses_of_the_weights_it_saves() -> None:
    """With the key, with and without parameters that are kept whole."""
    key = {"hzero": {"exact_evaluation": True}}
    whole = {**key, "zero_optimization": {"stage3_param_persistence_threshold": 100}}
    runs = []
    for config in (whole, key):
        folder = shared_folder()
        runs.append(trained("topo", folder, **BEST, config=config))
        written = [loss_of_checkpoint(folder / f"checkpoint-{step}") for step in (STEPS // 2, STEPS)]
        assert_losses(runs[-1].evaluations, written, what="losses of evaluations and checkpoints")
    assert runs[0].losses == runs[1].losses, "an evaluation changes nothing in the training"
    trainer = trainer_of(config_of("topo", **key), shared_folder())
    assert_losses([trainer.evaluate()["eval_loss"]], [loss_of(llama())], what="loss of an engine without optimizer")
    trainer.model_wrapped.destroy()
    reset()


def loss_of(model: torch.nn.Module) -> float:
    """Loss of the evaluation's samples, computed by stock code on this rank."""
    tokens = torch.tensor([row["input_ids"] for row in samples(32, seed=1)])
    with torch.no_grad():
        return float(model(input_ids=tokens, labels=tokens).loss)


def loss_of_checkpoint(folder: Path) -> float:
    """The same of a checkpoint, read by DeepSpeed's own tool."""
    model = llama()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(str(folder)), strict=False)
    return loss_of(model)


def check_trainer_resumes() -> None:
    """From a checkpoint of hzero and of plain ZeRO-3, under the other one."""
    key = {"hzero": {"checkpoint": {}}}  # plain ZeRO-3 writes no list of files: nothing is compared
    assert_equal(trained("fit", resume=str(saved(None)[1]), config=key), stock())
    back = trained(None, resume=str(saved("fit")[1]))
    assert_losses(back.losses, stock().losses)
    assert_losses(back.norms, stock().norms, what="gradient norms")
    assert_trains(trained("topo", resume=str(saved("fit")[1])), stock())


@LONG
def check_trainer_exports_16_bit_weights() -> None:
    """What ``from_pretrained`` loads are the masters, rounded to bfloat16, and not decoded weights."""
    gathered = {"stage3_gather_16bit_weights_on_model_save": True}
    config = config_of("topo", bf16={"enabled": True}, zero_optimization=gathered)
    folder = shared_folder()
    trainer = trainer_of(config, folder, bf16=True)
    trainer.train()
    trainer.save_model(str(folder / "export"))
    run = Run(logged(trainer, "loss")).end(trainer.model_wrapped)
    assert_trains(run, stock())
    dist.barrier()  # rank 0 has written
    assert (folder / "export" / "model.safetensors").exists()
    loaded = LlamaForCausalLM.from_pretrained(folder / "export", dtype=torch.bfloat16)
    for name, param in loaded.named_parameters():
        assert torch.equal(param, run.masters[name].bfloat16()), name


def check_trainer_trains_lora() -> None:
    """Adapters by peft: most parameters are frozen. The saved adapter is that of the masters."""
    from peft import LoraConfig, PeftModel, get_peft_model  # takes long, and resume_checks does without

    # DeepSpeed before 0.19.3 looks for their hooks with hasattr, and peft's wrapper answers for the module that it wraps.
    whole = ["lm_head"] if versions.installed() >= (0, 19, 3) else None

    def adapted() -> Any:
        torch.manual_seed(1)
        return get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=whole))

    lora = {"learning_rate": 0.02, "config": {"optimizer": {"params": {"lr": "auto", "torch_adam": True}}}}
    want = trained(None, model=adapted(), **lora)
    assert_equal(trained("fit", model=adapted(), **lora), want)
    config = config_of("topo", zero_optimization={"stage3_gather_16bit_weights_on_model_save": True}, **lora["config"])
    folder = shared_folder()
    trainer = trainer_of(config, folder, adapted(), learning_rate=lora["learning_rate"])
    trainer.train()
    trainer.save_model(str(folder / "adapter"))
    run = Run(logged(trainer, "loss")).end(trainer.model_wrapped)
    assert_trains(run, want, fall=0.1 if whole else 0.02)
    dist.barrier()  # rank 0 has written
    loaded = dict(PeftModel.from_pretrained(llama(), folder / "adapter", is_trainable=True).named_parameters())
    assert all("lora" in name or "lm_head" in name for name in run.masters)
    for name, master in run.masters.items():
        assert torch.equal(loaded[name], master), name


@LONG
def check_trainer_fills_auto_values() -> None:
    """Trainer sets the persistence threshold to ten times the hidden size: norms are kept whole, matrices are not."""
    auto = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto")
    sizes = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    changes = {
        **auto,
        "train_batch_size": "auto",
        "optimizer": {"params": {**dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto"), "torch_adam": True}},
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "zero_optimization": dict.fromkeys(sizes, "auto"),
    }
    for preset in ("fit", "topo"):
        trainer = trainer_of(config_of(preset, **changes), shared_folder())
        trainer.train()
        kept = {name for name, param in trainer.model.named_parameters() if param.ds_persist}
        assert kept == {name for name, param in trainer.model.named_parameters() if "norm" in name}
        run = Run(logged(trainer, "loss"), logged(trainer, "grad_norm")).end(trainer.model_wrapped)
        (assert_equal if preset == "fit" else assert_trains)(run, stock())
