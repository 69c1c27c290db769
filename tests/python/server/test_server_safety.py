"""Access control and invalid input, tested over the socket."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mpool
from mpool.checks import shown
from mpool.server import bodies
from mpool.server.errors import Refusal
from servers import Raw, ask, limits, serving

TOKEN = "a-token-of-some-length"


@pytest.fixture(scope="module")
def server(bert: Path) -> Iterator[Any]:
    with serving([f"bert={bert}"], max_body=1 << 20, max_text=100_000, max_header_count=20) as made:
        yield made


@pytest.fixture(scope="module")
def many(bert: Path) -> Iterator[Any]:
    """A server with the default limits."""
    with serving([f"bert={bert}"]) as made:
        yield made


@pytest.fixture(autouse=True)
def server_stays_usable(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check after each test that the server serves the next request."""
    yield
    if "server" in request.fixturenames:
        assert embed(request.getfixturevalue("server"), "Still here?")[0] == 200


def embed(server: Any, text: Any, *lines: str) -> tuple[int, Any]:
    return ask(server, "/v1/embeddings", {"model": "bert", "input": text}, *lines)


def post(server: Any, body: bytes, path: str = "/v1/embeddings", **more: Any) -> tuple[int, Any]:
    with Raw(server) as raw:
        status, _, found = raw.request(path, body, **more).answer()
    return status, json.loads(found)


BODY = json.dumps({"model": "bert", "input": "x"}).encode()


# ---- Host and Origin -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1", "localhost:1",
                                  "127.0.0.1.evil.example", "127.0.0.1:{port}.evil.example", "localhost", "[::1]:1",
                                  "0.0.0.0:{port}", "{port}",
                                  "user@127.0.0.1:{port}", "127.0.0.1:0{port}"])
def test_foreign_host_is_refused(server: Any, host: str) -> None:
    for path in ("/health", "/v1/models", "/nowhere"):
        with Raw(server) as raw:
            status, _, body = raw.request(path, host=host.format(port=server.port)).answer()
        assert status == 421 and json.loads(body)["error"]["code"] == "misdirected"


def test_names_of_loopback_are_accepted(server: Any) -> None:
    for host in ("127.0.0.1", "localhost", "LOCALHOST", "[::1]"):
        with Raw(server) as raw:
            assert raw.request("/health", host=f"{host}:{server.port}").answer()[0] == 200


def test_exactly_one_host_header_is_required(server: Any) -> None:
    for lines in (b"", f"Host: 127.0.0.1:{server.port}\r\n".encode() * 2):
        with Raw(server) as raw:
            assert raw.send(b"GET /health HTTP/1.1\r\n" + lines + b"\r\n").answer()[0] == 400
            assert raw.closed()


@pytest.mark.parametrize("header", ["Origin: http://127.0.0.1:{port}", "Origin: http://evil.example",
                                    "Authorization: Bearer x", "X-Api-Key: x", "Content-Type: application/json",
                                    "Content-Encoding: identity"])
def test_repeated_headers_are_refused(server: Any, header: str) -> None:
    """The first of two lines is harmless here. A proxy in front of the server may have checked only the other one."""
    lines = f"{header}\r\n".replace("{port}", str(server.port))
    harmless = lines.replace("evil.example", f"127.0.0.1:{server.port}")
    head = f"POST /v1/embeddings HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nContent-Length: {len(BODY)}\r\n"
    for again in (lines, lines.upper().replace("ORIGIN", "oRIGIN")):
        with Raw(server) as raw:
            kind = "" if header.startswith("Content-Type") else "Content-Type: application/json\r\n"
            status, _, body = raw.send((head + kind + harmless + again + "\r\n").encode() + BODY).answer()
        assert status == 400
        assert header.split(":")[0] in json.loads(body)["error"]["message"]
    with Raw(server) as raw:
        kind = "" if header.startswith("Content-Type") else "Content-Type: application/json\r\n"
        assert raw.send((head + kind + harmless + "\r\n").encode() + BODY).answer()[0] == 200


def test_allowed_hosts(bert: Path) -> None:
    with serving([f"bert={bert}"], allowed_hosts=("models.example",)) as made, Raw(made) as raw:
        assert raw.request("/health", host="models.example").answer()[0] == 200
        assert raw.request("/health", host="other.example").answer()[0] == 421


