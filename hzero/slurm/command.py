"""``hzero slurm``: writes job scripts, queues jobs and chains of jobs, and shows and cancels those of a run."""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hzero.arguments import Parser
from hzero.files import read_small, refusing, replacing
from hzero.formatting import table_of
from hzero.settings.conf import long_name
from hzero.settings.groups import known_keys
from hzero.slurm import queue
from hzero.slurm.job import FOLDER, HISTORY, Job, job_of
from hzero.slurm.machine import minutes_of, time_text
from hzero.slurm.submission import chain_length, submit
from hzero.terminal import console
from hzero.validation import ConfigError, nearest, printable

#: Short names of the keys that jobs are mostly about.
SHORT = {
    "nodes": "topology.nodes",
    "machine": "launcher",
    "account": "launcher.slurm.account",
    "partition": "launcher.slurm.partition",
    "qos": "launcher.slurm.qos",
    "time": "launcher.slurm.time",
    "environment": "launcher.slurm.environment",
}
_STATUS = "status.json"
#: Slurm's states of a job that waits, and of one that will run or runs.
_WAITS = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT")
_OPEN = (*_WAITS, "RUNNING", "SUSPENDED")
_EPILOG = """examples:
  hzero slurm render experiment=paper_20b nodes=48 machine=frontier account=abc123 environment=env.tar.gz
  hzero slurm submit --chain 12h experiment=paper_20b nodes=48 machine=frontier account=abc123 environment=env.tar.gz
  hzero slurm status runs/paper_20b
  hzero slurm logs runs/paper_20b --node frontier00012
  hzero slurm cancel runs/paper_20b

short names of keys:\n""" + "\n".join(f"  {short:15}{key}" for short, key in SHORT.items())


def parser() -> argparse.ArgumentParser:
    """Reads the command's arguments."""
    made = Parser(
        prog="hzero slurm",
        description="Renders a run's job script, checked against the rules of the machine, and manages its jobs.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = made.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    render = commands.add_parser("render", help="print a job script, or write it")
    render.add_argument("-o", "--output", metavar="FILE", type=Path, help="file to write in place of standard output")
    send = commands.add_parser("submit", help="queue a run's job, or a chain of jobs")
    for one in (render, send):
        one.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="keys of the trainer's configuration")
        one.add_argument(
            "--chain",
            metavar="TIME",
            help="as many jobs as that takes, one after the other; each goes on with the run (12h, 2d)",
        )
    status = commands.add_parser("status", help="show a run's jobs and what the run itself says")
    status.add_argument("--json", action="store_true", help="print JSON")
    logs = commands.add_parser("logs", help="print the ends of a job's logs, one for each node and step")
    logs.add_argument("--job", type=int, metavar="NUMBER", help="a job (default: the newest that has logs)")
    logs.add_argument("--node", metavar="NAME", help="logs of this node alone")
    logs.add_argument("-n", "--lines", type=int, default=10, metavar="N", help="lines of each file (%(default)s)")
    cancel = commands.add_parser("cancel", help="cancel all jobs of a run; the one that runs saves and ends")
    cancel.add_argument(
        "--now", action="store_true", help="end the job that runs at once: Slurm gives it KillWait seconds, often 30"
    )
    for one in (status, logs, cancel):
        one.add_argument("run", metavar="FOLDER", type=Path, help="folder of the run, such as runs/default")
    return made


def run_slurm(arguments: Sequence[str]) -> int:
    """Runs the command on its arguments. Raises `ConfigError` for input that cannot be used."""
    parsed = parser().parse_args(list(arguments))
    commands: dict[str, Callable[[argparse.Namespace], None]] = {
        "render": _render,
        "submit": _submit,
        "status": _show_status,
        "logs": _show_logs,
        "cancel": _cancel,
    }
    commands[parsed.command](parsed)
    return 0


def _chain(text: str | None) -> float:
    return minutes_of("--chain", text) if text is not None else 0.0


