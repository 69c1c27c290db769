"""Limits of the server's settings: each bound is allowed, the next value is refused, and the error names both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import mpool

pytest.importorskip("starlette")
pytest.importorskip("msgspec")

from mpool.server.settings import Settings, check_token, is_loopback, token_of  # noqa: E402
from mpool.server.worker import worker_config, worker_settings  # noqa: E402

SECONDS = (0.05, 3600.0)
#: Setting -> its minimum, maximum and default.
LIMITS: dict[str, tuple[float, float, float]] = {
    "port": (0, 65_535, 11_435), "max_body": (1024, 2**30, 32 * 2**20), "max_bodies": (1024, 2**40, 512 * 2**20),
    "max_text": (1, 1_000_000, 1_000_000),
    "max_header": (1024, 2**20, 16 * 1024), "max_header_count": (8, 1000, 64), "max_connections": (1, 100_000, 2048),
    "max_streams": (1, 100_000, 512), "max_n": (1, 128, 16), "max_tokens": (1, 2**31 - 1, 16_384),
    "default_max_tokens": (1, 2**31 - 1, 4096), "header_timeout": (*SECONDS, 10.0), "body_timeout": (*SECONDS, 60.0),
    "write_timeout": (*SECONDS, 30.0), "idle_timeout": (*SECONDS, 75.0), "ping": (*SECONDS, 15.0),
    "grace": (0.0, 3600.0, 5.0)}
#: The allowed values of ``allowed_hosts``.
HOSTS = ("names or addresses, each with a port unless it is 80 or 443, such as models.example, models.example:11435 or "
         "[fd00::1]:11435")
SWITCHES = ("allow_token_ids", "allow_image_urls", "strict")


@pytest.mark.parametrize("name", LIMITS)
def test_bounds(name: str) -> None:
    """A setting takes its bounds, and neither values beyond them nor other types."""
    low, high, default = LIMITS[name]
    whole = isinstance(high, int)
    assert getattr(Settings(), name) == default
    for value in (low, high):
        assert getattr(Settings(**{name: value}), name) == value  # type: ignore[arg-type]
    step = 1 if whole else 0.001
    wrong: tuple[Any, ...] = (low - step, high + step, True, str(low), None, *((float(high),) if whole else ()))
    kind = "an integer" if whole else "a number of seconds"
    for value in wrong:
        with pytest.raises(mpool.InvalidArgument) as caught:
            Settings(**{name: value})
        assert (caught.value.param, caught.value.allowed) == (name, f"{kind} from {low} to {high}")
        assert caught.value.got == repr(value)


@pytest.mark.parametrize(("name", "value", "allowed"), [
    *((name, value, "True or False") for name in SWITCHES for value in (1, None, "yes")),
    ("host", "", "an IP address or host name"), ("host", 5, "an IP address or host name"),
    ("host", "0.0.0.0", "a loopback address unless there is a token"),
    *(("allowed_origins", value, "origins such as https://page.example")
      for value in ("page.example", "ftp://page.example", "https://", "https://a/b", "https://*.example", "*",
                    "https://a b", "https://page.example\n", "https://a:b", "https://a:65536", "https://u@a")),
    *(("allowed_hosts", value, HOSTS)
      for value in ("", " ", "a b", "http://foo/", "foo/", "foo:", "foo:bar", "foo:0", "foo:65536", "*", "*.example",
                    "fd00::1", "[fd00::1", "[10.0.0.5]", "[]", "caf\u00e9.example", "foo\n", "user@foo", "a,b"))])
def test_values_that_are_refused(name: str, value: Any, allowed: str) -> None:
    """The error has the setting, the allowed values and the value."""
    with pytest.raises(mpool.InvalidArgument) as caught:
        Settings(**{name: (value,) if name.startswith("allowed_") else value})
    assert (caught.value.param, caught.value.allowed, caught.value.got) == (name, allowed, repr(value))


@pytest.mark.parametrize("name", ["allowed_hosts", "allowed_origins"])
@pytest.mark.parametrize("value", ["https://page.example", None, 5, (5,), b"x"])
def test_lists_of_strings(name: str, value: Any) -> None:
    """A single string is refused: each of its characters would be a value. A list becomes a tuple, which has a hash."""
    with pytest.raises(mpool.InvalidArgument) as caught:
        Settings(**{name: value})
    assert (caught.value.param, caught.value.allowed) == (name, "a tuple of strings")
    assert (caught.value.hint == "Pass ('https://page.example',)") == isinstance(value, str)
    given = "https://page.example" if name == "allowed_origins" else "page.example"
    found = Settings(**{name: [given]})
    assert getattr(found, name) == (given,) and hash(found)


def test_defaults_of_switches_and_access() -> None:
    """By default, only this machine has access, and no optional behaviour is on."""
    found = Settings()
    assert [getattr(found, name) for name in SWITCHES] == [False] * 3
    assert (found.host, found.token, found.allowed_hosts, found.allowed_origins) == ("127.0.0.1", None, (), ())
    assert Settings(allowed_origins=("http://a", "https://b:80")).allowed_origins == ("http://a", "https://b:80")


@pytest.mark.parametrize("host", ["a", "Models.Example", "my_service:8000", "10.0.0.5", "10.0.0.5:65535", "[fd00::1]",
                                  "[fd00::1]:1", "xn--caf-dma.example", "localhost."])
def test_allowed_hosts(host: str) -> None:
    """Values that a client can send. Their case does not matter."""
    assert host.lower() in Settings(allowed_hosts=(host,)).hosts(81)
    assert Settings(allowed_origins=(f"http://{host}",)).allowed_origins == (f"http://{host}",)


@pytest.mark.parametrize(("host", "loopback", "everywhere"), [
    ("localhost", True, False), ("127.0.0.1", True, False), ("127.8.8.8", True, False), ("::1", True, False),
    ("0.0.0.0", False, True), ("::", False, True), ("10.0.0.5", False, False), ("example.org", False, False)])
def test_hosts(host: str, loopback: bool, everywhere: bool) -> None:
    """The Host header is the address, or a local name that leads to the server. Port 80 may be left out."""
    found = Settings(host=host, token="t" * 16, allowed_hosts=("Proxy.Example",))
    assert (is_loopback(host), found.on_all_addresses) == (loopback, everywhere)
    own = f"[{host}]" if ":" in host else host
    names = {own} | ({"localhost", "127.0.0.1", "[::1]"} if loopback or everywhere else set())
    assert found.hosts(81) == {"proxy.example", *(f"{name}:81" for name in names)}
    assert found.hosts(80) == {"proxy.example", *names, *(f"{name}:80" for name in names)}


@pytest.mark.parametrize(("wanted", "tokens"), [(None, 5), (1, 1), (5, 5), (6, 6), (9, 9), (10, 9)])
def test_tokens_of_a_completion(wanted: int | None, tokens: int) -> None:
    """The default applies to requests without a limit, the maximum to all."""
    assert Settings(default_max_tokens=5, max_tokens=9).completion_tokens(wanted) == tokens
    assert Settings(default_max_tokens=9, max_tokens=5).completion_tokens(None) == 5


@pytest.mark.parametrize(("token", "valid"), [
    ("!" * 16, True), ("~" * 4096, True), ("a" * 15, False), ("a" * 4097, False), ("a" * 15 + " ", False),
    ("a" * 15 + "\x7f", False), ("a" * 15 + "é", False), (b"a" * 16, False)])
def test_tokens(token: Any, valid: bool, tmp_path: Path) -> None:
    """A token has 16 to 4,096 visible ASCII characters, as an argument or in a file. No message shows it."""
    path = tmp_path / "token"
    path.write_bytes((token if isinstance(token, bytes) else token.encode()) + b"\n")
    path.chmod(0o600)
    if valid:
        assert check_token(token) == token and token_of(path) == token
        return
    for call in (lambda: check_token(token), *((lambda: token_of(path),) if isinstance(token, str) else ())):
        with pytest.raises(mpool.InvalidArgument) as caught:
            call()
        assert caught.value.param == "token" and "16 to 4,096 visible ASCII" in str(caught.value.allowed)
        assert str(token) not in str(caught.value).replace(str(path), "")  # the path has the token in its folder's name


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o700, 0o640, 0o604, 0o620, 0o601])
def test_modes_of_token_files(mode: int, tmp_path: Path) -> None:
    """Only the owner may have access to the file."""
    path = tmp_path / "token"
    path.write_text("t" * 20)
    path.chmod(mode)
    if mode & 0o077:
        with pytest.raises(mpool.InvalidArgument, match="only its owner can read") as caught:
            token_of(path)
        assert caught.value.hint == f"Run chmod 600 {path}"
    else:
        assert token_of(path) == "t" * 20


def test_settings_of_a_worker() -> None:
    """A worker computes one job at a time, keeps its model, and takes prompts of 32,768 escaped characters."""
    found = worker_settings(7, "t" * 16, 2.0)
    assert (found.port, found.token, found.grace, found.strict, found.host) == (7, "t" * 16, 2.0, True, "127.0.0.1")
    assert worker_settings(0).token is None and worker_settings(0).grace == 3.5
    prompt = json.dumps({"prompt": "\U0001f600" * 32_768})
    assert len(prompt) < found.max_body < len(prompt) + 2**17
    config = worker_config(3, True, 1.5, "mapped")
    assert (config.threads, config.offline, config.shutdown_grace, config.weights) == (3, True, 1.5, "mapped")
    assert (config.policy, config.max_workers_per_model, config.keep_alive) == ("sequential", 1, -1)
    plain = worker_config()
    assert (plain.threads, plain.offline, plain.shutdown_grace, plain.weights) == (
        mpool.PoolConfig().threads, mpool.PoolConfig().offline, 3.5, "auto")
