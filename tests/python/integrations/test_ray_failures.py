"""mpool on a Ray cluster of two nodes, under load, while processes and a node are killed or fall silent.

Four clients send requests all the time. Two use the address of the head node only and never retry. Two use the other
node's address, and repeat a request at the head's address if the connection fails before a response has begun, as a
load balancer does. Every test asserts that no such client sees a failed request whose response had not begun, and that
the clients never wait longer than :data:`GAP` seconds for the next response. A stream that had begun on a lost replica
ends with an error: at once if its connection breaks, and after ``Limits.lost_after`` seconds if the replica is silent.
Both nodes are on this machine; the tests take minutes.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from clientpackages import package

package("ray.serve", "ray")
httpx = pytest.importorskip("httpx")

from mpool.integrations.ray import proxy  # noqa: E402
from mpool.integrations.ray.race import Limits  # noqa: E402

pytestmark = pytest.mark.slow
WAIT = 180.0
#: Seconds without a response that clients may see when a process or a node is lost.
GAP = 2.0
#: Seconds of load before and after a failure. Equally long: the longest request after the failure is compared with the
#: longest before it, and the longest of few requests is shorter than that of many.
BEFORE, AFTER = 10.0, 10.0


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def descendants(parent: int) -> list[int]:
    """Return the process ids of all descendants of a process."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except (OSError, ProcessLookupError):
            continue
    found, grew = {parent}, True
    while grew:
        more = {process for process, above in parents.items() if above in found} - found
        grew = bool(more)
        found |= more
    return sorted(found - {parent})


def named(parent: int, name: str) -> list[int]:
    """Return the process ids of the Ray actors with a name below a raylet."""
    found = []
    for process in descendants(parent):
        try:
            if Path(f"/proc/{process}/cmdline").read_bytes().startswith(f"ray::{name}".encode()):
                found.append(process)
        except OSError:
            continue
    return found


FRONT, POOLS = "ServeReplica:mpool:Front", "ServeReplica:mpool:Pools"


