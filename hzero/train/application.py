"""``hzero train``: a Hydra application that checks everything, prepares text and folder, and starts the ranks or is one."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from hydra import main as hydra_main
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hzero.bootstrap import bootstrap
from hzero.files import FULL, cannot_write
from hzero.formatting import size_text
from hzero.launcher import (
    INTERRUPTED,
    REFUSED,
    STARTED,
    UNFINISHED,
    PatientStream,
    Ranks,
    end_with_parent,
    local_ranks,
    on_rank_0,
)
from hzero.reasons import PeerError, PlainError, disk_error
from hzero.settings.buffers import buffers_of
from hzero.settings.conf import conf_dir, one_line, plain
from hzero.settings.settings import Settings
from hzero.sharding.memory import plan_memory, zero3_memory
from hzero.train import checkpoint, corpus, data, export, folder, monitor, stop
from hzero.train import status as run_status
from hzero.train.overrides import check
from hzero.train.stop import TIME_SIGNAL
from hzero.train.worker import RANK_IMPORTS, prepare_process, train_rank, write_job
from hzero.validation import ConfigError, seconds_of


def run(overrides: Sequence[str]) -> int:
    """Runs the application on Hydra's arguments; ``-m``, ``--help`` and ``--cfg job`` are among them.

    Returns:
        Exit status: 0, 1 if a rank failed, 2 for input that cannot be used (one line on stderr), 75 if the run has saved and
        stopped before its last step (`hzero.train.stop`), 130 after Ctrl-C.
    """
    statuses: list[int] = []
    began = time.time()

    def task(config: DictConfig) -> None:
        # In a multirun the first bad run must not keep the others from running.
        try:
            statuses.append(_train(config, began))
        except (ConfigError, PlainError) as error:
            if not error.elsewhere:
                print(f"hzero: error: {error}", file=sys.stderr)
            statuses.append(2 if isinstance(error, ConfigError) else 1)
        except OSError as error:
            if (line := disk_error(error)) is None:
                raise
            print(f"hzero: error: {line}", file=sys.stderr)
            statuses.append(1)
        if statuses[-1] == INTERRUPTED:
            raise KeyboardInterrupt  # ends a multirun as well
        if statuses[-1] == UNFINISHED:
            raise SystemExit(UNFINISHED)  # the same

    before = {number: signal.signal(number, _leave) for number in (signal.SIGTERM, TIME_SIGNAL)}
    argv = sys.argv
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come to us instead of being printed over several lines
    try:
        sys.argv = ["hzero train", *check(overrides)]
        hydra_main(config_path=str(conf_dir()), config_name="train", version_base="1.3")(task)()
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(one_line(error)) from None
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as left:  # Hydra's --help
        return left.code if isinstance(left.code, int) else 0
    finally:
        sys.argv = argv
        for number, handler in before.items():
            signal.signal(number, handler)
    return max(statuses, default=0)


def _leave(number: int, frame: object) -> None:
    """A signal while text is tokenised: leaves by an exception, so that the half-built corpus is removed."""
    raise SystemExit(UNFINISHED if number == TIME_SIGNAL else 128 + number)


def _signal_of(error: BaseException) -> str | None:
    """The signal that an exception comes from: that of `_leave`, or Ctrl-C."""
    if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code > 128:
        return signal.Signals(error.code - 128).name
    return "SIGINT" if isinstance(error, KeyboardInterrupt) else None


def _train(config: DictConfig, began: float) -> int:
    outside = _rank_of_a_launcher()
    if outside is not None:
        os.environ.update(outside)
        return _train_as_rank(config, began)
    settings = Settings(plain(config))
    if settings.plan is not None and settings.plan.transport == "mpi":
        raise ConfigError(
            "zero.transport: found 'mpi', whose ranks mpiexec or srun starts, as in mpiexec -n "
            f"{settings.world_size} hzero train zero.transport=mpi; possible for ranks that hzero starts: torch"
        )
    with contextlib.ExitStack() as claims:
        run_dir = _prepare(settings, claims, began)
        logs = run_dir / folder.LOGS
        said: list[str] = []
        ranks = Ranks(
            [sys.executable, "-m", "hzero.train.worker", str(run_dir)],
            local_ranks(settings.world_size, settings["launcher"]["threads"]),
            logs,
            imports=RANK_IMPORTS,
            start_timeout=settings["launcher"]["start_timeout_s"],
            timeout_key="launcher.start_timeout_s",
            stopping="the ranks finish their step and save (again to stop at once)",
            stopping_early="training had not begun",
            passed_on=(TIME_SIGNAL,),
            say=lambda line: _say_and_keep(line, said),
        )
        try:
            status = ranks.run()
        except OSError as error:
            if error.errno not in FULL:
                raise
            folder.undo(run_dir)
            raise ConfigError(cannot_write("run.dir", run_dir, error)) from None
        found = run_status.read(run_dir)
        begun = (logs / STARTED).exists()
        if not begun and (status in (REFUSED, INTERRUPTED) or folder.set_aside(run_dir)):
            folder.undo(run_dir)
        if status == 1 or (begun and status == INTERRUPTED):  # ranks that end well have noted it
            _note_end(run_dir, "failed" if status == 1 else "interrupted", said, found)
        return status


def _note_end(run_dir: Path, state: run_status.State, said: Sequence[str], found: dict[str, Any]) -> None:
    """Notes why a job has ended, if its run is there: nothing is left of one that has never begun."""
    lines = [line for text in said for line in text.splitlines()]
    reason = next((line for line in lines if line.endswith("all ranks are ended")), lines[0] if lines else None)
    with contextlib.suppress(OSError):  # the disk is full
        if folder.holds_run(run_dir):
            run_status.end(run_dir, state, reason, found)


def _say_and_keep(line: str, said: list[str]) -> None:
    said.append(line)
    print(line, file=sys.stderr, flush=True)


def _prepare(settings: Settings, claims: contextlib.ExitStack, began: float) -> Path:
    """Checks and prepares everything before anything is written into the run's folder.

    Args:
        settings: The run's settings.
        claims: Receives the lock of the folder, which is released at the end of the run.
        began: When the command was started, in seconds of the clock.

    Returns:
        The run's folder.
    """
    directory, resume, overwrite = str(settings["run"]["dir"]), settings["resume"], settings["run"]["overwrite"]
    directory += _suffix(settings.preset)
    run_dir = folder.choose(directory, resume, overwrite, fixed="SLURM_JOB_ID" in os.environ)
    claimed = run_dir.is_dir()
    if claimed:
        claims.enter_context(folder.lock(run_dir))
    prepare_process(settings["launcher"]["threads"])
    monitor.check(settings["train"]["monitor"])
    _check_machine(settings)
    tokens, tokenizer = corpus.prepare(settings, _say)
    identity, trust = checkpoint.identity_of(settings, tokens.key), settings["checkpoint"]["trust"]
    found = checkpoint.find(resume, run_dir, identity, trust=trust, warn=_warn)
    if found is not None:
        given, settings = settings, checkpoint.with_its_batch(settings, found)
        if settings is not given:
            _say(
                f"train.grad_accumulation={settings['train']['grad_accumulation']} in place of "
                f"{given['train']['grad_accumulation']}: the checkpoint's steps have {found.identity.sequences} sequences"
            )
        if found.identity.world_size != settings.world_size:
            _say(f"{found.folder.name} of {found.identity.world_size} ranks goes on with {settings.world_size}")
    steps = settings["train"]["steps"]
    # A run that was stopped between its last step and its summary has an evaluation left to do.
    unfinished = resume == "auto" and not folder.finished(run_dir)
    if found is not None and (found.step > steps or (found.step == steps and not unfinished)):
        raise ConfigError(f"train.steps: found {steps}, but the run has {found.step} steps already")
    if resume == "auto" and found is None:
        _say("no checkpoint to resume from: starting at the first step (existing metrics are kept as metrics.N.jsonl)")
    if not claimed:
        # Another run may have come while text was tokenised.
        run_dir = folder.choose(directory, resume, overwrite, fixed="SLURM_JOB_ID" in os.environ)
        claims.enter_context(folder.lock(run_dir))
    if run_dir != Path(directory).expanduser():
        why = (
            "the newest run with a checkpoint" if resume == "auto" else f"run.overwrite=true would replace {directory}"
        )
        _say(f"run folder {run_dir} ({why})")
    try:
        run_status.end_lost(run_dir)
    except OSError as error:
        raise folder.not_now(cannot_write("run.dir", run_dir, error)) from None
    text = OmegaConf.to_yaml(OmegaConf.create(settings.config))
    folder.create(run_dir, text, overwrite, found.step if found else None)
    try:
        export.describe(run_dir, settings["model"], tokenizer)
        limit = settings["train"]["time_limit"]
        ends_at = stop.ends_at(seconds_of(limit) if limit is not None else None, began)
        resume_from = found.folder if found else None
        write_job(run_dir, data.entry(settings["data"], tokens.key), tokens.source, resume_from, ends_at)
        run_status.begin(run_dir, step=found.step if found else 0, steps=steps, ranks=settings.world_size)
    except BaseException as error:
        if isinstance(error, OSError):
            error.filename = error.filename or str(run_dir)  # errors of a write name no file
        with contextlib.suppress(OSError):
            folder.undo(run_dir)
        raise
    grid, preset = settings.grid, settings.preset
    _say(f"{settings['model']['name']} on {tokens.source}, {settings.world_size} ranks: {grid}, preset {preset}")
    return run_dir


def _suffix(preset: str) -> str:
    """What tells the folders of a multirun's runs apart."""
    several = HydraConfig.initialized() and str(HydraConfig.get().mode).endswith("MULTIRUN")
    return f"-{HydraConfig.get().job.num}-{preset}" if several else ""


