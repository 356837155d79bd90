"""One rank of a run: ``python -m hzero.train.worker RUN_FOLDER``, or a process of srun or torchrun."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any, NoReturn

import yaml

from hzero.config import ConfigError
from hzero.train.folder import CONFIG, LOGS

JOB = "job.json"


def write_job(run_dir: Path, cache: Path, source: str, resume_from: Path | None) -> None:
    """Leaves for the ranks what the parent has found: the tokenised text, and the checkpoint to go on from."""
    job = {"tokens": str(cache), "source": source, "resume_from": str(resume_from) if resume_from else None}
    (run_dir / LOGS / JOB).write_text(json.dumps(job))


def train_rank(run_dir: Path) -> None:
    """Runs this rank's share of the run; the process group is up."""
    from hzero.train import checkpoint, data
    from hzero.train.loop import Loop
    from hzero.train.settings import Settings

    sys.stdout = PatientStream(sys.stdout)  # type: ignore[assignment]
    config: dict[str, Any] = yaml.safe_load((run_dir / CONFIG).read_text())
    job = json.loads((run_dir / LOGS / JOB).read_text())
    settings = Settings(config, world_size=int(os.environ["WORLD_SIZE"]))
    tokens = data.load(Path(job["tokens"]), settings["data"]["eval_share"], job["source"])
    resume_from = checkpoint.read(Path(job["resume_from"])) if job["resume_from"] else None
    Loop(settings, run_dir, tokens, resume_from).run()


class PatientStream:
    """Standard output that outlives its reader: ``hzero train | head`` must not end the training."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes, to nowhere once the reader is gone."""
        try:
            self._stream.write(text)
        except BrokenPipeError:
            self._stream = open(os.devnull, "w")  # noqa: SIM115 - open as long as the process
        return len(text)

    def flush(self) -> None:
        """Flushes, with the same patience."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._stream = open(os.devnull, "w")  # noqa: SIM115

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def prepare_process(threads: int) -> None:
    """What every rank does before it imports torch: fewer threads, no accelerator probing where there is none."""
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.simplefilter("ignore")
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        torch.set_num_threads(threads)


def die_with_parent() -> None:
    """Asks Linux to kill this rank when the launcher is gone, however it went: no orphans."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def end_with(error: BaseException, logs: Path, plain: bool = False) -> NoReturn:
    """Ends a rank that a launcher watches, leaving for it why.

    Args:
        error: The exception under way.
        logs: The launcher's folder.
        plain: Whether the message says all, so that no traceback is needed; input that cannot be used is plain anyway.
    """
    refused = isinstance(error, ConfigError)
    partial = logs / f"rank{os.environ['RANK']}.partial"
    partial.write_text(str(error) if refused or plain else traceback.format_exc())
    partial.rename(partial.with_suffix(".refused" if refused else ".traceback"))
    traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)  # a process group with a dead peer can take minutes to be torn down


def main() -> None:
    """Entry point of a rank that the command has started itself."""
    die_with_parent()
    run_dir = Path(sys.argv[1])
    try:
        prepare_process(int(os.environ["OMP_NUM_THREADS"]))
        from hzero.train.loop import start_process_group

        config = yaml.safe_load((run_dir / CONFIG).read_text())
        start_process_group(config["train"]["timeout_s"])
        train_rank(run_dir)
    except BaseException as error:
        end_with(error, run_dir / LOGS)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