class Served:
    """A Ray cluster of two nodes with one CPU each, and ``mpool ray serve --replicas 2`` on it."""

    def __init__(self, llama: Path, bert: Path) -> None:
        self.ports = free_port(), free_port()
        os.environ.update({"RAY_SERVE_WORKER_PROXY_HTTP_PORT": str(self.ports[1]), **proxy.ENVIRONMENT})
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(initialize_head=True, head_node_args={
            "num_cpus": 1, "include_dashboard": False, "object_store_memory": 128 << 20})
        self.other = self.cluster.add_node(num_cpus=1, object_store_memory=128 << 20)
        self.cluster.wait_for_nodes()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mpool", "ray", "serve", "--port", str(self.ports[0]), "--offline", "--only",
             "--model", f"small={llama}", "--model", f"vectors={bert}", "--load", "--replicas", "2", "--address",
             self.cluster.address], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None and self.process.stderr is not None
        line = self.process.stdout.readline()
        assert str(self.ports[0]) in line, (line, self.process.stderr.read())
        self.wait_until_complete()

    @staticmethod
    def raylet(node: Any) -> int:
        return int(node.all_processes["raylet"][0].process.pid)

    @property
    def head(self) -> int:
        """Process id of the head's raylet."""
        return self.raylet(self.cluster.head_node)

    def all(self, name: str) -> list[int]:
        """Return the process ids of the actors with a name on both nodes."""
        return [process for node in (self.cluster.head_node, self.other) for process in named(self.raylet(node), name)]

    def wait_until_complete(self) -> None:
        """Wait until both addresses answer from two fronts and two replicas."""
        deadline = time.monotonic() + WAIT
        while True:
            assert time.monotonic() < deadline, (self.all(FRONT), self.all(POOLS))
            time.sleep(0.5)
            if len(self.all(POOLS)) != 2 or len(self.all(FRONT)) != 2:
                continue
            try:
                ids = {self.embed(port).headers["x-request-id"][:8] for port in self.ports for _ in range(8)}
            except (httpx.HTTPError, KeyError):
                continue
            if len(ids) == 2:
                return

    def embed(self, port: int) -> Any:
        response = httpx.post(f"http://127.0.0.1:{port}/v1/embeddings", json={"model": "vectors", "input": "A cat."},
                              headers={"host": f"127.0.0.1:{self.ports[0]}"}, timeout=20.0)
        assert response.status_code == 200, response.text
        return response

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.communicate(timeout=60.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.cluster.shutdown()


@pytest.fixture(scope="module")
def served(llama: Path, bert: Path) -> Iterator[Served]:
    made = Served(llama, bert)
    yield made
    made.close()


@dataclass
class Outcome:
    """How a request of a client ended."""

    kind: str
    started: float
    ended: float
    result: str
    moved: int


class Clients:
    """Four clients that send requests until they are stopped."""

    def __init__(self, served: Served, *addresses: tuple[int, ...]) -> None:
        self.served, self.outcomes = served, list[Outcome]()
        self._stop, self._lock = threading.Event(), threading.Lock()
        head, other = served.ports
        addresses = addresses or ((head,), (head,), (other, head), (other, head))
        #: Streams from these addresses may break: their connection ends with the process or node that is killed.
        self._unreliable = {ports[0] for ports in addresses if len(ports) > 1}
        self._threads = [threading.Thread(target=self._run, args=(number, ports)) for number, ports in
                         enumerate(addresses)]

    def _run(self, number: int, ports: tuple[int, ...]) -> None:
        with httpx.Client(timeout=60.0, headers={"host": f"127.0.0.1:{self.served.ports[0]}"}) as client:
            count = 0
            while not self._stop.is_set():
                count += 1
                kind = ("vectors", "whole", "stream")[count % 3]
                started, moved, result = time.monotonic(), 0, ""
                while not result:
                    try:
                        result = self._ask(client, ports[0], kind, 1000 * number + count)
                    except httpx.TransportError as error:
                        if len(ports) == 1:
                            result = f"broken: {error!r}"
                        else:
                            ports, moved = ports[1:], moved + 1
                with self._lock:
                    self.outcomes.append(Outcome(kind, started, time.monotonic(), result, moved))

    def _ask(self, client: Any, port: int, kind: str, seed: int) -> str:
        url = f"http://127.0.0.1:{port}/v1/"
        if kind == "vectors":
            response = client.post(url + "embeddings", json={"model": "vectors", "input": f"Text {seed}."})
            return "done" if response.status_code == 200 else f"{response.status_code}: {response.text}"
        body = {"model": "small", "messages": [{"role": "user", "content": "A cat?"}], "seed": seed,
                "max_tokens": 400, "ignore_eos": True, "stream": kind == "stream"}
        if kind == "whole":
            response = client.post(url + "chat/completions", json=body)
            return "done" if response.status_code == 200 else f"{response.status_code}: {response.text}"
        lines: list[str] = []
        with client.stream("POST", url + "chat/completions", json=body) as response:
            if response.status_code != 200:
                return f"{response.status_code}: {response.read()!r}"
            try:
                for line in response.iter_lines():
                    if line.startswith("data: "):
                        lines.append(line.removeprefix("data: "))
            except httpx.TransportError:
                if not lines or port not in self._unreliable:
                    raise
                return "begun and lost"
        if lines and lines[-1] == "[DONE]":
            return "done"
        last = json.loads(lines[-1]) if lines else {}
        if len(lines) > 1 and last.get("error", {}).get("code") == "worker_lost":
            return "begun and lost"
        return f"stream of {len(lines)} events: {lines[-1:]}"

    def run(self, fail: Callable[[], object], after: float = AFTER) -> None:
        """Run the load, cause the failure, and check what the clients saw."""
        for thread in self._threads:
            thread.start()
        time.sleep(BEFORE)
        at = time.monotonic()
        fail()
        time.sleep(after)
        stopped = time.monotonic()
        self._stop.set()
        for thread in self._threads:
            thread.join(WAIT)
            assert not thread.is_alive(), "a request hangs"
        ends = sorted(outcome.ended for outcome in self.outcomes if outcome.result == "done")
        gap = max(end - start for start, end in pairwise([*(end for end in ends if end < stopped), stopped]))
        longest = self._longest("done")
        lost = self._longest("begun and lost")
        calm = max((outcome.ended - outcome.started for outcome in self.outcomes if outcome.ended < at), default=0.0)
        counts = Counter(outcome.result for outcome in self.outcomes)
        print(f"\n{len(self.outcomes)} requests, {sum(end > at for end in ends)} after the failure, {dict(counts)}, "
              f"moved {sum(outcome.moved for outcome in self.outcomes)}; longest gap {gap:.2f} s, longest request "
              f"{longest:.2f} s (before the failure {calm:.2f} s), longest lost stream {lost:.2f} s", flush=True)
        failed = {result: count for result, count in counts.items() if result not in ("done", "begun and lost")}
        assert not failed, failed
        assert gap < GAP and longest < GAP + calm, (gap, longest, calm)
        assert lost < Limits().lost_after + GAP + calm, (lost, calm)
        assert sum(end > at for end in ends) > 8

    def _longest(self, result: str) -> float:
        """Return the seconds of the longest request with a result."""
        return max((outcome.ended - outcome.started for outcome in self.outcomes if outcome.result == result),
                   default=0.0)


def test_front_process_killed(served: Served) -> None:
    fronts = named(served.head, FRONT)
    assert fronts, "each node has a front"
    Clients(served).run(lambda: [os.kill(process, signal.SIGKILL) for process in fronts])


def test_replica_process_killed(served: Served) -> None:
    served.wait_until_complete()
    (replica,) = named(served.head, POOLS)
    Clients(served).run(lambda: os.kill(replica, signal.SIGKILL))


def test_proxy_process_killed(served: Served) -> None:
    """Clients of the proxy go to another address. Then Ray replaces the proxy."""
    served.wait_until_complete()
    (killed,) = named(served.head, "ProxyActor")
    Clients(served, *[served.ports] * 4).run(lambda: os.kill(killed, signal.SIGKILL))
    served.wait_until_complete()


def test_node_falls_silent(served: Served) -> None:
    """A node whose network is cut closes no connection. It is stopped for 8 s; its own address is not used."""
    served.wait_until_complete()
    node = served.raylet(served.other)
    stopped = [node, *descendants(node)]
    try:
        Clients(served, *[served.ports[:1]] * 4).run(
            lambda: [os.kill(process, signal.SIGSTOP) for process in stopped], after=8.0)
    finally:
        for process in stopped:
            os.kill(process, signal.SIGCONT)


def test_node_killed(served: Served) -> None:
    """All processes of a node end at once, without grace."""
    served.wait_until_complete()
    node = served.raylet(served.other)
    Clients(served).run(lambda: [os.kill(process, signal.SIGKILL) for process in [node, *descendants(node)]],
                        after=15.0)
