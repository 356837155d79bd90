"""Job scripts: their lines, and the rules of machines that refuse a job before it is queued."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hzero.cli import main
from hzero.slurm import preflight, queue
from hzero.slurm.job import INSIDE, job_of
from hzero.slurm.machine import load_machine, machines, minutes_of
from hzero.validation import ConfigError
from tests.ranks import ROOT
from tests.slurm.conftest import tool


def _render(overrides: list[str], *options: str, output: str = "job.sbatch") -> str:
    assert main(["slurm", "render", *options, *overrides, "-o", output]) == 0
    return Path(output).read_text()


@pytest.mark.parametrize("machine", ["frontier", "lumi"])
def test_rendered_and_written_scripts_ask_for_the_same(machine: str, paper: list[str]) -> None:
    own = {"lumi": ["topology=lumi", "machine=lumi", "account=project_1", "environment=env.sif"]}
    rendered = _render(paper + own.get(machine, []))
    by_hand = (ROOT / "slurm" / f"{machine}.sbatch").read_text()
    of_run = ("--job-name", "--nodes", "--output", "--account")  # arguments of sbatch, by hand

    def asked(text: str) -> set[str]:
        return {line for line in re.findall(r"^#SBATCH (\S+)$", text, re.M) if not line.startswith(of_run)}

    def arrays(text: str) -> set[str]:
        return {
            "".join(re.findall(r"[\w$@,:=-]", line))
            for line in re.findall(r"^HZERO_(?:STEP|RANK|CHECK)=.*$", text, re.M)
        }

    assert asked(rendered) == asked(by_hand) and len(asked(rendered)) >= 8
    assert arrays(rendered) == arrays(by_hand) and len(arrays(rendered)) == 3
    assert (ROOT / "slurm" / "job.sh").read_text() in rendered and (
        ROOT / "slurm" / f"{machine}.env"
    ).read_text() in rendered


def test_a_rendered_script_is_clean_and_has_the_run(paper: list[str], tmp_path: Path) -> None:
    text = _render([*paper, "topology.order=[node,gpu,gcd]", "train.steps=7", 'data.path="it\'s $HOME"'])
    assert "#SBATCH --nodes=48\n" in text and "#SBATCH --time=02:00:00\n" in text and "--account=abc123\n" in text
    assert f"HZERO_ENV={tmp_path}/env.tar.gz\n" in text and "HZERO_RESTARTS=20\n" in text
    words = subprocess.run(
        ["/bin/bash", "-c", text.partition("# ---- frontier.env")[0] + 'printf "%s\\n" "$@"'],
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    # Ranks find their places themselves, so a declared topology stays away; the run's folder does not depend on the job's.
    assert words[-3:] == ["topology=auto", f"run.dir={tmp_path}/runs/paper_20b", "resume=auto"]
    assert "train.steps=7" in words and 'data.path="it\'s $HOME"' in words and "launcher=frontier" in words
    assert not [word for word in words if word.startswith(("topology.", "nodes"))]
    assert f"\ncd {tmp_path} || exit 1\n" in text and "HZERO_WAIT=1860\n" in text  # train.timeout_s and a minute
    assert "HZERO_RESTARTS=0\n" in _render(paper, "--chain", "12h")
    assert "HZERO_TRANSPORT=torch\n" in text
    assert "HZERO_TRANSPORT=mpi\n" in _render([*paper, "zero.transport=mpi"])
    debug = _render([*paper, "nodes=92", "qos=debug"])
    assert "HZERO_RESTARTS=0\n" in debug and "--time=02:00:00\n" in debug
    _render([*paper, "machine=lumi", "topology=lumi", "account=project_1", "environment=env.sif"], output="lumi.sbatch")
    if (shellcheck := shutil.which("shellcheck")) is not None:
        checked = subprocess.run([shellcheck, "job.sbatch", "lumi.sbatch"], capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            ["account=null"],
            r"launcher\.slurm\.account: missing, as in account=PROJECT; rule: every job names the project",
        ),
        (["nodes=9473"], r"topology\.nodes: found 9,473; rule: a job of partition batch has at most 9,472 nodes"),
        (["partition=extended", "nodes=65"], r"topology\.nodes: found 65; rule: .* extended has at most 64 nodes"),
        (["partition=bach"], r"launcher\.slurm\.partition: unknown partition 'bach'; did you mean 'batch'"),
        (["time=2h1m"], r"slurm\.time: found 2h1m; rule: a job of 1 to 91 nodes in partition batch may take 2 h"),
        (["nodes=183", "time=6:00:01"], r"rule: a job of 92 to 183 nodes in partition batch may take 6 h"),
        (["time=soon"], r"slurm\.time: found 'soon', expected a time such as 90m"),
        (["time=0"], r"slurm\.time: found 0, expected a time with a unit"),
        (["time=90"], r"slurm\.time: found 90, expected a time with a unit, .*; 90m is so many minutes"),
        (["time=6m"], r"slurm\.signal_s: found 300, and the job ends after 360 s .* three quarters"),
        (["qos=debug", "nodes=92", "time=3h"], r"slurm\.time: found 3h; rule: a job of qos debug may take 2 h"),
        (["resume=/other/run"], r"resume: found '/other/run'; jobs of a run go on with the run itself"),
        (["acct=abc"], r"acct: unknown key; did you mean 'account'"),
        (["account='abc 123 --wrap=x'"], r"slurm\.account: found 'abc 123 --wrap=x', expected letters"),
        (["qos='a\nb'"], r"slurm\.qos: found .*, expected letters"),
        (["environment=null"], r"slurm\.environment: missing, expected a file that ends in \.tar\.gz"),
        (
            ["environment=gone.tar.gz"],
            r"slurm\.environment: no file 'gone\.tar\.gz' that can be read; rule: environments on shared",
        ),
        (["environment=env.sif"], r"slurm\.environment: found 'env\.sif', expected a file that ends in \.tar\.gz"),
        (["topology.gpus_per_node=2"], r"topology: 4 ranks per node, and frontier has 8"),
        (["launcher.slurm.options=[mail]"], r"slurm\.options: found 'mail', expected one long option of sbatch"),
        (
            ["launcher.slurm.options=['--comment=a --time=9']"],
            r"found '--comment=a --time=9', expected one long option",
        ),
        (["launcher.slurm.options=[-t5]"], r"found '-t5', expected one long option"),
        (["launcher.slurm.options=['--time=24:00:00']"], r"'--time=24:00:00'; a job on frontier has its own --time"),
        (["launcher.slurm.options=['--dep=after:1']"], r"has its own --dependency"),
        (["launcher.slurm.options=[--no-requeue]"], r"has its own --requeue"),
        (["launcher.slurm.options=['--wrap=x']"], r"has its own --wrap"),
        (["run.overwrite=true"], r"run\.overwrite: a job goes on with its run"),
        (["run.dir='a b'"], r"run\.dir: .* has blanks"),
        (["run.name='a#b'"], r"run\.dir: .* has blanks, quotes or other signs"),
        (["run.name='c,d'"], r"run\.dir: .* has blanks, quotes or other signs"),
        (["machine=local"], r"launcher: local sends no jobs"),
        (["machine=frontier2"], r"launcher: unknown option 'frontier2'; did you mean 'frontier'"),
        (
            ["machine=lumi", "topology=lumi", "environment=env.sif"],
            r"account: found 'abc123'; rule: the account is a project",
        ),
        (["machine=slurm_local"], r"scontrol: not installed here"),
    ],
)
def test_a_job_that_breaks_a_rule_is_refused(
    changes: list[str], message: str, paper: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["slurm", "render", *paper, *changes, "-o", "job.sbatch"]) == 2
    said = capsys.readouterr().err
    assert re.search(message, said) and said.count("\n") == 1, said
    assert not Path("job.sbatch").exists() and not Path("runs").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--chain", "200h"], r"--chain: 105 jobs of 02:00:00, and frontier takes 100 of one user"),
        (["--chain", "12h", "qos=debug"], r"--chain: launcher\.slurm\.qos debug allows no chains on frontier"),
        (["--chain", "long"], r"--chain: found 'long', expected a time"),
    ],
)
def test_a_chain_that_breaks_a_rule_is_refused(
    options: list[str], message: str, paper: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["slurm", "submit", *options, *paper]) == 2
    assert re.search(message, capsys.readouterr().err) and not Path("runs").exists()


def test_an_account_that_the_database_does_not_know_is_refused(
    paper: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool(tmp_path, "sacctmgr", "echo abc124; echo xyz001")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert "--account=ABC124\n" in _render([*paper, "account=ABC124"])  # Slurm keeps them in lower case
    with pytest.raises(ConfigError, match=r"slurm\.account: unknown account 'abc123'; did you mean 'abc124'"):
        job_of(["experiment=paper_20b", "topology.nodes=1", "launcher=frontier", "launcher.slurm.account=abc123"])


def test_the_trainer_sends_jobs_of_a_multirun_and_trains_inside_them(
    paper: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tool(tmp_path, "sbatch", f'cat >/dev/null; echo 7; echo "$@" >> {tmp_path}/calls')
    tool(tmp_path, "squeue", "")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    keys = [
        "launcher=frontier",
        "launcher.slurm.account=a",
        "launcher.slurm.environment=env.tar.gz",
        "topology.nodes=1,48",
    ]
    assert main(["train", "-m", "experiment=paper_10b", *keys, "run.dir=multirun/paper/run"]) == 0
    assert Path("multirun", "paper", "multirun.yaml").is_file() and not Path("runs").exists()
    names = [f"{tmp_path}/multirun/paper/run-{number}-topo" for number in (0, 1)]
    assert [line.split()[-1] for line in (tmp_path / "calls").read_text().splitlines()] == [
        f"{n}/slurm/job-1.sbatch" for n in names
    ]
    row = json.loads(Path(names[1], "slurm", "jobs.jsonl").read_text())
    assert (row["job"], row["nodes"], row["time"], row["chain"]) == (7, 48, "02:00:00", "1 of 1")
    capsys.readouterr()
    monkeypatch.setenv(INSIDE, names[0])  # in the job it must not send another one; this one has no topology to find
    assert main(["train", "experiment=paper_10b", *keys[:3], "topology=auto"]) == 2
    assert "launcher.world_size: not given" in capsys.readouterr().err


TIMES = {
    "90m": 90,
    "1:30": 1.5,
    "1:30:00": 90,
    "1-12": 2160,
    "1-12:30": 2190,
    "1h30m": 90,
    "2d": 2880,
    "0h": None,
    "0:00": None,
    "1:2:3:4": None,
}


@pytest.mark.parametrize(("text", "minutes"), TIMES.items())
def test_times(text: str | int, minutes: float | None) -> None:
    if minutes is not None:
        assert minutes_of("time", text) == minutes
        return
    with pytest.raises(ConfigError, match="expected a time such as"):
        minutes_of("time", text)


def test_the_jobs_of_the_first_day_are_runs_of_their_own(paper: list[str]) -> None:
    """The commands in docs/frontier.md: each renders, and none goes on with another's run."""
    text = (ROOT / "docs" / "frontier.md").read_text()
    (presets,) = re.findall(r"`PRESETS` for `([^`]*)`", text)
    day = text.partition("## What to run first")[2].partition("\n## ")[0]
    commands = re.findall(
        r"`hzero slurm submit ((?:--chain \w+ )?nodes=[^`]*) HERE`(?:; the same with `([^`]*)`)?", day
    )
    names = []
    for command, other in commands:
        words = command.replace("PRESETS", presets).split()
        options = [words.pop(0) for _ in range(2)] if words[0] == "--chain" else []
        for more in [[], other.split()][: 2 if other else 1]:
            text = _render([*words, *paper[2:], *more], *options)
            names += re.findall(r"--job-name=(\S+)-\w{6}\n", text)
    assert names == ["lossless_1", "stock_1", "lossless_2", "topo_2", "paper_20b"]


