"""The log of requests: one record for each refused or failed request with its reason, whatever the protocol; none has a
prompt or a secret, and no client can write a record of its own."""

from __future__ import annotations

import io
import json
import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("msgspec")

from mpool import records  # noqa: E402
from mpool.server.worker import Worker, worker_config, worker_settings  # noqa: E402
from servers import Process, Raw, ask, running, server_idle, serving  # noqa: E402
from waiting import until  # noqa: E402

TOKEN, SECRET = "t0ken-" + "x" * 32, "SECRETPROMPT"


@contextmanager
def logged(level: int = logging.INFO) -> Iterator[list[logging.LogRecord]]:
    """Collect the records of requests."""
    found: list[logging.LogRecord] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record)

    logger, handler = logging.getLogger("mpool.server"), Handler()
    before = logger.level
    logger.setLevel(level)
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def of_requests(found: list[logging.LogRecord], count: int) -> list[dict[str, Any]]:
    """Return the fields of the records of requests, once there are ``count`` of them: a client may have its response
    before the record is written."""
    until(lambda: sum(hasattr(record, "fields") for record in found) >= count)
    return [{**record.fields, "level": record.levelname} for record in found if hasattr(record, "fields")]


CHAT = {"model": "llama", "messages": [{"role": "user", "content": SECRET}], "max_tokens": 3}
#: A request that is refused: method, path, body, headers; status, code.
REFUSED: list[tuple[str, str, Any, tuple[str, ...], int, str]] = [
    ("GET", "/nowhere", None, (), 404, "not_found"), ("DELETE", "/v1/embeddings", None, (), 405, "method_not_allowed"),
    ("POST", "/v1/chat/completions", {**CHAT, "model": "gone"}, (), 404, "model_not_found"),
    ("POST", "/v1/chat/completions", {**CHAT, "top_k": -7}, (), 400, "invalid_value"),
    ("POST", "/v1/completions", {"model": "bert", "prompt": SECRET}, (), 400, "wrong_capability"),
    ("POST", "/v1/responses", {"model": "llama", "input": SECRET, "previous_response_id": "resp_x"}, (), 400,
     "previous_response_not_found"),
    ("POST", "/v1/embeddings", b'{"model": "bert", "input": "' + SECRET.encode() + b'", }', (), 400, "invalid_json"),
    ("POST", "/v1/embeddings", {"model": "bert", "input": SECRET * 90_000}, (), 413, "request_too_large"),
    ("POST", "/v1/messages", {**CHAT, "max_tokens": SECRET}, ("anthropic-version: 2023-06-01",), 400, "invalid_value"),
    ("POST", "/api/chat", {**CHAT, "options": {"num_predict": SECRET}}, (), 400, "invalid_value"),
    ("POST", "/api/embed", {"model": "bert", "input": {"a": SECRET}}, (), 400, "invalid_value"),
    ("POST", "/embed", {"inputs": {"a": SECRET}}, (), 422, "invalid_value"),
    ("POST", "/rerank", {"query": SECRET, "texts": []}, (), 400, "empty_input"),
    ("POST", "/v1/embeddings", {"model": "bert", "input": SECRET}, ("Content-Encoding: gzip",), 415,
     "unsupported_media_type"),
    ("GET", "/metrics", None, ("Origin: https://evil.example",), 403, "forbidden_origin"),
    ("GET", "/api/mpool/series?step=SECRETPROMPT", None, (), 400, "invalid_value"),
]


@pytest.mark.parametrize(("method", "path", "body", "lines", "status", "code"), REFUSED,
                         ids=[f"{row[1].partition('?')[0]}-{row[5]}" for row in REFUSED])
def test_a_refused_request_has_one_record(server: Any, method: str, path: str, body: Any, lines: tuple[str, ...],
                                          status: int, code: str) -> None:
    """A warning with the code and a reason, and without the values of the request."""
    with logged() as found, Raw(server) as raw:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        assert raw.request(path, data, *lines, method=method).response()[0] == status
        row, = of_requests(found, 1)
        server_idle(server)
    assert (row["level"], row["method"], row["path"], row["status"], row["code"], row["client"]) == (
        "WARNING", method, path.partition("?")[0], status, code, "127.0.0.1")
    assert row["reason"] and row.get("model") == (body["model"] if code in _WITH_MODEL else None)
    text = "\n".join(record.getMessage() for record in found)
    assert SECRET not in text and SECRET not in json.dumps(row)


#: Codes of requests whose body was accepted.
_WITH_MODEL = ("model_not_found", "wrong_capability", "previous_response_not_found", "request_too_large")