@pytest.mark.parametrize(("host", "accepted"), [
    ("192.0.2.7:{port}", True), ("192.0.2.7", True), ("10.0.0.9:8080", True), ("[2001:db8::7]:{port}", True),
    ("[2001:db8::7]", True), ("localhost:{port}", True),
    ("evil.example:{port}", False), ("192.0.2.7.evil.example:{port}", False), ("2001:db8::7", False),
    ("[192.0.2.7]:80", False), ("192.0.2.7:99999", False), ("192.0.2.7:", False), ("3221225991", False),
    ("192.0.2.7:80:80", False), ("[2001:db8::7", False)])
def test_a_server_on_all_addresses_accepts_ip_addresses_as_host(everywhere: Any, host: str, accepted: bool) -> None:
    """A page of another site has a name, or another address in its origin."""
    host = host.replace("{port}", str(everywhere.port))
    allowed = f"Authorization: Bearer {TOKEN}"
    with Raw(everywhere) as raw:
        assert raw.request("/v1/models", None, allowed, host=host).answer()[0] == (200 if accepted else 421)
    if accepted:
        own, other = f"Origin: http://{host}", "Origin: http://198.51.100.1"
        for origin, status in ((own, 200), (other, 403), ("Origin: null", 403)):
            with Raw(everywhere) as raw:
                assert raw.request("/v1/models", None, allowed, origin, host=host).answer()[0] == status
        with Raw(everywhere) as raw:  # the token is required
            assert raw.request("/v1/models", None, host=host).answer()[0] == 401


@pytest.fixture(scope="module")
def everywhere(bert: Path) -> Iterator[Any]:
    with serving([f"bert={bert}"], host="0.0.0.0", token=TOKEN) as made:
        yield made


def test_foreign_origins_are_refused(server: Any) -> None:
    own = f"http://127.0.0.1:{server.port}"
    for origin, status in ((own, 200), (f"http://localhost:{server.port}", 200), ("https://evil.example", 403),
                           ("null", 403), (own + ".evil.example", 403), ("file://", 403), ("", 403)):
        found, body = embed(server, "x", f"Origin: {origin}")
        assert found == status, origin
    with Raw(server) as raw:
        status, headers, _ = raw.request("/v1/embeddings", None, "Origin: https://evil.example",
                                         "Access-Control-Request-Method: POST", method="OPTIONS").answer()
        assert status == 403 and not any(name.startswith("access-control") for name in headers)
        status, headers, _ = raw.request("/health", None, f"Origin: {own}").answer()
        assert status == 200 and not any(name.startswith("access-control") for name in headers)


# ---- request framing -------------------------------------------------------------------------------------------------

def head(server: Any, *lines: str) -> bytes:
    return "\r\n".join(["POST /v1/embeddings HTTP/1.1", f"Host: 127.0.0.1:{server.port}",
                        "Content-Type: application/json", *lines, "", ""]).encode()


@pytest.mark.parametrize("lines", [
    ("Content-Length: 31", "Content-Length: 32"), ("Content-Length: 31", "Content-Length: 31"),
    ("Content-Length: 31, 32",), ("Content-Length: -1",), ("Content-Length: +31",), ("Content-Length: 0x1f",),
    ("Content-Length: 99999999999999999999999",), ("Content-Length: 31", "Transfer-Encoding: chunked"),
    ("Transfer-Encoding: chunked", "Content-Length: 31"), ("Transfer-Encoding: gzip, chunked",),
    ("Transfer-Encoding: identity",), ("Transfer-Encoding: chunked", "Transfer-Encoding: chunked"),
    ("Content-Length : 31",), ("Content Length: 31",),
], ids=" & ".join)
def test_invalid_length_closes_the_connection(server: Any, lines: tuple[str, ...]) -> None:
    with Raw(server) as raw:
        status, headers, body = raw.send(head(server, *lines) + BODY).answer()
        assert status in (400, 501, 413) and json.loads(body)["error"]["type"] == "invalid_request_error"
        assert raw.closed(5)


def test_invalid_length_of_a_pipelined_request(server: Any) -> None:
    good = head(server, f"Content-Length: {len(BODY)}") + BODY
    bad = head(server, f"Content-Length: {len(BODY)}", f"Content-Length: {len(BODY)}") + BODY
    with Raw(server) as raw:
        assert raw.send(good + bad).answer()[0] == 200
        assert raw.answer()[0] == 400 and raw.closed()


