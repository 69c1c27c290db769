"""``mpool ps`` and ``mpool stop``: requests to a server that ``mpool serve`` runs on this or another machine."""

from __future__ import annotations

import argparse
import http.client
import ipaddress
import json
import os
import socket
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import ContextOverflow, InvalidArgument, ModelError, MpoolError, SendError, Timeout
from ..names import TASKS
from ..server.settings import default_token_file, read_token
from .common import note, print_json, say
from .layout import screen_width, table

#: Address of the server if neither ``--url`` nor ``MPOOL_URL`` names one.
DEFAULT_URL = "http://127.0.0.1:11435"
#: Time limit of one request. Reading the state of a pool never waits for its requests, but unloading a model does.
_SECONDS = 30.0
_MAX_RESPONSE = 64 << 20
#: What messages of the server say to its clients -> what they say on the command line.
_COMMANDS = {"GET /v1/models lists the models.": "`mpool ps` lists the loaded models, and `mpool models` those of the "
                                                 "catalogue."}


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follow no redirect: it could send the token to another server."""

    def redirect_request(self, *_: Any) -> None:
        return None


class Server:
    """A running server.

    Args:
        url: its address, without a path.
        token: the token that it requires; None: the token in the default file of `mpool serve`, which is sent only if a
            server on a loopback address requires one.
    """

    def __init__(self, url: str, token: str | None) -> None:
        try:
            parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
            host = parts.hostname if parts.scheme in ("http", "https") and parts.port != 0 else None
        except ValueError:  # a bracket without its pair, or a port that is no number up to 65535
            host = None
        if not host or parts.query or parts.fragment:
            raise InvalidArgument(param="url", got=repr(url), allowed=f"an address such as {DEFAULT_URL}")
        self.url, self.token = urllib.parse.urlunsplit(parts).rstrip("/"), token
        self.is_local = _is_local(host, parts.port or 80)
        self.default_file: str | None = None  # the file of the token, if it is the default one
        # a proxy of the environment cannot reach this machine's own addresses
        direct = [urllib.request.ProxyHandler({})] if self.is_local else []
        self.opener = urllib.request.build_opener(_NoRedirect, *direct)

    def request(self, path: str, wanted: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send a request, and return its response, a JSON object.

        Args:
            path: path of the route.
            wanted: field that the response must have.
            body: body of a POST request; None: send a GET request.

        Raises:
            SendError, Timeout, ModelError: see :meth:`open`.
        """
        with self.open(path, body) as response:
            found: dict[str, Any] = json.loads(response.read(_MAX_RESPONSE))
            if not isinstance(found, dict) or wanted not in found:
                raise ValueError(f"the response is not a JSON object with the key {wanted}")
        return found

    @contextmanager
    def open(self, path: str, body: dict[str, Any] | None = None, seconds: float | None = None) -> Iterator[Any]:
        """Send a request, and yield the response.

        Args:
            path: path of the route.
            body: body of a POST request; None: send a GET request.
            seconds: time limit of each wait for the server; None: that of a short request.

        Raises:
            SendError: there is no server, or the response is not one of mpool's server.
            Timeout: the server does not respond in time.
            ContextOverflow: the input is longer than the context of the model.
            ModelError: the server refuses the request; the message is the server's.
        """
        seconds = seconds or _SECONDS
        headers = {"content-type": "application/json"}
        if self.token is not None:
            headers["authorization"] = f"Bearer {self.token}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            try:
                response = self.opener.open(request, timeout=seconds)
            except urllib.error.HTTPError as error:
                if error.code != 401 or not self._take_default_token():
                    raise self._refusal(error) from None
                request.add_header("authorization", f"Bearer {self.token}")
                response = self.opener.open(request, timeout=seconds)
            with response:
                yield response
        except urllib.error.HTTPError as error:
            raise self._refusal(error) from None
        except TimeoutError:  # connected, but there was no response; a failed connection is a URLError
            raise Timeout(f"{self.url} did not respond within {seconds:g} s",
                          hint="Requests of the model may still run: mpool ps shows them") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            if isinstance(error, MpoolError):
                raise
            cause = getattr(error, "reason", None) or error
            raise SendError(f"{self.url} does not respond as `mpool serve` does: {cause}",
                            hint="Start a server with `mpool serve`, or name its address with --url") from None

    def _refusal(self, error: urllib.error.HTTPError) -> MpoolError:
        """Return the error of a request that the server refuses."""
        code, text = _reason(error)
        if code == "context_length_exceeded":
            return ContextOverflow(text)
        hint = None
        if error.code == 401:
            hint = "Name the server's token file with --token-file; mpool serve prints its path"
            if self.default_file is not None:
                hint = f"The server does not accept the token in {self.default_file}. {hint}"
        return ModelError(text, hint=hint)

    def _take_default_token(self) -> bool:
        """Read the default token file for a server on a loopback address. Return False if there is no new token."""
        if self.token is not None or not self.is_local or not os.path.lexists(default_token_file()):
            return False
        self.default_file = default_token_file()
        self.token = read_token(self.default_file)
        return True


