"""Requests of web pages of other origins (CORS): preflights, responses that a page can read, and allowed origins."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import mpool
from mpool.server.settings import Settings
from servers import Raw, limits, serving

TOKEN = "a-token-of-some-length"
PAGE, APP = "https://page.example", "app://obsidian.md"
BEARER = f"Authorization: Bearer {TOKEN}"
#: Preflights that headless Chromium 156 sent for calls of the JavaScript clients, bundled from their sources:
#: client and version, method, path, and the header Access-Control-Request-Headers.
PREFLIGHTS: list[tuple[str, str, str, str]] = [
    tuple(row) for row in json.loads(Path(__file__).with_name("preflights.json").read_text())]


@pytest.fixture(scope="module")
def server(bert: Path, llama: Path) -> Iterator[Any]:
    with serving([f"bert={bert}", f"llama={llama}"], token=TOKEN, max_body=1 << 20,
                 allowed_origins=(PAGE, "http://localhost:*", APP)) as made:
        yield made


def ask(server: Any, path: str, body: Any = None, *lines: str, origin: str | None = PAGE,
        **more: Any) -> tuple[int, dict[str, str], bytes]:
    own = () if origin is None else (f"Origin: {origin}",)
    with Raw(server) as raw:
        return raw.request(path, None if body is None else json.dumps(body).encode(), *own, *lines, **more).answer()


def preflight(server: Any, path: str, method: str, *lines: str, origin: str = PAGE) -> tuple[int, dict[str, str]]:
    return ask(server, path, None, f"Access-Control-Request-Method: {method}", *lines, origin=origin,
               method="OPTIONS")[:2]


def names(header: str) -> set[str]:
    return {name.strip().lower() for name in header.split(",")}


@pytest.mark.parametrize("client, method, path, wanted", PREFLIGHTS)
def test_preflights_of_clients_are_granted(server: Any, client: str, method: str, path: str, wanted: str) -> None:
    """A browser compares the headers that it asks for with those that are granted; ``*`` would exclude
    Authorization."""
    asks = (f"Access-Control-Request-Headers: {wanted}",) if wanted else ()
    status, headers = preflight(server, path, method, *asks)
    assert (status, headers["access-control-allow-origin"]) == (200, PAGE)
    assert method.lower() in names(headers["access-control-allow-methods"])
    assert not wanted or names(wanted) <= names(headers["access-control-allow-headers"])
    assert "origin" in names(headers["vary"])


def test_preflight_of_a_public_page_for_a_server_on_loopback(server: Any) -> None:
    name = "access-control-allow-private-network"
    _, headers = preflight(server, "/v1/models", "GET", "Access-Control-Request-Private-Network: true")
    assert headers[name] == "true"
    assert name not in preflight(server, "/v1/models", "GET")[1]


@pytest.mark.parametrize("path, body, lines, status", [
    ("/v1/embeddings", {"model": "bert", "input": "x"}, [BEARER], 200),
    ("/api/tags", None, [BEARER], 200),
    ("/v1/embeddings", {"model": "bert", "input": "x"}, [], 401),
    ("/v1/embeddings", {"model": "none", "input": "x"}, [BEARER], 404),
    ("/v1/nothing", None, [BEARER], 404), ("/v1/embeddings", None, [BEARER], 405),
    ("/v1/embeddings", {"model": "bert", "input": "x" * (1 << 20)}, [BEARER], 413),
    ("/v1/messages", {"model": "none"}, [BEARER, "anthropic-version: 2023-06-01"], 400),
    ("/api/chat", {"model": "none", "messages": []}, [BEARER], 404),
    ("/v1/models", None, [BEARER, BEARER], 400), ("/v1/models", None, [BEARER, "X: " + "a" * 20_000], 431)])
def test_pages_of_allowed_origins_can_read_responses(server: Any, path: str, body: Any, lines: list[str],
                                                     status: int) -> None:
    """Also errors, those that are found before the application runs, and all headers that the server adds."""
    found, headers, _ = ask(server, path, body, *lines)
    assert (found, headers["access-control-allow-origin"]) == (status, PAGE) and "origin" in names(headers["vary"])
    own = {"x-request-id", "x-mpool-ignored", "retry-after", "www-authenticate", "allow"} & set(headers)
    assert own <= names(headers.get("access-control-expose-headers", "")), own


def test_other_refusals_can_be_read(server: Any) -> None:
    """A Host that is not the server's (421), a full or a stopping server (503), a body that does not arrive (408)."""
    body = {"model": "llama", "prompt": "x", "stream": True}
    assert ask(server, "/v1/models", None, BEARER, host="other.example")[1]["access-control-allow-origin"] == PAGE
    with limits(server, max_streams=0):
        status, headers, _ = ask(server, "/v1/completions", body, BEARER)
    assert (status, headers["access-control-allow-origin"]) == (503, PAGE)
    assert {"retry-after", "x-request-id"} <= names(headers["access-control-expose-headers"])
    server.state.stopping = True
    try:
        status, headers, _ = ask(server, "/v1/models", None, BEARER)
    finally:
        server.state.stopping = False
    assert (status, headers["access-control-allow-origin"]) == (503, PAGE)
    with limits(server, body_timeout=0.2):
        status, headers, _ = ask(server, "/v1/completions", body, BEARER, length=1000)
    assert (status, headers["access-control-allow-origin"]) == (408, PAGE)