@pytest.mark.parametrize("chunk", [b"FFFFFFFFFFFFFFFFFFFFF\r\nx", b"FFFFFFFFFFFFFFFF\r\n" + b"x" * 65536,
                                   b"-1\r\nx\r\n", b"0x3\r\nabc\r\n", b"3\r\nabcd\r\n", b"\r\n", b"G\r\n",
                                   b"5;" + b"e" * 20000],
                         ids=["21 digits", "64 bits", "negative", "prefix", "overrun", "empty", "letter", "extension"])
def test_malformed_chunks_close_the_connection(server: Any, chunk: bytes) -> None:
    with Raw(server) as raw, limits(server, body_timeout=0.6):
        raw.send(head(server, "Transfer-Encoding: chunked") + chunk)
        status, _, _ = raw.answer()
        assert status in (400, 408, 413, 431)
        assert raw.closed(5)


def test_many_tiny_chunks_close_the_connection(server: Any) -> None:
    with Raw(server) as raw:
        raw.send(head(server, "Transfer-Encoding: chunked") + b"1\r\nx\r\n" * 5000)
        assert raw.answer()[0] == 400 and raw.closed()


def test_chunked_body_is_accepted(server: Any) -> None:
    parts = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (BODY[:10], BODY[10:11], BODY[11:]))
    with Raw(server) as raw:
        assert raw.send(head(server, "Transfer-Encoding: chunked") + parts + b"0\r\n\r\n").answer()[0] == 200
        assert raw.request("/health").answer()[0] == 200  # the connection stays open


def test_heads_have_limits(server: Any) -> None:
    many, large = [f"X-{at}: y" for at in range(30)], ["X: " + "y" * 20000]
    for lines in (many, large):
        with Raw(server) as raw:
            assert raw.request("/health", None, *lines).answer()[0] == 431
            assert raw.closed()
    with Raw(server) as raw:
        assert raw.request("/" + "a" * 20000).answer()[0] == 431


@pytest.mark.parametrize("text", [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET / HTTP/9.9\r\n\r\n",
                                  b"GET\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x00" * 100,
                                  b"GET /\xff HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a\r\nX: a\x00b\r\n\r\n",
                                  b"GET / HTTP/1.1\r\nHost: a\r\n X: folded\r\n\r\n"],
                         ids=["TLS", "version", "no path", "HTTP/2", "zeros", "not ASCII", "NUL", "folded"])
def test_input_that_is_not_http_is_refused(server: Any, text: bytes) -> None:
    with Raw(server) as raw:
        try:
            assert raw.send(text + b"\r\n\r\n").answer()[0] in (400, 421)
        except ConnectionError:
            pass
        assert raw.closed(5)


# ---- bodies ----------------------------------------------------------------------------------------------------------

def test_too_large_body_is_refused_before_it_is_read(server: Any) -> None:
    with Raw(server) as raw:
        status, _, _ = raw.request("/v1/embeddings", b"{", length=1 << 40).answer()
        assert status == 413
    with Raw(server) as raw:  # without Content-Length
        raw.send(head(server, "Transfer-Encoding: chunked"))
        for _ in range(20):
            raw.send(b"10000\r\n" + b"x" * 65536 + b"\r\n")
        assert raw.answer()[0] == 413


def test_connection_stays_open_after_a_refused_body(server: Any) -> None:
    with Raw(server) as raw:
        assert raw.request("/v1/embeddings", b"x" * ((1 << 20) + 1)).answer()[0] == 413
        assert raw.request("/health").answer()[0] == 200


def test_client_that_continues_a_refused_body_is_disconnected(server: Any) -> None:
    with Raw(server) as raw:
        raw.request("/v1/embeddings", b"{", length=1 << 40)
        for _ in range(400):
            raw.send(b"x" * 65536)
        assert raw.closed(5)


