"""mpool on a local Ray cluster: two pools behind one address, the death of a pool under load, autoscaling, the command
line, and embeddings for Parquet files. They take minutes; tests without a cluster are in other files of this folder."""

import json
import os
import signal
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

from clientpackages import package

package("ray.serve", "ray")
httpx = pytest.importorskip("httpx")

import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

import mpool  # noqa: E402

from rayservers import WAIT, RayServer, replicas  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def served(llama: Path, bert: Path) -> Iterator[RayServer]:
    server = RayServer("--model", f"small={llama}", "--model", f"vectors={bert}", "--model",
                       f"rare={bert}", "--only", "--replicas", "2", "--calls", "2")
    yield server
    assert server.stop() == 0
    assert replicas(server.process.pid) == []


def chat(seed: int, tokens: int, **more: Any) -> dict[str, Any]:
    return {"model": "small", "messages": [{"role": "user", "content": "A cat?"}], "seed": seed, "max_tokens": tokens,
            **more}


def test_protocols(served: RayServer, llama: Path, bert: Path) -> None:
    """OpenAI's client gets the same completions and vectors from two pools as from mpool in this process."""
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", timeout=WAIT, max_retries=0)
    expected = mpool.chat([{"role": "user", "content": "A cat?"}], str(llama), seed=3, max_tokens=12)
    request = chat(3, 12)
    assert client.chat.completions.create(**request).choices[0].message.content == expected.text
    texts = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**request, stream=True)]
    assert "".join(texts) == expected.text
    more = client.chat.completions.create(**chat(3, 2000, stream=True), extra_body={"ignore_eos": True})
    assert sum(1 for _ in more) > 8
    found = client.embeddings.create(model="vectors", input=["A cat sat.", "A dog."]).data
    assert np.allclose([row.embedding for row in found], mpool.embed(["A cat sat.", "A dog."], str(bert)), atol=1e-6)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**{**request, "model": "other"})
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(**request, temperature=-1)
    lines = httpx.post(f"{served.url}/api/chat", json={"model": "small", "messages": request["messages"],
                                                       "options": {"seed": 3, "num_predict": 12}}).text.splitlines()
    assert "".join(json.loads(line)["message"]["content"] for line in lines) == expected.text
    assert httpx.get(f"{served.url}/health").json()["status"] == "healthy"
    assert httpx.get(f"{served.url}/metrics").status_code == 404
    assert httpx.post(f"{served.url}/v1/embeddings", json={}, headers={"host": "evil.example"}).status_code == 421


def test_requests_go_to_the_replica_with_their_model(served: RayServer) -> None:
    """Sequential requests for one model all go to the replica of the first. Request ids begin with the replica's id."""
    def replica_id() -> str:
        response = httpx.post(f"{served.url}/v1/embeddings", json={"model": "rare", "input": "A cat."}, timeout=WAIT)
        assert response.status_code == 200
        return response.headers["x-request-id"][:8]

    first = replica_id()
    time.sleep(5.0)  # replicas report their loaded models once a second
    assert {replica_id() for _ in range(16)} == {first}


def test_a_disconnect_cancels_the_request(served: RayServer) -> None:
    """Soon after a client disconnects, no replica has a stream."""
    with httpx.stream("POST", f"{served.url}/v1/chat/completions", timeout=WAIT,
                      json=chat(1, 15000, stream=True, ignore_eos=True)) as response:
        next(response.iter_lines())
    deadline = time.monotonic() + WAIT
    while streams(served.url):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def streams(url: str) -> int:
    """Return the largest number of streams that a replica reports. 12 requests reach every replica with high
    probability."""
    return max(httpx.get(f"{url}/health", timeout=WAIT).json()["streams"] for _ in range(12))


