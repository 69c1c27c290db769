"""Undocumented parts of uvicorn that the server uses: the version that was checked, and all names that must exist.

uvicorn documents ``uvicorn.Config(http=CLASS)``, but neither base classes for such a class nor a way to serve without
its signal handlers.
"""

from __future__ import annotations


import pytest

uvicorn = pytest.importorskip("uvicorn")
httptools_impl = pytest.importorskip("uvicorn.protocols.http.httptools_impl")

SEEN = "0.54"
HELP = f"""uvicorn {uvicorn.__version__} is installed; mpool was last checked against {SEEN}.

Compare `uvicorn/protocols/http/httptools_impl.py` and `uvicorn/server.py` of the two versions with
`mpool/server/protocol.py` (`Connection`, `_Cycle`) and `mpool/server/serving.py` (`_Uvicorn`): attributes of a
connection and a cycle, the arguments of `RequestResponseCycle`, the callbacks that httptools calls, and the order of
`startup` and `shutdown`. Run `pytest tests/python/server`. Then change SEEN here."""

def test_installed_uvicorn_is_the_checked_version() -> None:
    assert uvicorn.__version__.rpartition(".")[0] == SEEN, HELP


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
