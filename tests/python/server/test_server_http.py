"""HTTP on one connection: requests in fragments, pipelining, other versions of HTTP, and other protocols."""

from __future__ import annotations

import json
import random
import re
import socket
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from servers import Process, Raw, ask, limits, server_idle, serving
from waiting import until

from mpool.server import protocol


@pytest.fixture(scope="module")
def server(bert: Path, llama: Path) -> Iterator[Any]:
    with serving([f"bert={bert}", f"llama={llama}"], max_header=4096) as made:
        yield made


@pytest.fixture(autouse=True)
def server_stays_usable(server: Any) -> Iterator[None]:
    """Check after each test that the server serves the next request and that no request or connection is left over."""
    yield
    with Raw(server) as raw:
        assert raw.request("/health").answer()[0] == 200
    server_idle(server)
    until(lambda: not server._uvicorn.server_state.connections)


def connection_of(server: Any) -> Any:
    """Return the server's side of the only connection, once the time limit of its first head runs."""
    connection, = until(lambda: server._uvicorn.server_state.connections)
    until(lambda: connection.receive_deadline)
    return connection


def chat(**more: Any) -> bytes:
    return json.dumps({"model": "llama", "messages": [{"role": "user", "content": "a"}], "max_tokens": 4,
                       "ignore_eos": True, "temperature": 0, **more}).encode()


def embed(text: str) -> bytes:
    return json.dumps({"model": "bert", "input": text}).encode()


def post(server: Any, path: str, body: bytes, *lines: str, version: str = "1.1", length: bool = True) -> bytes:
    """Return the bytes of a request. ``lines``: further header lines. ``length``: send a Content-Length."""
    head = [f"POST {path} HTTP/{version}", f"Host: 127.0.0.1:{server.port}", "Content-Type: application/json", *lines]
    return "\r\n".join(head + [f"Content-Length: {len(body)}"] * length + ["", ""]).encode() + body


