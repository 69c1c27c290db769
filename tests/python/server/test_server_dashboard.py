"""The dashboard without a browser: files, security headers, snapshot, and cancellation of requests."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import statistics
import threading
import time
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from servers import Raw, ask, server_idle, serving
from waiting import idle, until

import msgspec  # noqa: E402 - servers.py skips the tests if it is not installed
import mpool  # noqa: E402
from mpool.models.catalogue import estimate  # noqa: E402
from mpool.models.catalogue import load as load_catalogue  # noqa: E402
from mpool.server.dashboard import FILES  # noqa: E402
from mpool.server.dashboard.model_table import ServableModels  # noqa: E402
from mpool.server.dashboard.snapshot import Snapshot  # noqa: E402
from mpool.server.errors import Refusal  # noqa: E402
from mpool.server.event_list import KEPT  # noqa: E402

TOKEN = "a-token-of-some-length"
ENDLESS: dict[str, Any] = {"model": "llama", "max_tokens": 200_000, "ignore_eos": True, "stream": True,
                           "messages": [{"role": "user", "content": "Hello"}]}


@pytest.fixture(scope="module")
def server(llama: Path, bert: Path) -> Iterator[Any]:
    with serving([f"llama={llama}", f"bert={bert}"]) as made:
        yield made


# ---- the page's files ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("path", FILES)
def test_files_have_their_media_type_and_security_headers(server: Any, path: str) -> None:
    with Raw(server) as raw:
        status, headers, body = raw.request(path).answer()
        assert status == 200 and headers["content-type"].split(";")[0] == FILES[path][1]
        assert body == resources.files("mpool.server.dashboard").joinpath(FILES[path][0]).read_bytes()
        policy = dict(rule.strip().partition(" ")[::2] for rule in headers["content-security-policy"].split(";"))
        assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"
        assert raw.request(path, b"{}").answer()[0] == 405


# ---- the snapshot ----------------------------------------------------------------------------------------------------

def test_snapshot_agrees_with_the_library(server: Any) -> None:
    pool = server.state.pool
    pool.embed(["one", "two"], "bert")
    server_idle(server)
    status, plain = ask(server, "/api/mpool/state")
    assert status == 200
    found = msgspec.convert(plain, Snapshot)  # every field exists and has the right type
    assert msgspec.to_builtins(found) == plain
    model = next(model for model in found.models if model.key == "bert")
    row = next(row for row in pool.ps() if row.model == "bert")
    assert (model.state, model.calls, model.model_bytes, model.capability) \
        == (row.state, row.calls, row.model_bytes, "text_embedding") and model.calls >= 1
    assert [worker.id for worker in model.workers] == [pong.worker_id for pong in pool.ping("bert")] != []
    assert sum(model.latency) >= 1 and len(model.latency) == len(found.latency_bounds)
    assert found.latency_bounds[-1] is None and model.p50 is not None
    assert {one.capability for one in found.pools} == set(pool.pools)
    assert found.memory.limit == pool.health().memory.limit and sum(found.memory.by_kind.values()) > 0
    assert found.counters["completed"] >= 1 and found.requests == []
    numbers = pool.metrics()
    assert found.compute_threads == numbers["compute_threads"] >= 1 and numbers["compute_threads_leased"] >= 0


def test_snapshot_contains_no_paths(server: Any, llama: Path, bert: Path) -> None:
    ask(server, "/v1/embeddings", {"model": "bert", "input": "x"})
    text = json.dumps(ask(server, "/api/mpool/state")[1])
    assert str(llama) not in text and str(bert) not in text and "bert" in text


# ---- models and actions ----------------------------------------------------------------------------------------------

def _events(server: Any, kind: str) -> list[Any]:
    return [event for event in ask(server, "/api/mpool/events")[1]["events"] if event["kind"] == kind]


def _servable(server: Any) -> dict[str, Any]:
    status, found = ask(server, "/api/mpool/servable")
    assert status == 200
    return {model["name"]: model for model in msgspec.to_builtins(msgspec.convert(found, ServableModels))["models"]}


def _part(server: Any, key: str) -> Any:
    models = ask(server, "/api/mpool/state")[1]["models"]
    return next((model for model in models if model["key"] == key), None)


def test_every_servable_model_is_listed_whether_it_is_loaded_or_not(llama: Path) -> None:
    with serving([f"llama={llama}"], catalogue=True) as made:
        found = _servable(made)
        model, row = found["llama"], load_catalogue().rows["bge-small-en-v1.5"]
        described = made.state.pool.get("llama").description
        assert model["local"] and model["capabilities"] == ["text_to_text"] and model["keys"] == []
        assert model["context"] == described.generation.context_length and model["files"] > 0
        assert model["needed"] == estimate(described) * 10**6 and model["quantisation"]
        remote = found["bge-small-en-v1.5"]
        assert not remote["local"] and remote["download"] is None
        assert (remote["needed"], remote["files"], remote["license"]) == \
            (row.est_memory_allocation_mb * 10**6, row.download_bytes, row.license)
        assert set(found) >= set(load_catalogue().rows)
        assert str(llama) not in json.dumps(found)
        assert ask(made, "/api/mpool/servable")[1]["pull_refusal"]  # the pool of the test is offline
        assert ask(made, "/api/create", {"model": "other", "from": "llama", "stream": False})[0] == 200
        assert _servable(made)["llama"]["names"] == ["other"]


def test_load_pin_and_unload_have_the_effect_of_the_library(llama: Path) -> None:
    with serving([f"llama={llama}"]) as made:
        body = {"model": "llama"}
        assert ask(made, "/api/mpool/load", body) == (200, {**body, "state": "loaded", "pinned": False})
        assert _servable(made)["llama"]["keys"] == ["llama"]
        part = _part(made, "llama")
        assert part["state"] == "ready" and part["load_seconds"] > 0 and part["needed"] > 0 and not part["pinned"]
        assert [worker["served"] for worker in part["workers"]] == [0] * len(part["workers"]) != []
        for pinned in (True, False):
            assert ask(made, "/api/mpool/pin", {**body, "pinned": pinned})[1]["pinned"] == pinned
            assert [row.pinned for row in made.state.pool.ps()] == [pinned]
        ask(made, "/api/mpool/pin", {**body, "pinned": True})
        for _ in range(2):  # idempotent
            assert ask(made, "/api/mpool/unload", body) == (200, {**body, "state": "unloaded", "pinned": False})
        assert _part(made, "llama")["state"] == "cold"
        (load,), (unload,) = until(lambda: _events(made, "load")), until(lambda: _events(made, "unload"))
        assert load["model"] == unload["model"] == "llama"
        assert ask(made, "/api/mpool/pin", {**body, "pinned": True})[1] == {**body, "state": "loaded", "pinned": True}


@pytest.mark.parametrize("path", ["/api/mpool/load", "/api/mpool/unload", "/api/mpool/pin"])
def test_actions_need_the_rights_of_the_api(llama: Path, path: str) -> None:
    token = f"Authorization: Bearer {TOKEN}"
    with serving([f"llama={llama}"], token=TOKEN) as made:
        body = {"model": "llama", **({"pinned": True} if path.endswith("pin") else {})}
        assert ask(made, path, body)[0] == 401
        assert ask(made, path, body, token, "Origin: http://page.example")[0] == 403
        assert all(row.state == "cold" for row in made.state.pool.ps())
        assert ask(made, path, {**body, "model": "<b>no</b>"}, token)[0] == 404
        assert ask(made, path, {**body, "model": 3}, token)[0] == 400
        assert ask(made, path, None, token)[0] == 405
        assert ask(made, path, body, token)[0] == 200


# ---- events ----------------------------------------------------------------------------------------------------------

def test_events_have_refusals_with_their_reason(llama: Path) -> None:
    token = f"Authorization: Bearer {TOKEN}"
    with serving([f"llama={llama}"], token=TOKEN) as made:
        for _ in range(3):
            status, answer = ask(made, "/v1/embeddings", {"model": "llama", "input": "x"}, token)
            assert status == 400
        error = answer["error"]
        assert ask(made, "/v1/models", None, "Authorization: Bearer no")[0] == 401
        assert ask(made, "/v1/nothing", None, token)[0] == 404
        found = ask(made, "/api/mpool/events", None, token)[1]["events"]
        assert [(event["code"], event["path"], event["model"], event["count"]) for event in found] == [
            ("not_found", "/v1/nothing", None, 1), ("invalid_api_key", "/v1/models", None, 1),
            (error["code"], "/v1/embeddings", "llama", 3)]
        assert found[2]["reason"] == error["message"] and found[2]["client"] == "127.0.0.1"
        assert TOKEN not in json.dumps(found)


def test_refusals_do_not_drive_out_the_death_of_a_worker(llama: Path) -> None:
    config = mpool.PoolConfig(shutdown_grace=1.0, offline=True, isolation="process")
    with serving([f"llama={llama}"], config) as made:
        pool = made.state.pool
        pool.generate("x", "llama", max_tokens=2, ignore_eos=True)
        worker = next(worker for row in pool.registry.entries() for worker in row["worker"])
        os.kill(worker["process"], signal.SIGKILL)
        (death,) = until(lambda: _events(made, "death"))
        assert (death["model"], death["worker"], death["code"]) == ("llama", worker["id"], "worker_lost")
        assert death["reason"]
        for number in range(KEPT + 1):
            made.state.events.refused(Refusal("not_found"), f"/{number}", None)
        assert len(_events(made, "death")) == 1 and len(_events(made, "refusal")) == KEPT
        (fault,) = _part(made, "llama")["faults"]
        assert (fault["worker"], fault["code"], fault["reason"]) == (worker["id"], "worker_lost", death["reason"])


def test_an_unload_has_its_reason(bert: Path, llama: Path) -> None:
    with serving([f"bert={bert}", f"llama={llama}"]) as made:
        made.state.pool.load("bert", keep_alive=0.2)
        until(lambda: _events(made, "unload"))
        ask(made, "/api/mpool/load", {"model": "llama"})
        ask(made, "/api/mpool/unload", {"model": "llama"})
        found = until(lambda: len(both := [one for one in _events(made, "unload") if one["code"]]) == 2 and both)
        assert [(event["model"], event["code"]) for event in found] == [("llama", "call"), ("bert", "keep_alive")]
        assert found[0]["reason"] != found[1]["reason"]


def test_downloads_report_their_bytes(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list, Ollama's route, and the events."""
    gate, going = threading.Event(), threading.Event()

    def resolve(name: str, offline: bool | None = None, progress: Any = None) -> None:
        if offline:
            raise mpool.errors.OfflineError("not here")
        progress(30, 100)
        progress(20, 100)  # another bar of the hub's library, which is behind
        going.set()
        gate.wait(60)
        raise mpool.errors.DownloadError("planted")

    monkeypatch.setattr("mpool.server.ollama_models.resolve", resolve)
    config = mpool.PoolConfig(shutdown_grace=1.0, offline=False)
    with serving([f"llama={llama}"], config, catalogue=True) as made, Raw(made, 60) as raw:
        raw.request("/api/pull", b'{"model": "bge-small-en-v1.5"}')
        going.wait(60)
        assert _servable(made)["bge-small-en-v1.5"]["download"] == {"done": 30, "total": 100}
        gate.set()
        lines = [json.loads(line) for line in raw.answer()[2].splitlines()]
        assert (lines[1]["completed"], lines[1]["total"]) == (30, 100) and lines[1]["digest"].startswith("sha256:")
        assert "error" in lines[-1] and "completed" not in lines[0]
        (event,) = _events(made, "download_failed")
        assert (event["model"], event["code"]) == ("bge-small-en-v1.5", "download_failed") and event["reason"]
        assert _servable(made)["bge-small-en-v1.5"]["download"] is None
        assert ask(made, "/api/mpool/servable")[1]["pull_refusal"] is None