def _check_machine(settings: Settings) -> None:
    """Refuses a type that this machine cannot train in. Settings do not: a plan may be of another machine.

    Refuses a model whose states alone exceed the memory of this machine, if all ranks share it.

    Raises:
        ConfigError: Names the key, or both sizes.
    """
    import torch

    if settings.dtype == "fp16" and not torch.cuda.is_available():
        raise ConfigError(
            "train.dtype: found fp16, which DeepSpeed trains on accelerators only; possible: auto, fp32, bf16"
        )
    if torch.cuda.is_available() or _rank_of_a_launcher() is not None:
        return
    model = settings["model"]
    sizes, itemsize = settings.numels, settings.itemsize
    about: Any = {"itemsize": itemsize, "channels": 0, "buffers": buffers_of(settings)}
    if settings.plan is not None:
        states = plan_memory(settings.plan, sizes, accumulation=settings["train"]["grad_accumulation"], **about)
    else:
        states = zero3_memory(settings.layout.data_grid, sizes, **about)
    needed = sum(state.bytes for state in states if not state.name.startswith("transient")) * settings.world_size
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise ConfigError(
            f"model: {model['name']} has states of {size_text(needed)} on {settings.world_size} ranks, and this machine has "
            f"{size_text(there)} of memory; `hzero plan` shows what needs it"
        )