def chunked(body: bytes, size: int, *, extension: bytes = b"", trailer: bytes = b"") -> bytes:
    parts = [body[at:at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x%b\r\n%b\r\n" % (len(part), extension, part) for part in parts) + b"0\r\n" + trailer + b"\r\n"


def read_to_end(raw: Raw) -> bytes:
    """Read until the server closes the connection."""
    found = b""
    while data := raw.socket.recv(1 << 16):
        found += data
    return found


# ---- requests in fragments -------------------------------------------------------------------------------------------

@pytest.mark.parametrize("seed", range(12))
def test_requests_split_at_random_places(server: Any, seed: int) -> None:
    """Pipelined requests, split at random places into packets: each receives its own response, in order."""
    rng = random.Random(seed)
    texts = [f"number {seed} {at}" for at in range(5)]
    data = b"".join(
        post(server, "/v1/embeddings", embed(text)) if at % 2 else
        post(server, "/v1/embeddings", b"", "Transfer-Encoding: chunked", length=False)
        + chunked(embed(text), rng.randrange(1, 60), extension=b";a=b" * (at % 3), trailer=b"X: y\r\n" * (at % 4))
        for at, text in enumerate(texts))
    cuts = sorted({0, len(data), *(rng.randrange(len(data)) for _ in range(rng.choice((0, 3, 40))))})
    with Raw(server) as raw:
        for begin, end in zip(cuts, cuts[1:], strict=False):
            raw.send(data[begin:end])
            time.sleep(rng.choice((0.0, 0.0, 0.002)))
        together = [raw.answer() for _ in texts]
    with Raw(server) as raw:
        alone = [raw.send(post(server, "/v1/embeddings", embed(text))).answer() for text in texts]
    assert [status for status, _, _ in together] == [200] * len(texts)
    assert [json.loads(body)["data"] for _, _, body in together] == [json.loads(body)["data"] for _, _, body in alone]


def test_request_sent_byte_by_byte(server: Any) -> None:
    data = post(server, "/v1/embeddings", embed("x"))
    with Raw(server) as raw:
        for at in range(len(data)):
            raw.send(data[at:at + 1])
        assert raw.answer()[0] == 200


@pytest.mark.parametrize("begun", [b"GET /", b"GET / HTTP/1.1\r\nX: ", b"GET / HTTP/1.1\r\nX", b"GET / HTTP/1.1\r\n"])
def test_endless_header_line_is_refused(server: Any, begun: bytes) -> None:
    with Raw(server) as raw:
        raw.send(begun)
        for _ in range(20):
            raw.send(b"a" * 512)
            time.sleep(0.005)  # separate packets: no single packet exceeds the limit
        assert raw.answer()[0] in (400, 431) and raw.closed(5)


def test_trailers_are_limited_and_ignored(server: Any, bert: Path) -> None:
    start = post(server, "/v1/embeddings", b"", "Transfer-Encoding: chunked", length=False)
    with Raw(server) as raw:
        raw.send(start + chunked(embed("x"), 100, trailer=b"X: " + b"y" * 5000 + b"\r\n"))
        assert raw.answer()[0] in (400, 431) and raw.closed(5)
    token = "a-token-of-some-length"
    with serving([f"bert={bert}"], token=token) as made, Raw(made) as raw:
        raw.send(post(made, "/v1/embeddings", b"", "Transfer-Encoding: chunked", length=False)
                 + chunked(embed("x"), 100, trailer=f"Authorization: Bearer {token}\r\n".encode()))
        assert raw.answer()[0] == 401


def test_empty_lines_before_a_request_are_skipped(server: Any) -> None:
    with Raw(server) as raw:
        assert raw.send(b"\r\n\r\n").request("/health").answer()[0] == 200


# ---- pipelining ------------------------------------------------------------------------------------------------------

def test_pipelined_requests_are_served_in_order(server: Any) -> None:
    with Raw(server) as raw:
        raw.send(b"".join(post(server, path, body) for path, body in [
            ("/v1/chat/completions", chat(max_tokens=200)), ("/v1/embeddings", embed("second")), ("/nowhere", b"{}"),
            ("/v1/embeddings", embed("fourth"))]))
        responses = [raw.answer() for _ in range(4)]
    assert [status for status, _, _ in responses] == [200, 200, 404, 200]
    assert "choices" in json.loads(responses[0][2]) and "data" in json.loads(responses[3][2])


@pytest.mark.parametrize("bad, status", [
    (b"GARBAGE\r\n\r\n", 400), (b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n"
                                b"Content-Length: 4\r\n\r\nabc", 400),
    (b"GET /health HTTP/1.1\r\nX: " + b"y" * 5000 + b"\r\n\r\n", 431),
    (b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZ\r\n", 400)],
    ids=["head", "lengths", "large", "chunk"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_malformed_request_is_refused_after_earlier_responses(server: Any, bad: bytes, status: int,
                                                              stream: bool) -> None:
    """The error response follows the responses to earlier requests, and does not interrupt them."""
    first = post(server, "/v1/chat/completions", chat(max_tokens=300, stream=stream))
    with Raw(server) as raw:
        found = read_to_end(raw.send(first + post(server, "/v1/embeddings", embed("x")) + bad))
    assert found.count(b"HTTP/1.1 200 OK") == 2 and found.count(b"HTTP/1.1 ") == 3
    head, _, last = found.rpartition(b"HTTP/1.1 ")
    assert last.startswith(b"%d " % status) and b'"type"' in last
    assert (b"data: [DONE]" in head) is stream and b'"embedding"' in head


def test_incomplete_request_does_not_interrupt_an_earlier_response(server: Any) -> None:
    """A response may take longer than `header_timeout` while the head of the next request is incomplete."""
    with Raw(server) as raw:
        connection_of(server)
        with limits(server, header_timeout=0.4):
            raw.send(post(server, "/v1/chat/completions", chat(max_tokens=16000, n=8, stream=True)) + b"GET /health HT")
            end, found = time.monotonic() + 2.5 * 0.4, b""
            while time.monotonic() < end:
                found += raw._read()
        assert found.count(b"HTTP/1.1 ") == 1 and b"[DONE]" not in found
        more = b""
        while b"data: " not in more:  # a read may end within an event
            part = raw._read()
            assert part, (found + more)[-300:]
            more += part


def slow(server: Any) -> bytes:
    """Return a request whose response exceeds the send buffers, so that it completes only when the client reads."""
    return post(server, "/v1/chat/completions", chat(max_tokens=1000, n=2, stream=True, logprobs=True, top_logprobs=20))


@pytest.mark.parametrize("path, body", [
    ("/v1/embeddings", embed("x")), ("/v1/chat/completions", chat(max_tokens=2000)),
    ("/v1/chat/completions", chat(max_tokens=2000, stream=True)),
    ("/api/chat", json.dumps({"model": "llama", "messages": [{"role": "user", "content": "a"}],
                              "options": {"num_predict": 500}}).encode())],
    ids=["embedding", "chat", "events", "lines"])
@pytest.mark.parametrize("after", [0.0, 0.02], ids=["at once", "later"])
def test_half_closed_client_receives_its_responses(server: Any, path: str, body: bytes, after: float) -> None:
    """A client that shuts down its sending side, as ``nc -N`` does, still receives all responses."""
    with Raw(server) as raw:
        raw.send(post(server, path, body) + post(server, "/v1/embeddings", embed("y")))
        time.sleep(after)
        raw.socket.shutdown(socket.SHUT_WR)
        found = read_to_end(raw).replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")  # clients ignore it
    assert found.startswith(b"HTTP/1.1 200 OK") and found.count(b"HTTP/1.1 200 OK") == 2
    first, _, second = found.rpartition(b"HTTP/1.1 200 OK")
    assert json.loads(second.partition(b"\r\n\r\n")[2])["data"]
    head, _, body = first.partition(b"HTTP/1.1 200 OK")[2].partition(b"\r\n\r\n")
    if b"chunked" not in head:
        json.loads(body)
        return
    text = b"".join(body.split(b"\r\n")[1::2])
    if path == "/api/chat":
        assert [json.loads(line)["done"] for line in text.splitlines()][-1]
    else:
        assert text.endswith(b"data: [DONE]\n\n") and \
            all(part.startswith((b"data: {", b":")) for part in text.split(b"\n\n")[:-2])


def test_disconnect_cancels_pipelined_requests(server: Any) -> None:
    """The first request of each connection is cancelled, and the others never start."""
    before = server.state.pool.registry.stats()
    for _ in range(5):
        with Raw(server) as raw:
            raw.send(post(server, "/v1/chat/completions", chat(max_tokens=15_000, ignore_eos=True, stream=True)) * 5)
            raw._read()
    server_idle(server, 30)
    after = server.state.pool.registry.stats()
    assert (after["cancelled"] - before["cancelled"], after["completed"] - before["completed"]) == (5, 0)


# ---- other versions, other protocols ---------------------------------------------------------------------------------

def test_http_1_0_responses_are_not_chunked(server: Any) -> None:
    with Raw(server) as raw:
        raw.send(post(server, "/v1/chat/completions", chat(stream=True), version="1.0"))
        head, _, body = read_to_end(raw).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower() and b"connection: close" in head.lower()
    assert body.startswith(b"data: {") and body.endswith(b"data: [DONE]\n\n")
    with Raw(server) as raw:
        raw.send(post(server, "/v1/embeddings", embed("x"), version="1.0"))
        head, _, body = read_to_end(raw).partition(b"\r\n\r\n")
    assert b"content-length: %d" % len(body) in head.lower() and json.loads(body)["data"]
    with Raw(server) as raw:
        response = read_to_end(raw.send(
            post(server, "/v1/embeddings", b"", "Transfer-Encoding: chunked", version="1.0", length=False)
            + chunked(embed("x"), 9)))
    assert response.startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("protocol", ["h2c", "websocket", "TLS/1.3"])
def test_upgrade_requests_are_served_as_http_1_1(server: Any, protocol: str) -> None:
    """Java's HTTP client sends such headers with each request, including requests with a body."""
    lines = ("Connection: Upgrade, HTTP2-Settings", f"Upgrade: {protocol}", "HTTP2-Settings: AAEAAEAAAAIAAAAB")
    with Raw(server) as raw:
        for at in range(2):
            assert raw.send(post(server, "/v1/embeddings", embed(f"x {at}"), *lines)).answer()[0] == 200
            assert raw.request("/health", None, *lines).answer()[0] == 200
        raw.send(post(server, "/v1/embeddings", embed("y"), *lines) * 2)
        assert [raw.answer()[0] for _ in range(2)] == [200, 200]
        data = post(server, "/v1/embeddings", embed("z"), *lines)
        for at in range(len(data)):
            raw.send(data[at:at + 1])
        assert raw.answer()[0] == 200


@pytest.mark.parametrize("text", [b"CONNECT 127.0.0.1:1 HTTP/1.1\r\nHost: {host}\r\n\r\n",
                                  b"GET http:// HTTP/1.1\r\nHost: {host}\r\n\r\n",
                                  b"GET /health#a HTTP/1.1\r\nHost: {host}\r\n\r\n",
                                  b"GET /health HTTP/2.0\r\nHost: {host}\r\n\r\n",
                                  b"GET /health HTTP/0.9\r\nHost: {host}\r\n\r\n",
                                  b"GET /health HTTP/1.1\nHost: {host}\n\n",
                                  b"GET /health HTTP/1.1\r\nHost: {host}\r\nX: a\rb\r\n\r\n",
                                  b"GET /health HTTP/1.1\r\nHost: {host}\r\nX: a\r\n b\r\n\r\n",
                                  b"GET /health HTTP/1.1\r\nHost: {host}\r\nX : a\r\n\r\n",
                                  b"GET /health HTTP/1.1\r\nHost: {host}\r\n: a\r\n\r\n"],
                         ids=["CONNECT", "no path", "fragment", "2.0", "0.9", "LF", "CR", "folded", "space", "no name"])
def test_ambiguous_requests_are_refused(server: Any, text: bytes) -> None:
    with Raw(server) as raw:
        status, _, body = raw.send(text.replace(b"{host}", raw.host.encode())).answer()
        assert status == 400 and json.loads(body)["error"]["code"] == "bad_request" and raw.closed(5)


def test_absolute_target_overrides_the_host_header(server: Any) -> None:
    with Raw(server) as raw:
        for target, host, status in [("http://evil.example", raw.host, 421), (f"http://{raw.host}", "evil", 200),
                                     (f"HTTP://{raw.host}", raw.host, 200), (f"http://a@{raw.host}", raw.host, 421)]:
            assert raw.request(f"{target}/health?a", host=host).answer()[0] == status


def test_head_requests_have_no_body(server: Any) -> None:
    with Raw(server) as raw:
        raw.request("/health", method="HEAD").request("/health")
        data = b""
        while data.count(b"HTTP/1.1 200 OK") < 2 or not data.endswith(b"}"):
            data += raw.socket.recv(1 << 16)
        first, _, rest = data.partition(b"\r\n\r\n")
        assert rest.startswith(b"HTTP/1.1 200 OK") and b"content-length: " in first.lower()


def test_expect_continue_is_confirmed(server: Any) -> None:
    body = embed("x")
    with Raw(server) as raw:
        raw.request("/v1/embeddings", b"", "Expect: 100-continue", length=len(body))
        raw.socket.settimeout(5)
        assert raw.socket.recv(1 << 16) == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert raw.send(body).answer()[0] == 200


@pytest.mark.parametrize("state, alive, written", [
    ({"response_started": False}, True, b"HTTP/1.1 100 Continue\r\n\r\n"),
    ({"response_started": False, "version": "1.0"}, False, b""),
    ({"_pending_head": b"head"}, True, b"head"), ({"_filler": b": x"}, True, b"3\r\n: x\r\n"),
    ({"_filler": b": x", "chunked_encoding": False}, True, b": x"), ({"_filler": b": x", "paused": True}, True, b""),
    ({}, False, b""), ({"_filler": b": x", "_remaining": 5}, False, b""),
    ({"_filler": b": x", "_bodiless": True}, False, b"")])
def test_probes_of_a_client(state: dict[str, Any], alive: bool, written: bytes) -> None:
    """A probe writes bytes that a client ignores, if there are any at this point of the response."""
    cycle: Any = object.__new__(protocol._Cycle)
    sent = bytearray()
    values = {"response_started": True, "chunked_encoding": True, "_remaining": None, "_bodiless": False, **state}
    cycle.scope = {"http_version": values.pop("version", "1.1")}
    cycle.flow = SimpleNamespace(write_paused=values.pop("paused", False))
    cycle.transport = SimpleNamespace(write=sent.extend, is_closing=lambda: False)
    for name, value in values.items():
        setattr(cycle, name, value)
    assert (cycle.probe(), bytes(sent)) == (alive, written)


@pytest.mark.slow
def test_lines_of_the_log_carry_times(bert: Path) -> None:
    """``mpool serve -v`` writes one line per request, which begins with date and time to the millisecond."""
    with Process("serve", "-v", "--offline", "-m", f"bert={bert}", "--only") as server:
        assert ask(server, "/v1/embeddings", {"model": "bert", "input": "x"})[0] == 200
        assert ask(server, "/v1/embeddings", {"model": "nobody", "input": "x"})[0] == 404
        server.process.terminate()
        code, errors = server.end()
    assert code == 0, errors
    form = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) INFO (mpool[.\w]*): (.+)")
    lines = [form.fullmatch(line) for line in errors.splitlines()]
    assert None not in lines, errors
    times = [datetime.strptime(line[1], "%Y-%m-%d %H:%M:%S,%f") for line in lines if line]
    assert times == sorted(times)
    found = [line[3].split(" ", 1)[1] for line in lines if line and line[2] == "mpool.server"]
    assert [" ".join(text.split()[:3]) for text in found if text.startswith("POST")] == [
        "POST /v1/embeddings 200", "POST /v1/embeddings 404"], errors