# ---- requests in flight ----------------------------------------------------------------------------------------------

def _running(server: Any, path: str) -> Any:
    def found() -> Any:
        return [one for one in ask(server, "/api/mpool/state")[1]["requests"] if one["path"] == path]

    return until(found)[0]


@pytest.mark.parametrize("when", ["before the head", "waiting for a chunk", "sending a chunk", "after the end",
                                  "twice"])
def test_cancelled_stream_has_one_final_event_at_any_time(server: Any, when: str) -> None:
    """Cancel a stream at a given time, with a client whose reading the test controls."""
    from mpool.server.operations import Context, Operation
    from mpool.server.request_history import RunningRequest
    from mpool.server.streaming import LINES, StreamedResponse

    async def run() -> tuple[list[bytes], list[str]]:
        calls: list[str] = []
        sent: list[bytes] = []
        never, blocked = asyncio.Event(), asyncio.Event()
        state = SimpleNamespace(running={}, settings=server.state.settings, bodies=server.state.bodies,
                                new_id=lambda: "id")

        async def chunks() -> Any:
            yield b"one\n"
            if when in ("waiting for a chunk", "twice"):
                await never.wait()
            yield b"two\n"

        async def send(message: Any) -> None:
            if when == "before the head" and message["type"] == "http.response.start" \
                    or when == "sending a chunk" and message.get("body") == b"two\n" \
                    or when == "after the end" and message.get("more_body") is False:
                await blocked.wait()  # simulates a client that does not read
            sent.append(message.get("body", b"head"))

        operation: Any = Operation("GET", "/", None, None, None, "")  # type: ignore[arg-type]
        response = StreamedResponse(Context(operation, state, {}), chunks(),
                                    lambda refusal: f"{refusal.code}\n".encode(), LINES,
                                    lambda: calls.append("closed"))
        running = state.running["id"] = RunningRequest("id", "/", "model", None)
        task = asyncio.ensure_future(response({}, None, send))
        await asyncio.sleep(0.01)
        running.cancel()
        if when == "twice":
            running.cancel()
        await asyncio.sleep(0.01)
        blocked.set()
        await task
        return sent, calls

    sent, calls = asyncio.run(run())
    assert sent[0] == b"head" and sent[-1] == b"" and calls == ["closed"]
    wanted = {"before the head": [b"cancelled\n"], "after the end": [b"one\n", b"two\n"]}
    assert sent[1:-1] == wanted.get(when, [b"one\n", b"cancelled\n"])


