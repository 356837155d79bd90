"""The README's commands are run, long ones on smaller jobs; commands, figures, blocks and links of all pages are checked."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
import yaml

from hzero.errors import size_text
from hzero.program.collectives import step_traffic
from hzero.tools.cli import main
from hzero.tools.experiment import compose, full_names
from hzero.tools.plan.against import node_counts
from hzero.tools.plan.command import against_dict, plan_dict
from hzero.tools.plan.scenario import read_scenario
from tests.ranks import LONG, ROOT, run

README = ROOT / "README.md"
#: Where users copy commands and blocks from.
PAGES = [README, *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md")]

#: What is appended to a command so that it takes seconds, by how the command begins.
SHORTER = {
    "make train": "ARGS='train.steps=2 topology=single_node topology.devices_per_package=2"
    " model.num_layers=1 data.max_bytes=500000"
    " train.eval_batches=1 run.dir={run}'",
    "make test": "ARGS='--collect-only -q tests/test_config.py'",
    "hzero links": "--min-bytes 16K --out {run}.json",
    "hzero train": "train.steps=2 topology=single_node topology.devices_per_package=2 model.num_layers=1 data.max_bytes=500000"
    " train.eval_batches=1 run.dir={run}",
}


def _blocks(page: Path, language: str) -> list[str]:
    """Blocks of code."""
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


def _commands(page: Path = README) -> list[str]:
    lines = "\n".join(_blocks(page, "(?:sh|bash|console)")).replace("\\\n", " ").splitlines()
    return [line.split(" #")[0].removeprefix("$ ").strip() for line in lines if line.split("#")[0].strip()]


def _run(command: str, tmp_path: Path) -> str:
    """Output of a command in an environment where `hzero`, and the Python of `make`, are those of this test."""
    folder = tmp_path / "venv" / "bin"
    folder.mkdir(parents=True)
    for name, module in (("python", ""), ("hzero", "-m hzero")):
        (folder / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
        (folder / name).chmod(0o755)
    path = os.pathsep.join([str(folder), os.environ["PATH"]])
    done = run("sh", "-c", command, VENV=str(folder.parent), PATH=path, MAKEFLAGS="", MAKELEVEL="")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_readme_names_the_two_commands() -> None:
    assert {"make train", "make test"} <= set(_commands())


@pytest.mark.parametrize("command", dict.fromkeys(_commands()))
def test_command(command: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    if command.startswith(("pip ", "git ", "cd ", "export ", "python3 -m venv", "source ")):
        # Installations are test_packaging's; what they name exists.
        for extra in re.findall(r"[\w.]\[([\w,]+)\]", command):
            for name in extra.split(","):
                assert re.search(rf"^{name} = \[", (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE), name
    elif command.startswith(("bash ", "sbatch ")):
        # tests/slurm runs them.
        (script,) = re.findall(r"slurm/\S+", command)
        assert (ROOT / script).is_file()
    elif command.startswith("torchrun"):
        # tests/examples runs what the examples' docstrings say.
        example = ROOT / command.split()[-1]
        assert f"{command}." in (ast.get_docstring(ast.parse(example.read_text())) or "")
    elif command.startswith(("hzero plan", "hzero topology")):
        # Here, where transformers is imported once. Predictions of all schemes take seconds for every number of nodes.
        if "MODEL_FOLDER" in command:
            pytest.importorskip(
                "transformers", reason="the train extra is not installed"
            ).LlamaConfig().save_pretrained(tmp_path)
        assert main(shlex.split(command.replace("2,48,1024", "2").replace("MODEL_FOLDER", str(tmp_path)))[1:]) == 0
    elif command.startswith(("make train", "make test", "hzero ")):
        if "train" in command:
            pytest.importorskip("transformers", reason="the train extra is not installed")
        shorter = next((text for start, text in SHORTER.items() if command.startswith(start)), "")
        # -o: the environment has been set up.
        options = "-o setup " if command.startswith("make") else ""
        output = _run(f"{command} {options}{shorter.format(run=run)}", tmp_path)
        if command == "make train":
            assert "received between nodes per step: " in output or "received per step: " in output
    elif command.startswith("make "):
        assert _run(f"{command} --dry-run", tmp_path)
    else:
        pytest.fail(f"no rule says how to check: {command}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_benchmarks_can_be_read(page: Path) -> None:
    """Figures can be repeated: suites and keys that a page names exist. Modules and scripts are test_layers'."""
    from benchmarks.compare.suite import read

    for arguments in re.findall(r'make bench ARGS="([^"]+)"', page.read_text()):
        assert read(shlex.split(arguments)).measurements


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)|src=\"([^\"]+)\"", page.read_text()):
        link = target[0] or target[1]
        assert link.startswith("http") or (page.parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_of_python_and_json(page: Path) -> None:
    """Python parses and names what exists; an ``"hzero"`` block is one, and files that YAML names exist."""
    import hzero
    from hzero.config import parse_config

    for block in _blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "hzero":
                assert node.attr in hzero.__all__, node.attr
    for block in _blocks(page, "json"):
        text = block if block.lstrip().startswith("{") else f"{{{block}}}"
        config = json.loads(text)
        zero = config.get("zero_optimization", {})
        for place in (config, zero):
            if "hzero" in place:
                parse_config(place["hzero"])
                assert "zero_optimization" not in config or zero["stage"] in (1, 3)
    for block in _blocks(page, "yaml"):
        deepspeed = yaml.safe_load(block).get("deepspeed_config", {})
        assert (ROOT / deepspeed.get("deepspeed_config_file", "")).exists()


def test_bytes_of_the_main_job_are_those_of_the_plan() -> None:
    """All but the gathers inside a package: a small model is not gathered again in backward."""

    scenario = read_scenario([])
    plan, job = scenario.shard_plan("topo"), scenario.job
    rows = step_traffic(plan, scenario.grid, job.model.numels, itemsize=job.itemsize, accumulation=job.accumulation)
    sizes = {(row.tier, row.role): row.wire_bytes * scenario.grid.world_size for row in rows if row.used}
    text = (ROOT / "docs" / "cpu.md").read_text()
    for (tier, role), size in sizes.items():
        (shown,) = re.findall(rf"^{tier} +{role} +int[48] +([\d.]+ \wB) ", text, flags=re.MULTILINE)
        assert (tier, role) == ("intra_package", "weights") or shown == size_text(size), (tier, role)
    assert (
        f"received between nodes per step: {size_text(sizes['inter_node', 'weights'] + sizes['inter_node', 'gradients'])};"
        in text
    )


# ---- figures beside a plan's command ------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of a model, which pages call FOLDER: the configuration of Mixtral-8x7B."""
    transformers = pytest.importorskip("transformers", reason="the train extra is not installed")
    transformers.MixtralConfig(architectures=["MixtralForCausalLM"], max_position_embeddings=2**20).save_pretrained(
        tmp_path
    )
    return tmp_path


def _keys(page: str, command: str, folder: Path) -> list[list[str]]:
    """Words of all such commands in the blocks of a page, with a folder for FOLDER, MODEL_FOLDER and others."""
    lines = [line for line in _commands(ROOT / page) if line.startswith(command)]
    return [shlex.split(re.sub(r"\b(\w+_)?FOLDER\b", str(folder), line))[2:] for line in lines]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_keys_of_commands_exist(page: Path, folder: Path) -> None:
    """Of `hzero train` and `hzero plan`, in blocks and in jobs of Slurm."""

    name = str(page.relative_to(ROOT))
    for words in _keys(name, "hzero train", folder):
        if "-m" not in words:
            compose(full_names([word for word in words if "=" in word]))
    for words in _keys(name, "hzero plan", folder):
        keys = [word for word in words if re.match(r"[\w.]+=", word)]
        read_scenario(full_names([*keys, *["nodes=2"] * ("--against" in words)]))
    for line in _commands(page):
        if line.startswith("sbatch") and "prepare" not in line:
            keys = [word for word in shlex.split(line.partition(".sbatch")[2]) if "=" in word and "$" not in word]
            compose(full_names([*keys, *["nodes=2"] * (not any(key.startswith("nodes=") for key in keys))]))


@LONG
def test_figures_of_long_sequences(folder: Path) -> None:

    text = (ROOT / "docs" / "sequences.md").read_text()
    ((*keys, parallel),) = _keys("docs/sequences.md", "hzero plan", folder)
    for ranks in (1, 8, 32):
        found = plan_dict(read_scenario([*keys, f"{parallel.partition('=')[0]}={ranks}", "nodes=4"]))["sequences"]
        copies, compute = (f"{found[key]:,.0f} s" for key in ("copy_s", "compute_s"))
        assert f"| {ranks} | {found['longest']:,} | {copies} | {compute} | " in text
        assert f"Without the key, {found['longest_with_checkpointing_alone']:,} tokens fit" in text


@LONG
def test_figures_of_many_nodes(folder: Path) -> None:
    """The table and ratios of the page of predictions, and README's ratios."""

    readme, text = README.read_text(), (ROOT / "docs" / "predictions.md").read_text()
    rates = []
    for counts, *keys in (
        (words[1], *words[2:]) for words in _keys("docs/predictions.md", "hzero plan --against", folder)[:2]
    ):
        nodes = node_counts(counts)
        curves = against_dict(read_scenario([*keys, f"topology.nodes={nodes[-1]}"]), nodes)["curves"]
        rates.append({name: {point["nodes"]: point["tflops"] for point in points} for name, points in curves.items()})
    frontier, ordinary = rates
    head, _, *rows = re.findall(r"^\|.*\|$", text.partition("## 20B")[2].partition("\n- ")[0], flags=re.MULTILINE)
    schemes = [cell.strip().replace("`", "") for cell in head.split("|")[2:-1]]
    schemes = [scheme.replace(" over the", ",") for scheme in schemes]
    for row, nodes in zip(rows, frontier["ZeRO-3"], strict=True):
        expected = [f"{nodes:,}", *(f"{frontier[scheme][nodes]:.1f}" for scheme in schemes)]
        assert [cell.strip() for cell in row.split("|")[1:-1]] == expected
    far = frontier["hzero topo"][1024] / frontier["FSDP2"][1024]
    stock = frontier["hzero topo"][1024] / frontier["ZeRO-3"][1024]
    under = [frontier[f"FSDP2, hzero {preset}"][1024] / frontier["FSDP2"][1024] for preset in ("lossless", "topo")]
    assert f"predicted {under[0]:.1f} to {under[1]:.1f} times faster than FSDP2, and equal to HSDP" in readme
    assert f"`topo` is {far:.1f} times faster than FSDP2 and {stock:.1f} times faster than ZeRO-3" in text
    for scheme in ("FSDP2", "ZeRO-3", "ZeRO++"):
        ratios = [rate / ordinary[scheme][nodes] for nodes, rate in ordinary["hzero topo"].items()]
        digits = 2 if scheme == "ZeRO++" else 1
        assert f"{min(ratios):.{digits}f} to {max(ratios):.{digits}f} times faster than {scheme}" in text
