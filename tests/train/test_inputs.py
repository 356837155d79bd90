"""Wrong input: one line that names the key, status 2, nothing written."""

from __future__ import annotations

import copy
import functools
import math
import pickle
from pathlib import Path
from typing import Any

import pytest

from hzero.cli import main
from hzero.parsing import parse_config
from hzero.settings.conf import compose, plain
from hzero.settings.settings import Settings
from hzero.validation import ConfigError

#: Refused on the way: by Hydra, while settings are composed, or by what the run finds on this machine.
OVERRIDES = {
    "model=nope": "model: unknown option 'nope'",
    "zero=tpoo": "did you mean 'topo'",
    "model.hiden=3": "did you mean 'model.hidden_size'",
    "micro_batch=3": "did you mean 'train.micro_batch'",
    "=3": "=3: expected KEY=VALUE",
    "topology.source=auto": "topology.source: not set yet, or with other keys than these, so Hydra needs +topology.source=VALUE",
    "model=gpt_neox_20b": "states of",
    "data.path=": "data.path: found ''",
    "data=text": "data.path",
    "data.path=missing.txt": "data.path: no file or folder 'missing.txt'",
    "data.path=empty.txt": "data.path: 'empty.txt' is empty",
    "data.path=short.txt": "data.path: 'short.txt' is too short",
    "data.path=folder": "holds no text file",
    "data.path=binary.txt": "data.path: 'binary.txt' is not a text file",
    "resume=elsewhere": "resume: no folder 'elsewhere'",
    "run.name=${oc.env:HZERO_NOT_SET}": "HZERO_NOT_SET",
    "train.steps": "train.steps: expected KEY=VALUE",
    "run.dir=a(b": "run.dir=a(b: cannot be read",
    "experiment=nope": "experiment: unknown option 'nope'",
    "model=null": "model=null: the group needs an option",
    "+train.stepz=5": "train: unknown key 'stepz'; did you mean 'steps'",
    "~train.dtype": "train.dtype: missing",
    "train.dtype=fp16": "train.dtype: found fp16",
    "zero.transport=mpi": "zero.transport: found 'mpi', whose ranks mpiexec or srun starts, as in mpiexec -n 8 hzero train",
    "resume=auto run.overwrite=true": "run.overwrite: found true together with resume=auto",
    "zero=stock trace.steps=[1,2]": "trace.steps: given without zero.preset",
    "run.dir=project run.overwrite=true": "run.dir: 'project' holds config.yaml",
}
#: Refused by the settings.
VALUES: list[tuple[str, Any, str]] = [
    ("zero.preset", "mlid", "did you mean 'mild'"),
    ("zero.codecs.weights.gpu", "int9", "zero.codecs.weights.gpu.codec: unknown value 'int9'; did you mean 'int8'"),
    ("zero.shard.weights", "world", "zero.shard.weights: 'world' is wider than zero.shard.gradients 'node'"),
    ("zero.transport", "mpl", "zero.transport: unknown value 'mpl'; did you mean 'mpi'"),
    ("zero.error_feedback", ["nod"], "unknown value 'nod'; did you mean 'node'"),
    ("launcher.world_size", 12, "nodes=3 or gpus_per_node=3 or gcds_per_gpu=3 would fit"),
    ("launcher.world_size", 7, "no single factor makes it fit"),
    ("launcher.world_size", True, "launcher.world_size: found True"),
    ("launcher.world_size", 0, "launcher.world_size: found 0"),
    ("topology.nodes", None, "topology.nodes: not given"),
    ("topology.gpus_per_node", 0, "topology.gpus_per_node: found 0"),
    ("topology.source", "auto", "topology.nodes: given together with topology.source 'auto'"),
    ("topology.rack", 1, "topology: unknown key 'rack'"),
    ("topology.bandwidth_gb_s", 5, "topology.bandwidth_gb_s: found 5"),
    ("topology.bandwidth_gb_s", {"gcd": -5}, "topology.bandwidth_gb_s.gcd: found -5"),
    ("topology.bandwidth_gb_s", {"rack": 5}, "topology.bandwidth_gb_s: unknown key 'rack'"),
    ("train.steps", 0, "train.steps: found 0; input should be greater than or equal to 1"),
    ("train.steps", 1.5, "train.steps: found 1.5; input should be a valid integer"),
    ("train.steps", True, "train.steps: found True"),
    ("train.lr", math.nan, "train.lr: found nan"),
    ("train.dtype", "fp8", "train.dtype: unknown value 'fp8'"),
    ("train.betas", ["a", "b"], "train.betas.0: found 'a'"),
    (
        "train.time_limit",
        "2 hours",
        "train.time_limit: found '2 hours', possible: a duration such as 2h, 1h30m, 1:30:00 or 45s",
    ),
    ("train.time_limit", True, "train.time_limit: found True"),
    ("checkpoint.keep_for", -1, "checkpoint.keep_for: found -1"),
    ("checkpoint.timeout_s", 0, "checkpoint.timeout_s: found 0"),
    ("train.betas", [0.9], "train.betas: found [0.9]"),
    ("train.betas", [0.9, 1], "train.betas.1: found 1"),
    ("train.seed", "abc", "train.seed: found 'abc'"),
    ("train.seed", -1, "train.seed: found -1"),
    ("train.min_lr_ratio", 2, "train.min_lr_ratio: found 2"),
    ("train", 3, "train: found 3, expected a block"),
    ("zero", None, "zero: found None"),
    ("model.num_heads", 3, "model.num_heads: found 3, which does not divide"),
    ("model.zero_init", "maybe", "model.zero_init: unknown value 'maybe'"),
    ("model.extra", 1, "model: unknown key 'extra'"),
    ("run.name", "", "run.name: found ''"),
    ("data.cache_dir", 5, "data.cache_dir: found 5"),
    ("data.eval_share", 1, "data.eval_share: found 1"),
    ("trace.steps", [6, 3], "trace.steps: found [6, 3], whose first step comes after the last"),
    ("trace.steps", [3], "trace.steps: found [3]"),
    ("trace.steps", [0, 3], "trace.steps.0: found 0"),
    ("trace.steps", [3, 300], "trace.steps: found [3, 300], and the run ends with step 200"),
    ("trace.steps", 3, "trace.steps: found 3"),
    ("resume", 5, "resume: found 5, possible: false, auto or a path"),
    ("deepspeed.zero_optimization", 5, "deepspeed.zero_optimization: found 5"),
    ("deepspeed.zero_optimization", {"stage": 2}, "the trainer runs stage 3"),
    ("deepspeed.gradient_accumulation_steps", 4, "use train.grad_accumulation"),
    ("deepspeed.optimizer", {"params": {"lr": 1}}, "use train.lr"),
    ("deepspeed.hzero", {"preset": "topo"}, "deepspeed.hzero: the trainer sets it"),
    ("deepspeed.checkpoint", {"load_universal": True}, "deepspeed.checkpoint.load_universal: the trainer sets it"),
]