def test_cancel_of_a_request_without_stream(llama: Path) -> None:
    body = json.dumps({**ENDLESS, "stream": False}).encode()
    with serving([f"llama={llama}"], max_tokens=200_000) as server, Raw(server, 60) as raw:
        raw.request("/v1/chat/completions", body)
        found = _running(server, "/v1/chat/completions")
        assert found["chunks"] is None
        ask(server, "/api/mpool/cancel", {"id": found["id"]})
        status, _, data = raw.answer()
        assert status == 499 and json.loads(data)["error"]["code"] == "cancelled"
        server_idle(server)
        assert not server.state.running


def test_cancel_of_a_stream_whose_client_does_not_read(llama: Path) -> None:
    """Computation stops immediately; the final event waits until the client reads."""
    with serving([f"llama={llama}"], max_tokens=200_000) as server, Raw(server, 60) as raw:
        body = {**ENDLESS, "n": 8}
        raw.request("/v1/chat/completions", json.dumps(body).encode())
        found = _running(server, "/v1/chat/completions")
        time.sleep(0.5)
        assert ask(server, "/api/mpool/cancel", {"id": found["id"]})[1]["cancelled"]
        idle(server.state.pool, 20)
        status, _, data = raw.answer()
        assert status == 200 and data.count(b'"error"') == 1 and b"[DONE]" not in data


