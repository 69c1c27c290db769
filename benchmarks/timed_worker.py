"""Times of ``mpool worker`` as its client sees them: first token, /health and cancellation while a job runs."""

import http.client
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .timing import percentile, seconds_of

#: Jobs, and calls of /health during each: together the 2,000 calls that a 99th percentile needs. Jobs are many, because
#: the first calls of a job may be slower than later ones.
JOBS, HEALTHS = 40, 50


@dataclass
class WorkerTimes:
    """Seconds: median to the first token; 99th percentile of ``calls`` calls of /health; median from a cancellation to
    the job's end."""

    first: float
    health: float
    calls: int
    cancel: float


def _post(port: int, path: str, body: dict[str, Any]) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    return connection.getresponse()


def _job(port: int, name: str, begun: Callable[[], None]) -> tuple[float, float]:
    """Run a job. Calls ``begun`` at the first token. Returns the seconds to it, and the time of the end."""
    start, first = time.perf_counter(), 0.0
    response = _post(port, "/execute", {"job_id": name, "prompt": "Once upon a time", "max_tokens": 2048, "seed": 1})
    if response.status != 200:
        raise RuntimeError(f"/execute: {response.status} {response.read(500)!r}")
    for line in response:
        if line.startswith(b"event: token") and not first:
            first = time.perf_counter() - start
            begun()
    return first, time.perf_counter()


def time_worker(path: str, threads: int) -> WorkerTimes:
    """Start a worker for a model, and measure it.

    Raises:
        RuntimeError: the worker does not start, or a job fails or ends too early.
    """
    # run elsewhere: in the clone, Python would import its sources instead of the installed package
    process = subprocess.Popen([sys.executable, "-m", "mpool", "worker", "--model", os.path.abspath(path), "--port",
                                "0", "--threads", str(threads)], cwd=os.sep, stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if "http://" not in line:
            raise RuntimeError(f"the worker did not start: {line!r}")
        port = int(line.strip().rsplit(":", 1)[1].rstrip("/"))
        firsts, healths, cancels = [], [], []
        for number in range(JOBS):
            begun, ended = threading.Event(), []
            job = f"job-{number}"
            thread = threading.Thread(target=lambda: ended.append(_job(port, job, begun.set)))
            thread.start()
            if not begun.wait(120):
                raise RuntimeError("a job gave no token within 120 s")
            healths += [seconds_of(lambda: _health(port)) for _ in range(HEALTHS)]
            cancelled = time.perf_counter()
            was_running = json.loads(_post(port, "/cancel", {"job_id": job}).read())["cancelled"]
            thread.join(120)
            if not was_running or not ended:
                raise RuntimeError("a job ended before it was cancelled: use a larger model")
            firsts.append(ended[0][0])
            cancels.append(ended[0][1] - cancelled)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
    return WorkerTimes(statistics.median(firsts), percentile(healths, 0.99), len(healths), statistics.median(cancels))


def _health(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/health")
    connection.getresponse().read()
    connection.close()
