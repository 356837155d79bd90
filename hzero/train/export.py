"""The run as a Hugging Face folder: configuration and tokenizer at its start, weights by ``hzero export``."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import pickle
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hzero.arguments import Parser
from hzero.files import FULL, refusing
from hzero.progress import Progress
from hzero.settings import architecture
from hzero.train import checkpoint, folder, safe_load
from hzero.train import tokenizer as tokenizers
from hzero.validation import ConfigError

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_SHARD = "5GB"
#: Marks a folder that `hzero export` has written, and may replace.
_MARK = ".hzero-export"


def describe(run_dir: Path, model: dict[str, Any], tokenizer: Any) -> None:
    """Writes what makes weights a model into a run's folder: configuration, generation's configuration and tokenizer.

    Raises:
        ConfigError: The folder cannot be written.
    """
    from transformers import GenerationConfig

    target, source = run_dir / folder.MODEL, architecture.checkpoint_folder(model)
    config = architecture.transformers_config(model)
    if source is not None and (source / "generation_config.json").is_file():
        generation = GenerationConfig.from_pretrained(str(source))
    else:
        generation = GenerationConfig(bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id)
    config.use_cache = True
    with refusing("run.dir", target), tokenizers.errors_of_disk(target):
        target.mkdir(exist_ok=True)
        config.save_pretrained(target)
        generation.save_pretrained(target)
        tokenizer.save_pretrained(target)


def parser() -> argparse.ArgumentParser:
    """Reads the command's arguments."""
    made = Parser(
        prog="hzero export",
        description="Writes the newest complete checkpoint of a run as a Hugging Face folder: safetensors, config.json and "
        "tokenizer, from the exact float32 weights.",
        epilog="example: hzero export runs/default -o my-model --dtype bf16",
    )
    add = made.add_argument
    add("run", metavar="RUN", type=Path, help="folder of a run, such as runs/default")
    add("-o", "--output", metavar="DIR", type=Path, help="folder to write (default RUN/export)")
    add("--dtype", choices=sorted(DTYPES), help="type of the weights (default: that of the training)")
    add("--overwrite", action="store_true", help="replace an export that is there")
    add("--trust", action="store_true", help="load a checkpoint that could run code, as pickles can")
    return made


