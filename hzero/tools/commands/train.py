"""``hzero train``: a Hydra application that checks an experiment, prepares text and folder, and runs the ranks."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import warnings
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from hydra import main as hydra_main
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

import hzero
from hzero.errors import ConfigError, from_rank_0, of_file, printable, report
from hzero.files import expanded, read_json, refusing, replacing
from hzero.schema import validated
from hzero.tools.data import corpus
from hzero.tools.experiment import (
    Configuration,
    Experiment,
    compose,
    conf_dir,
    for_hydra,
    key_lines,
    one_line,
    plain,
    transformers_config,
)
from hzero.tools.launch import INTERRUPTED, MAX_RANKS, REFUSED, UNFINISHED, launched, run_launched, run_ranks

#: Modules that are slow to import. The first engine imports torch's compiler, and Muon's module starts the compiler.
IMPORTS = ("torch._inductor.compile_fx", "deepspeed.runtime.zero.muon.muon_optimizer", "hzero.tools.commands.trainer")


def run_train(arguments: Sequence[str]) -> int:
    """Runs the application on Hydra's arguments; ``-m``, ``--help`` and ``--cfg job`` are among them.

    Returns:
        Exit status: 0, or 1 if a rank failed. 2 for invalid input, with one line on stderr. 75 if the run has saved and stopped
        before its last step. 130 after Ctrl-C.
    """
    statuses: list[int] = []
    running = False

    def task(config: DictConfig) -> None:
        nonlocal running
        running = True
        try:
            if statuses and launched():
                raise ConfigError("-m: found several runs for the ranks of a launcher; expected one run")
            statuses.append(_train(plain(config)))
        # In a multirun, the other runs continue after one with invalid input.
        except (ConfigError, OSError) as error:
            report(of_file(error) if isinstance(error, OSError) else error)
            statuses.append(REFUSED)
        except SystemExit as left:  # a launcher's rank has finished
            statuses.append(int(left.code or 0))
        running = False
        if statuses[-1] in (INTERRUPTED, UNFINISHED):
            raise SystemExit(statuses[-1])  # ends a multirun too

    argv = sys.argv
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises errors instead of printing several lines
    try:
        # Hydra's parser does not accept overrides on both sides of an option.
        ordered = sorted(arguments, key=lambda one: one.startswith("-") or "=" not in one)
        sys.argv = ["hzero train", *for_hydra(ordered)]
        if "--cfg" in arguments:  # Hydra prints values without checking them
            compose([one for one in ordered if "=" in one or one.startswith("~")])
        hydra_main(config_path=str(conf_dir()), config_name="train", version_base="1.3")(task)()
    except (HydraException, OmegaConfBaseException, TypeError, ValueError) as error:
        if running:  # Hydra also raises the last two, for an option that is not a name, as in zero=null
            raise
        raise ConfigError(one_line(error)) from None
    except SystemExit as left:  # of Hydra's --help, too
        if "--help" in arguments:
            lines = {
                key: f"  {key}={value.strip('?')}".ljust(40) + f" {meaning}" for key, value, meaning in key_lines()
            }
            print("\n== Keys (key=default) ==", *lines.values(), sep="\n")
        return left.code if isinstance(left.code, int) else 0
    finally:
        sys.argv = argv
    return max(statuses, default=0)


def _train(config: dict[str, Any]) -> int:
    _prepare_process(validated(Configuration, config, "").launcher.threads)
    if launched():
        run_launched(partial(_launched, config))
    experiment = Experiment(config)
    if experiment.world_size > MAX_RANKS:
        ranks = f"found {experiment.world_size:,} ranks for this machine"
        raise ConfigError(f"topology: {ranks}; expected at most {MAX_RANKS}, or ranks of torchrun, srun or mpiexec")
    text, folder, resume = _begin(experiment)
    work, threads = partial(_started, experiment, text, folder, resume), experiment["launcher"]["threads"]
    status = run_ranks(work, experiment.world_size, logs=folder / "logs", threads=threads, imports=IMPORTS)
    if status == REFUSED and {path.name for path in folder.iterdir()} <= {"experiment.yaml", "logs"}:
        shutil.rmtree(folder, ignore_errors=True)
    return status


def _prepare_process(threads: int) -> None:
    """Sets few threads, no search for absent accelerators, and no warnings, before torch is imported."""
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.simplefilter("ignore")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def _started(experiment: Experiment, text: corpus.Corpus, folder: Path, resume: str | None) -> int:
    from hzero.tools.commands.trainer import run_rank  # spawned ranks import it with their own variables

    return run_rank(experiment, text, folder, resume)


def _launched(config: dict[str, Any]) -> int:
    """Trains as a rank that torchrun, srun or mpiexec has started."""
    from hzero.tools.commands.trainer import dist, join, run_rank

    join(config["train"]["timeout_s"])
    experiment = Experiment(config, world_size=dist.get_world_size())
    # Tokenising a large text takes longer than the timeout of other collectives.
    patience = timedelta(seconds=experiment["launcher"]["start_timeout_s"])
    begun = from_rank_0(lambda: _begin(experiment), dist.new_group(backend="gloo", timeout=patience))
    return run_rank(experiment, *begun)


def _begin(experiment: Experiment) -> tuple[corpus.Corpus, Path, str | None]:
    """Prepares the text and the run's folder, and prints both.

    Returns:
        The text, the folder, and the checkpoint to resume from.

    Raises:
        ConfigError: This machine cannot train the model, the text cannot be read, or the checkpoint does not exist.
    """
    from hzero.tools.commands.trainer import check

    check(experiment)
    text = corpus.prepare(experiment, _say)
    folder, resume = _folder(experiment)
    if resume is not None:
        _check_checkpoint(experiment, text, Path(resume))
    with refusing("run.dir", folder):
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        with replacing(folder / "experiment.yaml") as file:
            yaml.safe_dump(experiment.config, file, sort_keys=False)
    on = f"{experiment.world_size} ranks: {experiment.grid}, preset {experiment.preset}"
    _say(f"{experiment['model']['name']} on {text.source}, {on}")
    if resume is not None:
        _say(f"resuming from {resume}")
    elif experiment["resume"] == "auto":
        _say("no complete checkpoint to resume from: starting at the first step")
    return text, folder, resume


def _folder(experiment: Experiment) -> tuple[Path, str | None]:
    """The run's folder, and the checkpoint to resume from.

    ``resume=auto`` resumes in ``run.dir`` itself. Otherwise, if the folder contains a run, the next free number is appended.
    """
    resume, suffix = experiment["resume"], ""
    if HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN:
        suffix = f"-{HydraConfig.get().job.num}-{experiment.preset}"
    folder = first = expanded(experiment["run"]["dir"] + suffix).absolute()
    if resume == "auto":
        return folder, hzero.newest_checkpoint(folder)
    number = 1
    while folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        number += 1
        folder = Path(f"{first}-{number}")
    if not resume:
        return folder, None
    path = expanded(str(resume)).absolute()
    checkpoint = str(path) if (path / "trainer_state.json").is_file() else hzero.newest_checkpoint(path)
    if checkpoint is None:
        expected = "false, auto, a run's folder or a checkpoint"
        raise ConfigError(f"resume: found no complete checkpoint in {str(path)!r}; expected {expected}")
    return folder, checkpoint


def _check_checkpoint(experiment: Experiment, text: corpus.Corpus, path: Path) -> None:
    """Raises `ConfigError` if a checkpoint has another model or tokenizer, or has already done all steps."""
    steps = experiment["train"]["steps"]
    done = read_json(path / "trainer_state.json").get("global_step", 0)
    # A run writes its summary before its model. If saving the model has failed, the run is not complete.
    last = "model/tokenizer.json" if experiment["checkpoint"]["model"] else "summary.json"
    if done > steps or (done == steps and (path.parent / last).is_file()):
        raise ConfigError(f"train.steps: found {steps}; expected more than the {done} that {str(path)!r} has done")
    saved = read_json(path / "config.json")
    for key, value in transformers_config(experiment["model"]).to_dict().items():
        shape = key.startswith(("hidden_", "num_", "vocab_", "intermediate_", "model_type"))
        if shape and saved.get(key, value) != value:  # sizes of parameters are not enough: other heads have the same
            raise ConfigError(f"model: found {key} {value!r}; expected {saved[key]!r}, as in {str(path)!r}")
    if read_json(path / "tokenizer.json")["model"] != json.loads(text.tokenizer.backend_tokenizer.to_str())["model"]:
        expected = "the text of that run, or a model.path with a tokenizer"
        raise ConfigError(f"data.path: {text.source} gives another tokenizer than {str(path)!r}; expected {expected}")


def _say(line: str) -> None:
    print(printable(line), flush=True)