def _job(parsed: argparse.Namespace) -> Job:
    known = {*SHORT, *known_keys(), "experiment"}
    for override in parsed.overrides:
        key, sign, _ = override.partition("=")
        near = nearest(key, SHORT, cutoff=0.7)
        if sign and near is not None and key not in known:
            raise ConfigError(f"{key}: unknown key; did you mean {near!r}? `hzero slurm --help` shows the short names")
    return job_of([long_name(override, SHORT) for override in parsed.overrides])


def _render(parsed: argparse.Namespace) -> None:
    job = _job(parsed)
    text = job.script(chained=chain_length(job, _chain(parsed.chain)) > 1)
    if parsed.output is None:
        sys.stdout.write(text)
        return
    with refusing("--output", parsed.output), replacing(parsed.output) as file:
        file.write(text)
    print(
        f"written: {parsed.output}; the logs go to {job.run_dir / FOLDER}, which has to be there when it is submitted"
    )


def _submit(parsed: argparse.Namespace) -> None:
    job = _job(parsed)
    numbers = submit(job, _chain(parsed.chain))
    said = f"job {numbers[0]}" if len(numbers) == 1 else f"jobs {numbers[0]} to {numbers[-1]}, one after the other"
    print(
        f"submitted: {said}, of {job.nodes:,} nodes and {time_text(job.minutes)}; `hzero slurm status {_typed(job.run_dir)}`"
    )


