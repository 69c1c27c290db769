"""Undocumented parts of uvicorn that the server uses: the version that was checked, and all names that must exist.

uvicorn documents ``uvicorn.Config(http=CLASS)``, but neither base classes for such a class nor a way to serve without
its signal handlers.
"""

from __future__ import annotations

import inspect

import pytest

uvicorn = pytest.importorskip("uvicorn")
httptools_impl = pytest.importorskip("uvicorn.protocols.http.httptools_impl")

SEEN = "0.54"
HELP = f"""uvicorn {uvicorn.__version__} is installed; mpool was last checked against {SEEN}.

Compare `uvicorn/protocols/http/httptools_impl.py` and `uvicorn/server.py` of the two versions with
`mpool/server/protocol.py` (`Connection`, `_Cycle`) and `mpool/server/serving.py` (`_Uvicorn`): attributes of a
connection and a cycle, the arguments of `RequestResponseCycle`, the callbacks that httptools calls, and the order of
`startup` and `shutdown`. Run `pytest tests/python/server`. Then change SEEN here."""

#: Attributes that `Connection` reads or sets on its base class.
CONNECTION = {"access_logger", "app", "connections", "cycle", "expect_100_continue", "flow", "headers", "loop",
              "pipeline", "scope", "server_state", "tasks", "transport", "parser", "logger", "url"}
#: Attributes that `_Cycle` reads or sets on its base class.
CYCLE = {"chunked_encoding", "default_headers", "disconnected", "flow", "keep_alive", "message_event", "more_body",
         "on_response", "response_complete", "response_started", "scope", "transport", "waiting_for_100_continue"}
#: Methods that `Connection` calls on its base class or overrides.
METHODS = {"connection_made", "connection_lost", "pause_writing", "resume_writing", "data_received", "eof_received",
           "on_message_begin", "on_url", "on_header", "on_headers_complete", "on_body", "on_message_complete",
           "on_response_complete"}


def test_installed_uvicorn_is_the_checked_version() -> None:
    assert uvicorn.__version__.rpartition(".")[0] == SEEN, HELP


def test_names_of_the_connection() -> None:
    source = inspect.getsource(httptools_impl.HttpToolsProtocol)
    assert {name for name in CONNECTION if f"self.{name}" not in source} == set(), HELP
    assert {name for name in METHODS if not hasattr(httptools_impl.HttpToolsProtocol, name)} == set(), HELP


def test_names_of_the_cycle() -> None:
    source = inspect.getsource(httptools_impl.RequestResponseCycle)
    assert {name for name in CYCLE if f"self.{name}" not in source} == set(), HELP
    arguments = set(inspect.signature(httptools_impl.RequestResponseCycle).parameters)
    assert arguments == {"scope", "transport", "flow", "logger", "access_logger", "access_log", "default_headers",
                         "message_event", "expect_100_continue", "keep_alive", "on_response"}, HELP


def test_names_of_the_server() -> None:
    for name in ("capture_signals", "startup", "shutdown", "serve"):
        assert callable(getattr(uvicorn.Server, name)), HELP
    source = inspect.getsource(uvicorn.Server)
    assert all(f"self.{name}" in source for name in ("should_exit", "force_exit", "started", "server_state")), HELP
    assert "with self.capture_signals()" in source, HELP


def test_the_server_imports_no_private_name() -> None:
    """`mpool/server` imports no underscore names of other packages, and from uvicorn's modules only the names below."""
    import ast
    from pathlib import Path

    import mpool.server

    allowed = {"uvicorn.protocols.http.httptools_impl": {"HttpToolsProtocol", "RequestResponseCycle"}}
    for path in Path(mpool.server.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names = {alias.name for alias in node.names}
                assert not any(part.startswith("_") and part != "__future__" for part in node.module.split(".")), path
                assert not any(name.startswith("_") for name in names), (path, names)
                if node.module.startswith("uvicorn."):
                    assert names <= allowed.get(node.module, set()), (path, names)
