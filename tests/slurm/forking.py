"""A Python for jobs whose processes fork from that of `tests.forks`, which has imported everything: ranks cost no imports."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from tests.forks import fork, run_words

#: What jobs start: it hands arguments, variables, streams and signals over, and ends with the status that comes back.
_CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    request = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd(), os.getpid()])
    server.sendall(request.encode() + b"\\n")
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, _: server.sendall(bytes([number])))
    sys.exit(int(server.makefile().readline() or 1))
"""


@contextlib.contextmanager
def python(folder: Path) -> Iterator[Path]:
    """A program that jobs start instead of Python, inside the block.

    Args:
        folder: For the program and its socket, with a short path.
    """
    program, address = folder / "python", folder / "socket"
    program.write_text(_CLIENT.format(python=sys.executable, address=str(address)))
    program.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(address))
        server.listen(64)
        threading.Thread(target=_serve, args=(server,), daemon=True).start()
        yield program


def _serve(server: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the block has ended
        while True:
            threading.Thread(target=_answer, args=server.accept()[:1], daemon=True).start()


def _answer(client: socket.socket) -> None:
    with client:
        arguments, env, folder, pid = json.loads(client.makefile().readline())
        streams = {name: Path(f"/proc/{pid}/fd/{number}") for name, number in (("out", 1), ("err", 2))}
        process = fork(run_words, arguments, folder=Path(folder), env=env, **streams)
        while process.is_alive():
            if select.select([client], [], [], 0)[0]:
                for number in client.recv(64) or [signal.SIGKILL]:  # nothing: it was killed
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid or 0, number)
            process.join(0.1)
        status = process.exitcode or 0
        with contextlib.suppress(OSError):
            client.sendall(f"{status if status >= 0 else 128 - status}\n".encode())