@pytest.fixture(scope="module")
def defaults() -> dict[str, Any]:
    """The main job's configuration."""
    return plain(compose([]))


@pytest.mark.parametrize(("key", "value", "message"), VALUES)
def test_settings_name_the_key(key: str, value: Any, message: str, defaults: dict[str, Any]) -> None:
    config = copy.deepcopy(defaults)
    *blocks, last = key.split(".")
    functools.reduce(dict.__getitem__, blocks, config)[last] = value
    with pytest.raises(ConfigError) as refused:
        Settings(config)
    assert message in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("written", "expected"), [({}, (7, 100)), ({"every": 0}, (7, 0)), (3, (3, 100)), (0, (0, 100)), ("x", None)]
)
def test_the_guard_of_the_trainer_and_that_of_the_block(
    written: Any, expected: tuple[int, int] | None, defaults: dict[str, Any]
) -> None:
    config = copy.deepcopy(defaults)
    config["train"]["guard"], config["zero"]["guard"] = 7, written
    if expected is None:
        with pytest.raises(ConfigError, match=r"guard: found 'x', expected a number of steps"):
            Settings(config)
        return
    guard = parse_config(Settings(config).block).guard
    assert (guard.discarded_steps, guard.every) == expected


def test_a_group_that_is_gone_is_missed(defaults: dict[str, Any]) -> None:
    for key in defaults:
        with pytest.raises(ConfigError, match=f"^{key}: missing$"):
            Settings({name: group for name, group in defaults.items() if name != key})


@pytest.mark.parametrize("override", OVERRIDES)
def test_bad_override(
    override: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("too short\n" * 3)
    (tmp_path / "book.txt").write_text("some words to train on, again and again\n" * 8000)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "binary").write_bytes(b"\0\1\2")
    with_text = [] if override.startswith("data") else ["data.path=book.txt"]
    (tmp_path / "binary.txt").write_bytes(b"words\0words" * 9999)
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "config.yaml").write_text("not ours")
    before = sorted(tmp_path.rglob("*"))
    assert main(["train", *with_text, *override.split(" ")]) == 2
    error = capsys.readouterr().err
    assert OVERRIDES[override] in error and error.startswith("hzero: error: ") and error.count("\n") == 1, error
    left = sorted(path for path in tmp_path.rglob("*") if "cache" not in path.parts)
    assert left == before
    assert override.startswith("resume=else") or not list((tmp_path / "cache").glob("hzero/tokens-*"))


