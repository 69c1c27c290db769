"""The command ``mpool ray serve`` on a local cluster of its own, and the processes of its replicas."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

#: Seconds that a test waits for a server, a command or a response.
WAIT = 120.0


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def replicas(parent: int) -> list[int]:
    """Return the ids of the replica processes that a process has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            process = int(path.parent.name)
            if path.read_bytes().startswith(b"ray::ServeReplica:mpool:Pools") and parent in ancestors(process):
                found.append(process)
        except (OSError, ProcessLookupError):
            continue
    return found


def ancestors(process: int) -> set[int]:
    found = set()
    while process > 1:
        status = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        process = int(status[1])
        found.add(process)
    return found


class RayServer:
    """The command ``mpool ray serve`` in a process of its own."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mpool", "ray", "serve", "--port", str(self.port), "--offline", *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment})
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert self.url in line, (line, self.process.stderr and self.process.stderr.read())

    def wait_for_replicas(self, count: int) -> list[int]:
        """Wait until there are ``count`` replicas, and return their process ids."""
        deadline = time.monotonic() + WAIT
        while len(found := replicas(self.process.pid)) != count:
            assert time.monotonic() < deadline, found
            time.sleep(0.2)
        return found

    def stop(self) -> int:
        """Stop the server and return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.communicate(timeout=WAIT)
        finally:
            self.process.kill()
        return self.process.returncode
