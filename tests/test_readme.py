"""The README's commands are run, long ones on smaller jobs; its blocks can be used, and its links lead somewhere."""

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

from hzero.cli import main
from tests.ranks import ROOT, run

README = ROOT / "README.md"
#: Where users copy commands and blocks from.
PAGES = [README, *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md")]

#: What is appended to a command so that it takes seconds, by how the command begins.
SHORTER = {
    "make train": "ARGS='train.steps=2 topology=single_node topology.gcds_per_gpu=2 model.num_layers=1 data.max_bytes=500000"
    " train.eval_batches=1 run.dir={run}'",
    "make test": "ARGS='--collect-only -q tests/test_config.py'",
    "hzero links": "--min-bytes 16K --out {run}.json",
    "hzero train": "train.steps=2 topology=single_node topology.gcds_per_gpu=2 model.num_layers=1 data.max_bytes=500000"
    " train.eval_batches=1 run.dir={run}",
}


def _blocks(page: Path, language: str) -> list[str]:
    """Blocks of code; a line that includes a file is that file."""
    text = re.sub(r'^--8<-- "(.*)"$', lambda line: (ROOT / line[1]).read_text(), page.read_text(), flags=re.MULTILINE)
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


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
    if command.startswith(("pip ", "git ", "cd ", "python -m venv", "source ")):
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
        # Here, where transformers is imported once. Machines of thirteen sizes take half a minute.
        assert main(shlex.split(command.replace("2..9408", "2,4"))[1:]) == 0
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


@pytest.mark.parametrize(
    "page", [*PAGES, *ROOT.glob("benchmarks/*/README.md")], ids=lambda page: str(page.relative_to(ROOT))
)
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


def test_table_of_readme_is_what_its_command_computes() -> None:
    """And the rows of the Frontier tutorial for 48 nodes."""
    from hzero.plan.command import plan_dict
    from hzero.plan.scenario import read_scenario

    assert "`hzero plan experiment=paper_20b nodes=48`" in README.read_text()
    schemes = plan_dict(read_scenario(["experiment=paper_20b", "topology.nodes=48"]))["schemes"]
    shown = [schemes[name] for name in ("ZeRO-3", "ZeRO++", "HSDP, node", "topo")]
    rows = {
        row[0]: row[1:] for row in (line.strip("| ").split(" | ") for line in README.read_text().splitlines()) if row
    }
    into, memory, step = (
        rows[name]
        for name in ("bytes into each node per step", "memory per GCD, with buffers and activations", "predicted step")
    )
    assert into == [f"{one['node_bytes'] / 1e9:.3g} GB" for one in shown]
    assert memory == [f"{one['memory_bytes'] / 1e9:.1f} GB" for one in shown]
    assert step == [f"{one['step_s']:.1f} s" for one in shown]
    cells = " | ".join(f"{one['step_s']:.1f} s, {one['memory_bytes'] / 1e9:.1f} GB" for one in shown)
    assert f"| 20B | 48 | {cells} |" in (ROOT / "docs" / "frontier.md").read_text()
    ratio = shown[0]["step_s"] / shown[3]["step_s"]
    assert f"`topo` is {ratio:.2f} times faster than ZeRO-3" in README.read_text()


@pytest.mark.parametrize("page", [README, ROOT / "docs" / "recipes" / "cpu.md"], ids=lambda page: page.name)
def test_bytes_of_the_main_job_are_those_of_the_plan(page: Path) -> None:
    """All but the gathers inside a package: a small model is not gathered again in backward."""
    from hzero.plan.collectives import step_traffic
    from hzero.plan.scenario import read_scenario
    from hzero.terminal import size_text

    scenario = read_scenario([])
    plan, job = scenario.shard_plan("topo"), scenario.job
    rows = step_traffic(plan, scenario.grid, job.model.numels, itemsize=job.itemsize, accumulation=job.accumulation)
    sizes = {(row.tier, row.role): row.wire_bytes * scenario.grid.world_size for row in rows if row.used}
    text = page.read_text()
    for (tier, role), size in sizes.items():
        (shown,) = re.findall(rf"^{tier} +{role} +int[48] +([\d.]+ \wB) ", text, flags=re.MULTILINE)
        assert (tier, role) == ("gcd", "weights") or shown == size_text(size), (tier, role)
    assert (
        f"received between nodes per step: {size_text(sizes['node', 'weights'] + sizes['node', 'gradients'])};" in text
    )