@pytest.mark.parametrize("body", [{}, {"id": ""}, {"id": 3}, {"id": "x" * 65}, []])
def test_cancel_accepts_only_an_id(server: Any, body: Any) -> None:
    status, found = ask(server, "/api/mpool/cancel", body)
    assert status == 400 and isinstance(found["error"], str)


def test_cancel_of_an_unknown_id(server: Any) -> None:
    assert ask(server, "/api/mpool/cancel", {"id": "nothing"}) == (200, {"id": "nothing", "cancelled": False})


# ---- requests that ended ---------------------------------------------------------------------------------------------

def _history(server: Any, count: int) -> list[Any]:
    def found() -> Any:
        return ask(server, "/api/mpool/history")[1]["requests"]

    until(lambda: len(found()) >= count)
    return list(found())


def test_history_has_the_tokens_and_the_outcome_of_every_protocol(llama: Path, bert: Path) -> None:
    chat = {"model": "llama", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3, "ignore_eos": True}
    with serving([f"llama={llama}", f"bert={bert}"]) as made:
        _, found = ask(made, "/v1/chat/completions", chat)
        prompt = found["usage"]["prompt_tokens"]
        with Raw(made) as raw:
            assert raw.request("/v1/chat/completions", json.dumps({**chat, "stream": True, "n": 2}).encode()) \
                .answer()[0] == 200
        ask(made, "/api/chat", {"model": "llama", "messages": chat["messages"], "stream": False,
                                "options": {"num_predict": 2}})
        _, vectors = ask(made, "/v1/embeddings", {"model": "bert", "input": ["one", "two three"]})
        ask(made, "/v1/embeddings", {"model": "bert", "input": "x", "dimensions": 9999})
        ask(made, "/v1/chat/completions", {**chat, "model": "none"})
        rows = _history(made, 6)[::-1]
        assert [row["path"] for row in rows] == ["/v1/chat/completions"] * 2 + ["/api/chat"] + ["/v1/embeddings"] * 2 \
            + ["/v1/chat/completions"]
        assert [(row["prompt_tokens"], row["completion_tokens"]) for row in rows[:2]] in (
            [(prompt, 3), (prompt, 6)], [(prompt, 3), (2 * prompt, 6)])
        assert rows[3]["prompt_tokens"] == vectors["usage"]["prompt_tokens"] and rows[3]["completion_tokens"] == 0
        assert [row["capability"] for row in rows] == ["text_to_text"] * 3 + ["text_embedding"] * 2 + [None]
        assert [row["status"] for row in rows] == [200] * 4 + [400, 404]
        assert [row["outcome"] for row in rows[:4]] == ["completed"] * 4
        assert "completed" not in (rows[4]["outcome"], rows[5]["outcome"])
        assert {row["client"] for row in rows} == {"127.0.0.1"} and len({row["id"] for row in rows}) == 6
        first = [row["first_token"] for row in rows]
        assert all(0 <= one <= row["seconds"] for one, row in zip(first[:3], rows)) and first[3:] == [None] * 3
        assert ask(made, "/api/mpool/state")[1]["models"][1]["first_token"] == statistics.median(first[:3])
        assert all(row["seconds"] >= 0 and abs(row["ended"] - time.time()) < 600 for row in rows)
        assert "Hello" not in json.dumps(rows)