def test_slow_heads_and_bodies_time_out(server: Any) -> None:
    with Raw(server) as slow_head, Raw(server) as slow_body, Raw(server) as drip:
        for raw in (slow_head, drip):  # the limit of the second head of a connection begins with its first byte
            assert raw.request("/health").answer()[0] == 200
        with limits(server, header_timeout=0.4, body_timeout=0.6):
            slow_head.send(b"GET /health HT")
            slow_body.request("/v1/embeddings", BODY[:5], length=len(BODY))
            drip.send(b"GET /health HTTP/1.1\r\n")
            drip.drip(b"HTTP/1.1 408 ")
            for raw in (slow_head, slow_body):
                assert raw.answer()[0] == 408
                assert raw.closed()
            assert drip.closed()
            with Raw(server) as silent:
                assert silent._read() == b""  # closed: a client that has sent nothing receives no response


@pytest.mark.parametrize("coding", ["gzip", "br", "deflate", "zstd", "identity, gzip"])
def test_compressed_bodies_are_refused(server: Any, coding: str) -> None:
    with Raw(server) as raw:
        assert raw.request("/v1/embeddings", BODY, f"Content-Encoding: {coding}").answer()[0] == 415


@pytest.mark.parametrize("kind", ["text/plain; charset=latin-1", "multipart/form-data; boundary=x", "text/json",
                                  "application/json; charset=latin-1", "application/jsonp"])
def test_content_type_must_be_json(server: Any, kind: str) -> None:
    status, found = post(server, BODY, kind=kind)
    assert status == 415 and "Content-Type: application/json" in found["error"]["message"]


@pytest.mark.parametrize("kind", ["", "application/x-www-form-urlencoded", "text/plain; charset=utf-8",
                                  "application/octet-stream", None])
def test_default_content_types_are_read_unless_a_browser_may_have_sent_them(server: Any, kind: str | None) -> None:
    """Forms of other sites need no CORS preflight. Every browser marks them with one of these headers."""
    def send(*lines: str) -> tuple[int, bytes]:
        head = [f"POST /v1/embeddings HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nContent-Length: {len(BODY)}", *lines]
        head += [] if kind is None else [f"Content-Type: {kind}"]
        with Raw(server) as raw:
            status, _, body = raw.send("\r\n".join([*head, "", ""]).encode() + BODY).answer()
        return status, body

    wanted = post(server, BODY)
    for harmless in ((), ("User-Agent: curl/8.5.0", "Accept: */*"), ("User-Agent: not Mozilla/5.0",)):
        status, body = send(*harmless)
        assert (status, json.loads(body)) == wanted and status == 200
    own = f"http://127.0.0.1:{server.port}"
    for line in (f"Origin: {own}", "Sec-Fetch-Site: cross-site", "sec-fetch-mode: no-cors", "Sec-CH-UA: x",
                 "Referer: https://evil.example/", "User-Agent: Mozilla/5.0 (X11)", "user-agent:  mozilla/4.0"):
        assert send(line)[0] == 415, line
    for line in ("Origin: null", "Origin: https://evil.example"):
        assert send(line)[0] == 403, line


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON",
                                  'application/json;charset="UTF-8"'])
def test_equivalent_spellings_of_the_content_type(server: Any, kind: str) -> None:
    assert post(server, BODY, kind=kind)[0] == 200


# ---- JSON ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("body", [
    b'{"model":"bert","input":"x","dimensions":NaN}', b'{"model":"bert","input":"x","dimensions":Infinity}',
    b'{"model":"bert","input":"x","input":"y"}', b'{"model":"bert","input":"x","model":"bert"}',
    b'{"model":"bert","input":"x","dimensions":true}',
    b'{"model":"bert","input":"x","dimensions":' + b"9" * 5000 + b"}",
    b'{"model":"bert","input":"x","dimensions":1e999}', b'{"model":"bert","input":"x","dimensions":' + b"[" * 49_990,
    b'{"model":"bert","input":' + b"[" * 40_000 + b"1" + b"]" * 40_000 + b"}", b'{"model":"bert","input":"x",}',
    b"", b"null", b"[]", b'"x"', b"\xef\xbb\xbf" * 2 + BODY, BODY + b"x", BODY + BODY, b"{'model': 'bert'}",
    b'{"model":"bert","input":"\xff"}', b'{"model":"bert","input":"x"} // comment',
    b'{"model":"bert","input":"a\nb"}',
], ids=lambda body: repr(body[:60]))
def test_json_is_strict(server: Any, body: bytes) -> None:
    status, found = post(server, body)
    assert status == 400 and found["error"]["code"] in ("invalid_json", "invalid_value")