def test_health_that_is_bad_has_a_reason(bert: Path) -> None:
    """Status 503 of /health is a warning, with the problem of the pool."""
    with serving([f"bert={bert}"]) as server, logged() as found:
        assert ask(server, "/health")[0] == 200
        server.state.pool.begin_shutdown()
        assert ask(server, "/health")[0] == 503
        good, bad = of_requests(found, 2)
    assert (good["level"], bad["level"], bad["status"]) == ("INFO", "WARNING", 503) and "closed" in bad["reason"]


@pytest.mark.parametrize(("path", "body"), [
    ("/api/copy", {"source": "llama", "destination": "a b"}), ("/v1/chat/completions", {**CHAT, "model": "bert"}),
    ("/v1/chat/completions", {**CHAT, "top_k": {}}), ("/v1/chat/completions", {**CHAT, "top_k": SECRET}),
    ("/v1/chat/completions", {**CHAT, "top_k": "." * 56 + SECRET * 3}),
    ("/v1/chat/completions", {**CHAT, "top_k": f"a', got {SECRET} '. \""}),
    ("/v1/embeddings", {"model": "llama", "input": SECRET})])
def test_the_record_has_the_words_of_the_answer(server: Any, path: str, body: Any) -> None:
    """Only values in quotes are cut out of them."""
    with logged() as found:
        _, answer = ask(server, path, body)
        row, = of_requests(found, 1)
    said = (answer["error"] if path.startswith("/api/") else answer["error"]["message"]).removesuffix(".")
    before, cut, after = row["reason"].partition("'...'")
    assert said == row["reason"] if not cut else said.startswith(before) and said.endswith(after)
    assert SECRET not in found[0].getMessage() and bool(cut) == (", got " in said and "got an object" not in said)


def test_a_connection_that_is_refused_has_one_record(server: Any) -> None:
    """Requests that no operation sees: heads that are no HTTP, or too large, and a body that is too large."""
    host = f"Host: 127.0.0.1:{server.port}\r\n".encode()
    for data, status in ((b"GET /\x01 HTTP/1.1\r\n" + host + b"\r\n", 400),
                         (b"GET /a HTTP/1.1\r\n" + host + b"X: " + SECRET.encode() * 9000 + b"\r\n\r\n", 431),
                         (b"POST /v1/embeddings HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" + host
                          + b"Content-Type: application/json\r\n\r\nzz\r\n", 400)):
        with logged() as found, Raw(server) as raw:
            assert raw.send(data).response()[0] == status
            row, = of_requests(found, 1)
            server_idle(server)
        assert (row["level"], row["status"], row["client"]) == ("WARNING", status, "127.0.0.1") and row["reason"]
        assert SECRET not in found[0].getMessage() and len(of_requests(found, 1)) == 1


def test_a_failure_after_the_head_of_a_stream_has_one_record(server: Any) -> None:
    """Its status is 200, and the record has the code of the error event."""
    body = {**CHAT, "max_tokens": 400, "stream": True, "ignore_eos": True}
    with logged() as found, Raw(server) as raw:
        raw.request("/v1/chat/completions", json.dumps(body).encode())
        until(lambda: any(one.chunks for one in server.state.running.values()))
        id, = server.state.running
        assert ask(server, "/api/mpool/cancel", {"id": id})[1]["cancelled"]
        raw.response()
        row, = [row for row in of_requests(found, 2) if row["path"] != "/api/mpool/cancel"]
    assert (row["level"], row["status"], row["code"], row["model"], row["id"]) == (
        "WARNING", 200, "cancelled", "llama", id)


def test_a_request_has_its_model_tokens_and_first_token(server: Any) -> None:
    """At INFO, for one choice and several, streamed or not; the dashboard's own requests have no record there."""
    with logged() as found:
        for more in ({}, {"n": 2}, {"stream": True}):
            with Raw(server) as raw:
                data = json.dumps({**CHAT, **more, "ignore_eos": True}).encode()
                assert raw.request("/v1/chat/completions", data).response()[0] == 200
        for path in ("/api/mpool/state", "/api/mpool/series?step=1", "/dashboard/page.js", "/health"):
            with Raw(server) as raw:
                assert raw.request(path).response()[0] == 200
        rows = of_requests(found, 4)
    assert [(row["level"], row["path"]) for row in rows] == [
        *[("INFO", "/v1/chat/completions")] * 3, ("INFO", "/health")]
    for row, choices in zip(rows, (1, 2, 1)):
        assert (row["model"], row["completion_tokens"], row["client"]) == ("llama", 3 * choices, "127.0.0.1")
        assert row["prompt_tokens"] > 0 and 0 < row["first_token_seconds"] <= row["seconds"]
    assert SECRET not in "".join(record.getMessage() for record in found)


