"""The route that replaces a served model."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from adapterfiles import matrices, save_peft, smaller
from servers import Raw, ask, serving

PATH = "/api/mpool/swap"
CALL: dict[str, Any] = {"prompt": "Hello", "temperature": 0, "max_tokens": 4, "ignore_eos": True}


@pytest.fixture
def server(llama: Path, qwen2: Path, bert: Path) -> Iterator[Any]:
    with serving([f"m={llama}", f"new={qwen2}", f"bert={bert}"]) as made:
        yield made


def _text(server: Any, name: str = "m") -> str:
    status, found = ask(server, "/v1/completions", {**CALL, "model": name})
    assert status == 200, found
    return str(found["choices"][0]["text"])


def test_clients_see_the_old_or_the_new_model(server: Any) -> None:
    old, wanted = _text(server), _text(server, "new")
    assert old != wanted
    texts: list[str] = []
    stop = threading.Event()

    def client() -> None:
        while not stop.is_set():
            texts.append(_text(server))

    crowd = [threading.Thread(target=client) for _ in range(2)]
    for one in crowd:
        one.start()
    try:
        assert ask(server, PATH, {"model": "m", "source": "new", "timeout": 60}) \
            == (200, {"model": "m", "swapped": True})
        new = _text(server)
    finally:
        stop.set()
        for one in crowd:
            one.join()
    assert new == wanted and set(texts) <= {old, new}
    assert ask(server, PATH, {"model": "m"})[0] == 200  # the same files again
    assert _text(server) == wanted


def test_adapters_stay(llama: Path, tmp_path: Path) -> None:
    """A swap names only the model: its adapters stay, for new requests and for clients that use their names."""
    folder = save_peft(tmp_path / "adapter", matrices(llama, 8, 3), 16.0)
    with serving([f"m={llama}"], adapters=[f"it={folder}"]) as made:
        old = _text(made, "m:it")
        assert old != _text(made)
        assert ask(made, "/api/create", {"model": "short", "from": "m:it", "system": "Be short."})[0] == 200
        for _ in range(2):
            assert ask(made, PATH, {"model": "m"})[0] == 200
            assert _text(made, "m:it") == _text(made, "short") == old


def test_adapters_that_do_not_fit_refuse_the_source(llama: Path, tmp_path: Path) -> None:
    folder = save_peft(tmp_path / "adapter", matrices(llama, 8, 3), 16.0)
    with serving([f"m={llama}", f"new={smaller(llama, tmp_path / 'new')}"], adapters=[f"m:it={folder}"]) as made:
        old = _text(made, "m:it")
        status, found = ask(made, PATH, {"model": "m", "source": "new"})
        assert status == 400 and "`source`" in str(found) and "adapters" in str(found)
        assert _text(made, "m:it") == old


def test_source_is_a_name_and_never_a_path(server: Any, qwen2: Path) -> None:
    old = _text(server)
    for source in ("/etc/passwd", str(qwen2), "./model", "owner/name", "none"):
        status, found = ask(server, PATH, {"model": "m", "source": source})
        assert status == 404, found
    status, found = ask(server, PATH, {"model": "m", "source": "bert"})
    assert status == 400 and "capability" in str(found)
    assert _text(server) == old


@pytest.mark.parametrize("body", [{}, {"model": ""}, {"model": "m", "timeout": 0}, {"model": "m", "timeout": 1e9},
                                  {"model": "m", "source": 3}])
def test_invalid_bodies(server: Any, body: Any) -> None:
    assert ask(server, PATH, body)[0] == 400


def test_names_that_cannot_be_swapped(server: Any) -> None:
    assert ask(server, PATH, {"model": "none"})[0] == 404
    for field in ("model", "source"):  # no model can have this name, while "none" may be loaded later
        status, found = ask(server, PATH, {"model": "m", field: "http://host/model"})
        assert status == 400 and f"`{field}`" in str(found)
    with serving(["all-MiniLM-L6-v2"]) as other:
        status, found = ask(other, PATH, {"model": "all-MiniLM-L6-v2"})
        assert status == 400 and "--model" in str(found)


def test_the_route_needs_the_token_or_the_owner(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mpool.server import operations

    with serving([f"m={llama}"], token="a-token-of-some-length") as made, Raw(made) as raw:
        assert raw.request(PATH, b'{"model":"m"}').answer()[0] == 401
    with serving([f"m={llama}"]) as made:
        monkeypatch.setattr(operations, "user_of", lambda *ends: 12345)
        assert ask(made, PATH, {"model": "m"})[0] == 403


# ---- files of a served model that change -----------------------------------------------------------------------------

#: Route -> body, and how to find the result in the response.
ROUTES: dict[str, tuple[dict[str, Any], Any]] = {
    "/v1/completions": (CALL, lambda found: found["choices"][0]["text"]),
    "/v1/chat/completions": ({"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 4},
                             lambda found: found["choices"][0]["message"]["content"]),
    "/v1/messages": ({"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 4},
                     lambda found: found["content"]),
    "/api/generate": ({"prompt": "Hello", "stream": False, "options": {"temperature": 0, "num_predict": 4}},
                      lambda found: found["response"]),
    "/v1/embeddings": ({"input": "A cat sat."}, lambda found: found["data"][0]["embedding"]),
    "/api/embed": ({"input": "A cat sat."}, lambda found: found["embeddings"])}


@pytest.mark.parametrize("route", ROUTES)
def test_a_served_name_gets_the_files_of_now(llama: Path, bert: Path, tmp_path: Path, route: str) -> None:
    body, of = ROUTES[route]
    folder = Path(shutil.copytree(bert if "embed" in route else llama, tmp_path / "model"))

    def result(server: Any) -> Any:
        status, found = ask(server, route, {**body, "model": "m"})
        assert status == 200, found
        return of(found)

    with serving([f"m={folder}"]) as server:
        before = result(server)
        data = bytearray((folder / "model.safetensors").read_bytes())
        for at in range(8 + int.from_bytes(data[:8], "little"), len(data) - 7, 8):
            data[at + 3] ^= 0x80
        (tmp_path / "new").write_bytes(data)
        os.replace(tmp_path / "new", folder / "model.safetensors")
        after = result(server)
        (folder / "model.safetensors").unlink()
        assert result(server) == after != before  # the loaded model serves on
        (folder / "model.safetensors").write_bytes(data)
    with serving([f"m={folder}"]) as fresh:
        assert after == result(fresh)