def test_every_machine_has_scripts_and_a_launcher() -> None:
    assert machines() == ["frontier", "lumi", "slurm_local"]
    for name in machines():
        bins = [found.bins for found in (load_machine(name).partitions or {}).values()]
        assert all([one.nodes for one in found] == sorted({one.nodes for one in found}) for found in bins)
        assert (ROOT / "slurm" / f"{name}.env").is_file() and (ROOT / "conf" / "launcher" / f"{name}.yaml").is_file()


def test_lumis_ranks_have_cores_of_the_l3_next_to_their_gcd() -> None:
    masks = load_machine("lumi").srun[0].removeprefix("--cpu-bind=mask_cpu:").split(",")
    first = (49, 57, 17, 25, 1, 9, 33, 41)  # free core next to GCD 0 to 7: LUMI AI Guide, chapter 5
    assert [int(mask, 16) for mask in masks] == [sum(1 << core + more for more in range(6)) for core in first]


def test_every_variable_of_a_machine_has_a_source() -> None:
    for name in ("frontier", "lumi"):
        comment = ""
        tags = set(re.findall(r"^#   (\[\w+\])", (ROOT / "slurm" / f"{name}.env").read_text(), re.M))
        for line in (ROOT / "slurm" / f"{name}.env").read_text().splitlines():
            if line.startswith("#"):
                comment += line
            elif line.startswith(("export", "module", "if ")):
                assert any(tag in comment for tag in tags), f"{name}.env: no source of {line}"
            if not line.startswith("#"):
                comment = ""