def run_export(arguments: Sequence[str]) -> int:
    """Runs the command on its arguments. Raises `ConfigError` for input that cannot be used."""
    parsed = parser().parse_args(list(arguments))
    output = (parsed.output or parsed.run / "export").expanduser().resolve()
    found = _checkpoint(parsed.run)
    if (stages := found.identity.pipeline_parallel) > 1:
        raise ConfigError(
            f"RUN: {str(found.folder)!r} is of {stages} pipeline stages (model.pipeline_parallel), which are not joined"
        )
    if not parsed.trust:
        safe_load.refuse_code(found.folder, "--trust")
    _check_output(output, parsed.overwrite)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=".partial", dir=output.parent))
    except OSError as error:
        raise ConfigError(f"--output: cannot write {str(output)!r}: {error.strerror}") from None
    try:
        dtype = parsed.dtype or found.identity.dtype
        try:
            with tokenizers.errors_of_disk(work):
                export(parsed.run / folder.MODEL, found, work, dtype, parsed.trust)
        except (OSError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
            if isinstance(error, OSError) and error.errno in FULL:
                raise
            gone = not found.folder.is_dir()
            why = "the run has removed it since; try again" if gone else " ".join(str(error).split())[:300]
            raise ConfigError(f"RUN: {str(found.folder)!r} cannot be exported: {why}") from None
        work.chmod(0o777 & ~_umask())  # only their owner may read mkdtemp's folders
        _replace(work, output)
    except OSError as error:
        raise ConfigError(f"--output: cannot write {str(output)!r}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(f"written: {output} (step {found.step}, {dtype})")
    return 0


def _checkpoint(run: Path) -> checkpoint.Checkpoint:
    if not run.is_dir():
        raise ConfigError(f"RUN: no folder {str(run)!r}")
    if not (run / folder.MODEL / "config.json").is_file():
        raise ConfigError(f"RUN: {str(run)!r} holds no {folder.MODEL}/config.json; it is not the folder of a run")

    def warn(message: str) -> None:
        print(f"hzero: warning: {message.removeprefix('resume: ')}", file=sys.stderr)

    found = checkpoint.newest(run / folder.CHECKPOINTS, warn)
    if found is None:
        raise ConfigError(f"RUN: {str(run)!r} has no complete checkpoint (checkpoint.every sets when they are written)")
    return found


def _check_output(output: Path, overwrite: bool) -> None:
    if not output.exists():
        return
    if not output.is_dir():
        raise ConfigError(f"--output: {str(output)!r} is a file")
    if not any(output.iterdir()):
        return
    if not (output / _MARK).is_file():
        raise ConfigError(f"--output: {str(output)!r} holds other files than an export; choose another folder")
    if not overwrite:
        raise ConfigError(f"--output: {str(output)!r} holds an export; --overwrite replaces it")


def export(described: Path, found: checkpoint.Checkpoint, target: Path, dtype: str, trust: bool) -> None:
    """Writes a checkpoint into a folder.

    The host needs memory for the weights in ``dtype``; the float32 weights are read from the mapped files one by one.

    Args:
        described: The run's folder of configuration and tokenizer.
        found: The checkpoint.
        target: An existing folder.
        dtype: One of `DTYPES`.
        trust: Whether the checkpoint may hold more than tensors.

    Raises:
        ConfigError: The weights are not those of the configuration.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    from hzero.train.tensor_parallel import joined

    ranks = _of_tensor_ranks(found, trust)
    lazy = ranks[0]
    kind = getattr(torch, DTYPES[dtype])
    config = AutoConfig.from_pretrained(described)
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config, torch_dtype=kind)
    weights: dict[str, Any] = {}
    cast: dict[int, Any] = {}  # tied weights have two names and are one
    with Progress(len(lazy)) as progress:
        for number, (name, tensor) in enumerate(lazy.items(), 1):
            if id(tensor) not in cast:
                whole = joined(name, [of[name].contiguous() for of in ranks])
                cast[id(tensor)] = whole.to(kind) if whole.is_floating_point() else whole
            weights[name] = cast[id(tensor)]
            progress.update(number, f"{number}/{len(lazy)} tensors", always=number == len(lazy))
    try:
        # The optimizer's checkpoint holds no buffers that are not saved, and these stay on the meta device.
        built.load_state_dict(weights, strict=True, assign=True)
    except RuntimeError as error:
        raise ConfigError(f"RUN: {str(found.folder)!r} is not of {described}: {' '.join(str(error).split())}") from None
    built.tie_weights()
    built.generation_config = GenerationConfig.from_pretrained(described)
    built.save_pretrained(target, max_shard_size=_SHARD)
    for file in described.iterdir():
        if file.is_file() and not (target / file.name).exists():
            shutil.copy(file, target / file.name)
    (target / _MARK).write_text(f"{found.folder.resolve()}\n")


def _of_tensor_ranks(found: checkpoint.Checkpoint, trust: bool) -> list[dict[str, Any]]:
    """The float32 weights of every rank of a tensor group, by name, to be read one by one.

    DeepSpeed's tool knows the files of one tensor rank, number 0. So those of each are linked under such names.
    """
    noise, ranks = io.StringIO(), []
    for rank in range(found.identity.tensor_parallel):
        with tempfile.TemporaryDirectory() as linked:
            for file in found.folder.glob(f"*_mp_rank_{rank:02d}_*"):
                link = file.name.replace(f"_mp_rank_{rank:02d}_", "_mp_rank_00_")
                (Path(linked) / link).symlink_to(file.resolve())
            with contextlib.redirect_stdout(noise), contextlib.redirect_stderr(noise), safe_load.only_tensors(trust):
                from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

                folder, tag = os.path.split(linked)
                ranks.append(get_fp32_state_dict_from_zero_checkpoint(folder, tag=tag, lazy_mode=True))
    return ranks


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _replace(work: Path, output: Path) -> None:
    """Moves a folder into place; one that is there is moved aside before and removed after."""
    aside = work.with_suffix(".replaced")
    if output.exists():
        output.rename(aside)
    try:
        work.rename(output)
    except OSError:
        if aside.exists():
            aside.rename(output)
        raise
    shutil.rmtree(aside, ignore_errors=True)