def test_tokens_of_clients_are_not_logged(bert: Path) -> None:
    """Neither the server's token nor a wrong one, in whatever header or place of the URL a client sends it."""
    with serving([f"bert={bert}"], token=TOKEN) as server, logged(logging.DEBUG) as found:
        for line in ("Authorization: Bearer wrong" + SECRET, "x-api-key: " + SECRET, "Cookie: " + SECRET):
            with Raw(server) as raw:
                assert raw.request(f"/v1/models?key={SECRET}", None, line).response()[0] == 401
        assert ask(server, "/v1/models", None, f"Authorization: Bearer {TOKEN}")[0] == 200
        rows = of_requests(found, 4)
    assert [row["code"] for row in rows if "code" in row] == ["invalid_api_key"] * 3
    text = "".join(record.getMessage() + json.dumps(record.fields) for record in found)
    assert SECRET not in text and TOKEN not in text and TOKEN not in repr(server.state.settings)


@pytest.mark.parametrize("form", ["text", "json"])
def test_no_client_writes_a_record(server: Any, form: str) -> None:
    """Line ends, escape sequences and bidirectional controls in a path or in the name of a model stay in the record
    of their request, in both formats."""
    evil = "x\n2026-01-01 00:00:00,000 ERROR mpool.server: forged\r\x1b[31m\u202e\u2028"
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(records._Json() if form == "json" else logging.Formatter(records._FORMAT))
    logger = logging.getLogger("mpool.server")
    logger.addHandler(handler)
    try:
        with logged() as found:
            quoted = "".join(f"%{byte:02x}" for byte in evil.encode())
            assert ask(server, f"/{quoted}")[0] == 404
            assert ask(server, "/v1/embeddings", {"model": evil, "input": "a"})[0] == 404
            of_requests(found, 2)
    finally:
        logger.removeHandler(handler)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2 and all(line.isascii() and line.isprintable() for line in lines)
    if form == "json":
        first, second = map(json.loads, lines)
        assert (first["level"], first["status"], first["path"], second["model"]) == ("WARNING", 404, f"/{evil}", evil)
    else:
        assert all(" WARNING mpool.server: " in line for line in lines)


def test_the_worker_protocol_has_the_same_records(llama: Path) -> None:
    with logged() as found:
        made = Worker(f"m={llama}", worker_settings(0), worker_config(1, True))
        with running(made.run, made.serving.stop):
            assert ask(made.serving, "/execute", {"job_id": "a", "prompt": SECRET, "top_p": 7})[0] == 400
            assert ask(made.serving, "/nowhere")[0] == 404
            rows = of_requests(found, 2)
        made.pool.close()
    assert [(row["level"], row["path"], row["code"]) for row in rows] == [
        ("WARNING", "/execute", "invalid_value"), ("WARNING", "/nowhere", "not_found")]
    assert SECRET not in "".join(record.getMessage() for record in found)


def test_a_signal_tells_what_the_server_waits_for(llama: Path) -> None:
    """The first one names the requests and their models; the second one ends the process at once. With the JSON format,
    every line of standard error is an object."""
    body = {**CHAT, "stream": True, "max_tokens": 16_000, "ignore_eos": True}
    with Process("serve", "--only", "--offline", "-m", f"llama={llama}", "--grace", "600", "--log-format", "json",
                 "--max-tokens", "100000") as server:
        with Raw(server, 60) as raw:
            raw.request("/v1/chat/completions", json.dumps(body).encode())
            while b"data: " not in raw.socket.recv(1 << 16):
                pass
            server.process.send_signal(signal.SIGINT)
            told = server.process.stderr
            assert told is not None
            rows = [json.loads(told.readline()) for _ in range(2)]
            server.process.send_signal(signal.SIGINT)
            code, errors = server.end()
    assert code == 130 and [json.loads(line)["event"] for line in errors.splitlines()] == ["aborted"]
    assert [row["event"] for row in rows] == ["started", "stopping"] and rows[1]["requests"] == 1
    assert all(word in rows[1]["message"] for word in ("/v1/chat/completions", "llama", "600"))
    assert [model["name"] for model in rows[0]["models"]] == ["llama"] and rows[0]["memory_limit_bytes"] > 0
