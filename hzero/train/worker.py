"""One rank of a run: ``python -m hzero.train.worker RUN_FOLDER``, or a process of srun, torchrun or mpiexec."""

from __future__ import annotations

import functools
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import yaml

from hzero.files import refusing, replacing
from hzero.launcher import UNFINISHED, run_rank
from hzero.train.folder import CONFIG, LOGS
from hzero.train.stop import TIME_SIGNAL, Stop

JOB = "job.json"
#: Modules that take a rank long to import; the first engine imports torch's compiler, and an optimizer that starts it.
RANK_IMPORTS = (
    *("deepspeed", "torch._inductor.compile_fx", "deepspeed.runtime.zero.muon.muon_optimizer"),
    *("hzero.zero", "hzero.train.loop"),
)


def write_job(run_dir: Path, cache: Path, source: str, resume_from: Path | None, ends_at: float | None) -> None:
    """Writes the paths of the tokenised text and of the checkpoint to resume from, and when the job ends, for the ranks."""
    job: dict[str, Any] = {
        "tokens": str(cache),
        "source": source,
        "resume_from": str(resume_from) if resume_from else None,
    }
    job |= {"ends_at": ends_at}
    with refusing("run.dir", run_dir), replacing(run_dir / LOGS / JOB) as file:
        json.dump(job, file)


def train_rank(run_dir: Path, stop: Stop) -> int:
    """Runs this rank's share of the run; the process group is up.

    Returns:
        0, or 75 if the run was stopped before its last step.
    """
    from hzero.collectives import blaming
    from hzero.settings.settings import Settings
    from hzero.train import checkpoint, corpus
    from hzero.train.loop import Loop
    from hzero.train.pipeline_parallel import PipelineLoop

    job = json.loads((run_dir / LOGS / JOB).read_text())
    settings = Settings(_config(run_dir), world_size=int(os.environ["WORLD_SIZE"]))
    found = corpus.load(Path(job["tokens"]), settings["data"]["eval_share"], job["source"])
    resume_from = checkpoint.read(Path(job["resume_from"]), hashes=False) if job["resume_from"] else None
    stop.ends_at = job["ends_at"]
    with blaming():
        loop = Loop if settings.layout.pipeline == 1 else PipelineLoop
        return UNFINISHED if loop(settings, run_dir, found, resume_from, stop).run() else 0


def prepare_process(threads: int) -> None:
    """Prepares a rank's process before torch is imported: fewer threads, no search for absent accelerators."""
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.simplefilter("ignore")
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        torch.set_num_threads(threads)


def _config(run_dir: Path) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((run_dir / CONFIG).read_text())
    return config


def _started_here(run_dir: Path) -> int:
    stop = Stop()
    stop.remember(TIME_SIGNAL)
    prepare_process(int(os.environ["OMP_NUM_THREADS"]))
    from hzero.train.loop import start_process_group

    start_process_group(_config(run_dir)["train"]["timeout_s"])
    return train_rank(run_dir, stop)


if __name__ == "__main__":
    run_dir = Path(sys.argv[1])
    run_rank(functools.partial(_started_here, run_dir))