ROUTES = [("/v1/embeddings", "input"), ("/v1/chat/completions", "messages"), ("/v1/rerank", "documents"),
          ("/api/embed", "input"), ("/pooling", "unknown"), ("/v1/responses", "input"), ("/v1/messages", "tools"),
          ("/predict", "inputs")]
ITEMS = [(b"[1]", 60_000, "lists and objects"), (b"[]", 60_000, "lists and objects"),
         (b'{"a":1}', 60_000, "lists and objects"), (b'{"a":[]}', 30_000, "lists and objects"),
         (b"[" * 70_000, 1, "lists and objects"), (b"1", 2_000_001, "values"), (b'"["', 2_000_001, "values"),
         (b'{"a":1,"b":2,"c":3,"d":4,"e":5}', 20_001, "fields"),
         (b"{" + b",".join(b'"%d":0' % key for key in range(100_001)) + b"}", 1, "fields")]


@pytest.mark.sample(4)
@pytest.mark.parametrize("path, field, item, count, what", [
    *((*route, *ITEMS[0]) for route in ROUTES), *((*ROUTES[0], *item) for item in ITEMS[1:])])
def test_bodies_of_many_values_are_refused(many: Any, monkeypatch: pytest.MonkeyPatch, path: str, field: str,
                                           item: bytes, count: int, what: str) -> None:
    """Such bodies are refused before decoding, which would hold the interpreter's lock for seconds."""
    monkeypatch.setattr(bodies, "parse", lambda *given: pytest.fail("the body was decoded"))
    body = b'{"model":"bert","%s":[' % field.encode() + b",".join([item] * count) + b"]}"
    status, found = post(many, body, path)
    assert status == 413 and what in json.dumps(found), found


def test_values_in_strings_are_not_counted() -> None:
    """The check of sizes sees the values of a body, wherever its slices end."""
    rest = b",".join([b"[1]"] * 49_990)
    for text in (b'"[[[[{{{{::::"', b'"\\\\"', b'"\\""', b'"\\\\\\""', b'"' + b"\\\\" * 70_000 + b'"',
                 b'"' + b'\\"[' * 70_000 + b'"', b'"' + b"[,{:" * 70_000 + b'"'):
        json.loads(text)
        for more in range(3):
            body = b'{"a":[' + b" " * (65_530 - more) + b",".join([text] * 40 + [rest]) + b"]}"
            bodies.Counts().add(body)
            with pytest.raises(Refusal) as caught:
                bodies.Counts().add(body[:-2] + b",[],[],[],[],[],[],[],[],[]]}")
            assert "at most 50,000 lists" in (caught.value.message or "")


def test_duplicate_key_in_a_nested_object(server: Any) -> None:
    body = b'{"model":"bert","query":"q","documents":[{"text":"a"},{"text":"b","text":"c"}]}'
    status, found = post(server, body, "/v1/rerank")
    assert status == 400 and found["error"]["code"] == "invalid_json"


@pytest.mark.parametrize("text", [b"\\ud800", b"a\\udc00b", b"\\ud800\\ud800", b"\\ud83d"])
def test_lone_surrogates_are_refused(server: Any, text: bytes) -> None:
    status, found = post(server, b'{"model":"bert","input":"' + text + b'"}')
    assert status == 400 and found["error"]["code"] == "invalid_json"


def test_surrogate_pairs_and_nul_are_accepted(server: Any) -> None:
    assert post(server, b'{"model":"bert","input":"\\ud83d\\ude00"}')[0] == 200
    assert post(server, b'{"model":"bert","input":"a\\u0000b"}')[0] == 200


# ---- values and names ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["../bert", "bert/../bert", "/etc/passwd", "./bert", "C:\\x", "file:///etc/passwd",
                                  "http://evil.example/x", "hf://org/name", "org/name", "org/name:Q4_K_M",
                                  "pip:evil==1.0/x", "sha256:deadbeef", "bert\x00", "bert ", "BERT", "%2e%2e/bert",
                                  "x" * 256])
def test_model_names_are_never_paths_or_references(server: Any, name: str) -> None:
    status, found = ask(server, "/v1/embeddings", {"model": name, "input": "x"})
    assert status == 404 and found["error"]["code"] == "model_not_found"
    # the name as it was sent, escaped and shortened, and at most the served model: nothing of this machine
    assert found["error"]["message"].removesuffix("; did you mean bert?").removesuffix(".") == \
        f"Model not found. GET /v1/models lists the models. {shown(name)} is unknown"