def _is_local(host: str, port: int) -> bool:
    """Return True for a loopback address, and for ``localhost`` if it is the name of such addresses only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        pass
    try:
        found = {str(address[4][0]) for address in socket.getaddrinfo(host, port)} if host == "localhost" else set()
    except OSError:
        return False
    return bool(found) and all(ipaddress.ip_address(one).is_loopback for one in found)


def _reason(error: urllib.error.HTTPError) -> tuple[str, str]:
    """Return the code of a refused request, and its message with commands in place of routes."""
    try:
        found = json.loads(error.read(_MAX_RESPONSE))["error"]
        code, text = (str(found.get("code")), str(found["message"])) if isinstance(found, dict) else ("", str(found))
        for route, command in _COMMANDS.items():
            text = text.replace(route, command)
        return code, text
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return "", f"status {error.code}"


def server_of(arguments: argparse.Namespace) -> Server:
    """Return the server that ``--url`` and ``--token-file`` name."""
    token = None if arguments.token_file is None else read_token(arguments.token_file)
    return Server(arguments.url or os.environ.get("MPOOL_URL") or DEFAULT_URL, token)


def ps(arguments: argparse.Namespace) -> int:
    """Run ``mpool ps``."""
    server = server_of(arguments)
    state = server.request("/api/mpool/state", "models")
    models = [row for row in state["models"] if row["workers"] or row["model_bytes"] or row["state"] == "loading"]
    if arguments.json:
        print_json(models)
        return 0
    served = server.request("/api/mpool/servable", "models")["models"]  # requests and mpool stop use these names
    names = {key: one["name"] for one in served for key in one["keys"]}
    columns: dict[str, list[str]] = {
        "NAME": [names.get(row["key"], row["key"]) for row in models],
        "TASK": [TASKS[row["capability"]][0] for row in models],
        "STATE": [row["state"] for row in models],
        "MEMORY": [f"{(row['model_bytes'] + row['engine_bytes']) / 1e6:,.0f} MB" for row in models],
        "UNLOADS IN": [_left(row) for row in models],
    }
    if arguments.wide:
        columns |= {"WORKERS": [str(len(row["workers"])) for row in models],
                    "RUNNING": [str(row["running"]) for row in models],
                    "QUEUED": [str(row["queued"]) for row in models],
                    "SNAPSHOTS": [f"{row['snapshots']}, {row['snapshot_bytes'] / 1e6:,.0f} MB" if row["snapshots"]
                                  else "-" for row in models],
                    "REUSED": [f"{row['prefix_tokens']:,} tokens" if row["prefix_tokens"] else "-" for row in models]}
    say(table(list(columns), zip(*columns.values()), None if arguments.wide else screen_width()))
    memory = state["memory"]
    say(f"\n{memory['used'] / 1e6:,.0f} MB of {memory['limit'] / 1e6:,.0f} MB used, {state['status']}")
    return 0


def _left(row: dict[str, Any]) -> str:
    """Return the time until an idle model is unloaded."""
    if row["state"] == "loading":
        return "-"
    if row["pinned"] or row["keep_alive"] is None:
        return "never"
    if row["running"] or row["queued"]:
        return "in use"
    return f"{max(0.0, row['keep_alive'] - row['idle_seconds']):,.0f} s"


def stop(arguments: argparse.Namespace) -> int:
    """Run ``mpool stop``. If a model cannot be unloaded, the others still are."""
    server, failed = server_of(arguments), False
    for name in arguments.model:
        try:
            server.request("/api/generate", "done", {"model": name, "keep_alive": 0})
        except (ModelError, Timeout) as error:
            note(f"mpool: {name}: {error}")
            failed = True
            continue
        say(f"{name}: unloaded")
    return 1 if failed else 0