def test_history_has_cancelled_and_disconnected_requests(llama: Path) -> None:
    with serving([f"llama={llama}"], max_tokens=200_000) as made:
        for how in ("cancel", "disconnect"):
            with Raw(made, 60) as raw:
                raw.request("/v1/chat/completions", json.dumps(ENDLESS).encode())
                while not (running := _running(made, "/v1/chat/completions"))["chunks"]:
                    time.sleep(0.01)
                if how == "cancel":
                    ask(made, "/api/mpool/cancel", {"id": running["id"]})
                    raw.answer()
            server_idle(made)
            found = _history(made, 1 + (how == "disconnect"))[0]
            outcome = "cancelled" if how == "cancel" else "disconnected"
            assert (found["id"], found["outcome"]) == (running["id"], outcome)


# ---- images ----------------------------------------------------------------------------------------------------------

def test_embed_images_agrees_with_the_library() -> None:
    folder = resources.files("mpool").joinpath("demo_models/images")
    files = sorted((one for one in folder.iterdir() if one.name.endswith(".png")), key=lambda one: one.name)[:3]
    encoded = [base64.b64encode(one.read_bytes()).decode() for one in files]
    with serving(["digits=mpool:digits-clip"]) as made:
        status, found = ask(made, "/api/mpool/embed_images",
                            {"model": "digits", "images": [encoded[0], *("data:image/png;base64," + one
                                                                         for one in encoded[1:])]})
        wanted = made.state.pool.embed_image([one.read_bytes() for one in files], "digits")
        assert status == 200 and len(files) > 0
        assert [one["index"] for one in found["data"]] == list(range(len(files)))
        assert [one["embedding"] for one in found["data"]] == wanted.tolist()
        for image in ("/etc/passwd", "http://127.0.0.1/x.png", "data:image/png;base64,!!", "YWJj"):
            assert ask(made, "/api/mpool/embed_images", {"model": "digits", "images": [image]})[0] == 400


