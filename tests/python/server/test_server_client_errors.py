"""Errors of the server as OpenAI's and Anthropic's Python clients report them: exception, code, pause before a retry.

Every error of the server's table goes through the real clients. Streams and pages of models are read from a server.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from mpool.server.errors import TABLE, Refusal
from mpool.server.guard import refusal_response
from servers import Raw, server_idle, serving

openai, anthropic = (pytest.importorskip(name) for name in ("openai", "anthropic"))

#: HTTP status of OpenAI's API -> exception of both clients. Other statuses below 500 are APIStatusError.
CLASSES = {400: "BadRequestError", 401: "AuthenticationError", 403: "PermissionDeniedError", 404: "NotFoundError",
           409: "ConflictError"}
#: Status -> exception of Anthropic's client, where it has another one than OpenAI's.
ANTHROPIC = {408: "RequestTimeoutError", 413: "ContentTooLargeError", 431: "RequestHeaderFieldsTooLargeError",
             499: "ClientClosedRequestError", 503: "ServiceUnavailableError", 504: "GatewayTimeoutError",
             529: "OverloadedError"}
OVERLOADED = ("overloaded", "out_of_memory", "too_many_streams", "too_many_connections")
#: Errors that a retry may mend; the clients retry these statuses.
RETRIED = {code for code, row in TABLE.items() if row.status in (408, 409) or row.status >= 500}


class Refusing(ThreadingHTTPServer):
    """A server that responds to every request with the error ``code``, as mpool does.

    Attributes:
        code: key of the table of errors.
        requests: number of requests.
    """

    daemon_threads = True
    code, requests = "", 0


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        made = self.server
        assert isinstance(made, Refusing)
        made.requests += 1
        self.rfile.read(int(self.headers["Content-Length"]))
        headers = [(name.lower().encode(), value.encode()) for name, value in self.headers.items()]
        found = refusal_response(Refusal(made.code, "`x` must be 1.", "x"),
                                 {"type": "http", "path": self.path, "headers": headers})
        self.send_response(found.status_code)
        for name, value in found.headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(found.body)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture(scope="module")
def refusing() -> Iterator[Refusing]:
    with Refusing(("127.0.0.1", 0), _Handler) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def call(refusing: Refusing, code: str, package: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[float]]:
    """Send a request with one retry. Returns the exception, and the pauses in seconds before the retries."""
    refusing.code, refusing.requests = code, 0
    url, pauses = f"http://127.0.0.1:{refusing.server_port}", list[float]()
    with (package.OpenAI(base_url=url + "/v1", api_key="none", max_retries=1) if package is openai else
          package.Anthropic(base_url=url, api_key="none", max_retries=1)) as client:
        calculate = client._calculate_retry_timeout

        def pause(*arguments: Any, **more: Any) -> float:
            pauses.append(calculate(*arguments, **more))
            return 0.0

        monkeypatch.setattr(client, "_calculate_retry_timeout", pause)
        create = client.chat.completions.create if package is openai else client.messages.create
        with pytest.raises(package.APIStatusError) as raised:
            create(model="x", max_tokens=1, messages=[{"role": "user", "content": "x"}])
    return raised.value, pauses


@pytest.mark.sample(4)
@pytest.mark.parametrize("code", TABLE)
def test_openai_client(refusing: Refusing, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    error, pauses = call(refusing, code, openai, monkeypatch)
    row = TABLE[code]
    expected = "InternalServerError" if row.status >= 500 else CLASSES.get(row.status, "APIStatusError")
    assert (type(error).__name__, error.status_code) == (expected, row.status)
    assert (error.code, error.param, error.type) == (code, "x", row.kind)
    assert row.text in error.message and "`x` must be 1." in error.message
    assert refusing.requests == (2 if code in RETRIED else 1)
    if row.retry_after:
        assert pauses == [row.retry_after] and code in RETRIED


@pytest.mark.sample(4)
@pytest.mark.parametrize("code", TABLE)
def test_anthropic_client(refusing: Refusing, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    error, pauses = call(refusing, code, anthropic, monkeypatch)
    row = TABLE[code]
    status = 529 if code in OVERLOADED else row.status
    expected = {**CLASSES, **ANTHROPIC}.get(status, "InternalServerError" if status >= 500 else "APIStatusError")
    assert (type(error).__name__, error.status_code) == (expected, status)
    assert error.body["type"] == "error" and "`x` must be 1." in error.body["error"]["message"]
    assert refusing.requests == (2 if code in RETRIED else 1)
    if row.retry_after:
        assert pauses == [row.retry_after]


# ---- a server --------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def server(llama: Path) -> Iterator[Any]:
    with serving([f"m{at}={llama}" for at in range(7)], max_streams=1) as made:
        yield made


def test_a_retry_succeeds_once_there_is_room(server: Any) -> None:
    """The client waits as ``Retry-After`` says, and its second request is served."""
    body = {"model": "m0", "messages": [{"role": "user", "content": "x"}], "max_tokens": 16_000, "stream": True,
            "ignore_eos": True}
    server_idle(server)  # the request of an earlier test may still be listed
    with Raw(server, 60) as held, openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=3) as client:
        held.request("/v1/chat/completions", json.dumps(body).encode())
        while not server.state.running:
            time.sleep(0.005)
        timer = threading.Timer(0.3, held.socket.close)
        timer.start()
        found = client.chat.completions.with_raw_response.create(model="m0", messages=body["messages"], max_tokens=3,
                                                                 stream=True)
        assert found.retries_taken >= 1 and list(found.parse())[-1].choices[0].finish_reason
        timer.join()
    assert "x-ratelimit-remaining-requests" not in found.headers


def test_pages_of_models(server: Any) -> None:
    """Anthropic's client follows ``has_more`` and ``last_id``; OpenAI's has one page."""
    names = [f"m{at}" for at in range(7)]
    with anthropic.Anthropic(base_url=server.url, api_key="none") as client:
        for limit in (1, 2, 3, 7, 20):
            assert [model.id for model in client.models.list(limit=limit)] == names
        page = client.models.list(limit=3)
        assert page.has_next_page() and [model.id for model in page.get_next_page().data] == names[3:6]
        assert [model.id for model in client.models.list(limit=2, before_id="m3").data] == ["m1", "m2"]
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none") as client:
        assert [model.id for model in client.models.list()] == names


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
def test_events_of_streams(server: Any, path: str) -> None:
    """OpenAI's chat and text streams end with [DONE] and name no events; the other two name every event by its type."""
    inputs = {"/v1/completions": {"prompt": "x"}, "/v1/responses": {"input": "x"}}
    body = {"model": "m0", "max_output_tokens" if path == "/v1/responses" else "max_tokens": 4, "stream": True,
            **inputs.get(path, {"messages": [{"role": "user", "content": "x"}]})}
    with Raw(server, 60) as raw:
        status, headers, data = raw.request(path, json.dumps(body).encode()).response()
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    blocks = [block.split("\n") for block in data.decode().split("\n\n") if block and not block.startswith(":")]
    if path in ("/v1/chat/completions", "/v1/completions"):
        assert blocks[-1] == ["data: [DONE]"] and all(len(block) == 1 for block in blocks)
        assert all(json.loads(block[0].removeprefix("data: "))["id"] for block in blocks[:-1])
    else:
        for name, line in blocks:
            assert name == f"event: {json.loads(line.removeprefix('data: '))['type']}"
