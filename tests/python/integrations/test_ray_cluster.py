"""mpool on a local Ray: two pools behind one address, the death of one under load, more pools when calls wait, the
command, and vectors for Parquet files. Some minutes; what needs no cluster is in test_integrations_ray.py."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray.serve")
httpx = pytest.importorskip("httpx")

import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

import mpool  # noqa: E402

pytestmark = pytest.mark.slow
WAIT = 120.0


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def replicas(parent: int) -> list[int]:
    """Processes of replicas that a process has started."""
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


class Served:
    """``mpool ray serve`` in a process of its own."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mpool", "ray", "serve", "--port", str(self.port), "--offline", *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment})
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert self.url in line, (line, self.process.stderr and self.process.stderr.read())

    def until(self, count: int) -> list[int]:
        """The replicas, once there are so many."""
        deadline = time.monotonic() + WAIT
        while len(found := replicas(self.process.pid)) != count:
            assert time.monotonic() < deadline, found
            time.sleep(0.2)
        return found

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.communicate(timeout=WAIT)
        finally:
            self.process.kill()
        return self.process.returncode


@pytest.fixture(scope="module")
def served(llama: Path, bert: Path) -> Iterator[Served]:
    found = Served("--model", f"small={llama}", "--model", f"vectors={bert}", "--model",
                   f"rare={bert}", "--only", "--replicas", "2", "--calls", "2")
    yield found
    assert found.end() == 0
    assert replicas(found.process.pid) == []


def chat(seed: int, tokens: int, **more: Any) -> dict[str, Any]:
    return {"model": "small", "messages": [{"role": "user", "content": "A cat?"}], "seed": seed, "max_tokens": tokens,
            **more}


def test_protocols(served: Served, llama: Path, bert: Path) -> None:
    """Through the real client, from two pools: the same answers as in this process."""
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", timeout=WAIT, max_retries=0)
    expected = mpool.chat([{"role": "user", "content": "A cat?"}], str(llama), seed=3, max_tokens=12)
    asked = chat(3, 12)
    assert client.chat.completions.create(**asked).choices[0].message.content == expected.text
    pieces = [piece.choices[0].delta.content or "" for piece in client.chat.completions.create(**asked, stream=True)]
    assert "".join(pieces) == expected.text
    more = client.chat.completions.create(**chat(3, 2000, stream=True), extra_body={"ignore_eos": True})
    assert sum(1 for _ in more) > 8
    found = client.embeddings.create(model="vectors", input=["A cat sat.", "A dog."]).data
    assert np.allclose([row.embedding for row in found], mpool.embed(["A cat sat.", "A dog."], str(bert)), atol=1e-6)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**{**asked, "model": "other"})
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(**asked, temperature=-1)
    lines = httpx.post(f"{served.url}/api/chat", json={"model": "small", "messages": asked["messages"],
                                                       "options": {"seed": 3, "num_predict": 12}}).text.splitlines()
    assert "".join(json.loads(line)["message"]["content"] for line in lines) == expected.text
    assert httpx.get(f"{served.url}/health").json()["status"] == "healthy"
    assert httpx.get(f"{served.url}/metrics").status_code == 404
    assert httpx.post(f"{served.url}/v1/embeddings", json={}, headers={"host": "evil.example"}).status_code == 421


def test_requests_go_where_their_model_is_warm(served: Served) -> None:
    """One after the other, all to the replica that had the first; ids of requests begin with what is a replica's."""
    def asked() -> str:
        answer = httpx.post(f"{served.url}/v1/embeddings", json={"model": "rare", "input": "A cat."}, timeout=WAIT)
        assert answer.status_code == 200
        return answer.headers["x-request-id"][:8]

    first = asked()
    time.sleep(5.0)  # for the report that it is loaded there, which comes once a second
    assert {asked() for _ in range(16)} == {first}


def test_a_client_that_leaves_ends_the_work(served: Served) -> None:
    """On whichever replica: soon none has a request."""
    with httpx.stream("POST", f"{served.url}/v1/chat/completions", timeout=WAIT,
                      json=chat(1, 15000, stream=True, ignore_eos=True)) as answer:
        next(answer.iter_lines())
    deadline = time.monotonic() + WAIT
    while streams(served.url):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def streams(url: str) -> int:
    """Most streams that a replica says it has; each is asked some times."""
    return max(httpx.get(f"{url}/health", timeout=WAIT).json()["streams"] for _ in range(12))