def _typed(path: Path) -> str:
    """A path as one would type it here."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def history_of(run: Path) -> list[dict[str, Any]]:
    """The lines of the history of a run's jobs.

    Raises:
        ConfigError: The folder holds none.
    """
    rows = queue.read_history(run / FOLDER / HISTORY)
    if not rows:
        raise ConfigError(f"FOLDER: {str(run)!r} has no jobs ({FOLDER}/{HISTORY}); `hzero slurm submit` queues them")
    return rows


def status_of(run: Path) -> dict[str, Any]:
    """The jobs of a run, and what the run says of itself: the content of ``hzero slurm status --json``.

    ``slurm`` is what went wrong where Slurm does not answer. The state of jobs is known from their history alone then.

    Raises:
        ConfigError: The folder has no jobs.
    """
    rows = history_of(run)
    submitted = {row["job"]: row for row in rows if "submitted" in row}
    ends = {row["job"]: row for row in rows if "result" in row}  # the newest of each
    numbers = sorted({*submitted, *ends})
    live: dict[int, dict[str, str]] = {}
    past: dict[int, dict[str, str]] = {}
    silent = None
    try:
        for name in _names(rows):
            live.update(queue.jobs(name))
        past = queue.ended([number for number in numbers if number not in live])
    except ConfigError as error:
        silent = str(error)
    jobs = []
    for number in numbers:
        row, end, seen = submitted.get(number, {}), ends.get(number, {}), live.get(number) or past.get(number) or {}
        state, elapsed = seen.get("state", "ENDED" if end else "UNKNOWN"), seen.get("elapsed", "")
        if end and not elapsed:
            elapsed = _took(end)
        reason = seen.get("reason", "").replace("None", "")
        # Of a job that waits or runs the result is that of an earlier start.
        result = reason if state in _OPEN or not end else str(end["result"])
        jobs.append(
            {
                "job": number,
                "state": state,
                "chain": row.get("chain", ""),
                "restart": _count(end, "restart") + (bool(end) and state in _OPEN),
                "elapsed": elapsed,
                "left": seen.get("left", ""),
                "nodes": seen.get("nodes", ""),
                "result": result or (f"exit {seen['exit']}" if "exit" in seen else ""),
            }
        )
    try:
        said = json.loads(read_small(run / _STATUS))
    except (OSError, ValueError, RecursionError):
        said = None
    return {"run": str(run), "jobs": jobs, "slurm": silent, "status": said if isinstance(said, dict) else None}


def _names(rows: list[dict[str, Any]]) -> set[str]:
    """Names that the jobs of a run have had."""
    return {row["name"] for row in rows if "submitted" in row and isinstance(row.get("name"), str)}


def _count(row: dict[str, Any], key: str) -> int:
    return row[key] if isinstance(row.get(key), int) else 0


def _took(end: dict[str, Any]) -> str:
    """How long a start of a job has taken; empty if its line does not say."""
    seconds = _count(end, "ended") - _count(end, "began")
    return str(datetime.timedelta(seconds=seconds)) if "ended" in end and "began" in end else ""


def _show_status(parsed: argparse.Namespace) -> None:
    found = status_of(parsed.run)
    if parsed.json:
        print(json.dumps(found, indent=1))
        return
    out = console()
    if found["slurm"] is not None:
        out.print(f"Slurm does not answer: {found['slurm']}", soft_wrap=True, markup=False)
    head = ("*job", "state", "chain", "*restarts", "*elapsed", "*left", "nodes", "result, or why it waits")
    keys = ("job", "state", "chain", "restart", "elapsed", "left", "nodes", "result")
    out.print(table_of("", head, [[str(job[key]) for key in keys] for job in found["jobs"]]))
    for key, value in (found["status"] or {}).items():
        out.print(
            printable(f"{key}: {value if isinstance(value, (str, int, float)) else json.dumps(value)}"), soft_wrap=True
        )


def _show_logs(parsed: argparse.Namespace) -> None:
    folder = parsed.run / FOLDER
    history_of(parsed.run)
    if parsed.lines < 1:
        raise ConfigError(f"--lines: found {parsed.lines}, expected at least 1")
    places = sorted(
        (path for path in folder.glob("*-*") if re.fullmatch(r"[0-9]{1,18}-[0-9]{1,9}", path.name) and path.is_dir()),
        key=lambda path: tuple(map(int, path.name.split("-"))),
    )
    if parsed.job is not None:
        places = [path for path in places if path.name.split("-")[0] == str(parsed.job)]
    if not places:
        which = f"job {parsed.job}" if parsed.job is not None else "a job of this run"
        raise ConfigError(f"FOLDER: {str(folder)!r} has no logs of {which}; it has not begun")
    files = [folder / f"job-{places[-1].name.split('-')[0]}.log", *sorted(places[-1].glob("*.log"))]
    if parsed.node is not None:
        of = {path: path.stem.split("-", 2)[2] for path in files[1:] if path.stem.count("-") >= 2}
        names = sorted({*of.values()})
        files = [path for path, node in of.items() if node == parsed.node]
        if not files:
            raise ConfigError(f"--node: no logs of {parsed.node!r} in {str(places[-1])!r}; nodes: {', '.join(names)}")
    for path in files:
        if path.is_file() and path.stat().st_size:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-parsed.lines :]
            print(f"==> {path}", *map(printable, lines), sep="\n")


def _cancel(parsed: argparse.Namespace) -> None:
    rows = history_of(parsed.run)
    ours = {row["job"] for row in rows}  # a job of another run may have the same name
    found = {
        number: job["state"] for name in _names(rows) for number, job in queue.jobs(name).items() if number in ours
    }
    running = sorted(number for number, state in found.items() if state == "RUNNING" and not parsed.now)
    others = sorted(
        number for number, state in found.items() if state in (*_OPEN, "COMPLETING") and number not in running
    )
    # Before any signal: a job that ends looks for it, and is not started again.
    for number in (*running, *others):
        with refusing("FOLDER", parsed.run):
            (parsed.run / FOLDER / f"stop-{number}").touch()
    queue.cancel(others)
    queue.tell(running)
    if others:
        print(f"cancelled: {', '.join(map(str, others))}")
    if running:
        print(f"told to save and end: {', '.join(map(str, running))} (--now ends it at once)")
    if not others and not running:
        print("no job of this run waits or runs")