def test_death_of_a_replica_under_load(served: RayServer) -> None:
    """Every request gets one response or one error that allows a retry. Then a new replica replaces the dead one."""
    outcomes: Counter[str] = Counter()
    stop, lock = threading.Event(), threading.Lock()

    def load(number: int) -> None:
        with httpx.Client(timeout=WAIT) as client:
            seed = number
            while not stop.is_set():
                seed += 100
                kind = ("whole", "stream", "vectors")[seed % 3]
                outcome = ask(client, kind, seed)
                with lock:
                    outcomes[f"{kind} {outcome}"] += 1
                    outcomes["after"] += bool(dead) and outcome == "done"

    def long(number: int) -> None:
        with httpx.Client(timeout=2 * WAIT) as client:
            outcome = ask(client, "long", number)
        with lock:
            outcomes[f"long {outcome}"] += 1

    def ask(client: Any, kind: str, seed: int) -> str:
        if kind == "vectors":
            response = client.post(f"{served.url}/v1/embeddings", json={"model": "vectors", "input": f"Text {seed}."})
        else:
            tokens = 8000 if kind == "long" else 150
            response = client.post(f"{served.url}/v1/chat/completions",
                                 json=chat(seed, tokens, stream=kind != "whole", ignore_eos=True))
        if response.status_code == 503:
            assert response.json()["error"]["code"] == "worker_lost" and response.headers["retry-after"]
            return "lost"
        assert response.status_code == 200, response.text
        if kind in ("whole", "vectors"):
            assert response.json()
            return "done"
        events = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
        if events[-1] == "[DONE]":
            assert not any('"error"' in event for event in events)
            return "done"
        assert json.loads(events[-1])["error"]["code"] == "worker_lost", events[-1]
        return "lost"

    dead: list[int] = []
    before = served.wait_for_replicas(2)
    threads = [threading.Thread(target=load, args=(number,)) for number in range(6)]
    threads += [threading.Thread(target=long, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
        time.sleep(0.4)  # leave time for the load reports of the replicas
    os.kill(before[0], signal.SIGKILL)
    dead.append(before[0])
    time.sleep(3.0)
    after = served.wait_for_replicas(2)
    time.sleep(2.0)
    stop.set()
    for thread in threads:
        thread.join(2 * WAIT)
        assert not thread.is_alive(), "a request hangs"
    assert before[0] not in after and before[1] in after
    assert outcomes["after"] > 8 and outcomes["long lost"] > 0 and outcomes["long done"] > 0, outcomes
    assert outcomes["long lost"] + outcomes["long done"] == 8, outcomes
    expected = httpx.post(f"{served.url}/v1/chat/completions", json=chat(3, 12), timeout=WAIT)
    assert expected.status_code == 200


def test_replicas_are_added_when_requests_wait(llama: Path) -> None:
    """The number of requests in the pool starts a second replica."""
    server = RayServer("--model", f"small={llama}", "--only", "--max-replicas", "2", "--calls", "2",
                       RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S="1")
    try:
        assert len(server.wait_for_replicas(1)) == 1
        stop = threading.Event()

        def load() -> None:
            with httpx.Client(timeout=WAIT) as client:
                while not stop.is_set():
                    client.post(f"{server.url}/v1/chat/completions", json=chat(1, 4000, ignore_eos=True))

        threads = [threading.Thread(target=load) for _ in range(6)]
        for thread in threads:
            thread.start()
        try:
            server.wait_for_replicas(2)
        finally:
            stop.set()
            for thread in threads:
                thread.join(WAIT)
    finally:
        assert server.stop() == 0


def test_parquet(tmp_path: Path, bert: Path) -> None:
    """Two processes embed all files. A second call skips complete files and retries the failed one."""
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
    assert done.returncode == 1
    assert "1 of 6 files could not be embedded" in done.stderr and "hole.parquet" in done.stderr
    assert "200/202" in done.stderr.replace(" ", "")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "0.parquet", "1.parquet", "2.parquet", "3.parquet", "empty.parquet"]
    times = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    done = subprocess.run([*command, "--on-error", "null", "--quiet"], capture_output=True, text=True, timeout=WAIT)
    assert done.returncode == 0
    assert done.stdout == "embedded 2 rows of 1 files; skipped 5 files that exist in the target folder\n"
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


def test_invalid_arguments_fail_at_start(tmp_path: Path) -> None:
    for arguments, words in ((["--model", str(tmp_path / "nothing")], "nothing"),
                             (["--replicas", "1000", "--port", "0"], "--replicas must be ")):
        done = subprocess.run([sys.executable, "-m", "mpool", "ray", "serve", *arguments], capture_output=True,
                              text=True, timeout=WAIT)
        assert done.returncode == 1 and words in done.stderr, done.stderr
