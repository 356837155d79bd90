"""Machine and versions of a measurement."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

import hzero
from benchmarks.rows import Machine

ROOT = Path(__file__).resolve().parents[2]


def now() -> datetime.datetime:
    """The time to the second."""
    return datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0)


def machine() -> Machine:
    """Cores, processor, memory and system of this machine."""
    try:
        system = platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:
        system = platform.system()
    return Machine(
        cores=len(os.sched_getaffinity(0)),
        processor=_processor(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        system=f"{system}, {platform.system()} {platform.release()}",
        python=platform.python_version(),
    )


def versions() -> dict[str, str]:
    """Versions of the packages; ``commit`` is this checkout's, with + if files have changed since."""
    found = {"hzero": hzero.__version__, **{name: version(name) for name in ("torch", "deepspeed", "transformers")}}
    return {**found, "commit": ours} if (ours := commit(ROOT)) else found


def commit(checkout: Path) -> str:
    """The commit of a checkout, with + if files have changed since; empty if it is none."""
    found = _git(checkout, "rev-parse", "--short=10", "HEAD")
    changed = found and _git(checkout, "status", "--porcelain", "--untracked-files=no")
    return f"{found}{'+' if changed else ''}"


def _git(checkout: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=checkout, capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