def _bash(text: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "SLURM_JOB_NUM_NODES": "2", "USER": "me", "HZERO_ENV": "x"}
    return subprocess.run(
        ["/bin/bash", "-uc", text], env={**environment, "SLURM_SUBMIT_DIR": str(ROOT)}, capture_output=True, text=True
    )


def test_variables_of_mpi_are_those_of_jobs_with_it() -> None:
    show = "echo ${MPICH_GPU_SUPPORT_ENABLED:-} ${MPICH_OFI_NIC_POLICY:-} ${FI_CXI_RDZV_PROTO:-}"
    for transport, said in (("torch", "alt_read"), ("mpi", "1 GPU")):
        text = f"module() {{ :; }}; HZERO_TRANSPORT={transport}; source {ROOT}/slurm/frontier.env; {show}"
        assert _bash(text).stdout.split() == said.split()


@pytest.mark.parametrize("name", ["frontier", "lumi"])
def test_a_module_that_is_missing_ends_the_job(name: str) -> None:
    source = f"source {ROOT}/slurm/{name}.env; echo $WANDB_MODE"
    assert _bash("module() { return 0; }; " + source).stdout == "offline\n"
    missing = _bash(f"module() {{ [ $1 = use ]; }}; {source}")
    assert (missing.returncode, missing.stdout) == (1, "")