# ---- the token -------------------------------------------------------------------------------------------------------

def _basic(user: str, password: str) -> str:
    return "Authorization: Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def test_health_is_short_and_the_state_has_workers_and_memory(bert: Path) -> None:
    """Anyone may ask for the health; workers and memory are for those who have the token."""
    with serving([f"bert={bert}"], token=TOKEN) as made:
        made.state.pool.load(bert)
        status, found = ask(made, "/health")
        assert status == 200 and set(found) == {"status", "uptime", "streams", "worker_deaths", "starved"}
        assert ask(made, "/api/mpool/state")[0] == 401
        status, found = ask(made, "/api/mpool/state", None, f"Authorization: Bearer {TOKEN}")
        assert status == 200 and found["memory"]["used"] > 0 and found["memory"]["pressure"] == "low"
        (model,) = found["models"]
        assert [(one["state"], one["busy"]) for one in model["workers"]] and model["model_bytes"] > 0


def test_token_is_accepted_as_a_password(bert: Path) -> None:
    with serving([f"bert={bert}"], token=TOKEN) as made, Raw(made) as raw:
        for path in (*FILES, "/api/mpool/state"):
            status, headers, body = raw.request(path).answer()
            assert status == 401 and b"<" not in body
            assert headers["www-authenticate"].startswith("Basic " if path == "/" else "Bearer")
            for line in (_basic("", TOKEN), _basic("anyone", TOKEN), f"Authorization: Bearer {TOKEN}"):
                assert raw.request(path, None, line).answer()[0] == 200
            for line in (_basic("", ""), _basic(TOKEN, ""), _basic("", TOKEN + "x"), _basic("", ":" + TOKEN),
                         "Authorization: Basic", "Authorization: Basic ===", f"Authorization: Digest {TOKEN}"):
                assert raw.request(path, None, line).answer()[0] == 401, line
        # the password that a browser sends automatically gives the pages of other origins no access
        sent = raw.request("/api/mpool/cancel", b'{"id":"x"}', _basic("", TOKEN), "Origin: http://page.example")
        assert sent.answer()[0] == 403