def test_responses_never_contain_the_path_of_a_model(server: Any, bert: Path) -> None:
    text = json.dumps([ask(server, "/v1/models"), ask(server, "/v1/embeddings", {"model": "bert", "input": [10**6]}),
                       ask(server, "/v1/rerank", {"model": "bert", "query": "q", "documents": ["d"]})])
    assert str(bert) not in text and bert.name not in text.replace("bert", "", 0) or str(bert.parent) not in text
    with Raw(server) as raw:
        assert str(bert.parent) not in raw.request("/metrics").answer()[2].decode()


# ---- token and settings ----------------------------------------------------------------------------------------------

def test_token_is_required_on_every_route_but_health(bert: Path) -> None:
    from mpool.server.application import OPERATIONS

    with serving([f"bert={bert}"], token=TOKEN) as made, Raw(made) as raw:
        assert raw.request("/health").answer()[0] == 200
        assert raw.request("/nowhere").answer()[0] == 401
        for operation in OPERATIONS:
            if operation.path != "/health":
                body = None if operation.body is None else b"{}"
                status, headers, _ = raw.request(operation.path, body, method=operation.method).answer()
                scheme = 'Basic realm="mpool", charset="UTF-8"' if operation.path == "/" else "Bearer"
                assert status == 401 and headers["www-authenticate"] == scheme, operation.path
        for given in ("", TOKEN, f"Basic {TOKEN}", "Bearer", "Bearer ", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}",
                      "Bearer \xff\xfe"):
            assert raw.request("/v1/models", None, f"Authorization: {given}").answer()[0] == 401
        for given in (f"Bearer {TOKEN}", f"bearer {TOKEN}"):
            assert raw.request("/v1/models", None, f"Authorization: {given}").answer()[0] == 200


def test_addresses_other_than_loopback_require_a_token() -> None:
    from mpool.server.settings import Settings

    for host in ("0.0.0.0", "192.0.2.1", "::", "example.org"):
        with pytest.raises(mpool.InvalidArgument, match="token"):
            Settings(host=host)
        assert Settings(host=host, token=TOKEN).host == host
    for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        assert Settings(host=host).token is None
    for token in ("short", "x" * 5000, "with space in it here", "umlaut-äöü-umlaut-äöü"):
        with pytest.raises(mpool.InvalidArgument, match="token"):
            Settings(token=token)


def test_token_file_is_readable_by_its_owner_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mpool.server import settings

    monkeypatch.setenv("MPOOL_CACHE", str(tmp_path / "cache"))
    before = os.umask(0)
    try:
        token = settings.token_of(tmp_path / "token")
        made = settings.TokenFile.default()
        made.write()
    finally:
        os.umask(before)
    assert os.stat(tmp_path / "token").st_mode & 0o777 == os.stat(made.path).st_mode & 0o777 == 0o600
    assert len(token) >= 43 and token != made.token and settings.token_of(tmp_path / "token") == token
    assert settings.TokenFile.default().token != made.token
    os.chmod(tmp_path / "token", 0o644)
    with pytest.raises(mpool.InvalidArgument, match="owner"):
        settings.token_of(tmp_path / "token")
    with pytest.raises(mpool.errors.FileError):
        settings.token_of(tmp_path / "nowhere" / "token")


@pytest.mark.parametrize("path, body, status", [("/health", None, 200), ("/v1/models", None, 200),
                                                ("/v1/embeddings", BODY, 200), ("/v1/embeddings", b"{", 400),
                                                ("/v1/embeddings", BODY.replace(b"bert", b"none"), 404)])
def test_responses_of_endpoints_have_an_id(server: Any, path: str, body: bytes | None, status: int) -> None:
    with Raw(server) as raw:
        found, headers, _ = raw.request(path, body).answer()
    assert found == status and len(headers["x-request-id"]) >= 8


# ---- connections -----------------------------------------------------------------------------------------------------

def test_idle_connections_are_closed(bert: Path) -> None:
    with serving([f"bert={bert}"], idle_timeout=0.2, header_timeout=5.0) as made, Raw(made) as raw:
        assert raw.request("/health").answer()[0] == 200
        assert raw.closed(5)


# ---- log -------------------------------------------------------------------------------------------------------------
