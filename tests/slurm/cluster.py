"""A Slurm of its own on this machine: munge, a controller, and daemons that stand for the nodes of a cluster.

``python -m tests.slurm.cluster FOLDER`` keeps one up until Ctrl-C, to try commands by hand.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hzero.tools.launch import die_with_parent

#: What the daemons and commands are called, and the Debian packages that have them.
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "sbcast", "scontrol", "squeue", "scancel", "sinfo")
PACKAGES = "slurm-wlm munge"
#: Longest time that a daemon may take to answer, in seconds.
START_S = 30.0


def missing() -> str:
    """Why no cluster can be started here; empty if one can."""
    lacking = [name for name in PROGRAMS if _program(name) is None]
    if lacking:
        return f"{', '.join(lacking)} not installed (apt-get install --no-install-recommends {PACKAGES})"
    return "" if os.geteuid() == 0 else "slurmctld and slurmd need root"


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin")


class Cluster:
    """A running cluster.

    Attributes:
        nodes: Names of its nodes, ``pretend01`` and so on. All are this machine.
        environment: What commands such as ``sbatch`` need to find it.
    """

    def __init__(self, folder: Path, nodes: int, cpus: int, max_minutes: int) -> None:
        self.nodes = [f"pretend{number:02}" for number in range(1, nodes + 1)]
        self._folder, self._conf = folder, folder / "slurm.conf"
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        ports = _free_ports(nodes + 1)
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        host = socket.gethostname().split(".")[0]
        names = zip(self.nodes, ports[1:])
        lines = [
            "ClusterName=pretend",
            f"SlurmctldHost={host}(127.0.0.1)",
            f"SlurmctldPort={ports[0]}",
            "SlurmUser=root",
            # A job that is started again waits for as long as a credential lives: two minutes, at least 5 s.
            f"AuthInfo=socket={folder}/munge.socket,cred_expire=5",
            *(f"{key}={folder}/{name}" for key, name in _FILES.items()),
            *(f"{key}={value}" for key, value in _SETTINGS.items()),
            *(
                f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} RealMemory=1000 Gres=gpu:8 "
                "State=UNKNOWN"
                for name, port in names
            ),
            f"PartitionName=batch Nodes=ALL Default=YES MaxTime={max_minutes} State=UP OverSubscribe=FORCE:4",
            "PartitionName=standard-g Nodes=ALL",  # LUMI's
        ]
        self._conf.write_text("\n".join(lines) + "\n")
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-7]\n")
        for number in range(8):
            (folder / f"gpu{number}").touch()  # instead of a device
        (folder / "state").mkdir()
        self.environment = {**os.environ, "SLURM_CONF": str(self._conf)}

    def start(self) -> None:
        """Starts all daemons and waits until the nodes take jobs."""
        at = {name: f"{self._folder}/munge.{name}" for name in ("socket", "pid", "log", "seed")}
        self._daemon("munged", "-F", "-f", f"--key-file={self._folder}/munge.key", f"--socket={at['socket']}",
                     f"--pid-file={at['pid']}", f"--log-file={at['log']}", f"--seed-file={at['seed']}")  # fmt: skip
        _until("munged answers", lambda: Path(at["socket"]).exists())
        self._daemon("slurmctld", "-D", "-i", "-f", str(self._conf))
        _until("slurmctld answers", lambda: "UP" in self.run("scontrol", "ping").stdout)
        for node in self.nodes:
            self._daemon(node, "-D", "-N", node, "-f", str(self._conf), program="slurmd")
        _until(
            "the nodes are idle",
            lambda: self.run("sinfo", "-h", "-t", "idle", "-o", "%D").stdout.strip() == str(len(self.nodes)),
        )

    def stop(self) -> None:
        """Ends all jobs and daemons."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.run("scancel", "--signal=KILL", "--full", "-u", "root", timeout=10)
            self.run("scancel", "-u", "root", timeout=10)
        for process in reversed(list(self._daemons.values())):
            process.send_signal(signal.SIGTERM)
        for process in self._daemons.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()

    def run(
        self, *command: str, timeout: float = 60.0, cwd: Path | None = None, **more: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command with the cluster's environment, and ``more`` variables."""
        environment = {**self.environment, **more}
        return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout)

    def log(self) -> str:
        """The ends of all logs of the daemons, for the message of a failed test."""
        return "\n".join(f"{path.name}:\n{path.read_text()[-2000:]}" for path in sorted(self._folder.glob("*.log")))

    def _daemon(self, name: str, *arguments: str, program: str = "") -> None:
        path = _program(program or name)
        assert path is not None
        with open(self._folder / f"{name}.out.log", "ab") as out:
            self._daemons[name] = subprocess.Popen(
                [path, *arguments], env=self.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                start_new_session=True, preexec_fn=die_with_parent,
            )  # fmt: skip


#: Files below the folder. %n is the node's name.
_FILES = {
    "StateSaveLocation": "state", "SlurmctldPidFile": "slurmctld.pid", "SlurmdPidFile": "slurmd.%n.pid",
    "SlurmdSpoolDir": "spool.%n", "SlurmctldLogFile": "slurmctld.log", "SlurmdLogFile": "slurmd.%n.log",
}  # fmt: skip
#: Beside Slurm's defaults.
_SETTINGS = {
    "ProctrackType": "proctrack/linuxproc",  # without cgroups
    "SelectType": "select/cons_tres",
    "SelectTypeParameters": "CR_Core",
    "ReturnToService": "2",
    "SlurmdParameters": "config_overrides",  # nodes have the processors that they say
    "GresTypes": "gpu",
    "SchedulerParameters": "batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1",
    "KillWait": "20",
    "SlurmdTimeout": "10",
}


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as opened:
        probes = [opened.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def _until(what: str, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_S
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"cluster: not within {START_S:g} s: {what}")
        time.sleep(0.05)


@contextlib.contextmanager
def running(folder: Path, nodes: int = 2, cpus: int = 8, max_minutes: int = 120) -> Iterator[Cluster]:
    """A cluster that is stopped at the end of the block.

    Args:
        folder: An empty folder for its files, whose path others cannot change.
        nodes: How many nodes it has.
        cpus: Processors that each node says it has.
        max_minutes: The longest time of a job.
    """
    cluster = Cluster(folder, nodes, cpus, max_minutes)
    try:
        cluster.start()
        yield cluster
    except TimeoutError as error:
        raise TimeoutError(f"{error}\n{cluster.log()}") from None
    finally:
        cluster.stop()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"cluster: FOLDER: found {len(sys.argv) - 1} arguments; expected a new folder")
    place = Path(sys.argv[1])
    if place.exists():
        sys.exit(f"cluster: FOLDER: found {place}; expected a new folder")
    place.mkdir(parents=True)
    with running(place.resolve()) as up:
        print(f"export SLURM_CONF={up.environment['SLURM_CONF']}  # until Ctrl-C", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()