#: Arguments that other tools' parsers or Hydra would answer.
ARGUMENTS = {
    "plan foo": "foo: expected KEY=VALUE",
    "plan --steps 10": "hzero plan: unknown option '--steps'; keys are given as KEY=VALUE, as in train.steps=10",
    "plan topology=lumi": "topology.nodes: found null",
    "plan zero.codecs.weights.node=exp": "zero.codecs.weights.node: found 'exp', which holds bfloat16; expected train.dtype=bf16",
    "train --steps 10": "hzero train: unknown option '--steps'; keys are given as KEY=VALUE, as in train.steps=10",
    "train --cfg jb": "hzero train: argument --cfg/-c: invalid choice: 'jb'",
    "report --png x.txt": "hzero report: unknown argument '--png'",
    "runs --josn": "hzero runs: unknown argument '--josn'; did you mean '--json'",
    "train train.steps=1 -m train.seed=two": "train.seed: found 'two'",
    "export": "hzero export: the following arguments are required: RUN",
    "topology a b": "hzero topology: unknown argument 'b'",
    "doctor a b": "hzero doctor: unknown argument 'b'",
    "bench links --out x.txt": "--out: found 'x.txt', expected a name that ends in .json",
    "bench links --fctor 2": "did you mean '--factor'",
    "completion tcsh": "hzero completion: argument SHELL: invalid choice: 'tcsh'",
}


@pytest.mark.parametrize("line", ARGUMENTS)
def test_wrong_arguments_are_answered_in_our_words(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    said = capsys.readouterr()
    assert said.err.startswith("hzero: error: ") and said.err.count("\n") == 1 and ARGUMENTS[line] in said.err
    assert not said.out


#: Hydra would call, import or unpickle what these name; the folder is one that `--config-dir` adds.
CODE = {
    "+hydra.callbacks.x._target_=os.mkdir +hydra.callbacks.x.path=MARK": "hydra.callbacks.x._target_",
    "hydra/callbacks=x": "hydra/callbacks",
    "+a@hydra.callbacks=x": "a@hydra.callbacks",
    "hydra.launcher._target_=os.system": "hydra.launcher._target_",
    "hydra.sweeper._target_=os.system": "hydra.sweeper._target_",
    "+hydra.sweeper.sampler._target_=os.system": "hydra.sweeper.sampler._target_",
    "hydra.job.env_set.LD_PRELOAD=x.so": "hydra.job.env_set.LD_PRELOAD",
    "-m hydra.job.env_set.LD_PRELOAD=x.so,y.so": "hydra.job.env_set.LD_PRELOAD",
    "hydra/job_logging=default": "hydra/job_logging",
    "--config-dir FOLDER --config-name called": "hydra.callbacks",
    "--config-dir FOLDER experiment=sets": "hydra.job.env_set",
    "hydra.searchpath=[file://FOLDER] experiment=sets": "hydra.job.env_set",
    "--config-dir FOLDER experiment=logs": "hydra.job_logging",
    "--config-path FOLDER": "--config-path",
    "--experimental-rerun FOLDER/rerun.pickle": "--experimental-rerun",
}


@pytest.mark.parametrize("line", CODE)
def test_configuration_that_names_code_is_refused(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    mark, shared = tmp_path / "ran", tmp_path / "shared"
    (shared / "experiment").mkdir(parents=True)
    for name, text in (
        ("called", f"defaults: [train, _self_]\nhydra: {{callbacks: {{x: {{_target_: os.mkdir, path: {mark}}}}}}}"),
        ("experiment/sets", "# @package _global_\nhydra: {job: {env_set: {LD_PRELOAD: x.so}}}"),
        (
            "experiment/logs",
            f"# @package _global_\nhydra: {{job_logging: {{handlers: {{x: {{(): os.mkdir, path: {mark}}}}}}}}}",
        ),
    ):
        (shared / f"{name}.yaml").write_text(text)
    (shared / "rerun.pickle").write_bytes(pickle.dumps({}))
    assert main(["train", *line.replace("MARK", str(mark)).replace("FOLDER", str(shared)).split(" ")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"hzero: error: {CODE[line]}: ") and error.count("\n") == 1, error
    assert not mark.exists() and sorted(tmp_path.iterdir()) == [shared]


def test_a_folder_of_configurations_without_code_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "short.yaml").write_text("# @package _global_\ntrain: {steps: 3}\n")
    assert main(["train", "--config-dir", str(tmp_path), "experiment=short", "--cfg", "job"]) == 0
    assert "steps: 3" in capsys.readouterr().out


def test_unknown_command_suggests(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tarin"]) == 2
    assert "error: unknown command 'tarin'; did you mean 'train'" in capsys.readouterr().err


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "hzero plan model=gpt_neox_20b" in capsys.readouterr().out
    for arguments in (["--version"], ["plan", "--help"], ["report", "--help"]):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 0
    assert main(["train", "--help"]) == 0
    assert "resume=auto" in capsys.readouterr().out
    assert main(["train", "--cfg", "job"]) == 0
    assert "hidden_size: 128" in capsys.readouterr().out