def test_streams_and_ignored_fields_can_be_read(server: Any) -> None:
    body = {"model": "llama", "prompt": "a", "max_tokens": 3, "stream": True, "of_another_service": 1}
    status, headers, found = ask(server, "/v1/completions", body, BEARER)
    assert status == 200 and found.rstrip().endswith(b"[DONE]")
    assert headers["access-control-allow-origin"] == PAGE and headers["x-mpool-ignored"] == "of_another_service"
    assert {"x-mpool-ignored", "x-request-id"} <= names(headers["access-control-expose-headers"])


def test_each_origin_gets_its_own_headers(server: Any) -> None:
    for origin, allowed in ((PAGE, True), ("http://localhost:3000", True), ("http://localhost", True), (APP, True),
                            ("https://localhost:3000", False), ("http://localhost.evil.example", False),
                            ("app://other", False), ("null", False), (PAGE + ":8443", False),
                            (PAGE + ".evil.example", False), ("http://page.example", False)):
        for found in (ask(server, "/v1/models", None, BEARER, origin=origin)[:2],
                      preflight(server, "/v1/models", "GET", "Access-Control-Request-Headers: authorization",
                                origin=origin)):
            status, headers = found
            assert status == (200 if allowed else 403), origin
            assert headers.get("access-control-allow-origin") == (origin if allowed else None)
            assert allowed or not any(name.startswith("access-control") for name in headers), origin
    _, headers, _ = ask(server, "/v1/models", None, BEARER, origin=None)
    assert "origin" in names(headers["vary"]) and "access-control-allow-origin" not in headers


@pytest.mark.parametrize("allowed, origins, others", [
    (["https://Page.Example:443", "http://a:80"], ["https://page.example", "http://a"],
     ["https://page.example:443", "http://page.example", "http://a:8080", "null", ""]),
    (["http://localhost:*", "http://[::1]:*"], ["http://localhost", "http://localhost:1", "http://[::1]:8080"],
     ["http://localhost:1.evil.example", "http://localhost.evil.example", "https://localhost:1", "http://127.0.0.1"]),
    (["app://*", "file://", "vscode-webview://*", "moz-extension://1-a"],
     ["app://obsidian.md", "file://", "vscode-webview://0f", "moz-extension://1-a"],
     ["tauri://localhost", "moz-extension://2-b", "http://app", "null", "app"]),
    (["*"], [PAGE, "null", "tauri://localhost"], ["", "page.example"]), (["null"], ["null"], [PAGE, ""])])
def test_which_origins_are_allowed(allowed: list[str], origins: list[str], others: list[str]) -> None:
    found = Settings(allowed_origins=tuple(allowed), token=TOKEN)
    assert [one for one in (*origins, *others) if found.allows_origin(one)] == origins


@pytest.mark.parametrize("origin", ["*", "null"])
def test_origins_of_every_site_need_a_token(origin: str) -> None:
    with pytest.raises(mpool.InvalidArgument) as caught:
        Settings(allowed_origins=(origin,))
    assert caught.value.param == "allowed_origins" and "token" in str(caught.value.hint)


@pytest.mark.parametrize("origin", ["http://*", "https://*:*", "x://:*", "://*", "app://a/b", "null://*/", "http://:*"])
def test_origins_that_are_refused(origin: str) -> None:
    with pytest.raises(mpool.InvalidArgument):
        Settings(allowed_origins=(origin,), token=TOKEN)


def test_mounted_in_an_application_with_its_own_cors(bert: Path, pool: mpool.Pool) -> None:
    """A page then gets each header once."""
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.cors import CORSMiddleware
    from starlette.routing import Mount

    from mpool.server import create_app

    inner = create_app([f"b={bert}"], pool=pool, catalogue=False, settings=Settings(allowed_origins=(PAGE,)))
    outer = Starlette(routes=[Mount("/llm", inner)],
                      middleware=[Middleware(CORSMiddleware, allow_origins=[PAGE], expose_headers=["x-request-id"])])

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(outer)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.get("/llm/v1/models", headers={"origin": PAGE})

    found = asyncio.run(run())
    assert found.status_code == 200 and found.headers.get_list("access-control-allow-origin") == [PAGE]
