"""FSDP2's HSDP over the node on an experiment of `hzero train`: the same weights, batches, optimizer and schedule, as a peer.

srun ... python slurm/hsdp.py experiment=paper_10b train.steps=20 run.dir=FOLDER
"""

import json
import os
import sys
import time
from functools import partial
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import Trainer, TrainingArguments

from hzero.errors import from_rank_0
from hzero.tools.commands.train import _prepare_process
from hzero.tools.data import corpus
from hzero.tools.experiment import compose
from hzero.tools.launch import launched, run_launched


def train(arguments: list[str]) -> None:
    """Trains on this rank. Rank 0 writes ``steps.jsonl``, as `hzero train` does, and the peak of its memory."""
    from hzero.tools.commands.trainer import arguments_of, batch_of, build_model, join

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    join(600)
    experiment = compose([*arguments, f"launcher.world_size={dist.get_world_size()}"])
    folder, settings = Path(experiment["run"]["dir"]), experiment["train"]
    text = from_rank_0(lambda: corpus.prepare(experiment, print))
    with device:  # one whole copy in 16 bits, which shrinks layer by layer
        model = build_model(experiment, text.tokenizer)
    given = {**arguments_of(experiment, folder), "deepspeed": None, **experiment["trainer"]}
    if settings["activation_checkpointing"]:
        model.gradient_checkpointing_enable(given["gradient_checkpointing_kwargs"])
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    shape = (dist.get_world_size() // local, local)
    mesh = dist.device_mesh.init_device_mesh(device.type, shape, mesh_dim_names=("node", "device"))
    narrow = torch.bfloat16 if experiment.dtype == "bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=narrow)
    units = [module for module in model.modules() if type(module).__name__ in model._no_split_modules]
    for module in (*units, model):  # float32 masters, as ZeRO has them
        fully_shard(module.float(), mesh=mesh, mp_policy=policy)
        # RCCL's average of bfloat16 takes twice the time of its sum (ROCm/rocm-systems#9054).
        module.set_force_sum_reduction_for_comms(True)
    trainer = Trainer(model, TrainingArguments(**given), batch_of, train_dataset=text.train)
    trainer.create_optimizer_and_scheduler(settings["steps"])
    loader, micro_steps = trainer.get_train_dataloader(), settings["grad_accumulation"]
    batches = (batch for epoch in count() if loader.set_epoch(epoch) is None for batch in loader)
    for step in range(1, settings["steps"] + 1):
        began, total = time.perf_counter(), torch.zeros((), device=device)
        for micro_step in range(1, micro_steps + 1):
            model.set_is_last_backward(micro_step == micro_steps)
            model.set_requires_all_reduce(micro_step == micro_steps)
            loss = model(**next(batches)).loss / micro_steps
            loss.backward()
            total += loss.detach()
        if settings["grad_clip"]:
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings["grad_clip"])
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
        trainer.optimizer.zero_grad()
        dist.all_reduce(total)
        row = {"step": step, "loss": total.item() / dist.get_world_size(), "seconds": time.perf_counter() - began}
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / "steps.jsonl").open("a") as file:
                print(json.dumps(row), file=file)
    if dist.get_rank() == 0:
        (folder / "summary.json").write_text(json.dumps({"peak_bytes": torch.cuda.max_memory_allocated()}) + "\n")
    dist.barrier()


if __name__ == "__main__":
    _prepare_process(1)
    if not launched():
        sys.exit("hsdp.py: found one process; expected ranks of srun, torchrun or mpiexec")
    run_launched(partial(train, sys.argv[1:]))