def _say(message: str) -> None:
    try:
        print(message, flush=True)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - the reader has left, which is no reason to stop


def _warn(message: str) -> None:
    print(f"hzero: warning: {message}", file=sys.stderr, flush=True)


def _rank_of_a_launcher() -> dict[str, str] | None:
    """The variables that torch.distributed needs if torchrun, srun or mpiexec has started this process as one of several."""
    start = bootstrap()
    return start.environment() if start.world_size > 1 else None


def _train_as_rank(config: DictConfig, began: float) -> int:
    """Trains as one rank of a launcher: rank 0 prepares, the others wait for it."""
    import torch.distributed as dist

    end_with_parent()
    stops = stop.Stop()
    stops.remember(TIME_SIGNAL)
    settings = Settings(plain(config), world_size=int(os.environ["WORLD_SIZE"]))
    prepare_process(settings["launcher"]["threads"])
    from hzero.train.loop import start_process_group  # imports DeepSpeed, which looks for an accelerator at once

    start_process_group(settings["train"]["timeout_s"])
    # Tokenising a large text takes longer than any collective may.
    patience = timedelta(seconds=settings["launcher"]["start_timeout_s"])
    patient = dist.new_group(backend="gloo", timeout=patience)
    sys.stdout = PatientStream(sys.stdout)  # type: ignore[assignment]
    with contextlib.ExitStack() as claims:
        try:
            run_dir = Path(on_rank_0(lambda: str(_prepare(settings, claims, began).resolve()), patient))
        except PlainError:
            raise
        except RuntimeError as error:
            if isinstance(error, PlainError) or dist.get_rank() == 0:
                raise
            raise RuntimeError(
                f"rank 0 has not prepared text and run folder within {patience} (launcher.start_timeout_s): {error}"
            ) from error
        try:
            status = train_rank(run_dir, stops)
        except BaseException as error:
            blamed = error.ranks if isinstance(error, PeerError) else ()
            if dist.get_rank() == next(rank for rank in itertools.count() if rank not in blamed):
                found = run_status.read(run_dir)
                if not (run_dir / folder.LOGS / STARTED).exists():
                    folder.undo(run_dir)
                if signalled := _signal_of(error):
                    _note_end(run_dir, "interrupted", [signalled], found)
                else:
                    _note_end(run_dir, "failed", str(error).splitlines() or [repr(error)], found)
            if isinstance(error, PlainError):
                if not error.elsewhere:
                    print(f"{error}", file=sys.stderr, flush=True)
                os._exit(1)  # a process group with a dead member can take minutes to be torn down
            raise
        if status:
            # Launchers end the ranks that are left once one ends with a status other than 0, so all have to be done.
            dist.barrier()
            sys.stdout.flush()
            os._exit(status)
        dist.destroy_process_group()
    return 0
