"""Clients that disconnect from routes for vectors, scores, labels and spans: the pool cancels their request, and no
other one."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import mpool

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from cancelling import distinct_texts
from servers import Raw, server_idle, serving
from waiting import busy, until

#: Fixtures with the folders of the models, which are served under the same names.
MODELS = ("m3", "splade", "colbert", "letters", "sentiment", "tagger", "ranker")
QUERY = "w1 w2 a b"
FEW = distinct_texts(8, 99)


@dataclass(frozen=True)
class Route:
    """A route: its path, its model, the field of its texts, and other fields. ``nested``: each text is a list."""

    path: str
    model: str
    texts: str = "inputs"
    more: dict[str, Any] = field(default_factory=dict)
    nested: bool = False

    def body(self, texts: list[str]) -> bytes:
        """Return the body of a request."""
        given: Any = [[text] for text in texts] if self.nested else texts
        if self.path == "/similarity":
            given = {"source_sentence": texts[0], "sentences": texts[1:]}
        return json.dumps({"model": self.model, self.texts: given, **self.more}).encode()


ROUTES = [
    Route("/embed", "m3"), Route("/embed", "letters"), Route("/embed_sparse", "splade"), Route("/embed_sparse", "m3"),
    Route("/embed_all", "colbert"), Route("/similarity", "m3"), Route("/v1/multi-vector", "colbert", "input"),
    Route("/predict", "sentiment", nested=True), Route("/classify", "sentiment", "input"),
    Route("/classify_tokens", "tagger"), Route("/rerank", "ranker", "texts", {"query": QUERY}),
    Route("/v1/rerank", "ranker", "documents", {"query": QUERY}),
    Route("/v1/score", "ranker", "text_2", {"text_1": QUERY}), Route("/v1/score", "m3", "text_2", {"text_1": QUERY}),
    *(Route("/pooling", model, "input", {"task": task}) for model, task in (
        ("m3", "embed"), ("colbert", "token_embed"), ("sentiment", "classify"), ("tagger", "token_classify")))]


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[Any]:
    folders: dict[str, Path] = {name: request.getfixturevalue(name) for name in MODELS}
    # steps last five times longer, so that a server on a busy machine notices the disconnect before the last one ends
    config = mpool.PoolConfig(shutdown_grace=1.0, offline=True, chaos="slow=1")
    with serving([f"{name}={folder}" for name, folder in folders.items()], config) as made:
        yield made


def computed(server: Any, route: Route, texts: list[str]) -> Any:
    """Return the results of a response, without ids and times."""
    with Raw(server) as raw:
        status, _, found = raw.request(route.path, route.body(texts)).response()
    assert status == 200, found
    parsed = json.loads(found)
    return parsed if isinstance(parsed, list) else parsed.get("data") or parsed["results"]


@pytest.mark.sample(4)
@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.path} {route.model}")
def test_disconnect_cancels_the_request_and_no_other(server: Any, route: Route,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    # The request ends for no other reason than the one that the test is about.
    for module in ("text_embeddings_inference", "operations", "classifying", "labelling"):
        monkeypatch.setattr(f"mpool.server.{module}.MAX_RESPONSE", 1 << 40)
    for module in ("computing", "pooling"):
        monkeypatch.setattr(f"mpool.server.{module}.MAX_NUMBERS", 1 << 40)
    pool, expected = server.state.pool, computed(server, route, FEW)
    server_idle(server)
    for seed in range(10):  # if a request is complete before its client disconnects, try one with more texts
        before = pool.registry.stats()["cancelled"]
        last = next(iter(server.state.history)).id
        with Raw(server) as leaves, Raw(server) as stays:
            leaves.request(route.path, route.body(distinct_texts(3000 + 500 * seed, seed)))
            until(lambda: busy(pool) or next(iter(server.state.history)).id != last, 20)
            stays.request(route.path, route.body(FEW))
            # with this option, the kernel closes the connection with a reset
            leaves.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            leaves.socket.close()
            status, _, found = stays.response()
        assert status == 200, found
        parsed = json.loads(found)
        assert (parsed if isinstance(parsed, list) else parsed.get("data") or parsed["results"]) == expected
        server_idle(server)
        outcomes = [one.outcome for one in server.state.history if one.path == route.path][:2]
        if pool.registry.stats()["cancelled"] > before:
            assert sorted(outcomes) == ["completed", "disconnected"]
            break
    else:
        raise AssertionError(f"no request was cancelled; the last ones: {outcomes}")
    assert computed(server, route, FEW) == expected