def test_death_of_a_replica_under_load(served: Served) -> None:
    """Every request has one answer or one error that says that it may be tried again; then all is as before."""
    ends: Counter[str] = Counter()
    over, lock = threading.Event(), threading.Lock()

    def load(number: int) -> None:
        with httpx.Client(timeout=WAIT) as client:
            seed = number
            while not over.is_set():
                seed += 100
                kind = ("whole", "stream", "vectors")[seed % 3]
                end = ask(client, kind, seed)
                with lock:
                    ends[f"{kind} {end}"] += 1
                    ends["after"] += bool(dead) and end == "done"

    def long(number: int) -> None:
        with httpx.Client(timeout=2 * WAIT) as client:
            end = ask(client, "long", number)
        with lock:
            ends[f"long {end}"] += 1

    def ask(client: Any, kind: str, seed: int) -> str:
        if kind == "vectors":
            answer = client.post(f"{served.url}/v1/embeddings", json={"model": "vectors", "input": f"Text {seed}."})
        else:
            tokens = 8000 if kind == "long" else 150
            answer = client.post(f"{served.url}/v1/chat/completions",
                                 json=chat(seed, tokens, stream=kind != "whole", ignore_eos=True))
        if answer.status_code == 503:
            assert answer.json()["error"]["code"] == "worker_lost" and answer.headers["retry-after"]
            return "lost"
        assert answer.status_code == 200, answer.text
        if kind in ("whole", "vectors"):
            assert answer.json()
            return "done"
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
        if events[-1] == "[DONE]":
            assert not any('"error"' in event for event in events)
            return "done"
        assert json.loads(events[-1])["error"]["code"] == "worker_lost", events[-1]
        return "lost"

    dead: list[int] = []
    before = served.until(2)
    threads = [threading.Thread(target=load, args=(number,)) for number in range(6)]
    threads += [threading.Thread(target=long, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
        time.sleep(0.4)  # so that reports of replicas come in between
    os.kill(before[0], signal.SIGKILL)
    dead.append(before[0])
    time.sleep(3.0)
    after = served.until(2)
    time.sleep(2.0)
    over.set()
    for thread in threads:
        thread.join(2 * WAIT)
        assert not thread.is_alive(), "a request hangs"
    assert before[0] not in after and before[1] in after
    assert ends["after"] > 8 and ends["long lost"] > 0 and ends["long done"] > 0, ends
    assert ends["long lost"] + ends["long done"] == 8, ends
    expected = httpx.post(f"{served.url}/v1/chat/completions", json=chat(3, 12), timeout=WAIT)
    assert expected.status_code == 200


def test_more_replicas_when_calls_wait(llama: Path) -> None:
    """By the calls in the pool: one request of many answers is enough."""
    found = Served("--model", f"small={llama}", "--only", "--max-replicas", "2", "--calls", "2",
                   RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S="1")
    try:
        assert len(found.until(1)) == 1
        over = threading.Event()

        def load() -> None:
            with httpx.Client(timeout=WAIT) as client:
                while not over.is_set():
                    client.post(f"{found.url}/v1/chat/completions", json=chat(1, 4000, ignore_eos=True))

        threads = [threading.Thread(target=load) for _ in range(6)]
        for thread in threads:
            thread.start()
        try:
            found.until(2)
        finally:
            over.set()
            for thread in threads:
                thread.join(WAIT)
    finally:
        assert found.end() == 0


def test_parquet(tmp_path: Path, bert: Path) -> None:
    """All files, by two processes; what a kill or an error leaves is gone on with."""
    (tmp_path / "in").mkdir()
    for number in range(4):
        texts = [f"A cat, file {number}, line {line}." for line in range(50)]
        pq.write_table(pa.table({"id": range(50), "body": texts}), tmp_path / "in" / f"{number}.parquet")
    pq.write_table(pa.table({"id": pa.array([], pa.int64()), "body": pa.array([], pa.string())}),
                   tmp_path / "in" / "empty.parquet")
    pq.write_table(pa.table({"id": [1, 2], "body": ["A cat.", None]}), tmp_path / "in" / "hole.parquet")
    command = [sys.executable, "-m", "mpool", "ray", "embed", str(tmp_path / "in"), str(tmp_path / "out"), "--column",
               "body", "--model", str(bert), "--compute", "float32"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT)
    assert done.returncode == 1 and "1 of 6 files have no vectors" in done.stderr and "hole.parquet" in done.stderr
    assert "200/202" in done.stderr.replace(" ", "")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "0.parquet", "1.parquet", "2.parquet", "3.parquet", "empty.parquet"]
    times = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    done = subprocess.run([*command, "--on-error", "null", "--quiet"], capture_output=True, text=True, timeout=WAIT)
    assert done.returncode == 0 and done.stdout == "2 rows of 1 files have vectors; 5 files had them before\n"
    assert times.items() <= {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}.items()
    for number in range(4):
        table = pq.read_table(tmp_path / "out" / f"{number}.parquet")
        assert table.schema.field("embedding").type == pa.list_(pa.float32(), 32)
        assert table["id"].to_pylist() == list(range(50))
        expected = mpool.embed(table["body"].to_pylist(), str(bert), compute="float32")
        assert np.array_equal(np.float32(table["embedding"].to_pylist()), expected)
    hole = pq.read_table(tmp_path / "out" / "hole.parquet")["embedding"].to_pylist()
    assert len(hole[0]) == 32 and hole[1] is None
    assert pq.read_table(tmp_path / "out" / "empty.parquet").schema.names == ["id", "body", "embedding"]


def test_what_cannot_be_served_is_said_at_once(tmp_path: Path) -> None:
    for arguments, words in ((["--model", str(tmp_path / "nothing")], "nothing"),
                             (["--replicas", "1000", "--port", "0"], "--replicas must be ")):
        done = subprocess.run([sys.executable, "-m", "mpool", "ray", "serve", *arguments], capture_output=True,
                              text=True, timeout=WAIT)
        assert done.returncode == 1 and words in done.stderr, done.stderr