@pytest.mark.parametrize("name", ["frontier", "lumi"])
def test_a_job_by_hand_needs_a_name_of_its_own(name: str) -> None:
    done = _bash(f"SLURM_JOB_NAME=hzero; source {ROOT}/slurm/{name}.sbatch")
    assert done.returncode == 2 and "name the run" in done.stderr


def test_ports_of_a_job_are_none_that_linux_gives_to_connections() -> None:
    loop = "for SLURM_JOB_ID in 1 374 375 12345678; do "
    ports = _bash(f"{loop} source {ROOT}/slurm/slurm_local.env; echo $MASTER_PORT; done").stdout.split()
    assert len(ports) == 4 and all(20000 <= int(port) < 32768 - 32 for port in ports)


def test_history_with_torn_lines_is_read(tmp_path: Path) -> None:
    (tmp_path / "jobs.jsonl").write_text('{"job": 1}\n{"job": "x"}\n[]\n{"jo')
    assert queue.read_history(tmp_path / "jobs.jsonl") == [{"job": 1}]


def links_file(rate: float) -> str:
    row = {"tier": "gcd", "ranks": 2, "op": "all_gather", "codec": None, "size_bytes": 64, "count": 32, "type": "uint8",
           "median_us": 1.0, "min_us": 1.0, "max_us": 1.0, "algbw_gb_s": rate, "busbw_gb_s": rate}  # fmt: skip
    return json.dumps({
        "schema": "hzero-links-1", "date": "2026-11-22", "machine": {}, "versions": {}, "backend": "gloo", "device": "cpu",
        "codecs": "host", "launcher": "slurm", "grid": {"gcd": 2, "gpu": 1, "node": 1}, "settings": {},
        "tiers": {"gcd": {"gb_s": rate, "latency_us": 1.0}}, "rows": [row],
    })  # fmt: skip


def test_the_check_names_nodes_that_fail_are_slow_or_were_waited_for(tmp_path: Path) -> None:
    nodes = ("n1", "n2", "n3", "n4", "n5")
    for number, rate in enumerate((10.0, 4.0, 9.0, 11.0)):
        (tmp_path / f"alone-{number}.json").write_text(links_file(rate))
    assert preflight.alone(tmp_path, nodes) == ["n5", "n2"]
    assert preflight.together(tmp_path, 2, nodes) is None  # failed, and nobody is named
    (tmp_path / "links-0-n1.log").write_text(f"hzero: error: ..\n{preflight.BLAMED}7, 6\n")
    (tmp_path / "links-1-n2.log").write_text(f"{preflight.BLAMED}2, 999\n")
    assert preflight.together(tmp_path, 2, nodes) == ["n2", "n4"]
    (tmp_path / "links.json").write_text(links_file(1.0))
    assert preflight.together(tmp_path, 2, nodes) == []
